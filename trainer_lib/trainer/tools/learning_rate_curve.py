"""The learning rate over a whole run, sampled before it begins, and as a chart of text."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from trainer_lib.scheduler import AcceleratedScheduler
from trainer_lib.trainer.optim.schedules import moves_each_update

_MOST_STEPS = 20_000  # of a schedule that has to be stepped to know its rates
_MOST_RATES = 64
_BLOCKS = " ▁▂▃▄▅▆▇█"


def learning_rates(optimizer: Any, scheduler: Any, steps: int | None) -> list[float]:
    """Return the learning rate of the first parameter group at equal distances of a run; empty if it is not known.

    Args:
        optimizer: The optimizer, prepared or not.
        scheduler: Its schedule; `None` if it has none. It does not change.
        steps: The number of updates; `None` if it is not known.
    """
    if steps is None:
        return []
    wanted = sorted({round(index * (steps - 1) / (_MOST_RATES - 1)) for index in range(_MOST_RATES)})
    if scheduler is None:
        return [float(optimizer.param_groups[0]["lr"])] * len(wanted)
    if not moves_each_update(scheduler):
        return []
    inner = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    if isinstance(inner, LambdaLR):
        return [float(inner.base_lrs[0]) * inner.lr_lambdas[0](step) for step in wanted]
    return _stepped(inner, wanted) if steps <= _MOST_STEPS else []


def chart(rates: Sequence[float], rows: int = 4) -> list[str]:
    r"""Return a chart of so many lines, with the highest and the lowest rate at its left.

    Example:
        >>> print("\n".join(chart([0.0, 0.5, 1.0, 0.5], rows=2)))
        1  │  █
        0  │ ███
    """
    if not rates:
        return []
    high, low = max(rates), min(rates)
    base = 0.0 if low >= 0 else low
    heights = [round((rate - base) / ((high - base) or 1.0) * rows * (len(_BLOCKS) - 1)) for rate in rates]
    labels = [f"{high:.3g}"] + [""] * (rows - 2) + [f"{base:.3g}"]
    width = max(map(len, labels))
    return [
        f"{labels[row]:<{width}}  │" + "".join(_block(height, rows - 1 - row) for height in heights).rstrip()
        for row in range(rows)
    ]


def _block(height: int, row: int) -> str:
    full = len(_BLOCKS) - 1
    return _BLOCKS[min(max(height - row * full, 0), full)]


def _stepped(scheduler: Any, wanted: Sequence[int]) -> list[float]:
    """Return the rates of a copy of a schedule, which steps through the run beside an optimizer without a model."""
    light = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    light.param_groups = [
        {**copy.deepcopy(_options(group)), "params": []} for group in scheduler.optimizer.param_groups
    ]
    places: set[int] = set(wanted)
    rates: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer does not step
        copied = copy.deepcopy(scheduler, {id(scheduler.optimizer): light})
        for step in range(wanted[-1] + 1):
            if step in places:
                rates.append(float(light.param_groups[0]["lr"]))
            copied.step()
    return rates


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
