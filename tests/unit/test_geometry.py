"""The one place where coordinates are scaled: hand-worked points, then properties over every size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from owrl_jax.geometry import BadPoint, grid_point_to_pixel, pixel_to_grid_point


@pytest.mark.parametrize(
    ("point", "image", "css_width", "expected"),
    [
        # T8: a 2x screenshot of a 1280x720 page
        ((1000, 1000), (2560, 1440), 1280, (1279, 719)),
        ((0, 0), (2560, 1440), 1280, (0, 0)),
        ((500, 500), (2560, 1440), 1280, (640, 360)),
        # the returned image is 788 high, whatever was asked for
        ((1000, 1000), (1280, 788), None, (1279, 787)),
        ((500, 500), (1280, 788), None, (640, 394)),
        ((500, 500), (1280, 788), 1280, (640, 394)),
        # a ratio of 1.5, and one below 1
        ((500, 500), (1920, 1182), 1280, (640, 394)),
        ((500, 500), (640, 360), 1280, (640, 360)),
        # outside of the grid: the border; the reference system clicked off-screen
        ((1200, -7), (1280, 720), None, (1279, 0)),
        ((10**400, -(10**400)), (1280, 720), None, (1279, 0)),
        # floats stay exact where the products are: 333.5 * 1280 / 1000 = 426.88
        ((333.5, 999.9), (1280, 720), None, (426, 719)),
        ([7, 7], (1, 1), None, (0, 0)),
    ],
)
def test_points(point, image, css_width, expected):
    before = list(point)
    assert grid_point_to_pixel(point, image_size=image, css_width=css_width) == expected
    assert list(point) == before


@pytest.mark.parametrize(
    "point",
    [
        (math.nan, 1),
        (1, math.inf),
        (1, -math.inf),
        ("5", "5"),
        "55",
        b"55",
        (True, 1),
        (None, 1),
        (1,),
        (1, 2, 3),
        {"x": 1, "y": 2},
        None,
        5,
        ((1, 2), 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("convert", [grid_point_to_pixel, pixel_to_grid_point])
def test_what_is_no_point_is_refused(convert, point):
    with pytest.raises(BadPoint):
        convert(point, image_size=(1280, 720))


@pytest.mark.parametrize(
    "sizes",
    [
        {"image_size": (0, 720)},
        {"image_size": (1280, -1)},
        {"image_size": (1280.0, 720)},
        {"image_size": (1280, 720), "css_width": 0},
        {"image_size": (1280, 720), "css_width": math.nan},
        {"image_size": (1280, 720), "grid": 0},
    ],
    ids=repr,
)
def test_sizes_that_make_no_sense_are_refused(sizes):
    with pytest.raises(ValueError, match=r"image_size|css_width|grid"):
        grid_point_to_pixel((1, 1), **sizes)


coordinates = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
sides = st.integers(1, 10_000)


@given(coordinates, coordinates, sides, sides, st.one_of(st.none(), st.floats(1, 5000)))
def test_every_point_lands_on_the_page(x, y, width, height, css_width):
    got = grid_point_to_pixel((x, y), image_size=(width, height), css_width=css_width)
    page = width if css_width is None else round(css_width)
    assert 0 <= got[0] < page
    assert 0 <= got[1] < (height if css_width is None else max(1, round(height * css_width / width)))


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=2), sides)
def test_order_is_kept_and_scaling_is_linear(xs, side):
    low, high = (grid_point_to_pixel((x, 0), image_size=(side, 1))[0] for x in sorted(xs))
    assert low <= high
    for x, pixel in zip(sorted(xs), (low, high), strict=True):
        assert abs(pixel - x * side / 1000) <= 1


@given(sides, st.data())
def test_round_trip_from_pixels(side, data):
    pixel = data.draw(st.integers(0, side - 1))
    point = pixel_to_grid_point((pixel, 0), image_size=(side, 1))
    back = grid_point_to_pixel(point, image_size=(side, 1))[0]
    assert 0 <= point[0] <= 1000
    assert abs(back - pixel) <= (0 if side <= 1000 else math.ceil(side / 2000))
