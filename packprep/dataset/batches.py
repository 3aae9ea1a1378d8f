"""Read rows, and iterate over batches with a state that can be saved.

An iteration resumes exactly from its state, at any number of ranks.
"""

import html
import operator
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packprep.dataset import order
from packprep.dataset.attention import RULES
from packprep.dataset.epochs.resampling import check_accelerate
from packprep.dataset.manifest import StoredTask, is_in_place
from packprep.dataset.order import integer, true_or_false
from packprep.dataset.row_media import Media
from packprep.dataset.rows import (
    AHEAD,
    BY_ROW,
    COLUMNS,
    KNOWN,
    MADE_FROM,
    MEDIA,
    MORE_COLUMNS,
    SLOTS,
    own_dtype,
    refuse_columns,
)
from packprep.dataset.skips import Skips, skips_of_state, skips_of_steps
from packprep.errors import ArgumentError, Exhausted, StateError

# Number of samples that the first, the second and each later call of `_draw` compute at once.
_AHEAD = (1, 64, 4096)
_LIMITED = frozenset(("seq_idx", *AHEAD))  # Some tasks cannot provide these columns.
_CAUSALLY = (
    "packprep.dataset.attention.seq_idx(row.cu_seqlens, seq_length, row.cu_seqlens_padded) of"
    " each row"
)
_COUNTS = ("rows", "steps")  # These keys of a state may differ when it is loaded.
_WINDOWS = 4  # The number of windows whose order is cached.
_JOINED = {  # Keys that were added later → the check that is skipped if the key is missing.
    "digest": "whether the dataset is the same or was built again since",
    "redraw": "whether later epochs were resampled",
}
_INSTEAD = {
    "digest": (
        "a dataset that was built again may have other rows\n"
        "hint: open the dataset with this digest. If you know that the rows are the same, remove"
        " digest from the state to skip the check"
    ),
    "redraw": "later epochs would have other rows\nhint: give the redraw of the state",
    "balance": (
        "resuming would repeat and skip rows\n"
        "hint: give the balance, window and max_epochs of the state"
    ),
    "step_rows": (
        "resuming would repeat and skip rows\n"
        "hint: give batch_size · world_size with the same number of rows per step"
    ),
    "skip": (
        "resuming would repeat and skip rows\nhint: give the skip of the run that saved the state"
    ),
}
_WHERE_GIVEN = frozenset(("balance", "step_rows", "skip"))  # Only some iterations have these keys.
_MAY_LACK = _WHERE_GIVEN.union(_JOINED)


# Modules of packprep use these attributes of Reader and Batches. Trainers do not need them, so
# completion in notebooks leaves them out.
_INNER_NAMES = frozenset(
    (
        "check_redraw",
        "checked_columns",
        "costs",
        "count_delivered",
        "epoch_rows",
        "exhaustion",
        "facts",
        "fingerprint_at",
        "next_rows",
        "part",
        "plain_samples",
        "reads_of_steps",
        "redraw",
        "refuse_exhausted",
        "row_length",
        "rows_of_samples",
        "rows_of_steps",
        "samples_at_once",
        "samples_of_epochs",
        "samples_of_row",
        "step_samples",
        "tasks_with_loss",
        "what",
    )
)


def public_names(names: Iterable[str]) -> list[str]:
    """Return the names that completion in a notebook shows, sorted, and the special names."""
    return sorted(
        name for name in {*names} - _INNER_NAMES if not name.startswith("_") or name.endswith("__")
    )


class Reader:
    """The common interface of `Dataset` and `Mixture`.

    Both set the attributes below. They also define `fingerprint`, `digest`, `__len__`, `row` and:

        fingerprint_at(digest)            fingerprint of the version with this digest
        _find(rows)                       locations of rows, the argument `found` below
        _fill(found, batch, epochs, accelerate)    write these rows into arrays, column → [B, T]
        documents(row)                    documents of the segments of a row
        kinds                             names of the kinds of media
        _media(found)                     media spans of these rows
        rows_of_samples(samples, seed, shuffle)    rows and epochs of global samples
        samples_of_row(row, epochs, …)    epochs and global samples that read a row
        samples_of_epochs(epochs)         number of samples in some epochs
        check_redraw()                    raise an error if rows cannot be resampled
        tasks_with_loss()                 tasks that contribute to the loss
        costs(rows, attention, linear), epoch_rows    used by balanced steps
        rows_of_steps(…)                  used only by a mixture with several row lengths
    """

    seq_length: int
    vocab_size: int
    token_dtype: np.dtype
    encoder_length: int = 0
    what = "dataset"
    seq_lengths: tuple[int, ...] | None = (
        None  # One per dataset if they differ. Each step then reads one dataset.
    )
    kinds: tuple[str, ...] = ()  # The kinds of media, by name.
    samples_at_once: int | None = (
        None  # Limit of samples computed at once, where computing is slow; None: no limit.
    )
    _columns: tuple[str, ...] = COLUMNS
    _dtype: Any = None

    @property
    def fingerprint(self) -> str:
        raise NotImplementedError

    @property
    def digest(self) -> str:
        raise NotImplementedError

    def fingerprint_at(self, digest: str) -> str | None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __dir__(self) -> list[str]:
        return public_names(super().__dir__())

    def _find(self, rows: np.ndarray) -> Any:
        raise NotImplementedError

    def _fill(
        self,
        places: Any,
        batch: dict[str, np.ndarray],
        epochs: Sequence[int] | None,
        accelerate: str,
    ) -> None:
        raise NotImplementedError

    def _media(self, places: Any) -> Media:
        raise NotImplementedError

    def documents(self, row: int) -> list[dict[str, Any]]:
        raise NotImplementedError

    def rows_of_samples(
        self, samples: np.ndarray, seed: int, shuffle: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def samples_of_row(
        self,
        row: int,
        epochs: int,
        seed: int,
        shuffle: bool,
        step_rows: Mapping[int, int] | None = None,
    ) -> list[tuple[int, int, int]]:
        raise NotImplementedError

    def samples_of_epochs(self, epochs: int) -> int:
        raise NotImplementedError

    def costs(self, rows: np.ndarray, attention: float = 1, linear: float = 0) -> np.ndarray:
        raise NotImplementedError

    @property
    def epoch_rows(self) -> int | None:
        raise NotImplementedError

    def exhaustion(
        self, seed: int, shuffle: bool, step_rows: Mapping[int, int] | None
    ) -> tuple[int, str] | None:
        """Return the first sample beyond the max_epochs of a dataset, and an error message.

        Args:
            seed: Random seed of the order.
            shuffle: Whether rows are shuffled.
            step_rows: A dict seq_length → rows of a step over all ranks, if the datasets of a
                mixture differ in seq_length. A sample is then a whole step. Otherwise None.

        Returns:
            The global sample, and the start of an error message that names the exhausted dataset.
            None if no sample exceeds a limit.
        """
        return None

    def rows_of_steps(
        self,
        steps: np.ndarray,
        seed: int,
        shuffle: bool,
        step_rows: Mapping[int, int],
        rank: int,
        world_size: int,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        raise NotImplementedError

    def row_length(self, rows: np.ndarray) -> int:
        """Return the length that all given rows have, in slots.

        Raises:
            ArgumentError: If the rows differ in length.
        """
        return self.seq_length

    def check_redraw(self) -> None:
        raise NotImplementedError

    def tasks_with_loss(self) -> list[StoredTask]:
        raise NotImplementedError

    def checked_columns(self, columns: Iterable[str]) -> tuple[str, ...]:
        """Return the column names as a tuple after checking them.

        Raises:
            ArgumentError: If a name is not a column, or if `refuse_tasks` refuses it.
        """
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        refuse_columns(names)
        if not _LIMITED.isdisjoint(names):
            refuse_tasks(names, self.tasks_with_loss())
        return names

    def _repr_html_(self) -> str:
        """Return `str` of the dataset as HTML, for notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _with(self, **changes: Any) -> Any:
        """Return a shallow copy with some attributes replaced."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        return copy

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row as a dict column → array [T]. The arrays are writable copies.

        The columns are tokens, labels, segment_ids, position_ids and loss_mask, unless
        `with_columns` chose others.
        """
        batch = self.batch([self._place(index)])
        return {name: batch[name][0] for name in self._columns}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows as a list of dicts like `ds[i]`. Their arrays are views of one batch.

        torch's `DataLoader` calls this method.
        """
        items: list[dict[str, Any]] = [{} for _ in indices]
        batch = self.batch(indices)
        for name in self._columns:
            for item, row in zip(items, batch[name], strict=True):
                item[name] = row
        return items

    def _place(self, index: Any) -> int:
        index, n = operator.index(index), len(self)
        if not -n <= index < n:
            raise IndexError(f"row {index} of a {self.what} of {n} rows")
        return index % n

    def _places(self, indices: Any) -> np.ndarray:
        given_rows, n = np.asarray(indices, None if len(indices) else np.int64), len(self)
        if given_rows.ndim != 1 or given_rows.dtype.kind not in "iu":
            raise ArgumentError(
                "row indices should be a list of integers, but are"
                f" {given_rows.dtype}{list(given_rows.shape)}"
            )
        outside = (given_rows < -n) | (given_rows >= n)
        if outside.any():
            raise IndexError(f"row {given_rows[outside][0]} of a {self.what} of {n} rows")
        rows = given_rows.astype(np.int64)
        rows[rows < 0] += n
        return rows

    def batch(
        self,
        indices: Sequence[int] | np.ndarray,
        out: Mapping[str, np.ndarray] | None = None,
        columns: Sequence[str] | None = None,
        dtype: Any = None,
        epochs: Sequence[int] | np.ndarray | None = None,
        accelerate: str = "numpy",
    ) -> dict[str, Any]:
        """Read rows into a dict of arrays.

        Args:
            indices: Row indices, integers [B]. Negative indices count from the end.
            out: Arrays to write into: name → [B, T], or [B] for columns with one number per row.
                The result contains these arrays, with their dtypes. "media" has no array in `out`.
            columns: Names from COLUMNS and MORE_COLUMNS, or "media". The default is the names in
                `out`. Without `out`, the default is the columns of `with_columns`, or COLUMNS.
            dtype: The dtype of tokens, labels, labels_k, segment_ids, position_ids and prefix_ends,
                or a mapping column → dtype.
            epochs: The epoch of each row, [B]. A row with an epoch above 0 is resampled, see
                `redraw` in `batches`. By default, all rows are returned as stored (epoch 0).
            accelerate: The implementation that resamples, as in `batches`.

        Returns:
            A dict column → array. By default it has:

            - `tokens`, uint16 or int32[B, T].
            - `labels`, of the same dtype and shape. They are already shifted: `labels[t]` is the
              target of `logits[t]`.
            - `segment_ids`, uint16[B, T]: 1, 2, … in each row, and 0 on padding.
            - `position_ids`, int32[B, T].
            - `loss_mask`, uint8[B, T].

            On request it also has other columns of MORE_COLUMNS, among them:

            - `labels_k`, `loss_mask_k` and `loss_weights_k` (k = 2 … 8), for predicting the token
              k slots later. `labels`, `loss_mask` and `loss_weights` are for the next token.
            - `n_trained`, int32[B]: number of slots with loss.
            - `loss_weight_sum`, float32[B]: sum of the row's `loss_weights`.
            - `row_cost`, int64[B]: Σn² over the row's segments of n slots.
            - `media`, a `Media` with the media spans of the rows.

            If the dataset has an encoder_length, the dict contains it as an int, for
            `packprep.dataset.encoder_decoder.split`.

        Raises:
            ArgumentError: If an argument is invalid, or the rows differ in length.
            IndexError: If a row does not exist.
            DatasetError: If a shard is damaged or cannot be read.

        Example:
            >>> ds.batch([0, 5], columns=["tokens", "n_trained"])["tokens"].shape
            (2, 2048)
        """
        names = self._columns  # `with_columns` has checked them.
        if columns is not None:
            names = self.checked_columns(columns)
        elif out is not None:
            names = self.checked_columns(name for name in out if name != "encoder_length")
        rows = self._places(indices)
        if epochs is not None:
            if len(epochs) != len(rows):
                raise ArgumentError(f"there are {len(epochs)} epochs for {len(rows)} rows")
            epochs = [integer(f"epochs[{i}]", epoch, 0, 1 << 63) for i, epoch in enumerate(epochs)]
        with_media, names = MEDIA in names, tuple(name for name in names if name != MEDIA)
        dtypes = self._dtypes(self._dtype if dtype is None else dtype, names)
        # Find the rows before arrays are allocated: a manifest may claim more rows than exist.
        places = self._find(rows)
        batch: dict[str, Any] = {}
        for name in names:
            shape = (len(rows),) if name in BY_ROW else (len(rows), self.row_length(rows))
            if out is None:
                batch[name] = np.empty(shape, dtypes[name])
            elif name not in out:
                raise ArgumentError(f"out has no array for column {name!r}")
            elif out[name].shape != shape:
                raise ArgumentError(
                    f"out[{name!r}] has shape {list(out[name].shape)}, but should have"
                    f" {list(shape)}"
                )
            else:
                self._check_holds(name, out[name].dtype)
                batch[name] = out[name]
        self._fill(places, batch, epochs, accelerate)
        if with_media:
            batch[MEDIA] = self._media(places)
        return {**batch, "encoder_length": self.encoder_length} if self.encoder_length else batch

    def _dtypes(
        self, dtype: Any, names: Sequence[str] = COLUMNS + MORE_COLUMNS
    ) -> dict[str, np.dtype]:
        """Return the dtype of each column.

        `dtype` is one dtype for all ids, a mapping column → dtype, or None for the default dtypes.
        """
        by_name = isinstance(dtype, Mapping)
        if by_name and not dtype.keys() <= KNOWN:
            refuse_columns([*dtype])
        dtypes = {}
        for name in names:
            asked = (
                dtype.get(name)
                if by_name
                else dtype
                if name in SLOTS and SLOTS[name].cast
                else None
            )
            try:
                dtypes[name] = (
                    own_dtype(name, self.token_dtype) if asked is None else np.dtype(asked)
                )
            except TypeError as error:
                message = (
                    f"the dtype of {name!r} is {asked!r}, but should be a NumPy dtype: {error}"
                )
                raise ArgumentError(message) from error
            if asked is not None:
                self._check_holds(name, dtypes[name])
        return dtypes

    def _check_holds(self, name: str, dtype: np.dtype) -> None:
        """Check that a dtype can hold every value of a column.

        Without this check, numpy would wrap ids and truncate weights.

        Raises:
            ArgumentError: If the dtype cannot hold every value.
        """
        source_column = AHEAD[name][0] if name in AHEAD else name
        greatest_value = {
            "tokens": self.vocab_size - 1,
            "labels": self.vocab_size - 1,
            "loss_mask": 1,
            "row_cost": self.seq_length**2,
        }.get(source_column, self.seq_length)
        if source_column in ("loss_weights", "loss_weight_sum"):
            holds = dtype.kind not in "biu"
        elif dtype.kind in "iu":
            holds = np.iinfo(dtype).max >= greatest_value
        elif dtype.kind == "f":
            # A float holds every integer up to 2^(mantissa bits + 1).
            holds = 2 << np.finfo(dtype).nmant >= greatest_value
        else:
            holds = dtype.kind != "b" or greatest_value == 1
        if not holds:
            values = (
                "weights, which are not whole numbers"
                if name.startswith("loss_weight")
                else f"values up to {greatest_value}"
            )
            raise ArgumentError(
                f"the dtype of {name!r} is {dtype}, which cannot hold its {values}\n"
                "hint: give a wider dtype"
            )

    def with_columns(self, columns: Iterable[str] = COLUMNS, dtype: Any = None) -> Any:
        """Return a view of the dataset with other default columns and dtypes.

        The defaults apply to `ds[i]`, `ds.__getitems__`, `batch` and `batches`, unless a call sets
        its own. A torch `DataLoader` over the view reads only these columns.

        Args:
            columns: Names of columns, as in `batch`.
            dtype: One dtype for all ids, or a mapping column → dtype, as in `batch`.

        Returns:
            A copy of this `Dataset` or `Mixture` with these defaults.

        Raises:
            ArgumentError: If a column does not exist, a task cannot provide it, or its values do
                not fit the dtype.

        Example:
            DataLoader(ds.with_columns(["tokens", "loss_mask"], dtype=np.int64), batch_size=8)
        """
        return self._with(_columns=self.checked_columns(columns), _dtype=self._dtypes(dtype))

    def batches(
        self,
        batch_size: int | Mapping[int, int],
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        epochs: int | None = None,
        columns: Sequence[str] | None = None,
        dtype: Any = None,
        redraw: bool = False,
        samples: int | None = None,
        accelerate: str = "numpy",
        balance: tuple[str | tuple[float, float], int] | None = None,
        window: int | None = None,
        skip: Sequence[tuple[int, int]] | None = None,
    ) -> "Batches":
        """Iterate over batches, endlessly unless `epochs` or `samples` is given.

        `packprep.dataset.order` describes the order of rows.

        Args:
            batch_size: Rows per rank and step. A mixture of several seq_lengths takes a dict
                {seq_length: rows}. Each step of such a mixture reads one dataset. The shares are
                then shares of steps, `samples` is a number of steps, and max_epochs is rounded down
                to whole steps.
            seed: Random seed of the order.
            rank: Index of this data-parallel rank.
            world_size: Number of data-parallel ranks.
            shuffle: Whether to shuffle the rows in every epoch. Otherwise they come in stored
                order.
            epochs: Number of epochs to deliver. A mixture has no epochs, because its datasets end
                at different times.
            columns: Names of columns, as in `batch`.
            dtype: The dtypes of columns, as in `batch`.
            redraw: Whether to resample corruption in every epoch except 0, which has the stored
                rows. Spans, pivots, cuts and noise are drawn again from the same distributions.
            samples: Number of rows to deliver over all ranks. It cannot be combined with `epochs`.
            accelerate: The implementation that resamples: "numpy", "numba" for the compiled kernels
                of a build, or "auto" for numba where it is installed. All give the same rows.
            balance: (cost, group), to give all ranks rows of similar cost in each step. With the
                cost "attention", a row costs Σn² over its segments of n slots. With the cost (a,
                b), a row costs a · Σn² + b · Σn. `group` should be the number of rows of a step
                over all ranks, batch_size · world_size. With a different batch_size or world_size,
                the order of rows stays the same, but the ranks' costs are less similar.
            window: Number of rows of the shuffled order that are sorted by cost together, a
                multiple of `group`. The default is 64 · group. The sorted rows are cut into groups,
                and the groups are shuffled. So the rows of a step have similar costs. Every rank
                reads the segment boundaries of all rows.
            skip: Ranges of steps to leave out, as pairs (first, last). The steps count from the
                start of the order at this batch_size and world_size, as if nothing were left out.
                All other rows keep their order. The state stores the ranges as samples, so a run
                that loads the state skips the same rows at any world size, without `skip`.

        Returns:
            A `Batches`: an iterator of dicts as `batch` returns them.

        Raises:
            ArgumentError: If an argument is invalid. All arguments are checked before the first
                batch.
            Exhausted: If a dataset of a mixture reaches its max_epochs before the end that
                `samples` sets. Without `samples`, the iterator raises it later, at the first step
                beyond max_epochs.

        Example:
            >>> batches = ds.batches(8, rank=0, world_size=2, columns=["tokens", "labels"])
            >>> next(batches)["tokens"].shape
            (8, 2048)
        """
        batches = Batches()
        world_size = batches._world_size = integer("world_size", world_size, 1, 1 << 31)
        rank = batches._rank = integer("rank", rank, 0, world_size)
        sizes = _sizes(batch_size, self.seq_lengths, lambda: self.seq_length)
        batches._step_rows, batches._share = None, (rank, world_size)
        if self.seq_lengths is None:
            (batches._batch_size,) = sizes.values()
        else:
            batches._batch_size, batches._world_size, batches._rank = 1, 1, 0  # A sample is a step.
            batches._step_rows = {length: rows * world_size for length, rows in sizes.items()}
        if epochs is not None and samples is not None:
            raise ArgumentError(
                f"epochs = {epochs!r} and samples = {samples!r} both set the end\n"
                "hint: give only one of them"
            )
        if epochs is not None:
            epochs = integer("epochs", epochs, 0, 1 << 31)
            batches._order_end = batches.end = self.samples_of_epochs(epochs)
        elif samples is not None:
            batches.end = integer("samples", samples, 0, order.SAMPLES_END)
        if len(self) == 0 and batches.end != 0:
            raise ArgumentError(f"{self!r} has no rows, so it has no batches")
        # Check all arguments here, so that no error comes later, after some batches or an epoch.
        batches.dataset = self
        batches._columns = None if columns is None else self.checked_columns(columns)
        batches._seed = integer("seed", seed, 0, 1 << 64)
        batches._shuffle = true_or_false("shuffle", shuffle)
        batches._dtype = None if dtype is None else self._dtypes(dtype)
        batches._windows = {}
        batches._balance = order.balance_of(balance, window, batches._shuffle)
        if batches._balance is not None and batches._step_rows is not None:
            raise ArgumentError(
                "balance requires rows of one seq_length, but this mixture has several\n"
                "hint: leave balance out"
            )
        batches._exhaustion = self.exhaustion(batches._seed, batches._shuffle, batches._step_rows)
        # Balancing must not move rows after the exhausted sample to before it.
        if batches._exhaustion is not None and batches._balance is not None:
            batches._balance = order.ending_at(batches._balance, batches._exhaustion[0])
        batches._own_skips = skips_of_steps(skip, batches.step_samples)
        batches._leave_out(batches._own_skips)
        if batches.end is not None:
            batches.refuse_exhausted(batches.end)
        batches._redraw, batches._accelerate = true_or_false("redraw", redraw), accelerate
        check_accelerate(accelerate)
        if redraw:
            self.check_redraw()
        batches._restart(0)
        return batches


class Batches:
    """An iterator over the batches of one rank. `Dataset.batches` creates it.

    Its state can be loaded with any world size and batch size.

    Attributes:
        dataset: The `Dataset` or `Mixture` to read.
        end: The number of global samples to deliver over all ranks, or None for no end.

    Example:
        >>> batches = ds.batches(batch_size=8, seed=0)
        >>> batch = next(batches)
        >>> state = batches.state_dict()
        >>> ds.batches(batch_size=4, seed=0, rank=1, world_size=2).load_state_dict(state)
    """

    dataset: Reader
    end: int | None = None
    _batch_size: int
    _world_size: int
    _rank: int
    # The arguments rank and world_size. If a sample is a whole step, `_rank` is 0 and `_world_size`
    # is 1 instead.
    _share: tuple[int, int]
    # If a sample is a whole step: seq_length → rows of a step over all ranks. Otherwise None.
    _step_rows: dict[int, int] | None
    _first: int = 0  # Only the steps _first, _first + _every, _first + 2 · _every, … are delivered.
    _every: int = 1
    _seed: int
    _shuffle: bool
    _columns: tuple[str, ...] | None
    _dtype: Any
    _redraw: bool
    _accelerate: str
    _balance: order.Balance | None
    # The first sample of the order beyond a max_epochs, and the start of an error message.
    _exhaustion: tuple[int, str] | None
    _order_end: int | None = None  # The sample at which `epochs` ends, if nothing were left out.
    _own_skips: Skips  # The ranges of the argument `skip`.
    _skips: Skips  # These ranges, and the ranges of the state that was loaded last.
    # First sample of a window → the window's samples of the unbalanced order, in balanced order.
    _windows: dict[int, np.ndarray]

    def __repr__(self) -> str:
        size: Any = self._batch_size
        if self._step_rows is not None:
            world_size = self._share[1]
            size = {length: rows // world_size for length, rows in self._step_rows.items()}
        rank, world_size = self._share
        return (
            f"Batches({self.dataset!r}: batch_size {size}, rank {rank} of {world_size}, at step"
            f" {self._step})"
        )

    def __dir__(self) -> list[str]:
        return public_names(super().__dir__())

    def _restart(self, rows: int) -> None:
        self._rows = rows  # Number of rows that all ranks delivered before step 0.
        self._step = 0
        # The rows and epochs of the next steps.
        self._ahead: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self._draws = 0

    def _leave_out(self, skips: Skips) -> None:
        self._skips = skips
        if self._order_end is not None:
            self.end = skips.n_delivered(self._order_end)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, Any]:
        rows, epochs = self.next_rows()
        options: dict[str, Any] = {"columns": self._columns, "dtype": self._dtype}
        if self._redraw:
            options |= {"epochs": epochs, "accelerate": self._accelerate}
        batch = self.dataset.batch(rows, **options)
        self.count_delivered()  # A batch that could not be read is not delivered.
        return batch

    def next_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the next step and their epochs, without delivering them.

        Returns:
            Two arrays int64[B]. In the last step, a rank may have fewer rows, or none.

        Raises:
            StopIteration: If no step is left.
            Exhausted: If the step is beyond the max_epochs of a dataset.
        """
        if not self._ahead:
            self._draw()
        if not self._ahead:
            raise StopIteration
        return self._ahead[0]

    def count_delivered(self) -> None:
        """Count the rows of `next_rows` as delivered."""
        self._ahead.popleft()
        self._step += 1

    def _draw(self) -> None:
        """Append the rows and epochs of the next steps to `_ahead`.

        If no step is left, nothing is appended.
        """
        size, world = self._batch_size, self._world_size
        # The first call computes few steps, so that the first batch comes soon. Later calls compute
        # more at once.
        most_rows = (
            size if self._step_rows is None else max(self._step_rows.values()) // self._share[1]
        )
        steps = max(1, _AHEAD[min(self._draws, len(_AHEAD) - 1)] // most_rows)
        self._draws += 1
        window = self.dataset.samples_at_once if self._balance is None else self._balance.window
        # Without this limit, each of many ranks would compute very many samples of other ranks.
        if window is not None:
            steps = min(steps, max(1, window // (self.step_samples * self._every)))
        next_step = self._first + self._step * self._every
        if self.end is not None:
            steps = min(
                steps,
                -(-(order.n_steps(self._rows, self.end, size, world) - next_step) // self._every),
            )
        # Deliver only whole steps, so that all ranks end at the same step.
        elif self._exhaustion is not None:
            self.refuse_exhausted(self._rows + (next_step + 1) * self.step_samples)
            end = self._skips.n_delivered(self._exhaustion[0])
            steps = min(
                steps,
                -(-((end - self._rows) // self.step_samples - next_step) // self._every),
            )
        if steps <= 0:
            return
        numbers = range(next_step, next_step + steps * self._every, self._every)
        self._ahead.extend((rows, epochs) for _, rows, epochs in self._steps(numbers))

    def _steps(self, numbers: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return the samples, rows and epochs of this rank in some steps.

        Steps count from the last state that was loaded. Samples are samples of the order. In a
        mixture of several seq_lengths, a step has one sample, but several rows.
        """
        size, rank, world = self._batch_size, self._rank, self._world_size
        delivered = np.array(
            [order.samples_of_step(self._rows, n, size, rank, world) for n in numbers], np.int64
        )
        if self._step_rows is not None:
            samples = self._skips.of_delivered(delivered[:, 0])
            arguments = (self._seed, self._shuffle, self._step_rows, *self._share)
            rows_and_epochs = self.dataset.rows_of_steps(samples, *arguments)
            return [
                (np.full(len(rows), sample), rows, epochs)
                for sample, (rows, epochs) in zip(samples.tolist(), rows_and_epochs, strict=True)
            ]
        rows, epochs = self.rows_of_samples(delivered)
        samples = self._skips.of_delivered(delivered)
        is_delivered = delivered < (np.iinfo(np.int64).max if self.end is None else self.end)
        return [
            (s[k], r[k], e[k])
            for s, r, e, k in zip(samples, rows, epochs, is_delivered, strict=True)
        ]

    def documents(self, step: int) -> list[dict[str, Any]]:
        """Return the documents that this rank reads in a step.

        The documents follow from the order of rows and the headers of segments, so any step of any
        run can be looked up at once. The iterator does not move. In a mixture of several
        seq_lengths, the global sample of a row is the number of the step.

        Args:
            step: Number of the step. Step 0 is the first step after the state that was loaded last,
                or the first step of all. A negative number is a step before that state, at this
                batch_size and world_size.

        Returns:
            A dict for each segment of the batch, in the order of the batch:

            - position: Index of the row in the batch.
            - sample: Global sample of the row, as if `skip` were not given.
            - row, epoch: Index of the row in the dataset or mixture, and its epoch.
            - segment: Number of the segment in the row, from 1.
            - source, file, document: Name of the source, name of the file, position in the file.
            - repeat: Number of the pass over the document.
            - tokens: [first, end) of the document's tokens.
            - task: Name of the task.
            - dataset: Index of the dataset. Only in a mixture.

        Raises:
            ArgumentError: If the step is not part of the run.
            DatasetError: If plan.json is missing, or a file is damaged.

        Example:
            >>> batches = ds.batches(8, seed=0, rank=3, world_size=16)
            >>> {(found["file"], found["document"]) for found in batches.documents(12_345)}
            {('web/a.jsonl', 81_932), …}
        """
        ((samples, rows, epochs),) = self.reads_of_steps([step])
        return [
            {"position": i, "sample": sample, "row": row, "epoch": epoch, **document}
            for i, (sample, row, epoch) in enumerate(
                zip(samples.tolist(), rows.tolist(), epochs.tolist(), strict=True)
            )
            for document in self.dataset.documents(row)
        ]

    def reads_of_steps(self, steps: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        """Return the samples, rows and epochs that this rank reads in some steps.

        Args:
            steps: Numbers of steps, as in `documents`.

        Returns:
            Three arrays int64[B] for each step, as `documents` describes them.

        Raises:
            ArgumentError: If a step is not part of the run.
        """
        end = self._end_of_run()
        for step in steps:
            begin = self._rows + operator.index(step) * self.step_samples
            if not 0 <= begin < end:
                first_step, last_step = -(self._rows // self.step_samples), (end - 1 - self._rows)
                numbers = f"{first_step} … {last_step // self.step_samples}" if end else "none"
                raise ArgumentError(f"step {step} is not part of the run; its steps are {numbers}")
        return [*self._steps(steps)] if steps else []

    def reads_of_row(self, row: int, epochs: int = 1) -> list[dict[str, Any]]:
        """Return the steps in which all ranks together read a row.

        Steps are counted from the state that was loaded last, so that they may be negative.

        Args:
            row: Index of the row in the dataset or mixture.
            epochs: Number of epochs of the row's dataset to search, from epoch 0.

        Returns:
            A dict for each time that the row is read, in order:

            - epoch: The epoch of the row's dataset.
            - sample: The global sample, as if `skip` were not given.
            - step: The step, or None if `skip` leaves the sample out.
            - rank, position: The rank, and the index of the row in its batch. Not with step None.

            Reads after the end of the run are missing.

        Raises:
            ArgumentError: If `epochs` is invalid.
            IndexError: If the row does not exist.
        """
        epochs = integer("epochs", epochs, 0, 1 << 31)
        row_samples = self.dataset.samples_of_row(
            row, epochs, self._seed, self._shuffle, self._step_rows
        )
        end = self._end_of_run()
        reads = []
        for epoch, plain, index in row_samples:
            sample = self._balanced_sample(plain)
            read: dict[str, Any] = {"epoch": epoch, "sample": sample, "step": None}
            delivered = self._skips.n_delivered(sample)
            if delivered >= end:
                continue
            # A skipped sample would map to the next delivered sample.
            if self._skips.of_delivered(np.array(delivered)) == sample:
                step, place = divmod(delivered - self._rows, self.step_samples)
                size = self._batch_size
                if self._step_rows is not None:
                    length = self.dataset.row_length(self.dataset._places([row]))
                    place, size = index, self._step_rows[length] // self._share[1]
                read |= {"step": step, "rank": place // size, "position": place % size}
            reads.append(read)
        return reads

    def _end_of_run(self) -> int:
        """Return the number of samples that all ranks have delivered after the last step."""
        if self.end is not None:
            return self.end
        if self._exhaustion is None:
            return order.SAMPLES_END
        # Only whole steps are delivered before a max_epochs.
        end = self._skips.n_delivered(self._exhaustion[0])
        return end - (end - self._rows) % self.step_samples

    def _balanced_sample(self, plain: int) -> int:
        """Return the sample of the balanced order for a sample of the unbalanced order."""
        if self._balance is None:
            return plain
        begin, end = order.window_of(
            plain, self._balance.window, self.dataset.epoch_rows, self._balance.end
        )
        return begin + int(np.flatnonzero(self._window(begin, end) == plain)[0])

    @property
    def step_samples(self) -> int:
        """The number of samples in a step over all ranks.

        A sample is a row. In a mixture of several seq_lengths, a sample is a whole step, so the
        number is 1.
        """
        return self._batch_size * self._world_size

    def refuse_exhausted(self, end: int, skips: Skips | None = None) -> None:
        """Raise Exhausted if the first `end` delivered samples exceed a max_epochs.

        Args:
            end: Number of delivered samples.
            skips: Ranges of samples that are left out. None means the ranges of this iteration.
        """
        if self._exhaustion is None:
            return
        sample, problem = self._exhaustion
        sample = (self._skips if skips is None else skips).n_delivered(sample)
        if end > sample:
            raise Exhausted(
                f"{problem} before sample {sample}\n"
                f"hint: set samples = {sample}, lower its shares, or raise max_epochs"
            )

    def rows_of_samples(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and epochs of delivered samples of this iteration.

        Samples that `skip` leaves out are not counted. With `balance`, samples are counted in the
        balanced order.

        Args:
            samples: Numbers of delivered samples, integers of any shape, at least 0.

        Returns:
            The rows and their epochs, int64, shaped as `samples`.
        """
        of_order = self._skips.of_delivered(np.asarray(samples, np.int64))
        return self.dataset.rows_of_samples(self.plain_samples(of_order), self._seed, self._shuffle)

    def plain_samples(self, samples: np.ndarray) -> np.ndarray:
        """Convert samples of the balanced order to samples of the unbalanced order.

        Without `balance`, the numbers do not change.

        Args:
            samples: Global samples of the order, integers of any shape.

        Returns:
            Global samples of the unbalanced order, int64, shaped as `samples`.
        """
        samples = np.asarray(samples, np.int64)
        if self._balance is None:
            return samples
        flat, plain = samples.ravel(), np.empty(samples.size, np.int64)
        is_missing = np.ones(flat.size, bool)
        while is_missing.any():
            begin, end = order.window_of(
                int(flat[np.argmax(is_missing)]),
                self._balance.window,
                self.dataset.epoch_rows,
                self._balance.end,
            )
            in_window = (begin <= flat) & (flat < end)
            plain[in_window] = self._window(begin, end)[flat[in_window] - begin]
            is_missing &= ~in_window
        return plain.reshape(samples.shape)

    def _window(self, begin: int, end: int) -> np.ndarray:
        window_order = self._windows.get(begin)
        if window_order is None:
            assert self._balance is not None
            rows, _ = self.dataset.rows_of_samples(np.arange(begin, end), self._seed, self._shuffle)
            costs = self.dataset.costs(rows, self._balance.attention, self._balance.linear)
            window_order = begin + order.balanced(costs, begin, self._balance, self._seed)
            while len(self._windows) >= _WINDOWS:
                self._windows.pop(next(iter(self._windows)), None)
            self._windows[begin] = window_order
        return window_order

    def part(self, first_step: int, every: int, steps_made: int) -> None:
        """Restrict the iteration to every `every`-th step, from `first_step` on.

        Args:
            first_step: Number of the first step.
            every: Distance between two steps.
            steps_made: Number of steps in this series that have already been delivered. They are
                skipped.
        """
        self._restart(self._rows)
        self._first, self._every, self._step = first_step, every, steps_made

    def state_dict(self) -> dict[str, Any]:
        """Return the state after all batches so far, as a dict that can be written as JSON.

        The state is the same on all ranks. It has the keys `fingerprint`, `digest`, `seed`,
        `shuffle`, `redraw` and `rows`. `rows` is the number of rows that all ranks have delivered
        together. With balanced steps, the state also has the key `balance`. In a mixture of several
        seq_lengths, `rows` is the number of steps, and the key `step_rows` maps each seq_length to
        the number of rows in a step. If steps are left out, the key `skip` has their samples, and
        `rows` does not count them.
        """
        return self.state_after(0)

    def state_after(self, steps: int) -> dict[str, Any]:
        """Return the state that `state_dict` would return after `steps` more steps."""
        rows = self._rows + (self._step + steps) * self.step_samples
        if self.end is not None:
            rows = max(self._rows, min(rows, self.end))
        settings: dict[str, Any] = {
            "fingerprint": self.dataset.fingerprint,
            "digest": self.dataset.digest,
        }
        if self._balance is not None:
            settings["balance"] = {
                key: value for key, value in self._balance._asdict().items() if value is not None
            }
        if self._step_rows is not None:
            settings["step_rows"] = {
                str(length): rows for length, rows in sorted(self._step_rows.items())
            }
        if self._skips.ranges:
            settings["skip"] = self._skips.stored()
        return {
            **settings,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "redraw": self._redraw,
            "rows": rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the rows that were delivered when `state` was saved.

        If documents were removed from the dataset after the state was saved, the state is still
        accepted, because rows keep their indices. A state from an older version of packprep may
        lack the key `digest` or `redraw`. It is accepted with a warning. The next state that
        `state_dict` returns has both keys.

        The iteration leaves out the samples that the state leaves out. It also leaves out its own
        `skip`, which may name steps after the state.

        Args:
            state: A state from `state_dict`.

        Raises:
            StateError: If the state is invalid, comes from another dataset, seed or order, or has
                already delivered samples that `skip` leaves out.
            Exhausted: If the state leaves out samples, so that a dataset of a mixture reaches its
                max_epochs before the end that `samples` sets.
        """
        skips, mine = skips_of_state(state), self.state_dict()
        if skips.ranges:
            mine["skip"] = skips.stored()
        else:
            mine.pop("skip", None)
        check_state(self._with_own_end(state, skips), mine, self.dataset)
        rows = state["rows"]
        if type(rows) is not int or not 0 <= rows < order.SAMPLES_END:
            raise StateError(f"the state's rows is {rows!r} and should be an integer of at least 0")
        skips = skips.joined(self._own_skips, rows)
        if self.end is not None:
            self.refuse_exhausted(self.end, skips)
        self._leave_out(skips)
        self._restart(rows)

    def _with_own_end(self, state: Mapping[str, Any], skips: Skips) -> Mapping[str, Any]:
        """Replace the `end` in the state's balance with the `end` of this iteration.

        The result is a new state. With balanced steps, the window that contains `end` is cut in two
        at `end`. If the state was saved inside a window that is cut at the old or the new `end`,
        the replacement could change later rows. In this case, the result is `state` itself, so that
        `check_state` compares the ends. `skips` are the ranges of the state, because windows count
        samples of the order, and `rows` counts delivered samples.
        """
        balance, rows = (
            (state.get(key) for key in ("balance", "rows"))
            if isinstance(state, Mapping)
            else (None, None)
        )
        if self._balance is None or not isinstance(balance, Mapping) or type(rows) is not int:
            return state
        if not 0 <= rows < order.SAMPLES_END:
            return state
        own_balance, window = {"end": self._balance.end}, self._balance.window
        position = skips.position(rows)
        for end in (own_balance["end"], balance.get("end")):
            if type(end) is int and end // window == position // window and position % window:
                return state
        other_keys = {key: value for key, value in balance.items() if key != "end"}
        return {
            **state,
            "balance": {**other_keys, **(own_balance if own_balance["end"] is not None else {})},
        }


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any], dataset: Reader) -> None:
    """Check that a saved state fits the iteration that loads it.

    `state` and `mine` must have the same keys and values, but their `rows` and `steps` may differ.
    If `state` does not have the key `digest` or `redraw`, because an older packprep wrote it, a
    warning is issued.

    Args:
        state: The saved state.
        mine: The current state of the iteration.
        dataset: The dataset of the iteration. The digest in `state` may be the digest of an earlier
            version, from before documents were removed.

    Raises:
        StateError: If a key or a value differs.
    """
    if (
        not isinstance(state, Mapping)
        or not mine.keys() - _MAY_LACK <= state.keys() <= mine.keys() | _WHERE_GIVEN
    ):
        keys = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(
            f"a loader state has the keys {sorted(mine)}, not {keys}\n"
            "hint: pass the result of state_dict()"
        )
    # A removal of documents keeps the indices of rows, so a state from before the removal fits.
    if isinstance(digest := state.get("digest"), str) and (
        earlier_fingerprint := dataset.fingerprint_at(digest)
    ):
        mine = {**mine, "fingerprint": earlier_fingerprint, "digest": digest}
    for key in dict.fromkeys((*mine, *state)):
        ours, theirs = mine.get(key), state.get(key)
        checked = key not in _COUNTS and (key in state or key in _WHERE_GIVEN)
        if checked and (type(theirs), theirs) != (type(ours), ours):
            instead = (
                "resuming would repeat and skip rows\n"
                "hint: open that dataset with the seed and shuffle of the state"
            )
            raise StateError(
                f"the state's {key} is {theirs!r}, but this loader's is {ours!r}:"
                f" {_INSTEAD.get(key, instead)}"
            )
    absent = [key for key in _JOINED if key in mine and key not in state]
    if absent:
        unknown = ", and ".join(_JOINED[key] for key in absent)
        warnings.warn(
            f"the loader state has no {' and no '.join(absent)}, because an older packprep wrote"
            f" it. It is accepted without a check of {unknown}. The next state has"
            f" {'it' if len(absent) == 1 else 'both'}",
            stacklevel=3,
        )


def refuse_tasks(names: Iterable[str], tasks: Sequence[StoredTask]) -> None:
    """Check that the tasks with loss can provide the given columns.

    `seq_idx` is for layers that see only earlier tokens, so it is refused if a task attends to
    later tokens. `labels_k`, `loss_mask_k` and `loss_weights_k` are for predicting later tokens, so
    they are refused if all tasks are same-position tasks. If only some tasks are, the columns are
    allowed. In the segments of same-position tasks, labels are the pad id, and masks and weights
    are 0.

    Args:
        names: Names of columns.
        tasks: The tasks with loss.

    Raises:
        ArgumentError: If a column is refused. The message names the tasks that cannot provide it.
    """
    for name in names:
        refused, why = [], ""
        if name == "seq_idx":
            refused = [task for task in tasks if RULES[task["attention"]].ahead != "never"]
            names_refused = {task["name"] for task in refused}
            other_names = [
                *dict.fromkeys(task["name"] for task in tasks if task["name"] not in names_refused)
            ]
            ways = (
                [f"limit the loss to the others with with_loss_on(task={other_names})"]
                if other_names
                else []
            )
            ways.append("use a dataset of causal tasks")
            if all(RULES[task["attention"]].ahead == "prefix" for task in refused):
                ways.append(f"read prefixes causally: {_CAUSALLY}")
            why = (
                "attends bidirectionally, but layers that need seq_idx only see the past\n"
                f"hint: {', or '.join(ways)}"
            )
        elif name in AHEAD and all(is_in_place(task) for task in tasks):
            refused = [*tasks]
            why = (
                f"predicts the same position, so it has no {name}\n"
                f"hint: use {MADE_FROM[name]}, or a dataset with a next-token task"
            )
        if refused:
            raise ArgumentError(
                f"task {', '.join(dict.fromkeys(task['name'] for task in refused))} {why}"
            )


def _sizes(batch_size: Any, lengths: tuple[int, ...] | None, length: Any) -> dict[Any, int]:
    """Return the argument batch_size as a dict seq_length → rows per rank and step.

    The number 8 gives {None: 8}. `lengths` has the seq_length of each dataset in a mixture if they
    differ, otherwise None. `length` is a function that returns the common seq_length. Without
    `lengths`, the function is called if `batch_size` is a dict.

    Raises:
        ArgumentError: If the keys of `batch_size` are not the seq_lengths of the rows.
    """
    if not isinstance(batch_size, Mapping):
        if lengths is not None:
            example = ", ".join(f"{seq_length}: …" for seq_length in sorted(set(lengths)))
            raise ArgumentError(
                f"batch_size is {batch_size!r}, but rows differ in seq_length\n"
                f"hint: give {{{example}}}"
            )
        return {None: integer("batch_size", batch_size, 1, 1 << 31)}
    seq_lengths = {length()} if lengths is None else {*lengths}
    if batch_size.keys() != seq_lengths:
        raise ArgumentError(
            f"batch_size has the seq_lengths {sorted(batch_size)}, but the rows have"
            f" {sorted(seq_lengths)}\n"
            "hint: give the seq_lengths of the rows"
        )
    return {
        key: integer(f"batch_size[{key}]", rows, 1, 1 << 31) for key, rows in batch_size.items()
    }
