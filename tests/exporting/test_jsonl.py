"""JSON lines: their texts are the corpus and what a model reads of it, and `datasets` and packprep
itself take them."""

import json
from collections import Counter

import pytest

from packprep import open_dataset
from packprep.exporting.export import export_dataset
from packprep.exporting.jsonl import text_and_cuts
from packprep.storage import Remote
from packprep.tokenizer.texts import TokenTexts
from tests import made
from tests.exporting.conftest import MIXED_KINDS
from tests.tokenizer import tokenizers_made


def lines(folder) -> list[dict]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


@pytest.mark.parametrize("kind", ["repeated", "bos", "compact", "concat", "int32"])
def test_documents_are_those_of_the_corpus_by_place_and_use(known, tmp_path, kind):
    one = known(kind)
    receipt = one.export(tmp_path / "out", "jsonl")
    found = lines(tmp_path / "out")
    assert {(line["source"], line["position"]) for line in found} == one.texts.keys()
    for line in found:
        assert line["text"].encode() == one.texts[line["source"], line["position"]]
        assert (
            line["file"] == f"{line['source']}.jsonl"
            and line["start"] == 0
            and line["exact"]
            and line["all_trained"]
        )
    uses = Counter((line["source"], line["position"]) for line in found)
    assert all(uses[place] in ((2, 3) if place[0] == "web" else (1,)) for place in uses)
    assert (
        len({(line["source"], line["position"], line["use"]) for line in found})
        == len(found)
        == receipt["lines"]
    )


def ids_of_documents(out) -> list[list[int]]:
    """The tokens of a dataset of one causal task, whose documents are single segments."""
    dataset, found = open_dataset(out), []
    for row in map(dataset.row, range(len(dataset))):
        found += [
            row.tokens[b:e].tolist()
            for b, e in zip(row.segments["begin"], row.segments["end"], strict=True)
        ]
    return sorted(found)


TEXTS = ["Grüße 🙂 aus\n", " the  quick dog", "  two", "x"]


@pytest.mark.parametrize(
    "like", [tokenizers_made.gpt2_like, tokenizers_made.llama2_like, tokenizers_made.mistral_like]
)
def test_a_dataset_built_of_exported_documents_has_their_ids(tmp_path, like):
    """Also where a space is put before each text, or before one that has none, of which both then
    have the same ids."""
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed: pip install '.[trainers]'"
    )
    made.write_lines(tmp_path / "a.jsonl", TEXTS)
    tokenizers_made.write(tmp_path / "tokenizer", like())
    for paths, out in (("a.jsonl", "first"), ("out/*.jsonl", "second")):
        table = made.table(paths, tasks=[{"preset": "causal"}], tokenizer="tokenizer")
        made.build(table, tmp_path, tmp_path / out)
        if out == "first":
            export_dataset(tmp_path / "first", "jsonl", tmp_path / "out", made.Silent())
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "out/*.jsonl"), cache_dir=str(tmp_path / "cache")
    )
    same = {" the  quick dog": "the  quick dog"} if like is tokenizers_made.mistral_like else {}
    assert loaded["train"]["text"][:] == [same.get(text, text) for text in TEXTS]
    assert loaded["train"].column_names == [*lines(tmp_path / "out")[0]]
    assert ids_of_documents(tmp_path / "second") == ids_of_documents(tmp_path / "first")


@pytest.mark.parametrize("kind", MIXED_KINDS)
def test_rows_are_what_a_model_reads_and_what_is_trained_of_it(known, tmp_path, kind):
    """Character by character: those of trained tokens are in a range, and of others only such as
    they share a character with."""
    one = known(kind)
    one.export(tmp_path / "out", "jsonl", what="rows")
    dataset, found = one.dataset, lines(tmp_path / "out")
    texts = TokenTexts((one.out / "tokenizer.json").read_bytes())
    assert [line["row"] for line in found] == list(range(len(dataset)))
    shown = Counter()
    for line in found:
        row = dataset.row(line["row"])
        names = zip(
            line["segments"],
            row.segments["begin"],
            row.segments["end"],
            row.segments["task"],
            strict=True,
        )
        for segment, begin, end, task in names:
            rule, in_place = (dataset.tasks[task][key] for key in ("attention", "label_alignment"))
            end = begin + (end - begin) // 2 if rule == "block_diffusion" else end
            in_place = in_place == "same_slot"
            assert segment["task"] == dataset.tasks[task]["name"] and in_place == bool(
                segment["labels"]
            )
            where = (segment["source"], segment["position"])
            assert where in one.texts
            targets = range(begin, end) if in_place else range(begin + 1, end)
            trained = {t for t in targets if row.loss_mask[t if in_place else t - 1]}
            ids, text = (
                (row.labels, segment["labels"]) if in_place else (row.tokens, segment["text"])
            )
            marks = Counter(k for low, high in segment["trained"] for k in range(low, high))
            assert set(marks.values()) <= {1, 2} and len(marks) <= len(text)
            if segment["exact"]:
                data = [
                    mean.encode() if isinstance(mean := texts.meaning(int(id)), str) else mean
                    for id in ids[begin:end]
                ]
                assert b"".join(data).decode() == text
                at = 0
                owners = [t for t, one_token in enumerate(data, begin) for _ in one_token]
                for k, character in enumerate(text):
                    of = set(owners[at : at + len(character.encode())])
                    at += len(character.encode())
                    assert (k in marks) == bool(of & trained)
                shown[segment["task"]] += len(marks) > 0
    assert len(shown) > 5


def test_text_and_cuts_of_bytes_that_are_no_text():
    assert text_and_cuts("aé🙂".encode(), [0, 1, 2, 3, 5, 7]) == (
        "aé🙂", [(0, 0), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)], True,
    )  # fmt: skip
    assert text_and_cuts(b"\xe2\x82a\xff", [1, 2, 3, 4]) == (
        "\ufffda\ufffd",
        [(0, 1), (0, 1), (2, 2), (3, 3)],
        False,
    )
    assert text_and_cuts("\ufffd".encode(), []) == ("\ufffd", [], True)


def test_what_texts_cannot_say_is_counted_and_what_stopped_goes_on(known, tmp_path):
    one, progress = known("mixed_truncated"), made.Silent()
    receipt = export_dataset(one.out, "jsonl", tmp_path / "out", progress, workers=2)
    found, whole = lines(tmp_path / "out"), made.contents(tmp_path / "out")
    assert receipt["not_exact"] == sum(not line["exact"] for line in found) > 0
    assert receipt["trained_in_part"] == sum(not line["all_trained"] for line in found) > 0
    places = {(line["source"], line["position"]) for line in found if not line["all_trained"]}
    assert places <= one.supervised and len(progress.said) == 3
    for line in found:
        assert (
            one.texts[line["source"], line["position"]].decode().find(line["text"].strip("\ufffd"))
            >= 0
        )
    (tmp_path / "out/.export.json").rename(tmp_path / "out/.export-begun.json")
    (tmp_path / "out/000001.jsonl").unlink()
    before = (tmp_path / "out/000000.jsonl").stat().st_ino
    one.export(tmp_path / "out", "jsonl")
    assert (
        made.contents(tmp_path / "out") == whole
        and (tmp_path / "out/000000.jsonl").stat().st_ino == before
    )
    remote = Remote("memory://exporting/jsonl")
    one.export(remote.url, "jsonl")
    assert {name: remote.read(name) for name, _ in remote.list()} == whole


def test_a_dataset_without_rows(without_rows, tmp_path):
    for what in ("documents", "rows"):
        assert (
            export_dataset(without_rows, "jsonl", tmp_path / what, made.Silent(), what=what)[
                "lines"
            ]
            == 0
        )
