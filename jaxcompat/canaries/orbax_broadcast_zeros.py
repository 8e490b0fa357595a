"""After Orbax's single-replica broadcast the other replicas hold zeros.

Orbax 0.11.20 - 0.11.25 lay the replicas out by the number of slices that the devices belong to.
Where several replicas share a slice, as on CPU, nothing is broadcast, and no error is raised.

By hand, in two shells, with JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4:
    python orbax_broadcast_zeros.py 0 127.0.0.1:9876 /tmp/empty
    python orbax_broadcast_zeros.py 1 127.0.0.1:9876 /tmp/empty
"""

import os
import sys
import time
import traceback

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost import multislice

PROCESSES = 2
DEVICES = 8

AXES = ("replica", "data")
MEMORY_LIMIT = 2**20


def make_mesh() -> Mesh:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices).reshape(PROCESSES, -1), AXES)


def broadcast(value: np.ndarray, rank: int) -> jax.Array:
    mesh, spec = make_mesh(), PartitionSpec("data")
    mine = NamedSharding(Mesh(mesh.devices[rank : rank + 1], AXES), spec)
    held = value if rank == 0 else np.zeros_like(value)
    local = jax.make_array_from_callback(value.shape, mine, held.__getitem__)
    (array,), _ = multislice.broadcast_one_replica_to_all(
        (local,), mesh, 0, rank == 0, memory_limit_bytes=MEMORY_LIMIT
    )
    return array


def compare(array: jax.Array, value: np.ndarray) -> None:
    for shard in array.addressable_shards:
        got = np.asarray(shard.data)
        if got.shape == value[shard.index].shape and not got.any():
            raise AssertionError(f"{shard.device} holds zeros")
        np.testing.assert_array_equal(got, value[shard.index])


def main(rank: int, coordinator: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, PROCESSES, rank, initialization_timeout=60)
    value = np.arange(1, 65, dtype=np.float32).reshape(16, 4)
    array = broadcast(value, rank)
    jax.distributed.shutdown()
    compare(array, value)
    print(f"rank {rank}: every replica holds what was read", flush=True)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2])
    except BaseException:
        # A regular exit would wait for the other process, or abort and hide the traceback. Rank 0
        # leaves last: the other process is aborted as soon as its coordinator is gone.
        traceback.print_exc()
        sys.stderr.flush()
        if sys.argv[1] == "0":
            time.sleep(2)
        os._exit(1)
