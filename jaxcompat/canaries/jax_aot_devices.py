"""A serialized executable runs on the devices it was compiled for, or on those that are named.

From JAX 0.6.1 on it is loaded onto all devices of the backend, in the backend's order: the process
aborts ("device and buffer counts mismatch"), or the call fails ("Expected args to
execute_sharded_on_local_devices to have 4 shards, got: [1]"). Onto other devices than the recorded
ones it cannot be loaded: "KeyError: 0". JAX 0.6.0 takes no `execution_devices`.

By hand, with JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4:
    python jax_aot_devices.py 0 127.0.0.1:9876 /tmp/empty
"""

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PROCESSES = 1
DEVICES = 4

VALUE = np.arange(8, dtype=np.float32)


def on(devices: list[jax.Device]) -> jax.Array:
    mesh = Mesh(np.array(devices), ("data",))
    return jax.device_put(VALUE, NamedSharding(mesh, PartitionSpec("data")))


def main() -> None:
    devices = jax.devices()[:DEVICES]
    one, two, all_of_them = [devices[1]], [devices[2], devices[1]], devices[::-1]
    for recorded, others in ((one, devices[:1]), (two, devices[2:]), (all_of_them, devices)):
        compiled = jax.jit(lambda x: (2 * x, x.sum())).lower(on(recorded)).compile()
        serialized = serialize(compiled)
        for where in (None, recorded, others):
            named = {} if where is None else {"execution_devices": where}
            argument = on(where or recorded)
            doubled, total = deserialize_and_load(*serialized, **named)(argument)
            np.testing.assert_array_equal(np.asarray(doubled), 2 * VALUE)
            np.testing.assert_array_equal(np.asarray(total), VALUE.sum())
            if not doubled.sharding.is_equivalent_to(argument.sharding, 1):
                raise AssertionError(f"the result is on {doubled.sharding}")
            print(f"compiled for {recorded}, loaded onto {where or 'those'}", flush=True)


if __name__ == "__main__":
    main()
