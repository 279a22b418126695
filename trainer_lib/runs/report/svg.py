"""Curves as a small SVG image, for notebooks."""

import html
import math
from collections.abc import Callable, Mapping, Sequence

from trainer_lib.runs.report.downsampling import thin
from trainer_lib.runs.report.formatting import short

Points = Sequence[tuple[float, float]]

_COLOURS = ("#3b7be0", "#e0832a", "#1fa374", "#d04f9c", "#8a62e0", "#1f9db5")  # on light and on dark
_WIDTH, _HEIGHT = 420, 220  # in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 10, 24, 22
_POINTS = 800  # per curve


def draw_curves(title: str, curves: Mapping[str, Points]) -> str:
    """Return curves over steps as SVG, with gaps at NaN and Inf.

    Args:
        title: The title of the chart.
        curves: Steps and values, by curve name.

    Example:
        >>> draw_curves("Loss", {"loss": [(1, 0.5), (2, 0.25)]})[:4]
        '<svg'
    """
    known = [(x, y) for points in curves.values() for x, y in points if math.isfinite(y)]
    low, high = min((y for _, y in known), default=0.0), max((y for _, y in known), default=1.0)
    first, last = min((x for x, _ in known), default=0.0), max((x for x, _ in known), default=1.0)
    room = (high - low or abs(high) or 1.0) * 0.05
    low, high = low - room, high + room

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first or 1.0) * (_WIDTH - _LEFT - _RIGHT)
        return _LEFT + across, _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="15" font-weight="600">{html.escape(title)}</text>']
    for part in range(5):
        value = low + room + part / 4 * (high - low - 2 * room)
        _, y = place(first, value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" opacity=".15"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" opacity=".65">{value:.3g}</text>')
    for x, anchor in ((first, "start"), (last, "end")):
        label_start = f'<text x="{place(x, low)[0]:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}" opacity=".65">'
        parts.append(f"{label_start}{short(round(x))}</text>")
    label_end = float(_WIDTH - _RIGHT)
    for index, (name, points) in reversed(list(enumerate(curves.items()))):
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<path d="{_path(points, place)}" fill="none" stroke="{colour}" stroke-width="1.75"/>')
        label = f"{name} {short(points[-1][1]) if points else ''}"
        parts.append(f'<text x="{label_end}" y="15" text-anchor="end" fill="{colour}">{html.escape(label)}</text>')
        label_end -= 7 * len(label) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" font-size="11" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )


def _path(points: Points, place: Callable[[float, float], tuple[float, float]]) -> str:
    kept = [points[index] for index in thin([y for _, y in points], _POINTS).tolist()]
    text, is_open = list[str](), False
    for x, y in kept:
        if math.isfinite(y):
            across, down = place(x, y)
            # A single point is a line of length 0, which would be invisible.
            text.append(f"{'L' if is_open else 'M'}{across:.1f} {down:.1f}" + ("" if is_open else "h.01"))
        is_open = math.isfinite(y)
    return "".join(text)
