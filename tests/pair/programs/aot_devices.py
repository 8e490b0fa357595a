"""Loads AOT executables onto their own devices, and onto others, in the ways the arguments name."""

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

VALUE = np.arange(16, dtype=np.float32)
DEVICES = jax.devices()
Devices = Sequence[jax.Device]
Put = Callable[[Devices], Any]


def mesh_of(devices: Devices, kind: AxisType = AxisType.Auto) -> Mesh:
    shape = (2, -1) if len(devices) > 2 else (1, -1)
    return Mesh(np.array(devices).reshape(shape), ("x", "y"), axis_types=(kind,) * 2)


def put(devices: Devices, *spec: Any) -> jax.Array:
    spec = spec or (("x", "y"),)
    return jax.device_put(VALUE, NamedSharding(mesh_of(devices), PartitionSpec(*spec)))


def data(array: jax.Array) -> np.ndarray:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def placed(array: jax.Array) -> list[tuple[jax.Device, Any]]:
    """What each device holds, in the order of the array's own shards."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return [(shard.device, np.asarray(shard.data).tolist()) for shard in array.addressable_shards]


def loads(jitted: Any, arguments: Put, recorded: Devices, *others: Devices) -> None:
    """Compile for the first devices and load onto those, unnamed and named, and onto the others.

    What JAX compiles for those devices in the first place says what is right, and where.
    """
    serialized = serialize(jitted.lower(*arguments(recorded)).compile())
    for named in (None, recorded, *others):
        where = named or recorded
        compiled = jitted.lower(*arguments(where)).compile()
        loaded = deserialize_and_load(
            *serialized, **({} if named is None else {"execution_devices": named})
        )
        for _ in range(2):
            given = arguments(where)
            wanted, got = compiled(*arguments(where)), loaded(*given)
            assert jax.tree.structure(got) == jax.tree.structure(wanted)
            for one, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_array_equal(data(one), data(right))
                assert one.dtype == right.dtype
                assert placed(one) == placed(right), (named, placed(one), placed(right))
                same = one.sharding.is_equivalent_to(right.sharding, one.ndim)
                assert same, (named, one.sharding)
                assert {device for device, _ in placed(one)} <= {*where}
        used = jitted.lower(*arguments(where)).compile()  # what it takes is deleted, or is not
        taken = arguments(where)
        used(*taken)
        assert [a.is_deleted() for a in given] == [a.is_deleted() for a in taken]


def double_and_sum(x: jax.Array) -> Any:
    return 2 * x + 1, x.sum()


def one_device() -> None:
    loads(jax.jit(double_and_sum), lambda d: (put(d),), DEVICES[:1], DEVICES[5:6])
    plain = jax.jit(double_and_sum)
    loads(plain, lambda d: (jax.device_put(VALUE, d[0]),), DEVICES[:1], DEVICES[5:6])


def a_device_other_than_the_first() -> None:
    plain = jax.jit(double_and_sum)
    loads(plain, lambda d: (jax.device_put(VALUE, d[0]),), DEVICES[3:4], DEVICES[:1], DEVICES[7:])


def a_sub_mesh() -> None:
    moved = (DEVICES[4:], DEVICES[6:2:-1], [DEVICES[i] for i in (7, 0, 5, 2)])
    loads(jax.jit(double_and_sum), lambda d: (put(d),), DEVICES[2:6], *moved)


def a_permuted_full_mesh() -> None:
    permuted = [DEVICES[i] for i in (3, 1, 2, 0, 7, 6, 5, 4)]
    loads(jax.jit(double_and_sum), lambda d: (put(d),), permuted, DEVICES, DEVICES[::-1])


def explicit_axes() -> None:
    def arguments(devices: Devices) -> tuple[jax.Array]:
        mesh = mesh_of(devices, AxisType.Explicit)
        return (jax.device_put(VALUE, NamedSharding(mesh, PartitionSpec("y"))),)

    loads(jax.jit(lambda x: (2 * x, x.sum())), arguments, DEVICES[2:6], DEVICES[4:], DEVICES[3::-1])


def typed_keys() -> None:
    def arguments(devices: Devices) -> tuple[jax.Array, jax.Array]:
        sharding = NamedSharding(mesh_of(devices), PartitionSpec())
        return jax.device_put(jax.random.key(7), sharding), put(devices)

    jitted = jax.jit(lambda key, x: (jax.random.split(key), x + jax.random.normal(key, x.shape)))
    loads(jitted, arguments, DEVICES[2:4], DEVICES[5:3:-1])


def donated_arguments() -> None:
    jitted = jax.jit(lambda x, y: (x + y, y.sum()), donate_argnums=0)
    loads(jitted, lambda d: (put(d), put(d)), DEVICES[2:6], DEVICES[7:3:-1])
    jitted = jax.jit(lambda x: x + 1, donate_argnums=0)
    loads(jitted, lambda d: (jax.device_put(VALUE, d[0]),), DEVICES[2:3], DEVICES[:1])


def outputs_on_other_shardings() -> None:
    class Jitted:
        """The output's shardings are compiled in, and name the devices of the arguments."""

        def lower(self, x: jax.Array) -> Any:
            mesh = x.sharding.mesh
            whole, swapped, other = (
                NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), (("y", "x"),), ("y",))
            )
            jitted = jax.jit(lambda x: (x + 1, x + 2, x + 3), out_shardings=(whole, swapped, other))
            return jitted.lower(x)

    loads(Jitted(), lambda d: (put(d),), DEVICES[2:6], DEVICES[4:], DEVICES[3::-1])


def replicas_of_pmap() -> None:
    for count in (8, 2):
        value = np.arange(count * 3, dtype=np.float32).reshape(count, 3)

        def right(x: np.ndarray) -> np.ndarray:
            return x + x.sum(0)

        def call(x: Any) -> Any:
            return x + jax.lax.psum(x, "i")

        compiled = jax.pmap(call, "i", devices=DEVICES[:count]).lower(value).compile()
        serialized = serialize(compiled)
        for named in (None, DEVICES[:count], DEVICES[::-1][:count]):
            given = {} if named is None else {"execution_devices": named}
            result = deserialize_and_load(*serialized, **given)(value)
            np.testing.assert_array_equal(np.asarray(result), right(value))
            where = {shard.device: shard.index[0].start for shard in result.addressable_shards}
            assert [*where] == [*(named or DEVICES[:count])], where


# --- through the class, its subclasses and its copies

Unpickler = serialize_executable._JaxPjrtUnpickler
recorded = DEVICES[5:3:-1] or DEVICES  # of two, for the last case
payload, in_tree, out_tree = serialize(jax.jit(double_and_sum).lower(put(recorded)).compile())
client = DEVICES[0].client


def runs(unpickler: Any, devices: Devices) -> None:
    unloaded, *_ = unpickler.load()
    doubled, total = unloaded.load().unsafe_call(put(devices))
    right, _ = jax.jit(double_and_sum)(put(devices))
    assert placed(doubled) == placed(right), (placed(doubled), placed(right))
    assert total == VALUE.sum()
    assert {shard.device for shard in total.addressable_shards} == {*devices}


def each_way(unpickler: Any) -> None:
    others = DEVICES[6:]
    runs(unpickler(io.BytesIO(payload), client), recorded)
    runs(unpickler(io.BytesIO(payload), client, None), recorded)
    runs(unpickler(file=io.BytesIO(payload), backend=client), recorded)
    runs(unpickler(io.BytesIO(payload), client, recorded), recorded)
    runs(unpickler(io.BytesIO(payload), client, recorded[::-1]), recorded[::-1])
    runs(unpickler(io.BytesIO(payload), client, execution_devices=others), others)
    behind = io.BytesIO(b"behind" + payload)
    behind.seek(6)
    runs(unpickler(behind, client), recorded)


def the_class() -> None:
    each_way(Unpickler)


class Counting(Unpickler):  # type: ignore[misc, valid-type, unused-ignore]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[str] = []

    def persistent_load(self, pid: Any) -> Any:
        self.seen.append(pid[0])
        return super().persistent_load(pid)

    def load(self) -> Any:
        loaded = super().load()
        assert self.seen.count("exec") == 1
        assert "device" in self.seen
        return loaded


def a_subclass_that_overrides_methods() -> None:
    each_way(Counting)


class LoadsItself(Unpickler):  # type: ignore[misc, valid-type, unused-ignore]
    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "exec":
            return super().persistent_load(pid)
        return self.backend.deserialize_executable(
            pid[1], executable_devices=self.execution_devices
        )


def a_subclass_that_loads_the_executable_itself() -> None:
    runs(LoadsItself(io.BytesIO(payload), client), recorded)
    runs(LoadsItself(io.BytesIO(payload), client, recorded), recorded)


class TellsOfOthers(Unpickler):  # type: ignore[misc, valid-type, unused-ignore]
    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "device":
            return DEVICES[pid[1] + 2]
        return super().persistent_load(pid)


class SetsItsTable(Unpickler):  # type: ignore[misc, valid-type, unused-ignore]
    def __init__(self, file: Any, backend: Any) -> None:
        super().__init__(file, backend)
        self.devices_by_id = {device.id - 2: device for device in DEVICES}


def a_subclass_that_names_other_devices() -> None:
    others = [DEVICES[device.id + 2] for device in recorded]
    runs(TellsOfOthers(io.BytesIO(payload), client), others)
    runs(SetsItsTable(io.BytesIO(payload), client), others)
    afterwards = Unpickler(io.BytesIO(payload), client)
    afterwards.devices_by_id = {device.id - 2: device for device in DEVICES}
    runs(afterwards, others)
    afterwards = Unpickler(io.BytesIO(payload), client)
    for device in recorded:
        afterwards.devices_by_id[device.id] = DEVICES[device.id + 2]
    runs(afterwards, others)


def a_third_party_copy() -> None:
    import jaxcompat

    jaxcompat.patch_unpickler("vendored.same:_JaxPjrtUnpickler")
    same = importlib.import_module("vendored.same")
    assert same._JaxPjrtUnpickler is not Unpickler
    each_way(same._JaxPjrtUnpickler)


def devices_of_a_second_client() -> None:
    from jax._src.lib import xla_client

    there = xla_client.make_cpu_client().devices()
    loads(jax.jit(double_and_sum), lambda d: (put(d),), DEVICES[4:2:-1], there[1:3])
    runs(Unpickler(io.BytesIO(payload), client, there[3:1:-1]), there[3:1:-1])


# --- what is wrong is said


def says(words: str, body: Callable[[], Any]) -> None:
    try:
        body()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError("nothing was raised")


def load(**given: Any) -> Any:
    return deserialize_and_load(payload, in_tree, out_tree, **given)


def another_number_of_devices() -> None:
    for devices in (DEVICES, DEVICES[:1]):
        told = f"compiled for 2 devices (id 5, 4), and `execution_devices` names {len(devices)}"
        says(told, lambda named=devices: load(execution_devices=named))
        says(told, lambda named=devices: Unpickler(io.BytesIO(payload), client, named).load())
    says("names id 3 more than once", lambda: load(execution_devices=[DEVICES[3]] * 2))


def a_device_that_is_not_there(directory: str) -> None:
    """Called with 8 devices, and then with 2."""
    saved = Path(directory) / "executable"
    if len(DEVICES) == 8:
        saved.write_bytes(pickle.dumps((payload, in_tree, out_tree)))
        return
    serialized = pickle.loads(saved.read_bytes())
    says(
        "The executable was compiled for 2 devices (id 5, 4), which 'cpu' does not have here: "
        "id 5, 4. Name the devices to load it onto, in that order: "
        "execution_devices=jax.local_devices()[:2], for instance.",
        lambda: deserialize_and_load(*serialized),
    )
    doubled, _ = deserialize_and_load(*serialized, execution_devices=DEVICES)(put(DEVICES))
    np.testing.assert_array_equal(np.asarray(doubled), 2 * VALUE + 1)
    assert placed(doubled) == placed(put(DEVICES) * 2 + 1)


MENDED = [
    one_device,
    a_device_other_than_the_first,
    a_sub_mesh,
    a_permuted_full_mesh,
    explicit_axes,
    typed_keys,
    donated_arguments,
    outputs_on_other_shardings,
    replicas_of_pmap,
    the_class,
    a_subclass_that_overrides_methods,
    a_subclass_that_names_other_devices,
    a_third_party_copy,
    another_number_of_devices,
]
WITH_EXECUTION_DEVICES = [a_subclass_that_loads_the_executable_itself, devices_of_a_second_client]
"""JAX 0.6.0 loads them onto none, and onto those of no other client."""

if __name__ == "__main__":
    if sys.argv[1] == a_device_that_is_not_there.__name__:
        a_device_that_is_not_there(sys.argv[2])
    for case in [*MENDED, *WITH_EXECUTION_DEVICES]:
        if case.__name__ in sys.argv[1:]:
            case()
            print(case.__name__, flush=True)
