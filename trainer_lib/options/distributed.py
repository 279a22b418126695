"""This file is the options of process groups and of replication (DDP)."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.base import KwargsHandler, check_choice, check_flag, check_positive
from trainer_lib.options.kinds import DDPCommunicationHookType


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the processes find one another.

    Args:
        backend: gloo, nccl, …; by default the one that fits the device.
        init_method: A URL as `torch.distributed.init_process_group` takes it; by default the launcher's variables.
        timeout: How long a collective waits for the others; by default torch's (30 minutes, NCCL 10).
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


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """The options of `torch.nn.parallel.DistributedDataParallel`; its documentation explains them."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
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
        for name in ("comm_hook", "comm_wrapper"):
            check_choice(name, getattr(self, name), list(DDPCommunicationHookType))
            if getattr(self, name) != DDPCommunicationHookType.NO:
                raise UnsupportedError(
                    f"{name}={getattr(self, name)!s}: this version reduces gradients uncompressed only. "
                    "Leave it at DDPCommunicationHookType.NO."
                )
        if self.comm_state_option:
            raise UnsupportedError("comm_state_option belongs to communication hooks, which this version lacks.")
