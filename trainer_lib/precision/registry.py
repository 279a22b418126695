"""Choose the precision by name."""

import torch

from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.options.precision_options import PRECISIONS, AutocastKwargs, GradScalerKwargs
from trainer_lib.precision.autocast import Autocast
from trainer_lib.precision.base import FullPrecision
from trainer_lib.precision.bf16_true import TrueBfloat16
from trainer_lib.precision.scaler import ScaledAutocast

_logger = get_logger(__name__)


def choose_precision(
    name: str, device_type: str, autocast: AutocastKwargs | None = None, scaler: GradScalerKwargs | None = None
) -> FullPrecision:
    """Return the precision called `name` ("no", "bf16", "bf16-true", "fp16") on a type of device.

    Raises:
        ConfigurationError: If the name is unknown.
    """
    if scaler is not None and name != "fp16":
        _logger.warning_once("GradScalerKwargs are ignored: only 'fp16' scales the loss (mixed_precision is %r).", name)
    if name == "no":
        return FullPrecision()
    if name == "bf16":
        return Autocast(name, torch.bfloat16, device_type, autocast or AutocastKwargs())
    if name == "bf16-true":
        return TrueBfloat16(name, torch.bfloat16, device_type, autocast or AutocastKwargs())
    if name == "fp16":
        return ScaledAutocast(device_type, autocast or AutocastKwargs(), scaler or GradScalerKwargs())
    raise ConfigurationError(unknown("precision", name, PRECISIONS))
