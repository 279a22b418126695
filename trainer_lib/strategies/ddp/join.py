"""This file is joining: processes whose data ends early take part in the updates of the others.

Torch's `Join` answers, on a process without data, each message of those that still train: with gradients of zero. Here
it also answers with what the process has left in an unfinished window, and says what that weighs.
"""

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
from trainer_lib.strategies.base import Joined
from trainer_lib.strategies.grad_norm import weight_dtype

# The models whose windows this process leaves unfinished, and what their losses weigh.
Leftovers = dict[nn.Module, float | Tensor]


class Joining(Joined):
    """The block of a loop whose data may end early on some processes.

    Args:
        group: The processes.
        device: The device of this one.
        joinables: Whose messages to answer.
        leftovers: Asked at the end of this process's data.
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
        self._left: Leftovers = {}

    def __enter__(self) -> "Joining":
        self._before = [joinable._join_config for joinable in self._joinables]
        self._ending = _Ending(self._joinables[0])
        self._join = Join([*self._joinables, self._ending])
        self._handles = [handle for one in self._joinables for handle in _only_training_shares(one)]
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                self._left = self._leftovers()
                with warnings.catch_warnings():  # Join changes the filters
                    self._join.__exit__(None, None, None)
                self.source = self._made_all_updates()
        finally:
            for handle in self._handles:
                handle.remove()
            for joinable, config in zip(self._joinables, self._before, strict=True):
                joinable._join_config = config

    def total_weight(self, model: nn.Module, weight: Tensor | None) -> Tensor:
        """Return what the losses of a backward weigh a process, on average: with it go the leftovers of `model`."""
        local = torch.zeros(1, device=self._device, dtype=weight_dtype(self._device)) if weight is None else weight
        if model in self._left:
            local = local + self._left[model]
        return self._group.all_reduce(local)[0] / self._group.size

    def fill(self, model: nn.Module, bucket: dist.GradBucket) -> None:
        """Put the gradients of an unfinished window into a bucket, which has none on a process without data."""
        if model not in self._left:
            return
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            if parameter.grad is not None:
                gradient.copy_(parameter.grad)
        if bucket.is_last():
            del self._left[model]
            self.given.append(model)

    def _made_all_updates(self) -> int | None:
        """Return the process that went on to the end, if not all did."""
        is_last, rank = self._ending.is_last, self._group.rank
        told = torch.tensor([rank if is_last else -1, int(not is_last)], device=self._device)
        source, some_were_early = self._group.all_reduce(told, "max").tolist()
        return int(source) if some_were_early else None


class _Ending(Joinable, JoinHook):
    """Sends nothing itself, and learns who was last."""

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
        """The device of the messages."""
        return self._like.join_device

    @property
    def join_process_group(self) -> Any:
        """The processes."""
        return self._like.join_process_group

    def post_hook(self, is_last_joiner: bool) -> None:
        """Learn it."""
        self.is_last = is_last_joiner


def _only_training_shares(joinable: Joinable) -> list[RemovableHandle]:
    """Keep forwards without gradients to this process: there is no backward for the others to answer."""
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
        shares = before.pop()
        if shares is not None:
            model._join_config, model.require_backward_grad_sync, model.require_forward_param_sync = shares

    return [joinable.register_forward_pre_hook(enter), joinable.register_forward_hook(leave, always_call=True)]
