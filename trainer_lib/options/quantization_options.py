"""How bitsandbytes quantizes the linear layers of a model."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import Options
from trainer_lib.options.enums import CustomDtype

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_THRESHOLD = 6.0


@dataclass
class BnbQuantizationConfig(Options):
    """How `load_and_quantize_model` quantizes the linear layers of a model with bitsandbytes, to 8 or 4 bits.

    Args:
        load_in_8bit: Whether to quantize to 8 bits.
        llm_int8_threshold: In 8 bits, inputs above this value are multiplied in 16 bits.
        load_in_4bit: Whether to quantize to 4 bits.
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: Whether the scales of blocks are quantized too.
        bnb_4bit_compute_dtype: The type that 4-bit layers compute in: "fp32", "fp16", "bf16" or a torch dtype.
        torch_dtype: The type of what is not quantized; by default float16 in 8 bits, else `bnb_4bit_compute_dtype`.
        skip_modules: Names of modules that stay in `torch_dtype`; by default the output layer and tied weights.
        keep_in_fp32_modules: Names of modules that stay in float32.

    Example:
        >>> BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16").torch_dtype
        torch.bfloat16
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = _THRESHOLD
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    target_dtype: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._check_bits()
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigurationError(
                f"bnb_4bit_quant_type must be 'fp4' or 'nf4' (got {shown(self.bnb_4bit_quant_type)})."
            )
        if isinstance(self.llm_int8_threshold, bool) or not isinstance(self.llm_int8_threshold, (int, float)):
            raise ConfigurationError(f"llm_int8_threshold must be a number (got {shown(self.llm_int8_threshold)}).")
        if self.load_in_4bit and self.llm_int8_threshold != _THRESHOLD:
            warnings.warn("llm_int8_threshold has no effect on a model in 4 bits.", stacklevel=3)
        for name in ("skip_modules", "keep_in_fp32_modules"):
            _check_names(name, getattr(self, name))
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        if self.torch_dtype is None:
            self.torch_dtype = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = _dtype("torch_dtype", self.torch_dtype)
        self.target_dtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4

    def _check_bits(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} must be True or False (got {shown(getattr(self, name))}).")
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigurationError(
                f"load_in_8bit and load_in_4bit are both {self.load_in_8bit}. Give exactly one of them as True."
            )


def _check_names(option: str, names: Any) -> None:
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigurationError(f"{option} must be a list of names of modules (got {shown(names)}).")


def _dtype(option: str, value: Any) -> torch.dtype:
    dtype = _TYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"{option} must be 'fp32', 'fp16', 'bf16' or a torch dtype (got {shown(value)}).")
    return dtype
