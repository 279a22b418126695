"""Activation checkpointing: recompute the activations of blocks in the backward instead of storing them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.blocks import repeated_blocks
from trainer_lib.modules.forwards import wrap_forward


def checkpoint_activations(model: nn.Module, blocks: Sequence[nn.Module] = ()) -> None:
    """Let blocks of a model recompute their activations in the backward, without changing modules or names.

    Args:
        model: The model.
        blocks: The blocks; by default the repeated blocks of the model. A model with its own activation checkpointing
            chooses its blocks itself.

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
        return
    chosen = list(blocks) or list(repeated_blocks(model).values())
    if not chosen:
        raise ConfigurationError(
            f"activation_checkpointing=True finds no repeated blocks in this {type(model).__name__}. Name their "
            "classes in transformer_cls_names_to_wrap, or leave it out."
        )
    for block in chosen:
        wrap_forward(block, _checkpointed)


def _checkpointed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return checkpoint(original, self, *args, use_reentrant=False, **kwargs)

    return forward
