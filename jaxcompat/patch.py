"""What a patch is: a declaration that can be read without JAX or Orbax, and a replacement."""

from __future__ import annotations

import functools
import importlib
import pkgutil
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


class Patch(NamedTuple):
    """One known incompatibility and its mend."""

    id: str
    symptom: str
    """What the user sees, in the user's words; the error's own text in quotes, first."""
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
