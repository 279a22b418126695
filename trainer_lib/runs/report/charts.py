"""The charts of a report: which curves share a chart, its title, and the order."""

import re
from collections.abc import Iterable
from typing import Any

# Training and evaluation come first, cost last.
_KNOWN: tuple[tuple[str, str, str, str], ...] = (
    ("loss", "Loss", "number", r"(eval_(.+_)?)?loss"),
    ("learning-rate", "Learning rate", "number", r"learning_rate(/.*)?"),
    ("gradient-norm", "Gradient norm", "number", r"grad_norm(/.*)?"),
    ("momentum", "Momentum", "number", r"momentum(/.*)?"),
    ("samples", "Samples a second", "number", r"samples_per_second(_per_device)?"),
    ("tokens", "Tokens a second", "number", r"tokens_per_second"),
    ("data-wait", "Waiting for data", "percent", r"data_wait"),
    ("memory", "Memory", "bytes", r"host_memory|device_memory_peak"),
    ("steps", "Steps a second", "number", r"steps_per_second"),
)
_EXACT = ("learning-rate", "momentum", "memory")  # without noise: not smoothed
_FIRST, _LAST = 1, len(_KNOWN)


def charts_of(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the charts, each with its title, number format and curve names.

    Example:
        >>> [chart["title"] for chart in charts_of(["learning_rate", "eval_accuracy", "eval_loss", "loss"])]
        ['Loss', 'Accuracy', 'Learning rate']
    """
    shown = set(names)
    if "samples_per_second" in shown:
        shown.discard("steps_per_second")  # the same curve
    charts: dict[str, dict[str, Any]] = {}
    places: dict[str, tuple[int, int]] = {}
    for index, name in enumerate(sorted(shown, key=lambda name: (name.startswith("eval_"), name))):
        place, key, title, form = _chart_of(name)
        chart = charts.setdefault(
            key, {"id": key, "title": title, "form": form, "smooths": key not in _EXACT, "names": []}
        )
        chart["names"].append(name)
        places[key] = min(places.get(key, (place, index)), (place, index))
    return sorted(charts.values(), key=lambda chart: places[chart["id"]])


def _chart_of(name: str) -> tuple[int, str, str, str]:
    for place, (key, title, form, pattern) in enumerate(_KNOWN):
        if re.fullmatch(pattern, name):
            return (place if place < _FIRST else place + _LAST), key, title, form
    # A training metric and the evaluation metric of the same name share a chart.
    bare = name.removeprefix("eval_")
    return _FIRST, f"metric:{bare}", f"{bare[:1].upper()}{bare[1:].replace('_', ' ')}", "number"
