"""This file is local SGD: each process trains a model of its own, and now and then the models are averaged."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from trainer_lib.accelerator import Accelerator
from trainer_lib.foundation.errors import ConfigurationError, PreparationError
from trainer_lib.options.base import check_count, check_flag


class LocalSGD:
    """A block in which gradients stay on their process, and weights are averaged every few updates and at the end.

    Averaged is what is trained, and the running statistics of normalization (floating-point buffers) unless
    `DistributedDataParallelKwargs(broadcast_buffers=False)` leaves them alone; counts and the optimizer's state stay
    each process's own. All processes have to make the same number of updates. A weighted loss (`backward(loss,
    weight=)`) is a mean over the items of its process. With one process the loop runs as it would without.

    Args:
        accelerator: The engine.
        model: The prepared model.
        local_sgd_steps: After how many updates to average.
        enabled: Whether to do any of it.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = nn.Linear(4, 2)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     for batch in torch.ones(16, 3, 4):
        ...         with accelerator.accumulate(model):
        ...             accelerator.backward(model(batch).square().mean())
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...             local_sgd.step()
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if not isinstance(accelerator, Accelerator):
            raise ConfigurationError(f"accelerator must be an Accelerator, got {type(accelerator).__name__}.")
        check_count("local_sgd_steps", local_sgd_steps)
        check_flag("enabled", enabled)
        if not any(model is prepared for prepared in accelerator._models):
            raise PreparationError(
                f"LocalSGD got a {type(model).__name__} that is not prepared. Give what prepare() returned."
            )
        self.accelerator, self.model = accelerator, model
        self.local_sgd_steps, self.enabled = local_sgd_steps, enabled
        self.num_steps = 0
        if enabled:
            accelerator.strategy.stay_local(model)  # which says if it cannot

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            window = self.accelerator._window
            self._local: AbstractContextManager[Any] = self.accelerator.strategy.stay_local(self.model)
            self._local.__enter__()
            self._was_alone, window.is_alone = window.is_alone, True
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self.enabled:
            self.accelerator._window.is_alone = self._was_alone
            self._local.__exit__(kind, error, traceback)
            # After an error others may never come, and what is averaged already would only be rounded again.
            if kind is None and self.num_steps % self.local_sgd_steps:
                self.accelerator.strategy.average_weights(self.model)

    def step(self) -> None:
        """Count an update, and average if it is time; call it after each micro-batch or each update."""
        if self.accelerator.sync_gradients:
            self.num_steps += 1
            if self.enabled and self.num_steps % self.local_sgd_steps == 0:
                self.accelerator.strategy.average_weights(self.model)
