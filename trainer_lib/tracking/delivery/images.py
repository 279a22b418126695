"""Images in the form that every tracker takes: bytes, with the channels where the tracker expects them."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from trainer_lib.tracking.delivery.plain_values import read

_CHANNELS = (1, 3, 4)
_MODES = ("L", "RGB", "RGBA")  # of Pillow


def drawn(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return images by name, with figures of matplotlib as images of Pillow.

    The thread that logs a figure draws it: scripts change and close figures, and matplotlib does not support several
    threads. An error of matplotlib takes the figure's place, and `plain_images` raises it.
    """
    module = sys.modules.get("matplotlib.figure")
    return dict(values) if module is None else {name: _drawn(value, module.Figure) for name, value in values.items()}


def _drawn(value: Any, figure: type[Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_drawn(item, figure) for item in value]
    if not isinstance(value, figure):
        return value
    import io

    from PIL import Image

    file = io.BytesIO()
    try:
        value.savefig(file, format="png", dpi="figure")
    except Exception as error:  # noqa: BLE001  # a label with a mistake may raise anything
        return error
    return Image.open(file).convert("RGB")


def plain_images(values: Mapping[str, Any], channels_last: bool) -> dict[str, Any]:
    """Return images as arrays of `uint8`, by name.

    Floats from 0 to 1 become 0 to 255; other floats, and integers that are no bytes, are stretched to that range.
    Several images of one size become one array with a leading dimension, of several sizes a list.

    Args:
        values: Tensors, arrays, images of Pillow, or lists of these; of a figure what `drawn` returns.
        channels_last: Whether the tracker takes the channels last.

    Raises:
        TypeError: For a value that is no image.
    """
    return {name: _several(value, lambda item: _image(item, channels_last)) for name, value in values.items()}


def arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return images as arrays of their own type and layout, by name."""
    return {name: _several(value, _array) for name, value in values.items()}


def _several(value: Any, convert: Callable[[Any], Any]) -> Any:
    import numpy

    if not isinstance(value, (list, tuple)):
        return convert(value)
    images = [convert(item) for item in value]
    return numpy.stack(images) if len({image.shape for image in images}) == 1 else images


def _image(value: Any, channels_last: bool) -> Any:
    import numpy

    array = _bytes(_array(value))
    if array.ndim == 2:
        return array[..., None] if channels_last else array[None]
    # By the value's type, where the sizes leave it open: tensors have the channels first, Pillow's images last.
    is_last = hasattr(value, "getbands") or (channels_last and not hasattr(value, "detach"))
    if (array.shape[-1] in _CHANNELS) != (array.shape[-3] in _CHANNELS):
        is_last = array.shape[-1] in _CHANNELS
    if is_last == channels_last:
        return array
    return numpy.moveaxis(array, -3, -1) if channels_last else numpy.moveaxis(array, -1, -3)


def _array(value: Any) -> Any:
    import numpy

    value = read(value)
    if isinstance(value, Exception):
        raise value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # numpy has no bfloat16
    elif hasattr(value, "getbands") and value.mode not in _MODES:
        value = value.convert("RGB")
    array = numpy.asarray(value)
    if array.dtype.kind not in "biuf" or array.ndim < 2:
        kind = f"{type(value).__name__} of shape {array.shape}" if array.ndim else type(value).__name__
        raise TypeError(
            "an image must be a tensor, an array, an image of Pillow, a figure of matplotlib, or a list of these "
            f"(got a {kind})"
        )
    return array


def _bytes(array: Any) -> Any:
    import numpy

    if array.dtype == numpy.uint8 or not array.size:
        return array.astype(numpy.uint8)
    if array.dtype.kind == "f":
        array = numpy.nan_to_num(array, posinf=1.0, neginf=0.0)
    low, high = array.min(), array.max()
    largest = 255 if array.dtype.kind in "iu" else 1
    if low >= 0 and high <= largest:
        low, high = 0, largest
    scaled = (array.astype(numpy.float64) - low) * (255 / max(float(high) - float(low), 1e-12))
    return scaled.astype(numpy.uint8)
