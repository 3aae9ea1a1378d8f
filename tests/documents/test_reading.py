import json

import numpy as np
import pytest

from packprep.building.plan import Plan
from packprep.building.planning import look_up, make_plan
from packprep.building.work import documents_builder, text_reader
from packprep.documents.reading import (
    MOST_DOCUMENTS,
    Rejected,
    chosen_by_content,
    is_bad,
    keeper,
    kept_by_plan,
    read_documents,
    refuse_beyond,
)
from packprep.errors import SourceError
from packprep.recipe import read_recipe
from tests import made
from tests.twin import chance


def plan_of(folder, **changes):
    sources = changes.pop("sources", [{"paths": ["*.jsonl"]}])
    inputs = look_up(read_recipe(made.table(sources, **changes), folder), {})
    return Plan(make_plan(inputs), inputs.vocabulary.tokenizer_json)


def read(plan, shard=0, shards=1, **options):
    slices = ((source, part) for source in plan.sources for part in source.slices(shard, shards))
    clock = options.pop("clock", None)
    return read_documents(
        documents_builder(plan), text_reader(plan, clock=clock), slices, **options
    )


def texts_of(documents):
    bounds = zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
    return [bytes(documents.ids[a:b].astype(np.uint8)).decode() for a, b in bounds]


def test_documents_are_columns_with_their_places_and_keys(tmp_path):
    texts = {"a.jsonl": ["one", "zwei"], "b.jsonl": ["три"]}
    for name, documents in texts.items():
        made.write_lines(tmp_path / name, documents)
    plan = plan_of(tmp_path, seed=5)
    for only, wanted in (({0: [16, 99]}, ["zwei"]), ({1: [0]}, ["три"]), ({}, [])):
        chosen = {file: np.array(positions) for file, positions in only.items()}
        assert texts_of(read(plan, only=chosen)) == wanted
    reading = documents = read(plan)
    found = dict(
        zip(texts_of(reading), zip(documents.file, documents.position, strict=True), strict=True)
    )
    assert found == {"one": (0, 0), "zwei": (0, 16), "три": (1, 0)}
    assert documents.ids.dtype == np.uint16 and documents.offsets.dtype == np.int64
    expected = [chance.text_key(5, "source0", "ab"[f] + ".jsonl") for f in documents.file]
    assert documents.file_key.tolist() == expected
    assert set(documents.source) == set(documents.repeat) == {0}
    assert reading.read == {"source0": 3}


def test_the_shards_documents_together_are_the_corpus_whatever_their_number(tmp_path):
    texts = made.texts(300)
    made.write_lines(tmp_path / "a.jsonl", texts)
    plan = plan_of(tmp_path)
    for shards in (1, 2, 7, 50):
        parts = [texts_of(read(plan, b, shards)) for b in range(shards)]
        assert [text for part in parts for text in part] == texts


def test_the_plan_alone_tells_what_hash_splits_and_text_files_keep(tmp_path):
    lines = (json.dumps({"text": text, "n": 1}) for text in made.texts(200))
    made.write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    made.write_texts(tmp_path, ["one", "two"])
    positions = np.arange(0, 5000, 7)
    for keys, uses in (
        ({}, [False]),
        ({"repeat": 1.5}, [False, True]),
        ({"repeat": 2, "sample": [0.25, 0.5]}, [False, False]),
        ({"where": "n > 0", "sample": [0.25, 0.5]}, [True]),
        ({"repeat": "clip(n, 0, 2)"}, [True, True]),
    ):
        plan = plan_of(tmp_path, sources=[{"paths": ["a.jsonl"], **keys}])
        (source,) = plan.sources
        assert [chosen_by_content(source, use, 0) for use in range(source.uses)] == uses
        for use in range(source.uses):
            kept = kept_by_plan(source, use, 0, positions)
            assert kept.dtype == bool and len(kept) == len(positions)
            assert 0.15 < kept.mean() < 0.35 if "sample" in keys else kept.all()
    (source,) = plan_of(tmp_path, sources=[{"paths": ["*.txt"], "repeat": 1.5}]).sources
    assert not chosen_by_content(source, 1, 0)


def test_an_empty_shard_has_empty_columns_of_the_right_types(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["only one"])
    reading = read(plan_of(tmp_path), 3, 7)
    assert len(reading.ids) == 0 and reading.offsets.tolist() == [0]
    assert reading.ids.dtype == np.uint16 and reading.file_key.dtype == np.uint64


def test_empty_and_short_documents_are_counted_and_leave_the_others_alone(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["", "abcd", "ab", "abcdef", "abc"])
    reading = read(plan_of(tmp_path, documents={"min_tokens": 3}))
    assert texts_of(reading) == ["abcd", "abcdef", "abc"]
    assert [(r["reason"], r["position"]) for r in reading.rejected.records()] == [
        ("empty", 0),
        ("below_min_tokens", 30),
    ]
    assert reading.dropped_tokens == {"source0": {"below_min_tokens": 2}} and reading.read == {
        "source0": 5
    }
    assert not any(is_bad(r["reason"]) for r in reading.rejected.records())


def test_bad_documents_are_rejects_with_place_and_reason(tmp_path):
    lines = [
        b'{"text": "good"}',
        b"{broken",
        b'{"other": 1}',
        b'{"text": 5}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
    ]
    made.write(tmp_path / "a.jsonl", b"\n".join(lines) + b"\n")
    reading = read(plan_of(tmp_path))
    assert texts_of(reading) == ["good"]
    places = np.cumsum([0, *(len(line) + 1 for line in lines)])
    records = list(reading.rejected.records())
    assert [r["position"] for r in records] == places[1:6].tolist()
    reasons = ["malformed_json", "missing_text", "not_a_string", "invalid_utf8", "lone_surrogate"]
    assert [r["reason"] for r in records] == reasons and all(is_bad(reason) for reason in reasons)
    assert all(
        r["source"] == "source0" and r["file"] == "a.jsonl" and r["repeat"] == 0 for r in records
    )


def test_fault_24_bad_documents_fail_stops_at_the_first_and_names_it(tmp_path):
    made.write(tmp_path / "a.jsonl", b'{"text": "good"}\n{broken\n')
    with pytest.raises(
        SourceError,
        match=r"a.jsonl: document at 17: malformed_json: .*\nhint: fix the file, or set documents.bad",
    ):
        read(plan_of(tmp_path, documents={"bad_documents": "fail"}))
    made.write(tmp_path / "a.jsonl", b'{"text": "good"}\n{"text": ""}\n')
    # empty is not bad
    assert len(read(plan_of(tmp_path, documents={"bad_documents": "fail"})).rejected) == 1


def test_special_text_that_is_rejected_counts_as_bad_under_fail(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["about <pad> and </s>", "plain"])
    reading = read(plan_of(tmp_path, documents={"special_text": "reject"}))
    assert (
        texts_of(reading) == ["plain"]
        and next(reading.rejected.records())["reason"] == "special_text"
    )
    assert reading.dropped_tokens == {"source0": {}}
    with pytest.raises(SourceError, match="special_text"):
        read(plan_of(tmp_path, documents={"special_text": "reject", "bad_documents": "fail"}))


def test_rejects_are_in_the_order_of_their_places_however_the_work_was_batched():
    class Named:
        files = type("F", (), {"names": ["b", "a"]})
        first_file, name = 0, "s"

    rejected = Rejected()
    for use, file, position in [(1, 0, 3), (0, 0, 9), (0, 1, 5), (0, 0, 2)]:
        rejected.add(Named, use, file, position, "empty", "")
    found = [(r["file"], r["repeat"], r["position"]) for r in rejected.records()]
    assert found == [("a", 0, 5), ("b", 0, 2), ("b", 0, 9), ("b", 1, 3)]


def test_progress_is_told_of_every_batch_and_its_sums_are_the_reading_s(tmp_path):
    texts = made.texts(200)
    made.write_lines(tmp_path / "a.jsonl", [*texts, ""])
    sums = np.zeros(4, np.int64)

    def progress(*counts):
        nonlocal sums
        sums = sums + counts

    reading = read(plan_of(tmp_path), progress=progress)
    assert sums.tolist() == [201, len("".join(texts).encode()), len(reading.ids), 1]


def test_text_digests_are_of_the_text_bytes_read(tmp_path):
    import xxhash

    texts = [*made.texts(50), ""]
    made.write_lines(tmp_path / "a.jsonl", texts)
    expected = xxhash.xxh3_128_hexdigest("".join(texts).encode())
    assert read(plan_of(tmp_path)).text_digests == {"source0": expected}


# keeper


def test_no_keeper_where_everything_is_kept(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["x"])
    plan = plan_of(tmp_path, sources=[{"paths": ["a.jsonl"], "repeat": 2.5}])
    assert keeper(plan.sources[0], 0, 0) is keeper(plan.sources[0], 1, 0) is None
    assert keeper(plan.sources[0], 2, 0) is not None


def test_sample_keeps_by_name_and_position_alone(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["x"])
    positions = np.arange(500)
    kept = []
    for seed, name in ((0, "x"), (7, "y")):
        sources = [{"name": name, "paths": ["a.jsonl"], "sample": [0.25, 0.5]}]
        kept.append(
            keeper(plan_of(tmp_path, sources=sources, seed=seed).sources[0], 0, 0)(0, positions)
        )
    assert np.array_equal(*kept) and 90 < kept[0].sum() < 160


def test_parts_that_a_shard_does_not_hold_are_not_read(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(100))
    plan = plan_of(tmp_path)
    slices = [(plan.sources[0], part) for part in plan.sources[0].slices_of(0, 0, 5, 5, 10)]
    nothing = read_documents(documents_builder(plan), text_reader(plan), slices)
    assert nothing.read == {"source0": 0}


def test_a_text_key_of_its_own(tmp_path):
    made.write(tmp_path / "a.jsonl", json.dumps({"body": "found", "text": "not this"}).encode())
    assert texts_of(
        read(plan_of(tmp_path, sources=[{"paths": ["a.jsonl"], "text_key": "body"}]))
    ) == ["found"]


@pytest.mark.long
def test_a_shard_may_have_as_much_as_its_limits_and_no_more():
    refuse_beyond("a", MOST_DOCUMENTS, 10, 10)
    with pytest.raises(SourceError, match=f"^a: .* more than {MOST_DOCUMENTS} documents"):
        refuse_beyond("a", MOST_DOCUMENTS + 1, 10, 10)
    with pytest.raises(SourceError, match="^a: .* more than 10 bytes of text"):
        refuse_beyond("a", MOST_DOCUMENTS, 11, 10)
