"""A model that moves to its device for a forward as a whole, and back to the CPU when you or the next model says so."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.foundation.tensors.pytree import send_to_device
from trainer_lib.hooks.model_hook import ModelHook, remove_hook_from_module
from trainer_lib.modules.device_placement import Device
from trainer_lib.state import PartialState


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until its forward, which moves it to a device, where it stays.

    Args:
        execution_device: The device; by default that of this process.
        prev_module_hook: The hook of the model that runs before this one in a pipeline, and leaves the device first.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: "UserCpuOffloadHook | None" = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device: Device = PartialState().default_device if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Move the model, and its inputs, to the device."""
        if self.prev_module_hook is not None and isinstance(self.prev_module_hook, UserCpuOffloadHook):
            self.prev_module_hook.offload()
        device = torch.device(self.execution_device)
        module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """Controls a model with a `CpuOffload` hook.

    Args:
        model: The model.
        hook: Its hook.
    """

    hook: "CpuOffload"
    model: nn.Module

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)
