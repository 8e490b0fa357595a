"""A release with the fault mended by hand: told as not needed, and not as an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from jaxcompat import versions
from jaxcompat.patch import catalogue

Python = Callable[..., "CompletedProcess[str]"]

# What upstream might write at the end of its own module.
MENDED = {
    "jax-aot-backend": (
        "jax",
        "experimental/serialize_executable.py",
        """
def _own(function):
  import functools, inspect
  parameters = inspect.signature(function)
  @functools.wraps(function)
  def with_own_client(*args, **kwargs):
    bound = parameters.bind(*args, **kwargs)
    if bound.arguments.get("execution_devices") is not None:
      bound.arguments["backend"] = bound.arguments["execution_devices"][0].client
    return function(*bound.args, **bound.kwargs)
  return with_own_client
deserialize_and_load = _own(deserialize_and_load)
_JaxPjrtUnpickler.__init__ = _own(_JaxPjrtUnpickler.__init__)
""",
    ),
    "orbax-broadcast-mesh": (
        "orbax-checkpoint",
        "_src/multihost/multislice.py",
        """
def _without_a_mesh(function):
  @functools.wraps(function)
  def without_a_mesh(*args, **kwargs):
    set_mesh = vars(jax).get("set_mesh") or jax.sharding.use_mesh
    with set_mesh(jax.sharding.Mesh(np.empty((), dtype=object), ())):
      return function(*args, **kwargs)
  return without_a_mesh
broadcast_one_replica_to_all = _without_a_mesh(broadcast_one_replica_to_all)
if "precompile_broadcast" in globals():
  precompile_broadcast = _without_a_mesh(precompile_broadcast)
""",
    ),
}


@pytest.mark.parametrize("patch_id", MENDED)
def test_a_fault_mended_by_hand_is_not_needed(
    patch_id: str, python: Python, tmp_path: Path
) -> None:
    installed = versions.Installed()
    if versions.judge(catalogue()[patch_id].affected, installed).state != "affected":
        pytest.skip("not affected")
    distribution, module, mend = MENDED[patch_id]
    package = Path(distribution.split("-")[0], *distribution.split("-")[1:])
    source = Path(str(metadata.distribution(distribution).locate_file(package)))
    shutil.copytree(source, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / package / module).open("a", encoding="utf-8") as file:
        file.write(mend)

    ran = python("-m", "jaxcompat", "check", "--json", patch_id, PYTHONPATH=str(tmp_path))
    (found,) = json.loads(ran.stdout)["checks"]
    assert found["verdict"] == "not needed", found
    assert ran.returncode == 0
