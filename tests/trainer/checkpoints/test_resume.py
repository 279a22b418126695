"""A run that ends before its end goes on as if it had not: bitwise, on one process and on two."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from tests.faults.injuries import spoil
from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib import Accelerator, ConfigurationError, StateError, Trainer, UnsupportedError
from trainer_lib.callbacks import EMA, EarlyStopping
from trainer_lib.trainer.result import FitResult


def outcome(result: FitResult, model: nn.Module) -> list[Any]:
    """Return what has to be equal to the bit."""
    timeless = [
        {name: value for name, value in entry.items() if not name.endswith(("_per_second", "data_wait"))}
        for entry in result.history
    ]
    return [timeless, result.state.best, result.state.samples, [p.detach().tolist() for p in model.parameters()]]


OPTIONS: dict[str, Any] = {
    "num_train_epochs": 3,
    "log_every": 4,  # so that a log spans a restart
    "eval_every": 3,
    "save_every": 2,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
    "warmup": 3,
    "lr_scheduler": "cosine",
}


def run(folder: Path, options: dict[str, Any], data: Any, dies_at: int | None = None, **more: Any) -> list[Any] | None:
    model = network(dropout=0.3)
    callbacks = [EarlyStopping("eval_loss", patience=50), *([] if dies_at is None else [Dies(dies_at)])]
    one = trainer(
        arguments(output_dir=folder, **{**OPTIONS, **options}, **more),
        model=model,
        train_dataset=data,
        eval_dataset=points(10),
        callbacks=callbacks,
    )
    try:
        return outcome(one.fit(), model)
    except InterruptedError:
        return None


def test_auto_begins_where_there_is_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, {}, points(), resume="auto") is not None


def test_a_finished_run_stays_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = trainer(arguments(output_dir=tmp_path), eval_dataset=points(8)).fit()
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = trainer(arguments(output_dir=tmp_path, resume="auto"), eval_dataset=points(8)).fit()
    assert "is finished: there is nothing to train" in caplog.text
    assert (again.state, again.metrics, again.best_checkpoint) == (first.state, first.metrics, first.best_checkpoint)
    assert again.report == first.report is not None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written


@pytest.mark.parametrize("load_best", [False, True])
def test_a_finished_run_that_is_opened_again_has_its_final_weights(load_best: bool, tmp_path: Path) -> None:
    """More of the loss is called better here, so that the best evaluation is not the last one."""
    options: dict[str, Any] = {"metric_for_best": "loss", "greater_is_better": True, "load_best_at_end": load_best}

    def opened(resume: str) -> tuple[Any, ...]:
        model = network()
        args = arguments(output_dir=tmp_path, resume=resume, **options)
        one = trainer(args, model=model, eval_dataset=points(16), callbacks=[EMA(0.5)])
        result = one.fit()
        one.save_model(tmp_path.with_name(f"{tmp_path.name}-model"))
        saved = load_file(tmp_path.with_name(f"{tmp_path.name}-model") / "model.safetensors")
        return result.state, one.state, one.evaluate(), model.state_dict(), saved

    first, again = opened("never"), opened("auto")
    assert first[:3] == again[:3]
    for before, after in zip(first[3:], again[3:], strict=True):
        assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_finished_run_whose_last_checkpoint_is_damaged_trains_its_last_steps_again(tmp_path: Path) -> None:
    first = trainer(arguments(output_dir=tmp_path, save_every=4)).fit()
    assert first.last_checkpoint is not None
    spoil(Path(str(first.last_checkpoint)) / "model.safetensors")
    again = trainer(arguments(output_dir=tmp_path, save_every=4, resume="auto")).fit()
    assert [entry["step"] for entry in again.state.checkpoints] == [4, 8, 10]
    assert again.status == "finished"


def test_a_new_run_tells_of_an_unfinished_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, {}, points(), dies_at=7)
    (unfinished,) = tmp_path.iterdir()
    run(tmp_path, {}, points())
    assert f"The run {unfinished} is not finished" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2


def test_auto_leaves_the_runs_of_other_models_and_data_alone(tmp_path: Path) -> None:
    run(tmp_path, {}, points(), dies_at=7)
    result = run(tmp_path, {}, points(48), resume="auto")
    assert result is not None
    assert result[2] == 144  # all samples of three passes
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_kill_inside_a_save_left_goes_when_the_run_is_resumed(tmp_path: Path) -> None:
    run(tmp_path, {}, points(), dies_at=7)
    (checkpoints,) = tmp_path.glob("*/checkpoints")
    for name in ("checkpoint-00000008.partial", "checkpoint-00000002.deleted", "mine.partial"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_bytes(bytes(8))
    run(tmp_path, {}, points(), resume="auto")
    assert sorted(path.name for path in checkpoints.iterdir() if "." in path.name) == ["mine.partial"]


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Points that move a little each time they are read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = points()
        return inputs[index] + 0.1 * torch.rand(1), targets[index]


def resumed(folder: Path, **options: Any) -> tuple[Any, Any, str]:
    """Return the outcomes of a run, and of one that died in the middle of an epoch and went on, and its banner."""
    told = io.StringIO()
    whole = run(folder / "whole", options, Drawing())
    run(folder / "parts", options, Drawing(), dies_at=7)
    with contextlib.redirect_stderr(told):
        return whole, run(folder / "parts", options, Drawing(), resume="auto"), told.getvalue()


@pytest.mark.slow
def test_data_that_draws_in_workers_resumes_exactly_where_samples_are_seeded(tmp_path: Path) -> None:
    whole, parts, told = resumed(tmp_path, num_workers=1, seed_each_sample=True)
    assert parts == whole
    assert "  resume" not in told


@pytest.mark.slow
def test_a_resumed_run_says_that_draws_in_workers_may_differ(tmp_path: Path) -> None:
    whole, parts, told = resumed(tmp_path, num_workers=1)
    assert parts != whole
    assert told.count("exact, unless the dataset draws random numbers: in workers (num_workers=1) it draws other") == 1
    _, parts, told = resumed(tmp_path, num_workers=0)
    assert "unless the dataset draws" not in told


def test_streams_have_no_samples_to_seed() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(*points(), strict=True))

    model = network()
    with pytest.raises(UnsupportedError, match="seed_each_sample=True needs samples that have an index"):
        trainer(arguments(seed_each_sample=True), model=model, train_dataset=Stream()).fit()
    one = trainer(arguments(seed_each_sample=True), eval_dataset=Stream())  # evaluated as always
    assert one.fit().metrics["eval_loss"] > 0


def test_an_engine_that_does_not_seed_samples_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="seed_each_sample=True is for an engine that is made from the arg"):
        trainer(arguments(seed_each_sample=True), accelerator=Accelerator(cpu=True))


def test_by_path(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", {}, points())
    run(tmp_path / "parts", {}, points(), dies_at=7)
    (folder,) = (tmp_path / "parts").iterdir()
    assert run(tmp_path / "parts", {}, points(), resume=str(folder)) == whole
    assert run(tmp_path / "other", {}, points(), resume=str(folder / "checkpoints" / "checkpoint-00000014")) == whole


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no checkpoint is there"):
        trainer(arguments(resume=str(tmp_path / "nowhere"))).fit()


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    result = trainer(arguments(output_dir=tmp_path)).fit()
    other = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2))
    with pytest.raises(StateError, match=r"Linear|shape|names"):
        trainer(arguments(output_dir=tmp_path, resume=str(result.last_checkpoint)), model=other).fit()


def test_history_on_disk_is_that_of_the_run(tmp_path: Path) -> None:
    run(tmp_path, {}, points(), dies_at=7)
    run(tmp_path, {}, points(), resume="auto")
    (file,) = tmp_path.glob("*/history.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [entry["step"] for entry in entries if "loss" in entry]
    assert steps == [4, 8, 12, 15]


def test_a_trainer_from_a_checkpoint_has_its_weights_and_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", {}, points())
    run(tmp_path / "parts", {}, points(), dies_at=9)
    (folder,) = (tmp_path / "parts").iterdir()
    model = network(dropout=0.3)
    options: dict[str, Any] = {"train_dataset": points(), "eval_dataset": points(10)}
    one = Trainer.from_checkpoint(
        folder,
        model,
        loss_fn=torch.nn.functional.cross_entropy,
        callbacks=[EarlyStopping("eval_loss", patience=50)],
        **options,
    )
    assert one.args.gradient_accumulation_steps == 2
    saved = load_file(folder / "checkpoints" / "checkpoint-00000008" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    assert outcome(one.fit(), model) == whole


def test_the_best_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    """More of the loss is called better here, so that the first evaluation is the best."""
    args = arguments(
        output_dir=tmp_path,
        num_train_epochs=4,
        metric_for_best="loss",
        greater_is_better=True,
        keep_last=1,
        load_best_at_end=True,
    )
    one = trainer(args, eval_dataset=points(16))
    result = one.fit()
    evaluations = {entry["step"]: entry["eval_loss"] for entry in result.history if "eval_loss" in entry}
    assert max(evaluations, key=lambda step: evaluations[step]) == 5
    assert result.state.best is not None
    assert (result.state.best.step, result.state.step) == (5, 20)
    assert [checkpoint["step"] for checkpoint in result.state.checkpoints] == [5, 20]
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.name == "checkpoint-00000005"
    assert one.evaluate()["eval_loss"] == pytest.approx(evaluations[5], rel=1e-6)
