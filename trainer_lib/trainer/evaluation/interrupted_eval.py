"""This file is leaving an evaluation before its end, on all processes, where the run was asked to save and end."""

from collections.abc import Callable

import torch

from trainer_lib.events import Control
from trainer_lib.process_group import ProcessGroup

_BATCHES_APART = 8  # where processes have to agree before each batch that one leaves out


class EvaluationInterrupted(Exception):  # noqa: N818 - it went as it should
    """An evaluation was left before its end, on all processes; it comes to nothing."""


class EvalInterruption:
    """Whether to leave an evaluation; asked before each batch.

    Processes that evaluate each for itself leave on their own, and the others hear of it where they meet next: when
    batches are handed round, or at the end of the set. Those that compute together agree now and then.

    Args:
        control: What this process was asked for.
        group: The processes.
        device: Where they talk.
        in_lockstep: Whether they compute together.
        look: Looks at a deadline, if this process has one.
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
        """Whether to leave it before this batch."""
        if self._look is not None:
            self._look()
        is_wanted = self._control.interruption is not None
        if not self._in_lockstep:
            return is_wanted
        self._asked += 1
        if self._asked % _BATCHES_APART:
            return False
        return bool(self._group.all_reduce(torch.full((), float(is_wanted), device=self._device), "max"))
