"""Models that are large for one device: weights without memory, and weights stored in a smaller type."""

import re
from collections.abc import Iterable

import torch
from torch import nn

from trainer_lib.foundation.missing_features import BIG_MODELS, missing_function
from trainer_lib.hooks import LayerwiseCastingHook, add_hook_to_module
from trainer_lib.modules.init_on_device import init_empty_weights as init_empty_weights
from trainer_lib.modules.init_on_device import init_on_device as init_on_device

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)

cpu_offload = missing_function("cpu_offload", BIG_MODELS)
cpu_offload_with_hook = missing_function("cpu_offload_with_hook", BIG_MODELS)
disk_offload = missing_function("disk_offload", BIG_MODELS)
dispatch_model = missing_function("dispatch_model", BIG_MODELS)
load_checkpoint_and_dispatch = missing_function("load_checkpoint_and_dispatch", BIG_MODELS)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of a model's linear and convolution layers in a smaller type between their forwards.

    Args:
        module: The model.
        storage_dtype: The type between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: The type of a forward.
        skip_modules_pattern: Patterns of names of modules that stay as they are, such as "norm".
        skip_modules_classes: Classes of modules that stay as they are.
        non_blocking: Do not wait for copies.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
        >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
        >>> model[0].weight.dtype, model(torch.ones(1, 4)).dtype
        (torch.float8_e4m3fn, torch.float32)
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    for layer in _layers(module, "", patterns, skip_modules_classes or ()):
        add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)


def _layers(
    module: nn.Module, name: str, patterns: Iterable[str], classes: tuple[type[nn.Module], ...]
) -> list[nn.Module]:
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return []
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        return [module]
    return [
        layer
        for child_name, child in module.named_children()
        for layer in _layers(child, f"{name}.{child_name}" if name else child_name, patterns, classes)
    ]
