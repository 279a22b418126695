"""The ways to load a model: whole, or quantized by bitsandbytes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.device_map.by_name import infer_map
from trainer_lib.device_map.units import Classes
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.device_placement import Device, read_device
from trainer_lib.options.quantization_options import BnbQuantizationConfig
from trainer_lib.quantization.bnb_layers import (
    get_keys_to_not_convert,
    get_quantized_model_device_map,
    replace_with_bnb_layers,
)

Limits = Mapping[int | str, float | str] | None


class Whole:
    """Weights in one type, which are not quantized.

    Args:
        dtype: The type; by default that of the model.
    """

    keep_in_fp32: tuple[str, ...] = ()

    def __init__(self, dtype: str | torch.dtype | None = None) -> None:
        self.dtype = dtype

    def replace_layers(self, model: nn.Module) -> None:
        """Replace the layers of a model, in place, before its weights are loaded."""

    def device_map(
        self,
        model: nn.Module,
        device_map: str | Mapping[str, Device] | None,
        limits: Limits,
        no_split: Classes,
        offload_buffers: bool,
    ) -> Mapping[str, Device] | None:
        """Return the device of each module; see `load_checkpoint_and_dispatch`."""
        if not isinstance(device_map, str):
            return device_map
        return infer_map(model, device_map, limits, no_split, self.dtype, offload_buffers)


class BitsAndBytes(Whole):
    """Layers of bitsandbytes, whose weights are quantized one after the other while they are loaded.

    Args:
        config: The options.
    """

    def __init__(self, config: BnbQuantizationConfig) -> None:
        super().__init__(config.torch_dtype)
        self._config = config
        self.keep_in_fp32: tuple[str, ...] = tuple(config.keep_in_fp32_modules or ())

    def replace_layers(self, model: nn.Module) -> None:
        """Replace the linear layers of a model, in place, before its weights are loaded."""
        skipped = self._config.skip_modules
        skipped = get_keys_to_not_convert(model) if skipped is None else skipped
        replace_with_bnb_layers(model, self._config, [*skipped, *self.keep_in_fp32])
        # Where transformers and peft look.
        vars(model).update(is_loaded_in_8bit=self._config.load_in_8bit, is_loaded_in_4bit=self._config.load_in_4bit)

    def device_map(
        self,
        model: nn.Module,
        device_map: str | Mapping[str, Device] | None,
        limits: Limits,
        no_split: Classes,
        offload_buffers: bool,
    ) -> Mapping[str, Device] | None:
        """Return the device of each module; see `load_checkpoint_and_dispatch`."""
        del offload_buffers
        return get_quantized_model_device_map(model, self._config, device_map, limits, no_split)


def single_device(device_map: str | Mapping[str, Device] | None) -> torch.device:
    """Return the device of a model that torchao quantizes.

    Raises:
        ConfigurationError: If a map has several devices, or the disk.
    """
    if isinstance(device_map, Mapping):
        devices = {read_device(device) for device in device_map.values()}
        device = devices.pop() if len(devices) == 1 else None
        if not isinstance(device, torch.device):
            raise ConfigurationError(
                f"torchao quantizes a model on one device (got device_map={shown(dict(device_map))}). Give one device, "
                "such as device_map={'': 'cpu'}, or a BnbQuantizationConfig, which works with several and the disk."
            )
        return device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def quantization_method(quantization: Any, dtype: str | torch.dtype | None = None) -> Whole:
    """Return the way to load a model that a value of `quantization` asks for.

    Args:
        quantization: The options of bitsandbytes; `None` for whole weights.
        dtype: The type of whole weights.
    """
    if quantization is None:
        return Whole(dtype)
    if isinstance(quantization, BnbQuantizationConfig):
        return BitsAndBytes(quantization)
    raise ConfigurationError(
        f"quantization must be a BnbQuantizationConfig or a TorchAoConfig (got {shown(quantization)}). Give, for "
        "example, BnbQuantizationConfig(load_in_4bit=True)."
    )
