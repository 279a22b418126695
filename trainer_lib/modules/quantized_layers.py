"""Layers of bitsandbytes: their weights made from whole or quantized values, and what the weights take in memory."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import PreparationError

_BLOCK = 256  # scales that share one scale, where scales are quantized too
_CODE_4BIT, _CODE_8BIT, _OFFSET = 16 * 4, 256 * 4, 4  # bytes of the tables that codes stand for


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is a weight of a layer of bitsandbytes, whether or not it has been quantized yet."""
    return _is_4bit(tensor) or _is_8bit(tensor)


def weight_of(name: str) -> str | None:
    """Return the name of the weight that a name in a state dict holds statistics of, if it is such a name.

    Example:
        >>> weight_of("0.weight.absmax"), weight_of("0.SCB"), weight_of("0.bias")
        ('0.weight', '0.weight', None)
    """
    owner, found, last = f".{name}".rpartition(".")
    if last not in ("SCB", "weight_format"):
        owner, found, _ = f".{name}".rpartition(".weight.")
    return f"{owner}.weight".removeprefix(".") if found else None


def quantize(
    owner: nn.Module, current: Any, value: Tensor, device: Any, statistics: Mapping[str, Tensor] | None = None
) -> nn.Parameter:
    """Return a new weight for a layer of bitsandbytes.

    Args:
        owner: The layer.
        current: Its weight, of which the new one has the options.
        value: A whole weight, which is quantized here; or a quantized one, with its statistics.
        device: The device of the new weight.
        statistics: The statistics of a quantized value, by their names in the state dict.
    """
    kind: Any = type(current)
    if not statistics:
        # A weight of 8 bits is quantized on its way from the CPU.
        whole: Any = unquantized(owner, current, value.to("cpu") if _is_8bit(current) else value)
        return whole.to(device)
    if _is_4bit(current):
        return kind.from_prequantized(value, dict(statistics), requires_grad=False, device=device, module=owner)
    rows = value.detach().to(device)
    scales = next(part for name, part in statistics.items() if name.endswith("SCB"))
    return kind(rows, requires_grad=False, has_fp16_weights=False, CB=rows, SCB=scales.to(device))


def unquantized(owner: nn.Module, current: Any, value: Tensor) -> nn.Parameter:
    """Return a weight for a layer of bitsandbytes that is quantized as soon as it moves to a device.

    Args:
        owner: The layer.
        current: Its weight, of which the new one has the options.
        value: A whole weight, which may be on the meta device.
    """
    kind: Any = type(current)
    if _is_4bit(current):
        return kind(value.detach(), **_options(current), module=owner)  # it tells its module the scales
    return kind(value.detach(), requires_grad=False, has_fp16_weights=False)


def on_meta(weight: Any) -> nn.Parameter:
    """Return a weight without memory that stands for a quantized one, with its options."""
    empty = torch.empty_like(weight.data, device="meta")
    if _is_4bit(weight):
        return type(weight)(empty, **_options(weight), bnb_quantized=True)
    return type(weight)(empty, requires_grad=False, has_fp16_weights=weight.has_fp16_weights)


def release_statistics(layer: nn.Module) -> None:
    """Drop what a layer of bitsandbytes keeps of its quantized weight besides the weight."""
    if hasattr(layer, "quant_state"):
        vars(layer)["quant_state"] = None
    state: Any = vars(layer).get("state")
    if state is not None:
        state.CB = state.SCB = None


def keep_unpacked(model: nn.Module) -> None:
    """Have 4-bit layers keep their weights as they are where bitsandbytes would pack them for CPUs with AVX-512.

    Packed ones lose bits, let no gradient through, and are saved with scales that do not fit.

    Raises:
        PreparationError: If the weights of a model that trains are packed already.
    """
    for name, layer in model.named_modules():
        if not hasattr(layer, "support_avx512bf16_for_cpu"):
            continue
        is_packed = getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False)
        if is_packed and any(parameter.requires_grad for parameter in model.parameters()):
            raise PreparationError(
                f"The 4-bit weights of {name or 'the model'} were packed by bitsandbytes in an earlier evaluation, "
                "which lets no gradient through. Load the model again, and prepare it before its first forward."
            )
        vars(layer)["support_avx512bf16_for_cpu"] = False


def quantized_beside_trained(model: nn.Module) -> str | None:
    """Return the name of a quantized weight of a model of which all else is trained, as it is without adapters."""
    quantized = [name for name, parameter in model.named_parameters() if is_quantized(parameter)]
    layers = {name.rpartition(".")[0] for name in quantized}
    others = [p for name, p in model.named_parameters() if name.rpartition(".")[0] not in layers]
    return quantized[0] if quantized and others and all(parameter.requires_grad for parameter in others) else None


def quantized_size(weight: Any) -> int:
    """Return the bytes that the weight of a layer of bitsandbytes takes once it is quantized, with its statistics."""
    if _is_8bit(weight):
        return weight.numel() + 4 * weight.shape[0]
    is_packed = not weight.is_floating_point()  # two values a byte
    numel = 2 * weight.numel() * weight.element_size() if is_packed else weight.numel()
    blocks = math.ceil(numel / weight.blocksize)
    scales = blocks * 4
    if weight.compress_statistics:
        scales = blocks + math.ceil(blocks / _BLOCK) * 4 + _CODE_8BIT + _OFFSET
    return math.ceil(numel / 2) + scales + _CODE_4BIT


def _options(weight: Any) -> dict[str, Any]:
    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    return {"requires_grad": False, **{name: getattr(weight, name) for name in names}}


def _is_4bit(tensor: Any) -> bool:
    return _is_of(type(tensor), "Params4bit")


def _is_8bit(tensor: Any) -> bool:
    return _is_of(type(tensor), "Int8Params") and not tensor.has_fp16_weights


@lru_cache(maxsize=64)
def _is_of(kind: type, name: str) -> bool:
    # By name: bitsandbytes need not be installed, and takes seconds to import.
    return any(base.__name__ == name and base.__module__.startswith("bitsandbytes") for base in kind.__mro__)
