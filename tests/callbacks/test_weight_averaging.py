"""Tests of EMA and SWA: equal to a hand-written average, used in evaluations, and resumed bit for bit."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.callbacks.by_hand import (
    OPTIONS,
    Named,
    assert_close,
    assert_equal,
    batches,
    loop,
    resumed,
    trained,
    weights,
)
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, FullyShardedDataParallelPlugin
from trainer_lib.callbacks import EMA, SWA, before, every
from trainer_lib.events import Callback, Modifier, Run


def averaged_by_hand(decay: float = 0.8, *, warmup: bool = True) -> tuple[nn.Module, list[Named], list[Named]]:
    """Return the model trained by hand, and average and weights after each update."""
    model = network()
    average, averages, raw = weights(model), [], []

    def after(model: nn.Module, step: int) -> None:
        rate = min(decay, step / (9 + step)) if warmup else decay
        for name, value in model.state_dict().items():
            average[name] = average[name] * rate + value * (1 - rate)
        averages.append(dict(average))
        raw.append(weights(model))

    return loop(model, after=after), averages, raw


class Looks(Modifier):
    """Keeps the weights while a model is evaluated, saved, and trained."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.evaluated, self.trained, self.saved = folder, {}, {}, {}

    def on_step_end(self, run: Run) -> None:
        self.trained[run.state.step] = weights(run.trainer.unwrapped_model)
        if run.state.step == 4:
            run.trainer.save_model(self.folder)
            from safetensors.torch import load_file

            self.saved = load_file(self.folder / "model.safetensors")

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.evaluated[run.state.step] = weights(run.trainer.unwrapped_model)


def test_a_moving_average_is_evaluated_and_saved_while_the_weights_are_trained(tmp_path: Path) -> None:
    _, averages, raw = averaged_by_hand()
    looks = Looks(tmp_path)
    final = trained(EMA(0.8), looks, eval_dataset=points(16), eval_every=3)
    assert sorted(looks.evaluated) == [3, 6, 9, 10]
    for step, value in looks.evaluated.items():
        assert_close(value, averages[step - 1])
    for step, value in looks.trained.items():
        assert_close(value, raw[step - 1])
    assert_close(looks.saved, averages[3])
    assert_close(final, averages[-1])


def test_without_warm_up_it_is_that_of_torch() -> None:
    model = network()
    theirs = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.n_averaged += 1  # else it forgets the weights that it began with
    loop(model, after=lambda model, step: theirs.update_parameters(model))
    assert_close(trained(EMA(0.9, warmup=False)), weights(theirs.module))


def test_every_so_many_steps() -> None:
    _, _, raw = averaged_by_hand()
    expected = weights(network())
    for at in (4, 8):
        expected = {name: value * 0.5 + raw[at - 1][name] * 0.5 for name, value in expected.items()}
    assert_close(trained(EMA(0.5, warmup=False, every=4)), expected)


def test_running_statistics_too_if_wanted() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    by_hand = model()
    mean = [torch.zeros(4)]

    def after(model: Any, step: int) -> None:
        mean[0] = mean[0] * 0.5 + model[1].running_mean * 0.5

    loop(by_hand, after=after)
    assert_close({"": trained(EMA(0.5, warmup=False, buffers=True), model=model())["1.running_mean"]}, {"": mean[0]})
    running_mean = trained(EMA(0.5, warmup=False), model=model())["1.running_mean"]
    assert_close({"": running_mean}, {"": by_hand.get_buffer("1.running_mean")})


class Replacing(nn.Module):
    """A network whose forward replaces a buffer, the mean of the inputs so far, and appends to another."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("rows", torch.zeros(0, 6), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * inputs.detach().mean(dim=0)
            self.rows = torch.cat([self.rows, inputs[:1].detach()])
        return self.network(inputs + self.mean)


def test_statistics_that_a_forward_replaces_are_averaged(tmp_path: Path) -> None:
    by_hand = Replacing()
    mean = [torch.zeros(6)]

    def after(model: Any, step: int) -> None:
        mean[0] = mean[0] * 0.5 + model.mean * 0.5

    loop(by_hand, after=after)
    model = Replacing()
    trained(EMA(0.5, warmup=False, buffers=True), model=model)
    assert_close({"": model.mean}, {"": mean[0]})
    assert torch.equal(model.rows, by_hand.get_buffer("rows"))
    whole, parts = resumed(lambda: EMA(0.5, every=2, buffers=True), tmp_path, model=Replacing)
    assert_equal(parts, whole)


def test_an_average_of_16_bit_weights_moves() -> None:
    ema = EMA(0.999, warmup=False)
    run = Run(model=nn.Linear(1, 1, bias=False).bfloat16())
    nn.init.ones_(run.modules[""].weight)  # type: ignore[arg-type]
    run.optimizers = {"default": torch.optim.SGD(run.modules[""].parameters(), 0.1)}  # type: ignore[dict-item]
    ema.on_fit_begin(run)
    nn.init.zeros_(run.modules[""].weight)  # type: ignore[arg-type]
    ema.average()
    assert ema.state_dict()["averages"]["weight"].item() == pytest.approx(0.999)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_average_their_weights_and_resume_bit_for_bit(kind: str, tmp_path: Path) -> None:
    _, averages, _ = averaged_by_hand()
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    options: dict[str, Any] = {"per_device_train_batch_size": 4, **({"fsdp": plugin} if kind == "fsdp" else {})}

    def two() -> Any:
        from tests.callbacks.by_hand import resumed

        looks = EvaluationLosses()
        final = trained(EMA(0.8), looks, eval_dataset=points(16), eval_every=3, **options)
        return final, looks.losses, resumed(lambda: EMA(0.8), tmp_path, **options)

    evaluated = network()
    for final, losses, (whole, parts) in run_world(two, (), 2, timeout=60):
        assert_close(final, averages[-1])
        assert_equal(parts, whole)
        evaluated.load_state_dict(averages[5])
        inputs, targets = points(16)
        assert losses[6] == pytest.approx(cross_entropy(evaluated(inputs), targets).item(), rel=1e-5)


class EvaluationLosses(Modifier):
    """Keeps the losses of evaluations."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.losses[run.state.step] = metrics["eval_loss"]


def test_the_best_is_that_of_the_average(tmp_path: Path) -> None:
    _, averages, _ = averaged_by_hand(0.5)
    args = arguments(
        output_dir=tmp_path,
        optimizer="sgd",
        learning_rate=0.1,
        weight_decay=0.0,
        lr_scheduler="constant",
        max_grad_norm=None,
        shuffle=False,
        eval_every=5,
        metric_for_best="loss",
        greater_is_better=True,  # so that the first is the best
        load_best_at_end=True,
    )
    model_trainer = trainer(args, eval_dataset=points(16), callbacks=[EMA(0.5)])
    model_trainer.fit()
    assert_close(weights(model_trainer.unwrapped_model), averages[4])


def test_an_evaluation_that_fails_leaves_the_weights_that_are_trained() -> None:
    class Fails(Modifier):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 4:
                before = weights(run.trainer.unwrapped_model)
                with pytest.raises(KeyError):
                    run.trainer.evaluate()
                assert_equal(weights(run.trainer.unwrapped_model), before)

        def on_evaluate_batch_end(self, run: Run) -> None:
            if run.state.step == 4:
                raise KeyError

    trained(EMA(0.8), Fails(), eval_dataset=points(16), eval_every=None)


def test_the_last_weights_are_averaged_alike(tmp_path: Path) -> None:
    _, _, raw = averaged_by_hand()
    late = [raw[step - 1] for step in (6, 8, 10)]
    expected = {name: torch.stack([weights[name] for weights in late]).mean(dim=0) for name in late[0]}
    assert_close(trained(SWA(0.5, every=2)), expected)
    assert_close(trained(SWA("5 steps", every="2 steps")), expected)


def with_statistics(kind: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), kind(4), nn.Linear(4, 2))


def test_running_statistics_are_recomputed_at_the_end() -> None:
    average = AveragedModel(model := with_statistics())
    loop(model, after=lambda model, step: average.update_parameters(model) if step > 5 else None)
    update_bn([inputs for inputs, _ in batches(epochs=1)], average.module)
    expected = weights(average.module)
    actual = trained(SWA(0.5, every=1), model=with_statistics())
    assert_close(actual, expected)

    def two() -> Named:
        return trained(SWA(0.5, every=1), model=with_statistics(), per_device_train_batch_size=4)

    first, second = run_world(two, (), 2, timeout=60)
    assert_equal(first, second)
    assert first["1.num_batches_tracked"] == 5


def test_running_statistics_are_those_of_all_samples_where_ranks_have_different_numbers() -> None:
    """Of 11 batches of 4 samples one rank has 6; of a single one it has all."""

    def statistics(count: int) -> Named:
        options: dict[str, Any] = {"per_device_train_batch_size": 4, "learning_rate": 1e-30}
        averaged = trained(SWA(0.0, every=1), model=with_statistics(), train_dataset=points(count), **options)
        return {name: averaged[name] for name in ("1.running_mean", "1.running_var")}

    for count in (44, 4):
        expected = statistics(count)
        for actual in run_world(statistics, (count,), 2, timeout=60):
            assert_close(actual, expected)


class SyncedOnCpu(nn.BatchNorm1d):
    """Computes its statistics over the batches of all ranks, as SyncBatchNorm does on accelerators."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        sums = torch.cat([input.sum(dim=0), input.square().sum(dim=0), torch.tensor([float(len(input))])]).detach()
        torch.distributed.all_reduce(sums)
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        var = square - mean.square()
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for kept, value in ((self.running_mean, mean), (self.running_var, var)):
            assert kept is not None
            kept.lerp_(value, momentum)
        return (input - mean) / (var + self.eps).sqrt() * self.weight + self.bias


def test_running_statistics_of_synchronized_layers_wait_for_no_rank_without_a_batch() -> None:
    """Of 11 batches of 4 samples one rank has 6, and the other 5 and one that repeats samples."""

    def statistics() -> Named:
        model = with_statistics(SyncedOnCpu)
        data, rate = points(44), 1e-30
        averaged = trained(
            SWA(0.0, every=1), model=model, train_dataset=data, per_device_train_batch_size=4, learning_rate=rate
        )
        with torch.no_grad():  # the batch that repeats samples counts too
            means = with_statistics()[0](data[0]).mean(dim=0)
        torch.testing.assert_close(averaged["1.running_mean"], means, rtol=0, atol=0.05)
        return averaged

    first, second = run_world(statistics, (), 2, timeout=60)
    assert_equal(first, second)
    assert first["1.num_batches_tracked"] == 6


def test_running_statistics_leave_out_batches_with_nan() -> None:
    inputs, targets = points()
    bad = inputs.clone()
    bad[9] = math.nan  # in the second batch of five
    others = torch.cat([inputs[:8], inputs[16:]]), torch.cat([targets[:8], targets[16:]])

    def statistics(dataset: Any, **options: Any) -> Named:
        model, average = with_statistics(), SWA(0.0, every=1)
        averaged = trained(average, model=model, train_dataset=dataset, learning_rate=1e-30, **options)
        return {name: averaged[name] for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked")}

    assert_close(statistics((bad, targets), on_nonfinite="skip"), statistics(others))


class WithBadLoss(nn.Module):
    """A loss that is NaN at one of its calls."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, targets) + (math.nan if self.calls == self.at else 0.0)


def test_skipped_updates_are_not_averaged() -> None:
    """A run that skips its last update has the average of the run that ends before it."""
    options: dict[str, Any] = {"lr_scheduler": "constant"}
    skipping = trained(EMA(0.8), loss_fn=WithBadLoss(10), on_nonfinite="skip", **options)
    assert_equal(skipping, trained(EMA(0.8), max_steps=9, num_train_epochs=None, **options))


@pytest.mark.parametrize(
    "make",
    [
        lambda: before("7 steps", EMA(0.8, every="7 steps")),  # it averages at the end of the epoch, after step 10
        lambda: every("5 steps", EMA(0.8, every="6 steps")),  # it averages at step 10, the first that it sees from 6 on
    ],
)
def test_an_average_behind_a_filter_resumes_from_updates_that_it_did_not_see(
    make: Callable[[], Callback], tmp_path: Path
) -> None:
    """The run resumes from step 6."""
    whole, parts = resumed(make, tmp_path)
    assert_equal(parts, whole)


def uneven() -> nn.Module:
    """Return a network with a weight of 9 rows, which two ranks share as 5 and 4."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


@pytest.mark.parametrize("average", [lambda: EMA(0.5), lambda: SWA(0.2, every=1)], ids=["EMA", "SWA"])
def test_averages_of_uneven_shards_equal_those_of_one_rank(average: Callable[[], Modifier]) -> None:
    def two() -> Named:
        plugin = FullyShardedDataParallelPlugin(min_num_params=1, auto_wrap_policy="size_based_wrap")
        args = arguments(**OPTIONS, per_device_train_batch_size=4, fsdp=plugin)
        model_trainer = trainer(args, model=uneven(), callbacks=[average()])
        model_trainer.fit()
        return {name: value.full_tensor() for name, value in model_trainer.unwrapped_model.state_dict().items()}

    expected = trained(average(), model=uneven())
    for actual in run_world(two):
        assert_close(actual, expected)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="EMA and SWA, and only one can average the weights"):
        trainer(callbacks=[EMA(), SWA()])
    with pytest.raises(ConfigurationError, match="EMA and EMA"):
        trainer(callbacks=[EMA(), EMA(0.9)])
    with pytest.raises(ConfigurationError, match=r"at least 0 and (less than|below) 1"):
        EMA(1.0)
    with pytest.raises(ConfigurationError, match="must not be an amount of time"):
        EMA(every="10 minutes")
    with pytest.raises(ConfigurationError, match=r"at least 0 and (less than|below) 1"):
        SWA(1.5)
    with pytest.raises(ConfigurationError, match="the length of the run is unknown"):
        trained(SWA(0.5), num_train_epochs=None, max_time="1 hour")
