"""Asks README.md's program what a single-replica restore got wrong: prints each leaf it names."""

import os
import pathlib
import re
import sys
import time
import traceback

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from restore import begin, make_mesh, read

PROCESSES = 2


def main(rank: int, coordinator: str, directory: str) -> None:
    readme = pathlib.Path(__file__).parents[3].joinpath("README.md").read_text(encoding="utf-8")
    section = readme.split("## Was an earlier restore wrong?")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code
    names: dict[str, object] = {}
    exec(code[1], names)
    differing = names["differing"]
    assert callable(differing)

    path = begin(rank, coordinator, directory)
    sharding = NamedSharding(make_mesh(AxisType.Auto), PartitionSpec("data"))
    restored = read(path, "restore", sharding, rank)
    print(f"rank {rank}:", *sorted({name for name, device in differing(restored, path)}))
    jax.distributed.shutdown()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if sys.argv[1] == "0":
            time.sleep(2)  # the other process is aborted as soon as its coordinator is gone
        os._exit(1)
