"""`patch_unpickler`: third parties' copies of JAX's AOT unpickler."""

from __future__ import annotations

import pytest

from . import toys
from .conftest import MakeSite
from .toys import AOT, BACKEND, ToySite, changed

COPY = """
    import pickle

    class Unpickler(pickle.Unpickler):
        def __init__(self, file, execution_devices, extra=None, *, backend):
            super().__init__(file)
            self.given = backend, execution_devices

    COPY = Unpickler
    ORIGINALS = {"Unpickler.__init__": Unpickler.__init__}
    """
FILES = {"pkg/__init__.py": "", "pkg/mod.py": COPY}
OVERRULED = """
    import io
    cpu, gpu = load("jax").devices("cpu"), load("jax").devices("gpu")
    def overruled(copy):
        made = copy(io.BytesIO(), execution_devices=cpu, backend=gpu[0].client)
        return made.given == (cpu[0].client, tuple(cpu))
"""


@pytest.mark.parametrize(
    "order",
    [
        "import jaxcompat; jaxcompat.patch_unpickler('pkg.mod:Unpickler'); import pkg.mod",
        "import jaxcompat, pkg.mod; jaxcompat.patch_unpickler('pkg.mod:Unpickler')",
        "import pkg.mod, jaxcompat; jaxcompat.patch_unpickler('pkg.mod:Unpickler')",
    ],
    ids=["before its import", "after it", "after both"],
)
@pytest.mark.parametrize("jax", ["load(AOT)", "pass"], ids=["JAX's own is imported", "it is not"])
def test_a_copy_is_mended(toy_site: MakeSite, order: str, jax: str) -> None:
    told = toy_site(files=FILES).run(
        jax, f"\n{order}", OVERRULED, "tell(ok=overruled(pkg.mod.Unpickler))"
    )
    assert told["ok"]
    assert told.logged("WARNING")[-1].startswith("jax-aot-backend: The given backend")


def test_without_jaxcompat_the_copy_shows_the_defect(toy_site: MakeSite) -> None:
    told = toy_site(files=FILES).run(
        "import pkg.mod", OVERRULED, "tell(ok=overruled(pkg.mod.Unpickler))"
    )
    assert not told["ok"]


def test_naming_a_copy_imports_nothing(toy_site: MakeSite) -> None:
    told = toy_site(files=FILES).run("""
        import jaxcompat
        before = set(sys.modules)
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        tell(imported=sorted(set(sys.modules) - before))
    """)
    assert told["imported"] == []


def test_naming_an_imported_copy_does_not_import_jax(toy_site: MakeSite) -> None:
    """A module that imports JAX only in its functions is left to do so."""
    told = toy_site(files=FILES).run("""
        import pkg.mod
        import jaxcompat
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        tell(imported="jax" in sys.modules)
    """)
    assert not told["imported"]


def test_the_public_copy_is_known_without_a_call(toy_site: MakeSite) -> None:
    told = toy_site(
        files={
            "xrex/__init__.py": "",
            "xrex/utils/__init__.py": "",
            "xrex/utils/aot.py": f"{COPY}\n    _JaxPjrtUnpickler = Unpickler\n",
        }
    ).run(
        "import jaxcompat, xrex.utils.aot",
        OVERRULED,
        "tell(ok=overruled(xrex.utils.aot._JaxPjrtUnpickler))",
    )
    assert told["ok"]


def test_that_there_is_no_public_copy_does_not_matter(affected: ToySite) -> None:
    told = affected.run("import jaxcompat; load(AOT)")
    assert told.states[BACKEND] == "applied"
    assert told.logged("WARNING") == []


@pytest.mark.parametrize(
    "target",
    [
        "",
        ":",
        "pkg",
        "pkg.mod",
        "pkg.mod.Unpickler",
        "pkg.mod:",
        ":Unpickler",
        "pkg..mod:Unpickler",
        ".mod:Unpickler",
        "pkg.mod:Outer.Inner",
        "pkg.mod:Unpickler:load",
        "pkg.mod: Unpickler",
        "pkg mod:Unpickler",
        "pkg-mod:Unpickler",
        "1pkg:Unpickler",
    ],
)
def test_what_is_no_target_is_an_error(target: str) -> None:
    import jaxcompat

    before = jaxcompat.status()
    with pytest.raises(jaxcompat.JaxcompatError, match=r"Expected 'package\.module:Class', got"):
        jaxcompat.patch_unpickler(target)
    assert jaxcompat.status() == before


OTHER_COPIES = {
    "without the parameters": COPY.replace(", *, backend", "").replace("backend, ", ""),
    "without one of them": COPY.replace("execution_devices", "devices"),
    "no unpickler": COPY.replace("(pickle.Unpickler)", "").replace("(file)", "()"),
    "gone": COPY.replace("Unpickler", "Other").replace("pickle.Other", "pickle.Unpickler"),
    "a function": COPY + "\n    def Unpickler(file, backend, execution_devices): ...\n",
    "with a load that is awaited": COPY.replace(
        "    COPY =", "        async def load(self):\n            return 1\n\n    COPY ="
    ),
    "None": COPY + "\n    Unpickler = None\n",
}


@pytest.mark.parametrize("how", OTHER_COPIES)
def test_a_copy_that_is_none_is_left_alone_and_jaxs_own_stays_patched(
    toy_site: MakeSite, how: str
) -> None:
    told = toy_site(files={"pkg/__init__.py": "", "pkg/mod.py": OTHER_COPIES[how]}).run("""
        import jaxcompat
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        aot = load(AOT)
        import pkg.mod
        copy = pkg.mod.COPY
        tell(
            own=is_original(aot, "_JaxPjrtUnpickler.__init__"),
            copy=copy.__init__ is pkg.mod.ORIGINALS[f"{copy.__name__}.__init__"],
            shadowed=hasattr(vars(copy).get("load"), "__wrapped__"),
        )
    """)
    assert not told["own"]
    assert told["copy"]
    assert not told["shadowed"]
    assert told.states[BACKEND] == "applied"
    line = told.complaint(BACKEND)
    assert "leaves a copy alone" in line
    assert "pkg.mod" in line
    assert not any(target.startswith("pkg.mod") for target in told.status[BACKEND]["patched"])


def test_a_copy_that_is_none_is_no_error_with_strict(toy_site: MakeSite) -> None:
    told = toy_site(files={"pkg/__init__.py": "", "pkg/mod.py": OTHER_COPIES["gone"]}).run(
        """
        import jaxcompat
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        import pkg.mod
        """,
        environment={"JAXCOMPAT_STRICT": "1"},
    )
    assert len(told.logged("WARNING")) == 1


def test_a_copy_that_inherits_jaxs_own_has_no_shadows_after_revert(toy_site: MakeSite) -> None:
    source = f"""
        from {AOT} import _JaxPjrtUnpickler
        class Unpickler(_JaxPjrtUnpickler): ...
        """
    told = toy_site(files={"pkg/__init__.py": "", "pkg/mod.py": source}).run("""
        import jaxcompat
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        import pkg.mod
        patched = {"__init__", "load"} <= set(vars(pkg.mod.Unpickler))
        jaxcompat.revert()
        tell(
            patched=patched,
            shadows=sorted({"__init__", "load"} & set(vars(pkg.mod.Unpickler))),
            own=is_original(load(AOT), "_JaxPjrtUnpickler.__init__"),
        )
    """)
    assert told.facts == {"patched": True, "shadows": [], "own": True}


def test_revert_and_apply_take_the_copy_along(toy_site: MakeSite) -> None:
    told = toy_site(files=FILES).run(
        """
        import jaxcompat, pkg.mod
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        load(AOT)
        """,
        OVERRULED,
        """
        jaxcompat.revert(BACKEND)
        tell(reverted=is_original(pkg.mod, "Unpickler.__init__"))
        jaxcompat.apply(BACKEND)
        tell(applied=overruled(pkg.mod.Unpickler), layers=layers(pkg.mod.Unpickler.__init__))
        """,
    )
    assert told.facts == {"reverted": True, "applied": True, "layers": 1}


def test_naming_a_copy_twice_is_once(toy_site: MakeSite) -> None:
    told = toy_site(files=FILES).run("""
        import jaxcompat
        for repeated in range(2):
            jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        import pkg.mod
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        tell(layers=layers(pkg.mod.Unpickler.__init__))
    """)
    assert told["layers"] == 1
    assert told.status[BACKEND]["sites"].count("pkg.mod:Unpickler.__init__") == 1


def test_naming_jaxs_own_class_changes_nothing(affected: ToySite) -> None:
    told = affected.run(f"""
        import jaxcompat
        jaxcompat.patch_unpickler("{AOT}:_JaxPjrtUnpickler")
        tell(layers=layers(load(AOT)._JaxPjrtUnpickler.__init__))
    """)
    assert told["layers"] == 1
    assert told.states[BACKEND] == "applied"


@pytest.mark.parametrize(
    ("environment", "jax"),
    [({"JAXCOMPAT_DISABLE": "1"}, "0.9.0"), ({}, toys.UNAFFECTED["jax"]), ({}, None)],
    ids=["disabled", "unaffected", "absent"],
)
def test_where_the_patch_is_off_a_copy_is_not_hooked(
    toy_site: MakeSite, environment: dict[str, str], jax: str | None
) -> None:
    told = toy_site(jax=jax, orbax=None, files=FILES).run(
        """
        before = list(sys.meta_path)
        import jaxcompat
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        tell(unhooked=sys.meta_path == before)
        import pkg.mod
        tell(original=is_original(pkg.mod, "Unpickler.__init__"))
        """,
        environment=environment,
    )
    assert told["original"]
    assert told["unhooked"]


def test_a_copy_named_while_the_patch_was_off_is_mended_when_it_is_applied(
    toy_site: MakeSite,
) -> None:
    told = toy_site(files=FILES).run(
        """
        import os
        import jaxcompat
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        import pkg.mod
        os.environ["JAXCOMPAT_DISABLE"] = ""
        jaxcompat.apply()
        """,
        OVERRULED,
        "tell(ok=overruled(pkg.mod.Unpickler))",
        environment={"JAXCOMPAT_DISABLE": BACKEND},
    )
    assert told["ok"]


def test_switched_off_after_the_copy_was_mended_takes_the_copy_along(toy_site: MakeSite) -> None:
    told = toy_site(files=FILES).run("""
        import os
        import jaxcompat
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        import pkg.mod
        os.environ["JAXCOMPAT_DISABLE"] = BACKEND
        load(AOT)
        tell(original=is_original(pkg.mod, "Unpickler.__init__"))
    """)
    assert told.states[BACKEND] == "disabled"
    assert told["original"]
    assert told.status[BACKEND]["patched"] == []


NAMES_ITSELF = f"""{COPY}
    import jaxcompat
    jaxcompat.patch_unpickler(f"{{__name__}}:Unpickler")
    """


def test_a_half_imported_copy_is_not_touched_and_the_user_is_told(toy_site: MakeSite) -> None:
    """A module that names its own copy is still being imported."""
    told = toy_site(files={"pkg/__init__.py": "", "pkg/mod.py": NAMES_ITSELF}).run("""
        import pkg.mod
        tell(original=is_original(pkg.mod, "Unpickler.__init__"))
    """)
    assert told["original"]
    assert "pkg.mod" in told.complaint(BACKEND)


def test_a_half_imported_copy_is_mended_by_naming_it_again(toy_site: MakeSite) -> None:
    told = toy_site(files={"pkg/__init__.py": "", "pkg/mod.py": NAMES_ITSELF}).run(
        """
        import pkg.mod, jaxcompat
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        """,
        OVERRULED,
        "tell(ok=overruled(pkg.mod.Unpickler))",
    )
    assert told["ok"]


@pytest.mark.parametrize("own", ["load(AOT)", "pass"], ids=["applied", "armed"])
def test_a_half_imported_copy_is_mended_by_apply(toy_site: MakeSite, own: str) -> None:
    told = toy_site(files={"pkg/__init__.py": "", "pkg/mod.py": NAMES_ITSELF}).run(
        "import pkg.mod, jaxcompat",
        f"\n{own}\njaxcompat.apply()\n",
        OVERRULED,
        "tell(ok=overruled(pkg.mod.Unpickler))",
    )
    assert told["ok"]


def test_when_jaxs_own_class_is_drifted_a_copy_that_fits_is_still_mended(
    toy_site: MakeSite,
) -> None:
    """A copy stands or falls alone."""
    drifted = changed(AOT, ("_JaxPjrtUnpickler", "_Unpickler"))
    told = toy_site(files={**FILES, **drifted}).run(
        """
        import jaxcompat
        jaxcompat.patch_unpickler("pkg.mod:Unpickler")
        import pkg.mod
        load(AOT)
        """,
        OVERRULED,
        "tell(ok=overruled(pkg.mod.Unpickler))",
    )
    assert told.states[BACKEND] == "drifted"
    assert told["ok"]
