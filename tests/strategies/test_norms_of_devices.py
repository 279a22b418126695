"""Norms of gradients on several devices, and on one without float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_lib.foundation import device_types
from trainer_lib.strategies.clip_grad_norm import NormOfParts, total_norm


def test_gradients_of_several_devices_have_one_norm() -> None:
    """As those of a split model whose optimizer steps in the backward."""
    norm = NormOfParts(torch.device("meta"))
    for device in ("meta", "cpu"):
        norm.add(torch.ones(3, device=device))
    assert norm.total().device == torch.device("meta")


class ForbidsFloat64(TorchDispatchMode):
    """Raises where torch raises on Apple's GPUs."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, Tensor) and result.dtype is torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it.")
        return results


@pytest.mark.parametrize("in_double", [True, False])
def test_a_device_without_float64_has_norms_too(in_double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_types, "_WITHOUT_FLOAT64", ("cpu",))
    with ForbidsFloat64():
        norm = total_norm([torch.full((4,), 3.0), torch.full((7,), 2.0)], 2.0, torch.device("cpu"), in_double)
    assert norm == 8
