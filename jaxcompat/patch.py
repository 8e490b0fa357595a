"""What a patch is: a declaration that can be read without JAX or Orbax, and a replacement."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxcompat.versions import Ranges


class Site(NamedTuple):
    """One attribute of one module that a patch replaces."""

    target: str
    """``module:attribute`` or ``module:Class.attribute``, where it is *defined*."""
    wrap: Callable[[Any], Any]
    """From the original to its replacement: a plain function that keeps name and signature, or
    what stands in for a module in this one name of it."""
    relies_on: tuple[str, ...] = ()
    """The parameters that must be there, or a module's names: else it is not what was proven."""
    where: Ranges | None = None
    """The versions that have this target, where not all that the patch is for do."""
    copy: bool = False
    """A third party's copy of the code: it may be absent, and stands or falls alone."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.target.partition(":")[2].split("."))


class Argument:
    """One parameter of a function, found and replaced in the arguments of a call.

    Binding all of them would cost more than what most replacements do, and here a wrong call stays
    wrong: the function itself says so.
    """

    def __init__(self, signature: inspect.Signature, name: str) -> None:
        self._name = name
        self._position = [*signature.parameters].index(name)
        if signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
            self._position = sys.maxsize

    def get(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return its value, or None where it is left out."""
        if self._position < len(args):
            return args[self._position]
        return kwargs.get(self._name)

    def put(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments with this value for it."""
        if self._position < len(args):
            return (*args[: self._position], value, *args[self._position + 1 :]), kwargs
        return args, {**kwargs, self._name: value}

    def drop(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments without it."""
        left = {name: value for name, value in kwargs.items() if name != self._name}
        return (*args[: self._position], *args[self._position + 1 :]), left


class Patch(NamedTuple):
    """One known incompatibility and its mend."""

    id: str
    symptom: str
    """What the user sees, in the user's words; the errors' own texts in quotes, and no others."""
    cause: str
    mend: str
    """What the patch does, and what it leaves alone."""
    until: str
    """What makes it unnecessary."""
    affected: Sequence[Ranges]
    """A pair is affected when any range set holds."""
    sites: tuple[Site, ...]
    upstream: tuple[str, ...]
    copies: Callable[[str, str], tuple[Site, ...]] | None = None
    """From the module and the class of a third party's copy of the target to its sites."""
    aftermath: str = ""
    """Of a fault that raises no error: what may be wrong already, and how to check it."""


@functools.cache
def catalogue() -> Mapping[str, Patch]:
    """Return every patch by id, in the order of the ids: the order in which they compose.

    Each module in `jaxcompat.patches` declares one as ``PATCH``; its name is the id with
    underscores. Neither JAX nor Orbax is imported.
    """
    from jaxcompat import patches

    found: dict[str, Patch] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(patches.__path__)):
        patch: Patch = importlib.import_module(f"{patches.__name__}.{name}").PATCH
        found[patch.id] = patch
    return found
