"""fp8 with NVIDIA's Transformer Engine, on GPUs: its layers in place of torch's, and the contexts that they need."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer_lib.foundation.errors import MissingPackageError, UnsupportedError
from trainer_lib.foundation.imports import is_transformer_engine_available, pip_install
from trainer_lib.modules import forwards
from trainer_lib.options.enums import FP8BackendType
from trainer_lib.options.fp8_options import TERecipeKwargs
from trainer_lib.options.precision_options import AutocastKwargs
from trainer_lib.precision.autocast import Autocast
from trainer_lib.processes.gpu_info import check_cuda_fp8_capability

_MULTIPLE = 16


class TransformerEngine(Autocast):
    """Linear and normalization layers of Transformer Engine in fp8, all else in bf16 where that is safe."""

    fp8_backend = FP8BackendType.TE

    def __init__(self, device_type: str, options: AutocastKwargs, recipe: TERecipeKwargs) -> None:
        super().__init__("fp8", torch.bfloat16, device_type, options)
        _require(device_type)
        self._recipe = recipe

    def cast(self, model: nn.Module) -> None:
        """Replace linear and normalization layers, in place; the optimizer must be made afterwards."""
        convert_model(model)

    def wrap_forward(self, model: nn.Module) -> None:
        super().wrap_forward(model)
        apply_fp8_autowrap(model, self._recipe)


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace linear and layer-normalization layers of a model by those of Transformer Engine, in place, or back.

    Args:
        model: The model.
        to_transformer_engine: Whether to replace torch's layers; else to replace Transformer Engine's by torch's.
        _convert_linear: Whether to replace linear layers.
        _convert_ln: Whether to replace layer normalizations.
    """
    _require_package()
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

    source, target = (nn, te) if to_transformer_engine else (te, nn)
    for name, module in model.named_children():
        kind = type(module)
        if _convert_linear and kind is source.Linear and _has_sizes(module):
            setattr(model, name, _filled(_linear(module, target), module))
        elif _convert_ln and kind is source.LayerNorm:
            setattr(model, name, _filled(_layer_norm(module, target), module))
        else:
            convert_model(module, to_transformer_engine, _convert_linear, _convert_ln)


def contextual_fp8_autocast(model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False) -> Any:
    """Return a forward that computes in fp8 while the model trains, and in evaluation if `use_during_eval`.

    Args:
        model_forward: The forward, a method of the model.
        fp8_recipe: A recipe of `transformer_engine.common.recipe`.
        use_during_eval: Whether evaluation computes in fp8 too.
    """
    _require_package()
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

    @functools.wraps(model_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(self, *args, **kwargs)

    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Let a model whose layers `convert_model` replaced compute in fp8, and return it.

    Args:
        model: The model.
        fp8_recipe_handler: The options of fp8.
    """
    _require_package()
    options = fp8_recipe_handler or TERecipeKwargs()
    recipe, in_evaluation = _recipe(options), bool(options.use_autocast_during_eval)

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        return contextual_fp8_autocast(original, recipe, in_evaluation)

    forwards.wrap_forward(model, wrapped)
    return model


def _recipe(options: TERecipeKwargs) -> Any:
    from transformer_engine.common import recipe as recipes  # pyright: ignore[reportMissingImports]

    formats: Any = recipes.Format
    if options.use_mxfp8_block_scaling:
        return recipes.MXFP8BlockScaling(margin=options.margin, fp8_format=getattr(formats, str(options.fp8_format)))
    return recipes.DelayedScaling(
        margin=options.margin,
        interval=options.interval,
        fp8_format=getattr(formats, str(options.fp8_format)),
        amax_history_len=options.amax_history_len,
        amax_compute_algo=options.amax_compute_algo,
        override_linear_precision=options.override_linear_precision,
    )


def _has_sizes(layer: Any) -> bool:
    return not (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)


def _linear(layer: Any, package: Any) -> Any:
    types = {"dtype" if package is nn else "params_dtype": layer.weight.dtype}
    has_bias = layer.bias is not None and layer.bias.numel() > 0  # without one, Transformer Engine has an empty tensor
    return package.Linear(layer.in_features, layer.out_features, bias=has_bias, **types)


def _layer_norm(layer: Any, package: Any) -> Any:
    types = {"dtype" if package is nn else "params_dtype": layer.weight.dtype}
    return package.LayerNorm(layer.weight.shape[0], eps=layer.eps, **types)


@torch.no_grad()
def _filled(new: Any, old: Any) -> nn.Module:
    new.to(old.weight.device).train(old.training)
    for name, parameter in old.named_parameters():
        target = getattr(new, name)
        if target is not None and target.shape == parameter.shape:
            target.copy_(parameter)
            target.requires_grad_(parameter.requires_grad)
    return new


def _require_package() -> None:
    if not is_transformer_engine_available():
        raise MissingPackageError(
            f"fp8 layers of Transformer Engine need its package: {pip_install('transformer_engine[pytorch]')}, on a "
            "machine with CUDA. With torchao, Accelerator(mixed_precision='fp8') does it."
        )


def _require(device_type: str) -> None:
    _require_package()
    if not check_cuda_fp8_capability():
        raise UnsupportedError(
            f"mixed_precision='fp8' with Transformer Engine needs a GPU of NVIDIA's that multiplies in fp8 (Ada, "
            f"Hopper or later), and this {device_type} device does not. torchao emulates fp8 on a CPU: "
            "kwargs_handlers=[AORecipeKwargs()]."
        )
