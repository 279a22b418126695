"""`MegatronLMOptimizer`: an optimizer that clips before each update, as Megatron-LM's optimizers do."""

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from trainer_lib.accelerator.clipped_optimizer import ClippedOptimizer
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.strategies import Strategy

if TYPE_CHECKING:
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin


class MegatronLMOptimizer(ClippedOptimizer):
    """An optimizer that clips before each update, and notes the norm of the gradients in the plugin.

    Args:
        optimizer: The optimizer of the script.
        device_placement: Whether its state is moved to the device.
        plugin: The options of Megatron-LM.
        strategy: Clips the gradients.
        **kwargs: Keywords of `AcceleratedOptimizer`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        *,
        plugin: "MegatronLMPlugin",
        strategy: Strategy,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, device_placement, strategy=strategy, max_norm=0.0, **kwargs)
        self._plugin = plugin

    def clip(self) -> Any:
        """Clip the gradients, and return their norm before; `None` without clipping.

        Raises:
            ConfigurationError: If the loop does not count micro-batches.
        """
        plugin = self._plugin
        if not self.window.micro_batch and self.window.state.num_steps > 1:
            raise ConfigurationError(
                f"MegatronLMPlugin(num_micro_batches={plugin.num_micro_batches}), and the loop does not count "
                "micro-batches. Put `with accelerator.accumulate(model):` around forward, backward and step, or give "
                "MegatronLMPlugin(custom_train_step_class=GPTTrainStep), with which the model's call computes all."
            )
        self._max_norm = plugin.gradient_clipping or 0.0  # which may change between updates
        plugin.grad_norm = super().clip() if self._max_norm else None
        return plugin.grad_norm
