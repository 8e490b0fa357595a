"""What holds for every patch there is, read from its declaration."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import jaxcompat
from jaxcompat import canary, patches, versions
from jaxcompat.patch import Patch, catalogue

FOLDER = Path(patches.__path__[0])
FILES = sorted(file for file in FOLDER.glob("*.py") if file.stem != "__init__")
EVERY = pytest.mark.parametrize("patch", catalogue().values(), ids=catalogue())


def _imports(file: Path, *, at_import: bool = False) -> set[str]:
    """Return the modules that a file imports, with `at_import` those outside its functions."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or "."
            of_package = {f"{module}.{alias.name}" for alias in node.names}
            found |= of_package if module == "jaxcompat" else {module}
        elif not (at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            todo.extend(ast.iter_child_nodes(node))
    return found


def test_each_file_is_a_patch_named_after_it() -> None:
    assert [*catalogue()] == [file.stem.replace("_", "-") for file in FILES]
    assert all(patch.id == patch_id for patch_id, patch in catalogue().items())


@EVERY
def test_the_id_is_the_distribution_and_the_symptom_in_kebab_case(patch: Patch) -> None:
    assert re.fullmatch(r"(jax|orbax)(-[a-z0-9]+)+", patch.id)


@EVERY
def test_the_ranges_can_be_read_and_name_distributions_with_a_ceiling(patch: Patch) -> None:
    ranges = [*patch.affected, *(site.where for site in patch.sites if site.where)]
    for range_set in ranges:
        for distribution, specifier in range_set.items():
            assert distribution in versions.CEILING
            assert SpecifierSet(specifier)


@EVERY
def test_some_proven_version_is_within_each_range_set(patch: Patch) -> None:
    """The newest proven one, or the one before the range's end: no set holds for nothing."""
    for ranges in patch.affected:
        for distribution, specifier in ranges.items():
            edges = [Version(part.version) for part in SpecifierSet(specifier)]
            candidates = [*edges, Version(versions.CEILING[distribution])]
            assert any(
                SpecifierSet(specifier).contains(one, prereleases=True) for one in candidates
            )


@EVERY
def test_everything_is_said(patch: Patch) -> None:
    for text in (patch.symptom, patch.cause, patch.mend, patch.until):
        assert text
        assert text.strip() == text
    assert patch.upstream
    assert all(link.startswith("https://") for link in patch.upstream)


@EVERY
def test_a_site_names_a_module_and_an_attribute_of_what_is_affected(patch: Patch) -> None:
    assert patch.sites
    for site in patch.sites:
        assert re.fullmatch(r"[\w.]+:\w+(\.\w+)?", site.target)
        if not site.copy:
            assert site.module.startswith(("jax.", "orbax."))


@EVERY
def test_no_site_is_named_twice(patch: Patch) -> None:
    targets = [site.target for site in patch.sites]
    assert len(targets) == len(set(targets))


@EVERY
def test_each_patch_has_a_canary_that_knows_nothing_of_jaxcompat(patch: Patch) -> None:
    program = canary.path(patch.id)
    assert program.is_file()
    assert not any(name.split(".")[0] == "jaxcompat" for name in _imports(program))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_patch_imports_patch_and_mesh_only_and_no_jax_before_it_is_applied(file: Path) -> None:
    ours = {name for name in _imports(file) if name.startswith("jaxcompat")}
    assert ours <= {"jaxcompat.patch", "jaxcompat.mesh"}
    others = {name.split(".")[0] for name in _imports(file, at_import=True) - ours}
    assert others <= {*sys.stdlib_module_names}


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("settings", set()),
        ("versions", set()),
        ("mesh", set()),
        ("patch", {"versions", "patches"}),
        ("engine", {"patch", "versions", "settings"}),
    ],
)
def test_the_arrows_run_one_way(name: str, may: set[str]) -> None:
    found = _imports(FOLDER.parent / f"{name}.py")
    ours = {one.removeprefix("jaxcompat.") for one in found if one.startswith("jaxcompat")}
    assert ours <= may


def test_only_the_settings_read_the_switches() -> None:
    """But for who gives children their environment."""
    names = ("__init__", "__main__", "engine", "mesh", "patch", "versions")
    for file in [*(FOLDER.parent / f"{name}.py" for name in names), *FILES]:
        source = file.read_text(encoding="utf-8")
        assert "environ" not in source, file
        assert "getenv" not in source, file


def test_the_public_face_is_what_it_says() -> None:
    assert [*jaxcompat.__all__] == sorted(jaxcompat.__all__)
    assert set(jaxcompat.__all__) == {
        "JaxcompatError",
        "JaxcompatWarning",
        "PatchStatus",
        "__version__",
        "apply",
        "disabled",
        "patch_unpickler",
        "revert",
        "status",
    }
    assert all(inspect.getdoc(getattr(jaxcompat, name)) for name in jaxcompat.__all__)
