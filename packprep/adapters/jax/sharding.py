"""Which rows of a global batch this process reads, and how its arrays lie on the devices."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from packprep.adapters.jax.columns import LAYOUT_COLUMNS
from packprep.errors import ArgumentError


def data_rank(sharding: Any, shape: tuple[int, int]) -> tuple[int, int]:
    """(rank, world size) of this process among those that share the rows of a global batch of `shape`, [B, T].

    The rows that this process' devices hold are [rank · B/world size, (rank + 1) · B/world size). Axes that do not cut
    rows do not count: processes that are replicas have the same rank. Raises ArgumentError if the sharding does not
    fit the shape, or if those rows are no such share.
    """
    if not hasattr(sharding, "addressable_devices_indices_map"):
        raise ArgumentError(
            f'sharding is {sharding!r} and should be a jax.sharding.Sharding, as NamedSharding(mesh, PartitionSpec("data"))'
        )
    try:
        indices = sharding.addressable_devices_indices_map(shape).values()
    except ValueError as error:
        raise ArgumentError(f"the sharding does not fit a batch of {list(shape)}: {error}") from error
    n_rows = shape[0]
    held = np.zeros(n_rows, bool)
    for rows, *_ in indices:
        held[rows] = True
    rows = np.flatnonzero(held)
    if len(rows) == 0:
        raise ArgumentError("the sharding has no device of this process: build the mesh over the devices of all")
    begin, size = int(rows[0]), len(rows)
    if rows[-1] - begin + 1 != size:
        apart = int(rows[int(np.argmax(np.diff(rows) > 1))])
        raise ArgumentError(
            f"this process' devices hold rows {begin} … {apart} and then row {rows[rows > apart][0]} of {n_rows}: order "
            "the mesh so that each process' devices are neighbours on the axes that cut rows"
        )
    if n_rows % size or begin % size:
        raise ArgumentError(
            f"this process' devices hold rows [{begin}, {begin + size}) of {n_rows}, no equal share of them: give every "
            "process equally many devices on the axes that cut rows"
        )
    return begin // size, n_rows // size


def _row_sharding(sharding: Sharding) -> Sharding:
    """The same for arrays whose second axis is not the row's slots: only rows are cut."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return sharding


def global_arrays(
    sharding: Sharding, batch: Mapping[str, np.ndarray], columns: Collection[str], n_rows: int
) -> dict[str, jax.Array]:
    """These columns of this process' rows as global arrays of `n_rows` rows, which all processes make together."""
    cut_by_rows = _row_sharding(sharding)
    arrays = {}
    for name in columns:
        its_sharding = cut_by_rows if name in LAYOUT_COLUMNS else sharding
        shape = (n_rows, batch[name].shape[1])
        arrays[name] = jax.make_array_from_process_local_data(its_sharding, batch[name], shape)
    return arrays
