"""Runs in which each rank trains by itself for some steps: LocalSGD and DiLoCo in the Trainer."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import (
    ConfigurationError,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    UnsupportedError,
)
from trainer_lib.callbacks import EMA, Freeze
from trainer_lib.events import Modifier, Run

Batch = tuple[Tensor, Tensor]


class Spy(Modifier):
    """Keeps what each update of this rank is made of, and what it is evaluated with."""

    def __init__(self) -> None:
        self.windows: list[list[Batch]] = []
        self.evaluated: dict[int, list[Tensor]] = {}
        self.own: dict[int, list[Tensor]] = {}
        self.metrics: list[float] = []

    def on_step_begin(self, run: Run) -> None:
        self.windows.append([])

    def on_loss(self, run: Run) -> None:
        if not run.weighs_nothing:
            self.windows[-1].append(run.batch)

    def on_step_end(self, run: Run) -> None:
        self.own[run.state.step] = _weights(run.modules[""])

    def on_evaluate_begin(self, run: Run) -> None:
        self.evaluated[run.state.step] = _weights(run.modules[""])

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics["eval_loss"])


def _weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _run(callbacks: list[Any] | None = None, resume: str = "never", **options: Any) -> tuple[Spy, list[Tensor]]:
    spy, model = Spy(), network()
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_grad_norm": None,
        "lr_scheduler": "constant",
        "local_sgd_steps": 3,
        "seed": 1,
        "resume": resume,
    }
    args = arguments(**{**defaults, **options})
    evaluated = points(11) if args.eval_every is not None else None
    trainer(
        args, model=model, train_dataset=points(40), eval_dataset=evaluated, callbacks=[spy, *(callbacks or [])]
    ).fit()
    return spy, _weights(model)


def _by_hand(spies: list[Spy], every: int, make: Any, outer: tuple[float, float] | None) -> list[list[Tensor]]:
    """Train a model for each rank in plain torch; return the average after each update, and what is left at the end."""
    models = [network() for _ in spies]
    optimizers = [make(model.parameters()) for model in models]
    start = [nn.Parameter(value) for value in _weights(models[0])]
    step_outer = outer and torch.optim.SGD(start, lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0)
    means = []
    for update in range(len(spies[0].windows)):
        for model, optimizer, spy in zip(models, optimizers, spies, strict=True):
            if window := spy.windows[update]:
                optimizer.zero_grad()
                count = sum(len(labels) for _, labels in window)
                for inputs, labels in window:
                    (cross_entropy(model(inputs), labels, reduction="sum") / count).backward()
                optimizer.step()
        mean = [torch.stack(values).mean(dim=0) for values in zip(*map(_weights, models), strict=True)]
        means.append(mean)
        if (update + 1) % every == 0:
            if step_outer:
                for value, average in zip(start, mean, strict=True):
                    value.grad = value.detach() - average
                step_outer.step()
                mean = [value.detach().clone() for value in start]
            for model in models:
                torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(mean), model.parameters())
            means[-1] = mean
    return means


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0)


@pytest.mark.parametrize(
    ("processes", "outer", "options"),
    [
        (2, (0.7, 0.9), {"gradient_accumulation_steps": 2, "max_steps": 8}),
        pytest.param(2, None, {}, marks=pytest.mark.slow),
        pytest.param(4, (0.7, 0.9), {}, marks=pytest.mark.slow),
    ],
)
def test_training_equals_a_loop_by_hand(
    processes: int, outer: tuple[float, float] | None, options: dict[str, Any]
) -> None:
    """Also within a round: all ranks evaluate the average of their weights, and train on with their own."""
    if outer is not None:
        options = {**options, "outer_learning_rate": outer[0], "outer_momentum": outer[1]}
    results = run_world(partial(_run, **{**options, "eval_every": 2}), (), processes, timeout=120)
    spies = [spy for spy, _ in results]
    means = _by_hand(spies, 3, _adamw, outer)
    for spy, weights in results:
        assert spy.evaluated.keys() >= {2, 4, 6}
        for step, seen in spy.evaluated.items():
            torch.testing.assert_close(seen, means[step - 1], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(weights, means[-1], rtol=1e-6, atol=1e-7)
        assert spy.metrics == spies[0].metrics
    assert not torch.equal(spies[0].own[2][0], spies[1].own[2][0])  # within a round
    assert torch.equal(spies[0].own[3][0], spies[1].own[3][0])


@pytest.mark.slow
def test_a_rank_whose_data_ends_early_makes_no_update() -> None:
    """Of 9 batches the second rank has 4: its last window holds repeats alone."""
    results = run_world(partial(_run_uneven, num_train_epochs=1), (), 2, timeout=120)
    spies = [spy for spy, _ in results]
    assert [len(spy.windows[-1]) for spy in spies] == [1, 0]
    means = _by_hand(spies, 3, _adamw, (0.7, 0.9))
    for _, weights in results:
        torch.testing.assert_close(weights, means[-1], rtol=1e-6, atol=1e-7)


def test_a_rank_without_samples_in_its_first_update_makes_none() -> None:
    """As after a resume from the step before the last one of an epoch."""
    options: dict[str, Any] = {"max_steps": 1, "weight_decay": 0.1, "learning_rate": 0.1}
    first, second = run_world(partial(_run_uneven, samples=4, **options))
    assert [len(spy.windows[-1]) for spy, _ in (first, second)] == [1, 0]
    moved = [not torch.equal(own, start) for own, start in zip(second[0].own[1], _weights(network()), strict=True)]
    assert moved == [False] * 4


def _run_uneven(samples: int = 36, **options: Any) -> tuple[Spy, list[Tensor]]:
    spy, model = Spy(), network()
    args = arguments(
        per_device_train_batch_size=4,
        max_grad_norm=None,
        lr_scheduler="constant",
        local_sgd_steps=3,
        outer_learning_rate=0.7,
        **options,
    )
    trainer(args, model=model, train_dataset=points(samples), callbacks=[spy]).fit()
    return spy, _weights(model)


@pytest.mark.slow
def test_rounds_of_one_step_of_sgd_equal_averaged_gradients() -> None:
    sgd: dict[str, Any] = {"optimizer": "sgd", "eval_every": None}
    plain = run_world(partial(_run, **{**sgd, "local_sgd_steps": None}), (), 2, timeout=120)[0][1]
    outer = {"local_sgd_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    for _, weights in run_world(partial(_run, **{**sgd, **outer}), (), 2, timeout=120):
        torch.testing.assert_close(weights, plain, rtol=1e-6, atol=1e-6)


def _messages() -> list[int]:
    sent = [0]
    all_reduce = dist.ProcessGroup.allreduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        sent[-1] += 1
        return all_reduce(*args, **kwargs)

    class Counter(Modifier):
        order = -1

        def on_step_begin(self, run: Run) -> None:
            sent.append(0)

    dist.ProcessGroup.allreduce = counting
    _run([Counter()], log_every="never", max_steps=9, outer_learning_rate=0.7)
    return sent[1:10]


def test_nothing_is_reduced_between_rounds() -> None:
    sent = run_world(_messages, (), 2, timeout=120)[0]
    assert sent[1:8] == [0, 1, 0, 0, 1, 0, 0]  # of the last update the end of the run follows


def _resumed(folder: str, stops_at: int | None, max_steps: int, ema: bool, resume: str) -> tuple[list[float], Any]:
    class Stop(Modifier):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == stops_at:
                raise RuntimeError("stopped")

    options: dict[str, Any] = {
        "max_steps": max_steps,
        "output_dir": folder,
        "save_every": 4,
        "eval_every": 5,
        "on_exception": "raise",
        "outer_learning_rate": 0.7,
    }
    try:
        spy, weights = _run([Stop(), *([EMA(0.9)] if ema else [])], resume, **options)
    except RuntimeError:
        return [], None
    return spy.metrics, (weights, spy.own)


@pytest.mark.parametrize("ema", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_resumes_within_a_round_bit_by_bit(tmp_path: Path, ema: bool) -> None:
    whole = run_world(_resumed, (str(tmp_path / "whole"), None, 10, ema, "never"), 2, timeout=120)
    stopped = str(tmp_path / "stopped")
    run_world(_resumed, (stopped, 5, 10, ema, "never"), 2, timeout=120)
    resumed = run_world(_resumed, (stopped, None, 10, ema, "auto"), 2, timeout=120)
    for (metrics, (weights, own)), (expected_metrics, (expected, expected_own)) in zip(resumed, whole, strict=True):
        assert min(own) == 5
        for step, values in own.items():
            assert all(map(torch.equal, values, expected_own[step])), step
        assert metrics == expected_metrics[-len(metrics) :]
        assert all(map(torch.equal, weights, expected))
    assert all(map(torch.equal, resumed[0][1][0], resumed[1][1][0]))  # both ranks end with the same weights


def _history(folder: str, stops_at: int | None = None) -> list[dict[str, Any]]:
    args = arguments(max_steps=6, local_sgd_steps=4, output_dir=folder, save_every=2, log_every=3, resume="auto")
    callbacks = [] if stops_at is None else [Dies(stops_at)]
    with contextlib.suppress(InterruptedError):
        return trainer(args, train_dataset=points(48), callbacks=callbacks).fit().history
    return []


def test_all_ranks_log_the_mean_of_their_gradient_norms_also_after_a_resume(tmp_path: Path) -> None:
    whole = run_world(_history, (str(tmp_path / "whole"),))
    run_world(_history, (parts := str(tmp_path / "parts"), 5))
    for resumed in run_world(_history, (parts,)):
        assert [(entry["loss"], entry["grad_norm"]) for entry in resumed] == [
            (entry["loss"], entry["grad_norm"]) for entry in whole[0]
        ]
    assert [entry["grad_norm"] for entry in whole[1]] == [entry["grad_norm"] for entry in whole[0]]


def _freezing(outer: float | None, folder: str | None = None, stops_at: int | None = None) -> dict[int, list[Tensor]]:
    options: dict[str, Any] = {"max_steps": 9}
    if folder is not None:
        options |= {"output_dir": folder, "save_every": 1, "on_exception": "raise"}
    callbacks = [Freeze("0.*", after="4 steps"), *([] if stops_at is None else [Dies(stops_at)])]
    with contextlib.suppress(InterruptedError):
        spy, _ = _run(callbacks, "auto" if folder else "never", outer_learning_rate=outer, **options)
        return spy.own
    return {}


@pytest.mark.parametrize("outer", [None, 0.7])
def test_weights_that_are_frozen_within_a_round_are_averaged_at_its_end(outer: float | None) -> None:
    first, second = run_world(_freezing, (outer,), 2, timeout=120)
    assert not torch.equal(first[5][0], second[5][0])  # each rank has its own until the round ends
    for step in (6, 9):
        assert all(map(torch.equal, first[step], second[step]))
    assert all(map(torch.equal, first[6][:2], first[9][:2]))  # frozen: no outer momentum moves them
    assert not torch.equal(first[6][2], first[9][2])


def test_a_run_resumes_within_a_round_in_which_weights_were_frozen(tmp_path: Path) -> None:
    whole = run_world(_freezing, (None,), 2, timeout=120)
    folder = str(tmp_path)
    run_world(_freezing, (None, folder, 5), 2, timeout=120)
    for actual, expected in zip(run_world(_freezing, (None, folder), 2, timeout=120), whole, strict=True):
        assert actual
        for step, values in actual.items():
            assert all(map(torch.equal, values, expected[step])), step


def _with_statistics(folder: str, stops_at: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    args = arguments(max_steps=3, local_sgd_steps=4, output_dir=folder, save_every=1, resume="auto")
    callbacks = [] if stops_at is None else [Dies(stops_at)]
    with contextlib.suppress(InterruptedError):
        trainer(args, model=model, train_dataset=points(48), callbacks=callbacks).fit()
    return [value.detach().clone() for value in model.state_dict().values()]


def test_running_statistics_of_a_run_that_resumes_within_a_round(tmp_path: Path) -> None:
    whole = run_world(_with_statistics, (str(tmp_path / "whole"),))
    run_world(_with_statistics, (parts := str(tmp_path / "parts"), 2))
    for actual, expected in zip(run_world(_with_statistics, (parts,)), whole, strict=True):
        assert all(map(torch.equal, actual, expected))


def _finished(folder: str, freezes: bool, **options: Any) -> list[Tensor]:
    callbacks = [Freeze("0.*", until="2 steps")] if freezes else []
    return _run(callbacks, "auto", output_dir=folder, save_every=1, **options)[1]


@pytest.mark.parametrize("freezes", [False, True])
def test_a_finished_run_that_is_loaded_again_has_the_average(freezes: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 1 if freezes else 2}  # within the first round
    body = partial(_finished, str(tmp_path), freezes, **options)
    first, again = run_world(body), run_world(body)
    for weights in (*first, *again):
        assert all(map(torch.equal, weights, first[0]))


def test_another_world_resumes_from_the_average(tmp_path: Path) -> None:
    folder = str(tmp_path)
    by_rank = run_world(partial(_run, **_saving(folder, 4)), (), 2, timeout=120)
    mean = [torch.stack(values).mean(dim=0) for values in zip(*(spy.own[4] for spy, _ in by_rank), strict=True)]
    options = {**_saving(folder, 5), "resume": "extend", "learning_rate": 0.0}
    ((spy, _),) = run_world(partial(_run, **options), (), 1, timeout=120)
    torch.testing.assert_close(spy.own[5], mean, rtol=1e-6, atol=1e-7)


def _saving(folder: str, steps: int) -> dict[str, Any]:
    return {"output_dir": folder, "max_steps": steps, "save_every": 4, "outer_learning_rate": 0.7}


def _requested() -> int:
    class Asks(Modifier):
        def on_step_end(self, run: Run) -> None:
            run.control.stop = run.state.step == 7 and not run.is_main_process

    spy, _ = _run([Asks()], max_steps=20)
    return len(spy.windows)


def test_a_request_of_one_rank_takes_effect_at_the_end_of_the_round() -> None:
    assert run_world(_requested, (), 2, timeout=120) == [9, 9]


def _skips() -> tuple[int, list[Tensor]]:
    class Spoils(Modifier):
        def on_micro_batch_begin(self, run: Run) -> None:
            if run.state.step == 4 and not run.is_main_process:
                run.batch = (run.batch[0] * torch.nan, run.batch[1])

    model = network()
    args = arguments(local_sgd_steps=3, max_steps=6, on_nonfinite="skip", per_device_train_batch_size=4)
    result = trainer(args, model=model, callbacks=[Spoils()]).fit()
    return result.state.skipped, _weights(model)


def test_nan_on_one_rank_skips_its_update_alone() -> None:
    (skipped, weights), (skipped_there, weights_there) = run_world(_skips, (), 2, timeout=120)
    assert (skipped, skipped_there) == (0, 1)
    assert all(map(torch.equal, weights, weights_there))
    assert all(weight.isfinite().all() for weight in weights)


def _sharded() -> str:
    with pytest.raises(UnsupportedError) as error:
        _run(parallelism=ParallelismConfig(dp_shard_size=2))
    return str(error.value)


def test_a_sharded_model_is_refused() -> None:
    assert "LocalSGD" in run_world(_sharded, (), 2, timeout=120)[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outer_learning_rate": 0.7}, "outer_learning_rate=0.7 has no effect without local_sgd_steps"),
        ({"local_sgd_steps": 2, "outer_momentum": 0.5}, "outer_momentum=0.5 has no effect without outer_learning_rate"),
        ({"local_sgd_steps": 2, "outer_learning_rate": 1, "outer_momentum": 1}, "outer_momentum must be less than 1"),
        ({"local_sgd_steps": 2, "on_nonfinite": "rewind"}, 'on_nonfinite="rewind" goes back'),
        ({"local_sgd_steps": 2, "per_device_train_batch_size": "auto"}, '="auto" splits batches'),
        ({"local_sgd_steps": 2, "fsdp": FullyShardedDataParallelPlugin()}, "fsdp computes together"),
        ({"local_sgd_steps": 0}, "local_sgd_steps must be"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        arguments(**options)
