"""The guard before each update: NaN and Inf in losses or gradients never change a weight.

A loss that is not finite makes the weight of its window NaN, and with it the gradients of all ranks, by what they tell
each other anyway: the norm of the gradients tells everything, on all ranks alike.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.errors import NonFiniteError
from trainer_lib.logging import get_logger
from trainer_lib.modules.module_buffers import Buffers
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.windows.step_message import StepMessage
from trainer_lib.trainer.safety.nonfinite_report import NonFiniteReport

_logger = get_logger(__name__)

_REMEMBERED, _KNOWN = 50, 10  # losses that a spike is compared with: at most, and at least
_OVERFLOWS = 50  # overflows of fp16 in a row, after which its scale is close to 0


class NonFiniteGuard:
    """Decides for each update whether it may be made.

    Args:
        context: What is trained.
        report: Names what caused NaN or Inf.
        can_rewind: Whether there is a checkpoint to rewind to.

    Attributes:
        mark: The means as they were before the window, where it may be skipped.
        is_scaled: Whether a scaler skips updates that overflow (fp16).
        reads_losses: Whether losses are read before their backward.
        watches_spikes: Whether ranks tell each other the loss of a window.
    """

    policy: Any

    def __init__(self, context: FitContext, report: NonFiniteReport, can_rewind: Callable[[], bool]) -> None:
        run, accelerator = context.run, context.accelerator
        args = run.args
        self._context, self._run, self._window = context, run, accelerator.window
        self._report, self._can_rewind = report, can_rewind
        self._parameters: list[Tensor] = []
        self.policy, self._most, self._factor = args.on_nonfinite, args.max_nonfinite, args.loss_spike
        self.watches_spikes: bool = self._factor is not None
        self.is_scaled: bool = accelerator.precision.scaler is not None
        self._max_norm = args.max_grad_norm
        self._in_backward = [each for each in run.optimizers.values() if each.updates_in_backward]
        is_on_host = accelerator.device.type == "cpu"
        self.reads_losses: bool = is_on_host or self.policy != "raise" or self.watches_spikes
        # Fused optimizers skip an update on their device; it is reported later, so that nothing waits for the norm.
        self._skipping = [] if self.reads_losses or self.is_scaled else _that_can_skip(run.optimizers.values())
        self._found: Tensor | None = None  # on the device: whether an update was skipped
        self._norm_before: Tensor | None = None  # of the gradients as the backward left them
        self._buffers = Buffers(context.models)
        self.mark: Any = None
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._in_window = 0.0
        self._overflows = 0

    # -- before an update -----------------------------------------------------------------------------------------

    @property
    def rewinds(self) -> bool:
        """Whether a refused update makes the run go back to its last checkpoint."""
        return self.policy == "rewind" and self._can_rewind()

    def begin_window(self) -> None:
        """Remember the logged means and the buffers: a skipped update leaves no trace in them."""
        self._in_window = 0.0
        self._norm_before = None
        if self._buffers.exist:
            self._buffers.copy()
        self.mark = self._context.means.mark() if self.policy != "raise" else None

    def weigh(self, loss: Tensor, weight: float | Tensor, is_mean: bool) -> float | Tensor:
        """Return the weight of a loss, a mean or a sum over so many items: NaN if the loss is NaN or infinite."""
        value = loss.item()
        if self.watches_spikes:
            self._in_window += value * float(weight) if is_mean else value
            if isinstance(self._window.message, StepMessage):
                self._window.message.window_loss = self._in_window
        if math.isfinite(value):
            return weight
        self._report.note_loss(value)
        return torch.full((), math.nan, device=loss.device)

    def passes(self) -> bool:
        """Clip gradients, and return whether the update may be made; the same on all ranks."""
        if self._in_backward:
            return self._were_finite()
        run, strategy = self._run, self._run.accelerator.strategy
        run.accelerator.unscale_gradients()
        parameters = self._trained()
        norm = run.grad_norm = strategy.grad_norm(parameters, 2.0)
        if self._skipping:
            self._skip_on_device(norm)
            value = math.inf  # not known here
        else:
            value = norm.item()
            if not math.isfinite(value):
                norm = run.grad_norm = strategy.grad_norm(parameters, 2.0, in_double=True)
                value = norm.item()
            if not self._is_finite(value):
                return False
            if self._factor is not None and math.isfinite(value) and not self._is_no_spike():
                return False
        if self._max_norm is not None and value > 0.99 * self._max_norm:  # smaller ones are left alone, up to rounding
            strategy.shrink_gradients(parameters, self._max_norm, norm)
        return True

    def passes_to_callbacks(self, has_stepped: bool) -> bool:
        """Prepare gradients for callbacks, and return whether they may have them: none modifies NaN or Inf.

        Args:
            has_stepped: Whether the training step stepped the optimizers itself.
        """
        events = self._context.events
        if "on_backward_end" not in events.handlers and "on_optimizer_step_begin" not in events.handlers:
            return True
        self._run.accelerator.unscale_gradients()  # callbacks see the true size of gradients
        return has_stepped or not events.modifies("on_backward_end") or self._is_finite_unmodified()

    def _is_finite_unmodified(self) -> bool:
        # Clipping by value, for one, makes infinite gradients finite and wrong.
        strategy = self._run.accelerator.strategy
        parameters = self._trained()
        norm = strategy.grad_norm(parameters, 2.0)
        if self._skipping:
            self._norm_before = norm
            return True
        value = norm.item()
        if not math.isfinite(value):
            value = strategy.grad_norm(parameters, 2.0, in_double=True).item()
        return self._is_finite(value)

    def _were_finite(self) -> bool:
        """Raise if gradients were not finite; parameters with finite ones are updated already."""
        from trainer_lib.accelerator.optimizer_in_backward import norm_in_backward

        norm = self._run.grad_norm = norm_in_backward(self._in_backward)
        value = norm.item()
        if math.isfinite(value):
            return True
        optimizer = self._in_backward[0]
        raise NonFiniteError(
            f"{self._report.find(value)} With {optimizer.option} the other weights are updated already: resume from "
            f"the last checkpoint, or {optimizer.remedy}, so that no weight changes."
        )

    def _trained(self) -> list[Tensor]:
        if not self._parameters:
            self._parameters = self._run.trained_parameters
        return list(self._run.accelerator.strategy.current_parameters(self._parameters))

    def _is_finite(self, norm: float) -> bool:
        optimizers = self._run.optimizers.values()
        if math.isfinite(norm):
            self._overflows = 0
            return True
        if self.is_scaled and not any(self._is_spoiled(optimizer) for optimizer in optimizers):
            self._overflows += 1  # the scale was too large: the scaler skips this update, and lowers it
            if self._overflows < _OVERFLOWS:
                return True
        return self._refuse(self._report.find(norm))

    def _skip_on_device(self, norm: Tensor) -> None:
        self._report.watch_weights()
        found = one_if_not_finite(norm)
        if self._norm_before is not None:
            found = torch.maximum(found, one_if_not_finite(self._norm_before))
        if self._buffers.exist:
            self._buffers.restore_where(found.bool())
        self._found = found if self._found is None else torch.maximum(self._found, found)
        for optimizer in self._skipping:
            optimizer.found_inf = found

    def flush(self) -> None:
        """Report what was skipped on a device; where there is time to wait for it, and before anything is saved."""
        if self._found is not None:
            found, self._found = float(self._found), None
            if found:
                self._refuse(self._report.find(math.nan), self._run.state.step)

    def restore_buffers(self) -> None:
        """Restore the buffers after an update that the scaler of fp16 skipped."""
        if self._buffers.exist:
            self._buffers.restore()

    # -- after it --------------------------------------------------------------------------------------------------

    def skip_update(self) -> None:
        """Restore the logged means to those before the window."""
        self._context.means.go_back(self.mark)
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
        usual, deviation = _usual(self._losses) if len(self._losses) >= _KNOWN else (math.inf, math.inf)
        assert self._factor is not None
        if deviation and loss > usual + self._factor * deviation:
            return self._refuse(
                f"In step {self._run.state.step + 1} the loss is {loss:.6g}, more than loss_spike={self._factor} "
                f"deviations above the usual {usual:.6g} ± {deviation:.2g}{self._report.samples()}."
            )
        self._losses.append(loss)
        return True

    def _loss_of_all(self) -> float:
        share = self._window.share_of(tuple(self._run.optimizers.values()))
        if share is None or share.total is None or not float(share.total):
            return 0.0
        total = self._in_window if self._window.is_local else self._received_loss()
        return total / float(share.total)

    def _received_loss(self) -> float:
        message = self._window.message
        assert isinstance(message, StepMessage)
        assert message.received is not None
        assert message.received.window_loss is not None
        return float(message.received.window_loss)

    def _refuse(self, what: str, step: int | None = None) -> bool:
        """Raise, or note that an update is skipped; weights and buffers are as before it.

        Args:
            what: The value with NaN or Inf, for the message.
            step: The step in the history; `None` is the one that the update would have made.
        """
        state = self._run.state
        if self._buffers.exist and not self._skipping:
            self._buffers.restore()
        rewinds = self.rewinds
        if not rewinds and (spoiled := self._report.spoiled_weights()):
            raise NonFiniteError(
                f"{what} {len(spoiled)} weights were NaN or Inf before this step ({', '.join(spoiled[:3])}"
                f"{', …' if len(spoiled) > 3 else ''}): an earlier update overflowed although its gradients were "
                "finite. Lower the learning rate and resume from a checkpoint before that, or use "
                'on_nonfinite="rewind" with save_every.'
            )
        if self.policy == "raise":
            raise NonFiniteError(
                f'{what} Weights and buffers are as before this step. on_nonfinite="skip" skips such updates, "rewind" '
                "goes back to the last checkpoint and skips what led here."
            )
        if state.skipped >= self._most:
            raise NonFiniteError(
                f"{what} The run has skipped {state.skipped} updates already (max_nonfinite={self._most}), so single "
                "samples are not the cause. Lower the learning rate, or look at those samples."
            )
        state.skipped += 1
        does = "The run rewinds to its last checkpoint and skips this update" if rewinds else "This update is skipped"
        _logger.warning("%s %s (%d of max_nonfinite=%d).", what, does, state.skipped, self._most)
        name = "went_back" if rewinds else "left_out"
        self._run.record_event(name, why=what, step=state.step + 1 if step is None else step)
        return False


def one_if_not_finite(norm: Tensor) -> Tensor:
    """Return the flag by which fused optimizers skip an update: 1 or 0, in a third of the kernels of `isfinite`."""
    return torch.nan_to_num(norm * 0.0, nan=1.0).float()  # in the norm's own type: of double, 1e300 is finite


def _usual(losses: Iterable[float]) -> tuple[float, float]:
    """Return the median of losses and their median distance from it, which is at least a hundredth of it.

    The distance, unlike a multiple of the loss, means the same for losses around zero and below it. Medians, since a
    spike among the losses must not hide the next one.
    """
    from statistics import median as median_of

    known = list(losses)
    median = median_of(known)
    return median, max(median_of(abs(loss - median) for loss in known), 0.01 * abs(median))


def _that_can_skip(optimizers: Any) -> list[Any]:
    """Return the optimizers inside, if all of them take a flag that has them leave the weights alone."""
    inner = [optimizer.optimizer for optimizer in optimizers]
    return inner if all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in inner) else []
