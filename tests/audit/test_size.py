"""Memory of an audit of many tokens and of many documents, in a process of its own."""

import numpy as np
import pytest

from tests.made import run_python

CODE = """
import re
from pathlib import Path
from packprep.audit.report import Request, describe_audit
describe_audit(Request(Path({warm!r}), special_ids=dict(eos=0, vocab_size=60000)))
described = describe_audit(Request(Path({path!r}), special_ids=dict(eos=0, vocab_size=60000)))
# ru_maxrss would be the peak of the process that started this one, if that is higher.
peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(described["documents"], peak_kib * 1024 / 1e6)
"""


def audited(folder, blocks, tokens):
    """The peak memory in MB of an audit of `blocks` blocks of documents of `tokens` tokens."""
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
    documents, megabytes = map(float, done.stdout.split())
    assert documents == blocks * (10_000_000 // tokens)
    return megabytes


@pytest.mark.long
def test_the_memory_of_an_audit_does_not_grow_with_the_tokens(tmp_path):
    of_small = audited(tmp_path, 4, 400)
    assert audited(tmp_path, 20, 400) < min(500, of_small + 100)  # 0.4 GB


@pytest.mark.long
def test_the_hashes_of_many_documents_are_spilled(tmp_path):
    assert audited(tmp_path, 10, 17) < 500  # 5.9 million documents
