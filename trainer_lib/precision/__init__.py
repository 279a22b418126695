"""Precisions to train in: fp32, bf16 and fp16 autocast, and bf16 weights."""

from trainer_lib.precision.autocast import Autocast
from trainer_lib.precision.base import FullPrecision
from trainer_lib.precision.bf16_true import TrueBfloat16
from trainer_lib.precision.registry import choose_precision
from trainer_lib.precision.scaler import ScaledAutocast

__all__ = ["Autocast", "FullPrecision", "ScaledAutocast", "TrueBfloat16", "choose_precision"]
