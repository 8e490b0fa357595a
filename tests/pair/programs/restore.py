"""Restores through SingleReplicaArrayHandler under every kind of mesh, on two processes.

Saves once without a mesh, and leaves that have no replicas: what bites there is another matter.
"""

import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

PROCESSES = 2
AXES = ("replica", "data")
VALUES = {
    "kernel": np.arange(1, 65, dtype=np.float32).reshape(16, 4),
    "scale": np.arange(101, 117, dtype=np.float32) * -0.0,
    "mask": np.arange(16) % 3 == 0,
    "steps": np.arange(-8, 8, dtype=np.int8),
}

set_mesh_around = vars(jax).get("set_mesh") or vars(jax.sharding)["use_mesh"]
set_mesh_from_here_on = vars(jax).get("set_mesh") or vars(jax.sharding)["set_mesh"]


def make_mesh(axis_type: AxisType, axes: tuple[str, str] = AXES) -> Mesh:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices).reshape(PROCESSES, -1), axes, axis_types=(axis_type,) * 2)


def make_checkpointer(name: str) -> ocp.Checkpointer:
    # With processes named, Orbax waits at the coordination service's barriers. Its other barrier
    # is a JAX computation, which has its own trouble under a mesh (jax < 0.8).
    options = ocp.options.MultiprocessingOptions(
        active_processes=set(range(PROCESSES)), barrier_sync_key_prefix=name
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def save(path: pathlib.Path) -> None:
    sharding = NamedSharding(make_mesh(AxisType.Auto), PartitionSpec(AXES))
    tree = {
        name: jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        for name, value in VALUES.items()
    }
    make_checkpointer("save").save(path, args=ocp.args.PyTreeSave(tree))


def read(path: pathlib.Path, name: str, sharding: NamedSharding, rank: int) -> dict[str, jax.Array]:
    replica = Mesh(sharding.mesh.devices[rank : rank + 1], AXES)
    restore_args = {
        leaf: ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            restore_type=jax.Array,
            global_shape=value.shape,
            dtype=value.dtype,
            sharding=sharding,
            single_replica_sharding=NamedSharding(replica, sharding.spec),
        )
        for leaf, value in VALUES.items()
    }
    restored: dict[str, jax.Array] = make_checkpointer(name).restore(
        path, args=ocp.args.PyTreeRestore(restore_args=restore_args)
    )
    return restored


def restore(path: pathlib.Path, name: str, sharding: NamedSharding, rank: int) -> None:
    restored = read(path, name, sharding, rank)
    for leaf, value in VALUES.items():
        array = restored[leaf]
        assert (array.shape, array.dtype) == (value.shape, value.dtype), (leaf, array)
        assert array.sharding == sharding, (leaf, array.sharding)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes(), (leaf, shard)


def under(mesh: Mesh, body: Callable[[], None], *, around: bool) -> None:
    """Run the body under the mesh, set around it or once and for all; in a thread, to undo it."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            if around:
                with set_mesh_around(mesh):
                    body()
                    assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
            else:
                set_mesh_from_here_on(mesh)
                body()
                assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
                if set_mesh_from_here_on is not set_mesh_around:
                    set_mesh_from_here_on(None)  # JAX 0.6.0 sets it for every thread
            assert not around or jax.sharding.get_abstract_mesh().empty
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


def begin(rank: int, coordinator: str, directory: str) -> pathlib.Path:
    """Start this process, register the handler, and save; return the checkpoint."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, PROCESSES, rank, initialization_timeout=60)
    handler = ocp.type_handlers.SingleReplicaArrayHandler(
        replica_axis_index=0, broadcast_memory_limit_bytes=2**20
    )
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    path = pathlib.Path(directory).absolute() / "checkpoint"
    save(path)
    return path


def main(rank: int, coordinator: str, directory: str) -> None:
    path = begin(rank, coordinator, directory)
    sharding = NamedSharding(make_mesh(AxisType.Auto), PartitionSpec("data"))
    restore(path, "none", sharding, rank)
    print(f"rank {rank}: none", flush=True)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        same = make_mesh(axis_type)
        for kind, mesh in {
            "same": same,
            "permuted": Mesh(same.devices[::-1, ::-1], AXES, axis_types=same.axis_types),
            "foreign": make_mesh(axis_type, ("x", "y")),
            "smaller": Mesh(
                same.devices[rank : rank + 1, :2], ("x", "y"), axis_types=same.axis_types
            ),
        }.items():
            for around in (True, False):
                name = f"{axis_type.name}-{kind}-{'around' if around else 'set'}"
                arrays = NamedSharding(same, PartitionSpec("data"))
                under(mesh, lambda n=name, s=arrays: restore(path, n, s, rank), around=around)
                print(f"rank {rank}: {name}", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if sys.argv[1] == "0":
            time.sleep(2)  # the other process is aborted as soon as its coordinator is gone
        os._exit(1)
