"""Tests of the shipped modifiers: equal to a hand-written loop on one and two ranks, and after a resume bit for bit."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from tests.callbacks.by_hand import Named, assert_close, assert_equal, batches, loop, resumed, trained, weights
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    Trainer,
)
from trainer_lib.callbacks import (
    SAM,
    SWA,
    AccumulationSchedule,
    AdaptiveClipping,
    ClipValue,
    CutMix,
    Freeze,
    GradualUnfreezing,
    LabelSmoothing,
    Mixup,
    MixupOrCutMix,
    NEFTune,
    SequenceLengthWarmup,
    after,
)
from trainer_lib.callbacks.batch_rng import generator_of_batch
from trainer_lib.events import Callback, Modifier, Run, RunState


def draws(step: int, name: str, rank: int = 0, seed: int = 42) -> np.random.Generator:
    run = Run(args=type("Args", (), {"seed": seed}), state=RunState(micro_batches=step - 1))
    run.accelerator = SimpleNamespace(data_group=SimpleNamespace(rank=rank))  # type: ignore[assignment]
    return generator_of_batch(run, name)


def unfrozen_from(step_of: dict[str, int]) -> Callable[[nn.Module, int], None]:
    def before(model: nn.Module, step: int) -> None:
        for name, weight in model.named_parameters():
            if step < step_of.get(name.partition(".")[0], 0):
                weight.grad = None

    return before


def uphill(model: nn.Module, radius: float, adaptive: bool = False) -> Callable[[nn.Module, int], None]:
    def before(model: nn.Module, step: int) -> None:
        batch = batches()[step - 1]
        kept = [weight.detach().clone() for weight in model.parameters()]
        gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        sizes = [weight.abs() if adaptive else torch.ones_like(weight) for weight in kept]
        norm = torch.cat([(g * s).flatten() for g, s in zip(gradients, sizes, strict=True)]).norm()
        with torch.no_grad():
            for weight, gradient, size in zip(model.parameters(), gradients, sizes, strict=True):
                weight += radius * gradient * size**2 / norm
        model.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        with torch.no_grad():
            for weight, before in zip(model.parameters(), kept, strict=True):
                weight.copy_(before)

    return before


def clipped(model: nn.Module, step: int) -> None:
    for weight in model.parameters():
        assert weight.grad is not None
        rows = (weight[None], weight.grad[None]) if weight.ndim == 1 else (weight, weight.grad)
        for unit, gradient in zip(*rows, strict=True):
            limit = 0.1 * max(unit.detach().norm().item(), 1e-3)
            if gradient.norm() > limit:
                gradient.mul_(limit / gradient.norm())


def by_value(model: nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)


def smoothed(model: nn.Module, step: int, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], label_smoothing=0.2)


# What changes the gradients of an update, whatever processes they come from.
CHANGES: dict[str, tuple[Callable[[], Callback], dict[str, Any]]] = {
    "freeze": (lambda: Freeze("0.*", until="4 steps"), {"before": unfrozen_from({"0": 5})}),
    "unfreeze": (lambda: GradualUnfreezing("3.*", "0.*", every="1 epoch"), {"before": unfrozen_from({"0": 6})}),
    "value": (lambda: ClipValue(0.02), {"before": by_value}),
    "adaptive": (lambda: AdaptiveClipping(0.1), {"before": clipped}),
    "smoothing": (lambda: LabelSmoothing(0.2), {"loss": smoothed}),
    "sam": (lambda: SAM(0.5), {"before": uphill(nn.Identity(), 0.5)}),
    "asam": (lambda: SAM(2.0, adaptive=True), {"before": uphill(nn.Identity(), 2.0, adaptive=True)}),
}


@functools.cache
def expected(name: str) -> Named:
    return weights(loop(network(), **CHANGES[name][1]))


@pytest.mark.parametrize("name", CHANGES)
def test_as_by_hand(name: str) -> None:
    assert_close(trained(CHANGES[name][0]()), expected(name))
    plain = weights(loop(network()))
    assert not torch.allclose(plain["0.weight"], expected(name)["0.weight"], atol=1e-4)  # else nothing is compared


@pytest.mark.parametrize("name", ["smoothing", "sam", "value"])
def test_with_accumulation(name: str) -> None:
    accumulated = trained(CHANGES[name][0](), per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_close(accumulated, expected(name))


PLUGIN = FullyShardedDataParallelPlugin(
    auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="ddp"), pytest.param({"fsdp": PLUGIN}, id="fsdp", marks=pytest.mark.slow)],
)
def test_on_two_processes(options: dict[str, Any]) -> None:
    """With 2 samples and accumulation of 2, so that an update is of 8."""
    options = {**options, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

    def two() -> list[Named]:
        return [trained(make(), **options) for make, _ in CHANGES.values()]

    for everything in run_world(two, (), 2, timeout=120):
        for name, actual in zip(CHANGES, everything, strict=True):
            assert_close(actual, expected(name))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-true"])
def test_sharded_layers_that_were_frozen_train_in_16_bits(precision: str) -> None:
    """In updates of two micro-batches, and of one at the end of an epoch."""
    options: dict[str, Any] = {"fsdp": PLUGIN, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

    def frozen(**options: Any) -> Named:
        return trained(Freeze("0.*", until="4 steps"), mixed_precision=precision, train_dataset=points(36), **options)

    first, second = run_world(lambda: frozen(**options))
    assert_equal(first, second)
    start = network().state_dict()
    for name, expected in frozen().items():
        assert not torch.equal(first[name], start[name].to(first[name].dtype))
        torch.testing.assert_close(first[name], expected, rtol=0, atol=1e-2)


def climbing(data: tuple[Tensor, Tensor]) -> Callable[[nn.Module, int], None]:
    seen = batches(data)

    def climb(model: nn.Module, step: int) -> None:
        kept = weights(model)
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.5 * weight.grad / norm  # type: ignore[operator]
        model.zero_grad()
        cross_entropy(model(seen[step - 1][0]), seen[step - 1][1]).backward()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(kept[name])

    return climb


# Of a whole update of 8 samples both ranks have as many batches. The last update is of fewer: one rank has none, or its
# second batch only repeats samples.
@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (41, {"per_device_train_batch_size": 4}),
        (41, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
        (46, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    ],
)
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="ddp"), pytest.param({"fsdp": PLUGIN}, id="fsdp", marks=pytest.mark.slow)],
)
def test_ranks_without_data_of_their_own_climb_along(
    count: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    data = points(count)
    by_hand = loop(network(), before=climbing(data), seen=batches(data))

    def two() -> Named:
        return trained(SAM(0.5), train_dataset=data, **sizes, **options)

    for actual in run_world(two, (), 2, timeout=30):
        assert_close(actual, weights(by_hand))


def images(count: int = 16) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(count, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    return drawn, (drawn.mean(dim=(1, 2, 3)) > 0).long()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 2))


def mixed(kind: str, step: int, batch: tuple[Tensor, Tensor], rank: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch mixed by hand."""
    drawn = draws(step, "MixupOrCutMix" if kind == "either" else kind, rank)
    if kind == "either":
        kind = "Mixup" if drawn.random() < 0.5 else "CutMix"
    inputs, targets = batch
    share, shift = drawn.beta(0.7, 0.7), int(drawn.integers(1, len(inputs)))
    order = [(place - shift) % len(inputs) for place in range(len(inputs))]
    if kind == "Mixup":
        inputs = share * inputs + (1 - share) * inputs[order]
    else:
        side = math.sqrt(1 - share)
        lengths = [int(5 * side)] * 2
        middles = [int(drawn.integers(5)) for _ in range(2)]
        box = [range(max(0, m - n // 2), min(5, m + (n + 1) // 2)) for m, n in zip(middles, lengths, strict=True)]
        inputs = inputs.clone()
        for row in box[0]:
            for column in box[1]:
                inputs[..., row, column] = batch[0][order][..., row, column]
        share = 1 - len(box[0]) * len(box[1]) / 25
    soft = one_hot(targets, 2).float()
    return inputs, share * soft + (1 - share) * soft[order]


MIXING: dict[str, Callable[[], Callback]] = {
    "Mixup": lambda: Mixup(0.7, num_classes=2),
    "CutMix": lambda: CutMix(0.7, num_classes=2),
    "either": lambda: MixupOrCutMix(Mixup(0.7, num_classes=2), CutMix(0.7, num_classes=2)),
}


@pytest.mark.parametrize("kind", MIXING)
def test_mixed_batches(kind: str) -> None:
    seen = [mixed(kind, step, batch) for step, batch in enumerate(batches(images()), start=1)]
    by_hand = loop(classifier(), seen=seen)
    actual = trained(MIXING[kind](), model=classifier(), train_dataset=images(), seed=42)
    assert_close(actual, weights(by_hand))


def test_each_process_mixes_its_own() -> None:
    def two() -> list[Named]:
        options: dict[str, Any] = {"train_dataset": images(), "seed": 42, "per_device_train_batch_size": 4}
        return [trained(make(), model=classifier(), **options) for make in MIXING.values()]

    results = run_world(two, (), 2, timeout=60)
    for place, kind in enumerate(MIXING):
        seen: list[tuple[Tensor, Tensor]] = []
        for step, (inputs, targets) in enumerate(batches(images()), start=1):
            halves = [mixed(kind, step, (inputs[4 * r :][:4], targets[4 * r :][:4]), r) for r in range(2)]
            seen.append((torch.cat([h[0] for h in halves]), torch.cat([h[1] for h in halves])))
        for everything in results:
            assert_close(everything[place], weights(loop(classifier(), seen=seen)))


def test_numbers_as_targets_are_mixed_in_batches_with_names() -> None:
    class ByName(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    inputs = points(16)[0]
    targets = inputs.sum(dim=1, keepdim=True)
    torch.manual_seed(0)
    model, by_hand = ByName(6, 1), nn.Linear(6, 1)
    by_hand.load_state_dict(model.state_dict())
    seen: list[Any] = []
    for step, (x, y) in enumerate(batches((inputs, targets)), start=1):
        drawn = draws(step, "Mixup")
        share, shift = float(drawn.beta(0.7, 0.7)), int(drawn.integers(1, 8))
        seen.append((share * x + (1 - share) * x.roll(shift, 0), share * y + (1 - share) * y.roll(shift, 0)))
    loop(by_hand, lambda model, step, batch: mse_loss(model(batch[0]), batch[1]), seen=seen)
    data = {"x": inputs, "labels": targets}
    assert_close(trained(Mixup(0.7), model=model, train_dataset=data, loss_fn=mse_loss, seed=42), weights(by_hand))


class Words(nn.Module):
    """A language model; with its own loss over the next words, if asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 4)
        self.last = nn.Linear(4, 7)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.last(self.words(input_ids).cumsum(dim=1))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}


def sentences(ignored: bool = True) -> dict[str, Tensor]:
    tokens = torch.randint(7, (16, 12), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    if ignored:
        labels[:, -3:] = -100
        labels[::3, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def test_models_with_their_own_loss_are_smoothed() -> None:
    data = sentences()
    seen = [{name: value[at : at + 8] for name, value in data.items()} for _ in range(2) for at in (0, 8)]

    def smooth(model: nn.Module, step: int, batch: Any) -> Tensor:
        logits = model(batch["input_ids"])["logits"]
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.2)

    by_hand = loop(Words(), smooth, seen=seen)
    losses: list[float] = []

    class Losses(Callback):
        def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
            losses.append(metrics["eval_loss"])

    actual = trained(
        LabelSmoothing(0.2), Losses(), model=Words(), train_dataset=data, eval_dataset=data, loss_fn=None, eval_every=2
    )
    assert_close(actual, weights(by_hand))
    plain = cross_entropy(by_hand(data["input_ids"])["logits"].flatten(0, 1), data["labels"].flatten())
    assert losses[-1] == pytest.approx(plain.item(), rel=1e-5)  # evaluations compare with those of other runs


def test_no_label_of_bytes_counts_as_ignored() -> None:
    def losses_of(kind: torch.dtype) -> list[float]:
        batch = {"logits": torch.arange(2.0 * 157).reshape(2, 157), "labels": torch.tensor([156, 3], dtype=kind)}
        run = Run(batch=batch, outputs=batch, trainer=SimpleNamespace(loss_fn=cross_entropy), args=None)
        run.accelerator = SimpleNamespace(sequence_split=SimpleNamespace(ranks=None))  # type: ignore[assignment]
        run.loss_sum = torch.zeros(())
        smoothing = LabelSmoothing(0.5)
        smoothing.on_fit_begin(run)
        smoothing.on_loss(run)
        return run.loss_sum.tolist()

    assert losses_of(torch.uint8) == losses_of(torch.int64)


def test_sequences_grow() -> None:
    data = sentences(ignored=False)
    lengths: list[int] = []

    class Lengths(Callback):
        def on_micro_batch_end(self, run: Run) -> None:
            lengths.append(run.batch["input_ids"].shape[1])
            assert run.batch["labels"].shape[1] == lengths[-1]

    growing = SequenceLengthWarmup(2, 12, until="5 steps", multiple_of=2)
    trained(growing, Lengths(), model=Words(), train_dataset=data, loss_fn=None, num_train_epochs=4)
    assert lengths == [2, 4, 6, 8, 10, 12, 12, 12]


class Pair(NamedTuple):
    input_ids: Tensor
    values: Tensor


@pytest.mark.parametrize(
    ("make", "cut"),
    [
        (lambda tokens, values: tokens, lambda tokens, values: tokens[:, :4]),
        (lambda tokens, values: (tokens, values), lambda tokens, values: (tokens[:, :4], values)),
        (lambda tokens, values: [tokens, tokens[:, 0]], lambda tokens, values: [tokens[:, :4], tokens[:, 0]]),
        (Pair, lambda tokens, values: Pair(tokens[:, :4], values)),
        (
            lambda tokens, values: {"input_ids": tokens, "values": values, "weights": values},
            lambda tokens, values: {"input_ids": tokens[:, :4], "values": values, "weights": values[:, :4]},
        ),
    ],
    ids=["tensor", "tuple", "list", "named tuple", "dict"],
)
def test_sequences_of_every_kind_of_batch_are_cut(make: Callable[..., Any], cut: Callable[..., Any]) -> None:
    tokens, values = torch.arange(20).reshape(2, 10), torch.rand(2, 10)
    run = Run(batch=make(tokens, values), state=RunState(step=4))
    SequenceLengthWarmup(1, 10, until="10 steps", multiple_of=2, names=("weights",)).on_micro_batch_begin(run)
    assert type(run.batch) is type(make(tokens, values))
    torch.testing.assert_close(run.batch, cut(tokens, values))


def test_noise_is_on_embeddings_in_training_only() -> None:
    noises: list[Tensor] = []
    model = Words()

    class Looks(Modifier):
        order = 1

        def on_fit_begin(self, run: Run) -> None:
            def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
                noises.append(output.detach() - module.weight.detach()[inputs[0]])  # type: ignore[operator]

            model.words.register_forward_hook(keep)

    data = sentences()
    trained(NEFTune(5.0), Looks(), model=model, train_dataset=data, eval_dataset=data, loss_fn=None, eval_every=2)
    bound = 5.0 / math.sqrt(12 * 4)
    training, evaluating = noises[:2], noises[2:4]
    assert all(0.9 * bound < noise.abs().max() <= bound * 1.0001 for noise in training)
    assert all(abs(float(noise.mean())) < bound / 5 for noise in training)
    assert all(not noise.any() for noise in evaluating)
    assert len(model.words._forward_hooks) == 1  # that of this test


RESUMED: dict[str, tuple[Callable[[], Callback], dict[str, Any]]] = {
    "accumulation": (
        lambda: AccumulationSchedule({0: 3, 1: 1}),
        {"per_device_train_batch_size": 4, "lr_scheduler": "cosine", "save_every": 2},
    ),
    "accumulation at the end of an epoch": (
        lambda: AccumulationSchedule({0: 3, 1: 1}),
        {"per_device_train_batch_size": 4, "lr_scheduler": "cosine", "save_every": "1 epoch"},
    ),
    "swa": (lambda: SWA(0.3, every=1), {}),
    **{name: (make, {}) for name, (make, _) in CHANGES.items()},
    "frozen later": (lambda: Freeze("0.*", after="3 steps", until="7 steps"), {}),
    **{kind: (make, {"model": classifier, "train_dataset": images(40)}) for kind, make in MIXING.items()},
    "noise": (
        lambda: NEFTune(5.0),
        {"model": Words, "train_dataset": {n: v.repeat(3, 1)[:40] for n, v in sentences().items()}, "loss_fn": None},
    ),
}


def test_updates_of_more_batches_in_later_passes() -> None:
    """10 updates of 4 samples, then 5 of 8; the rate goes down to 0 over all 15."""
    inputs, targets = points()
    seen = [(inputs[at : at + 4], targets[at : at + 4]) for at in range(0, 40, 4)] + batches(epochs=1)

    def scheduled(model: nn.Module, step: int, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1]) * (1 - (step - 1) / 15)

    by_hand = weights(loop(network(), scheduled, seen=seen))
    schedule = {1: 2}
    options: dict[str, Any] = {"lr_scheduler": "linear", "warmup": 0}
    assert_close(trained(AccumulationSchedule(schedule), per_device_train_batch_size=4, **options), by_hand)

    def two() -> Named:
        return trained(AccumulationSchedule(schedule), per_device_train_batch_size=2, **options)

    for actual in run_world(two, (), 2, timeout=60):
        assert_close(actual, by_hand)


@pytest.mark.parametrize(("steps", "batch", "behind"), [({0: 4, 1: 1}, 8, 4), ({0: 4, 1: 1}, 2, 16), ({1: 2}, 8, 6)])
def test_a_schedule_after_a_resume_with_another_batch_size(
    tmp_path: Path, steps: dict[int, int], batch: int, behind: int
) -> None:
    """The rest of the run has the learning rates of a whole run with that batch size."""

    def rates(size: int, folder: Path | None, stops_at: int | None = None) -> list[float]:
        class Stops(Callback):
            def on_step_end(self, run: Run) -> None:
                run.control.stop = run.state.step == stops_at

        result = trainer(
            arguments(
                per_device_train_batch_size=size,
                num_train_epochs=4,
                lr_scheduler="linear",
                log_every=1,
                output_dir=folder,
                save_every="never" if folder is None else 1,
            ),
            train_dataset=points(48),
            callbacks=[AccumulationSchedule(steps), Stops()],
        ).fit("extend" if folder and not stops_at else "never")
        return [entry["learning_rate"] for entry in result.history if "learning_rate" in entry]

    before = rates(4, tmp_path, stops_at=3 + 5 if 0 in steps else 12 + 1)
    resumed = rates(batch, tmp_path)
    assert resumed[: len(before)] == before
    assert resumed[len(before) :] == pytest.approx(rates(batch, None)[behind:])


def test_the_best_weights_after_updates_of_more_batches(tmp_path: Path) -> None:
    evaluated: dict[int, Named] = {}

    class Keeps(Callback):
        def on_evaluate_begin(self, run: Run) -> None:
            evaluated[run.state.step] = weights(run.modules[""])

    actual = trained(
        AccumulationSchedule({1: 2}),
        Keeps(),
        eval_dataset=points(8),
        eval_every="1 epoch",
        output_dir=tmp_path,
        load_best_at_end=True,
        metric_for_best="loss",
        greater_is_better=True,
    )
    assert list(evaluated) == [5, 8]
    assert_equal(actual, evaluated[5])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("accumulation", "unfreeze", "sam", "noise") else pytest.mark.slow)
        for name in RESUMED
    ],
)
def test_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    make, options = RESUMED[name]
    whole, parts = resumed(make, tmp_path, **options)
    assert_equal(parts, whole)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["sam"], id="sam", marks=pytest.mark.slow),
        pytest.param(["unfreeze", "either", "noise"], id="others", marks=pytest.mark.slow),
    ],
)
def test_resumed_to_the_bit_on_two_processes(names: list[str], tmp_path: Path) -> None:
    def two() -> list[Any]:
        options: dict[str, Any] = {"per_device_train_batch_size": 4}
        chosen = {name: RESUMED[name] for name in names}
        return [resumed(make, tmp_path / name, **options, **more) for name, (make, more) in chosen.items()]

    for everything in run_world(two, (), 2, timeout=120):
        for whole, parts in everything:
            assert_equal(parts, whole)


@pytest.mark.parametrize(
    ("make", "frozen"),
    [
        (lambda: Freeze("0.*", until="5 steps"), [1, 2, 3, 4, 5, 4, 5]),
        (lambda: Freeze("0.*", after="4 steps"), [5, 6, 5, 7, 8]),
        (lambda: GradualUnfreezing("3.*", "0.*", every="5 steps"), [1, 2, 3, 4, 5, 4, 5]),
    ],
)
def test_a_rewound_run_freezes_at_the_same_steps_again(
    make: Callable[[], Callback], frozen: list[int], tmp_path: Path
) -> None:
    """Step 6 is NaN, and goes back to step 3."""
    model, seen = network(), list[int]()

    class Spoils(Modifier):
        def on_step_begin(self, run: Run) -> None:
            if not next(model.parameters()).requires_grad:
                seen.append(run.state.step + 1)

        def on_loss(self, run: Run) -> None:
            if run.state.samples == 40:
                assert run.loss_sum is not None
                run.loss_sum = run.loss_sum * math.nan

    options: dict[str, Any] = {"max_steps": 8, "save_every": 3, "on_nonfinite": "rewind", "output_dir": tmp_path}
    trained(make(), Spoils(), model=model, train_dataset=points(80), **{**options, "num_train_epochs": None})
    assert seen == frozen


def test_unfrozen_weights_start_with_fresh_optimizer_state() -> None:
    states: dict[int, bool] = {}

    class Looks(Modifier):
        order = 1

        def on_step_end(self, run: Run) -> None:
            weight = next(run.trainer.unwrapped_model.parameters())
            states[run.state.step] = bool(run.optimizer.state.get(weight))

    model = network()
    trained(Freeze("0.*", after="3 steps", until="7 steps"), Looks(), model=model, optimizer="adamw")
    assert [step for step, has_state in states.items() if has_state] == [1, 2, 8, 9, 10]
    assert all(weight.requires_grad for weight in model.parameters())


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: AccumulationSchedule({0: 0}), r"AccumulationSchedule.* is not valid\. Map epochs"),
    (lambda: AccumulationSchedule([1, 2]), r"AccumulationSchedule.* is not valid\. Map epochs"),  # type: ignore[arg-type]
    (lambda: AccumulationSchedule({}), r"AccumulationSchedule.* is not valid\. Map epochs"),
    (
        lambda: trained(AccumulationSchedule({1: 2}), global_batch_size=8),
        "global_batch_size=8 and AccumulationSchedule both set the size",
    ),
    (lambda: trained(Freeze("0.weigth", until=3)), "matches none .* Names like it: 0.weight"),
    (lambda: trained(Freeze("*", until=3)), "freezes all trained weights"),
    (lambda: trained(Freeze("0.*", until=3), Freeze("0.weight", until=5)), "Two callbacks freeze the same"),
    (lambda: trained(after(2, Freeze("0.*", until=3)), Freeze("0.weight", until=5)), "Two callbacks freeze the same w"),
    (lambda: trained(GradualUnfreezing("3.*", "0.*", "0.weight")), "in an earlier stage"),
    (lambda: trained(GradualUnfreezing("head.*", "0.*")), "matches none"),
    (lambda: GradualUnfreezing("0.*"), r"at least two stages \(got 1\)"),
    (lambda: Freeze("0.*"), "needs until=… or after=…"),
    (lambda: Freeze(until=3), r"needs names of weights or patterns .*\(got \(\)\)"),
    (lambda: Freeze("0.*", until="1 hour"), r"must not be an amount of time.*\(got '1 hour'\)"),
    (
        lambda: trainer(callbacks=[Mixup(num_classes=3)]).fit(),
        r"targets of \(8, 3\) and outputs of \(8, 2\)\. Give the model one output per class \(3\)",
    ),
    (
        lambda: trainer(callbacks=[Mixup(num_classes=2)], train_metrics=["accuracy"]).fit(),
        r"The labels are probabilities of classes, as Mixup .* train_metrics=",
    ),
    (lambda: trainer(callbacks=[Mixup(num_classes=2), CutMix(num_classes=2)]), "only one can mix the samples"),
    (lambda: Mixup(0.0), "above 0"),
    (lambda: Mixup(num_classes=1), r"at least 2 \(got 1\)"),
    (lambda: MixupOrCutMix(Mixup(), CutMix(), 1.0), "between 0 and 1"),
    (lambda: trained(Mixup()), "Give num_classes"),
    (
        lambda: trained(Mixup(num_classes=2), train_dataset=(points()[0], points()[1] + 1)),
        r"class indices from 0 to 1 \(got 1 to 2\)",
    ),
    (lambda: trained(CutMix(num_classes=2)), "images"),
    (
        lambda: trained(Mixup(num_classes=2), model=Words(), train_dataset=sentences(), loss_fn=None),
        "the model's own loss does not take",
    ),
    (lambda: LabelSmoothing(1.0), "between 0 and 1"),
    (lambda: trained(LabelSmoothing(0.1), loss_fn=mse_loss), r"needs loss_fn=cross_entropy \(got mse_loss\)"),
    (
        lambda: trained(LabelSmoothing(0.1), loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1)),
        r"does not support a loss_fn with label_smoothing=…\. Give",
    ),
    (lambda: NEFTune(0.0), "above 0"),
    (lambda: trained(NEFTune()), "no get_input_embeddings.* and 0 embeddings"),
    (lambda: trained(NEFTune(embedding="3x")), r"must name a module of Sequential \(got '3x'\)"),
    (lambda: SAM(-1.0), "above 0"),
    (lambda: trained(SAM(), per_device_train_batch_size="auto"), "does not support split batches"),
    (lambda: ClipValue(0.0), "above 0"),
    (lambda: trained(AdaptiveClipping(exclude=("head.*",))), "matches none"),
    (lambda: SequenceLengthWarmup(8, 8, until=3), r"start < full \(got start=8, full=8\)"),
    (lambda: SequenceLengthWarmup(0, 8, until=3), r"SequenceLengthWarmup\(start\) must be .* at least 1 \(got 0\)"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda case: REFUSED[case][1])
def test_invalid_options_are_refused(case: int) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: ClipValue(0.1), lambda: AdaptiveClipping(0.1)])
def test_gradients_of_a_training_step_that_steps_cannot_be_clipped(make: Callable[[], Callback]) -> None:
    class Steps(Trainer):
        def training_step(self, model: Any, batch: Any) -> None:
            self.backward(cross_entropy(model(batch[0]), batch[1]))
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()

    made = Steps(network(), arguments(), train_dataset=points(), loss_fn=cross_entropy, callbacks=[make()])
    with pytest.raises(ConfigurationError, match=r"your training_step steps them itself\. Leave .* out, and clip in"):
        made.fit()


def test_replicas_that_wait_for_all_gradients_freeze_nothing() -> None:
    def two() -> str:
        with pytest.raises(ConfigurationError, match="find_unused_parameters=True") as caught:
            trained(Freeze("0.*", until=3), per_device_train_batch_size=4, ddp=DistributedDataParallelKwargs())
        return str(caught.value)

    assert all("wait for the gradients of frozen weights" in message for message in run_world(two, (), 2, timeout=60))


def test_only_trainers_whose_callbacks_freeze_weights_let_ddp_search_for_unused_parameters() -> None:
    def two() -> list[bool]:
        accelerator, searches = Accelerator(cpu=True), []
        for callbacks in ([Freeze("0.*", until=3)], []):
            trainer = Trainer(
                network(), arguments(), train_dataset=points(), loss_fn=cross_entropy, callbacks=callbacks,
                accelerator=accelerator,
            )  # fmt: skip
            trainer.fit()
            replica: Any = trainer.run.model
            searches.append(replica.find_unused_parameters)
            accelerator.free_memory()
        return searches

    assert run_world(two, (), 2, timeout=60) == [[True, False]] * 2
