"""The number of accelerators of this machine, counted without initializing them, so that forks can use them."""

import os
from typing import Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.launchers.local.torch_build import has_no_accelerators
from trainer_lib.options.enums import DistributedType

# A launcher for the CPU does without torch, so functions import it where it is needed.


def count_accelerators() -> int:
    """Return how many accelerators processes can train on; 0 if the CPU was requested."""
    kind = None if environment.cpu_requested() else _kind()
    if kind is None:
        return 0
    import torch

    from trainer_lib.foundation.device_types import is_shared

    # All processes share Apple's single GPU, so several processes train on the CPU.
    return 0 if is_shared(kind) else torch.accelerator.device_count()


def check_enough(num_processes: int, accelerators: int) -> None:
    """Raise for more processes on this machine than accelerators, unless it has none."""
    if 0 < accelerators < num_processes:
        raise ConfigurationError(
            f"{num_processes} processes on this machine were requested, and it has {accelerators} "
            f"{_kind()} {'device' if accelerators == 1 else 'devices'}: each process needs its own. "
            f"Request at most {accelerators}, or train on the CPU (`--cpu`, ACCELERATE_USE_CPU=1)."
        )


def visible_devices(ids: str, name: str = "--gpu_ids") -> dict[str, str]:
    """Return the variable that restricts processes to accelerators by their ids: `"0,1"`, or `"all"`.

    Args:
        ids: The ids.
        name: What gives them, for errors.
    """
    if ids == "all":
        return {}
    kind = _kind()
    if kind is None:
        raise ConfigurationError(f"{name} {ids} was given, and this machine has no accelerator. Leave it out.")
    from trainer_lib.foundation.device_types import types_with_visible_devices, visible_devices_variable

    variable = visible_devices_variable(kind)
    if variable is None:
        known = ", ".join(types_with_visible_devices())
        raise UnsupportedError(f"{name} is not supported for {kind} devices. Known: {known}.")
    if not all(part.strip() for part in ids.split(",")):
        raise ConfigurationError(f"{name} must be a list such as 0,1, or all (got {ids!r}).")
    return {variable: ids.replace(" ", "")}


def get_current_device_type() -> tuple[str, str]:
    """Return the type of this machine's devices ("cuda", …, or "cpu") and the kind of a world of several of them.

    Example:
        >>> get_current_device_type()  # doctest: +SKIP
        ('cuda', 'MULTI_GPU')
    """
    kind = _kind() or "cpu"
    return kind, str(DistributedType.of_device(kind))


def forks_are_poisoned() -> bool:
    """Whether this process has initialized its accelerator, so that its forks cannot use it.

    Only a fork can tell: checking for a device may already initialize it.
    """
    import torch

    kind = _kind()
    is_poisoned: Any = kind and getattr(torch.get_device_module(kind), "_is_in_bad_fork", None)
    if not is_poisoned:
        return False
    child = os.fork()
    if child == 0:
        os._exit(int(bool(is_poisoned())))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _kind() -> str | None:
    if has_no_accelerators():
        return None
    import torch

    device = torch.accelerator.current_accelerator()
    return None if device is None or torch.accelerator.device_count() == 0 else device.type
