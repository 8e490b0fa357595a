"""The neutral mesh, for calls and for coroutines, with a toy JAX in a child interpreter."""

from __future__ import annotations

import ast
from pathlib import Path

import hypothesis
import pytest

from .conftest import MakeSite
from .toys import ToySite

FILE = Path(__file__).with_name("mesh_scenarios.py")
SCENARIOS = [
    node.name
    for node in ast.parse(FILE.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
    and not node.args.args
    and not node.name.startswith("_")
    and ast.unparse(node.returns or ast.Pass()) == "None"
]
OLD_JAX_TOO = [
    "the_mesh_is_hidden_within_and_back_afterwards",
    "inside_a_trace_the_mesh_is_left_as_it_is",
    "each_step_is_neutral_and_the_mesh_is_back_between_them",
    "jax_is_not_asked_for_names_that_it_lacks",
]
"""With `jax.sharding.use_mesh`, which is all that JAX has before 0.7.1."""


def _play(site: ToySite, scenarios: list[str]) -> dict[str, str]:
    """Play scenarios in one child; return how each ended: "", or its traceback."""
    site.write(FILE.name, FILE.read_text(encoding="utf-8"))
    # What is installed here comes last: hypothesis is looked for there, the toys are found before.
    installed = str(Path(hypothesis.__file__).parent.parent)
    told = site.run(
        f"""
        import traceback
        sys.path.append({installed!r})
        import jax, mesh_scenarios
        for scenario in {scenarios}:
            jax.sharding.set_to.clear()
            try:
                vars(mesh_scenarios)[scenario]()
                tell(**{{scenario: ""}})
            except BaseException as error:
                tell(**{{scenario: traceback.format_exc()}})
        """,
        options=("-W", "error"),
    )
    return told.facts


@pytest.fixture(scope="module")
def outcomes(toy_site: MakeSite) -> dict[str, str]:
    return _play(toy_site(), SCENARIOS)


@pytest.fixture(scope="module")
def outcomes_with_use_mesh(toy_site: MakeSite) -> dict[str, str]:
    return _play(toy_site(jax="0.6.2", new=False), OLD_JAX_TOO)


def test_the_scenarios_are_found() -> None:
    assert len(SCENARIOS) > 25
    assert set(OLD_JAX_TOO) < set(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_mesh(outcomes: dict[str, str], scenario: str) -> None:
    if outcomes[scenario]:
        pytest.fail(outcomes[scenario], pytrace=False)


@pytest.mark.parametrize("scenario", OLD_JAX_TOO)
def test_mesh_with_use_mesh(outcomes_with_use_mesh: dict[str, str], scenario: str) -> None:
    if outcomes_with_use_mesh[scenario]:
        pytest.fail(outcomes_with_use_mesh[scenario], pytrace=False)
