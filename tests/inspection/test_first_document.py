import json

import pytest

from packprep.building.run import open_job
from packprep.errors import BuildError
from packprep.inspection.first_document import first_document
from tests.inspection.conftest import built


def lines_of(folder, **table):
    built(folder, "out", tasks=[{"preset": "causal"}], **table)
    return first_document(open_job(folder / "out"))


@pytest.fixture
def one(tmp_path):
    """A folder to which documents are written by calling the value."""
    (tmp_path / "corpus").mkdir()

    def write(*documents):
        text = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
        (tmp_path / "corpus" / "abc.jsonl").write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_document_1_is_shown_by_its_first_and_last_tokens(one):
    assert lines_of(one({"text": "abcdefghijklmnopqrstuvwxyz"})) == (
        "document 1: source0 abc.jsonl at 0: 26 tokens: a│b│c│d│e│f│g│h … t│u│v│w│x│y│z│‹eos›"
    )


def test_a_short_document_1_is_shown_whole_token_by_token(one):
    folder = one({"text": "é\n日"})
    assert lines_of(folder, documents={"prepend_bos": True}) == (
        "document 1: source0 abc.jsonl at 0: 6 tokens: ‹bos›│\\xc3│\\xa9│␊│\\xe6│\\x97│\\xa5│‹eos›"
    )


def test_a_doubled_bos_shows(one):
    folder = one({"text": "<bos>one"})
    line = lines_of(folder, documents={"prepend_bos": True, "special_text": "special"})
    assert line.endswith("4 tokens: ‹bos›│‹bos›│o│n│e│‹eos›")


def test_of_a_supervised_document_1_it_is_said_how_much_is_trained(one):
    folder = one({"text": "Q: 2+2? A: 4", "loss_spans": [[8, 12]]})
    assert lines_of(folder) == (
        "document 1: source0 abc.jsonl at 0: 12 tokens, 4 of them trained: Q│:│ │2│+│2│?│ │A│:│ │4│‹eos›"
    )


def test_messages_are_a_document_1(one):
    folder = one({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]})
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    (folder / "chat.jinja").write_text(template)
    assert lines_of(folder, documents={"chat_template": "chat.jinja"}).startswith(
        "document 1: source0 abc.jsonl at 0: 9 tokens, 4 of them trained: u│h│i│.│a│y│e│s│.│"
    )


def test_document_1_is_the_first_with_tokens(one):
    folder = one({"words": "no"}, {"text": ""}, {"text": "yes"})
    line = lines_of(folder, documents={"max_bad_fraction": 1})
    assert line.startswith("document 1: source0 abc.jsonl at 29: 3 tokens: y│e│s")


def test_without_a_document_the_first_reject_shows(one):
    folder = one({"words": "no text"}, {"text": 5})
    with pytest.raises(BuildError, match="none can be used"):
        lines_of(folder)
    line = first_document(open_job(folder / "out"))
    assert "shard 0 has no document that can be used; the first is source0 abc.jsonl at 0: missing_text: " in line


def test_no_document_at_all_is_said(one):
    folder = one({"text": ""})
    with pytest.raises(BuildError, match="none can be used"):
        lines_of(folder)
    assert first_document(open_job(folder / "out")) == "document 1: shard 0 has no document with tokens"
