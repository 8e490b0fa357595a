"""The version matrix: which cells prove the ranges, and COMPAT_MATRIX.md from what happened.

A cell is one pair of releases on one Python. Which cells there are follows from the declared
ranges: at each bound the last release before it and the first inside it, and the last inside and
the first after, crossed over the distributions so that the corners of each rectangle are run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

from jaxcompat.known import KNOWN
from jaxcompat.patch import Patch, catalogue
from jaxcompat.versions import Ranges, contains, describe, distributions, holds

JAX, ORBAX = "jax", "orbax-checkpoint"
SEED = ("0.9.0", "0.11.33")
"""The pair of google/orbax#3164, where it began."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

IMPOSSIBLE: Sequence[tuple[Ranges, str]] = (
    (
        {ORBAX: "<0.11.18", JAX: ">=0.7.0"},
        "`import orbax.checkpoint` fails: jax.experimental.layout has no DeviceLocalLayout "
        "(google/orbax#2521)",
    ),
    (
        {ORBAX: ">=0.11.26,<0.11.30", JAX: "<0.6.2"},
        "`import orbax.checkpoint` fails: jax.experimental.layout has no Format",
    ),
    ({ORBAX: "==0.11.34"}, "`import orbax.checkpoint` needs flax, which it does not declare"),
)
"""Pairs that cannot be run, with the reason: their cells are left out."""


@dataclass(frozen=True)
class Cell:
    """One pair of releases on one Python."""

    python: str
    jax: str
    orbax: str

    @property
    def name(self) -> str:
        return f"py{self.python}-jax{self.jax}-orbax{self.orbax}"

    @property
    def found(self) -> dict[str, str]:
        return {JAX: self.jax, ORBAX: self.orbax}


Releases = Mapping[str, Mapping[str, Sequence[str]]]
"""Distribution -> release -> the Pythons that can install it."""


def releases() -> Releases:
    """Return the published releases that the matrix is made of (``releases.json``)."""
    text = resources.files("jaxcompat").joinpath("releases.json").read_text(encoding="utf-8")
    found: Releases = json.loads(text)
    return found


def is_affected(affected: Sequence[Ranges], found: Mapping[str, str]) -> bool:
    """Return whether any range set holds."""
    return any(holds(ranges, found) for ranges in affected)


def impossible(jax: str, orbax: str) -> str | None:
    """Return why a pair cannot be run, or None."""
    found = {JAX: jax, ORBAX: orbax}
    return next((reason for ranges, reason in IMPOSSIBLE if holds(ranges, found)), None)


def cells(patches: Iterable[Patch] | None = None) -> list[Cell]:
    """Return the cells that prove the patches' ranges, the newest first."""
    published = releases()
    jaxes, orbaxes = (sorted(published[name], key=Version) for name in (JAX, ORBAX))
    pairs = {SEED, (jaxes[-1], orbaxes[-1]), (jaxes[0], orbaxes[0])}
    for patch in catalogue().values() if patches is None else patches:
        wheres = [site.where for site in patch.sites if site.where is not None]
        for ranges in (*patch.affected, *wheres):
            # Edges are looked for among the releases that go with the other one at all.
            for jax in _edges(jaxes, ranges.get(JAX, "")):
                usable = [orbax for orbax in orbaxes if not impossible(jax, orbax)]
                wanted = _edges(usable, ranges[ORBAX]) if ORBAX in ranges else usable[-1:]
                pairs.update((jax, orbax) for orbax in wanted)
            for orbax in _edges(orbaxes, ranges[ORBAX]) if ORBAX in ranges else ():
                usable = [jax for jax in jaxes if not impossible(jax, orbax)]
                pairs.update((jax, orbax) for jax in _edges(usable, ranges.get(JAX, "")))
    return sorted(
        (
            Cell(_python(published, jax, orbax), jax, orbax)
            for jax, orbax in pairs
            if not impossible(jax, orbax)
        ),
        key=lambda cell: (Version(cell.orbax), Version(cell.jax)),
        reverse=True,
    )


def _edges(ordered: Sequence[str], specifier: str) -> list[str]:
    """Return the last before, first inside, last inside and first after, as far as they exist."""
    inside = [contains(specifier, release) for release in ordered]
    edges = []
    for index, release in enumerate(ordered):
        at_an_end = index in (0, len(ordered) - 1) and inside[index]
        beside = {inside[i] for i in (index - 1, index + 1) if 0 <= i < len(ordered)}
        if at_an_end or (not inside[index]) in beside:
            edges.append(release)
    return edges


def _python(published: Releases, jax: str, orbax: str) -> str:
    """Return the oldest Python that can install both, the newest for the newest pair."""
    usable = [p for p in PYTHONS if p in published[JAX][jax] and p in published[ORBAX][orbax]]
    newest = all(
        release == max(published[name], key=Version)
        for name, release in ((JAX, jax), (ORBAX, orbax))
    )
    return usable[-1 if newest else 0]


# --- what was recorded -----------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """What one canary showed in one cell: facts, from which the verdict follows."""

    cell: Cell
    date: str
    needed: bool
    """The canary failed bare."""
    works: bool
    """It passed with `import jaxcompat` (with the patch forced, where it is not affected)."""


def proofs(directory: Path) -> dict[str, list[Proof]]:
    """Return what was recorded, by patch id."""
    found: dict[str, list[Proof]] = {}
    for path in sorted(directory.glob("*.json")):
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        cell = Cell(**record["cell"])
        for check in record["checks"]:
            found.setdefault(check["id"], []).append(
                Proof(cell, record["date"], check["needed"], check["works"])
            )
    return found


def contradictions(
    patch_id: str, affected: Sequence[Ranges], recorded: Sequence[Proof]
) -> list[str]:
    """Return a sentence per recorded result that the ranges do not agree with."""
    found = []
    for proof in recorded:
        inside = is_affected(affected, proof.cell.found)
        if inside and not proof.needed:
            found.append(f"{patch_id} is not needed on {proof.cell.name}: the range is too wide")
        if not inside and proof.needed:
            found.append(f"{patch_id} is needed on {proof.cell.name}: the range is too narrow")
        if not proof.works:
            found.append(f"{patch_id} does not work on {proof.cell.name}")
    return found


def unproven(patch: Patch, recorded: Sequence[Proof]) -> list[str]:
    """Return the cells that the patch's bounds ask for and that have no recorded result."""
    run = {proof.cell.name for proof in recorded}
    return [cell.name for cell in cells([patch]) if cell.name not in run]


# --- COMPAT_MATRIX.md ------------------------------------------------------------------------

_LEGEND = """\
`●` needed, and it works: run bare and with the import. `○` in the range, between cells that were
run. `✓` not needed: run. Blank: outside of the range, between cells that were run. `/` the pair
does not import at all."""


def render(recorded: Mapping[str, Sequence[Proof]]) -> str:
    """Return COMPAT_MATRIX.md: the same text for the same results."""
    names = {proof.cell.name for found in recorded.values() for proof in found}
    lines = [
        "# Compatibility matrix",
        "",
        "Rendered by `nox -s matrix` from the results in tests/matrix; not to be edited by hand.",
        f"{len(names)} pairs of JAX and Orbax were installed from real wheels; on each, every",
        "patch's canary ran bare and with `import jaxcompat`, in fresh interpreters on CPU.",
        "",
        _LEGEND,
    ]
    for patch in catalogue().values():
        found = recorded.get(patch.id, ())
        dates = sorted(proof.date for proof in found)
        lines += [
            "",
            f"## {patch.id}",
            "",
            patch.symptom,
            "",
            f"- **Affected**: {describe(patch.affected)}",
            f"- **Unnecessary with**: {patch.until}",
            f"- **Upstream**: {', '.join(f'<{link}>' for link in patch.upstream)}",
            f"- **Proven**: {len(found)} cells, last on {dates[-1] if dates else 'never'}",
            "",
            *_picture(patch, found),
        ]
    lines += ["", "## Known and not mended", ""]
    lines += ["Run on some pairs; the bounds are not proven from both sides as those above.", ""]
    lines += [
        f"- **{one.id}** ({describe(one.affected)}). {one.symptom} *Not mended:* {one.reason} "
        f"*Instead:* {one.advice}"
        for one in KNOWN
    ]
    lines += ["", "## Pairs that cannot be run", ""]
    lines += [f"- {describe([ranges])}: {reason}" for ranges, reason in IMPOSSIBLE]
    return "\n".join(lines) + "\n"


def _picture(patch: Patch, found: Sequence[Proof]) -> Iterator[str]:
    """Draw a table, jax across and orbax down; releases that look alike share a row or column."""
    proven = {(proof.cell.jax, proof.cell.orbax): proof for proof in found}
    jaxes, orbaxes = (sorted(releases()[name], key=Version) for name in (JAX, ORBAX))
    if ORBAX not in distributions(patch.affected):
        # Orbax plays no part: one row, with what was run of any Orbax.
        proven = {(jax, "any"): proof for (jax, _), proof in proven.items()}
        orbaxes = ["any"]

    def sign(jax: str, orbax: str) -> str:
        proof = proven.get((jax, orbax))
        if orbax != "any" and impossible(jax, orbax):
            return "/"
        if proof is None:
            inside = is_affected(patch.affected, {JAX: jax, ORBAX: orbax})
            return "○" if inside else " "
        if not proof.works:
            return "✗"
        return "●" if proof.needed else "✓"

    rows = list(_grouped(orbaxes, lambda orbax: [sign(jax, orbax) for jax in jaxes]))
    columns = list(_grouped(jaxes, lambda jax: [sign(jax, orbax) for orbax in orbaxes]))
    yield f"| orbax \\ jax | {' | '.join(_span(column) for column in columns)} |"
    yield f"|---|{':-:|' * len(columns)}"
    for row in rows:
        signs = " | ".join(sign(column[0], row[0]) for column in columns)
        yield f"| {_span(row)} | {signs} |"


def _grouped(ordered: Sequence[str], looks: Callable[[str], list[str]]) -> Iterator[list[str]]:
    for _, group in groupby(ordered, key=looks):
        yield list(group)


def _span(group: Sequence[str]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]} - {group[-1]}"


def as_json(found: Iterable[Cell]) -> str:
    """Return the cells as a JSON list: what CI makes its jobs of."""
    return json.dumps([{"name": c.name, **dataclasses.asdict(c)} for c in found], indent=2)
