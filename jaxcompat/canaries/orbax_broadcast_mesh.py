"""Orbax's single-replica broadcast is not independent of the mesh that happens to be set.

Under a mesh with another order of devices, or with explicit axes, the merge of the replicas fails:
"Received incompatible devices for jitted computation". From 0.12.7 the merge is compiled ahead in
a thread, which has no mesh: under a mesh it is compiled a second time, after the read.

By hand, in two shells, with JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4:
    python orbax_broadcast_mesh.py 0 127.0.0.1:9876 /tmp/empty
    python orbax_broadcast_mesh.py 1 127.0.0.1:9876 /tmp/empty
"""

import contextlib
import logging
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

set_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh


class MergeCompilations(logging.Handler):
    """Counts what jax_log_compiles reports of the merge, whichever thread compiles it."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Compiling ") and "_sum_over_replica_axis" in message:
            self.count += 1


def make_mesh(axes: tuple[str, str] = AXES, axis_type: AxisType = AxisType.Auto) -> Mesh:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices).reshape(PROCESSES, -1), axes, axis_types=(axis_type,) * 2)


def reverse(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices[::-1, ::-1], mesh.axis_names, axis_types=mesh.axis_types)


def make_array(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def compare(array: jax.Array, value: np.ndarray, sharding: NamedSharding, rank: int) -> None:
    if (array.shape, array.dtype) != (value.shape, value.dtype):
        raise AssertionError(f"{array.shape} {array.dtype} is not {value.shape} {value.dtype}")
    if array.sharding != sharding:
        raise AssertionError(f"{array.sharding} is not {sharding}")
    for shard in array.addressable_shards:
        if shard.data.shape != value[shard.index].shape:
            raise AssertionError(f"{shard} has the shape {shard.data.shape}")
        # Values count on the source replica only: that the other replicas silently hold zeros
        # with some releases is orbax-broadcast-zeros' business.
        if rank == 0:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


def broadcast(context: Mesh, rank: int) -> None:
    mesh = make_mesh()
    spec = PartitionSpec("data")
    value = np.arange(1, 65, dtype=np.float32).reshape(16, 4)
    replica = Mesh(mesh.devices[rank : rank + 1], AXES)
    local = make_array(value if rank == 0 else np.zeros_like(value), NamedSharding(replica, spec))
    with set_mesh(context):
        (array,), _ = multislice.broadcast_one_replica_to_all(
            (local,), mesh, 0, rank == 0, memory_limit_bytes=MEMORY_LIMIT
        )
    compare(array, value, NamedSharding(mesh, spec), rank)


def make_checkpointer(name: str) -> ocp.Checkpointer:
    # Naming the processes makes Orbax wait at barriers of the coordination service. Its other
    # barrier is a JAX computation, which has its own trouble with a mesh on jax < 0.8.
    options = ocp.options.MultiprocessingOptions(
        active_processes=set(range(PROCESSES)), barrier_sync_key_prefix=name
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def merge_compilations(path: pathlib.Path, rows: int, context: Mesh | None, rank: int) -> int:
    mesh = make_mesh()
    # A leaf with replicas would not be saved by every release.
    value = np.arange(1, 4 * rows + 1, dtype=np.float32).reshape(rows, 4)
    tree = {"kernel": make_array(value, NamedSharding(mesh, PartitionSpec(AXES)))}
    make_checkpointer(f"save{rows}").save(path, args=ocp.args.PyTreeSave(tree))

    sharding = NamedSharding(mesh, PartitionSpec("data"))
    restore_args = ocp.type_handlers.SingleReplicaArrayRestoreArgs(
        restore_type=jax.Array, global_shape=value.shape, dtype=value.dtype, sharding=sharding
    )
    compilations = MergeCompilations()
    logger = logging.getLogger("jax")
    logger.addHandler(compilations)
    try:
        with contextlib.nullcontext() if context is None else set_mesh(context):
            restored = make_checkpointer(f"restore{rows}").restore(
                path, args=ocp.args.PyTreeRestore(restore_args={"kernel": restore_args})
            )
    finally:
        logger.removeHandler(compilations)
    compare(restored["kernel"], value, sharding, rank)
    return compilations.count


def restore(directory: pathlib.Path, rank: int) -> None:
    handler = ocp.type_handlers.SingleReplicaArrayHandler(
        replica_axis_index=0, broadcast_memory_limit_bytes=MEMORY_LIMIT
    )
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    jax.config.update("jax_log_compiles", True)
    # Each restore has a shape of its own, which no earlier one has compiled.
    without = merge_compilations(directory / "without", 24, None, rank)
    under = merge_compilations(directory / "under", 32, make_mesh(), rank)
    jax.config.update("jax_log_compiles", False)
    print(f"rank {rank}: merge compiled {without} times without a mesh, {under} under one")
    if not without:
        raise AssertionError("no compilation of the merge was counted: this program is out of date")
    # Each restore has one merge. Twice means that the one compiled ahead was of no use.
    if max(without, under) > 1:
        raise AssertionError(
            f"one merge was compiled {without} times without a mesh, {under} times under one"
        )


def main(rank: int, coordinator: str, directory: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, PROCESSES, rank, initialization_timeout=60)
    broadcast(reverse(make_mesh()), rank)
    print(f"rank {rank}: broadcast under a mesh of the reversed devices", flush=True)
    broadcast(make_mesh(("x", "y"), AxisType.Explicit), rank)
    print(f"rank {rank}: broadcast under a mesh with other, explicit axes", flush=True)
    if hasattr(multislice, "precompile_broadcast"):
        restore(pathlib.Path(directory).absolute(), rank)
    else:
        print(f"rank {rank}: this Orbax does not compile the merge ahead")
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
