"""fp8 with torchao: linear layers multiply in fp8, all else computes in bf16."""

import dataclasses
from typing import Any, cast

import torch
from torch import nn

from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.options.enums import FP8BackendType
from trainer_lib.options.fp8_options import AORecipeKwargs
from trainer_lib.options.precision_options import AutocastKwargs
from trainer_lib.precision.autocast import Autocast
from trainer_lib.precision.float8_layers import convert_model_to_fp8_ao
from trainer_lib.processes.gpu_info import check_cuda_fp8_capability


class Float8(Autocast):
    """Weights in fp32, products of linear layers in fp8 (emulated on the CPU), all else in bf16 where that is safe."""

    fp8_backend = FP8BackendType.AO

    def __init__(self, device_type: str, options: AutocastKwargs, recipe: AORecipeKwargs) -> None:
        super().__init__("fp8", torch.bfloat16, device_type, options)
        self.config: Any = _layer_config(recipe, device_type)
        self._filter = recipe.module_filter_func

    def cast(self, model: nn.Module) -> None:
        """Replace linear layers, in place; their weights stay the objects that optimizers know."""
        # torchao would replace weights that FSDP gathers in fp8. FSDP's strategy wraps their shards instead.
        plain = dataclasses.replace(self.config, enable_fsdp_float8_all_gather=False)
        convert_model_to_fp8_ao(model, plain, self._filter)
        for module in model.modules():
            if getattr(module, "config", None) is plain:
                cast("Any", module).config = self.config


def _layer_config(recipe: AORecipeKwargs, device_type: str) -> Any:
    config = _configuration(recipe, device_type)
    if device_type != "cpu" and not config.emulate and not check_cuda_fp8_capability():
        raise UnsupportedError(
            f"mixed_precision='fp8' needs a GPU of NVIDIA's that multiplies in fp8 (Ada, Hopper or later), and this "
            f"{device_type} device does not. Use mixed_precision='bf16', or emulate fp8, which is slow: "
            "AORecipeKwargs(config=Float8LinearConfig(emulate=True))."
        )
    return config


def _configuration(recipe: AORecipeKwargs, device_type: str) -> Any:
    from torchao.float8 import Float8LinearConfig  # pyright: ignore[reportMissingImports]

    if recipe.config is not None and not isinstance(recipe.config, str):
        return recipe.config
    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe.config or "tensorwise"),
        pad_inner_dim=bool(recipe.pad_inner_dim),
        enable_fsdp_float8_all_gather=bool(recipe.enable_fsdp_float8_all_gather),
        emulate=device_type == "cpu",
    )
