"""Orbax's single-replica broadcast does not return the bytes that it was given.

The merge of the replicas is a `jnp.sum`: int8, int16 and bool come back as int32, uint8 and uint16
as uint32, -0.0 as 0.0 and every float8_e8m0fnu as NaN. No error is raised.

By hand, in two shells, with JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4:
    python orbax_broadcast_dtype.py 0 127.0.0.1:9876 /tmp/empty
    python orbax_broadcast_dtype.py 1 127.0.0.1:9876 /tmp/empty
"""

import os
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost import multislice

PROCESSES = 2
DEVICES = 8

AXES = ("replica", "data")
MEMORY_LIMIT = 2**20
DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e8m0fnu",
)


def make_mesh() -> Mesh:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices).reshape(PROCESSES, -1), AXES)


def make_value(name: str) -> np.ndarray:
    """Return 64 values; a negative zero and a quiet NaN are among the floats."""
    dtype = np.dtype(getattr(jnp, name))
    if name == "bool":
        return (np.arange(64) % 3 == 0).reshape(16, 4)
    value = np.arange(1, 65).astype(dtype).reshape(16, 4)
    if not jnp.issubdtype(dtype, jnp.integer):
        value[::2, 1] = np.nan
        value[::2, 2] *= -1 if name != "float8_e8m0fnu" else 1
        value[::2, 3] = -0.0 if name != "float8_e8m0fnu" else 1
    return value


def broadcast(value: np.ndarray, rank: int) -> jax.Array:
    mesh, spec = make_mesh(), PartitionSpec("data")
    mine = NamedSharding(Mesh(mesh.devices[rank : rank + 1], AXES), spec)
    held = value if rank == 0 else np.zeros_like(value)
    local = jax.make_array_from_callback(value.shape, mine, held.__getitem__)
    (array,), _ = multislice.broadcast_one_replica_to_all(
        (local,), mesh, 0, rank == 0, memory_limit_bytes=MEMORY_LIMIT
    )
    if array.sharding != NamedSharding(mesh, spec):
        raise AssertionError(f"{array.sharding} is not over {mesh}")
    return array


def difference(array: jax.Array, value: np.ndarray, rank: int) -> str:
    if array.dtype != value.dtype:
        return f"{value.dtype} came back as {array.dtype}"
    for shard in array.addressable_shards:
        got, wanted = np.asarray(shard.data), value[shard.index]
        # That replicas other than the source silently hold nothing at all with some releases is
        # orbax-broadcast-zeros' business.
        if got.tobytes() != wanted.tobytes() and (rank == 0 or np.frombuffer(got, np.uint8).any()):
            where = np.frombuffer(got, np.uint8) != np.frombuffer(wanted, np.uint8)
            return f"{value.dtype} came back with {where.sum()} of {where.size} bytes changed"
    return ""


def main(rank: int, coordinator: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, PROCESSES, rank, initialization_timeout=60)
    found = []
    for name in DTYPES:
        if hasattr(jnp, name):
            value = make_value(name)
            found.append(difference(broadcast(value, rank), value, rank))
    print(f"rank {rank}: {len(found)} types broadcast", flush=True)
    jax.distributed.shutdown()
    if any(found):
        raise AssertionError("; ".join(filter(None, found)))


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
