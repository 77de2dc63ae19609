"""Our patches against the PIL image processor of transformers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from owrl_jax.models.processor import ImageProcessor, smart_resize


def reference(**changes):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**(ImageProcessor().to_hf() | changes))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def page(width: int, height: int) -> Image.Image:
    """Hard edges, small text and flat areas, as pages have them: where resampling filters differ most."""
    picture = Image.new("RGB", (width, height), (250, 250, 252))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, width, 56), fill=(20, 40, 90))
    for n, y in enumerate(range(70, height - 20, 19)):
        draw.text((12, y), f"{n}. The quick brown fox jumps over the lazy dog, {n * 7919}", fill=(n * 9 % 200, 30, 60))
        draw.rectangle((width // 2, y, width // 2 + 11 * n % 300, y + 13), outline=(180, 0, 0))
    return picture


def as_model_input(patches: np.ndarray) -> np.ndarray:
    """What the device computes, in the layout of transformers: both temporal slices hold the same frame."""
    pixels = (patches.astype(np.float32) / np.float32(127.5) - np.float32(1)).reshape(-1, 3, 1, 256)
    return np.broadcast_to(pixels, (*pixels.shape[:2], 2, 256)).reshape(-1, 1536)


PICTURES = {
    "page 1280x1000": page(1280, 1000),
    "page 1280x720": page(1280, 720),
    "page, no resize": page(1280, 992),
    "noise 700x500": noise(700, 500),
    "noise 31x639": noise(639, 31),
    "noise, grown": noise(17, 23),
    "one pixel": noise(1, 1),
    "noise 200:1": noise(1, 200),
    "alpha": Image.merge("RGBA", [*noise(301, 407).split(), *noise(301, 407, 1).split()[:1]]),
    "palette": page(500, 333).quantize(16),
    "grey": page(500, 333).convert("L"),
}


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES.keys())
def test_patches_equal_transformers_bit_for_bit(picture):
    expected = reference()(images=[picture], return_tensors="np")
    got = ImageProcessor().process(picture)
    np.testing.assert_array_equal(as_model_input(got.patches), expected["pixel_values"])
    assert expected["image_grid_thw"].tolist() == [[1, *got.grid]]


@pytest.mark.parametrize("limits", [(4096, 100_000), (300_000, 400_000)], ids=str)
def test_area_limits_reach_the_pixels(limits):
    processor = ImageProcessor(min_area=limits[0], max_area=limits[1])
    picture = page(900, 700)
    expected = reference(size=processor.to_hf()["size"])(images=[picture], return_tensors="np")
    np.testing.assert_array_equal(as_model_input(processor.process(picture).patches), expected["pixel_values"])


areas = st.tuples(st.integers(1024, 10**6), st.integers(0, 2 * 10**7)).map(lambda t: (t[0], t[0] + t[1]))


@settings(max_examples=500)
@given(st.integers(1, 20_000), st.integers(1, 20_000), areas)
def test_resize_table_equals_transformers(height, width, limits):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as theirs

    try:
        expected = theirs(height, width, factor=32, min_pixels=limits[0], max_pixels=limits[1])
    except ValueError:
        with pytest.raises(ValueError, match="aspect_ratio"):
            smart_resize(height, width, min_pixels=limits[0], max_pixels=limits[1])
        return
    assert smart_resize(height, width, min_pixels=limits[0], max_pixels=limits[1]) == expected


def test_every_half_rounds_like_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as theirs

    for side in range(16, 4096, 32):  # side / 32 is a half for each of them
        assert smart_resize(side, 1280) == theirs(side, 1280, factor=32, min_pixels=65536, max_pixels=16777216)


def test_exported_settings_make_transformers_do_the_same():
    processor = ImageProcessor(min_area=4096, max_area=200_000)
    theirs = reference(**processor.to_hf())
    assert dict(theirs.size) == {"shortest_edge": 4096, "longest_edge": 200_000}
    assert ImageProcessor.from_hf(theirs.to_dict()) == processor
