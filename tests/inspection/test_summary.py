import json

import numpy as np
import pytest

from packprep.building.run import build
from packprep.dataset.loader import open_dataset
from packprep.errors import DatasetError
from packprep.inspection import summary
from packprep.inspection.summary import describe_build, describe_dataset, print_summary
from packprep.recipe import read_recipe
from tests import made
from tests.command_line import inside, refused
from tests.dataset.synthetic import make_dataset
from tests.inspection.conftest import Silent, built, write_corpus


@pytest.fixture(scope="module", params=["ul2r", "causal"])
def described(request, folder):
    """(summary, dataset)."""
    return describe_dataset(folder / request.param), open_dataset(folder / request.param)


def header(ds, name):
    return np.concatenate([ds.row(r).segments[name] for r in range(len(ds))])


def test_the_totals_are_the_datasets(described):
    s, ds = described
    assert s["published"] and s["shards"] == len(ds.manifest["shards"]) and s["rows"] == len(ds)
    assert s["seq_length"] == ds.seq_length == 256
    assert s["segments"] == len(header(ds, "task"))
    assert s["tokens"]["used"] == header(ds, "tokens").sum()
    assert (s["vocab_size"], s["token_dtype"], s["engine"]["name"]) == (528, "uint16", "bytes")
    assert s["fingerprint"] == ds.manifest["fingerprint"]
    assert s["documents"] == {
        "read": 61,
        "used": 55,
        "rejected": {"empty": 5, "missing_text": 1},
        "filtered": 0,
    }


def test_every_slot_is_accounted_for(described):
    s, ds = described
    slots = s["slots"]
    real = sum(int(ds.row(r).cu_seqlens[-1]) for r in range(len(ds)))
    assert slots["total"] == slots["used"] + sum(slots["added"].values()) + slots["padding_inside"]
    assert slots["total"] + slots["row_padding"] == s["row_slots"] == len(ds) * ds.seq_length
    assert slots["total"] - slots["padding_inside"] == real
    assert slots["used"] == s["tokens"]["used"]


def test_utilisation_with_and_without_each_shards_last_row(described):
    s, ds = described
    ledger = ds.manifest["ledger"]
    content = sum(int(ds.row(r).cu_seqlens[-1]) for r in range(len(ds)))
    assert s["utilisation"]["all_rows"] == pytest.approx(content / s["row_slots"])
    last = ledger["last_rows"] * s["seq_length"]
    without = (content - (last - ledger["last_row_padding"])) / (s["row_slots"] - last)
    assert s["utilisation"]["without_last_rows"] == pytest.approx(without)
    assert s["utilisation"]["all_rows"] <= s["utilisation"]["without_last_rows"] <= 1


@pytest.mark.long
def test_padding_inside_segments_is_no_content_in_any_figure(tmp_path, capsys):
    """31 tokens and eos in 64 slots: rows are full, and half of them is content."""
    made.write_lines(tmp_path / "a.jsonl", ["x" * 31] * 96)
    table = made.table(
        "a.jsonl",
        seq_length=256,
        tasks=[{"preset": "causal"}],
        packing={"pad_seq_to_mult": 64},
        output={},
    )
    s = describe_build(made.build(table, tmp_path, tmp_path / "out"))
    assert s["rows"] == 24 and s["slots"]["row_padding"] == 0
    assert s["utilisation"] == {"all_rows": 0.5, "without_last_rows": 0.5}
    print_summary(s)
    assert (
        "utilisation  50.00% of 6,144 slots in rows; 50.00% without each shard's last row"
        in capsys.readouterr().out
    )


@pytest.mark.long
def test_a_single_row_has_no_utilisation_without_its_last_row(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "one.jsonl").write_text('{"text": "only a few words"}\n')
    built(tmp_path, "one", tasks=[{"preset": "causal"}])
    s = describe_dataset(tmp_path / "one")
    assert s["utilisation"]["without_last_rows"] is None and s["row_segments"]["most"] == 1
    print_summary(s)
    out = capsys.readouterr().out
    assert "1 row of 256 slots in 1 shard, " in out and "without each shard" not in out


def test_the_task_mix_is_that_of_the_rows(described):
    s, ds = described
    task, tokens = header(ds, "task"), header(ds, "tokens").astype(int)
    slots = header(ds, "end") - header(ds, "begin")
    masks = np.stack([ds.row(r).loss_mask for r in range(len(ds))])
    task_of_slot = np.stack(
        [np.append(255, ds.row(r).segments["task"])[ds.row(r).segment_ids] for r in range(len(ds))]
    )
    assert sum(entry["drawn"] for entry in s["tasks"]) == pytest.approx(1)
    for t, entry in enumerate(s["tasks"]):
        own = task == t
        assert entry["name"] == ds.tasks[t]["name"]
        assert (entry["segments"], entry["tokens"], entry["slots"]) == (
            own.sum(),
            tokens[own].sum(),
            slots[own].sum(),
        )
        assert entry["token_share"] == pytest.approx(tokens[own].sum() / tokens.sum())
        trained = s["trained"][entry["name"]]
        assert (
            trained["trained"] == masks[task_of_slot == t].sum()
            and trained["slots"] == slots[own].sum()
        )


def test_the_source_mix_is_that_of_the_rows(described):
    s, ds = described
    source, tokens = header(ds, "source"), header(ds, "tokens").astype(int)
    assert sum(entry["documents"] for entry in s["sources"]) == s["documents"]["used"]
    for i, entry in enumerate(s["sources"]):
        assert (entry["segments"], entry["tokens"]) == (
            (source == i).sum(),
            tokens[source == i].sum(),
        )
        assert entry["token_share"] == pytest.approx(tokens[source == i].sum() / tokens.sum())
        assert entry["repeat"] == 1


def test_histograms_count_every_segment_and_row(described):
    s, ds = described
    slots = header(ds, "end") - header(ds, "begin")
    per_row = np.array([ds.row(r).n_segments for r in range(len(ds))])
    for histogram, values in (
        (s["segment_slots"], slots),
        (s["row_segments"]["histogram"], per_row),
    ):
        assert sum(bar["count"] for bar in histogram) == len(values)
        for bar in histogram:
            assert bar["count"] == ((values >= bar["from"]) & (values <= bar["to"])).sum()
    assert s["row_segments"]["most"] == per_row.max()
    assert s["row_segments"]["mean"] == pytest.approx(per_row.mean())
    assert s["looked_at"] == {"shards": s["shards"], "segments": s["segments"]}


def test_of_many_shards_some_are_read_and_the_summary_says_so(folder, monkeypatch, capsys):
    monkeypatch.setattr(summary, "MOST_SHARDS", 2)
    s = describe_dataset(folder / "ul2r")
    assert s["shards"] > 2 and s["looked_at"]["shards"] == 2
    assert (
        sum(bar["count"] for bar in s["segment_slots"])
        == s["looked_at"]["segments"]
        < s["segments"]
    )
    print_summary(s)
    assert "from 2 shards" in capsys.readouterr().out


def test_a_summary_is_plain_json_and_prints_in_100_columns(described, capsys):
    s, _ = described
    assert json.loads(json.dumps(s)) == s
    print_summary(json.loads(json.dumps(s)))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[1:])) <= 100 and "\x1b" not in out
    for text in (
        f"{s['rows']:,} rows of 256 slots",
        s["fingerprint"],
        "rejected: empty 5, missing_text 1",
        "by engine bytes",
    ):
        assert text in out
    for entry in s["tasks"]:
        assert (f"\n{entry['name']} " in out) == bool(entry["drawn"] or entry["segments"])


@pytest.mark.long
def test_columns_of_a_table_are_aligned(described, capsys):
    print_summary(described[0])
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("task "))
    head, *rows = lines[at : lines.index("", at)]
    end = head.index("tokens") + len("tokens")
    assert all(row[end - 1].isdigit() and row[end : end + 2] == "  " for row in rows)


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="is not a dataset, or its build is not finished"):
        describe_dataset(tmp_path)


def test_a_ledger_without_its_numbers_is_refused(tmp_path):
    make_dataset(tmp_path)
    with pytest.raises(DatasetError, match=r"dataset\.json: invalid ledger"):
        describe_dataset(tmp_path)


@pytest.fixture(scope="module")
def part_built(tmp_path_factory):
    """The outcome of one array task of two."""
    folder = tmp_path_factory.mktemp("part")
    write_corpus(folder)
    table = {
        "tokenizer": "bytes",
        "seq_length": 256,
        "tasks": [{"preset": "causal"}],
        "sources": [{"paths": ["corpus/*.jsonl"]}],
    }
    recipe = read_recipe({**table, "output": {"shard_text_bytes": "2KiB"}}, folder)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr("packprep.building.run.LIST_AGAIN_S", 0)
        return build(recipe, folder / "out", Silent(), array=(0, 2))


def test_an_unfinished_build_says_what_is_missing_and_what_to_do(part_built, capsys):
    s = describe_build(part_built)
    shards = part_built.plan.shards
    assert json.loads(json.dumps(s)) == s and not s["published"]
    assert (s["shards"], s["done"], s["missing"], s["made"]) == (
        shards,
        shards // 2 + shards % 2,
        shards // 2,
        s["done"],
    )
    print_summary(s)
    out = capsys.readouterr().out
    assert f"not published yet; {s['done']} of {shards} shards done, {s['missing']} missing" in out
    assert "run the same command again" in out and "array tasks" in out


def test_a_finished_build_reads_no_shard(folder, monkeypatch, capsys):
    monkeypatch.setattr(summary, "shard_in", None)
    outcome = built(folder, "ul2r", output={"shard_text_bytes": "2KiB"})
    s = describe_build(outcome)
    monkeypatch.undo()
    whole = describe_dataset(folder / "ul2r")
    assert s == {**{key: whole[key] for key in s if key != "made"}, "made": 0}
    print_summary(s)
    assert "utilisation" in capsys.readouterr().out


def test_a_folder_of_several_datasets_is_shown_whole_and_one_by_one(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(40))
    table = made.table("a.jsonl", seq_lengths=[64, 256], tasks=[{"preset": "causal"}])
    del table["seq_length"]
    out = tmp_path / "all"
    made.build_lengths(table, tmp_path, out)
    said = inside("inspect", out, "--json")
    assert said.status == 0, said
    whole, *each = said.json
    assert [one["directory"] for one in each] == [f"{out}/seq_64", f"{out}/seq_256"]
    assert each == json.loads(json.dumps([describe_dataset(one["directory"]) for one in each]))
    assert whole["rows"] == sum(one["rows"] for one in each) and len(whole["datasets"]) == 2
    assert sum(one["documents"] for one in whole["datasets"]) == 40
    assert sum(one["slot_share"] for one in whole["datasets"]) == pytest.approx(1)
    text = inside("inspect", out).out
    assert (
        text.startswith(f"{out}: 2 datasets of ")
        and text.count("row slots") == 1
        and text.count("fingerprint") == 2
    )
    for view in (
        ["--row", 0],
        ["--doc", 0],
        ["--grep", "x"],
        ["--diff", out],
        ["--html", tmp_path / "h.html"],
    ):
        assert f"has 2 datasets, but {view[0]} shows one" in refused("inspect", out, *view)
