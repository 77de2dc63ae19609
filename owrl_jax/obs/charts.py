"""Curves as inline SVG, drawn here so that a page needs nothing from anywhere. Colours and fonts are in `report.css`.

A chart is a frame of fixed size in user units; axes take round numbers. Long series are drawn as means of equal
stretches, and the caption says so. What the mouse reads off stands beside the drawing, in `Chart.points`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

WIDTH, HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24
MOST_POINTS = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One line.

    Attributes:
      label: in words.
      x, y: points in the order of x; values that are not finite break the line.
      low, high: of a band or of error bars, as long as y; empty without.
      dots: error bars with dots instead of a line with a band: few points that were measured, not followed.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dots: bool = False

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.low) != len(self.high) or len(self.low) not in (0, len(self.y)):
            raise ValueError(
                f"the curve {self.label!r} has {len(self.x)} x, {len(self.y)} y, {len(self.low)} low and "
                f"{len(self.high)} high values: they must be as many"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing: its SVG, and for each curve the points in words and where they stand across the frame (0 to WIDTH)."""

    svg: str
    points: list[dict[str, Any]]


def draw(curves: Sequence[Curve], *, x_label: str, share: bool = False) -> Chart:
    """Draws curves into one frame.

    Args:
      curves: at least one; at most six have a colour of their own.
      x_label: what x counts, for reading off.
      share: y runs from 0 to 1 whatever the values, and is written in per cent.
    """
    curves = [_thinned(curve) for curve in curves]
    ys = [v for c in curves for row in (c.y, c.low, c.high) for v in row if math.isfinite(v)]
    xs = [float(v) for c in curves for v in c.x]
    x_ticks = ticks(min(xs, default=0), max(xs, default=1), 5, whole=True)
    y_ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if share else ticks(min(ys, default=0.0), max(ys, default=1.0), 4)
    x_low, x_high = min([*xs, x_ticks[0]]), max([*xs, x_ticks[-1]])
    y_low, y_high = min([*ys, y_ticks[0]]), max([*ys, y_ticks[-1]])

    def px(x: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (x - x_low) / ((x_high - x_low) or 1)

    def py(y: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (y - y_low) / ((y_high - y_low) or 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in y_ticks:
        y = py(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = f"{tick:.0%}" if share else number(tick)
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 3.5:.1f}">{label}</text>')
    for tick in x_ticks:
        parts.append(f'<text class="x" x="{px(tick):.1f}" y="{HEIGHT - 8}">{number(tick)}</text>')
    for n, curve in enumerate(curves):
        parts.append(f'<g class="c{n % 6}">{_curve(curve, px, py, 4.0 * n)}</g>')
    parts.append(f'<line class="cursor" x1="-9" x2="-9" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/></svg>')
    points = [
        {
            "label": curve.label,
            "at": [round(px(x), 1) for x in curve.x],
            "x": [f"{x_label} {number(x)}" for x in curve.x],
            "y": [_words(curve, i, share) for i in range(len(curve.y))],
        }
        for curve in curves
    ]
    return Chart(svg="".join(parts), points=points)


def _words(curve: Curve, i: int, share: bool) -> str:
    form = (lambda v: f"{v:.1%}") if share else number
    said = form(curve.y[i]) if math.isfinite(curve.y[i]) else str(curve.y[i])
    return f"{said} [{form(curve.low[i])}, {form(curve.high[i])}]" if curve.low else said


def _curve(curve: Curve, px: Callable[[float], float], py: Callable[[float], float], aside: float) -> str:
    """One line, or dots with error bars that stand `aside` of those of the curves before."""
    good = [i for i, v in enumerate(curve.y) if math.isfinite(v)]
    runs: list[list[int]] = []
    for i in good:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    line = "".join(
        "M" + "L".join(f"{px(curve.x[i]):.1f} {py(curve.y[i]):.1f}" for i in run) + ("h.1" if len(run) == 1 else "")
        for run in runs
    )
    if curve.dots:
        at = {i: f"{px(curve.x[i]) + aside:.1f}" for i in good}
        bars = "".join(
            f'<line class="error" x1="{at[i]}" x2="{at[i]}" y1="{py(curve.low[i]):.1f}" y2="{py(curve.high[i]):.1f}"/>'
            for i in good
            if curve.low
        )
        dots = "".join(f'<circle cx="{at[i]}" cy="{py(curve.y[i]):.1f}" r="3"/>' for i in good)
        return f'<path class="thin" d="{line}"/>{bars}{dots}'
    smooth = _smooth(curve, good) if len(good) >= 20 else []
    if not smooth:
        return f'<path class="line" d="{line}"/>'
    soft = "M" + "L".join(f"{px(curve.x[i]):.1f} {py(v):.1f}" for i, v in zip(good, smooth, strict=True))
    return f'<path class="raw" d="{line}"/><path class="line" d="{soft}"/>'


def _smooth(curve: Curve, good: Sequence[int]) -> list[float]:
    """Exponential mean over about a tenth of the curve, unbiased at its beginning."""
    keep = 1 - 2 / (len(good) / 10 + 1)
    total = weight = 0.0
    out = []
    for i in good:
        total, weight = keep * total + curve.y[i], keep * weight + 1
        out.append(total / weight)
    return out


def _thinned(curve: Curve) -> Curve:
    """At most `MOST_POINTS` points: means over equal stretches, of what is finite in them."""
    size = math.ceil(len(curve.x) / MOST_POINTS)
    if size <= 1 or curve.low:
        return curve
    xs, ys = [], []
    for at in range(0, len(curve.x), size):
        part = [v for v in curve.y[at : at + size] if math.isfinite(v)]
        xs.append(curve.x[min(at + size // 2, len(curve.x) - 1)])
        ys.append(math.fsum(part) / len(part) if part else math.nan)
    return dataclasses.replace(curve, label=f"{curve.label} (means of {size})", x=xs, y=ys)


def ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Round numbers from at most `low` to at least `high`; for `whole`, integers within."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = (low, low + 1) if whole else (low - pad, high + pad)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
        first, last = math.ceil(low / step), math.floor(high / step)
        return [i * step for i in range(first, last + 1)] or [math.ceil(low)]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A number for people: four digits that count, no noise, `12.3k`, `4.5M`."""
    size = abs(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            scale = 1e3 if name == "k" else unit
            return f"{value / scale:.4g}{name}"
    if size and size < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-")
    return f"{value:.4g}"
