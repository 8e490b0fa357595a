"""``python -m jaxcompat``, as a user types it."""

from __future__ import annotations

import json
import sys

import pytest

from jaxcompat.known import KNOWN, Known
from jaxcompat.patch import catalogue
from jaxcompat.versions import CEILING

from . import toys
from .conftest import MakeSite
from .toys import BACKEND, BROADCAST, MULTISLICE, PATCHES, SINGLE, ToySite, changed

SHOW = """
    import json, sys
    print(json.dumps({
        "argv": sys.argv,
        "name": __name__,
        "path": sys.path[0],
        "patched": "jaxcompat" in sys.modules,
        "main": sys.modules["__main__"].__dict__ is globals(),
    }))
    """


# --- status ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("status",)], ids=["by default", "asked for"])
def test_status_has_a_line_for_each_patch(affected: ToySite, arguments: tuple[str, ...]) -> None:
    ended = affected.python("-m", "jaxcompat", *arguments)
    assert ended.returncode == 0
    for patch_id in PATCHES:
        (line,) = (line for line in ended.stdout.splitlines() if line.startswith(patch_id))
        assert line.split()[1] == "armed"
    for version in toys.AFFECTED.values():
        assert version in ended.stdout.splitlines()[0]


def test_status_as_json(affected: ToySite) -> None:
    ended = affected.python("-m", "jaxcompat", "status", "--json")
    assert ended.returncode == 0
    found = json.loads(ended.stdout)
    assert [one["id"] for one in found] == [*PATCHES]
    for text in ("state", "reason", "affected"):
        assert all(isinstance(one[text], str) and one[text] for one in found)
    for several in ("sites", "upstream"):
        assert all(isinstance(one[several], list) and one[several] for one in found)


def test_status_where_nothing_is_installed(toy_site: MakeSite) -> None:
    ended = toy_site(jax=None, orbax=None).python("-m", "jaxcompat", "status")
    assert ended.returncode == 0
    assert "jax (not installed), orbax-checkpoint (not installed)" in ended.stdout
    assert ended.stdout.count(" absent ") == len(PATCHES)


def test_status_imports_neither_jax_nor_orbax(toy_site: MakeSite) -> None:
    broken = "raise AssertionError('imported')"
    site = toy_site(files={"jax/__init__.py": broken, "orbax/checkpoint/__init__.py": broken})
    assert site.python("-m", "jaxcompat", "status").returncode == 0


def test_status_obeys_the_switches(affected: ToySite) -> None:
    ended = affected.python("-m", "jaxcompat", environment={"JAXCOMPAT_DISABLE": "1"})
    assert ended.stdout.count(" disabled ") == len(PATCHES)


def test_the_version(affected: ToySite) -> None:
    ended = affected.python("-m", "jaxcompat", "--version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("jaxcompat ")


# --- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch_id", PATCHES)
def test_explain_says_all_that_is_to_be_known(affected: ToySite, patch_id: str) -> None:
    ended = affected.python("-m", "jaxcompat", "explain", patch_id)
    assert ended.returncode == 0
    text = " ".join(ended.stdout.split())
    status = json.loads(affected.python("-m", "jaxcompat", "status", "--json").stdout)
    (now,) = (one for one in status if one["id"] == patch_id)
    for part in (
        patch_id,
        now["affected"],
        f"armed: {now['reason']}",
        *now["sites"],
        *now["upstream"],
        f"JAXCOMPAT_DISABLE={patch_id}",
    ):
        assert part in text


@pytest.mark.parametrize("entry", KNOWN, ids=[entry.id for entry in KNOWN])
def test_what_is_known_and_not_mended_is_told_with_the_way_out(
    affected: ToySite, toy_site: MakeSite, entry: Known
) -> None:
    assert entry.id not in catalogue()
    explained = " ".join(affected.python("-m", "jaxcompat", "explain", entry.id).stdout.split())
    for part in (entry.symptom, entry.reason, entry.advice):
        assert part in explained
    newest = toy_site(jax=str(CEILING["jax"]), orbax=str(CEILING["orbax-checkpoint"]))
    assert entry.symptom in newest.python("-m", "jaxcompat").stdout
    elsewhere = toy_site(**toys.UNAFFECTED).python("-m", "jaxcompat").stdout
    assert entry.symptom not in elsewhere


def test_explain_of_an_unknown_id_is_wrong_use_and_names_the_nearest(affected: ToySite) -> None:
    ended = affected.python("-m", "jaxcompat", "explain", "orbax-singel-replica-mesh")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'orbax-singel-replica-mesh'" in ended.stderr
    assert f"did you mean {SINGLE!r}" in ended.stderr
    assert "Traceback" not in ended.stderr


# --- run ------------------------------------------------------------------------------------------


def test_run_is_as_if_jaxcompat_were_imported_first(affected: ToySite) -> None:
    affected.write(
        "../program.py",
        f"""
        from report import *
        {toys.PRELUDE.strip().replace(chr(10), chr(10) + "        ")}
        tell(mended=mended(load(MULTISLICE).broadcast_one_replica_to_all))
        """,
    )
    told = affected.path.parent / "report.json"
    ended = affected.python(
        "-m", "jaxcompat", "run", "program.py", environment={"REPORT_TO": str(told)}
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(told.read_text())["facts"] == {"mended": True}


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("one", "two words", ""),
        ("--json", "-m", "--help", "--version", "-x=1"),
        ("--", "-m", "--"),
        ("status",),
    ],
)
def test_run_gives_the_script_its_arguments(affected: ToySite, arguments: tuple[str, ...]) -> None:
    script = affected.write("scripts/show.py", SHOW)
    ended = affected.python("-m", "jaxcompat", "run", str(script), *arguments)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "argv": [str(script), *arguments],
        "name": "__main__",
        "path": str(script.parent),
        "patched": True,
        "main": True,
    }


@pytest.mark.parametrize(
    "arguments", [(), ("one", "-m", "--help", "--", "-c")], ids=["without arguments", "with some"]
)
def test_run_gives_the_module_its_arguments(affected: ToySite, arguments: tuple[str, ...]) -> None:
    file = affected.write("../pkg/show.py", SHOW)
    bare = affected.python("-m", "pkg.show", *arguments)
    ended = affected.python("-m", "jaxcompat", "run", "-m", "pkg.show", *arguments)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found == {**json.loads(bare.stdout), "patched": True}
    assert found["argv"] == [str(file.resolve()), *arguments]
    assert found["name"] == "__main__"


def test_run_of_a_package_runs_its_main(affected: ToySite) -> None:
    affected.write("../pkg/__init__.py", "")
    affected.write("../pkg/__main__.py", "import sys; print(__name__, *sys.argv[1:])")
    ended = affected.python("-m", "jaxcompat", "run", "-m", "pkg", "argument")
    assert (ended.returncode, ended.stdout) == (0, "__main__ argument\n")


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('it says why')", 1),
        ("raise ValueError('it breaks')", 1),
    ],
)
@pytest.mark.parametrize("how", [("program.py",), ("-m", "program")], ids=["script", "module"])
def test_run_ends_as_the_program_does(
    affected: ToySite, how: tuple[str, ...], last: str, code: int
) -> None:
    affected.write("../program.py", last)
    ended = affected.python("-m", "jaxcompat", "run", *how)
    assert ended.returncode == code
    assert ("it breaks" in ended.stderr or "it says why" in ended.stderr) == (code == 1)


def test_run_of_a_program_that_raises_our_error_ends_with_its_traceback(
    toy_site: MakeSite,
) -> None:
    """An error of the program is no wrong use of the command line."""
    site = toy_site(files=changed(MULTISLICE, ("is_source: bool", "source: bool")))
    site.write("../program.py", f"import {MULTISLICE}")
    ended = site.python(
        "-m", "jaxcompat", "run", "program.py", environment={"JAXCOMPAT_STRICT": "1"}
    )
    assert "JaxcompatError" in ended.stderr
    assert "Traceback (most recent call last)" in ended.stderr
    assert ended.returncode == 1


def test_run_finds_the_scripts_neighbours(affected: ToySite) -> None:
    affected.write("scripts/neighbour.py", "print('found')")
    script = affected.write("scripts/program.py", "import neighbour")
    assert affected.python("-m", "jaxcompat", "run", str(script)).stdout == "found\n"


def test_run_lets_a_script_pickle_what_it_defines(affected: ToySite) -> None:
    script = affected.write(
        "program.py",
        """
        import pickle
        class Mine: ...
        assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
        """,
    )
    ended = affected.python("-m", "jaxcompat", "run", str(script))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P is new in 3.11")
def test_run_with_a_safe_path_keeps_the_path(affected: ToySite) -> None:
    """With -P nothing was put before the path, so there is nothing to replace."""
    script = affected.write("scripts/program.py", "import jax, sys; print(*sys.path[:2], sep=';')")
    ended = affected.python("-P", "-m", "jaxcompat", "run", str(script))
    assert ended.returncode == 0, ended.stderr
    assert str(affected.path) in ended.stdout


# --- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("--nonsense",),
        ("explain",),
        ("explain", BACKEND, BROADCAST),
        ("status", "nonsense"),
        ("run",),
        ("run", "-m"),
        ("run", "--nonsense", "program.py"),
        ("run", "no_such_file.py"),
    ],
    ids=" ".join,
)
def test_wrong_use_ends_with_2(affected: ToySite, arguments: tuple[str, ...]) -> None:
    ended = affected.python("-m", "jaxcompat", *arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr
    assert "Traceback" not in ended.stderr
