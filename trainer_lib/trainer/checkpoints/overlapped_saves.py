"""Whether copies for background saves may overlap with training: where only optimizers change weights."""

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.checkpointing.format.overlapped_copies import versions_of
from trainer_lib.collectives.agreement import raise_on_all_ranks
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.foundation.lazy_imports import without_collections
from trainer_lib.options.enums import DistributedType
from trainer_lib.trainer.fit.context import FitContext

_KNOWN = "torch.optim."  # these optimizers change weights and states in `step` alone
_SAMPLED = 16  # values of a weight by which a change is seen


class OverlappedSaves:
    """Has background saves copy weights and optimizer states until the next update, into memory allocated ahead.

    The first update shows whether forward and backward leave the weights alone. An embedding with `max_norm` does not,
    nor does a codebook that is written through `weight.data`, which torch does not count as a change.

    Args:
        context: The fit.

    Attributes:
        has_memory: Whether the memory of the first save is allocated, or is being allocated.
    """

    def __init__(self, context: FitContext) -> None:
        self._context, self._saves = context, context.accelerator.checkpoints.background
        self._optimizers = [optimizer.optimizer for optimizer in context.run.optimizers.values()]
        updates_in_backward = any(optimizer.updates_in_backward for optimizer in context.run.optimizers.values())
        self._is_possible = not updates_in_backward and _is_possible(context, self._optimizers)
        self._weights = [
            weight
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for weight in group["params"]
            if self._is_possible and weight.requires_grad
        ]
        self._versions, self._values = versions_of(self._weights), _some_values(self._weights)
        self.has_memory = False

    def begin(self) -> None:
        """Begin, before the first update of a fit."""
        if self._is_possible and self._is_unchanged():
            self._saves.overlapping = self._optimizers
        self._weights, self._values = [], []

    def allocate(self) -> None:
        """After the first update of a fit, import what the first save needs, and allocate its memory on a thread.

        Raises:
            CheckpointError: If checkpoints cannot hold the states of an optimizer.
        """
        self.has_memory: bool = True
        context, args = self._context, self._context.run.args
        checkpoints = context.accelerator.checkpoints
        writes_shards = checkpoints.engine.strategy.writes_shards
        if args.save_interval is None or context.folder is None:
            return
        if self._saves.overlapping and (checkpoints.leads or writes_shards):
            self._saves.allocate(whole=not writes_shards)
        with without_collections():  # now, so that the first save does not import them
            importlib.import_module("trainer_lib.accelerator.checkpoints.save_state")
        if context.accelerator.distributed_type is DistributedType.FSDP:
            from trainer_lib.tensor_files.quantized_states import check_shards

            # Shards of some ranks may be large enough to be quantized, and others not.
            with raise_on_all_ranks(context.group, "fit", CheckpointError):
                for optimizer in self._optimizers:
                    check_shards(optimizer.state.values())

    def end(self) -> None:
        """Copy before `save_state` returns from now on."""
        self._saves.overlapping = ()

    def _is_unchanged(self) -> bool:
        if versions_of(self._weights) != self._versions:
            return False
        return all(map(torch.equal, _some_values(self._weights), self._values))


@torch.no_grad()
def _some_values(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return a few values of each plain weight, in one copy for each type and device."""
    samples: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for weight in weights:
        if type(weight) is nn.Parameter and weight.is_contiguous():
            count = min(weight.numel(), _SAMPLED)
            values = weight.as_strided((count,), (weight.numel() // max(count, 1),))
            samples.setdefault((weight.dtype, weight.device), []).append(values)
    return [torch.cat(values) for values in samples.values()]


def _is_possible(context: FitContext, optimizers: list[Optimizer]) -> bool:
    changes_weights = any(each.may_change_training and each.changes_weights for each in context.events)
    return (
        context.run.args.save_in_background
        and not changes_weights
        and not context.has_own_step
        and not context.accelerator.checkpoints.engine.trains_locally
        and all(f"{type(optimizer).__module__}.".startswith(_KNOWN) for optimizer in optimizers)
    )
