"""Training on uneven inputs with DDP: ranks whose data ends early take part in the updates of the other ranks.

On a rank without data, torch's `Join` answers each collective of the ranks that still train with gradients of zero.
`Joining` also contributes the rank's gradients of an unfinished accumulation window, and their weight.
"""

# pyright: reportPrivateUsage=false
# Here, what torch's Join sets on a module has no public name.

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.base import JoinOutcome, Leftovers
from trainer_lib.strategies.clip_grad_norm import weight_dtype


class Joining(JoinOutcome):
    """The context of a training loop in which some ranks may run out of data early.

    Args:
        group: The process group of all ranks.
        device: The device of this rank.
        joinables: The models and other objects whose collectives to answer.
        leftovers: Returns, at the end of this rank's data, the models with unfinished windows and their weights.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        joinables: Sequence[Joinable],
        leftovers: Callable[[], Leftovers],
    ) -> None:
        super().__init__()
        self._group, self._device, self._leftovers = group, device, leftovers
        self._joinables = list(joinables)
        self._remaining: Leftovers = {}

    def __enter__(self) -> "Joining":
        self._before = [joinable._join_config for joinable in self._joinables]
        self._last_joiner = _LastJoiner(self._joinables[0])
        self._join = Join([*self._joinables, self._last_joiner])
        self._handles = [handle for joinable in self._joinables for handle in _sync_only_in_training(joinable)]
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                self._remaining = self._leftovers()
                with warnings.catch_warnings():  # Join changes the filters
                    self._join.__exit__(None, None, None)
                self.source: int | None = self._rank_with_all_updates()
        finally:
            for handle in self._handles:
                handle.remove()
            for joinable, config in zip(self._joinables, self._before, strict=True):
                joinable._join_config = config

    def total_weight(self, model: nn.Module, weight: Tensor | None) -> Tensor:
        """Return the mean over ranks of the weight of a backward's losses, including the leftovers of `model`."""
        local = torch.zeros(1, device=self._device, dtype=weight_dtype(self._device)) if weight is None else weight
        if model in self._remaining:
            local = local + self._remaining[model]
        return self._group.all_reduce(local)[0] / self._group.size

    def fill(self, model: nn.Module, bucket: dist.GradBucket) -> None:
        """Copy the gradients of an unfinished window into a bucket, which holds zeros on a rank without data."""
        if model not in self._remaining:
            return
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            if parameter.grad is not None:
                gradient.copy_(parameter.grad)
        if bucket.is_last():
            del self._remaining[model]
            self.contributed.append(model)

    def _rank_with_all_updates(self) -> int | None:
        """Return a rank that made all updates, or `None` if all ranks did."""
        is_last, rank = self._last_joiner.is_last, self._group.rank
        flags = torch.tensor([rank if is_last else -1, int(not is_last)], device=self._device)
        source, some_were_early = self._group.all_reduce(flags, "max").tolist()
        return int(source) if some_were_early else None


class _LastJoiner(Joinable, JoinHook):
    """Records whether this rank was among the last to run out of data; runs no collectives."""

    is_last = False

    def __init__(self, like: Joinable) -> None:
        super().__init__()
        self._like = like

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return this object: it is its own hook."""
        del kwargs
        return self

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives."""
        return self._like.join_device

    @property
    def join_process_group(self) -> Any:
        """The process group of the collectives."""
        return self._like.join_process_group

    def post_hook(self, is_last_joiner: bool) -> None:
        """Record whether this rank was among the last."""
        self.is_last = is_last_joiner


def _sync_only_in_training(joinable: Joinable) -> list[RemovableHandle]:
    """Run forwards without gradients locally: they have no backward that other ranks could answer."""
    if not isinstance(joinable, DistributedDataParallel):
        return []
    before: list[tuple[Any, bool, bool] | None] = []

    def enter(model: DistributedDataParallel, inputs: Any) -> None:
        del inputs
        before.append(None)
        if not torch.is_grad_enabled():
            before[-1] = model._join_config, model.require_backward_grad_sync, model.require_forward_param_sync
            model._join_config = model._join_config._replace(enable=False)
            model.require_backward_grad_sync = model.require_forward_param_sync = False

    def leave(model: DistributedDataParallel, inputs: Any, output: Any) -> None:
        del inputs, output
        settings = before.pop()
        if settings is not None:
            model._join_config, model.require_backward_grad_sync, model.require_forward_param_sync = settings

    return [joinable.register_forward_pre_hook(enter), joinable.register_forward_hook(leave, always_call=True)]
