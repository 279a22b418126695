"""Further names that scripts import from `accelerate.inference`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from trainer_lib.device_map.infer import infer_auto_device_map
from trainer_lib.foundation.public_names.missing_features import PIPELINE_STEPS, missing_function
from trainer_lib.foundation.tensors.pytree import ignorant_find_batch_size
from trainer_lib.modules.weights.tensor_sizes import calculate_maximum_sizes

_ROOM = 1.1  # for layers that are not equally large


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the size of the first dimension of the first tensor, of the keyword arguments at last.

    Example:
        >>> import torch
        >>> find_pippy_batch_size((), {"input_ids": torch.zeros(3, 8)})
        3
    """
    return ignorant_find_batch_size([list(args or ()), list((kwargs or {}).values())])


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[int | str, float | str] | None = None,
) -> dict[str, int | str]:
    """Return a device map of so many parts of about equal size.

    Args:
        model: The model.
        num_processes: How many parts.
        no_split_module_classes: Classes of modules that stay whole.
        max_memory: How large each part may be.
    """
    if max_memory is None and num_processes > 1:
        size, (largest, _) = calculate_maximum_sizes(model)
        part = int((size + largest) / num_processes * _ROOM) + 1
        max_memory = dict.fromkeys(range(num_processes), part)
    return infer_auto_device_map(model, max_memory, no_split_module_classes=no_split_module_classes, clean_result=False)


build_pipeline: Callable[..., Any] = missing_function("build_pipeline", PIPELINE_STEPS)
pippy_forward: Callable[..., Any] = missing_function("pippy_forward", PIPELINE_STEPS)
