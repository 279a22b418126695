"""Options of process groups and of DDP."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.options.base import (
    KwargsHandler,
    check_at_least_zero,
    check_choice,
    check_count,
    check_flag,
    check_positive,
)
from trainer_lib.options.enums import DDPCommunicationHookType

_NONE = DDPCommunicationHookType.NO
_CASTS = (DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
_POWER_SGD = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)


@dataclass(repr=False, eq=False)
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is initialized.

    Args:
        backend: gloo, nccl, …; by default the backend for the device.
        init_method: A URL for `torch.distributed.init_process_group`; by default the launcher's environment variables.
        timeout: How long a collective waits for other ranks; by default 30 minutes, and 10 with backend="nccl".
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if self.timeout is not None and (not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0)):
            raise ConfigurationError(
                f"timeout must be a datetime.timedelta above 0, got {self.timeout!r}. "
                "For 90 seconds: timedelta(seconds=90)."
            )


@dataclass(repr=False, eq=False)
class DistributedDataParallelKwargs(KwargsHandler):
    """The options of `torch.nn.parallel.DistributedDataParallel`, and the compression of gradients.

    The documentation of `DistributedDataParallel` explains the options that are not listed here.

    Args:
        comm_hook: How to compress gradients sent between ranks: "fp16", "bf16", "power_sgd" or "batched_power_sgd".
        comm_wrapper: The 16-bit type in which to send the output of `comm_hook`: "fp16" or "bf16".
        comm_state_option: The arguments of torch's `PowerSGDState`, for "power_sgd" and "batched_power_sgd".

    Example:
        >>> options = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"warm_start": False})
        >>> options.comm_hook
        <DDPCommunicationHookType.POWER_SGD: 'power_sgd'>
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = _NONE
    comm_wrapper: DDPCommunicationHookType | str = _NONE
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values."""
        check_positive("bucket_cap_mb", self.bucket_cap_mb)
        for name in (
            "broadcast_buffers",
            "find_unused_parameters",
            "check_reduction",
            "gradient_as_bucket_view",
            "static_graph",
        ):
            check_flag(name, getattr(self, name))
        self.comm_hook = DDPCommunicationHookType.read("comm_hook", self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType.read("comm_wrapper", self.comm_wrapper)
        check_choice("comm_wrapper", str(self.comm_wrapper), [_NONE, *_CASTS])
        if self.comm_hook in _CASTS and self.comm_wrapper not in (_NONE, self.comm_hook):
            raise ConfigurationError(
                f"comm_hook={self.comm_hook!s} and comm_wrapper={self.comm_wrapper!s} name two types to send gradients "
                "in. Give one of them."
            )
        if not isinstance(self.comm_state_option, dict):
            raise ConfigurationError(
                f"comm_state_option must be a dict of PowerSGDState's arguments, got {self.comm_state_option!r}."
            )
        if self.comm_state_option:
            _check_power_sgd(self.comm_hook, self.comm_state_option)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `DistributedDataParallel` that differ from the defaults, by name."""
        return {name: value for name, value in super().to_kwargs().items() if not name.startswith("comm_")}


_POWER_SGD_OPTIONS: dict[str, Callable[[str, object], None]] = {
    "matrix_approximation_rank": check_count,
    "start_powerSGD_iter": check_count,
    "min_compression_rate": check_positive,
    "use_error_feedback": check_flag,
    "warm_start": check_flag,
    "orthogonalization_epsilon": check_at_least_zero,
    "random_seed": functools.partial(check_count, at_least=0),
    "compression_stats_logging_frequency": check_count,
    "batch_tensors_with_same_shape": check_flag,
}


def _check_power_sgd(hook: str, options: dict[str, Any]) -> None:
    if hook not in _POWER_SGD:
        raise ConfigurationError(
            f"comm_state_option needs comm_hook='power_sgd' or 'batched_power_sgd' (got '{hook}'). Leave it out."
        )
    for name, value in options.items():
        if name not in _POWER_SGD_OPTIONS:
            raise ConfigurationError(unknown("option in comm_state_option", name, _POWER_SGD_OPTIONS))
        _POWER_SGD_OPTIONS[name](name, value)
    keeps_state = options.get("use_error_feedback", True) or options.get("warm_start", True)
    if keeps_state and options.get("start_powerSGD_iter", 2) < 2:
        raise ConfigurationError(
            "start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start (got "
            f"{options['start_powerSGD_iter']}): after the first update DDP sorts the gradients into other buckets, "
            "and the state kept for the old buckets would not fit."
        )
