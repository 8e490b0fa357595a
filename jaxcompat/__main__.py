"""The command line: ``python -m jaxcompat`` (also the script ``jaxcompat``)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import runpy
import sys
from collections.abc import Sequence

import jaxcompat
from jaxcompat import engine, known
from jaxcompat.patch import catalogue
from jaxcompat.versions import CEILING, Installed, describe


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 fine, 1 the answer is no, 2 wrong use."""
    parser = _parser()
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["run"] and arguments[1:2] not in (["-h"], ["--help"]):
        return _run(parser, arguments[1:])  # what follows is the program's, down to each `--`
    options = parser.parse_args(arguments)
    try:
        code: int = options.command(options)
    except jaxcompat.JaxcompatError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxcompat",
        description="What jaxcompat does to the installed JAX and Orbax, and why.",
    )
    parser.add_argument("--version", action="version", version=f"jaxcompat {jaxcompat.__version__}")
    parser.set_defaults(command=_status, json=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    status = commands.add_parser("status", help="every patch and what became of it (the default)")
    status.add_argument("--json", action="store_true")
    status.set_defaults(command=_status)

    explain = commands.add_parser("explain", help="what bites, who is affected, what is done")
    explain.add_argument("id", metavar="ID", help=f"one of {', '.join(catalogue())}")
    explain.set_defaults(command=_explain)

    check = commands.add_parser(
        "check",
        help="prove here, in fresh interpreters, which patches are needed and that they work",
    )
    check.add_argument("ids", metavar="ID", nargs="*", help="patches to check (all)")
    check.add_argument("--show", action="store_true", help="also print what the programs printed")
    check.add_argument("--json", action="store_true")
    check.set_defaults(command=_check)

    matrix = commands.add_parser(
        "matrix", help="the pairs of releases that prove the ranges, or what was recorded there"
    )
    matrix.add_argument("ids", metavar="ID", nargs="*", help="patches to prove (all)")
    matrix.add_argument("--json", action="store_true")
    matrix.add_argument(
        "--results",
        metavar="DIRECTORY",
        help="hold the results recorded there against the ranges, and print COMPAT_MATRIX.md",
    )
    matrix.set_defaults(command=_matrix)

    commands.add_parser(
        "run",
        help="run a program with `import jaxcompat` before its first line",
        usage="%(prog)s SCRIPT [ARG ...]  or  %(prog)s -m MODULE [ARG ...]",
    )
    return parser


def _status(options: argparse.Namespace) -> int:
    found = jaxcompat.status()
    if options.json:
        print(json.dumps([one._asdict() for one in found], indent=2))
        return 0
    print(f"jaxcompat {jaxcompat.__version__}: {Installed().describe(CEILING)}\n")
    width = max(len(one.id) for one in found)
    for one in found:
        print(f"{one.id:<{width}}  {one.state:<10}  {one.reason}")
    unmended = known.here(Installed())
    if unmended:
        print("\nKnown here, and not mended:")
        for entry in unmended:
            print(f"{entry.id:<{width}}  {entry.symptom}")
    print("\n`python -m jaxcompat explain ID` says more; JAXCOMPAT_DISABLE=ID switches one off.")
    return 0


def _explain(options: argparse.Namespace) -> int:
    if options.id in (unmended := {one.id: one for one in known.KNOWN}):
        entry = unmended[options.id]
        _print_sections(
            entry.id,
            ("What bites", entry.symptom),
            ("Affected", describe(entry.affected)),
            ("Not mended, since", entry.reason),
            ("Instead", entry.advice),
            ("Upstream", "\n".join(entry.upstream)),
        )
        return 0
    patch = engine.find(options.id)
    (now,) = (one for one in jaxcompat.status() if one.id == patch.id)
    _print_sections(
        patch.id,
        ("What bites", patch.symptom),
        ("Why", patch.cause),
        ("Affected", describe(patch.affected)),
        ("Here", f"{now.state}: {now.reason}"),
        ("What is done", patch.mend),
        ("Restored before?", patch.aftermath),
        ("Where", "\n".join(now.sites)),
        ("Unnecessary with", patch.until),
        ("Upstream", "\n".join(patch.upstream)),
        ("Switch it off", f"JAXCOMPAT_DISABLE={patch.id}"),
    )
    return 0


def _print_sections(title: str, *sections: tuple[str, str]) -> None:
    """Print what a command has to say under headings, without those that have nothing."""
    print(f"{title}\n")
    for heading, text in sections:
        if text:
            print(f"{heading}:\n{_indented(text)}\n")


def _check(options: argparse.Namespace) -> int:
    from jaxcompat import canary  # brings in subprocess and its kind, for this command only

    installed = Installed()
    ids = [engine.find(patch_id).id for patch_id in options.ids] or list(catalogue())
    checks = []
    for number, patch_id in enumerate(ids, 1):
        print(f"[{number}/{len(ids)}] {patch_id} ...", file=sys.stderr, flush=True)
        checks.append(canary.check(patch_id, installed))
    if options.json:
        found = {
            "versions": {name: installed[name] for name in CEILING},
            "checks": [dataclasses.asdict(one) for one in checks],
        }
        print(json.dumps(found, indent=2))
    else:
        print(f"jaxcompat {jaxcompat.__version__}: {installed.describe(CEILING)}\n")
        width = max(len(one.id) for one in checks)
        for one in checks:
            print(f"{one.id:<{width}}  {one.state:<10}  {one.verdict}")
            for title, run in (("without", one.bare), ("with", one.patched)):
                if run is not None and (options.show or not one.fine):
                    outcome = "works" if run.passed else "fails"
                    print(f"\n{title} jaxcompat it {outcome} ({run.seconds:.1f} s):\n{run}\n")
    return 0 if all(one.fine for one in checks) else 1


def _matrix(options: argparse.Namespace) -> int:
    from jaxcompat import matrix

    patches = [engine.find(patch_id) for patch_id in options.ids] or list(catalogue().values())
    if options.results is None:
        cells = matrix.cells(patches)
        print(matrix.as_json(cells) if options.json else "\n".join(cell.name for cell in cells))
        return 0
    recorded = matrix.proofs(pathlib.Path(options.results))
    print(matrix.render(recorded), end="")
    wrong = [
        sentence
        for patch in patches
        for sentence in (
            *matrix.contradictions(patch.id, patch.affected, recorded.get(patch.id, ())),
            *(
                f"{patch.id}: no result for {name}"
                for name in matrix.unproven(patch, recorded.get(patch.id, ()))
            ),
        )
    ]
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


def _indented(text: str) -> str:
    import textwrap

    return "\n".join(
        textwrap.fill(
            line,
            width=88,
            initial_indent="  ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    as_module = arguments[:1] == ["-m"]
    target, *rest = arguments[as_module:] or [""]
    if not target or target.startswith("-"):
        parser.error("run takes SCRIPT [ARG ...] or -m MODULE [ARG ...]")
    if not as_module and not os.path.exists(target):
        parser.error(f"can't open {target!r}: there is no such file")
    sys.argv[:] = [target, *rest]
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(target))
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
