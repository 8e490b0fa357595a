"""Known incompatibilities between exactly your JAX and exactly your Orbax stop biting.

``import jaxcompat`` on the first line of the program arms the patches that the installed versions
need, and nothing else; each is applied when the module that it mends is imported. Neither JAX nor
Orbax is imported here. ``python -m jaxcompat`` says what is done and why; ``JAXCOMPAT_DISABLE=1``
(or a list of ids) undoes it from outside.
"""

from typing import Any

from jaxcompat.engine import (
    JaxcompatError,
    JaxcompatWarning,
    PatchStatus,
    apply,
    arm,
    disabled,
    patch_unpickler,
    revert,
    status,
)

__all__ = [
    "JaxcompatError",
    "JaxcompatWarning",
    "PatchStatus",
    "__version__",
    "apply",
    "disabled",
    "patch_unpickler",
    "revert",
    "status",
]

arm()
del arm


def __getattr__(name: str) -> Any:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:  # asked for when it is wanted: a look-up in every job would be for nobody
        return version("jaxcompat")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"
