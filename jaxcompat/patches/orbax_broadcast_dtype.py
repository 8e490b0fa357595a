"""Orbax's single-replica broadcast brings back the bits that were saved, in their own type.

The replica that read the checkpoint holds the values, the others hold zeros, and the merge is a
``jnp.sum`` over the replicas. A sum of numbers is not a copy of bits: NumPy's rules widen small
integers and booleans (with x64, every integer), ``-0.0 + 0.0`` is ``0.0``, a signalling NaN comes
back quiet, a subnormal number may be flushed to zero, and float8_e8m0fnu has no zero, so that the
others hold NaN and every value becomes NaN (0.11.26 - 0.11.31 take NumPy's zeros, all bits 0, and
there only some values change). No error is raised.

The sum stays, over the bits as unsigned integers of the same width: as many bytes as before on the
network, or fewer, since XLA no longer widens what it adds up.

The price is compilation: XLA:CPU took 0.50 s for the merge of 30 float32 leaves on 8 devices, where
the bare sum takes 0.04 s (jax 0.9.0, orbax-checkpoint 0.11.33); once a broadcast to 0.12.6, and
ahead, during the read, from 0.12.7.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from jaxcompat.patch import Patch, Site

_MODULE = "orbax.checkpoint._src.multihost.multislice"


def _exact(add: Callable[[Any], Any], array: Any) -> Any:
    """Return what `add` makes of an array whose other replicas hold zeros, bit for bit.

    `add` sums integers over the replicas and keeps their type.
    """
    from jax import lax
    from jax import numpy as jnp

    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        width = jnp.finfo(dtype).bits  # of a complex number's parts
        if width == 6:  # No integer is as wide; float8_e4m3fn holds all of its values. (XLA:CPU
            # has no program with float6, and aborts over the sum as it was: not run.)
            return _exact(add, array.astype("float8_e4m3fn")).astype(dtype)

        def by_bits(array: Any) -> Any:
            if jnp.issubdtype(array.dtype, jnp.complexfloating):
                return lax.complex(by_bits(array.real), by_bits(array.imag))
            bits = lax.bitcast_convert_type(array, f"uint{width}")
            return lax.bitcast_convert_type(add(bits), array.dtype)

        if width < 64:
            return by_bits(array)
        # A TPU has no float64: XLA keeps two float32 in its place, and refuses to bit-cast them.
        return lax.platform_dependent(array, tpu=add, default=by_bits)
    if dtype.name in ("bool", "int2", "uint2"):  # no collective has these
        return add(array.astype("uint8")).astype(dtype)
    return add(array)


def _sum(array: Any, axis: int = 0) -> Any:
    from jax import numpy as jnp

    return _exact(lambda part: jnp.sum(part, axis=axis, dtype=part.dtype), array)


def _stand_in(module: Any, **names: Any) -> types.ModuleType:
    """Return what answers as the module does, but for the names given."""
    stand_in = types.ModuleType(module.__name__, module.__doc__)
    vars(stand_in).update(
        names,
        __wrapped__=module,
        __getattr__=functools.partial(getattr, module),
        __dir__=functools.partial(dir, module),
    )
    return stand_in


def _with_exact_sum(jnp: Any) -> types.ModuleType:
    @functools.wraps(jnp.sum)
    def sum_(array: Any, axis: int = 0) -> Any:
        return _sum(array, axis)

    @functools.wraps(jnp.zeros)
    def zeros(shape: Any, dtype: Any = None, **device: Any) -> Any:
        if dtype != "float8_e8m0fnu":
            return jnp.zeros(shape, dtype, **device)
        import numpy as np

        # It has no zero, and 0 becomes NaN. No bit may be set.
        return jnp.full(shape, np.zeros((), dtype), dtype, **device)

    @functools.wraps(jnp.zeros_like)
    def zeros_like(array: Any) -> Any:
        if array.dtype != "float8_e8m0fnu":
            return jnp.zeros_like(array)
        return zeros(array.shape, array.dtype)

    return _stand_in(jnp, sum=sum_, zeros=zeros, zeros_like=zeros_like)


def _with_exact_psum(jax: Any) -> types.ModuleType:
    psum = jax.lax.psum

    @functools.wraps(psum)
    def psum_(array: Any, axis_name: Any) -> Any:
        return _exact(lambda part: psum(part, axis_name), array)

    return _stand_in(jax, lax=_stand_in(jax.lax, psum=psum_))


def _with_exact_merge(merge: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # Under its own name: the programs that are compiled ahead are told by it in JAX's logs.
    @functools.wraps(merge)
    def merge_exactly(tree: Any) -> Any:
        import jax

        return jax.tree.map(_sum, tree)

    return merge_exactly


PATCH = Patch(
    id="orbax-broadcast-dtype",
    symptom=(
        "A tree restored with SingleReplicaArrayHandler, or by an emergency CheckpointManager, is "
        'not what was saved, and no error says so: int8, int16 and bool come back as "int32" '
        "(uint8 and uint16 as uint32; with x64 all integers as 64 bits), -0.0 and subnormal "
        "numbers as 0.0, and (but for 0.11.26 - 0.11.31) every float8_e8m0fnu as NaN."
    ),
    cause=(
        "Orbax broadcasts one replica by adding up all of them, the others being zeros. A sum "
        "follows NumPy's rules for types, and -0.0 + 0.0 is 0.0."
    ),
    mend=(
        "The same sum is taken over the bits, as unsigned integers of the same width, and in the "
        "type that was saved. No more bytes are moved than before. On a TPU float64 is added up "
        "as before: it has no such type, and no bits of it."
    ),
    until="an Orbax release that broadcasts bits; none does up to 0.12.8.",
    affected=({"orbax-checkpoint": ">=0.11.0", "jax": ">=0.6.0"},),
    sites=(
        # To 0.12.6 the sum is in a lambda within a function; what can be replaced is the module's
        # name for jax.numpy.
        Site(f"{_MODULE}:jnp", _with_exact_sum, relies_on=("sum", "zeros", "zeros_like")),
        # An option of the handler, and what the emergency CheckpointManager does there.
        Site(
            f"{_MODULE}:jax",
            _with_exact_psum,
            relies_on=("lax",),
            where={"orbax-checkpoint": ">=0.11.22,<0.11.26"},
        ),
        # Compiled ahead, and cached by the function: with another one, what was compiled before
        # the patch was applied is not used.
        Site(
            f"{_MODULE}:_sum_over_replica_axis",
            _with_exact_merge,
            relies_on=("tree",),
            where={"orbax-checkpoint": ">=0.12.7"},
        ),
    ),
    upstream=("https://github.com/google/orbax/issues/3164",),
    aftermath=(
        "Checkpoints are right as they were saved; trees that were restored from them with these "
        "versions in the ways above may not be, and what was saved from those since neither. To "
        "check a restore, compare each host's shards with the checkpoint, byte for byte; to check "
        'a later checkpoint, compare its types with those of the one before: README.md, "Was an '
        'earlier restore wrong?". Float leaves without -0.0, NaN and subnormal values are not '
        "concerned, nor are int32 and uint32 without x64."
    ),
)
