"""A third party's AOT unpickler: JAX's check copied, and a constructor of its own."""

import pickle
from typing import Any

from jax._src.lib import xla_client


class _JaxPjrtUnpickler(pickle.Unpickler):
    def __init__(
        self,
        file: Any,
        backend: Any,
        execution_devices: Any,
        host_callbacks: Any,
        compile_options: Any,
    ) -> None:
        super().__init__(file)
        if execution_devices[0].client != backend:
            raise ValueError("Execution devices belong to a client other than `backend`.")
        self.backend = backend
        self.devices = xla_client.DeviceList(tuple(execution_devices))

    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "exec":
            return self.backend.deserialize_executable(rest[0], executable_devices=self.devices)
        return self.devices[rest[0]] if kind == "device" else self.backend
