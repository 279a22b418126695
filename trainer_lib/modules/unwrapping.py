"""Unwrap the user's model from DDP, torch.compile, mixed precision and adapters."""

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainer_lib.modules import compilation
from trainer_lib.modules.forwards import unwrap_forward
from trainer_lib.modules.views import view


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model inside the wrappers of distributed training.

    Args:
        model: The wrapped model.
        keep_fp32_wrapper: Keep its forward in mixed precision.
        keep_torch_compile: Keep it compiled; else return a view of it that runs eagerly.
        recursive: Remove wrappers around submodules too. If there are any, return a view without them.
    """
    model = inside_wrappers(model)
    if compilation.is_compiled(model):
        inside: nn.Module = getattr(model, "_orig_mod", model)
        # A model that was compiled together with DDP cannot stay compiled without it.
        if inside_wrappers(inside) is not inside:
            model = inside_wrappers(inside)
    if recursive:
        model = view(model, inside_wrappers, lambda module: False)
    if not keep_torch_compile:
        model = compilation.eager_view(model)
    if not keep_fp32_wrapper:
        unwrap_forward(model)
    return model


def inside_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel` and `DataParallel`."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model


def without_adapter(model: Any) -> Any:
    """Return the model within an adapter of PEFT, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_compiled_module(module: nn.Module) -> bool:
    """Whether calls of the whole model go through torch.compile, inside DDP too."""
    return compilation.is_compiled(module) or compilation.is_compiled(inside_wrappers(module))


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether parts of a model are compiled separately."""
    return compilation.has_compiled_regions(inside_wrappers(module))
