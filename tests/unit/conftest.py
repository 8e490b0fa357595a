"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from . import toys

# The machines that run this are shared: how long an example takes says nothing.
hypothesis.settings.register_profile("unit", deadline=None, database=None)
hypothesis.settings.load_profile("unit")

MakeSite = Callable[..., toys.ToySite]


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with jaxcompat and what it imports, and nothing else."""
    return toys.link_dependencies(tmp_path_factory.mktemp("dependencies"))


@pytest.fixture(scope="session")
def toy_site(tmp_path_factory: pytest.TempPathFactory, dependencies: Path) -> MakeSite:
    """Return a function that builds a site of toy distributions; see `toys.build`."""

    def make(**how: Any) -> toys.ToySite:
        return toys.build(
            tmp_path_factory.mktemp("toys") / "site",
            **{"dependencies": dependencies, **toys.AFFECTED, **how},
        )

    return make


@pytest.fixture
def affected(toy_site: MakeSite) -> toys.ToySite:
    """Return a site with a pair that is affected by every patch."""
    return toy_site()
