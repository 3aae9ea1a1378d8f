import gzip
import itertools
import json
import math
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard

from packprep import clock
from packprep.building.planning import look_up
from packprep.conversations.media import MediaPlace
from packprep.conversations.supervision import Conversation, supervise
from packprep.conversations.training import tokenize_supervised
from packprep.documents import calibration
from packprep.documents import sample as sampling
from packprep.documents.calibration import FIRST_CHARACTERS, Estimates, calibrate, first_texts
from packprep.documents.joining import Separators
from packprep.documents.tally import Tally
from packprep.recipe import DocumentKeys, read_recipe
from packprep.sources.formats import FORMATS, Batch, Choice, IdLists, Reject
from packprep.sources.slices import PlannedSource
from packprep.tokenizer.engines import candidates, engine_facts, load_engine
from tests import made, tokens_made
from tests.golden.builds import SOURCES


def looked_up(folder, pattern, seed=0, **of_source):
    table = made.table(pattern, seed=seed)
    table["sources"][0].update(of_source)
    inputs = look_up(read_recipe(table, folder), {})
    unresolved = {"ratios": {}, "repeat": 1.0, "step_bytes": 1 << 14}
    return inputs, PlannedSource(
        inputs.recipe.sources[0], 0, inputs.prefixes[0], inputs.files[0], 0, unresolved, seed
    )


def estimate(folder, pattern, seed=0, precise=False, **of_source):
    inputs, source = looked_up(folder, pattern, seed, **of_source)
    engine = load_engine(
        engine_facts(candidates("auto", inputs.vocabulary)[0]), inputs.vocabulary, "text"
    )
    return calibrate(source, engine, inputs.vocabulary, DocumentKeys(), precise=precise)


def text_bytes(texts):
    return sum(len(text.encode()) for text in texts)


def all_tokens(found):
    return float((found.lengths * found.length_weights).sum())


@pytest.mark.parametrize(
    "ending, kind", [("jsonl", "jsonl"), ("jsonl.gz", "jsonl.gzip"), ("jsonl.zst", "jsonl.zstd")]
)
def test_a_small_source_is_measured_whole(tmp_path, ending, kind):
    texts = made.texts(300)
    path = made.write_lines(tmp_path / f"a.{ending}", texts)
    found = estimate(tmp_path, f"a.{ending}")
    assert found.ratios == {kind: round(1024 * text_bytes(texts) / path.stat().st_size)}
    as_planned = path.stat().st_size * found.ratios[kind] / 1024 * found.tokens_per_byte
    assert as_planned == pytest.approx(text_bytes(texts)) == all_tokens(found)
    assert found.document_bytes == text_bytes(texts) / 300 and found.sampling_error == 0
    assert sorted(found.lengths.tolist()) == sorted(len(text.encode()) for text in texts)


def test_parquet_and_text_files_have_ratios_of_their_own(tmp_path):
    texts = made.texts(200)
    made.write_parquet(tmp_path / "a.parquet", texts)
    made.write_texts(tmp_path, texts[:20])
    made.write_lines(tmp_path / "b.jsonl", texts[:50])
    found = estimate(tmp_path, "*")
    assert set(found.ratios) == {"parquet", "text", "jsonl"} and found.ratios["text"] == 1024
    assert found.ratios["jsonl"] < 1024
    assert all_tokens(found) == text_bytes(texts + texts[:20] + texts[:50])


@pytest.mark.long
@pytest.mark.parametrize("precise, within", [(False, 0.02), (True, 0.003)])
def test_a_large_source_is_estimated_from_a_part_of_it(tmp_path, monkeypatch, precise, within):
    monkeypatch.setattr(sampling, "READ_BYTES", 12 << 20)
    texts = made.texts(6000, mean_bytes=4000)
    path = made.write_lines(tmp_path / "a.jsonl", texts)
    assert path.stat().st_size > 16 << 20
    found = estimate(tmp_path, "a.jsonl", precise=precise)
    assert len(found.lengths) < 6000
    assert abs(all_tokens(found) / text_bytes(texts) - 1) < min(within, 4 * found.sampling_error)
    assert 0 < found.sampling_error < within
    again = estimate(tmp_path, "a.jsonl", precise=precise)
    assert again.ratios == found.ratios and np.array_equal(again.lengths, found.lengths)
    # A document stands for others in proportion to its chance of being looked at.
    assert found.length_weights.sum() == pytest.approx(6000, rel=0.25)
    longer = np.array([len(text.encode()) for text in texts]) > 8000
    weighed = found.length_weights[found.lengths > 8000].sum() / found.length_weights.sum()
    assert weighed == pytest.approx(longer.mean(), rel=0.25)


FILES = {
    "jsonl.gz": made.write_lines,
    "jsonl.zst": made.write_lines,
    "parquet": lambda path, texts: made.write_parquet(path, texts, 100),
    "arrow": lambda path, texts: made.write_arrow(path, texts, 100),
}


@pytest.mark.parametrize("ending", FILES)
def test_precise_figures_are_exact_where_all_is_read_and_what_files_hold_is_noted(tmp_path, ending):
    alike, other = made.texts(900, mean_bytes=1500), ["x" * 3000] * 900
    FILES[ending](tmp_path / f"a.{ending}", alike)
    FILES[ending](tmp_path / f"b.{ending}", other)
    inputs, source = looked_up(tmp_path, f"*.{ending}")
    engine = load_engine(
        engine_facts(candidates("auto", inputs.vocabulary)[0]), inputs.vocabulary, "text"
    )
    found = calibrate(source, engine, inputs.vocabulary, DocumentKeys(), precise=True)
    assert all_tokens(found) == text_bytes(alike + other) and found.sampling_error == 0
    source.ratios = found.ratios
    pieces = [source.pieces.of_file(i) for i in (0, 1)]
    held = [int(source.weights()[p.start : p.stop].sum()) for p in pieces]
    if ending != "parquet":  # a dictionary holds the repeated text once
        assert held[0] / sum(held) == pytest.approx(
            text_bytes(alike) / text_bytes(alike + other), rel=0.01
        )
    assert sum(held) * found.tokens_per_byte == pytest.approx(text_bytes(alike + other), rel=0.001)


@pytest.mark.parametrize(
    "ending, member",
    [("jsonl.gz", gzip.compress), ("jsonl.zst", zstandard.ZstdCompressor().compress)],
)
def test_files_that_are_not_read_are_as_large_as_their_heads_and_trailers_say(
    tmp_path, monkeypatch, ending, member
):
    monkeypatch.setattr(sampling, "READ_BYTES", 1)
    texts = [made.texts(300, seed, mean_bytes=1000) for seed in range(4)]
    for i, some in enumerate(texts):
        made.write_lines(tmp_path / f"{i}.{ending}", some)
    # Of many members the last says little; what that file holds is told from its bytes.
    lines = [
        json.dumps({"text": text}).encode() + b"\n" for text in made.texts(300, 9, mean_bytes=1000)
    ]
    made.write(tmp_path / f"many.{ending}", b"".join(map(member, lines)))
    inputs, source = looked_up(tmp_path, f"*.{ending}")
    engine = load_engine(
        engine_facts(candidates("auto", inputs.vocabulary)[0]), inputs.vocabulary, "text"
    )
    calibrate(source, engine, inputs.vocabulary, DocumentKeys(), precise=True)
    for i, some in enumerate(texts):
        assert source.files.piece_bytes[i][0] == pytest.approx(text_bytes(some), rel=0.03)
    assert source.files.piece_bytes[4][0] > 100_000


@pytest.mark.long
@pytest.mark.alike(4)
@pytest.mark.parametrize(
    "ending, within", [("jsonl", 0.05), ("jsonl.zst", 0.15), ("jsonl.gz", 0.15)]
)
@pytest.mark.parametrize("seed", range(3))
def test_few_very_long_documents_are_estimated_by_their_own_bytes(tmp_path, ending, within, seed):
    texts = made.texts(40, seed, mean_bytes=300_000)
    path = made.write_lines(tmp_path / f"a.{ending}", texts)
    (ratio,) = estimate(tmp_path, f"a.{ending}", seed).ratios.values()
    assert abs(ratio / 1024 * path.stat().st_size / text_bytes(texts) - 1) < within


def test_a_source_without_text_has_harmless_figures(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", [])
    made.write_lines(tmp_path / "b.jsonl", [""])
    found = estimate(tmp_path, "*.jsonl")
    assert found.ratios == {"jsonl": 1024} and found.tokens_per_byte == 1.0
    assert found.sampling_error == 0.0 and not len(found.lengths)


@pytest.mark.long
def test_a_document_limits_what_is_trained_if_the_weights_of_its_tokens_differ():
    lists = IdLists(np.arange(5), np.array([0, 2, 2, 5]))
    for weights, differs in (
        ([1, 1, 0.5, 0.5, 0.5], False),
        ([1, 0, 0.5, 0.5, 0.5], True),
        ([1, 1, 1, 1, 0], True),
    ):
        batch = Batch([], None, None, [], {}, lists, {}, np.array(weights))
        assert sampling._has_different_weights(batch) == differs
        for part in (batch._replace(token_weights=None), batch._replace(tokens=None)):
            assert not sampling._has_different_weights(part)


def test_a_position_of_a_file_is_in_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "_BACK", 2)
    monkeypatch.setattr(sampling, "WINDOW_BYTES", 3)
    lines, expected = (b"\xef\xbb\xbfabc", b"", b"de", b"f" * 40, b"last"), []
    for line in lines:
        begin, text = len(expected), line.removeprefix(b"\xef\xbb\xbf")
        whole = str(tmp_path / "a"), begin, begin + len(line) + 1, text
        places = range(len(line) + 1)
        expected += [(whole, min(place / max(len(text), 1), 1.0)) for place in places]
    path, size = made.write(tmp_path / "a", b"\n".join(lines)), len(expected) - 1
    other = sampling._Line("b", 0, 99, b"x")
    for last in (None, other):
        found = [sampling._lines_at(str(path), size, [at], last)[0] for at in range(size)]
        assert found == expected[:-1]
    found = sampling._lines_at(str(path), size, range(size), None)
    assert found == expected[:-1] and len({id(line) for line, _ in found}) == len(lines)
    again = sampling._lines_at(str(path), size, [size - 1, 0], found[-1][0])
    assert again[0][0] is found[-1][0] and again[1] == expected[0]


@pytest.mark.long
def test_a_long_text_is_tokenized_in_a_window_at_its_position(monkeypatch):
    monkeypatch.setattr(calibration, "TOKENIZED_CHARACTERS", 4)
    text, spans = "abcdefghij", ((0, 2),)
    chat, document = Conversation(text, spans, chat=True), Conversation(text, spans)
    for position, window in ((0.0, "abcd"), (0.5, "defg"), (1.0, "ghij")):
        for conversation in (None, document, Separators(3)):
            place = sampling.Place(text, conversation, position)
            assert calibration._window_of(place) == (window, None)
        found = calibration._window_of(sampling.Place(text, chat, position))
        assert found == (window, Conversation(window, (), chat=True))
    for short, position in ((text[:8], 0.5), (text, -1.0)):
        for conversation in (None, document, chat):
            place = sampling.Place(short, conversation, position)
            assert calibration._window_of(place) == (short, conversation)
        assert calibration._window_of(sampling.Place(short, Separators(3), position))[1] is None


def test_blank_and_too_large_lines_are_neither_documents_nor_rejects(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_LINE_BYTES", 9)

    def decode(line):
        return ("malformed_json", "why") if line.startswith(b"!") else line.decode()

    lines, rejects = (b"", b" \t", b"123456789", b"1234567890", b"!23"), []
    found = [sampling._document(decode, line, None, rejects, i) for i, line in enumerate(lines)]
    assert found == [None, None, ("123456789", None), None, None]
    assert rejects == [Reject(0, 4, "malformed_json", "why")]


@pytest.mark.long
def test_the_fields_of_the_first_record_are_listed_for_a_message(tmp_path):
    def listed(record):
        made.write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + json.dumps(record).encode() + b"\n{")
        return calibration._fields_in_words(looked_up(tmp_path, "a.jsonl")[1])

    record = {"m": {"a": "x", "b": None}, "text": [1], "é" + "k" * 40: 2.5}
    cut = "\\xe9" + "k" * 39
    assert listed(record) == (
        f"'text' (a list), '{cut}' (a number), 'm.a' (a string), 'm.b' (null)"
    )
    many = listed({f"f{i}": 0 for i in range(51)}).split(", ")
    assert len(many) == 50 and many[-1] == "'f49' (a number)"
    assert listed([1]) == ""
    made.write_parquet(tmp_path / "a.parquet", ["x"], 1)
    assert calibration._fields_in_words(looked_up(tmp_path, "a.parquet")[1]) == ""


def used_by(low, high, repeat):
    """A source of one piece, as far as the error of its tokens depends on it."""
    return SimpleNamespace(source=SimpleNamespace(sample=(low, high)), repeat=repeat, pieces=[0])


@pytest.mark.parametrize("kept, repeat", [(1.0, 0.4), (1.0, 2.5), (0.3, 1.0), (0.6, 0.7)])
def test_the_error_counts_in_that_chance_decides_which_documents_are_used(tmp_path, kept, repeat):
    texts = made.texts(400, mean_bytes=1500)
    made.write_lines(tmp_path / "a.jsonl", texts)
    found = estimate(tmp_path, "a.jsonl")
    sizes = np.array([len(text.encode()) for text in texts])
    used = []
    for seed in range(400):
        sampled = np.random.default_rng(seed).random(len(sizes)) < kept
        choice = Choice(
            np.uint64(seed),
            int(repeat % 1 * 2**32),
            lambda file, positions, sampled=sampled: sampled,
        )
        once_more = choice(0, np.arange(len(sizes)), sizes)
        used.append(float((sampled * int(repeat) + once_more) @ sizes))
    assert np.mean(used) == pytest.approx(kept * repeat * sizes.sum(), rel=0.02)
    assert found.error_of(used_by(0.0, kept, repeat)) == pytest.approx(
        np.std(used) / np.mean(used), rel=0.35
    )


def test_all_documents_once_have_the_error_of_the_estimate_alone(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(50))
    found = estimate(tmp_path, "a.jsonl")
    assert found.error_of(used_by(0.0, 1.0, 2.0)) == found.sampling_error


def test_the_error_is_that_of_its_formula():
    columns = [2, 4, 10, 6, 7], [3.0, 5.0, 2.0, 4.0, 0.5], [2, 3, 20, 18, 100]
    lengths, weights, sizes = (np.array(column) for column in columns)
    rows = list(zip(*columns, strict=True))
    total = sum(n * w for n, w, _ in rows)
    found = Estimates({}, 1.0, 1.0, False, False, 0.1, lengths, weights, sizes)
    kept, repeat, chance, pieces = 0.5, 1.75, 0.1875, 2
    variance = kept * (1 - kept) * repeat**2 * sum(w * n**2 for n, w, _ in rows)
    for bits in (2, 5, 7):
        of_class = [(n, w) for n, w, size in rows if size.bit_length() == bits]
        own = sum(w for _, w in of_class)
        mean = sum(n * w for n, w in of_class) / own
        within = sum(w * (n - mean) ** 2 for n, w in of_class) / own
        expected = kept * own / pieces * chance
        variance += pieces * (min(expected, 0.25) * mean**2 + expected * within)
    source = used_by(0.25, 0.75, repeat)
    source.pieces = [0] * pieces
    error = math.hypot(0.1, math.sqrt(variance) / (kept * repeat * total))
    assert found.error_of(source) == pytest.approx(error, rel=1e-9)

    numbers = [1.5, 2.0, 0.25, 1.0, 3.75]
    found = replace(found, numbers=np.array(numbers), pass_shares=[1.0])
    variance = sum(
        w / r * n**2 * (kept * (1 - kept) * r**2 + kept * (r % 1) * (1 - r % 1))
        for (n, w, _), r in zip(rows, numbers, strict=True)
    )
    error = math.hypot(0.1, math.sqrt(variance) / (kept * total))
    assert found.error_of(source) == pytest.approx(error, rel=1e-9)


def test_the_error_of_a_source_is_that_of_the_part_that_is_sampled(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(50))
    found = estimate(tmp_path, "a.jsonl")
    assert (
        found.error_of(used_by(0.5, 0.75, 1.5))
        == found.error_of(used_by(0.0, 0.25, 1.5))
        > found.sampling_error
    )


def test_the_first_texts_are_documents_cut_to_some_characters_together(tmp_path):
    texts = made.texts(600, mean_bytes=900)
    made.write_lines(tmp_path / "a.jsonl", texts[:300])
    made.write_parquet(tmp_path / "b.parquet", texts[300:])
    made.write(tmp_path / "c.jsonl.zst", b"")
    *whole, last = first_texts(looked_up(tmp_path, "*")[1])
    assert sum(map(len, whole)) + len(last) == FIRST_CHARACTERS
    assert (
        len(whole) > 100
        and set(whole) <= set(texts)
        and any(text.startswith(last) for text in texts)
    )


def test_texts_that_fill_the_first_characters_exactly_are_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "FIRST_CHARACTERS", 20)
    made.write_lines(tmp_path / "a.jsonl", ["0123456789"] * 3)
    assert list(first_texts(looked_up(tmp_path, "a.jsonl")[1])) == ["0123456789"] * 2


def test_all_texts_of_a_small_source_are_its_first_and_a_source_of_tokens_has_none(tmp_path):
    texts = made.texts(20, mean_bytes=300)
    made.write_lines(tmp_path / "a.jsonl", texts)
    assert sorted(first_texts(looked_up(tmp_path, "a.jsonl")[1])) == sorted(texts)
    tokens_made.write_parquet(tmp_path / "t.parquet", [[1, 2], [3]])
    source = looked_up(tmp_path, "t.parquet", format="tokens")[1]
    assert not list(first_texts(source))


def test_the_sample_s_lengths_are_those_of_its_documents(tmp_path):
    texts = made.texts(200)
    made.write_lines(tmp_path / "a.jsonl", texts)
    found = estimate(tmp_path, "a.jsonl")
    # bytes are its tokens
    assert sorted(found.lengths.tolist()) == sorted(len(text.encode()) for text in texts)
    assert found.length_weights.tolist() == [1.0] * len(texts)


@pytest.mark.parametrize(
    "ending, ratio, document_bytes, first, tokens",
    [
        ("jsonl", 986, 338.778589, [849, 1744, 168, 1744], 21983),
        ("txt", 1024, 316.097551, [339] * 4, 943190),
    ],
)
def test_what_is_looked_at_stays_what_it_is(
    tmp_path, monkeypatch, ending, ratio, document_bytes, first, tokens
):
    """The plan holds these figures: places that are drawn in another way would be another plan of
    the same inputs."""
    for name, value in (("WHOLE_BYTES", 1 << 10), ("WINDOWS", 8), ("PIECE_TEXT_BYTES", 1 << 12)):
        monkeypatch.setattr(sampling, name, value)
    texts = made.texts(1000, 5)
    made.write_texts(tmp_path, texts)
    for i in range(20):
        made.write_lines(tmp_path / f"{i}.jsonl", texts[i::20])
    found = estimate(tmp_path, f"*.{ending}", seed=7)
    said = (
        [*found.ratios.values()],
        round(found.document_bytes, 6),
        found.lengths[:4].tolist(),
        int(found.lengths.sum()),
    )
    assert said == ([ratio], document_bytes, first, tokens)


SMALL = {
    "WHOLE_BYTES": 1 << 10,
    "PRECISE_WHOLE_BYTES": 1 << 11,
    "WINDOWS": 4,
    "WINDOW_BYTES": 1 << 10,
    "ROUNDS": 3,
    "PIECES": 2,
    "PIECE_TEXT_BYTES": 1 << 11,
    "READ_BYTES": 1 << 12,
    "SPACING": 1 << 6,
    "HELD_DOCUMENTS": 20,
    "_STEP_BYTES": 1 << 8,
}
"""Limits by which the small golden sources are sampled as large ones are."""
FROZEN = {
    ("web.jsonl", False): ([988], [], (9, 47, 3), (12, 14684), 46.63, (0.99987, 355.44, 0.016181)),
    ("*.jsonl.gz", False): ([1856], [], (32, 155, 2), (29, 6024), 155.18, (1.0, 162.44, 0.7223)),
    ("web.jsonl.zst", False): (
        [4448],
        [],
        (20, 101, 1),
        (69, 13821),
        101.3,
        (0.99281, 159.12, 0.0),
    ),
    ("web.arrow", False): (
        [506],
        [17976],
        (9, 115, 2),
        (32, 5490),
        114.77,
        (1.0119, 77.46, 0.40796),
    ),
    ("books.parquet", False): (
        [793],
        [14752],
        (20, 41, 2),
        (50, 19123),
        41.34,
        (1.0088, 276.3, 0.035611),
    ),
    ("notes/*.txt", False): ([1024], [], (7, 7, 1), (64, 21873), 6.04, (1.0, 330.45, 0.0)),
    ("spans.jsonl", False): ([789], [], (15, 12, 4), (16, 2932), 12.1, (0.9997, 160.68, 0.021117)),
    ("media.jsonl", False): ([512], [], (15, 45, 4), (16, 2071), 44.52, (0.99969, 103.91, 0.12083)),
    ("pair.bin", False): ([1882], [], (7, 35, 1), (7, 720), 35.11, (0.24763, 415.43, 0.0)),
    ("rows.parquet", False): ([1024], [16808], (26, 30, 2), (26, 3615), 30.22, (0.25, 556.15, 0.0)),
    ("web.jsonl", True): ([988], [], (9, 47, 3), (12, 14684), 46.63, (0.99987, 355.44, 0.016181)),
    ("*.jsonl.gz", True): (
        [1024],
        [16544, 3039, 15142],
        (85, 143, 2),
        (186, 186398),
        142.94,
        (0.99744, 242.93, 0.40481),
    ),
    ("web.jsonl.zst", True): (
        [1024],
        [16609],
        (65, 65, 1),
        (286, 327406),
        62.19,
        (0.99847, 267.06, 0.0),
    ),
    ("web.arrow", True): (
        [898],
        [17976],
        (18, 96, 2),
        (225, 68583),
        95.68,
        (1.0022, 164.85, 0.050038),
    ),
    ("books.parquet", True): (
        [898],
        [14752],
        (32, 42, 2),
        (224, 92058),
        42.06,
        (0.99777, 307.52, 0.0056521),
    ),
    ("notes/*.txt", True): ([1024], [], (7, 7, 1), (6, 1995), 6.0, (1.0, 285.0, 0.0)),
    ("spans.jsonl", True): ([791], [], (12, 12, 1), (198, 37172), 11.85, (1.0013, 164.52, 0.0)),
    ("media.jsonl", True): ([532], [], (19, 44, 5), (20, 2641), 44.23, (1.0005, 108.76, 0.097838)),
    ("pair.bin", True): ([1882], [], (30, 30, 1), (30, 3616), 30.0, (0.24798, 486.13, 0.0)),
    ("rows.parquet", True): (
        [1021],
        [16808],
        (30, 30, 2),
        (30, 4172),
        30.11,
        (0.2499, 556.27, 0.0035241),
    ),
}
"""(files, precise) → the figures of a sample.

They are the ratios, the recorded sizes of files, (sampled documents, all documents, windows),
(sampled lengths, their sum), the number of documents that the lengths represent, and (tokens per
byte, bytes per document, error).
"""


SECONDS = {
    ("web.jsonl", False): (0.002813, 0.0002043),
    ("*.jsonl.gz", False): (0.001015, 0.000332),
    ("web.jsonl.zst", False): (0.0009557, 7.183e-05),
    ("web.arrow", False): (0.004807, 0.0003686),
    ("books.parquet", False): (0.000816, 0.0001055),
    ("notes/*.txt", False): (0.001504, 4.572e-05),
    ("spans.jsonl", False): (0.006573, 0.001427),
    ("media.jsonl", False): (0.00962, 0.001931),
    ("pair.bin", False): (0.0006879, 0.0),
    ("rows.parquet", False): (0.0002766, 0.0),
    ("web.jsonl", True): (0.002813, 0.0002043),
    ("*.jsonl.gz", True): (0.0002043, 1.07e-05),
    ("web.jsonl.zst", True): (0.0001204, 3.05e-06),
    ("web.arrow", True): (0.001208, 2.923e-05),
    ("books.parquet", True): (0.0003946, 2.168e-05),
    ("notes/*.txt", True): (0.00401, 0.003509),
    ("spans.jsonl", True): (0.001538, 0.0005135),
    ("media.jsonl", True): (0.009199, 0.001894),
    ("pair.bin", True): (0.0001372, 0.0),
    ("rows.parquet", True): (0.0002396, 0.0),
}
"""Seconds to read and to tokenize a byte, if each stage of a sample takes a second."""


def test_a_sample_of_any_format_stays_what_it_is(tmp_path, monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(sampling, name, value)
    shutil.copytree(SOURCES, tmp_path, dirs_exist_ok=True)
    lines = (SOURCES / "web.jsonl").read_bytes().splitlines(keepends=True)
    for i, part in enumerate((lines[:20], lines[20:60])):  # stored, as every zlib does it alike
        made.write(tmp_path / f"{i}.jsonl.gz", gzip.compress(b"".join(part), 0, mtime=0))
    rendered = partial(supervise, template=None, settings=DocumentKeys())
    # Each stage takes a second, so that the estimated seconds are exact as well.
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    found, seconds = {}, {}
    for files, precise in FROZEN:
        as_tokens = {"format": "tokens"} if files == "rows.parquet" else {}
        inputs, source = looked_up(tmp_path, files, 7, **as_tokens)
        engine = load_engine(
            engine_facts(candidates("reference", inputs.vocabulary)[0]), inputs.vocabulary, "text"
        )
        estimates = calibrate(
            source, engine, inputs.vocabulary, DocumentKeys(), rendered, precise=precise
        )
        tally, rates = estimates.tally, (estimates.tokens_per_byte, estimates.document_bytes)
        found[files, precise] = (
            [*estimates.ratios.values()],
            [sum(sizes) for sizes in source.files.piece_bytes.values()],
            (tally.looked_at, round(tally.totals[0]), len(tally.units)),
            (len(estimates.lengths), int(estimates.lengths.sum())),
            round(float(estimates.length_weights.sum()), 2),
            tuple(float(f"{rate:.5g}") for rate in (*rates, estimates.sampling_error)),
        )
        rates = (estimates.read_s_per_byte, estimates.tokenize_s_per_byte)
        seconds[files, precise] = tuple(float(f"{rate:.4g}") for rate in rates)
    assert found == FROZEN
    assert seconds == SECONDS


def test_no_more_texts_are_held_than_may_be(monkeypatch):
    """Beyond HELD_DOCUMENTS texts count, and are forgotten."""
    monkeypatch.setattr(sampling, "HELD_DOCUMENTS", 2)
    looks = [
        (["aaa", "b"], [None, None], [1.0, 2.0]),
        (["cccc"], [None], [1.0]),
        (["d"], [None], [0.5]),
    ]
    assert sampling._some(iter(looks)) == ((["aaa", "b"], [None, None], [1.0, 2.0]), 4 / 9)
    assert sampling._some(iter(looks[1:])) == ((["cccc", "d"], [None, None], [1.0, 0.5]), 1.0)


@pytest.mark.parametrize("first", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("held", [1, 3, 4])
def test_no_more_lines_are_decoded_than_may_be_held(monkeypatch, held, first):
    """The result has the fraction of the bytes that are decoded, and the last line may be open."""
    monkeypatch.setattr(sampling, "HELD_DOCUMENTS", held)
    texts = ["a", "bb", "cc", "dddd"]
    lines = first + b"\n".join(json.dumps({"text": text}).encode() for text in texts)
    decode = FORMATS["jsonl"].module.line_decoder("text", None)
    every = sampling.Sampling(None, None, None, None, None, False, None, Tally())
    (found, *_), share = sampling._texts_of(decode, lines, "a.jsonl", every)
    rest = sum(len(json.dumps({"text": text})) + 1 for text in texts[held:])
    assert found == texts[:held] and share == 1 - max(0, rest - 1) / len(lines)


@pytest.mark.parametrize("beside", ["media", "loss_spans"])
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_document_of_many_spans_is_tokenized_once_however_many_places_lie_in_it(
    tmp_path, monkeypatch, beside, ending
):
    count = 20_000
    entries = {
        "media": [
            {"at": i * 3000 // count, "tokens": 2, "ref": "a" * 9, "kind": "image"}
            for i in range(count)
        ],
        "loss_spans": [
            [i * 3000 // count, i * 3000 // count + 1, 1.000000000000000000000000001]
            for i in range(count)
        ],
    }
    lines = (
        json.dumps({"text": "abc" * 1000, "url": "x" * (1 << 20), beside: entries[beside]}).encode()
        + b"\n"
    )
    made.write(tmp_path / f"a.{ending}", gzip.compress(lines) if ending.endswith("gz") else lines)
    table = made.table(f"a.{ending}", tasks=[{"objective": "causal"}])
    table["specials"] = {"missing": "add", "media": {"image": ["<vs>", "<ip>", "<ve>"]}}
    inputs = look_up(read_recipe(table, tmp_path), {})
    unresolved = {"ratios": {}, "repeat": 1.0, "step_bytes": 1 << 14}
    source = PlannedSource(
        inputs.recipe.sources[0],
        0,
        inputs.prefixes[0],
        inputs.files[0],
        0,
        unresolved,
        0,
        kinds=("image",),
    )
    seen = []

    def tokenized(engine, texts, conversations, *more):
        seen.extend(one for one in conversations.values() if len(one.text) == 3000)
        return tokenize_supervised(engine, texts, conversations, *more)

    monkeypatch.setattr("packprep.documents.calibration.tokenize_supervised", tokenized)
    engine = load_engine(
        engine_facts(candidates("reference", inputs.vocabulary)[0]), inputs.vocabulary, "text"
    )
    found = calibrate(
        source,
        engine,
        inputs.vocabulary,
        DocumentKeys(),
        partial(supervise, template=None, settings=DocumentKeys()),
    )
    assert len(seen) == 1 and set(found.lengths.tolist()) == {
        3000 + (4 * count if beside == "media" else 0)
    }


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_lines_of_ids_are_sampled_by_the_bytes_that_were_read(tmp_path, monkeypatch, ending):
    chance = np.random.default_rng(2)
    lists = [chance.integers(0, 256, n).tolist() for n in chance.integers(1, 300, 3000)]
    path = tokens_made.write_lines(tmp_path / f"a.{ending}", lists)
    tokens = sum(map(len, lists))
    monkeypatch.setattr(sampling, "PIECE_TEXT_BYTES", 90_000)
    found = estimate(tmp_path, path.name, format="tokens")
    assert 0 < len(found.lengths) < len(lists) / 2
    assert all_tokens(found) == pytest.approx(tokens, rel=0.05)
    whole = estimate(tmp_path, path.name, precise=True, format="tokens")
    assert all_tokens(whole) == tokens and whole.sampling_error == 0


def test_lines_of_ids_longer_than_what_is_read_of_a_piece_are_sampled_whole(tmp_path, monkeypatch):
    tokens_made.write_lines(tmp_path / "a.jsonl", [[7] * 1_000_000] * 4)
    monkeypatch.setattr(sampling, "PIECES", 1)
    found = estimate(tmp_path, "a.jsonl", format="tokens")
    assert found.lengths.tolist() == [1_000_000] * 4 and all_tokens(found) == 4_000_000


@pytest.mark.long
def test_a_document_counts_its_bytes_and_four_for_each_slot_of_media():
    assert sampling._size("é水", None) == 5
    media = [MediaPlace(at=1, tokens=7, ref="r", kind="image")]
    assert sampling._size("é水", Conversation("é水", ((0, 2),), places=tuple(media))) == 5 + 4 * 7
