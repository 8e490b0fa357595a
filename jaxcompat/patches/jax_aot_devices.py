"""JAX loads an AOT executable onto the devices it was compiled for, or onto those that are named.

An executable runs on as many devices as it was compiled for. Since 0.6.1 JAX loads it onto all
that the backend has, in the backend's order, unless it is told otherwise: the process aborts, or
the call fails ("Expected args to execute_sharded_on_local_devices to have 8 shards, got: [1]").
Told otherwise, it looks the recorded devices up among those given: "KeyError: 0".

The payload says what is right: it is a pickle in which each device is a persistent id, and the
first run of them after the executable's own is the device assignment. It is read with
`pickletools`, which executes nothing. Devices that are given take the places of the recorded ones,
in order, in the shardings (through the unpickler's own table) and in XLA's device assignment
(through compile options, which `deserialize_executable` takes).
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import pickletools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from jaxcompat.patch import Argument, Patch, Site

ID = "jax-aot-devices"

_logger = logging.getLogger("jaxcompat")
_UNASKED: Any = object()
_asked: ContextVar[Any] = ContextVar("devices asked of deserialize_and_load", default=_UNASKED)
"""What the caller gave: JAX tells the unpickler of all devices where he gave none."""
_STATE = "_jaxcompat_devices"


class Recorded(NamedTuple):
    """What a payload says of the devices that it was compiled for."""

    ids: tuple[int, ...] = ()
    """Their ids, in assignment order."""
    replicas: bool = False
    """Whether each is a replica of its own, as before 0.8.1 in a program of `jax.pmap`."""


class _State(NamedTuple):
    """What is known of one unpickler before it loads."""

    recorded: tuple[int, ...]
    replicas: bool
    given: tuple[Any, ...] | None
    by_id: dict[int, Any]
    """JAX's table as its constructor left it; another one is the caller's, and counts."""
    executed_on: list[Any]
    """The devices that XLA would load the executable onto."""


# --- what the payload says ---------------------------------------------------------------------


def read(file: Any) -> Recorded:
    """Return what a payload says of the devices that it was compiled for.

    None are found where it is no payload of JAX's; nothing in it is executed, and reading stops
    behind the devices. The file is left where it was.

    Parameters
    ----------
    file
        A binary file that can seek; else nothing is read.
    """
    try:
        start = file.tell()
        try:
            end = file.seek(0, io.SEEK_END)
            file.seek(start)
            return _read(_Skimmed(file, end) if end - start > _LONG else file)
        finally:
            file.seek(start)
    # No file that can seek, or no pickle: loading it says so in JAX's words.
    except (AttributeError, OSError, ValueError, IndexError) as error:
        _logger.debug("%s: no devices can be read: %r", ID, error)
        return Recorded()


_LONG = 1 << 16


class _Skimmed:
    """A file whose long runs of bytes, such as the executable, are passed over: none is copied."""

    def __init__(self, file: Any, end: int) -> None:
        self._file, self._end = file, end
        self.readline = file.readline

    def read(self, count: int) -> Any:
        if count <= _LONG or self._file.tell() + count > self._end:
            return self._file.read(count)
        self._file.seek(count, io.SEEK_CUR)
        return bytes(count)  # zeros, of memory that is not touched


_WITHIN_A_RUN = {"BINGET", "BININT", "BININT1", "BININT2", "BINPERSID", "FRAME", "LONG_BINGET"} | {
    "BINPUT", "LONG_BINPUT", "MEMOIZE", "TUPLE2",
}  # fmt: skip


def _read(file: Any) -> Recorded:
    memo: dict[Any, Any] = {}
    stack: list[Any] = []  # of constants, and of pairs of them; the rest only fills its place
    ids: list[int] = []
    executable = replicas = False
    for opcode, arg, _ in pickletools.genops(file):
        name = opcode.name
        if ids and name not in _WITHIN_A_RUN:
            break
        if name == "FRAME":
            continue
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo.get(arg))
        elif name == "TUPLE2":
            stack[-2:] = [tuple(stack[-2:])]
        elif name == "BINPERSID":
            match stack.pop():
                case ("exec", bytes()):
                    executable = True
                case ("device", int() as device) if executable:
                    ids.append(device)
        else:
            replicas = replicas or arg == "UnloadedPmapExecutable"
            stack.append(arg)
    return Recorded(tuple(ids), replicas)


# --- what is replaced --------------------------------------------------------------------------


def with_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `deserialize_and_load` such that the unpickler knows what the caller gave."""
    settle = _Settling(original)

    @functools.wraps(original)
    def deserialize_and_load(*args: Any, **kwargs: Any) -> Any:
        given, devices = settle(args, kwargs)
        token = _asked.set(devices)
        try:
            return original(*given[0], **given[1])
        finally:
            _asked.reset(token)

    vars(deserialize_and_load)["__signature__"] = settle.signature
    return deserialize_and_load


def with_recorded_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the unpickler's constructor such that its payload's own devices are the default."""
    settle = _Settling(original)
    files = Argument(settle.signature, "file")

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given, devices = settle((self, *args), kwargs)
        if (asked := _asked.get()) is not _UNASKED:
            devices = asked
        recorded, replicas = read(files.get(*given))
        original(*given[0], **given[1])
        by_id = getattr(self, "devices_by_id", None)
        # Nothing to go by; or a copy that numbers its devices in another way.
        if not recorded or not isinstance(by_id, dict) or not hasattr(self, "backend"):
            return
        state = _State(recorded, replicas, devices, dict(by_id), [*by_id.values()])
        if devices is None and all(device in by_id for device in recorded):
            # For subclasses that load the executable themselves.
            state = _execute_on(self, [by_id[device] for device in recorded], state)
        setattr(self, _STATE, state)

    vars(__init__)["__signature__"] = settle.signature
    return __init__


def with_the_assignment(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the unpickler's `persistent_load` such that XLA assigns the same devices as JAX."""

    @functools.wraps(original)
    def persistent_load(self: Any, pid: Any) -> Any:
        state: _State | None = getattr(self, _STATE, None)
        if state is None or not isinstance(pid, tuple) or pid[:1] != ("exec",):
            return original(self, pid)
        devices = _devices(self, state)
        _execute_on(self, devices, state)
        ids = [device.id for device in devices]
        if ids == [*state.recorded]:
            return original(self, pid)
        client = self.backend
        self.backend = _Assigning(client, ids, state.replicas)
        try:
            return original(self, pid)
        finally:
            self.backend = client

    return persistent_load


class _Settling:
    """Takes the devices out of the arguments, and leaves to the original what it takes."""

    def __init__(self, original: Callable[..., Any]) -> None:
        name = "execution_devices"
        self.signature = inspect.signature(original)
        self._missing = name not in self.signature.parameters
        if self._missing:  # JAX 0.6.0
            new = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
            self.signature = self.signature.replace(
                parameters=[*self.signature.parameters.values(), new]
            )
        self._devices = Argument(self.signature, name)
        self._backend = Argument(self.signature, "backend")

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...] | None]:
        devices = self._devices.get(args, kwargs)
        if devices is not None:
            devices = tuple(getattr(devices, "flat", devices))
            args, kwargs = self._devices.put(args, kwargs, devices)
        if self._missing:
            args, kwargs = self._devices.drop(args, kwargs)
            if devices:
                clients = {device.client for device in devices}
                if len(clients) > 1:
                    raise ValueError(f"`execution_devices` belong to {len(clients)} PJRT clients.")
                args, kwargs = self._backend.put(args, kwargs, *clients)
        return (args, kwargs), devices


def _devices(unpickler: Any, state: _State) -> list[Any]:
    """Return the devices to load onto, as the unpickler itself answers for the recorded ones."""
    count = len(state.recorded)
    if state.given is not None and unpickler.devices_by_id == state.by_id:
        if len(state.given) != count:
            raise ValueError(
                f"The executable was compiled for {_named(count)} ({_listed(state.recorded)}), and "
                f"`execution_devices` names {len(state.given)}. Pass {count}, or leave it out to "
                "load the executable onto the devices that it was compiled for."
            )
        twice = [device.id for device, named in Counter(state.given).items() if named > 1]
        if twice:
            raise ValueError(f"`execution_devices` names {_listed(twice)} more than once.")
        unpickler.devices_by_id = dict(zip(state.recorded, state.given, strict=True))
    devices, unknown = [], []
    for recorded in state.recorded:
        try:
            devices.append(unpickler.persistent_load(("device", recorded)))
        except KeyError:
            unknown.append(recorded)
    client = unpickler.backend
    if unknown:
        problem = f"which {client.platform!r} does not have here"
    elif all(device.process_index != client.process_index() for device in devices):
        problem = f"and this process ({client.process_index()}) can address none of them"
    else:
        return devices
    raise ValueError(
        f"The executable was compiled for {_named(count)} ({_listed(state.recorded)}), {problem}"
        f"{f': {_listed(unknown)}' if unknown else ''}. Name the devices to load it onto, in that "
        f"order: execution_devices=jax.local_devices()[:{count}], for instance."
    )


def _execute_on(unpickler: Any, devices: list[Any], state: _State) -> _State:
    if devices != state.executed_on and hasattr(unpickler, "execution_devices"):  # not on 0.6.0
        unpickler.execution_devices = type(unpickler.execution_devices)(tuple(devices))
    return state._replace(executed_on=devices)


def _named(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _listed(ids: Iterable[int]) -> str:
    named = [str(device) for device in ids]
    return f"id {', '.join(named[:16])}{', ...' if len(named) > 16 else ''}"


class _Assigning:
    """A PJRT client that gives the executables that it loads a device assignment."""

    def __init__(self, client: Any, ids: list[int], replicas: bool) -> None:
        self._client = client
        self._assignment = [[device] for device in ids] if replicas else [ids]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def deserialize_executable(self, serialized: bytes, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("compile_options") is None:
            import numpy as np
            from jax._src import compiler

            kwargs["compile_options"] = compiler.get_compile_options(
                num_replicas=len(self._assignment),
                num_partitions=len(self._assignment[0]),
                device_assignment=np.array(self._assignment),
                backend=self._client,
            )
        return self._client.deserialize_executable(serialized, *args, **kwargs)


def class_sites(module: str, name: str, *, copy: bool = True) -> tuple[Site, ...]:
    """Return the sites of one unpickler class; `relies_on` is all that a copy must share."""
    return (
        Site(
            f"{module}:{name}.__init__",
            with_recorded_devices,
            relies_on=("file", "backend"),
            copy=copy,
        ),
        Site(
            f"{module}:{name}.persistent_load", with_the_assignment, relies_on=("pid",), copy=copy
        ),
    )


_JAX_MODULE = "jax.experimental.serialize_executable"

PATCH = Patch(
    id=ID,
    symptom=(
        "An AOT executable that was compiled for fewer devices than the process has ends it with "
        '"device and buffer counts mismatch", or its call fails with "Expected args to '
        'execute_sharded_on_local_devices to have"; loading it onto other devices fails with '
        '"KeyError: 0" (or, on JAX 0.6.0, "unexpected keyword argument").'
    ),
    cause=(
        "Where no execution devices are given, JAX loads an executable onto all devices of the "
        "backend, whatever it was compiled for. Where they are, it looks for the recorded ones "
        "among them, and XLA's device assignment stays the recorded one."
    ),
    mend=(
        "Without execution_devices the recorded ones are read from the payload, in assignment "
        "order; nothing in it is executed for that. With them, the k-th takes the place of the "
        "k-th recorded, in the shardings and in XLA's device assignment. Another number of "
        "devices, and recorded devices that this process does not have, are ValueErrors that say "
        "which. What the pickle may reach is unchanged."
    ),
    until="a JAX release that loads executables onto their own devices; none does up to 0.12.0.1.",
    affected=({"jax": ">=0.6.0"},),
    sites=(
        Site(
            f"{_JAX_MODULE}:deserialize_and_load",
            with_devices,
            relies_on=("serialized", "backend"),
        ),
        *class_sites(_JAX_MODULE, "_JaxPjrtUnpickler", copy=False),
    ),
    upstream=("https://github.com/jax-ml/jax/blob/main/jax/experimental/serialize_executable.py",),
    copies=class_sites,
)
