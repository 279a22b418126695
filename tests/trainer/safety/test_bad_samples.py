"""Samples that cannot be read, in a Trainer: the run ends and names them, or continues as if they had no label."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils import signal_handling

from tests.faults.trainings import Dies
from tests.trainer.tasks import Points, arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, UnsupportedError
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import BadSampleError
from trainer_lib.launchers import ProcessFailedError

BAD = (3, 17, 18, 19, 20, 33)


class Samples(Dataset[Any]):
    """Points of which some cannot be read, or have no label that counts."""

    def __init__(self, *bad: int, raises: bool = True) -> None:
        self.points: Points = points()
        self.bad, self.raises = bad, raises

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index in self.bad and self.raises:
            raise OSError(f"file {index} is not there")
        label = torch.tensor(-100) if index in self.bad else self.points[1][index]
        return self.points[0][index], label


class Killing(Samples):
    def __getitem__(self, index: int) -> Any:
        if index == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.values.append(values["loss"])


def fitted(dataset: Any, resume: str = "never", dies_at: int | None = None, **options: Any) -> Any:
    losses = Losses()
    callbacks = [losses] if dies_at is None else [losses, Dies(dies_at)]
    args = arguments(log_every=1, per_device_train_batch_size=4, **options)
    model_trainer = trainer(args, train_dataset=dataset, callbacks=callbacks)
    result = model_trainer.fit(resume=resume)
    return (
        losses.values,
        [p.detach().clone() for p in model_trainer.unwrapped_model.parameters()],
        result,
        model_trainer,
    )


@pytest.mark.fault("samples that raise are skipped")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_rest_of_a_batch_is_trained_on_as_if_the_bad_samples_had_no_label(processes: int, tmp_path: Path) -> None:
    def train() -> None:
        options: dict[str, Any] = {"on_bad_sample": "skip", "shuffle": False, "num_workers": processes - 1}
        losses, weights, result, _ = fitted(Samples(*BAD), output_dir=tmp_path, **options)
        expected, expected_weights, _, _ = fitted(Samples(*BAD, raises=False), shuffle=False)
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
        assert result.state.step == 20 // processes

    run_world(train, (), processes, timeout=90)
    (file,) = tmp_path.glob("*/quarantine.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(entry["index"] for entry in entries) == list(BAD)
    assert {entry["pass"] for entry in entries} == {0}
    assert entries[0]["error"].startswith("OSError: file ")
    assert {entry["process"] for entry in entries} == set(range(processes))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_list_that_cannot_be_written_waits(processes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Occupies(Callback):
        """Has a folder in the place of the list until step 4."""

        def on_step_begin(self, run: Run) -> None:
            (folder,) = tmp_path.iterdir()
            if run.state.step == 0:
                (folder / "quarantine.jsonl" / "inside").mkdir(parents=True)
            if run.state.step == 4:
                shutil.rmtree(folder / "quarantine.jsonl")

    def train() -> None:
        args = arguments(output_dir=tmp_path, on_bad_sample="skip", log_every=1, per_device_train_batch_size=2)
        assert trainer(args, train_dataset=Samples(*BAD), callbacks=[Occupies()]).fit().state.status == "finished"

    run_world(train, (), processes, timeout=90)
    (file,) = tmp_path.glob("*/quarantine.jsonl")
    assert {json.loads(line)["index"] for line in file.read_text().splitlines()} == set(BAD)


@pytest.mark.slow
@pytest.mark.fault("samples that raise, in a run that is interrupted and resumed")
def test_a_resumed_run_leaves_out_the_same_to_the_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"on_bad_sample": "skip", "save_every": 3, "num_train_epochs": 3}
    expected, expected_weights, _, _ = fitted(Samples(*BAD), output_dir=tmp_path / "whole", **options)
    for dies_at in (4, 17):
        folder = tmp_path / str(dies_at)
        with pytest.raises(InterruptedError):
            fitted(Samples(*BAD), dies_at=dies_at, output_dir=folder, **options)
        losses, weights, _, _ = fitted(Samples(*BAD), resume="auto", output_dir=folder, **options)
        assert losses == expected[-len(losses) :]
        assert all(torch.equal(first, second) for first, second in zip(weights, expected_weights, strict=True))


def test_what_was_left_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fitted(Samples(3, 17), on_bad_sample="skip")
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("2 samples were skipped, because they could not be read. They are ")
    assert "3 (OSError: file 3 is not there)" in text


@pytest.mark.fault("more samples raise on two ranks than allowed")
def test_all_processes_end_alike_if_there_are_too_many() -> None:
    def train() -> str:
        with pytest.raises(BadSampleError) as raised:
            fitted(Samples(*range(20, 40)), on_bad_sample="skip", max_bad_samples=0.1, shuffle=False)
        return str(raised.value)

    first, second = run_world(train, (), 2, timeout=60)
    assert first == second
    assert "max_bad_samples=0.1 allows 4" in first


def test_without_it_the_error_ends_the_run_and_names_the_sample() -> None:
    with pytest.raises(OSError, match="file 17") as raised:
        fitted(Samples(17))
    assert raised.value.__notes__ == ["In sample 17."]


@pytest.mark.fault("a sample that raises on one of two ranks")
def test_a_sample_that_raises_on_one_process_ends_all_and_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(ProcessFailedError, match="OSError: file 17 is not there") as raised:
        run_world(lambda: fitted(Samples(17), num_workers=2), (), 2, timeout=60)
    assert time.monotonic() - began < 20
    assert "In sample 17, read by worker " in str(raised.value)


class Kills(Callback):
    """Kills the second worker of the loader, in whose place torch raises wherever training is, if it was forked."""

    may_change_training = True

    def on_optimizer_step_begin(self, run: Run) -> None:
        max(active_children(), key=lambda child: child._identity).kill()  # pids start again from 1 at some point
        time.sleep(10)  # which what torch raises cuts short
        raise AssertionError("torch has not noticed")


@pytest.mark.fault("`SIGKILL` to a data worker")
@pytest.mark.parametrize("is_reading", [True, False])
def test_a_killed_worker_is_named_wherever_training_is(is_reading: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch sets its handler of SIGCHLD once in a process, and a test before this one may have replaced it.
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    if not is_reading and multiprocessing.get_start_method() != "fork":
        pytest.skip("no signal tells of the end of a worker that a fork server started")
    dataset, callbacks = (Killing(), []) if is_reading else (Samples(), [Kills()])
    args = arguments(shuffle=False, num_workers=2, prefetch_factor=4, per_device_train_batch_size=4)
    # torch hears of the worker's end, or of the end of the connection over which it hands a batch.
    with pytest.raises((RuntimeError, ConnectionError, EOFError)) as raised:
        trainer(args, train_dataset=dataset, callbacks=callbacks).fit()
    notes = [note for note in raised.value.__notes__ if note.startswith("Worker 1 (pid ")]
    assert len(notes) == 1
    assert "was killed by SIGKILL" in notes[0]
    assert "samples 28, 29, 30, 31" in notes[0] or not is_reading


def test_an_evaluation_says_how_many_were_left_out() -> None:
    def evaluate() -> Any:
        model_trainer = trainer(arguments(on_bad_sample="skip"), train_dataset=points(), metrics=["accuracy"])
        other = trainer(arguments(), train_dataset=points(), metrics=["accuracy"])
        metrics = model_trainer.evaluate(Samples(*BAD))
        kept = [index for index in range(40) if index not in BAD]
        whole = other.evaluate([Samples()[index] for index in kept])
        return metrics, whole

    for processes in (1, 2):
        for evaluated, whole in run_world(evaluate, (), processes, timeout=60):
            assert evaluated.pop("eval_left_out") == len(BAD)
            assert evaluated == pytest.approx(whole, rel=1e-6)


def test_without_it_an_evaluation_ends_and_a_prediction_always_does() -> None:
    with pytest.raises(OSError, match="file 17"):
        trainer().evaluate(Samples(17))
    with pytest.raises(OSError, match="file 17"):  # it has a row for each sample
        trainer(arguments(on_bad_sample="skip")).predict(Samples(17))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_bad_sample": "ignore"}, "Unknown on_bad_sample 'ignore'. Known: raise, skip"),
        ({"max_bad_samples": 0}, 'at least 1, or a share between 0 and 1, got 0. For none, give on_bad_sample="raise"'),
        ({"max_bad_samples": 1.5}, "at least 1, or a share between 0 and 1, got 1.5"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        arguments(**options)
    assert text in str(raised.value)


def test_an_iterable_dataset_is_refused_before_the_first_step() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Samples())

    with pytest.raises(UnsupportedError, match="train_dataset is iterable"):
        fitted(Stream(), on_bad_sample="skip", max_steps=2)
