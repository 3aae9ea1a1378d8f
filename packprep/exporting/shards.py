"""The shards of a dataset that is exported: near, one at a time, and each compared with its digest first."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from packprep.building.ledger import is_ledger
from packprep.building.output import Nearby
from packprep.dataset.json_files import MANIFEST_NAME, as_stored, shard_name
from packprep.dataset.manifest import LATER, Manifest, read_manifest
from packprep.dataset.shard import Shard, shard_of
from packprep.digests import digest_of_file, own_digest
from packprep.errors import DatasetError


class ShardToExport(NamedTuple):
    """One shard to export."""

    number: int

    def __str__(self) -> str:
        return f"export of shard {self.number}"


def sound_manifest(near: Nearby) -> Manifest:
    """The manifest of a published dataset, brought near; DatasetError if it is not as it was written."""
    near.bring(MANIFEST_NAME)
    manifest = read_manifest(near.folder)
    own = own_digest(as_stored(manifest, LATER))
    if own != manifest["digest"]:
        raise DatasetError(
            f"{near.out.place(MANIFEST_NAME)}: it carries the digest {manifest['digest']} and its own is {own}: it was "
            "changed or damaged after it was written; put it back"
        )
    sources, tasks = ([entry["name"] for entry in entries] for entries in (manifest["sources"], manifest["tasks"]))
    if not is_ledger(manifest["ledger"], sources, tasks):
        raise DatasetError(
            f"{near.out.place(MANIFEST_NAME)}: its ledger has not the keys and counts of a ledger; put the right file back"
        )
    return manifest


@contextmanager
def sound_shard(near: Nearby, manifest: Manifest, number: int) -> Iterator[Shard]:
    """A shard, here while this lasts; DatasetError unless its bytes are those that the manifest names."""
    name, entry = shard_name(number), manifest["shards"][number]
    with near.brought(name):
        path = near.folder / name
        try:
            digest = digest_of_file(path)
        except OSError as error:
            raise DatasetError(f"{path}: {error.strerror}; nothing can be exported without it: put it back") from None
        if digest != entry["digest"]:
            raise DatasetError(
                f"{path}: its digest is {digest} and the manifest's {entry['digest']}: it is damaged, and nothing is "
                "exported from it. `packprep verify` says what is wrong; build it again"
            )
        yield shard_of(path, manifest, number)


def drawn_tasks(manifest: Manifest) -> list[dict[str, Any]]:
    """The tasks of which the dataset has segments."""
    counted = manifest["ledger"].get("tasks", {})
    return [dict(task) for task in manifest["tasks"] if counted.get(task["name"], {}).get("segments", 1)]
