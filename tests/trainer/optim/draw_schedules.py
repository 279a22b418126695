"""Draws the picture of the learning-rate schedules in docs/trainer.md, from the rates that they give.

`python -m tests.trainer.optim.draw_schedules` writes it.
"""

from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD

from trainer_lib.trainer.optim.schedules import build_schedule, is_metric_driven

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "schedules.svg"

# The name of each, and the options that the picture shows it with.
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 3},
    "wsd": {"decay_ratio": 0.2},
    "constant": {},
    "inverse_sqrt": {},
    "polynomial": {"power": 3},
    "one_cycle": {},
    "plateau": {"factor": 0.3, "patience": 2},
}
_TOTAL, _WARMUP = 200, 20
_EVAL_EVERY, _BEST_AT = 10, 60  # the metric of the plateau improves until this step
_WIDTH, _HEIGHT, _COLUMNS = 240, 100, 3  # of a panel
_GAP, _TITLE = 40, 44


def rates_of(name: str, options: dict[str, Any]) -> list[float]:
    """Return the rate of each update of a run with a warm-up, of the largest rate."""
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    warmup = {} if name == "one_cycle" else {"warmup_steps": _WARMUP}  # it has one of its own
    schedule: Any = build_schedule(name, optimizer, total_steps=_TOTAL, **warmup, **options)
    rates: list[float] = []
    for step in range(1, _TOTAL + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        if is_metric_driven(schedule) and step % _EVAL_EVERY == 0:
            schedule.step(1.0 / min(step, _BEST_AT))
    return rates


def svg() -> str:
    """Return the picture: a panel for each schedule."""
    rows = -(-len(SCHEDULES) // _COLUMNS)
    width, height = _COLUMNS * (_WIDTH + _GAP) + _GAP, rows * (_HEIGHT + _TITLE) + 16
    panels = "\n".join(
        _panel(name, options, _GAP + number % _COLUMNS * (_WIDTH + _GAP), number // _COLUMNS * (_HEIGHT + _TITLE))
        for number, (name, options) in enumerate(SCHEDULES.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="ui-monospace, monospace" font-size="13">\n'
        "<title>The learning rate over a run with each schedule</title>\n"
        "<style>.n { fill: #14424f; font-weight: 600 } .o { fill: #41626b } .a { stroke: #c5d5d9 } "
        ".r { stroke: #c2410c; stroke-width: 2; fill: none }</style>\n"
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>\n{panels}\n</svg>\n'
    )


def _panel(name: str, options: dict[str, Any], left: int, top: int) -> str:
    bottom = top + _TITLE + _HEIGHT - 8
    rates = rates_of(name, options)
    points = " ".join(
        f"{left + step / (_TOTAL - 1) * _WIDTH:.1f},{bottom - rate * (_HEIGHT - 22):.1f}"
        for step, rate in enumerate(rates)
    )
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    note = f'<text class="o" x="{left}" y="{top + 43}" font-size="11">{given}</text>' if given else ""
    return (
        f'<text class="n" x="{left}" y="{top + 28}">{name}</text>{note}'
        f'<path class="a" d="M{left} {bottom}h{_WIDTH}"/><polyline class="r" points="{points}"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(svg())
