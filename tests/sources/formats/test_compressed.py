"""packprep.sources.formats.compressed: steps, members, frames, damage."""

import gzip
import random
import struct
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.errors import SourceError
from packprep.sources.formats.compressed import Decoders, decompressed
from tests.sources.formats.parts import COMPRESS, part_of, read_all, write

NOISE = random.Random(0).randbytes(200_000)
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"


def blocks(path, compression, step_bytes):
    return list(decompressed(str(path), path.stat().st_size, compression, step_bytes))


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize("step_bytes", [1000, 1 << 14, 1 << 20])
def test_blocks_tile_the_stream_and_steps_ascend(tmp_path, compression, step_bytes):
    data = NOISE + b"a" * 5_000_000 + NOISE
    path = write(tmp_path, "a", COMPRESS[compression](data))
    found = blocks(path, compression, step_bytes)
    assert b"".join(block.data for block in found) == data
    labels = [block.label for block in found]
    assert labels == sorted(labels) and set(labels) == set(
        range(-(-path.stat().st_size // step_bytes))
    )
    position = 0
    for block in found:
        assert block.position == position
        position += len(block.data)


def test_a_step_has_what_comes_out_while_it_is_fed(tmp_path):
    import zlib

    packed = gzip.compress(NOISE + b"ab" * 100_000)
    path = write(tmp_path, "a", packed)
    decoder = zlib.decompressobj(wbits=31)
    expected = [decoder.decompress(packed[i : i + 50_000]) for i in range(0, len(packed), 50_000)]
    found = blocks(path, "gzip", 50_000)
    assert [
        b"".join(b.data for b in found if b.label == step) for step in range(len(expected))
    ] == expected


@pytest.mark.long
@settings(max_examples=60)
@given(
    st.lists(
        st.binary(max_size=3000) | st.sampled_from([b"abc " * 500, bytes(20_000), NOISE[:9999]]),
        max_size=8,
    ),
    st.integers(0, 9),
    st.integers(0, 4),
    st.sampled_from([None, zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH]),
    st.sampled_from([1, 7, 100, 4096]),
)
def test_at_every_step_gzip_has_given_what_zlib_gives(
    tmp_path_factory, pieces, level, strategy, flush, step_bytes
):
    """The law says which bytes are of which step by zlib; another library might hold some back."""
    compressor, packed = zlib.compressobj(level, zlib.DEFLATED, 31, 8, strategy), b""
    for piece in pieces:
        packed += compressor.compress(piece) + (b"" if flush is None else compressor.flush(flush))
    packed += compressor.flush()
    expected, decoder, at = {}, zlib.decompressobj(wbits=31), 0
    for step in range(-(-len(packed) // step_bytes)):
        at += len(decoder.decompress(packed[step * step_bytes : (step + 1) * step_bytes]))
        expected[step] = at
    ends = {}
    for block in blocks(write(tmp_path_factory.getbasetemp(), "a", packed), "gzip", step_bytes):
        ends[block.label] = block.position + len(block.data)
    assert ends == expected


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_one_call_gives_bounded_output(tmp_path, compression):
    path = write(tmp_path, "a", COMPRESS[compression](bytes(200 << 20)))
    found = blocks(path, compression, 1 << 20)
    assert sum(len(block.data) for block in found) == 200 << 20
    assert max(len(block.data) for block in found) <= (
        1 << 20 if compression == "gzip" else 16 << 20
    )


@pytest.mark.parametrize("step_bytes", [1, 10, 1 << 20])
def test_members_frames_and_paddings_are_one_stream(tmp_path, step_bytes):
    parts = [b"abc", b"", b"def" * 100, b"g"]
    path = write(tmp_path, "a", b"".join(map(gzip.compress, parts)) + bytes(512))
    assert b"".join(block.data for block in blocks(path, "gzip", step_bytes)) == b"".join(parts)
    compress = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress
    path = write(tmp_path, "a", SKIPPABLE + SKIPPABLE.join(map(compress, parts)) + SKIPPABLE)
    assert b"".join(block.data for block in blocks(path, "zstd", step_bytes)) == b"".join(parts)


def test_a_zstd_file_with_a_long_window_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(
        window_log=28, enable_ldm=True, write_content_size=False
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = write(tmp_path, "a", compressor.compress(NOISE) + compressor.flush())
    assert b"".join(block.data for block in blocks(path, "zstd", 1 << 20)) == NOISE


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_truncated_file_is_an_error_at_whatever_byte(tmp_path, compression):
    packed = COMPRESS[compression](b"abcdefgh" * 3 + NOISE[:30])
    for n in range(1, len(packed)):
        path = write(tmp_path, "a", packed[:n])
        with pytest.raises(
            SourceError, match=rf"{path}: .* ends at byte {n} .*\nhint: fetch the file again"
        ):
            blocks(path, compression, 1 << 20)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_corrupt_file_is_an_error_that_names_the_bytes(tmp_path, compression):
    packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(NOISE))
    if compression == "gzip":
        packed = bytearray(gzip.compress(NOISE))
    packed[100_000:100_010] = bytes(10)
    path = write(tmp_path, "a", packed)
    with pytest.raises(
        SourceError,
        match=rf"{path}: corrupt {compression} data between bytes \d+ and \d+ of {len(packed)}",
    ):
        blocks(path, compression, 1 << 14)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize("junk", [b"junk that is not compressed", bytes(100)])
def test_a_file_that_is_not_compressed_is_an_error(tmp_path, compression, junk):
    with pytest.raises(SourceError, match="corrupt|truncated"):
        blocks(write(tmp_path, "a", junk), compression, 1 << 14)


def test_a_stream_of_zlib_is_no_gzip(tmp_path):
    with pytest.raises(SourceError, match="corrupt"):
        blocks(write(tmp_path, "a", zlib.compress(b"abc")), "gzip", 1 << 14)


def test_junk_after_the_last_member_is_an_error(tmp_path):
    for compression, compress in COMPRESS.items():
        if compression:
            with pytest.raises(SourceError, match="corrupt"):
                blocks(
                    write(tmp_path, "a", compress(b"abc") + b"this is junk"), compression, 1 << 14
                )


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_the_last_part_of_a_truncated_line_file_fails_and_earlier_ones_do_not(tmp_path, ending):
    data = b"".join(b'{"text": "%d"}\n' % random.Random(i).getrandbits(800) for i in range(2000))
    packed = COMPRESS["gzip" if ending == ".gz" else "zstd"](data)
    path = write(tmp_path, "a.jsonl" + ending, packed[: len(packed) // 2])
    assert read_all(part_of(path, 0, 0, 1, 4, 1024))[1] == []
    with pytest.raises(SourceError, match="truncated"):
        read_all(part_of(path, 0, 3, 4, 4, 1024))


def by_hand(packed, step_bytes):
    """Each step's bytes of a zstd file, fed byte by byte: what comes out does not depend on how a
    step is fed."""
    steps = []
    frame = None
    for at in range(len(packed)):
        if at % step_bytes == 0:
            steps.append(b"")
        if frame is None or frame.eof:
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        steps[-1] += frame.decompress(packed[at : at + 1])
    return steps


@pytest.mark.parametrize("seed", range(12))
def test_every_step_of_zstd_has_the_bytes_that_the_rule_says(tmp_path, seed):
    rng = random.Random(seed)
    packed = b""
    for _ in range(rng.randrange(1, 8)):
        data = rng.choice([rng.randbytes, bytes, lambda n: b"abcdefg " * (n // 8)])(
            rng.choice([0, 9, 3000, 400_000])
        )
        size, checksum = rng.random() < 0.5, rng.random() < 0.5
        packed += zstandard.ZstdCompressor(
            write_content_size=size, write_checksum=checksum
        ).compress(data)
        packed += SKIPPABLE * rng.choice([0, 0, 1, 3])
    path = write(tmp_path, "a", packed)
    for step_bytes in (rng.randrange(1, 40), rng.randrange(400, 700), 1 << 14):
        found = [b""] * -(-len(packed) // step_bytes)
        for block in blocks(path, "zstd", step_bytes):
            found[block.label] += block.data
        assert found == by_hand(packed, step_bytes)


def test_decoders_keep_as_many_files_and_indexes_as_their_capacity_and_no_more(tmp_path):
    paths = [str(write(tmp_path, f"{i}.gz", COMPRESS["gzip"](NOISE))) for i in range(3)]
    decoders, found = Decoders(capacity=2), []

    def use(i: int) -> tuple[bool, bool]:
        """Return whether the cursor and the index of file i were kept."""
        cursor, before = decoders.take(paths[i], len(NOISE), "gzip", 1 << 10, 0), len(found)
        is_known = cursor in seen
        seen.append(cursor)
        decoders.give_back(cursor)
        assert decoders.fact(paths[i], lambda: found.append(i) or i) == i
        return is_known, len(found) == before

    seen = []
    assert [use(i) for i in (0, 1, 0, 1)] == [(False, False)] * 2 + [(True, True)] * 2
    assert use(2) == (False, False)
    assert [use(1), use(0)] == [(True, True), (False, False)]
