"""What ``import jaxcompat`` does, and what it leaves alone."""

from __future__ import annotations

import pytest

from . import toys
from .conftest import MakeSite
from .toys import AOT, BACKEND, BROADCAST, HANDLERS, MULTISLICE, PATCHES, SINGLE, ToySite, file_of


def test_neither_jax_nor_orbax_nor_numpy_is_imported(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        tell(imported=sorted({"jax", "jaxlib", "numpy", "orbax"} & set(sys.modules)))
    """)
    assert told["imported"] == []
    assert set(told.states.values()) == {"armed"}


def test_nothing_is_printed_and_logging_is_not_configured(affected: ToySite) -> None:
    program = affected.write(
        "quiet.py",
        """
        import logging
        import jaxcompat
        import jax.experimental.serialize_executable
        logger = logging.getLogger("jaxcompat")
        assert not logging.root.handlers
        assert not logger.handlers
        assert logger.level == logging.NOTSET
        assert logger.propagate
        """,
    )
    ended = affected.python(str(program))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("value", ["1", "all", "jax-*,orbax-*"])
def test_switched_off_nothing_is_hooked(affected: ToySite, value: str) -> None:
    told = affected.run(
        """
        before = list(sys.meta_path)
        import jaxcompat
        tell(unhooked=sys.meta_path == before)
        aot, multislice, handlers = load_all()
        tell(original=is_original(multislice, "broadcast_one_replica_to_all"))
        """,
        environment={"JAXCOMPAT_DISABLE": value},
    )
    assert told["unhooked"]
    assert told["original"]
    assert told.states == dict.fromkeys(PATCHES, "disabled")


def test_an_unaffected_pair_is_left_as_it_is(toy_site: MakeSite) -> None:
    told = toy_site(**toys.UNAFFECTED).run("""
        before = list(sys.meta_path)
        import jaxcompat
        tell(unhooked=sys.meta_path == before)
        aot, multislice, handlers = load_all()
        tell(original=is_original(multislice, "broadcast_one_replica_to_all"))
    """)
    assert told["unhooked"]
    assert told["original"]
    assert told.states == dict.fromkeys(PATCHES, "unaffected")


@pytest.mark.parametrize(
    ("installed", "absent"),
    [
        ({"jax": None, "orbax": None}, PATCHES),
        ({"jax": None}, PATCHES),
        ({"orbax": None}, (BROADCAST, SINGLE)),
    ],
    ids=["neither is installed", "jax is not", "orbax is not"],
)
def test_what_is_not_installed_is_absent_and_no_more_than_a_debug_line(
    toy_site: MakeSite, installed: dict[str, None], absent: tuple[str, ...]
) -> None:
    told = toy_site(**installed).run("import jaxcompat")
    assert [patch_id for patch_id, state in told.states.items() if state == "absent"] == [*absent]
    assert {level for level, _ in told.log} == {"DEBUG"}
    assert told.warnings == []


def test_a_pair_newer_than_what_was_proven_is_not_patched(toy_site: MakeSite) -> None:
    told = toy_site(**toys.UNLISTED).run("""
        before = list(sys.meta_path)
        import jaxcompat
        tell(unhooked=sys.meta_path == before)
        aot, multislice, handlers = load_all()
        tell(original=is_original(multislice, "broadcast_one_replica_to_all"))
    """)
    assert told["unhooked"]
    assert told["original"]
    assert told.states[BROADCAST] == "unlisted"


def test_an_unlisted_pair_is_told_once_with_both_versions_and_the_way_out(
    toy_site: MakeSite,
) -> None:
    told = toy_site(**toys.UNLISTED).run("import jaxcompat; load_all()")
    (line,) = told.logged("WARNING")
    for part in (*toys.UNLISTED.values(), BROADCAST, "JAXCOMPAT_FORCE", "JAXCOMPAT_DISABLE"):
        assert part in line
    assert told.warnings == []


@pytest.mark.parametrize("installed", [toys.UNLISTED, toys.UNAFFECTED], ids=["unlisted", "outside"])
def test_force_applies_where_the_pair_is_not_affected(
    toy_site: MakeSite, installed: dict[str, str]
) -> None:
    told = toy_site(**installed).run(
        """
        import jaxcompat
        aot, multislice, handlers = load_all()
        tell(mended=mended(multislice.broadcast_one_replica_to_all))
        """,
        environment={"JAXCOMPAT_FORCE": "orbax-broadcast-*"},
    )
    assert told["mended"]
    assert told.states[BROADCAST] == "applied"
    assert told.states[BACKEND] != "applied"
    (line,) = told.logged("INFO")
    assert "forced" in line


def test_force_is_never_over_disable(toy_site: MakeSite) -> None:
    told = toy_site(**toys.UNLISTED).run(
        "import jaxcompat; load_all()",
        environment={"JAXCOMPAT_FORCE": "*", "JAXCOMPAT_DISABLE": BROADCAST},
    )
    assert told.states == {BACKEND: "applied", BROADCAST: "disabled", SINGLE: "applied"}


def test_force_does_not_apply_to_what_is_not_installed(toy_site: MakeSite) -> None:
    told = toy_site(orbax=None).run("import jaxcompat", environment={"JAXCOMPAT_FORCE": "*"})
    assert told.states[BROADCAST] == "absent"


def test_an_affected_pair_is_armed_and_then_applied_by_the_import(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        tell(before=states())
        aot, multislice, handlers = load_all()
        tell(
            broadcast=mended(multislice.broadcast_one_replica_to_all),
            globalize=mended(multislice._globalize_single_replica_arrays),
            coroutine=mended(handlers._single_replica_deserialize_and_broadcast),
        )
    """)
    assert told["before"] == dict.fromkeys(PATCHES, "armed")
    assert told.states == dict.fromkeys(PATCHES, "applied")
    assert told["broadcast"]
    assert told["globalize"]
    assert told["coroutine"]
    assert told.warnings == []


def test_without_jaxcompat_the_toys_show_the_defect(affected: ToySite) -> None:
    told = affected.run("""
        aot, multislice, handlers = load_all()
        tell(
            broadcast=mended(multislice.broadcast_one_replica_to_all),
            globalize=mended(multislice._globalize_single_replica_arrays),
            coroutine=mended(handlers._single_replica_deserialize_and_broadcast),
        )
    """)
    assert told.facts == {"broadcast": False, "globalize": False, "coroutine": False}


@pytest.mark.parametrize("patch_id", [BROADCAST, SINGLE])
def test_applied_is_one_info_line_with_both_versions(affected: ToySite, patch_id: str) -> None:
    told = affected.run("import jaxcompat; load_all()")
    (line,) = (line for line in told.logged("INFO") if patch_id in line)
    assert toys.AFFECTED["jax"] in line
    assert toys.AFFECTED["orbax"] in line


def test_a_patch_over_two_modules_is_armed_until_both_are_imported(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        load(MULTISLICE)
        tell(one=states())
        load(HANDLERS)
        tell(both=states())
    """)
    assert told["one"][SINGLE] == "armed"
    assert told["both"][SINGLE] == "applied"


def test_the_toy_jax_is_never_asked_for_a_name_that_it_lacks(affected: ToySite) -> None:
    told = affected.run("""
        import jaxcompat
        aot, multislice, handlers = load_all()
        mended(multislice.broadcast_one_replica_to_all)
        jaxcompat.revert()
        jaxcompat.apply()
        tell(asked=sys.modules["jax"].asked)
    """)
    assert told["asked"] == []


@pytest.mark.parametrize(
    ("module", "path"),
    [
        (MULTISLICE, "broadcast_one_replica_to_all"),
        (HANDLERS, "_single_replica_deserialize_and_broadcast"),
        (AOT, "deserialize_and_load"),
        (AOT, "_JaxPjrtUnpickler.__init__"),
    ],
)
def test_a_replacement_answers_as_the_original_does(
    affected: ToySite, module: str, path: str
) -> None:
    look = f"""
import operator
module = load({module!r})
tell(
    answers=answers(operator.attrgetter({path!r})(module)),
    original=is_original(module, {path!r}),
)
"""
    bare = affected.run(look)
    patched = affected.run("import jaxcompat" + look)
    assert bare["original"]
    assert not patched["original"]
    assert patched["answers"] == bare["answers"]
    assert bare["answers"]["survives pickle"]


def test_a_held_replacement_pickles_across_the_patch(affected: ToySite) -> None:
    """By name, as any function: what was pickled patched is the original once it is undone."""
    told = affected.run("""
        import jaxcompat
        aot, multislice, handlers = load_all()
        data = pickle.dumps(multislice.broadcast_one_replica_to_all)
        jaxcompat.revert()
        tell(original=pickle.loads(data) is multislice.ORIGINALS["broadcast_one_replica_to_all"])
    """)
    assert told["original"]


def test_disable_set_in_the_script_after_the_import_counts(affected: ToySite) -> None:
    told = affected.run("""
        import os
        import jaxcompat
        os.environ["JAXCOMPAT_DISABLE"] = SINGLE
        aot, multislice, handlers = load_all()
        tell(original=is_original(multislice, "_globalize_single_replica_arrays"))
    """)
    assert told.states == {BACKEND: "applied", BROADCAST: "applied", SINGLE: "disabled"}
    assert told["original"]


def test_disable_set_between_the_two_imports_of_a_patch_takes_all_of_it_off(
    affected: ToySite,
) -> None:
    told = affected.run("""
        import os
        import jaxcompat
        multislice = load(MULTISLICE)
        os.environ["JAXCOMPAT_DISABLE"] = SINGLE
        handlers = load(HANDLERS)
        tell(
            first=is_original(multislice, "_globalize_single_replica_arrays"),
            second=is_original(handlers, "_single_replica_deserialize_and_broadcast"),
        )
    """)
    assert told.facts == {"first": True, "second": True}
    assert told.states[SINGLE] == "disabled"


def test_strict_set_in_the_script_after_the_import_counts(toy_site: MakeSite) -> None:
    told = toy_site(files={file_of(MULTISLICE): "import jax"}).run("""
        import os
        import jaxcompat
        os.environ["JAXCOMPAT_STRICT"] = "1"
        try:
            load(MULTISLICE)
        except jaxcompat.JaxcompatError as error:
            tell(raised=str(error))
    """)
    assert "broadcast_one_replica_to_all" in told["raised"]


def test_force_set_in_the_script_counts_with_apply(toy_site: MakeSite) -> None:
    told = toy_site(**toys.UNLISTED).run("""
        import os
        import jaxcompat
        os.environ["JAXCOMPAT_FORCE"] = BROADCAST
        aot, multislice, handlers = load_all()
        jaxcompat.apply()
        tell(mended=mended(multislice.broadcast_one_replica_to_all))
    """)
    assert told["mended"]


def test_a_misspelt_id_is_warned_of_in_the_users_own_file(affected: ToySite) -> None:
    told = affected.run(
        "import jaxcompat", environment={"JAXCOMPAT_DISABLE": "orbax-singel-replica-mesh"}
    )
    (warning,) = told.warnings
    assert warning["category"] == "JaxcompatWarning"
    assert "'orbax-singel-replica-mesh'" in warning["text"]
    assert f"did you mean '{SINGLE}'" in warning["text"]
    assert warning["file"].endswith("program.py")
    assert told.states == dict.fromkeys(PATCHES, "armed")
