"""Requests of callbacks to end an epoch and to leave out a batch, on any number of ranks and after a resume."""

import contextlib
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.faults.trainings import Dies
from tests.trainer import tasks
from tests.trainer.fit.test_exact_updates import (
    Gradients,
    arguments,
    assert_equal,
    big_batches,
    classifier,
    samples,
    train,
)
from tests.worlds import run_world
from trainer_lib import Interrupted, Trainer
from trainer_lib.callbacks import SWA, once
from trainer_lib.events import Callback, Run
from trainer_lib.processes.exit_codes import by_signal

ROWS = 48


class Ends(Callback):
    """Asks for the end of an epoch at some steps, on the last rank only, and notes what happens when."""

    def __init__(self, at: tuple[int, ...], event: str = "on_step_begin") -> None:
        self.at, self.notes = at, list[Any]()
        setattr(self, event, self.ask)

    def ask(self, run: Run) -> None:
        if run.state.step + 1 in self.at and run.accelerator.is_last_process:
            run.control.end_epoch = True

    def on_epoch_end(self, run: Run) -> None:
        self.notes.append(("epoch", run.state.epoch, run.state.step))

    def on_evaluate_end(self, run: Run, metrics: Any) -> None:
        self.notes.append(("evaluation", run.state.epoch, run.state.step))


class Seen(nn.Module):
    """Notes the first feature of each sample, by epoch as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.samples = classifier(), list[float]()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.samples += inputs[:, 0].tolist()
        return self.inner(inputs)


def fitted(at: tuple[int, ...], event: str = "on_step_begin", **options: Any) -> tuple[Any, Seen, Any]:
    ends, model = Ends(at, event), Seen()
    defaults: dict[str, Any] = {"num_train_epochs": 3, "shuffle": True, "seed": 3, "learning_rate": 0.1}
    trainer = Trainer(
        model, arguments(**{**defaults, "eval_every": "1 epoch", **options}), train_dataset=samples(ROWS),
        eval_dataset=samples(4), loss_fn=cross_entropy, callbacks=[ends],
    )  # fmt: skip
    return trainer.fit(), model, ends.notes


@pytest.mark.parametrize(
    ("workers", "processes"),
    [(0, 1), (0, 2), *(pytest.param(2, processes, marks=pytest.mark.slow) for processes in (1, 2))],
)
def test_an_epoch_ends_when_any_rank_asks(processes: int, workers: int) -> None:
    """The next one has the order it has anyway; an evaluation of each epoch comes at its end."""

    def body() -> tuple[list[Any], list[float], list[float]]:
        _, model, notes = fitted((3,), num_workers=workers)
        _, whole, _ = fitted(())
        return notes, model.samples, whole.samples

    steps = ROWS // 4 // processes
    for notes, seen, whole in run_world(body, (), processes, timeout=60):
        ends = [3, 3 + steps, 3 + 2 * steps]
        assert notes == [
            (event, epoch, step) for epoch, step in enumerate(ends, 1) for event in ("epoch", "evaluation")
        ]
        of_epoch = ROWS // processes
        assert seen == [*whole[:12], *whole[of_epoch:]]


def test_asked_for_at_the_end_of_a_step_it_comes_then_where_there_is_one_rank() -> None:
    _, _, notes = fitted((3,), "on_step_end", max_steps=5)
    assert ("epoch", 1, 2) in notes


@pytest.mark.parametrize("processes", [1, 2])
def test_the_last_step_of_an_epoch_ends_it_once(processes: int) -> None:
    steps = ROWS // 4 // processes

    def body() -> list[Any]:
        return [note for note in fitted((steps,))[2] if note[0] == "epoch"]

    for notes in run_world(body, (), processes, timeout=60):
        assert notes == [("epoch", epoch, epoch * steps) for epoch in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_stopped_where_an_epoch_was_ended_resumes_bitwise(processes: int, tmp_path: Path) -> None:
    def body() -> None:
        _, whole, _ = fitted((3,), output_dir=tmp_path / "whole", save_every="1 step", schedule_steps=9, max_steps=9)
        fitted((3,), output_dir=tmp_path / "parts", save_every="1 step", schedule_steps=9, max_steps=3)
        _, resumed, _ = fitted((3,), output_dir=tmp_path / "parts", resume="extend", schedule_steps=9, max_steps=9)
        assert resumed.samples == whole.samples[12:]
        for weight, other in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert torch.equal(weight, other)

    run_world(body, (), processes, timeout=60)


class Skips(Callback):
    """Leaves out the second batch of each rank, or of the last rank only."""

    may_change_training = True

    def __init__(self, everywhere: bool) -> None:
        self.everywhere, self.count = everywhere, 0

    def on_micro_batch_begin(self, run: Run) -> None:
        self.count += 1
        run.control.skip_batch = self.count == 2 and (self.everywhere or run.accelerator.is_last_process)


@pytest.mark.parametrize(("processes", "everywhere"), [(1, True), (2, True), (2, False)])
def test_a_batch_that_is_skipped_weighs_nothing(processes: int, everywhere: bool) -> None:
    inputs, targets = samples(12 * processes)

    def body() -> Gradients:
        options = arguments(gradient_accumulation_steps=3)
        trainer = Trainer(classifier(), options, train_dataset=(inputs, targets), loss_fn=cross_entropy)
        trainer.events.add(Skips(everywhere))
        return train(trainer)

    left_out = range(4 * processes, 8 * processes) if everywhere else range(12, 16)
    kept = [row for row in range(12 * processes) if row not in left_out]
    expected = big_batches(classifier(), inputs[kept], targets[kept], len(kept))
    for actual in run_world(body, (), processes, timeout=60):
        assert_equal(actual, expected)


class Spoils(Callback):
    """Makes each batch that is skipped not finite, in the forward and so in the backward."""

    order = 1  # after `Skips`
    may_change_training = True

    def on_micro_batch_begin(self, run: Run) -> None:
        if run.control.skip_batch:
            inputs, targets = run.batch
            run.batch = (inputs * math.nan, targets)


@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "skip"}, {"loss_spike": 20.0}])
@pytest.mark.parametrize(("processes", "everywhere", "accumulated"), [(1, True, 3), (2, True, 3), (2, False, 2)])
def test_a_batch_that_is_skipped_cannot_spoil_the_update(
    processes: int, everywhere: bool, accumulated: int, options: dict[str, Any]
) -> None:
    count = 4 * accumulated
    inputs, targets = samples(count * processes)

    def body() -> Gradients:
        args = arguments(gradient_accumulation_steps=accumulated, **options)  # of 2 the skipped one is the last
        trainer = Trainer(classifier(), args, train_dataset=(inputs, targets), loss_fn=cross_entropy)
        trainer.events.add(Skips(everywhere))
        trainer.events.add(Spoils())
        return train(trainer)

    left_out = range(4 * processes, 8 * processes) if everywhere else range(12, 16)
    kept = [row for row in range(count * processes) if row not in left_out]
    expected = big_batches(classifier(), inputs[kept], targets[kept], len(kept))
    for actual in run_world(body, (), processes, timeout=60):
        assert_equal(actual, expected)


def test_running_statistics_do_not_see_a_batch_that_is_skipped() -> None:
    def statistics(skips: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))
        inputs, targets = samples(12)
        rows = [0, 1, 2, 3, 8, 9, 10, 11] if not skips else list(range(12))
        callbacks = [Skips(everywhere=True)] if skips else []
        Trainer(
            model, arguments(), train_dataset=(inputs[rows], targets[rows]), loss_fn=cross_entropy, callbacks=callbacks
        ).fit()
        return list(model[0].buffers())

    for first, second in zip(statistics(skips=True), statistics(skips=False), strict=True):
        assert torch.equal(first, second)


class SavesAndInterrupts(Callback):
    """Asks for a checkpoint after the last step, and for the end of the run in the evaluation that follows."""

    def __init__(self) -> None:
        self.is_on = True

    def on_step_end(self, run: Run) -> None:
        if self.is_on and run.state.step == 3:
            run.control.save = True

    def on_evaluate_batch_begin(self, run: Run) -> None:
        if self.is_on:
            run.control.interruption = by_signal(signal.SIGTERM)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_save_requested_after_the_last_step_survives_an_interrupted_evaluation(
    processes: int, tmp_path: Path
) -> None:
    """It needs no interval of saves; the resumed run makes the evaluation."""

    def run() -> list[Any]:
        options: dict[str, Any] = {"max_steps": 3, "save_every": "never", "output_dir": tmp_path, "resume": "auto"}
        asks = SavesAndInterrupts()
        data: dict[str, Any] = {"train_dataset": samples(ROWS), "eval_dataset": samples(16), "loss_fn": cross_entropy}
        trainer = Trainer(classifier(), arguments(**options), callbacks=[asks], **data)
        with pytest.raises(Interrupted) as caught:
            trainer.fit()
        kept = [entry["step"] for entry in caught.value.result.state.checkpoints]
        trainer.accelerator.free_memory()
        again = Trainer(classifier(), arguments(**options), **data)
        return [kept, again.fit().state.step, "eval_loss" in again.run.metrics]

    assert run_world(run, (), processes, timeout=60) == [[[3], 3, True]] * processes


class Evaluates(Callback):
    """Asks for an evaluation at the end of step 2 on one rank, and notes where evaluations come."""

    def __init__(self, rank: int) -> None:
        self.rank, self.evaluated = rank, list[int]()

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 2 and run.accelerator.process_index == self.rank:
            run.control.evaluate = True

    def on_evaluate_end(self, run: Run, metrics: Any) -> None:
        self.evaluated.append(run.state.step)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_that_waits_for_the_next_update_survives_a_kill(rank: int, tmp_path: Path) -> None:
    def evaluated(dies_at: int | None = None) -> list[int]:
        callback = Evaluates(rank)
        args = tasks.arguments(output_dir=tmp_path, max_steps=4, save_every=2, eval_every="never", resume="auto")
        callbacks = [callback] if dies_at is None else [callback, Dies(dies_at)]
        with contextlib.suppress(InterruptedError):
            tasks.trainer(args, eval_dataset=tasks.points(8), callbacks=callbacks).fit()
        return callback.evaluated

    assert run_world(evaluated, (3,)) == [[], []]  # ends before the requests of step 2 are carried out, at step 3
    assert run_world(evaluated) == [[3], [3]]


def test_a_fraction_of_an_epoch_counts_after_an_epoch_that_ended_early(tmp_path: Path) -> None:
    def fit(folder: str, *callbacks: Callback, **options: Any) -> tuple[Any, ...]:
        callbacks = (
            once("2 steps", lambda run: setattr(run.control, "end_epoch", True)),
            SWA(0.5, every=1),
            *callbacks,
        )
        args = tasks.arguments(output_dir=tmp_path / folder, num_train_epochs=2.5, save_every=3, **options)
        trainer = tasks.trainer(args, callbacks=callbacks)
        state = trainer.fit().state
        return state.step, state.epochs, state.max_steps, [p.tolist() for p in trainer.unwrapped_model.parameters()]

    whole = fit("whole")
    assert whole[:3] == (10, 2.6, 10)  # of 5 steps in an epoch
    with pytest.raises(InterruptedError):
        fit("parts", Dies(4))
    assert fit("parts", resume="auto") == whole
