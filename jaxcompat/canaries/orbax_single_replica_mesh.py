"""Orbax cannot restore through SingleReplicaArrayHandler while a mesh is set.

Replica 0 reads the checkpoint and broadcasts it. The broadcast runs eager operations on the
devices of one replica, or on one device, and the caller's mesh claims them for all devices:
"Received incompatible devices for jitted computation".

By hand, in two shells, with JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4:
    python orbax_single_replica_mesh.py 0 127.0.0.1:9876 /tmp/empty
    python orbax_single_replica_mesh.py 1 127.0.0.1:9876 /tmp/empty
"""

import os
import pathlib
import sys
import time
import traceback

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost import multislice

PROCESSES = 2
DEVICES = 8

AXES = ("replica", "data")
MEMORY_LIMIT = 2**20
VALUES = {
    "kernel": np.arange(1, 65, dtype=np.float32).reshape(16, 4),
    "bias": np.arange(101, 109, dtype=np.float32),
}

set_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh


def make_mesh(axis_type: AxisType) -> Mesh:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices).reshape(PROCESSES, -1), AXES, axis_types=(axis_type,) * 2)


def make_checkpointer(name: str) -> ocp.Checkpointer:
    # Naming the processes makes Orbax wait at barriers of the coordination service. Its other
    # barrier is a JAX computation, which has its own trouble with a mesh on jax < 0.8.
    options = ocp.options.MultiprocessingOptions(
        active_processes=set(range(PROCESSES)), barrier_sync_key_prefix=name
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def make_array(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def own_replica(sharding: NamedSharding, rank: int) -> NamedSharding:
    return NamedSharding(Mesh(sharding.mesh.devices[rank : rank + 1], AXES), sharding.spec)


def save(path: pathlib.Path) -> None:
    # No leaf has replicas here: saving those is a different matter.
    sharding = NamedSharding(make_mesh(AxisType.Auto), PartitionSpec(AXES))
    tree = {name: make_array(value, sharding) for name, value in VALUES.items()}
    make_checkpointer("save").save(path, args=ocp.args.PyTreeSave(tree))


def restore(path: pathlib.Path, sharding: NamedSharding, rank: int) -> dict[str, jax.Array]:
    restore_args = {
        name: ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            restore_type=jax.Array,
            global_shape=value.shape,
            dtype=value.dtype,
            sharding=sharding,
            single_replica_sharding=own_replica(sharding, rank),
        )
        for name, value in VALUES.items()
    }
    checkpointer = make_checkpointer(f"restore_{sharding.mesh.axis_types[0].name}")
    return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))


def broadcast(arrays: dict[str, jax.Array], mesh: Mesh, rank: int) -> dict[str, jax.Array]:
    result, _ = multislice.broadcast_one_replica_to_all(
        tuple(arrays.values()), mesh, 0, rank == 0, memory_limit_bytes=MEMORY_LIMIT
    )
    return dict(zip(arrays, result, strict=True))


def restore_under_mesh(
    path: pathlib.Path, sharding: NamedSharding, rank: int
) -> dict[str, jax.Array]:
    mesh = sharding.mesh
    read = {
        name: make_array(value if rank == 0 else np.zeros_like(value), own_replica(sharding, rank))
        for name, value in VALUES.items()
    }
    with set_mesh(mesh):
        before = jax.sharding.get_abstract_mesh()
        restored = None
        try:
            restored = restore(path, sharding, rank)
        except ValueError as error:
            # Orbax < 0.11.17 goes by slice_index, which is 0 on every CPU device, and refuses.
            # What is left to try there is the broadcast by itself.
            if "All devices are in the primary replica" not in str(error):
                raise
        if restored is None:
            print(f"rank {rank}: this Orbax sees one replica only: broadcast without a restore")
            restored = broadcast(read, mesh, rank)
        after = jax.sharding.get_abstract_mesh()
    if after != before:
        raise AssertionError(f"the restore left the mesh {after} set instead of {before}")
    return restored


def compare(restored: dict[str, jax.Array], sharding: NamedSharding, rank: int) -> None:
    if restored.keys() != VALUES.keys():
        raise AssertionError(f"restored {sorted(restored)}, not {sorted(VALUES)}")
    for name, value in VALUES.items():
        array = restored[name]
        if (array.shape, array.dtype) != (value.shape, value.dtype):
            raise AssertionError(f"{name}: {array.shape} {array.dtype} is not what was saved")
        if array.sharding != sharding:
            raise AssertionError(f"{name}: {array.sharding} is not {sharding}")
        for shard in array.addressable_shards:
            if shard.data.shape != value[shard.index].shape:
                raise AssertionError(f"{name}: {shard} has the shape {shard.data.shape}")
            # Values count on the source replica only: that the other replicas silently hold
            # zeros with some releases is orbax-broadcast-zeros' business.
            if rank == 0:
                np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index], name)


def main(rank: int, coordinator: str, directory: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, PROCESSES, rank, initialization_timeout=60)
    handler = ocp.type_handlers.SingleReplicaArrayHandler(
        replica_axis_index=0, broadcast_memory_limit_bytes=MEMORY_LIMIT
    )
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    path = pathlib.Path(directory).absolute() / "checkpoint"
    save(path)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        sharding = NamedSharding(make_mesh(axis_type), PartitionSpec("data"))
        compare(restore_under_mesh(path, sharding, rank), sharding, rank)
        print(f"rank {rank}: restored under a mesh with {axis_type.name} axes", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    except BaseException:
        # A regular exit would wait for the other process, or abort and hide the traceback. Rank 0
        # leaves last: the other process is aborted as soon as its coordinator is gone.
        traceback.print_exc()
        sys.stderr.flush()
        if sys.argv[1] == "0":
            time.sleep(2)
        os._exit(1)
