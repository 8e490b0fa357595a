"""Patches dropped into a copy of jaxcompat: they need no more than their file, and may fail."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from . import toys
from .conftest import MakeSite

TOY_MODULES = {
    "toy/__init__.py": "",
    "toy/first.py": """
        class Parent:
            def method(self, x):
                return x

        class Child(Parent):
            pass

        def one(x):
            return x

        ORIGINALS = {"one": one, "Parent.method": Parent.method}
        """,
    "toy/second.py": """
        from toy import first

        def two(x):
            return x

        def one_of_first(x):
            return first.one(x)

        ORIGINALS = {"two": two}
        """,
}


def _patch(patch_id: str, *sites: str) -> str:
    return dedent("""
        import functools
        from jaxcompat.patch import Patch, Site

        def doubles(original):
            @functools.wraps(original)
            def replacement(*args):
                return 2 * original(*args)
            return replacement

        def adds_one(original):
            @functools.wraps(original)
            def replacement(*args):
                return original(*args) + 1
            return replacement

        def stands_in(module):
            stand_in = type(module)(module.__name__)
            stand_in.one = doubles(module.one)
            stand_in.__wrapped__ = module
            return stand_in

        def fails(original):
            raise ValueError("no replacement could be made")

        PATCH = Patch(
            id={patch_id!r},
            symptom="The toy gives half of what it should.",
            cause="A toy's cause.",
            mend="A toy's mend.",
            until="never.",
            affected=({{"toy": ">=1"}},),
            sites=({sites},),
            upstream=("https://toys.example/1",),
            aftermath={aftermath!r},
        )
        """).format(
        aftermath="Look at the toy." if "silent" in patch_id else "",
        patch_id=patch_id,
        sites=", ".join(f"Site({site})" for site in sites),
    )


@pytest.fixture
def toy_patches(tmp_path: Path, toy_site: MakeSite) -> MakeSite:
    """Return a function that adds patches to a copy of jaxcompat, and a site with their toy."""

    def make(**patches: tuple[str, ...]) -> toys.ToySite:
        dependencies = toys.link_dependencies(tmp_path / "jaxcompat-and-toy-patches")
        for name, sites in patches.items():
            file = dependencies / "jaxcompat" / "patches" / f"{name}.py"
            file.write_text(_patch(name.replace("_", "-"), *sites), encoding="utf-8")
        site = toy_site(dependencies=dependencies, files=TOY_MODULES)
        site.distribution("toy", "1.2")
        return site

    return make


def test_adding_a_patch_takes_its_file_and_nothing_else(toy_patches: MakeSite) -> None:
    site = toy_patches(toy_halves=("'toy.first:one', doubles", "'toy.second:two', doubles"))
    told = site.run("""
        import jaxcompat
        import toy.first, toy.second
        tell(results=[toy.first.one(3), toy.second.two(5)])
    """)
    assert told["results"] == [6, 10]
    assert told.states["toy-halves"] == "applied"
    assert told.logged("INFO") == ["toy-halves applied: toy 1.2"]
    explained = site.python("-m", "jaxcompat", "explain", "toy-halves")
    assert "The toy gives half of what it should." in explained.stdout


FAILING = {
    "at once": ("'toy.first:one', fails",),
    "at its second site": ("'toy.first:Parent.method', doubles", "'toy.first:one', fails"),
    "in its second module": ("'toy.first:one', doubles", "'toy.second:two', fails"),
    "on an inherited method": ("'toy.first:one', doubles", "'toy.first:Child.method', fails"),
}


@pytest.mark.parametrize("how", FAILING)
def test_a_patch_that_fails_is_rolled_back_and_the_import_works(
    toy_patches: MakeSite, how: str
) -> None:
    told = toy_patches(toy_fails=FAILING[how]).run("""
        import jaxcompat
        import toy.first, toy.second
        tell(
            originals=[
                is_original(toy.first, "one"),
                is_original(toy.first, "Parent.method"),
                is_original(toy.second, "two"),
            ],
            shadowed="method" in vars(toy.first.Child),
        )
    """)
    assert told["originals"] == [True, True, True]
    assert not told["shadowed"]
    assert told.states["toy-fails"] == "failed"
    assert told.status["toy-fails"]["patched"] == []


def test_what_went_wrong_is_kept_and_told(toy_patches: MakeSite) -> None:
    told = toy_patches(toy_fails=FAILING["at once"]).run("import jaxcompat, toy.first")
    line = told.complaint("toy-fails")
    for part in (
        "ValueError: no replacement could be made",
        "toy 1.2",
        "The toy gives half",
        "JAXCOMPAT_DISABLE=toy-fails",
    ):
        assert part in line
    trace = told.status["toy-fails"]["traceback"]
    assert trace.startswith("Traceback (most recent call last)")
    assert "in fails" in trace
    assert "no replacement could be made" in trace


def test_strict_makes_a_failure_an_error_of_the_import(toy_patches: MakeSite) -> None:
    told = toy_patches(toy_fails=FAILING["at once"]).run(
        """
        import jaxcompat
        try:
            import toy.first
        except jaxcompat.JaxcompatError as error:
            tell(raised=str(error))
        """,
        environment={"JAXCOMPAT_STRICT": "1"},
    )
    assert "no replacement could be made" in told["raised"]


@pytest.mark.parametrize("failing", ["toy_a", "toy_z"], ids=["the inner", "the outer"])
def test_a_patch_that_fails_leaves_the_other_on_its_target(
    toy_patches: MakeSite, failing: str
) -> None:
    told = toy_patches(
        **{failing: ("'toy.first:one', fails",), "toy_m": ("'toy.first:one', doubles",)}
    ).run("""
        import jaxcompat, toy.first
        tell(result=toy.first.one(3), layers=layers(toy.first.one))
        jaxcompat.revert()
        tell(original=is_original(toy.first, "one"))
    """)
    assert told["result"] == 6
    assert told["layers"] == 1
    assert told["original"]


@pytest.mark.parametrize("order", [("toy-a", "toy-b"), ("toy-b", "toy-a")])
def test_patches_on_one_target_compose_in_the_catalogues_order(
    toy_patches: MakeSite, order: tuple[str, str]
) -> None:
    told = toy_patches(
        toy_a=("'toy.first:one', doubles",), toy_b=("'toy.first:one', adds_one",)
    ).run(f"""
        import jaxcompat, toy.first
        both = toy.first.one(10)
        jaxcompat.revert()
        for patch_id in {order}:
            jaxcompat.apply(patch_id)
        tell(at_import=both, one_by_one=toy.first.one(10))
    """)
    assert told.facts == {"at_import": 21, "one_by_one": 21}


def test_a_patch_waits_for_a_module_that_was_not_imported(toy_patches: MakeSite) -> None:
    told = toy_patches(toy_waits=("'toy.first:one', doubles", "'toy.third:x', doubles")).run(
        "import jaxcompat, toy.first"
    )
    assert told.states["toy-waits"] == "armed"


STAND_IN = "'toy.second:first', stands_in, relies_on=('one',)"


def test_a_modules_name_for_another_is_replaced_there_and_nowhere_else(
    toy_patches: MakeSite,
) -> None:
    told = toy_patches(toy_stands_in=(STAND_IN,)).run("""
        import jaxcompat
        import toy.first, toy.second
        patched = toy.second.one_of_first(3), toy.first.one(3)
        jaxcompat.revert("toy-stands-in")
        tell(patched=patched, reverted=toy.second.first is toy.first)
        jaxcompat.apply()
        tell(again=toy.second.one_of_first(3))
    """)
    assert told["patched"] == [6, 3]
    assert told["reverted"]
    assert told["again"] == 6
    assert told.status["toy-stands-in"]["patched"] == ["toy.second:first"]


def test_who_holds_the_module_itself_is_not_told_to_hold_the_old_one(toy_patches: MakeSite) -> None:
    told = toy_patches(toy_stands_in=(STAND_IN,)).run("""
        import toy.first as mine, toy.second
        import jaxcompat
        tell(patched=toy.second.one_of_first(3))
    """)
    assert told["patched"] == 6
    assert told.warned == []


def test_a_module_without_the_names_that_are_replaced_is_drift(toy_patches: MakeSite) -> None:
    site = "'toy.second:first', stands_in, relies_on=('one', 'three')"
    told = toy_patches(toy_stands_in=(site,)).run("""
        import jaxcompat
        import toy.first, toy.second
        tell(original=toy.second.first is toy.first)
    """)
    assert told["original"]
    assert told.states["toy-stands-in"] == "drifted"
    assert "toy.second:first no longer has three" in told.complaint("toy-stands-in")


def test_of_a_silent_fault_is_told_that_earlier_results_may_be_wrong(toy_patches: MakeSite) -> None:
    site = toy_patches(toy_silent=("'toy.first:one', doubles",))
    told = site.run("import jaxcompat, toy.first")
    (line,) = told.logged("INFO")
    for text in (line, told.status["toy-silent"]["reason"]):
        assert "may be wrong, and no error said so" in text
        assert "python -m jaxcompat explain toy-silent" in text
    explained = site.python("-m", "jaxcompat", "explain", "toy-silent")
    assert "Look at the toy." in explained.stdout


@pytest.mark.parametrize("switch", ["1", "toy-silent"])
def test_of_a_silent_fault_that_is_switched_off_it_is_told_too(
    toy_patches: MakeSite, switch: str
) -> None:
    told = toy_patches(toy_silent=("'toy.first:one', doubles",)).run(
        "import jaxcompat, toy.first", environment={"JAXCOMPAT_DISABLE": switch}
    )
    assert told.states["toy-silent"] == "disabled"
    assert "may be wrong" in told.status["toy-silent"]["reason"]


def test_where_a_silent_fault_never_was_nothing_is_told_of_it(toy_patches: MakeSite) -> None:
    site = toy_patches(toy_silent=("'toy.first:one', doubles",))
    for metadata in site.path.glob("toy-*.dist-info/METADATA"):
        metadata.write_text(metadata.read_text().replace("Version: 1.2", "Version: 0.9"))
    told = site.run("import jaxcompat, toy.first")
    assert told.states["toy-silent"] == "unaffected"
    assert "may be wrong" not in told.status["toy-silent"]["reason"]
