"""The switches: the only place that reads ``os.environ``.

==================== =========================================================
``JAXCOMPAT_DISABLE`` empty or ``0 false no off``: nothing is off.
                      ``1 true yes on all *``: everything is off.
                      Else a comma list of patch ids; globs are allowed.
``JAXCOMPAT_FORCE``   comma list of patch ids (globs) to apply although the
                      installed pair is unlisted or unaffected.
``JAXCOMPAT_STRICT``  boolean: raise where a patch would be failed or drifted.
==================== =========================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

DISABLE = "JAXCOMPAT_DISABLE"
FORCE = "JAXCOMPAT_FORCE"
STRICT = "JAXCOMPAT_STRICT"

_NO = frozenset({"", "0", "false", "no", "off"})
_YES = frozenset({"1", "true", "yes", "on", "all", "*"})


class Settings(NamedTuple):
    """What the environment says at one moment."""

    off: tuple[str, ...]
    """Globs of the patch ids that are switched off."""
    forced: tuple[str, ...]
    """Globs of the patch ids to apply outside their ranges."""
    strict: bool
    problems: tuple[str, ...]
    """One sentence per value that could not be understood."""

    def disables(self, patch_id: str) -> bool:
        return _matches(patch_id, self.off)

    def forces(self, patch_id: str) -> bool:
        """Whether the patch is forced; what is switched off is never forced."""
        return _matches(patch_id, self.forced) and not self.disables(patch_id)


def read(known_ids: Iterable[str]) -> Settings:
    """Read the switches as they are now.

    Parameters
    ----------
    known_ids
        The ids of the catalogue, to tell a misspelt one.
    """
    known = tuple(known_ids)
    problems: list[str] = []

    def value(name: str) -> str:
        return os.environ.get(name, "").strip().lower()

    def globs(name: str, text: str) -> tuple[str, ...]:
        if text in _NO:
            return ()
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if name == DISABLE and not _YES.isdisjoint(parts):
            return ("*",)
        for part in parts:
            if not any(fnmatchcase(patch_id, part) for patch_id in known):
                problems.append(_unknown(name, part, known))
        return parts

    strict = value(STRICT)
    if strict not in _YES | _NO:
        problems.append(f"{STRICT}={strict!r} is neither yes nor no; it is taken as no.")
    return Settings(
        off=globs(DISABLE, value(DISABLE)),
        forced=globs(FORCE, value(FORCE)),
        strict=strict in _YES,
        problems=tuple(problems),
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest of `known`, or nothing."""
    from difflib import get_close_matches  # only a misspelt name pays for it

    close = get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _unknown(name: str, part: str, known: tuple[str, ...]) -> str:
    words = known if name == FORCE else (*known, "true", "all")
    return (
        f"{name} names {part!r}, which is no patch id{nearest(part, words)}; "
        "`python -m jaxcompat status` lists them, and * is all of them."
    )


def _matches(patch_id: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(patch_id, glob) for glob in globs)
