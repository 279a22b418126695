"""`LocalSGD`: each rank trains its own copy of the model, and the copies are averaged every few updates."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from trainer_lib.accelerator import Accelerator
from trainer_lib.foundation.errors import ConfigurationError, PreparationError
from trainer_lib.options.base import check_count, check_flag


class LocalSGD:
    """The context in which gradients are not reduced, and weights are averaged every few updates and at the end.

    `LocalSGD` averages trained parameters, and floating-point buffers (running statistics) unless
    `DistributedDataParallelKwargs(broadcast_buffers=False)` is set. Integer buffers and optimizer states stay local.
    All ranks must make the same number of updates. A weighted loss (`backward(loss, weight=)`) is a mean over the
    items of its rank. With one rank `LocalSGD` has no effect.

    Args:
        accelerator: The `Accelerator`.
        model: The prepared model.
        local_sgd_steps: How many updates lie between two averages.
        enabled: Whether to train locally; `False` reduces gradients as usual.

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
            raise ConfigurationError(f"accelerator must be an Accelerator (got {type(accelerator).__name__}).")
        check_count("local_sgd_steps", local_sgd_steps)
        check_flag("enabled", enabled)
        if not any(model is prepared for prepared in accelerator.prepared.models):
            raise PreparationError(
                f"LocalSGD got a {type(model).__name__} that is not prepared. Give the model that prepare() returned."
            )
        self.accelerator, self.model = accelerator, model
        self.local_sgd_steps, self.enabled = local_sgd_steps, enabled
        self.num_steps = 0
        if enabled:
            accelerator.strategy.stay_local(model)  # raises now if the strategy cannot

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            window = self.accelerator.window
            self._local: AbstractContextManager[Any] = self.accelerator.strategy.stay_local(self.model)
            self._local.__enter__()
            self._was_alone, window.is_alone = window.is_alone, True
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self.enabled:
            self.accelerator.window.is_alone = self._was_alone
            self._local.__exit__(kind, error, traceback)
            # After an error other ranks may not get here; after an average another one would only round again.
            if kind is None and self.num_steps % self.local_sgd_steps:
                self.accelerator.strategy.average_weights(self.model)

    def step(self) -> None:
        """Count an update, and average every `local_sgd_steps` updates. Call it after each micro-batch or update."""
        if self.accelerator.sync_gradients:
            self.num_steps += 1
            if self.enabled and self.num_steps % self.local_sgd_steps == 0:
                self.accelerator.strategy.average_weights(self.model)
