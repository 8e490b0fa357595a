"""Targets that are not what the patch knows: they are left alone, and the import works."""

from __future__ import annotations

import pytest

from . import toys
from .conftest import MakeSite
from .toys import (
    AOT,
    BACKEND,
    BROADCAST,
    HANDLERS,
    MULTISLICE,
    SINGLE,
    TYPE_HANDLERS,
    Report,
    changed,
)

BROADCAST_IS = {
    "gone": ("broadcast_one_replica_to_all", "broadcast_to_all"),
    "without a parameter": ("is_source: bool, ", ""),
    "with a parameter renamed": ("is_source: bool", "is_primary: bool"),
    "without a signature": ("", "broadcast_one_replica_to_all = max"),
    "not callable": ("", "broadcast_one_replica_to_all = ()"),
    "a class that takes something else": (
        "",
        """
        class broadcast_one_replica_to_all:
            pass
        """,
    ),
}

IMPORT_AND_LOOK = """
    import jaxcompat
    aot, multislice, handlers = load_all()
    tell(original=is_original(multislice, "broadcast_one_replica_to_all"))
"""


@pytest.fixture(scope="module", params=BROADCAST_IS)
def told_of_drift(toy_site: MakeSite, request: pytest.FixtureRequest) -> Report:
    """Return what a program tells that imports a changed target, for each way to change it."""
    return toy_site(files=changed(MULTISLICE, BROADCAST_IS[request.param])).run("""
        import jaxcompat
        multislice = load(MULTISLICE)
        found = vars(multislice).get("broadcast_one_replica_to_all")
        tell(patched=hasattr(found, "__wrapped__"))
    """)


def test_a_changed_target_is_left_alone_and_the_import_works(told_of_drift: Report) -> None:
    assert not told_of_drift["patched"]
    assert told_of_drift.states[BROADCAST] == "drifted"
    assert told_of_drift.status[BROADCAST]["patched"] == []


def test_drift_is_told_with_both_versions_the_symptom_and_how_to_silence_it(
    told_of_drift: Report,
) -> None:
    line = told_of_drift.complaint(BROADCAST)
    for part in (
        *toys.AFFECTED.values(),
        "broadcast_one_replica_to_all",
        "SingleReplicaArrayHandler",
        f"JAXCOMPAT_DISABLE={BROADCAST}",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("module", "patch_id", "name"),
    [(MULTISLICE, BROADCAST, "broadcast_one_replica_to_all"), (AOT, BACKEND, "_JaxPjrtUnpickler")],
    ids=["function", "class"],
)
def test_drift_does_not_ask_the_module_for_the_name(
    toy_site: MakeSite, module: str, patch_id: str, name: str
) -> None:
    """A JAX module's `__getattr__` answers for deprecated names, and warns of each once."""
    answers = f"""
        asked = []
        def __getattr__(name):
            if name == {name!r}:
                asked.append(name)
                return name_of_today
            raise AttributeError(name)
        """
    edits = [(name, "name_of_today"), ("", answers)]
    told = toy_site(files=changed(module, *edits)).run(f"""
        import jaxcompat
        tell(asked=load({module!r}).asked)
    """)
    assert told["asked"] == []
    assert told.states[patch_id] == "drifted"


@pytest.mark.parametrize(
    "edit",
    [
        ("limit=None", "limit=None, more=None, *rest, **others"),
        ("in_tree: tuple, global_mesh, replica_axis_index: int, is_source: bool, limit=None",
         "is_source, replica_axis_index, limit, global_mesh, in_tree"),
    ],
    ids=["added", "in another order"],
)  # fmt: skip
def test_a_parameter_added_or_moved_is_no_drift(toy_site: MakeSite, edit: tuple[str, str]) -> None:
    told = toy_site(files=changed(MULTISLICE, edit)).run("""
        import jaxcompat
        tell(mended=mended(load(MULTISLICE).broadcast_one_replica_to_all))
    """)
    assert told["mended"]
    assert told.logged("WARNING") == []


@pytest.mark.parametrize(
    "edit",
    [
        ("_JaxPjrtUnpickler", "_Unpickler"),
        ("", "_JaxPjrtUnpickler = None"),
        ("", "def _JaxPjrtUnpickler(file, backend, execution_devices=None): ..."),
    ],
    ids=["gone", "None", "a function"],
)
def test_a_class_that_is_none_leaves_the_function_beside_it_alone_too(
    toy_site: MakeSite, edit: tuple[str, str]
) -> None:
    told = toy_site(files=changed(AOT, edit)).run("""
        import jaxcompat
        tell(original=is_original(load(AOT), "deserialize_and_load"))
    """)
    assert told["original"]
    assert told.states[BACKEND] == "drifted"
    assert "_JaxPjrtUnpickler" in told.complaint(BACKEND)


def test_a_method_that_is_gone_leaves_its_class_alone(toy_site: MakeSite) -> None:
    """`load` is inherited; a class that no longer is a `pickle.Unpickler` has none."""
    told = toy_site(
        files=changed(
            AOT, ("(pickle.Unpickler)", ""), ("super().__init__(file)", "super().__init__()")
        )
    ).run("""
        import jaxcompat
        aot = load(AOT)
        tell(originals=[is_original(aot, path) for path in aot.ORIGINALS])
        tell(shadowed="load" in vars(aot._JaxPjrtUnpickler))
    """)
    assert told.states[BACKEND] == "drifted"
    assert told["originals"] == [True, True]
    assert not told["shadowed"]


def test_a_coroutine_that_became_a_function_is_drift(toy_site: MakeSite) -> None:
    """The replacement awaits what it calls: its caller would get a coroutine for a result."""
    told = toy_site(files=changed(HANDLERS, ("async def ", "def "))).run("""
        import jaxcompat
        aot, multislice, handlers = load_all()
        result = handlers._single_replica_deserialize_and_broadcast(*[None] * 4)
        tell(result=type(result).__name__)
        getattr(result, "close", lambda: None)()
    """)
    assert told["result"] == "tuple"
    assert told.states[SINGLE] == "drifted"


def test_a_function_that_became_a_coroutine_is_drift(toy_site: MakeSite) -> None:
    """Its call would run under the empty mesh, and none of its steps."""
    edit = ("def broadcast_one", "async def broadcast_one")
    told = toy_site(files=changed(MULTISLICE, edit)).run("import jaxcompat; load(MULTISLICE)")
    assert told.states[BROADCAST] == "drifted"


# --- loaded code of another version than the metadata says ------------------------------------


@pytest.mark.parametrize(
    "loaded", [{"loaded_orbax": "0.11.34"}, {"loaded_jax": "0.8.0"}], ids=["orbax", "jax"]
)
def test_loaded_code_of_another_version_is_left_alone(
    toy_site: MakeSite, loaded: dict[str, str]
) -> None:
    told = toy_site(**loaded).run(IMPORT_AND_LOOK)
    assert told["original"]
    assert told.states[BROADCAST] == told.states[SINGLE] == "drifted"
    line = told.complaint(BROADCAST)
    for version in (*toys.AFFECTED.values(), *loaded.values()):
        assert version in line


@pytest.mark.parametrize(
    "versions",
    [
        {"orbax": "0.11.33+vendor", "loaded_orbax": "0.11.33"},
        {"jax": "0.9.0", "loaded_jax": "0.9.0+cuda12"},
        {"jax": "0.9", "loaded_jax": "0.9"},
    ],
    ids=["metadata with a local segment", "code with one", "short"],
)
def test_a_vendors_local_segment_is_no_other_version(
    toy_site: MakeSite, versions: dict[str, str]
) -> None:
    told = toy_site(**versions).run("import jaxcompat; load_all()")
    assert told.states[BROADCAST] == "applied"
    assert told.logged("WARNING") == []


@pytest.mark.parametrize(
    "source", ["", "__version__ = 'junk'", "__version__ = None"], ids=["none", "junk", "None"]
)
def test_loaded_code_that_does_not_tell_its_version_is_left_alone(
    toy_site: MakeSite, source: str
) -> None:
    told = toy_site(
        files={
            "orbax/checkpoint/__init__.py": "",
            "orbax/checkpoint/version.py": source,
        }
    ).run(IMPORT_AND_LOOK)
    assert told["original"]
    assert told.states[BROADCAST] == "drifted"
    assert "orbax.checkpoint.version" in told.complaint(BROADCAST)


def test_loaded_code_without_a_version_module_is_left_alone(toy_site: MakeSite) -> None:
    told = toy_site(
        files={"orbax/checkpoint/__init__.py": "", "orbax/checkpoint/version.py": None}
    ).run(IMPORT_AND_LOOK)
    assert told["original"]
    assert told.states[BROADCAST] == "drifted"


def test_a_version_module_that_breaks_does_not_break_the_import(toy_site: MakeSite) -> None:
    told = toy_site(
        files={
            "orbax/checkpoint/__init__.py": "",
            "orbax/checkpoint/version.py": "raise RuntimeError('no git here')",
        }
    ).run(IMPORT_AND_LOOK)
    assert told["original"]
    assert told.states[BROADCAST] == "drifted"


# --- all sites or none ------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["MULTISLICE, HANDLERS", "HANDLERS, MULTISLICE"])
def test_over_two_modules_all_or_none(toy_site: MakeSite, order: str) -> None:
    edit = ("_single_replica_deserialize_and_broadcast", "_deserialize")
    told = toy_site(files=changed(HANDLERS, edit)).run(f"""
        import jaxcompat
        for module in ({order}):
            load(module)
        tell(original=is_original(load(MULTISLICE), "_globalize_single_replica_arrays"))
    """)
    assert told["original"]
    assert told.states[SINGLE] == "drifted"
    assert told.status[SINGLE]["patched"] == []
    assert len(told.logged("WARNING")) == 1


def test_a_class_that_is_gone_takes_the_function_in_the_other_module_with_it(
    toy_site: MakeSite,
) -> None:
    told = toy_site(
        orbax="0.11.26",
        files=changed(TYPE_HANDLERS, ("SingleReplicaArrayHandler", "Handler")),
    ).run("""
        import jaxcompat
        multislice = load(MULTISLICE)
        load(TYPE_HANDLERS)
        tell(original=is_original(multislice, "_globalize_single_replica_arrays"))
    """)
    assert told["original"]
    assert told.states[SINGLE] == "drifted"


def test_the_other_patch_on_a_shared_target_stays(toy_site: MakeSite) -> None:
    told = toy_site(
        jax="0.7.0",
        orbax="0.12.7",
        files=changed(MULTISLICE, ("_globalize_single_replica_arrays", "_globalize")),
    ).run("""
        import jaxcompat
        load(HANDLERS)
        load(MULTISLICE)
        tell(layers=layers(load(HANDLERS)._single_replica_deserialize_and_broadcast))
    """)
    assert told.states[SINGLE] == "drifted"
    assert told.states[BROADCAST] == "applied"
    assert told["layers"] == 1
    target = f"{HANDLERS}:_single_replica_deserialize_and_broadcast"
    assert target in told.status[BROADCAST]["patched"]


# --- JAXCOMPAT_STRICT ----------------------------------------------------------------------------


def test_strict_makes_drift_an_error_of_the_import(toy_site: MakeSite) -> None:
    told = toy_site(files=changed(MULTISLICE, BROADCAST_IS["gone"])).run(
        """
        import jaxcompat
        try:
            load(MULTISLICE)
        except jaxcompat.JaxcompatError as error:
            tell(raised=str(error))
        """,
        environment={"JAXCOMPAT_STRICT": "1"},
    )
    for part in (*toys.AFFECTED.values(), BROADCAST, f"JAXCOMPAT_DISABLE={BROADCAST}"):
        assert part in told["raised"]
    assert told.states[BROADCAST] == "drifted"


def test_strict_names_every_drifted_patch_of_the_module(toy_site: MakeSite) -> None:
    told = toy_site(loaded_orbax="0.11.34").run(
        """
        import jaxcompat
        try:
            load(MULTISLICE)
        except jaxcompat.JaxcompatError as error:
            tell(raised=str(error))
        """,
        environment={"JAXCOMPAT_STRICT": "1"},
    )
    assert BROADCAST in told["raised"]
    assert SINGLE in told["raised"]


def test_strict_and_late_the_import_of_jaxcompat_raises(toy_site: MakeSite) -> None:
    told = toy_site(files=changed(MULTISLICE, BROADCAST_IS["gone"])).run(
        """
        load(MULTISLICE)
        try:
            import jaxcompat
        except RuntimeError as error:
            tell(raised=type(error).__name__, text=str(error))
        """,
        environment={"JAXCOMPAT_STRICT": "yes"},
    )
    assert told["raised"] == "JaxcompatError"
    assert BROADCAST in told["text"]


def test_strict_leaves_a_program_without_drift_alone(toy_site: MakeSite) -> None:
    told = toy_site().run("import jaxcompat; load_all()", environment={"JAXCOMPAT_STRICT": "1"})
    assert set(told.states.values()) == {"applied"}


def test_a_switched_off_patch_is_no_drift(toy_site: MakeSite) -> None:
    told = toy_site(files=changed(MULTISLICE, BROADCAST_IS["gone"])).run(
        "import jaxcompat; load(MULTISLICE)",
        environment={"JAXCOMPAT_DISABLE": BROADCAST, "JAXCOMPAT_STRICT": "1"},
    )
    assert told.logged("WARNING") == []
    assert told.states[BROADCAST] == "disabled"


def test_force_applies_whatever_version_the_loaded_code_tells(toy_site: MakeSite) -> None:
    told = toy_site(**toys.UNLISTED, loaded_orbax="0.11.33").run(
        """
        import jaxcompat
        tell(mended=mended(load(MULTISLICE).broadcast_one_replica_to_all))
        """,
        environment={"JAXCOMPAT_FORCE": BROADCAST},
    )
    assert told["mended"]


def test_force_does_not_apply_to_a_target_that_is_gone(toy_site: MakeSite) -> None:
    told = toy_site(**toys.UNLISTED, files=changed(MULTISLICE, BROADCAST_IS["gone"])).run(
        "import jaxcompat; load(MULTISLICE)", environment={"JAXCOMPAT_FORCE": BROADCAST}
    )
    assert told.states[BROADCAST] == "drifted"
