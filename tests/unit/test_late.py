"""``import jaxcompat`` after, or in the middle of, the import of what it mends."""

from __future__ import annotations

import pytest

from .conftest import MakeSite
from .toys import (
    BACKEND,
    BROADCAST,
    HANDLERS,
    MULTISLICE,
    PATCHES,
    SINGLE,
    ToySite,
    changed,
    file_of,
)

HOLDERS = {
    "holder_by_name.py": f"from {MULTISLICE} import broadcast_one_replica_to_all",
    "holder_by_alias.py": f"""
        import {MULTISLICE}
        merge = {MULTISLICE}.broadcast_one_replica_to_all
        """,
    "user_of_the_module.py": f"""
        from {MULTISLICE.rpartition(".")[0]} import multislice
        in_a_list = [multislice.broadcast_one_replica_to_all]
        """,
}


def test_what_is_imported_already_is_patched_at_once(affected: ToySite) -> None:
    told = affected.run("""
        aot, multislice, handlers = load_all()
        import jaxcompat
        tell(
            states=states(),
            broadcast=mended(multislice.broadcast_one_replica_to_all),
            coroutine=mended(handlers._single_replica_deserialize_and_broadcast),
            unpickler=is_original(aot, "_JaxPjrtUnpickler.__init__"),
        )
    """)
    assert told["states"] == dict.fromkeys(PATCHES, "applied")
    assert told["broadcast"]
    assert told["coroutine"]
    assert not told["unpickler"]


def test_what_is_not_imported_yet_waits(affected: ToySite) -> None:
    told = affected.run("""
        load(MULTISLICE)
        import jaxcompat
        tell(states=states())
        load_all()
    """)
    assert told["states"] == {BACKEND: "armed", BROADCAST: "applied", SINGLE: "armed"}
    assert told.states == dict.fromkeys(PATCHES, "applied")


def test_when_nobody_holds_the_old_object_nobody_is_warned(affected: ToySite) -> None:
    told = affected.run("load_all(); import jaxcompat")
    assert told.states == dict.fromkeys(PATCHES, "applied")
    assert told.warnings == []


def test_one_warning_names_exactly_the_modules_that_hold_the_old_object(
    toy_site: MakeSite,
) -> None:
    told = toy_site(files=HOLDERS).run("""
        import holder_by_name, holder_by_alias, user_of_the_module
        import jaxcompat
    """)
    (text,) = told.warned
    for holder in ("holder_by_name", "holder_by_alias"):
        assert f"{holder} holds {MULTISLICE}:broadcast_one_replica_to_all" in text
    assert text.count(" holds ") == 2
    assert "first line" in text


def test_the_warning_stands_at_the_users_import(toy_site: MakeSite) -> None:
    told = toy_site(files=HOLDERS).run("import holder_by_name; import jaxcompat")
    assert told.warnings[0]["file"].endswith("program.py")


def test_the_program_itself_may_be_the_holder(affected: ToySite) -> None:
    told = affected.run("""
        held = load(HANDLERS)._single_replica_deserialize_and_broadcast
        import jaxcompat
    """)
    (text,) = told.warned
    assert f"__main__ holds {HANDLERS}:_single_replica_deserialize_and_broadcast" in text


def test_holders_are_named_once(toy_site: MakeSite) -> None:
    told = toy_site(files=HOLDERS).run("""
        import holder_by_name
        import jaxcompat
        jaxcompat.revert()
        jaxcompat.apply()
    """)
    assert len(told.warned) == 1


def test_a_module_that_is_loaded_lazily_is_not_loaded_by_the_search(toy_site: MakeSite) -> None:
    told = toy_site(files={"lazy.py": "raise AssertionError('loaded')"}).run("""
        import importlib.util
        load(MULTISLICE)
        spec = importlib.util.find_spec("lazy")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules["lazy"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["lazy"])
        import jaxcompat
    """)
    assert told.states[BROADCAST] == "applied"


@pytest.mark.parametrize(
    ("environment", "versions"),
    [
        ({"JAXCOMPAT_DISABLE": "1"}, {}),
        ({}, {"orbax": "0.1.0"}),
        ({}, {"orbax": "99.8"}),
    ],
    ids=["disabled", "unaffected", "unlisted"],
)
def test_who_is_not_patched_is_not_warned_of_being_late(
    toy_site: MakeSite, environment: dict[str, str], versions: dict[str, str]
) -> None:
    told = toy_site(files=HOLDERS, **versions).run(
        "import holder_by_name; import jaxcompat", environment=environment
    )
    assert told.warned == []


def test_a_late_drift_is_told_as_drift_and_not_as_being_late(toy_site: MakeSite) -> None:
    """Everybody holds the only object that there is."""
    told = toy_site(files=changed(MULTISLICE, ("is_source: bool", "source: bool"))).run("""
        load(MULTISLICE)
        import jaxcompat
    """)
    assert told.states[BROADCAST] == "drifted"
    assert told.warned == []


@pytest.mark.parametrize("module", ["MULTISLICE", "AOT"])
def test_a_module_that_is_blocked_in_sys_modules_is_no_hindrance(
    affected: ToySite, module: str
) -> None:
    """None there is Python's own way to say that a module must not be imported."""
    told = affected.run(f"""
        sys.modules[{module}] = None
        import jaxcompat
        jaxcompat.apply()
        tell(wrapped=not is_original(load(HANDLERS), "_single_replica_deserialize_and_broadcast"))
    """)
    assert told["wrapped"]


# --- half imported -----------------------------------------------------------------------------

HALF_IMPORTED = {
    "before": ("import jax\n", "import jax\nimport jaxcompat\n"),
    "after": ("", "import jaxcompat"),
}


@pytest.mark.parametrize("where", HALF_IMPORTED)
def test_a_half_imported_module_is_not_touched_and_the_user_is_told(
    toy_site: MakeSite, where: str
) -> None:
    """jaxcompat is imported by the module itself, before or after it defines the target."""
    told = toy_site(files=changed(MULTISLICE, HALF_IMPORTED[where])).run("""
        multislice = load(MULTISLICE)
        tell(original=is_original(multislice, "broadcast_one_replica_to_all"))
    """)
    assert told["original"]
    assert told.states[BROADCAST] == "armed"
    for patch_id in (BROADCAST, SINGLE):
        line = told.complaint(patch_id)
        assert MULTISLICE in line
        assert "jaxcompat.apply()" in line
        assert "jaxcompat.apply()" in told.status[patch_id]["reason"]


@pytest.mark.parametrize("where", HALF_IMPORTED)
def test_apply_patches_what_was_half_imported(toy_site: MakeSite, where: str) -> None:
    told = toy_site(files=changed(MULTISLICE, HALF_IMPORTED[where])).run("""
        multislice, handlers = load(MULTISLICE), load(HANDLERS)
        import jaxcompat
        jaxcompat.apply()
        tell(
            broadcast=mended(multislice.broadcast_one_replica_to_all),
            globalize=mended(multislice._globalize_single_replica_arrays),
            layers=layers(multislice.broadcast_one_replica_to_all),
            coroutine=mended(handlers._single_replica_deserialize_and_broadcast),
        )
    """)
    assert told.facts == {"broadcast": True, "globalize": True, "layers": 1, "coroutine": True}
    assert told.states[BROADCAST] == told.states[SINGLE] == "applied"


def test_the_half_imported_module_does_not_hold_up_the_others(toy_site: MakeSite) -> None:
    told = toy_site(files=changed(MULTISLICE, HALF_IMPORTED["before"])).run("""
        load(MULTISLICE)
        tell(unpickler=is_original(load(AOT), "deserialize_and_load"))
    """)
    assert not told["unpickler"]
    assert told.states[BACKEND] == "applied"


@pytest.mark.parametrize(
    "file", ["jax/__init__.py", "orbax/checkpoint/__init__.py", "orbax/checkpoint/version.py"]
)
def test_a_half_imported_package_above_the_target_is_early_enough(
    toy_site: MakeSite, file: str
) -> None:
    site = toy_site()
    source = (site.path / file).read_text(encoding="utf-8")
    site.write(file, f"import jaxcompat\n{source}")
    told = site.run("""
        aot, multislice, handlers = load_all()
        tell(mended=mended(multislice.broadcast_one_replica_to_all))
    """)
    assert told["mended"]
    assert told.states == dict.fromkeys(PATCHES, "applied")
    assert told.logged("WARNING") == []


def test_an_import_that_fails_is_patched_when_it_is_tried_again(toy_site: MakeSite) -> None:
    flaky = f"""
        import os
        if "BROKEN" in os.environ:
            raise ImportError("not now")
        {changed(MULTISLICE)[file_of(MULTISLICE)].strip().replace(chr(10), chr(10) + " " * 8)}
        """
    told = toy_site(files={file_of(MULTISLICE): flaky}).run("""
        import os
        import jaxcompat
        os.environ["BROKEN"] = "1"
        try:
            load(MULTISLICE)
        except ImportError as error:
            tell(first=str(error))
        del os.environ["BROKEN"]
        multislice = load(MULTISLICE)
        tell(mended=mended(multislice.broadcast_one_replica_to_all))
    """)
    assert told.facts == {"first": "not now", "mended": True}
