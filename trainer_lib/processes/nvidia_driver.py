"""The GPUs that NVIDIA's driver knows, asked without torch and without initializing them."""

import ctypes
from typing import Any

from trainer_lib.foundation.light_dataclasses import frozen_dataclass

_NAME_LENGTH = 96


@frozen_dataclass
class Gpu:
    """A GPU.

    Args:
        name: Its name.
        memory: Its memory, in bytes.
        free: How much of it no process uses.
        uuid: Its id, which CUDA_VISIBLE_DEVICES understands.
    """

    name: str
    memory: int
    free: int
    uuid: str = ""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_gpus() -> tuple[str, list[Gpu]]:
    """Return the version of NVIDIA's driver, and its GPUs; an empty version without a driver.

    Example:
        >>> read_gpus()  # doctest: +SKIP
        ('570.86', [Gpu(name='NVIDIA H200', memory=150754820096, free=150198943744, uuid='GPU-5fd2')])
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():  # it returns an error code
            return "", []
    except (OSError, AttributeError):
        return "", []
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return _text(library.nvmlSystemGetDriverVersion), [_gpu(library, index) for index in range(count.value)]
    finally:
        library.nvmlShutdown()


def _gpu(library: Any, index: int) -> Gpu:
    handle, memory = ctypes.c_void_p(), _Memory()
    library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    name, uuid = _text(library.nvmlDeviceGetName, handle), _text(library.nvmlDeviceGetUUID, handle)
    return Gpu(name, int(memory.total), int(memory.free), uuid)


def _text(function: Any, *arguments: Any) -> str:
    text = ctypes.create_string_buffer(_NAME_LENGTH)
    function(*arguments, text, _NAME_LENGTH)
    return text.value.decode(errors="replace")
