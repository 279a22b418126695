"""torch_xla, which drives TPUs: whether it is asked for, and every call of it that this library makes.

No other module imports torch_xla or asks whether it is there. The calls are those of its documentation for version 2.9.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import MissingPackageError, UnsupportedError
from trainer_lib.foundation.imports import is_package_available

# Tells each process its chip, and finds the first process; torch.distributed knows it once `load` has returned.
RENDEZVOUS = "xla://"
_STATE_BYTES = 8  # the state of a generator is one unsigned number
_REDUCTIONS = {"sum": "REDUCE_SUM", "max": "REDUCE_MAX", "min": "REDUCE_MIN"}


# -- whether it is there and asked for ---------------------------------------------------------------------------------


def is_requested(cpu: bool = False) -> bool:
    """Whether ranks use a device of torch_xla: a variable names one, and nobody asked for the CPU.

    Args:
        cpu: The script asks for the CPU.
    """
    return not (cpu or environment.cpu_requested()) and environment.xla_requested()


def can_be_imported() -> bool:
    """Whether torch_xla is installed, and fits the torch that is."""
    if not is_package_available("torch_xla"):
        return False
    try:
        load()
    except MissingPackageError:
        return False
    return True


def load() -> Any:
    """Import torch_xla, and return it.

    Raises:
        MissingPackageError: If it is not installed, or not built for the torch that is.
    """
    try:
        import_module("torch_xla.distributed.xla_backend")  # for RENDEZVOUS
        return import_module("torch_xla")
    except (ImportError, OSError) as error:  # OSError: a library beside its module does not load
        raise MissingPackageError(
            "A device of torch_xla is asked for (by `launch --tpu`, PJRT_DEVICE or ACCELERATE_TORCH_DEVICE), and "
            f"torch_xla cannot be imported beside torch {torch.__version__}: {str(error).splitlines()[0]}. Install a "
            "torch_xla that is built for this torch, or leave these out to train on GPUs or the CPU."
        ) from error


# -- this process ------------------------------------------------------------------------------------------------------


def device() -> torch.device:
    """Return the device of this process."""
    return load().device()


def device_kind() -> str:
    """Return what torch_xla drives: "TPU", "CPU" or "NEURON"."""
    return str(_runtime().device_type())


def rank() -> int:
    """Return the rank of this process, which need not be the one that its launcher gave it."""
    return int(_runtime().global_ordinal())


def world_size() -> int:
    """Return the number of processes of a world that has formed, or that `torch_xla.launch` started; else 1."""
    return int(_runtime().world_size())


def check_one_device() -> None:
    """Raise if this process drives several devices.

    Raises:
        UnsupportedError: Then torch_xla has a thread for each, and they would share one rank.
    """
    count = int(_runtime().addressable_device_count())
    if count > 1:
        raise UnsupportedError(
            f"torch_xla gives this process {count} devices, a thread each (TPU v2 and v3, or CPU_NUM_DEVICES), and a "
            "rank of this library is a process with one device. Use TPU v4 or later, or a single device."
        )


def sync(wait: bool = False) -> None:
    """Start to compute what was recorded since the last call: a step ends here.

    Args:
        wait: Wait until it is computed.
    """
    load().sync(wait=wait)


def seed(number: int) -> None:
    """Seed the generator of the device."""
    load().manual_seed(number)


def generator_state() -> Tensor:
    """Return the state of the device's generator."""
    return torch.tensor([*int(_model().get_rng_state()).to_bytes(_STATE_BYTES)], dtype=torch.uint8)


def set_generator_state(state: Tensor) -> None:
    """Restore a state that `generator_state` returned."""
    _model().set_rng_state(int.from_bytes(bytes(state.tolist())))


# -- all processes: the same calls with equal shapes, each in a graph of its own ---------------------------------------


def all_reduce(tensor: Tensor, op: str) -> None:
    """Reduce over the ranks by `sum`, `max` or `min`, in place."""
    model = _model()
    model.all_reduce(getattr(model, _REDUCTIONS[op]), [tensor])


def all_gather(tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, stacked along a new first dimension."""
    return _model().all_gather(tensor.unsqueeze(0), dim=0)


def broadcast(tensor: Tensor, source: int) -> None:
    """Overwrite a tensor of numbers with that of one rank."""
    _model().collective_broadcast([tensor], root_ordinal=source)


def _model() -> Any:
    load()
    return import_module("torch_xla.core.xla_model")


def _runtime() -> Any:
    load()
    return import_module("torch_xla.runtime")
