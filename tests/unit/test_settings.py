"""The three variables, value by value."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxcompat import settings
from jaxcompat.settings import DISABLE, FORCE, STRICT, Settings

KNOWN = ("jax-aot-backend", "orbax-broadcast-mesh", "orbax-single-replica-mesh")

NO = ["", "  ", "0", "false", "no", "off", "FALSE", "Off", " no "]
YES = ["1", "true", "yes", "on", "TRUE", "Yes", " 1 ", "\ton\n"]
EVERYTHING = [*YES, "all", "*", "ALL", " * "]

WORDS = [*KNOWN, *EVERYTHING, *NO, "orbax-*", "[", "[!", "]", "?", "[z-a]", "ünïcode", "İ"]
CHARACTERS = st.integers(1, 0xD7FF).map(chr) | st.sampled_from(",*?[]!-^ \t\nabO0")
TEXT = st.lists(CHARACTERS, max_size=20).map("".join) | st.lists(
    st.sampled_from(WORDS), max_size=4
).map(",".join)


@contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    before = dict(os.environ)
    try:
        for name in (DISABLE, FORCE, STRICT):
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in values.items() if value is not None})
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _read(**values: str | None) -> Settings:
    with _environment(**values):
        return settings.read(KNOWN)


def _off(found: Settings) -> list[str]:
    return [patch_id for patch_id in KNOWN if found.disables(patch_id)]


def _forced(found: Settings) -> list[str]:
    return [patch_id for patch_id in KNOWN if found.forces(patch_id)]


@pytest.mark.parametrize("value", [None, *NO])
def test_disable_empty_or_no_switches_nothing_off(value: str | None) -> None:
    found = _read(JAXCOMPAT_DISABLE=value)
    assert _off(found) == []
    assert found.problems == ()


@pytest.mark.parametrize("value", EVERYTHING)
def test_disable_yes_switches_everything_off(value: str) -> None:
    found = _read(JAXCOMPAT_DISABLE=value)
    assert _off(found) == [*KNOWN]
    assert found.off == ("*",)
    assert found.problems == ()


LISTS = [
    ("jax-aot-backend", ["jax-aot-backend"]),
    ("JAX-AOT-Backend", ["jax-aot-backend"]),
    ("jax-aot-backend,orbax-broadcast-mesh", ["jax-aot-backend", "orbax-broadcast-mesh"]),
    (" jax-aot-backend ,\torbax-broadcast-mesh ", ["jax-aot-backend", "orbax-broadcast-mesh"]),
    (",jax-aot-backend,,", ["jax-aot-backend"]),
    ("orbax-*", ["orbax-broadcast-mesh", "orbax-single-replica-mesh"]),
    ("*-mesh", ["orbax-broadcast-mesh", "orbax-single-replica-mesh"]),
    ("jax-aot-backen?", ["jax-aot-backend"]),
    ("orbax-[bx]*", ["orbax-broadcast-mesh"]),
    ("orbax-b*, jax-*", ["jax-aot-backend", "orbax-broadcast-mesh"]),
    (",", []),
]


@pytest.mark.parametrize(("value", "ids"), LISTS)
def test_disable_takes_a_list_of_ids_and_globs(value: str, ids: list[str]) -> None:
    found = _read(JAXCOMPAT_DISABLE=value)
    assert _off(found) == ids
    assert found.off != ("*",)
    assert found.problems == ()


@pytest.mark.parametrize(("value", "ids"), [*LISTS, ("*", [*KNOWN])])
def test_force_takes_a_list_of_ids_and_globs(value: str, ids: list[str]) -> None:
    found = _read(JAXCOMPAT_FORCE=value)
    assert _forced(found) == ids
    assert _off(found) == []
    assert found.problems == ()


@pytest.mark.parametrize("value", [None, *NO])
def test_force_empty_or_no_forces_nothing(value: str | None) -> None:
    found = _read(JAXCOMPAT_FORCE=value)
    assert _forced(found) == []
    assert found.problems == ()


@pytest.mark.parametrize(
    ("disable", "forced"),
    [
        ("1", []),
        ("orbax-broadcast-mesh", ["jax-aot-backend", "orbax-single-replica-mesh"]),
        ("orbax-*", ["jax-aot-backend"]),
        ("0", [*KNOWN]),
    ],
)
def test_force_is_never_over_disable(disable: str, forced: list[str]) -> None:
    assert _forced(_read(JAXCOMPAT_DISABLE=disable, JAXCOMPAT_FORCE="*")) == forced


@pytest.mark.parametrize("variable", [DISABLE, FORCE])
@pytest.mark.parametrize(
    ("value", "word", "near"),
    [
        ("orbax-singel-replica-mesh", "orbax-singel-replica-mesh", "orbax-single-replica-mesh"),
        ("Jax_AOT_backend", "jax_aot_backend", "jax-aot-backend"),
        ("jax-aot-backend,orbax-brodcast-mesh", "orbax-brodcast-mesh", "orbax-broadcast-mesh"),
        ("orbax-broadcast-mesh*x", "orbax-broadcast-mesh*x", "orbax-broadcast-mesh"),
    ],
)
def test_an_unknown_id_names_the_nearest(variable: str, value: str, word: str, near: str) -> None:
    (problem,) = _read(**{variable: value}).problems
    assert problem.startswith(f"{variable} names {word!r}")
    assert f"did you mean {near!r}?" in problem
    assert "python -m jaxcompat status" in problem


def test_an_unknown_id_far_from_all_names_none() -> None:
    (problem,) = _read(JAXCOMPAT_DISABLE="zzz").problems
    assert "'zzz'" in problem
    assert "did you mean" not in problem


def test_each_unknown_id_is_a_problem_of_its_own() -> None:
    first, second = _read(JAXCOMPAT_DISABLE="qqq,zzz").problems
    assert "'qqq'" in first
    assert "'zzz'" in second


def test_a_misspelt_yes_of_disable_is_told() -> None:
    (problem,) = _read(JAXCOMPAT_DISABLE="ture").problems
    assert "did you mean 'true'?" in problem


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_force_is_no_boolean(value: str) -> None:
    found = _read(JAXCOMPAT_FORCE=value)
    assert _forced(found) == []
    assert f"'{value}'" in found.problems[0]


def test_an_unknown_id_leaves_the_known_ones_beside_it_alone() -> None:
    assert _off(_read(JAXCOMPAT_DISABLE="zzz,jax-aot-backend")) == ["jax-aot-backend"]


@pytest.mark.parametrize("value", YES)
def test_strict_yes(value: str) -> None:
    found = _read(JAXCOMPAT_STRICT=value)
    assert found.strict
    assert found.problems == ()


@pytest.mark.parametrize("value", [None, *NO])
def test_strict_no(value: str | None) -> None:
    found = _read(JAXCOMPAT_STRICT=value)
    assert not found.strict
    assert found.problems == ()


@pytest.mark.parametrize("value", ["2", "yess", "1,0", "jax-aot-backend"])
def test_strict_junk_is_no_and_is_told(value: str) -> None:
    found = _read(JAXCOMPAT_STRICT=value)
    assert not found.strict
    (problem,) = found.problems
    assert problem.startswith(f"{STRICT}={value!r}")


def test_the_variables_are_read_each_time() -> None:
    with _environment(JAXCOMPAT_DISABLE="1"):
        assert _off(settings.read(KNOWN)) == [*KNOWN]
        os.environ[DISABLE] = "0"
        assert _off(settings.read(KNOWN)) == []


@given(disable=TEXT, force=TEXT, strict=TEXT)
@example(disable="[z-a]", force="[!", strict="[")
def test_no_text_whatever_raises_and_force_is_never_over_disable(
    disable: str, force: str, strict: str
) -> None:
    found = _read(JAXCOMPAT_DISABLE=disable, JAXCOMPAT_FORCE=force, JAXCOMPAT_STRICT=strict)
    assert not set(_forced(found)) & set(_off(found))
    assert all(problem.startswith((DISABLE, FORCE, STRICT)) for problem in found.problems)


@given(ids=st.sets(st.sampled_from(KNOWN)), blanks=st.sampled_from(["", " ", "\t"]))
def test_a_list_switches_off_what_it_names_and_nothing_else(ids: set[str], blanks: str) -> None:
    value = f"{blanks},{blanks}".join(sorted(ids))
    assert set(_off(_read(JAXCOMPAT_DISABLE=value))) == ids
