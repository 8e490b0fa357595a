"""JAX looks LAPACK's functions up before it loads an AOT executable that calls them.

On CPU the kernels of jaxlib call LAPACK through pointers that are taken from SciPy when a program
with linear algebra is first *traced*. A process that only loads such a program never traced one,
and calls address 0: a segmentation fault (jax-ml/jax#28908). The targets' names stand in the
executable's bytes, so that a search tells whether there are any; SciPy is not imported otherwise.
What makes an executable long are its constants, and the search jumps over them: in all of 50 MB it
took 75 ms of the 210 ms that loading them takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from jaxcompat.patch import Patch, Site


@functools.cache
def _beginnings() -> tuple[bytes, ...]:
    """Return how the names begin of all custom call targets of jaxlib's LAPACK module."""
    from jaxlib import lapack

    return tuple({f"{name.partition('_')[0]}_".encode() for name in lapack._lapack.registrations()})


def names_lapack(executable: bytes) -> bool:
    """Return whether a serialized executable of XLA's may call one of LAPACK's functions."""
    for start, end in _spans(executable):
        for beginning in _beginnings():
            if executable.find(beginning, start, end) >= 0:
                return True
    return False


_CONSTANT = b"\x12\x08constant"  # HloInstructionProto.opcode
_SHAPE, _METADATA, _LITERAL = (number << 3 | 2 for number in (3, 7, 8))  # and what may follow it


def _spans(executable: bytes) -> Iterator[tuple[int, int]]:
    """Yield the spans, as start and end, between the long literals of the program's constants."""
    start = 0
    at = 0 if len(executable) > 1 << 20 else len(executable)  # else all of it is soon searched
    while (at := executable.find(_CONSTANT, at)) >= 0:
        at += len(_CONSTANT)
        tag, length, after = _field(executable, at)
        for passed in (
            _SHAPE,
            _METADATA,
        ):  # each once, lest a crafted one cost more than its length
            if tag == passed:
                tag, length, after = _field(executable, after + length)
        if tag == _LITERAL and length > 4096 and after + length <= len(executable):
            yield start, after
            start = at = after + length
    yield start, len(executable)


def _field(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag, the length, and the place of what follows, of protobuf's field there."""
    length = shift = 0
    for after in range(at + 1, min(at + 6, len(data))):
        length |= (data[after] & 127) << shift
        shift += 7
        if data[after] < 128:
            return data[at], length, after + 1
    return 0, 0, at


def with_lapack(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the unpickler's `persistent_load` such that LAPACK is ready for what it loads."""

    @functools.wraps(original)
    def persistent_load(self: Any, pid: Any) -> Any:
        match pid, getattr(self, "backend", None):
            case ("exec", bytes() as executable), backend if _is_cpu(backend):
                if names_lapack(executable):
                    from jaxlib import lapack

                    lapack._lapack.initialize()  # once; then it returns at once
        return original(self, pid)

    return persistent_load


def _is_cpu(backend: Any) -> bool:
    return bool(getattr(backend, "platform", None) == "cpu")


def class_sites(module: str, name: str, *, copy: bool = True) -> tuple[Site, ...]:
    """Return the sites of one unpickler class."""
    return (Site(f"{module}:{name}.persistent_load", with_lapack, relies_on=("pid",), copy=copy),)


PATCH = Patch(
    id="jax-aot-lapack",
    symptom=(
        "A fresh CPU process that loads an AOT executable with linear algebra dies in its call: "
        '"Segmentation fault".'
    ),
    cause=(
        "jaxlib's CPU kernels call LAPACK through pointers that are set when such a program is "
        "traced. A process that only loads one has none."
    ),
    mend=(
        "An executable that names a LAPACK kernel has the pointers set before it is loaded, as "
        "tracing would have. Others, and other platforms, are untouched: SciPy is not imported."
    ),
    until="a JAX release that sets them when an executable is loaded; none does up to 0.12.0.1.",
    affected=({"jax": ">=0.6.0"},),
    sites=(
        *class_sites("jax.experimental.serialize_executable", "_JaxPjrtUnpickler", copy=False),
        *class_sites("xrex.utils.aot", "_JaxPjrtUnpickler"),
    ),
    upstream=(
        "https://github.com/jax-ml/jax/issues/28908",
        "https://github.com/jax-ml/jax/issues/24982",
    ),
    copies=class_sites,
)
