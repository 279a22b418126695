"""Random generators that models, losses, trainers and callbacks hold, after a resume and an evaluation."""

import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.trainer.tasks import arguments, points
from tests.worlds import run_world
from trainer_lib import Accelerator, Trainer
from trainer_lib.events import Modifier, Run

noise_of_script = np.random.RandomState(3)


class NoisyModel(nn.Module):
    """A model with generators of its own, one of them made with the first batch."""

    late: "np.random.Generator | None" = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2)
        self.blocks = nn.ModuleList([NoisyBlock(), NoisyBlock()])
        self.late = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.late is None:
            self.late = np.random.default_rng(7)
        outputs = self.layer(inputs) + self.late.random()
        for block in self.blocks:
            outputs = block(outputs)
        return outputs


class NoisyBlock(nn.Module):
    """A block that is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1.0 + torch.rand((), generator=self.generator))


class NoisyLoss:
    """A loss that weighs samples at random."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {"rng": random.Random(2)}

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.options["rng"].random() * nn.functional.cross_entropy(outputs, targets)


class NoisyTrainer(Trainer):
    """A trainer with a generator of its own, and one of its script."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rng = random.Random(1)

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return super().compute_loss(model, (inputs * self.rng.random() + noise_of_script.rand(), targets))


class Noise(Modifier):
    """A callback that scales batches."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def on_micro_batch_begin(self, run: Run) -> None:
        inputs, targets = run.batch
        run.batch = inputs * self.rng.random(), targets


def both(data: Any) -> dict[str, Any]:
    return {"train_dataset": data, "eval_dataset": data}


def trained(folder: Path | None, steps: int, **options: Any) -> list[Tensor]:
    noise_of_script.seed(3)
    options |= {"output_dir": folder, "save_every": "3 steps"} if folder else {}
    data = {"train_dataset": points(), "eval_dataset": options.pop("eval_dataset", None)}
    args = arguments(max_steps=steps, schedule_steps=9, **options)
    model = NoisyModel()
    NoisyTrainer(model, args, **data, loss_fn=NoisyLoss(), callbacks=[Noise()]).fit()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_equals_the_uninterrupted_one(processes: int, tmp_path: Path) -> None:
    def body() -> None:
        expected = trained(None, 9)
        trained(tmp_path, 5)
        assert all(map(torch.equal, trained(tmp_path, 9, resume="extend"), expected))

    run_world(body, (), processes)


def test_evaluations_do_not_change_what_training_draws() -> None:
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(9))
    evaluated = trained(None, 9, eval_every="2 steps", eval_dataset=(inputs, torch.zeros(40).long()))
    assert all(map(torch.equal, trained(None, 9), evaluated))


def test_a_callback_draws_other_samples_to_show_in_each_evaluation() -> None:
    class Shown(Noise):
        drawn: ClassVar[list[float]] = []

        def on_micro_batch_begin(self, run: Run) -> None:
            """Leave the batch as it is."""

        def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
            del run, metrics
            self.drawn.append(self.rng.random())

    args = arguments(max_steps=4, eval_every="2 steps")
    Trainer(NoisyModel(), args, **both(points()), loss_fn=NoisyLoss(), callbacks=[Shown()]).fit()
    assert len(set(Shown.drawn)) == 2


def test_a_loop_that_loads_a_state_draws_from_the_models_generators_what_it_would_have(tmp_path: Path) -> None:
    def updates(accelerator: Accelerator, model: nn.Module, optimizer: Any, count: int) -> None:
        for _ in range(count):
            accelerator.backward(mse_loss(model(torch.ones(4, 6)), torch.ones(4, 2)))
            optimizer.step()
            optimizer.zero_grad()

    weights: list[Tensor] = []
    for is_resumed in (False, True):
        accelerator = Accelerator(cpu=True)
        bare = NoisyModel()
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        if is_resumed:
            accelerator.load_state(tmp_path)
        else:
            updates(accelerator, model, optimizer, 3)
            accelerator.save_state(tmp_path)
        updates(accelerator, model, optimizer, 3)
        weights.append(bare.layer.weight.detach().clone())
        accelerator.free_memory()
    assert torch.equal(*weights)


def test_a_rank_that_did_not_exist_takes_the_generators_of_rank_0(tmp_path: Path) -> None:
    def state(folder: Path) -> Any:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(NoisyModel())
        blocks: Any = accelerator.unwrap_model(model).blocks
        if not folder.exists():
            torch.rand(3, generator=blocks[1].generator)
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        return blocks[1].generator.get_state()

    saved = state(tmp_path / "saved")
    assert all(torch.equal(loaded, saved) for loaded in run_world(state, (tmp_path / "saved",), 2))


def test_a_step_computed_again_to_report_nan_draws_nothing_for_training() -> None:
    class Counting(NoisyModel):
        def __init__(self) -> None:
            super().__init__()
            self.batches = list[int]()  # not a number, which would be restored

        def forward(self, inputs: Tensor) -> Tensor:
            self.batches.append(len(inputs))
            size = (self.layer.weight * inputs[:, None]).abs().sum((1, 2))
            return super().forward(inputs) + size.sqrt()[:, None]  # whose gradient at 0 is NaN

    def body() -> tuple[int, int]:
        inputs, targets = points(32)
        inputs[20] = 0.0
        model = Counting()
        args = arguments(max_steps=2, on_nonfinite="skip")
        Trainer(model, args, train_dataset=(inputs, targets), loss_fn=nn.functional.cross_entropy).fit()
        expected, draws = np.random.default_rng(7), 0
        assert model.late is not None
        while expected.bit_generator.state != model.late.bit_generator.state:
            expected.random()
            draws += 1
        return draws, len(model.batches)

    draws, calls = zip(*run_world(body, (), 2), strict=True)
    assert draws == (2, 2)
    assert max(calls) > 2
