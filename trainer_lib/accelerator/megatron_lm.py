"""What an `Accelerator` does for scripts that train with Megatron-LM's options."""

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.megatron_lm.placeholders import MegatronLMDummyScheduler
from trainer_lib.state.accumulation_window import GradientWindow
from trainer_lib.strategies import Strategy

if TYPE_CHECKING:
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin


def step_as_megatron_lm(
    optimizer: Optimizer, plugin: "MegatronLMPlugin", strategy: Strategy, window: GradientWindow
) -> None:
    """Clip the gradients of all parameters of an optimizer before each of its steps, as Megatron-LM's optimizers do.

    Each step raises if micro-batches are not counted.
    """

    def before_step(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if not window.micro_batch and window.state.num_steps > 1:
            raise ConfigurationError(
                f"MegatronLMPlugin(num_micro_batches={plugin.num_micro_batches}), and the loop does not count "
                "micro-batches. Put `with accelerator.accumulate(model):` around forward, backward and step."
            )
        if plugin.gradient_clipping:
            parameters = [parameter for group in stepped.param_groups for parameter in group["params"]]
            strategy.clip_grad_norm(parameters, plugin.gradient_clipping, 2.0)

    optimizer.register_step_pre_hook(before_step)


def schedule_of(dummy: MegatronLMDummyScheduler, plugin: "MegatronLMPlugin | None") -> LRScheduler:
    """Return the schedule that a dummy stands for: a linear warm-up, then the plugin's shape down to its `min_lr`."""
    if plugin is None:
        raise ConfigurationError(
            "MegatronLMDummyScheduler stands for the schedule of a MegatronLMPlugin, and this Accelerator has none. "
            "Give Accelerator(megatron_lm_plugin=…), or a schedule of torch."
        )
    shape, least = plugin.lr_decay_style, plugin.min_lr
    if dummy.total_num_steps is None and shape != "constant":
        raise ConfigurationError(
            f"MegatronLMDummyScheduler needs total_num_steps, the updates until lr_decay_style={shape!r} ends."
        )

    def factor_of(rate: float) -> Any:
        return lambda step: dummy.factor(step, shape, min(least / rate, 1.0) if rate else 0.0)

    return LambdaLR(dummy.optimizer, [factor_of(group["lr"]) for group in dummy.optimizer.param_groups])
