"""From samples on the host to the flat static arrays that the model sees.

A batch has B rows of T tokens; a row holds any number of samples one after another (packing), and padding at one end.
Each sample sees itself alone: its tokens expire at its own end. Prefix trees are the learner's business
(`rl/packing.py`); this is the plain form, for evaluation, parity tests, benchmarks and simple supervised rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from owrl_jax.models.processor import Patches
from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.qwen3_vl.positions import mrope_positions, plan_vision, visual_index
from owrl_jax.models.qwen3_vl.text import TextInput
from owrl_jax.models.qwen3_vl.vision import VisionInput


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sequence: token ids with image placeholders already expanded, and its images in order."""

    tokens: np.ndarray
    images: tuple[Patches, ...] = ()


def batch_rows(
    config: ModelConfig,
    rows: Sequence[Sequence[Sample]],
    *,
    length: int | None = None,
    patches: int | None = None,
    pad: Literal["left", "right"] = "right",
) -> tuple[TextInput, VisionInput | None]:
    """Arrays of a batch.

    Args:
      rows: the samples of each row.
      length: T; the longest row if None.
      patches: patch bucket P per row; the fullest row if None.
      pad: end at which short rows are padded.
    Returns:
      the text arrays, and the image arrays or None if no row holds an image. All numpy.
    Raises:
      ValueError: if a row or its images do not fit, or placeholders and images disagree.
    """
    used = [sum(len(s.tokens) for s in row) for row in rows]
    length = max(used) if length is None else length
    if max(used) > length:
        raise ValueError(f"row {int(np.argmax(used))} holds {max(used)} tokens and does not fit into {length}")
    batch = len(rows)
    tokens = np.zeros((batch, length), np.int32)
    positions = np.zeros((3, batch, length), np.int32)
    until = np.zeros((batch, length), np.int32)
    index = np.full((batch, length), -1, np.int32)
    for b, row in enumerate(rows):
        if not row:
            continue
        begin = 0 if pad == "right" else length - used[b]
        here = slice(begin, begin + used[b])
        ids = np.concatenate([s.tokens for s in row]).astype(np.int32)
        ends = np.cumsum([len(s.tokens) for s in row])
        grids = [image.grid for s in row for image in s.images]
        merge = config.vision.merge if config.vision else 2
        starts = [0, *ends[:-1].tolist()]
        common = {"image_token_id": config.image_token, "merge": merge, "segment_starts": starts}
        tokens[b, here] = ids
        positions[:, b, here] = mrope_positions(ids, grids, **common).positions
        until[b, here] = begin + np.repeat(ends, [len(s.tokens) for s in row])
        index[b, here] = visual_index(ids, grids, **common)
    text = TextInput(tokens=tokens, positions=positions, visible_until=until, visual_index=index)
    return text, batch_images(config, [[i for s in row for i in s.images] for row in rows], patches=patches)


def batch_images(
    config: ModelConfig, rows: Sequence[Sequence[Patches]], *, patches: int | None = None
) -> VisionInput | None:
    """The image arrays of a batch, one patch buffer a row; None without any image and without a bucket."""
    most = max(sum(len(image.patches) for image in row) for row in rows)
    if config.vision is None or (most == 0 and patches is None):
        return None
    patches = most if patches is None else patches
    plans = [
        plan_vision(
            [image.grid for image in row],
            bucket=patches,
            position_side=config.vision.positions,
            merge=config.vision.merge,
        )
        for row in rows
    ]
    values = np.zeros((len(rows), patches, config.vision.patch_values), np.uint8)
    for b, row in enumerate(rows):
        if row:
            joined = np.concatenate([image.patches for image in row])
            values[b, : len(joined)] = joined
    return VisionInput(
        patches=values,
        rc=np.stack([p.rc for p in plans]),
        taps=np.stack([p.taps for p in plans]),
        tap_weights=np.stack([p.tap_weights for p in plans]),
        segment=np.stack([p.segment for p in plans]),
    )
