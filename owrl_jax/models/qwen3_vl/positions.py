"""Everything ragged about Qwen3-VL, decided on the host in numpy: positions, visual rows, the plan of the vision tower.

Text: a text token advances all three M-RoPE axes (time, height, width) by one. An image of h x w tokens that begins at
position p gives its token (i, j) the position (p, p + i, p + j), and the next text token stands at p + max(h, w). So an
image advances the clock by its longer side, not by its token count, and the difference (`rope_delta`) must travel with
a sequence into decoding.

Vision: every patch gets its row and column for the 2-D rotary, four taps into the learned square position table
(bilinear, corners aligned) and the number of its image, which is its attention segment. All in 2x2 merge-block order,
padded to one of a few static sizes.

Images are consumed strictly by their grids, so two images whose placeholder runs touch are told apart. Here grids are
always counted in patches, (rows, columns); a grid of tokens is a grid of patches divided by `merge`.
Reference: `get_rope_index` and `vision_utils` of transformers 5.24. Video is out of scope.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

Grid = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RopePositions:
    """M-RoPE positions of a row that holds S packed sequences.

    Attributes:
      positions: int32 [3, T], axes (time, height, width); 0 at padding.
      next_position: int32 [S], where each sequence goes on: its largest position plus one.
      rope_delta: int32 [S], next_position minus (start + number of real tokens); a token decoded as number n of its
        sequence (n counted from `start`) stands at n + rope_delta on all axes.
    """

    positions: np.ndarray
    next_position: np.ndarray
    rope_delta: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VisionPlan:
    """Per-patch indices of the images of one row or batch, N patches with padding at the end.

    Attributes:
      rc: int32 [N, 2], row and column of the patch in its image; 0 at padding.
      taps: int32 [N, 4], rows of the flattened position table; 0 at padding.
      tap_weights: float32 [N, 4], their weights, which sum to 1; 0 at padding.
      segment: int32 [N], number of the image in the list; -1 at padding.
      n_valid: number of real patches.
    """

    rc: np.ndarray
    taps: np.ndarray
    tap_weights: np.ndarray
    segment: np.ndarray
    n_valid: int


def mrope_positions(
    tokens: np.ndarray,
    grids: Sequence[Grid],
    *,
    image_token_id: int,
    merge: int = 2,
    mask: np.ndarray | None = None,
    segment_starts: Sequence[int] | None = None,
    start: int | Sequence[int] = 0,
) -> RopePositions:
    """Positions of one row of tokens with images in expanded form (one placeholder per visual token).

    Args:
      tokens: int [T].
      grids: grids of the images in patches, in the order of the row.
      image_token_id: id of the placeholder.
      merge: patches per side of a token.
      mask: bool or 0/1 [T], false at padding; padding may stand anywhere but inside an image. `None`: no padding.
      segment_starts: index of the first token of each packed sequence, ascending; positions restart there. `None`:
        one sequence.
      start: first position of each sequence, or one for all: the `next_position` of a prefix that is already
        computed, when these tokens continue it.

    Raises:
      ValueError: if placeholders and grids disagree, naming image, place and both counts.
    """
    tokens, keep, begins = _row(tokens, mask, segment_starts)
    starts = np.broadcast_to(np.asarray(start, np.int64), begins.shape)
    positions = np.zeros((3, tokens.size), np.int64)
    next_position = np.empty(begins.size, np.int64)
    spans = _image_spans(tokens, grids, image_token_id=image_token_id, merge=merge, keep=keep, begins=begins)
    ends = np.append(begins[1:], tokens.size)
    for s, (begin, end, clock) in enumerate(zip(begins.tolist(), ends.tolist(), starts.tolist(), strict=True)):
        cursor = begin
        for at, (rows, cols) in spans:
            if not begin <= at < end:
                continue
            clock = _text(positions, keep, cursor, at, clock)
            i, j = np.divmod(np.arange(rows * cols), cols)
            cursor = at + rows * cols
            positions[:, at:cursor] = clock + np.stack([np.zeros_like(i), i, j])
            clock += max(rows, cols)
        next_position[s] = _text(positions, keep, cursor, end, clock)
    lengths = np.add.reduceat(keep.astype(np.int64), begins) if tokens.size else np.zeros(begins.size, np.int64)
    return RopePositions(
        positions=positions.astype(np.int32),
        next_position=next_position.astype(np.int32),
        rope_delta=(next_position - starts - lengths).astype(np.int32),
    )


def visual_index(
    tokens: np.ndarray,
    grids: Sequence[Grid],
    *,
    image_token_id: int,
    first_row: int = 0,
    merge: int = 2,
    mask: np.ndarray | None = None,
    segment_starts: Sequence[int] | None = None,
) -> np.ndarray:
    """Where each token finds its visual embedding.

    Arguments as in `mrope_positions`; `first_row` is the row of the visual buffer where this row's images begin (rows
    of the buffer are visual tokens: padded patches divided by merge²).

    Returns:
      int32 [T], -1 for text and padding.

    Raises:
      ValueError: as `mrope_positions`.
    """
    tokens, keep, begins = _row(tokens, mask, segment_starts)
    _image_spans(tokens, grids, image_token_id=image_token_id, merge=merge, keep=keep, begins=begins)
    visual = (tokens == image_token_id) & keep
    return np.where(visual, first_row + np.cumsum(visual) - 1, -1).astype(np.int32)


def plan_vision(grids: Sequence[Grid], *, bucket: int | None, position_side: int = 48, merge: int = 2) -> VisionPlan:
    """Indices for the vision tower over images that lie one after the other in one patch buffer.

    Args:
      grids: (rows, columns) of each image, in patches; may be empty.
      bucket: number of patches to pad to, a multiple of merge²; `None`: no padding.
      position_side: side of the learned position table.
      merge: patches per side of a merge block.

    Raises:
      ValueError: for a grid that does not divide into blocks, or a bucket that is too small, naming both sizes.
    """
    grids = [_checked_grid(n, grid, merge) for n, grid in enumerate(grids)]
    counts = [h * w for h, w in grids]
    n_valid = sum(counts)
    size = n_valid if bucket is None else bucket
    if size < n_valid or size % merge**2:
        raise ValueError(
            f"a bucket of {size} patches does not hold {n_valid} patches of {len(grids)} images; it must be at least "
            f"that and a multiple of {merge**2}"
        )
    plan = VisionPlan(
        rc=np.zeros((size, 2), np.int32),
        taps=np.zeros((size, 4), np.int32),
        tap_weights=np.zeros((size, 4), np.float32),
        segment=np.full(size, -1, np.int32),
        n_valid=n_valid,
    )
    first = 0
    for n, (h, w) in enumerate(grids):
        here = slice(first, first + h * w)
        row, col = _merge_block_order(h, w, merge)
        row_taps, row_weights = _axis_taps(h, position_side)
        col_taps, col_weights = _axis_taps(w, position_side)
        plan.rc[here] = np.stack([row, col], axis=1)
        plan.taps[here] = (row_taps[row, :, None] * position_side + col_taps[col, None, :]).reshape(-1, 4)
        plan.tap_weights[here] = (row_weights[row, :, None] * col_weights[col, None, :]).reshape(-1, 4)
        plan.segment[here] = n
        first += h * w
    return plan


def choose_bucket(n: int, buckets: Sequence[int]) -> int:
    """The smallest of a few static sizes that holds `n`: the number of compiled shapes is the number of buckets.

    Raises:
      ValueError: if none is large enough, naming `n` and the sizes.
    """
    fitting = [size for size in buckets if size >= n]
    if not fitting:
        raise ValueError(f"{n} does not fit into the largest of the buckets {sorted(buckets)}: add a larger bucket")
    return min(fitting)


def _text(positions: np.ndarray, keep: np.ndarray, begin: int, end: int, clock: int) -> int:
    """Numbers the text of [begin, end) from `clock` on, skipping padding; returns the clock after it."""
    kept = begin + np.flatnonzero(keep[begin:end])
    positions[:, kept] = clock + np.arange(kept.size)
    return clock + kept.size


def _row(
    tokens: np.ndarray, mask: np.ndarray | None, segment_starts: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise ValueError(f"tokens must be one row of integer ids [T], got shape {tokens.shape}, dtype {tokens.dtype}")
    keep = np.ones(tokens.size, bool) if mask is None else np.asarray(mask).astype(bool)
    if keep.shape != tokens.shape:
        raise ValueError(f"mask has shape {keep.shape} but tokens have shape {tokens.shape}: one value per token")
    begins = np.asarray([0] if segment_starts is None else segment_starts, np.int64)
    if not begins.size or begins[0] != 0 or np.any(np.diff(begins) <= 0) or begins[-1] >= max(tokens.size, 1):
        raise ValueError(
            f"segment_starts must begin with 0 and ascend within {tokens.size} tokens, got {begins.tolist()}"
        )
    return tokens, keep, begins


def _image_spans(
    tokens: np.ndarray, grids: Sequence[Grid], *, image_token_id: int, merge: int, keep: np.ndarray, begins: np.ndarray
) -> list[tuple[int, Grid]]:
    """Index of the first placeholder and grid of tokens for each image; checks that the two tell one story."""
    visual = (tokens == image_token_id) & keep
    places = np.flatnonzero(visual)
    shapes = [(h // merge, w // merge) for h, w in (_checked_grid(n, grid, merge) for n, grid in enumerate(grids))]
    wanted = sum(h * w for h, w in shapes)
    if places.size != wanted:
        raise ValueError(
            f"the row has {places.size} image tokens but its {len(shapes)} grids ask for {wanted} "
            f"({[h * w for h, w in shapes]}): expand the placeholders exactly once, with these grids"
        )
    spans, used = [], 0
    cuts = set(begins.tolist())
    for n, (h, w) in enumerate(shapes):
        run = places[used : used + h * w]
        broken = np.flatnonzero(np.diff(run) != 1)
        crossing = cuts.intersection(range(int(run[0]) + 1, int(run[-1]) + 1))
        if broken.size or crossing:
            length = int(broken[0]) + 1 if broken.size else min(crossing) - int(run[0])
            raise ValueError(
                f"image {n} of {h}x{w} tokens needs {h * w} placeholders in one run from token {run[0]} on, "
                f"but the run ends after {length}"
            )
        spans.append((int(run[0]), (h, w)))
        used += h * w
    return spans


def _checked_grid(n: int, grid: Grid, merge: int) -> Grid:
    h, w = (int(side) for side in grid)
    if h < merge or w < merge or h % merge or w % merge:
        raise ValueError(f"grid {n} is {h}x{w} patches; both sides must be positive multiples of {merge}")
    return h, w


def _merge_block_order(h: int, w: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each patch when patches are listed block by block, row-major within and between blocks."""
    index = np.arange(h * w).reshape(h // merge, merge, w // merge, merge).transpose(0, 2, 1, 3).reshape(-1)
    return np.divmod(index, w)


def _axis_taps(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Linear interpolation of `size` points from a table of `side` entries with the corners aligned.

    Returns int64 [size, 2] entries and float32 [size, 2] weights. Every step is float32 in the order of transformers
    5.x, because the floor of a rounded source decides which entry is read.
    """
    source = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(source)
    fraction = source - low
    taps = np.minimum(low.astype(np.int64)[:, None] + np.arange(2), side - 1)
    return taps, np.stack([np.float32(1) - fraction, np.float32(1) - np.abs(fraction - np.float32(1))], axis=1)
