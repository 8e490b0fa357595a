"""From the installed versions and a patch's ranges to a verdict with its reason."""

from __future__ import annotations

import importlib
import operator
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Literal, NamedTuple

Ranges = Mapping[str, str]
"""One range set: distribution -> specifier. It holds when all of them match."""

CEILING: Ranges = {"jax": "0.12.0.1", "orbax-checkpoint": "0.12.8"}
"""The newest release of each distribution that has been run. Above it, a pair is unlisted."""

_VERSION_MODULES = {"jax": "jax.version", "orbax-checkpoint": "orbax.checkpoint.version"}
"""Where a distribution's loaded code says its own version (plain literals, nothing else)."""


class Verdict(NamedTuple):
    """What a patch's ranges say of the installed versions: a value, not an exception."""

    state: Literal["absent", "unaffected", "unlisted", "affected"]
    reason: str

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}"


class Installed:
    """The installed versions, asked of `importlib.metadata` once per distribution."""

    def __init__(self) -> None:
        self._found: dict[str, str | None] = {}

    def __getitem__(self, distribution: str) -> str | None:
        """Return the version as the metadata spells it; None where it is not installed.

        A version that cannot be read comes back as text that says so and parses as no version.
        """
        if distribution not in self._found:
            try:
                version = _version(metadata.distribution(distribution))
            except metadata.PackageNotFoundError:
                self._found[distribution] = None
            except (OSError, ValueError, KeyError) as error:
                self._found[distribution] = f"unreadable ({type(error).__name__}: {error})"
            else:
                self._found[distribution] = (
                    version if isinstance(version, str) else f"unreadable ({version!r})"
                )
        return self._found[distribution]

    def describe(self, distributions: Iterable[str]) -> str:
        """Return ``jax 0.9.0, orbax-checkpoint 0.11.33``."""
        return ", ".join(f"{name} {self[name] or '(not installed)'}" for name in distributions)


def _version(distribution: metadata.Distribution) -> object:
    """Return the version: a string, or None where damaged metadata have none.

    Its line is read as it stands: `Distribution.version` parses all of a METADATA as an e-mail,
    the README in it too, which costs JAX and Orbax 2 ms.
    """
    headers = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
    line = re.search(r"^Version:[ \t]*(\S+)[ \t]*$", headers, re.MULTILINE)
    if line:
        return line[1]
    parsed: Any = distribution.metadata  # get(), not []: that warns of what is missing
    return parsed.get("Version")


def distributions(affected: Sequence[Ranges]) -> tuple[str, ...]:
    """Return the distributions that the range sets name, in order, each once."""
    return tuple(dict.fromkeys(name for ranges in affected for name in ranges))


def describe(affected: Sequence[Ranges]) -> str:
    """Return the range sets as a sentence: ``jax >=0.6.0, orbax-checkpoint <0.11.40; or ...``."""
    return "; or ".join(
        ", ".join(f"{name} {specifier}" for name, specifier in ranges.items())
        for ranges in affected
    )


def judge(affected: Sequence[Ranges], installed: Installed) -> Verdict:
    """Say whether the installed versions are affected, and why.

    Parameters
    ----------
    affected
        The patch's range sets: affected is a pair for which any set holds.
    installed
        The versions to judge.
    """
    names = distributions(affected)
    missing = [name for name in names if installed[name] is None]
    if missing:
        return Verdict("absent", f"{' and '.join(missing)} not installed")
    found = {name: installed[name] or "" for name in names}
    for name, version in found.items():
        if not _is_version(version):
            return Verdict("unlisted", f"the version of {name} is {version}: not patched")
    pair = installed.describe(names)
    holding = [ranges for ranges in affected if holds(ranges, found)]
    if not holding:
        return Verdict("unaffected", f"{pair} is outside {describe(affected)}")
    above = [
        name
        for name in holding[0]
        if name in CEILING and not contains(f"<={CEILING[name]}", found[name])
    ]
    if above:
        newest = ", ".join(f"{name} {CEILING[name]}" for name in above)
        return Verdict("unlisted", f"{pair} is newer than what was proven ({newest}): not patched")
    return Verdict("affected", pair)


def holds(ranges: Ranges, found: Mapping[str, str]) -> bool:
    """Return whether every distribution of the range set is within its specifier."""
    return all(contains(specifier, found[name]) for name, specifier in ranges.items())


def contains(specifier: str, version: str) -> bool:
    """Return whether a version is within a specifier, as `packaging` says it.

    Pre-releases count as what they are, between two releases: without `prereleases=True` a
    specifier turns every one of them away. Plain releases, which nearly all are, are compared
    here: importing `packaging.specifiers` takes 1 % of what JAX and Orbax take.
    """
    clauses = [_CLAUSE.fullmatch(clause.strip()) for clause in specifier.split(",") if clause]
    if _PLAIN.fullmatch(version) and all(clauses):
        release = _release(version)
        return all(_COMPARED[c[1]](release, _release(c[2])) for c in clauses if c)
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


_PLAIN = re.compile(r"[0-9]+(\.[0-9]+)*")
_CLAUSE = re.compile(r"(>=|<=|<|>|==)\s*([0-9]+(?:\.[0-9]+)*)")
_COMPARED = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}


def _release(plain: str) -> tuple[int, ...]:
    """Return the numbers, without the zeros at the end, which do not count."""
    numbers = [int(number) for number in plain.split(".")]
    while numbers and not numbers[-1]:
        del numbers[-1]
    return tuple(numbers)


def _is_version(text: str) -> bool:
    if _PLAIN.fullmatch(text):
        return True
    from packaging.version import InvalidVersion, Version

    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def disagreement(names: Iterable[str], installed: Installed) -> str | None:
    """Return a sentence when the loaded code is of another version than the metadata says.

    Editable installs and a second copy earlier on `sys.path` do that; the ranges then speak of
    code that is not running. Local segments (``+cuda12``) are not compared. A distribution that
    is not being imported has no say; of one that is, the version module is imported where it is
    not yet.
    """
    for name in names:
        module_name = _VERSION_MODULES.get(name, "")
        if module_name.rpartition(".")[0] not in sys.modules:
            continue
        try:
            module = sys.modules.get(module_name) or importlib.import_module(module_name)
            loaded = str(vars(module)["__version__"])
            same = loaded == installed[name] or _is_same(loaded, installed[name] or "")
        # It may be anything that somebody put there, and must not break the user's import.
        except Exception as error:
            return (
                f"the loaded {name} does not tell its version as {module_name}.__version__ "
                f"({type(error).__name__}: {error})"
            )
        if not same:
            return f"the metadata says {name} {installed[name]}, the loaded code {loaded}"
    return None


def _is_same(one: str, other: str) -> bool:
    from packaging.version import Version

    return Version(one).public == Version(other).public
