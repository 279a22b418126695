"""Activation checkpointing: recompute the activations of blocks in the backward instead of storing them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_lib.foundation.device_types import can_pin_memory
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.blocks import repeated_blocks
from trainer_lib.modules.forwards import wrap_forward

# Where transformers' layers keep the function that checkpoints them.
_TRANSFORMERS_FUNCTION = "_gradient_checkpointing_func"
# Whether one of these layers checkpoints.
_TRANSFORMERS_SWITCH = "gradient_checkpointing"


def checkpoint_activations(
    model: nn.Module, blocks: Sequence[nn.Module] = (), offload: bool = False, every: int = 1
) -> None:
    """Let blocks of a model recompute their activations in the backward, without changing modules or names.

    Args:
        model: The model.
        blocks: The blocks; by default the repeated blocks of the model. A model with its own activation checkpointing
            chooses its blocks itself.
        offload: Whether the inputs of blocks are kept in CPU memory until the backward.
        every: Only every n-th block recomputes its activations, from the first one on.

    Raises:
        ConfigurationError: If the model has no such blocks.
    """
    # transformers' models know which side effects must not happen twice, such as writing to a cache.
    if getattr(model, "supports_gradient_checkpointing", False):
        transformers_model: Any = model
        if hasattr(model, "activation_checkpointing_enable"):
            transformers_model.activation_checkpointing_enable({"use_reentrant": False})
        else:  # its name in earlier versions
            transformers_model.gradient_checkpointing_enable({"use_reentrant": False})
        if every > 1:
            _keep_all_but_every(model, every)
        for module in model.modules() if offload else ():
            if hasattr(module, _TRANSFORMERS_FUNCTION):
                setattr(module, _TRANSFORMERS_FUNCTION, _saving_on_cpu(getattr(module, _TRANSFORMERS_FUNCTION)))
        return
    chosen = list(blocks) or list(repeated_blocks(model).values())
    if not chosen:
        raise ConfigurationError(
            f"activation_checkpointing=True finds no repeated blocks in this {type(model).__name__}. Name their "
            "classes in transformer_cls_names_to_wrap, or leave it out."
        )
    for block in chosen[::every]:
        wrap_forward(block, functools.partial(_checkpointed, run=_saving_on_cpu(checkpoint) if offload else checkpoint))


def _keep_all_but_every(model: nn.Module, every: int) -> None:
    layers: list[Any] = [block for block in repeated_blocks(model).values() if hasattr(block, _TRANSFORMERS_SWITCH)]
    if not layers:
        raise ConfigurationError(
            f"gradient_checkpointing_every={every} does not work with {type(model).__name__}: it switches activation "
            "checkpointing for all of its layers together. Leave gradient_checkpointing_every out."
        )
    for index, layer in enumerate(layers):
        setattr(layer, _TRANSFORMERS_SWITCH, index % every == 0)


def _saving_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The block's own activations are not saved, so this moves what the recomputation starts from.
        with torch.autograd.graph.save_on_cpu(pin_memory=can_pin_memory()):
            return function(*args, **kwargs)

    return run


def _checkpointed(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return run(original, self, *args, use_reentrant=False, **kwargs)

    return forward
