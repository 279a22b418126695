"""This file is the guard before each update: losses and gradients that are not finite never change a weight.

A loss that is not finite gives its window a weight that is none either, and so makes the gradients of all processes not
finite, by what they tell each other anyway: the norm of the gradients tells everything, on all processes alike.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer_lib.foundation.errors import NonFiniteError
from trainer_lib.logging import get_logger
from trainer_lib.trainer.culprits import Culprits

if TYPE_CHECKING:
    from trainer_lib.trainer.fitting import Fitting

_logger = get_logger(__name__)

_REMEMBERED, _KNOWN = 50, 10  # losses that a spike is measured by, and how many there have to be
_OVERFLOWS = 50  # of fp16 in a row, by when its scale is next to nothing


class Guard:
    """Says of each update whether it may be made.

    Args:
        fitting: Whose updates they are.

    Attributes:
        mark: The averages as they were before the window, where it may be left out.
        reads_losses: Whether losses are looked at before their backward.
        watches_spikes: Whether processes tell each other what their losses of a window come to.
    """

    def __init__(self, fitting: "Fitting") -> None:
        run = fitting.run
        args, accelerator = run.args, run.accelerator
        self._fitting, self._run, self._window = fitting, run, accelerator._window
        self._culprits = Culprits(fitting)
        self.policy, self._most, self._factor = args.on_nonfinite, args.max_nonfinite, args.loss_spike
        self.watches_spikes = self._factor is not None
        self._is_scaled = accelerator.precision.scaler is not None
        self._is_norm_there = args.max_grad_norm is not None
        is_on_host = accelerator.device.type == "cpu"
        self.reads_losses = is_on_host or self.policy != "raise" or self.watches_spikes
        # Fused optimizers skip an update on their device, which is told of later: nothing waits for the norm.
        self._skipping = [] if self.reads_losses or self._is_scaled else _that_can_skip(run.optimizers.values())
        self._found: Tensor | None = None  # on the device: whether an update was skipped
        self.mark: Any = None
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._in_window = 0.0
        self._overflows = 0

    # -- before an update -----------------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Note where the averages stand, which a window that is left out is not to be part of."""
        self._in_window = 0.0
        self.mark = self._fitting.trainer.averages.mark() if self.policy != "raise" else None

    def weigh(self, loss: Tensor, weight: float | Tensor) -> float | Tensor:
        """Return what a loss weighs: a number that is none, if the loss is none."""
        value = loss.item()
        if self.watches_spikes:
            self._in_window += value
            if self._run.accelerator.sync_gradients and not self._window.is_alone:
                self._window.notes = [*self._window.notes, self._in_window]
        if math.isfinite(value):
            return weight
        self._culprits.note_loss(value)
        return torch.full((), math.nan, device=loss.device)

    def passes(self) -> bool:
        """Whether the update may be made; the same on all processes."""
        run, optimizers = self._run, self._run.optimizers.values()
        if not self._is_norm_there:
            run.accelerator.unscale_gradients()
            run.grad_norm = _norm(self._fitting)
        norm = run.grad_norm
        assert norm is not None
        if self._skipping:
            found = (~torch.isfinite(norm)).float()
            self._found = found if self._found is None else torch.maximum(self._found, found)
            for optimizer in self._skipping:
                optimizer.found_inf = found
            return True
        if math.isfinite(norm):
            self._overflows = 0
            return self._factor is None or self._is_no_spike()
        if self._is_scaled and not any(self._is_spoiled(optimizer) for optimizer in optimizers):
            self._overflows += 1  # a scale that was too large; the scaler leaves this one out, and lowers it
            if self._overflows < _OVERFLOWS:
                return True
        return self._refuse(self._culprits.find(float(norm)))

    def settle(self) -> None:
        """Tell of what was skipped on a device; where there is time to wait for it, and before anything is saved."""
        if self._found is not None:
            found, self._found = float(self._found), None
            if found:
                self._refuse(self._culprits.find(math.nan))

    # -- after it --------------------------------------------------------------------------------------------------

    def leave_out(self) -> None:
        """Have an update be as if its samples had not been there."""
        self._fitting.trainer.averages.go_back(self.mark)
        self._run.grad_norm = None

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that a spike is measured by."""
        return {"losses": list(self._losses)} if self.watches_spikes else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them up."""
        self._losses.clear()
        self._losses.extend(state.get("losses", ()))

    # -- private ---------------------------------------------------------------------------------------------------

    def _is_spoiled(self, optimizer: Any) -> bool:
        return math.isnan(float(self._window.factor(optimizer)))

    def _is_no_spike(self) -> bool:
        loss = self._loss_of_all()
        usual = statistics.median(self._losses) if len(self._losses) >= _KNOWN else math.inf
        assert self._factor is not None
        if loss > usual * self._factor:
            return self._refuse(
                f"In step {self._run.state.step + 1} the loss is {loss:.6g}, and {usual:.6g} is usual: more than "
                f"loss_spike={self._factor} times as much{self._culprits.samples()}."
            )
        self._losses.append(loss)
        return True

    def _loss_of_all(self) -> float:
        share = self._window.share_of(tuple(self._run.optimizers.values()))
        if share is None or share.total is None or not float(share.total):
            return 0.0
        total = self._in_window if self._window.is_alone else float(self._window.heard[-1])
        return total / float(share.total)

    def _refuse(self, what: str) -> bool:
        """Raise, or note that an update is left out; the weights are as they were."""
        state = self._run.state
        if self.policy == "raise":
            raise NonFiniteError(
                f'{what} The weights are as they were before. on_nonfinite="skip" leaves out such updates, "rewind" '
                "goes back to the last checkpoint and leaves out what led here."
            )
        if state.skipped >= self._most:
            raise NonFiniteError(
                f"{what} The run has left out {state.skipped} updates already, and max_nonfinite={self._most}: what is "
                "wrong is not in the data alone. Lower the learning rate, or look at those samples."
            )
        state.skipped += 1
        goes_back = self.policy == "rewind" and self._fitting.can_go_back
        does = "The run goes back to its last checkpoint, and leaves it out" if goes_back else "It is left out"
        _logger.warning("%s %s (%d of max_nonfinite=%d).", what, does, state.skipped, self._most)
        self._run.note("went_back" if goes_back else "left_out", why=what)
        return False


def _that_can_skip(optimizers: Any) -> list[Any]:
    """Return the optimizers inside, if all of them take a flag that has them leave the weights alone."""
    inner = [one.optimizer for one in optimizers]
    return inner if all(getattr(one, "_step_supports_amp_scaling", False) for one in inner) else []


def _norm(fitting: "Fitting") -> Tensor:
    strategy = fitting.run.accelerator.strategy
    parameters = [p for one in fitting.run.optimizers.values() for group in one.param_groups for p in group["params"]]
    return strategy.grad_norm(strategy.trained(parameters), 2.0)
