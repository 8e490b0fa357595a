"""Orbax restores through `SingleReplicaArrayHandler` although a mesh is set.

Received incompatible devices for jitted computation. Got argument args[0] of broadcast_in_dim
with shape float32[1] and device ids [0] on platform GPU and jit's context mesh with device ids
[0, 1, 2, 3] on platform GPU                                     (google/orbax#3164)

Each host adds the replica axis device by device (``expand_dims``, ``zeros``), and the hosts
outside the primary replica make zeros for the whole tree (``create_zeros``). Under a mesh both
target all of its devices. Mending one of the two mends nothing: the other host still dies, and
this one then waits for it or loses the connection.
"""

from __future__ import annotations

from jaxcompat.mesh import scoped, scoped_coroutine
from jaxcompat.patch import Patch, Site

PATCH = Patch(
    id="orbax-single-replica-mesh",
    symptom=(
        "Restoring with SingleReplicaArrayHandler under jax.set_mesh (or jax.sharding.use_mesh) "
        'fails with "Received incompatible devices for jitted computation".'
    ),
    cause=(
        "jax.set_mesh makes every operation target the whole mesh, and Orbax works on one device "
        "at a time while it adds the replica axis and makes the zeros of the other replicas. "
        "Orbax 0.11.40 mends it with jax.set_mesh, which JAX has from 0.7.1 on; with an older JAX "
        "it falls back to `with mesh:`, which does not undo jax.sharding.use_mesh."
    ),
    mend=(
        "The restore's own steps run under an empty mesh, and the caller's mesh is back whenever "
        "other code runs. What is read, how it is broadcast and the errors of wrong input stay "
        "as they are. Without a mesh nothing is done."
    ),
    until="orbax-checkpoint 0.11.40 together with jax 0.7.1, or newer ones.",
    affected=(
        {"orbax-checkpoint": ">=0.11.0,<0.11.40", "jax": ">=0.6.0"},
        {"orbax-checkpoint": ">=0.11.40", "jax": ">=0.6.0,<0.7.1"},
    ),
    sites=(
        # To 0.11.25 a closure inside the broadcast adds the replica axis: orbax-broadcast-mesh.
        Site(
            "orbax.checkpoint._src.multihost.multislice:_globalize_single_replica_arrays",
            scoped,
            relies_on=("inp", "replica_axis_index", "global_mesh", "is_source"),
            where={"orbax-checkpoint": ">=0.11.26"},
        ),
        # To 0.11.26 the coroutine is the handler's own method.
        Site(
            "orbax.checkpoint._src.serialization.type_handlers"
            ":SingleReplicaArrayHandler.deserialize",
            scoped_coroutine,
            relies_on=("infos", "args"),
            where={"orbax-checkpoint": "<0.11.27"},
        ),
        Site(
            "orbax.checkpoint._src.serialization.jax_array_handlers"
            ":_single_replica_deserialize_and_broadcast",
            scoped_coroutine,
            relies_on=("infos", "args", "shardings", "single_replica_shardings"),
            where={"orbax-checkpoint": ">=0.11.27"},
        ),
    ),
    upstream=(
        "https://github.com/google/orbax/issues/3164",
        "https://github.com/google/orbax/pull/3177",
    ),
)
