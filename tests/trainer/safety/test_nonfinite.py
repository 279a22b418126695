"""Losses and gradients that are not finite: no weight is ever changed by them, and who is to blame is told."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.checkpoints.test_resume import Dies
from tests.trainer.fit.test_sharded_runs import plugin
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, NonFiniteError, ParallelismConfig, Trainer
from trainer_lib.callbacks import ClipValue
from trainer_lib.events import Callback, Run
from trainer_lib.trainer.safety.nonfinite_guard import one_if_not_finite

BAD = 21  # the sample that spoils its update: of batches of 4 the sixth


class Spoiled(nn.Module):
    """A network that comes to grief at samples that are marked: in its outputs, its gradients, or its loss."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, network()

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, :1] > 100
        y = self.inner(torch.where(x > 100, 0.0, x))
        if self.how == "outputs":
            return torch.where(marked, math.nan, y)
        if self.how == "spike":
            return torch.where(marked, y - torch.tensor([1e3, 0.0]), y)
        if self.how == "gradients" and marked.any():
            return y + (y * 0).square().sum().sqrt()  # the slope of the root is infinite at 0
        return y


class WithInfinity(nn.Module):
    """A loss that is infinite once, with gradients that are finite."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, targets) + (math.inf if self.calls == self.at else 0.0)


class Watches(Callback):
    def __init__(self) -> None:
        self.skipped: list[int] = []
        self.losses: list[float] = []

    def on_step_skipped(self, run: Run) -> None:
        self.skipped.append(run.state.step + 1)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.losses.append(values["loss"])


def data(left_out: range = range(0), bad: int = BAD) -> tuple[Tensor, Tensor]:
    x, y = points()
    x[bad, 0], y[bad] = 1000.0, 0
    kept = [place for place in range(len(x)) if place not in left_out]
    return x[kept], y[kept]


def prepared(
    how: str = "nothing",
    points: Any = None,
    loss_fn: Any = cross_entropy,
    model: nn.Module | None = None,
    **options: Any,
) -> Trainer:
    defaults: dict[str, Any] = {"per_device_train_batch_size": 4, "shuffle": False, "num_train_epochs": 1}
    defaults |= {"log_every": 1, "lr_scheduler": "constant", "optimizer": "sgd", "learning_rate": 0.1}
    callbacks = [Watches(), *options.pop("callbacks", [])]
    args = arguments(**{**defaults, **options})
    return trainer(
        args, model=model or Spoiled(how), train_dataset=points or data(), loss_fn=loss_fn, callbacks=callbacks
    )


def after(first: Trainer) -> tuple[dict[str, Tensor], Any, Watches]:
    result = first.fit()
    weights = {name: value.clone() for name, value in first.unwrapped_model.state_dict().items()}
    return weights, result.state, next(each for each in first.events if isinstance(each, Watches))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.fault("a NaN loss or gradient ends the run before it changes a weight")
@pytest.mark.parametrize("max_norm", [1.0, None])
@pytest.mark.parametrize("how", ["outputs", "gradients", "loss"])
def test_a_run_ends_before_a_weight_is_touched(how: str, max_norm: float | None, tmp_path: Path) -> None:
    loss_fn: Any = WithInfinity(at=6) if how == "loss" else cross_entropy
    model_trainer = prepared(how, loss_fn=loss_fn, max_grad_norm=max_norm, output_dir=tmp_path, save_every=1)
    with pytest.raises(NonFiniteError) as caught:
        model_trainer.fit()

    message = str(caught.value)
    assert "In step 6 the" in message
    assert "(samples 20, 21, 22, 23)" in message
    if how == "gradients":
        assert "the gradients have the norm nan, of losses that are finite" in message
        assert "Not finite are those of inner.0.weight, inner.0.bias, inner.3.weight and 1 more." in message
    else:
        assert f"the loss is {'inf' if how == 'loss' else 'nan'} " in message
    expected, _, _ = after(prepared(loss_fn=loss_fn, max_grad_norm=max_norm, max_steps=5))
    assert_equal(model_trainer.unwrapped_model.state_dict(), expected)
    assert (model_trainer.state.step, model_trainer.state.status) == (5, "failed")
    assert max(path.name for path in tmp_path.glob("*/checkpoints/*")) == "checkpoint-00000005"


@pytest.mark.fault("a NaN loss or gradient: the update is skipped")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("how", ["outputs", "gradients"])
def test_an_update_that_is_left_out_leaves_no_trace(how: str, accumulation: int) -> None:
    options: dict[str, Any] = {"on_nonfinite": "skip", "gradient_accumulation_steps": accumulation}
    actual, state, watched = after(prepared(how, **options))
    left_out = range(20, 24) if accumulation == 1 else range(16, 24)
    expected, other, watched_there = after(prepared(points=data(left_out), **options))

    assert_equal(actual, expected)
    assert (state.step, state.skipped, other.skipped) == (other.step + 1, 1, 0)
    assert state.epoch == 1
    assert watched.skipped == [6 if accumulation == 1 else 3]
    assert watched.losses == watched_there.losses  # the step that is left out has none


class Normalized(Spoiled):
    """The same behind running statistics, which a forward moves before anyone knows its loss."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, :1] > 100
        return super().forward(self.norm(torch.where(marked, math.inf, x)))


def normalized(**options: Any) -> Trainer:
    return prepared(model=Normalized("nothing"), **options)


@pytest.mark.fault("a NaN loss: running statistics are restored")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_skipped_update_leaves_running_statistics_alone(processes: int) -> None:
    def train() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        size = 4 // processes
        skipping = normalized(on_nonfinite="skip", per_device_train_batch_size=size)
        expected, _, _ = after(normalized(points=data(range(20, 24)), per_device_train_batch_size=size))
        return after(skipping)[0], expected

    for actual, expected in run_world(train, (), processes):
        assert_equal(actual, expected)


@pytest.mark.fault("a NaN loss ends the run: running statistics are restored")
def test_a_run_that_ends_leaves_running_statistics_finite() -> None:
    model = normalized()
    with pytest.raises(NonFiniteError, match="Weights and buffers are as before this step"):
        model.fit()
    expected, _, _ = after(normalized(max_steps=5))
    assert_equal(model.unwrapped_model.state_dict(), expected)


class Steep(Spoiled):
    """A network with one weight whose gradient is infinite at the marked sample; all others are finite."""

    def __init__(self) -> None:
        super().__init__("nothing")
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        offset = self.offset.sqrt() if (x > 100).any() else self.offset * 0
        return super().forward(x) + torch.stack([offset, torch.zeros(())])


@pytest.mark.fault("gradients that a callback would make finite")
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_gradients_are_judged_before_callbacks_modify_them(policy: str) -> None:
    model_trainer = prepared(model=Steep(), on_nonfinite=policy, callbacks=[ClipValue(0.5)])
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="In step 6 the gradients have the norm inf"):
            model_trainer.fit()
        return
    actual, state, _ = after(model_trainer)
    expected, _, _ = after(prepared(model=Steep(), points=data(range(20, 24)), callbacks=[ClipValue(0.5)]))
    assert_equal(actual, expected)
    assert state.skipped == 1


@pytest.mark.parametrize("shift", [0.0, -0.65, -100.0])
def test_losses_around_and_below_zero_are_no_spikes(shift: float) -> None:
    def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) + shift

    options: dict[str, Any] = {"num_train_epochs": 2, "loss_spike": 20, "on_nonfinite": "skip", "loss_fn": shifted}
    assert after(prepared(points=points(), **options))[1].skipped == 0
    assert after(prepared("spike", points=data(bad=39), **options))[2].skipped == [20]


def test_too_many_updates_that_are_left_out_end_the_run() -> None:
    x, y = data()
    x[:, 0] = 1000.0
    model_trainer = prepared("outputs", points=(x, y), on_nonfinite="skip", max_nonfinite=3)
    with pytest.raises(NonFiniteError, match="has skipped 3 updates already \\(max_nonfinite=3\\)"):
        model_trainer.fit()
    assert model_trainer.state.step == 3


@pytest.mark.fault("a NaN loss: the run rewinds to a checkpoint")
def test_a_run_goes_back_to_its_checkpoint_and_leaves_out_what_led_astray(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shuffle": True, "num_train_epochs": 2}
    model_trainer = prepared("outputs", on_nonfinite="rewind", save_every=4, output_dir=tmp_path, **options)
    actual, state, watched = after(model_trainer)
    expected, other, watched_there = after(prepared("outputs", on_nonfinite="skip", **options))

    assert_equal(actual, expected)
    assert (state.step, state.skipped, state.samples) == (other.step, 2, other.samples)
    assert watched.skipped == watched_there.skipped
    assert [entry["loss"] for entry in state.history] == [entry["loss"] for entry in other.history]
    assert [end - first for first, end in state.left_out] == [4, 4]


@pytest.mark.fault("a rewound run, interrupted and resumed")
def test_a_run_that_went_back_resumes_to_the_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"on_nonfinite": "rewind", "save_every": 2, "num_train_epochs": 2, "loss_spike": 50}
    expected, state, _ = after(prepared("outputs", output_dir=tmp_path / "whole", **options))
    with pytest.raises(InterruptedError):
        prepared("outputs", output_dir=tmp_path / "cut", callbacks=[Dies(9)], **options).fit()
    actual, resumed, _ = after(prepared("outputs", output_dir=tmp_path / "cut", resume="auto", **options))
    assert_equal(actual, expected)
    assert (resumed.skipped, resumed.left_out) == (state.skipped, state.left_out) == (2, [[20, 24], [60, 64]])


def test_the_history_of_a_resumed_run_has_a_skipped_update_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"on_nonfinite": "skip", "save_every": 5, "output_dir": tmp_path}
    with pytest.raises(InterruptedError):
        prepared("outputs", callbacks=[Dies(7)], **options).fit()
    assert after(prepared("outputs", resume="auto", **options))[1].skipped == 1
    (history,) = tmp_path.glob("*/history.jsonl")
    events = [json.loads(line) for line in history.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "left_out"] == [6]


def test_without_a_checkpoint_to_go_back_to_the_update_is_left_out() -> None:
    actual, state, _ = after(prepared("outputs", on_nonfinite="rewind"))
    expected, _, _ = after(prepared(points=data(range(20, 24))))
    assert_equal(actual, expected)
    assert (state.skipped, state.left_out) == (1, [])


@pytest.mark.fault("a loss spike is skipped")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_far_beyond_the_usual_is_no_reason_to_learn(accumulation: int) -> None:
    bad = 39  # the last update's, when the usual is known
    epochs = accumulation + 1  # of 10 updates, or 5: the usual is that of 10
    options: dict[str, Any] = {
        "num_train_epochs": epochs,
        "gradient_accumulation_steps": accumulation,
        "loss_spike": 20,
    }
    with pytest.raises(NonFiniteError, match=r"the loss is \d+.*loss_spike=20 deviations above the usual 0\.\d+ ± 0\."):
        prepared("spike", points=data(bad=bad), **options).fit()
    if accumulation == 1:
        _, state, watched = after(prepared("spike", points=data(bad=bad), on_nonfinite="skip", **options))
        assert watched.skipped == [20]  # in the first pass too little was known
        assert (state.skipped, max(watched.losses) > 100) == (1, True)


@pytest.mark.fault("a NaN loss or gradient on one of two ranks")
@pytest.mark.parametrize("how", ["outputs", "gradients"])
def test_all_processes_hear_whose_samples_they_were(how: str) -> None:
    def train() -> tuple[str, int, list[int]]:
        model_trainer = prepared(how, on_nonfinite="raise")
        with pytest.raises(NonFiniteError) as caught:
            model_trainer.fit()
        skipping = prepared(how, on_nonfinite="skip", gradient_accumulation_steps=2)
        skipping.fit()
        return str(caught.value), model_trainer.state.step, [skipping.state.step, skipping.state.skipped]

    results = run_world(train, (), 2, timeout=60)
    # Updates of 8 samples, of which the second process has the last 4: sample 21 is in the third, on the second one.
    assert results[0] == results[1]
    assert (
        "process 1 (samples 20, 21, 22, 23)" in results[0][0]
        or "(samples 20, 21, 22, 23) on process 1" in results[0][0]
    )
    assert "process 0" not in results[0][0]
    assert results[0][1:] == (2, [3, 1])


def losses_of(trainer: Trainer) -> list[float]:
    """Return the losses that a spike is measured by."""
    guard: Any = trainer.parts.guard
    return [round(loss, 4) for loss in guard.state_dict()["losses"]]


def test_spikes_are_those_of_all_processes_together() -> None:
    def train() -> tuple[int, list[float]]:
        model_trainer = prepared("spike", points=data(bad=39), num_train_epochs=3, loss_spike=20, on_nonfinite="skip")
        model_trainer.fit()
        return model_trainer.state.skipped, losses_of(model_trainer)

    def alone() -> list[float]:
        model_trainer = prepared(
            "spike",
            points=data(bad=39),
            num_train_epochs=3,
            loss_spike=20,
            on_nonfinite="skip",
            per_device_train_batch_size=8,
        )
        model_trainer.fit()
        return losses_of(model_trainer)

    (skipped, losses), (other, others) = run_world(train, (), 2, timeout=60)
    assert (skipped, losses) == (other, others)
    assert skipped == 1
    assert losses == pytest.approx(alone(), abs=2e-4)


def test_spikes_are_those_of_the_windows_of_a_pipeline() -> None:
    def marked(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets % 2) + 1e3 * (targets == 2).float().mean()

    def train(parallelism: ParallelismConfig | None) -> tuple[int, list[float]]:
        x, y = points()
        y[39] = 2
        model_trainer = prepared(
            model=network(),
            loss_fn=marked,
            points=(x, y),
            num_train_epochs=3,
            loss_spike=20,
            on_nonfinite="skip",
            gradient_accumulation_steps=2,
            parallelism=parallelism,
        )
        model_trainer.fit()
        return model_trainer.state.skipped, losses_of(model_trainer)

    ((skipped, losses),) = run_world(train, (None,), 1)
    assert skipped
    for actual in run_world(train, (ParallelismConfig(pp_size=2),), 2, timeout=60):
        assert actual == (skipped, pytest.approx(losses, abs=2e-4))


@pytest.mark.fault("a NaN gradient in shards on two ranks")
def test_shards_are_guarded_too() -> None:
    def train() -> tuple[str, int]:
        model_trainer = prepared("outputs", fsdp=plugin())
        with pytest.raises(NonFiniteError) as caught:
            model_trainer.fit()
        return str(caught.value), model_trainer.state.step

    for message, step in run_world(train, (), 2, timeout=60):
        assert "the loss is nan (samples 20, 21, 22, 23) on process 1." in message
        assert step == 2


@pytest.mark.fault("a NaN loss under fp16")
def test_overflows_of_fp16_are_the_scalers_and_a_loss_that_is_none_is_not() -> None:
    options: dict[str, Any] = {"mixed_precision": "fp16", "num_train_epochs": 2, "callbacks": []}
    _, state, _ = after(prepared(points=points(), **options))
    assert (state.step, state.skipped) == (20, 0)
    model_trainer = prepared("outputs", **options)
    with pytest.raises(NonFiniteError, match=r"In step 6 the loss is nan \(samples 20"):
        model_trainer.fit()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nonfinite": "ignore"}, "Unknown on_nonfinite 'ignore'. Known: raise, rewind, skip"),
        ({"max_nonfinite": 0}, "max_nonfinite must be a whole number of at least 1, got 0"),
        ({"loss_spike": 1.0}, "loss_spike must be a finite number above 1, got 1.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments(**options)


class Sloped(nn.Module):
    """A network whose gradients are as large as wanted."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope, self.inner = slope, network()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y.detach() + self.slope * (y - y.detach())


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("shards", [False, True])
def test_gradients_whose_squares_overflow_are_finite(shards: bool, processes: int) -> None:
    """Clipped to a norm, they are the same whatever their size was."""

    def train(slope: float) -> tuple[dict[str, Tensor], list[float]]:
        norms: list[float] = []

        class Norms(Callback):
            def on_log(self, run: Run, values: dict[str, float]) -> None:
                norms.append(values.get("grad_norm", math.nan))

        options: dict[str, Any] = {"fsdp": plugin()} if shards else {}
        model_trainer = prepared(
            model=Sloped(slope), points=points(), max_grad_norm=0.1, callbacks=[Norms()], **options
        )
        model_trainer.fit()
        weights = model_trainer.accelerator.get_state_dict(model_trainer.accelerator.prepared.models[0])
        return weights, norms[:-1]

    def both() -> None:
        weights, norms = train(1e25)
        expected, expected_norms = train(1.0)
        assert norms == pytest.approx([1e25 * norm for norm in expected_norms], rel=1e-3)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)

    run_world(both, (), processes, timeout=60)


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head = nn.EmbeddingBag(9, 4, sparse=sparse), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens))


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_sparse_gradients_are_judged_and_clipped_as_dense_ones(max_norm: float | None) -> None:
    """Several values of one row, as of a token that is there twice, count as their sum."""
    tokens = torch.randint(9, (24, 5), generator=torch.Generator().manual_seed(0))
    rows = (tokens, torch.arange(24) % 2)

    def train(sparse: bool) -> tuple[list[float], dict[str, Tensor]]:
        options: dict[str, Any] = {"max_grad_norm": max_norm, "gradient_accumulation_steps": 2}
        weights, _, watches = after(prepared(points=rows, model=Bag(sparse), **options))
        return watches.losses, weights

    losses, weights = train(sparse=True)
    expected, expected_weights = train(sparse=False)
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-7)


def test_sparse_gradients_that_are_not_finite_are_refused() -> None:
    tokens = torch.arange(36).reshape(12, 3) % 9
    model_trainer = prepared(points=(tokens, torch.arange(12) % 2), model=Bag(sparse=True), loss_fn=WithInfinity(at=3))
    with pytest.raises(NonFiniteError, match="In step 3 the loss is inf"):
        model_trainer.fit()


@pytest.mark.fault("an update that overflows, of finite gradients")
@pytest.mark.parametrize("policy", ["raise", "skip", "rewind"])
def test_weights_that_an_update_made_infinite_are_named(policy: str) -> None:
    """No later update could be of use: it is not skipped ten times first, nor said that weights are as before."""
    model_trainer = prepared(
        points=points(), learning_rate=1e38, max_grad_norm=None, on_nonfinite=policy, model=Sloped(1e3)
    )
    with pytest.raises(
        NonFiniteError, match="an earlier update overflowed although its gradients were finite"
    ) as raised:
        model_trainer.fit()
    assert "In step 2 the loss is nan" in str(raised.value)
    assert "inner.0.weight" in str(raised.value)
    assert "are as before" not in str(raised.value)


@pytest.mark.fault("gradients that overflow fp16, with BatchNorm")
def test_running_statistics_do_not_see_updates_that_fp16_leaves_out() -> None:
    """With every sample alike, the statistics after n updates say how many forwards they have seen."""

    class Tracked(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[int, bool]] = []

        def on_step_end(self, run: Run) -> None:
            unwrapped: Any = run.accelerator.unwrap_model(run.model)  # type: ignore[arg-type]
            tracked = unwrapped.norm.num_batches_tracked
            self.seen.append((int(tracked), run.accelerator.optimizer_step_was_skipped))

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.steep = nn.BatchNorm1d(6), Sloped(1e4)

        def forward(self, x: Tensor) -> Tensor:
            return self.steep(self.norm(x))

    tracked = Tracked()
    prepared(model=Normed(), points=points(), mixed_precision="fp16", callbacks=[tracked], num_train_epochs=2).fit()
    skipped = [was_skipped for _, was_skipped in tracked.seen]
    assert True in skipped
    assert False in skipped
    assert [count for count, _ in tracked.seen] == [skipped[: step + 1].count(False) for step in range(len(skipped))]


@pytest.mark.parametrize("share", [0.5, 0.97, 1.03])
def test_gradients_are_clipped_from_the_limit_on(share: float) -> None:
    def moved(max_norm: float) -> float:
        options: dict[str, Any] = {"max_steps": 1, "optimizer": "sgd", "learning_rate": 1.0, "lr_scheduler": "constant"}
        model = network()
        before = [weight.detach().clone() for weight in model.parameters()]
        trainer(arguments(max_grad_norm=max_norm, **options), model=model).fit()
        changes = [weight.detach() - old for weight, old in zip(model.parameters(), before, strict=True)]
        return torch.cat([change.flatten() for change in changes]).norm().item()

    norm = moved(1e9)
    assert moved(share * norm) == pytest.approx(min(share, 1) * norm, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [0.0, 1e-45, 1.0, 1e300, math.inf, -math.inf, math.nan])
def test_a_fused_optimizer_skips_by_the_flag_what_is_not_finite(norm: float, dtype: torch.dtype) -> None:
    """As on a GPU, where nothing waits for the norm."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer: Any = torch.optim.AdamW([weight], lr=0.1, fused=True)
    value = torch.tensor(norm, dtype=dtype)  # 1e300 is finite in double alone
    optimizer.found_inf = one_if_not_finite(value)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(3)) is not bool(value.isfinite())


class Observed(nn.Module):
    """Resizes a buffer in its first forward, as observers of quantization-aware training do."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("largest", torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        found = inputs.detach().abs().amax(dim=0)
        with torch.no_grad():
            if not len(self.largest):
                self.largest.resize_(found.shape).copy_(found)
            else:
                self.largest.copy_(torch.maximum(self.largest, found))
        return self.layer(inputs)


@pytest.mark.parametrize("bad", [None, 0, 9])
def test_buffers_that_a_forward_resizes_are_kept(bad: int | None) -> None:
    """A sample of NaN in the first or the second of three updates leaves no trace in them."""
    inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    good = [row for row in range(24) if bad is None or row // 8 != bad // 8]
    expected = inputs[good].abs().amax(dim=0)
    if bad is not None:
        inputs[bad] = math.nan
    args = arguments(num_train_epochs=1, shuffle=False, on_nonfinite="skip")
    model = Observed()
    Trainer(model, args, train_dataset=(inputs, torch.arange(24) % 2), loss_fn=cross_entropy).fit()
    assert torch.equal(model.largest, expected)
