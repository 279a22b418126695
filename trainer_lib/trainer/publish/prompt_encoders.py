"""Whole weights for PEFT's prompt encoders while PEFT saves what they compute."""

from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from trainer_lib.modules.module_kinds import is_peft_model
from trainer_lib.modules.weights.tensor_slots import module_slots, parameter_slots

_ENCODERS = "prompt_encoder"  # PEFT's name for them in a model
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@contextmanager
def whole_prompt_encoders(model: nn.Module, state: Mapping[str, Any]) -> Generator[None]:
    """Give the prompt encoders of a model the weights of a state within a `with` block.

    PEFT saves the output of these modules, on one rank. There, a sharded model has parts of their weights, and the
    hooks that gather them wait for the other ranks.

    Args:
        model: The model, perhaps without prompt encoders.
        state: The whole weights of the model.
    """
    encoders = module_slots(model).get(_ENCODERS) if is_peft_model(model) else None
    modules = {} if encoders is None else dict(encoders.named_modules(prefix=_ENCODERS))
    hooks = {module: {name: vars(module)[name] for name in _HOOKS} for module in modules.values()}
    parameters = {name: dict(parameter_slots(module)) for name, module in modules.items()}
    try:
        for name, module in modules.items():
            vars(module).update({hook: OrderedDict[int, Any]() for hook in _HOOKS})
            for key, parameter in parameters[name].items():
                whole = state.get(f"{name}.{key}")
                if parameter is not None and isinstance(whole, Tensor):
                    setattr(module, key, nn.Parameter(whole, requires_grad=False))
        yield
    finally:
        for name, module in modules.items():
            vars(module).update(hooks[module])
            for key, parameter in parameters[name].items():
                setattr(module, key, parameter)
