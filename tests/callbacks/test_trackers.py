"""Tests of tracker callbacks, including failing trackers."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.tracking.misbehaving import Misbehaving, steps, taken
from tests.worlds import run_world
from trainer_lib import Callback, Run, Trainer, TrainingArguments
from trainer_lib.callbacks import (
    MLflowCallback,
    Predictions,
    TensorBoardCallback,
    TrackerCallback,
    WandbCallback,
    after,
)
from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, SignatureError, UnsupportedError
from trainer_lib.tracking import Patience, register_tracker_class
from trainer_lib.tracking.adapters.wandb import WandBTracker

register_tracker_class(Misbehaving)
QUICK = Patience(linger=0.02, call=0.5, finish=1.0, working=0.0, first_pause=0.05, longest_pause=0.2)
PATIENT = Patience(linger=0.02, finish=30.0, first_pause=0.05, longest_pause=0.2)


def trainer(callbacks: list[Any], output_dir: Path | None = None, **options: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(64, 4, generator=generator), torch.randint(2, (64,), generator=generator))
    settings: dict[str, Any] = {"max_steps": 8, "log_every": "2 steps", "eval_every": "4 steps", "use_cpu": True}
    args = TrainingArguments(output_dir=output_dir, progress_bar=False, **{**settings, **options})
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model.bias.requires_grad_(False)
    return Trainer(model, args, train_dataset=data, eval_dataset=data, loss_fn=cross_entropy, callbacks=callbacks)


def callback(path: Path, patience: Patience = PATIENT, **options: Any) -> TrackerCallback:
    return TrackerCallback("misbehaving", path=str(path), patience=patience, **options)


def test_a_tracker_gets_the_whole_run(tmp_path: Path) -> None:
    tracker = callback(tmp_path / "taken", system_metrics=True, artifact="model")
    model_trainer = trainer([tracker], tmp_path / "runs", learning_rate=0.25)
    history = model_trainer.fit().state.history
    records = taken(tmp_path / "taken")
    settings = records[1]["settings"]
    assert settings["learning_rate"] == 0.25
    assert settings["model"] == {"class": "Linear", "parameters": 10, "trainable_parameters": 8}
    logs = [record for record in records if "loss" in record]
    assert [(record["step"], record["loss"]) for record in logs] == [
        (entry["step"], entry["loss"]) for entry in history if "loss" in entry
    ]
    assert {"learning_rate", "epoch", "grad_norm", "system/process_memory_gb"} <= set(logs[0])
    evaluations = [record for record in records if "eval_loss" in record]
    assert [(record["step"], record["eval_loss"]) for record in evaluations] == [
        (entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry
    ]
    (artifact,) = [record for record in records if "artifact" in record]
    names = {file.name for file in Path(artifact["artifact"]).iterdir()}
    assert "model.safetensors" in names
    assert not any(name.startswith(("optimizer", "manifest", "random", "engine")) for name in names)
    assert records[-1] == {"finished": "finished"}


def test_a_tracker_behind_a_filter_gets_tables_and_finishes(tmp_path: Path) -> None:
    tracker, lines = callback(tmp_path / "taken", artifact="model"), TrackerCallback("jsonl")
    model_trainer = trainer([after("2 steps", tracker), after("2 steps", lines), Predictions(2)], tmp_path / "runs")
    model_trainer.fit()
    records = taken(tmp_path / "taken")
    assert [record for record in records if "artifact" in record]
    assert records[-1] == {"finished": "finished"}
    assert model_trainer.run.folder is not None
    assert '"table": "predictions"' in (model_trainer.run.folder / "jsonl.jsonl").read_text()


class SavesModel(Callback):
    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        assert run.folder is not None
        folder = run.folder / "model"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text("mine")


def test_an_artifact_leaves_the_files_that_you_saved(tmp_path: Path) -> None:
    tracker = callback(tmp_path / "taken", artifact="model")
    model_trainer = trainer([tracker, SavesModel()], tmp_path / "runs")
    model_trainer.fit()
    run_folder = model_trainer.run.folder
    assert run_folder is not None
    assert [file.read_text() for file in (run_folder / "model").iterdir()] == ["mine"]
    (artifact,) = [record["artifact"] for record in taken(tmp_path / "taken") if "artifact" in record]
    (last, *_) = sorted((run_folder / "checkpoints").iterdir(), reverse=True)
    assert (Path(artifact) / "model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()


class Describes(Callback):
    """Logs to the tracker itself what `run.log` does not take, and nothing more once it is gone."""

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        tracker = run.accelerator.get_tracker("misbehaving")
        tracker.log({"note": f"after step {run.state.step}"}, step=run.state.step)
        tracker.log_images({"weights": torch.zeros(1, 4, 4)}, step=run.state.step)


def test_a_callback_gets_the_tracker_by_name_while_the_run_lasts(tmp_path: Path) -> None:
    model_trainer = trainer([callback(tmp_path / "taken"), Describes()])
    model_trainer.fit()
    notes = [(record["step"], record["note"]) for record in taken(tmp_path / "taken") if "note" in record]
    assert notes == [(4, "after step 4"), (8, "after step 8")]
    assert model_trainer.accelerator.trackers == []
    with pytest.raises(ConfigurationError, match=r"no tracker 'misbehaving'.*TrainingArguments\(report_to='misb"):
        model_trainer.accelerator.get_tracker("misbehaving")


def test_the_project_is_the_given_one_or_that_of_the_environment_or_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def project(**options: Any) -> str:
        path = tmp_path / f"taken-{len(list(tmp_path.iterdir()))}"
        trainer([callback(path, **options)], tmp_path / "digits", max_steps=1).fit()
        (started,) = [record["project"] for record in taken(path) if "started" in record]
        return started

    assert project() == "digits"
    monkeypatch.setattr(Misbehaving, "project_variable", WandBTracker.project_variable)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert project() == "mine"
    assert project(project="given") == "given"


def test_w_and_b_keeps_the_run_s_name_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_NAME", raising=False)
    assert WandBTracker.named("run-1") == {"name": "run-1"}
    monkeypatch.setenv("WANDB_NAME", "mine")
    assert WandBTracker.named("run-1") == {}


def test_a_callback_gets_a_tracker_that_does_nothing_on_ranks_that_do_not_report(tmp_path: Path) -> None:
    def body() -> None:
        trainer([callback(tmp_path / "taken"), Describes()]).fit()

    run_world(body, num_processes=2)
    notes = [record["note"] for record in taken(tmp_path / "taken") if "note" in record]
    assert notes == ["after step 4", "after step 8"]
    assert sum("shapes" in record for record in taken(tmp_path / "taken")) == 2


def test_a_resumed_run_continues_the_tracker_s_run(tmp_path: Path) -> None:
    first = trainer([callback(tmp_path / "taken")], tmp_path / "runs", max_steps=4, schedule_steps=8)
    first.fit()
    second = trainer([callback(tmp_path / "taken")], tmp_path / "runs", schedule_steps=8, resume="extend")
    second.fit()
    third = trainer([callback(tmp_path / "taken")], tmp_path / "runs")
    third.fit()
    names = [record["started"] for record in taken(tmp_path / "taken") if "started" in record]
    assert names[0] == names[1] != names[2]
    assert steps(tmp_path / "taken")[:8] == [2, 4, 4, 6, 8, 8, 2, 4]


@pytest.mark.parametrize(
    "how",
    [
        *("raise in start", "raise in log", "hang in log"),
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("hang in start", "hang in finish")),
    ],
)
def test_a_run_finishes_whatever_a_tracker_does(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    bad = [callback(tmp_path / "one", QUICK, how=how), callback(tmp_path / "two", QUICK, how=how, apart=True)]
    bad[1].key = "second"
    plain = trainer([], None, log_every="1 step").fit()
    begun = time.monotonic()
    result = trainer(bad, tmp_path / "runs", log_every="1 step").fit()
    assert time.monotonic() - begun < 15
    assert [entry["loss"] for entry in result.state.history if "loss" in entry] == [
        entry["loss"] for entry in plain.state.history if "loss" in entry
    ]
    assert result.state.status == "finished"
    messages = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("fails, and training continues" in line for line in messages) <= 2
    if how != "hang in finish":
        assert sum("points are kept in" in line for line in messages) == 2
        (file,) = (tmp_path / "runs").glob("*/history.jsonl")
        notes = [json.loads(line) for line in file.read_text().splitlines() if "points_missing" in line]
        assert len(notes) == 1 + (bad[0].tracker_name != bad[1].tracker_name)
        assert all(note["points"] > 0 for note in notes)


def test_trackers_are_asked_for_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install trainer_lib[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model_trainer = trainer([], tmp_path, report_to=["tensorboard", "jsonl"])
    history = model_trainer.fit().state.history
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    read: Any = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    losses = [(event.step, event.value) for event in read.Scalars("loss")]
    assert losses == [(entry["step"], pytest.approx(entry["loss"])) for entry in history if "loss" in entry]
    lines = [json.loads(line) for line in (folder / "jsonl.jsonl").read_text().splitlines()]
    assert [line["eval_loss"] for line in lines if "eval_loss" in line] == [
        entry["eval_loss"] for entry in history if "eval_loss" in entry
    ]


def test_a_tracker_callback_replaces_the_one_named_in_report_to(tmp_path: Path) -> None:
    tracker = TensorBoardCallback("mine", folder=tmp_path)
    model_trainer = trainer([tracker], None, report_to="tensorboard")
    assert [callback for callback in model_trainer.events if isinstance(callback, TrackerCallback)] == [tracker]
    model_trainer.fit()
    assert list((tmp_path / "mine").glob("events.out.*"))
    assert not [
        callback
        for callback in trainer([], None, report_to="jsonl", dry_run=True).events
        if isinstance(callback, TrackerCallback)
    ]


def test_configuration_errors_are_raised_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    bad_artifact: dict[str, Any] = {"artifact": "modle"}
    for make, error, message in (
        (
            lambda: trainer([], report_to="jsonl"),
            ConfigurationError,
            "report_to='jsonl' writes files.* Give output_dir",
        ),
        (lambda: MLflowCallback(tracking_uri="htp://x"), ConfigurationError, "Unknown kind of address 'htp'"),
        (lambda: TrackerCallback("tensorbord"), ConfigurationError, "Did you mean 'tensorboard'"),
        (lambda: TrackerCallback("all"), ConfigurationError, "must be one tracker"),
        (lambda: TrackerCallback("jsonl", **bad_artifact), ConfigurationError, 'must be "model", "checkpoint"'),
        (lambda: TrackerCallback("jsonl", artifact="model"), UnsupportedError, "jsonl does not store files"),
    ):
        with pytest.raises(error, match=message):
            make()  # type: ignore[no-untyped-call]
    monkeypatch.setattr("trainer_lib.tracking.base.is_package_available", lambda module: False)
    with pytest.raises(MissingPackageError, match=r'pip install "trainer_lib\[wandb\]"'):
        WandbCallback()
    with pytest.raises(MissingPackageError, match=r'pip install "trainer_lib\[tensorboard\]"'):
        trainer([], tmp_path, report_to="tensorboard")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TensorBoardCallback(foldr="boards"),
            r"^TensorBoardCallback takes no 'foldr'. Did you mean 'folder'\?",
        ),
        (lambda: TensorBoardCallback(log_dir="boards"), "takes no 'log_dir'. Give folder. Known: project, folder, "),
        (lambda: TensorBoardCallback(flush_sec=3), "Did you mean 'flush_secs'"),
        (lambda: MLflowCallback(tracking_url="http://127.0.0.1"), "Did you mean 'tracking_uri'"),
        (lambda: TrackerCallback("jsonl", foldr="logs"), "TrackerCallback takes no 'foldr'. Did you mean 'folder'"),
        (lambda: TrackerCallback("misbehaving", hwo="raise"), "Did you mean 'how'"),
        (lambda: TrackerCallback(Misbehaving("project", path="taken"), how="raise"), "TrackerCallback takes no 'how'"),
    ],
)
def test_an_option_that_the_tracker_does_not_take_is_refused(make: Any, message: str) -> None:
    with pytest.raises(SignatureError, match=message):
        make()


def test_options_of_the_package_are_taken(tmp_path: Path) -> None:
    TensorBoardCallback("mine", folder=tmp_path, flush_secs=3, filename_suffix=".board")
