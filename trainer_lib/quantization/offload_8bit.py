"""Writes a weight of an 8-bit layer into a folder of offloaded weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.modules.device_placement import set_module_tensor_to_device
from trainer_lib.modules.quantized_layers import release_statistics
from trainer_lib.tensor_files.offloaded_weights import Index, offload_weight


def quantize_and_offload_8bit(
    model: nn.Module,
    param: Tensor,
    param_name: str,
    new_dtype: torch.dtype | None,
    offload_folder: str | Path,
    offload_index: Index,
    fp16_statistics: Tensor | None,
) -> None:
    """Quantize a weight of an 8-bit layer, and write it and its scales into a folder; the layer keeps no values.

    Args:
        model: The model.
        param: The value, whole or quantized.
        param_name: Its name in the model.
        new_dtype: The type of a whole value before it is quantized.
        offload_folder: The folder.
        offload_index: The index of the folder, to which the weight is added.
        fp16_statistics: The scales of a quantized value.
    """
    layer: Any = model.get_submodule(param_name.rpartition(".")[0])
    set_module_tensor_to_device(model, param_name, "cpu", param, new_dtype, fp16_statistics)
    parts = {param_name: layer.weight.data, f"{param_name.removesuffix('weight')}SCB": layer.weight.SCB}
    for name, part in parts.items():
        offload_index.update(offload_weight(part, name, offload_folder))
    set_module_tensor_to_device(model, param_name, "meta")
    release_statistics(layer)
