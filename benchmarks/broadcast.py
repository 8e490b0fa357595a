"""A sample of Orbax's single-replica broadcast: 30 distinct shapes, on 8 devices as 2 replicas.

    python broadcast.py globalize cold --patched --mesh
    python broadcast.py broadcast warm

A cold sample is the first pass over all shapes in this interpreter, which traces and compiles:
one line ``cold WALL CPU``, in seconds. A warm sample repeats the pass in every way in turn: lines
``bare WALL CPU``, ``patched WALL CPU``, ``patched-mesh WALL CPU``. The arrays are
small, so what is timed is the work per array and not the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
from time import perf_counter, process_time
from typing import Any

SHAPES = [(4 * n, 3) for n in range(1, 31)]
WARM_UP = 3
"""Passes that are not counted: JAX compiles in the first and fills its last caches in the next."""
WAYS = ("bare", "patched", "patched-mesh")
MODULE = "orbax.checkpoint._src.multihost.multislice"
FUNCTIONS = {
    "globalize": "_globalize_single_replica_arrays",
    "broadcast": "broadcast_one_replica_to_all",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("function", choices=FUNCTIONS)
    parser.add_argument("state", choices=("cold", "warm"))
    parser.add_argument("--patched", action="store_true", help="cold: import jaxcompat first")
    parser.add_argument("--mesh", action="store_true", help="cold: run under jax.set_mesh")
    parser.add_argument("--passes", type=int, default=40, help="warm: passes to count")
    options = parser.parse_args()
    if options.patched or options.state == "warm":
        import jaxcompat  # before JAX and Orbax, as its users do
    work = Work(options.function)
    if options.patched or options.state == "warm":
        patched = {target for patch in jaxcompat.status() for target in patch.patched}
        if not {f"{MODULE}:{name}" for name in FUNCTIONS.values()} <= patched:
            raise SystemExit(f"jaxcompat does not mend the broadcast here: {jaxcompat.status()}")
    if options.state == "cold":
        print("cold", *work.timed(mesh=options.mesh))
        return
    for number in range(WARM_UP + options.passes):
        for name in WAYS if number % 2 else reversed(WAYS):
            with jaxcompat.disabled() if name == "bare" else contextlib.nullcontext():
                times = work.timed(mesh=name == "patched-mesh")
            if number >= WARM_UP:
                print(name, *times)


class Work:
    """One pass over all shapes, by one of Orbax's two functions, and what it needs."""

    def __init__(self, function: str) -> None:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.module = importlib.import_module(MODULE)
        self.broadcasts = function == "broadcast"
        self.mesh: Any = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "data"))
        replica = Mesh(self.mesh.devices[:1], self.mesh.axis_names)
        self.sharding: Any = NamedSharding(replica, PartitionSpec("data"))
        self.values: list[Any] = [
            np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for shape in SHAPES
        ]

    def timed(self, *, mesh: bool) -> tuple[float, float]:
        """Return the wall and CPU seconds of a pass, whose result is checked."""
        import jax
        import numpy as np

        # Made here, outside of what is timed: the broadcast deletes its input.
        arrays = tuple(jax.device_put(value, self.sharding) for value in self.values)
        jax.block_until_ready(arrays)
        with jax.set_mesh(self.mesh) if mesh else contextlib.nullcontext():
            wall, cpu = perf_counter(), process_time()
            result = jax.block_until_ready(self.run(arrays))
            times = perf_counter() - wall, process_time() - cpu
        for value, array in zip(self.values, result, strict=True):
            found = np.asarray(array)
            np.testing.assert_array_equal(found if self.broadcasts else found[0], value)
        return times

    def run(self, arrays: tuple[Any, ...]) -> Any:
        if self.broadcasts:
            return self.module.broadcast_one_replica_to_all(
                arrays, self.mesh, 0, is_source=True, memory_limit_bytes=2**30
            )[0]
        globalize = self.module._globalize_single_replica_arrays
        return [globalize(array, 0, self.mesh, is_source=True) for array in arrays]


if __name__ == "__main__":
    main()
