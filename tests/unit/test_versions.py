"""From the installed versions to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from jaxcompat import versions
from jaxcompat.versions import CEILING, Installed, Ranges, judge

from .conftest import MakeSite

JAX, ORBAX = "toy-jax", "toy-orbax-checkpoint"
"""Distributions that are installed nowhere but in these tests, and have no ceiling."""

TWO_RECTANGLES: list[Ranges] = [
    {ORBAX: ">=0.11.0,<0.11.40", JAX: ">=0.6.0"},
    {ORBAX: ">=0.11.40", JAX: ">=0.6.0,<0.7.1"},
]

Install = Callable[..., Installed]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs distributions' metadata and returns what is found."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(metadata: dict[str, str | None]) -> Installed:
        for name, version in metadata.items():
            folder = tmp_path / f"{name.replace('-', '_')}-0.dist-info"
            folder.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\n"
            if version is not None:
                text += f"Version: {version}\n"
            (folder / "METADATA").write_text(text, encoding="utf-8")
        return Installed()

    return install


@pytest.mark.parametrize(
    ("jax", "orbax", "state"),
    [
        # in the first rectangle, the second, both edges, neither
        ("0.9.0", "0.11.33", "affected"),
        ("0.6.0", "0.11.0", "affected"),
        ("0.6.2", "0.11.40", "affected"),
        ("0.7.0", "0.12.8", "affected"),
        ("0.7.1", "0.11.40", "unaffected"),
        ("0.9.0", "0.11.40", "unaffected"),
        ("0.5.3", "0.11.33", "unaffected"),
        ("0.5.3", "0.11.40", "unaffected"),
        ("0.9.0", "0.10.3", "unaffected"),
    ],
)
def test_any_range_set_holds_when_all_its_distributions_match(
    install: Install, jax: str, orbax: str, state: str
) -> None:
    assert judge(TWO_RECTANGLES, install({JAX: jax, ORBAX: orbax})).state == state


@pytest.mark.parametrize(
    ("specifier", "version", "state"),
    [
        # pre-releases and development versions lie between two releases
        (">=0.6.0", "0.9.0.dev20250101", "affected"),
        (">=0.6.0", "0.9.0rc1", "affected"),
        (">=0.6.0", "0.6.0rc1", "unaffected"),
        (">=0.6.0", "0.6.0.dev1", "unaffected"),
        (">=0.6.0,<0.11.40", "0.11.39.dev3", "affected"),
        (">=0.6.0,<0.11.40", "0.11.39rc1", "affected"),
        # the mend may be in it already: PEP 440's exclusive order leaves it out
        (">=0.6.0,<0.11.40", "0.11.40.dev0", "unaffected"),
        (">=0.6.0,<0.11.40", "0.11.40rc1", "unaffected"),
        (">=0.6.0", "0.6.0.post1", "affected"),
        (">=0.6.0,<0.11.40", "0.11.40.post1", "unaffected"),
        # vendor builds carry a local segment, and are the release that they name
        (">=0.6.0", "0.6.0+cuda12", "affected"),
        (">=0.6.0,<0.7.1", "0.7.0+nvidia.25.8", "affected"),
        (">=0.6.0,<0.7.1", "0.7.1+vendor", "unaffected"),
        (">=0.6.0,<=0.7.0", "0.7.0+vendor", "affected"),
        (">=0.6.0", "0.5.3+selfbuilt", "unaffected"),
        (">=0.6.0", "0.9.0.dev20250101+4d6c5c7", "affected"),
    ],
)
def test_which_versions_a_range_takes_in(
    install: Install, specifier: str, version: str, state: str
) -> None:
    assert judge([{JAX: specifier}], install({JAX: version})).state == state


@pytest.mark.parametrize("distribution", CEILING)
@pytest.mark.parametrize(
    ("build", "state"),
    [
        ("{ceiling}", "affected"),
        ("{ceiling}+vendor", "affected"),
        ("{ceiling}.dev1", "affected"),
        ("{ceiling}rc1", "affected"),
        ("{ceiling}.post1", "unlisted"),
        ("{next}", "unlisted"),
        ("{next}.dev1", "unlisted"),
        ("{next}+vendor", "unlisted"),
        ("99", "unlisted"),
    ],
)
def test_above_the_ceiling_a_pair_is_unlisted(
    install: Install, distribution: str, build: str, state: str
) -> None:
    ceiling = Version(CEILING[distribution])
    following = ".".join(map(str, (*ceiling.release[:-1], ceiling.release[-1] + 1)))
    version = build.format(ceiling=ceiling, next=following)
    verdict = judge([{distribution: ">=0.6.0"}], install({distribution: version}))
    assert verdict.state == state
    if state == "unlisted":
        assert version in verdict.reason
        assert str(ceiling) in verdict.reason


def test_one_distribution_above_its_ceiling_is_enough(install: Install) -> None:
    installed = install({"jax": CEILING["jax"], "orbax-checkpoint": "99"})
    verdict = judge([{"jax": ">=0.6.0", "orbax-checkpoint": ">=0.6.0"}], installed)
    assert verdict.state == "unlisted"
    assert f"(orbax-checkpoint {CEILING['orbax-checkpoint']})" in verdict.reason


def test_outside_the_ranges_a_pair_above_the_ceiling_is_unaffected(install: Install) -> None:
    assert judge([{"jax": "<0.7.1"}], install({"jax": "99"})).state == "unaffected"


def test_a_distribution_that_is_not_installed_is_absent(install: Install) -> None:
    verdict = judge(TWO_RECTANGLES, install({JAX: "0.9.0"}))
    assert (verdict.state, verdict.reason) == ("absent", f"{ORBAX} not installed")


def test_all_that_is_missing_is_named(install: Install) -> None:
    assert judge(TWO_RECTANGLES, install({})).reason == f"{ORBAX} and {JAX} not installed"


def test_absent_comes_before_what_cannot_be_read(install: Install) -> None:
    assert judge(TWO_RECTANGLES, install({JAX: "junk"})).state == "absent"


@pytest.mark.parametrize(
    "version", [None, "", "junk", "0.9.0-and-more", "0.9.*", "unknown", "v", "0.9.0 0.8.0"]
)
def test_a_version_that_is_none_is_unlisted(install: Install, version: str | None) -> None:
    verdict = judge([{JAX: ">=0.6.0"}], install({JAX: version}))
    assert verdict.state == "unlisted"
    assert JAX in verdict.reason


@pytest.mark.parametrize("damage", ["METADATA is missing", "not UTF-8", "METADATA is a loop"])
def test_metadata_that_cannot_be_read_are_unlisted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    folder = tmp_path / "toy_jax-0.9.0.dist-info"
    folder.mkdir()
    if damage == "not UTF-8":
        (folder / "METADATA").write_bytes(b"Name: toy-jax\nVersion: 0.9.0\nAuthor: \xff\n")
    elif damage == "METADATA is a loop":
        (folder / "METADATA").symlink_to("METADATA")
    monkeypatch.syspath_prepend(tmp_path)
    installed = Installed()
    assert judge([{JAX: ">=0.6.0"}], installed).state == "unlisted"
    assert str(installed[JAX]).startswith("unreadable")


def test_the_same_metadata_are_asked_for_once(install: Install, tmp_path: Path) -> None:
    installed = install({JAX: "0.9.0"})
    assert installed[JAX] == "0.9.0"
    (tmp_path / "toy_jax-0.dist-info" / "METADATA").unlink()
    assert installed[JAX] == "0.9.0"


def test_the_reason_holds_all_the_versions(install: Install) -> None:
    verdict = judge(TWO_RECTANGLES, install({JAX: "0.9.0", ORBAX: "0.11.33"}))
    assert verdict.reason == f"{ORBAX} 0.11.33, {JAX} 0.9.0"
    assert str(verdict) == f"affected: {verdict.reason}"


def test_the_reason_of_an_unaffected_pair_holds_versions_and_ranges(install: Install) -> None:
    verdict = judge(TWO_RECTANGLES, install({JAX: "0.9.0", ORBAX: "0.11.40"}))
    for part in (f"{JAX} 0.9.0", f"{ORBAX} 0.11.40", versions.describe(TWO_RECTANGLES)):
        assert part in verdict.reason


def test_the_ranges_as_text() -> None:
    assert versions.describe(TWO_RECTANGLES) == (
        f"{ORBAX} >=0.11.0,<0.11.40, {JAX} >=0.6.0; or {ORBAX} >=0.11.40, {JAX} >=0.6.0,<0.7.1"
    )


def test_the_distributions_of_the_ranges_each_once_in_order() -> None:
    assert versions.distributions(TWO_RECTANGLES) == (ORBAX, JAX)


def test_what_is_not_installed_is_described_so(install: Install) -> None:
    described = install({JAX: "0.9.0"}).describe([JAX, ORBAX])
    assert described == f"{JAX} 0.9.0, {ORBAX} (not installed)"


NUMBERS = st.tuples(*[st.integers(0, 30)] * 3)


@given(sets=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=3), data=st.data())
def test_any_of_all_is_what_it_says_for_releases(
    sets: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]], data: st.DataObject
) -> None:
    def text(release: tuple[int, ...]) -> str:
        return ".".join(map(str, release))

    # Versions near the edges tell more than any others.
    edges = st.sampled_from([edge for edges in sets for edge in edges])
    jax, orbax = data.draw(edges | NUMBERS), data.draw(edges | NUMBERS)
    found = {JAX: text(jax), ORBAX: text(orbax)}
    affected: list[Ranges] = [
        {JAX: f">={text(low)},<{text(high)}", ORBAX: f">={text(least)}"}
        for low, high, least in sets
    ]
    assert any(versions.holds(ranges, found) for ranges in affected) == any(
        low <= jax < high and orbax >= least for low, high, least in sets
    )


PARTS = st.integers(0, 3).map(str) | st.sampled_from(["00", "01", "10"])
RELEASES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
SUFFIXES = st.sampled_from(["", "", "rc1", ".dev2", "a1", ".post1", "+local.1", ".dev1+x", "-1"])
CLAUSES = st.tuples(
    st.sampled_from([">=", "<=", "<", ">", "==", "!=", "~=", "=="]),
    st.sampled_from(["", " "]),
    RELEASES,
    st.sampled_from(["", "", "", ".*", "rc1"]),
).map("".join)


@given(
    clauses=st.lists(CLAUSES, max_size=3),
    comma=st.sampled_from([",", ", ", " ,"]),
    release=RELEASES,
    suffix=SUFFIXES,
)
@example(clauses=["<=0.9"], comma=",", release="0.9.0", suffix="")
@example(clauses=[">0.9"], comma=",", release="0.9.0", suffix="")
@example(clauses=["==0.9.0"], comma=",", release="0.9", suffix="")
@example(clauses=["<0.9.0", ">=0"], comma=", ", release="0.9", suffix="")
@example(clauses=["==0"], comma=",", release="0.0", suffix="")
def test_a_version_is_within_a_specifier_where_packaging_says_so(
    clauses: list[str], comma: str, release: str, suffix: str
) -> None:
    specifier, version = comma.join(clauses), release + suffix
    try:
        expected = SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidSpecifier:
        assume(False)
    assert versions.contains(specifier, version) is expected


HEADER = "Metadata-Version: 2.1\nName: toy-jax\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (f"{HEADER}Version: 0.9.0\n", "0.9.0"),
        (f"{HEADER}Version: 0.9.0", "0.9.0"),
        (f"{HEADER}Version:0.9.0  \n", "0.9.0"),
        (f"{HEADER}version: 0.9.0\n", "0.9.0"),
        (f"{HEADER}Version: 0.9.0\n".replace("\n", "\r\n"), "0.9.0"),
        (f"{HEADER}Summary: as\n Version: 7\nVersion: 0.9.0\n", "0.9.0"),
        (f"{HEADER}Version: 0.9.0\n\nReadme\nVersion: 7\n", "0.9.0"),
        (f"{HEADER}Requires-Dist: Version: 7\nVersion: 0.9.0\n", "0.9.0"),
        (f"{HEADER}\nReadme\n\nVersion: 7\n", "unreadable (None)"),
    ],
    ids=[
        "plain",
        "at the end",
        "with blanks",
        "in lower case",
        "with Windows' line ends",
        "after a folded line",
        "before a readme",
        "after a line that ends like it",
        "in the readme only",
    ],
)
def test_the_version_is_the_header_of_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str
) -> None:
    folder = tmp_path / "toy_jax-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(text.encode())
    monkeypatch.syspath_prepend(tmp_path)
    assert Installed()[JAX] == version


def test_the_version_of_an_egg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "toy_jax.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text(f"{HEADER}Version: 0.9.0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert Installed()[JAX] == "0.9.0"


@pytest.mark.parametrize("line", ["", "Version: junk\n"], ids=["no version", "junk"])
def test_damaged_metadata_are_told_and_break_nothing_even_if_warnings_are_errors(
    toy_site: MakeSite, line: str
) -> None:
    site = toy_site(jax=None)
    site.write("jax-0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: jax\n{line}")
    told = site.run("import jaxcompat", options=("-W", "error"))
    assert set(told.states.values()) == {"unlisted"}
    (warning,) = told.logged("WARNING")
    assert "jax unreadable (None)" in warning if not line else "jax junk" in warning
