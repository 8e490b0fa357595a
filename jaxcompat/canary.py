"""Runs canaries in fresh interpreters, bare and patched, and gives the verdict.

A canary (`jaxcompat/canaries/`) is an ordinary program that knows nothing of jaxcompat and exits
0 only if the incompatibility does not bite. It says with a literal ``PROCESSES`` how many of it
belong together; each is started as ``python canary.py RANK COORDINATOR DIRECTORY``.
"""

from __future__ import annotations

import ast
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

DEVICES = 8
"""Virtual CPU devices of a canary, over all of its processes."""
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


def processes(program: Path) -> int:
    """Return how many processes a canary takes: its literal ``PROCESSES``, read, not run."""
    for node in ast.parse(program.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="PROCESSES")], value=ast.Constant(value=int(n))):
                return n
    return 1


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
    count = processes(program)
    start = [sys.executable, "-m", "jaxcompat", "run"] if patched else [sys.executable]
    child_environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("JAXCOMPAT_")},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // count}",
        # For a bare run nothing may bring jaxcompat in by another way, such as sitecustomize.
        settings.DISABLE: "" if patched else "1",
        **(environment or {}),
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxcompat-") as scratch:
        shared = Path(scratch, "shared")
        shared.mkdir()
        coordinator = f"127.0.0.1:{_free_port()}"
        logs = [Path(scratch, f"output-{rank}") for rank in range(count)]
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
                            env=child_environment,
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
