"""fp8 with torchao: linear layers multiply in fp8, all else computes in bf16."""

import dataclasses
from typing import Any

import torch
from torch import nn

from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.logging import get_logger
from trainer_lib.options.enums import FP8BackendType
from trainer_lib.options.fp8_options import AORecipeKwargs
from trainer_lib.options.precision_options import AutocastKwargs
from trainer_lib.precision.autocast import Autocast
from trainer_lib.precision.float8_layers import convert_model_to_fp8_ao
from trainer_lib.processes.gpu_info import check_cuda_fp8_capability

_logger = get_logger(__name__)


class Float8(Autocast):
    """Weights in fp32, products of linear layers in fp8 (emulated on the CPU), all else in bf16 where that is safe."""

    fp8_backend = FP8BackendType.AO

    def __init__(self, device_type: str, options: AutocastKwargs, recipe: AORecipeKwargs) -> None:
        super().__init__("fp8", torch.bfloat16, device_type, options)
        self.config = _layer_config(recipe, device_type)
        self._filter = recipe.module_filter_func

    def cast(self, model: nn.Module) -> None:
        """Replace linear layers, in place; their weights stay the objects that optimizers know."""
        convert_model_to_fp8_ao(model, self.config, self._filter)


def _layer_config(recipe: AORecipeKwargs, device_type: str) -> Any:
    from torchao.float8 import Float8LinearConfig  # pyright: ignore[reportMissingImports]

    config = recipe.config or Float8LinearConfig(pad_inner_dim=bool(recipe.pad_inner_dim), emulate=device_type == "cpu")
    if device_type != "cpu" and not config.emulate and not check_cuda_fp8_capability():
        raise UnsupportedError(
            f"mixed_precision='fp8' needs a GPU of NVIDIA's that multiplies in fp8 (Ada, Hopper or later), and this "
            f"{device_type} device does not. Use mixed_precision='bf16', or emulate fp8, which is slow: "
            "AORecipeKwargs(config=Float8LinearConfig(emulate=True))."
        )
    if recipe.enable_fsdp_float8_all_gather or config.enable_fsdp_float8_all_gather:
        _logger.warning_once(
            "enable_fsdp_float8_all_gather=True has no effect in this version: FSDP gathers weights in bf16, and "
            "products are in fp8 all the same."
        )
    # Weights stay plain tensors under their names, for optimizers and checkpoints.
    return dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
