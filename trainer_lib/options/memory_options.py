"""Options that save memory in training: activation checkpointing and offload, optimizer steps in the backward."""

from dataclasses import dataclass

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import KwargsHandler, check_count, check_flag
from trainer_lib.options.recompute_policy import RecomputePolicy, check_policy


@dataclass(repr=False, eq=False)
class MemoryKwargs(KwargsHandler):
    """How prepared models and optimizers save memory; `TrainingArguments` has the same names.

    Args:
        gradient_checkpointing: Recompute the activations of blocks in the backward instead of storing them.
        gradient_checkpointing_every: Recompute those of every n-th block only.
        gradient_checkpointing_policy: The operations that keep their outputs: "matmul" (matrix products with weights,
            and fused attention), "attention", a list such as `["aten.mm"]`, or a function
            `(context, operation, *args, **kwargs)` that returns a `torch.utils.checkpoint.CheckpointPolicy`.
        activation_offload: Keep the activations of blocks in host memory until the backward.
        optimizer_in_backward: Update each parameter in the backward, as soon as its gradient is complete, and free the
            gradient.

    Example:
        >>> MemoryKwargs(gradient_checkpointing=True, gradient_checkpointing_policy="matmul").saves_activations
        True
    """

    gradient_checkpointing: bool = False
    gradient_checkpointing_every: int = 1
    gradient_checkpointing_policy: RecomputePolicy | None = None
    activation_offload: bool = False
    optimizer_in_backward: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("gradient_checkpointing", "activation_offload", "optimizer_in_backward"):
            check_flag(name, getattr(self, name))
        check_count("gradient_checkpointing_every", self.gradient_checkpointing_every)
        check_policy("gradient_checkpointing_policy", self.gradient_checkpointing_policy)
        check_checkpointing(
            self.gradient_checkpointing, self.gradient_checkpointing_every, self.gradient_checkpointing_policy
        )

    @property
    def saves_activations(self) -> bool:
        """Whether models keep fewer activations, or keep them elsewhere."""
        return self.gradient_checkpointing or self.activation_offload


def check_one_checkpointing(gradient_checkpointing: bool, activation_offload: bool, other: str) -> None:
    """Raise for options that keep activations elsewhere, if FSDP's `other` lets blocks recompute them already."""
    if gradient_checkpointing:
        raise ConfigurationError(f"gradient_checkpointing=True and {other} set the same thing. Give one of them.")
    if activation_offload:
        raise ConfigurationError(
            f"activation_offload=True does not work with {other}: blocks would recompute nothing. Give "
            "gradient_checkpointing=True with activation_offload=True, or activation_checkpointing_offload=True of the "
            "FSDP plugin."
        )


def check_checkpointing(gradient_checkpointing: bool, every: int, policy: RecomputePolicy | None) -> None:
    """Raise for details of activation checkpointing without it."""
    details = {"every": every if every > 1 else None, "policy": policy}
    for name, value in details.items():
        if value is not None and not gradient_checkpointing:
            raise ConfigurationError(
                f"gradient_checkpointing_{name}={value!r} has no effect without gradient_checkpointing=True. Set both, "
                "or leave it out."
            )
