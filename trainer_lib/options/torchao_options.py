"""How torchao quantizes the linear layers of a model."""

from dataclasses import dataclass
from typing import Any

import torch

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown

QUANTIZED_TYPES = ("int8_weight_only", "float8_weight_only")
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class TorchAoConfig:
    """How `load_checkpoint_and_dispatch` and `load_and_quantize_model` quantize linear layers with torchao.

    Args:
        quant_type: "int8_weight_only" or "float8_weight_only": weights of 8 bits, with a scale for each row; or one of
            torchao's own configurations, such as `Int8DynamicActivationInt8WeightConfig()`.
        modules_to_not_convert: Names of modules that stay in `torch_dtype`; by default the output layer and tied
            weights.
        torch_dtype: The type of what is not quantized, and of the outputs: "fp32", "fp16", "bf16" or a torch dtype.

    Example:
        >>> TorchAoConfig("int8_weight_only", torch_dtype="fp32").torch_dtype
        torch.float32
    """

    quant_type: Any = "int8_weight_only"
    modules_to_not_convert: list[str] | None = None
    torch_dtype: Any = torch.bfloat16

    def __post_init__(self) -> None:
        """Check the values."""
        if isinstance(self.quant_type, str) and self.quant_type not in QUANTIZED_TYPES:
            hint = " For 4 bits, give BnbQuantizationConfig(load_in_4bit=True)." if "4" in self.quant_type else ""
            raise ConfigurationError(unknown("quant_type", self.quant_type, QUANTIZED_TYPES) + hint)
        if not isinstance(self.quant_type, str) and not type(self.quant_type).__module__.startswith("torchao."):
            raise ConfigurationError(
                f"quant_type must be one of {', '.join(QUANTIZED_TYPES)}, or a configuration of torchao (got "
                f"{shown(self.quant_type)})."
            )
        names: Any = self.modules_to_not_convert
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ConfigurationError(f"modules_to_not_convert must be a list of names of modules (got {shown(names)}).")
        dtype = _TYPES.get(self.torch_dtype) if isinstance(self.torch_dtype, str) else self.torch_dtype
        if not isinstance(dtype, torch.dtype):
            raise ConfigurationError(
                f"torch_dtype must be 'fp32', 'fp16', 'bf16' or a torch dtype (got {shown(self.torch_dtype)})."
            )
        self.torch_dtype = dtype
