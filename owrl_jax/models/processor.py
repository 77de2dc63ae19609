"""Screenshots to patches: one resize, one transpose, uint8 all the way.

The vision tower reads patches of 16x16 pixels in blocks of 2x2, so a picture is first brought to sides that are
multiples of 32 (`smart_resize`), by one bicubic resize with PIL, and then cut. What leaves this file is uint8 in
[0, 255]; the model computes `x / 127.5 - 1` on the device, which equals the rescale and normalise steps of the
`transformers` PIL processor bit for bit (mean = std = 0.5), at an eighth of the bytes: half because a still image needs
no second temporal slice, a quarter because uint8 is a quarter of float32.

A picture that cannot be used ends as `BadImage` with a reason from a closed list, never as a crash of the caller.
Videos are refused: web agents see screenshots. numpy and PIL only.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

BAD_IMAGE_REASONS = (
    "undecodable",  # not a PNG, JPEG or WebP, cut short, or damaged
    "empty",  # a side of zero pixels
    "aspect_ratio",  # more than 200:1
    "too_large",  # more source pixels than PIL will decode
    "too_many_tokens",  # over max_tokens even at the smallest allowed size
    "dtype",  # an array that is not uint8
    "layout",  # an array that is not [height, width, 3 or 4], or that could be read as channels-first
    "mode",  # a pixel format without a defined meaning as RGB
    "video",  # several frames
    "type",  # not an image at all
)
_MAX_RATIO = 200
_FORMATS = ("PNG", "JPEG", "WEBP")


class BadImage(ValueError):
    """A picture that the model cannot be shown. `reason` is one of `BAD_IMAGE_REASONS`; the message says the rest."""

    def __init__(self, reason: str, message: str):
        if reason not in BAD_IMAGE_REASONS:
            raise ValueError(f"unknown reason {reason!r}, expected one of {BAD_IMAGE_REASONS}")
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Patches:
    """One image as the vision tower reads it.

    Attributes:
      patches: uint8 [h * w, channels * 16 * 16]; a row is one patch in order (channel, row, column), and rows follow
        2x2 merge blocks: (h/2, w/2, 2, 2).
      grid: (h, w), number of patches down and across; both even.
      tokens: number of tokens the image takes in the text, h * w / 4.
    """

    patches: np.ndarray
    grid: tuple[int, int]
    tokens: int


def smart_resize(
    height: int, width: int, *, factor: int = 32, min_pixels: int = 65536, max_pixels: int = 16777216
) -> tuple[int, int]:
    """The size (height, width) to which a picture is resized before it is cut into patches.

    Both sides become multiples of `factor`: rounded to the nearest one (halves to the even one: 720 / 32 = 22.5 gives
    22), or, where that leaves the area limits, scaled by the root of the area ratio and rounded inwards, never below
    one unit (so a very thin picture can stay above `max_pixels`). Semantics: Qwen2-VL processor of `transformers` 5.24.

    Args:
      height, width: source size in pixels.
      factor: patch side times merge factor.
      min_pixels, max_pixels: limits of the resulting *area*.

    Raises:
      BadImage: for a side of zero, or a ratio of the sides above 200.
    """
    if height < 1 or width < 1:
        raise BadImage("empty", f"both sides must have at least one pixel, got {width}x{height}")
    if max(height, width) / min(height, width) > _MAX_RATIO:
        raise BadImage("aspect_ratio", f"sides of {width}x{height} differ by more than {_MAX_RATIO}:1")
    rows, cols = round(height / factor) * factor, round(width / factor) * factor
    if rows * cols > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        cols = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * cols < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        cols = math.ceil(width * grow / factor) * factor
    return rows, cols


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """How pictures become patches. One knob for size: the area limits, in pixels after the resize.

    Attributes:
      patch_size: side of a patch in pixels.
      merge_size: patches per side of a merge block, that is of one token.
      min_area, max_area: limits of the resized picture's area in pixels. HF files call them `size.shortest_edge` and
        `size.longest_edge`, although no edge is meant.
      max_tokens: hard limit per image, so that a prompt of known length stays in the context; lowers `max_area`
        where that is larger, and refuses the thin pictures that cannot get below it. `None`: no limit of its own.
    """

    patch_size: int = 16
    merge_size: int = 2
    min_area: int = 65536
    max_area: int = 16777216
    max_tokens: int | None = None

    def __post_init__(self):
        for name in ("patch_size", "merge_size", "min_area", "max_area"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, got {value!r}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens!r}; use None for no limit")
        if self.max_area < self.factor**2:
            raise ValueError(
                f"max_area={self.max_area} is less than one token ({self.factor}x{self.factor} = {self.factor**2} "
                "pixels); it is an area, not the length of an edge"
            )
        if self.min_area > self.max_area:
            raise ValueError(
                f"min_area={self.min_area} exceeds max_area={self.max_area}; both are areas in pixels, not edges. "
                "Lower min_area too if small images are wanted"
            )

    @property
    def factor(self) -> int:
        """Side of one token in pixels: sides of resized pictures are multiples of it."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after the resize, with this processor's limits. Raises BadImage as `process` would."""
        low, high = self.min_area, self.max_area
        if self.max_tokens is not None:
            high = min(high, self.max_tokens * self.factor**2)
            low = min(low, high)
        rows, cols = smart_resize(height, width, factor=self.factor, min_pixels=low, max_pixels=high)
        tokens = rows * cols // self.factor**2
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise BadImage(
                "too_many_tokens",
                f"{width}x{height} needs {tokens} tokens at the smallest size its shape allows ({cols}x{rows}), "
                f"more than max_tokens={self.max_tokens}",
            )
        return rows, cols

    def token_count(self, height: int, width: int) -> int:
        """Tokens that a picture of this source size takes in the text. Raises BadImage as `process` would."""
        rows, cols = self.resized(height, width)
        return rows * cols // self.factor**2

    def process(self, image: Any) -> Patches:  # anything may come; what cannot be shown is a BadImage, not a TypeError
        """Resize once and cut into patches.

        Args:
          image: a PIL image of any still mode, a uint8 array [height, width, 3 or 4], or the bytes of a PNG, JPEG or
            WebP file. Transparency is laid over white, grey is repeated, 16-bit grey keeps its high byte. EXIF
            rotation is not applied: coordinates refer to the pixels as stored.

        Raises:
          BadImage: with a reason, for anything that cannot be shown.
        """
        picture = _to_rgb(image)
        rows, cols = self.resized(picture.height, picture.width)
        if picture.size != (cols, rows):
            # No reducing_gap and no draft mode: a second, hidden resize would change pixels.
            picture = picture.resize((cols, rows), Image.Resampling.BICUBIC)
        h, w, p, m = rows // self.patch_size, cols // self.patch_size, self.patch_size, self.merge_size
        pixels = np.asarray(picture).reshape(h // m, m, p, w // m, m, p, 3)
        patches = pixels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(h * w, 3 * p * p)
        return Patches(patches=patches, grid=(h, w), tokens=h * w // m**2)

    @classmethod
    def load(cls, folder: str | Path) -> ImageProcessor:
        """Reads the processor of a model folder (`preprocessor_config.json`, or the image part of
        `processor_config.json` as newer `transformers` versions write it).

        Raises:
          FileNotFoundError: if the folder has neither file.
          ValueError: as `from_hf`, with the path of the file.
        """
        folder = Path(folder)
        for name in ("preprocessor_config.json", "processor_config.json"):
            path = folder / name
            if not path.exists():
                continue
            values = json.loads(path.read_text(encoding="utf-8"))
            values = values.get("image_processor", {}) if name == "processor_config.json" else values
            if not values:
                continue
            try:
                return cls.from_hf(values)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        raise FileNotFoundError(f"{folder} has no preprocessor_config.json: is this a Qwen3-VL model folder?")

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ImageProcessor:
        """Reads the contents of a HF `preprocessor_config.json`.

        `min_pixels` and `max_pixels`, at the top or inside `size`, are older names of the same two limits.

        Raises:
          ValueError: for a key that is not known, limits that contradict each other, or a step that differs from the
            one this processor does (another mean, resampling filter, temporal patch size, ...).
        """
        knobs = {key: value for key, value in values.items() if value is not None}
        for key, wanted in _FIXED_STEPS.items():
            found = knobs.pop(key, wanted)
            found = list(found) if isinstance(found, tuple) else found
            near = isinstance(wanted, float) and isinstance(found, float) and math.isclose(found, wanted, rel_tol=1e-6)
            if found != wanted and not near:
                raise ValueError(f"{key}={found!r} is not supported, this processor has {key}={wanted!r}")
        size = dict(knobs.pop("size", {}))
        limits: dict[str, int] = {}
        for edge, legacy, field in (
            ("shortest_edge", "min_pixels", "min_area"),
            ("longest_edge", "max_pixels", "max_area"),
        ):
            sources = {
                f"size.{edge}": size.pop(edge, None),
                f"size.{legacy}": size.pop(legacy, None),
                legacy: knobs.pop(legacy, None),
            }
            given = {name: value for name, value in sources.items() if value is not None}
            if len(set(given.values())) > 1:
                raise ValueError(f"{given} name one limit with different values: keep one of them")
            if given:
                limits[field] = next(iter(given.values()))
        fields = {key: knobs.pop(key) for key in ("patch_size", "merge_size") if key in knobs}
        off = {key for key in _MUST_BE_OFF if knobs.get(key) is False}
        unknown = sorted(set(knobs) - _WITHOUT_EFFECT - off) + sorted(f"size.{key}" for key in size)
        if unknown:
            raise ValueError(
                f"unknown image processor settings {unknown}: the size of images is set by size.shortest_edge and "
                "size.longest_edge alone (areas in pixels)"
            )
        return cls(**fields, **limits)

    def to_hf(self) -> dict[str, Any]:
        """The contents of a `preprocessor_config.json` that makes `transformers` do the same.

        `max_tokens` has no counterpart there; it is written as the area it stands for.
        """
        high = self.max_area if self.max_tokens is None else min(self.max_area, self.max_tokens * self.factor**2)
        return {
            **{key: list(value) if isinstance(value, list) else value for key, value in _FIXED_STEPS.items()},
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "size": {"shortest_edge": min(self.min_area, high), "longest_edge": high},
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen3VLProcessor",
        }


# What every released Qwen3-VL says and this file does; 3 is PIL's number for bicubic.
_FIXED_STEPS: dict[str, Any] = {
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "resample": 3,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
}
_MUST_BE_OFF = ("do_center_crop", "do_pad")
# Settings that HF files carry and that change nothing for a Qwen image: names of classes and layouts of its tensors.
_WITHOUT_EFFECT = {
    "image_processor_type",
    "processor_class",
    "data_format",
    "input_data_format",
    "default_to_square",
    "return_tensors",
    "device",
    "disable_grouping",
    "model_input_names",
    "auto_map",
    "_auto_class",
    "_processor_class",
    "backend",
}


def _to_rgb(image: Any) -> Image.Image:
    if isinstance(image, bytes | bytearray | memoryview):
        picture = _decode(bytes(image))
    elif isinstance(image, np.ndarray):
        picture = _from_array(image)
    elif isinstance(image, Image.Image):
        picture = image
    elif isinstance(image, list | tuple):
        raise BadImage(
            "video", f"got {len(image)} items; frames of a video are not supported, pass one image at a time"
        )
    else:
        raise BadImage("type", f"expected a PIL image, a uint8 array or bytes, got {type(image).__name__}")
    if min(picture.size) < 1:
        raise BadImage("empty", f"both sides must have at least one pixel, got {picture.width}x{picture.height}")
    if getattr(picture, "n_frames", 1) > 1:
        raise BadImage("video", f"the picture has {picture.n_frames} frames; animations are not supported")  # type: ignore[attr-defined]
    try:
        return _flatten(picture)
    except (OSError, SyntaxError, EOFError) as error:  # PIL decodes lazily: a cut file shows here
        raise BadImage("undecodable", f"the picture cannot be decoded ({error})") from error
    except ValueError as error:
        if isinstance(error, BadImage):
            raise
        raise BadImage("mode", f"mode {picture.mode!r} has no conversion to RGB ({error})") from error


def _decode(data: bytes) -> Image.Image:
    # MP4 and QuickTime; Matroska and WebM; AVI (RIFF also frames WebP pictures)
    if data[4:8] == b"ftyp" or data[:4] == b"\x1aE\xdf\xa3" or (data[:4] == b"RIFF" and data[8:12] != b"WEBP"):
        raise BadImage("video", "these bytes are a video file; pass one screenshot as PNG or JPEG")
    try:
        picture = Image.open(io.BytesIO(data), formats=_FORMATS)
        picture.load()
    except Image.DecompressionBombError as error:
        raise BadImage("too_large", str(error)) from error
    # PIL reports damage through many types; all of them mean that this file is not a whole picture.
    except (OSError, SyntaxError, EOFError, ValueError) as error:
        why = "format not recognised" if isinstance(error, UnidentifiedImageError) else str(error)
        raise BadImage(
            "undecodable", f"{len(data)} bytes beginning {data[:8]!r} are no whole {' / '.join(_FORMATS)} file: {why}"
        ) from error
    return picture


def _from_array(array: np.ndarray) -> Image.Image:
    if array.ndim == 4:
        raise BadImage("video", f"an array of shape {array.shape} is a stack of frames; pass one image at a time")
    if array.dtype != np.uint8:
        raise BadImage("dtype", f"arrays must be uint8 in 0..255, got {array.dtype}")
    if array.ndim != 3:
        raise BadImage("layout", f"arrays must be [height, width, 3 or 4], got shape {array.shape}")
    if 0 in array.shape:
        raise BadImage("empty", f"got an array of shape {array.shape}")
    first, last = array.shape[0] in (3, 4), array.shape[2] in (3, 4)
    if not last:
        hint = "; this looks channels-first, transpose it" if array.shape[0] in (1, 3, 4) else ""
        raise BadImage("layout", f"arrays must be [height, width, 3 or 4], got shape {array.shape}{hint}")
    if first:
        raise BadImage(
            "layout", f"shape {array.shape} can be read as channels-last or channels-first; pass a PIL image instead"
        )
    return Image.fromarray(np.ascontiguousarray(array))


def _flatten(picture: Image.Image) -> Image.Image:
    mode = picture.mode
    if mode == "RGB" and "transparency" not in picture.info:
        picture.load()
        return picture
    if mode == "F":
        raise BadImage("mode", "a picture of floating-point values has no defined range; convert it to 8 bits")
    if mode == "I" or mode.startswith("I;16"):
        # PIL would clip at 255 and make nearly everything white.
        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65535:
            raise BadImage("mode", f"grey values span {values.min()}..{values.max()}, outside of 16 bits")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if "A" in picture.getbands() or "a" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture).convert("RGB")
    return picture.convert("RGB")
