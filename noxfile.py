"""`nox -s demo` shows the main job, `nox -s tests` passes the tests, `nox -s lint` the linters."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "tests"]

SEED = ("3.11", "0.9.0", "0.11.33")
CELLS = [
    # Python, JAX, Orbax: the seed pair on its oldest Python and on 3.12, then a pair of each other
    # shape of the code, and the corners of the affected rectangles. Unit tests run once a Python.
    SEED,
    ("3.12", "0.9.0", "0.11.33"),
    ("3.10", "0.6.2", "0.11.25"),  # a closure adds the replica axis; the handler's method awaits
    ("3.11", "0.8.0", "0.11.26"),  # a function adds it; the handler's method still awaits
    ("3.11", "0.9.0", "0.11.31"),  # a function of the module awaits; a jitted expand_dims
    ("3.10", "0.6.0", "0.11.40"),  # mended upstream, but not for this JAX; no execution_devices
    ("3.11", "0.7.0", "0.12.8"),  # the last JAX for which it is not; the merge compiled ahead
    ("3.11", "0.7.1", "0.11.40"),  # the first pair with that mend
    ("3.12", "0.11.2", "0.12.6"),  # the last that compiles nothing ahead
    ("3.13", "0.12.0.1", "0.12.8"),  # the newest of all
]
UNIT = {"3.11": SEED, "3.12": CELLS[1], "3.10": CELLS[2], "3.13": CELLS[-1]}


def _pair(session: nox.Session, jax: str, orbax: str) -> None:
    session.install(f"jax=={jax}", f"orbax-checkpoint=={orbax}", ".")


@nox.session(python=SEED[0])
def demo(session: nox.Session) -> None:
    """Restore under jax.set_mesh in two processes: without the import, then with it."""
    _pair(session, *SEED[1:])
    session.chdir(session.create_tmp())
    session.run("python", "-m", "jaxcompat", "check", "orbax-single-replica-mesh", "--show")


@nox.session
@nox.parametrize(
    "python,jax,orbax", CELLS, ids=[f"py{py}-jax{jax}-orbax{orbax}" for py, jax, orbax in CELLS]
)
def tests(session: nox.Session, jax: str, orbax: str) -> None:
    """Run the tests against the built wheel, with the source tree out of the way."""
    _pair(session, jax, orbax)
    session.install("pytest>=8", "pytest-xdist", "hypothesis")
    session.run("uv", "pip", "freeze", external=True)
    away = Path(session.create_tmp()) / "away"
    shutil.rmtree(away, ignore_errors=True)
    away.mkdir(parents=True)
    shutil.copytree("tests", away / "tests")
    shutil.copy("pyproject.toml", away)
    cell = (str(session.python), jax, orbax)
    suites = ["tests/pair"] + (["tests/unit"] if cell in UNIT.values() else [])
    session.chdir(away)
    session.run("pytest", "-n2", *suites, *session.posargs)


@nox.session(python=SEED[0])
def lint(session: nox.Session) -> None:
    """Check the style, and the types strictly."""
    session.install("ruff", "mypy", "pytest>=8", "hypothesis", "nox", ".")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")


@nox.session(python=SEED[0])
def bench(session: nox.Session) -> None:
    """Print what the patches cost, as ratios from one run."""
    _pair(session, *SEED[1:])
    session.run("python", "benchmarks/run.py", *session.posargs)
