"""Replicas with different weights are named before the first update."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.tasks import arguments, trainer
from tests.worlds import run_world


class Shifted(nn.Module):
    """A model that sets some of its weights from its first batch."""

    def __init__(self, is_lazy: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2)
        self.mean = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(6, dtype=dtype))
        self.last = nn.Parameter(torch.zeros(6))
        self.none = nn.Parameter(torch.zeros(0))
        self.is_set = not is_lazy

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.is_set:
            self.is_set = True
            self.mean.data.copy_(inputs.mean(0))
            self.shift.data.copy_(inputs.mean(0))
            if self.shift.is_complex():
                self.last.data.copy_(inputs[0])
        return self.layer(inputs - self.shift.real) + self.none.sum() + self.last.sum()


def warnings_of(fits: list[dict[str, Any]]) -> list[list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer_lib").addHandler(handler)
    found: list[list[str]] = []
    for options in fits:
        records.clear()
        trainer(arguments(max_steps=2), model=Shifted(**options)).fit()
        found.append([record for record in records if record.startswith("Before the first update")])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_weights_that_a_model_sets_on_each_rank_are_a_warning(dtype: torch.dtype) -> None:
    def body() -> list[list[str]]:
        return warnings_of([{"is_lazy": is_lazy, "dtype": dtype} for is_lazy in (False, True, False)])

    alike, different, again = zip(*run_world(body), strict=True)
    assert alike == again == ([], [])
    (message,) = different[0] or different[1]  # on the rank that came second
    assert not (different[0] and different[1])
    more = " (and 1 more)" if dtype.is_complex else ""
    assert f"hold different values of the weight shift{more}." in message, "and not of the frozen one"


def test_one_process_compares_nothing() -> None:
    assert warnings_of([{"is_lazy": True, "dtype": torch.float32}]) == [[]]
