"""Whether a model is of PEFT or transformers, has DTensors, is split, or has layers that compute in 8 or 4 bits.

Also the layers of torch that compute with weights of the modules inside them.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer_lib.modules.unwrapping import extract_model_from_parallel

# The forward of these reads the weights of inner modules instead of calling those modules: that of the encoder layer
# in evaluations.
READS_INNER_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is one of PEFT, inside the wrappers of distributed training too."""
    return _is_a(type(extract_model_from_parallel(model)), "peft", "PeftModel")


def is_transformers_model(model: object) -> bool:
    """Whether a model itself, not one inside it, is of transformers."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter of a model is a DTensor, as those of a sharded model are."""
    return any(hasattr(parameter, "_local_tensor") for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return over how many ranks transformers has split a model's matrices; `None` if it has not.

    Example:
        >>> get_model_tp_size(nn.Linear(2, 2)) is None
        True
    """
    size: Any = getattr(model, "tp_size", None)  # transformers 4; it stays None in version 5
    if size is None:
        options: Any = getattr(getattr(model, "config", None), "distributed_config", None)
        size = options.get("tp_size") if isinstance(options, Mapping) else getattr(options, "tp_size", None)
    return size


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a model has layers of 4 bits of bitsandbytes."""
    return _has_layer(model, "bitsandbytes", "Linear4bit")


def has_ao_layers(model: nn.Module) -> bool:
    """Whether a model has fp8 layers of torchao."""
    return _has_layer(model, "torchao", "Float8Linear")


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a model has layers of Transformer Engine."""
    return _has_layer(model, "transformer_engine", "")


def _has_layer(model: nn.Module, package: str, name: str) -> bool:
    return any(_is_a(kind, package, name) for kind in {type(module) for module in model.modules()})


def _is_a(kind: type, package: str, name: str) -> bool:
    # By name: the packages need not be installed, and take a second to import.
    bases = kind.__mro__
    return any(base.__module__.partition(".")[0] == package and base.__name__.startswith(name) for base in bases)
