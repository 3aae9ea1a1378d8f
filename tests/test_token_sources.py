"""Sources that are tokenized already, from their files to verified datasets."""

import json
import os

import numpy as np
import pytest

import packprep
from packprep.errors import PackprepError, SourceError
from packprep.inspection.document import describe_document, first_document
from packprep.verification import verify_dataset
from tests import made, tokens_made
from tests.command_line import packprep as run_packprep
from tests.tokens_made import BOS, EOS, MASK
from tests.twin.check import verify_with_twin

TEXTS = made.texts(260, 11)
FORMS = {
    "megatron": {"paths": ["m/a.bin"]},
    "several": {"paths": ["m/several.idx"], "format": "megatron"},
    "datatrove": {"paths": ["d/*"]},
    "npy": {"paths": ["s/*.npy"]},
    "llm.c": {"paths": ["s/c.bin"], "format": "token_stream"},
    "parquet": {"paths": ["p/*.parquet"], "format": "tokens"},
    "arrow": {"paths": ["p/a.arrow"], "format": "tokens", "text_key": "tokens"},
    "folder": {"paths": ["saved"], "format": "tokens"},
    "lines": {"paths": ["lines/*.jsonl*"], "format": "tokens", "text_key": "tokens"},
}
SMALL = {"output": {"shard_text_bytes": 40_000}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    lists = tokens_made.ids_of(TEXTS)
    made.write_lines(folder / "a.jsonl", TEXTS)
    tokens_made.write_megatron(folder / "m" / "a.bin", lists)
    tokens_made.write_megatron(
        folder / "m" / "several.bin", lists, "<i4", [1 + i % 3 for i in range(len(lists))]
    )
    for i, own in enumerate((lists[:100], lists[100:])):
        loss = [1] * sum(map(len, own)) if i else None
        tokens_made.write_datatrove(folder / "d" / f"{i}.ds", own, "<u4" if i else "<u2", loss)
    flat = sum(lists, [])
    cut = sum(map(len, lists[:150]))
    tokens_made.write_stream(folder / "s" / "a.npy", flat[:cut])
    tokens_made.write_stream(folder / "s" / "b.npy", flat[cut:-1], ">i8", "numpy")
    tokens_made.write_stream(folder / "s" / "c.bin", flat, "<u4", "llama-3")
    (folder / "p").mkdir()
    tokens_made.write_parquet(folder / "p" / "a.parquet", lists)
    tokens_made.write_arrow(folder / "p" / "a.arrow", lists, name="tokens")
    tokens_made.save_dataset(folder / "saved", lists, 3)
    tokens_made.write_lines(folder / "lines" / "a.jsonl", lists[:90], "tokens")
    tokens_made.write_lines(folder / "lines" / "b.jsonl.gz", lists[90:180], "tokens")
    tokens_made.write_lines(folder / "lines" / "c.jsonl.zst", lists[180:], "tokens")
    return folder


def holds(directory, **moved):
    found = verify_with_twin(directory, moved=moved)
    assert [fault["message"] for fault in found["listed"]] == [] and found["faults"] == 0
    assert found["twin"] == found["replayed"] == found["segments"] > 0
    return found


def contents(directory, eos=1):
    """(file, position) → the content tokens of a dataset of causal segments; each of a document's
    ends has `eos` eos."""
    dataset = packprep.open_dataset(directory)
    files = [file["name"] for file in json.loads((directory / "plan.json").read_text())["files"]]
    parts: dict = {}
    for r in range(len(dataset)):
        row = dataset.row(r)
        s = row.segments
        for i in range(row.n_segments):
            slots = row.tokens[s["begin"][i] : s["end"][i]].tolist()
            n = int(s["tokens"][i])
            place = files[s["file"][i]], int(s["doc"][i])
            parts.setdefault(place, []).append((int(s["start"][i]), slots[:n], slots[n:]))
    found = {}
    for place, own in parts.items():
        own.sort()
        assert [rest for _, _, rest in own] == [[]] * (len(own) - 1) + [[EOS] * eos]
        found[place] = [id for _, ids, _ in own for id in ids]
    return found


def in_order(found):
    return [found[place] for place in sorted(found)]


CAUSAL = {"tasks": [{"preset": "causal"}], **SMALL}


@pytest.fixture(scope="module")
def of_text(corpus):
    """The contents and the ledger of the text."""
    outcome = made.build(made.table("a.jsonl", **CAUSAL), corpus, corpus / "of_text")
    return in_order(contents(corpus / "of_text")), outcome.manifest["ledger"]["sources"]["source0"]


@pytest.mark.parametrize("form", FORMS)
def test_tokens_give_what_their_text_gives_token_by_token(corpus, of_text, form):
    out = corpus / f"causal_{form}"
    outcome = made.build(made.table([FORMS[form]], **CAUSAL), corpus, out)
    assert in_order(contents(out)) == of_text[0]
    ledger = outcome.manifest["ledger"]["sources"]["source0"]
    assert (ledger["documents"], ledger["tokens"]) == (
        of_text[1]["documents"],
        of_text[1]["tokens"],
    )
    assert ledger["slots"]["added"]["eos"] == len(TEXTS) == ledger["documents"]["used"]
    names = [file["name"] for file in json.loads((out / "plan.json").read_text())["files"]]
    assert {
        "megatron": ["a.bin"],
        "several": ["several.bin"],
        "datatrove": ["0.ds", "1.ds"],
        "npy": ["a.npy", "b.npy"],
        "llm.c": ["c.bin"],
        "parquet": ["a.parquet"],
        "arrow": ["a.arrow"],
        "folder": [f"saved/data-0000{i}-of-00003.arrow" for i in range(3)],
        "lines": ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst"],
    }[form] == names
    assert first_document(outcome.plan).endswith("│‹eos›") and " tokens: " in first_document(
        outcome.plan
    )
    [position, file] = sorted(contents(out))[0][::-1]
    [described] = describe_document(out, None, f"{file}:{position}", {}, True)["files"]
    assert described["tokens"] == len(of_text[0][0]) and described["uses"][0]["outcome"] == "used"


@pytest.mark.long
def test_a_mix_of_objectives_is_the_same_with_any_number_of_workers_and_verifies(corpus):
    """All forms at once, each in parts, with a fraction of a second use."""
    sources = [
        form | {"name": name, "repeat": 1.4, "sample": [0.0, 0.8]} for name, form in FORMS.items()
    ]
    recipe = made.table(sources, **SMALL)
    outs = [corpus / f"ul2r_{workers}" for workers in (1, 2, 5)]
    for workers, out in zip((1, 2, 5), outs, strict=True):
        made.build(recipe, corpus, out, workers)
    assert len(list((outs[0] / "shards").rglob("*.safetensors"))) > 3
    assert made.contents(outs[0]) == made.contents(outs[1]) == made.contents(outs[2])
    holds(outs[0])


def test_text_and_tokens_share_a_dataset_at_the_shares_of_the_recipe(corpus):
    sources = [
        {"name": name, "share": share, **form}
        for name, share, form in (
            ("text", 0.5, {"paths": ["a.jsonl"]}),
            ("pairs", 0.3, FORMS["megatron"]),
            ("lists", 0.2, FORMS["lines"]),
        )
    ]
    outcome = made.build(made.table(sources, **SMALL), corpus, corpus / "shared")
    used = {
        name: source["tokens"]["used"]
        for name, source in outcome.manifest["ledger"]["sources"].items()
    }
    whole = sum(used.values())
    for name, share in (("text", 0.5), ("pairs", 0.3), ("lists", 0.2)):
        assert abs(used[name] / whole - share) < 0.05
    holds(corpus / "shared")


EVERY_KIND = [
    {"preset": "ul2r"},
    {"preset": "fim"},
    {"preset": "llada"},
    {"preset": "dllm"},
    {"preset": "mlm"},
    {"preset": "duo"},
    {"preset": "bd3"},
    {"name": "plain", "objective": "causal"},
]


@pytest.mark.long
@pytest.mark.parametrize("special_text", ["text", "special", "reject"])
def test_special_ids_in_documents_disturb_no_promise(tmp_path, special_text):
    """Sentinels, masks, mode tokens, bos, eos and pad inside of documents, at their begins and
    ends."""
    chance = np.random.default_rng(5)
    lists = []
    for i in range(150):
        ids = chance.integers(0, 256, chance.integers(0, 400))
        if i % 3:
            where = chance.random(len(ids)) < 0.3
            special = [
                256,
                BOS,
                EOS,
                MASK,
                260,
                261,
                262,
                *([263, 264, 265, 266, 267, 300] if i % 3 == 2 else []),
            ]
            ids[where] = chance.choice(special, where.sum())
        lists.append([*([BOS] if i % 2 else []), *ids.tolist(), *([EOS] if i % 5 else [])])
    tokens_made.write_megatron(tmp_path / "a.bin", lists)
    tokens_made.write_parquet(tmp_path / "a.parquet", lists)
    sources = [
        {"name": "m", "paths": ["a.bin"]},
        {"name": "p", "paths": ["a.parquet"], "format": "tokens"},
    ]
    changes = {
        "documents": {"special_text": special_text, "prepend_bos": True, "max_bad_fraction": 1.0}
    }
    for packing in ({}, {"algorithm": "concat"}):
        tasks = EVERY_KIND if not packing else [{"preset": "causal"}, {"preset": "llada"}]
        out = tmp_path / f"out{len(packing)}"
        made.build(
            made.table(sources, tasks=tasks, packing=packing, **SMALL, **changes), tmp_path, out
        )
        holds(out)
        rejected = json.loads((out / "dataset.json").read_text())["ledger"]["sources"]["m"][
            "documents"
        ]["rejected"]
        assert ("special_text" in rejected) == (special_text == "reject")
        assert ("sentinel_in_text" in rejected) == (special_text != "reject" and not packing)


SENTINEL, FIM_SUFFIX, PLAIN = 266, 265, list(b"no such token here")
WRITE_THEM = {
    "spans": ([{"preset": "t5"}], [SENTINEL]),
    "pivots": ([{"objective": "prefix_lm", "sentinel": True}, {"preset": "causal"}], [SENTINEL]),
    "middles": ([{"objective": "fill_in_the_middle"}], [FIM_SUFFIX]),
    "none": ([{"preset": "causal"}, {"preset": "prefix_lm"}, {"preset": "llada"}], []),
    "no_middles": ([{"objective": "fill_in_the_middle", "rate": 0.0}], []),
}


def kept_beside(directory, source="source0"):
    """How many documents of a source a dataset has, and how many it rejects for tokens that its
    tasks write."""
    counts = json.loads((directory / "dataset.json").read_text())["ledger"]["sources"][source][
        "documents"
    ]
    assert counts["rejected"].keys() <= {"sentinel_in_text"}
    return counts["used"], sum(counts["rejected"].values())


@pytest.mark.parametrize("name", WRITE_THEM)
def test_a_document_with_a_token_that_its_tasks_write_is_rejected(tmp_path, name):
    """Sentinels and role tokens stand once each in a segment, so no document may bring its own."""
    tasks, marks = WRITE_THEM[name]
    lists = [PLAIN, [*PLAIN, SENTINEL, *PLAIN], [FIM_SUFFIX, *PLAIN], PLAIN, [*PLAIN, 300]]
    # 300 is a sentinel too
    written = [bool(set(marks) & {*ids, *([SENTINEL] if 300 in ids else [])}) for ids in lists]
    tokens_made.write_megatron(tmp_path / "a.bin", lists)
    table = made.table("a.bin", tasks=tasks, seq_length=64, documents={"max_bad_fraction": 1.0})
    made.build(table, tmp_path, tmp_path / "out")
    assert kept_beside(tmp_path / "out") == (written.count(False), written.count(True))
    holds(tmp_path / "out")
    if any(written):
        rejects = [
            json.loads(line)
            for line in (tmp_path / "out/rejects/000/000000.jsonl").read_text().splitlines()
        ]
        assert [reject["position"] for reject in rejects] == np.flatnonzero(written).tolist()
        with pytest.raises(SourceError, match="sentinel_in_text: token .* is the special id"):
            fail = {**table, "documents": {"bad_documents": "fail"}}
            made.build(fail, tmp_path, tmp_path / "fail")


def test_a_text_with_a_sentinel_is_rejected_where_its_source_draws_a_task_that_writes_sentinels(
    tmp_path,
):
    """Not where no task does, where the text stays text, or where the document is supervised and
    cannot draw the task."""
    text = "with <extra_id_0> in it"
    lines = [{"text": text}, {"text": "without"}, {"text": text, "loss_spans": [[6, 18]]}]
    lines += [{"text": text, "weight": 0.5}]  # which may draw any task
    made.write(tmp_path / "a.jsonl", b"\n".join(json.dumps(line).encode() for line in lines))
    tasks = [
        {"name": "spans", "objective": "span_corruption"},
        {"name": "plain", "objective": "causal"},
    ]
    sources = [
        {"name": "both", "paths": ["a.jsonl"]},
        {"name": "one", "paths": ["a.jsonl"], "tasks": ["plain"]},
    ]
    for special_text, expected in (("special", (2, 2)), ("text", (4, 0))):
        documents = {"special_text": special_text, "max_bad_fraction": 1.0}
        table = made.table(sources, tasks=tasks, seq_length=64, documents=documents)
        out = tmp_path / special_text
        made.build(table, tmp_path, out)
        assert (kept_beside(out, "both"), kept_beside(out, "one")) == (expected, (4, 0))
        holds(out)
        made.build(table, tmp_path, tmp_path / f"{special_text}_store", is_store=True)
        stored = [
            {**source, "paths": [f"{special_text}_store"], "format": "store"} for source in sources
        ]
        made.build({**table, "sources": stored}, tmp_path, out / "of_store")
        found, wanted = made.contents(out / "of_store/shards"), made.contents(out / "shards")
        assert found == wanted


def test_the_ends_of_documents_are_neither_doubled_nor_lost(tmp_path):
    lists = [[BOS, 1, 2, EOS], [3, 4], [5, EOS, EOS], [EOS], [BOS, EOS], [], [EOS, 6], [7, BOS]]
    tokens_made.write_megatron(tmp_path / "a.bin", lists)
    table = made.table("a.bin", tasks=[{"preset": "causal"}])
    made.build(table, tmp_path, tmp_path / "eos")
    kept = {0: [BOS, 1, 2], 1: [3, 4], 2: [5, EOS], 4: [BOS], 6: [EOS, 6], 7: [7, BOS]}
    assert contents(tmp_path / "eos") == {("a.bin", i): ids for i, ids in kept.items()}
    rejects = [
        json.loads(line)
        for line in (tmp_path / "eos/rejects/000/000000.jsonl").read_text().splitlines()
    ]
    assert [(r["position"], r["reason"]) for r in rejects] == [(3, "empty"), (5, "empty")]
    plain = {"documents": {"append_eos": False}}
    made.build(table | plain, tmp_path, tmp_path / "plain")
    assert contents(tmp_path / "plain", 0) == {
        ("a.bin", i): ids for i, ids in enumerate(lists) if ids
    }
    holds(tmp_path / "eos")
    holds(tmp_path / "plain")


@pytest.mark.parametrize("form", ["megatron", "parquet"])
def test_an_id_that_is_none_rejects_its_document_with_place_and_id(tmp_path, form):
    lists = [[1, 2, 3], [4, 528, 5], [6, 7, 8], [2**32 + 1, 9], [-1]]
    if form == "megatron":
        tokens_made.write_megatron(tmp_path / "a.bin", lists, "<i8")
        source = {"paths": ["a.bin"]}
    else:
        import pyarrow as pa

        tokens_made.write_parquet(tmp_path / "a.parquet", lists, kind=pa.list_(pa.int64()))
        source = {"paths": ["a.parquet"], "format": "tokens"}
    table = made.table([source], tasks=[{"preset": "causal"}])
    outcome = made.build(
        table | {"documents": {"max_bad_fraction": 1.0}}, tmp_path, tmp_path / "out"
    )
    assert outcome.manifest["ledger"]["sources"]["source0"]["documents"] == {
        "read": 5,
        "used": 2,
        "rejected": {"id_out_of_range": 3},
    }
    rejects = [
        json.loads(line)
        for line in (tmp_path / "out/rejects/000/000000.jsonl").read_text().splitlines()
    ]
    assert [(r["position"], r["detail"].split(";")[0]) for r in rejects] == [
        (1, "token 1 is 528"),
        (3, f"token 0 is {2**32 + 1}"),
        (4, "token 0 is -1"),
    ]
    holds(tmp_path / "out")
    with pytest.raises(SourceError, match="document at 1: id_out_of_range: token 1 is 528"):
        made.build(table | {"documents": {"bad_documents": "fail"}}, tmp_path, tmp_path / "other")
    tokens_made.write_megatron(tmp_path / "b.bin", [[600]] * 200)
    with pytest.raises(PackprepError, match="id_out_of_range"):
        made.build(made.table("b.bin"), tmp_path, tmp_path / "many")


@pytest.mark.long
@pytest.mark.parametrize(
    "documents",
    [
        {"long": "truncate", "min_tokens": 30},
        {"long": "drop", "max_tokens": 90},
        {"append_eos": False},
    ],
)
def test_every_rule_of_cutting_holds_for_tokens(corpus, tmp_path, documents):
    recipe = made.table(
        [FORMS["several"], FORMS["folder"]], documents=documents, seq_length=256, **SMALL
    )
    made.build(recipe, corpus, tmp_path / "out")
    holds(tmp_path / "out")


def test_a_changed_source_is_found_by_replay(tmp_path):
    lists = tokens_made.ids_of(TEXTS[:40])
    tokens_made.write_megatron(tmp_path / "a.bin", lists)
    made.build(made.table("a.bin"), tmp_path, tmp_path / "out")
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[100] ^= 1
    (tmp_path / "a.bin").write_bytes(data)
    found = verify_dataset(tmp_path / "out", -1, {}, (0, 1), 0, made.Silent())
    assert any("changed since the build" in fault["message"] for fault in found["listed"])


def test_sources_that_moved_are_found_by_their_prefix(corpus, tmp_path):
    import shutil

    shutil.copytree(corpus / "saved", tmp_path / "here" / "saved")
    made.build(
        made.table([FORMS["folder"] | {"name": "s"}], **SMALL), tmp_path / "here", tmp_path / "out"
    )
    os.rename(tmp_path / "here", tmp_path / "there")
    holds(tmp_path / "out", s=str(tmp_path / "there"))


@pytest.mark.long
def test_urls_give_the_bytes_of_the_files(corpus, tmp_path):
    places = {"pairs": "m/*.bin", "tables": "p/a.parquet", "saved": "saved/*.arrow"}
    for where, out in ((str(corpus), "local"), (f"file://{corpus}", "remote")):
        sources = [{"name": name, "paths": [f"{where}/{path}"]} for name, path in places.items()]
        sources = [
            source | ({} if source["name"] == "pairs" else {"format": "tokens"})
            for source in sources
        ]
        made.build(made.table(sources, **SMALL), tmp_path, tmp_path / out)
    for under in ("shards", "rejects"):
        assert made.contents(tmp_path / "local", under) == made.contents(tmp_path / "remote", under)
    found = verify_dataset(tmp_path / "remote", -1, {}, (0, 1), 0, made.Silent())
    assert found["faults"] == 0 and found["replayed"] > 0


@pytest.mark.long
def test_the_command_line_plans_builds_verifies_and_inspects(corpus, tmp_path):
    for inputs, more in (
        (["m/a.bin", "m/several.idx"], []),
        (["saved"], ["--set", "sources.0.format=tokens"]),
    ):
        out = tmp_path / inputs[0].replace("/", "_")
        common = ["--tokenizer", "bytes", "--seq-length", "256", "--tasks", "ul2r", *more]
        planned = json.loads(run_packprep("plan", *inputs, *common, "--json", at=corpus).out)
        tokens = sum(map(len, tokens_made.ids_of(TEXTS, False))) * len(inputs)
        assert abs(planned["tokens"] / tokens - 1) < 0.1
        said = run_packprep("build", *inputs, *common, "--out", out, at=corpus)
        assert said.status == 0 and "document 1: source0 " in said.err and "‹eos›" in said.err
        assert verify_with_twin(out)["faults"] == 0
        row = json.loads(
            run_packprep("inspect", out, "--row", "0", "--from-plan", "--json", at=corpus).out
        )
        assert {segment["rebuilt"] for segment in row["segments"]} == {"identical"}, row[
            "segments"
        ][0]
