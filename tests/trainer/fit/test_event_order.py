"""The order of events in a fit, for each way that a step can go, on one process and on two.

`event_order.txt` holds the expected order: a section for each scenario, a line for each optimizer step.
"""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.faults.trainings import Dies
from tests.trainer.safety.test_micro_batching import Hungry
from tests.trainer.tasks import Recorder, arguments, network, points
from tests.worlds import run_world
from trainer_lib import Interrupted, LossResult, Trainer
from trainer_lib.callbacks import SAM
from trainer_lib.events import Callback, Run
from trainer_lib.events.callback import EVENTS
from trainer_lib.processes.exit_codes import by_signal

EXPECTED = Path(__file__).with_name("event_order.txt")
# What ends a line: all other events belong to the line of the step that they precede.
LAST = "step_end"


class Poisoned(nn.Module):
    """A network whose outputs are NaN in the training batches that hold this sample."""

    def __init__(self, sample: Tensor) -> None:
        super().__init__()
        self.inner, self.sample = network(), sample

    def forward(self, inputs: Tensor) -> Tensor:
        is_poisoned = self.training and bool((inputs == self.sample).all(dim=1).any())
        outputs: Tensor = self.inner(inputs)
        return outputs * torch.nan if is_poisoned else outputs


class Stops(Callback):
    """Asks for an evaluation, a checkpoint and the end of the epoch, and then for the end of training."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 2:
            run.control.evaluate = run.control.save = run.control.end_epoch = True
        if run.state.step == 4:
            run.control.stop = True


class Interrupts(Callback):
    """Asks for the end of the run as a signal does, and for a checkpoint, in the step that evaluates."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 1 and run.accelerator.is_last_process:
            run.control.save = True
        if run.state.step == 2 and run.is_main_process:
            run.control.interruption = by_signal(signal.SIGTERM)


class Gan(Trainer):
    """Steps two optimizers by itself."""

    def configure_optimizer(self) -> dict[str, torch.optim.Optimizer]:
        models: Any = self.model
        return {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}

    def training_step(self, model: Any, batch: Any) -> LossResult | None:
        inputs, sides = batch
        for name in ("generator", "critic"):
            optimizer = self.optimizers[name]
            self.backward(cross_entropy(model[name](inputs), sides), optimizer=name)
            optimizer.step()
            optimizer.zero_grad()
        return None


def events(
    folder: Path, *callbacks: Callback, model: Any = None, kind: type[Trainer] = Trainer, rows: int = 40, **options: Any
) -> list[str]:
    """Return the events of a run as lines, the last of which is not complete where the run was killed."""
    recorder = Recorder(*(name for name in EVENTS if name != "on_event"))
    settings: dict[str, Any] = {"num_train_epochs": 1, "log_every": 2, "output_dir": folder, "resume": "auto"}
    settings |= {"save_in_background": False, **options}
    trainer = kind(
        model or network(),
        arguments(**settings),
        train_dataset=points(rows),
        eval_dataset=points(16) if kind is Trainer else None,
        loss_fn=cross_entropy if kind is Trainer else None,
        callbacks=[recorder, *callbacks],
    )
    try:
        trainer.fit()
    except InterruptedError:
        recorder.events.append("killed")
    except Interrupted:
        recorder.events.append("interrupted")
    lines, line = list[str](), list[str]()
    for event in recorder.events:
        line.append(event.partition(" ")[0])
        if line[-1] == LAST:
            lines.append(" ".join(line))
            line = []
    return [*lines, " ".join(line)]


def resumed(folder: Path, *callbacks: Callback, **options: Any) -> list[str]:
    """Return the events of a run that callbacks end early, and those of the run that resumes it."""
    return [*events(folder, *callbacks, **options), "resumed:", *events(folder, **options)]


def poisoned(folder: Path, **options: Any) -> list[str]:
    """Return the events of a run whose fourth batch makes NaN."""
    return events(folder, model=Poisoned(points()[0][26]), shuffle=False, save_every=1, **options)


SCENARIOS: Mapping[str, Callable[[Path], list[str]]] = {
    "plain": lambda folder: events(folder, eval_every=2, save_every=2),
    "accumulation, with a short last window": lambda folder: events(folder, gradient_accumulation_steps=2),
    "filler batches": lambda folder: events(folder, rows=33),
    "requests": lambda folder: events(folder, Stops(), num_train_epochs=2),
    "a skipped update": lambda folder: poisoned(folder, on_nonfinite="skip"),
    "a rewind": lambda folder: poisoned(folder, on_nonfinite="rewind"),
    "killed and resumed": lambda folder: resumed(folder, Dies(2), save_every=1),
    "interrupted and resumed": lambda folder: resumed(folder, Interrupts(), save_every="1 epoch", eval_every=2),
    "a training step that steps itself": lambda folder: events(
        folder, model={"generator": network(), "critic": network()}, kind=Gan, rows=24
    ),
    "SAM": lambda folder: events(folder, SAM(0.05), rows=16),
    "batches that do not fit into memory": lambda folder: events(
        folder, model=Hungry({0: 3}), per_device_train_batch_size="auto", gradient_accumulation_steps=2, rows=96
    ),
}


def orders(name: str, ranks: int, folder: Path) -> dict[str, list[str]]:
    """Return the events of a scenario on each rank, by the titles of sections."""
    each = (
        [SCENARIOS[name](folder)] if ranks == 1 else run_world(lambda: SCENARIOS[name](folder), (), ranks, timeout=60)
    )
    return {f"{name}, rank {rank} of {ranks}": lines for rank, lines in enumerate(each)}


def expected() -> dict[str, list[str]]:
    """Return what the file holds, by the titles of its sections."""
    sections = [section.strip("\n").split("\n") for section in EXPECTED.read_text().split("\n\n")]
    return {title.removeprefix("# "): lines for title, *lines in sections}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SCENARIOS)
def test_events_come_in_this_order(name: str, ranks: int, tmp_path: Path) -> None:
    sections = expected()
    for title, lines in orders(name, ranks, tmp_path / "runs").items():
        assert lines == sections[title], title
