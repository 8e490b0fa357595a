"""Saves and restores every dtype through every path of Orbax, and compares bytes on every host.

Prints one JSON line for each leaf that is not what was saved, each path that refused a dtype, and
a last one with the counts. Raises nothing for a difference: whoever runs it knows what to expect.

    ROUNDTRIP_PATHS   names of paths, with semicolons between them (all of PATHS)
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import json
import os
import pathlib
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import absl.flags
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost import multislice
from packaging.version import Version

PROCESSES = 2
DEVICES = 8

AXES = ("replica", "data")
Tree = dict[str, Any]

LIMIT = 2**24
SPLIT = 256
"""Bytes of a broadcast: with the one everything at once, with the other a leaf or two."""

LOUD = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3", "float8_e8m0fnu")
"""Dtypes that some release of Orbax or TensorStore cannot save (0.1.78 is Python 3.10's last), or
not broadcast: an error, and so not looked for here."""

TOGETHER = "all others"

_names = (f"{number}" for number in itertools.count())


def make_mesh(*, spanning: bool = False) -> Mesh:
    """Return 2 replicas of 4 devices, or as many as there are processes.

    A replica is one process, or, spanning, a part of every process.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    replicas = max(2, PROCESSES)
    laid_out = np.array(devices).reshape(replicas, -1)
    if spanning:
        laid_out = np.array(devices).reshape(-1, replicas).T
    return Mesh(laid_out, AXES)


# --- what is saved ---------------------------------------------------------------------------


def width(dtype: np.dtype) -> int:
    """Return how many bits of each item mean something: less than a byte holds of some."""
    narrow = re.fullmatch(r"(?:u?int|float)([24])(?:_.*)?", dtype.name)
    return int(narrow[1]) if narrow else dtype.itemsize * 8


def patterns(dtype: np.dtype) -> np.ndarray:
    """Return all bit patterns of a dtype of up to 16 bits, and of a wider one the special ones."""
    if dtype.kind == "b":
        return np.array([False, True])
    if (narrow := width(dtype)) < 8:
        numbers = np.arange(2**narrow, dtype=np.uint8)
        return numbers.view(dtype) if "float" in dtype.name else numbers.astype(dtype)
    if jnp.issubdtype(dtype, np.complexfloating):
        part = np.dtype(f"float{dtype.itemsize * 4}")
        numbers = patterns(part)
        return np.stack([numbers, numbers[::-1]], axis=1).reshape(-1).view(dtype)
    unsigned = np.dtype(f"uint{dtype.itemsize * 8}")
    if dtype.itemsize <= 2:
        return np.arange(2 ** (dtype.itemsize * 8), dtype=unsigned).view(dtype)
    bits = dtype.itemsize * 8
    special = [0, 1, 2, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2 ** (bits - 1) + 1]
    if jnp.issubdtype(dtype, np.floating):
        mantissa = ml_dtypes.finfo(dtype).nmant
        infinity = (2 ** (bits - 1 - mantissa) - 1) << mantissa
        # Infinities, a quiet and a signalling NaN with payload, the largest, the smallest normal.
        quiet, signalling = infinity | 1 << (mantissa - 1) | 0x2A, infinity | 0x2A
        special += [infinity, infinity | 2 ** (bits - 1), quiet, signalling, infinity - 1]
        special += [1 << mantissa, (1 << mantissa) - 1]
    return np.array(special, dtype=unsigned).view(dtype)


def dtypes() -> Iterator[np.dtype]:
    """Yield every dtype that arrays of this JAX can have."""
    names = [name for name in ml_dtypes.__all__ if name.startswith(("int", "uint", "float"))]
    for name in ["bool_", "bfloat16", "complex64", "complex128", *names] + [
        f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)
    ]:
        # JAX 0.12 has these names, and XLA:CPU aborts over a program that has such arrays.
        if hasattr(jnp, name) and not re.match("u?int1$|float6", name):
            dtype = np.dtype(getattr(jnp, name))
            if dtype.itemsize < 8 or dtype.name == "complex64" or jax.config.jax_enable_x64:
                yield dtype


def as_bytes(value: np.ndarray) -> bytes:
    if (narrow := width(value.dtype)) < 8:
        return bytes(np.frombuffer(value.tobytes(), np.uint8) & (2**narrow - 1))
    return value.tobytes()


def make_leaves(dtype: np.dtype) -> dict[str, tuple[np.ndarray, PartitionSpec]]:
    all_patterns = patterns(dtype)
    whole = np.resize(all_patterns, -(-all_patterns.size // 8) * 8)
    some = np.resize(all_patterns, 64).reshape(16, 4)
    return {
        "patterns": (whole, PartitionSpec("data")),
        "sharded": (some, PartitionSpec("data")),
        "replicated": (some, PartitionSpec()),
        "scalar": (all_patterns[-1].reshape(()), PartitionSpec()),
    }


def make_array(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    array = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
    different = compare(array, value, sharding)
    assert different is None, f"not even on its way in: {different}"
    return array


def make_groups(mesh: Mesh) -> Iterator[tuple[str, dict[str, np.ndarray], Tree]]:
    """Yield the name of each tree, its values, and the arrays that hold them."""
    together: tuple[dict[str, np.ndarray], Tree] = {}, {}
    for dtype in dtypes():
        values, tree = ({}, {}) if dtype.name in LOUD else together
        for name, (value, spec) in make_leaves(dtype).items():
            values[f"{dtype.name}/{name}"] = value
            tree[f"{dtype.name}/{name}"] = make_array(value, NamedSharding(mesh, spec))
        if dtype.name in LOUD:
            yield dtype.name, values, tree
    yield TOGETHER, *together
    everywhere = NamedSharding(mesh, PartitionSpec())
    for name in ("float32", "int8", "bool"):
        empty = {"empty": np.zeros((0,), name), "rows of none": np.zeros((0, 4), name)}
        yield f"{name}, empty", empty, {n: make_array(v, everywhere) for n, v in empty.items()}
    for kind in sorted({memory.kind for memory in jax.local_devices()[0].addressable_memories()}):
        sharding = NamedSharding(mesh, PartitionSpec("data"), memory_kind=kind)
        value = {"kernel": make_leaves(np.dtype(np.float32))["sharded"][0]}
        with contextlib.suppress(ValueError):  # "Cannot make an array there", on some of CPU's
            yield f"in {kind}", value, {"kernel": make_array(value["kernel"], sharding)}
    donated = NamedSharding(mesh, PartitionSpec("data"))
    value = {"kernel": make_leaves(np.dtype(np.float32))["sharded"][0]}
    same = jax.jit(lambda array: array, donate_argnums=0, out_shardings=donated)
    yield "donated", value, {"kernel": same(make_array(value["kernel"], donated))}


# --- the paths -------------------------------------------------------------------------------


def multiprocessing() -> Any:
    # With processes named, Orbax waits at the coordination service's barriers.
    if PROCESSES == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(PROCESSES)), barrier_sync_key_prefix=next(_names)
    )


def abstract(tree: Tree) -> Tree:
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in tree.items()
    }


def make(checkpointer: Any, handler: Any) -> Any:
    return checkpointer(
        handler(multiprocessing_options=(options := multiprocessing())),
        multiprocessing_options=options,
    )


def standard(path: pathlib.Path, tree: Tree, *, target: bool, checkpointer: Any) -> Tree:
    made = make(checkpointer, ocp.StandardCheckpointHandler)
    made.save(path, args=ocp.args.StandardSave(tree))
    if hasattr(made, "wait_until_finished"):
        made.wait_until_finished()
    wanted = ocp.args.StandardRestore(abstract(tree) if target else None)
    restored: Tree = made.restore(path, args=wanted)
    made.close()
    return restored


def pytree(path: pathlib.Path, tree: Tree, *, target: bool) -> Tree:
    made = make(ocp.Checkpointer, ocp.PyTreeCheckpointHandler)
    made.save(path, args=ocp.args.PyTreeSave(tree))
    wanted = {
        name: ocp.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=leaf.sharding, global_shape=leaf.shape
        )
        for name, leaf in tree.items()
    }
    restored: Tree = made.restore(
        path, args=ocp.args.PyTreeRestore(restore_args=wanted if target else None)
    )
    return restored


def manager(path: pathlib.Path, tree: Tree, *, standard: bool) -> Tree:
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=multiprocessing())
    if jax.process_index() == 0:
        path.mkdir()
    barrier()
    with ocp.CheckpointManager(path, options=options) as made:
        save = ocp.args.StandardSave if standard else ocp.args.PyTreeSave
        made.save(0, args=save(tree))
        made.wait_until_finished()
        restore = ocp.args.StandardRestore if standard else ocp.args.PyTreeRestore
        args = [abstract(tree)] if standard else []
        extra = {} if standard else {"restore_args": single_args(tree, ocp.ArrayRestoreArgs)}
        restored: Tree = made.restore(0, args=restore(*args, **extra))
    return restored


def single_args(tree: Tree, kind: Any, **more: Any) -> Tree:
    return {
        name: kind(
            restore_type=jax.Array,
            global_shape=leaf.shape,
            dtype=leaf.dtype,
            sharding=leaf.sharding,
            **{key: make_more(leaf) for key, make_more in more.items()},
        )
        for name, leaf in tree.items()
    }


def replica_of(sharding: NamedSharding, replica_axis: int) -> NamedSharding:
    """Return the same over the one replica that this process belongs to."""
    mesh = sharding.mesh
    replicas = np.moveaxis(mesh.devices, replica_axis, 0)
    index = jax.process_index() if jax.process_count() == len(replicas) else 0
    devices = np.expand_dims(replicas[index], replica_axis)
    return NamedSharding(
        Mesh(devices, mesh.axis_names), sharding.spec, memory_kind=sharding.memory_kind
    )


def turned(tree: Tree, values: dict[str, np.ndarray], replica_axis: int, spanning: bool) -> Tree:
    mesh = make_mesh(spanning=spanning)
    if replica_axis:
        mesh = Mesh(mesh.devices.T, AXES[::-1])
    turned = {}
    for name, leaf in tree.items():
        kind = leaf.sharding.memory_kind
        turned[name] = make_array(
            values[name], NamedSharding(mesh, leaf.sharding.spec, memory_kind=kind)
        )
    return turned


def single_replica(
    path: pathlib.Path,
    tree: Tree,
    values: dict[str, np.ndarray],
    *,
    replica_axis: int = 0,
    limit: int = LIMIT,
    spanning: bool = False,
    **handler: Any,
) -> tuple[Tree, Tree]:
    tree = turned(tree, values, replica_axis, spanning)
    saved = dict(tree)
    for name, leaf in tree.items():
        if leaf.ndim and leaf.size % DEVICES == 0 and leaf.shape[0] >= DEVICES:
            # Without replicas: XLA:CPU changes a NaN where Orbax has each save a part of its own.
            everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec(AXES))
            saved[name] = make_array(values[name], everywhere)
    make(ocp.Checkpointer, ocp.PyTreeCheckpointHandler).save(path, args=ocp.args.PyTreeSave(saved))
    usual = ocp.type_handlers.get_type_handler(jax.Array)
    ocp.type_handlers.register_type_handler(
        jax.Array,
        ocp.type_handlers.SingleReplicaArrayHandler(
            replica_axis_index=replica_axis, broadcast_memory_limit_bytes=limit, **handler
        ),
        override=True,
    )
    try:
        restored = make(ocp.Checkpointer, ocp.PyTreeCheckpointHandler).restore(
            path,
            args=ocp.args.PyTreeRestore(
                restore_args=single_args(
                    tree,
                    ocp.type_handlers.SingleReplicaArrayRestoreArgs,
                    single_replica_sharding=lambda leaf: replica_of(leaf.sharding, replica_axis),
                )
            ),
        )
    finally:
        ocp.type_handlers.register_type_handler(jax.Array, usual, override=True)
    return restored, tree


def broadcast(tree: Tree, values: dict[str, np.ndarray], **options: Any) -> Tree:
    """Broadcast one replica to all, without a checkpoint."""
    source = PROCESSES == 1 or jax.process_index() == 0
    held = {}
    for name, leaf in tree.items():
        value = values[name] if source else np.zeros_like(values[name])
        held[name] = make_array(value, replica_of(leaf.sharding, 0))
    mesh = next(iter(tree.values())).sharding.mesh
    restored, _ = multislice.broadcast_one_replica_to_all(
        tuple(held.values()), mesh, 0, source, memory_limit_bytes=LIMIT, **options
    )
    return dict(zip(held, restored, strict=True))


def v1(path: pathlib.Path, tree: Tree, *, target: bool, asynchronous: bool = False) -> Tree:
    new = importlib.import_module("orbax.checkpoint.experimental.v1")
    if asynchronous:
        new.save_pytree_async(path, tree).result()
    else:
        new.save_pytree(path, tree)
    restored: Tree = new.load_pytree(path, abstract(tree)) if target else new.load_pytree(path)
    return restored


def emergency(path: pathlib.Path, tree: Tree, *, persistent: bool) -> Tree:
    """Save in steps, in every host's own directory and in the common one, and restore the last.

    With the local ones gone, from the common one, through the broadcast.
    """
    module = importlib.import_module("orbax.checkpoint.experimental.emergency.checkpoint_manager")
    mesh = next(iter(tree.values())).sharding.mesh
    local = path / f"local{jax.process_index()}"
    local.mkdir(parents=True)
    common = path / "common"
    common.mkdir(exist_ok=True)
    barrier()
    known = inspect.signature(module.CheckpointManagerOptions).parameters
    wanted = {
        "local": module.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        "persistent": module.PersistentCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        "replica_axis_index": 0,
    }
    options = module.CheckpointManagerOptions(**{k: v for k, v in wanted.items() if k in known})

    def manage() -> Any:
        return module.CheckpointManager(
            local, common, mesh, abstract_state=abstract(tree), options=options
        )

    args = ocp.args.Composite(state=ocp.args.PyTreeSave(tree))
    takes_composite = "Composite" in inspect.getsource(module.CheckpointManager.save)
    with contextlib.closing(manage()) as made:
        made.save(0, args=args if takes_composite else ocp.args.PyTreeSave(tree))
        made.wait_until_finished()
    barrier()
    if persistent:
        for step in local.iterdir():
            shutil.rmtree(step)
    barrier()
    with contextlib.closing(manage()) as made:
        assert made.latest_step() == 0, made.latest_step()
        restore = ocp.args.PyTreeRestore()
        found = made.restore(0, args=ocp.args.Composite(state=restore) if takes_composite else None)
    restored: Tree = found["state"] if takes_composite else found
    return restored


def barrier() -> None:
    if PROCESSES > 1:
        ocp.multihost.sync_global_processes(next(_names))


Path = Callable[..., Any]
PATHS: dict[str, Path] = {
    "standard": functools.partial(standard, target=True, checkpointer=ocp.Checkpointer),
    "standard, no target": functools.partial(standard, target=False, checkpointer=ocp.Checkpointer),
    "async": functools.partial(standard, target=True, checkpointer=ocp.AsyncCheckpointer),
    "pytree": functools.partial(pytree, target=True),
    "pytree, no target": functools.partial(pytree, target=False),
    "manager": functools.partial(manager, standard=True),
    "manager, pytree": functools.partial(manager, standard=False),
    "v1": functools.partial(v1, target=True),
    "v1, no target": functools.partial(v1, target=False),
    "v1, async": functools.partial(v1, target=True, asynchronous=True),
    "emergency, local": functools.partial(emergency, persistent=False),
    "emergency, persistent": functools.partial(emergency, persistent=True),
    "single replica": single_replica,
    "single replica, axis 1": functools.partial(single_replica, replica_axis=1),
    "single replica, split": functools.partial(single_replica, limit=SPLIT),
    "single replica, spanning": functools.partial(single_replica, spanning=True),
    "single replica, shard_map": functools.partial(single_replica, use_shard_map=True),
    "broadcast": broadcast,
    "broadcast, shard_map": functools.partial(broadcast, use_shard_map=True),
}


def exists(name: str) -> bool:
    """Whether this Orbax has the path, and this number of processes can take it."""
    if "shard_map" in name:
        taken = inspect.signature(multislice.broadcast_one_replica_to_all).parameters
        return "use_shard_map" in taken and PROCESSES > 1
    if name.startswith("v1"):
        return importlib.util.find_spec("orbax.checkpoint.experimental.v1") is not None
    if name.startswith("emergency"):  # to 0.11.25 it refuses CPU; between the two it was not run
        return PROCESSES == 2 and Version(ocp.__version__) >= Version("0.11.33")
    return True


# --- what came back --------------------------------------------------------------------------


def compare(
    array: Any, value: np.ndarray, sharding: NamedSharding | None
) -> tuple[str, str] | None:
    """Return what is different, and how, if anything is."""
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        if (array.shape, array.dtype) != (value.shape, value.dtype):
            return "dtype", f"{value.dtype}{value.shape} is {array.dtype}{array.shape}"
        same = as_bytes(array) == as_bytes(value)
        return None if same else ("bytes", how_many(array, value))
    if array.shape != value.shape:
        return "shape", f"{value.shape} is {array.shape}"
    if array.dtype != value.dtype:
        return "dtype", f"{value.dtype} is {array.dtype}"
    if sharding is not None and array.sharding != sharding:
        kinds = array.sharding.memory_kind, sharding.memory_kind
        if kinds[0] != kinds[1]:
            return "memory", f"{kinds[1]} is {kinds[0]}"
        return "sharding", f"{sharding} is {array.sharding}"
    for shard in array.addressable_shards:
        got, wanted = np.asarray(shard.data), np.asarray(value[shard.index])
        if as_bytes(got) != as_bytes(wanted):
            return "bytes", how_many(got, wanted)
    return None


def how_many(got: np.ndarray, wanted: np.ndarray) -> str:
    if got.shape != wanted.shape:
        return f"{wanted.shape} is {got.shape}"
    size = got.dtype.itemsize
    rows = [np.frombuffer(as_bytes(one), np.uint8).reshape(-1, size) for one in (got, wanted)]
    different = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    first = different[0]
    shown = " is ".join(rows[i][first].tobytes()[::-1].hex() for i in (1, 0))
    return f"{different.size} of {len(rows[0])}, as 0x{shown}"


def go(name: str, path: pathlib.Path, values: dict[str, np.ndarray], tree: Tree) -> Iterator[Any]:
    take = PATHS[name]
    if name.startswith("single"):
        restored, tree = take(path, tree, values)
    elif name.startswith("broadcast"):
        restored = take(tree, values)
    else:
        restored = take(path, tree)
    for leaf, value in values.items():
        different = compare(restored[leaf], value, tree[leaf].sharding)
        if different:
            yield leaf, *different


def keys(mesh: Mesh) -> Iterator[tuple[str, Tree]]:
    for implementation in ("threefry2x32", "rbg", "unsafe_rbg"):
        made = jax.jit(
            lambda i=implementation: jax.random.split(jax.random.key(7, impl=i), 8),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )()
        yield f"key<{implementation}>", {"key": made}


def main(rank: int, coordinator: str, directory: str) -> None:
    if PROCESSES > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, PROCESSES, rank, initialization_timeout=60)
        # What the emergency CheckpointManager asks for.
        absl.flags.FLAGS.mark_as_parsed()
        ocp.multihost.initialize_runtime_to_distributed_ids()
        ocp.multihost.initialize_distributed_to_device_ids()
    mesh = make_mesh()
    groups: list[tuple[str, Any, Tree]] = [*make_groups(mesh)]
    groups += ((name, None, tree) for name, tree in keys(mesh))
    wanted = [name for name in os.environ.get("ROUNDTRIP_PATHS", "").split(";") if name]
    tried = leaves = 0
    for path in wanted or PATHS:
        if not exists(path):
            continue
        began = time.monotonic()
        for group, values, tree in groups:
            if path.startswith(("single", "broadcast", "emergency")) and (
                # Extended dtypes do not come there, and XLA:CPU cannot merge in host memory. An
                # error leaves the processes at different barriers, or one waits for the other.
                values is None or group.endswith("_host")
            ):
                continue
            if path.startswith("emergency") and (group in LOUD or group.endswith("empty")):
                continue
            tried += 1
            leaves += len(tree)
            found: list[tuple[str, str, str]] = []
            where = pathlib.Path(directory).absolute() / next(_names)
            try:
                if values is None:
                    found = list(go_keys(path, where, tree))
                else:
                    found = list(go(path, where, values, tree))
            # Whatever Orbax raises is loud, and so not what is looked for: it is told, and counted.
            except Exception as error:
                if os.environ.get("ROUNDTRIP_TRACE"):
                    traceback.print_exc()
                found = [("", "error", f"{type(error).__name__}: {error}"[:200])]
            for name, outcome, detail in found:
                dtype, _, leaf = name.rpartition("/")
                told = {"path": path, "group": dtype or group, "leaf": leaf, "outcome": outcome}
                print(json.dumps({"rank": rank, **told, "detail": detail}), flush=True)
        print(f"# {path}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps({"rank": rank, "trees": tried, "leaves": leaves}), flush=True)
    if PROCESSES > 1:
        jax.distributed.shutdown()


def go_keys(name: str, path: pathlib.Path, tree: Tree) -> Iterator[tuple[str, str, str]]:
    restored = PATHS[name](path, tree)["key"]
    if restored.dtype != tree["key"].dtype:
        yield "key", "dtype", f"{tree['key'].dtype} is {restored.dtype}"
    else:
        raw = jax.random.key_data(tree["key"])
        different = compare(jax.random.key_data(restored), np.asarray(raw), None)
        if different:
            yield "key", *different


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if sys.argv[1] == "0":
            time.sleep(2)  # the other process is aborted as soon as its coordinator is gone
        os._exit(1)
