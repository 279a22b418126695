"""`fit`: how long it goes, what happens in which order, and what is asked of it on the way."""

import dataclasses
import io
import itertools
import json
import math
import re
import time
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import multi_margin_loss
from torch.utils.data import IterableDataset

from tests.trainer.tasks import Recorder, arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, Trainer
from trainer_lib.callbacks import EarlyStopping, LambdaCallback
from trainer_lib.callbacks.checkpoint import Checkpoint
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.foundation.errors import SignatureError
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Points without a length."""

    def __iter__(self) -> Any:
        return iter(list(zip(*points(), strict=True)))


class Asks(Callback):
    """Asks for one thing after a step, on one process."""

    def __init__(self, kind: str, at: int, rank: int = 0) -> None:
        self._what, self._at, self._rank = kind, at, rank

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self._at and run.accelerator.process_index == self._rank:
            setattr(run.control, self._what, True)


class Fails(Modifier):
    def on_step_end(self, run: Run) -> None:
        if run.state.step == 3:
            raise RuntimeError("the third step")


@pytest.mark.parametrize(
    ("limits", "steps", "epochs"),
    [
        ({"num_train_epochs": 2}, 10, 2.0),
        ({"num_train_epochs": 0.5}, 3, 0.6),
        ({"num_train_epochs": 1.2}, 6, 1.2),
        ({"max_steps": 7}, 7, 1.4),
        ({"max_steps": 7, "num_train_epochs": 1}, 5, 1.0),
        ({"num_train_epochs": None}, 15, 3.0),
        ({"gradient_accumulation_steps": 2}, 6, 2.0),
        ({"gradient_accumulation_steps": 99}, 2, 2.0),
        ({"global_batch_size": 16}, 6, 2.0),
        ({"limit_train_batches": 2}, 4, 2.0),
        ({"overfit_batches": 1}, 2, 2.0),
        ({"dry_run": True}, 2, 1.0),
    ],
)
def test_the_first_limit_reached_ends_a_run(limits: dict[str, Any], steps: int, epochs: float) -> None:
    result = trainer(arguments(**limits)).fit()
    assert (result.state.step, result.state.epochs, result.status) == (steps, pytest.approx(epochs), "finished")
    samples = {4: 32, 6: 48 if limits == {"num_train_epochs": 1.2} else 80}.get(steps, min(8 * steps, 120))
    if "gradient_accumulation_steps" in limits:
        samples = 80
    assert result.state.samples == samples


def test_time_ends_a_run() -> None:
    result = trainer(arguments(max_time=0.3, lr_scheduler="constant")).fit()
    assert (result.status, result.state.reason) == ("stopped", "max_time is over")
    assert 0.3 <= result.state.seconds < 60


def test_time_of_evaluations_does_not_count() -> None:
    class Slow(Callback):
        def on_step_end(self, run: Run) -> None:
            run.control.evaluate = run.state.step < 3

        def on_evaluate_begin(self, run: Run) -> None:
            time.sleep(0.2)

    args = arguments(max_time=0.3, lr_scheduler="constant", eval_every="never")
    result = trainer(args, eval_dataset=points(), callbacks=[Slow()]).fit()
    assert result.state.reason == "max_time is over"
    assert result.state.seconds >= 0.3


def test_time_before_a_resume_counts(tmp_path: Path) -> None:
    class Hours(Callback):
        def on_step_end(self, run: Run) -> None:
            run.state.seconds += 7200

    options: dict[str, Any] = {"output_dir": tmp_path, "lr_scheduler": "constant"}
    trainer(arguments(max_steps=2, save_every=2, **options), callbacks=[Hours()]).fit()
    result = trainer(arguments(max_steps=9, max_time="3h", resume="extend", **options)).fit()
    assert (result.state.step, result.state.reason) == (3, "max_time is over")


def test_passes_over_data_without_a_length_are_real_passes() -> None:
    result = trainer(arguments(lr_scheduler="constant"), train_dataset=Stream()).fit()
    assert (result.state.step, result.state.epoch, result.state.samples) == (10, 2, 80)


def test_an_iterator_that_is_read_up_ends_training_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Once(IterableDataset[tuple[Tensor, Tensor]]):
        def __init__(self) -> None:
            self.samples = iter(list(zip(*points(), strict=True)))

        def __iter__(self) -> Any:
            return self.samples

    result = trainer(arguments(lr_scheduler="constant"), train_dataset=Once()).fit()
    assert (result.state.step, result.status, result.state.reason) == (5, "stopped", "the data came to an end")
    assert "an iterator can be read only once" in caplog.text


def test_events_come_in_this_order() -> None:
    recorder = Recorder()
    args = arguments(num_train_epochs=1, limit_train_batches=3, gradient_accumulation_steps=2, log_every=1)
    trainer(args, eval_dataset=points(8), callbacks=[recorder]).fit()
    micro = ["micro_batch_begin", "loss", "micro_batch_end"]
    update = ["backward_end", "optimizer_step_begin", "optimizer_step_end"]
    evaluation = ["evaluate_begin", "evaluate_set_begin", "evaluate_batch_begin", "evaluate_batch_end"]
    evaluation += ["evaluate_set_end", "evaluate_end"]
    assert recorder.events == [
        "fit_begin 0",
        "epoch_begin 0",
        *(f"{name} 0" for name in ["step_begin", *micro, *micro, *update]),
        "step_end 1",
        "log 1",
        *(f"{name} 1" for name in ["step_begin", *micro, *update]),
        *(f"{name} 2" for name in ["step_end", "epoch_end", "log", *evaluation, "best"]),
        "fit_end 2",
    ]


def test_what_is_asked_for_is_done_in_one_order(tmp_path: Path) -> None:
    class AsksBackwards(Callback):
        def on_step_end(self, run: Run) -> None:
            run.control.stop = run.control.save = run.control.evaluate = run.control.log = run.state.step == 2

    recorder = Recorder("on_log", "on_evaluate_end", "on_save_end", "on_fit_end")
    args = arguments(output_dir=tmp_path, log_every="never", save_every="never", eval_every="never")
    result = trainer(args, eval_dataset=points(8), callbacks=[AsksBackwards(), recorder]).fit()
    assert recorder.events == ["log 2", "evaluate_end 2", "save_end 2", "fit_end 2"]
    assert (result.status, result.state.reason) == ("stopped", "a callback asked for it")


def test_the_last_step_is_logged_evaluated_and_saved_once(tmp_path: Path) -> None:
    recorder = Recorder("on_log", "on_evaluate_end", "on_save_end")
    args = arguments(output_dir=tmp_path, num_train_epochs=1, log_every=5, eval_every=5, save_every=5)
    trainer(args, eval_dataset=points(8), callbacks=[recorder]).fit()
    assert recorder.events == ["log 5", "evaluate_end 5", "save_end 5"]
    other = Recorder("on_log", "on_evaluate_end", "on_save_end")
    args = dataclasses.replace(args, log_every=3, eval_every=3, save_every=3, save_in_background=False)
    trainer(args, eval_dataset=points(8), callbacks=[other]).fit()
    expected = [f"{event} {step}" for step in (3, 5) for event in ("log", "evaluate_end", "save_end")]
    # The evaluation after step 3 was the best, which is saved with the others of its step.
    assert other.events == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_process_asks_for_is_done_by_all_with_the_next_update(rank: int) -> None:
    def body() -> int:
        return (
            trainer(arguments(), callbacks=[Asks("stop", at=2, rank=rank)], train_dataset=points(80)).fit().state.step
        )

    assert run_world(body, (), 2, timeout=60) == [3, 3]


def test_one_process_stops_at_once() -> None:
    assert trainer(callbacks=[Asks("stop", at=2)]).fit().state.step == 2


def test_time_is_that_of_the_main_process() -> None:
    def body() -> tuple[int, str | None]:
        args = arguments(max_time=0.3, lr_scheduler="constant")
        result = trainer(args, train_dataset=points(80)).fit()
        return result.state.step, result.status

    (steps, status), other = run_world(body, (), 2, timeout=60)
    assert (steps, status) == other
    assert status == "stopped"


class FitsAgain(Modifier):
    def on_step_end(self, run: Run) -> None:
        run.trainer.fit()


def test_a_fit_within_a_fit_is_an_error_and_another_trainer_in_it_is_not() -> None:
    again = FitsAgain()
    nested = trainer(callbacks=[again])
    with pytest.raises(ConfigurationError, match=r"fit\(\) was called while it runs"):
        nested.fit()
    nested.events.remove(again)
    nested.events.add(LambdaCallback(on_epoch_end=lambda run: trainer(arguments(max_steps=1)).fit()))
    assert nested.fit().status == "finished"


class LogsMuch(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        inputs, _ = batch
        self.log("rows", len(inputs))
        self.log("weighted", inputs.sum() / len(inputs), weight=len(inputs))
        return super().compute_loss(model, batch)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_logged_is_averaged_over_batches_steps_and_processes(processes: int) -> None:
    inputs, targets = points(37)

    def body() -> list[dict[str, Any]]:
        args = arguments(num_train_epochs=1, gradient_accumulation_steps=2, log_every="1 epoch", learning_rate=0.0)
        return (
            LogsMuch(network(), args, train_dataset=(inputs, targets), loss_fn=torch.nn.functional.cross_entropy)
            .fit()
            .history
        )

    for history in run_world(body, (), processes, timeout=60) if processes > 1 else [body()]:
        (entry,) = history
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(network()(inputs), targets)
        assert entry["loss"] == pytest.approx(float(loss), rel=1e-6)
        assert entry["weighted"] == pytest.approx(float(inputs.sum() / 37), rel=1e-5)
        # A process that ran along without data of its own logs nothing: two had 3 batches each, of 37 rows together.
        assert entry["rows"] == pytest.approx(37 / 5)


class LogsInputs(Trainer):
    @classmethod
    def on_ones(cls) -> Self:
        """Return a trainer that trains on ones and is evaluated on thousands."""
        inputs, targets = torch.ones(40, 4), torch.zeros(40, dtype=torch.long)
        return cls(
            nn.Linear(4, 2),
            arguments(num_train_epochs=1, log_every="2 steps", eval_every="1 step"),
            train_dataset=(inputs, targets),
            eval_dataset=(inputs * 1000, targets),
            loss_fn=torch.nn.functional.cross_entropy,
        )

    def compute_loss(self, model: Any, batch: Any) -> Any:
        self.log("input", batch[0].mean())
        return super().compute_loss(model, batch)


def test_what_a_loss_logs_in_an_evaluation_is_a_metric_of_it() -> None:
    trainer = LogsInputs.on_ones()
    history = trainer.fit().history
    logs = [entry for entry in history if "eval_loss" not in entry]
    assert [entry["input"] for entry in logs] == [1.0] * len(logs)
    assert all("loss" in entry for entry in logs)  # no log of an evaluation's values alone follows the last step
    assert {entry["eval_input"] for entry in history if "eval_loss" in entry} == {1000.0}
    assert trainer.predict(trainer.eval_dataset).metrics["predict_input"] == 1000.0
    assert not trainer.parts.means.collect()


class LogsParts(Trainer):
    """Logs in all ways, with batches of different sizes."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        inputs, _ = batch
        self.log("by_row", inputs.mean())
        self.log("by_weight", inputs.mean(), weight=len(inputs) ** 2)
        self.log("by_weight", math.nan, weight=0)
        self.log("by_weight", torch.tensor(math.nan), weight=torch.zeros(()))
        result: Any = super().compute_loss(model, batch)
        return result._replace(logs={"by_loss": inputs.max()})

    def evaluation_step(self, model: Any, batch: Any) -> Any:
        output = super().evaluation_step(model, batch)
        self.log("by_row", 2.0)
        self.log("f1", 0.5)
        return EvaluationOutput(output.loss_sum, output.weight)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_an_evaluation_logs_is_averaged_over_samples(processes: int) -> None:
    inputs, targets = points(37)

    def body() -> dict[str, float]:
        args = arguments(per_device_eval_batch_size=16 // processes)
        loss = torch.nn.functional.cross_entropy
        return LogsParts(network(), args, eval_dataset=(inputs, targets), loss_fn=loss).evaluate()

    batches = [inputs[:16], inputs[16:32], inputs[32:]] if processes == 1 else list(inputs.split(8))
    sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.float64)
    means = torch.stack([batch.mean() for batch in batches]).double()
    largest = torch.stack([batch.max() for batch in batches]).double()
    for metrics in run_world(body, (), processes, timeout=60) if processes > 1 else [body()]:
        assert metrics["eval_by_row"] == pytest.approx((float(inputs.mean()) + 2.0) / 2, rel=1e-6)
        assert metrics["eval_by_weight"] == pytest.approx(float((means * sizes**2).sum() / (sizes**2).sum()), rel=1e-6)
        assert metrics["eval_by_loss"] == pytest.approx(float((largest * sizes).sum() / 37), rel=1e-6)
        assert metrics["eval_f1"] == 0.5


def test_what_an_evaluation_logs_can_be_monitored() -> None:
    class Rising(LogsInputs):
        def evaluation_step(self, model: Any, batch: Any) -> Any:
            self.log("step", float(self.run.state.step))
            return super().evaluation_step(model, batch)

    stopping = EarlyStopping("eval_step", patience=2, greater_is_better=False)
    trainer = Rising.on_ones()
    trainer.events.add(stopping)
    assert trainer.fit().state.step == 3  # the lowest value is the first

    class Silent(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> Any:
            return super().compute_loss(model, batch)

    silent = Silent(network(), arguments(), train_dataset=points(8), eval_dataset=points(8), callbacks=[stopping])
    with pytest.raises(ConfigurationError, match="'eval_step'\\) is not a metric of the evaluations"):
        silent.fit()


def test_intervals_of_epochs_and_samples() -> None:
    recorder = Recorder("on_log")
    trainer(arguments(log_every="0.4 epochs"), callbacks=[recorder]).fit()
    assert recorder.events == ["log 2", "log 4", "log 6", "log 8", "log 10"]
    other = Recorder("on_log")
    trainer(arguments(log_every="20 samples"), callbacks=[other]).fit()
    assert other.events == ["log 3", "log 5", "log 8", "log 10"]


def test_an_error_is_told_and_written_down(tmp_path: Path) -> None:
    recorder = Recorder("on_exception", "on_fit_end")
    with pytest.raises(RuntimeError, match="the third step"):
        trainer(arguments(output_dir=tmp_path), callbacks=[recorder, Fails()]).fit()
    assert recorder.events == ["exception 3", "fit_end 3"]
    (file,) = tmp_path.glob("*/run.json")
    assert json.loads(file.read_text())["status"] == "failed"


def test_fit_again_begins_anew_with_the_weights_there_are() -> None:
    model_trainer = trainer()
    first, again = model_trainer.fit(), model_trainer.fit()
    assert (first.state.step, again.state.step) == (10, 10)
    assert again.metrics["loss"] < first.metrics["loss"]


def updated(model: nn.Module, loss_fn: Any, learning_rate: float) -> list[Tensor]:
    """Return the weights after one step of SGD on all points."""
    inputs, targets = points()
    gradients = torch.autograd.grad(loss_fn(model(inputs), targets), list(model.parameters()))
    return [
        (weight - learning_rate * gradient).detach()
        for weight, gradient in zip(model.parameters(), gradients, strict=True)
    ]


@pytest.mark.parametrize("before", ["evaluate", "fit"])
def test_what_is_set_between_calls_takes_effect(before: str) -> None:
    args = arguments(max_steps=1, optimizer="sgd", lr_scheduler="constant", max_grad_norm=None, eval_every="never")
    args.per_device_train_batch_size = 40
    model_trainer = trainer(args, eval_dataset=points())
    getattr(model_trainer, before)()
    other, (inputs, targets) = nn.Linear(6, 2), points()
    expected = updated(other, multi_margin_loss, 0.05)
    model_trainer.model, model_trainer.loss_fn = other, multi_margin_loss
    model_trainer.compute_metrics = lambda predictions, labels: {"count": float(len(labels))}
    model_trainer.metrics = ["accuracy"]
    metrics = model_trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(float(multi_margin_loss(other(inputs), targets).detach()))
    assert metrics["eval_accuracy"] == pytest.approx(float((other(inputs).argmax(1) == targets).float().mean()))
    assert metrics["eval_count"] == 40
    model_trainer.fit()
    assert model_trainer.unwrapped_model is other
    assert all(map(torch.allclose, other.parameters(), expected))
    model_trainer.eval_dataset = {"few": points(8), "more": points(16)}
    model_trainer.compute_metrics, model_trainer.metrics = None, {"few": ["accuracy"]}
    assert set(model_trainer.evaluate()) == {"eval_few_loss", "eval_few_accuracy", "eval_more_loss"}


def test_a_callback_sets_the_loss_of_the_steps_that_follow() -> None:
    def change(run: Run) -> None:
        if run.state.step == 5:
            run.trainer.loss_fn = lambda outputs, targets: outputs.sum() * 0 + 7

    recorded: list[float] = []
    model_trainer = trainer(
        arguments(log_every="1 step"),
        callbacks=[
            LambdaCallback(on_epoch_begin=change, on_log=lambda run, values: recorded.append(values.get("loss", 7.0)))
        ],
    )
    model_trainer.fit()
    assert [loss == 7 for loss in recorded[:10]] == [False] * 5 + [True] * 5


def test_a_model_cannot_be_set_during_fit() -> None:
    class Sets(Modifier):
        def on_step_end(self, run: Run) -> None:
            run.trainer.model = network()

    with pytest.raises(ConfigurationError, match=r"model cannot be set while fit\(\) runs"):
        trainer(callbacks=[Sets()]).fit()


def test_a_tool_leaves_the_metrics_of_each_set() -> None:
    sets = {"few": points(8), "more": points(16)}
    model_trainer = trainer(arguments(eval_every="never"), eval_dataset=sets, metrics={"few": ["accuracy"]})
    model_trainer.find_batch_size()
    assert set(model_trainer.evaluate()) == {"eval_few_loss", "eval_few_accuracy", "eval_more_loss"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("callbacks", [], r"'callbacks' was set on the Trainer, and nothing reads it\. Give it to the constructor"),
        ("data_collator", list, "That is collate_fn here"),
        ("train_datset", points(8), "Did you mean 'train_dataset'"),
        ("optimizer", 7, "optimizer must be an Optimizer"),
        ("args", {"max_steps": 1}, "args must be trainer_lib.TrainingArguments"),
        ("args", arguments(mixed_precision="bf16"), "mixed_precision is read only when a Trainer is made: it was None"),
        ("args.num_train_epochs", "many", "num_train_epochs must be a finite number above 0, got 'many'"),
        ("args.num_trian_epochs", 2, "Did you mean 'num_train_epochs'"),
        ("args.report_to", ["jsonl"], r"Make another Trainer with TrainingArguments\(report_to="),
    ],
)
def test_what_is_set_between_calls_and_has_no_effect_is_an_error(name: str, value: Any, message: str) -> None:
    model_trainer = trainer()
    *path, last = name.split(".")
    setattr(model_trainer.args if path else model_trainer, last, value)
    with pytest.raises((ConfigurationError, SignatureError), match=message):
        model_trainer.fit()


@pytest.mark.parametrize(("name", "value"), [("loss_fn", "cross_entropy"), ("model", "gpt2")])
def test_an_invalid_model_or_loss_is_an_error_where_it_is_set(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be a"):
        setattr(trainer(), name, value)


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(eval_dataset=points(8)).fit()
    assert list(tmp_path.iterdir()) == []


def test_the_banner_says_what_will_happen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = arguments(
        output_dir=tmp_path,
        run_name="line",
        gradient_accumulation_steps=2,
        warmup=2,
        lr_scheduler="cosine",
        save_every=3,
    )
    trainer(args, eval_dataset=points(8)).fit()
    banner = capsys.readouterr().err
    for line in (
        r"run line-",
        "Sequential, 74 parameters, all trained",
        "1 process on cpu, full precision",
        "16 samples per update = 8 × 2 accumulated × 1 process",
        "6 steps, 3 per epoch, 2 epochs",
        "AdamW, learning rate 0 first, 0.05 at most, 0.00732233 last, gradients clipped to a norm of 1",
        "cross_entropy, averaged over all targets of an update",
        "every epoch, best by eval_loss",
        f"{tmp_path}/line-",
        "a checkpoint every 3 steps",
    ):
        assert line in banner
    assert banner.count("\n  model ") == 1


def test_one_epoch_is_not_a_plural(capsys: pytest.CaptureFixture[str]) -> None:
    line = trainer(arguments(num_train_epochs=1))
    result = line.fit()
    assert re.search(r"steps +5 in 1 epoch, ", str(result))
    assert "5 steps, 5 per epoch, 1 epoch\n" in capsys.readouterr().err
    assert " in 1 epoch, " in line.model_card()
    assert "5 updates in total (1 epoch)" in str(trainer(arguments(num_train_epochs=1)).check())


@pytest.mark.parametrize(
    ("every", "delay", "evaluated"),
    [
        (2, None, [2, 4, 6, 8, 10]),
        (2, 5, [6, 8, 10]),
        ("1 epoch", "2 epochs", [10]),
        ("0.5 epochs", "16 samples", [3, 5, 8, 10]),
    ],
)
def test_evaluations_begin_after_their_delay(every: Any, delay: Any, evaluated: list[int]) -> None:
    state = trainer(arguments(eval_every=every, eval_delay=delay), eval_dataset=points(8)).fit().state
    assert [entry["step"] for entry in state.history if "eval_loss" in entry] == evaluated


def test_a_delay_says_something_only_where_there_are_evaluations() -> None:
    with pytest.raises(ConfigurationError, match=r"eval_delay must be an amount of training.*got '5 minutes'"):
        arguments(eval_delay="5 minutes")
    with pytest.raises(ConfigurationError, match='has no effect with eval_every="never"'):
        arguments(eval_delay=5, eval_every="never")
    with pytest.raises(ConfigurationError, match="eval_delay=5 needs evaluations"):
        trainer(arguments(eval_delay=5)).fit()


class StepsItself(Trainer):
    def training_step(self, model: Any, batch: Any) -> None:
        self.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
        self.optimizers["default"].step()


def test_the_banner_says_what_holds_for_this_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trainer(arguments(output_dir=tmp_path), callbacks=[Checkpoint(every="4 steps")]).fit()
    assert "a checkpoint every epoch and every 4 steps" in capsys.readouterr().err
    for keep_best, output in ((1, "a checkpoint at each best evaluation"), (0, "no checkpoints")):
        args = arguments(output_dir=tmp_path / output, save_every="never", keep_best=keep_best)
        result = trainer(args, eval_dataset=points(8)).fit()
        assert f", {output}\n" in capsys.readouterr().err
        assert bool(result.state.checkpoints) == bool(keep_best)
    StepsItself(network(), arguments(max_steps=1), train_dataset=points()).fit()
    banner = capsys.readouterr().err
    assert banner.startswith("run (not saved)\n")
    assert "a norm of 1, unless training_step steps the optimizer itself" in banner


def test_the_banner_wraps_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "60")
    trainer(arguments(max_steps=1)).fit()
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith(" " * 14) for line in lines) >= 2  # below the text, not below the label
    words = " ".join(screen.getvalue().split())
    assert "gradients clipped to a norm of 1" in words
    assert "averaged over all targets of an update" in words


def test_a_notebook_gets_the_banner_on_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    trainer(arguments(max_steps=1)).fit()
    written = capsys.readouterr()
    assert "parameters, all trained" in written.out
    assert written.err == ""


def test_the_norm_is_that_before_clipping() -> None:
    history = (
        trainer(arguments(max_grad_norm=0.01, optimizer="sgd", learning_rate=1.0, log_every=1, max_steps=1))
        .fit()
        .history
    )
    unclipped = (
        trainer(arguments(max_grad_norm=None, optimizer="sgd", learning_rate=1.0, log_every=1, max_steps=1))
        .fit()
        .history
    )
    assert history[0]["grad_norm"] == pytest.approx(unclipped[0]["grad_norm"], rel=1e-6)
    assert history[0]["grad_norm"] > 0.01


def test_clipping_moves_weights_by_the_norm_at_most() -> None:
    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    args = arguments(max_grad_norm=0.01, optimizer="sgd", learning_rate=1.0, lr_scheduler="constant", max_steps=1)
    trainer(args, model=model).fit()
    moved = math.sqrt(
        sum(float((p - q.detach()).square().sum()) for p, q in zip(before, model.parameters(), strict=True))
    )
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_the_schedule_counts_updates_on_any_number_of_processes() -> None:
    def body() -> list[float]:
        args = arguments(max_steps=6, log_every=1, warmup=2, gradient_accumulation_steps=2)
        return [entry["learning_rate"] for entry in trainer(args, train_dataset=points(200)).fit().history]

    alone = body()
    # What is logged is in force for the next update.
    assert alone == pytest.approx([0.025, 0.05, 0.0375, 0.025, 0.0125, 0.0])
    assert run_world(body, (), 2, timeout=60) == [alone, alone]


def test_a_plateau_lowers_the_rate() -> None:
    class Worse(Trainer):
        values = itertools.count()

        def evaluate(self, dataset: Any = None, *more: Any, **options: Any) -> dict[str, float]:
            del dataset, more, options
            return {"eval_loss": float(next(self.values))}

    args = arguments(lr_scheduler="plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5}, eval_every=2)
    model_trainer = Worse(
        network(), args, train_dataset=points(), eval_dataset=points(), loss_fn=torch.nn.functional.cross_entropy
    )
    model_trainer.fit()
    assert model_trainer.run.scheduler is not None
    assert model_trainer.run.scheduler.get_last_lr() == [0.05 / 2**4]


def test_saving_needs_a_folder() -> None:
    with pytest.raises(ConfigurationError, match="Give output_dir"):
        trainer(callbacks=[Asks("save", at=1)]).fit()
