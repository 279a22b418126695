"""The schedule that a `MegatronLMDummyScheduler` stands for: learning rate, and weight decay that changes with it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.megatron_lm.dummy_data_loader import MegatronLMDummyScheduler, decay_factor, increase_factor

if TYPE_CHECKING:
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin


class MegatronLMSchedule(LambdaLR):
    """A schedule of the learning rate, and of the weight decay of groups that decay.

    Args:
        optimizer: The optimizer.
        lr_lambda: The factor of the learning rate after some updates, for each group.
        weight_decay: The weight decay after some updates; `None`: it stays.
    """

    def __init__(self, optimizer: Any, lr_lambda: Any, weight_decay: Callable[[int], float] | None = None) -> None:
        self._weight_decay = weight_decay
        self._decaying = [bool(group.get("weight_decay")) for group in optimizer.param_groups]
        super().__init__(optimizer, lr_lambda)

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rate and the weight decay of the next update."""
        super().step(epoch)
        self._set_weight_decay()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without the functions."""
        return {name: value for name, value in super().state_dict().items() if name != "_weight_decay"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, and the weight decay that belongs to it."""
        super().load_state_dict(state_dict)
        self._set_weight_decay()

    def _set_weight_decay(self) -> None:
        if self._weight_decay is None:
            return
        for group, decays in zip(self.optimizer.param_groups, self._decaying, strict=True):
            if decays:
                group["weight_decay"] = self._weight_decay(self.last_epoch)


def schedule_of(dummy: MegatronLMDummyScheduler, plugin: "MegatronLMPlugin | None") -> MegatronLMSchedule:
    """Return the schedule that a dummy stands for: a warm-up, then the plugin's shape down to its `min_lr`."""
    if plugin is None:
        raise ConfigurationError(
            "MegatronLMDummyScheduler stands for the schedule of a MegatronLMPlugin, and this Accelerator has none. "
            "Give Accelerator(megatron_lm_plugin=…), or a schedule of torch."
        )
    steps = plugin.schedule_steps(dummy.total_num_steps, dummy.warmup_num_steps)
    shape, least = plugin.lr_decay_style, plugin.min_lr

    def factor_of(rate: float) -> Callable[[int], float]:
        lowest = min(least / rate, 1.0) if rate else 0.0
        return lambda step: decay_factor(step, shape, steps.warmup, steps.decay, lowest)

    return MegatronLMSchedule(
        dummy.optimizer, [factor_of(group["lr"]) for group in dummy.optimizer.param_groups], _decay_of(plugin, steps)
    )


def _decay_of(plugin: "MegatronLMPlugin", steps: Any) -> Callable[[int], float] | None:
    style, start, end = plugin.weight_decay_incr_style, plugin.start_weight_decay, plugin.end_weight_decay
    if style == "constant" or start is None or end is None:
        return None
    return lambda step: start + (end - start) * increase_factor(step, style, steps.train)
