"""Files of one repository become one document, and come back file by file."""

import itertools
import json
import random
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers

from packprep.building.plan import open_plan
from packprep.dataset.loader import open_dataset
from packprep.dataset.manifest import read_manifest
from packprep.dataset.shard import shard_in
from packprep.errors import RecipeError
from packprep.exporting.export import export_dataset
from packprep.inspection.document import describe_document, print_document
from packprep.recipe import read_recipe
from packprep.removing import remove_documents
from packprep.restoring import restored_documents, restored_records
from tests import made
from tests.command_line import refused
from tests.verification.damage import copied, faults_of, resigned

ALL = -1
EOS, SEP = "<|end|>", "<file_sep>"


def code(chance):
    """The text of a file, which may be empty, and may have the text of the separator."""
    kinds = ["", "def f(x):\n    return x\n", f"# {SEP} ünïcödé 数据 🙂\r\n\t", " leading", "\n"]
    return "".join(chance.choice(kinds) for _ in range(chance.randint(0, 30)))


def repositories(count, seed):
    """Records of repositories, the files of each next to one another."""
    chance = random.Random(seed)
    found = [{"text": "", "repo": "owner/empty", "path": f"{i}.py"} for i in range(2)]
    for r in range(count):
        repo = None if chance.random() < 0.1 else f"owner/{r}"
        for _ in range(chance.choice([1, 2, 4, 8])):
            path = f"src/{chance.randint(0, 99):02d}.py"
            found.append({"text": code(chance), "repo": repo, "path": path})
    return found


def corpus():
    """Name of each of three files → its records by position."""
    found = {}
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        rows = repositories(25, name)
        ends = itertools.accumulate(map(len, map(line_of, rows)), initial=0)
        found[name] = dict(
            zip(itertools.count() if "parquet" in name else ends, rows, strict=False)
        )
    return found


def line_of(row):
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def write_corpus(folder):
    for name, rows in corpus().items():
        made.write_compressed(folder / name, b"".join(map(line_of, rows.values())))
    table = pa.Table.from_pylist(list(rows.values()))
    pa.parquet.write_table(table, folder / name, row_group_size=9)


def write_tokenizer(folder):
    """A byte-level BPE, as Hugging Face tokenizers trains it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[EOS, SEP],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([code(random.Random(i)) for i in range(20)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def recipe(**changes):
    source = {"name": "code", "paths": ["*.jsonl*", "*.parquet"], "group_by": "repo"}
    source |= {"order_by": "path", "between": SEP, **changes.pop("source", {})}
    table = {
        "seq_length": 128,
        "tokenizer": "tokenizer.json",
        "sources": [source],
        "specials": {"eos": EOS},
        "tasks": [{"objective": "causal"}],
        "output": {"shard_text_bytes": 6_000},
    }
    return table | changes


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    write_corpus(folder)
    write_tokenizer(folder)
    made.build(recipe(), folder, folder / "out")
    return folder


def judged(folder):
    """(file, position) → the ids of each document, by itertools, json, pyarrow and tokenizers."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    separator, found = tokenizer.token_to_id(SEP), {}
    for name, records in corpus().items():
        alone = itertools.count()

        def repo(item):
            return item[1]["repo"] or next(alone)  # noqa: B023

        for _, group in itertools.groupby(records.items(), repo):
            members = list(group)
            ordered = sorted(members, key=lambda item: item[1]["path"])
            encoded = [tokenizer.encode(row["text"]).ids for _, row in ordered]
            ids = encoded[0] + [i for more in encoded[1:] for i in (separator, *more)]
            if any(encoded):
                found[name, min(position for position, _ in members)] = ids
    return found


def documents_in(out):
    """(file, position) → the ids of each document of a dataset."""
    plan, manifest, found = open_plan(out), read_manifest(out), {}
    for number in range(plan.shards):
        shard = shard_in(out, manifest, number)
        documents = restored_documents(plan, shard.arrays, str(shard.path))
        parts = np.split(documents.tokens, np.cumsum(documents.lengths))[:-1]
        files = [file.name for source in plan.sources for file in source.files]
        for g, ids in zip(documents.segment.tolist(), parts, strict=True):
            place = files[shard.arrays["segment_file"][g]], int(shard.arrays["segment_doc"][g])
            assert place not in found
            found[place] = ids[:-1].tolist()  # without eos
    return found


def test_documents_are_the_groups_that_other_tools_find(built):
    assert documents_in(built / "out") == judged(built)


@pytest.mark.alike(1)
@pytest.mark.parametrize("shard_text_bytes", [60_000, 2_500, 900])
def test_documents_do_not_depend_on_the_number_of_shards(built, tmp_path, shard_text_bytes):
    output = {"shard_text_bytes": shard_text_bytes}
    made.build(recipe(output=output), built, tmp_path / "out")
    assert documents_in(tmp_path / "out") == judged(built)
    assert faults_of(tmp_path / "out", ALL) == []


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 1, 3])
def test_any_number_of_workers_gives_the_same_bytes(built, tmp_path, workers):
    made.build(recipe(), built, tmp_path / "out", workers)
    assert made.contents(tmp_path / "out" / "shards") == made.contents(built / "out" / "shards")
    receipts = [made.contents(out / "receipts") for out in (tmp_path / "out", built / "out")]
    assert receipts[0] == receipts[1]


@pytest.mark.long
def test_a_resumed_build_gives_the_same_bytes(built, tmp_path):
    shutil.copytree(built / "out", tmp_path / "out")
    for name in ("dataset.json", "receipts/000/000001.json", "shards/000/000002.safetensors"):
        next((tmp_path / "out").glob(name)).unlink()
    made.build(recipe(), built, tmp_path / "out")
    assert made.contents(tmp_path / "out") == made.contents(built / "out")


def test_files_come_back_byte_by_byte(built):
    records = corpus()
    wanted = {
        (name, position): row["text"].encode()
        for name, of_file in records.items()
        for position, row in of_file.items()
    }
    found = {
        (record.file, record.position): record.text.encode()
        for record in restored_records(built / "out")
    }
    # A record without tokens is in no document if its repository has no tokens at all.
    lost = wanted.keys() - found.keys()
    assert all(wanted[place] == b"" for place in lost)
    assert found == {place: text for place, text in wanted.items() if place not in lost}
    assert sum(not text for text in found.values()) > 0


@pytest.mark.long
def test_an_export_has_the_text_of_each_record(built, tmp_path):
    export_dataset(built / "out", "jsonl", tmp_path / "jsonl", made.Silent(), what="documents")
    lines = [
        json.loads(line)
        for file in sorted((tmp_path / "jsonl").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    texts = {
        (line["file"], record["position"]): record["text"]
        for line in lines
        for record in line["records"]
    }
    assert texts == {(r.file, r.position): r.text for r in restored_records(built / "out")}


def test_the_ledger_counts_joined_and_ungrouped_records(built):
    records = [row for of_file in corpus().values() for row in of_file.values()]
    counts = read_manifest(built / "out")["ledger"]["sources"]["code"]["documents"]
    documents = judged(built)
    listed = list(restored_records(built / "out"))
    assert counts == {
        "read": len(records),
        "used": len(documents),
        "rejected": {"empty": len(records) - len(listed)},
        "joined": len(listed) - len(documents),
        "ungrouped": sum(row["repo"] is None for row in records),
    }


@pytest.mark.long
def test_a_row_names_the_records_of_its_segments(built):
    dataset, tokens = open_dataset(built / "out"), {}
    for row in range(len(dataset)):
        ids, begin = dataset.row(row).tokens, dataset.row(row).segments["begin"]
        for segment in dataset.documents(row):
            first, end = segment["tokens"]
            for record in segment["records"]:
                low, high = max(record["tokens"][0], first), min(record["tokens"][1], end)
                at = int(begin[segment["segment"] - 1]) + low - first
                part = tokens.setdefault((segment["file"], record["position"]), {})
                part[low] = ids[at : at + high - low].tolist()
    found = {
        place: [i for _, ids in sorted(parts.items()) for i in ids]
        for place, parts in tokens.items()
    }
    wanted = {(r.file, r.position): r.tokens.tolist() for r in restored_records(built / "out")}
    assert found == {place: ids for place, ids in wanted.items() if ids}


def first_repository():
    """The positions of the records of the first repository of a.jsonl that has several files."""
    groups = itertools.groupby(corpus()["a.jsonl"].items(), lambda item: item[1]["repo"])
    every = ([position for position, row in group if repo] for repo, group in groups)
    return next(positions for positions in list(every)[1:] if len(positions) > 1)


def test_inspect_shows_the_records_of_the_document_of_any_record(built, capsys):
    positions = first_repository()
    document, *_ = positions
    for position in positions:
        described = describe_document(built / "out", "code", f"a.jsonl:{position}", {}, True)
        (file,) = described["files"]
        (use,) = file["uses"]
        assert file["document"] == document and use["outcome"] == "used"
        assert sorted(record["position"] for record in use["records"]) == positions
        assert use["records"][-1]["tokens"][1] == file["tokens"] == use["segments"][-1]["tokens"][1]
    print_document(described)
    assert f"record at {positions[-1]:,}: " in capsys.readouterr().out


def test_a_document_is_removed_with_all_of_its_records(built, tmp_path):
    positions = first_repository()
    count = len(positions)
    listed = tmp_path / "list.jsonl"
    listed.write_text(json.dumps({"file": "a.jsonl", "doc": positions[1]}))
    with pytest.raises(RecipeError, match=f"is a part of the document a.jsonl:{positions[0]}"):
        remove_documents(built / "out", listed, tmp_path / "none", made.Silent())
    listed.write_text(json.dumps({"file": "a.jsonl", "doc": positions[0]}))
    remove_documents(built / "out", listed, tmp_path / "out", made.Silent())
    assert faults_of(tmp_path / "out", ALL, code=built) == []
    left = documents_in(built / "out").keys() - documents_in(tmp_path / "out").keys()
    assert left == {("a.jsonl", positions[0])}
    counts, before = (
        read_manifest(folder / "out")["ledger"]["sources"]["code"]["documents"]
        for folder in (tmp_path, built)
    )
    assert counts["rejected"]["removed"] == count
    assert counts["joined"] == before["joined"] - count + 1
    (file,) = describe_document(tmp_path / "out", "code", f"a.jsonl:{positions[1]}", {})["files"]
    assert file["uses"][0]["outcome"] == "removed"


def moved(name, change):
    def forge(arrays):
        arrays[name][: len(change)] += np.array(change, arrays[name].dtype)

    return forge


def dropped(arrays):
    """The last record of the last document that has several is listed no longer."""
    counts = np.diff(arrays["record_offsets"])
    g = int(np.flatnonzero(counts > 1)[-1])
    at = int(arrays["record_offsets"][g + 1]) - 1
    arrays["record_offsets"][g + 1 :] -= 1
    for name in ("record_position", "record_start", "record_tokens"):
        arrays[name] = np.delete(arrays[name], at)


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (moved("record_start", [1]), "does not follow the record before it"),
        (moved("record_tokens", [1]), "other records than its document|does not follow"),
        (moved("record_position", [1]), "not at the first of its records"),
        (
            moved("record_offsets", [0, 1]),
            "first segment of a document|does not ascend|other records than",
        ),
        (dropped, "other records than its document"),
    ],
)
def test_verify_finds_forged_records(built, tmp_path, forge, message):
    copy = copied(built / "out", tmp_path)
    with resigned(copy) as arrays:
        forge(arrays)
    faults = faults_of(copy)
    assert {fault["promise"] for fault in faults} == {"P21"}
    assert any(re.search(message, fault["message"]) for fault in faults), faults


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"group_by": ""}, r"sources\[0\]\.order_by requires group_by"),
        ({"group_by": "", "order_by": ""}, r"sources\[0\]\.between requires group_by"),
        ({"format": "tokens"}, 'group_by does not support format = "tokens"'),
        ({"messages_format": "sharegpt"}, "group_by does not join conversations"),
        ({"where": "path == 'a'"}, "group_by joins records, but where selects single records"),
        ({"repeat": "clip(n, 0, 2)"}, "group_by joins records, but repeat selects single records"),
    ],
)
def test_what_group_by_does_not_support_is_refused_by_name(source, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        read_recipe(recipe(source=source), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("between", "message"),
    [
        ("<none>", 'between = "<none>": the tokenizer has no such token'),
        (9999, "between = 9999: the tokenizer has no such token"),
        ("<extra_id_0>", "a task or .specials. media gives this token another meaning"),
    ],
)
def test_a_token_that_cannot_be_between_records_is_refused(tmp_path, between, message):
    made.write(tmp_path / "a.jsonl", b'{"text": "x", "repo": 1}\n')
    sources = [{"paths": ["a.jsonl"], "group_by": "repo", "between": between}]
    table = made.table(sources)
    with pytest.raises(RecipeError, match=message):
        made.build(table, tmp_path, tmp_path / "out")


def test_a_field_that_no_record_has_is_refused(tmp_path):
    made.write(tmp_path / "a.jsonl", b'{"text": "x", "repo": 1}\n{"text": "y", "repo": null}\n')
    made.build(made.table([{"paths": ["a.jsonl"], "group_by": "repo"}]), tmp_path, tmp_path / "o")
    with pytest.raises(RecipeError, match='group_by = "rep": no record in the sample has a value'):
        made.build(
            made.table([{"paths": ["a.jsonl"], "group_by": "rep"}]), tmp_path, tmp_path / "p"
        )


@pytest.mark.long
def test_the_plan_estimates_documents_and_tokens_with_their_separators(built):
    (planned,) = open_plan(built / "out").stored["sources"]
    counts = read_manifest(built / "out")["ledger"]["sources"]["code"]
    # The plan counts empty documents too, and tokenizes the texts of a document as one text.
    assert planned["documents"] == pytest.approx(counts["documents"]["used"], rel=0.1)
    assert planned["tokens"] == pytest.approx(counts["tokens"]["read"], rel=0.02)


@pytest.mark.long
def test_a_token_store_of_groups_is_refused(tmp_path):
    made.write(tmp_path / "a.jsonl", b'{"text": "x", "repo": 1}\n')
    made.write(
        tmp_path / "r.toml",
        b'tokenizer = "bytes"\n[[sources]]\npaths = ["a.jsonl"]\ngroup_by = "repo"\n',
    )
    said = refused("tokenize", tmp_path / "r.toml", "--out", tmp_path / "store")
    assert "group_by is not supported in a token store" in said
