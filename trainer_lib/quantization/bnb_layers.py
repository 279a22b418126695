"""Replaces the linear layers of a model by those of bitsandbytes."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.device_map.by_name import infer_map
from trainer_lib.device_map.units import Classes
from trainer_lib.foundation.imports import require
from trainer_lib.logging import get_logger
from trainer_lib.modules.device_placement import Device
from trainer_lib.modules.quantized_layers import keep_unpacked, unquantized
from trainer_lib.modules.weights.names import is_listed
from trainer_lib.modules.weights.tensor_slots import module_slots
from trainer_lib.modules.weights.tied_parameters import find_tied_parameters
from trainer_lib.options.quantization_options import BnbQuantizationConfig

_logger = get_logger(__name__)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Iterable[str] | None = None,
    current_key_name: list[str] | None = None,
) -> nn.Module:
    """Replace the linear layers of a model, in place, by layers of bitsandbytes, and return the model.

    Their weights are quantized when they move to a device, or get their values from a checkpoint.

    Args:
        model: The model.
        bnb_quantization_config: The number of bits, and the options of the layers.
        modules_to_not_convert: Names of modules that stay as they are; parts of names such as "lm_head" count.
        current_key_name: The parts of the name of `model` in a larger one.
    """
    prefix, skipped = [*(current_key_name or ())], list(modules_to_not_convert or ())
    to_replace = [
        (parent, name, child)
        for path, parent in model.named_modules()
        for name, child in module_slots(parent).items()
        if isinstance(child, nn.Linear) and not is_listed(".".join([*prefix, path, name]).strip("."), skipped)
    ]
    new: dict[int, nn.Module] = {}  # a layer that has several names stays one
    for parent, name, child in to_replace:
        if id(child) not in new:
            new[id(child)] = _layer(child, bnb_quantization_config)
        module_slots(parent)[name] = new[id(child)]
    if not new:
        _logger.warning(
            "%s has no nn.Linear to quantize: Conv1D of GPT-2, for example, stays as it is.", type(model).__name__
        )
    return model


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules that quantization leaves as they are by default: the output layer, and tied weights.

    A model of transformers without a head has neither.
    """
    tied = [name for names in find_tied_parameters(model) for name in names]
    base: Any = getattr(model, "base_model_prefix", None)
    children = [name for name, _ in model.named_children()]
    if not children or (not tied and base is not None and not hasattr(model, base)):
        return []
    names = (name.removesuffix(".weight").removesuffix(".bias") for name in tied)
    return list(dict.fromkeys([*names, children[-1]]))


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: Classes = None,
) -> Mapping[str, Device]:
    """Return the device map of a model with layers of bitsandbytes, which count as quantized.

    Args:
        model: The model, after `replace_with_bnb_layers`.
        bnb_quantization_config: The types of what is not quantized.
        device_map: A map, which is returned; a way of inferring one ("auto", …); by default all is on one device.
        max_memory: See `infer_auto_device_map`.
        no_split_module_classes: See `infer_auto_device_map`.
    """
    if device_map is None:
        return {"": torch.accelerator.current_device_index() if torch.accelerator.is_available() else "cpu"}
    if not isinstance(device_map, str):
        return dict(device_map)
    dtype = bnb_quantization_config.torch_dtype
    kept = bnb_quantization_config.keep_in_fp32_modules or ()
    special = {name: torch.float32 for name, _ in model.named_parameters() if is_listed(name, kept)}
    return infer_map(model, device_map, max_memory, no_split_module_classes, dtype, special_dtypes=special)


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of the first parameter of a module."""
    return next(parameter.parameters()).device


def _layer(linear: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    layers: Any = require("bitsandbytes", "bitsandbytes").nn
    sizes: Any = (linear.in_features, linear.out_features, linear.bias is not None)
    if config.load_in_8bit:
        layer = layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=config.llm_int8_threshold, device="meta")
    else:
        layer = layers.Linear4bit(
            *sizes,
            config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            device="meta",
        )
    layer.weight, layer.bias = unquantized(layer, layer.weight, linear.weight), linear.bias
    keep_unpacked(layer)
    layer.train(linear.training)
    return layer.requires_grad_(False)
