"""What the largest corpora ask of a plan, of a process that starts, and of the list of shards:
seconds and memory.

python benchmarks/scale.py                                  1 000 000 files, 60 TB; 50 000 shards
python benchmarks/scale.py --files 10000 --file-bytes 60MB --shards 500

The files are made up: their listing and what a look into them gives. All else is the code that a
build runs. Each part has a process of its own, so that its memory is its own.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import packprep
from packprep.building import commit, distributed, planning, run
from packprep.building.plan import open_plan, stored_plan, stored_plan_and_digest
from packprep.building.plan_form import LATER
from packprep.dataset.manifest import read_manifest
from packprep.documents import calibration, sample
from packprep.documents.sample import Looked
from packprep.format.digests import own_digest
from packprep.format.json_files import as_stored, encode, receipt_name, shard_name
from packprep.recipe import parse_size, read_recipe
from packprep.sources.files import Files
from packprep.storage import folder_at
from packprep.verification.faults import Faults
from packprep.verification.on_disk import check_listing

ENDINGS = (".jsonl", ".jsonl.zst", ".parquet")
GROUP_BYTES = 100_000_000  # of a Parquet file's row groups
TEXTS = ["A text of a corpus, as a look into one of its files gives it. " * 40] * 50


def listing(count: int, file_bytes: int, ending: str) -> Callable[..., tuple[str, Files]]:
    """In place of find_files: `count` files in folders of 100, all of one size."""

    def find(source: Any, index: int, base: Path, prefix: str | None) -> tuple[str, Files]:
        names = [
            f"crawl-{i // 10_000:04d}/part-{i // 100 % 100:02d}/{i:08d}{ending}"
            for i in range(count)
        ]
        sizes = np.full(count, file_bytes, np.int64)
        groups = (
            None
            if ending != ".parquet"
            else np.full(count, max(1, file_bytes // GROUP_BYTES), np.int64)
        )
        return "/corpus", Files(index, names, sizes, source.format, "/corpus", groups)

    return find


def looks(files: sample.Sampling, *_: Any, **options: Any) -> Looked:
    """In place of what calibration looks at in files."""
    source = files.source
    held = sample.held_by(source, files.pieces)
    sizes = np.array([len(text.encode()) for text in TEXTS], np.int64)
    text_bytes = held * (1 if source.formats[0] == ("jsonl", "") else 3)
    return Looked(
        held, text_bytes, 0.0, sizes, sizes / 4, np.full(len(sizes), text_bytes / sizes.sum())
    )


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Files that are not there are not looked at."""
    found = {name: looks for name in ("look_at_lines", "look_at_pieces")}
    with mock.patch.multiple(
        calibration, first_looks=lambda *_: [(TEXTS, [None] * len(TEXTS))], **found
    ):
        yield


class Laps:
    """Seconds and memory of the steps of one process."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._last = time.perf_counter()

    def lap(self, what: str, note: str = "") -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        seconds = time.perf_counter() - self._last
        self.lines.append({"what": what, "seconds": seconds, "peak_mib": peak, "note": note})
        self._last = time.perf_counter()


def inputs_of() -> planning.Inputs:
    """What a recipe of one source finds."""
    table = {"seq_length": 4096, "tokenizer": "bytes", "sources": [{"paths": ["/corpus/**/*"]}]}
    return planning.look_up(
        read_recipe({**table, "tasks": [{"preset": "ul2r"}]}, Path("/corpus")), {}
    )


def planned(folder: Path, count: int, file_bytes: int, ending: str, laps: Laps) -> None:
    """The plan as the first process makes it."""
    with (
        mock.patch.object(planning, "find_files", listing(count, file_bytes, ending)),
        mock.patch.object(planning, "first_look", lambda *arguments: None),
        simulated(),
    ):
        found = inputs_of()
        laps.lap("look up files and tokenizer", "listing simulated")
        values = planning.make_plan(found)
    laps.lap(
        "make the plan",
        f"{values['shards']:,} shards of {values['shard_text_bytes'] >> 20} MiB of text",
    )
    data = encode(values)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_bytes(data)
    (folder / "tokenizer.json").write_bytes(found.vocabulary.tokenizer_json)
    laps.lap("write it", f"{len(data) / 1e6:.1f} MB")
    del values, data
    written = stored_plan_and_digest(folder)
    assert written is not None and planning.differences(found, written[0]) == []
    laps.lap("read and compare it")


def starting(folder: Path, laps: Laps) -> None:
    """A process that joins the build: its plan, and what its first shards read."""
    plan = open_plan(folder)
    laps.lap("open the plan", f"{sum(len(source.files) for source in plan.sources):,} files")
    list(plan.sources[0].taken(0, plan.shards, plan.sources[0].places(0, plan.shards)))
    laps.lap("pieces of its first shard", f"{len(plan.sources[0].pieces):,} pieces")
    parts = 0
    for shard in range(plan.shards // 2, min(plan.shards // 2 + 100, plan.shards)):
        parts += sum(1 for _ in plan.sources[0].slices(shard, plan.shards))
    laps.lap("slices of 100 shards", f"{parts:,} slices")


def publishing(folder: Path, shards: int, laps: Laps) -> None:
    """A dataset of `shards` shards: receipts as a real build of one writes them, and no bytes of
    rows."""
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "a.jsonl").write_text('{"text": "One document."}\n' * 1000)
    table = {
        "seq_length": 512,
        "tokenizer": "bytes",
        "sources": [{"paths": ["a.jsonl"]}],
        "tasks": [{"preset": "ul2r"}],
    }
    recipe, out = (
        read_recipe({**table, "output": {"shard_text_bytes": 1 << 20}}, source),
        folder / "out",
    )
    run.build(recipe, out, Silent())
    values = stored_plan(out)
    receipt = commit.read_receipt(folder_at(out), 0)
    assert values is not None and receipt is not None
    (out / "dataset.json").unlink()
    values = as_stored({**values, "shards": shards}, LATER)
    (out / "plan.json").write_bytes(encode({**values, "digest": own_digest(values)}))
    plan = open_plan(out)
    laps.lap("build one shard")
    for b in range(shards):
        own = {
            **receipt[0],
            "shard": b,
            "file": shard_name(b),
            "plan_digest": plan.digest,
            "bytes": 0,
        }
        for name, data in ((shard_name(b), b""), (receipt_name(b), encode(own))):
            path = out / name
            if b % 1000 == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    folders = {path.parent for path in out.rglob("*")}
    most = max(sum(1 for _ in path.iterdir()) for path in folders)
    laps.lap(
        "write receipts, unflushed", f"{shards:,} shards, at most {most:,} entries in a folder"
    )
    few = min(200, shards)
    for b in range(few):
        folder_at(out).write(receipt_name(b), [(out / receipt_name(b)).read_bytes()])
    laps.lap(f"flush {few} of them, one by one")
    assert not distributed.status_of(out, 500)["missing"]
    laps.lap("status")
    manifest = commit.publish(folder_at(out), plan)
    assert manifest is not None and len(manifest["shards"]) == shards
    laps.lap("publish", f"dataset.json of {(out / 'dataset.json').stat().st_size / 1e6:.1f} MB")
    assert len(packprep.open_dataset(out)) == manifest["ledger"]["rows"]
    laps.lap("open_dataset")
    faults = Faults()
    check_listing(out, read_manifest(out), faults)
    assert not faults.total
    laps.lap("verify's file listing")


class Silent:
    """A progress that shows nothing."""

    def begin(self, *_: Any) -> None: ...
    def add(self, *_: Any) -> None: ...
    def say(self, _: str) -> None: ...
    def done(self, item: object) -> None: ...
    def end(self) -> None: ...


def measured(part: str, given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The laps of one part, in a process of its own."""
    sizes = ["--files", given.files, "--file-bytes", given.file_bytes, "--shards", given.shards]
    command = [sys.executable, __file__, "--part", part, "--folder", folder, *sizes]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{part}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--file-bytes", type=parse_size, default=60_000_000)
    parser.add_argument("--shards", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, help="where it writes; a temporary folder by itself")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part:
        laps, (kind, _, ending) = Laps(), given.part.partition(":")
        folder = given.folder / (ending or "published")
        if kind == "planning":
            planned(folder, given.files, given.file_bytes, ending, laps)
        elif kind == "starting":
            starting(folder, laps)
        else:
            publishing(folder, given.shards, laps)
        print(json.dumps(laps.lines))
        return
    parts = [f"{kind}:{ending}" for ending in ENDINGS for kind in ("planning", "starting")] + [
        "publishing"
    ]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        results = {part: measured(part, given, Path(folder)) for part in parts}
    if given.json:
        print(json.dumps(results))
        return
    for part, lines in results.items():
        print(f"\n{part:<32}{'seconds':>9}{'peak MiB':>10}")
        for line in lines:
            print(
                f"  {line['what']:<30}{line['seconds']:>9.2f}{line['peak_mib']:>10.0f} "
                f" {line['note']}".rstrip()
            )


if __name__ == "__main__":
    main()
