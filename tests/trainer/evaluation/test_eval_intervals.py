"""Tests of evaluation intervals by set: what is evaluated when, and what goes by a metric of one set."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_stopping import Asks
from tests.faults.trainings import Dies
from tests.trainer.checkpoints.test_resume import outcome
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import forget_world, run_world
from trainer_lib import ConfigurationError, Interrupted, Trainer, TrainingArguments
from trainer_lib.callbacks import Checkpoint, EarlyStopping
from trainer_lib.events import Callback, Modifier, Run, trigger
from trainer_lib.foundation.duration import Every

SETS = {"dev": points(8), "test": points(24)}
EVERY = {"dev": "2 steps", "test": "1 epoch"}  # of 5 steps
BOTH = ["dev", "test"]


def evaluated(result: Any) -> list[tuple[int, list[str]]]:
    """Return which sets were evaluated after which steps, in the order of the history."""
    evaluations = [
        (entry["step"], [name for name in ("dev", "test", "mean") if f"eval_{name}_loss" in entry]) for entry in result
    ]
    return [(step, names) for step, names in evaluations if names]


def sequence(every: Mapping[str, Any], **options: Any) -> list[tuple[int, list[str]]]:
    return evaluated(trainer(arguments(eval_every=every, **options), eval_dataset=SETS).fit().history)


@pytest.mark.parametrize(
    ("every", "options", "expected"),
    [
        (EVERY, {}, [(2, ["dev"]), (4, ["dev"]), (5, ["test"]), (6, ["dev"]), (8, ["dev"]), (10, BOTH)]),
        ({"dev": 5, "test": 7}, {}, [(5, ["dev"]), (7, ["test"]), (10, BOTH)]),
        ({"dev": "never", "test": 4}, {}, [(4, ["test"]), (8, ["test"]), (10, ["test"])]),
        ({"dev": "24 samples", "test": 6}, {}, [(3, ["dev"]), (6, BOTH), (9, ["dev"]), (10, BOTH)]),
        (EVERY, {"eval_delay": 5}, [(5, ["test"]), (6, ["dev"]), (8, ["dev"]), (10, BOTH)]),
        ({"dev": 7, "test": "never"}, {"eval_on_start": True}, [(0, BOTH), (7, ["dev"]), (10, ["dev"])]),
        (
            {"dev": 3, "test": "2 epochs"},
            {"max_steps": 7, "metric_for_best": "mean_loss"},
            [(3, ["dev"]), (6, ["dev"]), (7, [*BOTH, "mean"])],
        ),
    ],
)
def test_each_set_is_evaluated_at_its_interval_and_all_at_the_end(
    every: Mapping[str, Any], options: dict[str, Any], expected: list[tuple[int, list[str]]]
) -> None:
    assert sequence(every, **options) == expected


def test_values_are_those_of_a_run_that_evaluates_all_sets_each_time() -> None:
    apart = trainer(arguments(eval_every=EVERY), eval_dataset=SETS).fit()
    together = trainer(arguments(eval_every=1), eval_dataset=SETS).fit()
    full = {entry["step"]: entry for entry in together.history if "eval_dev_loss" in entry}
    for entry in apart.history:
        for name in entry.keys() & {"eval_dev_loss", "eval_test_loss"}:
            assert entry[name] == full[entry["step"]][name]
    assert apart.metrics == together.metrics


def test_a_mean_is_that_of_all_sets_and_only_where_all_are_evaluated() -> None:
    sets = {**SETS, "other": points(16)}
    args = arguments(eval_every={"dev": 2, "test": 4, "other": 8}, metric_for_best="mean_loss")
    result = trainer(args, eval_dataset=sets).fit()
    means = {entry["step"]: entry for entry in result.history if "eval_mean_loss" in entry}
    assert list(means) == [8, 10]
    for entry in means.values():
        assert entry["eval_mean_loss"] == pytest.approx(sum(entry[f"eval_{name}_loss"] for name in sets) / 3, rel=1e-12)
    assert result.state.best is not None
    assert result.state.best.value == min(entry["eval_mean_loss"] for entry in means.values())


def test_a_set_is_no_column_of_which_the_model_takes_one_of_that_name() -> None:
    class Small(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> Any:
            return model(batch).square().mean()

    inputs = points()[0]
    sets = {"input": inputs[:8], "other": inputs[8:]}  # of which nn.Sequential takes the first by its name
    args = arguments(eval_every={"input": 2, "other": 5}, num_train_epochs=1)
    result = Small(network(), args, train_dataset=inputs, eval_dataset=sets).fit()
    steps = [entry["step"] for entry in result.history if "eval_input_loss" in entry]
    assert steps == [2, 4, 5]


class AsksFor(Callback):
    """Asks for an evaluation after a step, on the last process."""

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 2 and run.accelerator.is_last_process:
            run.control.evaluate = True


def test_a_callback_that_asks_for_an_evaluation_gets_all_sets(everywhere: Any) -> None:
    def body(*rank_and_size: int) -> list[tuple[int, list[str]]]:
        model_trainer = trainer(arguments(eval_every={"dev": 4, "test": "never"}, max_steps=4), eval_dataset=SETS)
        model_trainer.events.add(AsksFor())
        return evaluated(model_trainer.fit().history)

    for result in everywhere(body):
        assert result == [(3, BOTH), (4, ["dev"])]


def test_intervals_of_time_evaluate_the_same_sets_on_all_processes() -> None:
    def body() -> list[tuple[int, list[str]]]:
        model_trainer = trainer(arguments(eval_every={"dev": "1 hour", "test": 4}, max_steps=6), eval_dataset=SETS)
        clock = Clock()
        model_trainer.events.add(clock)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trigger, "time", clock)
            return evaluated(model_trainer.fit().history)

    first, second = run_world(body, (), 2)
    assert first == second == [(3, ["dev"]), (4, ["test"]), (6, BOTH)]


class Clock(Callback):
    """A clock that an hour passes on in the second step, on the main process."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 2 and run.is_main_process:
            self.now = 3600.0


# -- what goes by a metric of one set ---------------------------------------------------------------------------------


def test_the_best_and_early_stopping_go_by_evaluations_with_their_metric(tmp_path: Path) -> None:
    class Values(Callback):
        order = -1

        def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
            seen.append((run.state.step, sorted(metrics)))

    seen: list[Any] = []
    stopping, keeping = EarlyStopping("eval_test_loss", patience=99), Checkpoint(metric="eval_dev_loss")
    args = arguments(
        eval_every=EVERY, output_dir=tmp_path, metric_for_best="test_loss", lr_scheduler="plateau",
        load_best_at_end=True, save_every="never",
    )  # fmt: skip
    model_trainer = trainer(args, eval_dataset=SETS, callbacks=[stopping, keeping, Values()])
    result = model_trainer.fit()
    losses = {entry["step"]: entry["eval_test_loss"] for entry in result.history if "eval_test_loss" in entry}
    assert list(losses) == [5, 10]
    assert result.state.best is not None
    assert (result.state.best.metric, result.state.best.value) == ("eval_test_loss", min(losses.values()))
    assert stopping.best == min(losses.values())
    assert [step for step, _ in seen] == [2, 4, 5, 6, 8, 10]
    assert model_trainer.evaluate()["eval_test_loss"] == pytest.approx(min(losses.values()), rel=1e-6)


def test_a_plateau_is_judged_by_the_set_of_its_metric() -> None:
    options: dict[str, Any] = {"lr_scheduler": "plateau", "metric_for_best": "test_loss", "greater_is_better": True}
    options["lr_scheduler_kwargs"] = {"patience": 0, "factor": 0.5}  # the loss falls, which counts as no better

    def rate(every: Any) -> float:
        model_trainer = trainer(arguments(eval_every=every, max_steps=9, **options), eval_dataset=SETS)
        model_trainer.fit()
        return model_trainer.run.optimizer.param_groups[0]["lr"]

    assert rate({"dev": 1, "test": 3}) == rate({"dev": "never", "test": 3}) == 0.05 / 4


def test_a_stop_by_one_set_still_evaluates_the_others_once() -> None:
    stopping = EarlyStopping("eval_dev_loss", stop_below=99.0)
    result = trainer(arguments(eval_every=EVERY), eval_dataset=SETS, callbacks=[stopping]).fit()
    assert evaluated(result.history) == [(2, ["dev"]), (2, ["test"])]
    assert {"eval_dev_loss", "eval_test_loss"} <= result.metrics.keys()


def test_without_a_metric_the_best_is_that_of_the_first_set_with_an_interval() -> None:
    model_trainer = trainer(arguments(eval_every={"dev": "never", "test": 5}), eval_dataset=SETS)
    assert model_trainer.parts.evaluation.best_metric == "eval_test_loss"


def test_a_misspelt_metric_is_named_at_the_first_evaluation_of_its_set() -> None:
    args = arguments(eval_every=EVERY, metric_for_best="eval_test_los", greater_is_better=False)
    model_trainer = trainer(args, eval_dataset=SETS, compute_metrics=lambda message: {"other": 1.0})
    with pytest.raises(ConfigurationError, match="metric_for_best='eval_test_los' is not a metric of this evaluation"):
        model_trainer.fit()
    assert model_trainer.run.state.step == 5


# -- resume ---------------------------------------------------------------------------------------------------------


def live(folder: Path, callback: Callback | None, **options: Any) -> list[Any]:
    settings = {"lr_scheduler": "plateau", "save_every": 3, "resume": "auto", "log_every": 4, **options}
    args = arguments(**{"eval_every": EVERY, "output_dir": folder, "num_train_epochs": 3, **settings})
    watching = EarlyStopping("eval_test_loss", patience=50)
    callbacks = [watching, *([] if callback is None else [callback])]
    model_trainer = trainer(args, model=network(dropout=0.3), eval_dataset=SETS, callbacks=callbacks)
    try:
        return [*outcome(model_trainer.fit(), model_trainer.unwrapped_model), watching.best]
    except (Interrupted, InterruptedError) as stop:
        return [type(stop).__name__]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at", [4, *(pytest.param(at, marks=pytest.mark.slow) for at in (3, 8, 10))])
def test_a_killed_run_evaluates_what_it_would_have(tmp_path: Path, at: int, processes: int) -> None:
    every = {"dev": "16 samples" if processes == 1 else "32 samples", "test": "1 epoch"}

    def body(folder: Path, dies: bool) -> list[Any]:
        return live(folder, Dies(at) if dies else None, eval_every=every)

    if processes == 1:
        whole = body(tmp_path / "whole", False)
        assert body(tmp_path / "cut", True) == ["InterruptedError"]
        assert body(tmp_path / "cut", False) == whole
    else:
        whole = run_world(body, (tmp_path / "whole", False), 2)
        at = min(at, 6)
        assert run_world(body, (tmp_path / "cut", True), 2) == [["InterruptedError"]] * 2
        assert run_world(body, (tmp_path / "cut", False), 2) == whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what a run without a break gives."""
    forget_world()
    return live(tmp_path_factory.mktemp("whole"), None)


@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate_begin"])
@pytest.mark.parametrize("at", [5, 10, *(pytest.param(at, marks=pytest.mark.slow) for at in (4, 15))])
def test_a_signal_owes_the_sets_that_were_due(tmp_path: Path, whole: list[Any], at: int, event: str) -> None:
    assert live(tmp_path / "cut", Asks(at, [(signal.SIGTERM, 0)], event)) == ["Interrupted"]
    assert live(tmp_path / "cut", None) == whole


def test_the_last_evaluation_of_a_stopped_run_is_made_up_for(tmp_path: Path) -> None:
    class Leaves(Callback):
        def on_evaluate_set_begin(self, run: Run, name: str, batches: int | None) -> None:
            if name == "test":
                os.kill(os.getpid(), signal.SIGTERM)

    def run(folder: Path, callback: Callback | None) -> Any:
        stopping = EarlyStopping("eval_dev_loss", stop_below=99.0)
        args = arguments(eval_every=EVERY, output_dir=folder, resume="auto")
        model_trainer = trainer(args, eval_dataset=SETS, callbacks=[stopping, *([callback] if callback else [])])
        result = model_trainer.fit()
        return evaluated(result.history), result.metrics, result.state.reason

    whole = run(tmp_path / "whole", None)
    assert whole[0] == [(2, ["dev"]), (2, ["test"])]
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", Leaves())
    assert run(tmp_path / "cut", None) == whole


def test_a_run_that_dies_after_its_last_evaluation_does_not_repeat_it(tmp_path: Path) -> None:
    class DiesAfterSave(Modifier):
        def on_save_end(self, run: Run, folder: Path) -> None:
            if run.state.step == 10:
                raise InterruptedError

    def run(folder: Path, callbacks: list[Any]) -> Any:
        args = arguments(eval_every=EVERY, save_every=5, output_dir=folder, resume="auto", save_in_background=False)
        result = trainer(args, eval_dataset=SETS, callbacks=callbacks).fit()
        return evaluated(result.history), {name: result.metrics[name] for name in ("eval_dev_loss", "eval_test_loss")}

    whole = run(tmp_path / "whole", [])
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", [DiesAfterSave()])
    assert run(tmp_path / "cut", []) == whole


# -- how it is given --------------------------------------------------------------------------------------------------


def test_files_and_command_lines_take_intervals_by_set(tmp_path: Path) -> None:
    args = TrainingArguments(eval_every={"dev": Every(100, "steps"), "test": 1000})
    assert args.eval_every == {"dev": "100 steps", "test": 1000}
    assert args.eval_intervals == {"dev": Every(100, "steps"), "test": Every(1000, "steps")}
    for name in ("args.json", "args.yaml"):
        args.to_file(tmp_path / name)
        assert TrainingArguments.from_file(tmp_path / name) == args
    text = '{"dev": "100 steps", "test": 1000}'
    assert TrainingArguments.from_cli(["--eval_every", text]) == args
    assert TrainingArguments.from_cli([f"--eval_every={text}"]) == args
    assert TrainingArguments.from_cli(["--eval_every.dev", "100 steps", "--eval_every.test", "1000"]) == args
    assert TrainingArguments.from_cli(["--eval_every", "1 epoch"]).eval_intervals == {}


def test_tokens_of_one_set_are_counted() -> None:
    assert TrainingArguments(eval_every={"dev": "5 steps", "test": "1M tokens"}).counts_tokens


@pytest.mark.parametrize(
    ("every", "message"),
    [
        ({}, r"eval_every must be an interval, or intervals by the names of sets"),
        ({"dev": "soon"}, r"eval_every\['dev'\]='soon' is not a duration"),
        (
            {"dev": None},
            r"""eval_every\['dev'\]=None is not an interval. To turn it off, give eval_every\['dev'\]="never".""",
        ),
        ({"dev": "never"}, r'evaluates no set. Give eval_every="never".'),
        ({1: "5 steps"}, r"eval_every must be an interval, or intervals by the names"),
    ],
)
def test_what_is_no_mapping_of_intervals_is_refused(every: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments(eval_every=every)


@pytest.mark.parametrize(
    ("every", "data", "options", "message"),
    [
        ({"dev": 2, "tset": 5}, SETS, {}, r"names 'tset', but the sets are 'dev', 'test'. Did you mean 'test'"),
        ({"dev": 2}, SETS, {}, r"no interval for 'test'.*eval_every={'dev': 2, 'test': 'never'}"),
        ({"dev": 2}, points(8), {}, r"one set without a name. Give one interval, eval_every=2, or name the set"),
        (EVERY, None, {}, r"needs evaluations, but there is no evaluation set"),
        (
            {"dev": 2, "test": "never"},
            SETS,
            {"metric_for_best": "test_loss"},
            r"""metric_for_best='test_loss' needs evaluations of the set 'test', but eval_every\['test'\]="never\"""",
        ),
        ({"dev": 2, "test": "never"}, SETS, {"metric_for_best": "mean_loss"}, r"needs evaluations of the set 'test'"),
        (
            {"dev": "0.3 epochs", "test": 5},
            SETS,
            {},
            r"""eval_every\['dev'\]="0.3 epochs" needs the length of an epoch""",
        ),
    ],
)
def test_names_that_do_not_fit_the_sets_are_refused(every: Any, data: Any, options: Any, message: str) -> None:
    from tests.trainer.fit.test_fit import Stream

    train = {"train_dataset": Stream()} if "epochs" in str(every) else {}
    options = {"lr_scheduler": "constant", **options}
    with pytest.raises(ConfigurationError, match=message):
        trainer(arguments(eval_every=every, **options), eval_dataset=data, **train).fit()


def test_callbacks_that_go_by_a_set_that_is_never_evaluated_are_refused() -> None:
    every = {"dev": 2, "test": "never"}
    with pytest.raises(
        ConfigurationError, match=r"EarlyStopping\(metric='eval_test_loss'\) needs evaluations of the set"
    ):
        trainer(arguments(eval_every=every), eval_dataset=SETS, callbacks=[EarlyStopping("eval_test_loss")]).fit()


def test_an_own_evaluate_gets_the_sets_that_are_due() -> None:
    class Own(Trainer):
        def evaluate(self, dataset: Any = None, prefix: str = "eval", **options: Any) -> dict[str, float]:
            evaluated.append(sorted(self.eval_dataset if dataset is None else dataset))
            return super().evaluate(dataset, prefix, **options)

    class Without(Trainer):
        def evaluate(self) -> dict[str, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().evaluate()

    from torch.nn.functional import cross_entropy

    evaluated: list[list[str]] = []
    datasets: dict[str, Any] = {"train_dataset": points(), "eval_dataset": SETS, "loss_fn": cross_entropy}
    Own(network(), arguments(eval_every=EVERY, num_train_epochs=1), **datasets).fit()
    assert evaluated == [["dev"], ["dev"], BOTH]
    with pytest.raises(ConfigurationError, match=r"but Without.evaluate has no parameter for them"):
        Without(network(), arguments(eval_every=EVERY), **datasets).fit()


def test_the_banner_has_the_interval_of_each_set(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(arguments(eval_every={"dev": 2, "test": "never"}, max_steps=1), eval_dataset=SETS).fit()
    assert "dev every 2 steps, test never, best by eval_dev_loss" in capsys.readouterr().err
