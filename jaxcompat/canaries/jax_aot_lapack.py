"""A process that never traced any linear algebra loads a serialized executable that contains some.

On CPU its call is a segmentation fault (jax-ml/jax#28908): jaxlib takes the pointers to LAPACK from
SciPy when such a program is traced, and loading one traces nothing.

By hand, with JAX_PLATFORMS=cpu, a process of each number at the same time:
    python jax_aot_lapack.py 0 127.0.0.1:9876 /tmp/empty
    python jax_aot_lapack.py 1 127.0.0.1:9876 /tmp/empty
"""

import faulthandler
import pickle
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

PROCESSES = 2
DEVICES = 2

MATRIX = np.array([[4, 2, 0], [2, 5, 3], [0, 3, 6]], np.float32)


def compile_into(file: Path) -> None:
    device = jax.devices("cpu")[0]
    argument = jax.device_put(MATRIX, device)
    compiled = jax.jit(jax.numpy.linalg.cholesky).lower(argument).compile()
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(serialize(compiled)))
    unfinished.rename(file)


def load_from(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)
    device = jax.devices("cpu")[0]
    # As many devices as the executable was compiled for: that is another matter.
    loaded = deserialize_and_load(*pickle.loads(file.read_bytes()), backend=device.client)
    lower = np.asarray(loaded(jax.device_put(MATRIX, device)))
    np.testing.assert_allclose(lower @ lower.T, MATRIX, rtol=1e-5)
    print("factorized by a program that was loaded")


if __name__ == "__main__":
    faulthandler.enable()
    rank, directory = int(sys.argv[1]), Path(sys.argv[3])
    (load_from if rank else compile_into)(directory / "executable")
