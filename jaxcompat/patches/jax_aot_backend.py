"""JAX loads an AOT executable with the client of its devices, whatever `backend` says.

ValueError: Execution devices belong to a client other than `backend`. Got backend client:
('gpu', 'cuda 12090') and execution devices client: ('cpu', 'cpu')

`deserialize_and_load` and the unpickler behind it take a backend *and* devices, and refuse the
pair when the two come from different PJRT clients: a CPU backend beside a GPU one, a second
client, a client cached from before. The devices alone say where the program will run. Copies of
the class repeat the check; the public one is x-algorithm's ``phoenix/xrex/utils/aot.py``.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from jaxcompat.patch import Argument, Patch, Site

ID = "jax-aot-backend"

_logger = logging.getLogger("jaxcompat")
_overruled: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Unpicklers whose backend was overruled, with the sentence that says so."""
_said: set[str] = set()


def normalized(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original` such that `backend` and `execution_devices` come from one client."""
    signature = inspect.signature(original)
    backends = Argument(signature, "backend")
    execution_devices = Argument(signature, "execution_devices")

    @functools.wraps(original)
    def with_the_devices_client(*args: Any, **kwargs: Any) -> Any:
        backend, devices, note = settle(
            backends.get(args, kwargs), execution_devices.get(args, kwargs)
        )
        given = backends.put(args, kwargs, backend)
        if devices is not None:
            given = execution_devices.put(*given, devices)
        try:
            result = original(*given[0], **given[1])
        except Exception as error:
            if note:
                _add_note(error, note)
            raise
        if note and original.__name__ == "__init__":
            try:
                _overruled[args[0]] = note
            except TypeError as error:  # a copy may be unhashable, or have slots
                _logger.debug("%s: its load cannot say that it was overruled: %s", ID, error)
        return result

    return with_the_devices_client


def explained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the unpickler's `load` such that its errors say that the backend was overruled."""

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            note = next((said for ref, said in _overruled.items() if ref is self), "")
            if note:
                _add_note(error, note)
            raise

    return load


def settle(backend: Any, execution_devices: Any) -> tuple[Any, tuple[Any, ...] | None, str]:
    """Return the client, the devices as a tuple, and a note where the backend was overruled.

    Parameters
    ----------
    backend
        A PJRT client, the name of a platform, or None for the devices' own (or the default) one.
    execution_devices
        Devices of one client, in any iterable (arrays are flattened), or None.

    Raises
    ------
    ValueError
        If there are no devices, or they belong to several clients; the message names them.
    RuntimeError
        JAX's own, if there is no platform of that name.
    """
    import jax

    if execution_devices is None:
        if backend is None or isinstance(backend, str):
            backend = jax.devices(backend)[0].client
        return backend, None, ""
    devices = tuple(getattr(execution_devices, "flat", execution_devices))
    if not devices:
        raise ValueError(
            "`execution_devices` is empty: an executable needs at least one device. "
            "Leave it out for all devices of the backend."
        )
    clients: list[Any] = []
    for device in devices:
        if device.client not in clients:
            clients.append(device.client)
    if len(clients) > 1:
        described = "; ".join(
            f"{_described(client)}: {[d for d in devices if d.client == client]}"
            for client in clients
        )
        raise ValueError(
            f"`execution_devices` belong to {len(clients)} PJRT clients, and an executable runs "
            f"on one. Got {described}"
        )
    (client,) = clients
    if backend is None or backend == client or _is_platform_of(backend, client):
        return client, devices, ""
    note = (
        f"The given backend {_described(backend)} was overruled: the execution devices belong to "
        f"another PJRT client, {_described(client)}, and an executable runs where its devices are."
    )
    if note not in _said:
        _said.add(note)
        _logger.warning(
            "%s: %s Pass no backend, or execution_devices[0].client, to silence this; "
            "JAXCOMPAT_DISABLE=%s brings JAX's own error back.",
            ID,
            note,
            ID,
        )
    return client, devices, note


def _is_platform_of(backend: Any, client: Any) -> bool:
    """Return whether `backend` is a platform name ("cuda" as well as "gpu") of the client's."""
    import jax

    if not isinstance(backend, str):
        return False
    return bool(jax.devices(backend)[0].client.platform == client.platform)


def _described(backend: Any) -> str:
    if isinstance(backend, str):
        return repr(backend)
    version = getattr(backend, "platform_version", "").split("\n")[0]
    return f"({getattr(backend, 'platform', type(backend).__name__)!r}, {version!r})"


def _add_note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif error.args and isinstance(error.args[0], str) and note not in error.args[0]:
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])  # Python 3.10


def class_sites(module: str, name: str, *, copy: bool = True) -> tuple[Site, ...]:
    """Return the sites of one unpickler class; `relies_on` is all that a copy must share."""
    return (
        Site(
            f"{module}:{name}.__init__",
            normalized,
            relies_on=("backend", "execution_devices"),
            copy=copy,
        ),
        Site(f"{module}:{name}.load", explained, copy=copy),
    )


_JAX_MODULE = "jax.experimental.serialize_executable"

PATCH = Patch(
    id=ID,
    symptom=(
        'Loading an AOT executable fails with "Execution devices belong to a client other than '
        '`backend`".'
    ),
    cause=(
        "deserialize_and_load and its unpickler take a backend and the execution devices, and "
        "refuse the two when they come from different PJRT clients: a CPU backend beside a GPU "
        "one, a second client, a cached one. Left out, the backend is the default one, whatever "
        "the devices are."
    ),
    mend=(
        "The client is taken from the execution devices. A backend that is left out, or a "
        "platform's name, is resolved; devices may come as a list, tuple, array or DeviceList. "
        "A backend that was overruled is logged once. No devices, and devices of two clients, "
        "stay errors, and say which. With no devices given, JAX decides as before."
    ),
    until="a JAX release that derives the backend from the devices; none does up to 0.12.0.1.",
    affected=({"jax": ">=0.6.1"},),
    sites=(
        Site(
            f"{_JAX_MODULE}:deserialize_and_load",
            normalized,
            relies_on=("backend", "execution_devices"),
        ),
        *class_sites(_JAX_MODULE, "_JaxPjrtUnpickler", copy=False),
        *class_sites("xrex.utils.aot", "_JaxPjrtUnpickler"),
    ),
    upstream=(
        "https://github.com/jax-ml/jax/blob/main/jax/experimental/serialize_executable.py",
        "https://github.com/xai-org/x-algorithm/blob/main/phoenix/xrex/utils/aot.py",
    ),
    copies=class_sites,
)
