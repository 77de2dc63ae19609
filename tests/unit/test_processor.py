"""Sizes, pixel formats and refusals of the image processor. The comparison with transformers is in tests/parity."""

from __future__ import annotations

import io
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from owrl_jax.models.processor import BadImage, ImageProcessor, smart_resize
from owrl_jax.models.qwen3_vl.positions import choose_bucket

DEFAULT = ImageProcessor()


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


# ---- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height", "settings", "resized", "tokens"),
    [
        # T6: common screenshots; 720 / 32 = 22.5 rounds to the even 22
        (1280, 720, {}, (1280, 704), 880),
        (1280, 1000, {}, (1280, 992), 1240),
        (1920, 1080, {}, (1920, 1088), 2040),
        (1440, 900, {}, (1440, 896), 1260),
        (1280, 720, {"max_area": 200_000}, (576, 320), 180),
        # T7: tiny, thin and huge
        (1, 1, {}, (256, 256), 64),
        (1, 200, {}, (32, 3648), 114),
        (200, 1, {}, (3648, 32), 114),
        (4000, 20, {}, (4000, 32), 125),
        (639, 31, {"max_area": 20 * 1024, "min_area": 1024}, (640, 32), 20),
        (31, 639, {"max_area": 20 * 1024, "min_area": 1024}, (32, 640), 20),
        (1280, 200_000, {}, (320, 51_200), 16_000),
        (200_000, 1280, {}, (51_200, 320), 16_000),
    ],
)
def test_sizes_of_the_user_reports(width, height, settings, resized, tokens):
    processor = ImageProcessor(**settings)
    assert processor.resized(height, width) == resized[::-1]
    assert processor.token_count(height, width) == tokens


@pytest.mark.parametrize(("height", "width"), [(1, 201), (201, 1), (10_051, 50), (0, 5), (5, 0), (0, 0)])
def test_shapes_that_cannot_be_shown(height, width):
    with pytest.raises(BadImage) as caught:
        smart_resize(height, width)
    assert caught.value.reason == ("empty" if 0 in (height, width) else "aspect_ratio")
    assert str(width) in str(caught.value)


areas = st.tuples(st.integers(1024, 10**6), st.integers(0, 2 * 10**7)).map(lambda t: (t[0], t[0] + t[1]))


@settings(max_examples=300)
@given(st.integers(1, 5000), st.integers(1, 5000), areas)
def test_resize_properties(height, width, limits):
    low, high = limits
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(BadImage):
            smart_resize(height, width, min_pixels=low, max_pixels=high)
        return
    rows, cols = smart_resize(height, width, min_pixels=low, max_pixels=high)
    assert rows > 0 and cols > 0 and rows % 32 == 0 and cols % 32 == 0
    nearest = 1024 * round(height / 32) * round(width / 32)
    if low <= nearest <= high:  # inside the limits a side moves by half a unit at most
        assert abs(rows - height) <= 16 and abs(cols - width) <= 16
    elif nearest > high:  # rounded inwards; only the floor of one unit may hold the area up
        assert rows * cols <= high or min(rows, cols) == 32
        scale = (high / (height * width)) ** 0.5
        assert all(s == 32 or t - 32.001 < s < t + 0.001 for s, t in ((rows, height * scale), (cols, width * scale)))
    else:
        assert rows * cols >= low
        scale = (low / (height * width)) ** 0.5
        assert all(t - 0.001 < s < t + 32.001 for s, t in ((rows, height * scale), (cols, width * scale)))


def test_max_tokens_is_a_hard_limit():
    processor = ImageProcessor(max_tokens=256)
    for height, width in [(1, 1), (720, 1280), (5000, 5000), (1280, 200_000), (3, 600)]:
        assert processor.token_count(height, width) <= 256
    tiny = ImageProcessor(max_tokens=4)
    assert tiny.token_count(720, 1280) <= 4
    with pytest.raises(BadImage, match=r"max_tokens=4") as caught:  # 100:1 cannot have fewer than some ten tokens
        tiny.token_count(100, 10_000)
    assert caught.value.reason == "too_many_tokens"


def test_thirty_random_screenshots_need_few_compiled_shapes():
    """T10: the number of static sizes is the number of buckets that were offered, not of image sizes that were seen."""
    rng = np.random.default_rng(0)
    buckets = (1024, 2048, 4096, 6144, 9216)
    patches = [
        4 * DEFAULT.token_count(int(h), int(w))
        for h, w in zip(rng.integers(300, 1400, 30), rng.integers(300, 1600, 30), strict=True)
    ]
    assert len(set(patches)) > 20
    chosen = [choose_bucket(n, buckets) for n in patches]
    assert 1 < len(set(chosen)) <= len(buckets)
    assert all(bucket >= n for bucket, n in zip(chosen, patches, strict=True))


# ---- patches -------------------------------------------------------------------------------------------------------


def test_patch_order_by_hand():
    """Every pixel says where it stands; the patch rows must say it back: blocks of 2x2, then channel, row, column."""
    h, w = 4, 6  # patches
    y, x = np.mgrid[: h * 16, : w * 16]
    image = np.stack([y // 16 * w + x // 16, y % 16, x % 16], axis=-1).astype(np.uint8)
    got = ImageProcessor(min_area=1024).process(image)
    assert (got.grid, got.tokens) == ((4, 6), 6)
    assert got.patches.dtype == np.uint8 and got.patches.shape == (24, 768)
    expected = [
        (2 * bi + i) * w + 2 * bj + j
        for bi, bj, i, j in itertools.product(range(h // 2), range(w // 2), range(2), range(2))
    ]
    rows = got.patches.reshape(24, 3, 16, 16)
    for k, number in enumerate(expected):
        assert (rows[k, 0] == number).all()
        assert (rows[k, 1] == np.arange(16)[:, None]).all()
        assert (rows[k, 2] == np.arange(16)[None, :]).all()


def flat_colour(image) -> list[int]:
    """The colour of a picture of one colour, after processing: resizing keeps it."""
    patches = DEFAULT.process(image).patches.reshape(-1, 3, 256)
    assert (patches == patches[:1, :, :1]).all()
    return patches[0, :, 0].tolist()


def grey16(value: int) -> bytes:
    return encoded(Image.fromarray(np.full((40, 50), value, np.uint16)))


PALETTE = Image.new("P", (40, 50), 1)
PALETTE.putpalette([0, 0, 0, 10, 20, 30])


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        (Image.new("RGB", (40, 50), (10, 20, 30)), [10, 20, 30]),
        (np.full((50, 40, 3), (10, 20, 30), np.uint8), [10, 20, 30]),
        (np.full((50, 40, 4), (10, 20, 30, 0), np.uint8), [255, 255, 255]),
        (np.full((50, 40, 3), (10, 20, 30), np.uint8)[:, ::-1], [10, 20, 30]),
        # transparency is laid over white: 0.2 * 100 + 0.8 * 255 = 224
        (Image.new("RGBA", (40, 50), (100, 100, 100, 51)), [224, 224, 224]),
        (Image.new("RGBA", (40, 50), (1, 2, 3, 255)), [1, 2, 3]),
        (Image.new("LA", (40, 50), (7, 0)), [255, 255, 255]),
        (Image.new("L", (40, 50), 77), [77, 77, 77]),
        (Image.new("1", (40, 50), 1), [255, 255, 255]),
        (PALETTE, [10, 20, 30]),
        (encoded(PALETTE), [10, 20, 30]),
        (encoded(PALETTE, transparency=1), [255, 255, 255]),
        (encoded(Image.new("RGB", (40, 50), (10, 20, 30)), transparency=(10, 20, 30)), [255, 255, 255]),
        # 16-bit grey keeps its high byte; PIL alone would clip to 255
        (grey16(0x8040), [0x80] * 3),
        (grey16(0xFFFF), [255] * 3),
        (Image.new("I", (40, 50), 0x1234), [0x12] * 3),
        (Image.new("CMYK", (40, 50), (0, 0, 0, 255)), [0, 0, 0]),
        (encoded(Image.new("RGB", (40, 50), (128, 128, 128)), "JPEG"), [128] * 3),
        (encoded(Image.new("RGB", (40, 50), (10, 20, 30)), "WEBP", lossless=True), [10, 20, 30]),
    ],
)
def test_pixel_formats_have_one_meaning(image, colour):
    assert flat_colour(image) == colour


def test_all_forms_of_one_picture_give_the_same_patches():
    pixels = np.random.default_rng(1).integers(0, 256, (333, 500, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    forms = [pixels, picture, encoded(picture), bytearray(encoded(picture)), Image.open(io.BytesIO(encoded(picture)))]
    first, *others = (DEFAULT.process(form).patches for form in forms)
    for other in others:
        np.testing.assert_array_equal(first, other)


# ---- refusals ------------------------------------------------------------------------------------------------------

PNG = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)))
JPEG = encoded(Image.open(io.BytesIO(PNG)), "JPEG")


def animation(form: str) -> bytes:
    frames = [Image.new("RGB", (40, 50), (n, n, 80 * n)) for n in range(3)]
    return encoded(frames[0], form, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (PNG[: len(PNG) // 2], "undecodable"),
        (PNG[:20], "undecodable"),
        (PNG[:100] + bytes(50) + PNG[150:], "undecodable"),
        (JPEG[: len(JPEG) // 2], "undecodable"),
        (Image.open(io.BytesIO(PNG[: len(PNG) // 2])), "undecodable"),  # lazily opened, cut short
        (b"", "undecodable"),
        (b"<html>502 Bad Gateway</html>", "undecodable"),
        (encoded(Image.new("RGB", (4, 4)), "BMP"), "undecodable"),
        (Image.new("RGB", (201, 1)), "aspect_ratio"),
        (encoded(Image.new("RGB", (1, 201))), "aspect_ratio"),
        (Image.new("RGB", (0, 5)), "empty"),
        (np.zeros((0, 5, 3), np.uint8), "empty"),
        (np.zeros((64, 64, 3), np.float32), "dtype"),
        (np.zeros((64, 64, 3), np.int64), "dtype"),
        (np.zeros((3, 64, 64), np.uint8), "layout"),
        (np.zeros((3, 64, 3), np.uint8), "layout"),  # could be read either way
        (np.zeros((4, 64, 3), np.uint8), "layout"),
        (np.zeros((64, 64), np.uint8), "layout"),
        (np.zeros((64, 64, 2), np.uint8), "layout"),
        (Image.new("F", (40, 50)), "mode"),
        (Image.new("I", (40, 50), 70_000), "mode"),
        (Image.new("I", (40, 50), -1), "mode"),
        (np.zeros((8, 64, 64, 3), np.uint8), "video"),
        ([Image.new("RGB", (40, 50))] * 2, "video"),
        (animation("PNG"), "video"),
        (animation("WEBP"), "video"),
        (b"\x00\x00\x00\x20ftypisom" + bytes(64), "video"),
        (b"\x1aE\xdf\xa3" + bytes(64), "video"),
        (b"RIFF\x00\x00\x00\x00AVI " + bytes(64), "video"),
        ("screenshot.png", "type"),
        (None, "type"),
    ],
)
def test_what_cannot_be_shown_has_a_reason(image, reason):
    with pytest.raises(BadImage) as caught:
        DEFAULT.process(image)
    assert caught.value.reason == reason
    assert isinstance(caught.value, ValueError) and str(caught.value).startswith(f"{reason}: ")


def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(BadImage) as caught:
        DEFAULT.process(PNG)
    assert caught.value.reason == "too_large"


# ---- configuration -------------------------------------------------------------------------------------------------

RELEASED = {  # the shape of a released Qwen3-VL preprocessor_config.json
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "crop_size": None,
    "do_center_crop": False,
    "rescale_factor": 0.00392156862745098,
}


def test_released_settings_are_the_defaults():
    assert ImageProcessor.from_hf(RELEASED) == ImageProcessor()


@pytest.mark.parametrize(
    ("change", "limits"),
    [
        ({"size": {"longest_edge": 200_000}}, (65536, 200_000)),
        ({"size": None, "min_pixels": 4096, "max_pixels": 200_000}, (4096, 200_000)),
        ({"size": {"min_pixels": 4096, "max_pixels": 200_000}}, (4096, 200_000)),
        ({"max_pixels": 16777216}, (65536, 16777216)),  # twice the same is no conflict
    ],
)
def test_old_and_new_names_are_one_knob(change, limits):
    processor = ImageProcessor.from_hf(RELEASED | change)
    assert (processor.min_area, processor.max_area) == limits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_pixels": 200_000}, r"max_pixels.*different values"),
        ({"size": {"shortest_edge": 1, "min_pixels": 2, "longest_edge": 10**6}}, r"min_pixels.*different values"),
        ({"max_area": 200_000}, r"unknown.*max_area"),
        ({"size": {"height": 224, "width": 224}}, r"unknown.*size\.height"),
        ({"size": {"longest_edge": 1280}}, r"max_area=1280 .*|min_area=65536 exceeds max_area=1280.*areas"),
        ({"size": {"longest_edge": 1000}}, r"less than one token"),
        ({"image_mean": [0.48, 0.46, 0.41]}, r"image_mean"),
        ({"resample": 2}, r"resample"),
        ({"temporal_patch_size": 1}, r"temporal_patch_size"),
        ({"rescale_factor": 1.0}, r"rescale_factor"),
        ({"do_resize": False}, r"do_resize"),
        ({"do_center_crop": True}, r"do_center_crop"),
    ],
)
def test_wrong_knobs_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        ImageProcessor.from_hf(RELEASED | change)


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="max_pixels"):
        ImageProcessor(max_pixels=200_000)  # type: ignore[call-arg]


def test_folder_round_trip(tmp_path):
    processor = ImageProcessor(min_area=4096, max_area=200_000)
    with pytest.raises(FileNotFoundError, match="preprocessor_config"):
        ImageProcessor.load(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor.to_hf()}))
    assert ImageProcessor.load(tmp_path) == processor
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 5}}))
    with pytest.raises(ValueError, match=r"preprocessor_config\.json: "):
        ImageProcessor.load(tmp_path)
