"""`jax-aot-backend`: which client a backend and execution devices come to, with a toy JAX."""

from __future__ import annotations

import pytest

from .conftest import MakeSite
from .toys import BACKEND, Report, ToySite

PATCHED = """
    import jaxcompat
    aot, jax = load(AOT), load("jax")
    cpu, gpu = jax.devices("cpu"), jax.devices("gpu")
    def settled(**given):
        backend, devices = aot.deserialize_and_load(b"", None, None, **given)
        return [backend.platform, [repr(device) for device in devices or ()]]
    def error_of(**given):
        try:
            aot.deserialize_and_load(b"", None, None, **given)
        except Exception as error:
            return [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
    class Array:
        flat = cpu
"""
CPU = ["cpu", ["cpu:0", "cpu:1"]]
GPU = ["gpu", ["gpu:0", "gpu:1"]]


def test_without_jaxcompat_jax_refuses_the_pair(affected: ToySite) -> None:
    told = affected.run(
        PATCHED.replace("import jaxcompat", ""),
        "tell(error=error_of(backend=gpu[0].client, execution_devices=cpu))",
    )
    assert "client other than `backend`" in told["error"][1]


SETTLED = {
    "backend=gpu[0].client, execution_devices=cpu": CPU,
    "backend=cpu[0].client, execution_devices=gpu": GPU,
    "backend=cpu[0].client, execution_devices=cpu": CPU,
    "backend='gpu', execution_devices=cpu": CPU,
    "backend='cuda', execution_devices=gpu": GPU,
    "execution_devices=gpu": GPU,
    "backend=None, execution_devices=gpu": GPU,
    "execution_devices=tuple(gpu)": GPU,
    "execution_devices=iter(gpu)": GPU,
    "execution_devices=gpu[1:]": ["gpu", ["gpu:1"]],
    "execution_devices=Array()": CPU,
    "": ["cpu", []],
    "backend='gpu'": ["gpu", []],
    "backend=gpu[0].client": ["gpu", []],
    "backend='gpu', execution_devices=None": ["gpu", []],
}


@pytest.fixture(scope="module")
def settled(toy_site: MakeSite) -> Report:
    """Return what becomes of all that may be given, each a fact."""
    calls = (f"tell(**{{{given!r}: settled({given})}})\n" for given in SETTLED)
    return toy_site().run(PATCHED, *calls)


@pytest.mark.parametrize("given", SETTLED)
def test_the_devices_say_which_client_it_is(settled: Report, given: str) -> None:
    assert settled[given] == SETTLED[given]


def test_the_unpickler_settles_it_as_well(affected: ToySite) -> None:
    told = affected.run(
        PATCHED,
        """
        import io
        made = aot._JaxPjrtUnpickler(io.BytesIO(), gpu[0].client, cpu)
        tell(cpu=made.backend is cpu[0].client, devices=made.execution_devices == tuple(cpu))
        """,
    )
    assert told.facts == {"cpu": True, "devices": True}


@pytest.mark.parametrize(
    ("given", "warnings"),
    [
        ("backend=gpu[0].client, execution_devices=cpu", 1),
        ("backend='gpu', execution_devices=cpu", 1),
        ("backend='cuda', execution_devices=gpu", 0),
        ("execution_devices=gpu", 0),
        ("backend=gpu[0].client", 0),
    ],
)
def test_what_was_overruled_is_said_once(affected: ToySite, given: str, warnings: int) -> None:
    told = affected.run(PATCHED, f"settled({given}); settled({given})")
    said = told.logged("WARNING")
    assert len(said) == warnings
    assert all("overruled" in line and f"JAXCOMPAT_DISABLE={BACKEND}" in line for line in said)


def test_no_devices_at_all_is_an_error_that_says_so(affected: ToySite) -> None:
    told = affected.run(PATCHED, "tell(error=error_of(execution_devices=[]))")
    kind, text = told["error"]
    assert kind == "ValueError"
    assert "`execution_devices` is empty" in text


def test_devices_of_two_clients_are_an_error_that_names_both(affected: ToySite) -> None:
    told = affected.run(PATCHED, "tell(error=error_of(execution_devices=[cpu[0], gpu[1], cpu[1]]))")
    kind, text = told["error"]
    assert kind == "ValueError"
    assert "2 PJRT clients" in text
    assert "[cpu:0, cpu:1]" in text
    assert "[gpu:1]" in text


def test_a_wrong_call_is_answered_in_jaxs_own_words(affected: ToySite) -> None:
    wrong = "tell(error=error_of(no_such_parameter=1))"
    bare = affected.run(PATCHED.replace("import jaxcompat", ""), wrong)
    assert affected.run(PATCHED, wrong)["error"] == bare["error"]
    assert "no_such_parameter" in bare["error"][1]


UNREADABLE = """
    import io
    def error_of_loading(devices):
        try:
            aot._JaxPjrtUnpickler(io.BytesIO(b"junk"), gpu[0].client, devices).load()
        except Exception as error:
            return " ".join([str(error), *getattr(error, "__notes__", ())])
"""


def test_an_error_of_loading_says_that_the_backend_was_overruled(affected: ToySite) -> None:
    told = affected.run(
        PATCHED, UNREADABLE, "tell(cpu=error_of_loading(cpu), gpu=error_of_loading(gpu))"
    )
    assert told["cpu"].count("was overruled") == 1
    assert "overruled" not in told["gpu"]


def test_an_error_of_jaxs_own_says_that_the_backend_was_overruled(affected: ToySite) -> None:
    told = affected.run(
        PATCHED,
        """
        def error_of(devices):
            try:
                aot.deserialize_and_load(b"junk", None, None, gpu[0].client, devices)
            except ValueError as error:
                return " ".join([str(error), *getattr(error, "__notes__", ())])
        tell(cpu=error_of(cpu), gpu=error_of(gpu))
        """,
    )
    assert told["gpu"] == "this is no executable"
    assert told["cpu"].startswith("this is no executable")
    assert told["cpu"].count("was overruled") == 1


def test_the_unpickler_still_reads(affected: ToySite) -> None:
    told = affected.run(
        PATCHED,
        """
        import io
        data = io.BytesIO(pickle.dumps({"a": [1, 2]}))
        tell(read=aot._JaxPjrtUnpickler(data, gpu[0].client, cpu).load())
        """,
    )
    assert told["read"] == {"a": [1, 2]}


@pytest.mark.parametrize(("jax", "state"), [("0.6.0", "unaffected"), ("0.6.1", "armed")])
def test_the_first_jax_that_has_the_defect(toy_site: MakeSite, jax: str, state: str) -> None:
    assert toy_site(jax=jax).run("import jaxcompat").states[BACKEND] == state
