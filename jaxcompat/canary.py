"""Runs canaries in fresh interpreters, bare and patched, and gives the verdict.

A canary (`jaxcompat/canaries/`) is an ordinary program that knows nothing of jaxcompat and exits
0 only if the incompatibility does not bite. It says with the literals ``PROCESSES`` and
``DEVICES`` (1 and 8 where it does not) how many of it belong together and on how many devices in
all; each is started as ``python canary.py RANK COORDINATOR DIRECTORY``. The devices are the default
platform's where it has enough of them, and virtual CPU devices otherwise.
"""

from __future__ import annotations

import ast
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxcompat import settings, versions
from jaxcompat.patch import catalogue

_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_GRACE = 15.0
"""Seconds that the other processes get to end by themselves once one has failed."""


@dataclass(frozen=True)
class Run:
    """How a canary ended: a return code per process (negative: a signal) and what was printed."""

    returncodes: tuple[int, ...]
    outputs: tuple[str, ...]
    seconds: float
    timed_out: bool = False

    @property
    def passed(self) -> bool:
        return not any(self.returncodes)

    def __str__(self) -> str:
        return "\n".join(
            f"--- process {rank} ended with {code}{' (time is up)' if self.timed_out else ''}\n"
            f"{output.rstrip()}"
            for rank, (code, output) in enumerate(zip(self.returncodes, self.outputs, strict=True))
        )


Verdict = Literal[
    "needed and fixed",
    "needed and NOT fixed",
    "not needed",
    "needed outside range",
    "BROKEN by jaxcompat",
    "absent",
]


@dataclass(frozen=True)
class Check:
    """What a canary showed on the installed versions, bare and patched."""

    id: str
    state: str
    """affected, unaffected, unlisted or absent: what the declared ranges say."""
    verdict: Verdict
    bare: Run | None = None
    patched: Run | None = None

    @property
    def fine(self) -> bool:
        """Whether nothing is left to mend."""
        return self.verdict in ("needed and fixed", "not needed", "absent")


def check(patch_id: str, installed: versions.Installed, *, time_limit: float = 120.0) -> Check:
    """Run a patch's canary bare and patched, and give the verdict.

    Outside of its ranges the patch is forced for the patched run, so that *needed outside range*
    comes with whether it would help.
    """
    state = versions.judge(catalogue()[patch_id].affected, installed).state
    if state == "absent":
        return Check(patch_id, state, "absent")
    program = path(patch_id)
    bare = run(program, patched=False, time_limit=time_limit)
    force = {} if state == "affected" or bare.passed else {settings.FORCE: patch_id}
    patched = run(program, patched=True, time_limit=time_limit, environment=force)
    return Check(patch_id, state, _verdict(state, bare, patched), bare, patched)


def _verdict(state: str, bare: Run, patched: Run) -> Verdict:
    if bare.passed:
        return "not needed" if patched.passed else "BROKEN by jaxcompat"
    if state != "affected":
        return "needed outside range"
    return "needed and fixed" if patched.passed else "needed and NOT fixed"


def path(patch_id: str) -> Path:
    """Return the file of a patch's canary."""
    return Path(__file__).parent / "canaries" / f"{patch_id.replace('-', '_')}.py"


def literal(program: Path, name: str, otherwise: int) -> int:
    """Return the integer that a canary assigns to `name` at its top: read, not run."""
    for node in ast.parse(program.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Constant(value=int(number))):
                if found == name:
                    return number
    return otherwise


@functools.cache
def accelerators() -> tuple[str, int]:
    """Return the default platform and how many devices of it this process's children would have.

    Asked in a child process: JAX is not imported here, and no device is held.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu", 0
    ask = "import jax; d = jax.local_devices(); print(d[0].platform, len(d))"
    environment = {**os.environ, settings.DISABLE: "1"}
    answer = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, env=environment, check=False
    )
    match answer.stdout.split():
        case [platform, count] if answer.returncode == 0:
            return platform, int(count)
    return "cpu", 0


def device_variables(program: Path, platform: str, available: int) -> list[dict[str, str]]:
    """Return, for each process of a canary, the variables that give it its devices.

    Parameters
    ----------
    program
        The canary's file.
    platform, available
        The default platform, and how many devices of it there are.
    """
    processes, devices = literal(program, "PROCESSES", 1), literal(program, "DEVICES", 8)
    each = devices // processes
    if platform != "cpu" and available >= devices and processes == 1:
        return [{}]
    if platform == "gpu" and available >= devices:
        listed = next((os.environ[name] for name in _GPU_VARIABLES if os.environ.get(name)), "")
        names = listed.split(",") if listed else [str(number) for number in range(available)]
        shares = [",".join(names[rank * each : (rank + 1) * each]) for rank in range(processes)]
        return [dict.fromkeys(_GPU_VARIABLES, share) for share in shares]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={each}"
    return [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}] * processes


def run(
    program: Path,
    *,
    patched: bool,
    time_limit: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run a canary to its end in fresh interpreters.

    Parameters
    ----------
    program
        The canary's file.
    patched
        With ``import jaxcompat`` as its first line, or bare.
    time_limit
        Seconds after which its processes are killed.
    environment
        Variables to set on top of this process's; the switches are cleared before.
    """
    devices = device_variables(program, *accelerators())
    start = [sys.executable, "-m", "jaxcompat", "run"] if patched else [sys.executable]
    inherited = {
        **{k: v for k, v in os.environ.items() if not k.startswith("JAXCOMPAT_")},
        # For a bare run nothing may bring jaxcompat in by another way, such as sitecustomize.
        settings.DISABLE: "" if patched else "1",
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxcompat-") as scratch:
        shared = Path(scratch, "shared")
        shared.mkdir()
        coordinator = f"127.0.0.1:{_free_port()}"
        logs = [Path(scratch, f"output-{rank}") for rank in range(len(devices))]
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    children.append(
                        subprocess.Popen(
                            [*start, str(program), str(rank), coordinator, str(shared)],
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env={**inherited, **devices[rank], **(environment or {})},
                            start_new_session=True,
                        )
                    )
            timed_out = _wait(children, began + time_limit)
        finally:
            for child in children:
                _kill(child)
        return Run(
            returncodes=tuple(child.returncode for child in children),
            outputs=tuple(log.read_text(encoding="utf-8", errors="replace") for log in logs),
            seconds=time.monotonic() - began,
            timed_out=timed_out,
        )


def _wait(children: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait for all; once one has failed, only as long as the others need to see it."""
    cut = False
    while any(child.poll() is None for child in children):
        now = time.monotonic()
        if now > deadline:
            return not cut
        if not cut and any(child.returncode for child in children):
            cut, deadline = True, min(deadline, now + _GRACE)
        time.sleep(0.02)
    return False


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
        child.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
