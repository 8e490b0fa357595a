"""The declared ranges, the recorded results and COMPAT_MATRIX.md say the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

from jaxcompat import matrix
from jaxcompat.patch import catalogue
from jaxcompat.versions import CEILING, Ranges

ROOT = Path(__file__).parents[2]
RECORDED = matrix.proofs(ROOT / "tests" / "matrix")
PUBLISHED = {name: sorted(found, key=Version) for name, found in matrix.releases().items()}
PAIRS = [
    (jax, orbax)
    for jax in PUBLISHED[matrix.JAX]
    for orbax in PUBLISHED[matrix.ORBAX]
    if not matrix.impossible(jax, orbax)
]


def test_the_table_is_what_was_recorded() -> None:
    written = (ROOT / "COMPAT_MATRIX.md").read_text(encoding="utf-8")
    assert written == matrix.render(RECORDED), "run `nox -s matrix` to render it anew"


@pytest.mark.parametrize("patch_id", catalogue())
def test_no_result_contradicts_a_range(patch_id: str) -> None:
    patch = catalogue()[patch_id]
    assert matrix.contradictions(patch_id, patch.affected, RECORDED.get(patch_id, [])) == []


@pytest.mark.parametrize("patch_id", catalogue())
def test_each_bound_was_run_on_both_sides(patch_id: str) -> None:
    # What is listed has no result yet: `nox -s matrix` runs it.
    assert matrix.unproven(catalogue()[patch_id], RECORDED.get(patch_id, [])) == []


def test_the_ceiling_is_the_newest_release_that_was_run() -> None:
    for name in CEILING:
        assert PUBLISHED[name][-1] == CEILING[name]
        assert CEILING[name] in {
            proof.cell.found[name] for found in RECORDED.values() for proof in found
        }


def mutations() -> Iterator[tuple[str, str, Sequence[Ranges]]]:
    """Move each declared bound by one release, both ways."""
    for patch in catalogue().values():
        for number, ranges in enumerate(patch.affected):
            for name, specifiers in ranges.items():
                for bound in SpecifierSet(specifiers):
                    place = next(
                        (
                            i
                            for i, v in enumerate(PUBLISHED[name])
                            if Version(v) == Version(bound.version)
                        ),
                        None,
                    )
                    assert place is not None, f"{patch.id}: {name} {bound.version} is no release"
                    for step in (-1, 1):
                        if not 0 <= place + step < len(PUBLISHED[name]):
                            continue
                        moved = Specifier(f"{bound.operator}{PUBLISHED[name][place + step]}")
                        others = [str(s) for s in SpecifierSet(specifiers) if s != bound]
                        mutated = list(patch.affected)
                        mutated[number] = {**ranges, name: ",".join([*others, str(moved)])}
                        yield patch.id, f"{name}{bound} -> {moved} in set {number}", mutated


MUTATIONS = list(mutations())


def changes(patch_id: str, mutated: Sequence[Ranges]) -> bool:
    """Return whether any pair that can be run is judged differently."""
    return any(
        matrix.is_affected(catalogue()[patch_id].affected, found)
        != matrix.is_affected(mutated, found)
        for jax, orbax in PAIRS
        for found in [{matrix.JAX: jax, matrix.ORBAX: orbax}]
    )


@pytest.mark.parametrize(
    ("patch_id", "mutated"),
    [(patch_id, mutated) for patch_id, _, mutated in MUTATIONS],
    ids=[f"{patch_id}: {what}" for patch_id, what, _ in MUTATIONS],
)
def test_a_bound_moved_by_one_release_contradicts_what_was_recorded(
    patch_id: str, mutated: Sequence[Ranges]
) -> None:
    if not changes(patch_id, mutated):
        pytest.skip("every pair that can be run is judged as before")
    assert matrix.contradictions(patch_id, mutated, RECORDED.get(patch_id, []))


@pytest.mark.parametrize("patch_id", catalogue())
def test_ranges_are_made_of_published_releases(patch_id: str) -> None:
    patch = catalogue()[patch_id]
    wheres = [site.where for site in patch.sites if site.where is not None]
    for ranges in (*patch.affected, *wheres):
        for name, specifiers in ranges.items():
            for bound in SpecifierSet(specifiers):
                assert Version(bound.version) in map(Version, PUBLISHED[name])


def cell_pairs(*ids: str) -> set[tuple[str, str]]:
    return {(c.jax, c.orbax) for c in matrix.cells([catalogue()[i] for i in ids])}


def test_cells_of_a_rectangle_are_its_corners_and_what_lies_beside_them() -> None:
    pairs = cell_pairs("orbax-single-replica-mesh")
    # jax >=0.6.0,<0.7.1 with orbax >=0.11.40
    for jax in ("0.6.0", "0.7.0", "0.7.1"):
        for orbax in ("0.11.39", "0.11.40", CEILING[matrix.ORBAX]):
            assert (jax, orbax) in pairs
    # orbax <0.11.40 with every jax that it goes with: 0.11.18 is the first for the newest
    for pair in (("0.6.0", "0.11.0"), ("0.6.2", "0.11.0"), (CEILING[matrix.JAX], "0.11.18")):
        assert pair in pairs


def test_oldest_newest_and_seed_pair_are_always_cells() -> None:
    for patch_id in catalogue():
        assert cell_pairs(patch_id) >= {
            matrix.SEED,
            ("0.6.0", "0.11.0"),
            (CEILING[matrix.JAX], CEILING[matrix.ORBAX]),
        }


def test_a_cell_has_a_python_that_both_releases_take() -> None:
    published = matrix.releases()
    pythons = set()
    for cell in matrix.cells():
        assert cell.python in published[matrix.JAX][cell.jax]
        assert cell.python in published[matrix.ORBAX][cell.orbax]
        pythons.add(cell.python)
    assert pythons == set(matrix.PYTHONS)


def test_a_result_that_failed_with_the_import_is_a_contradiction_anywhere() -> None:
    (patch_id, *_) = catalogue()
    cell = matrix.Cell("3.11", *matrix.SEED)
    for needed in (True, False):
        proof = matrix.Proof(cell, "2026-01-01", needed=needed, works=False)
        found = matrix.contradictions(patch_id, catalogue()[patch_id].affected, [proof])
        assert f"{patch_id} does not work on {cell.name}" in found
