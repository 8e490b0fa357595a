"""`nox -s demo` shows the main job, `nox -s tests` passes the tests, `nox -s lint` the linters."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import nox
from packaging.version import Version

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "tests"]

SEED = ("3.11", "0.9.0", "0.11.33")
CELLS = [
    # Python, JAX, Orbax: the seed pair on its oldest Python and on 3.12, then a pair of each other
    # shape of the code. Unit tests run once a Python, and the search for silent differences on the
    # seed pair and the newest. The bounds are the matrix's business.
    SEED,
    ("3.12", "0.9.0", "0.11.33"),
    ("3.10", "0.6.2", "0.11.25"),  # a closure adds the replica axis; the handler's method awaits
    ("3.11", "0.8.0", "0.11.26"),  # a function adds it; the handler's method still awaits
    ("3.11", "0.9.0", "0.11.31"),  # a function of the module awaits; a jitted expand_dims
    ("3.11", "0.6.0", "0.11.40"),  # mended upstream, but not for this JAX; no execution_devices
    ("3.11", "0.7.0", "0.12.8"),  # the last JAX for which it is not; the merge compiled ahead
    ("3.13", "0.12.0.1", "0.12.8"),  # the newest of all
]
AGAIN = CELLS[1]  # only its Python is another
UNIT = (SEED, AGAIN, CELLS[2], CELLS[-1])


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
    for name in ("pyproject.toml", "README.md", "COMPAT_MATRIX.md"):
        shutil.copy(name, away)
    cell = (str(session.python), jax, orbax)
    chosen = ["tests/pair"] if cell in (SEED, CELLS[-1]) else ["tests/pair", "-m", "not search"]
    if cell == AGAIN:
        chosen = ["tests/pair", "-k", "canary"]
    session.chdir(away)
    session.run("pytest", "-n2", *chosen, *session.posargs)
    if cell in UNIT:
        session.run("pytest", "-n2", "tests/unit", *session.posargs)


@nox.session(python=SEED[0])
def lint(session: nox.Session) -> None:
    """Check the style, the types (strictly) and the workflows."""
    session.install("ruff", "mypy", "check-jsonschema", "pytest>=8", "hypothesis", "nox", ".")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    workflows = [str(path) for path in sorted(Path(".github/workflows").glob("*.yml"))]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)


@nox.session(python=SEED[0])
def bench(session: nox.Session) -> None:
    """Print what the patches cost, as ratios from one run: `nox -s bench -- [import|...]`."""
    session.install("uv")
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session(python=SEED[0])
def matrix(session: nox.Session) -> None:
    """Run the version matrix on real wheels: `nox -s matrix -- [--fresh] [--into DIR] [ID ...]`.

    Two cells at a time, newest first. A cell that was already recorded with the same wheel is not
    run again, so an interrupted run goes on where it was; --fresh starts over. The results go to
    tests/matrix, and COMPAT_MATRIX.md is rendered from them; with --into they go elsewhere, and
    nothing is rendered.
    """
    parser = argparse.ArgumentParser(prog="nox -s matrix --")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--cell", help="only this one")
    parser.add_argument("ids", nargs="*", metavar="ID")
    options = parser.parse_args(session.posargs)
    results: Path = options.into or Path("tests/matrix")
    results.mkdir(parents=True, exist_ok=True)

    session.install("uv", ".")
    scratch = Path(session.create_tmp()).resolve()  # the cells run elsewhere
    shutil.rmtree(scratch / "wheel", ignore_errors=True)
    session.run("uv", "build", "--wheel", "-q", "-o", str(scratch / "wheel"), external=True)
    (wheel,) = (scratch / "wheel").glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    listed = session.run("jaxcompat", "matrix", "--json", *options.ids, silent=True)
    cells = [c for c in json.loads(str(listed)) if options.cell in (None, c["name"])]
    if not cells:
        session.error(f"there is no cell {options.cell}")
    todo = []
    for cell in cells:
        path = results / f"{cell['name']}.json"
        recorded = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if options.fresh or recorded.get("wheel") != digest:
            todo.append(cell)

    began, failed = time.monotonic(), []
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = {
            pool.submit(_run_cell, cell, wheel, digest, results, options.ids): cell for cell in todo
        }
        for done, run in enumerate(as_completed(runs), 1):
            name = runs[run]["name"]
            problem = run.result()
            if problem:
                failed.append(name)
                session.warn(f"{name}: {problem}")
            left = (time.monotonic() - began) / done * (len(todo) - done) / 60
            session.log(f"cell {done} of {len(todo)}: {name}; about {left:.0f} min left")
    rendered = session.run(
        "jaxcompat", "matrix", "--results", str(results), *options.ids,
        silent=True, stderr=None, success_codes=[0, 1],
    )  # fmt: skip
    if options.into is None and not options.ids:
        Path("COMPAT_MATRIX.md").write_text(str(rendered), encoding="utf-8")
    if failed:
        session.error(f"no result: {', '.join(failed)}")
    if options.cell is None:
        session.run("jaxcompat", "matrix", "--results", str(results), *options.ids, silent=True)


def _run_cell(cell: dict[str, str], wheel: Path, digest: str, results: Path, ids: list[str]) -> str:
    """Run one cell in an environment of its own and record it; return what went wrong, if so."""
    began = time.monotonic()
    environment = Path(tempfile.mkdtemp(prefix="jaxcompat-cell-"))
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"

    def run(*command: str) -> str:
        ran = subprocess.run(
            command,
            cwd=environment,  # the wheel is tested, and not the tree that it was built from
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        if ran.returncode not in (0, 1) or (ran.returncode and command[0] == "uv"):
            raise ChildProcessError(f"{command} ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
        return ran.stdout

    try:
        run("uv", "venv", "-q", "--clear", "--python", cell["python"], str(environment))
        pair = (f"jax=={cell['jax']}", f"orbax-checkpoint=={cell['orbax']}")
        run("uv", "pip", "install", "-q", "--python", str(python), *pair, str(wheel))
        frozen = run("uv", "pip", "freeze", "-q", "--python", str(python)).splitlines()
        found = json.loads(run(str(python), "-m", "jaxcompat", "check", "--json", *ids))
        wanted = {"jax": cell["jax"], "orbax-checkpoint": cell["orbax"]}
        if found["versions"] != wanted:
            return f"{found['versions']} is installed"
    except (ChildProcessError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(environment, ignore_errors=True)
    record = {
        "cell": {key: cell[key] for key in ("python", "jax", "orbax")},
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(time.monotonic() - began),
        "wheel": digest,
        "packages": [line for line in frozen if not line.startswith("jaxcompat")],
        "checks": [_recorded(check) for check in found["checks"]],
    }
    path = results / f"{cell['name']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return ""


def _recorded(check: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": check["id"],
        "verdict": check["verdict"],
        "needed": any(check["bare"]["returncodes"]),
        "works": not any(check["patched"]["returncodes"]),
        "seconds": round(check["bare"]["seconds"] + check["patched"]["seconds"], 1),
    }


@nox.session(python=False)
def releases(session: nox.Session) -> None:
    """Write jaxcompat/releases.json anew from the package index that pip is set up for."""
    found: dict[str, dict[str, list[str]]] = {"jax": {}, "orbax-checkpoint": {}}
    for name, first in (("jax", "0.6.0"), ("orbax-checkpoint", "0.11.0")):
        for python in ("3.10", "3.11", "3.12", "3.13"):
            index = ("pip", "index", "versions", name, "--json", "--only-binary=:all:")
            answer = session.run(
                "uvx", *index, f"--python-version={python}", silent=True, external=True, stderr=None
            )
            for version in json.loads(str(answer))["versions"]:
                if Version(version) >= Version(first):
                    found[name].setdefault(version, []).append(python)
        found[name] = dict(sorted(found[name].items(), key=lambda item: Version(item[0])))
    # A line per release, for diffs that can be read.
    text = re.sub(r"\n\s{3,}|\n\s+(?=\])", "", json.dumps(found, indent=1)).replace('","', '", "')
    Path("jaxcompat/releases.json").write_text(text + "\n", encoding="utf-8")
