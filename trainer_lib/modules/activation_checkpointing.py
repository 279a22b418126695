"""Activation checkpointing: recompute the activations of blocks in the backward instead of storing them."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.activation_offload import ActivationOffload
from trainer_lib.modules.blocks import repeated_blocks
from trainer_lib.modules.forwards import wrap_forward
from trainer_lib.options.recompute_policy import RecomputePolicy, selective_contexts

# Where transformers' layers keep the function that checkpoints them.
_TRANSFORMERS_FUNCTION = "_gradient_checkpointing_func"
# Whether one of these layers checkpoints.
_TRANSFORMERS_SWITCH = "gradient_checkpointing"

Checkpoint = Callable[..., Any]


class ActivationOptions(Protocol):
    """What `MemoryKwargs` and `TrainingArguments` say about activations."""

    gradient_checkpointing: bool
    gradient_checkpointing_every: int
    gradient_checkpointing_policy: Any
    activation_offload: bool


def save_activation_memory(model: nn.Module, options: ActivationOptions) -> None:
    """Let blocks of a model recompute their activations, or keep them in host memory, as options say."""
    if options.gradient_checkpointing:
        checkpoint_activations(
            model,
            offload=options.activation_offload,
            every=options.gradient_checkpointing_every,
            policy=options.gradient_checkpointing_policy,
        )
    elif options.activation_offload:
        offload_activations(model)


def checkpoint_activations(
    model: nn.Module,
    blocks: Sequence[nn.Module] = (),
    offload: bool = False,
    every: int = 1,
    policy: RecomputePolicy | None = None,
    first: int | None = None,
    option: str = "gradient_checkpointing",
) -> None:
    """Let blocks of a model recompute their activations in the backward, without changing modules or names.

    Args:
        model: The model.
        blocks: The blocks; by default the repeated blocks of the model. A model with its own activation checkpointing
            chooses its blocks itself.
        offload: Whether what is kept waits in host memory for the backward: the inputs of blocks that recompute, and
            all activations of the others. What a policy keeps stays on the device.
        every: Only every n-th block recomputes its activations, from the first one on.
        policy: Which operations in these blocks keep their outputs; see `selective_contexts`.
        first: Only so many blocks recompute their activations, from the first one on.
        option: The name of the option that asks for it, for errors.

    Raises:
        ConfigurationError: If the model has no such blocks.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if policy is not None:
        options["context_fn"] = selective_contexts(policy, "gradient_checkpointing_policy")
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:  # from torch 2.15 on
            options["respect_saved_tensors_hooks"] = False
    mover = ActivationOffload() if offload else None
    # transformers' models know which side effects must not happen twice, such as writing to a cache.
    if getattr(model, "supports_gradient_checkpointing", False):
        _checkpoint_transformers(model, options, every, mover)
        if first is not None:
            _switch_layers(model, range(first), f"recompute_num_layers={first}", "recompute_num_layers")
        return
    for index, block in enumerate(_chosen(model, blocks, option)):
        if index % every == 0 and (first is None or index < first):
            run = functools.partial(checkpoint, **options)
            wrap_forward(
                block, functools.partial(_checkpointed, run=run if mover is None else mover.around_checkpoint(run))
            )
        elif mover is not None:
            _offload(block, mover)


def offload_activations(model: nn.Module) -> None:
    """Keep what the repeated blocks of a model save for the backward in host memory; modules and names stay the same.

    Raises:
        ConfigurationError: If the model has no such blocks.
    """
    mover = ActivationOffload()
    for block in _chosen(model, (), "activation_offload"):
        _offload(block, mover)


def _chosen(model: nn.Module, blocks: Sequence[nn.Module], option: str) -> list[nn.Module]:
    chosen = list(blocks) or list(repeated_blocks(model).values())
    if not chosen:
        raise ConfigurationError(
            f"{option}=True finds no repeated blocks in this {type(model).__name__}. Name their "
            "classes in transformer_cls_names_to_wrap, or leave it out."
        )
    return chosen


def _checkpoint_transformers(model: Any, options: dict[str, Any], every: int, mover: ActivationOffload | None) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:  # its name in earlier versions
        model.gradient_checkpointing_enable(options)
    if every > 1:
        _keep_all_but_every(model, every)
    if mover is None:
        return
    for module in model.modules():
        if hasattr(module, _TRANSFORMERS_FUNCTION):
            setattr(module, _TRANSFORMERS_FUNCTION, mover.around_checkpoint(getattr(module, _TRANSFORMERS_FUNCTION)))
    for block in repeated_blocks(model).values() if every > 1 else ():
        if not getattr(block, _TRANSFORMERS_SWITCH, True):
            _offload(block, mover)


def _keep_all_but_every(model: nn.Module, every: int) -> None:
    count = len(repeated_blocks(model))
    _switch_layers(
        model, range(0, count, every), f"gradient_checkpointing_every={every}", "gradient_checkpointing_every"
    )


def _switch_layers(model: nn.Module, recomputed: range, option: str, name: str) -> None:
    """Let only some layers of a model of transformers recompute their activations."""
    layers: list[Any] = [block for block in repeated_blocks(model).values() if hasattr(block, _TRANSFORMERS_SWITCH)]
    if not layers:
        raise ConfigurationError(
            f"{option} does not work with {type(model).__name__}: it switches activation checkpointing for all of its "
            f"layers together. Leave {name} out."
        )
    for index, layer in enumerate(layers):
        setattr(layer, _TRANSFORMERS_SWITCH, index in recomputed)


def _offload(block: nn.Module, mover: ActivationOffload) -> None:
    wrap_forward(block, mover.around_forward)


def _checkpointed(original: Callable[..., Any], run: Checkpoint) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return run(original, self, *args, **kwargs)

    return forward
