"""Loads what is no executable, and prints how each ends: `name: outcome`, a line each.

The payloads of other JAX releases were written by `serialize`, for one device.
"""

import io
import os
import pickle
import pickletools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

Unpickler = serialize_executable._JaxPjrtUnpickler
client = jax.devices()[0].client
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
argument = jax.device_put(np.arange(8, dtype=np.float32), everywhere)
payload, _, _ = serialize_executable.serialize(jax.jit(lambda x: 2 * x).lower(argument).compile())


class Hostile:
    """Its pickle calls what it was made with, where it is loaded."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


class Persistent:
    def __init__(self, *pid: Any) -> None:
        self.pid = pid


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Persistent) else None


def dumped(obj: Any, protocol: int = 4) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol).dump(obj)
    return file.getvalue()


def junk() -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "zeros", bytes(100)
    yield "text", b"this is no executable\n" * 3
    yield "no arguments", b"\x80\x04U"
    yield "a persistent id of nothing", b"\x80\x04Q."
    yield "too deep a memo", b"\x80\x04h\xff."
    chance = random.Random(5)
    for i in range(20):
        yield f"random {i}", chance.randbytes(50)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield f"a dict, protocol {protocol}", pickle.dumps({"a": [1.5, None, {2}]}, protocol)
        named = b"executable" if protocol > 2 else 8  # bytes are no constants before
        ids = [Persistent("exec", named), Persistent("device", 0), Persistent("device", 77)]
        yield f"no executable, protocol {protocol}", dumped(ids, protocol)
    execs: list[Any] = [("exec",), ("exec", None), ("exec", b""), ("exec", b"no")]
    for i, pid in enumerate([(), *execs, ("device", "0"), ("who",), 7]):
        yield f"persistent id {i}", dumped(Persistent(*pid) if isinstance(pid, tuple) else pid)
    for i in range(1, 40):
        yield f"truncated {i}", payload[: len(payload) * i // 40]
    arguments: list[Any] = [arg for _, arg, _ in pickletools.genops(payload)]
    executable = max((arg for arg in arguments if isinstance(arg, bytes)), key=len)
    for i in (1, 10, 100, 1000):
        cut = executable[:i].ljust(len(executable))
        yield f"executable truncated {i}", payload.replace(executable, cut)
    for file in sorted((Path(__file__).parent / "payloads").iterdir()):
        if file.stem != f"jax-{jax.__version__}":
            yield file.stem, file.read_bytes()


def outcome(body: Any) -> str:
    try:
        return type(body()).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")


def main() -> None:
    for name, data in junk():
        told = outcome(lambda d=data: Unpickler(io.BytesIO(d), client).load())
        print(f"{name}: {told}", flush=True)
    print(f"whole: {outcome(lambda: Unpickler(io.BytesIO(payload), client).load())}")


def hostile(directory: str) -> None:
    """Reading the devices runs nothing of it; loading it reaches what it always did."""
    marks = [Path(directory) / name for name in ("before", "within", "behind")]
    before, within, behind = (Hostile(os.mkdir, str(mark)) for mark in marks)
    devices = [Persistent("device", i) for i in (0, within, 1)]
    data = dumped([before, Persistent("exec", b"junk"), devices, behind])
    unpickler = Unpickler(io.BytesIO(data), client)
    assert not [mark for mark in marks if mark.exists()]
    told = outcome(unpickler.load)
    assert [mark.name for mark in marks if mark.exists()] == ["before"], told
    assert type(unpickler).find_class is pickle.Unpickler.find_class
    print(told)


if __name__ == "__main__":
    hostile(*sys.argv[1:]) if sys.argv[1:] else main()
