"""Positions in charts, in the units of their SVG: used by charts.html."""

from collections.abc import Sequence

import numpy as np

from vitkit.apps.report.sections import Curve

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 408, 10, 262
"""Edges of the unit square."""
TICKS = (0, 0.2, 0.4, 0.6, 0.8, 1.0)
_COLORS = ("#1f6fb4", "#d1640f", "#2b8a3e", "#b02a37", "#6f42c1", "#7a5230", "#c2408f", "#5c6670", "#8a8500", "#0b8a94")


def x_at(x: float) -> float:
    """Convert x in 0..1 to the SVG's units."""
    return round(LEFT + x * (RIGHT - LEFT), 1)


def y_at(y: float) -> float:
    """Convert y in 0..1 to the SVG's units."""
    return round(BOTTOM - y * (BOTTOM - TOP), 1)


def color(number: int) -> str:
    """Return the color of a curve."""
    return _COLORS[number % len(_COLORS)]


def line_of(curve: Curve) -> str:
    """Return the points of a curve."""
    return _points(curve.x, curve.y)


def band_of(curve: Curve) -> str:
    """Return the outline of a curve's interval; "" if it has none."""
    if curve.low is None or curve.high is None:
        return ""
    finite = np.isfinite(curve.low)
    x, low, high = curve.x[finite], curve.low[finite], curve.high[finite]
    return _points(np.r_[x, x[::-1]], np.r_[low, high[::-1]])


def widest(rows: Sequence[tuple[str, float, float, float]]) -> float:
    """Return the largest value of bars, at least 0.01."""
    return max([0.01, *(value for row in rows for value in row[1:] if value == value)])


def percent(value: float, total: float) -> float:
    """Return a value as a percentage, 0..100; 0 for NaN."""
    return round(100 * max(value, 0.0) / total, 1) if value == value else 0.0


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{x_at(a)},{y_at(b)}" for a, b in zip(x.tolist(), y.tolist()) if b == b)
