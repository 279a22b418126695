"""Sharpness-aware minimization (SAM and ASAM)."""

import math
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.tensors.kept_state import attributes_kept, tensors_kept
from trainer_lib.modules.module_buffers import buffers_kept, no_gradients_of

_OF_A_BATCH = ("batch", "loss_sum", "weight", "outputs")


class SAM(Modifier):
    """Updates the weights with the gradients at a point `radius` uphill (sharpness-aware minimization).

    Each update computes the forward and backward twice. The uphill step uses the gradients of the whole update, over
    all batches and ranks. Buffers (running statistics) and logged values see the data once, at the original weights.

    Args:
        radius: The length of the uphill step; usually 0.05.
        adaptive: Whether to scale each weight's step by its magnitude (ASAM); `radius` is then larger, about 1.

    Example:
        >>> sam = SAM(0.05)
    """

    adaptive: bool
    radius: float

    order = -50  # before gradients are clipped
    reads_outputs: ClassVar[bool] = False
    supports_batch_splitting: ClassVar[bool] = False  # it computes each batch twice

    def __init__(self, radius: float = 0.05, adaptive: bool = False) -> None:
        if isinstance(radius, bool) or not isinstance(radius, (int, float)) or not 0 < radius < math.inf:
            raise ConfigurationError(f"SAM(radius) must be a number above 0, such as 0.05 (got {radius!r}).")
        self.radius, self.adaptive = radius, adaptive
        self._batches: list[tuple[Any, float]] = []  # of this update; weight 0.0 for filler batches

    def on_fit_begin(self, run: Run) -> None:
        trainer = run.trainer
        if trainer.parts.loss.has_own_step or len(run.optimizers) > 1:
            raise ConfigurationError(
                "SAM calls compute_loss twice per batch and supports one optimizer. With your own training_step or "
                "several optimizers, implement SAM in training_step."
            )
        if run.args.per_device_train_batch_size == "auto":
            raise ConfigurationError(
                'SAM does not support split batches (per_device_train_batch_size="auto"). Give a number.'
            )
        if run.accelerator.mixed_precision == "fp16":
            raise UnsupportedError(
                'SAM does not support mixed_precision="fp16": gradients would be scaled twice. Use "bf16".'
            )

    def on_step_begin(self, run: Run) -> None:
        del run
        self._batches = []

    def on_micro_batch_begin(self, run: Run) -> None:
        # Filler batches of a rank without data count too: the other ranks wait for this one.
        self._batches.append((run.batch, 0.0))

    def on_micro_batch_end(self, run: Run) -> None:
        self._batches[-1] = (run.batch, 1.0)  # as the other callbacks left it

    def on_backward_end(self, run: Run) -> None:
        run.accelerator.unscale_gradients()
        weights = [parameter for parameter in run.trained_parameters if parameter.grad is not None]
        share = run.accelerator.window.share_of((run.optimizer,))
        if share is None or not weights:
            return
        total = share.local if share.total is None else share.total
        batches, self._batches = self._batches, []
        means = run.trainer.parts.means
        mark = means.mark()
        with tensors_kept(weights), buffers_kept(run.modules.values()), attributes_kept([run], _OF_A_BATCH):
            self._climb(run, weights)
            for weight in weights:
                weight.grad = None
            self._differentiate(run, batches, total)
        means.go_back(mark)

    @torch.no_grad()
    def _climb(self, run: Run, weights: list[Any]) -> None:
        if self.adaptive:
            for weight in weights:
                weight.grad.mul_(weight.abs())
        norm = run.accelerator.strategy.grad_norm(weights, 2.0)
        for weight in weights:
            step = weight.grad * (self.radius / (norm + 1e-12)).to(weight.grad.dtype)
            weight.add_(step * weight.abs() if self.adaptive else step)

    def _differentiate(self, run: Run, batches: list[tuple[Any, float]], total: float | Tensor) -> None:
        """Compute the gradients of the whole update again; the ranks reduce them with the last batch."""
        models = [run.model] if isinstance(run.model, nn.Module) else list(run.model.values())
        divisor = torch.where(total == 0, 1, total) if isinstance(total, Tensor) else total or 1.0
        # With cp_size or sp_size a rank computes its part of each sequence.
        parts, around = run.trainer.parts.batches.of_window(run.model, [batch for batch, _ in batches])
        for number, (batch, weight) in enumerate(batches):
            with around(number), ExitStack() as local:
                if number < len(batches) - 1:
                    for model in models:
                        local.enter_context(run.accelerator.strategy.no_sync(model))
                if not weight:  # it may be NaN, and 0 times NaN is NaN
                    local.enter_context(no_gradients_of(run.trained_parameters))
                run.batch = batch
                result = run.trainer.parts.loss.of(run.model, parts[number])
                (result.loss * weight / divisor).backward()
