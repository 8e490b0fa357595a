"""What is known and not mended: each with the reason, and the way out.

The ranges were run on some pairs, and not from both sides at each bound as a patch's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxcompat.versions import Installed, Ranges, judge


class Known(NamedTuple):
    """One incompatibility that no patch mends; its id is never a patch's."""

    id: str
    symptom: str
    """What the user sees, in the user's words."""
    affected: Sequence[Ranges]
    reason: str
    """Why it is not mended."""
    advice: str
    """The way out."""
    upstream: tuple[str, ...] = ()


KNOWN = (
    Known(
        id="jax-cpu-nan-payload",
        symptom=(
            "On CPU a signalling NaN comes back as a quiet one, in leaves of bfloat16 and float8 "
            "(from JAX 0.11.2 on: float8 only) that were saved by several replicas together."
        ),
        affected=(
            {"orbax-checkpoint": ">=0.11.0", "jax": ">=0.6.0,<0.7.1"},
            {"orbax-checkpoint": ">=0.11.0", "jax": ">=0.11.2"},
        ),
        reason=(
            "Each replica saves a slice of the leaf, and it is XLA's slice on CPU that changes the "
            "payload, in any program; no other value is touched."
        ),
        advice="Save such leaves without replicas, or on a JAX between the two.",
    ),
    Known(
        id="orbax-memory-kind",
        symptom=(
            "An array that was saved in host memory (pinned_host, unpinned_host) comes back in "
            "device memory, and no error says so: where it is restored without a target or a "
            "sharding, and by an emergency CheckpointManager whatever the sharding says."
        ),
        affected=({"orbax-checkpoint": ">=0.11.0", "jax": ">=0.6.0"},),
        reason=(
            "The checkpoint does not record the memory kind, and the emergency manager's "
            "broadcast merges in device memory. Values, dtypes and the rest of the sharding are "
            "right."
        ),
        advice=(
            "Give the restore a target whose shardings name the memory kind, or move the arrays "
            "afterwards with jax.device_put."
        ),
    ),
    Known(
        id="orbax-single-replica-meshes",
        symptom=(
            "Leaves that are restored together through SingleReplicaArrayHandler onto meshes with "
            "other orders of devices all come back on the first leaf's mesh, with rows in the "
            "wrong places, and no error says so."
        ),
        affected=({"orbax-checkpoint": ">=0.12.7", "jax": ">=0.6.0"},),
        reason=(
            "Orbax broadcasts all leaves at once, over the mesh of the first. To do so once for "
            "each mesh is possible and not built yet. Before 0.12.7 it is an error: "
            "incompatible devices."
        ),
        advice="Restore the leaves of each mesh by a call of their own, or all onto one mesh.",
    ),
)


def here(installed: Installed) -> list[Known]:
    """Return those that the installed versions have."""
    return [one for one in KNOWN if judge(one.affected, installed).state == "affected"]
