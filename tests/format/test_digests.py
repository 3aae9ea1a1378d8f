import numpy as np
import pytest
import xxhash

from packprep.format.digests import digest_of, digest_of_buffers, digest_of_file


def test_digests_are_the_xxh3_128_of_the_bytes():
    assert digest_of(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest_of(b"abc") == xxhash.xxh3_128_hexdigest(b"abc")


@pytest.mark.parametrize("size", [0, 1, 100, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 9 << 20])
def test_a_file_s_digest_is_that_of_its_bytes(tmp_path, size):
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "x").write_bytes(data)
    assert digest_of_file(tmp_path / "x") == digest_of(data)


def test_buffers_have_the_digest_of_their_concatenation():
    buffers = [b"ab", memoryview(b"cd"), np.arange(5, dtype=np.uint8).data, b""]
    assert digest_of_buffers(buffers) == digest_of(b"abcd\x00\x01\x02\x03\x04")
    assert digest_of_buffers([]) == digest_of(b"")
