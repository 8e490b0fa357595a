"""Other tasks of the restore's own loop see the caller's mesh; so does the caller, however it ends.

One process whose devices span both replicas: Orbax can do that from 0.11.26 on.
"""

import asyncio
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PROCESSES = 1
AXES = ("replica", "data")
VALUE = np.arange(1, 65, dtype=np.float32).reshape(16, 4)

set_mesh = vars(jax).get("set_mesh") or vars(jax.sharding)["use_mesh"]
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), AXES)
foreign = Mesh(mesh.devices[::-1], AXES)


def assert_mesh_is_foreign() -> None:
    assert jax.sharding.get_abstract_mesh() == foreign.abstract_mesh
    # An operation sees the concrete mesh: without one, the result stays on one device.
    placed = jax.jit(lambda: jax.numpy.ones(()))().sharding
    assert len(placed.device_set) == 8, placed


def is_cancellation(error: BaseException | None) -> bool:
    """Return whether the error is a cancellation, or what Orbax's read makes of one."""
    while error is not None and not isinstance(error, asyncio.CancelledError):
        error = error.__cause__ or error.__context__
    return error is not None


class Watched(ocp.type_handlers.SingleReplicaArrayHandler):
    """Restores beside a task that watches the mesh, after cancelling itself at every suspension."""

    looks = 0
    cancelled = 0

    async def watch(self) -> None:
        while True:
            assert_mesh_is_foreign()
            self.looks += 1
            await asyncio.sleep(0)

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        watcher = asyncio.ensure_future(self.watch())
        try:
            for suspensions in range(200):
                attempt = asyncio.ensure_future(super().deserialize(infos, args))
                for _ in range(suspensions):
                    await asyncio.sleep(0)
                    assert_mesh_is_foreign()
                if attempt.done():
                    return attempt.result()
                attempt.cancel()
                try:
                    await attempt
                except BaseException as error:
                    assert is_cancellation(error), error
                    self.cancelled += 1
                assert_mesh_is_foreign()
            raise AssertionError("the restore did not end within 200 suspensions")
        finally:
            assert not watcher.done(), watcher.exception()
            watcher.cancel()


def main(directory: str) -> None:
    handler = Watched(replica_axis_index=0, broadcast_memory_limit_bytes=2**20)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    path = pathlib.Path(directory).absolute() / "checkpoint"
    tree = {"kernel": jax.device_put(VALUE, NamedSharding(mesh, PartitionSpec(AXES)))}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(path, args=ocp.args.PyTreeSave(tree))

    sharding = NamedSharding(mesh, PartitionSpec("data"))
    replica = NamedSharding(Mesh(mesh.devices[:1], AXES), PartitionSpec("data"))

    def restore(single_replica_sharding: Any) -> Any:
        restore_args = ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            restore_type=jax.Array,
            global_shape=VALUE.shape,
            dtype=VALUE.dtype,
            sharding=sharding,
            single_replica_sharding=single_replica_sharding,
        )
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(
            path, args=ocp.args.PyTreeRestore(restore_args={"kernel": restore_args})
        )

    with set_mesh(foreign):
        array = restore(replica)["kernel"]
        assert_mesh_is_foreign()
        assert array.sharding == sharding
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), VALUE[shard.index])
        assert handler.cancelled, "nothing was ever suspended"
        assert handler.looks > handler.cancelled
        try:
            # A replica with an axis that Orbax needs for itself: its own error, and the mesh stays.
            restore(NamedSharding(Mesh(mesh.devices[:1], AXES), PartitionSpec("replica")))
        except AssertionError as error:
            assert "already exists" in str(error), error
        else:
            raise AssertionError("the wrong sharding was accepted")
        assert_mesh_is_foreign()
    assert jax.sharding.get_abstract_mesh().empty
    print(f"cancelled {handler.cancelled} times, looked {handler.looks} times")


if __name__ == "__main__":
    main(sys.argv[3])
