"""Learning rates and schedules of a resumed run: changed arguments override the checkpoint's values."""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from trainer_lib.events import Run
from trainer_lib.logging import get_logger
from trainer_lib.trainer.optim.plateau import PlateauSchedule

_logger = get_logger(__name__)

_OF_RATES = ("learning_rate", "parameter_groups", "optimizer_kwargs")
_OF_GROUPS = ("weight_decay", "parameter_groups", "optimizer_kwargs")
_OF_SCHEDULES = ("num_train_epochs", "max_steps", "schedule_steps", "warmup", "lr_scheduler", "lr_scheduler_kwargs")
_KEPT = ("params", "param_names", "lr", "initial_lr")


class FreshOptimizers:
    """The optimizers and schedules as the current arguments made them, before a checkpoint is loaded into them.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._groups = {
            name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for name, optimizer in run.optimizers.items()
        }
        self._bases = {
            name: list(getattr(schedule.scheduler, "base_lrs", ())) for name, schedule in run.schedulers.items()
        }

    def apply(self, changed: Collection[str], moved: int, is_other_length: bool) -> None:
        """Apply changed arguments to the optimizers and schedules after a checkpoint was loaded into them.

        Args:
            changed: The names of the changed arguments.
            moved: How many steps to advance schedules by, where the number of samples per update changed.
            is_other_length: Whether the number of updates per epoch changed, so that schedules were rebuilt.
        """
        has_other_rates = not {*_OF_RATES}.isdisjoint(changed)
        if has_other_rates:
            self._take_rates()
        if not {*_OF_GROUPS}.isdisjoint(changed):
            self._take_options()
        if has_other_rates or moved or is_other_length or not {*_OF_SCHEDULES}.isdisjoint(changed):
            for name, schedule in self._run.schedulers.items():
                self._move(name, schedule.scheduler, moved)

    def _take_rates(self) -> None:
        for name, optimizer in self._run.optimizers.items():
            for group, fresh in zip(optimizer.param_groups, self._groups[name], strict=True):
                _scale_rate(group, fresh)
        for name, schedule in self._run.schedulers.items():
            if self._bases[name]:
                schedule.scheduler.base_lrs = list(self._bases[name])

    def _take_options(self) -> None:
        for name, optimizer in self._run.optimizers.items():
            for group, fresh in zip(optimizer.param_groups, self._groups[name], strict=True):
                group.update({key: value for key, value in fresh.items() if key not in _KEPT})

    def _move(self, name: str, schedule: Any, moved: int) -> None:
        """Advance a schedule, and set its optimizer's learning rates to match."""
        if not isinstance(schedule, (LambdaLR, PlateauSchedule)):
            if moved:
                _logger.warning(
                    "The schedule %s of %s counts updates, and the number of samples per update changed. It cannot be "
                    "advanced to match, and continues from the update it was saved at.",
                    type(schedule).__name__,
                    name,
                )
            return
        schedule.last_epoch += moved
        step = schedule.last_epoch
        if isinstance(schedule, PlateauSchedule):
            rates: list[Any] = [schedule.rate_at(step, group) for group in range(len(schedule.base_lrs))]
        else:
            rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            _set_rate(group, float(rate))
        # torch's schedules have no public way to set what `get_last_lr` returns.
        schedule._last_lr = rates  # pyright: ignore[reportPrivateUsage]


def _scale_rate(group: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Change a learning rate by the ratio of the fresh base rate to the one that was loaded."""
    before, now = (float(options.get("initial_lr", options["lr"])) for options in (group, fresh))
    if before == now:
        return
    _set_rate(group, float(group["lr"]) * now / before if before else now)
    if "initial_lr" in group:
        group["initial_lr"] = fresh["initial_lr"]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
