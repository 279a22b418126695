"""This file is reading pickles that other libraries wrote: tensors, numbers, texts and containers of them, no more.

torch refuses what names anything else before it is made, so that nothing in a file runs.
"""

import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_lib.foundation.errors import CheckpointError


def read_pickle(path: Path) -> Any:
    """Return what a file holds.

    Raises:
        CheckpointError: If that is more than tensors and plain values, or it cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of protocols that torch does not write itself
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused, and nothing in it was run: it is a pickle of more than tensors and plain values "
            f"({_reason(error)})."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {_reason(error)}") from error


def read_generators(path: Path) -> dict[str, Any]:
    """Return where the generators of a process stood, in the form in which states here have it, and its "step".

    Raises:
        CheckpointError: If the file holds something else.
    """
    state = _read_with_arrays(path)
    try:
        python = state.get("python", state.get("random_state"))
        kind, key, position, has_gauss, gauss = state.get("numpy", state.get("numpy_random_seed"))
        found = {
            "python": (python[0], tuple(python[1]), python[2]),
            "numpy": {
                "bit_generator": str(kind),
                "state": {"key": np.asarray(key, np.uint32), "pos": int(position)},
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            },
            "torch": state.get("cpu", state.get("torch_manual_seed")),
        }
        _try_out(found)
        found["step"] = int(state.get("step", 0))
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} holds no states of generators: {error}") from error
    device = state.get("cuda", state.get("torch_cuda_manual_seed"))
    if isinstance(device, torch.Tensor):
        found["device"] = {"cuda": device}
    elif isinstance(device, list) and len(device) == 1:  # of several it is not known which was this process's
        found["device"] = {"cuda": device[0]}
    return found


def _read_with_arrays(path: Path) -> Any:
    with torch.serialization.safe_globals(_of_arrays()):
        return read_pickle(path)


def _of_arrays() -> list[Any]:
    # What numpy pickles its arrays by, under the names of its first and its second version.
    reconstruct = np.zeros(1).__reduce__()[0]
    names = [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [*names, np.ndarray, np.dtype, type(np.dtype(np.uint32))]


def _try_out(found: dict[str, Any]) -> None:
    random.Random().setstate(found["python"])
    np.random.RandomState().set_state(found["numpy"])
    torch.Generator().set_state(found["torch"])


def _reason(error: Exception) -> str:
    """Return what torch says is wrong, without its advice to read the file by other means."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "GLOBAL" in line] or [line for line in lines if "torch.load" not in line] or [""]
    return told[0].removeprefix("WeightsUnpickler error: ").split(" by default", 1)[0].rstrip(". ")
