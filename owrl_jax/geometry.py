"""Where the model's 0-1000 grid meets the page: the only place where coordinates are scaled.

The policy speaks in a grid of 1000 by 1000 laid over the screenshot it was shown, whatever its size. The browser wants
CSS pixels. The scale is taken from the image that really came back, never from the viewport that was asked for: a
1280x788 picture is a 1280x788 page, and a 2560x1440 picture of a page 1280 CSS pixels wide has a device pixel ratio
of 2. A result always lies inside the page. Nothing here mutates its input, so a replayed action is scaled once.

Lowest floor of the house: imports nothing but the standard library, so that browser hosts can use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

GRID = 1000


class BadPoint(ValueError):
    """The policy's coordinates are not a point: wrong count, not a number, or not finite."""


def grid_point_to_pixel(
    point: Sequence[float],
    *,
    image_size: tuple[int, int],
    css_width: float | None = None,
    grid: int = GRID,
) -> tuple[int, int]:
    """The CSS pixel that holds a point of the model's grid.

    Args:
      point: (x, y) on the grid; ints or floats. Values outside [0, grid] are clamped to the border of the page.
      image_size: (width, height) of the screenshot that the model saw, in device pixels.
      css_width: width of the page in CSS pixels; `None` means that a CSS pixel is a device pixel. The CSS height
        follows from the proportions of the image.
      grid: number of grid units along each axis.

    Returns:
      (x, y) with 0 <= x <= css width - 1 and 0 <= y <= css height - 1.

    Raises:
      BadPoint: if `point` is not two finite numbers (strings, booleans, NaN and infinities are refused).
      ValueError: if the sizes are not positive.
    """
    x, y = _two_numbers(point)
    width, height = _css_size(image_size, css_width)
    if grid <= 0:
        raise ValueError(f"grid must be positive, got {grid!r}")
    return _cell(x, width, grid), _cell(y, height, grid)


def pixel_to_grid_point(
    pixel: Sequence[float],
    *,
    image_size: tuple[int, int],
    css_width: float | None = None,
    grid: int = GRID,
) -> tuple[int, int]:
    """The grid point nearest to the centre of a CSS pixel: how a script or a teacher that knows pixels speaks.

    Arguments, result range and errors mirror `grid_point_to_pixel`. On pages up to `grid` pixels a side the two are
    inverse to each other; on larger ones the round trip is off by at most side / (2 * grid) pixels, rounded up.
    """
    x, y = _two_numbers(pixel)
    width, height = _css_size(image_size, css_width)
    if grid <= 0:
        raise ValueError(f"grid must be positive, got {grid!r}")
    return tuple(min(max(round((v + 0.5) * grid / side), 0), grid) for v, side in ((x, width), (y, height)))  # type: ignore[return-value]


def _cell(value: float, side: int, grid: int) -> int:
    # Clamp before multiplying: a model can write an integer too long for a float.
    value = min(max(value, 0), grid)
    return min(math.floor(value * side / grid), side - 1)


def _css_size(image_size: tuple[int, int], css_width: float | None) -> tuple[int, int]:
    if len(image_size) != 2 or not all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in image_size):
        raise ValueError(f"image_size must be (width, height) in whole pixels, both positive; got {image_size!r}")
    width, height = image_size
    if css_width is None:
        return width, height
    if not math.isfinite(css_width) or css_width < 1:
        raise ValueError(f"css_width must be at least one CSS pixel, got {css_width!r}")
    return round(css_width), max(1, round(height * css_width / width))


def _two_numbers(point: Any) -> tuple[float, float]:
    if isinstance(point, str | bytes | dict) or not isinstance(point, Sequence) or len(point) != 2:
        raise BadPoint(f"a point is two numbers [x, y], got {point!r:.80}")
    for value in point:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadPoint(f"a coordinate must be a number, got {value!r:.80} of type {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise BadPoint(f"a coordinate must be finite, got {value!r}")
    return point[0], point[1]
