"""`UnusedParameters`: FSDP2 reduces the gradients of parameters that only some ranks have used."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainer_lib.process_group import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class UnusedParameters:
    """Gives parameters that this rank has not used zeros as gradients, since other ranks may have used them.

    torch reduces the gradients of a block in one message. If ranks have gradients of different parameters, torch adds
    them up where they are of one size, and else fails or waits forever.

    At the end of the first backward, ranks tell each other whether any of them has unused parameters. If so, they do it
    after each backward, and a parameter that no rank has used gets no gradient, as on one process. If not, a parameter
    that no rank uses later has zeros.

    Args:
        blocks: The modules that are sharded separately.
        group: The ranks that reduce gradients together.
        device: The device of this rank.
    """

    def __init__(self, blocks: "Sequence[FSDPModule]", group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._watches = group.size > 1
        self._is_first = True
        self._params: list[Any] = []
        self._unused: set[Any] = set()  # by this rank, in this backward
        self._used: set[Any] = set()
        self._accumulated: set[Any] = set()  # unused ones that have gradients of earlier backwards
        self._reduces = False
        for block in blocks:
            # torch has no event for these two moments.
            state: Any = block._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
            for param_group in state._fsdp_param_groups:
                param_group.post_backward = partial(_reduce_gathered, param_group, param_group.post_backward)
            if not self._watches:
                continue
            state._root_post_backward_final_callback = partial(self._end, state._root_post_backward_final_callback)
            for param_group in state._fsdp_param_groups:
                param_group.post_backward = partial(self._reduce, param_group, param_group.post_backward)
                self._params += param_group.fsdp_params

    @property
    def watches(self) -> bool | None:
        """Whether ranks tell each other after each backward what they have not used; `None` before the first one."""
        return None if self._is_first or self._group.size == 1 else self._watches

    @watches.setter
    def watches(self, watches: bool | None) -> None:
        if self._group.size > 1:
            self._is_first, self._watches = watches is None, watches is not False

    def _reduce(self, param_group: Any, reduce: Callable[..., None], *arguments: Any) -> None:
        """Reduce the gradients of a block."""
        # A block without a backward gathers no weights, so no rank has had one.
        had_backward = param_group._training_state.name == "PRE_BACKWARD"
        param_group.reduce_scatter_unused_params = had_backward
        if self._watches and param_group.reduce_grads:
            self._reduces = True
            # A module that is called twice has two reductions in a backward, and gradients only at the second one.
            self._used.update(param for param in param_group.fsdp_params if not _is_unused(param))
            unused = set(param_group.fsdp_params) - self._used - self._unused
            self._unused |= unused
            self._accumulated.update(param for param in unused if param.sharded_param.grad is not None)
        reduce(*arguments)

    def _end(self, end: Callable[[], None]) -> None:
        """End a backward."""
        end()
        if not self._reduces:
            return
        self._reduces = False
        self._unused -= self._used
        if self._is_first:
            self._is_first = False
            any_unused = torch.tensor(float(bool(self._unused)), device=self._device)
            self._watches = bool(self._group.all_reduce(any_unused, "max"))
        if self._watches:
            used = torch.tensor([float(param not in self._unused) for param in self._params], device=self._device)
            for param, is_used in zip(self._params, self._group.all_reduce(used, "max").tolist(), strict=True):
                if not is_used and param not in self._accumulated:
                    param.sharded_param.grad = None
        self._unused.clear()
        self._used.clear()
        self._accumulated.clear()


def _reduce_gathered(param_group: Any, reduce: Callable[..., None], *arguments: Any) -> None:
    """Reduce the gradients of a block; in a micro-batch without an update torch would raise if it has never run."""
    # Before 2.15 torch chooses no types for a block that was frozen, and that may train now.
    if getattr(param_group, "_orig_dtype", ...) is None:
        param_group._init_mp_dtypes()
    if param_group.reduce_grads:
        _add_up_in_one_type(param_group)
    if param_group.reduce_grads or all(hasattr(param, "_unsharded_param") for param in param_group.fsdp_params):
        reduce(*arguments)


def _add_up_in_one_type(param_group: Any) -> None:
    """Give all gradients of a block the type of those of earlier micro-batches: torch reduces gradients of one type."""
    gathered = [param for param in param_group.fsdp_params if hasattr(param, "_unsharded_param")]
    if all(param.unsharded_accumulated_grad is None for param in gathered):
        return
    for param in gathered:
        if param.unsharded_accumulated_grad is None:
            if param_group.reduce_scatter_unused_params and _is_unused(param):
                param._unsharded_param.grad = torch.zeros_like(param._unsharded_param)
            param.to_accumulated_grad_if_needed()


def _is_unused(param: Any) -> bool:
    if not param.sharded_param.requires_grad or getattr(param, "unsharded_accumulated_grad", None) is not None:
        return False
    whole = getattr(param, "_unsharded_param", None)
    return whole is None or whole.grad is None
