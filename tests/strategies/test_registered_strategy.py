"""A strategy of another package, registered under its options: one that averages parameters instead of gradients."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.callbacks.by_hand import weights
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, DistributedDataParallelKwargs
from trainer_lib.options.base import KwargsHandler
from trainer_lib.strategies import Strategy, register_strategy, registry
from trainer_lib.strategies.base import JoinOutcome, Leftovers


@dataclass
class AveragingKwargs(KwargsHandler):
    """The options of the strategy, which has none."""


class ParameterAveraging(Strategy):
    """Each rank steps by its own gradients; the parameters are averaged after each step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._optimizers: list[Optimizer] = []

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        for parameter in model.parameters():
            self.group.broadcast(parameter.data)
        return model

    def rebind_parameters(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            optimizer.register_step_post_hook(self._average)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def send_with_gradients(self, values: Sequence[float | Tensor]) -> None:
        mean = self._mean(torch.tensor([float(value) for value in values], dtype=torch.float64))
        self._averages = mean.tolist()

    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], Leftovers] | None
    ) -> AbstractContextManager[JoinOutcome]:
        return nullcontext(JoinOutcome())

    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def average_weights(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self._mean(parameter.data)

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float, *, in_double: bool = False) -> Tensor:
        return self._mean(super().grad_norm(parameters, norm_type, in_double=in_double))

    def _mean(self, tensor: Tensor) -> Tensor:
        return self.group.all_reduce(tensor).div_(self.group.size)

    def _average(self, optimizer: Optimizer, *arguments: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._mean(parameter.data)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {AveragingKwargs: ParameterAveraging})


def trained(averages: bool, accumulation: int, spoiled: tuple[int, ...] = ()) -> tuple[str, dict[str, Tensor], int]:
    """Return the strategy of a fit with plain SGD, its weights, and the skipped steps."""
    register_strategy(AveragingKwargs)(ParameterAveraging)
    engine = Accelerator(cpu=True, kwargs_handlers=[AveragingKwargs()] if averages else None)
    inputs, labels = points()
    inputs[list(spoiled)] = torch.nan
    options: dict[str, Any] = {"optimizer": "sgd", "max_grad_norm": None, "on_nonfinite": "skip", "shuffle": False}
    args = arguments(max_steps=3, gradient_accumulation_steps=accumulation, per_device_train_batch_size=4, **options)
    fitted = trainer(args, train_dataset=(inputs, labels), accelerator=engine)
    result = fitted.fit()
    return type(engine.strategy).__name__, weights(fitted.unwrapped_model), result.state.skipped


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_fit_trains_by_a_registered_strategy(accumulation: int) -> None:
    """The mean of parameters after a step of SGD is a step by the mean gradient, which DDP makes."""
    by_gradients = run_world(lambda: trained(False, accumulation), (), 2, timeout=60)
    by_parameters = run_world(lambda: trained(True, accumulation), (), 2, timeout=60)
    assert [name for name, *_ in by_gradients] == ["DDP"] * 2
    assert [name for name, *_ in by_parameters] == ["ParameterAveraging"] * 2
    _, expected, _ = by_gradients[0]
    for _, found, _ in by_parameters:
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


def test_all_ranks_skip_an_update_that_is_not_finite_on_one() -> None:
    """Sample 0 is in the first batch of rank 0."""
    skipped = [count for *_, count in run_world(lambda: trained(True, 1, (0,)), (), 2, timeout=60)]
    assert skipped == [1, 1]


def test_a_registered_strategy_trains_one_process_too(registered: None) -> None:
    name, found, _ = trained(True, 1)
    _, expected, _ = trained(False, 1)
    assert name == "ParameterAveraging"
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_options_of_two_strategies_are_refused(registered: None) -> None:
    with pytest.raises(ConfigurationError, match="AveragingKwargs selects the strategy ParameterAveraging, and Dist"):
        Accelerator(cpu=True, kwargs_handlers=[AveragingKwargs(), DistributedDataParallelKwargs()])


@pytest.mark.parametrize(
    ("options", "strategy", "message"),
    [(dict, ParameterAveraging, "a subclass of KwargsHandler"), (AveragingKwargs, dict, "a subclass of Strategy")],
)
def test_only_strategies_and_options_are_registered(options: Any, strategy: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        register_strategy(options)(strategy)
