"""`apply`, `revert` and `disabled`: each patch alone and all together."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import MakeSite
from .toys import BACKEND, BROADCAST, PATCHES, SINGLE, ToySite

APPLIED = """
    def originals():
        return [
            f"{module.__name__.rpartition('.')[2]}:{path}"
            for module in map(load, (AOT, MULTISLICE, HANDLERS))
            for path in module.ORIGINALS
            if is_original(module, path)
        ]

    import jaxcompat
    aot, multislice, handlers = load_all()
"""
"""A script's beginning: everything is applied, and `originals()` tells what is as it was."""

NEVER_PATCHED = ["multislice:precompile_broadcast"]
"""A target that the patches know and this Orbax does not have yet."""
ALL = [
    "serialize_executable:deserialize_and_load",
    "serialize_executable:_JaxPjrtUnpickler.__init__",
    "multislice:broadcast_one_replica_to_all",
    "multislice:_globalize_single_replica_arrays",
    *NEVER_PATCHED,
    "jax_array_handlers:_single_replica_deserialize_and_broadcast",
]
TARGETS: dict[str, list[str]] = {
    BACKEND: ALL[:2],
    BROADCAST: ALL[2:3],
    SINGLE: [ALL[3], ALL[5]],
}


# --- revert and apply --------------------------------------------------------------------------


def test_revert_brings_every_original_object_back(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        before = originals()
        jaxcompat.revert()
        tell(before=before, after=originals(), shadowed="load" in vars(aot._JaxPjrtUnpickler))
        """,
    )
    assert told["before"] == NEVER_PATCHED
    assert told["after"] == ALL
    assert not told["shadowed"]
    assert told.states == dict.fromkeys(PATCHES, "reverted")


@pytest.mark.parametrize("patch_id", PATCHES)
def test_revert_of_one_leaves_the_others(affected: ToySite, patch_id: str) -> None:
    told = affected.run(
        APPLIED,
        f"""
        jaxcompat.revert({patch_id!r})
        tell(originals=originals())
        """,
    )
    assert sorted(told["originals"]) == sorted([*TARGETS[patch_id], *NEVER_PATCHED])
    assert told.states == {one: "reverted" if one == patch_id else "applied" for one in PATCHES}


@pytest.mark.parametrize("patch_id", PATCHES)
def test_apply_of_one_leaves_the_others_off(affected: ToySite, patch_id: str) -> None:
    told = affected.run(
        APPLIED,
        f"""
        jaxcompat.revert()
        jaxcompat.apply({patch_id!r})
        tell(originals=originals())
        """,
    )
    assert told["originals"] == [one for one in ALL if one not in TARGETS[patch_id]]
    assert told.states == {one: "applied" if one == patch_id else "reverted" for one in PATCHES}


@pytest.mark.parametrize("ids", ["", "*states()"], ids=["none named", "all named"])
def test_apply_puts_everything_on_again_once(affected: ToySite, ids: str) -> None:
    told = affected.run(
        APPLIED,
        f"""
        for repeated in range(3):
            jaxcompat.revert({ids})
            jaxcompat.apply({ids})
            jaxcompat.apply({ids})
        tell(
            originals=originals(),
            mended=mended(handlers._single_replica_deserialize_and_broadcast),
            layers=layers(handlers._single_replica_deserialize_and_broadcast),
        )
        jaxcompat.revert()
        tell(reverted=originals())
        """,
    )
    assert told["originals"] == NEVER_PATCHED
    assert told["mended"]
    assert told["layers"] == 1
    assert told["reverted"] == ALL


def test_a_second_revert_does_nothing(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        jaxcompat.revert()
        multislice.broadcast_one_replica_to_all = "the user's"
        jaxcompat.revert()
        tell(left=multislice.broadcast_one_replica_to_all)
        """,
    )
    assert told["left"] == "the user's"
    assert told.warnings == []


def test_revert_before_the_import_leaves_the_import_unpatched(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        jaxcompat.revert(SINGLE)
        multislice = load(MULTISLICE)
        tell(
            reverted=is_original(multislice, "_globalize_single_replica_arrays"),
            other=is_original(multislice, "broadcast_one_replica_to_all"),
        )
    """)
    assert told.facts == {"reverted": True, "other": False}
    assert told.states[SINGLE] == "reverted"


def test_revert_between_the_two_imports_of_a_patch_takes_all_of_it_off(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        multislice = load(MULTISLICE)
        jaxcompat.revert(SINGLE)
        handlers = load(HANDLERS)
        tell(
            first=is_original(multislice, "_globalize_single_replica_arrays"),
            second=is_original(handlers, "_single_replica_deserialize_and_broadcast"),
        )
    """)
    assert told.facts == {"first": True, "second": True}
    assert told.states[SINGLE] == "reverted"


def test_apply_before_the_import_arms_again(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        jaxcompat.revert()
        jaxcompat.apply()
        tell(armed=states())
        tell(mended=mended(load(MULTISLICE)._globalize_single_replica_arrays))
    """)
    assert told["armed"] == dict.fromkeys(PATCHES, "armed")
    assert told["mended"]


def test_apply_obeys_what_is_switched_off_since(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        import os
        jaxcompat.revert()
        os.environ["JAXCOMPAT_DISABLE"] = "orbax-*"
        jaxcompat.apply()
        tell(originals=originals())
        """,
    )
    assert told["originals"] == [one for one in ALL if one not in TARGETS[BACKEND]]
    assert told.states == {BACKEND: "applied", BROADCAST: "disabled", SINGLE: "disabled"}


def test_apply_applies_what_is_switched_on_since(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        import os
        tell(off=originals())
        os.environ["JAXCOMPAT_DISABLE"] = ""
        jaxcompat.apply()
        tell(on=originals())
        """,
        environment={"JAXCOMPAT_DISABLE": "1"},
    )
    assert told["off"] == ALL
    assert told["on"] == NEVER_PATCHED


# --- two patches on one target ----------------------------------------------------------------

ORDER = pytest.mark.parametrize(
    ("first", "second"), [(SINGLE, BROADCAST), (BROADCAST, SINGLE)], ids=["single", "broadcast"]
)


@pytest.fixture
def sharing(toy_site: MakeSite) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs a script that may `look` at a target of two patches."""

    def run(script: str) -> dict[str, Any]:
        told = toy_site(jax="0.7.0", orbax="0.12.7").run(
            """
            import jaxcompat
            aot, multislice, handlers = load_all()
            def original():
                return is_original(handlers, "_single_replica_deserialize_and_broadcast")
            def look():
                target = HANDLERS + ":_single_replica_deserialize_and_broadcast"
                on_it = [one.id for one in jaxcompat.status() if target in one.patched]
                return [layers(handlers._single_replica_deserialize_and_broadcast), *on_it]
            """,
            script,
            """
            jaxcompat.revert()
            assert original()
            """,
        )
        return told.facts

    return run


@ORDER
def test_on_a_shared_target_each_goes_alone(
    sharing: Callable[[str], dict[str, Any]], first: str, second: str
) -> None:
    facts = sharing(f"""
        tell(both=look())
        jaxcompat.revert({first!r})
        tell(one=look(), states={{name: states()[name] for name in (SINGLE, BROADCAST)}})
        jaxcompat.revert({second!r})
        tell(none=original())
    """)
    states = {first: "reverted", second: "applied"}
    both = [2, BROADCAST, SINGLE]
    assert facts == {"both": both, "one": [1, second], "states": states, "none": True}


@ORDER
def test_on_a_shared_target_each_comes_alone(
    sharing: Callable[[str], dict[str, Any]], first: str, second: str
) -> None:
    facts = sharing(f"""
        jaxcompat.revert()
        jaxcompat.apply({first!r})
        tell(one=look())
        jaxcompat.apply({second!r})
        tell(both=look())
    """)
    assert facts == {"one": [1, first], "both": [2, BROADCAST, SINGLE]}


@ORDER
def test_on_a_reloaded_shared_target_each_comes_back_alone(
    sharing: Callable[[str], dict[str, Any]], first: str, second: str
) -> None:
    facts = sharing(f"""
        importlib.reload(handlers)
        jaxcompat.apply({first!r})
        tell(one=look())
        jaxcompat.apply({second!r})
        tell(both=look())
    """)
    assert first in facts["one"]
    assert facts["both"] == [2, BROADCAST, SINGLE]


# --- inherited attributes ----------------------------------------------------------------------


def test_an_inherited_method_is_inherited_again_after_revert(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        aot = load(AOT)
        own = "load" in vars(aot._JaxPjrtUnpickler)
        jaxcompat.revert(BACKEND)
        tell(
            patched=own,
            shadowed="load" in vars(aot._JaxPjrtUnpickler),
            inherited=aot._JaxPjrtUnpickler.load is pickle.Unpickler.load,
        )
    """)
    assert told.facts == {"patched": True, "shadowed": False, "inherited": True}


def test_the_base_class_of_an_inherited_method_is_never_touched(affected: ToySite) -> None:
    told = affected.run("""
        before = dict(vars(pickle.Unpickler))
        import jaxcompat
        load(AOT)
        tell(same=dict(vars(pickle.Unpickler)) == before)
    """)
    assert told["same"]


# --- wrappers of others -----------------------------------------------------------------------

FOREIGN = """
    import functools
    def foreign(original):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return original(*args, **kwargs)
        return wrapper
"""


def test_a_foreign_wrapper_on_top_stays_and_the_user_is_told(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        FOREIGN,
        """
        top = foreign(multislice.broadcast_one_replica_to_all)
        multislice.broadcast_one_replica_to_all = top
        jaxcompat.revert()
        tell(
            stays=multislice.broadcast_one_replica_to_all is top,
            mended=mended(multislice.broadcast_one_replica_to_all),
            originals=originals(),
        )
        """,
    )
    assert told["stays"]
    assert told["mended"]
    assert told["originals"] == [one for one in ALL if one not in TARGETS[BROADCAST]]
    assert told.states == {BACKEND: "reverted", BROADCAST: "applied", SINGLE: "reverted"}
    (text,) = told.warned
    assert f"{BROADCAST} stays on" in text
    assert "multislice:broadcast_one_replica_to_all" in text
    assert SINGLE not in text


def test_the_user_is_told_where_the_revert_stands(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        FOREIGN,
        """
        multislice.broadcast_one_replica_to_all = foreign(multislice.broadcast_one_replica_to_all)
        jaxcompat.revert()
        """,
    )
    assert told.warnings[0]["file"].endswith("program.py")


def test_once_the_foreign_wrapper_is_gone_revert_works(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        FOREIGN,
        """
        ours = multislice.broadcast_one_replica_to_all
        multislice.broadcast_one_replica_to_all = foreign(ours)
        jaxcompat.revert()
        multislice.broadcast_one_replica_to_all = ours
        jaxcompat.revert()
        tell(originals=originals())
        """,
    )
    assert told["originals"] == ALL


def test_a_foreign_wrapper_on_one_target_does_not_cost_disabled_the_others(
    toy_site: MakeSite,
) -> None:
    """`disabled` puts back what it took off, where another target of the patch was held."""
    told = toy_site(orbax="0.12.7").run(
        APPLIED,
        FOREIGN,
        """
        multislice.broadcast_one_replica_to_all = foreign(multislice.broadcast_one_replica_to_all)
        with jaxcompat.disabled(BROADCAST):
            within = is_original(multislice, "precompile_broadcast")
        tell(
            within=within,
            after=mended(multislice.precompile_broadcast),
            coroutine=is_original(handlers, "_single_replica_deserialize_and_broadcast"),
        )
        """,
    )
    assert told.facts == {"within": True, "after": True, "coroutine": False}
    assert told.states[BROADCAST] == "applied"


def test_apply_completes_a_patch_that_revert_could_only_half_undo(toy_site: MakeSite) -> None:
    told = toy_site(orbax="0.12.7").run(
        APPLIED,
        FOREIGN,
        """
        multislice.broadcast_one_replica_to_all = foreign(multislice.broadcast_one_replica_to_all)
        jaxcompat.revert(BROADCAST)
        jaxcompat.apply(BROADCAST)
        tell(
            foreign=layers(multislice.broadcast_one_replica_to_all),
            ahead=mended(multislice.precompile_broadcast),
        )
        """,
    )
    assert told.facts == {"foreign": 2, "ahead": True}


def test_a_foreign_wrapper_is_not_dropped_by_applying_another_patch(toy_site: MakeSite) -> None:
    told = toy_site(jax="0.7.0", orbax="0.12.7").run(
        APPLIED,
        FOREIGN,
        """
        jaxcompat.revert(SINGLE)
        top = foreign(handlers._single_replica_deserialize_and_broadcast)
        handlers._single_replica_deserialize_and_broadcast = top
        jaxcompat.apply(SINGLE)
        tell(stays=handlers._single_replica_deserialize_and_broadcast is top)
        """,
    )
    assert told["stays"]
    assert told.states[BROADCAST] == "applied"
    assert told.states[SINGLE] == "drifted"
    assert "wrapped by someone else" in told.complaint(SINGLE)


def test_a_target_that_someone_replaced_is_left_to_them_and_the_user_is_told(
    affected: ToySite,
) -> None:
    """What was put there may call ours, and says nothing of it."""
    told = affected.run(
        APPLIED,
        """
        ours = multislice.broadcast_one_replica_to_all
        multislice.broadcast_one_replica_to_all = other = lambda *args, **kwargs: ours()
        jaxcompat.revert(BROADCAST)
        tell(left=multislice.broadcast_one_replica_to_all is other)
        """,
    )
    assert told["left"]
    (warning,) = told.warned
    assert "broadcast_one_replica_to_all" in warning
    assert told.states[BROADCAST] == "applied"


def test_what_a_mock_brings_back_can_still_be_undone(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        import warnings
        from unittest import mock
        with mock.patch.object(multislice, "broadcast_one_replica_to_all"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                jaxcompat.revert()
        tell(warned=len(caught))
        jaxcompat.revert()
        tell(original=is_original(multislice, "broadcast_one_replica_to_all"))
        """,
    )
    assert told["warned"] == 1
    assert told["original"]
    assert told.states[BROADCAST] == "reverted"


def test_status_names_as_patched_only_what_is_patched_now(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        import importlib
        importlib.reload(multislice)
        patched = {one.id: one.patched for one in jaxcompat.status()}
        tell(broadcast=any("broadcast_one" in site for site in patched[BROADCAST]))
        jaxcompat.apply()
        patched = {one.id: one.patched for one in jaxcompat.status()}
        tell(again=any("broadcast_one" in site for site in patched[BROADCAST]))
        """,
    )
    assert told.facts == {"broadcast": False, "again": True}


def test_what_was_applied_is_told_once(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        for _ in range(3):
            with jaxcompat.disabled():
                pass
        """,
    )
    lines = told.logged("INFO")
    assert len(lines) == len(set(lines))
    assert any(BROADCAST in line for line in lines)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_a_thread_holds_the_lock_does_not_wait_for_it(
    affected: ToySite,
) -> None:
    told = affected.run("""
        import os, signal, threading, warnings
        import jaxcompat
        from jaxcompat import engine
        held, done = threading.Event(), threading.Event()
        def hold():
            with engine._lock:
                held.set()
                done.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of fork beside threads
            child = os.fork()
        if not child:
            signal.alarm(20)
            jaxcompat.status()
            os._exit(0)
        tell(child=os.waitpid(child, 0)[1])
        done.set()
        thread.join()
    """)
    assert told["child"] == 0


def test_a_foreign_wrapper_below_comes_back(affected: ToySite) -> None:
    told = affected.run(
        FOREIGN,
        """
        multislice = load(MULTISLICE)
        below = multislice.broadcast_one_replica_to_all = foreign(
            multislice.broadcast_one_replica_to_all
        )
        import jaxcompat
        on_it = layers(multislice.broadcast_one_replica_to_all)
        is_mended = mended(multislice.broadcast_one_replica_to_all)
        jaxcompat.revert()
        tell(on_it=on_it, mended=is_mended, back=multislice.broadcast_one_replica_to_all is below)
        """,
    )
    assert told.facts == {"on_it": 2, "mended": True, "back": True}


def test_a_foreign_wrapper_on_an_unpickler_method_stays(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        FOREIGN,
        """
        top = aot._JaxPjrtUnpickler.load = foreign(aot._JaxPjrtUnpickler.load)
        jaxcompat.revert(BACKEND)
        tell(stays=vars(aot._JaxPjrtUnpickler)["load"] is top, originals=originals())
        """,
    )
    assert told["stays"]
    assert told["originals"] == [*TARGETS[BACKEND], *NEVER_PATCHED]
    assert len(told.warned) == 1


# --- reloads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["aot", "multislice", "handlers"])
def test_after_a_reload_apply_patches_again_once(affected: ToySite, module: str) -> None:
    told = affected.run(
        APPLIED,
        f"""
        importlib.reload({module})
        unpatched = originals()
        jaxcompat.apply()
        tell(unpatched=unpatched, patched=originals(), layers=layers(next(
            vars({module})[path] for path in {module}.ORIGINALS if "." not in path
        )))
        jaxcompat.revert()
        tell(reverted=originals(), shadowed="load" in vars(aot._JaxPjrtUnpickler))
        """,
    )
    assert len(told["unpatched"]) > len(NEVER_PATCHED)
    assert told["patched"] == NEVER_PATCHED
    assert told["layers"] == 1
    assert told["reverted"] == ALL
    assert not told["shadowed"]


def test_after_a_reload_revert_leaves_the_new_original(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        importlib.reload(multislice)
        jaxcompat.revert()
        tell(originals=originals())
        """,
    )
    assert told["originals"] == ALL
    assert told.warnings == []


def test_a_module_that_was_dropped_and_imported_again_is_patched_by_apply(
    affected: ToySite,
) -> None:
    told = affected.run(
        APPLIED,
        """
        del sys.modules[MULTISLICE]
        again = load(MULTISLICE)
        jaxcompat.apply()
        tell(mended=mended(again.broadcast_one_replica_to_all), other=again is not multislice)
        """,
    )
    assert told["mended"]
    assert told["other"]


def test_a_module_that_is_imported_again_without_the_target_is_drift(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        with open(multislice.__file__) as file:
            source = file.read()
        with open(multislice.__file__, "w") as file:
            file.write(source.replace("broadcast_one_replica_to_all", "broadcast_to_all"))
        del sys.modules[MULTISLICE]
        load(MULTISLICE)
        jaxcompat.apply(BROADCAST)
        """,
    )
    assert told.states[BROADCAST] == "drifted"
    assert told.status[BROADCAST]["patched"] == []


# --- with disabled() ------------------------------------------------------------------------------


def test_disabled_gives_the_originals_within_and_the_patches_after(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        with jaxcompat.disabled():
            tell(within=originals(), states=states())
        tell(after=originals())
        """,
    )
    assert told["within"] == ALL
    assert told["states"] == dict.fromkeys(PATCHES, "reverted")
    assert told["after"] == NEVER_PATCHED
    assert told.states == dict.fromkeys(PATCHES, "applied")
    assert told.warnings == []


@pytest.mark.parametrize("patch_id", PATCHES)
def test_disabled_of_one_leaves_the_others(affected: ToySite, patch_id: str) -> None:
    told = affected.run(
        APPLIED,
        f"""
        with jaxcompat.disabled({patch_id!r}):
            tell(within=originals())
        tell(after=originals())
        """,
    )
    assert sorted(told["within"]) == sorted([*TARGETS[patch_id], *NEVER_PATCHED])
    assert told["after"] == NEVER_PATCHED


def test_disabled_ends_when_its_body_raises(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        class Mine(Exception): ...
        try:
            with jaxcompat.disabled():
                raise Mine
        except Mine:
            tell(after=originals())
        """,
    )
    assert told["after"] == NEVER_PATCHED


def test_disabled_that_fails_at_once_costs_no_patch(affected: ToySite) -> None:
    """Warnings may be errors, and one of a wrapper on top ends it before its body."""
    told = affected.run(
        APPLIED,
        FOREIGN,
        """
        import warnings
        multislice.broadcast_one_replica_to_all = foreign(multislice.broadcast_one_replica_to_all)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                with jaxcompat.disabled():
                    tell(body=True)
            except jaxcompat.JaxcompatWarning:
                tell(after=originals())
        """,
    )
    assert told.facts == {"after": NEVER_PATCHED}


def test_an_import_within_disabled_is_patched_after_it(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        with jaxcompat.disabled():
            multislice = load(MULTISLICE)
            within = is_original(multislice, "broadcast_one_replica_to_all")
        tell(within=within, after=mended(multislice.broadcast_one_replica_to_all))
        tell(later=mended(load(HANDLERS)._single_replica_deserialize_and_broadcast))
    """)
    assert told.facts == {"within": True, "after": True, "later": True}
    assert told.states == {BACKEND: "armed", BROADCAST: "applied", SINGLE: "applied"}


def test_disabled_within_disabled_ends_with_the_outer(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        with jaxcompat.disabled():
            with jaxcompat.disabled(SINGLE):
                pass
            tell(between=originals())
        tell(after=originals())
        """,
    )
    assert told["between"] == ALL
    assert told["after"] == NEVER_PATCHED


def test_disabled_does_not_apply_what_was_reverted_before(affected: ToySite) -> None:
    told = affected.run(
        APPLIED,
        """
        jaxcompat.revert(SINGLE)
        with jaxcompat.disabled():
            pass
        """,
    )
    assert told.states == {BACKEND: "applied", BROADCAST: "applied", SINGLE: "reverted"}


def test_disabled_tells_nothing_of_a_program_that_keeps_an_original(affected: ToySite) -> None:
    """To look at what is beneath is what it is for; jaxcompat was not imported late."""
    told = affected.run(
        APPLIED,
        """
        with jaxcompat.disabled():
            bare = multislice.broadcast_one_replica_to_all
        """,
    )
    assert told.warned == []


# --- ids that do not exist -----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["apply", "revert", "disabled"])
def test_an_unknown_id_is_an_error_that_names_the_nearest(affected: ToySite, call: str) -> None:
    told = affected.run(
        APPLIED,
        f"""
        try:
            with jaxcompat.{call}("orbax-singel-replica-mesh") or sys.stdout:
                pass
        except jaxcompat.JaxcompatError as error:
            tell(error=str(error))
        """,
    )
    assert "'orbax-singel-replica-mesh'" in told["error"]
    assert f"did you mean {SINGLE!r}" in told["error"]


@pytest.mark.parametrize("call", ["apply", "revert", "disabled"])
def test_an_unknown_id_among_others_leaves_everything_as_it_was(
    affected: ToySite, call: str
) -> None:
    told = affected.run(
        APPLIED,
        f"""
        jaxcompat.revert(BROADCAST)
        before = originals()
        try:
            with jaxcompat.{call}(BROADCAST, SINGLE, "nonsense") or sys.stdout:
                pass
        except jaxcompat.JaxcompatError:
            tell(same=originals() == before)
        """,
    )
    assert told["same"]


def test_errors_are_runtime_errors_and_warnings_are_user_warnings(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        tell(
            error=issubclass(jaxcompat.JaxcompatError, RuntimeError),
            warning=issubclass(jaxcompat.JaxcompatWarning, UserWarning),
        )
    """)
    assert told.facts == {"error": True, "warning": True}
