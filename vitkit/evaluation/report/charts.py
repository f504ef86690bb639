"""Charts as inline SVG."""

import html
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 38
COLORS = ("#1f6fb4", "#d1640f", "#2b8a3e", "#b02a37", "#6f42c1", "#7a5230", "#c2408f", "#5c6670", "#8a8500", "#0b8a94")


class Curve(NamedTuple):
    """A named line; NaN leaves a gap in it."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def _at(x: float, y: float) -> tuple[float, float]:
    """Convert a point of the unit square to pixels."""
    return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join("{:.1f},{:.1f}".format(*_at(a, b)) for a, b in zip(x.tolist(), y.tolist()) if b == b)


def _frame(x_title: str, y_title: str) -> str:
    lines = []
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1.0):
        (x, bottom), (left, y) = _at(tick, 0), _at(0, tick)
        lines.append(f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{bottom:.1f}'/>")
        lines.append(f"<line class='grid' x1='{left:.1f}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        lines.append(f"<text x='{x:.1f}' y='{bottom + 15:.1f}' text-anchor='middle'>{tick:g}</text>")
        lines.append(f"<text x='{left - 6:.1f}' y='{y + 4:.1f}' text-anchor='end'>{tick:g}</text>")
    middle = (_at(0.5, 0)[0], _at(0, 0.5)[1])
    lines.append(f"<text x='{middle[0]:.1f}' y='{HEIGHT - 4}' text-anchor='middle'>{html.escape(x_title)}</text>")
    turned = f"transform='rotate(-90 12 {middle[1]:.1f})'"
    lines.append(f"<text x='12' y='{middle[1]:.1f}' text-anchor='middle' {turned}>{html.escape(y_title)}</text>")
    return "".join(lines)


def _svg(content: str, title: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    items = "".join(f"<li><i style='background:{color}'></i>{html.escape(name)}</li>" for name, color in legend)
    return (
        f"<figure class='chart'><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{html.escape(title)}'>"
        f"{content}</svg><figcaption>{html.escape(title)}<ul class='legend'>{items}</ul></figcaption></figure>"
    )


def line_chart(curves: Sequence[Curve], title: str, x_title: str, y_title: str, *, marker: float | None = None) -> str:
    """Return a chart of curves in the unit square, with a legend below.

    Args:
        marker: x at which to draw a vertical line, of class "marker", which the page's script moves.
    """
    parts, legend = [_frame(x_title, y_title)], []
    for curve, color in zip(curves, COLORS * (1 + len(curves) // len(COLORS))):
        x, y = curve.x, curve.y
        if curve.low is not None and np.isfinite(curve.low).any():
            finite = np.isfinite(curve.low)
            outline = (np.r_[x[finite], x[finite][::-1]], np.r_[curve.low[finite], curve.high[finite][::-1]])
            parts.append(f"<polygon points='{_points(*outline)}' fill='{color}' opacity='.15'/>")
        parts.append(f"<polyline points='{_points(x, y)}' fill='none' stroke='{color}' stroke-width='2'/>")
        legend.append((curve.name, color))
    if marker is not None:
        x = _at(marker, 0)[0]
        parts.append(f"<line class='marker' x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{HEIGHT - BOTTOM}'/>")
    return _svg("".join(parts), title, legend)


def reliability_chart(
    confidence: np.ndarray, accuracy: np.ndarray, low: np.ndarray, high: np.ndarray, title: str, y_title: str
) -> str:
    """Return a reliability diagram: a bar with its interval for each bin of the scores, and the diagonal.

    Args:
        confidence, accuracy, low, high: (bins,) mean score, fraction correct and its interval; NaN: an empty bin.
    """
    parts = [_frame("score", y_title)]
    bins = len(confidence)
    for k in range(bins):
        if accuracy[k] != accuracy[k]:
            continue
        (left, top), (right, bottom) = _at((k + 0.08) / bins, accuracy[k]), _at((k + 0.92) / bins, 0)
        parts.append(
            f"<rect x='{left:.1f}' y='{top:.1f}' width='{right - left:.1f}' height='{bottom - top:.1f}' fill='#9ce'/>"
        )
        x = (left + right) / 2
        if low[k] == low[k]:
            (_, y0), (_, y1) = _at(0, low[k]), _at(0, high[k])
            parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{y0:.1f}' y2='{y1:.1f}' stroke='#14507f'/>")
        cx, cy = _at(confidence[k], accuracy[k])
        parts.append(f"<circle cx='{cx:.1f}' cy='{cy:.1f}' r='3.5' fill='#14507f'/>")
    (x0, y0), (x1, y1) = _at(0, 0), _at(1, 1)
    parts.append(f"<line x1='{x0}' y1='{y0}' x2='{x1}' y2='{y1}' stroke='#999' stroke-dasharray='4 4'/>")
    return _svg("".join(parts), title)


def bar_chart(rows: Sequence[tuple[str, float, float, float]], title: str) -> str:
    """Return horizontal bars with whiskers.

    Args:
        rows: name, value (at least 0), low and high ends of its interval.
    """
    widest = max([0.01, *(value for row in rows for value in row[1:] if value == value)])
    lines = []
    for name, value, low, high in rows:
        share = 0 if value != value else max(0.0, value) / widest
        whisker = ""
        if low == low:
            left, span = max(low, 0) / widest, max(high, 0) / widest - max(low, 0) / widest
            whisker = f"<s style='left:{100 * left:.1f}%;width:{100 * span:.1f}%'></s>"
        text = f"{value:.3f}" if value == value else "–"
        bar = f"<div class='track'><b style='width:{100 * share:.1f}%'></b>{whisker}</div>"
        lines.append(f"<div class='bar'><span>{html.escape(name)}</span>{bar}<span>{text}</span></div>")
    return f"<figure class='bars' role='img' aria-label='{html.escape(title)}'>{''.join(lines)}</figure>"
