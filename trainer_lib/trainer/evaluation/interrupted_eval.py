"""Interrupting an evaluation on all ranks, when the run is asked to save and end."""

from collections.abc import Callable

import torch

from trainer_lib.events import Control
from trainer_lib.process_group import ProcessGroup

_BATCHES_APART = 8  # how often ranks in lockstep exchange whether to leave


class EvaluationInterrupted(Exception):  # noqa: N818 - it is not an error
    """An evaluation ended before its last batch, on all ranks, and has no metrics."""


class EvalInterruption:
    """Decides before each batch whether to leave an evaluation.

    Ranks that evaluate independently leave at once, and the others learn of it at the next exchange: when batches are
    gathered, or at the end of the set. Ranks in lockstep exchange it every few batches.

    Args:
        control: The requests on this rank.
        group: The process group.
        device: The device of collective operations.
        in_lockstep: Whether all ranks must make the same number of steps.
        look: Checks the deadline, if this rank has one.
    """

    def __init__(
        self,
        control: Control,
        group: ProcessGroup,
        device: torch.device,
        in_lockstep: bool,
        look: Callable[[], None] | None,
    ) -> None:
        self._control, self._group, self._device, self._look = control, group, device, look
        self._in_lockstep = in_lockstep
        self._asked = 0

    def __call__(self) -> bool:
        """Whether to leave the evaluation before this batch."""
        if self._look is not None:
            self._look()
        is_wanted = self._control.interruption is not None
        if not self._in_lockstep:
            return is_wanted
        self._asked += 1
        if self._asked % _BATCHES_APART:
            return False
        return bool(self._group.all_reduce(torch.full((), float(is_wanted), device=self._device), "max"))
