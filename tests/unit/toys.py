"""Toy distributions of JAX and Orbax, with versions and shapes as a test wants them.

A toy site is a real site directory: importable packages that are named and shaped like the real
ones as far as the patches look, and real ``*.dist-info/METADATA`` files. A child interpreter
sees it, jaxcompat and jaxcompat's dependencies, and nothing else that is installed (``-S``), so
the tests say the same whether JAX is installed here or not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import packaging
import wrapt

import jaxcompat

MULTISLICE = "orbax.checkpoint._src.multihost.multislice"
HANDLERS = "orbax.checkpoint._src.serialization.jax_array_handlers"
TYPE_HANDLERS = "orbax.checkpoint._src.serialization.type_handlers"
AOT = "jax.experimental.serialize_executable"

BACKEND = "jax-aot-backend"
BROADCAST = "orbax-broadcast-mesh"
SINGLE = "orbax-single-replica-mesh"
PATCHES = (BACKEND, BROADCAST, SINGLE)
"""The patches that the toys are shaped for."""

AFFECTED = {"jax": "0.9.0", "orbax": "0.11.33"}
"""A pair for which each of them is armed."""
UNAFFECTED = {"jax": "0.3.0", "orbax": "0.1.0"}
"""A pair for which none of them is."""
UNLISTED = {"jax": "98.7", "orbax": "99.8"}
"""A pair that nobody can have run."""

PRELUDE = f"""
from report import *
AOT, MULTISLICE, HANDLERS = {AOT!r}, {MULTISLICE!r}, {HANDLERS!r}
TYPE_HANDLERS = {TYPE_HANDLERS!r}
BACKEND, BROADCAST, SINGLE = {BACKEND!r}, {BROADCAST!r}, {SINGLE!r}
def load_all():
    return load(AOT), load(MULTISLICE), load(HANDLERS)
"""
"""What each script of a child begins with."""


def file_of(module: str) -> str:
    """Return the path of a module's file under its site."""
    return f"{module.replace('.', '/')}.py"


TOY_JAX = {
    "jax/__init__.py": """
        from jax import sharding
        from jax.version import __version__

        if {new}:
            from jax.sharding import set_mesh

        class Client:
            def __init__(self, platform, version="toy 1"):
                self.platform = platform
                self.platform_version = version

        class Device:
            def __init__(self, client, id=0):
                self.client = client
                self.id = id

            def __repr__(self):
                return f"{{self.client.platform}}:{{self.id}}"

        _names = {{None: "cpu", "cpu": "cpu", "gpu": "gpu", "cuda": "gpu"}}
        _devices = {{
            name: [Device(client, number) for number in range(2)]
            for name, client in (("cpu", Client("cpu")), ("gpu", Client("gpu")))
        }}

        def devices(platform=None):
            if platform not in _names:
                raise RuntimeError(f"Unknown backend {{platform}}")
            return _devices[_names[platform]]

        asked = []

        def __getattr__(name):
            # JAX warns once here of a name that is gone, and answers for it.
            asked.append(name)
            raise AttributeError(name)
        """,
    "jax/version.py": "__version__ = {loaded!r}\n",
    "jax/sharding.py": """
        import threading

        set_to = []
        _local = threading.local()

        class Mesh:
            def __init__(self, devices, axis_names):
                self.axis_names = tuple(axis_names)

            @property
            def empty(self):
                return not self.axis_names

        _no_mesh = Mesh(None, ())

        def get_abstract_mesh():
            return getattr(_local, "mesh", _no_mesh)

        def trace(function):
            def traced(*args):
                _local.tracing = True
                try:
                    return function(*args)
                finally:
                    _local.tracing = False
            return traced

        class _Set:
            # As the real one: set at once, and back when the with block ends.
            def __init__(self, mesh):
                if getattr(_local, "tracing", False):
                    raise ValueError("no mesh may be set inside a trace")
                set_to.append(mesh)
                self.mesh, self.before = mesh, get_abstract_mesh()
                _local.mesh = mesh

            def __enter__(self):
                return self.mesh

            def __exit__(self, *exception):
                assert _local.mesh is self.mesh, "meshes are left in another order than entered"
                _local.mesh = self.before

        if {new}:
            set_mesh = _Set
        else:
            use_mesh = _Set
        """,
    "jax/experimental/__init__.py": "",
    file_of(AOT): '''
        import pickle

        def deserialize_and_load(
            serialized, in_tree, out_tree, backend=None, execution_devices=None
        ):
            """Load an executable."""
            if serialized == b"junk":
                raise ValueError("this is no executable")
            clients = {{id(device.client) for device in execution_devices or ()}}
            if clients and clients != {{id(backend)}}:
                raise ValueError("Execution devices belong to a client other than `backend`.")
            return backend, execution_devices

        class _JaxPjrtUnpickler(pickle.Unpickler):
            def __init__(self, file, backend, execution_devices=None):
                """Unpickle an executable."""
                super().__init__(file)
                self.backend = backend
                self.execution_devices = execution_devices

        ORIGINALS = {{
            "deserialize_and_load": deserialize_and_load,
            "_JaxPjrtUnpickler.__init__": _JaxPjrtUnpickler.__init__,
        }}
        ''',
    "numpy/__init__.py": "def empty(shape, dtype=None):\n    return ()\n",
}

TOY_ORBAX = {
    "orbax/checkpoint/__init__.py": "from orbax.checkpoint.version import __version__\n",
    "orbax/checkpoint/version.py": "__version__ = {loaded!r}\n",
    "orbax/checkpoint/_src/__init__.py": "",
    "orbax/checkpoint/_src/multihost/__init__.py": "",
    "orbax/checkpoint/_src/serialization/__init__.py": "",
    file_of(MULTISLICE): '''
        import jax

        def broadcast_one_replica_to_all(
            in_tree: tuple, global_mesh, replica_axis_index: int, is_source: bool, limit=None
        ):
            """Broadcast one replica to all."""
            return jax.sharding.get_abstract_mesh().axis_names

        def _globalize_single_replica_arrays(inp, replica_axis_index, global_mesh, is_source):
            """Add the replica axis."""
            return jax.sharding.get_abstract_mesh().axis_names

        def precompile_broadcast(in_tree, global_mesh, replica_axis_index):
            """Compile ahead."""
            return jax.sharding.get_abstract_mesh().axis_names

        ORIGINALS = {{
            one.__name__: one
            for one in (
                broadcast_one_replica_to_all,
                _globalize_single_replica_arrays,
                precompile_broadcast,
            )
        }}
        ''',
    file_of(HANDLERS): '''
        import jax

        async def _single_replica_deserialize_and_broadcast(
            infos, args: list, shardings, single_replica_shardings
        ):
            """Read on one replica, and broadcast."""
            return jax.sharding.get_abstract_mesh().axis_names

        ORIGINALS = {{
            "_single_replica_deserialize_and_broadcast": _single_replica_deserialize_and_broadcast
        }}
        ''',
    file_of(TYPE_HANDLERS): '''
        import jax

        class SingleReplicaArrayHandler:
            async def deserialize(self, infos, args=None):
                """Read on one replica, and broadcast."""
                return jax.sharding.get_abstract_mesh().axis_names

        ORIGINALS = {{
            "SingleReplicaArrayHandler.deserialize": SingleReplicaArrayHandler.deserialize
        }}
        ''',
}


def changed(module: str, *edits: tuple[str, str]) -> dict[str, str]:
    """Return a toy module's file with every occurrence of some texts replaced, for `files`.

    An empty text stands for the module's end.
    """
    file = file_of(module)
    source = dedent({**TOY_JAX, **TOY_ORBAX}[file]).format(loaded="", new=True)
    for old, new in edits:
        assert old in source, f"{module} has no {old!r} to change"
        source = source.replace(old, new) if old else f"{source}\n{dedent(new)}"
    return {file: source}


@dataclass(frozen=True)
class Report:
    """What a child told, logged, warned of and printed."""

    facts: dict[str, Any]
    log: list[tuple[str, str]]
    warnings: list[dict[str, str]]
    status: dict[str, dict[str, Any]]
    """`jaxcompat.status()` at the child's exit, by id; empty where it was never imported."""
    output: str
    errors: str

    def __getitem__(self, fact: str) -> Any:
        return self.facts[fact]

    def logged(self, level: str) -> list[str]:
        return [line for logged_at, line in self.log if logged_at == level]

    def complaint(self, patch_id: str) -> str:
        """Return the one WARNING that names a patch."""
        (line,) = (line for line in self.logged("WARNING") if patch_id in line)
        return line

    @property
    def states(self) -> dict[str, str]:
        return {patch_id: one["state"] for patch_id, one in self.status.items()}

    @property
    def warned(self) -> list[str]:
        """The texts of the `JaxcompatWarning`s."""
        return [one["text"] for one in self.warnings if one["category"] == "JaxcompatWarning"]


@dataclass(frozen=True)
class ToySite:
    """A site directory, and the children that see it."""

    path: Path
    dependencies: Path
    """The directory that holds jaxcompat (or a changed copy) and what it imports."""

    def write(self, name: str, source: str) -> Path:
        """Write a file under the site; its folders are made."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(source), encoding="utf-8")
        return file

    def distribution(self, name: str, version: str) -> None:
        """Install a distribution's metadata."""
        self.write(
            f"{name.replace('-', '_')}-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        )

    def run(
        self,
        *blocks: str,
        environment: Mapping[str, str] | None = None,
        options: tuple[str, ...] = (),
        expect: int = 0,
    ) -> Report:
        """Run a script, in blocks, that may `tell` in a child; return what it reported."""
        program = self.path.parent / "program.py"
        program.write_text("".join((PRELUDE, *map(dedent, blocks))), encoding="utf-8")
        told = self.path.parent / "report.json"
        ended = self.python(
            *options, str(program), environment={"REPORT_TO": str(told), **(environment or {})}
        )
        assert ended.returncode == expect, f"{ended.returncode}\n{ended.stdout}{ended.stderr}"
        found = json.loads(told.read_text(encoding="utf-8"))
        told.unlink()
        return Report(
            facts=found["facts"],
            log=[(level, line) for level, line in found["log"]],
            warnings=found["warnings"],
            status={one["id"]: one for one in found["status"]},
            output=ended.stdout,
            errors=ended.stderr,
        )

    def python(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a child interpreter to its end."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAXCOMPAT_", "PYTHON"))
        }
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            env={
                **inherited,
                "PYTHONPATH": os.pathsep.join(map(str, (self.path, self.dependencies))),
                **(environment or {}),
            },
            cwd=self.path.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def link_dependencies(folder: Path) -> Path:
    """Make a directory of what a child needs of what is installed here.

    Its jaxcompat is the one under test, with the patches that the toys are shaped for: another
    patch of the catalogue can neither break these tests nor hide what they look for.
    """
    shim = folder / "jaxcompat"
    (shim / "patches").mkdir(parents=True)
    for package in (wrapt, packaging):
        (folder / package.__name__).symlink_to(_folder(package))
    for file in _folder(jaxcompat).iterdir():
        if file.name not in ("patches", "__pycache__"):
            (shim / file.name).symlink_to(file)
    for name in ("__init__", *(patch_id.replace("-", "_") for patch_id in PATCHES)):
        (shim / "patches" / f"{name}.py").symlink_to(_folder(jaxcompat) / "patches" / f"{name}.py")
    return folder


def _folder(package: ModuleType) -> Path:
    assert package.__file__ is not None
    return Path(package.__file__).resolve().parent


def build(
    path: Path,
    dependencies: Path,
    *,
    jax: str | None,
    orbax: str | None,
    loaded_jax: str | None = None,
    loaded_orbax: str | None = None,
    new: bool = True,
    files: Mapping[str, str | None] | None = None,
) -> ToySite:
    """Build a toy site.

    Parameters
    ----------
    path
        The directory to make.
    dependencies
        What the children see besides (`link_dependencies`).
    jax, orbax
        The versions that the metadata give; None: not installed.
    loaded_jax, loaded_orbax
        The versions that the code gives, where they are others.
    new
        Whether the toy JAX has `jax.set_mesh`, as from 0.7.1 on, or `jax.sharding.use_mesh`.
    files
        Sources to add or to put in the place of the toys' own, by their path under the site;
        None: the file is missing.
    """
    site = ToySite(path, dependencies)
    path.mkdir(parents=True)
    (path / "report.py").write_bytes(Path(__file__).with_name("report.py").read_bytes())
    for name, version, loaded, sources in (
        ("jax", jax, loaded_jax, TOY_JAX),
        ("orbax-checkpoint", orbax, loaded_orbax, TOY_ORBAX),
    ):
        if version is None:
            continue
        site.distribution(name, version)
        for file, source in sources.items():
            site.write(file, dedent(source).format(loaded=loaded or version, new=new))
    for file, changed in (files or {}).items():
        if changed is None:
            (path / file).unlink()
        else:
            site.write(file, changed)
    return site
