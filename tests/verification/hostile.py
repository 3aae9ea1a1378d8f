"""What must hold of any bytes in a dataset's files: a loader and `verify` end soon, in little
memory, and raise nothing but what packprep raises on purpose."""

import contextlib
import gc
import json
import os
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packprep.dataset.loader import Dataset, open_dataset
from packprep.dataset.rows import AHEAD, COLUMNS, MORE_COLUMNS
from packprep.errors import PackprepError

MORE_MEMORY = 1 << 29
"""Bytes that a child may map beyond what it has when it is forked."""
PARTS = [
    "tokens",
    "labels",
    "segment_ids",
    "loss_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "segments",
    "position_ids",
    "prefix_ends",
    "loss_weights",
    "n_segments",
    "n_tokens",
    "max_seqlen",
]
MOST_ROWS = 40


def read_all(directory: Path, io: str = "mmap") -> int:
    """Read rows, batches and samples of a dataset in every way that the loader has; gives how many
    calls were refused."""
    refused = 0

    @contextlib.contextmanager
    def counted():
        nonlocal refused
        try:
            yield
        except PackprepError as error:
            assert str(error)
            refused += 1

    with counted():
        dataset = open_dataset(directory, io=io)
        if len(dataset) <= MOST_ROWS:
            rows = list(range(len(dataset)))
        else:
            rows = [*range(MOST_ROWS // 2), *range(len(dataset) - MOST_ROWS // 2, len(dataset))]
        _read_rows(dataset, rows, counted)
        _read_batches(dataset, rows, counted)
    return refused


def _read_rows(dataset: Dataset, rows: list[int], counted) -> None:
    for i in rows:
        for part in PARTS:
            with counted():
                getattr(dataset.row(i), part)
        with counted():
            for _ in dataset.row(i).micro_sequences(dataset.seq_length):
                pass


def _read_batches(dataset: Dataset, rows: list[int], counted) -> None:
    with counted():
        _ = dataset.task_params
    one_distance = [
        name for name in (*COLUMNS, *MORE_COLUMNS) if name not in AHEAD or AHEAD[name][1] == 2
    ]
    for columns in (COLUMNS, *[(name,) for name in one_distance], ("prefix_ends", "block_lengths")):
        for begin in range(0, len(rows), 8):
            with counted():
                dataset.batch(rows[begin : begin + 8], columns=columns)
    for begin in range(0, len(rows), 8):
        own = rows[begin : begin + 8]
        with counted():
            dataset.batch(
                own, columns=("tokens", "loss_mask", "loss_weights"), epochs=[1] * len(own)
            )
    with counted():
        dataset.with_loss_on(task=dataset.tasks[0]["name"]).batch(rows[:8])
    with counted():
        batches = dataset.batches(4, epochs=2, redraw=True)
        for _ in range(4):
            next(batches, None)


def in_child(work: Callable[[], Any], seconds: int = 120, more: int = MORE_MEMORY) -> Any:
    """What `work` gives (JSON), done in a forked process that may map `more` bytes and run so long;
    AssertionError with the traceback of whatever it raised, or the signal that ended it."""
    gc.collect()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(read)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            with open("/proc/self/statm") as file:
                mapped = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + more, mapped + more))
            result = {"value": work()}
            status = 0
        except BaseException:  # handed to the parent, which raises it
            result = {"error": traceback.format_exc()}
        with open(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(status)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    _, how = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(how), (
        f"the child ended by signal {os.WTERMSIG(how)} (14: after {seconds} s)"
    )
    result = json.loads(text)
    assert "error" not in result, result["error"]
    return result["value"]
