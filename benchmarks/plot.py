"""A bar chart of the ratios, with a line from the lowest round to the highest."""

from collections.abc import Sequence
from html import escape

from benchmarks.figures import Comparison, Row

_LEFT, _WIDTH, _RIGHT, _BAR, _GAP = 156, 454, 60, 16, 6
_COLORS = {"trainer_lib": "#3f51b5"}
_OTHER = "#9e9e9e"


def svg(comparisons: Sequence[Comparison]) -> str:
    """Return the picture: time beside the loop written by hand, scenario by scenario."""
    shown = [comparison for comparison in comparisons if comparison.rows[0].baseline]
    top = max((row.cpu_ratio.high for comparison in shown for row in _bars(comparison)), default=1.0) * 1.02
    marks: list[str] = []
    y = 30
    for comparison in shown:
        marks.append(f'<text x="8" y="{y}" font-weight="bold">{escape(comparison.title)}</text>')
        y += 10
        for row in _bars(comparison):
            marks += _bar(row, y, _WIDTH / top)
            y += _BAR + _GAP
        y += 24
    x = _LEFT + _WIDTH / top
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="36" y2="{y - 24}" stroke="#d32f2f" stroke-dasharray="4 3"/>'
    middle = f'x="{x:.1f}" y="{y - 8}" text-anchor="middle"'
    size = f'width="{_LEFT + _WIDTH + _RIGHT}" height="{y}" viewBox="0 0 {_LEFT + _WIDTH + _RIGHT} {y}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13" fill="#212121">\n'
        f'<rect width="100%" height="100%" rx="6" fill="#ffffff"/>\n'
        + "\n".join([*marks, line])
        + f'\n<text {middle} fill="#d32f2f">the loop written by hand</text>\n</svg>\n'
    )


def _bars(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.rows[1:] if row.samples]


def _bar(row: Row, y: float, scale: float) -> list[str]:
    middle, low, high = (_LEFT + value * scale for value in row.cpu_ratio)
    color, center = _COLORS.get(row.contestant, _OTHER), y + _BAR / 2
    return [
        f'<text x="{_LEFT - 6}" y="{y + 13}" text-anchor="end">{escape(row.contestant)}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{middle - _LEFT:.1f}" height="{_BAR}" fill="{color}"/>',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{center}" y2="{center}" stroke="#212121"/>',
        f'<text x="{high + 5:.1f}" y="{y + 13}">{row.cpu_ratio.median:.2f}</text>',
    ]
