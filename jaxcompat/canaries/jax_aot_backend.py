"""JAX refuses to load a serialized executable on devices of another client than `backend`.

The devices say where the program shall run, and still `deserialize_and_load` and its unpickler
want the same client a second time: "Execution devices belong to a client other than `backend`".

By hand, with JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=1:
    python jax_aot_backend.py 0 127.0.0.1:9876 /tmp/empty
"""

import inspect
import io
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client
from jax.experimental import serialize_executable

PROCESSES = 1
DEVICES = 1


def other_client(device: jax.Device) -> Any:
    if device.platform == "cpu":
        return xla_client.make_cpu_client()
    return jax.devices("cpu")[0].client


def main() -> None:
    parameters = inspect.signature(serialize_executable.deserialize_and_load).parameters
    if "execution_devices" not in parameters:
        print(f"jax {jax.__version__} takes no execution_devices")
        return

    device = jax.devices()[0]
    value = np.arange(1, 9, dtype=np.float32)
    argument = jax.device_put(value, device)
    compiled = jax.jit(lambda x: 2 * x + 1).lower(argument).compile()
    payload, in_tree, out_tree = serialize_executable.serialize(compiled)

    loaded = serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, backend=other_client(device), execution_devices=[device]
    )
    result = loaded(argument)
    np.testing.assert_array_equal(np.asarray(result), 2 * value + 1)
    if result.devices() != {device}:
        raise AssertionError(f"the program ran on {result.devices()} instead of {device}")
    print("loaded with another client as backend")

    for backend in (None, device.platform):
        unpickler = serialize_executable._JaxPjrtUnpickler(io.BytesIO(payload), backend, [device])
        unloaded, *_ = unpickler.load()
        unloaded.load()
        print(f"unpickled with {backend!r} as backend")


if __name__ == "__main__":
    main()
