"""What `jax-aot-devices` reads of a payload, and where `jax-aot-lapack` searches an executable."""

from __future__ import annotations

import inspect
import io
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcompat.patch import Argument
from jaxcompat.patches import jax_aot_lapack as lapack
from jaxcompat.patches.jax_aot_devices import Recorded, read


class Persistent:
    """What is pickled as a persistent id: a device, or the executable."""

    def __init__(self, *pid: Any) -> None:
        self.pid = pid


class UnloadedPmapExecutable:
    """A class of the name that JAX gives the executables of `jax.pmap`."""


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Persistent) else None


def dumped(obj: Any, protocol: int = 4) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol).dump(obj)
    return file.getvalue()


def read_bytes(payload: bytes, at: int = 0) -> Recorded:
    file = io.BytesIO(payload)
    file.seek(at)
    found = read(file)
    assert file.tell() == at
    return found


IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300, unique=True)
EXECUTABLES = st.one_of(
    st.binary(max_size=200),
    st.integers(1 << 16, 1 << 18).map(bytes),  # passed over
)


def payload(ids: list[int], executable: bytes, protocol: int = 4, **others: Any) -> bytes:
    """Return a pickle in JAX's order: the executable, its devices, and what else there is."""
    devices = [Persistent("device", one) for one in ids]
    return dumped(
        [others, Persistent("exec", executable), devices, others, devices[::-1]], protocol
    )


@given(IDS, EXECUTABLES, st.sampled_from([3, 4, 5]), st.integers(0, 9))
def test_the_devices_are_read_in_assignment_order(
    ids: list[int], executable: bytes, protocol: int, behind: int
) -> None:
    data = bytes(behind) + payload(ids, executable, protocol, shape=(8, 2), name="jit_f")
    assert read_bytes(data, behind) == Recorded(tuple(ids))


@given(IDS, st.binary(max_size=200), st.data())
def test_a_device_named_twice_in_the_memo_is_found_again(
    ids: list[int], executable: bytes, data: st.DataObject
) -> None:
    # Equal ids are one object here, and so the pickle gets them from its memo.
    chosen = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=50))
    assert read_bytes(payload(chosen, executable)) == Recorded(tuple(chosen))


@given(st.binary(max_size=400))
def test_of_what_is_no_payload_nothing_is_read(data: bytes) -> None:
    assert read_bytes(data) == Recorded()


@given(IDS, EXECUTABLES, st.floats(0, 1))
def test_of_a_truncated_payload_no_more_is_read_than_there_is(
    ids: list[int], executable: bytes, part: float
) -> None:
    whole = payload(ids, executable)
    found = read_bytes(whole[: int(part * len(whole))])
    assert found.ids == tuple(ids[: len(found.ids)])


def test_devices_before_the_executable_are_not_its_own() -> None:
    devices = [Persistent("device", one) for one in (3, 1)]
    assert read_bytes(dumped([devices, Persistent("exec", b"")])) == Recorded()
    found = read_bytes(dumped([devices, Persistent("exec", b""), devices[::-1], 0, devices]))
    assert found == Recorded((1, 3))


def test_a_pmap_executable_is_known_by_its_class() -> None:
    data = dumped([UnloadedPmapExecutable, Persistent("exec", b""), [Persistent("device", 2)]])
    assert read_bytes(data) == Recorded((2,), replicas=True)


@pytest.mark.parametrize(
    "file",
    [None, object(), io.StringIO("text"), b"bytes", open],
    ids=["None", "an object", "text", "bytes", "a function"],
)
def test_of_what_is_no_binary_file_nothing_is_read(file: Any) -> None:
    assert read(file) == Recorded()


def test_a_file_that_cannot_seek_is_left_where_it_is() -> None:
    class Pipe(io.BytesIO):
        def seek(self, *args: int) -> int:
            raise OSError("this cannot seek")

    pipe = Pipe(payload([1], b""))
    assert read(pipe) == Recorded()
    assert pipe.tell() == 0


def test_the_executable_is_not_copied() -> None:
    class File(io.BytesIO):
        longest = 0

        def read(self, count: int | None = -1, /) -> bytes:
            found = super().read(count)
            self.longest = max(self.longest, len(found))
            return found

    file = File(payload([5, 4], bytes(1 << 22)))
    assert read(file) == Recorded((5, 4))
    assert file.longest < 1 << 17


# --- one argument of a call ----------------------------------------------------------------------


def called(a: Any, b: Any = None, *, c: Any = None) -> tuple[Any, ...]:
    return a, b, c


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, 2), {}),
    ((1,), {"b": 2}),
    ((), {"a": 1, "b": 2, "c": 3}),
    ((1, 2), {"c": 3}),
    ((1,), {"c": 3}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_an_argument_is_found_replaced_and_dropped(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    signature, before = inspect.signature(called), dict(kwargs)
    argument = Argument(signature, name)
    bound = signature.bind(*args, **kwargs).arguments
    assert argument.get(args, kwargs) == bound.get(name)
    changed_args, changed_kwargs = argument.put(args, kwargs, "new")
    assert signature.bind(*changed_args, **changed_kwargs).arguments == {**bound, name: "new"}
    # What stands behind a dropped one moves up; only the last parameter is ever dropped.
    if name == [*signature.parameters][-1] or name in kwargs:
        left_args, left_kwargs = argument.drop(args, kwargs)
        left = signature.bind_partial(*left_args, **left_kwargs).arguments
        assert left == {key: value for key, value in bound.items() if key != name}
    assert kwargs == before


def test_an_argument_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not in list"):
        Argument(inspect.signature(called), "d")


# --- where the names of LAPACK's functions are searched -------------------------------------------


def varint(number: int) -> bytes:
    digits = [number >> shift & 127 for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])


def field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field of protobuf's."""
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def constant(literal: bytes, *, metadata: bool = True) -> bytes:
    """Return an HloInstructionProto of a constant, as XLA writes its fields."""
    return (
        field(1, b"constant.1")
        + field(2, b"constant")
        + field(3, b"\x10\x0b\x1a\x01\x08")
        + (field(7, b"\x12\x05jit_f") if metadata else b"")
        + field(8, literal)
    )


NAME = b"lapack_spotrf_ffi"
SHORT, LONG = 4096, 4097
PADDING = bytes(1 << 20)
PARTS = st.lists(
    st.one_of(
        st.binary(max_size=50),
        st.builds(
            constant,
            st.sampled_from([0, 1, 127, 128, SHORT, LONG, 20000]).map(bytes),
            metadata=st.booleans(),
        ),
    ),
    max_size=8,
)


def searched(executable: bytes) -> bytes:
    """Return all that is searched, and see that it is in order."""
    spans = [*lapack._spans(executable)]
    ends = [place for span in spans for place in span]
    assert ends == sorted(ends)
    assert ends[0] == 0
    assert ends[-1] == len(executable)
    return b"|".join(executable[start:end] for start, end in spans)


@given(PARTS, PARTS)
def test_a_name_outside_of_literals_is_found(before: list[bytes], behind: list[bytes]) -> None:
    executable = b"".join([*before, NAME, *behind])
    for padded in (executable, executable + PADDING, PADDING + executable):
        assert NAME in searched(padded)


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("metadata", [False, True])
def test_long_literals_are_passed_over(length: int, metadata: bool) -> None:
    executable = constant(NAME.ljust(length), metadata=metadata) + PADDING
    assert (NAME in searched(executable)) == (length == SHORT)


@given(st.integers(1, LONG + 40))
def test_a_literal_that_is_cut_off_is_searched(missing: int) -> None:
    cut = PADDING + constant(NAME.ljust(LONG))[:-missing]
    assert (NAME in searched(cut)) == (NAME in cut)


@pytest.mark.parametrize(
    "unit", [b"\x1a\x0a\x12\x08constant", b"\x12\x08constant\x1a\x00\x3a\x00", b"\x12\x08constant"]
)
def test_the_search_is_linear_in_a_crafted_executable(
    unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, original = [0], lapack._field

    def counted(data: bytes, at: int) -> tuple[int, int, int]:
        steps[0] += 1
        return original(data, at)

    monkeypatch.setattr(lapack, "_field", counted)
    executable = unit * ((1 << 20) // len(unit) + 10)
    searched(executable)
    assert 0 < steps[0] <= 3 * executable.count(b"constant")


def test_the_names_are_those_of_the_installed_jaxlib() -> None:
    pytest.importorskip("jaxlib.lapack")
    beginnings = lapack._beginnings()
    assert b"lapack_" in beginnings
    assert lapack.names_lapack(b"...lapack_sgetrf_ffi...")
    assert not lapack.names_lapack(b"...cublas_gemm...")
