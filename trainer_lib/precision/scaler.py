"""This file is the loss scaler of fp16: torch's, also for an optimizer that trains shards and whole weights."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LossScaler(torch.amp.GradScaler):
    """torch's scaler, which takes gradients that are all shards or all whole, asked for each kind on its own."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        kinds: dict[bool, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kinds.setdefault(hasattr(parameter, "_local_tensor"), []).append(parameter)
        if len(kinds) < 2:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found: dict[torch.device, Tensor] = {}
        for _, parameters in sorted(kinds.items()):  # shards have to be asked about in one order on all processes
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            flags = super()._unscale_grads_(part, inv_scale, found_inf.clone(), allow_fp16)
            for device, flag in flags.items():
                found[device] = torch.maximum(found[device], flag) if device in found else flag
        return found
