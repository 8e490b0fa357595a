"""Each patch on the installed pair: its canary, and what else must hold there."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from packaging.version import Version

from jaxcompat import canary, known, versions
from jaxcompat.patch import catalogue

from .conftest import PROGRAMS

Program = Callable[..., canary.Run]
Python = Callable[..., "CompletedProcess[str]"]

INSTALLED = versions.Installed()
ORBAX = Version(INSTALLED["orbax-checkpoint"] or "0")
STATE = {
    patch.id: versions.judge(patch.affected, INSTALLED).state for patch in catalogue().values()
}
PAIR = INSTALLED.describe(versions.CEILING)

MESH = "Received incompatible devices for jitted computation"


def upstream_says(patch_id: str, run: canary.Run) -> bool:
    """Whether one of the errors is told that a patch's symptom quotes."""
    quoted = re.findall(r'"([^"]+)"', catalogue()[patch_id].symptom)
    assert quoted, f"{patch_id} quotes no error"
    return any(text in str(run) for text in quoted)


@pytest.mark.parametrize("patch_id", catalogue())
def test_canary_bare(patch_id: str) -> None:
    run = canary.run(canary.path(patch_id), patched=False)
    if STATE[patch_id] == "affected":
        assert not run.passed, f"{patch_id} is not needed on {PAIR}, its range is too wide"
        assert upstream_says(patch_id, run), run
    else:
        assert run.passed, f"{patch_id} is needed on {PAIR}, its range is too narrow\n{run}"


@pytest.mark.parametrize("patch_id", catalogue())
def test_canary_patched(patch_id: str) -> None:
    run = canary.run(canary.path(patch_id), patched=True)
    assert run.passed, f"on {PAIR}\n{run}"


AFFECTED = [patch_id for patch_id in catalogue() if STATE[patch_id] == "affected"]
SILENT = [patch_id for patch_id in AFFECTED if catalogue()[patch_id].aftermath]


@pytest.mark.parametrize("patch_id", AFFECTED)
def test_switched_off_it_bites_again(patch_id: str) -> None:
    off = patch_id
    if patch_id == "orbax-single-replica-mesh" and Version("0.12.7") <= ORBAX:
        # All that is left of its fault lies within the broadcast there, which the other mends too.
        off += ",orbax-broadcast-mesh"
    run = canary.run(canary.path(patch_id), patched=True, environment={"JAXCOMPAT_DISABLE": off})
    assert not run.passed
    assert upstream_says(patch_id, run), run


@pytest.mark.parametrize(
    ("off", "other"),
    [
        (off, other)
        for off in AFFECTED
        for other in AFFECTED
        if off != other and {off, other} & {*SILENT} and "orbax" in off and "orbax" in other
    ],
)
def test_switched_off_it_brings_no_other_fault_back(off: str, other: str) -> None:
    run = canary.run(canary.path(other), patched=True, environment={"JAXCOMPAT_DISABLE": off})
    assert run.passed, f"on {PAIR}, without {off}\n{run}"


AOT = [patch_id for patch_id in AFFECTED if patch_id.startswith("jax-aot-")]


@pytest.mark.parametrize("patch_id", AOT)
def test_each_aot_patch_is_right_alone(patch_id: str) -> None:
    off = ",".join(other for other in AOT if other != patch_id)
    run = canary.run(canary.path(patch_id), patched=True, environment={"JAXCOMPAT_DISABLE": off})
    assert run.passed, f"on {PAIR}, without {off}\n{run}"


IMPORT_ALL = """
import json, sys
before = list(sys.meta_path)
import jaxcompat
hooks = len(sys.meta_path) - len(before)
import jax, jax.experimental.serialize_executable, orbax.checkpoint
from jaxcompat.engine import _Drifted, _find
from jaxcompat.patch import catalogue
upstream, ours = [], []
for patch in catalogue().values():
    for site in patch.sites:
        try:
            _, target, _ = _find(site, sys.modules[site.module])
        except (KeyError, _Drifted):  # a module or a name that these versions do not have
            continue
        if isinstance(target, type(sys)):  # a module, or what stands in for it
            is_ours = target is not sys.modules[target.__name__]
        else:
            code = getattr(target, "__code__", None)
            is_ours = bool(code) and "/jaxcompat/" in code.co_filename.replace("\\\\", "/")
        (ours if is_ours else upstream).append(site.target)
print(json.dumps({
    "hooks": hooks, "upstream": upstream, "ours": ours,
    "states": {s.id: s.state for s in jaxcompat.status()},
    "patched": {s.id: s.patched for s in jaxcompat.status()},
}))
"""


def imported(python: Python, **environment: str) -> dict[str, object]:
    ran = python("-c", IMPORT_ALL, **environment)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(ran.stdout)
    return found


def test_what_is_affected_is_applied_and_nothing_else_is_touched(python: Python) -> None:
    found = imported(python)
    applied = {patch_id for patch_id, state in STATE.items() if state == "affected"}
    assert found["states"] == {
        patch_id: "applied" if patch_id in applied else "unaffected" for patch_id in STATE
    }
    patched = found["patched"]
    assert isinstance(patched, dict)
    assert {patch_id for patch_id, sites in patched.items() if sites} == applied
    assert set(found["ours"]) == {site for sites in patched.values() for site in sites}  # type: ignore[call-overload]


def test_everything_off_leaves_no_hook_and_no_wrapper(python: Python) -> None:
    found = imported(python, JAXCOMPAT_DISABLE="1")
    assert found["hooks"] == 0
    assert found["ours"] == []
    assert found["upstream"]
    assert set(found["states"].values()) == {"disabled"}  # type: ignore[attr-defined]


def test_import_brings_in_none_of_the_packages_it_mends(python: Python) -> None:
    ran = python(
        "-c",
        "import sys, jaxcompat; print(sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'jax', 'jaxlib', 'numpy', 'orbax'}))",
    )
    assert ran.stdout == "[]\n", ran.stderr


def test_two_processes_restore_under_every_mesh(program: Program) -> None:
    run = program("restore.py", patched=True)
    assert run.passed, run
    for rank, output in enumerate(run.outputs):
        # No mesh; and {Auto, Explicit} x {same, permuted, foreign, smaller} x {around, set}.
        assert output.count(f"rank {rank}: ") == 1 + 2 * 4 * 2, run


def roundtrip(program: Program, *, patched: bool, paths: str, **environment: str) -> list[str]:
    """Return what differs after a restore, as ``path, dtype: what``; all ranks together."""
    run = program(
        "roundtrip.py", patched=patched, ROUNDTRIP_PATHS=paths, time_limit=400, **environment
    )
    assert run.passed, run
    told = [
        json.loads(line)
        for output in run.outputs
        for line in output.splitlines()
        if line.startswith("{")
    ]
    counts = [one for one in told if "leaves" in one]
    assert len(counts) == len(run.outputs)
    assert all(one["leaves"] > 50 for one in counts)
    # What is saved together can be: an error there would hide every difference.
    assert not [one for one in told if one.get("group") == "all others"], run
    return sorted(
        {
            f"{one['path']}, {one['group']}: {one['outcome']}"
            for one in told
            if one.get("outcome", "error") != "error"
        }
    )


BROADCASTS = "single replica;single replica, axis 1;single replica, split;broadcast"
SHARD_MAP = "single replica, shard_map;broadcast, shard_map"


@pytest.mark.skipif(Version("0.11.17") > ORBAX, reason="no restore on CPU before 0.11.17")
@pytest.mark.parametrize("x64", ["0", "1"])
def test_two_processes_restore_every_dtype_bit_for_bit(program: Program, x64: str) -> None:
    different = roundtrip(
        program, patched=True, paths=f"{BROADCASTS};{SHARD_MAP}", JAX_ENABLE_X64=x64
    )
    assert different == []


OTHERS = (
    "standard;standard, no target;async;pytree;pytree, no target;manager;manager, pytree;"
    "v1;v1, no target;v1, async;emergency, local;emergency, persistent"
)
KNOWN_HERE = {entry.id for entry in known.here(INSTALLED)}


def is_known(difference: str) -> bool:
    """Whether a row of what is known and not mended explains it."""
    path, dtype, outcome = re.split(", (?=[^,]*: )|: ", difference)
    if outcome == "memory":
        return "orbax-memory-kind" in KNOWN_HERE and path.endswith("no target")
    return (
        outcome == "bytes"
        and "jax-cpu-nan-payload" in KNOWN_HERE
        and dtype.startswith(("bfloat16", "float8"))
    )


@pytest.mark.search
@pytest.mark.skipif(
    Version("0.11.30") <= ORBAX and Version(INSTALLED["jax"] or "0") < Version("0.7.1"),
    reason="saving a leaf with replicas fails there, with or without a mesh",
)
def test_every_other_path_restores_what_was_saved_but_for_what_is_known(program: Program) -> None:
    different = roundtrip(program, patched=True, paths=OTHERS)
    assert [one for one in different if not is_known(one)] == []


@pytest.mark.search
@pytest.mark.skipif(Version("0.11.17") > ORBAX, reason="no restore on CPU before 0.11.17")
def test_bare_what_is_restored_differs(program: Program) -> None:
    different = roundtrip(program, patched=False, paths="broadcast")
    for dtype, what in (
        ("bool", "dtype"),
        ("int8", "dtype"),
        ("uint16", "dtype"),
        ("float32", "bytes"),
        ("bfloat16", "bytes"),
        ("complex64", "bytes"),
        ("float8_e8m0fnu", "bytes"),
    ):
        assert f"broadcast, {dtype}: {what}" in different
    int32 = "broadcast, int32: bytes"  # zeros in the other replica
    assert (int32 in different) == (STATE["orbax-broadcast-zeros"] == "affected")


MERGED = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "int64",
    "float64",
    "complex128",
]


def test_the_merge_moves_no_more_bytes_than_upstreams(python: Python) -> None:
    moved = []
    for start in ((), ("-m", "jaxcompat", "run")):
        ran = python(*start, "merge_bytes.py", *MERGED, JAX_ENABLE_X64="1")
        assert ran.returncode == 0, ran.stderr
        moved.append(json.loads(ran.stdout))
    bare, patched = moved
    assert bare.keys() == patched.keys()
    assert bare["float32"] == patched["float32"] == 64 * 64 * 4 / 4
    assert all(0 < patched[dtype] <= bare[dtype] for dtype in bare), moved


@pytest.mark.skipif(Version("0.11.17") > ORBAX, reason="no restore on CPU before 0.11.17")
@pytest.mark.parametrize("patched", [False, True])
def test_readme_tells_what_an_earlier_restore_got_wrong(program: Program, patched: bool) -> None:
    run = program("earlier.py", patched=patched)
    assert run.passed, run
    wrong = {"['mask']", "['scale']", "['steps']"}  # bool, -0.0 and int8
    zeros = STATE["orbax-broadcast-zeros"] == "affected"
    for rank, output in enumerate(run.outputs):
        (line,) = re.findall(rf"^rank {rank}:(.*)$", output, re.MULTILINE)
        got = set(line.split())
        if patched:
            assert got == set(), run
        elif zeros:  # The source is not added to, and keeps its -0.0; the other holds no value.
            assert got == ({*wrong, "['kernel']"} if rank else wrong - {"['scale']"}), run
        else:
            assert got == wrong, run


def test_two_processes_fail_under_a_mesh_without_its_patches(program: Program) -> None:
    # One of the two is needed everywhere: the broadcast's is, to the newest release.
    off = "orbax-single-replica-mesh,orbax-broadcast-mesh"
    run = program("restore.py", patched=True, JAXCOMPAT_DISABLE=off)
    assert not run.passed
    assert MESH in str(run), run
    assert all(f"rank {rank}: none" in output for rank, output in enumerate(run.outputs)), run


@pytest.mark.skipif(Version("0.11.26") > ORBAX, reason="no restore in one process before 0.11.26")
def test_the_mesh_is_the_callers_in_every_other_task_and_after_every_end(program: Program) -> None:
    run = program("one_loop.py", patched=True)
    assert run.passed, run
    assert "cancelled" in run.outputs[0]


def cases(program: str, name: str) -> list[str]:
    """Return the names of the cases that one of the program's lists holds."""
    for node in ast.parse((PROGRAMS / program).read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.List(elts=elements)):
                if found == name:
                    return [case.id for case in elements if isinstance(case, ast.Name)]
    raise LookupError(name)


needs_execution_devices = pytest.mark.skipif(
    STATE["jax-aot-backend"] != "affected", reason="this JAX has no execution_devices"
)


@needs_execution_devices
@pytest.mark.parametrize("case", cases("aot.py", "MENDED"))
def test_aot_mended(python: Python, case: str) -> None:
    bare = python("aot.py", case, JAXCOMPAT_DISABLE="1")
    assert bare.returncode != 0, "bare JAX does it as well"
    patched = python("-m", "jaxcompat", "run", "aot.py", case)
    assert patched.returncode == 0, patched.stderr


@needs_execution_devices
@pytest.mark.parametrize("case", cases("aot.py", "UNTOUCHED"))
def test_aot_untouched(python: Python, case: str) -> None:
    bare = python("aot.py", case, JAXCOMPAT_DISABLE="1")
    assert bare.returncode == 0, bare.stderr
    patched = python("-m", "jaxcompat", "run", "aot.py", case)
    assert patched.returncode == 0, patched.stderr


DEVICES = cases("aot_devices.py", "MENDED")
if STATE["jax-aot-backend"] == "affected":
    DEVICES += cases("aot_devices.py", "WITH_EXECUTION_DEVICES")


@pytest.mark.parametrize("case", DEVICES)
def test_aot_devices_bare(python: Python, case: str) -> None:
    bare = python("aot_devices.py", case, JAXCOMPAT_DISABLE="1")
    assert bare.returncode != 0, "bare JAX does it as well"


def test_aot_devices_mended(python: Python) -> None:
    patched = python("-m", "jaxcompat", "run", "aot_devices.py", *DEVICES)
    assert patched.returncode == 0, patched.stdout + patched.stderr
    assert patched.stdout.split() == DEVICES


def test_aot_devices_that_are_not_there_are_an_error_that_names_them(
    python: Python, tmp_path: Path
) -> None:
    for devices in (8, 2):
        ran = python(
            *("-m", "jaxcompat", "run", "aot_devices.py"),
            *("a_device_that_is_not_there", str(tmp_path)),
            XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
        )
        assert ran.returncode == 0, ran.stderr


def test_aot_executables_of_two_processes_and_of_the_other_one(program: Program) -> None:
    bare = program("aot_two.py", patched=False)
    assert not bare.passed, "bare JAX does it as well"
    run = program("aot_two.py", patched=True)
    assert run.passed, run
    for rank, output in enumerate(run.outputs):
        assert f"rank {rank}: everywhere" in output
        assert f"rank {rank}: from the other" in output


def test_aot_junk_ends_as_it_does_bare(python: Python) -> None:
    told = []
    for off in ("1", ""):
        ran = python("-m", "jaxcompat", "run", "aot_junk.py", JAXCOMPAT_DISABLE=off)
        assert ran.returncode == 0, ran.stderr
        # XLA says where it stopped to read, which is another place each time.
        lines = re.sub(r"byte \d+", "byte N", ran.stdout).splitlines()
        told.append(dict(line.split(": ", 1) for line in lines))
    bare, patched = told
    assert bare.keys() == patched.keys()
    assert len(bare) > 80
    assert patched["whole"] == "tuple"
    clear = "ValueError: The executable was compiled for 2 devices (id 0, 77), which 'cpu'"
    for name, outcome in bare.items():
        of_ours = name.startswith("no executable, protocol ") and patched[name].startswith(clear)
        assert of_ours or patched[name] == outcome, name


def test_aot_reading_the_devices_runs_nothing_of_a_hostile_pickle(
    python: Python, tmp_path: Path
) -> None:
    ran = python("-m", "jaxcompat", "run", "aot_junk.py", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
