"""Loads weights into a model, or takes a loaded one, and quantizes its linear layers by bitsandbytes or torchao."""

import os
from collections.abc import Mapping

import torch
from torch import nn

from trainer_lib.big_modeling import load_checkpoint_and_dispatch
from trainer_lib.device_map.units import Classes
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.device_placement import Device, read_device
from trainer_lib.modules.weights.names import is_listed
from trainer_lib.options.quantization_options import BnbQuantizationConfig
from trainer_lib.options.torchao_options import TorchAoConfig
from trainer_lib.quantization.bnb_layers import get_parameter_device, get_quantized_model_device_map
from trainer_lib.quantization.methods import BitsAndBytes, single_device
from trainer_lib.quantization.torchao_layers import quantize_linear_layers


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig | TorchAoConfig,
    weights_location: str | AnyPath | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: Classes = None,
    max_memory: Mapping[int | str, float | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantize the linear layers of a model with bitsandbytes or torchao, in place, and return it on its devices.

    An empty model gets its weights from files, one after the other, so that they never take their whole memory. Files
    that `save_model` wrote of a quantized model are loaded as they are.

    Args:
        model: The model: empty (see `init_empty_weights`), or with its weights.
        bnb_quantization_config: The number of bits, and what stays as it is; or a `TorchAoConfig`.
        weights_location: The weights of an empty model; see `load_checkpoint_in_model`.
        device_map: The device of each module; "auto", "balanced", "balanced_low_0" or "sequential" to infer it; by
            default all is on one device. Modules on the "disk" are quantized too.
        no_split_module_classes: See `infer_auto_device_map`.
        max_memory: See `infer_auto_device_map`.
        offload_folder: The folder for weights on the disk.
        offload_state_dict: Accepted for compatibility: weights never take memory twice.
    """
    del offload_state_dict
    if get_parameter_device(model).type != "meta":
        if isinstance(bnb_quantization_config, TorchAoConfig):
            model.to(single_device(device_map), bnb_quantization_config.torch_dtype)
            quantize_linear_layers(model, bnb_quantization_config)
            return model
        return _quantize_loaded(model, bnb_quantization_config, device_map)
    if weights_location is None:
        raise ConfigurationError(
            "The model has no values yet: it is on the meta device. Give weights_location, the files of its weights."
        )
    return load_checkpoint_and_dispatch(
        model,
        weights_location,
        device_map,
        max_memory,
        no_split_module_classes,
        offload_folder,
        quantization=bnb_quantization_config,
    )


def _quantize_loaded(
    model: nn.Module, config: BnbQuantizationConfig, device_map: str | Mapping[str, Device] | None
) -> nn.Module:
    method = BitsAndBytes(config)
    method.replace_layers(model)
    devices = {*get_quantized_model_device_map(model, config, device_map).values()}
    if len(devices) > 1 or "disk" in devices:
        raise ConfigurationError(
            "A model that has its weights is quantized on one device (got a device_map with several, or the disk). "
            "Make it under init_empty_weights() and give weights_location, or leave device_map out."
        )
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, known_as in names.items():
        if parameter.is_floating_point():
            in_fp32 = any(is_listed(name, method.keep_in_fp32) for name in known_as)
            parameter.data = parameter.data.to(torch.float32 if in_fp32 else config.torch_dtype)
    return model.to(read_device(devices.pop()))  # which quantizes
