"""A third party's unpickler that is unlike JAX's in all but its two parameters."""

from typing import Any


class Unpickler:
    __slots__ = ("backend",)

    def __init__(self, backend: Any, execution_devices: Any) -> None:
        if execution_devices[0].client != backend:
            raise ValueError("Execution devices belong to a client other than `backend`.")
        self.backend = backend

    def __eq__(self, other: object) -> bool:
        return NotImplemented

    def load(self, strict: bool = False) -> Any:
        if not strict:
            raise LookupError("not strict")
        return self.backend
