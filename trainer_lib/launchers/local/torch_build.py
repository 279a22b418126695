"""The accelerators that the installed torch was built for, read without importing it."""

import ctypes
import importlib.util
import runpy
import sys
from pathlib import Path

_CUDA = "cuda"
_BUILDS = (_CUDA, "hip", "xpu")  # what torch/version.py says
_DRIVER_OF_CUDA = "libcuda.so.1"


def has_no_accelerators() -> bool:
    """Whether the installed torch cannot use any accelerator; False where only torch itself can tell.

    Example:
        >>> has_no_accelerators()  # torch is imported here
        False
    """
    if "torch" in sys.modules or sys.platform == "darwin":
        return False
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    build = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    kinds = [name for name in _BUILDS if build.get(name, True)]
    return (kinds == [] or (kinds == [_CUDA] and not _has_driver())) and not _has_backends()


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER_OF_CUDA)
    except OSError:
        return False
    return True


def _has_backends() -> bool:
    """Whether a package for other accelerators is installed, which torch loads at its import."""
    from importlib import metadata

    return bool(metadata.entry_points(group="torch.backends"))
