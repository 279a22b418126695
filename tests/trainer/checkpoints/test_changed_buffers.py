"""Buffers that a state dict leaves out and training changes: a resumed run has them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib.trainer.checkpoints.changed_buffers import ChangedBuffers


class Remembering(nn.Module):
    """A model that adds to its inputs what a bank remembers of earlier ones, and has a table that does not change.

    Args:
        grows: Whether the bank gets a row with each batch.
    """

    bank: Tensor
    table: Tensor

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.grows = nn.Linear(6, 2), grows
        self.register_buffer("bank", torch.zeros(1 if grows else 4, 6), persistent=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("unset", None, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs + self.bank.mean(0) + self.table)
        if self.training:
            rows = torch.cat([self.bank, inputs[:1].detach()])
            self.bank = rows if self.grows else rows[-4:].clone()
        return outputs


def trained(folder: Path | None, steps: int, model: nn.Module, **options: Any) -> dict[str, Tensor]:
    options |= {"output_dir": folder, "save_every": "3 steps"} if folder else {}
    trainer(arguments(max_steps=steps, schedule_steps=9, **options), model=model).fit()
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("grows", [False, True])
def test_a_resumed_run_equals_the_uninterrupted_one(grows: bool, processes: int, tmp_path: Path) -> None:
    def body() -> None:
        expected = trained(None, 9, Remembering(grows))
        trained(tmp_path, 5, Remembering(grows))
        resumed = trained(tmp_path, 9, Remembering(grows), resume="extend")
        assert all(torch.equal(resumed[name], value) for name, value in expected.items())
        assert expected["bank"].abs().sum() > 1

    run_world(body, (), processes)


class MakesItsBank(Remembering):
    """A model whose first forward makes the bank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", None, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.bank is None:  # pyright: ignore[reportUnnecessaryComparison]
            self.bank = torch.zeros(4, 6)
        return super().forward(inputs)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bank_that_the_first_forward_makes_is_resumed(processes: int, tmp_path: Path) -> None:
    def body() -> None:
        expected = trained(None, 9, MakesItsBank())
        trained(tmp_path, 5, MakesItsBank())
        resumed = trained(tmp_path, 9, MakesItsBank(), resume="extend")
        assert all(torch.equal(resumed[name], value) for name, value in expected.items())

    run_world(body, (), processes)


def test_a_model_with_a_conjugate_is_trained_and_saved(tmp_path: Path) -> None:
    model = nn.Linear(6, 2)
    values = torch.tensor([1 + 2j, 3 - 4j])
    model.register_buffer("values", values)
    model.register_buffer("conjugate", values.conj())
    model.register_buffer("not_saved", values.conj(), persistent=False)
    model.register_buffer("negative", values.conj().imag, persistent=False)
    trained(tmp_path, 3, model)
    model.conjugate = torch.zeros(2, dtype=torch.complex64)
    trained(tmp_path, 5, model, resume="extend")
    assert torch.equal(model.conjugate, values.conj())


def test_only_buffers_that_change_are_saved(tmp_path: Path) -> None:
    trained(tmp_path, 3, Remembering())
    (file,) = tmp_path.glob("*/checkpoints/checkpoint-00000003/custom_checkpoint_0.json")
    assert list(json.loads(file.read_text())["changed_buffers"]) == ["bank"]
    trained(tmp_path / "none", 3, nn.Linear(6, 2))
    (file,) = tmp_path.glob("none/*/checkpoints/checkpoint-00000003/custom_checkpoint_0.json")
    assert "changed_buffers" not in json.loads(file.read_text())
    without_values = nn.Linear(6, 2)
    without_values.register_buffer("unset", None, persistent=False)
    trained(tmp_path / "unset", 3, without_values)
    (file,) = tmp_path.glob("unset/*/checkpoints/checkpoint-00000003/custom_checkpoint_0.json")
    assert json.loads(file.read_text())["changed_buffers"] == {}


def test_a_run_that_was_compiled_resumes_without_compiling(tmp_path: Path) -> None:
    expected = trained(None, 9, Remembering())
    trained(tmp_path, 5, Remembering(), compile="eager")
    resumed = trained(tmp_path, 9, Remembering(), resume="extend")
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())


class StartsLate(Remembering):
    """A model that remembers nothing before its fourth batch."""

    batches = 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, bank = self.layer(inputs + self.bank.mean(0) + self.table), self.bank
        self.batches += self.training
        if self.batches > 3:
            super().forward(inputs)
            if not self.grows:
                bank.copy_(self.bank)
                self.bank = bank
        return outputs


@pytest.mark.parametrize("grows", [False, True])
def test_the_best_checkpoint_has_the_buffers_that_changed_later(grows: bool, tmp_path: Path) -> None:
    model, scores = StartsLate(grows), itertools.count()
    best: dict[str, Any] = {"metric_for_best": "score", "greater_is_better": False, "load_best_at_end": True}
    args = arguments(output_dir=tmp_path, max_steps=6, save_every=1, eval_every=1, **best)
    measured = {"eval_dataset": points(), "compute_metrics": lambda _: {"score": next(scores)}}
    result = trainer(args, model=model, **measured).fit()
    assert result.state.best is not None
    assert result.state.best.step == 1
    assert torch.equal(model.bank, torch.zeros(1 if grows else 4, 6))


def test_first_values_are_loaded_again_and_again() -> None:
    model = Remembering(grows=True)
    buffers = ChangedBuffers({"": model})
    for _ in range(2):
        model.bank, model.unset = torch.ones(3, 6), torch.ones(2)
        model.table.add_(1)
        buffers.load_state_dict({})
        assert torch.equal(model.bank, torch.zeros(1, 6))
        assert torch.equal(model.table, torch.arange(6.0))
        assert model.unset is None
        model.bank.add_(1)


class Permuting(nn.Module):
    """A model whose buffer holds the same values in another order after each batch."""

    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2)
        self.register_buffer("order", torch.arange(6), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs[:, self.order])
        if self.training:
            self.order.copy_(self.order.roll(1))
        return outputs


def test_values_in_another_order_are_a_change(tmp_path: Path) -> None:
    expected = trained(None, 9, Permuting())
    trained(tmp_path, 5, Permuting())
    resumed = trained(tmp_path, 9, Permuting(), resume="extend")
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
