"""Fingerprints of samples (types, shapes and some values), to compare what several ranks read."""

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

Fingerprint = Any  # texts, numbers, and tuples of these

_VALUES = 8  # of an array, besides its mean
_PARTS = 32  # of a sample that is a list or a dict
_LETTERS = 64
_LARGEST = 1 << 20  # elements of an array of which the mean is taken
_TOLERANCE = 1e-4  # processors differ in the last digits of what they compute


def fingerprint(sample: Any, depth: int = 4) -> Fingerprint:
    """Return the fingerprint of a sample, the same for equal samples.

    Example:
        >>> fingerprint({"inputs": torch.tensor([1.0, 3.0]), "label": 2})
        ('dict', 2, ('inputs', ('tensor', 'float32', (2,), (1.0, 3.0, 2.0))), ('label', 2))
    """
    if sample is None or isinstance(sample, (bool, int, float)):
        return sample
    if isinstance(sample, (str, bytes)):
        return _text(sample)
    if isinstance(sample, Tensor):
        return _tensor(sample.detach())
    if isinstance(sample, np.generic) or hasattr(sample, "__array_interface__"):  # a picture of PIL has it too
        return _array(np.asarray(sample))
    name = type(sample).__name__
    if depth and isinstance(sample, Mapping):
        items = list(cast("Mapping[Any, Any]", sample).items())
        return (name, len(items), *((str(key), fingerprint(value, depth - 1)) for key, value in items[:_PARTS]))
    if depth and isinstance(sample, (list, tuple)):
        parts = cast("Sequence[Any]", sample)
        return (name, len(parts), *(fingerprint(part, depth - 1) for part in parts[:_PARTS]))
    return (name,)


def alike(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints are of the same sample, up to rounding.

    Example:
        >>> alike(fingerprint([torch.ones(2), "cat"]), fingerprint([torch.ones(2) + 1e-7, "cat"]))
        True
    """
    if isinstance(one, tuple) and isinstance(other, tuple):
        parts, others = cast("tuple[Any, ...]", one), cast("tuple[Any, ...]", other)
        if len(parts) == len(others) and parts and all(isinstance(part, float) for part in (*parts, *others)):
            scale = max((abs(part) for part in parts if math.isfinite(part)), default=0.0)
            return all(_is_close(a, b, scale) for a, b in zip(parts, others, strict=True))
        return len(parts) == len(others) and all(alike(a, b) for a, b in zip(parts, others, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return _is_close(one, other, abs(one))
    return type(one) is type(other) and one == other


def digest(samples: Iterable[Any]) -> int:
    """Return a number for samples, the same for equal samples; never 0.

    Example:
        >>> digest([1, "a"]) == digest([1, "a"]) != digest([2, "a"])
        True
    """
    text = repr([fingerprint(sample) for sample in samples])
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little") + 1


def shown(of: Fingerprint) -> str:
    """Return a fingerprint in few words, for an error.

    Example:
        >>> shown(fingerprint((torch.tensor([1.0, 3.0]), 2)))
        '(float32 of shape (2,) with values 1, 3; 2)'
    """
    if not isinstance(of, tuple):
        return repr(of)
    kind, *parts = cast("tuple[Any, ...]", of)
    if kind == "tensor":
        dtype, shape, values = parts
        listed = ", ".join(f"{value:.4g}" if isinstance(value, float) else repr(value) for value in values[:2])
        return f"{dtype} of shape {shape} with values {listed}"
    if kind == "text":
        return repr(parts[-1])
    return f"({'; '.join(_shown_part(part) for part in parts[1:5])})" if parts else f"a {kind}"


def _shown_part(part: Any) -> str:
    is_item = isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str) and isinstance(part[1], tuple)  # pyright: ignore[reportUnknownArgumentType]
    return f"{part[0]}: {shown(part[1])}" if is_item else shown(part)  # pyright: ignore[reportUnknownArgumentType]


def _text(text: str | bytes) -> Fingerprint:
    if len(text) <= _LETTERS:
        return ("text", len(text), text)
    whole = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return ("text", len(text), blake2b(whole, digest_size=8).hexdigest(), text[:_LETTERS])


def _tensor(tensor: Tensor) -> Fingerprint:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_complex():
        return ("tensor", dtype, shape, ())
    flat = tensor.reshape(-1)[:_LARGEST].cpu()
    if not len(flat):
        return ("tensor", dtype, shape, ())
    places = torch.linspace(0, len(flat) - 1, min(_VALUES, len(flat))).long()
    values = flat[places].double() if tensor.is_floating_point() else flat[places]
    return ("tensor", dtype, shape, (*values.tolist(), flat.double().mean().item()))


def _array(array: np.ndarray[Any, Any]) -> Fingerprint:
    try:
        return _tensor(torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)))
    except (TypeError, ValueError):  # texts and objects
        return ("array", str(array.dtype), tuple(array.shape), *map(str, array.reshape(-1)[:_VALUES].tolist()))


def _is_close(one: float, other: float, scale: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) <= _TOLERANCE * scale
    return one == other or (math.isnan(one) and math.isnan(other))
