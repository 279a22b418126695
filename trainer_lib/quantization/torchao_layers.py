"""Linear layers whose weights torchao quantizes, with state dicts of plain tensors."""

from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import StateError
from trainer_lib.foundation.imports import require
from trainer_lib.logging import get_logger
from trainer_lib.modules.weights.names import is_listed
from trainer_lib.options.torchao_options import TorchAoConfig
from trainer_lib.quantization.bnb_layers import get_keys_to_not_convert

_logger = get_logger(__name__)


def quantize_linear_layers(model: nn.Module, config: TorchAoConfig) -> None:
    """Quantize the linear layers of a model with torchao, in place, one after the other; they are frozen.

    Their weights appear in state dicts in parts that are plain tensors, such as `weight.qdata` and `weight.scale`.

    Args:
        model: The model; weights on the meta device become empty quantized ones.
        config: What to quantize, and how.
    """
    quantization: Any = require("torchao.quantization", "torchao", "torchao")
    kind = config.quant_type
    if isinstance(kind, str):
        names = {"int8_weight_only": "Int8WeightOnlyConfig", "float8_weight_only": "Float8WeightOnlyConfig"}
        kind = getattr(quantization, names[kind])()
    skipped = config.modules_to_not_convert
    skipped = get_keys_to_not_convert(model) if skipped is None else skipped
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not is_listed(name, skipped)
    }
    if not layers:
        _logger.warning(
            "%s has no nn.Linear to quantize: Conv1D of GPT-2, for example, stays as it is.", type(model).__name__
        )
    for layer in layers.values():
        quantization.quantize_(layer, kind, filter_fn=lambda module, name: True)
        if hasattr(layer.weight, "__tensor_flatten__"):
            layer.requires_grad_(False)
            _keep_in_parts(layer)


def _keep_in_parts(layer: nn.Linear) -> None:
    layer.register_state_dict_post_hook(_in_parts)
    layer.register_load_state_dict_pre_hook(_from_parts)


def _in_parts(module: Any, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    del local_metadata
    name = f"{prefix}weight"
    weight = state.pop(name, None)
    if weight is not None:
        state.update({f"{name}.{part}": value for part, value in _parts(module.weight).items()})


def _from_parts(module: Any, state: dict[str, Any], prefix: str, *more: Any) -> None:
    del more
    name, weight = f"{prefix}weight", module.weight
    parts = {part: state.pop(f"{name}.{part}") for part in _parts(weight) if f"{name}.{part}" in state}
    if not parts:
        return
    for part, current in _parts(weight).items():
        if part not in parts or (parts[part].dtype, parts[part].shape) != (current.dtype, current.shape):
            found = f"{parts[part].dtype} of {tuple(parts[part].shape)}" if part in parts else "none"
            raise StateError(
                f"{name}.{part} is {current.dtype} of {tuple(current.shape)} in this model, and the file has {found}: "
                "the weights were quantized in another way. Give the TorchAoConfig they were saved with."
            )
    _, options = weight.__tensor_flatten__()
    state[name] = type(weight).__tensor_unflatten__(parts, options, weight.shape, weight.stride())


def _parts(weight: Any) -> dict[str, Tensor]:
    names, _ = weight.__tensor_flatten__()
    return {name: value for name in names if isinstance(value := getattr(weight, name), torch.Tensor)}
