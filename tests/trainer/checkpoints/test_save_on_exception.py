"""An error between two updates loses no update: the state after the last update is saved and resumes bit for bit."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from tests.callbacks.by_hand import weights
from tests.trainer.checkpoints.test_resume import OPTIONS, outcome
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import PartialState
from trainer_lib.callbacks import CsvLog, EarlyStopping
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.launchers import ProcessFailedError


class RaisesOnce(Dataset[tuple[Tensor, Tensor]]):
    """Raises once when a sample is read, like a network that is down for a moment.

    Args:
        marker: A file that exists once the error was raised.
        read: The number of the read that raises, counted from 0.
    """

    def __init__(self, marker: Path, read: int) -> None:
        self._points, self._marker, self._read, self._count = points(), marker, read, 0

    def __len__(self) -> int:
        return len(self._points[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._count += 1
        if self._count > self._read and not self._marker.exists():
            self._marker.touch()
            raise ConnectionError("the network is down")
        return self._points[0][index], self._points[1][index]


class StreamRaisesOnce(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples as a stream."""

    def __init__(self, marker: Path, read: int) -> None:
        self._samples = RaisesOnce(marker, read)

    def __iter__(self) -> Any:
        return (self._samples[index] for index in range(len(self._samples)))


def fit(folder: Path, data: Any, resume: str = "never", **options: Any) -> Any:
    """Train for three epochs of five steps; return the outcome to compare bit for bit, or the error."""
    model = network(dropout=0.3)
    settings = {
        **OPTIONS,
        "save_every": 100,
        "keep_best": 0,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
        "schedule_steps": 15,
    }
    more = {name: options.pop(name) for name in ("compute_metrics", "callbacks") if name in options}
    args = arguments(output_dir=folder, resume=resume, **{**settings, **options})
    model_trainer = trainer(args, model=model, train_dataset=data, eval_dataset=points(10), **more)
    try:
        return outcome(model_trainer.fit(), model)
    except (ConnectionError, ArithmeticError) as error:
        return error


def saved(folder: Path) -> list[int]:
    return [int(path.name[-8:]) for path in sorted(folder.glob("*/checkpoints/*"))]


@pytest.mark.parametrize("kind", [RaisesOnce, StreamRaisesOnce])
@pytest.mark.parametrize(
    ("read", "step"),
    [pytest.param(20, 2, marks=pytest.mark.slow), (40, 5), (60, 7), pytest.param(100, 12, marks=pytest.mark.slow)],
)
def test_a_dataset_that_raised_once_costs_no_update(kind: Any, read: int, step: int, tmp_path: Path) -> None:
    (tmp_path / "never").touch()
    whole = fit(tmp_path / "whole", kind(tmp_path / "never", 0))
    data = kind(tmp_path / "marker", read)
    error = fit(tmp_path / "parts", data)
    assert isinstance(error, ConnectionError)
    (last,) = saved(tmp_path / "parts")
    assert last in (step - 1, step)  # a stream is read one batch ahead
    assert f"The state after step {last} is saved in" in error.__notes__[-1]
    (folder,) = (tmp_path / "parts").glob("*/checkpoints/*")
    assert read_manifest(folder).reasons == ["exception"]
    assert fit(tmp_path / "parts", kind(tmp_path / "marker", read), "auto") == whole


def test_a_metric_that_raised_is_computed_after_the_resume(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure(predictions: Any) -> dict[str, float]:
        calls.append(len(calls))
        if len(calls) == 3 and not (tmp_path / "marker").exists():
            (tmp_path / "marker").touch()
            raise ArithmeticError
        return {"size": float(len(predictions.label_ids))}

    (tmp_path / "marker").touch()
    whole = fit(tmp_path / "whole", points(), compute_metrics=measure)
    (tmp_path / "marker").unlink()
    calls.clear()
    assert isinstance(fit(tmp_path / "parts", points(), compute_metrics=measure), ArithmeticError)
    assert saved(tmp_path / "parts") == [9]
    assert fit(tmp_path / "parts", points(), "auto", compute_metrics=measure) == whole


@pytest.mark.parametrize(("event", "step"), [("on_best", 6), ("on_log", 4)])
def test_an_evaluation_and_a_log_of_which_a_callback_raised_are_in_the_history_once(
    event: str, step: int, tmp_path: Path
) -> None:
    class Fails(Modifier):
        def __init__(self, fails: bool) -> None:
            self._fails = fails

        def on_best(self, run: Run, metric: str, value: float) -> None:
            self._fail("on_best", run)

        def on_log(self, run: Run, values: dict[str, float]) -> None:
            self._fail("on_log", run)

        def _fail(self, name: str, run: Run) -> None:
            if self._fails and (name, run.state.step) == (event, step):
                raise ArithmeticError

    def raising(folder: str, resume: str = "never", *, raises: bool = False) -> Any:
        options: dict[str, Any] = {"eval_every": 3, "log_every": 2, "lr_scheduler": "plateau", "learning_rate": 0.01}
        return fit(tmp_path / folder, points(), resume, callbacks=[Fails(raises)], **options)

    whole = raising("whole")
    assert isinstance(raising("parts", raises=True), ArithmeticError)
    assert saved(tmp_path / "parts") == [step]
    assert raising("parts", "auto") == whole


def test_an_evaluation_that_is_made_in_two_resumed_programs_is_in_the_logs_once(tmp_path: Path) -> None:
    class Fails(Modifier):
        def on_step_begin(self, run: Run) -> None:
            raise ArithmeticError

    def measure(predictions: Any) -> dict[str, float]:
        raise ArithmeticError

    def score(predictions: Any) -> dict[str, float]:
        return {"score": 2.0}

    table = tmp_path / "history.csv"
    options: dict[str, Any] = {"eval_every": 4, "log_every": 2}
    fit(tmp_path, points(), callbacks=[CsvLog(table)], compute_metrics=measure, **options)
    fit(tmp_path, points(), "auto", callbacks=[CsvLog(table), Fails()], compute_metrics=score, **options)
    fit(tmp_path, points(), "auto", callbacks=[CsvLog(table)], compute_metrics=score, **options)
    (history,) = tmp_path.glob("*/history.jsonl")
    entries = [json.loads(line) for line in history.read_text().splitlines()]
    for event in ("evaluation", "best"):
        assert [entry["step"] for entry in entries if entry["event"] == event].count(4) == 1
    with table.open(newline="") as file:
        scores = [int(row["step"]) for row in csv.DictReader(file) if row["eval_score"]]
    assert scores == [4, 8, 12, 15]


def test_the_log_of_a_run_that_resumes_at_its_end_has_the_norm_of_the_gradients(tmp_path: Path) -> None:
    """Step 14 is saved, not yet logged, and becomes the last by a smaller `max_steps`."""

    class Fails(Modifier):
        def on_save_end(self, run: Run, folder: Path) -> None:
            raise ArithmeticError

    options: dict[str, Any] = {"eval_every": 7, "save_every": 14, "max_grad_norm": 1.0}
    whole = fit(tmp_path / "whole", points(), max_steps=14, **options)
    assert isinstance(fit(tmp_path / "parts", points(), callbacks=[Fails()], **options), ArithmeticError)
    parts = fit(tmp_path / "parts", points(), "auto", max_steps=14, **options)
    logs = [
        {entry["step"]: entry.get("grad_norm") for entry in ended[0] if "loss" in entry} for ended in (parts, whole)
    ]
    assert logs[0] == logs[1]
    assert list(logs[0]) == [4, 8, 12, 14]


class Counts(Modifier):
    """Counts batches and ends of evaluations, and logs; may raise at one."""

    def __init__(self, fails_at: tuple[str, int] | None) -> None:
        self.batches, self.ends, self._fails_at = 0, list[int](), fails_at

    def on_evaluate_batch_end(self, run: Run) -> None:
        self.batches += 1
        run.log("batches", self.batches)
        self._fail("batch", run)

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.ends.append(run.state.step)
        self._fail("end", run)

    def _fail(self, where: str, run: Run) -> None:
        if self._fails_at == (where, run.state.step):
            raise ArithmeticError

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "ends": self.ends} if self.ends else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, self.ends = state["batches"], list(state["ends"])


@pytest.mark.parametrize("fails_at", [("end", 3), ("batch", 6), ("end", 6), ("end", 15)])
def test_callbacks_count_an_evaluation_that_an_error_ended_once(fails_at: tuple[str, int], tmp_path: Path) -> None:
    def counted(folder: str, resume: str = "never", *, fails: bool = False) -> Any:
        counts, stopping = Counts(fails_at if fails else None), EarlyStopping(patience=50, min_delta=100.0)
        ended = fit(tmp_path / folder, points(), resume, callbacks=[stopping, counts], eval_every=3, log_every=4)
        return ended if fails else [ended, counts.batches, counts.ends, stopping.state_dict()]

    whole = counted("whole")
    assert isinstance(counted("parts", fails=True), ArithmeticError)
    assert saved(tmp_path / "parts") == [fails_at[1]]
    assert counted("parts", "auto") == whole


def test_an_error_in_the_last_evaluation_loses_no_update(tmp_path: Path) -> None:
    def measure(predictions: Any) -> dict[str, float]:
        raise ArithmeticError

    fit(tmp_path, points(), eval_every=100, compute_metrics=measure)
    assert saved(tmp_path) == [15]
    fit(tmp_path, points(), "auto", eval_every=100, compute_metrics=lambda _: {"score": 2.0})
    (folder,) = tmp_path.glob("*/checkpoints/*")
    manifest = read_manifest(folder)
    assert manifest.metrics["eval_score"] == 2.0
    assert "end" in manifest.reasons


class Halfway(Callback):
    """Raises in the middle of a step."""

    may_change_training = True

    def on_backward_end(self, run: Run) -> None:
        if run.state.step == 7:
            raise ArithmeticError


class FailsInForward(nn.Module):
    """Raises in the forward of a step, after random generators and buffers changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, inputs: Tensor) -> Any:
        self.calls += 1
        if self.calls == 8:
            raise ArithmeticError
        return self.inner(inputs)


def test_an_error_within_an_update_saves_nothing(tmp_path: Path) -> None:
    fit(tmp_path / "backward", points(), callbacks=[Halfway()])
    args = arguments(output_dir=tmp_path / "forward", save_every=100)
    with pytest.raises(ArithmeticError):
        trainer(args, model=FailsInForward()).fit()
    assert saved(tmp_path / "backward") == saved(tmp_path / "forward") == []


def test_on_exception_raise_saves_nothing(tmp_path: Path) -> None:
    for name, options in (("raise", {"on_exception": "raise"}), ("never", {"save_every": "never"})):
        error = fit(tmp_path / name, RaisesOnce(tmp_path / f"marker-{name}", 60), **options)
        assert isinstance(error, ConnectionError)
        assert saved(tmp_path / name) == []


@pytest.mark.slow
def test_ranks_that_all_raise_save_together_and_resume_bit_for_bit(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"per_device_train_batch_size": 4}

    def body(name: str, resume: str, read: int = 30) -> Any:
        data = RaisesOnce(tmp_path / f"{name}-{PartialState().process_index}", read)
        result = fit(tmp_path / name, data, resume, **sizes)
        return result.__notes__[-1] if isinstance(result, ConnectionError) else result

    whole = run_world(body, ("whole", "never", 10**6), 2, timeout=60)
    notes = run_world(body, ("parts", "never"), 2, timeout=60)
    (last,) = saved(tmp_path / "parts")
    assert last in (6, 7)  # of 15: each rank raises at its 31st read
    assert all(f"The state after step {last} is saved in" in note for note in notes)
    assert run_world(body, ("parts", "auto"), 2, timeout=60) == whole


class RaisesAtLog(Modifier):
    """Raises on some ranks at the first log, which is between two updates."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if run.accelerator.process_index in self.ranks:
            raise ArithmeticError


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
def test_a_callback_that_raises_on_all_ranks_costs_no_update(sharded: bool, tmp_path: Path) -> None:
    def body(name: str, *callbacks: Callback, resume: str = "never") -> Any:
        args = arguments(output_dir=tmp_path / name, resume=resume, save_every=100, log_every=4, fsdp=sharded)
        model_trainer = trainer(args, model=network(dropout=0.3), callbacks=list(callbacks))
        try:
            model_trainer.fit()
        except ArithmeticError as error:
            return error.__notes__[-1]
        return {name: value.tolist() for name, value in weights(model_trainer.unwrapped_model).items()}

    whole = run_world(lambda: body("whole"), (), 2, timeout=60)
    notes = run_world(lambda: body("parts", RaisesAtLog(0, 1)), (), 2, timeout=60)
    assert saved(tmp_path / "parts") == [4]
    assert all("The state after step 4 is saved in" in note for note in notes)
    assert run_world(lambda: body("parts", resume="auto"), (), 2, timeout=60) == whole


@pytest.mark.slow  # the rank that raises waits five seconds for the other
def test_a_sample_that_one_rank_cannot_read_saves_nothing(tmp_path: Path) -> None:
    def body() -> None:
        args = arguments(output_dir=tmp_path / "runs", save_every=100)
        trainer(args, train_dataset=RaisesOnce(tmp_path / "marker", 20)).fit()

    message = r"the network is down[\s\S]*The state after step \d is not saved: within 5 seconds not all ranks raised"
    with pytest.raises(ProcessFailedError, match=message):
        run_world(body, (), 2, timeout=60)
    assert saved(tmp_path / "runs") == []
