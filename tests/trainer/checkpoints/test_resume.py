"""An interrupted run resumes bit for bit, on one rank and on two."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
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
from trainer_lib import Accelerator, Callback, ConfigurationError, Run, StateError, Trainer, UnsupportedError
from trainer_lib.callbacks import EMA, EarlyStopping
from trainer_lib.events import Modifier
from trainer_lib.trainer.result import FitResult


def outcome(result: FitResult, model: nn.Module) -> list[Any]:
    """Return the parts of a result that must be equal bit for bit."""
    history = [
        {name: value for name, value in entry.items() if not name.endswith(("_per_second", "data_wait"))}
        for entry in result.history
    ]
    return [history, result.state.best, result.state.samples, [p.detach().tolist() for p in model.parameters()]]


OPTIONS: dict[str, Any] = {
    "num_train_epochs": 3,
    "log_every": 4,  # so that one log covers steps before and after the resume
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
    model_trainer = trainer(
        arguments(output_dir=folder, **{**OPTIONS, **options}, **more),
        model=model,
        train_dataset=data,
        eval_dataset=points(10),
        callbacks=callbacks,
    )
    try:
        return outcome(model_trainer.fit(), model)
    except InterruptedError:
        return None


def test_auto_begins_a_new_run_in_an_empty_folder(tmp_path: Path) -> None:
    assert run(tmp_path, {}, points(), resume="auto") is not None


def test_a_finished_run_stays_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = trainer(arguments(output_dir=tmp_path), eval_dataset=points(8)).fit()
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = trainer(arguments(output_dir=tmp_path, resume="auto"), eval_dataset=points(8)).fit()
    assert "is finished: there is nothing to train" in caplog.text
    assert (again.state, again.metrics, again.best_checkpoint) == (first.state, first.metrics, first.best_checkpoint)
    assert again.report == first.report is not None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written


def test_a_finished_run_without_a_checkpoint_cannot_be_extended(tmp_path: Path) -> None:
    trainer(arguments(output_dir=tmp_path)).fit()
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigurationError, match=r"is finished and has no checkpoint to resume from"):
        trainer(arguments(output_dir=tmp_path, resume="extend", num_train_epochs=9)).fit()


@pytest.mark.parametrize("load_best", [False, True])
def test_fit_on_a_finished_run_loads_its_final_weights(load_best: bool, tmp_path: Path) -> None:
    """A higher loss counts as better here, so that the best evaluation is not the last."""
    options: dict[str, Any] = {"metric_for_best": "loss", "greater_is_better": True, "load_best_at_end": load_best}

    def opened(resume: str) -> tuple[Any, ...]:
        model = network()
        args = arguments(output_dir=tmp_path, resume=resume, **options)
        model_trainer = trainer(args, model=model, eval_dataset=points(16), callbacks=[EMA(0.5)])
        result = model_trainer.fit()
        model_trainer.save_model(tmp_path.with_name(f"{tmp_path.name}-model"))
        saved = load_file(tmp_path.with_name(f"{tmp_path.name}-model") / "model.safetensors")
        return result.state, model_trainer.state, model_trainer.evaluate(), model.state_dict(), saved

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


def test_a_new_run_warns_of_an_unfinished_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, {}, points(), dies_at=7)
    (unfinished,) = tmp_path.iterdir()
    run(tmp_path, {}, points())
    assert f"The run {unfinished} is unfinished" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2


def test_auto_does_not_resume_a_run_of_other_models_or_data(tmp_path: Path) -> None:
    run(tmp_path, {}, points(), dies_at=7)
    result = run(tmp_path, {}, points(48), resume="auto")
    assert result is not None
    assert result[2] == 144  # all samples of three passes
    assert len(list(tmp_path.iterdir())) == 2


def test_resume_deletes_the_files_of_a_killed_save(tmp_path: Path) -> None:
    run(tmp_path, {}, points(), dies_at=7)
    (checkpoints,) = tmp_path.glob("*/checkpoints")
    for name in ("checkpoint-00000008.partial", "checkpoint-00000002.deleted", "mine.partial"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_bytes(bytes(8))
    run(tmp_path, {}, points(), resume="auto")
    assert sorted(path.name for path in checkpoints.iterdir() if "." in path.name) == ["mine.partial"]


class NoisyPoints(Dataset[tuple[Tensor, Tensor]]):
    """Points with random noise, drawn at each read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = points()
        return inputs[index] + 0.1 * torch.rand(1), targets[index]


def resumed(folder: Path, **options: Any) -> tuple[Any, Any, str]:
    """Return the outcomes of a run and of one that died in an epoch and was resumed, and the banner of the latter."""
    banner = io.StringIO()
    whole = run(folder / "whole", options, NoisyPoints())
    run(folder / "parts", options, NoisyPoints(), dies_at=7)
    with contextlib.redirect_stderr(banner):
        return whole, run(folder / "parts", options, NoisyPoints(), resume="auto"), banner.getvalue()


@pytest.mark.slow
def test_random_data_in_workers_resumes_exactly_with_seeded_samples(tmp_path: Path) -> None:
    whole, parts, banner = resumed(tmp_path, num_workers=1, seed_each_sample=True)
    assert parts == whole
    assert "  resume" not in banner


@pytest.mark.slow
def test_a_resumed_run_warns_that_random_data_in_workers_may_differ(tmp_path: Path) -> None:
    whole, parts, banner = resumed(tmp_path, num_workers=1)
    assert parts != whole
    assert banner.count("exact, unless the dataset draws random numbers: in workers (num_workers=1) they differ") == 1
    _, parts, banner = resumed(tmp_path, num_workers=0)
    assert "unless the dataset draws" not in banner


def test_seed_each_sample_refuses_a_stream() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(*points(), strict=True))

    model = network()
    with pytest.raises(UnsupportedError, match="seed_each_sample=True needs samples with an index"):
        trainer(arguments(seed_each_sample=True), model=model, train_dataset=Stream()).fit()
    model_trainer = trainer(arguments(seed_each_sample=True), eval_dataset=Stream())  # evaluation works as always
    assert model_trainer.fit().metrics["eval_loss"] > 0


def test_an_accelerator_that_does_not_seed_samples_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="seed_each_sample=True conflicts with the accelerator"):
        trainer(arguments(seed_each_sample=True), accelerator=Accelerator(cpu=True))


def test_a_run_resumes_from_the_path_of_its_folder_or_of_a_checkpoint(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", {}, points())
    run(tmp_path / "parts", {}, points(), dies_at=7)
    (folder,) = (tmp_path / "parts").iterdir()
    assert run(tmp_path / "parts", {}, points(), resume=str(folder)) == whole
    assert run(tmp_path / "other", {}, points(), resume=str(folder / "checkpoints" / "checkpoint-00000014")) == whole


def test_a_run_resumes_from_checkpoints_on_another_disk(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", {}, points())
    run(tmp_path / "runs", {}, points(), dies_at=7)
    (folder,) = (tmp_path / "runs").iterdir()
    elsewhere = (folder / "checkpoints").rename(tmp_path / "large")
    (folder / "checkpoints").symlink_to(elsewhere)
    newest = max((folder / "checkpoints").glob("checkpoint-*"))
    assert run(tmp_path / "runs", {}, points(), resume=str(newest)) == whole
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert len(list(elsewhere.iterdir())) > 1


class ChangesFolder(Callback):
    """Changes the program's current directory while it trains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, run: Run) -> None:
        os.chdir(self.folder)


@pytest.mark.parametrize("resume", ["auto", "by path"])
def test_a_run_in_a_relative_folder_resumes_while_the_current_directory_changes(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    run(Path("runs"), {}, points(), dies_at=5)
    (folder,) = Path("runs").iterdir()
    args = arguments(output_dir="runs", resume=resume if resume == "auto" else str(folder), save_every=2)
    result = trainer(args, train_dataset=points(), callbacks=[ChangesFolder(elsewhere)]).fit()
    assert result.state.status == "finished"
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.parent == tmp_path / folder / "checkpoints"
    assert list(elsewhere.iterdir()) == []


def test_a_folder_of_runs_names_the_newest_run(tmp_path: Path) -> None:
    run(tmp_path, {}, points(), dies_at=7)
    (folder,) = tmp_path.iterdir()
    with pytest.raises(ConfigurationError, match=f"^checkpoint=.*: the newest one here is {folder}[.]$"):
        Trainer.from_checkpoint(tmp_path, torch.nn.Linear(2, 1))


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no checkpoint, nor one in its folder"):
        trainer(arguments(resume=str(tmp_path / "nowhere"))).fit()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    result = trainer(arguments(output_dir=tmp_path)).fit()
    other = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2))
    with pytest.raises(StateError, match=r"Linear|shape|names"):
        trainer(arguments(output_dir=tmp_path, resume=str(result.last_checkpoint)), model=other).fit()


def test_the_history_file_of_a_resumed_run_has_each_log_once(tmp_path: Path) -> None:
    run(tmp_path, {}, points(), dies_at=7)
    run(tmp_path, {}, points(), resume="auto")
    (file,) = tmp_path.glob("*/history.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [entry["step"] for entry in entries if "loss" in entry]
    assert steps == [4, 8, 12, 15]


def test_a_trainer_from_a_checkpoint_has_its_weights_and_resumes(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", {}, points())
    run(tmp_path / "parts", {}, points(), dies_at=9)
    (folder,) = (tmp_path / "parts").iterdir()
    model = network(dropout=0.3)
    options: dict[str, Any] = {"train_dataset": points(), "eval_dataset": points(10)}
    model_trainer = Trainer.from_checkpoint(
        folder,
        model,
        loss_fn=torch.nn.functional.cross_entropy,
        callbacks=[EarlyStopping("eval_loss", patience=50)],
        **options,
    )
    assert model_trainer.args.gradient_accumulation_steps == 2
    saved = load_file(folder / "checkpoints" / "checkpoint-00000008" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    assert outcome(model_trainer.fit(), model) == whole


@pytest.mark.parametrize(("before", "after"), [("plateau", "linear"), ("linear", "plateau")])
def test_a_schedule_of_another_kind_is_refused_by_the_name_of_the_argument(
    before: str, after: str, tmp_path: Path
) -> None:
    def made(schedule: str) -> Trainer:
        args = arguments(output_dir=tmp_path, num_train_epochs=1, lr_scheduler=schedule)
        return trainer(args, eval_dataset=points(8))

    made(before).fit()
    message = f"cannot be resumed with a changed lr_scheduler ('{before}' → '{after}').*Give the old value"
    with pytest.raises(ConfigurationError, match=message.replace("(", r"\(").replace(")", r"\)")):
        made(after).fit(resume="extend")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min")
def test_a_model_with_quantization_observers_resumes(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).train()
        plain.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        return torch.ao.quantization.prepare_qat(plain)  # type: ignore[no-untyped-call,no-any-return]

    def trained(name: str, epochs: int, resume: str = "never") -> dict[str, Tensor]:
        args = arguments(output_dir=tmp_path / name, num_train_epochs=epochs, lr_scheduler="constant")
        made = trainer(args, model=model())
        made.fit(resume=resume)
        return made.unwrapped_model.state_dict()

    whole = trained("whole", 2)
    trained("resumed", 1)
    resumed = trained("resumed", 2, resume="extend")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


SCRIPTING = ("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")


@pytest.mark.filterwarnings(*SCRIPTING)
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_a_scripted_model_trains_and_resumes_as_the_model_itself(kind: str, tmp_path: Path) -> None:
    def norm() -> nn.Module:  # a traced BatchNorm counts the batch of the trace too
        return nn.BatchNorm1d(8) if kind == "script" else nn.Identity()

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), norm(), nn.ReLU(), nn.Linear(8, 2))

    def scripted() -> Any:
        compiled: Any = torch.jit.script(plain()) if kind == "script" else torch.jit.trace(plain(), points()[0])
        return compiled

    def trained(model: nn.Module, epochs: int, resume: str = "never", **more: Any) -> tuple[Any, Any]:
        args = arguments(num_train_epochs=epochs, lr_scheduler="constant", mixed_precision="bf16", **more)
        made = trainer(args, model=model, eval_dataset=points(), metrics=["accuracy"])
        made.fit(resume=resume)
        return made.unwrapped_model.state_dict(), made.evaluate()

    weights, metrics = trained(plain(), 2)
    for result in (
        trained(scripted(), 2),
        (trained(scripted(), 1, output_dir=tmp_path), trained(scripted(), 2, "extend", output_dir=tmp_path))[1],
    ):
        assert result[1] == pytest.approx(metrics)
        for name, value in result[0].items():
            torch.testing.assert_close(value, weights[name])


@pytest.mark.filterwarnings(*SCRIPTING)
def test_a_traced_model_says_which_columns_it_takes() -> None:
    inputs, labels = points()
    model: Any = torch.jit.trace(network(), inputs)
    rows = {"input": inputs, "labels": labels, "weight": inputs[:, 0]}
    with pytest.raises(ConfigurationError, match=r"'weight', which TopLevelTracedModule\.forward does not"):
        trainer(arguments(max_steps=1), model=model, train_dataset=rows).fit()
    samples = [{name: column[index] for name, column in rows.items()} for index in range(len(inputs))]
    made = trainer(arguments(max_steps=1, remove_unused_columns=True), model=model, train_dataset=samples)
    assert made.fit().state.step == 1


def test_the_best_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    """A higher loss counts as better here, so that the first evaluation is the best."""
    args = arguments(
        output_dir=tmp_path,
        num_train_epochs=4,
        metric_for_best="loss",
        greater_is_better=True,
        keep_last=1,
        load_best_at_end=True,
    )
    model_trainer = trainer(args, eval_dataset=points(16))
    result = model_trainer.fit()
    evaluations = {entry["step"]: entry["eval_loss"] for entry in result.history if "eval_loss" in entry}
    assert max(evaluations, key=lambda step: evaluations[step]) == 5
    assert result.state.best is not None
    assert (result.state.best.step, result.state.step) == (5, 20)
    assert [checkpoint["step"] for checkpoint in result.state.checkpoints] == [5, 20]
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.name == "checkpoint-00000005"
    assert model_trainer.evaluate()["eval_loss"] == pytest.approx(evaluations[5], rel=1e-6)


def test_loading_the_best_leaves_callbacks_that_observe_as_they_are(tmp_path: Path) -> None:
    """They know the whole run; the average of a modifier is that of the weights."""

    class Steps(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step_end(self, run: Run) -> None:
            self.steps.append(run.state.step)

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.steps[:] = state["steps"]

    steps, ema = Steps(), EMA(0.5)
    args = arguments(output_dir=tmp_path, metric_for_best="loss", greater_is_better=True, load_best_at_end=True)
    result = trainer(args, eval_dataset=points(16), callbacks=[steps, ema]).fit()
    assert result.state.best is not None
    assert (result.state.best.step, ema.updates) == (5, 5)
    assert steps.steps == list(range(1, 11))

    steps, ema = Steps(), EMA(0.5)  # the finished run, loaded by another program
    args = dataclasses.replace(args, resume="auto")
    trainer(args, eval_dataset=points(16), callbacks=[steps, ema]).fit()
    assert ema.updates == 5
    assert steps.steps == list(range(1, 11))


@pytest.mark.parametrize(
    ("length", "status"),
    [({"num_train_epochs": 9}, "stopped"), ({"max_steps": 4, "eval_every": "3 steps"}, "finished")],
)
def test_a_run_that_died_at_its_end_ends_alike_when_it_is_resumed(
    tmp_path: Path, length: dict[str, Any], status: str
) -> None:
    """Its last checkpoint is written, the end of the run is not recorded."""

    def stopped(folder: str, *callbacks: Callback, resume: str = "never", **options: Any) -> FitResult:
        settings: dict[str, Any] = {"save_every": "1 epoch", **length, **options}
        args = arguments(output_dir=tmp_path / folder, resume=resume, learning_rate=0.0, **settings)
        stopping = EarlyStopping(patience=1)
        return trainer(args, eval_dataset=points(16), callbacks=[stopping, *callbacks], model=network(0.2)).fit()

    class DiesAtTheEnd(Modifier):
        def on_fit_end(self, run: Run) -> None:
            os._exit(0)

    whole = stopped("whole")
    child = os.fork()
    if child == 0:
        stopped("parts", DiesAtTheEnd())
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    result = stopped("parts", resume="auto")
    assert (result.state.step, result.status, result.state.reason) == (whole.state.step, status, whole.state.reason)
    assert [entry["step"] for entry in result.history] == [entry["step"] for entry in whole.history]
    longer = stopped("parts", resume="extend", **dict.fromkeys(length, 10) | {"eval_every": "1 epoch"})
    assert longer.state.step > whole.state.step
