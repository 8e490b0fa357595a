"""A sample of loading AOT executables: serialized programs of three lengths, on 8 devices.

    python aot.py 10

Each pass loads the three, without the patches and with them in turn: lines ``tiny-bare WALL CPU``,
``tiny-patched WALL CPU`` and so on, in seconds. They were compiled for all devices, in order, since
nothing else loads without the patches: `tiny` doubles its argument (7 KB), `small` is the gradient
of four dense layers (60 KB), and `large` adds a constant of 50 MB.
"""

from __future__ import annotations

import argparse
import contextlib
from time import perf_counter, process_time
from typing import Any

import jaxcompat  # isort: skip  # before JAX, as its users do

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LOADS = {"tiny": 40, "small": 10, "large": 1}
"""How often a pass loads each."""
WARM_UP = 2
"""Passes that are not counted."""


def programs() -> dict[str, tuple[Any, ...]]:
    """Return what `deserialize_and_load` takes, by name."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    batch = jax.device_put(np.ones((16, 64), np.float32), split)
    layers = jax.device_put([np.full((64, 64), 0.1, np.float32)] * 4, whole)
    constant = np.random.default_rng(0).random(50_000_000 // 4, np.float32)

    def loss(layers: list[jax.Array], batch: jax.Array) -> jax.Array:
        for layer in layers:
            batch = jax.nn.gelu(batch @ layer)
        return (batch**2).mean()

    lowered = {
        "tiny": jax.jit(lambda x: 2 * x).lower(batch),
        "small": jax.jit(jax.value_and_grad(loss)).lower(layers, batch),
        "large": jax.jit(lambda x: constant + x.sum()).lower(batch),
    }
    return {name: serialize(one.compile()) for name, one in lowered.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("passes", type=int, help="passes to count")
    passes = parser.parse_args().passes
    serialized = programs()
    applied = {patch.id for patch in jaxcompat.status() if patch.state == "applied"}
    if not {"jax-aot-backend", "jax-aot-devices", "jax-aot-lapack"} <= applied:
        raise SystemExit(f"jaxcompat does not mend AOT executables here: {jaxcompat.status()}")
    for number in range(WARM_UP + passes):
        for name, program in serialized.items():
            for way in ("bare", "patched") if number % 2 else ("patched", "bare"):
                with jaxcompat.disabled() if way == "bare" else contextlib.nullcontext():
                    wall, cpu = perf_counter(), process_time()
                    for _ in range(LOADS[name]):
                        deserialize_and_load(*program)
                    wall, cpu = perf_counter() - wall, process_time() - cpu
                if number >= WARM_UP:
                    print(f"{name}-{way}", wall / LOADS[name], cpu / LOADS[name], flush=True)


if __name__ == "__main__":
    main()
