"""A published dataset in, a folder in another tool's format out: the order of it."""

import os
import shlex
from typing import Any

from packprep.building.output import Output, nearby, output_of
from packprep.building.progress import put_line
from packprep.building.run import Progress
from packprep.errors import RecipeError
from packprep.exporting.folder import FORMAT, RECEIPT, VERSION, finish, refuse_nested, standing_export
from packprep.exporting.megatron import check_out, check_rows, data_path, export_megatron, say_what_documents_lack
from packprep.exporting.shards import sound_manifest

WHAT = ("documents", "rows")
COLUMNS = ("nemo", "full")


def export_dataset(
    directory: str | os.PathLike | Output,
    to: str,
    out: str | os.PathLike | Output,
    progress: Progress,
    what: str | None = None,
    columns: str | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """Export a dataset, or find that it stands in `out` already; gives the receipt, with `out` and, for Megatron, data_path.

    to: "megatron", of which `what` is "documents" (the default) or "rows"; or "parquet", of which `columns` is "nemo" (the
    default) or "full". workers: processes that write Parquet; Megatron's files are written by one.
    Raises RecipeError for what cannot be exported so, and for an `out` that holds something else; DatasetError for a damaged
    dataset; BuildError for what cannot be written; Stopped after a signal.
    """
    source, target = output_of(directory), output_of(out)
    form = _form(to, what, columns)
    refuse_nested(source, target)
    with nearby(source) as near:
        manifest = sound_manifest(near)
        identity = {
            "format": FORMAT,
            "version": VERSION,
            **form,
            "dataset": {"fingerprint": manifest["fingerprint"], "digest": manifest["digest"]},
        }
        shared = {key: manifest[key] for key in ("seq_length", "vocab_size", "pad_id")}
        if to == "megatron":
            folder = check_out(target)
            if form["what"] == "rows":
                check_rows(manifest, progress)
        else:
            from packprep.exporting.parquet import check_columns, export_parquet

            check_columns(manifest, form["columns"], progress)
        receipt = standing_export(target, identity)
        if receipt is not None:
            progress.say(f"nothing to make: {target} holds this export")
            return _result(receipt, target)
        target.remove_temporaries()
        if to == "megatron":
            if form["what"] == "documents":
                say_what_documents_lack(manifest, progress)
            made = export_megatron(near, manifest, folder, form["what"], progress)
        else:
            made = export_parquet(near, manifest, target, form["columns"], workers, progress)
        receipt = {**identity, **shared, **made}
        finish(target, receipt)
        return _result(receipt, target)


def _form(to: str, what: str | None, columns: str | None) -> dict[str, str]:
    """{to, and its choice}; RecipeError for an option that is the other target's."""
    if to == "megatron" and columns is not None:
        raise RecipeError("--columns is Parquet's: with --to megatron give --what documents or --what rows")
    if to == "parquet" and what is not None:
        raise RecipeError("--what is Megatron's: with --to parquet give --columns nemo or --columns full")
    choices = {"megatron": ("what", WHAT, what), "parquet": ("columns", COLUMNS, columns)}
    if to not in choices:
        raise RecipeError(f"--to {to}: expected {' or '.join(choices)}")
    name, known, chosen = choices[to]
    if chosen is not None and chosen not in known:
        raise RecipeError(f"--{name} {chosen}: expected {' or '.join(known)}")
    return {"to": to, name: chosen or known[0]}


def _result(receipt: dict[str, Any], out: Output) -> dict[str, Any]:
    result = {**receipt, "out": str(out)}
    return {**result, "data_path": list(data_path(receipt, out))} if receipt["to"] == "megatron" else result


def print_export(result: dict[str, Any]) -> None:
    """What was made, and how a trainer is told of it."""
    size = sum(file["bytes"] for file in result["files"])
    count = len(result["files"])
    files = f"{count:,} file{'' if count == 1 else 's'}, {size / 1e6:,.1f} MB, and {RECEIPT}"
    if result["to"] == "parquet":
        put_line(f"{result['out']}: {result['rows']:,} rows, columns {result['columns']}: {files}")
        return
    put_line(
        f"{result['out']}: {result['documents']:,} {result['what']}, {result['tokens']:,} tokens ({result['dtype']}): {files}"
    )
    if result["data_path"]:
        put_line(f"--data-path {shlex.join(result['data_path'])}")
