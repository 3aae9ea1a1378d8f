"""The command audit: what is wrong in a dataset that any tool packed."""

from pathlib import Path
from typing import Annotated, Any

import typer

from packprep.cli.arguments import Json, Tokenizer
from packprep.cli.printing import one_thread, put

_IDS_PANEL = "Ids, if --tokenizer does not give them"


def _of_ids(help: str) -> Any:
    return typer.Option(
        metavar="ID", min=0, help=help, show_default=False, rich_help_panel=_IDS_PANEL
    )


def audit(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A packed dataset: a folder, a file or a prefix.")
    ],
    tokenizer: Tokenizer = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Jinja file of the chat template. Default: the one next to the tokenizer.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="INPUT",
            help="File or pattern of the documents that the data should contain.",
            show_default=False,
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=SHARE",
            help="Exit with status 1 if the share of a kind is above SHARE, such as padding=0.05.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write an HTML report.", show_default=False),
    ] = None,
    token_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Dtype of the ids in files without a header, such as uint32. Default: uint16.",
            show_default=False,
        ),
    ] = None,
    eos_id: Annotated[int | None, _of_ids("Id of the token that ends a document.")] = None,
    bos_id: Annotated[int | None, _of_ids("Id of the token that begins a document.")] = None,
    pad_id: Annotated[int | None, _of_ids("Id of padding.")] = None,
    unk_id: Annotated[int | None, _of_ids("Id of unknown text.")] = None,
    vocab_size: Annotated[int | None, _of_ids("Number of ids of the model.")] = None,
    as_json: Json = False,
) -> None:
    """Check a dataset that any tool packed, and count what is wrong with it."""
    one_thread()
    from packprep.audit.html import write_audit
    from packprep.audit.report import Request, describe_audit, print_audit
    from packprep.audit.rows import Choices
    from packprep.errors import RecipeError
    from packprep.inspection.report import check_file
    from packprep.storage import expanded, is_url

    if is_url(path):
        raise RecipeError(f"{path}: a URL, but audit reads local files\nhint: fetch the data first")
    # The report is written last, so check its path before the work.
    if html is not None:
        check_file(html)
    names = {
        "eos": eos_id,
        "bos": bos_id,
        "pad": pad_id,
        "unk": unk_id,
        "vocab_size": vocab_size,
    }
    request = Request(
        Path(expanded(path)),
        tokenizer,
        chat_template,
        source,
        {name: id for name, id in names.items() if id is not None},
        Choices(_dtype_of(token_dtype)),
        _limits_of(fail_on or []),
    )
    described = describe_audit(request)
    if html is not None:
        described["html"] = html
        write_audit(described, html)
    put(described, as_json, print_audit, after_work=html is not None)
    if described["failed"]:
        raise typer.Exit(1)


def _limits_of(texts: list[str]) -> dict[str, float]:
    """Return kind → share of all options --fail-on."""
    from packprep.errors import RecipeError

    limits: dict[str, float] = {}
    for text in texts:
        kind, share = _limit_of(text)
        if kind in limits:
            raise RecipeError(f"--fail-on {kind}: given twice\nhint: give one share per kind")
        limits[kind] = share
    return limits


def _limit_of(text: str) -> tuple[str, float]:
    """Return the kind and the share of KIND=SHARE."""
    from packprep.errors import RecipeError

    kind, _, share = text.partition("=")
    try:
        limit = float(share)
    except ValueError:
        limit = -1.0
    if not 0 <= limit <= 1:
        raise RecipeError(
            f"--fail-on {text}: expected KIND=SHARE, a share from 0 to 1"
            "\nhint: write padding=0.05, or wrong_labels=0"
        )
    return kind, limit


def _dtype_of(text: str | None) -> str | None:
    from packprep.errors import RecipeError

    if text is not None and text not in ("uint8", "uint16", "uint32", "uint64", "int32", "int64"):
        raise RecipeError(
            f"--token-dtype {text}: not a dtype of ids\nhint: write uint16, uint32, int32 or int64"
        )
    return text
