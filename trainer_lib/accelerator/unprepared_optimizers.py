"""Warns of an optimizer that is not prepared, where its steps differ from those of a prepared one."""

from typing import Any
from weakref import finalize, ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainer_lib.accelerator.engine import Engine
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)


def watch_unprepared(engine: Engine) -> Any:
    """Warn, once for each class, if an optimizer steps that holds weights of a prepared model and is not prepared.

    Args:
        engine: What an `Accelerator` trains with.

    Returns:
        torch's handle, which ends the watch; so does the end of the engine.
    """
    reference, warned = ref(engine), set[type]()

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        engine = reference()
        effect = None if engine is None or type(optimizer) in warned else _effect(engine, optimizer)
        if effect is not None:
            warned.add(type(optimizer))
            _logger.warning(
                "This %s is not prepared, so %s. Use the optimizer that prepare() returns: "
                "model, optimizer = accelerator.prepare(model, optimizer).",
                type(optimizer).__name__,
                effect,
            )

    handle = register_optimizer_step_pre_hook(look)
    finalize(engine, handle.remove)
    return handle


def _effect(engine: Engine, optimizer: Optimizer) -> str | None:
    """Return what differs from a prepared optimizer."""
    scaler, effect = engine.precision.scaler, None
    if scaler is not None and scaler.is_enabled() and not _is_unscaled(scaler, optimizer):
        effect = f"it steps with gradients that are multiplied by the loss scale of fp16 ({scaler.get_scale():g})"
    elif not engine.window.state.sync_gradients:
        effect = f"it steps after each micro-batch, not after {engine.window.state.num_steps} of them"
    known = {id(parameter) for model in engine.prepared.models for parameter in model.parameters()} if effect else ()
    return effect if any(id(p) in known for group in optimizer.param_groups for p in group["params"]) else None


def _is_unscaled(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether the script calls the scaler itself: `scaler.step(optimizer)`."""
    return id(optimizer) in scaler._per_optimizer_states
