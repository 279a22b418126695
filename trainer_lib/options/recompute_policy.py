"""Selective activation checkpointing: which operations keep their outputs, so that they are not computed again."""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OperatorBase, OpOverloadPacket

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointPolicy

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
PolicyFunction = Callable[..., "CheckpointPolicy"]
RecomputePolicy = str | Sequence[Any] | PolicyFunction

_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "higher_order.flex_attention",
)
# Products with weights. Those of two activations, such as the scores of attention by hand, are large and cheap.
_PRODUCTS = ("aten.mm", "aten.addmm", "aten._scaled_mm", "aten.convolution")
POLICIES: dict[str, tuple[Any, ...]] = {"matmul": (*_PRODUCTS, *_ATTENTION), "attention": _ATTENTION}


def check_policy(name: str, policy: Any) -> None:
    """Raise unless a policy has one of its forms, and torch has its operations."""
    if policy is not None and (not callable(policy) or _is_operation(policy)):
        _operations(name, policy)


def selective_contexts(policy: RecomputePolicy, name: str = "policy") -> Callable[[], Contexts]:
    """Return the `context_fn` of torch's `checkpoint` that keeps the outputs of some operations.

    Args:
        policy: "matmul" keeps the outputs of matrix products with weights and of fused attention, "attention" those of
            fused attention; or the operations that keep theirs, such as `["aten.mm"]`; or a function
            `(context, operation, *args, **kwargs)` that returns a `CheckpointPolicy`.
        name: The name of the option, for errors.

    Example:
        >>> contexts = selective_contexts(["aten.mm", torch.ops.aten.addmm])
        >>> selective_contexts("matmull")
        Traceback (most recent call last):
        ...
        trainer_lib.foundation.errors.ConfigurationError: policy must be "matmul", "attention", or operations ...
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    if callable(policy) and not _is_operation(policy):
        return functools.partial(create_selective_checkpoint_contexts, policy)
    kept = _operations(name, policy)
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_keep, kept))


def _keep(kept: frozenset[Any], context: Any, operation: Any, *args: Any, **kwargs: Any) -> "CheckpointPolicy":
    from torch.utils.checkpoint import CheckpointPolicy

    del context
    if operation in kept and not _draws_random_numbers(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws_random_numbers(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an attention drops some of its weights.

    If it were not computed again, what follows it in the block would draw other random numbers than in the forward.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0))


def _operations(name: str, policy: Any) -> frozenset[Any]:
    if isinstance(policy, str) and policy in POLICIES:
        found = [_found(operation) for operation in POLICIES[policy]]
        return frozenset(overload for operation in found if operation is not None for overload in _overloads(operation))
    if isinstance(policy, str) or not isinstance(policy, Iterable):
        known = ", ".join(f'"{each}"' for each in POLICIES)
        hint = did_you_mean(policy, list(POLICIES)) if isinstance(policy, str) else ""
        raise ConfigurationError(
            f'{name} must be {known}, or operations such as ["aten.mm"] that keep their outputs (got '
            f"{shown(policy)}).{hint}"
        )
    chosen: set[Any] = set()
    for operation in policy:
        chosen.update(_checked(name, operation))
    if not chosen:
        raise ConfigurationError(f"{name} has no operations (got {shown(policy)}). To recompute all, leave it out.")
    return frozenset(chosen)


def _checked(name: str, operation: Any) -> list[Any]:
    found = _found(operation) if isinstance(operation, str) else operation
    if not _is_operation(found):
        known = sorted({each for names in POLICIES.values() for each in names})
        hint = did_you_mean(operation, known) if isinstance(operation, str) else ""
        raise ConfigurationError(
            f"{name} has {shown(operation)}, which is no operation of torch. Give names such as "
            f'"aten.mm", or operations such as torch.ops.aten.mm.{hint}'
        )
    overloads = _overloads(found)
    for overload in overloads:
        is_seeded = torch.Tag.nondeterministic_seeded in getattr(overload, "tags", ())
        if is_seeded and "dropout_p" not in {argument.name for argument in overload._schema.arguments}:
            raise ConfigurationError(
                f"{name} has {shown(operation)}, which draws random numbers: what follows it in a block would draw "
                "others when it is computed again. Leave it out; it is computed again with the same numbers."
            )
    return overloads


def _found(name: str) -> Any:
    """Return the operation of a name such as "aten.mm", "aten::mm" or "aten.mm.default", or `None`."""
    found: Any = torch.ops
    for part in name.replace("::", ".").split("."):
        found = getattr(found, part, None)
    return found if _is_operation(found) else None


def _is_operation(value: Any) -> bool:
    return isinstance(value, (OperatorBase, OpOverloadPacket))


def _overloads(operation: Any) -> list[Any]:
    if isinstance(operation, OpOverloadPacket):
        return [getattr(operation, overload) for overload in operation.overloads()]
    return [operation]
