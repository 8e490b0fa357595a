"""Running canaries, with toy programs: what comes back, and what they see."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from jaxcompat import canary


def _program(tmp_path: Path, source: str) -> Path:
    file = tmp_path / "toy_canary.py"
    file.write_text(dedent(source), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("source", "processes"),
    [
        ("", 1),
        ("PROCESSES = 2", 2),
        ("import no_such_module\nPROCESSES = 4\nraise SystemExit", 4),
        ("def f():\n    PROCESSES = 3", 1),
    ],
)
def test_how_many_processes_is_read_and_not_run(
    tmp_path: Path, source: str, processes: int
) -> None:
    assert canary.literal(_program(tmp_path, source), "PROCESSES", 1) == processes


@pytest.mark.parametrize("patched", [True, False])
def test_a_canary_knows_of_jaxcompat_only_when_patched(tmp_path: Path, patched: bool) -> None:
    program = _program(tmp_path, "import sys; print('jaxcompat' in sys.modules)")
    run = canary.run(program, patched=patched)
    assert run.passed
    assert run.outputs == (f"{patched}\n",)


@pytest.mark.parametrize(("code", "passed"), [(0, True), (1, False), (7, False)])
def test_a_canary_passes_when_it_exits_with_0(tmp_path: Path, code: int, passed: bool) -> None:
    run = canary.run(_program(tmp_path, f"raise SystemExit({code})"), patched=False)
    assert run.returncodes == (code,)
    assert run.passed is passed
    assert not run.timed_out


def test_each_process_gets_its_rank_a_coordinator_and_one_directory(tmp_path: Path) -> None:
    program = _program(
        tmp_path,
        """
        PROCESSES = 2
        import json, os, sys
        print(json.dumps([*sys.argv[1:], os.path.isdir(sys.argv[3]), os.environ["XLA_FLAGS"]]))
        """,
    )
    run = canary.run(program, patched=False)
    first, second = map(json.loads, run.outputs)
    assert (first[0], second[0]) == ("0", "1")
    assert first[1:] == second[1:]
    assert first[1].startswith("127.0.0.1:")
    assert first[3] is True
    assert first[4].endswith("--xla_force_host_platform_device_count=4")


@pytest.mark.parametrize(("patched", "disable"), [(True, ""), (False, "1")])
def test_the_callers_switches_do_not_reach_a_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: bool, disable: str
) -> None:
    for name in ("DISABLE", "FORCE", "STRICT"):
        monkeypatch.setenv(f"JAXCOMPAT_{name}", "orbax-*")
    program = _program(
        tmp_path,
        """
        import json, os
        print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("JAXCOMPAT_")}))
        """,
    )
    (output,) = canary.run(program, patched=patched).outputs
    assert json.loads(output) == {"JAXCOMPAT_DISABLE": disable}


def test_the_environment_that_is_given_wins(tmp_path: Path) -> None:
    program = _program(
        tmp_path, "import os; print(os.environ['JAX_PLATFORMS'], os.environ['MINE'])"
    )
    environment = {"JAX_PLATFORMS": "toy", "MINE": "1"}
    (output,) = canary.run(program, patched=False, environment=environment).outputs
    assert output == "toy 1\n"


def test_a_canary_that_hangs_is_killed_and_said_to_be_out_of_time(tmp_path: Path) -> None:
    program = _program(tmp_path, "import time; print('begins', flush=True); time.sleep(60)")
    run = canary.run(program, patched=False, time_limit=1.0)
    assert run.timed_out
    assert not run.passed
    assert run.returncodes[0] < 0
    assert run.outputs == ("begins\n",)
    assert run.seconds < 20
    assert "time is up" in str(run)


def test_when_one_process_has_failed_the_others_are_not_waited_for_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "_GRACE", 0.2)
    program = _program(
        tmp_path,
        """
        PROCESSES = 2
        import sys, time
        if sys.argv[1] == "0":
            raise SystemExit("the one that fails")
        time.sleep(60)
        """,
    )
    run = canary.run(program, patched=False, time_limit=50.0)
    assert run.returncodes[0] == 1
    assert run.returncodes[1] < 0
    assert not run.timed_out
    assert run.seconds < 20
    assert "process 0 ended with 1\nthe one that fails" in str(run)


def test_output_that_is_no_text_is_kept(tmp_path: Path) -> None:
    program = _program(tmp_path, r"import os; os.write(1, b'\xff!\n')")
    assert canary.run(program, patched=False).outputs == ("\ufffd!\n",)


TWO_ON_EIGHT = "PROCESSES = 2\nDEVICES = 8"


@pytest.mark.parametrize(
    ("source", "platform", "available", "expected"),
    [
        ("DEVICES = 1", "gpu", 1, [{}]),
        ("", "tpu", 8, [{}]),
        ("", "gpu", 7, None),
        (TWO_ON_EIGHT, "gpu", 8, ["0,1,2,3", "4,5,6,7"]),
        (TWO_ON_EIGHT, "gpu", 4, None),
        (TWO_ON_EIGHT, "tpu", 8, None),
        ("DEVICES = 1", "cpu", 1, None),
    ],
)
def test_devices_are_the_default_platforms_where_it_has_enough(
    tmp_path: Path, source: str, platform: str, available: int, expected: list[object] | None
) -> None:
    found = canary.device_variables(_program(tmp_path, source), platform, available)
    if expected is None:
        processes = canary.literal(_program(tmp_path, source), "PROCESSES", 1)
        each = canary.literal(_program(tmp_path, source), "DEVICES", 8) // processes
        assert [share["JAX_PLATFORMS"] for share in found] == ["cpu"] * processes
        assert all(
            share["XLA_FLAGS"].endswith(f"--xla_force_host_platform_device_count={each}")
            for share in found
        )
    else:
        assert [share.get("CUDA_VISIBLE_DEVICES", {}) for share in found] == expected


def test_gpus_are_shared_out_of_those_that_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,a,b")
    program = _program(tmp_path, "PROCESSES = 2\nDEVICES = 4")
    shares = [share["CUDA_VISIBLE_DEVICES"] for share in canary.device_variables(program, "gpu", 4)]
    assert shares == ["8,9", "a,b"]
