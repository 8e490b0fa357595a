"""Programs run in fresh interpreters against the JAX and Orbax that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxcompat import canary

os.environ["JAX_PLATFORMS"] = "cpu"  # the tests are about CPU devices, wherever they run
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def program() -> Callable[..., canary.Run]:
    """Run one of the programs with `import jaxcompat` first, or bare."""

    def run(name: str, *, patched: bool, time_limit: float = 240, **environment: str) -> canary.Run:
        path = PROGRAMS / name
        return canary.run(path, patched=patched, time_limit=time_limit, environment=environment)

    return run


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python on 8 virtual CPU devices, with the variables given."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=PROGRAMS,
            check=False,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("JAXCOMPAT_")},
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                **environment,
            },
        )

    return run
