"""Memory and time of an audit of many tokens and of many documents, in a process of its own."""

import numpy as np
import pytest

from tests.made import run_python

CODE = """
import resource, time
from pathlib import Path
from packprep.audit.report import Request, describe_audit
describe_audit(Request(Path({warm!r}), special_ids=dict(eos=0, vocab_size=60000)))
begun = time.process_time()
described = describe_audit(Request(Path({path!r}), special_ids=dict(eos=0, vocab_size=60000)))
print(described["documents"], time.process_time() - begun,
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


def audited(folder, blocks, tokens):
    """The documents, CPU seconds and MB of an audit of `blocks` blocks of documents of as many
    tokens."""
    random = np.random.default_rng(0)
    with (folder / "train.bin").open("wb") as file:
        for _ in range(blocks):
            ids = random.integers(1, 60000, (10_000_000 // tokens, tokens), dtype=np.uint16)
            ids[:, -1] = 0
            file.write(ids.tobytes())
    ids[:100].tofile(folder / "warm.bin")
    paths = {"path": str(folder / "train.bin"), "warm": str(folder / "warm.bin")}
    done = run_python(CODE.format(**paths))
    assert done.returncode == 0, done.stderr
    documents, seconds, megabytes = map(float, done.stdout.split())
    assert documents == blocks * (10_000_000 // tokens)
    return seconds, megabytes


@pytest.mark.long
def test_a_gigabyte_of_ids_takes_less_than_10_seconds_and_memory_does_not_grow(tmp_path):
    _, of_small = audited(tmp_path, 4, 400)
    seconds, megabytes = audited(tmp_path, 20, 400)  # 0.4 GB
    assert seconds < 4 and megabytes < min(500, of_small + 100)


@pytest.mark.long
def test_the_hashes_of_many_documents_are_spilled(tmp_path):
    _, megabytes = audited(tmp_path, 10, 17)  # 5.9 million documents
    assert megabytes < 500
