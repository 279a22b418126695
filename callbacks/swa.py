"""Stochastic weight averaging (SWA)."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - the base of all of them

from trainer_lib.callbacks.weight_averaging import WeightAverage
from trainer_lib.events import Run
from trainer_lib.events.trigger import callback_trigger
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.tensors.kept_state import attributes_kept
from trainer_lib.foundation.tensors.tensor_operations import foreach_lerp_


class SWA(WeightAverage):
    """Averages the weights over the last part of a run, with equal weights.

    Evaluations, predictions and `save_model` use the average as soon as there is one, and at the end the model holds
    it. BatchNorm's running statistics do not fit the averaged weights, so they are recomputed from the training data at
    the end. Until then a model with BatchNorm is evaluated with its own weights.

    Args:
        start: When to begin: a share of the run such as 0.75, or an amount such as "10 epochs".
        every: How often to add the weights to the average, such as "1 epoch"; not an amount of time.

    Example:
        >>> swa = SWA(start="10 epochs", every="1 epoch")
    """

    def __init__(self, start: Any = 0.75, every: Any = "1 epoch") -> None:
        self._share = start if isinstance(start, float) else None
        if self._share is not None and not 0 <= self._share < 1:
            raise ConfigurationError(
                'SWA(start) must be a share of the run of at least 0 and below 1, or an amount such as "10 epochs" '
                f"(got {start!r})."
            )
        self._begins = (
            None if self._share is not None else callback_trigger(start, "SWA(start)", "after", may_be_time=False)
        )
        super().__init__(callback_trigger(every, "SWA(every)", may_be_time=False))

    def on_fit_begin(self, run: Run) -> None:
        super().on_fit_begin(run)
        if self._share is not None and run.state.max_steps is None:
            raise ConfigurationError(
                f"SWA(start={self._share}) is a share of the run, but the length of the run is unknown. Give an "
                'amount such as start="1000 steps".'
            )
        if _batch_norms(run) and run.accelerator is not None and run.accelerator.strategy.needs_lockstep:
            raise UnsupportedError(
                "SWA does not support sharded models with BatchNorm: it cannot recompute their running statistics. Use "
                "a "
                "model without BatchNorm, or do not shard it."
            )
        self._begin(run)

    def on_load_end(self, run: Run, folder: Path) -> None:
        super().on_load_end(run, folder)
        self._begin(run)

    def is_due(self, run: Run) -> bool:
        has_begun = self._has_reached_share(run) if self._begins is None else self._begins.is_due(run.state)
        return super().is_due(run) and has_begun

    def mix(self, averages: list[Any], weights: list[Any]) -> None:
        foreach_lerp_(averages, weights, 1 / (self.updates + 1))

    def may_use(self, run: Run) -> bool:
        return not _batch_norms(run)

    def on_fit_end(self, run: Run) -> None:
        is_used = run.state.has_ended and self.updates > 0
        super().on_fit_end(run)
        layers = _batch_norms(run)
        if is_used and layers:
            with torch.no_grad():
                _recompute_statistics(run, layers)

    def _has_reached_share(self, run: Run) -> bool:
        steps = run.state.max_steps  # fewer after an epoch that a callback ended early
        return steps is not None and run.state.step > max(1, math.ceil((self._share or 0.0) * steps))

    def _begin(self, run: Run) -> None:
        if self._begins is not None:
            self._begins.begin(run.state)


def _batch_norms(run: Run) -> list[_BatchNorm]:
    """Return the BatchNorm layers with running statistics."""
    modules = (module for model in run.modules.values() for module in model.modules())
    return [layer for layer in modules if isinstance(layer, _BatchNorm) and layer.running_mean is not None]


def _recompute_statistics(run: Run, layers: list[_BatchNorm]) -> None:
    """Recompute running statistics as the mean over all batches of the training data."""
    models = list(run.modules.values())
    modules = [module for model in models for module in model.modules()]
    with attributes_kept(modules, ["training"]), attributes_kept(layers, ["momentum"]):
        batches = _average_statistics(run, models, layers)
    total_batches = sum(run.accelerator.group.all_gather_objects(batches))
    for layer in layers:
        for statistic in (layer.running_mean, layer.running_var):
            assert statistic is not None
            # Each rank's statistics are weighted by its number of batches.
            statistic.copy_(run.accelerator.reduce(statistic * (batches / total_batches), "sum"))  # type: ignore[arg-type]


def _average_statistics(run: Run, models: list[nn.Module], layers: list[_BatchNorm]) -> int:
    """Set the running statistics to their means over the batches of this rank, and return how many these are."""
    trainer = run.trainer
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # None: the plain mean over all batches
    for model in models:
        model.train()
    model_or_models: Any = run.modules if len(models) > 1 else models[0]
    loader, batches = trainer.parts.evaluator.prepared(trainer.train_dataloader()), 0
    # No repeated samples, unless a layer, such as SyncBatchNorm (torch's or another), waits for all ranks.
    loader.even_batches = any("Sync" in type(layer).__name__ for layer in layers)
    statistics = [value for layer in layers for value in layer.buffers()]
    for batch in loader:
        before = [value.clone() for value in statistics]
        trainer.compute_loss(model_or_models, batch)
        if all(bool(value.isfinite().all()) for value in statistics):
            batches += 1
        else:  # NaN or Inf in this batch, whose updates were skipped too
            for value, kept in zip(statistics, before, strict=True):
                value.copy_(kept)
    return batches
