"""Copied into every toy site: keeps what a child tells, logs and warns of, and reports it at exit.

Imported by children only: it takes over the warnings of its process.
"""

import atexit
import copy
import importlib
import inspect
import json
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TextIO

_facts: dict[str, Any] = {}
_log: list[tuple[str, str]] = []
_warnings: list[dict[str, str]] = []


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _log.append((record.levelname, record.getMessage()))


def _keep_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _warnings.append({"category": category.__name__, "text": str(message), "file": filename})


def tell(**facts: Any) -> None:
    """Report facts to the test that runs this child."""
    _facts.update(facts)


def load(module: str) -> ModuleType:
    """Import a module."""
    return importlib.import_module(module)


def states() -> dict[str, str]:
    """Return the state of each patch now."""
    return {one.id: one.state for one in sys.modules["jaxcompat"].status()}


def is_original(module: ModuleType, path: str) -> bool:
    """Say whether a toy target is the very object that its module defined."""
    value: Any = module
    for part in path.split("."):
        value = vars(value)[part]
    return value is vars(module)["ORIGINALS"][path]


def mended(function: Callable[..., Any]) -> bool:
    """Say whether an Orbax toy sees no mesh although its caller has set one."""
    jax = sys.modules["jax"]
    enter = vars(jax).get("set_mesh") or vars(jax.sharding)["use_mesh"]
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
    ]
    with enter(jax.sharding.Mesh(None, ("x",))):
        result = function(*[None] * len(needed))
        if inspect.iscoroutine(result):
            try:
                result.send(None)
            except StopIteration as stop:
                result = stop.value
    if result not in ((), ("x",)):
        raise AssertionError(f"{function} is no toy: it returned {result!r}")
    return not result


def layers(function: Any) -> int:
    """Return how many replacements lie on a target."""
    count = 0
    while hasattr(function, "__wrapped__"):
        function, count = function.__wrapped__, count + 1
    return count


def answers(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function answers to those who look at it rather than call it."""
    return {
        "type": type(function).__name__,
        "signature": str(inspect.signature(function)),
        "is a coroutine function": inspect.iscoroutinefunction(function),
        "is a function": inspect.isfunction(function),
        "__name__": function.__name__,
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "annotations": str(inspect.get_annotations(function)),
        "survives pickle": pickle.loads(pickle.dumps(function)) is function,
        "survives deepcopy": copy.deepcopy(function) is function,
    }


@atexit.register
def _report() -> None:
    shim = sys.modules.get("jaxcompat")
    status = [one._asdict() for one in shim.status()] if shim else []
    with open(os.environ["REPORT_TO"], "w", encoding="utf-8") as file:
        json.dump({"facts": _facts, "log": _log, "warnings": _warnings, "status": status}, file)


_logger = logging.getLogger("jaxcompat")
_logger.setLevel(logging.DEBUG)
_logger.addHandler(_Keep())
warnings.showwarning = _keep_warning
if not any(action == "error" for action, *_ in warnings.filters):
    warnings.simplefilter("always")
