"""Shapes of learning-rate schedules: functions from the number of updates to a factor of the learning rate.

They have no state, so a schedule gives the same rate after every resume. Shapes with the name of a schedule of
transformers give the same numbers, `wsd` those of its warmup_stable_decay, and `one_cycle` those of torch's OneCycleLR.
"""

import math
from typing import Literal

Decay = Literal["linear", "cosine", "1-sqrt"]


def constant(step: int, *, warmup: int) -> float:
    """Return the full rate."""
    return _warmup(step, warmup) if step < warmup else 1.0


def linear(step: int, *, warmup: int, total: int, min_ratio: float = 0.0) -> float:
    """Decay linearly."""
    if step < warmup:
        return _warmup(step, warmup)
    return _interpolate(min_ratio, 1.0 - _progress(step, warmup, total))


def cosine(step: int, *, warmup: int, total: int, min_ratio: float = 0.0, num_cycles: float = 0.5) -> float:
    """Decay along a cosine, by default half a period."""
    if step < warmup:
        return _warmup(step, warmup)
    return _interpolate(min_ratio, _half_cosine(2.0 * num_cycles * _progress(step, warmup, total)))


def cosine_with_restarts(
    step: int, *, warmup: int, total: int, min_ratio: float = 0.0, num_cycles: float = 1.0
) -> float:
    """Decay along half a period of a cosine, several times."""
    if step < warmup:
        return _warmup(step, warmup)
    progress = _progress(step, warmup, total)
    return min_ratio if progress >= 1.0 else _interpolate(min_ratio, _half_cosine(num_cycles * progress % 1.0))


def polynomial(step: int, *, warmup: int, total: int, base: float, lr_end: float = 1e-7, power: float = 1.0) -> float:
    """Decay to `lr_end` by a power of the remaining fraction of steps; `base` is the peak rate."""
    if step < warmup:
        return _warmup(step, warmup)
    return _interpolate(lr_end / base, (1.0 - _progress(step, warmup, total)) ** power)


def inverse_sqrt(step: int, *, warmup: int, timescale: int | None = None) -> float:
    """Decay with the square root of the step: to one half at three times `timescale` after the warm-up."""
    if step < warmup:
        return _warmup(step, warmup)
    scale = timescale or warmup or 10_000
    return 1.0 / math.sqrt((step - warmup + scale) / scale)


def wsd(
    step: int, *, warmup: int, total: int, decay_steps: int, decay: Decay = "linear", min_ratio: float = 0.0
) -> float:
    """Rise from `min_ratio`, stay constant, and decay to `min_ratio` in the last `decay_steps`."""
    if step < warmup:
        return _interpolate(min_ratio, _warmup(step, warmup))
    progress = _progress(step, total - decay_steps, total)
    shapes = {"linear": 1.0 - progress, "cosine": _half_cosine(progress), "1-sqrt": 1.0 - math.sqrt(progress)}
    return _interpolate(min_ratio, shapes[decay])


def one_cycle(
    step: int, *, warmup: float, total: int, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> float:
    """Rise along a cosine from 1 / `div_factor`, and decay to that divided by `final_div_factor`.

    As in torch, the last of the `warmup` updates has the full rate, and the last of all the lowest one. With a `warmup`
    that is not a whole number, no update has the full rate.
    """
    start, peak, last = 1.0 / div_factor, warmup - 1, total - 1
    if step < peak:
        return _interpolate(start, _half_cosine(1.0 - step / peak))
    if step == peak:
        return 1.0
    return _interpolate(start / final_div_factor, _half_cosine(_progress(step, peak, last)))


def _warmup(step: int, warmup: int) -> float:
    return step / warmup


def _progress(step: int, start: float, end: int) -> float:
    """Return the fraction of the steps from `start` to `end` that are done, from 0 to 1."""
    if step >= end:
        return 1.0
    return 0.0 if step <= start else (step - start) / (end - start)


def _half_cosine(progress: float) -> float:
    """Return half a period of a cosine, from 1 to 0 while `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _interpolate(low: float, factor: float) -> float:
    """Return the value between `low` (at factor 0) and 1 (at factor 1)."""
    return low + (1.0 - low) * factor
