"""A recorder in place of torch_xla: it writes down each call, and computes on the CPU through gloo.

It shows which documented functions are called, with which arguments and in which order; signatures are those of
torch_xla 2.9. It does not show that a TPU computes anything.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

# Its own name is that of a package that is not installed.
from . import distributed as distributed  # noqa: TID252
from . import runtime as runtime  # noqa: TID252


def record(call: str, **arguments: Any) -> None:
    """Write a call down."""
    with Path(f"{os.environ['RECORDED_CALLS']}.{os.environ.get('RANK', '0')}").open("a") as file:
        file.write(json.dumps([call, arguments]) + "\n")


def device(index: int | None = None) -> torch.device:
    """Return the CPU."""
    assert index is None
    return torch.device("cpu")


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Do nothing: CPUs compute at once."""
    assert reset_scope
    record("sync", wait=wait)


def manual_seed(seed: int, device: Any = None) -> None:
    """Do nothing."""
    assert device is None
    record("manual_seed", seed=seed)
