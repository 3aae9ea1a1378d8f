import json
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from packprep import clock
from packprep.building import forecast as module
from packprep.building.forecast import built_together, forecast, outlook
from packprep.building.planning import look_up, make_plan
from packprep.cli.printing import duration, print_forecast
from packprep.conversations import supervision
from packprep.documents import calibration, sample
from packprep.documents.tally import Tally
from packprep.inspection.summary import describe_manifest
from packprep.recipe import read_recipe
from tests import made


def forecast_of(folder, sources="a.jsonl", **changes):
    table = made.table(sources, **changes)
    given = {key: value for key, value in table.items() if value is not None}
    inputs, samples = look_up(read_recipe(given, folder), {}), []
    return forecast(make_plan(inputs, samples=samples), inputs, samples)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    made.write_lines(folder / "a.jsonl", made.texts(600))
    return folder


def built_as_forecast(folder, out, sources="a.jsonl", **changes):
    """(forecast, ledger, bytes of shards, utilisation) of a recipe and its build."""
    manifest = made.build(made.table(sources, **changes), folder, out).manifest
    size = sum(entry["bytes"] for entry in manifest["shards"])
    return (
        forecast_of(folder, sources, **changes),
        manifest,
        size,
        describe_manifest("", manifest)["utilisation"],
    )


def test_a_forecast_is_near_what_the_build_makes(folder, tmp_path):
    found, manifest, _, _ = built_as_forecast(folder, tmp_path / "out")
    ledger = manifest["ledger"]
    assert found["shards"] == len(manifest["shards"])
    assert abs(found["tokens"] / ledger["sources"]["source0"]["tokens"]["used"] - 1) < 0.02
    assert abs(found["documents"] / 600 - 1) < 0.02
    segments = ledger["sources"]["source0"]["segments"]
    assert abs(found["segments"] / segments - 1) < 0.02
    assert found["fingerprint"] == manifest["fingerprint"] and found["worker_bytes"] > 100 << 20


@pytest.mark.parametrize("preset, slot_bytes", [("causal", 2 + 3), ("mlm", 2 * 2 + 3)])
def test_a_worker_has_three_copies_of_its_tokens_and_two_of_its_rows(folder, preset, slot_bytes):
    """Same-position tasks store labels beside the tokens. An id has two bytes."""
    found = forecast_of(folder, tasks=[{"preset": preset}])
    tokens = found["tokens"] / found["shards"]
    slots = found["rows"] * found["seq_length"] / found["shards"]
    expected = 3 * 2 * tokens + 2 * slot_bytes * slots
    assert found["worker_bytes"] - module.PROCESS_BYTES == pytest.approx(expected, rel=0.01)


def test_lengths_that_are_built_together_read_once_and_keep_the_documents_of_all():
    figures = {"tokens": 1000, "worker_bytes": 10_000, "read_s": 3.0, "tokenize_s": 5.0}
    done, missing = built_together([{**figures, "shards": 2}, {**figures, "shards": 1}], [0, 1])
    assert (done["read_s"], done["tokenize_s"]) == (0, 0)
    assert (missing["read_s"], missing["tokenize_s"]) == (3, 5)
    assert (done["worker_bytes"], missing["worker_bytes"]) == (14_000, 12_000)
    alone = {**figures, "shards": 3}
    assert built_together([alone], [3]) == [alone]


def test_a_token_store_is_forecast_whatever_uses_the_recipe_makes_of_it(folder, tmp_path):
    table = made.table([{"paths": ["a.jsonl"], "repeat": 2.5, "sample": [0.2, 0.7]}])
    store = made.build(table, folder, tmp_path / "store", is_store=True).manifest
    inputs, samples = look_up(read_recipe(table, folder), {}), []
    found = forecast(make_plan(inputs, samples=samples), inputs, samples)["store"]
    ledger = store["ledger"]["sources"]["source0"]
    assert abs(found["documents"] / ledger["documents"]["used"] - 1) < 0.05
    assert (
        abs(found["tokens"] / ledger["tokens"]["used"] - 1) < 0.05
        and 0 <= found["token_error"] < 0.1
    )
    assert abs(found["bytes"] / sum(shard["bytes"] for shard in store["shards"]) - 1) < 0.1
    of_store = made.table([{"paths": [str(tmp_path / "store")], "format": "store"}])
    from_store, from_files = forecast_of(folder, of_store["sources"]), forecast_of(folder)
    assert from_store["store"] is None and not from_store["sampled"] and from_files["sampled"]
    assert (from_store["read_s"], from_store["tokenize_s"]) == (
        pytest.approx(from_store["text_bytes"] / 1e9),  # 1000 MB a second
        0,
    )


@pytest.mark.parametrize("seed", range(20))
def test_rows_and_bytes_are_within_three_hundredths_whatever_is_packed(tmp_path, seed):
    """Two kinds of recipe a seed: with pieces that divide rows, padding, blocks, other ways to pack
    and to cut."""
    made.write_lines(tmp_path / "a.jsonl", made.texts(100, seed, 3000))
    few = {
        "specials": {"sentinels": {"first": 266, "count": 20}},
        "tasks": [{"preset": "t5"}],
        "output": {},
    }
    changes = [
        few,
        {"packing": {"pad_seq_to_mult": 64}, "output": {"columns": "compact"}},
        {"packing": {"algorithm": "next_fit"}},
        {
            "tasks": [{"preset": "bd3"}, {"preset": "llada"}],
            "documents": {"max_tokens": 200},
            "output": {},
        },
        {
            "packing": {"algorithm": "concat"},
            "tasks": [{"preset": "causal"}],
            "documents": {"prepend_bos": True},
        },
        {"documents": {"min_tokens": 200}, "packing": {"max_segments_per_row": 2}},
    ]
    for change in (changes[seed % 6], changes[(seed + 3) % 6]):
        out = tmp_path / str(changes.index(change))
        found, manifest, size, fill = built_as_forecast(
            tmp_path, out, **{"seq_length": 1024, **change}
        )
        assert abs(found["rows"] / manifest["ledger"]["rows"] - 1) < 0.03, change
        assert abs(found["output_bytes"] / size - 1) < 0.03, change
        assert abs(found["utilisation"]["all_rows"] - fill["all_rows"]) < 0.02, change
        assert abs(found["utilisation"]["without_last_rows"] - fill["without_last_rows"]) < 0.02, (
            change
        )


def test_what_says_what_is_trained_is_forecast_by_the_tasks_that_it_may_draw(tmp_path):
    lines = [
        json.dumps({"text": text, "loss_spans": [[0, len(text)]]})
        for text in made.texts(150, 3, 3000)
    ]
    made.write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    # block diffusion doubles slots, and takes no such documents
    tasks = [{"preset": "bd3"}, {"preset": "causal"}]
    found, manifest, size, _ = built_as_forecast(
        tmp_path, tmp_path / "out", tasks=tasks, seq_length=1024, output={}
    )
    assert (
        abs(found["rows"] / manifest["ledger"]["rows"] - 1) < 0.03
        and abs(found["output_bytes"] / size - 1) < 0.03
    )


def test_of_a_large_corpus_some_shards_are_packed(folder, monkeypatch):
    whole = forecast_of(folder)
    monkeypatch.setattr(module, "MOST", 500)
    part = forecast_of(folder)
    monkeypatch.setattr(module, "MOST", 100)  # less than one shard
    least = forecast_of(folder)
    assert whole["shards"] == 5
    for found in (part, least):
        assert found["output_bytes"] != whole["output_bytes"]
        assert all(
            abs(found[name] / whole[name] - 1) < 0.1
            for name in ("rows", "segments", "output_bytes")
        )


def test_rows_that_are_not_full_are_warned_of_with_what_to_do(folder):
    def of(**changes):
        found = forecast_of(folder, tasks=[{"preset": "causal"}], **changes)["warnings"]
        return [text for text in found if text.startswith("rows are only ")]

    assert of() == []
    assert "pad_seq_to_mult = 256 pads segments" in of(packing={"pad_seq_to_mult": 256})[0]
    assert 'packing.algorithm = "next_fit" leaves gaps' in of(packing={"algorithm": "next_fit"})[0]
    assert "max_segments_per_row = 1 limits them" in of(packing={"max_segments_per_row": 1})[0]
    assert (
        "segment lengths do not fill them" in of(documents={"min_tokens": 250, "long": "drop"})[0]
    )
    # Two rows of 100 positions: of one, 98 or 97 are filled. Padding is within segments or after.
    packing = {"algorithm": "best_fit", "pad_seq_to_mult": 8, "max_segments_per_row": None}
    for filled, slots, changes, words in [
        (98, 191, {}, None),
        (97, 191, {}, "pad_seq_to_mult = 8 pads segments"),
        (97, 190, {}, "segment lengths do not fill them"),
        (97, 190, {"seq_lengths": (50, 100)}, 'documents.long = "decompose" avoids gaps'),
        (97, 190, {"seq_lengths": (50, 100), "long": "decompose"}, "do not fill them"),
    ]:
        recipe = SimpleNamespace(
            packing=SimpleNamespace(sides=None, **packing),
            documents=SimpleNamespace(long=changes.get("long", "split")),
            seq_length=100,
            seq_lengths=changes.get("seq_lengths"),
        )
        packed = module.Packed(9, 2, slots, 180, filled, 100, 0, 0)
        warnings = module._emptiness(packed, recipe)
        assert len(warnings) == (words is not None) and all(words in one for one in warnings)
    found = forecast_of(folder, tasks=[{"preset": "causal"}], documents={"max_tokens": 200})
    assert found["warnings"] == [] and found["utilisation"]["without_last_rows"] > 0.98
    assert [
        found["tasks"][0][name] for name in ("longest_inner", "longest_last", "pieces_of_a_row")
    ] == [170, 200, 3]


def test_sums_that_nobody_counted_are_left_out(folder, capsys):
    found = forecast_of(folder)
    print_forecast({**found, "documents": 0, "tokens": 0})
    assert (
        f"\nabout {found['text_bytes']:,} bytes of text (bytes engine)\n" in capsys.readouterr().out
    )


def test_realised_span_lengths_are_told_and_warned_of_beyond_a_tenth(folder):
    found = forecast_of(folder, seq_length=4096)
    by_name = {task["name"]: task for task in found["tasks"]}
    figure = by_name["r"]["figures"]["mean_span_length"]
    assert figure["wanted"] == 3 and abs(figure["realised"] - 3) < 0.05
    few = {"sentinels": {"first": 266, "count": 20}}
    tasks = [{"objective": "span_corruption", "too_many_spans": "lower"}]
    found = forecast_of(folder, seq_length=4096, specials=few, tasks=tasks)
    assert found["tasks"][0]["figures"]["mean_span_length"]["realised"] > 25
    assert any(
        "mean_span_length will be " in text and "not 3" in text for text in found["warnings"]
    )


def test_segments_that_end_for_want_of_sentinels_are_warned_of(folder):
    tasks = [{"objective": "span_corruption", "noise_density": 0.5}]
    found = forecast_of(
        folder, seq_length=4096, specials={"sentinels": {"first": 266, "count": 20}}, tasks=tasks
    )
    assert any("20 sentinels limit its segments to 1" in text for text in found["warnings"]), found[
        "warnings"
    ]
    assert forecast_of(folder, seq_length=4096, tasks=[{"preset": "t5"}])["warnings"] == []


def test_tasks_are_warned_of_beyond_a_tenth(monkeypatch):
    monkeypatch.setattr(module, "capacity", lambda *given: 50)
    documents = SimpleNamespace(eos_after_document=True, eos_after_segment=False)
    recipe = SimpleNamespace(seq_length=100, documents=documents)
    for realised, needed, most, filled, words in [
        (11.0, 2, 50, 90, []),
        (11.1, 2, 50, 90, ["x will be 11.1 at full length, not 10. Use longer rows to"]),
        (8.9, 3, 50, 90, ["x will be 8.9 at full length, not 10. Use more sentinels to"]),
        (9.0, 3, 50, 89, ["2 sentinels limit its segments to 50 tokens, 89% of a row"]),
        (9.0, 3, 51, 89, []),
    ]:
        objective = SimpleNamespace(
            sentinels=lambda parameters, n, needed=needed: needed,
            most_tokens=lambda task, most=most: most,
        )
        task = SimpleNamespace(
            name="t",
            parameters={},
            ids=SimpleNamespace(sentinels=[7, 8]),
            objective=objective,
            most_body_slots=lambda tokens, filled=filled: filled,
        )
        figures = {"longest_inner": 9, "figures": {"x": {"wanted": 10.0, "realised": realised}}}
        found = list(module._warnings_of_task(recipe, task, figures))
        assert len(found) == len(words)
        assert all(
            one.startswith(f"task t: {text}") for one, text in zip(found, words, strict=True)
        )


def test_a_source_used_more_than_four_times_is_warned_of(folder):
    for repeat, warnings in (4, []), (4.5, ["source a: each document is used 4.5 times"]):
        source = {"name": "a", "paths": ["a.jsonl"], "repeat": repeat}
        assert forecast_of(folder, [source], tasks=[{"preset": "causal"}])["warnings"] == warnings


def test_a_forecast_is_printed_as_text(folder, capsys):
    print_forecast(forecast_of(folder, [{"name": "web", "paths": ["a.jsonl"], "repeat": 5}]))
    text = capsys.readouterr().out
    assert re.match(r"\d\d shards of about 0\.0477 MiB of text, 1 file\n", text)
    for said in (
        "web",
        "x-dense",
        "span_corruption",
        "warning: source web",
        "rows of 512",
        "slots filled; 99.",
    ):
        assert said in text
    assert forecast_of(folder)["sources"][0]["share"] == 1.0
    print_forecast(forecast_of(folder, output={}))
    assert capsys.readouterr().out.startswith("1 shard of about 64 MiB of text, 1 file\n")


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def conversations(folder, count):
    """Conversations of the same size."""
    turns = [
        [{"role": "user", "content": f"{k:05}"}, {"role": "assistant", "content": "so" * 99}]
        for k in range(count)
    ]
    made.write(
        folder / "chats.jsonl",
        "".join(json.dumps({"messages": own}) + "\n" for own in turns).encode(),
    )
    made.write(folder / "chat.jinja", CHAT.encode())
    return {"name": "chats", "paths": ["chats.jsonl"]}


@pytest.mark.parametrize("whole_bytes", [1 << 20, 1000])
def test_time_is_what_the_sample_took_rendering_included(tmp_path, monkeypatch, whole_bytes):
    now = [0.0]

    def slower(name, module, seconds):
        act = getattr(module, name)

        def slow(*arguments):
            now[0] += seconds(arguments)
            return act(*arguments)

        monkeypatch.setattr(module, name, slow)

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(sample, "WHOLE_BYTES", whole_bytes)
    slower("rendered_turns", supervision, lambda given: 0.5)
    slower("tokenize_supervised", calibration, lambda given: 0.25 * len(given[1]))
    sources = [{**conversations(tmp_path, 400), "repeat": 2}]
    found = forecast_of(
        tmp_path, sources, tasks=[{"preset": "causal"}], documents={"chat_template": "chat.jinja"}
    )
    assert found["renders"]
    assert found["read_s"] == pytest.approx(400, rel=0.01) and found["tokenize_s"] == pytest.approx(
        200, rel=0.01
    )
    come = outlook(found, found["shards"], 1)
    assert come["seconds"] > 600 and come["read_mb_s"] == pytest.approx(come["tokenize_mb_s"] / 2)
    print_forecast({**found, "to_come": come})


def test_time_is_that_of_the_worker_with_most_shards_and_of_the_kernels_that_are_not_compiled(
    monkeypatch, capsys
):
    found = {
        "text_bytes": 8e9,
        "output_bytes": 15e9,
        "shards": 10,
        "read_s": 500,
        "tokenize_s": 1500,
    }
    found |= {"sampled": True, "renders": True}
    monkeypatch.setattr(module, "is_kept", lambda what: True)
    seconds = [outlook(found, 10, workers)["seconds"] for workers in (1, 4, 10, 99)]
    assert seconds == [1 + 2100, 1 + 3 * 210, 1 + 210, 1 + 210]
    half = outlook(found, 5, 1)
    assert (half["seconds"], half["output_bytes"], half["text_bytes"]) == (1 + 1050, 7.5e9, 4e9)
    monkeypatch.setattr(module, "is_kept", lambda what: False)
    assert outlook(found, 5, 1)["seconds"] == 11 + 1050
    assert outlook(found, 0, 1)["seconds"] == 0
    assert (half["read_mb_s"], half["tokenize_mb_s"]) == (16, 8e3 / 1500)
    assert [duration(s) for s in (1.2, 119, 150, 3000, 7200, 90000)] == [
        "1 s",
        "119 s",
        "2.5 min",
        "50 min",
        "2 h",
        "25 h",
    ]


def test_the_errors_of_shares_and_of_a_store_are_those_of_independent_sources():
    tokens, errors = np.array([30_000, 10_000, 500]), np.array([0.01, 0.04, 0.2])
    plan = {
        "token_dtype": "uint16",
        "sources": [
            {"name": f"s{i}", "text_bytes": 1, "repeat": 2.0, "tokens": n, "documents": n // 10}
            | {"relative_error": error}
            for i, (n, error) in enumerate(zip(tokens.tolist(), errors.tolist(), strict=True))
        ],
    }
    drawn = np.random.default_rng(1).normal(tokens, tokens * errors, (20_000, 3))
    shares = drawn / drawn.sum(1, keepdims=True)
    for i, found in enumerate(module._figures_of_sources(plan)):
        assert found["share"] == tokens[i] / tokens.sum()
        assert found["share_error"] == pytest.approx(shares[:, i].std(), rel=0.03)
    intervals = (0.0, 0.5), (0.25, 0.5), (0.0, 1.0)
    samples = [SimpleNamespace(sample=one, where=None, repeat=2.0) for one in intervals]
    uses = np.array([1.0, 0.5, 2.0])
    found = module._of_store(plan, SimpleNamespace(sources=samples))
    assert found["tokens"] == (tokens / uses).sum()
    assert found["documents"] == (tokens / uses).sum() / 10
    assert found["bytes"] == 2 * found["tokens"] + module.DOCUMENT_BYTES * found["documents"]
    for key, value in (("where", "score > 1"), ("repeat", "score")):
        by_fields = SimpleNamespace(**{**vars(samples[1]), key: value})
        assert module._of_store(plan, SimpleNamespace(sources=[samples[0], by_fields])) is None
    sums = (drawn / uses).sum(1)
    assert found["token_error"] == pytest.approx(sums.std() / sums.mean(), rel=0.03)


def bad_of(fraction, *sources, keys=None):
    """(message, certain) of sources, each given as (good, bad, whole, keys of the source, repeat)."""
    samples, entries = [], []
    for good, bad, is_whole, of_source, repeat in sources:
        tally = Tally(good + bad, Counter({"empty": bad} if bad else {}), [(good + bad, bad)])
        tally.totals, tally.is_whole = (float(good + bad), float(bad)), is_whole
        samples.append(SimpleNamespace(tally=tally))
        entries.append(SimpleNamespace(**{"sample": (0.0, 1.0), "repeat": repeat, **of_source}))
    documents = {"max_bad_fraction": fraction, "bad_documents": "skip", **(keys or {})}
    recipe = SimpleNamespace(sources=entries, documents=SimpleNamespace(**documents))
    nothing = [SimpleNamespace(names=[])] * len(entries)
    inputs = SimpleNamespace(recipe=recipe, prefixes=[""] * len(entries), files=nothing)
    plan = {"sources": [{"repeat": repeat} for *_, repeat in sources]}
    return module.bad_in_samples(plan, inputs, samples)


def test_bad_documents_count_as_often_as_a_build_reads_them():
    good, bad = (10_000, 0, True, {}, 1.0), (8000, 2000, True, {}, 2.0)
    half, by_fields = {"sample": (0.25, 0.75)}, {"repeat": "score"}
    for sources, part in [
        ([bad], 0.2),
        ([good, bad], 4000 / 30_000),
        ([good, (8000, 2000, True, half, 2.0)], 0.1),
        ([good, (8000, 2000, True, by_fields, 2.0)], 0.1),
        ([(8000, 2000, True, {}, 1.5)], 0.2),
    ]:
        assert bad_of(part, *sources) == ("", False)
        message, is_certain = bad_of(part - 1e-4, *sources)
        assert "documents are bad (empty 2000), more than documents.max_bad" in message
        # A build that draws some of the documents may draw fewer bad ones, but hardly half.
        by_chance = sources[-1][3] or sources[-1][4] == 1.5
        assert is_certain == (not by_chance) and bad_of(part / 2, *sources)[1]
        assert bad_of(0.0, *sources, keys={"bad_documents": "fail"}) == ("", False)
    assert bad_of(0.0, bad)[0].startswith("2000 of 10000 documents are bad (empty 2000), more than")
    guessed = bad_of(0.0, good, (8000, 2000, False, {}, 1.0))[0]
    assert guessed.startswith("about 10.0% of the documents are bad, 2000 of a sample of 20000 (em")
    assert bad_of(0.0, (0, 0, True, {}, 1.0)) == ("", False)


def test_sampled_documents_that_say_what_is_trained_are_trained_whole():
    training = module._all_trained(np.array([0, 1, 1], np.uint8), np.array([5, 7, 9], np.int64))
    assert training.spans.tolist() == [[0, 7], [0, 9]] and training.span_offsets.tolist() == [
        0,
        0,
        1,
        2,
    ]
    assert training.cut_offsets.tolist() == [0, 0, 0, 0] and not len(training.cuts)


STORE = (390, 187480, 385881)
FROZEN = {
    "ul2r": (7, 822, 316566, 1162, 669, 339046, 1812814, 760853, STORE, [0.989465, 0.994747]),
    "blocks": (7, 822, 316566, 2369, 936, 468756, 3590924, 1229296, STORE, [0.966349, 0.969714]),
    "concat": (7, 822, 316566, 1436, 623, 317419, 1709258, 727207, STORE, [0.99472, 0.99999]),
    "sides": (
        *(7, 822, 316566, 1544, 1125, 348767, 2285121, 888350),
        *(STORE, [0.80751, 0.810147, 0.988383, 0.445766]),
    ),
}
"""Recipe → shards, documents, tokens, segments, rows, slots, bytes of output, bytes of a worker beyond
those of a process, the token store's documents, tokens and bytes, and the packing efficiency."""


def test_a_forecast_of_a_corpus_stays_what_it_is(tmp_path):
    """Whoever plans again, on any machine, reads the same figures."""
    made.write_lines(tmp_path / "a.jsonl", made.texts(300))
    made.write_lines(tmp_path / "b.jsonl", made.texts(90, 1, 900))
    sources = [{"paths": ["a.jsonl"], "repeat": 2.5}, {"paths": ["b.jsonl"], "sample": [0.1, 0.9]}]
    recipes = {
        "ul2r": {"tasks": [{"preset": "ul2r"}]},
        "blocks": {
            "tasks": [{"preset": "bd3"}, {"preset": "llada"}],
            "documents": {"max_tokens": 200, "min_tokens": 9},
            "packing": {"pad_seq_to_mult": 16},
        },
        "concat": {"tasks": [{"preset": "causal"}], "packing": {"algorithm": "concat"}},
        "sides": {
            "tasks": [{"preset": "t5"}],
            "packing": {"encoder_length": 256, "decoder_length": 128},
            "seq_length": None,
        },
    }
    columns = ("shards", "documents", "tokens", "segments", "rows", "slots", "output_bytes")
    for name, changes in recipes.items():
        found = forecast_of(tmp_path, sources, **{"seq_length": 512, **changes})
        fill = [round(value, 6) for value in found["utilisation"].values()]
        worker = found["worker_bytes"] - (220 << 20)
        store = tuple(found["store"].values())[:3]
        assert (*(found[key] for key in columns), worker, store, fill) == FROZEN[name], name


@pytest.mark.long
@pytest.mark.parametrize(
    "share, said", [(0.5, False), (0.4, True), (0.5000004, False), (0.5000006, True)]
)
def test_shares_are_warned_of_if_they_do_not_sum_to_1(folder, share, said):
    sources = [{"name": name, "paths": ["a.jsonl"], "share": share} for name in "ab"]
    warnings = [text for text in forecast_of(folder, sources)["warnings"] if "shares" in text]
    assert len(warnings) == said and all("scaled to a 50.0%, b 50.0%" in text for text in warnings)
