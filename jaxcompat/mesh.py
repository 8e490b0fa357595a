"""The neutral mesh: a stretch of code runs as if no mesh had been set.

``jax.set_mesh`` (``jax.sharding.use_mesh`` before JAX 0.7.1) keeps a mesh in thread-local state,
and every operation then targets that mesh. Code that works on single devices must not see it.
The neutral mesh has no axes and no devices: setting it clears the concrete and the abstract mesh,
and leaving it brings both back. It is public API from JAX 0.6.0 on.

Not done here: JAX's private way back to "no mesh set". The price is that JAX's compilation caches
tell the two apart, so whatever is compiled ahead has to be compiled under the neutral mesh too;
for that the scope follows `contextvars` into the threads that the code starts.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_logger = logging.getLogger("jaxcompat")
_in_scope: ContextVar[bool] = ContextVar("jaxcompat.mesh", default=False)


@functools.cache
def _neutral_mesh() -> Any:
    import numpy
    from jax.sharding import Mesh

    # Mesh(np.empty((0,)), ("x",)) would be the obvious one; JAX 0.7.1 and later refuse it.
    return Mesh(numpy.empty((), dtype=object), ())


class neutral:
    """Run the body as if no mesh had been set; the caller's mesh is back afterwards.

    Without a mesh, and inside a trace (where no mesh may be set), nothing is done.
    """

    # A class, since `contextlib.contextmanager` and an `ExitStack` cost three times as much, and
    # this is entered for every leaf of a tree.
    __slots__ = ("_scope", "_token")

    def __enter__(self) -> None:
        import jax

        self._scope: Any = None
        if jax.sharding.get_abstract_mesh().empty and not _in_scope.get():
            return
        # vars(), since getattr on a JAX module sets off the deprecation warning of a name that is
        # gone.
        set_mesh: Any = vars(jax).get("set_mesh") or vars(jax.sharding)["use_mesh"]
        try:
            scope = set_mesh(_neutral_mesh())
            scope.__enter__()
        except ValueError as error:
            _logger.debug("the mesh is left as it is: %s", error)
            return
        self._scope = scope
        self._token = _in_scope.set(True)

    def __exit__(self, *raised: Any) -> None:
        if self._scope is not None:
            _in_scope.reset(self._token)
            self._scope.__exit__(*raised)


def scoped(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `function` such that it runs under the neutral mesh."""

    @functools.wraps(function)
    def under_neutral_mesh(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with neutral():
            return function(*args, **kwargs)

    return under_neutral_mesh


def scoped_coroutine(
    function: Callable[_P, Coroutine[Any, Any, _R]],
) -> Callable[_P, Coroutine[Any, Any, _R]]:
    """Return the coroutine function such that each of its steps runs under the neutral mesh.

    A plain ``with`` around an ``await`` would leave the neutral mesh set for the other tasks of
    the same loop, which share the thread; so it is entered before each step and left before each
    suspension.
    """

    @functools.wraps(function)
    async def under_neutral_mesh(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return await _in_steps(function(*args, **kwargs))

    return under_neutral_mesh


@types.coroutine
def _in_steps(coroutine: Coroutine[Any, Any, _R]) -> Generator[Any, Any, _R]:
    resume: Callable[[Any], Any] = coroutine.send
    with_what: Any = None
    while True:
        with neutral():
            try:
                awaited = resume(with_what)
            except StopIteration as finished:
                result: _R = finished.value
                return result
            finally:
                with_what = None  # an exception kept here would keep this frame, in a cycle
        try:
            resume, with_what = coroutine.send, (yield awaited)
        # Whatever is thrown in (cancellation, GeneratorExit on close) is the coroutine's to handle.
        except BaseException as error:
            resume, with_what = coroutine.throw, error
