"""A dataset opened for inspection, with token texts, file names and rebuilt segments."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from packprep.building.plan import Plan, at_text, open_plan, prefix_of, stored_plan
from packprep.dataset.loader import Dataset, open_dataset, segments_of
from packprep.dataset.manifest import first_rows, read_manifest
from packprep.dataset.segments import Arrays, Segments
from packprep.dataset.shard import Shard, shard_in
from packprep.errors import DatasetError, PackprepError, RecipeError, SourceError
from packprep.format.json_files import (
    MANIFEST_NAME,
    PLAN_NAME,
    REMOVED_NAME,
    TOKENIZER_NAME,
    shard_name,
)
from packprep.messages import nearest
from packprep.restoring import replay_segments
from packprep.sources.slices import UNREAD
from packprep.storage import Folder, LocalCopy, folder_at, local_copy
from packprep.tokenizer.texts import TokenTexts, texts_of_dataset

IDENTICAL = "identical"
NO_TOKENS = "its document was removed"
NOT_READ = (
    "not rebuilt: its source was not read; give --source NAME=PREFIX or --from-plan to read it"
)


@dataclass(frozen=True)
class OpenedDataset:
    """A published dataset on this machine. Shards at a URL are fetched on first access.

    Attributes:
        local: The local copy of the dataset.
        dataset: The dataset.
        texts: The text of every token.
        files: The plan's file names, indexed by segment_file.
        prefixes: The location of each source's files, or UNREAD if they must not be read. None
            without a plan.
    """

    local: LocalCopy
    dataset: Dataset
    texts: TokenTexts
    files: list[str]
    prefixes: list[str] | None

    @cached_property
    def first_rows(self) -> np.ndarray:
        """Return the number of rows before each shard, int64[shards + 1]."""
        return np.array(first_rows(self.dataset.manifest), np.int64)

    def location(self, row: int) -> tuple[int, int]:
        """Return (shard number, row in the shard) of a row."""
        shard = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        return shard, row - int(self.first_rows[shard])

    def file_name(self, file: int) -> str:
        """Return the name of a file of the plan. `file` is its number in segment_file."""
        return self.files[file] if file < len(self.files) else f"file {file}"

    def source_name(self, source: int) -> str:
        """Return the name of a source. `source` is its number in segment_source.

        Raises:
            DatasetError: If the source does not exist.
        """
        sources = self.dataset.manifest["sources"]
        if source >= len(sources):
            raise DatasetError(
                f"{self.local.out}: segment_source {source} is out of range: the manifest has"
                f" {len(sources)} sources"
            )
        return sources[source]["name"]

    @contextmanager
    def shard(self, number: int) -> Iterator[Shard]:
        """Yield shard `number`, after checking the boundaries of its segments.

        The local copy of the shard exists until the context ends.
        """
        with self.local.fetched(shard_name(number)):
            shard = shard_in(self.local.folder, self.dataset.manifest, number)
            if shard.rows:
                # Reading the segments checks their boundaries.
                len(segments_of(shard, self.dataset.manifest).task)
            yield shard

    @property
    def usable_plan(self) -> Plan:
        """Return the plan, or raise the error from opening it."""
        if isinstance(self.plan, PackprepError):
            raise self.plan
        return self.plan

    @cached_property
    def plan(self) -> Plan | PackprepError:
        """Return the plan, or the error from opening it."""
        try:
            return open_plan(self.local.folder, self.prefixes)
        except PackprepError as error:
            return error

    def rebuilt(self, number: int, chosen: np.ndarray) -> list[str]:
        """Return "identical", "differs: …" or "not rebuilt: …" for each chosen segment of a shard.

        Segments without tokens get `NO_TOKENS`.
        """
        plan = self.plan
        if isinstance(plan, PackprepError):
            return [f"not rebuilt: {plan}"] * len(chosen)
        arrays = shard_in(self.local.folder, self.dataset.manifest, number).arrays
        segments = Segments.of_arrays(arrays).select(chosen)
        files = segments.file
        source = np.searchsorted([source.first_file for source in plan.sources], files, "right") - 1
        # The most general reason comes first, and better ones replace it.
        results = np.full(
            len(chosen), "not rebuilt: the file in its header does not belong to its source", object
        )
        is_known = (files < len(self.files)) & (source == segments.source)
        is_read = (
            is_known & np.array([planned.prefix != UNREAD for planned in plan.sources])[source]
        )
        is_read &= segments.has_tokens
        results[is_known] = NOT_READ
        results[~segments.has_tokens] = NO_TOKENS
        results[is_read] = self._replayed(plan, arrays, chosen[is_read])
        return results.tolist()

    def _replayed(self, plan: Plan, arrays: Arrays, chosen: np.ndarray) -> list[str]:
        """Rebuild segments, and return one text per segment, as in `rebuilt`.

        The caller must have checked that the sources of the segments may be read.
        """

        def replay(indices: np.ndarray) -> list[str]:
            return [
                f"differs: {difference}" if difference else IDENTICAL
                for difference in replay_segments(plan, arrays, indices)
            ]

        try:
            return replay(chosen)
        except PackprepError as error:
            if not isinstance(error, SourceError):
                return [f"not rebuilt: {error}"] * len(chosen)
        lines = []
        for i in range(len(chosen)):  # A missing file does not affect the segments of other files.
            try:
                lines += replay(chosen[i : i + 1])
            except SourceError as error:
                lines.append(f"not rebuilt: {error}")
        return lines


@contextmanager
def opened(
    directory: str | os.PathLike | Folder, moved: Mapping[str, str], from_plan: bool = False
) -> Iterator[OpenedDataset]:
    """Open a dataset for inspection, and remove fetched files at the end.

    Args:
        directory: Directory or URL of the dataset.
        moved: Source name → folder or URL of the source's files. They are read from there, and
            never from the location in the plan.
        from_plan: Whether to also read the sources that are not in `moved`, from the locations in
            the plan. The author of the dataset chose these locations, so do not trust them.

    Raises:
        DatasetError: If the dataset cannot be read.
        RecipeError: If `moved` has an unknown source.
    """
    with local_copy(folder_at(directory)) as local:
        local.fetch(MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME, REMOVED_NAME)
        if not (local.folder / MANIFEST_NAME).exists():
            # This raises an error that describes the directory, even for a mixture.
            read_manifest(local.folder)
        dataset = open_dataset(local.folder)
        names = [source["name"] for source in dataset.manifest["sources"]]
        for name in moved:
            check_source(name, names)
        plan = stored_plan(local.folder)
        files = [file["name"] for file in plan["files"]] if plan else []
        prefixes = None
        if plan:
            planned = {source["name"]: source["prefix"] for source in plan["sources"]}
            unnamed = {
                name: at_text(name, prefix) if from_plan else UNREAD
                for name, prefix in planned.items()
            }
            prefixes = [
                prefix_of(moved[name]) if name in moved else unnamed[name] for name in planned
            ]
        yield OpenedDataset(
            local, dataset, texts_of_dataset(local.folder, dataset.manifest), files, prefixes
        )


def check_source(name: str, names: Sequence[str]) -> None:
    """Check that the dataset has a source of this name.

    Raises:
        RecipeError: If the dataset has no such source. The message lists similar names.
    """
    if name not in names:
        raise RecipeError(
            f"--source {name}: the dataset has no source of that name; it has"
            f" {nearest(name, names)}"
        )
