"""Choose the precision by name."""

from typing import TYPE_CHECKING

import torch

from trainer_lib.foundation.device_types import computes_in_fp16
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.options.precision_options import PRECISIONS, AutocastKwargs, GradScalerKwargs
from trainer_lib.precision.autocast import Autocast
from trainer_lib.precision.base import FullPrecision
from trainer_lib.precision.bf16_true import TrueBfloat16
from trainer_lib.precision.scaler import ScaledAutocast

if TYPE_CHECKING:
    from trainer_lib.options.fp8_options import FP8Recipe

_logger = get_logger(__name__)


def choose_precision(
    name: str,
    device_type: str,
    autocast: AutocastKwargs | None = None,
    scaler: GradScalerKwargs | None = None,
    fp8: "FP8Recipe | None" = None,
) -> FullPrecision:
    """Return the precision called `name` ("no", "bf16", "bf16-true", "fp16", "fp8") on a type of device.

    Raises:
        ConfigurationError: If the name is unknown, or there are options of fp8 for another precision.
        MissingPackageError: If the package that computes in fp8 is not installed.
        UnsupportedError: If the device does not compute in fp8 or fp16.
    """
    if fp8 is not None and name != "fp8":
        raise ConfigurationError(
            f"{type(fp8).__name__} has no effect with mixed_precision={name!r}. Give mixed_precision='fp8'."
        )
    if scaler is not None and name != "fp16":
        _logger.warning_once("GradScalerKwargs are ignored: only 'fp16' scales the loss (mixed_precision is %r).", name)
    if name == "no":
        return FullPrecision()
    autocast = autocast or AutocastKwargs()
    if name == "bf16":
        return Autocast(name, torch.bfloat16, device_type, autocast)
    if name == "bf16-true":
        return TrueBfloat16(name, torch.bfloat16, device_type, autocast)
    if name == "fp16":
        if not computes_in_fp16(device_type):
            raise UnsupportedError(
                f"mixed_precision='fp16' does not work on {device_type} devices, which compute in bf16. Use "
                "mixed_precision='bf16'."
            )
        return ScaledAutocast(device_type, autocast, scaler or GradScalerKwargs())
    if name == "fp8":
        return _fp8(device_type, autocast, fp8)
    raise ConfigurationError(unknown("precision", name, PRECISIONS))


def _fp8(device_type: str, autocast: AutocastKwargs, given: "FP8Recipe | None") -> FullPrecision:
    from trainer_lib.options.fp8_options import AORecipeKwargs, TERecipeKwargs, choose_recipe
    from trainer_lib.precision.float8 import Float8
    from trainer_lib.precision.transformer_engine_fp8 import TransformerEngine

    recipe = choose_recipe(given)
    if isinstance(recipe, AORecipeKwargs):
        return Float8(device_type, autocast, recipe)
    assert isinstance(recipe, TERecipeKwargs)
    return TransformerEngine(device_type, autocast, recipe)
