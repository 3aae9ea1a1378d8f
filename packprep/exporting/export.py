"""Export a published dataset to a folder in another tool's format.

    empty ─► .export-begun.json ─► files, each written atomically ─► .export.json only

Both JSON files name the dataset and the form, so that a folder contains only one export. The same
command resumes an interrupted export. A shard is compared with its digest before anything is read
from it.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from packprep.building.ledger import is_ledger
from packprep.building.plan import Plan, lengths_in, open_plan
from packprep.building.processes import Do, in_processes
from packprep.building.removal import REMOVED
from packprep.building.run import Progress
from packprep.dataset.manifest import LATER, Manifest, read_manifest
from packprep.dataset.shard import Shard, shard_of
from packprep.errors import DatasetError, PlanError, RecipeError
from packprep.exporting import EXPORTS, chosen_form, export_module
from packprep.format.digests import digest_of_file, own_digest
from packprep.format.json_files import (
    MANIFEST_NAME,
    PLAN_NAME,
    REMOVED_NAME,
    TOKENIZER_NAME,
    as_stored,
    decode,
    encode,
    shard_name,
)
from packprep.messages import put_line
from packprep.restoring import RestoredDocuments, restored_documents
from packprep.storage import (
    Folder,
    LocalCopy,
    LocalFolder,
    Remote,
    folder_at,
    local_copy,
    refuse_nested,
)

RECEIPT = ".export.json"
BEGUN = ".export-begun.json"
FORMAT, VERSION = "packprep export", 1
LOSS_WEIGHTS = ("refuse", "ignore")
"""Ways to treat weights that a form cannot express."""


class Exporting(NamedTuple):
    """An export in progress. The functions `check` and `write` of an export receive it."""

    dataset: LocalCopy
    manifest: Manifest
    form: str  # one of the export's choices, or "" without choices
    out: Folder
    workers: int  # number of processes that write files; 0 runs in this process
    progress: Progress
    card: Callable[[LocalCopy, str], str] | None = None  # (dataset, usage text) → its data card


class ShardToExport(NamedTuple):
    """One shard to export."""

    number: int

    def __str__(self) -> str:
        return f"export of shard {self.number}"


def export_dataset(
    directory: str | os.PathLike | Folder,
    to: str,
    out: str | os.PathLike | Folder,
    progress: Progress,
    workers: int = 0,
    card: Callable[[LocalCopy, str], str] | None = None,
    loss_weights: str = "refuse",
    **options: str | None,
) -> dict[str, Any]:
    """Export a dataset, or find that `out` already has this export.

    Args:
        directory: The published dataset.
        to: A key of EXPORTS.
        out: Output folder.
        progress: Reports progress and warnings.
        workers: Number of processes. 0 runs in this process.
        card: Returns the data card of a published dataset, as `packprep.inspection.card.card_at`
            does. The Hugging Face export writes it.
        loss_weights: "refuse" raises an error if the export would lose weights that documents give.
            "ignore" gives all trained tokens the same weight.
        options: The export's option, for example `what="rows"`.

    Returns:
        The receipt, with `out` and the entries that the export adds.

    Raises:
        RecipeError: If the dataset cannot be exported in this form, or `out` has other contents.
        DatasetError: If the dataset is damaged.
        BuildError: If a file cannot be written.
        Stopped: After a signal.
    """
    source, target = folder_at(directory), folder_at(out)
    form = chosen_form(to, options)
    module = export_module(to)
    refuse_nested(source, target)
    with local_copy(source) as local:
        manifest = sound_manifest(local)
        dataset = {"fingerprint": manifest["fingerprint"], "digest": manifest["digest"]}
        identity = {"format": FORMAT, "version": VERSION, **form, "dataset": dataset}
        exporting = Exporting(
            local, manifest, "".join([*form.values()][1:]), target, workers, progress, card
        )
        # An export that is refused must not leave files, so the form is checked first.
        module.check(exporting)
        # An export that ignores weights is another export, so its identity differs.
        if loses_weights(exporting, to, loss_weights):
            identity["loss_weights"] = "ignore"
        if any(source["slots"].get("media") for source in manifest["ledger"]["sources"].values()):
            progress.say(
                "warning: the export has the positions of media, but not their refs\n"
                "hint: packprep's loader gives both, as column media"
            )
        located = getattr(module, "located", lambda receipt, out: receipt)
        try:
            receipt = standing_export(target, identity)
            if receipt is not None:
                # `said` reads the keys that it prints, so a receipt with other keys fails here.
                [*module.said({**located(receipt, target), "out": str(target)})]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            message = (
                f"{target.path_of(RECEIPT)}: not the keys and values of an export ({error!s:.100})"
            )
            raise DatasetError(
                f"{message}\nhint: choose another folder, or remove this one"
            ) from None
        if receipt is not None:
            progress.say(f"nothing to make: {target} contains this export")
        else:
            # Files that an interrupted export completed are kept, but not its temporary files.
            target.remove_temporaries()
            shared = {key: manifest[key] for key in ("seq_length", "vocab_size", "pad_id")}
            receipt = {**identity, **shared, **module.write(exporting)}
            finish(target, receipt)
        return {**located(receipt, target), "out": str(target)}


def folders_to_export(
    directory: str, out: str, to: str, options: Mapping[str, str | None]
) -> list[tuple[str, str]]:
    """Return the datasets to export, as [(dataset, output folder)].

    The output folder of a single dataset is `out`. If `directory` has datasets of several row
    lengths, their output folders are `out`/seq_N.

    Raises:
        RecipeError: If `directory` has datasets of several row lengths, and `out` is this folder or
            inside it. Also if documents are exported, but each dataset has only parts of them.
    """
    source = folder_at(directory)
    lengths = [] if source.exists(MANIFEST_NAME) else lengths_in(source)
    if not lengths:
        return [(directory, out)]
    refuse_nested(source, folder_at(out))
    names = [f"seq_{length}" for length in lengths]
    cut = False
    for name in names:  # Check all first, so that an unfinished dataset prevents every export.
        with local_copy(folder_at(f"{source}/{name}")) as local:
            cut |= sound_manifest(local)["recipe"].get("documents", {}).get("long") == "decompose"
    if cut and "documents" in chosen_form(to, options).values():
        raise RecipeError(
            f'{directory}: documents.long = "decompose" divides documents among {len(names)}'
            " datasets, so no dataset has all of a document\n"
            "hint: give --what rows"
        )
    return [(f"{source}/{name}", f"{folder_at(out)}/{name}") for name in names]


def loses_weights(exporting: Exporting, to: str, loss_weights: str) -> bool:
    """Return whether the export ignores weights that documents give.

    Args:
        exporting: The export.
        to: Name of the export.
        loss_weights: "refuse" or "ignore".

    Returns:
        Whether weights other than 1 are lost.

    Raises:
        RecipeError: If weights would be lost and `loss_weights` is "refuse", or if `loss_weights`
            is invalid for this export.
    """
    if loss_weights not in LOSS_WEIGHTS:
        raise RecipeError(f"--loss-weights {loss_weights}: expected {' or '.join(LOSS_WEIGHTS)}")
    if exporting.form in EXPORTS[to].weighted:
        if loss_weights == "ignore":
            raise RecipeError(
                "--loss-weights ignore: this export has the column loss_weights\n"
                "hint: leave the option out"
            )
        return False
    sources = exporting.manifest["ledger"]["sources"].items()
    weighted = [name for name, source in sources if source["slots"].get("weighted")]
    if weighted and loss_weights == "refuse":
        form = f"--{EXPORTS[to].option} {exporting.form}"
        weighting = exporting.manifest["recipe"]["documents"].get("loss_weighting", "token")
        why = f"documents of {', '.join(weighted)} have weights other than 1"
        if weighting != "token":
            why = f'documents.loss_weighting = "{weighting}" gives weights other than 1'
        raise RecipeError(
            f"--to {to} {form} cannot store loss weights, and {why}\n"
            "hint: give --to mds or --to parquet --columns full, or --loss-weights ignore for"
            " equal weights"
        )
    return bool(weighted)


def print_export(result: dict[str, Any]) -> None:
    """Print a description of the export and the trainer's options."""
    size, count = sum(file["bytes"] for file in result["files"]), len(result["files"])
    files = f"{count:,} file{'' if count == 1 else 's'}, {size / 1e6:,.1f} MB, and {RECEIPT}"
    summary, *more_lines = export_module(result["to"]).said(result)
    put_line(f"{result['out']}: {summary}: {files}")
    for line in more_lines:
        put_line(line)


def each_shard(
    exporting: Exporting, setup: Callable[..., Do], *arguments: Any, workers: int = 0
) -> Iterator[tuple[int, Any]]:
    """Yield (number, result) of every shard, in the order of completion.

    Args:
        exporting: The export.
        setup: Called as setup(dataset, manifest, *arguments) once in each process. It returns the
            function that processes each `ShardToExport`.
        arguments: Further arguments of `setup`.
        workers: Number of processes. 0 runs in this process.
    """
    manifest, progress = exporting.manifest, exporting.progress
    items = [ShardToExport(b) for b in range(len(manifest["shards"]))]
    progress.begin(sum(entry["bytes"] for entry in manifest["shards"]), len(items), len(items))
    setup_arguments = (exporting.dataset, manifest, *arguments)
    try:
        for item, result in in_processes(
            setup, setup_arguments, items, workers, progress.add, exporting.out.remove_temporaries
        ):
            progress.done(item)
            yield item.number, result
    finally:
        progress.end()


def sound_manifest(local: LocalCopy) -> Manifest:
    """Fetch the manifest of a published dataset and check it.

    Raises:
        DatasetError: If the manifest differs from its digest or has an invalid ledger.
    """
    local.fetch(MANIFEST_NAME)
    manifest = read_manifest(local.folder)
    actual_digest = own_digest(as_stored(manifest, LATER))
    if actual_digest != manifest["digest"]:
        raise DatasetError(
            f"{local.out.path_of(MANIFEST_NAME)}: it states the digest {manifest['digest']}, but"
            f" its digest is {actual_digest}. It was changed or damaged after it was written\n"
            "hint: restore the file from a copy"
        )
    sources, tasks = (
        [entry["name"] for entry in entries] for entries in (manifest["sources"], manifest["tasks"])
    )
    if not is_ledger(manifest["ledger"], sources, tasks):
        raise DatasetError(
            f"{local.out.path_of(MANIFEST_NAME)}: its ledger does not have the keys and counts of"
            " a ledger\n"
            "hint: restore the right file"
        )
    return manifest


@contextmanager
def sound_shard(local: LocalCopy, manifest: Manifest, number: int) -> Iterator[Shard]:
    """Compare a shard with its digest, and yield it. Its local copy exists until the context ends.

    Raises:
        DatasetError: If the shard is missing or differs from its digest in the manifest.
    """
    name, entry = shard_name(number), manifest["shards"][number]
    with local.fetched(name):
        path = local.folder / name
        try:
            digest = digest_of_file(path)
        except OSError as error:
            raise DatasetError(
                f"{path}: {error.strerror}. Nothing can be exported without it\n"
                "hint: restore the file"
            ) from None
        if digest != entry["digest"]:
            raise DatasetError(
                f"{path}: its digest is {digest}, but the manifest has {entry['digest']}. The"
                " file is damaged\n"
                "hint: `packprep verify` describes the damage; build the dataset again"
            )
        yield shard_of(path, manifest, number)


def plan_of(local: LocalCopy, manifest: Manifest) -> Plan:
    """Fetch plan.json and tokenizer.json of a dataset, and return the plan.

    Raises:
        PlanError: If plan.json is not the plan that built the dataset.
    """
    local.fetch(PLAN_NAME, TOKENIZER_NAME, REMOVED_NAME)
    plan = open_plan(local.folder)
    if plan.digest != manifest["plan"]["digest"]:
        raise PlanError(
            f"{local.folder / PLAN_NAME}: its digest is {plan.digest}, but the manifest has"
            f" {manifest['plan']['digest']}\n"
            "hint: restore the right file"
        )
    return plan


def restored(plan: Plan, manifest: Manifest, shard: Shard) -> RestoredDocuments:
    """Return the documents of a shard, sorted by source.

    Raises:
        DatasetError: If a document's source is not in the manifest.
    """
    documents = restored_documents(plan, shard.arrays, str(shard.path))
    if len(documents.source) and documents.source[-1] >= len(manifest["sources"]):
        raise DatasetError(
            f"{shard.path}: segment_source {documents.source[-1]} is not a source of the manifest"
        )
    return documents


def say_what_documents_lack(exporting: Exporting) -> None:
    """Print how many tokens the recipe truncated or dropped, since no segment has them."""
    truncated = dropped = 0
    for source in exporting.manifest["ledger"].get("sources", {}).values():
        truncated += source["tokens"]["truncated"]
        dropped += sum(n for reason, n in source["tokens"]["dropped"].items() if reason != REMOVED)
    if truncated or dropped:
        exporting.progress.say(
            f"{truncated + dropped:,} tokens that the recipe truncated ({truncated:,}) or dropped"
            f" ({dropped:,}) are not in the dataset, so the export does not have them"
        )


def files_of_rows(manifest: Manifest, slots: int) -> list[list[range]]:
    """Divide the rows of each shard among files of at most `slots` slots.

    Each file has at least one row, even if a row has more slots. A shard without rows has one file.

    Returns:
        A list for each shard, with one range of rows per file: [[range(0, 64), range(64, 100)], …].
    """
    rows_per_file = max(1, slots // manifest["seq_length"])
    rows = [entry["rows"] for entry in manifest["shards"]]
    return [
        [range(b, min(b + rows_per_file, n)) for b in range(0, max(n, 1), rows_per_file)]
        for n in rows
    ]


def standing_export(out: Folder, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the receipt of a complete export in `out`, or None if the export must be written.

    If the export must be written, `out` contains .export-begun.json afterwards.

    Args:
        out: Output folder.
        identity: The entries that identify this export.

    Raises:
        RecipeError: If the folder has other contents.
        DatasetError: If .export.json or .export-begun.json is invalid.
    """
    # A complete export has a receipt. An interrupted export has only the other file.
    for name in (RECEIPT, BEGUN):
        content = _read(out, name)
        if content is None:
            continue
        for key, value in identity.items():
            if content.get(key) != value:
                raise RecipeError(
                    f"--out {out} contains another export: {key} is {content.get(key)!r} in {name}"
                    f" and {value!r} here\n"
                    "hint: choose another folder, or remove this one"
                )
        # A receipt counts only if each of its files has the recorded size.
        if name == RECEIPT and all(
            out.size(file["file"]) == file["bytes"] for file in content["files"]
        ):
            _tidy_up(out)  # The process that wrote the receipt may have been killed right after.
            return content
        if name == BEGUN:
            return None
    # A folder without these files must be empty.
    if _read(out, RECEIPT) is None and (other_names := _names(out)):
        raise RecipeError(
            f"--out {out} is not empty and contains no export (it contains {other_names[0]!r})\n"
            "hint: choose another folder"
        )
    out.create(BEGUN, encode(identity))
    return None


def finish(out: Folder, receipt: Mapping[str, Any]) -> None:
    """Write the receipt, which is the last file of an export, and remove .export-begun.json."""
    out.write(RECEIPT, [encode(receipt)])
    _tidy_up(out)


def _tidy_up(out: Folder) -> None:
    out.remove(BEGUN)
    out.remove_temporaries()


def _read(out: Folder, name: str) -> dict[str, Any] | None:
    try:
        value = decode(out.read(name), out.path_of(name))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise RecipeError(f"--out {out} is not a folder\nhint: choose another path") from None
    except OSError as error:
        raise RecipeError(
            f"{out.path_of(name)}: {error.strerror}\nhint: choose another folder"
        ) from None
    if not isinstance(value, dict) or (name == RECEIPT and not _are_files(value.get("files"))):
        raise DatasetError(
            f"{out.path_of(name)}: not the receipt of an export\n"
            "hint: choose another folder, or remove this one"
        )
    return value


def _are_files(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(file, dict) and isinstance(file.get("file"), str) and "bytes" in file
        for file in value
    )


def _names(out: Folder) -> list[str]:
    """Return the names in the folder, without temporary files of interrupted writes."""
    if isinstance(out, LocalFolder):
        try:
            names = sorted(os.listdir(out.path))
        except FileNotFoundError:
            return []
        return [name for name in names if not (name.startswith(".") and name.endswith(".tmp"))]
    assert isinstance(out, Remote)
    return [name for name, _ in out.list()]
