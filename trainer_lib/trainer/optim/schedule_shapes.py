"""This file is the shapes of learning-rate schedules: each a function from updates made to a factor of the rate.

They are functions of numbers and nothing else, so that a schedule is the same whenever, and wherever, it is asked.
Where transformers has a schedule of the same name, it gives the same numbers.
"""

import math
from typing import Literal

Decay = Literal["linear", "cosine", "1-sqrt"]


def constant(step: int, *, warmup: int) -> float:
    """Return the full rate."""
    return _warming(step, warmup) if step < warmup else 1.0


def linear(step: int, *, warmup: int, total: int, min_ratio: float = 0.0) -> float:
    """Go down in a straight line."""
    if step < warmup:
        return _warming(step, warmup)
    return _between(min_ratio, 1.0 - _progress(step, warmup, total))


def cosine(step: int, *, warmup: int, total: int, min_ratio: float = 0.0, num_cycles: float = 0.5) -> float:
    """Go down along a cosine, by default half a wave of it."""
    if step < warmup:
        return _warming(step, warmup)
    return _between(min_ratio, _wave(2.0 * num_cycles * _progress(step, warmup, total)))


def cosine_with_restarts(
    step: int, *, warmup: int, total: int, min_ratio: float = 0.0, num_cycles: float = 1.0
) -> float:
    """Go down along half a wave of a cosine, several times."""
    if step < warmup:
        return _warming(step, warmup)
    progress = _progress(step, warmup, total)
    return min_ratio if progress >= 1.0 else _between(min_ratio, _wave(num_cycles * progress % 1.0))


def polynomial(step: int, *, warmup: int, total: int, base: float, lr_end: float = 1e-7, power: float = 1.0) -> float:
    """Go down to `lr_end` by a power of what is left; `base` is the rate that the factor is of."""
    if step < warmup:
        return _warming(step, warmup)
    return _between(lr_end / base, (1.0 - _progress(step, warmup, total)) ** power)


def inverse_sqrt(step: int, *, warmup: int, timescale: int | None = None) -> float:
    """Go down with the square root of the step, by half when four times `timescale` has gone by."""
    if step < warmup:
        return _warming(step, warmup)
    scale = timescale or warmup or 10_000
    return 1.0 / math.sqrt((step - warmup + scale) / scale)


def wsd(
    step: int, *, warmup: int, total: int, decay_steps: int, decay: Decay = "linear", min_ratio: float = 0.0
) -> float:
    """Stay, and go down in the last `decay_steps` only."""
    if step < warmup:
        return _warming(step, warmup)
    progress = _progress(step, total - decay_steps, total)
    shapes = {"linear": 1.0 - progress, "cosine": _wave(progress), "1-sqrt": 1.0 - math.sqrt(progress)}
    return _between(min_ratio, shapes[decay])


def one_cycle(step: int, *, warmup: int, total: int, div_factor: float = 25.0, final_div_factor: float = 1e4) -> float:
    """Go up along a cosine from 1 / `div_factor`, and down to that divided by `final_div_factor`."""
    start = 1.0 / div_factor
    if step < warmup:
        return _between(start, _wave(1.0 - step / warmup))
    return _between(start / final_div_factor, _wave(_progress(step, warmup, total)))


def _warming(step: int, warmup: int) -> float:
    return step / warmup


def _progress(step: int, start: int, end: int) -> float:
    """Return how much of the way from `start` to `end` has gone by, from 0 to 1."""
    return 1.0 if step >= end else max(0.0, (step - start) / max(1, end - start))


def _wave(progress: float) -> float:
    """Return a cosine that goes from 1 to 0 while `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _between(low: float, factor: float) -> float:
    """Return what lies between `low` (at 0) and 1."""
    return low + (1.0 - low) * factor
