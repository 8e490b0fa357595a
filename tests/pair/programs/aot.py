"""Loads an AOT executable in the way that the argument names; `aot.py list` names them all."""

import importlib
import io
import logging
import pickle
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client
from jax.experimental import serialize_executable
from jax.experimental.serialize_executable import deserialize_and_load

VALUE = np.arange(1, 9, dtype=np.float32)

device = jax.devices()[0]
second = xla_client.make_cpu_client()
compiled = jax.jit(lambda x: 2 * x + 1).lower(jax.device_put(VALUE, device)).compile()
payload, in_tree, out_tree = serialize_executable.serialize(compiled)


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("jaxcompat").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def calls(loaded: Any, where: Any) -> None:
    result = loaded(jax.device_put(VALUE, where))
    np.testing.assert_array_equal(np.asarray(result), 2 * VALUE + 1)
    assert result.devices() == {where}, result.devices()


def unpickles(unpickler: Any) -> None:
    unloaded, *_ = unpickler.load()
    unloaded.load()


def raises(kind: type[BaseException], body: Callable[[], Any]) -> BaseException:
    try:
        body()
    except kind as error:
        return error
    raise AssertionError("nothing was raised")


def said(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def load(**given: Any) -> Any:
    return deserialize_and_load(payload, in_tree, out_tree, **given)


def new_unpickler(*args: Any, **kwargs: Any) -> Any:
    return serialize_executable._JaxPjrtUnpickler(io.BytesIO(payload), *args, **kwargs)


# --- each of these fails on bare JAX


def second_client_as_backend() -> None:
    records = Records()
    for _ in range(2):
        calls(load(backend=second, execution_devices=[device]), device)
        unpickles(new_unpickler(second, [device]))
    # Once, with both platforms: here both are called cpu.
    assert len(records.messages) == 1, records.messages
    assert "overruled" in records.messages[0]
    assert records.messages[0].count("('cpu', 'cpu')") == 2, records.messages
    assert "JAXCOMPAT_DISABLE=jax-aot-backend" in records.messages[0]


def default_backend_beside_devices_of_the_second_client() -> None:
    there = second.devices()[0]
    calls(load(execution_devices=[there]), there)
    calls(load(backend="cpu", execution_devices=[there]), there)


def platform_name_as_backend() -> None:
    records = Records()
    unpickles(new_unpickler("cpu", [device]))
    assert not records.messages
    raises(RuntimeError, lambda: load(backend="no such platform", execution_devices=[device]))


def no_backend() -> None:
    unpickles(new_unpickler(None, [device]))
    unpickles(new_unpickler(execution_devices=[device]))
    assert new_unpickler(None).backend is device.client


def devices_of_any_kind() -> None:
    for devices in (
        (device,),
        np.array([device]),
        np.array([[device]]),
        iter([device]),
        xla_client.DeviceList((device,)),
    ):
        unpickles(new_unpickler(None, devices))
    unpickler = new_unpickler(None, np.array(jax.devices()).reshape(2, 4))
    assert unpickler.devices_by_id == {d.id: d for d in jax.devices()}


def no_devices() -> None:
    for body in (
        lambda: load(execution_devices=[]),
        lambda: new_unpickler(device.client, ()),
    ):
        assert "`execution_devices` is empty" in said(raises(ValueError, body))


def devices_of_two_clients() -> None:
    devices = [device, second.devices()[1]]
    for body in (
        lambda: load(execution_devices=devices),
        lambda: new_unpickler(device.client, devices),
    ):
        message = said(raises(ValueError, body))
        assert "2 PJRT clients" in message, message
        assert message.count(repr(device)) == 1, message
        assert message.count(repr(second.devices()[1])) == 1, message


def overruled_and_then_failing() -> None:
    junk = pickle.dumps("no executable")
    for body in (
        lambda: deserialize_and_load(
            junk, in_tree, out_tree, backend=second, execution_devices=[device]
        ),
        lambda: serialize_executable._JaxPjrtUnpickler(
            io.BytesIO(junk[:-2]), second, [device]
        ).load(),
    ):
        assert said(raises(Exception, body)).count("was overruled") == 1
    # One that was not overruled says nothing of the kind.
    body = serialize_executable._JaxPjrtUnpickler(io.BytesIO(junk[:-2]), None, [device]).load
    assert "overruled" not in said(raises(Exception, body))


def subclass_of_the_unpickler() -> None:
    class Moved(serialize_executable._JaxPjrtUnpickler):  # type: ignore[misc, unused-ignore]
        def __init__(self, file: Any, backend: Any) -> None:
            super().__init__(file, backend, [device])
            self.devices_by_id = {0: device}

        def persistent_load(self, pid: Any) -> Any:
            seen.append(pid[0])
            return super().persistent_load(pid)

    seen: list[str] = []
    unpickles(Moved(io.BytesIO(payload), second))
    assert "exec" in seen
    assert "device" in seen


def a_copy(module: str, *, before: bool) -> None:
    if before and module != "xrex.utils.aot":
        import jaxcompat

        jaxcompat.patch_unpickler(f"{module}:_JaxPjrtUnpickler")
        assert module not in sys.modules
    copy = importlib.import_module(module)
    if not before:
        import jaxcompat

        jaxcompat.patch_unpickler(f"{module}:_JaxPjrtUnpickler")
    unpickles(copy._JaxPjrtUnpickler(io.BytesIO(payload), second, [device], None, None))
    unpickles(
        copy._JaxPjrtUnpickler(
            io.BytesIO(payload),
            execution_devices=np.array([device]),
            backend="cpu",
            compile_options=None,
            host_callbacks=None,
        )
    )


def third_party_copy_named_before_its_import() -> None:
    a_copy("vendored.aot", before=True)


def third_party_copy_named_after_its_import() -> None:
    a_copy("vendored.aot", before=False)


def third_party_copy_known_by_default() -> None:
    a_copy("xrex.utils.aot", before=True)


def third_party_copy_that_is_no_key() -> None:
    """Neither hashable nor weakly referenced, and with a load of its own."""
    import jaxcompat

    jaxcompat.patch_unpickler("vendored.odd:Unpickler")
    odd = importlib.import_module("vendored.odd")
    assert odd.Unpickler(second, [device]).load(strict=True) is device.client
    message = said(raises(LookupError, odd.Unpickler(second, [device]).load))
    assert message == "not strict", message


MENDED = [
    second_client_as_backend,
    default_backend_beside_devices_of_the_second_client,
    platform_name_as_backend,
    no_backend,
    devices_of_any_kind,
    no_devices,
    devices_of_two_clients,
    overruled_and_then_failing,
    subclass_of_the_unpickler,
    third_party_copy_named_before_its_import,
    third_party_copy_named_after_its_import,
    third_party_copy_known_by_default,
    third_party_copy_that_is_no_key,
]

# --- and these do not: they must stay as they are


def right_from_the_start() -> None:
    records = Records()
    calls(load(execution_devices=[device]), device)
    calls(load(backend=device.client, execution_devices=[device]), device)
    unpickles(new_unpickler(device.client, [device]))
    unpickler = new_unpickler(device.client)
    assert unpickler.devices_by_id == {d.id: d for d in jax.devices()}
    assert not records.messages


def wrong_calls() -> None:
    for body, words in (
        (lambda: new_unpickler(device.client, [device], 1, 2), "positional arguments but"),
        (lambda: new_unpickler(devices=[device]), "unexpected keyword argument 'devices'"),
        (lambda: deserialize_and_load(), "missing 3 required positional arguments"),
    ):
        assert words in said(raises(TypeError, body))
    raises(RuntimeError, lambda: load(backend="no such platform"))


UNTOUCHED = [right_from_the_start, wrong_calls]

if __name__ == "__main__":
    cases = {case.__name__: case for case in MENDED + UNTOUCHED}
    cases[sys.argv[1]]()
