"""Samples to rows: depth-first walks of the tree of contexts, filled to a token budget. All on the host, in numpy.

A row is a walk of a part of the prefix tree (`tree.py`). Each token has one integer, `visible_until`, the end of its
node's subtree in the walk, and attention is `k ≤ q < visible_until[k]`: a token sees its ancestors and nothing of a
sibling branch. Positions are those that each turn had when it was sampled, alone. So the loss and its gradient are
those of one prompt per turn, and what turns have in common is computed once. Mode "plain" builds the same rows from a
tree in which nothing is shared: one segment per turn.

Filling. Whole trajectories go where they fit and add the least. One that fits nowhere is cut between turns: its early
turns, which need the least of its trunk, fill the row that is open, the rest goes on in new rows; a cut costs the
trunk once more and changes nothing else. Rows of similar length form a batch, which takes the smallest of the few
allowed shapes; a last batch with fewer rows is packed again into smaller rows, so that all devices have work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from owrl_jax.models.processor import Patches
from owrl_jax.models.qwen3_vl.batch import batch_images
from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.qwen3_vl.positions import mrope_positions
from owrl_jax.models.qwen3_vl.text import TextInput
from owrl_jax.rl.batch import Counts, PackedBatch, Responses, TrainSample
from owrl_jax.rl.tree import Forest, Node, Path, walk

Pictures = Callable[[str], Patches]
"""The patches of a screenshot by its content hash."""

SHAPES = 6
"""Most shapes a batch may have, that is programs that are compiled."""

BUCKETS = (1.0, 0.96875, 0.9375, 0.6875, 0.5, 0.25)
SHORT = 2048
"""Rows up to this length are computed in about a second and compiled in twenty: two shapes of them are enough."""

_NO_LIMIT = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackSettings:
    """Shapes of rows and batches.

    Attributes:
      tokens: T of the largest row.
      rows: B, rows of every batch; a multiple of `shards`.
      patches: P of the largest row; 0 for a model or data without pictures.
      responses: R of the largest row.
      buckets: sizes of rows as fractions of the largest, which is one of them.
      mode: "tree", or "plain" for one segment per turn.
      shards: data shards; each computes `rows / shards` rows of a batch, and they are balanced by visible pairs.
    """

    tokens: int
    rows: int = 1
    patches: int = 0
    responses: int
    buckets: tuple[float, ...] = BUCKETS
    mode: Literal["tree", "plain"] = "tree"
    shards: int = 1

    def __post_init__(self) -> None:
        for field in ("tokens", "rows", "responses", "shards"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.rows % self.shards:
            raise ValueError(f"rows={self.rows} must be a multiple of shards={self.shards}: one shape for all of them")
        if not 1 <= len(self.buckets) <= SHAPES or max(self.buckets) != 1.0 or min(self.buckets) <= 0:
            raise ValueError(f"buckets={self.buckets} must be 1 to {SHAPES} fractions above 0, the largest of them 1.0")
        if self.patches < 0 or self.mode not in ("tree", "plain"):
            raise ValueError(f"patches={self.patches} must be 0 or more, mode={self.mode!r} tree or plain")

    def shapes(self, merge: int = 2) -> list[tuple[int, int, int]]:
        """(T, P, R) of every bucket, smallest first, rounded up to whole tiles and merge blocks."""
        found = set()
        for fraction in self.buckets:
            tokens = _round_up(self.tokens * fraction, 16)
            patches = _round_up(self.patches * fraction, 4 * merge**2)
            found.add((tokens, patches, _round_up(self.responses * fraction, 8)))
        return sorted(found)

    @classmethod
    def fitted(
        cls, samples: Sequence[TrainSample], config: ModelConfig, *, tokens: int, spare: float = 0.05, **fields: Any
    ) -> PackSettings:
        """Settings with room for the patches and responses that rows full of these samples have, and a little more.

        What the first iteration of a run shows is kept for all of it: other shapes would be compiled anew.

        Args:
          tokens: T of the largest row; raised if a single turn is longer.
          spare: of patches and responses, beyond the fullest row.
          fields: the other settings.
        """
        if tokens <= SHORT:
            fields.setdefault("buckets", (1.0, 0.5))
        forest = _forest(samples, config, fields.get("mode", "tree"))
        longest = max((_Row(forest).cost(path).tokens for path in forest.paths), default=0)
        tokens = _round_up(max(tokens, longest), 16)
        rows = _fill(forest, _by_trajectory(forest.paths), (tokens, _NO_LIMIT, _NO_LIMIT))
        patches = max((row.patches for row in rows), default=0)
        responses = max((row.responses for row in rows), default=1)
        return cls(
            tokens=tokens,
            patches=math.ceil(patches * (1 + spare)),
            responses=math.ceil(responses * (1 + spare)),
            **fields,
        )


def pack(
    samples: Sequence[TrainSample], config: ModelConfig, *, pictures: Pictures, settings: PackSettings
) -> list[PackedBatch]:
    """Micro-batches that hold every turn of the samples that has a loss, each once.

    Args:
      samples: what one update is made of.
      config: of the model: ids and grids.
      pictures: patches by content hash; asked once per picture and row.
      settings: shapes.
    Raises:
      ValueError: if a turn does not fit into a row, placeholders and pictures disagree, or a picture has another grid
        than its turn says; the sample and the turn are named.
    """
    return list(stream(samples, config, pictures=pictures, settings=settings))


def stream(
    samples: Sequence[TrainSample], config: ModelConfig, *, pictures: Pictures, settings: PackSettings
) -> Iterator[PackedBatch]:
    """`pack`, one batch at a time: the pictures of an update together may be gigabytes."""
    for plan in plan_batches(samples, config, settings):
        yield build(plan, config, pictures=pictures, settings=settings)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """Which turns lie in which row of one batch, and its shape; no pixels. The same on every process.

    Attributes:
      samples: what was planned.
      rows: B of them; rows without turns are padding.
      shape: (T, P, R).
    """

    samples: tuple[TrainSample, ...]
    forest: Forest
    rows: tuple[_Row, ...]
    shape: tuple[int, int, int]


def plan_batches(samples: Sequence[TrainSample], config: ModelConfig, settings: PackSettings) -> list[BatchPlan]:
    """The plan of `pack`: a pure function of its arguments, so that every process can make the same one."""
    samples = tuple(samples)
    forest = _forest(samples, config, settings.mode)
    shapes = settings.shapes(config.vision.merge if config.vision else 2)
    rows = _fill(forest, _by_trajectory(forest.paths), shapes[-1])
    # Rows of like length side by side: a batch is as long as its longest row.
    rows.sort(key=lambda row: -row.fraction(shapes[-1]))
    whole = len(rows) - len(rows) % settings.rows
    chunks = [rows[at : at + settings.rows] for at in range(0, whole, settings.rows)]
    if whole < len(rows):
        chunks.append(_spread(forest, rows[whole:], shapes, settings.rows))
    plans = []
    for chunk in chunks:
        shape = next(shape for shape in shapes if all(row.fits(shape) for row in chunk))
        plans.append(BatchPlan(samples=samples, forest=forest, rows=_balanced(forest, chunk, settings), shape=shape))
    return plans


def build(
    plan: BatchPlan,
    config: ModelConfig,
    *,
    pictures: Pictures,
    settings: PackSettings,
    rows: slice | None = None,
) -> PackedBatch:
    """The arrays of a plan; of some of its rows, if asked: a process of many builds those that its devices hold."""
    chosen = plan.rows if rows is None else plan.rows[rows]
    tokens, patches, responses = plan.shape
    made = [_fill_row(plan, row, config) for row in chosen]
    filled = [arrays for arrays, _ in made]
    text = TextInput(
        tokens=np.stack([_padded(f["tokens"], tokens, 0) for f in filled]),
        positions=np.stack([_padded(f["positions"], tokens, 0) for f in filled], axis=1),
        visible_until=np.stack([_padded(f["until"], tokens, 0) for f in filled]),
        visual_index=np.stack([_padded(f["visual"], tokens, -1) for f in filled]),
    )
    images = batch_images(config, [_row_pictures(plan, row, pictures) for row in chosen], patches=patches or None)
    names = {
        "index": np.int32, "targets": np.int32, "behaviour": np.float32, "advantages": np.float32,
        "weights": np.float32, "turn": np.int32, "trajectory": np.int32, "step": np.int32,
        "proximal": np.float32, "reference": np.float32,
    }  # fmt: skip
    kept = {name for name in names if all(name in f for f in filled)}
    columns = {
        name: np.stack([
            _padded(f[name].astype(names[name]), responses, -1 if name in ("turn", "trajectory") else 0)
            for f in filled
        ])
        for name in sorted(kept)
    }  # fmt: skip
    origins = tuple(tuple((path.sample, path.turn) for path in row.paths) for row in chosen)
    paths = [path for row in chosen for path in row.paths]
    counts = Counts(
        tokens=sum(row.tokens for row in chosen),
        token_slots=tokens * len(chosen),
        separate_tokens=sum(sum(map(len, path.end.path())) for path in paths),
        patches=sum(row.patches for row in chosen),
        patch_slots=patches * len(chosen),
        responses=sum(path.responses for path in paths),
        turns=len(paths),
        trajectories=len({path.sample for path in paths}),
        pairs=sum(pairs for _, pairs in made),
    )
    return PackedBatch(
        text=text,
        images=images,
        responses=Responses(**columns),
        origins=origins,
        samples=plan.samples,
        counts=counts,
        again=lambda some: stream(some, config, pictures=pictures, settings=settings),
    )


def empty_row(config: ModelConfig, settings: PackSettings) -> PackedBatch:
    """A batch of one row without turns, of the largest shape: what can be compiled for before there are samples."""
    forest = _forest((), config, settings.mode)
    shape = settings.shapes(config.vision.merge if config.vision else 2)[-1]
    plan = BatchPlan(samples=(), forest=forest, rows=(_Row(forest),), shape=shape)
    return build(plan, config, pictures=_no_picture, settings=settings)


def _no_picture(name: str) -> Patches:
    raise LookupError(f"an empty row has no picture {name}")


# --- Rows ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Cost:
    """What some paths would add to a row."""

    paths: tuple[Path, ...]
    nodes: dict[int, Node]
    pictures: dict[int, None]
    tokens: int
    patches: int
    responses: int


class _Row:
    """Paths that lie together, with the nodes and pictures that they need."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self.paths: list[Path] = []
        self.nodes: dict[int, Node] = {}
        self.pictures: dict[int, None] = {}  # an ordered set
        self.tokens = self.patches = self.responses = 0

    def cost(self, *paths: Path) -> _Cost:
        nodes: dict[int, Node] = {}
        for path in paths:
            node = path.end
            # An ancestor of a node that is there is there.
            while node.parent is not None and id(node) not in self.nodes and id(node) not in nodes:
                nodes[id(node)] = node
                node = node.parent
        pictures = {
            number: None
            for node in nodes.values()
            for number in self._forest.images(node)
            if number not in self.pictures
        }
        return _Cost(
            paths,
            nodes,
            pictures,
            sum(len(node) for node in nodes.values()),
            sum(map(self._forest.patches, pictures)),
            sum(path.responses for path in paths),
        )

    def room_for(self, cost: _Cost, shape: tuple[int, int, int]) -> bool:
        return (
            self.tokens + cost.tokens <= shape[0]
            and self.patches + cost.patches <= shape[1]
            and self.responses + cost.responses <= shape[2]
        )

    def add(self, cost: _Cost) -> None:
        self.paths += cost.paths
        self.nodes |= cost.nodes
        self.pictures |= cost.pictures
        self.tokens += cost.tokens
        self.patches += cost.patches
        self.responses += cost.responses

    def fits(self, shape: tuple[int, int, int]) -> bool:
        return self.tokens <= shape[0] and self.patches <= shape[1] and self.responses <= shape[2]

    def fraction(self, shape: tuple[int, int, int]) -> float:
        return max(self.tokens / shape[0], self.patches / max(shape[1], 1), self.responses / shape[2])


def _forest(samples: Sequence[TrainSample], config: ModelConfig, mode: str) -> Forest:
    forest = Forest(
        image_token=config.image_token if config.vision else None,
        merge=config.vision.merge if config.vision else 2,
        shared=mode == "tree",
    )
    for number, sample in enumerate(samples):
        forest.add(number, sample)
    return forest


def _by_trajectory(paths: Sequence[Path]) -> list[list[Path]]:
    found: dict[int, list[Path]] = {}
    for path in paths:
        found.setdefault(path.sample, []).append(path)
    return list(found.values())


def _fill(forest: Forest, trajectories: Sequence[Sequence[Path]], shape: tuple[int, int, int]) -> list[_Row]:
    """Rows that hold all paths, none larger than `shape`."""
    rows: list[_Row] = []
    for paths in trajectories:
        rest = list(paths)
        offers = [(row, row.cost(*rest)) for row in rows]
        fitting = [(cost.tokens, -row.tokens, n) for n, (row, cost) in enumerate(offers) if row.room_for(cost, shape)]
        if fitting:
            row, cost = offers[min(fitting)[-1]]
            row.add(cost)
            continue
        if rows:
            fullest = max(rows[-4:], key=lambda row: shape[0] - row.tokens)
            rest = _take(fullest, rest, shape)
        while rest:
            rows.append(_Row(forest))
            left = _take(rows[-1], rest, shape)
            if len(left) == len(rest):
                _refuse(forest, rest[0], shape)
            rest = left
    return rows


def _take(row: _Row, paths: Sequence[Path], shape: tuple[int, int, int]) -> list[Path]:
    """Adds early turns to a row as long as they fit, and gives the others."""
    rest = []
    for path in paths:
        cost = row.cost(path)
        if row.room_for(cost, shape):
            row.add(cost)
        else:
            rest.append(path)
    return rest


def _spread(forest: Forest, rows: Sequence[_Row], shapes: Sequence[tuple[int, int, int]], count: int) -> list[_Row]:
    """The turns of fewer than `count` rows in at most `count` rows of the smallest shape that will do."""
    trajectories = _by_trajectory(sorted((p for row in rows for p in row.paths), key=lambda p: (p.sample, p.turn)))
    for shape in shapes:
        alone = [_Row(forest).cost(path) for paths in trajectories for path in paths]
        if not all(_Row(forest).room_for(cost, shape) for cost in alone):
            continue
        smaller = _fill(forest, trajectories, shape)
        if len(smaller) <= count:
            return smaller
    return list(rows)


def _balanced(forest: Forest, rows: Sequence[_Row], settings: PackSettings) -> tuple[_Row, ...]:
    """`settings.rows` rows, empty ones added, in an order in which the shards have about the same work each."""
    padded = [*rows, *(_Row(forest) for _ in range(settings.rows - len(rows)))]
    each = settings.rows // settings.shards
    shards: list[list[_Row]] = [[] for _ in range(settings.shards)]
    for row in sorted(padded, key=lambda row: -row.tokens):
        open_shards = [shard for shard in shards if len(shard) < each]
        min(open_shards, key=lambda shard: sum(r.tokens for r in shard)).append(row)
    return tuple(row for shard in shards for row in shard)


def _refuse(forest: Forest, path: Path, shape: tuple[int, int, int]) -> None:
    cost = _Row(forest).cost(path)
    raise ValueError(
        f"turn {path.turn} of sample {path.sample} needs {cost.tokens} tokens, {cost.patches} patches and "
        f"{cost.responses} response positions, but a row has {shape[0]}, {shape[1]} and {shape[2]}: make rows larger "
        "(a turn is never cut)"
    )


# --- Arrays -------------------------------------------------------------------------------------------------


def _fill_row(plan: BatchPlan, row: _Row, config: ModelConfig) -> tuple[dict[str, np.ndarray], int]:
    """The unpadded arrays of one row, and how many query-key pairs see each other in it."""
    forest = plan.forest
    first_visual: dict[int, int] = {}
    visual_rows = 0
    for number in row.pictures:
        first_visual[number] = visual_rows
        visual_rows += forest.visual_tokens(number)
    size = row.tokens
    tokens, until = np.zeros(size, np.int32), np.zeros(size, np.int32)
    positions, visual = np.zeros((3, size), np.int32), np.full(size, -1, np.int32)
    start: dict[int, int] = {}
    clock: dict[int, int] = {id(forest.root): 0}
    depth: dict[int, int] = {id(forest.root): 0}
    at = pairs = 0
    for node, entering in walk(forest.root, row.nodes.values()):
        if not entering:
            until[start[id(node)] : start[id(node)] + len(node)] = at
            continue
        here = slice(at, at + len(node))
        start[id(node)] = at
        above, n = depth[id(node.parent)], len(node)
        depth[id(node)] = above + n
        pairs += n * above + n * (n + 1) // 2
        numbers = forest.images(node)
        ids = forest.ids(node)
        if n:
            tokens[here] = ids
            placed = mrope_positions(
                ids,
                [forest.pictures[number][1] for number in numbers],
                image_token_id=config.image_token if config.vision else -1,
                merge=config.vision.merge if config.vision else 2,
                start=clock[id(node.parent)],
            )
            positions[:, here] = placed.positions
            clock[id(node)] = int(placed.next_position[0])
        else:
            clock[id(node)] = clock[id(node.parent)]
        if numbers:
            visual[at + np.flatnonzero(node.keys < 0)] = np.concatenate(
                [first_visual[number] + np.arange(forest.visual_tokens(number)) for number in numbers]
            )
        at += n
    found: dict[str, np.ndarray] = {"tokens": tokens, "positions": positions, "until": until, "visual": visual}
    columns: dict[str, list[np.ndarray]] = {}
    for number, path in enumerate(row.paths):
        for name, values in _turn_columns(plan.samples[path.sample], path, number, start).items():
            columns.setdefault(name, []).append(values)
    optional = [name for name in ("proximal", "reference") if any(getattr(s, name) for s in plan.samples)]
    for name in (*_COLUMNS, *optional):
        parts = columns.get(name, [])
        if row.paths and len(parts) != len(row.paths):
            raise ValueError(f"some samples of a batch have {name} log-probs and others have none: give all or no ones")
        found[name] = np.concatenate(parts) if parts else np.zeros(0, np.float64)
    return found, pairs


_COLUMNS = ("index", "targets", "behaviour", "advantages", "weights", "turn", "trajectory", "step")


def _turn_columns(sample: TrainSample, path: Path, number: int, start: dict[int, int]) -> dict[str, np.ndarray]:
    """Everything about the response positions of one turn."""
    turn, n = sample.turns[path.turn], path.responses
    weights = np.ones(n)
    if sample.token_weights:
        weights = np.asarray(sample.token_weights[path.turn], np.float64)
    total = weights.sum()
    # The mean over the turn's tokens; a turn whose every token is masked has no loss instead of 0 / 0.
    weights = weights / total * sample.weight(path.turn) if total > 0 else np.zeros(n)
    columns = {
        "index": _last_positions(path, start),
        "targets": np.asarray(turn.response_ids),
        "behaviour": np.asarray(turn.logprobs),
        "advantages": np.full(n, sample.advantage),
        "weights": weights,
        "turn": np.full(n, number),
        "trajectory": np.full(n, path.sample),
        "step": np.full(n, path.turn),
    }
    for name in ("proximal", "reference"):
        given = getattr(sample, name)
        if given:
            columns[name] = np.asarray(given[path.turn])
    return columns


def _last_positions(path: Path, start: dict[int, int]) -> np.ndarray:
    """Where in the row the last `path.responses` tokens of a path lie."""
    parts, missing, node = [], path.responses, path.end
    while missing:
        assert node.parent is not None, "a path has at least as many tokens as its response"
        take = min(missing, len(node))
        end = start[id(node)] + len(node)
        parts.append(np.arange(end - take, end))
        missing -= take
        node = node.parent
    return np.concatenate(parts[::-1])


def _row_pictures(plan: BatchPlan, row: _Row, pictures: Pictures) -> list[Patches]:
    found = []
    for number in row.pictures:
        sha, grid, _ = plan.forest.pictures[number]
        picture = pictures(sha)
        if tuple(picture.grid) != tuple(grid):
            raise ValueError(
                f"picture {sha[:12]} has {picture.grid[0]}x{picture.grid[1]} patches, but its turn was sampled with "
                f"{grid[0]}x{grid[1]}: the image processor has other limits than at collection"
            )
        found.append(picture)
    return found


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    width = [(0, 0)] * (values.ndim - 1) + [(0, size - values.shape[-1])]
    return np.pad(values, width, constant_values=fill)


def _round_up(value: float | int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
