"""Clipping before each step of an optimizer, as Megatron-LM's optimizers do."""

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_lib.accelerator.prepared import Prepared
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.state.accumulation_window import GradientWindow
from trainer_lib.strategies import Strategy

if TYPE_CHECKING:
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin

_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


def step_as_megatron_lm(
    optimizer: Optimizer, plugin: "MegatronLMPlugin", prepared: Prepared, strategy: Strategy, window: GradientWindow
) -> None:
    """Clip the gradients of all parameters of an optimizer before each of its steps, as Megatron-LM's optimizers do.

    Each step raises if micro-batches are not counted. Once the optimizer is released, nothing is clipped.
    """
    owner = ref(prepared)  # the optimizer may outlive its Accelerator

    def before_step(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        current = owner()
        if current is None or all(held.optimizer is not stepped for held in current.optimizers):
            return
        if not window.micro_batch and window.state.num_steps > 1:
            raise ConfigurationError(
                f"MegatronLMPlugin(num_micro_batches={plugin.num_micro_batches}), and the loop does not count "
                "micro-batches. Put `with accelerator.accumulate(model):` around forward, backward and step, or give "
                "MegatronLMPlugin(custom_train_step_class=GPTTrainStep), with which the model's call computes all."
            )
        if plugin.gradient_clipping:
            parameters = [parameter for group in stepped.param_groups for parameter in group["params"]]
            plugin.grad_norm = strategy.clip_grad_norm(parameters, plugin.gradient_clipping, 2.0)

    earlier = _hooks.pop(optimizer, None)  # of a preparation before free_memory()
    if earlier is not None:
        earlier.remove()
    _hooks[optimizer] = optimizer.register_step_pre_hook(before_step)
