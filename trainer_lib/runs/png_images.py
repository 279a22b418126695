"""Tensors as small PNG images, in text that a page shows without a file."""

import base64
import struct
import zlib
from typing import Any

import torch
from torch import Tensor

_SIDE = 96  # pixels; a larger image keeps every n-th row and column
_SMALLEST = 4


def is_image(value: Any) -> bool:
    """Whether a value has the shape of an image: channels first or last, 1 or 3 of them."""
    if not isinstance(value, Tensor) or value.ndim != 3 or value.is_complex():
        return False
    first, *middle, last = value.shape
    sides = [*middle, last] if first in (1, 3) else [first, *middle]
    return (first in (1, 3) or last in (1, 3)) and min(sides) >= _SMALLEST


def png_uri(image: Tensor) -> str:
    """Return an image as a `data:` URI; its smallest value is black, and its largest white.

    Example:
        >>> png_uri(torch.rand(1, 8, 8))[:22]
        'data:image/png;base64,'
    """
    pixels = image.detach().to("cpu", torch.float32)
    if pixels.shape[0] in (1, 3):
        pixels = pixels.permute(1, 2, 0)
    stride = -(-max(pixels.shape[:2]) // _SIDE)
    pixels = torch.nan_to_num(pixels[::stride, ::stride], posinf=0.0, neginf=0.0)
    low, high = pixels.min(), pixels.max()
    values = ((pixels - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    height, width, channels = values.shape
    # Each row of a PNG begins with the number of its filter; 0 leaves the row unfiltered.
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), values.reshape(height, width * channels)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)
    file += _chunk(b"IDAT", zlib.compress(rows.numpy().tobytes(), 9)) + _chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
