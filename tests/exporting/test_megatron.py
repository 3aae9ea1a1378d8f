"""Megatron's files: byte by byte those that Megatron-core itself writes, and it reads them; and
their documents are what the corpus holds, token by token, whatever the objectives made of it."""

import json
from collections import Counter

import numpy as np
import pytest

from packprep.errors import DatasetError
from packprep.exporting import megatron as own
from packprep.exporting.export import export_dataset
from packprep.exporting.megatron import Pair, dtype_for, prefixes
from tests import made
from tests.exporting.conftest import MIXED_KINDS, NEXT_TOKEN_KINDS
from tests.exporting.plain import documents_of

BOS, EOS = 257, 258


def exported(known, out):
    """source → its exported documents; and the receipt."""
    receipt = known.export(out, "megatron")
    weights, paths = receipt["data_path"][::2], receipt["data_path"][1::2]
    found = dict(zip(paths, map(documents_of, paths), strict=True))
    assert weights == [str(sum(map(len, documents))) for documents in found.values()]
    assert receipt["tokens"] == sum(map(int, weights)) and receipt["documents"] == sum(
        map(len, found.values())
    )
    names = [source["name"] for source in known.dataset.manifest["sources"]]
    of_prefix = {
        str(out / prefix): name for prefix, name in zip(prefixes(names), names, strict=True)
    }
    return {of_prefix[path]: documents for path, documents in found.items()}, receipt


def dressed(known, text, begins=True, ends=True):
    documents = known.table.get("documents", {})
    bos = [BOS] * (begins and documents.get("prepend_bos", False))
    append_eos = documents.get("append_eos", True)
    return (*bos, *text, *[EOS] * (append_eos == "segment" or (ends and append_eos)))


@pytest.mark.parametrize("kind", [k for k in NEXT_TOKEN_KINDS if k not in ("truncated", "dropped")])
def test_every_document_is_there_as_often_as_it_is_used(known, tmp_path, kind):
    found, _ = exported(known(kind), tmp_path / "out")
    for source, repeats in (("web", {2, 3}), ("my books", {1})):
        counts = Counter(map(tuple, found[source]))
        texts = Counter(
            dressed(known(kind), text)
            for (name, _), text in known(kind).texts.items()
            if name == source
        )
        assert counts.keys() == texts.keys()
        assert {counts[text] // many for text, many in texts.items() if many == 1} == repeats


@pytest.mark.parametrize("kind", ["truncated", "dropped"])
def test_what_the_recipe_left_out_is_missing_and_said(known, tmp_path, kind):
    progress = made.Silent()
    export_dataset(known(kind).out, "megatron", tmp_path / "out", progress)
    found, _ = exported(known(kind), tmp_path / "out")
    ledger = known(kind).dataset.manifest["ledger"]["sources"]
    lacking = sum(
        source["tokens"]["truncated"] + sum(source["tokens"]["dropped"].values())
        for source in ledger.values()
    )
    assert lacking and any(
        line.startswith(f"{lacking:,} tokens that the recipe truncated") for line in progress.said
    )
    for source, documents in found.items():
        whole = {
            dressed(known(kind), text)
            for (name, _), text in known(kind).texts.items()
            if name == source
        }
        cut = [document for document in map(tuple, documents) if document not in whole]
        assert len(cut) < len(documents) and bool(cut) == (kind == "truncated")
        assert all(EOS not in document for document in cut)
        assert all(any(text[: len(document)] == document for text in whole) for document in cut)


@pytest.mark.parametrize("kind", MIXED_KINDS)
def test_all_objectives_are_undone_and_no_two_tokens_meet_that_did_not_stand_together(
    known, tmp_path, kind
):
    """A document without training marks is whole; of the others, runs of segments that follow one
    another are."""
    one = known(kind)
    found, receipt = exported(one, tmp_path / "out")
    long = one.table["documents"].get("long", "split")
    sources = [source["name"] for source in one.table["sources"]]
    dataset = one.dataset
    pieces = []
    for i in range(len(dataset)):
        columns = dataset.row(i).segments
        for s, doc, start, n in zip(
            *(columns[c].tolist() for c in ("source", "doc", "start", "tokens")), strict=True
        ):
            pieces.append((sources[s], doc, start, n))
    assert {
        dataset.tasks[t]["objective"]
        for i in range(len(dataset))
        for t in dataset.row(i).segments["task"]
    } >= {
        "causal",
        "prefix_lm",
        "span_corruption",
        "fill_in_the_middle",
        "masked_diffusion",
        "uniform_diffusion",
        "block_diffusion",
    }
    expected, runs = Counter(), []
    for source, doc, start, n in sorted(pieces):
        if runs and runs[-1][:2] == [source, doc] and runs[-1][3] == start:
            runs[-1][3] = start + n
        else:
            runs.append([source, doc, start, start + n])
    for source, doc, begin, end in runs:
        text = one.texts[source, doc]
        if (source, doc) not in one.supervised and long == "split":
            assert (begin, end) == (0, len(text))
        expected[source, dressed(one, text[begin:end], begin == 0, end == len(text))] += 1
    assert (
        Counter((source, tuple(document)) for source, all_ in found.items() for document in all_)
        == expected
    )
    assert receipt["documents"] == len(runs)


def test_what_lies_between_two_segments_that_were_kept_parts_a_document(tmp_path):
    """Nothing of the middle is trained, so no segment holds it."""
    text = "".join(f"{i:04d}" for i in range(600))
    lines = [
        {"text": text, "loss_spans": [[0, 50], [2300, 2400]]},
        {"text": text, "loss_spans": [[600, 700]]},
    ]
    made.write(tmp_path / "a.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    table = made.table(
        "a.jsonl", seq_length=256, tasks=[{"preset": "causal"}], documents={"prepend_bos": True}
    )
    made.build(table, tmp_path, tmp_path / "dataset")
    said = made.Silent()
    said.say = (lines := []).append
    export_dataset(tmp_path / "dataset", "megatron", tmp_path / "out", said)
    assert [line for line in lines if "3 documents are only partly trained" in line]
    first, last, inside = documents_of(tmp_path / "out/source0_document")
    whole = [*text.encode()]
    assert first == [BOS, *whole[: len(first) - 1]] and 50 <= len(first) < 300
    assert last == [*whole[-len(last) + 1 :], EOS] and 100 <= len(last) < 600
    assert bytes(inside) in text.encode() and 100 <= len(inside) <= 256


def test_documents_of_a_shard_are_in_the_order_of_the_corpus(known, tmp_path):
    """Every use of a document follows the one before it, and documents those before them in their
    file."""
    one = known("repeated")
    found, _ = exported(one, tmp_path / "out")
    assert len(one.dataset.manifest["shards"]) > 1
    [books] = [documents for source, documents in found.items() if source == "my books"]
    order = [dressed(one, text) for (name, _), text in one.texts.items() if name == "my books"]
    at = [order.index(tuple(document)) for document in books]
    assert sum(a > b for a, b in zip(at, at[1:], strict=False)) < len(
        one.dataset.manifest["shards"]
    )


DTYPES = [("repeated", 528, "uint16"), ("int32", 528, "uint16"), ("between", 65_520, "int32")]
DTYPES.append(("large_vocabulary", 70_000, "int32"))


@pytest.mark.parametrize("kind, vocab_size, dtype", DTYPES)
def test_the_dtype_is_the_one_that_megatron_takes_for_the_vocabulary(
    known, tmp_path, kind, vocab_size, dtype
):
    receipt = known(kind).export(tmp_path / "out", "megatron")
    assert (receipt["vocab_size"], receipt["dtype"]) == (vocab_size, dtype)


def test_datasets_without_rows_and_with_empty_shards(without_rows, with_empty_shards, tmp_path):
    receipt = export_dataset(without_rows, "megatron", tmp_path / "none", made.Silent())
    assert (receipt["documents"], receipt["files"], receipt["data_path"]) == (0, [], [])
    assert sorted(made.contents(tmp_path / "none")) == [".export.json"]
    export_dataset(with_empty_shards, "megatron", tmp_path / "some", made.Silent())
    wanted = [(*b"one document", EOS), (*b"x" * 3000, EOS), (*b"another", EOS)]
    assert sorted(map(tuple, documents_of(tmp_path / "some/source0_document"))) == sorted(wanted)


def test_names_of_sources_become_names_of_files():
    named = prefixes(["web", "a/b", "../up", "a_b", ".hidden", "-x", "ünï", "y" * 300])
    assert named[:5] == [
        "web_document",
        "a_b_document",
        "_._up_document",
        "a_b_3_document",
        "_hidden_document",
    ]
    assert named[5:7] == ["_x_document", "ünï_document"] and len(named[7]) == 109
    assert len(set(named)) == len(named) and not any("/" in name for name in named)


def test_a_numbered_name_differs_from_a_source_with_that_name():
    named = prefixes(["a_b_2", "a b", "a_b"])
    assert named == ["a_b_2_document", "a_b_document", "a_b_3_document"]


DOCUMENTS = [np.arange(1, n + 1) for n in (3, 1, 700, 2, 40)]


def write(prefix, dtype):
    pair = Pair(prefix, np.dtype(dtype))
    for some in (DOCUMENTS[:2], [], DOCUMENTS[2:]):
        pair.add(
            np.concatenate([np.zeros(0, np.int64), *some]),
            np.array([len(d) for d in some], np.int64),
        )
    return pair, pair.commit()


@pytest.fixture(scope="module")
def megatron():
    reason = "megatron-core is not installed (extra: trainers)"
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason)


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
@pytest.mark.parametrize("at_once", [1, 2, 1 << 20])
def test_what_is_written_is_read_again(tmp_path, dtype, at_once, monkeypatch):
    monkeypatch.setattr(own, "_AT_ONCE", at_once)
    pair, files = write(tmp_path / "p", dtype)
    assert documents_of(tmp_path / "p") == [document.tolist() for document in DOCUMENTS]
    assert (pair.documents, pair.tokens) == (5, 746)
    assert [(file["file"], file["bytes"]) for file in files] == [
        (name, len(data)) for name, data in made.contents(tmp_path).items()
    ]


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_megatron_writes_the_same_bytes(megatron, tmp_path, dtype):
    import torch

    write(tmp_path / "ours", dtype)
    kind = np.dtype(dtype).type
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=kind)
    for document in DOCUMENTS:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()


@pytest.mark.parametrize("kind", ["repeated", "large_vocabulary", "mixed"])
def test_megatron_reads_an_exported_dataset(megatron, known, tmp_path, kind):
    receipt = known(kind).export(tmp_path, "megatron")
    for prefix in receipt["data_path"][1::2]:
        dataset = megatron.IndexedDataset(prefix)
        assert dataset.index.dtype is np.dtype(receipt["dtype"]).type
        assert [dataset[i].tolist() for i in range(len(dataset))] == documents_of(prefix)
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))


@pytest.mark.parametrize("vocab_size", [528, 65499, 65500, 65536, 200_000])
def test_the_dtype_is_megatrons(megatron, vocab_size):
    assert dtype_for(vocab_size) == megatron.DType.optimal_dtype(vocab_size)


def test_a_document_longer_than_the_format_can_say_is_refused(tmp_path):
    pair = Pair(tmp_path / "p", np.dtype("<u2"))
    with pytest.raises(DatasetError, match="a document has 2147483648 tokens"):
        pair.add(np.zeros(0, np.uint16), np.array([1 << 31]))
    pair.discard()
    assert made.contents(tmp_path) == {}
