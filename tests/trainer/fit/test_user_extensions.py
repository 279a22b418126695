"""What is written from the documentation alone is short, and works in a run of one process and of two."""

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.strangers import BalancedAccuracy, EasyFirst, EvaluateWhenHalved
from tests.trainer.tasks import arguments
from tests.worlds import run_world
from trainer_lib import Callback, Run, Trainer

SAMPLES, BATCH, MIDDLE = 64, 8, 13  # the last is the step after which a run is resumed


@pytest.mark.parametrize("written", [EvaluateWhenHalved, BalancedAccuracy, EasyFirst])
def test_each_takes_less_than_thirty_lines(written: type) -> None:
    assert len(inspect.getsource(written).strip().splitlines()) < 30


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(5))
    return inputs, (inputs[:, 0] > -0.4).long()  # more of one class than of the other


class Told(Callback):
    """Keeps what strangers tell the history, and what each update was made from."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []
        self.seen: list[list[float]] = []

    def on_event(self, run: Run, name: str, facts: Mapping[str, Any]) -> None:
        self.notes.append({"name": name, "step": run.state.step, **facts})

    def on_step_end(self, run: Run) -> None:
        self.seen.append(run.batch[0][:, 0].tolist())


def train(folder: Path, processes: int, resume: str = "never") -> dict[str, Any]:
    torch.manual_seed(0)
    inputs, targets = data()
    loader = DataLoader(
        TensorDataset(inputs, targets), batch_size=BATCH // processes, sampler=EasyFirst(inputs.square().sum(dim=1))
    )
    listener = Told()
    trainer = Trainer(
        nn.Linear(3, 2),
        arguments(
            num_train_epochs=5,
            learning_rate=0.3,
            log_every=4,
            eval_every="never",
            save_every=MIDDLE,
            keep_last=None,
            output_dir=folder,
            resume=resume,
        ),
        train_dataset=loader,
        eval_dataset=(inputs, targets),
        loss_fn=cross_entropy,
        metrics={"classes": BalancedAccuracy(2)},
        callbacks=[EvaluateWhenHalved(), listener],
    )
    result, metrics = trainer.fit(), trainer.evaluate()
    logits = torch.from_numpy(trainer.predict((inputs, targets)).predictions)
    shares = [(logits.argmax(dim=1) == targets)[targets == label].double().mean().item() for label in (0, 1)]
    return {
        "history": result.history,
        "checkpoint": next(label["path"] for label in result.state.checkpoints if label["step"] == MIDDLE),
        "metrics": metrics,
        "by hand": {"eval_classes_balanced": sum(shares) / 2, "eval_classes_worst": min(shares)},
        "halved": [(note["step"], note["now"]) for note in listener.notes if note["name"] == "halved"],
        "seen": listener.seen,
        "weights": {name: value.clone() for name, value in trainer.unwrapped_model.state_dict().items()},
    }


def losses(run: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in run["history"] if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_they_work_together(processes: int, tmp_path: Path) -> None:
    runs = run_world(train, (tmp_path / "whole", processes), num_processes=processes, timeout=60)
    first = runs[0]
    # The sampler: the easy half comes first in each pass, in another order each time, each sample once.
    inputs, _ = data()
    easy = set(inputs[inputs.square().sum(dim=1).argsort()[: SAMPLES // 2], 0].tolist())
    steps = [[value for run in runs for value in run["seen"][step]] for step in range(5 * SAMPLES // BATCH)]
    passes = [steps[start : start + SAMPLES // BATCH] for start in range(0, len(steps), SAMPLES // BATCH)]
    for loader in passes:
        assert {value for step in loader[:4] for value in step} == easy
        assert sorted(value for step in loader for value in step) == sorted(inputs[:, 0].tolist())
    assert passes[0] != passes[1]
    # The metric: the same on all processes, and as by hand.
    for run in runs:
        for name, value in first["by hand"].items():
            assert run["metrics"][name] == pytest.approx(value, abs=1e-6)
    # The callback: evaluated where the loss was half of the last, as the history tells.
    logged = [(entry["step"], entry["loss"]) for entry in first["history"] if "loss" in entry]
    halved, last = list[tuple[int, float]](), logged[0][1]
    for step, loss in logged[1:]:
        if loss <= last / 2:
            halved.append((step, loss))
            last = loss
    assert first["halved"] == halved
    assert halved[0][0] <= MIDDLE < halved[-1][0]  # so that what it remembers counts after a resume
    assert len([entry for entry in first["history"] if "eval_loss" in entry]) == len(halved)
    # The run is the same with one process and two, and resumed or uninterrupted.
    if processes == 2:
        (alone,) = run_world(train, (tmp_path / "alone", 1), num_processes=1, timeout=60)
        for loss, other in zip(losses(first), losses(alone), strict=True):
            assert math.isclose(loss, other, rel_tol=1e-5)
    arguments_on = (tmp_path / "on", processes, first["checkpoint"])
    (on, *_) = run_world(train, arguments_on, num_processes=processes, timeout=60)
    assert all(torch.equal(value, first["weights"][name]) for name, value in on["weights"].items())
    assert losses(on) == losses(first)
    assert on["halved"] == [loader for loader in halved if loader[0] > MIDDLE]
    assert on["seen"] == first["seen"][MIDDLE:]
