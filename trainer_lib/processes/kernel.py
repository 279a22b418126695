"""A check of the version of Linux."""

import platform
import re
import warnings

from packaging.version import parse

_LOWEST = "5.5.0"


def check_os_kernel() -> None:
    """Warn if the kernel of Linux is so old that processes may hang."""
    name, release = platform.system(), platform.release()
    version = re.match(r"\d+\.\d+\.\d+", release)
    if name == "Linux" and version is not None and parse(version[0]) < parse(_LOWEST):
        warnings.warn(
            f"Linux {release} is older than {_LOWEST}, and processes may hang on it. Update the kernel.", stacklevel=2
        )
