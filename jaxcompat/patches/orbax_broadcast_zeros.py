"""Orbax's single-replica broadcast reaches every replica, not only those of other slices.

Orbax 0.11.20 - 0.11.25 lay the replicas out by `slice_count`, the number of different
``slice_index`` among the devices. Where that is not the number of replicas (on CPU, and wherever
several replicas share a slice, it is 1) the sum runs over slices that have no part of it, and
every replica keeps what it put in: the values in the one that read, zeros in the others. Before
and after, the replicas are counted by the mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from jaxcompat.patch import Patch, Site

_replicas: ContextVar[int | None] = ContextVar("jaxcompat.replicas", default=None)


def _counting(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(broadcast)
    def broadcast_to_replicas(
        in_tree: Any, global_mesh: Any, replica_axis_index: int, *args: Any, **kwargs: Any
    ) -> Any:
        token = _replicas.set(global_mesh.devices.shape[replica_axis_index])
        try:
            return broadcast(in_tree, global_mesh, replica_axis_index, *args, **kwargs)
        finally:
            _replicas.reset(token)

    return broadcast_to_replicas


def _counted(slice_count: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(slice_count)
    def replicas_or_slices() -> int:
        replicas = _replicas.get()
        return slice_count() if replicas is None else replicas

    return replicas_or_slices


PATCH = Patch(
    id="orbax-broadcast-zeros",
    symptom=(
        "After a restore with SingleReplicaArrayHandler every replica but the one that read the "
        'checkpoint holds "zeros", and no error says so: with several replicas in one slice, and '
        "on CPU always."
    ),
    cause=(
        "Orbax 0.11.20 - 0.11.25 count the slices of the hardware where the replicas of the mesh "
        "are meant, and with another number the sum that broadcasts adds up nothing."
    ),
    mend=(
        "While Orbax broadcasts, its slice_count answers the number of replicas on the mesh's "
        "replica axis, as the releases before and after count them. At all other times, and where "
        "the two agree, it answers what it did."
    ),
    until="orbax-checkpoint 0.11.26.",
    affected=({"orbax-checkpoint": ">=0.11.20,<0.11.26", "jax": ">=0.6.0"},),
    sites=(
        Site(
            "orbax.checkpoint._src.multihost.multislice:broadcast_one_replica_to_all",
            _counting,
            relies_on=("in_tree", "global_mesh", "replica_axis_index"),
        ),
        Site("orbax.checkpoint._src.multihost.multislice:slice_count", _counted),
    ),
    upstream=("https://github.com/google/orbax/releases/tag/v0.11.26",),
    aftermath=(
        "Checkpoints are right as they were saved, but a job that went on from such a restore "
        "trained with zeros in every other replica, and what it saved since is not to be trusted: "
        "go back to the last checkpoint before it. To check a restore, compare each host's shards "
        'with the checkpoint, byte for byte: README.md, "Was an earlier restore wrong?".'
    ),
)
