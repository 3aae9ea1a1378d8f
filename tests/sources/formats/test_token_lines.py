"""packprep.sources.formats.token_lines: lists of token ids in JSON Lines."""

import json
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.sources.formats import Slice, count_pieces, read, token_lines
from packprep.sources.formats import batch as limits
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.token_masks import MASKS
from tests.sources.formats.parts import COMPRESS, write
from tests.sources.formats.test_megatron import cut_points
from tests.twin import reading

KEYS = token_lines._keys_of("text", Fields())


def parts(path, cuts=(0, 1), piece_bytes=limits.PIECE_BYTES, compression=""):
    size = path.stat().st_size
    for piece in range(count_pieces(str(path), "jsonl_tokens", compression, size, piece_bytes)):
        for lo, hi in zip(cuts[:-1], cuts[1:], strict=True):
            of_file = str(path), 7, size, "jsonl_tokens", compression
            yield Slice(*of_file, piece, lo, hi, cuts[-1], 64, piece_bytes)


def read_all(some_parts, text_key="text", fields=None, **options):
    """Return the documents of parts, (position, ids, weights of the tokens), and their rejects."""
    found, rejects = [], []
    for part in some_parts:
        for batch in read(part, text_key, fields=fields, **options):
            ids, offsets = batch.tokens
            weights = np.ones(len(ids)) if batch.token_weights is None else batch.token_weights
            for i, position in enumerate(batch.positions.tolist()):
                one = slice(*offsets[i : i + 2])
                own = weights[one] * batch.weights.get(i, 1)
                found.append((position, ids[one].tolist(), own.tolist()))
            rejects += [(r.position, r.reason, r.detail) for r in batch.rejects]
    return found, rejects


def read_lines(folder, lines, **options):
    """Return `read_all` of lines in one file."""
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    return read_all(parts(write(folder, "a.jsonl", data)), **options)


id_lists = st.lists(st.integers(0, 2**40) | st.integers(0, 9), max_size=5)


@settings(max_examples=100, deadline=None)
@given(st.lists(id_lists, max_size=25), cut_points, st.integers(1, 90), st.integers(1, 60))
@pytest.mark.parametrize("compression", COMPRESS)
def test_each_line_is_in_exactly_one_part(compression, lists, cuts, piece_bytes, batch_bytes):
    lines = [json.dumps({"x": "é", "tokens": ids}, ensure_ascii=False).encode() for ids in lists]
    data = b"\n".join(lines)
    begins = np.cumsum([0, *[len(line) + 1 for line in lines]]).tolist()
    expected = [(at, ids, [1.0] * len(ids)) for at, ids in zip(begins, lists, strict=False)]
    with tempfile.TemporaryDirectory() as folder:
        path = write(folder, "a.jsonl", COMPRESS[compression](data) if data else b"")
        some_parts = parts(path, cuts, piece_bytes, compression)
        assert read_all(some_parts, batch_bytes=batch_bytes) == (expected, [])
        wanted = read_all(parts(path, cuts, piece_bytes, compression), keep=lambda _, at: at % 2)
        assert wanted[0] == [document for document in expected if document[0] % 2]


NUMBER = "not an integer"
REJECTS = {
    '{"input_ids": [70, 71.0]}': ("not_tokens", f"token 1 is 71.0, {NUMBER}"),
    '{"input_ids": [70.5]}': ("not_tokens", f"token 0 is 70.5, {NUMBER}"),
    '{"input_ids": [7e1]}': ("not_tokens", f"token 0 is 70.0, {NUMBER}"),
    '{"input_ids": [NaN]}': ("not_tokens", f"token 0 is nan, {NUMBER}"),
    '{"input_ids": [70, true]}': ("not_tokens", f"token 1 is true or false, {NUMBER}"),
    '{"input_ids": [70, "71"]}': ("not_tokens", f"token 1 is a string, {NUMBER}"),
    '{"input_ids": [[70, 71]]}': ("not_tokens", f"token 0 is a list, {NUMBER}"),
    '{"input_ids": [70, null]}': ("not_tokens", "token 1 is null"),
    '{"input_ids": null, "tokens": [70]}': ("not_tokens", "the value is null"),
    '{"input_ids": "70 71"}': (
        "not_tokens",
        "the value of 'input_ids' is a string, not a list of token ids",
    ),
    '{"ids": [70], "x": 1}': (
        "not_tokens",
        "no key 'input_ids' or 'tokens'; the line's keys are: 'ids', 'x'",
    ),
    '{"input_ids": [70, 9223372036854775808]}': (
        "id_out_of_range",
        "token 1 has more than 63 bits",
    ),
    '{"input_ids": [-99999999999999999999]}': ("id_out_of_range", "token 0 has more than 63 bits"),
    '{"input_ids": [9223372036854775807]}': ("id_out_of_range", "token 0 has more than 63 bits"),
    '{"input_ids": [-9223372036854775808]}': ("id_out_of_range", "token 0 has more than 63 bits"),
    '{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}': ("too_large", "9 tokens; at most 8"),
    '{"input_ids": [70], "weight": "much"}': ("bad_weight", "weight is 'much'"),
    '{"input_ids": [70], "labels": null}': ("bad_mask", "labels has 0 entries for 1 tokens"),
    '{"input_ids": [70], "labels": 1}': ("bad_mask", "labels is a number, not a list"),
    '{"input_ids": [70], "loss_mask": [null]}': ("bad_mask", "loss_mask: token 0 is null"),
    '{"input_ids": [70], "loss_mask": ["1"]}': (
        "bad_mask",
        "loss_mask: token 0 is a string, not a number",
    ),
    '{"input_ids": [70], "loss_weights": [NaN]}': (
        "bad_mask",
        "token 0: loss_weights is no finite number",
    ),
    '{"input_ids": [70, 71, 72], "labels": [-100, 72, -100]}': (
        "bad_mask",
        "labels are those of the next token",
    ),
    '{"input_ids": [70, 71], "loss_weights": [1, 1e30], "weight": 1e30}': (
        "bad_mask",
        "a token's weight times the document's is not finite in float32",
    ),
    '{"input_ids": [70, 71], "attention_mask": [1]}': (
        "bad_mask",
        "attention_mask has 1 entries for 2 tokens",
    ),
    '{"input_ids": [70, 71': ("malformed_json", "not JSON; the line begins"),
    "[70, 71]": ("malformed_json", "the line is a list, not an object"),
    '{"input_ids": [1], "x": ' + "[" * 300 + "]" * 300 + "}": ("malformed_json", "nested deeper"),
}


def test_a_line_that_is_no_row_is_a_reject_with_its_reason_and_no_other_line_is(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(limits, "MAX_DOCUMENT_TOKENS", 8)
    good = '{"input_ids": [70, 71]}'
    lines = [line for bad in REJECTS for line in (good, bad)]
    bad_bytes = b'{"input_ids": [70], "x": "\xff"}'
    found, rejects = read_lines(tmp_path, [*lines, bad_bytes], fields=Fields())
    assert [ids for _, ids, _ in found] == [[70, 71]] * len(REJECTS)
    wanted = [*REJECTS.values(), ("invalid_utf8", "byte 26 of the line")]
    for (_, reason, detail), (wanted_reason, words) in zip(rejects, wanted, strict=True):
        assert (reason, words in detail) == (wanted_reason, True), (reason, detail, words)
    most = '{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]'
    found, rejects = read_lines(tmp_path, [most + "}", most + ', "x": NaN}'])
    assert [ids for _, ids, _ in found] == [list(range(1, 9))] * 2 and rejects == []


def test_a_mask_says_something_in_the_records_that_have_it(tmp_path):
    lines = [
        '{"input_ids": [1, 2, 3]}',
        '{"labels": [-100, 2, 3], "input_ids": [1,2,3], "tokens": ["a", "b", "c"]}',
        '{"input_ids": [ 1 ,2], "loss_mask": [false, true], "weight": 2}',
        '{"input_ids": [9, 1, 2, 0], "attention_mask": [1, 1.0, 1, 0], "loss_weights": [1, 0.5, 0, 7]}',
        '{"input_ids": [ ], "labels": [], "loss_mask": null}',
        '{"input_ids": [5, 5], "input_ids": [1, 2], "weight": null, "x": "\\ud800"}',
    ]
    found, rejects = read_lines(tmp_path, lines, fields=Fields())
    assert rejects == []
    assert [one[1:] for one in found] == [
        ([1, 2, 3], [1, 1, 1]),
        ([1, 2, 3], [0, 1, 1]),
        ([1, 2], [0, 2]),
        ([9, 1, 2], [1, 0.5, 0]),
        ([], []),
        ([1, 2], [1, 1]),
    ]
    ignored, rejects = read_lines(tmp_path, [*lines, '{"input_ids": [1], "labels": 3}'])
    assert rejects == [] and {w for _, _, weights in ignored for w in weights} == {1}
    named, _ = read_lines(tmp_path, ['{"a\\"b": [4], "input_ids": 1}'], text_key='a"b')
    assert named == [(0, [4], [1.0])]


values = st.sampled_from([0, 1, 1, -100, 5, True, 1.0, 0.5, -2, 2**70, None, float("nan"), "1"])
lists_of_values = st.lists(values, max_size=3) | values


@given(
    st.fixed_dictionaries(
        {},
        optional={name: lists_of_values for name in ("input_ids", "tokens", "weight", *MASKS)},
    )
)
def test_the_fast_way_the_exact_way_and_the_twin_read_a_line_alike(record):
    line = json.dumps(record).encode()
    ways = token_lines._line_decoder(KEYS), lambda line: token_lines._decode_exactly(line, KEYS)
    [fast, exact] = [_of_line(line, way) for way in ways]
    assert fast == exact
    ids, weight, masks = reading._of_line(line, "text")
    is_row = ids is not None and max(map(abs, ids), default=0) < 2**63 - 1
    is_row = is_row and reading.in_float32(1 if weight is None else weight) is not None
    assert fast == (reading._unmasked(ids, masks) if is_row else None)


def _of_line(line, decode):
    """Return the ids and weights of the tokens of a line; None for a reject."""
    lines = token_lines.Lines(line, *np.array([[0], [0], [len(line)]]))
    rows = token_lines._token_rows(lines, decode, {})
    batch = token_lines.batch_of_rows(7, lines.positions, rows)
    if batch.rejects:
        return None
    ids = batch.tokens.ids.tolist()
    if max(map(abs, ids), default=0) >= 2**63 - 1:
        return None
    weights = [1.0] * len(ids) if batch.token_weights is None else batch.token_weights.tolist()
    return ids, weights


def test_lines_give_what_a_table_of_the_same_rows_gives(tmp_path):
    chance = np.random.default_rng(3)
    rows = []
    for i in range(400):
        ids = chance.integers(0, 300, chance.integers(0, 9)).tolist()
        labels = [id if chance.random() < 0.7 else -100 for id in ids]
        mask = [int(label != -100) for label in labels]
        row = {"input_ids": ids, "labels": labels, "loss_mask": mask, "weight": None}
        row["loss_weights"] = chance.choice([0.5, 1, 3], len(ids)).tolist()
        damage = i % 9
        if damage == 1:
            row["input_ids"] = None if i % 2 else [*ids, None]
        elif damage == 2:
            row["labels"] = None if i % 2 else labels[1:]
        elif damage == 3:
            row["loss_mask"] = [1 - one for one in mask]
        elif damage == 4:
            row["weight"] = -1.0 if i % 2 else 0.5
        elif damage == 5:
            row["loss_weights"] = [None] * len(ids) if i % 2 else [-1.0] * len(ids)
        rows.append(row)
    found, rejects = read_lines(tmp_path, map(json.dumps, rows), fields=Fields())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    size = (tmp_path / "a.parquet").stat().st_size
    part = Slice(str(tmp_path / "a.parquet"), 7, size, "parquet_tokens", "", 0, 0, 1, 1, 1)
    of_table, table_rejects = read_all([part], fields=Fields())
    assert [one[1:] for one in found] == [one[1:] for one in of_table]
    assert [one[1:] for one in rejects] == [one[1:] for one in table_rejects]
    assert len(rejects) > 100 and len({detail for *_, detail in rejects}) > 5
