"""Trained prompts and trained empty reasoning, in packprep's datasets of conversations."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from packprep.audit.documents import SpecialIds, find_documents
from packprep.audit.markup import chat_specials, prompt_search
from packprep.audit.report import Request, describe_audit
from packprep.audit.rows import PackedRows
from packprep.audit.special_ids import read_vocabulary
from packprep.tokenizer.file import added_tokens
from tests import made
from tests.conversations.chats_made import CHATML, GENERATION, HOISTED, LLAMA3
from tests.verification.damage import places_of, resigned

SPECIAL = ["<|im_start|>", "<|im_end|>", "<pad>", "<think>", "</think>"]
LLAMA = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]


def write_tokenizer(folder, template, eos, added=SPECIAL):
    """A tokenizer of bytes with special tokens and a chat template, in a folder as of the Hub."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "eos_token": eos,
        "bos_token": added[-1] if "begin" in added[-1] or added[-1] == "<s>" else None,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A dataset of conversations, some with an empty reasoning in the last answer."""
    folder = tmp_path_factory.mktemp("chats")
    write_tokenizer(folder / "tokenizer", CHATML, "<|im_end|>")
    random = np.random.default_rng(0)
    with (folder / "in.jsonl").open("w") as file:
        for i in range(60):
            words = ["".join(map(chr, random.integers(97, 123, 12))) for _ in range(5)]
            roles = ["system", "user", "assistant", "user", "assistant"]
            if i % 9 == 0:
                words[4] = f"<think>\n\n</think>\n\n{words[4]}"
            messages = [{"role": r, "content": w} for r, w in zip(roles, words, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")
    recipe = made.table(
        "in.jsonl",
        tokenizer="tokenizer",
        seq_length=512,
        tasks=[{"preset": "causal"}],
        documents={"append_eos": False, "special_text": "special", "train_empty_reasoning": False},
    )
    made.build(recipe, folder, folder / "out")
    return folder


def found(path, tokenizer=None) -> set[str]:
    """The findings. Without a tokenizer, those by the stored tokenizer and chat template."""
    checks = describe_audit(Request(path, tokenizer and str(tokenizer)))["checks"]
    assert {"trained_prompts", "empty_reasoning"} <= {
        check["kind"] for check in checks if check["state"] != "not_checked"
    }
    kinds = {check["kind"] for check in checks if check["state"] == "finding"}
    return kinds - {"padding"}  # There are few rows, and the last one is short.


def test_a_trained_prompt_and_a_trained_empty_reasoning_are_named(chats, tmp_path):
    tokenizer = chats / "tokenizer"
    assert found(chats / "out", tokenizer) == found(chats / "out") == set()
    ids = read_vocabulary(str(tokenizer)).tokenizer_json
    start, think = (json.loads(ids)["added_tokens"][i]["id"] for i in (0, 3))
    for kind, after in (("trained_prompts", start), ("empty_reasoning", think)):
        copy = shutil.copytree(chats / "out", tmp_path / kind)
        with resigned(copy) as arrays:
            row, begin, _ = places_of(arrays)
            of_row = arrays["tokens"][row[0]]
            at = begin[0] + int(np.flatnonzero(of_row[begin[0] :] == after)[0])
            at += 10 if kind == "trained_prompts" else 0
            arrays["loss_mask"][row[0], at] = 1
        assert found(copy, tokenizer) == found(copy) == {kind}


def test_an_answer_that_goes_on_after_a_repeated_system_message_is_no_prompt():
    assert found(Path(__file__).parents[1] / "golden/law3/chats/dataset") == set()


def test_prompts_are_found_by_the_markup_of_other_families_or_the_reason_is_given(tmp_path):
    for template, added, eos in (
        (LLAMA3, LLAMA, "<|eot_id|>"),
        (HOISTED, ["</s>", "<pad>", "<s>"], "</s>"),
    ):
        folder = write_tokenizer(tmp_path / eos.strip("</|>"), template, eos, added)
        own = template.replace("bos_token", repr(added[-1])).replace("eos_token", repr(eos))
        vocabulary = read_vocabulary(str(folder))
        assert not isinstance(prompt_search(own, vocabulary), str)
        # If eos is a token that the template does not write, its last added token ends the text.
        ends = {id: text for text, id in added_tokens(vocabulary.tokenizer_json)}
        specials = chat_specials(own, vocabulary, -1, -1)
        assert (ends[specials.end], specials.after_end) == (eos, 0)
    plain = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert "no markup" in prompt_search(plain, read_vocabulary(str(folder)))


@pytest.mark.long
def test_masks_of_transformers_train_no_prompt_and_their_inverses_do(tmp_path):
    """The judge is `apply_chat_template` with its mask of the assistant's tokens."""
    transformers = pytest.importorskip("transformers", reason="the judge is Transformers")
    added = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<pad>"]
    folder = write_tokenizer(tmp_path / "tokenizer", GENERATION, "<|end|>", added)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=GENERATION
    )
    search = prompt_search(GENERATION, read_vocabulary(str(folder)))
    random = np.random.default_rng(0)
    ids, mask, starts = [], [], [0]
    for _ in range(50):
        roles = ["system"] * int(random.integers(0, 2)) + ["user", "assistant"] * 2
        words = ["".join(map(chr, random.integers(97, 123, 12))) for _ in roles]
        found = tokenizer.apply_chat_template(
            [{"role": r, "content": w} for r, w in zip(roles, words, strict=True)],
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        ids += found["input_ids"]
        mask += found["assistant_masks"]
        starts.append(len(ids))
    rows = PackedRows(np.array(ids), np.array(starts), document_starts=np.array(starts[:-1]))
    documents = find_documents(rows, SpecialIds(), False)
    trained = np.array(mask, bool)
    assert trained.any() and not search(rows, documents, trained).any()
    assert search(rows, documents, ~trained).all()
