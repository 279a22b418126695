"""The machine, libraries and process that a run uses."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_lib.foundation.imports import imported_versions
from trainer_lib.processes.proc_stat import began_at

_GIT_TIMEOUT = 2.0  # seconds
_PACKAGES = ("numpy", "transformers", "datasets", "accelerate", "peft", "safetensors")


def describe_environment() -> dict[str, Any]:
    """Return facts about the machine and the libraries, under readable names."""
    import torch

    from trainer_lib.foundation.device_types import toolkit_versions

    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": f"{platform.system()}-{platform.release()}-{platform.machine()}",  # platform() starts a process
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory": _total_memory(),
        **_devices(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    facts.update(toolkit_versions())
    # Only imported packages: nothing is imported just for its version.
    facts.update(imported_versions(_PACKAGES))
    return {**facts, "script": _script(), "folder": str(Path.cwd())}


def script_commit() -> str | None:
    """Return the git commit of the script's repository, and whether files differ from it; git may take seconds."""
    git, folder = shutil.which("git"), Path(_script()).resolve().parent
    if git is None or not folder.is_dir():
        return None
    try:
        lines = _output([git, "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"])
    except (OSError, subprocess.SubprocessError):  # no repository, or git takes too long
        return None
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid")), "(initial)")
    if commit == "(initial)":  # the repository has no commit
        return None
    return commit if all(line.startswith("#") for line in lines) else f"{commit} (with changes)"


def describe_process() -> dict[str, Any]:
    """Return the facts by which `is_alive` identifies this process."""
    return {"pid": os.getpid(), "host": platform.node(), "boot": _boot(), "began": _began(os.getpid())}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Whether a described process still runs; `None` if that is unknown, such as on another machine."""
    import psutil

    if process.get("host") != platform.node():
        return None
    if process.get("boot") != _boot():
        return False
    try:
        known = psutil.Process(int(process["pid"]))
        # Process ids are reused: it is the same process only if its start time matches.
        is_same = abs(_began(known.pid) - float(process["began"])) < 1
        return is_same and known.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.AccessDenied:
        return None
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def _began(pid: int) -> float:
    """Return when a process began: on Linux in seconds since the machine started, as clocks may be set meanwhile."""
    try:
        return int(began_at(pid)) / os.sysconf("SC_CLK_TCK")
    except OSError:  # not on Linux
        import psutil

        return psutil.Process(pid).create_time()


def _boot() -> str | None:
    """Return the machine's boot id, which differs between machines of the same name and between boots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _total_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # on Windows
        import psutil

        return psutil.virtual_memory().total


def memory_in_use(device_type: str) -> dict[str, int]:
    """Return this process's memory in bytes: current host memory, and peak device memory."""
    import psutil
    import torch

    used = {"host_memory": psutil.Process().memory_info().rss}
    if device_type != "cpu" and torch.accelerator.is_available() and torch.accelerator.memory_stats():
        used["device_memory_peak"] = torch.accelerator.max_memory_allocated()
    return used


def _script() -> str:
    return sys.argv[0] if sys.argv else ""


def _output(command: list[str]) -> list[str]:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT, check=True, env=environment)
    return done.stdout.decode(errors="replace").splitlines()  # names of files may be in any encoding


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


def _devices() -> dict[str, Any]:
    import torch

    from trainer_lib.foundation.device_types import device_name

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {}
    count = torch.accelerator.device_count()
    names = [device_name(torch.device(accelerator.type, index)) for index in range(count)]
    counts = {name: names.count(name) for name in names}
    return {"devices": ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())}
