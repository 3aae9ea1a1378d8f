"""Find the documents of training steps, and the steps of documents.

```
step, batch size, world size, seed ─► samples ─► rows ─► headers of segments ─► documents
document ─► its segments ─► rows ─► samples ─► steps
logged losses ─► steps, rows or samples ─► documents, the highest loss first
```
The order of rows is arithmetic, so no earlier step is computed.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.plan import stored_plan_and_digest
from packprep.dataset.batches import Batches, Reader
from packprep.errors import ArgumentError, DatasetError, RecipeError
from packprep.inspection.document import describe_document
from packprep.inspection.terminal import DIM, Page, page
from packprep.messages import counted, visible

SHOWN_LINES = 100  # Number of lines that a table shows.


@dataclass(frozen=True)
class TrainingRun:
    """The arguments that determine which rows a training run reads in each step.

    Attributes:
        batch_size: Rows per rank and step, or a dict seq_length → rows for several lengths.
        world_size: Number of data-parallel ranks.
        options: Other arguments of `Dataset.batches`: seed, shuffle, redraw, balance, window, skip.
        state: A saved state of the loader, or None for a run from its start.
        first_step: Number that the trainer gives to the first step after `state`.
    """

    batch_size: int | Mapping[int, int]
    world_size: int
    options: Mapping[str, Any]
    state: Mapping[str, Any] | None = None
    first_step: int = 0

    def batches(self, dataset: Reader) -> Batches:
        """Return the batches of all ranks together, at the state of the run.

        Raises:
            ArgumentError: If an argument is invalid.
            StateError: If the state does not belong to the dataset and the arguments.
        """
        size: Any = self.batch_size
        if isinstance(size, Mapping):
            size = {length: rows * self.world_size for length, rows in size.items()}
        else:
            size *= self.world_size
        batches = dataset.batches(size, **self.options)
        if self.state is not None:
            batches.load_state_dict(self.state)
        return batches

    def rows_per_rank(self, dataset: Reader, row: int) -> int:
        """Return the number of rows in a rank's batch, in a step that reads a row."""
        if isinstance(self.batch_size, Mapping):
            return self.batch_size[dataset.row_length(np.array([row]))]
        return self.batch_size


def options_of_state(state: Any, path: str) -> dict[str, Any]:
    """Return the arguments of `Dataset.batches` that a saved loader state determines.

    Args:
        state: The contents of the file.
        path: The file, for error messages.

    Raises:
        RecipeError: If the file is not a loader state.
    """
    try:
        options = {key: state[key] for key in ("seed", "shuffle")}
        options["redraw"] = state.get("redraw", False)
        if balance := state.get("balance"):
            weights = balance["attention"], balance["linear"]
            options |= {"balance": (weights, balance["group"]), "window": balance["window"]}
    except (TypeError, LookupError, AttributeError):
        raise RecipeError(
            f"--state {path}: not a loader state"
            "\nhint: give a file with the JSON of the loader's state_dict()"
        ) from None
    return options


def check_plans(dataset: Any) -> None:
    """Check that the names of source files come from the plan of each dataset.

    Raises:
        DatasetError: If plan.json is missing, or is not the plan that the dataset names.
    """
    for member in getattr(dataset, "datasets", (dataset,)):
        plan_and_digest = stored_plan_and_digest(str(member.directory))
        if plan_and_digest is None or plan_and_digest[1] != member.manifest["plan"]["digest"]:
            raise DatasetError(
                f"{member.directory}: plan.json is missing, or is not the plan that the"
                " dataset names\nhint: restore the original file"
            )


def documents_of_steps(
    dataset: Reader, run: TrainingRun, first_step: int, last_step: int, rank: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the documents of some steps, in the order of steps, ranks and rows.

    Args:
        dataset: The dataset or mixture.
        run: The training run.
        first_step: Number of the first step.
        last_step: Number of the last step.
        rank: Index of one rank, or None for all ranks.

    Yields:
        A dict for each segment, as `Batches.documents` returns it, with the step and the rank.

    Raises:
        ArgumentError: If a step is not part of the run.
    """
    batches = run.batches(dataset)
    for step in range(first_step, last_step + 1):
        try:
            documents = batches.documents(step - run.first_step)
        except ArgumentError as error:
            if not run.first_step:
                raise
            raise ArgumentError(
                f"step {step} with --first-step {run.first_step} is step {step - run.first_step}"
                f" of the loader: {error}"
            ) from None
        for document in documents:
            # The batches of all ranks were read as one batch, in the order of ranks.
            size = run.rows_per_rank(dataset, document["row"])
            own_rank, position = divmod(document["position"], size)
            if rank is None or own_rank == rank:
                yield {"step": step, "rank": own_rank, **document, "position": position}


def describe_steps(
    dataset: Reader, run: TrainingRun, first_step: int, last_step: int, rank: int | None = None
) -> dict[str, Any]:
    """Return the documents of some steps as JSON-compatible values.

    Args:
        dataset: As in `documents_of_steps`.
        run: As in `documents_of_steps`.
        first_step: As in `documents_of_steps`.
        last_step: As in `documents_of_steps`.
        rank: As in `documents_of_steps`.

    Returns:
        A dict with the keys `steps` ([first, last]), `rows` (number of rows), and `documents`.
    """
    documents = [*documents_of_steps(dataset, run, first_step, last_step, rank)]
    rows = len({(document["step"], document["sample"], document["row"]) for document in documents})
    return {"steps": [first_step, last_step], "rows": rows, "documents": documents}


def describe_reads(
    dataset: Reader, run: TrainingRun, source: str | None, place: str, epochs: int
) -> dict[str, Any]:
    """Return the steps in which a document is read, as JSON-compatible values.

    Args:
        dataset: The dataset or mixture.
        run: The training run.
        source: Name of the source, or None if each dataset has only one.
        place: "FILE:POSITION" or "POSITION", as in `describe_document`.
        epochs: Number of epochs to search.

    Returns:
        A dict with the keys `document`, `epochs`, `reads`, `unread` and `more_files`. Each entry of
        `reads` has the keys of `Batches.reads_of_row`, and the row and segment with the document's
        source, file, tokens, task and pass. `unread` has an entry for each file and pass without
        segments: source, file, repeat, outcome and why, as in `describe_document`. `more_files` is
        the number of further files that have a document at the position.

    Raises:
        RecipeError: If no dataset has the source, the file or the document, or if `source` is None
            and a dataset has several sources.
    """
    batches = run.batches(dataset)
    reads: list[dict[str, Any]] = []
    unread: list[dict[str, Any]] = []
    refused: list[RecipeError] = []
    first_row = more_files = 0
    datasets: tuple[Any, ...] = getattr(dataset, "datasets", (dataset,))
    names_of = [[entry["name"] for entry in member.manifest["sources"]] for member in datasets]
    # Without a name, the source must be clear in each dataset.
    for member, names in zip(datasets, names_of, strict=True):
        if source is None and len(names) > 1:
            raise RecipeError(
                f"--document: {member.directory} has several sources: {', '.join(names)}"
                "\nhint: add --source NAME"
            )
    any_has_source = any(source in names for names in names_of)
    for number, (member, names) in enumerate(zip(datasets, names_of, strict=True)):
        # In a mixture, some datasets may not have the source.
        if any_has_source and source not in names:
            first_row += len(member)
            continue
        dataset_key = {"dataset": number} if len(datasets) > 1 else {}
        # A dataset without the document is an error only if no dataset has it.
        try:
            described = describe_document(str(member.directory), source, place, {})
        except RecipeError as error:
            refused.append(error)
            described = {"source": source, "files": [], "more_files": 0}
        more_files += described["more_files"]
        for document in described["files"]:
            where = {**dataset_key, "source": described["source"], "file": document["file"]}
            for use in document["uses"]:
                if not use["segments"]:
                    why = {key: use[key] for key in ("outcome", "why")}
                    unread.append({**where, "repeat": use["use"], **why})
                for segment in use["segments"]:
                    # A row is read once per epoch, and each of its segments with it.
                    about = {key: segment[key] for key in ("segment", "tokens", "task")}
                    row = first_row + segment["row"]
                    for read in batches.reads_of_row(row, epochs):
                        if read["step"] is not None:
                            read["step"] += run.first_step
                        repeat = use["use"]
                        reads.append({**read, "row": row, **where, "repeat": repeat, **about})
        first_row += len(member)
    if refused and not (reads or unread):
        raise refused[0]
    reads.sort(key=lambda read: (read["sample"], read["row"], read["segment"]))
    return {
        "document": place,
        "epochs": epochs,
        "reads": reads,
        "unread": unread,
        "more_files": more_files,
    }


def describe_losses(
    dataset: Reader, run: TrainingRun, path: str | os.PathLike, limit: int
) -> dict[str, Any]:
    """Return the documents with the highest losses, as JSON-compatible values.

    Args:
        dataset: The dataset or mixture.
        run: The training run.
        path: A file of JSON lines. Each line has "loss" and the place of the loss: "step",
            optionally with "rank", and with "position" (index in the rank's batch); or "sample"; or
            "row". Other keys are ignored. A loss that is null or not finite counts as infinite.
        limit: Maximum number of documents to return.

    Returns:
        A dict with these keys:

        - losses: Number of lines.
        - found: Number of documents that the losses cover. Removed documents are not counted.
        - documents: [{dataset, source, file, document, loss, losses}], the highest loss first.
          `loss` is the mean of the losses that cover the document, or None if it is infinite.
          `losses` is their number. `dataset` is only present in a mixture.

    Raises:
        RecipeError: If a line is invalid.
    """
    lookup = _LossLookup(dataset, run)
    totals: dict[tuple[Any, ...], list[float]] = {}
    n_losses = 0
    for losses in _chunks(_losses(path), _LINES_AT_ONCE):
        n_losses += len(losses)
        try:
            covered = lookup.documents([record for _, _, record in losses])
        except (ArgumentError, IndexError):
            # The error of a chunk does not name a line, so its lines are looked up one by one.
            for where, _, record in losses:
                try:
                    lookup.documents([record])
                except (ArgumentError, IndexError) as error:
                    raise RecipeError(f"{where}: {error}") from None
            raise
        for (_, loss, _), keys in zip(losses, covered, strict=True):
            for key in keys:
                total = totals.setdefault(key, [0.0, 0])
                total[0] += loss
                total[1] += 1
    if not n_losses:
        raise RecipeError(f"--losses {path}: the file has no lines\n{_LINE_HINT}")
    worst = sorted(totals.items(), key=lambda entry: (-entry[1][0] / entry[1][1], entry[0]))
    return {
        "losses": n_losses,
        "found": len(totals),
        "documents": [
            {
                **({} if key[0] is None else {"dataset": key[0]}),
                **dict(zip(("source", "file", "document"), key[1:], strict=True)),
                "loss": total / count if math.isfinite(total) else None,
                "losses": int(count),
            }
            for key, (total, count) in worst[:limit]
        ],
    }


_LINE_HINT = 'hint: write lines such as {"step": 812, "rank": 3, "loss": 7.31}'
_LINES_AT_ONCE = 512
_CACHED_ROWS = 1 << 16  # Number of rows whose documents are cached.


def _chunks(values: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while chunk := [*islice(values, size)]:
        yield chunk


def _losses(path: str | os.PathLike) -> Iterator[tuple[str, float, dict[str, int]]]:
    """Yield the place of each line in the file, its loss, and where the loss was measured."""
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, *_loss_of_line(line, where)


def _lines(path: str | os.PathLike) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--losses {path}: cannot be read: {error}") from None


def _loss_of_line(line: str, where: str) -> tuple[float, dict[str, int]]:
    """Return the loss of a line, and the whole numbers that say where it was measured."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RecipeError(f"{where}: invalid JSON: {error}\n{_LINE_HINT}") from None
    if not isinstance(record, dict) or "loss" not in record:
        raise RecipeError(
            f"{where}: expected an object with loss, but found {line.strip()!r:.100}\n{_LINE_HINT}"
        )
    loss = record["loss"]
    if loss is not None and (isinstance(loss, bool) or not isinstance(loss, int | float)):
        raise RecipeError(f"{where}: loss is {loss!r:.100}, but should be a number or null")
    try:
        loss = math.inf if loss is None or not math.isfinite(loss) else float(loss)
    except OverflowError:  # The integer is beyond the range of float.
        loss = math.inf
    places = {name: record[name] for name in _PLACES if name in record}
    for name, value in places.items():
        if type(value) is not int:
            raise RecipeError(f"{where}: {name} is {value!r:.100}, but should be a whole number")
        if value < 0 and name != "step":  # Steps before a state are negative.
            raise RecipeError(f"{where}: {name} is {value}, but should be at least 0")
    ways = [name for name in ("step", "sample", "row") if name in places]
    if not ways:
        raise RecipeError(
            f"{where}: no step, sample or row says where the loss was measured\n{_LINE_HINT}"
        )
    if "step" not in places and ("rank" in places or "position" in places):
        raise RecipeError(f"{where}: rank and position need step")
    if "position" in places and "rank" not in places:
        raise RecipeError(f"{where}: position is an index in a rank's batch, so it needs rank")
    return loss, places


_PLACES = ("step", "rank", "position", "sample", "row")


class _LossLookup:
    """The documents of the rows for which a loss was logged."""

    def __init__(self, dataset: Reader, run: TrainingRun):
        self._dataset, self._run = dataset, run
        self._batches = run.batches(dataset)
        # Sample numbers count all samples of the order, so neither `skip` nor a state applies.
        full_run = replace(run, options={**run.options, "skip": None}, state=None)
        if not isinstance(run.batch_size, Mapping):
            full_run = replace(full_run, batch_size=1, world_size=1)
        # A step of this order has one sample.
        self._by_sample = full_run.batches(dataset)
        self._keys_of_row = lru_cache(_CACHED_ROWS)(self._keys)

    def documents(self, records: Sequence[Mapping[str, int]]) -> list[list[tuple[Any, ...]]]:
        """Return the documents that each loss covers: of its row, sample, batch or step.

        Args:
            records: The places of losses.

        Returns:
            For each record, tuples (dataset or None, source, file, position).

        Raises:
            ArgumentError: If a place is not part of the run.
            IndexError: If a row does not exist.
        """
        first_step = self._run.first_step
        samples = {
            record["sample"] for record in records if "row" not in record and "sample" in record
        }
        steps = {
            record["step"] - first_step
            for record in records
            if not {"row", "sample"} & record.keys()
        }
        rows_of_sample = _rows_of_steps(self._by_sample, samples)
        rows_of_step = _rows_of_steps(self._batches, steps)
        covered = []
        for record in records:
            if "row" in record:
                rows = [record["row"]]
            elif "sample" in record:
                rows = rows_of_sample[record["sample"]]
            else:
                rows = self._rows_of_batch(rows_of_step[record["step"] - first_step], record)
            covered.append([*dict.fromkeys(key for row in rows for key in self._keys_of_row(row))])
        return covered

    def _rows_of_batch(self, rows: list[int], record: Mapping[str, int]) -> list[int]:
        """Return the rows of a step, of a rank's batch in it, or of a position in the batch."""
        rank, position = record.get("rank"), record.get("position")
        if rank is None:
            return rows
        if rank >= self._run.world_size:
            raise ArgumentError(f"rank {rank} is not below the world size {self._run.world_size}")
        size = self._run.rows_per_rank(self._dataset, rows[0])
        rows = rows[rank * size : (rank + 1) * size]
        if position is None:
            return rows
        if position >= len(rows):
            raise ArgumentError(f"position {position} is not an index of the batch")
        return [rows[position]]

    def _keys(self, row: int) -> tuple[tuple[Any, ...], ...]:
        names = ("dataset", "source", "file", "document")
        return tuple(
            tuple(document.get(name) for name in names)
            for document in self._dataset.documents(row)
            if document["tokens"][0] < document["tokens"][1]  # A removed document has no tokens.
        )


def _rows_of_steps(batches: Batches, steps: set[int]) -> dict[int, list[int]]:
    numbers = sorted(steps)
    reads = batches.reads_of_steps(numbers)
    return {step: rows.tolist() for step, (_, rows, _) in zip(numbers, reads, strict=True)}


def write_removal_lists(
    documents: Sequence[Mapping[str, Any]], path: str | os.PathLike
) -> list[str]:
    """Write documents as JSON lines to new files, the lists that `packprep remove` takes.

    Args:
        documents: Entries of the key `documents` of `describe_losses`.
        path: The file. Documents of a mixture are written to a file for each dataset. The index of
            the dataset is then put before the suffix, as in worst.0.jsonl.

    Returns:
        The paths of the files.

    Raises:
        RecipeError: If a file exists. Then no file is written.
    """
    lines: dict[str, list[str]] = {}
    for document in documents:
        list_path = Path(path)
        if "dataset" in document:
            list_path = list_path.with_suffix(f".{document['dataset']}{list_path.suffix}")
        entry = {
            "source": document["source"],
            "file": document["file"],
            "doc": document["document"],
        }
        lines.setdefault(str(list_path), []).append(json.dumps(entry, ensure_ascii=False) + "\n")
    for name in lines:
        if os.path.exists(name):
            raise RecipeError(f"--out {name} exists already\nhint: give a new file")
    for name, own_lines in lines.items():
        with open(name, "x", encoding="utf-8") as file:
            file.writelines(own_lines)
    return [*lines]


def print_steps(described: Mapping[str, Any]) -> None:
    """Print the documents of some steps as a table."""
    documents = described["documents"]
    with page() as drawn:
        _table(
            drawn,
            documents,
            ("source", "file", "document", "tokens", "task"),
            ("step", "rank", "sample", "row", "segment"),
        )
        first_step, last_step = described["steps"]
        steps = (
            f"step {first_step:,}"
            if first_step == last_step
            else f"steps {first_step:,} … {last_step:,}"
        )
        rows, segments = counted(described["rows"], "row"), counted(len(documents), "segment")
        drawn.put(f"{steps}: {segments} of {rows}")


def print_reads(described: Mapping[str, Any]) -> None:
    """Print the steps that read a document as a table."""
    reads = described["reads"]
    with page() as drawn:
        _table(
            drawn,
            reads,
            ("source", "file", "tokens", "task"),
            ("epoch", "step", "rank", "position", "sample", "row", "segment"),
        )
        skipped = sum(read["step"] is None for read in reads)
        left_out = f"; {counted(skipped, 'read')} in skipped steps" if skipped else ""
        epochs = counted(described["epochs"], "epoch")
        times = counted(len(reads) - skipped, "time")
        drawn.wrap(f"{visible(described['document'])} is read {times} in {epochs}{left_out}")
        for unread in described["unread"][:SHOWN_LINES]:
            where = f"{unread['source']} {visible(unread['file'])}, pass {unread['repeat']}"
            why = f": {visible(unread['why'])}" if unread["why"] else ""
            drawn.wrap(f"{where}: {unread['outcome']}{why}", indent=2)
        if described["more_files"]:
            drawn.wrap(
                f"{counted(described['more_files'], 'more file')} with a document at this position"
                " not searched; give --document FILE:POSITION to select a file"
            )


def print_losses(described: Mapping[str, Any]) -> None:
    """Print the documents with the highest losses as a table."""
    documents = described["documents"]
    with page() as drawn:
        _table(drawn, documents, ("source", "file", "document"), ("loss", "losses"))
        drawn.put(
            f"{described['losses']:,} logged losses cover"
            f" {counted(described['found'], 'document')}; the worst {len(documents):,} are listed"
        )
        for name in described.get("written", ()):
            drawn.put(f"{name}: the list for `packprep remove`")


def _table(
    drawn: Page,
    entries: Sequence[Mapping[str, Any]],
    texts: tuple[str, ...],
    numbers: tuple[str, ...],
) -> None:
    if any("dataset" in entry for entry in entries):
        numbers = ("dataset", *numbers)
    lines = [
        [_cell(entry.get(name)) for name in (*texts, *numbers)] for entry in entries[:SHOWN_LINES]
    ]
    if lines:
        drawn.table((*texts, *numbers), lines, len(texts))
    if len(entries) > SHOWN_LINES:
        more_lines = counted(len(entries) - SHOWN_LINES, "more line")
        drawn.put(f"… and {more_lines}; --json lists all", DIM)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        # A removed document has no tokens.
        return f"{value[0]:,} … {value[1] - 1:,}" if value[0] < value[1] else "removed"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else "—" if value is None else str(value)
