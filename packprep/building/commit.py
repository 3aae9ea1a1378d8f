"""Shards that are committed, and the receipts that say which are done.

A shard is done iff its receipt parses, carries the plan's digest, and the shard and rejects files have its sizes; the receipt
is written last. A second commit of a shard compares digests and changes nothing.
"""

from typing import Any

from packprep.building.files import write_error
from packprep.building.job import Job
from packprep.building.output import Output
from packprep.building.work import Made
from packprep.dataset import shard as shard_format
from packprep.dataset.json_files import (
    FORMAT,
    VERSION,
    Later,
    as_stored,
    decode,
    encode,
    newer_version,
    receipt_name,
    rejects_name,
    shard_name,
    with_defaults,
)
from packprep.digests import digest_of, digest_of_buffers
from packprep.errors import BuildError, DatasetError, PackprepError, PlanError

_RECEIPT_KEYS = {
    "format", "version", "plan_digest", "shard", "file", "rows", "segments", "tokens", "bytes", "digest",
    "rejects", "text_digests", "ledger",
}  # fmt: skip
LATER: Later = {"": {}, "rejects": {}}
"""The keys that joined later."""

REJECTS_KEYS = {"file", "bytes", "digest", "documents"}


def read_receipt(out: Output, shard: int) -> tuple[dict[str, Any], bytes] | None:
    """(receipt, its bytes) as it stands; None if there is none or it does not parse. PlanError for one that a newer version
    wrote."""
    name = receipt_name(shard)
    try:
        data = out.read(name)
        receipt = decode(data, out.place(name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DatasetError:
        return None
    except OSError as error:
        raise BuildError(f"{out.place(name)}: {error.strerror}; see to it and run the same command again") from None
    if not isinstance(receipt, dict) or not receipt.keys() >= _RECEIPT_KEYS:
        return None
    if receipt["format"] != FORMAT or receipt["version"] != VERSION or receipt["shard"] != shard:
        return None
    rejects = receipt["rejects"] if isinstance(receipt["rejects"], dict) else {}
    for found, known, later in ((receipt, _RECEIPT_KEYS, LATER[""]), (rejects, REJECTS_KEYS, LATER["rejects"])):
        if known <= found.keys() and (unknown := found.keys() - known - later.keys()):
            raise PlanError(f"{out.place(name)}: {newer_version(min(unknown))}")
    return with_defaults(receipt, LATER), data


def _can_be_gone_on_with(receipt: dict[str, Any]) -> bool:
    """Whether what publication reads of a receipt has its types; who damaged it may have left it canonical."""
    rejects = receipt["rejects"]
    return (
        all(type(receipt[key]) is int and receipt[key] >= 0 for key in ("rows", "segments", "tokens", "bytes"))
        and (rejects is None or (isinstance(rejects, dict) and rejects.keys() >= REJECTS_KEYS))
        and isinstance(receipt["ledger"], dict)
    )


def done_receipt(out: Output, shard: int, plan_digest: str) -> tuple[dict[str, Any], bytes] | None:
    """(receipt, its bytes) of a shard that is done; None if it is not."""
    found = read_receipt(out, shard)
    if found is None or found[0]["plan_digest"] != plan_digest:
        return None
    receipt = found[0]
    rejects = receipt["rejects"]
    if not _can_be_gone_on_with(receipt):
        return None
    sizes = [(shard_name(shard), receipt["bytes"])] + ([(rejects_name(shard), rejects["bytes"])] if rejects else [])
    for name, size in sizes:
        if out.size(name) != size:
            return None
    return found


def encode_rejects(made: Made) -> bytearray:
    """The rejects file of a shard: one JSON record a line; empty if all documents were used."""
    data = bytearray()
    for record in made.reading.rejected.in_order():
        data += encode(record)
    return data


def commit_shard(out: Output, job: Job, shard: int, made: Made) -> dict[str, Any]:
    """Write a shard, its rejects, then its receipt; gives the receipt.

    If the shard is done already, nothing is written: BuildError with both digests where they differ.
    """
    try:
        buffers = shard_format.encode(made.arrays)
        rejects = encode_rejects(made)
        receipt = {
            "format": FORMAT,
            "version": VERSION,
            "plan_digest": job.digest,
            "shard": shard,
            "file": shard_name(shard),
            "rows": len(made.arrays["row_offsets"]) - 1,
            "segments": len(made.arrays["segment_key"]),
            "tokens": sum(source["tokens"]["used"] for source in made.ledger["sources"].values()),
            "bytes": sum(memoryview(buffer).nbytes for buffer in buffers),
            "digest": digest_of_buffers(buffers),
            "rejects": None,
            "text_digests": made.reading.text_digests,
            "ledger": made.ledger,
        }
        if rejects:
            receipt["rejects"] = {
                "file": rejects_name(shard),
                "bytes": len(rejects),
                "digest": digest_of(rejects),
                "documents": len(made.reading.rejected),
            }
        if _stands(out, job, receipt):
            return receipt
        out.write_whole(shard_name(shard), buffers)
        if rejects:
            out.write_whole(rejects_name(shard), [rejects])
        else:
            out.remove(rejects_name(shard))
        if not _stands(out, job, receipt):  # an upload takes its time: another build may have been faster
            out.write_whole(receipt_name(shard), [encode(as_stored(receipt, LATER))])
        return receipt
    except PackprepError:
        raise
    except OSError as error:
        raise write_error(out.place(shard_name(shard)), error) from error


def _stands(out: Output, job: Job, receipt: dict[str, Any]) -> bool:
    """Whether a shard is done, and with this receipt; BuildError where it is done with another."""
    shard = receipt["shard"]
    standing = done_receipt(out, shard, job.digest)
    if standing is not None and standing[0] != receipt:
        raise BuildError(
            f"{shard_name(shard)}: made again with digest {receipt['digest']} and it stands with "
            f"{standing[0]['digest']}: the input files changed under the build, or two builds differ; "
            "begin anew in another folder and compare"
        )
    return standing is not None
