"""This file is the average of weights over the last part of a run (stochastic weight averaging)."""

import math
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer_lib.callbacks.weight_averaging import WeightAverage, interval
from trainer_lib.events import Run
from trainer_lib.events.gates import AfterAmount
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError


class SWA(WeightAverage):
    """Averages the weights that a run goes through in its last part, all alike.

    Evaluations, predictions and `save_model` use the average from its first weights on, and at the end the model has
    it. Running statistics (BatchNorm) are not those of the average: at the end they are made anew from the training
    data, and a model that has some is evaluated with its own weights until then.

    Args:
        start: When to begin: a share of the run such as 0.75, or an amount such as "10 epochs".
        every: How often to take the weights, such as "1 epoch"; not an amount of time.

    Example:
        >>> swa = SWA(start="10 epochs", every="1 epoch")
    """

    def __init__(self, start: Any = 0.75, every: Any = "1 epoch") -> None:
        self._share = start if isinstance(start, float) else None
        if self._share is not None and not 0 <= self._share < 1:
            raise ConfigurationError(
                f'SWA(start={start!r}): give a share of the run from 0 up to 1, or an amount such as "10 epochs".'
            )
        self._begins = None if self._share is not None else interval(start, "SWA(start)", AfterAmount)
        super().__init__(interval(every, "SWA(every)"))

    def on_fit_begin(self, run: Run) -> None:
        super().on_fit_begin(run)
        if self._share is not None:
            if run.state.max_steps is None:
                raise ConfigurationError(
                    f"SWA(start={self._share}) is a share of the run, and how long it is cannot be known. Give an "
                    'amount such as start="1000 steps".'
                )
            self._begins = AfterAmount(max(1, math.ceil(self._share * run.state.max_steps)), "SWA(start)")
        if _normalizing(run) and run.accelerator is not None and run.accelerator.strategy.needs_lockstep:
            raise UnsupportedError(
                "SWA makes the running statistics of a BatchNorm anew, and the processes of a sharded model would "
                "have to do so together. Take a model without BatchNorm, or leave the sharding out."
            )
        self._begin(run)

    def on_load_end(self, run: Run, folder: Path) -> None:
        super().on_load_end(run, folder)
        self._begin(run)

    def is_due(self, run: Run) -> bool:
        has_begun = self._begins is not None and self._begins.opens_at_end(run.state)
        return super().is_due(run) and has_begun

    def mix(self, averages: list[Any], weights: list[Any]) -> None:
        torch._foreach_lerp_(averages, weights, 1 / (self.updates + 1))

    def may_use(self, run: Run) -> bool:
        return not _normalizing(run)

    def on_fit_end(self, run: Run) -> None:
        is_used = run.state.has_ended and self.updates > 0
        super().on_fit_end(run)
        layers = _normalizing(run)
        if is_used and layers:
            with torch.no_grad():
                _make_anew(run, layers)

    def _begin(self, run: Run) -> None:
        if self._begins is not None:
            self._begins.begin(run.state)


def _normalizing(run: Run) -> list[_BatchNorm]:
    """Return the layers with running statistics."""
    modules = (module for model in run.modules.values() for module in model.modules())
    return [one for one in modules if isinstance(one, _BatchNorm) and one.running_mean is not None]


def _make_anew(run: Run, layers: list[_BatchNorm]) -> None:
    """Have running statistics be the mean over the batches of the training data."""
    trainer, models = run.trainer, list(run.modules.values())
    modes = [(module, module.training) for model in models for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean of all batches alike
    for model in models:
        model.train()
    used: Any = run.modules if len(models) > 1 else models[0]
    loader, batches = trainer._prepared_for_evaluation(trainer.train_dataloader()), 0
    loader.even_batches = False  # repeated samples have no part in it
    for batch in loader:
        trainer.compute_loss(used, batch)
        batches += 1
    every = sum(run.accelerator.group.all_gather_objects(batches))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        for statistic in (layer.running_mean, layer.running_var):
            assert statistic is not None
            # A rank of fewer batches has less to say, and one without any nothing.
            statistic.copy_(run.accelerator.reduce(statistic * (batches / every), "sum"))  # type: ignore[arg-type]
    for module, was_training in modes:
        module.training = was_training
