import math
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packprep.documents.reading import with_keeps
from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.sources.files import find_files, fixed_prefix
from packprep.sources.formats import PIECE_BYTES, Decoders, read
from packprep.sources.slices import PlannedSource, format_name, pieces_of_all_uses, step_bytes
from tests import made

ENDINGS = {
    ".jsonl": made.write_lines,
    ".jsonl.gz": made.write_lines,
    ".jsonl.zst": made.write_lines,
    ".parquet": lambda path, texts: made.write_parquet(path, texts, 7),
    ".arrow": lambda path, texts: made.write_arrow(path, texts, 5),
    ".txt": lambda path, texts: made.write(path, "\n".join(texts).encode()),
}


class Corpus(NamedTuple):
    """Written files and what stands in them: name → positions of its documents."""

    folder: Path
    positions: dict[str, list[int]]


def positions_of(path, ending, texts):
    if ending == ".txt":
        return [0]
    if not ending.startswith(".jsonl"):
        return list(range(len(texts)))
    import json

    sizes = [len(json.dumps({"text": text}, ensure_ascii=False).encode()) + 1 for text in texts]
    return np.cumsum([0, *sizes])[:-1].tolist()


def write_corpus(folder, files):
    """files: [(ending, number of documents, seed)]."""
    positions = {}
    for i, (ending, count, seed) in enumerate(files):
        texts = made.texts(count, seed, 200)
        name = f"d{i % 3}/f{i:03d}{ending}"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        ENDINGS[ending](path, texts)
        positions[name] = positions_of(path, ending, texts)
    return Corpus(folder, positions)


def planned(
    corpus, repeat=1.0, sample=(0.0, 1.0), name="s", seed=0, shards=3, ratios=None, step=None
):
    source = Source(
        name=name, paths=(str(corpus.folder / "**" / "*"),), repeat=repeat, sample=sample
    )
    prefix, files = find_files(source, 0, Path("/"), None)
    kinds = {format_name(*planning_format(file.name)) for file in files}
    resolved = {
        "ratios": ratios or {kind: 1024 for kind in kinds},
        "repeat": repeat,
        "step_bytes": step or step_bytes(sum(file.size for file in files), shards),
    }
    return PlannedSource(source, 0, prefix, files, 0, resolved, seed)


def every(source):
    """All pieces of a source, as columns."""
    return source.pieces.at(np.arange(len(source.pieces)))


def planning_format(name):
    from packprep.sources.formats import detect_format

    return detect_format(name)


def uses_in(source, shards):
    """Per shard the list of (file name, position, use) that it reads."""
    decoders = Decoders()
    found = []
    for b in range(shards):
        own = []
        for _, part, keep in with_keeps((source, part) for part in source.slices(b, shards)):
            name = source.files[part.file].name
            for batch in read(part, "text", keep, decoders=decoders):
                own += [(name, int(position), part.use) for position in batch.positions]
        found.append(own)
    return found


FILES = st.lists(
    st.tuples(st.sampled_from(sorted(ENDINGS)), st.integers(0, 60), st.integers(0, 5)),
    min_size=1,
    max_size=8,
)


@given(
    FILES,
    st.sampled_from([1.0, 1.0, 2.0, 2.5, 0.3, 0.001, 3.75]),
    st.sampled_from([(0.0, 1.0), (0.0, 1.0), (0.0, 0.1), (0.1, 1.0), (0.25, 0.5)]),
    st.integers(1, 23),
    st.integers(0, 3),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fault_17_every_document_is_used_as_often_as_repeat_and_sample_say(
    tmp_path_factory, files, repeat, sample, shards, seed
):
    corpus = write_corpus(tmp_path_factory.mktemp("c"), files)
    source = planned(corpus, repeat, sample, "web", seed, shards)
    found = Counter(use for own in uses_in(source, shards) for use in own)
    assert found == made.uses_of(source)
    if sample == (0.0, 1.0):
        whole = Counter(
            {(file, at): int(repeat) for file, ats in corpus.positions.items() for at in ats}
        )
        once_more = Counter((file, at) for file, at, _ in found.elements())
        once_more.subtract(whole)
        assert set(once_more.values()) <= ({0, 1} if repeat % 1 else {0})


@given(
    FILES,
    st.sampled_from([1.0, 2.5, 0.3]),
    st.sampled_from([(0.0, 1.0), (0.2, 0.7)]),
    st.integers(1, 40),
)
@settings(max_examples=60)
def test_slices_neither_overlap_nor_leave_a_gap_and_give_each_shard_its_share(
    tmp_path_factory, files, repeat, sample, shards
):
    corpus = write_corpus(tmp_path_factory.mktemp("c"), files)
    source = planned(corpus, repeat, sample, shards=shards)
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    weights, readers = {}, dict[int, set[int]]()
    order = []
    for b in range(shards):
        share = 0
        for piece, use, lo, hi, weight in source.taken(b, shards, source.places(b, shards)):
            assert 0 <= lo < hi <= weight
            taken.setdefault((piece, use), []).append((lo, hi))
            weights[piece, use] = weight
            order.append((use, piece))
            readers.setdefault(piece, set()).add(b)
            share += hi - lo
        assert share == (b + 1) * source.weight // shards - b * source.weight // shards
    for key, ranges in taken.items():
        assert ranges[0][0] == 0 and ranges[-1][1] == weights[key]
        assert all(a[1] == b[0] for a, b in zip(ranges[:-1], ranges[1:], strict=True))
    assert set(taken) == {(p, u) for p in range(len(source.pieces)) for u in range(source.uses)}
    for piece, found in readers.items():
        assert source.shards_of(np.array([piece]), shards).tolist() == sorted(found)
    every = source.shards_of(np.arange(len(source.pieces)), shards).tolist()
    assert every == sorted(set().union(*readers.values()))
    # the uses follow one another, each in its own keyed order
    seen = list(dict.fromkeys(order))
    assert seen == [
        (use, int(piece))
        for use in range(source.uses)
        for piece in source.order(range(use, use + 1))[0]
    ]


def test_sources_end_together_and_every_shard_holds_each_one_s_share_of_the_text(tmp_path):
    sources = []
    for name, files in (
        ("big", [(".jsonl", 900, 1), (".parquet", 400, 2)]),
        ("small", [(".jsonl", 90, 3)] + [(".txt", 3, i) for i in range(40)]),
    ):
        sources.append(planned(write_corpus(tmp_path / name, files), 1.0, name=name, shards=10))
    for source in sources:
        counts = [len(own) for own in uses_in(source, 10)]
        assert min(counts) > 0 and counts[-1] > 0
        sizes = [
            sum(hi - lo for _, _, lo, hi, _ in source.taken(b, 10, source.places(b, 10)))
            for b in range(10)
        ]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seeds", [(0, 0), (1, 99)])
def test_two_sample_intervals_part_the_corpus_whatever_seed_and_source_name(tmp_path, seeds):
    corpus = write_corpus(
        tmp_path, [(".jsonl", 300, 0), (".parquet", 200, 1), (".jsonl.zst", 200, 2), (".txt", 1, 3)]
    )
    held_out = planned(corpus, 1.0, (0.0, 0.1), "held-out", seeds[0], 2)
    training = planned(corpus, 1.0, (0.1, 1.0), "training", seeds[1], 5)
    first = {(name, position) for own in uses_in(held_out, 2) for name, position, _ in own}
    rest = {(name, position) for own in uses_in(training, 5) for name, position, _ in own}
    everything = {
        (name, position) for name, positions in corpus.positions.items() for position in positions
    }
    assert first.isdisjoint(rest) and first | rest == everything
    assert 0.05 * len(everything) < len(first) < 0.15 * len(everything)


@pytest.mark.long
def test_a_fractional_repeat_takes_its_part_of_every_length_and_of_all_bytes(tmp_path):
    texts = ["x" * int(100 * 3000 ** ((i * 0.618034) % 1)) for i in range(300)]
    made.write_lines(tmp_path / "d0" / "a.jsonl", texts)
    sizes = np.array([len(text) + len('{"text": ""}') for text in texts])
    at = dict(zip(np.cumsum([0, *(sizes + 1)])[:-1].tolist(), range(300), strict=True))
    part, used = 0.3, np.zeros((200, 300), np.bool_)
    for seed in range(200):
        source = planned(Corpus(tmp_path, {}), part, seed=seed)
        used[seed, [at[position] for own in uses_in(source, 3) for _, position, _ in own]] = True
    # Every document with the same probability, short or long.
    by_class = [used[:, np.frexp(sizes.astype(float))[1] == bits].mean() for bits in range(8, 19)]
    assert np.abs(np.array(by_class) - part).max() < 0.03
    assert np.abs(used.mean(0) - part).max() < 5 * math.sqrt(part * (1 - part) / 200)
    # Of the bytes, far nearer to the part than documents by coins.
    assert abs((used @ sizes / sizes.sum()).mean() - part) < 0.01
    by_coins = math.sqrt(part * (1 - part) * (sizes.astype(float) ** 2).sum()) / sizes.sum()
    assert (used @ sizes / sizes.sum()).std() < by_coins / 2


@pytest.mark.long
@pytest.mark.parametrize("ending", sorted(ENDINGS))
def test_a_fraction_is_the_same_however_many_shards_begin_inside_a_piece(tmp_path, ending):
    write = ENDINGS[ending]
    texts = made.texts(200, mean_bytes=500)
    for k in range(20 if ending == ".txt" else 1):
        write(
            tmp_path / f"d{k:02d}{ending}",
            texts[10 * k : 10 * k + 10] if ending == ".txt" else texts,
        )
    found = [
        Counter(
            use
            for own in uses_in(
                planned(Corpus(tmp_path, {}), 1.4, shards=shards, step=1 << 8), shards
            )
            for use in own
        )
        for shards in (1, 2, 7, 31)
    ]
    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) > (20 if ending == ".txt" else 200)


def test_each_use_has_its_own_order_of_pieces(tmp_path):
    source = planned(write_corpus(tmp_path, [(".parquet", 700, 0)]), 3.0)
    orders = source.order(range(3)).tolist()
    assert len({tuple(order) for order in orders}) == 3 and all(
        sorted(o) == list(range(100)) for o in orders
    )
    other = planned(write_corpus(tmp_path / "x", [(".parquet", 700, 0)]), 3.0, seed=1)
    assert other.order(range(1))[0].tolist() != orders[0]


def test_a_line_file_of_many_pieces_is_cut_at_lines(tmp_path):
    line = b'{"text": "' + b"x" * 4000 + b'"}\n'
    count = 2 * PIECE_BYTES // len(line) + 300
    made.write(tmp_path / "d0" / "a.jsonl", line * count)
    corpus = Corpus(tmp_path, {"d0/a.jsonl": [i * len(line) for i in range(count)]})
    source = planned(corpus, shards=7)
    assert len(source.pieces) == 3 and every(source).bytes.sum() == len(line) * count
    found = Counter(use for own in uses_in(source, 7) for use in own)
    assert found == Counter(
        ("d0/a.jsonl", position, 0) for position in corpus.positions["d0/a.jsonl"]
    )


# Text files


@pytest.mark.long
@given(
    st.lists(st.sampled_from([0, 0, 1, 7, 300, 5000]), min_size=1, max_size=60), st.integers(1, 30)
)
@settings(max_examples=40)
def test_small_text_files_share_pieces_and_each_is_in_one_shard_though_some_are_empty(
    tmp_path_factory, sizes, shards
):
    folder = tmp_path_factory.mktemp("t")
    made.write_texts(folder / "x", ["a" * size for size in sizes])
    corpus = Corpus(folder, {f"d{i:04d}.txt": [0] for i in range(len(sizes))})
    source = planned(corpus, shards=shards)
    assert len(source.pieces) == 1 and every(source).files.tolist() == [len(sizes)]
    found = Counter(use for own in uses_in(source, shards) for use in own)
    assert found == Counter((name, 0, 0) for name in (f.name for f in source.files))


def test_text_files_are_grouped_to_about_a_piece(tmp_path):
    for i, size in enumerate([PIECE_BYTES - 10, 5, 5, 1, 2 * PIECE_BYTES, 0, 10]):
        made.write(tmp_path / f"{i}.txt", b"a" * size)
    source = planned(Corpus(tmp_path, {}))
    assert every(source).files.tolist() == [3, 1, 1, 2]
    assert every(source).file.tolist() == [0, 3, 4, 5]
    found = [use for own in uses_in(source, 5) for use in own]
    assert sorted(name for name, _, _ in found) == [f"{i}.txt" for i in range(7)]


def test_a_text_file_between_others_keeps_its_own_piece(tmp_path):
    corpus = write_corpus(
        tmp_path, [(".txt", 2, 0), (".jsonl", 20, 1), (".txt", 2, 2), (".txt", 2, 3)]
    )
    for name in list(corpus.positions):  # one folder, so that the order is that of the numbers
        os.rename(tmp_path / name, tmp_path / name.split("/")[1])
    source = planned(Corpus(tmp_path, {}))
    assert every(source).files.tolist() == [1, 1, 2]
    assert len([use for own in uses_in(source, 4) for use in own]) == 23


def test_an_empty_file_of_another_format_between_text_files_takes_none_of_them_away(tmp_path):
    for name in ("a.txt", "c.txt", "d.txt"):
        made.write(tmp_path / name, b"text")
    for name in ("b.jsonl", "bb.jsonl.gz"):
        made.write(tmp_path / name, b"")
    source = planned(Corpus(tmp_path, {}))
    assert every(source).files.tolist() == [1, 2]
    assert sorted(name for own in uses_in(source, 2) for name, _, _ in own) == [
        "a.txt",
        "c.txt",
        "d.txt",
    ]


# Empty and odd sources


def test_a_source_without_documents_gives_nothing(tmp_path):
    corpus = write_corpus(tmp_path, [(".jsonl", 0, 0), (".jsonl.zst", 0, 0), (".parquet", 0, 0)])
    source = planned(corpus, shards=3)
    assert [use for own in uses_in(source, 3) for use in own] == []


def test_the_weight_of_a_use_is_the_text_that_is_kept(tmp_path):
    corpus = write_corpus(tmp_path, [(".jsonl", 500, 0)])
    size = (tmp_path / "d0/f000.jsonl").stat().st_size
    assert planned(corpus).weight == size
    assert planned(corpus, 2.0).weight == 2 * size
    assert abs(planned(corpus, 2.5).weight - 2.5 * size) < 2
    assert abs(planned(corpus, 1.0, (0.25, 0.5)).weight - size / 4) < 2
    assert planned(corpus, ratios={"jsonl": 512}).weight == size // 2


def test_step_bytes_is_a_power_of_two_that_gives_16_steps_a_shard_within_bounds():
    assert step_bytes(0, 1) == step_bytes(10_000, 5) == 1 << 14
    assert step_bytes(1 << 40, 1) == 1 << 20
    for stored in (1 << 22, 5_000_000, 100_000_000):
        for shards in (1, 3, 17):
            step = step_bytes(stored, shards)
            assert step & (step - 1) == 0 and 1 << 14 <= step <= 1 << 20
            assert step in (1 << 14, 1 << 20) or step * 16 <= stored // shards < step * 32


# find_files


def source_of(*paths, **values):
    return Source(name="web", paths=paths, **values)


@pytest.mark.parametrize(
    "patterns, prefix",
    [
        (["/a/b/c.jsonl"], "/a/b"),
        (["/a/b/*.jsonl"], "/a/b"),
        (["/a/b/*/c.jsonl", "/a/b/d/e.jsonl"], "/a/b"),
        (["/a/x/*.jsonl", "/a/y/*.jsonl"], "/a"),
        (["/a/**/*.jsonl"], "/a"),
        (["/a/b?/c.jsonl"], "/a"),
        (["/*.jsonl"], "/"),
        (["/a/b.jsonl", "/c/d.jsonl"], "/"),
    ],
)
def test_the_fixed_prefix_is_the_longest_folder_before_any_wildcard(patterns, prefix):
    assert fixed_prefix(patterns) == prefix


def test_files_are_named_relative_to_the_prefix_and_sorted_bytewise(tmp_path):
    for name in ("z.jsonl", "a/b.jsonl", "a-b.jsonl", "é.jsonl", "B.jsonl", "a/c/d.jsonl"):
        made.write_lines(tmp_path / name, ["x"])
    prefix, files = find_files(source_of("**/*.jsonl"), 4, tmp_path, None)
    assert prefix == str(tmp_path)
    assert [file.name for file in files] == [
        "B.jsonl",
        "a-b.jsonl",
        "a/b.jsonl",
        "a/c/d.jsonl",
        "z.jsonl",
        "é.jsonl",
    ]
    assert {(file.source, file.size, file.pieces) for file in files} == {(4, 14, 1)}


def test_a_file_named_twice_counts_once_and_hidden_files_do_not(tmp_path):
    for name in ("a.jsonl", "b.jsonl", ".hidden.jsonl", ".folder/c.jsonl"):
        made.write_lines(tmp_path / name, ["x"])
    _, files = find_files(source_of("*.jsonl", "a.jsonl", "**/*.jsonl"), 0, tmp_path, None)
    assert [file.name for file in files] == ["a.jsonl", "b.jsonl"]


def test_a_name_with_wildcard_characters_that_exists_is_that_file(tmp_path):
    made.write_lines(tmp_path / "a[1].jsonl", ["x"])
    _, files = find_files(source_of("a[1].jsonl"), 0, tmp_path, None)
    assert [file.name for file in files] == ["a[1].jsonl"]


def test_brackets_in_the_recipe_s_own_folder_are_no_wildcards(tmp_path):
    for folder in ("run[1]", "run1"):
        made.write_lines(tmp_path / folder / "data" / "a.jsonl", ["x"])
    base = tmp_path / "run[1]"
    for prefix in (None, str(base / "data")):
        found = find_files(source_of("data/*.jsonl"), 0, base, prefix)
        assert found[0] == str(base / "data") and [file.name for file in found[1]] == ["a.jsonl"]


def test_moved_files_keep_their_names(tmp_path):
    for place in ("old", "new"):
        made.write_lines(tmp_path / place / "x" / "a.jsonl", ["x"])
    source = source_of(str(tmp_path / "old" / "**" / "*.jsonl"))
    prefix, files = find_files(source, 0, Path("/"), str(tmp_path / "new"))
    assert prefix == str(tmp_path / "new") and files == find_files(source, 0, Path("/"), None)[1]


def test_what_names_no_file_is_refused_with_where_it_was_looked_for(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        SourceError, match=r"source 'web': x.jsonl: no such file \(looked for .*/x.jsonl\)"
    ):
        find_files(source_of("x.jsonl"), 0, tmp_path, None)
    with pytest.raises(
        SourceError,
        match=r"source 'web': \*.jsonl matches no file \(looked for .*\n.*--source web=FOLDER",
    ):
        find_files(source_of("*.jsonl"), 0, tmp_path, None)
    with pytest.raises(
        SourceError, match=r"folder/ is a folder\nhint: give its files, as in folder/\*\*/\*.jsonl"
    ):
        find_files(source_of("folder/"), 0, tmp_path, None)


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    made.write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")), b"{}")
    with pytest.raises(
        SourceError, match=r"b'\\xff.jsonl' is not valid UTF-8\nhint: rename the file"
    ):
        find_files(source_of("*.jsonl"), 0, tmp_path, None)


@pytest.mark.long
def test_splits_are_counted_once_per_pass_and_a_pass_counts_as_256_at_least():
    few, many = (
        SimpleNamespace(uses=3, pieces=range(255)),
        SimpleNamespace(uses=2, pieces=range(999)),
    )
    assert pieces_of_all_uses([few, many]) == 3 * 256 + 2 * 999
