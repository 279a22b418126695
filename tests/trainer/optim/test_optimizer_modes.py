"""Schedule-free optimizers: the right mode throughout a run, on one rank and two."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from tests.callbacks.by_hand import Named, assert_close, assert_equal, batches, resumed, weights
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import FullyShardedDataParallelPlugin
from trainer_lib.events import Modifier, Run

RATE = 0.3
BETA = 0.9


class Unmarked(torch.optim.Optimizer):
    """Schedule-free SGD as in the package `schedulefree`: a model has y in training, and the average x elsewhere.

    It does not track its mode, so each switch moves the weights.
    """

    def __init__(self, params: Iterable[Any], lr: float = RATE, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0})

    @torch.no_grad()
    def eval(self) -> None:
        self.move(1 - 1 / BETA)

    @torch.no_grad()
    def train(self) -> None:
        self.move(1 - BETA)

    def move(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (BETA * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class ScheduleFree(Unmarked):
    """Schedule-free SGD whose groups hold the mode: switching twice does nothing, and evaluation mode cannot step."""

    def __init__(self, params: Iterable[Any], lr: float = RATE, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.mark(training=False)

    def eval(self) -> None:
        if self.is_marked:
            super().eval()
        self.mark(training=False)

    def train(self) -> None:
        if not self.is_marked:
            super().train()
        self.mark(training=True)

    @property
    def is_marked(self) -> bool:
        return self.param_groups[0]["train_mode"]

    def mark(self, *, training: bool) -> None:
        for group in self.param_groups:
            group["train_mode"] = training

    def step(self, closure: Any = None) -> None:
        if not self.is_marked:
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        super().step(closure)


OPTIONS: dict[str, Any] = {"learning_rate": RATE, "lr_scheduler": "constant", "max_grad_norm": None, "shuffle": False}
SHARDED = FullyShardedDataParallelPlugin(min_num_params=1, auto_wrap_policy="size_based_wrap")


class Recorder(Modifier):
    """Records the weights while a model is trained, evaluated and saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.evaluated: dict[int, Named] = {}
        self.trained: dict[int, Named] = {}
        self.saved: Named = {}

    def on_step_begin(self, run: Run) -> None:
        self.trained[run.state.step] = weights(run.trainer.unwrapped_model)

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 4:
            run.trainer.save_model(self.folder)
            self.saved = load_file(self.folder / "model.safetensors")

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        del metrics
        self.evaluated[run.state.step] = weights(run.trainer.unwrapped_model)


def by_hand() -> tuple[list[Named], list[Named]]:
    """Return the training weights and their averages, at the start and after each update."""
    model = network()
    optimizer = ScheduleFree(model.parameters())
    optimizer.train()
    raw, averages = [weights(model)], [weights(model)]
    for inputs, targets in batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        raw.append(weights(model))
        averages.append(weights(model))
        for name, p in model.named_parameters():
            averages[-1][name].lerp_(optimizer.state[p]["z"], 1 - 1 / BETA)
    return raw, averages


def recorded_run(folder: Path, kind: str = "ScheduleFree", **options: Any) -> tuple[Recorder, Named, Named]:
    """Return the records of a run with evaluations, and its weights before and after another evaluation."""
    recorder = Recorder(folder)
    args = arguments(optimizer=f"{__name__}.{kind}", eval_every=3, **OPTIONS, **options)
    run_trainer = trainer(args, callbacks=[recorder], eval_dataset=points(16))
    run_trainer.fit()
    final = weights(run_trainer.unwrapped_model)
    run_trainer.evaluate()
    run_trainer.predict(points(16))
    run_trainer.save_model(folder)
    return recorder, final, weights(run_trainer.unwrapped_model)


def check(recorder: Recorder, final: Named, after: Named) -> None:
    """Compare with weights computed by hand: training has y, everything else x."""
    raw, averages = by_hand()
    assert (
        float((averages[-1]["0.weight"] - raw[-1]["0.weight"]).abs().max()) > 5e-3
    )  # else the comparison shows nothing
    assert sorted(recorder.evaluated) == [3, 6, 9, 10]
    for step, value in recorder.evaluated.items():
        assert_close(value, averages[step])
    for step, value in recorder.trained.items():
        assert_close(value, raw[step])
    assert_close(recorder.saved, averages[4])
    assert_close(final, averages[-1])
    assert_equal(after, final)


@pytest.mark.parametrize("kind", ["ScheduleFree", "Unmarked"])
def test_the_average_is_evaluated_saved_and_kept_after_fit(kind: str, tmp_path: Path) -> None:
    check(*recorded_run(tmp_path, kind))


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
def test_two_ranks_are_in_the_same_modes_as_one(sharded: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 4, **({"fsdp": SHARDED} if sharded else {})}
    for results in run_world(lambda: recorded_run(tmp_path, **options)):
        check(*results)


def test_an_evaluation_restores_the_training_weights_bit_for_bit(tmp_path: Path) -> None:
    recorder, final, _ = recorded_run(tmp_path)
    args = arguments(optimizer=f"{__name__}.ScheduleFree", **OPTIONS)
    alone = Recorder(tmp_path)
    run_trainer = trainer(args, callbacks=[alone])
    run_trainer.fit()
    for step, value in alone.trained.items():
        assert_equal(recorder.trained[step], value)
    assert_equal(final, weights(run_trainer.unwrapped_model))


@pytest.mark.parametrize("kind", ["ScheduleFree", "Unmarked"])
def test_a_checkpoint_holds_the_training_weights_and_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole, parts = resumed_as(kind, tmp_path)
    assert_equal(parts, whole)


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    for whole, parts in run_world(lambda: resumed_as("ScheduleFree", tmp_path, per_device_train_batch_size=4)):
        assert_equal(parts, whole)


def resumed_as(kind: str, folder: Path, **options: Any) -> tuple[Named, Named]:
    """Return the weights of a run, and of a run that was killed after an evaluation and resumed."""
    return resumed(
        lambda: Recorder(folder),
        folder,
        optimizer=f"{__name__}.{kind}",
        learning_rate=RATE,
        eval_dataset=points(16),
        eval_every=3,
        **options,
    )


def test_a_second_fit_starts_from_the_training_weights(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    model = network()
    optimizer = ScheduleFree(model.parameters())
    run_trainer = trainer(
        arguments(num_train_epochs=1, **OPTIONS), model=model, optimizer=optimizer, callbacks=[recorder]
    )
    run_trainer.fit()
    run_trainer.fit()
    _, averages = by_hand()
    assert_close(weights(model), averages[-1])


@pytest.mark.parametrize("kind", ["ScheduleFree", "Unmarked"])
def test_a_finished_run_that_is_loaded_again_has_the_average(kind: str, tmp_path: Path) -> None:
    args = arguments(optimizer=f"{__name__}.{kind}", output_dir=tmp_path, resume="auto", **OPTIONS)
    for model in (network(), network()):
        trainer(args, model=model).fit()
        assert_close(weights(model), by_hand()[1][-1])


def test_load_best_at_end_restores_the_average_of_the_best_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    args = arguments(
        optimizer=f"{__name__}.ScheduleFree",
        output_dir=tmp_path,
        eval_every=3,
        load_best_at_end=True,
        metric_for_best="loss",
        greater_is_better=True,
        **OPTIONS,
    )
    run_trainer = trainer(args, callbacks=[recorder], eval_dataset=points(16))
    result = run_trainer.fit()
    assert result.state.best is not None
    assert result.state.best.step == 3
    assert_close(weights(run_trainer.unwrapped_model), recorder.evaluated[3])
