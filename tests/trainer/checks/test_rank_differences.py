"""Models, callbacks, losses, optimizers and schedules that differ between ranks: an error that names the ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import DistributedOperationException, PartialState
from trainer_lib.callbacks import EMA, SAM, Checkpoint, ClipValue, EarlyStopping
from trainer_lib.events import Callback, Modifier


class Named(nn.Module):
    """Layers of equal sizes, in the order of their names."""

    def __init__(self, names: str, frozen: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})
        self.last = nn.Linear(6, 2)
        for name in frozen:
            self.layers[name].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers["a"](x) + self.layers["b"](x))


def with_buffer(size: int | None) -> nn.Module:
    model = network()
    if size is not None:
        model.register_buffer("statistics", torch.zeros(size))
    return model


def in_half(is_half: bool) -> nn.Module:
    model = network()
    if is_half:
        model.get_submodule("3").to(torch.bfloat16)
    return model


def optimized(rate: float, count: int = 4) -> dict[str, Any]:
    model = network()
    return {"model": model, "optimizer": torch.optim.SGD(list(model.parameters())[:count], lr=rate)}


def stepwise(size: int) -> dict[str, Any]:
    return {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, size)}  # type: ignore[reportUnknownLambdaType]


def fails(rank: int, options: Callable[[int], dict[str, Any]], *texts: str) -> None:
    with pytest.raises(DistributedOperationException) as raised:
        trainer(arguments(num_train_epochs=1), **options(rank)).fit()
    for text in texts:
        assert text in str(raised.value)


CASES: dict[str, tuple[Callable[[int], dict[str, Any]], str, str]] = {
    "layers in another order": (
        lambda rank: {"model": Named("ba" if rank else "ab")},
        "Rank 1 has another model than rank 0: number 1 of its weights and buffers is layers.b.weight (float32 of "
        "shape (6, 6)), and on rank 0 layers.a.weight",
        "(the order of a set differs between processes)",
    ),
    "other weights frozen, as many": (
        lambda rank: {"model": Named("ab", frozen="ab"[rank])},
        "is layers.a.weight (float32 of shape (6, 6)), and on rank 0 layers.a.weight (float32 of shape (6, 6), frozen)",
        "Rank 1",
    ),
    "another type": (lambda rank: {"model": in_half(rank == 1)}, "is 3.weight (bfloat16 of shape (2, 8))", "Rank 1"),
    "a buffer": (
        lambda rank: {"model": with_buffer(3 if rank else None)},
        "statistics (float32 of shape (3,), a buffer), and on rank 0 nothing",
        "number 5",
    ),
    "a larger buffer": (lambda rank: {"model": with_buffer(3 + rank)}, "(float32 of shape (4,), a buffer)", "Rank 1"),
    "a modifier": (
        lambda rank: {"callbacks": [SAM(0.05)] if rank else []},
        "the callbacks that all ranks need: [] on rank 0, ['SAM(radius=0.05, adaptive=False)'] on rank 1",
        "Set the same on all ranks",
    ),
    "the value of a modifier": (
        lambda rank: {"callbacks": [ClipValue(0.5 + rank)]},
        "['ClipValue(value=0.5)'] on rank 0, ['ClipValue(value=1.5)'] on rank 1",
        "the callbacks that all ranks need",
    ),
    "the loss function": (
        lambda rank: {"loss_fn": F.multi_margin_loss if rank else F.cross_entropy},
        "the loss function: cross_entropy on rank 0, multi_margin_loss on rank 1",
        "or train different weights",
    ),
    "an evaluation set, on rank 1 alone": (
        lambda rank: {"eval_dataset": points(8) if rank else None},
        "the sets to evaluate on: None on rank 0, ['eval: 8'] on rank 1",
        "Set the same on all ranks",
    ),
    "a metric of the same name": (
        lambda rank: {"eval_dataset": points(8), "metrics": {"good": "f1" if rank else "accuracy"}},
        "the kinds of metrics: ['good: MeanMetric'] on rank 0, ['good: CountedMetric'] on rank 1",
        "Set the same on all ranks",
    ),
    "compute_metrics": (
        lambda rank: {"eval_dataset": points(8), "compute_metrics": (lambda prediction: {"a": 1.0}) if rank else None},
        "sets with compute_metrics: [] on rank 0, ['eval'] on rank 1",
        "Set the same on all ranks",
    ),
    "the rate of an optimizer": (
        lambda rank: optimized(0.1 * (1 + rank)),
        "the optimizers: ['default: SGD of 4 parameters with lr=0.1,",
        "['default: SGD of 4 parameters with lr=0.2,",
    ),
    "the weights of an optimizer": (
        lambda rank: optimized(0.1, 4 - 2 * rank),
        "SGD of 2 parameters with lr=0.1",
        "SGD of 4 parameters with lr=0.1",
    ),
    "a schedule": (
        lambda rank: stepwise(1 + rank),
        "the schedules: ['default: StepLR with step_size=1",
        "StepLR with step_size=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named_at_the_start(case: str) -> None:
    """Most of these trained different weights on the ranks silently; the others hung."""

    def body() -> None:
        fails(PartialState(cpu=True).process_index, *CASES[case])

    run_world(body, (), 2, timeout=30)


def test_a_checkpoint_callback_is_compared_with_its_interval(tmp_path: Any) -> None:
    def body() -> None:
        rank = PartialState(cpu=True).process_index
        saves = Checkpoint(every="2 steps") if rank else Checkpoint()
        with pytest.raises(DistributedOperationException, match="every=Every"):
            trainer(arguments(output_dir=tmp_path), callbacks=[saves]).fit()

    run_world(body, (), 2, timeout=30)


def test_observers_and_modifiers_of_one_rank_are_allowed() -> None:
    """One that only observes may be on one rank, and a modifier whose class says so."""

    class Watches(Modifier):
        runs_on_all_ranks = False

    def body() -> list[Tensor]:
        rank = PartialState(cpu=True).process_index
        alone: list[Callback] = [Watches(), EarlyStopping("eval_loss")] if rank else []
        both = trainer(arguments(num_train_epochs=1), eval_dataset=points(8), callbacks=[EMA(0.9), *alone])
        both.fit()
        return [weight.detach() for weight in both.unwrapped_model.parameters()]

    first, second = run_world(body, (), 2, timeout=30)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
