"""Orbax broadcasts one replica to all although another mesh is set, and compiles the merge once.

Two things meet in `broadcast_one_replica_to_all`. Its last step sums over the replica axis in a
program for the arrays' own mesh; under a mesh of another device order, or one with Explicit axes,
JAX refuses it. And Orbax 0.12.7 compiles that program ahead, in a thread, so that all hosts enter
the broadcast together (google/orbax#3181). A thread has no mesh, to JAX's compilation cache that
is another program, and the merge is compiled a second time where it was meant to be ready. So the
compilation ahead follows the scope of the restore that started it.
"""

from __future__ import annotations

from jaxcompat.mesh import scoped, scoped_coroutine
from jaxcompat.patch import Patch, Site

_AHEAD = {"orbax-checkpoint": ">=0.12.7"}

PATCH = Patch(
    id="orbax-broadcast-mesh",
    symptom=(
        'Restoring with SingleReplicaArrayHandler fails with "Received incompatible devices for '
        'jitted computation" when the mesh set by jax.set_mesh has another device order than the '
        "arrays' mesh, or Explicit axes; or, from Orbax 0.12.7 on, it compiles every merge twice "
        "under a mesh, on the critical path."
    ),
    cause=(
        "The merge of the replicas is a jitted sum over the arrays' mesh, run under the caller's "
        "mesh. What Orbax 0.12.7 compiles ahead of it is compiled in a thread, where no mesh is "
        "set, and so is not what runs."
    ),
    mend=(
        "broadcast_one_replica_to_all runs under an empty mesh, and so does what is compiled "
        "ahead for it. The bytes that are moved and the programs are upstream's. Without a mesh "
        "nothing is done."
    ),
    until="an Orbax release that broadcasts under its own mesh; none does up to 0.12.8.",
    affected=({"orbax-checkpoint": ">=0.11.0", "jax": ">=0.6.0"},),
    sites=(
        Site(
            "orbax.checkpoint._src.multihost.multislice:broadcast_one_replica_to_all",
            scoped,
            relies_on=("in_tree", "global_mesh", "replica_axis_index", "is_source"),
        ),
        Site(
            "orbax.checkpoint._src.multihost.multislice:precompile_broadcast",
            scoped,
            relies_on=("in_tree", "global_mesh", "replica_axis_index"),
            where=_AHEAD,
        ),
        # Opens the scope that precompile_broadcast, called in a thread, then follows.
        Site(
            "orbax.checkpoint._src.serialization.jax_array_handlers"
            ":_single_replica_deserialize_and_broadcast",
            scoped_coroutine,
            relies_on=("infos", "args", "shardings", "single_replica_shardings"),
            where=_AHEAD,
        ),
    ),
    upstream=(
        "https://github.com/google/orbax/issues/3164",
        "https://github.com/google/orbax/issues/3181",
    ),
)
