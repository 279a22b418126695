"""What differs between types of devices; other code asks here or `torch.accelerator`, and names no device."""

import torch
import torch.distributed as dist

from trainer_lib.foundation import xla

_CUDA, _MPS, _XPU, _NPU, _XLA = "cuda", "mps", "xpu", "npu", "xla"
_NO_DEVICE = ("cpu", "meta")
_WITHOUT_FLOAT64 = (_MPS, _XLA)
# The variables that restrict a process to some devices.
_VISIBLE = {_CUDA: "CUDA_VISIBLE_DEVICES", _XPU: "ZE_AFFINITY_MASK", _NPU: "ASCEND_RT_VISIBLE_DEVICES"}
# torch has fused kernels of Adam and AdamW for these.
_WITH_FUSED_ADAM = frozenset({"cpu", _CUDA, _MPS, _XPU})
FOREACH_NORM = frozenset({"cpu", _CUDA})  # the norms of many tensors are computed by one call; read in each update


# -- processes ---------------------------------------------------------------------------------------------------------


def is_shared(device_type: str) -> bool:
    """Whether all processes of a machine have one device, which is part of the host's memory (Apple's GPU)."""
    return device_type == _MPS


def has_index(device: torch.device) -> bool:
    """Whether a device is one of several of its type."""
    # torch_xla chooses the device of a process itself.
    return device.type not in (*_NO_DEVICE, _XLA) and not is_shared(device.type) and device.index is not None


def default_backend(device_type: str) -> str:
    """Return the backend in which ranks on a type of device send tensors.

    Example:
        >>> default_backend("cpu"), default_backend("cuda")
        ('gloo', 'nccl')
    """
    is_host = device_type == "cpu" or is_shared(device_type)
    return "gloo" if is_host else dist.get_default_backend_for_device(device_type)


def needs_accelerator(backend: str) -> bool:
    """Whether a backend sends tensors of accelerators only, and its barrier has to be told which one."""
    return default_backend(_CUDA) in backend


def visible_devices_variable(device_type: str) -> str | None:
    """Return the environment variable that restricts a process to some devices; `None` if there is no known one."""
    return _VISIBLE.get(device_type)


def types_with_visible_devices() -> list[str]:
    """Return the types of devices that a variable can restrict a process to."""
    return list(_VISIBLE)


# -- memory and numbers ------------------------------------------------------------------------------------------------


def pins_memory(device_type: str) -> bool:
    """Whether copies between host and device are faster, and run beside the computation, from page-locked memory."""
    return device_type not in (*_NO_DEVICE, _XLA) and not is_shared(device_type)


def can_pin_memory() -> bool:
    """Whether this machine has a device that copies from page-locked memory."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and pins_memory(accelerator.type)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for long sums: float64, since float32 loses digits over thousands of values, or the widest."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


def has_fused_adam(device_type: str) -> bool:
    """Whether torch has a fused kernel of Adam and AdamW for a type of device."""
    return device_type in _WITH_FUSED_ADAM


def has_flash_attention(device_type: str) -> bool:
    """Whether torch's flash and memory-efficient attention can be called for a type of device, backward included."""
    return device_type == _CUDA


def has_symmetric_memory(device_type: str) -> bool:
    """Whether devices of one machine read each other's memory, by which messages overlap with matrix products."""
    return device_type == _CUDA


def has_cuda_graphs(device_type: str) -> bool:
    """Whether a type of device records what is launched, and replays it as one."""
    return device_type == _CUDA


def computes_in_fp16(device_type: str) -> bool:
    """Whether a type of device has fp16, with a scale of the loss."""
    return device_type != _XLA


def supports_bf16() -> bool:
    """Whether this machine's accelerator computes in bf16; True without one, and where torch cannot tell."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    ask = None if accelerator is None else getattr(torch.get_device_module(accelerator), "is_bf16_supported", None)
    return True if ask is None else bool(ask())


# -- computing ---------------------------------------------------------------------------------------------------------


def generator_type() -> str | None:
    """Return the type of device whose generator this process draws from beside the CPU's, or `None`."""
    if xla.is_requested():
        return _XLA
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def generator_state(device_type: str) -> torch.Tensor:
    """Return the state of the generator of this process's device."""
    if device_type == _XLA:
        return xla.generator_state()
    return torch.get_device_module(device_type).get_rng_state()


def set_generator_state(device_type: str, state: torch.Tensor) -> None:
    """Restore a state that `generator_state` returned."""
    if device_type == _XLA:
        xla.set_generator_state(state)
    else:
        torch.get_device_module(device_type).set_rng_state(state)


def has_events(device_type: str) -> bool:
    """Whether torch can wait for what was launched on a type of device up to some moment."""
    return device_type not in (*_NO_DEVICE, _XLA)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done its work; the CPU has."""
    if device.type == _XLA:
        xla.sync(wait=True)
    elif device.type not in _NO_DEVICE:
        torch.accelerator.synchronize(device)


# -- facts for people --------------------------------------------------------------------------------------------------


def device_name(device: torch.device | str) -> str:
    """Return what the maker calls a device, such as "NVIDIA H100 80GB HBM3"; its type if torch cannot tell."""
    device = torch.device(device)
    if device.type == _XLA:
        return xla.device_kind()
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if ask is None else str(ask(device))


def memory_of(device: torch.device) -> dict[str, int]:
    """Return the bytes that are allocated and reserved on a device, and the peak; nothing for the CPU."""
    if device.type in (*_NO_DEVICE, _XLA) or not torch.accelerator.memory_stats(device):
        return {}
    return {
        "allocated": torch.accelerator.memory_allocated(device),
        "reserved": torch.accelerator.memory_reserved(device),
        "peak": torch.accelerator.max_memory_allocated(device),
    }


def load_of(device: torch.device) -> dict[str, float]:
    """Return how busy a device is in percent, its power in watts and its temperature, where asking takes no time.

    It needs the package pynvml.
    """
    if device.type != _CUDA:  # asking an Intel GPU takes a tenth of a second
        return {}
    return {
        "percent": float(torch.cuda.utilization(device)),
        "power_watts": torch.cuda.power_draw(device) / 1e3,
        "temperature": float(torch.cuda.temperature(device)),
    }


def toolkit_versions() -> dict[str, str]:
    """Return the versions of the makers' software that torch was built with, such as {"cuda": "13.0"}."""
    versions = {name: getattr(torch.version, name, None) for name in (_CUDA, "hip", _XPU)}
    return {name: str(version) for name, version in versions.items() if version is not None}
