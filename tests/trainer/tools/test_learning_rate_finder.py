"""The search for a learning rate: the losses of a loop written by hand, and what is made of them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, MissingPackageError, NonFiniteError, ParameterGroup, Trainer
from trainer_lib.events import Callback, Run
from trainer_lib.trainer.tools.learning_rate_finder import LearningRateSweep


def by_hand(rates: list[float], size: int, of_head: float = 1.0) -> list[float]:
    """Return the losses of updates at these rates, on the points in their order; the last layer has a share of them."""
    model, (inputs, sides) = network(), points()
    head = model[3].parameters()  # type: ignore[index]
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": head}], lr=0.0, momentum=0.5)  # type: ignore[index]
    batches = list(zip(inputs.split(size), sides.split(size), strict=True))
    losses: list[float] = []
    for place, rate in enumerate(rates):
        x, y = batches[place % len(batches)]
        for group, share in zip(optimizer.param_groups, (1.0, of_head), strict=True):
            group["lr"] = rate * share
        loss = cross_entropy(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def swept(**options: Any) -> LearningRateSweep:
    sizes = {name: options.pop(name) for name in ("lowest", "highest", "updates") if name in options}
    args: dict[str, Any] = {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.5}, "shuffle": False}
    args |= {"warmup": 0.1, "lr_scheduler": "cosine", "learning_rate": 0.02}
    settings: dict[str, Any] = {"lowest": 1e-3, "highest": 10.0, **sizes}
    return trainer(arguments(**{**args, **options})).find_learning_rate(**settings)


def test_losses_are_those_of_a_loop_by_hand() -> None:
    sweep = swept(updates=40)
    assert sweep.rates == pytest.approx(np.geomspace(1e-3, 10.0, 40)[: len(sweep.rates)].tolist(), rel=1e-12)
    assert sweep.losses == pytest.approx(by_hand(sweep.rates, 8), rel=1e-6)
    assert len(sweep.losses) > 20


def test_a_run_with_a_plateau_can_be_swept() -> None:
    def losses(**options: Any) -> list[float]:
        return trainer(arguments(**options), eval_dataset=points()).find_learning_rate(updates=10).losses

    plateau = {"lr_scheduler": "plateau", "lr_scheduler_kwargs": {"patience": 0}, "eval_every": "1 epoch"}
    assert losses(**plateau) == losses()


def test_groups_with_rates_of_their_own_keep_their_ratio() -> None:
    groups = [ParameterGroup("3.*", learning_rate=0.005)]
    sweep = swept(updates=15, highest=1.0, parameter_groups=groups)
    assert sweep.losses == pytest.approx(by_hand(sweep.rates, 8, of_head=0.25), rel=1e-6)
    assert sweep.losses != pytest.approx(by_hand(sweep.rates, 8), rel=1e-6)


def test_two_processes_see_the_losses_of_one() -> None:
    def sweep() -> Any:
        result = swept(updates=40, per_device_train_batch_size=4, highest=1e4)
        return result.rates, result.losses, result.has_diverged, result.suggestion

    first, second = run_world(sweep, (), 2, timeout=60)
    assert first == second
    rates, losses, has_diverged, _ = first
    assert has_diverged
    assert 10 < len(rates) < 40
    assert losses == pytest.approx(by_hand(rates, 8), rel=1e-5)
    lost = [sum(losses[end - 3 : end]) > 4 * sum(losses[:3]) for end in range(4, len(losses) + 1)]
    assert lost.index(True) == len(lost) - 1  # at the update that shows it, not one later


class Steep(Trainer):
    """A loss that is lost at once when the rate is too high."""

    def compute_loss(self, model: Any, batch: Any) -> Tensor:
        return model(batch[0]).square().mean().exp()


def test_the_sweep_ends_where_the_loss_is_no_number() -> None:
    args = arguments(optimizer="sgd", max_grad_norm=None, shuffle=False)
    sweep = Steep(network(), args, train_dataset=points()).find_learning_rate(1e-4, 1e6, updates=60)
    assert sweep.has_diverged
    assert all(map(math.isfinite, sweep.losses))
    assert 5 < len(sweep.losses) == len(sweep.rates) < 60
    assert sweep.suggestion is not None
    assert sweep.suggestion < sweep.rates[-1]

    class Lost(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> Tensor:
            return model(batch[0]).mean() * math.nan

    with pytest.raises(NonFiniteError, match="In step 1 the loss is nan"):
        Lost(network(), args, train_dataset=points()).find_learning_rate()


def test_the_suggestion_is_where_the_smoothed_loss_falls_steepest() -> None:
    rates = np.geomspace(1e-6, 1.0, 61).tolist()
    losses = [2 - 1.5 / (1 + math.exp(-3 * (math.log10(rate) + 3))) for rate in rates]  # falls steepest at 1e-3
    sweep = LearningRateSweep(rates=rates, losses=losses)
    assert sweep.suggestion == pytest.approx(1e-3, rel=1e-9)
    assert sweep.smoothed[30] == pytest.approx(sum(losses[27:34]) / 7)
    assert sweep.smoothed[0] == pytest.approx(sum(losses[:4]) / 4)
    # What falls after the lowest point is no descent.
    lost = LearningRateSweep(rates=rates, losses=[*losses[:50], *[9.0] * 5, *[0.6] * 6])
    assert lost.suggestion == pytest.approx(1e-3, rel=1e-9)
    assert "learning rate 0.001" in str(lost)
    rising = LearningRateSweep(rates=rates, losses=sorted(losses), has_diverged=True)
    assert rising.suggestion is None
    assert str(rising).startswith("no learning rate to suggest")


def test_a_plot_shows_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    rates, losses = [10.0**power for power in range(-9, 0)], [2.0, 2.0, 1.9, 1.7, 1.4, 1.1, 0.8, 0.7, 0.6]
    sweep = LearningRateSweep(rates=rates, losses=losses)
    axes = sweep.plot()
    assert axes.get_xscale() == "log"
    assert axes.lines[0].get_xydata().tolist() == list(map(list, zip(rates, losses, strict=True)))
    assert len(axes.lines) == 3
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"trainer_lib\[plot\]"):
        sweep.plot()


class Hidden(Trainer):
    """A step of its own, which tells no loss."""

    def training_step(self, model: Any, batch: Any) -> None:
        self.backward(cross_entropy(model(batch[0]), batch[1]))
        self.optimizers["default"].step()
        self.optimizers["default"].zero_grad()


class Watching(Callback):
    def on_step_end(self, run: Run) -> None:
        raise AssertionError("observers are not told")


def test_what_cannot_be_swept_is_refused() -> None:
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"lowest": 0.0}, "lowest must be a finite number above 0"),
        ({"highest": math.inf}, "highest must be a finite number above 0"),
        ({"lowest": 1.0, "highest": 0.1}, "lowest=1.0 must be below highest=0.1"),
        ({"updates": 9}, "updates must be a whole number of at least 10"),
    )
    for options, message in bad:
        with pytest.raises(ConfigurationError, match=message):
            trainer().find_learning_rate(**options)
    models = {"one": network(), "other": network()}
    two = Hidden(models, arguments(), train_dataset=points(), callbacks=[Watching()])
    with pytest.raises(ConfigurationError, match=r"needs a single optimizer, but there are one, other"):
        two.find_learning_rate()
    two.accelerator.free_memory()
    with pytest.raises(ConfigurationError, match=r"Hidden.training_step returns none"):
        Hidden(network(), arguments(), train_dataset=points()).find_learning_rate()
