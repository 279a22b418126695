"""Reading pickles of other libraries safely: only tensors, numbers, strings and containers of them.

torch refuses any other name in a pickle before it creates an object, so no code in a file runs.
"""

import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_lib.foundation.errors import CheckpointError


def read_pickle(path: Path, *, in_place: bool = False) -> Any:
    """Return the contents of a file.

    Args:
        path: The file.
        in_place: Whether tensors stay in the file until they are read.

    Raises:
        CheckpointError: If it holds more than tensors and plain values, or cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns about pickle protocols that it does not write
            return torch.load(path, map_location="cpu", weights_only=True, mmap=in_place)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused, and no code in it was run: the pickle holds more than tensors and plain values "
            f"({_reason(error)})."
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {_reason(error)}") from error


def read_tensors(path: Path) -> Any:
    """Return the contents of a file whose objects other than tensors and plain values are not needed.

    Such an object becomes a placeholder: its class is neither imported nor called. Tensors stay in the file until they
    are read.

    Raises:
        CheckpointError: If it names a function of the operating system, or cannot be read.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {_reason(error)}") from error
    with torch.serialization.safe_globals([(_Placeholder, name) for name in names]):
        return read_pickle(path, in_place=True)


class _Placeholder:
    """Stands for an object of a class that is not known."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Placeholder":
        del args, kwargs
        return super().__new__(cls)


def read_generators(path: Path) -> dict[str, Any]:
    """Return the states of the random generators of a rank in this library's format, and the "step" of the file.

    Raises:
        CheckpointError: If the file does not hold generator states.
    """
    state = read_with_arrays(path)
    try:
        python = state.get("python", state.get("random_state"))
        kind, key, position, has_gauss, gauss = state.get("numpy", state.get("numpy_random_seed"))
        generators = {
            "python": (python[0], tuple(python[1]), python[2]),
            "numpy": {
                "bit_generator": str(kind),
                "state": {"key": np.asarray(key, np.uint32), "pos": int(position)},
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            },
            "torch": state.get("cpu", state.get("torch_manual_seed")),
        }
        _try_to_load(generators)
        generators["step"] = int(state.get("step", 0))
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not hold the states of random generators: {error}") from error
    device = state.get("cuda", state.get("torch_cuda_manual_seed"))
    if isinstance(device, torch.Tensor):
        generators["device"] = {"cuda": device}
    elif isinstance(device, list) and len(device) == 1:  # of several it is unknown which belongs to this rank
        generators["device"] = {"cuda": device[0]}
    return generators


def read_with_arrays(path: Path) -> Any:
    """Return the contents of a file that may hold arrays of NumPy."""
    with torch.serialization.safe_globals(_array_globals()):
        return read_pickle(path)


def _array_globals() -> list[Any]:
    # The names in pickled arrays of NumPy 1 and 2.
    reconstruct = np.zeros(1).__reduce__()[0]
    names = [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [*names, np.ndarray, np.dtype, type(np.dtype(np.uint32))]


def _try_to_load(generators: dict[str, Any]) -> None:
    random.Random().setstate(generators["python"])
    np.random.RandomState().set_state(generators["numpy"])
    torch.Generator().set_state(generators["torch"])


def _reason(error: Exception) -> str:
    """Return the reason in torch's message, without its advice to read the file unsafely."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if "GLOBAL" in line] or [line for line in lines if "torch.load" not in line]
    return (reasons or [""])[0].removeprefix("WeightsUnpickler error: ").split(" by default", 1)[0].rstrip(". ")
