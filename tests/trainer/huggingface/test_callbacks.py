"""Callbacks of Hugging Face's Trainer hear here what they hear there, and get what they ask for."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import EarlyStoppingCallback, ExportableState, TrainerCallback

from tests.trainer.hugging_face import model, rows, their_arguments
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
SEEN = (
    *("global_step", "epoch", "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps"),
    *("train_batch_size", "best_global_step", "is_world_process_zero", "is_local_process_zero"),
)
ARGUMENTS = (
    *("learning_rate", "weight_decay", "max_grad_norm", "max_steps", "num_train_epochs", "seed"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("train_batch_size", "eval_batch_size", "logging_strategy", "eval_strategy", "save_strategy", "save_steps"),
    *("device", "n_gpu", "world_size", "process_index", "local_process_index", "parallel_mode", "should_save"),
    *("metric_for_best_model", "greater_is_better", "load_best_model_at_end", "bf16", "fp16", "use_cpu"),
)


class Hearing(TrainerCallback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.arguments: dict[str, Any] = {}
        self.logs: list[dict[str, float]] = []
        self.histories: list[list[Any]] = []
        self.eval_loaders: list[list[Any]] = []

    def hear(self, event: str, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.told.append((event, {name: getattr(state, name) for name in SEEN}))
        assert {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader"} <= more.keys()
        assert isinstance(more["model"], transformers.PreTrainedModel)
        if event == "on_train_begin":
            self.arguments = {name: getattr(args, name) for name in ARGUMENTS}
            assert len(more["train_dataloader"]) == 6
            assert args.to_sanitized_dict()["learning_rate"] == 0.01
        if event == "on_optimizer_step":
            assert more["optimizer"].param_groups[0]["lr"] >= 0
            assert any(parameter.grad is not None for parameter in more["model"].parameters())
        if event == "on_log":
            self.logs.append(dict(more["logs"]))
        self.histories.append([event, [entry["step"] for entry in state.log_history]])
        loader = more["eval_dataloader"]
        self.eval_loaders.append([event, None if loader is None else len(loader)])

    def steps(self, event: str) -> list[int]:
        """Return the steps at which an event was heard."""
        return [seen["global_step"] for name, seen in self.told if name == event]


for _name in EVENTS:
    setattr(Hearing, _name, lambda self, *given, _name=_name, **more: self.hear(_name, *given, **more))


OF_THE_PROCESS = (
    *("process_index", "local_process_index", "world_size", "parallel_mode", "should_save"),
    *("is_world_process_zero", "is_local_process_zero", "train_batch_size"),
)
THEIR_SPEED = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "total_flos"}


@pytest.mark.parametrize("processes", [1, 2])
def test_they_hear_what_they_hear_there(tmp_path: Path, processes: int) -> None:
    options: dict[str, Any] = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    options |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    args = their_arguments(tmp_path / "theirs", **options, save_strategy="steps", save_steps=3)
    data = {"train_dataset": rows(24), "eval_dataset": rows(8)}

    def body() -> Hearing:
        heard = Hearing()
        ours = dataclasses.replace(TrainingArguments.from_transformers(args), save_in_background=False)
        if processes > 1:
            ours = dataclasses.replace(ours, per_device_train_batch_size=2, per_device_eval_batch_size=2)
        Trainer(model(), ours, callbacks=[heard], **data).fit()
        return heard

    reference = Hearing()
    transformers.Trainer(model(), args, callbacks=[reference], **data).train()
    if processes == 1:
        compare(body(), reference)
    for rank, rank_heard in enumerate(run_world(body, timeout=60) if processes > 1 else []):
        assert {seen["is_world_process_zero"] for _, seen in rank_heard.told} == {rank == 0}
        assert [rank_heard.arguments[name] for name in ("process_index", "world_size", "should_save")] == [
            rank,
            2,
            rank == 0,
        ]
        names = {name for name in reference.arguments if name in OF_THE_PROCESS or name.endswith("batch_size")}
        rank_heard.arguments |= {name: reference.arguments[name] for name in names}
        for _, seen in (*rank_heard.told, *reference.told):
            for name in OF_THE_PROCESS:
                seen.pop(name, None)
        compare(rank_heard, reference)


def compare(actual: Hearing, expected: Hearing) -> None:
    """Compare what was heard in a run of this library with what was heard in one of Hugging Face's."""

    def but_passes(message: list[Any]) -> list[Any]:
        # Here a pass ends before its last update is logged, evaluated and saved.
        return [event for event in message if event[0] != "on_epoch_end"]

    first, *rest = but_passes(actual.told)
    first_there, *rest_there = but_passes(expected.told)
    assert (first[0], first_there[0]) == ("on_init_end", "on_init_end")  # where there is no plan of the run yet
    assert rest == rest_there
    assert actual.steps("on_epoch_end") == expected.steps("on_epoch_end") == [3, 6]
    assert actual.steps("on_substep_end") == [0, 1, 2, 3, 4, 5]
    assert actual.steps("on_save") == [3, 6]
    assert actual.steps("on_prediction_step") == [3, 3, 6, 6]
    assert actual.arguments == expected.arguments
    assert but_passes(actual.histories)[1:] == but_passes(expected.histories)[1:]
    assert but_passes(actual.eval_loaders) == but_passes(expected.eval_loaders)
    assert len(actual.logs) == len(expected.logs) == 6  # 3 of training, 2 of evaluations, the totals
    for ours, theirs in zip(actual.logs, expected.logs, strict=True):
        assert ours.keys() >= theirs.keys() - THEIR_SPEED
        assert ours["epoch"] == theirs["epoch"]
        for name in {"loss", "grad_norm", "eval_loss", "train_loss"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5), name


@pytest.mark.parametrize("processes", [1, 2])
def test_integrations_report(tmp_path: Path, processes: int) -> None:
    def body() -> list[dict[str, float]]:
        callbacks = [TensorBoardCallback()]
        args = arguments(output_dir=str(tmp_path), log_every=2, eval_every="1 epoch", save_every="never")
        return trainer(args, eval_dataset=points(16), callbacks=callbacks).fit().history

    history = run_world(body, num_processes=processes, timeout=60)[0] if processes > 1 else body()
    (file,) = tmp_path.rglob("events.out.tfevents.*")  # the main process alone
    read = EventAccumulator(str(file)).Reload()
    logged = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    assert len(logged) >= 3
    assert len(evaluated) == 2
    for tag, wanted in {"train/loss": logged, "eval/loss": evaluated}.items():
        scalars = [(scalar.step, scalar.value) for scalar in read.Scalars(tag)]
        assert scalars == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]
    assert [scalar.step for scalar in read.Scalars("train/train_runtime")] == [logged[-1][0]]
    assert b"per_device_train_batch_size" in read.Tensors("args/text_summary")[0].tensor_proto.string_val[0]


class Asking(TrainerCallback):
    """Asks at steps for what there is to ask for, on one process."""

    def __init__(self, process: int) -> None:
        self.process, self.heard = process, list[str]()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        if args.process_index == self.process:
            control.should_save = state.global_step == 1
            control.should_evaluate = state.global_step == 2
            control.should_log = state.global_step == 3
            control.should_training_stop = state.global_step == 4
        return control

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.heard.append(f"save {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.heard.append(f"evaluate {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            self.heard.append(f"log {state.global_step}")
            logs["doubled"] = 2 * logs["loss"]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_they_ask_for_is_done_on_all_processes(tmp_path: Path, processes: int) -> None:
    def body() -> tuple[list[str], int, str | None, Any]:
        asking = Asking(process=processes - 1)
        args = arguments(
            output_dir=str(tmp_path),
            num_train_epochs=9,
            per_device_train_batch_size=4,
            log_every="never",
            eval_every="never",
            save_every="never",
            keep_best=0,
            save_in_background=False,
        )
        result = trainer(args, eval_dataset=points(16), callbacks=[asking]).fit()
        last = next(entry for entry in result.history if "doubled" in entry)
        return asking.heard, result.state.step, result.state.reason, last["doubled"] / last["loss"]

    late = processes - 1  # with the next update, whose gradients take it along
    for heard, step, reason, doubled in run_world(body, num_processes=processes, timeout=60) if late else [body()]:
        assert heard[:3] == [f"save {1 + late}", f"evaluate {2 + late}", f"log {3 + late}"]
        assert step == 4 + late
        assert reason == ("Asking asked for it" if not late else reason)
        assert doubled == 2


def test_one_of_their_own_that_raises_ends_the_run_and_an_integration_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match=r"^broken$"):
        trainer(callbacks=[Broken()]).fit()

    def on_log(self: Any, *args: Any, **more: Any) -> None:
        raise OSError("the server is gone")

    monkeypatch.setattr(TensorBoardCallback, "on_log", on_log)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert trainer(callbacks=[TensorBoardCallback()]).fit().status == "finished"
    assert "TensorBoardCallback raised in on_log" in caplog.text


class Patience(TrainerCallback, ExportableState):
    """Counts evaluations in its state, and stops at a number of them."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.count += 1
        control.should_training_stop = self.count == self.most

    def state(self) -> dict[str, Any]:
        return {"args": {"most": self.most}, "attributes": {"count": self.count}}


class Pulled(TrainerCallback):
    """Ends a run by an error."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.step:
            raise KeyError("pulled")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_states_survive_a_restart(tmp_path: Path, processes: int) -> None:
    def body() -> tuple[list[int], list[Any]]:
        def run(resume: str, *callbacks: Any) -> Any:
            args = arguments(
                output_dir=str(tmp_path),
                num_train_epochs=9,
                per_device_train_batch_size=8 // processes,
                learning_rate=0.0,  # no evaluation is better than the first
                eval_every="5 steps",
                save_every="5 steps",
                save_in_background=False,
                resume=resume,
            )
            return trainer(args, eval_dataset=points(16), callbacks=list(callbacks)).fit().state

        stopping, counting = EarlyStoppingCallback(early_stopping_patience=3), Patience(most=9)
        with pytest.raises(KeyError, match="pulled"):
            run("never", stopping, counting, Pulled(12))
        assert (stopping.early_stopping_patience_counter, counting.count) == (1, 2)
        stopping, counting = EarlyStoppingCallback(early_stopping_patience=3), Patience(most=9)
        ended = run("auto", stopping, counting)
        return [ended.step, stopping.early_stopping_patience_counter, counting.count, counting.most], [ended.reason]

    for numbers, reasons in run_world(body, num_processes=processes, timeout=60) if processes > 1 else [body()]:
        assert numbers == [20, 3, 4, 9]  # the evaluations at 5, 10, 15 and 20
        assert reasons == ["EarlyStoppingCallback asked for it"]


def test_evaluations_and_predictions_outside_training_are_told() -> None:
    heard: list[Any] = []

    class Outside(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
            heard.append(("evaluate", state.global_step, sorted(metrics), state.log_history[-1]["eval_loss"]))

        def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> None:
            heard.append(("predict", args.per_device_eval_batch_size, control.should_log))

    model_trainer = trainer(eval_dataset=points(16), callbacks=[Outside()])
    loss = model_trainer.evaluate()["eval_loss"]
    model_trainer.predict(points(8))
    assert heard == [("evaluate", 0, ["eval_loss"], loss), ("predict", 8, False)]


def test_metrics_of_an_evaluation_have_the_epoch_and_take_further_values() -> None:
    heard: list[float] = []

    class Adding(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
            heard.append(metrics["epoch"])
            metrics["eval_doubled"] = 2 * metrics["eval_loss"]

    result = trainer(arguments(eval_every="1 epoch"), eval_dataset=points(16), callbacks=[Adding()]).fit()
    assert heard == [1.0, 2.0]
    assert result.metrics["eval_doubled"] == 2 * result.metrics["eval_loss"]
    assert "epoch" not in result.metrics


class EndsPasses(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_epoch_stop = state.global_step == 2


def test_an_epoch_ends_where_a_callback_of_transformers_says() -> None:
    state = trainer(callbacks=[EndsPasses()]).fit().state
    assert state.step == 2 + (state.max_epochs or 0) * (state.steps_per_epoch or 0) - (state.steps_per_epoch or 0)


class Pushes(TrainerCallback):
    def on_push_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trainer(callbacks=[EarlyStoppingCallback]), r"the class EarlyStoppingCallback\. Give an object"),
        (lambda: trainer(callbacks=2 * [EndsPasses()]), "callbacks has the same AdaptedCallback twice"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_what_is_never_told_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer(callbacks=[Pushes()])
    assert "Pushes has on_push_begin, which is never called here" in caplog.text


def test_who_does_not_listen_is_not_called() -> None:
    model_trainer = trainer(callbacks=[TrainerCallback()])
    assert not any(model_trainer.events.listens(event) for event in ("on_micro_batch_end", "on_optimizer_step_begin"))
