"""For scripts that make DeepSpeed's engine themselves: a wrapper that steps it, and DeepSpeed's optimizers for CPUs."""

from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, UnsupportedError
from trainer_lib.foundation.imports import is_deepspeed_available, pip_install
from trainer_lib.strategies.deepspeed.engine_model import EngineModel

# For each optimizer, by the name of its class: DeepSpeed's module and class, and the options that both have.
_ON_CPU = {
    "AdamW": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", ("betas", "eps")),
    "Adam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", ("betas", "eps")),
    "Adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", ("eps",)),
    "Lion": ("deepspeed.ops.lion", "DeepSpeedCPULion", ("betas",)),
}
_OF_GROUP = ("params", "lr", "weight_decay")
_WITHOUT_COUNTERPART = ("amsgrad", "maximize", "lr_decay", "initial_accumulator_value")


class DeepSpeedEngineWrapper:
    """Backward and step of an engine that `deepspeed.initialize` returned.

    A model of `accelerator.prepare` needs none: `accelerator.backward`, `clip_grad_norm_` and the prepared optimizer
    drive its engine.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: Any) -> None:
        if isinstance(engine, EngineModel) or not hasattr(engine, "is_gradient_accumulation_boundary"):
            raise ConfigurationError(
                f"DeepSpeedEngineWrapper needs the engine that deepspeed.initialize returns (got "
                f"{type(engine).__name__}). For a prepared model, call accelerator.backward(loss) and step the "
                "prepared optimizer."
            )
        self.engine = engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and update the weights if this micro-batch ends its accumulation window.

        The engine divides the loss by its `gradient_accumulation_steps`. It updates the weights, steps the schedule of
        its config and drops the gradients.

        Args:
            loss: The loss of a micro-batch.
            sync_gradients: Whether the window ends here.
            **kwargs: Options of the engine's `backward`.
        """
        if self.engine.managed_gradient_accumulation():
            self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the gradients of the last update, before clipping; `None` if the engine has none."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, Tensor) else norm


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's optimizer for CPUs with the parameters and options of one of torch, or the optimizer itself.

    AdamW, Adam, Adagrad and Lion have a counterpart; any other is returned unchanged. DeepSpeed compiles it when it is
    made for the first time. `accelerator.prepare` needs none of them: offloaded weights are updated by any optimizer.

    Args:
        optimizer: A new optimizer.

    Raises:
        MissingPackageError: If DeepSpeed is not installed.
        UnsupportedError: If an option has no counterpart.
    """
    found = _ON_CPU.get(type(optimizer).__name__)
    if found is None:
        return optimizer
    if not is_deepspeed_available():
        raise MissingPackageError(
            f"map_pytorch_optim_to_deepspeed needs DeepSpeed: {pip_install('trainer_lib[deepspeed]')}."
        )
    module, name, names = found
    for group in optimizer.param_groups:
        option = next((option for option in _WITHOUT_COUNTERPART if group.get(option)), None)
        if option is not None:
            raise UnsupportedError(
                f"{name} has no {option} (got {group[option]!r}). Leave it out, or keep the optimizer of torch: "
                "offloading works with it too."
            )
    groups = [{key: group[key] for key in (*_OF_GROUP, *names)} for group in optimizer.param_groups]
    options: dict[str, Any] = {key: optimizer.defaults[key] for key in (*_OF_GROUP[1:], *names)}
    if name == "DeepSpeedCPUAdam":
        # torch's own flag; without it (an optimizer of another package) the name says it.
        options["adamw_mode"] = optimizer.defaults.get("decoupled_weight_decay", type(optimizer).__name__ == "AdamW")
    return getattr(import_module(module), name)(groups, **options)
