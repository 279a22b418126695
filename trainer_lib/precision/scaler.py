"""The loss scaler of fp16: torch's, extended to optimizers with both sharded and whole weights."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.options.enums import DistributedType
from trainer_lib.state.partial_state import PartialState


class LossScaler(torch.amp.GradScaler):
    """Calls torch's scaler separately for shards and for whole gradients, since it does not take both at once."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        kinds: dict[bool, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kinds.setdefault(hasattr(parameter, "_local_tensor"), []).append(parameter)
        if len(kinds) < 2:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        overflows: dict[torch.device, Tensor] = {}
        for _, parameters in sorted(kinds.items()):  # the same order of collectives on all ranks
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            flags = super()._unscale_grads_(part, inv_scale, found_inf.clone(), allow_fp16)
            for device, flag in flags.items():
                overflows[device] = torch.maximum(overflows[device], flag) if device in overflows else flag
        return overflows


def get_grad_scaler(distributed_type: DistributedType | str | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for this rank's device, for loops that scale the loss of fp16 themselves.

    Args:
        distributed_type: Accepted for compatibility: one scaler is for all kinds of worlds.
        **kwargs: Arguments of `torch.amp.GradScaler`.
    """
    del distributed_type
    return LossScaler(PartialState().device.type, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for sharded models; see `get_grad_scaler`."""
    return get_grad_scaler(**kwargs)
