"""What jaxcompat costs and what it saves, as ratios measured side by side.

    python benchmarks/run.py                        # everything, in environments made by uv
    python benchmarks/run.py import --rounds 60
    python benchmarks/run.py globalize --seed PYTHON --upstream PYTHON

A round runs each way once, forwards and backwards in turn; a cold way runs in a fresh
interpreter. A ratio is taken within a round, so that whatever slows the machine slows both sides
of it, and the table gives the median over the rounds. The ratio of CPU times and the ratio of the
fastest runs stand beside it: they move less when the machine is busy. The targets are printed and
not enforced; no check depends on a clock.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SEED = ("jax==0.9.0", "orbax-checkpoint==0.11.33")
UPSTREAM = ("jax==0.9.0", "orbax-checkpoint==0.11.40")
DEVICES = 8

TIMED_IMPORT = """
from time import perf_counter, process_time
wall, cpu = perf_counter(), process_time()
import {}
print("cold", perf_counter() - wall, process_time() - cpu)
"""
VERSIONS = """
from importlib.metadata import distributions
found = {d.metadata["Name"]: d.version for d in distributions()}
names = ("jax", "jaxlib", "orbax-checkpoint", "jaxcompat", "wrapt", "packaging")
print(*(f"{name} {found[name]}" for name in names if name in found), sep=", ")
"""

Command = tuple[str, ...]
"""Prints lines ``NAME WALL CPU``, in seconds."""
Round = dict[str, tuple[float, float]]
"""Name of a way -> its wall and CPU seconds."""


@dataclass(frozen=True)
class Comparison:
    """Two ways to do the same, and what their ratio should be at most."""

    title: str
    measured: str
    baseline: str
    target: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ("import", "globalize", "broadcast", "aot")
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, help="default: 40 for import, 12 for the others")
    parser.add_argument("--seed", metavar="PYTHON", help=f"has jaxcompat and {' '.join(SEED)}")
    parser.add_argument("--upstream", metavar="PYTHON", help=f"has {' '.join(UPSTREAM)}")
    options = parser.parse_args()
    chosen = options.benchmarks or known
    if unknown := set(chosen) - set(known):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    if options.rounds is not None and options.rounds < 2:
        parser.error("a median over rounds takes two of them at least")
    with tempfile.TemporaryDirectory() as scratch:
        seed = options.seed or make_environment(Path(scratch, "seed"), *SEED, str(HERE.parent))
        interpreters = {"seed": seed}
        if {*chosen} & {"globalize", "broadcast"}:
            interpreters["upstream"] = options.upstream or make_environment(
                Path(scratch, "upstream"), *UPSTREAM
            )
        print("| benchmark | ratio | quartiles | of CPU | of fastest | target | seconds | rounds |")
        print("|---|---|---|---|---|---|---|---|")
        for name in chosen:
            if name == "import":
                benchmark_import(seed, options.rounds or 40)
            elif name == "aot":
                benchmark_aot(seed, options.rounds or 12)
            else:
                benchmark_broadcast(name, **interpreters, rounds=options.rounds or 12)
        print()
        for name, python in interpreters.items():
            print(f"- {name}: {run((python, '-I', '-c', VERSIONS)).strip()}")
        version = run((seed, "-V")).strip()
    print(f"- machine: {os.cpu_count()} cores, {platform.machine()}, {sys.platform}, {version}")


def benchmark_import(seed: str, rounds: int) -> None:
    modules = "jax, orbax.checkpoint"
    taken = in_fresh_interpreters(
        {
            "bare": (seed, "-I", "-c", TIMED_IMPORT.format(modules)),
            "patched": (seed, "-I", "-c", TIMED_IMPORT.format(f"jaxcompat, {modules}")),
        },
        rounds,
    )
    report(taken, Comparison("import, with jaxcompat / without", "patched", "bare", 1.02))


def benchmark_aot(seed: str, rounds: int) -> None:
    taken = in_one_interpreter((seed, "-I", str(HERE / "aot.py"), str(rounds)), interpreters=3)
    for name, length in (("tiny", "7 KB"), ("small", "60 KB"), ("large", "50 MB")):
        title = f"loading an AOT executable of {length}, patched / bare"
        report(taken, Comparison(title, f"{name}-patched", f"{name}-bare", 1.05))


def benchmark_broadcast(function: str, seed: str, upstream: str, rounds: int) -> None:
    program = ("-I", str(HERE / "broadcast.py"), function)
    cold = in_fresh_interpreters(
        {
            "bare": (seed, *program, "cold"),
            "patched": (seed, *program, "cold", "--patched"),
            "patched-mesh": (seed, *program, "cold", "--patched", "--mesh"),
            "upstream-mesh": (upstream, *program, "cold", "--mesh"),
        },
        rounds,
    )
    mesh = f"{function} {{}}, patched under a mesh / bare without"
    no_mesh = f"{function} {{}}, patched / bare, both without a mesh"
    fix = f"{function} cold, patched / upstream's fix, both under a mesh"
    report(cold, Comparison(mesh.format("cold"), "patched-mesh", "bare", 1.05))
    report(cold, Comparison(no_mesh.format("cold"), "patched", "bare", 1.05))
    report(cold, Comparison(fix, "patched-mesh", "upstream-mesh", 0.6))
    warm = in_one_interpreter((seed, *program, "warm"), interpreters=3)
    report(warm, Comparison(mesh.format("warm"), "patched-mesh", "bare", 1.05))
    report(warm, Comparison(no_mesh.format("warm"), "patched", "bare", 1.05))


def in_fresh_interpreters(ways: dict[str, Command], rounds: int) -> list[Round]:
    """Run each way once a round, each time in an interpreter of its own."""
    for command in ways.values():
        run(command)  # fills the file system's cache, and writes what bytecode is missing
    taken: list[Round] = []
    for number in range(rounds):
        times: Round = {}
        for name in ways if number % 2 else reversed(ways):
            ((_, times[name]),) = samples(ways[name])
        taken.append(times)
    return taken


def in_one_interpreter(command: Command, interpreters: int) -> list[Round]:
    """Run a command that takes the turns itself; return the rounds of all its runs."""
    taken: list[Round] = []
    for _ in range(interpreters):
        for name, times in samples(command):
            if not taken or name in taken[-1]:
                taken.append({})
            taken[-1][name] = times
    return taken


def samples(command: Command) -> Iterator[tuple[str, tuple[float, float]]]:
    for line in run(command).splitlines():
        name, wall, cpu = line.split()
        yield name, (float(wall), float(cpu))


def report(rounds: list[Round], comparison: Comparison) -> None:
    """Print the comparison's row of the table."""
    measured, baseline = (
        [times[name] for times in rounds] for name in (comparison.measured, comparison.baseline)
    )
    wall, cpu = (
        [a[clock] / b[clock] for a, b in zip(measured, baseline, strict=True)] for clock in (0, 1)
    )
    low, middle, high = statistics.quantiles(wall, n=4, method="inclusive")
    fastest = min(measured)[0] / min(baseline)[0]
    seconds = (statistics.median(wall for wall, _ in side) for side in (measured, baseline))
    print(
        f"| {comparison.title} | **{middle:.3f}** | {low:.3f} - {high:.3f} "
        f"| {statistics.median(cpu):.3f} | {fastest:.3f} | <= {comparison.target} "
        f"| {' / '.join(f'{s:.4f}' for s in seconds)} | {len(rounds)} |",
        flush=True,
    )


def run(command: Command) -> str:
    """Return what a command prints; what it complains of goes to the terminal only if it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def make_environment(directory: Path, *requirements: str) -> str:
    """Make an environment with these requirements, bytecode included; return its interpreter."""
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(("uv", "venv", "--quiet", "--python", sys.executable, str(directory)))
    install = ("uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python))
    # A working tree that changes keeps its version: what uv has cached of it may be old.
    run((*install, "--reinstall-package", "jaxcompat", *requirements))
    return str(python)


if __name__ == "__main__":
    main()
