"""Loads AOT executables of several processes, and of the other process, on two."""

import os
import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PROCESSES = 2
VALUE = np.arange(16, dtype=np.float32)


def put(devices: Sequence[jax.Device]) -> jax.Array:
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    return jax.make_array_from_callback(VALUE.shape, sharding, VALUE.__getitem__)


def placed(array: jax.Array) -> list[tuple[jax.Device, object]]:
    return [(shard.device, np.asarray(shard.data).tolist()) for shard in array.addressable_shards]


def everywhere(rank: int, devices: list[jax.Device]) -> None:
    """A program of both processes, on some of the devices of each."""
    mine, others = ([d for d in devices if (d.process_index == rank) == own] for own in (1, 0))
    first, second = (mine, others) if rank == 0 else (others, mine)
    jitted = jax.jit(lambda x: (2 * x + 1, x.sum()))
    for recorded, moved in (
        ([second[1], first[1]], [first[0], second[2]]),
        ([*second, *first], devices),
        (first[:2] + second[:2], [second[3], first[2], second[2], first[3]]),
    ):
        serialized = serialize(jitted.lower(put(recorded)).compile())
        for named in (None, recorded, moved):
            given = {} if named is None else {"execution_devices": named}
            loaded = deserialize_and_load(*serialized, **given)
            got, total = loaded(put(named or recorded))
            wanted, _ = jitted(put(named or recorded))
            assert placed(got) == placed(wanted)
            assert placed(got)
            assert np.asarray(total.addressable_shards[0].data) == VALUE.sum()


def from_the_other(rank: int, directory: Path) -> None:
    """A program of the first process's, saved by it and loaded by the second."""
    file = directory / "executable"
    if rank == 0:
        here = jax.device_put(VALUE, jax.local_devices()[1])
        compiled = jax.jit(lambda x: 2 * x + 1).lower(here).compile()
        file.write_bytes(pickle.dumps(serialize(compiled)))
    sync_global_devices("saved")
    serialized = pickle.loads(file.read_bytes())
    recorded = [d for d in jax.devices() if d.process_index == 0][1]
    if rank == 0:
        result = deserialize_and_load(*serialized)(jax.device_put(VALUE, recorded))
    else:
        try:
            deserialize_and_load(*serialized)
        except ValueError as error:
            assert str(error) == (
                f"The executable was compiled for 1 device (id {recorded.id}), and this process "
                "(1) can address none of them. Name the devices to load it onto, in that order: "
                "execution_devices=jax.local_devices()[:1], for instance."
            )
        else:
            raise AssertionError("nothing was raised")
        local = jax.local_devices()
        result = deserialize_and_load(*serialized, execution_devices=local[:1])(
            jax.device_put(VALUE, local[0])
        )
        assert result.devices() == {local[0]}
    np.testing.assert_array_equal(np.asarray(result), 2 * VALUE + 1)
    sync_global_devices("loaded")


def main(rank: int, coordinator: str, directory: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, PROCESSES, rank, initialization_timeout=60)
    everywhere(rank, jax.devices())
    print(f"rank {rank}: everywhere", flush=True)
    from_the_other(rank, Path(directory))
    print(f"rank {rank}: from the other", flush=True)
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
