"""What the learner computes on: flat arrays of fixed size, and beside them what they were made of.

A batch has B rows. `TextInput` and `VisionInput` are the model's; `Responses` lists the R positions of each row that
have a loss. Several positions may point at the same token: siblings that began a response alike share its hidden
states, and each has its own weight there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from owrl_jax.models.qwen3_vl.text import TextInput
from owrl_jax.models.qwen3_vl.vision import VisionInput
from owrl_jax.models.run import Leaf
from owrl_jax.types import Turn


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainSample:
    """One trajectory as the learner sees it.

    Attributes:
      name: for messages.
      turns: all of them, in order; later contexts contain the earlier turns.
      advantage: of every response token; 1 in supervised training.
      turn_weights: weight of each turn; empty means 1 each. A turn of weight 0 stays in the contexts of later turns
        and is otherwise not computed.
      token_weights: within each turn, weight of each response token in the turn's mean; empty means 1 each.
      unit: what the sample adds to the normaliser of an update; None means the sum of its turn weights.
      group: siblings have the same.
      proximal, reference: per turn, log-probs of the response under the proximal and the reference policy; empty where
        the loss needs none.
    """

    name: str
    turns: tuple[Turn, ...]
    advantage: float = 1.0
    turn_weights: tuple[float, ...] = ()
    token_weights: tuple[tuple[float, ...], ...] = ()
    unit: float | None = None
    group: str = ""
    proximal: tuple[tuple[float, ...], ...] = ()
    reference: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        n = len(self.turns)
        for field in ("turn_weights", "token_weights", "proximal", "reference"):
            given = getattr(self, field)
            if given and len(given) != n:
                raise ValueError(f"sample {self.name}: {field} has {len(given)} entries for {n} turns")
        for field in ("token_weights", "proximal", "reference"):
            for number, values in enumerate(getattr(self, field)):
                if len(values) != len(self.turns[number].response_ids):
                    raise ValueError(
                        f"sample {self.name}, turn {number}: {field} has {len(values)} values for "
                        f"{len(self.turns[number].response_ids)} response ids"
                    )
        if any(not w >= 0 for w in self.turn_weights):
            raise ValueError(f"sample {self.name}: turn weights must be 0 or more, got {self.turn_weights}")

    def weight(self, turn: int) -> float:
        """Weight of a turn; 0 where it has no response."""
        if not self.turns[turn].response_ids:
            return 0.0
        return self.turn_weights[turn] if self.turn_weights else 1.0

    @property
    def live(self) -> tuple[int, ...]:
        """Numbers of the turns that have a loss."""
        return tuple(t for t in range(len(self.turns)) if self.weight(t) > 0)

    @property
    def share(self) -> float:
        """What the sample adds to the normaliser."""
        return sum(self.weight(t) for t in self.live) if self.unit is None else self.unit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Responses:
    """The response positions of a batch, R per row, the rest padding of weight 0.

    Attributes:
      index: int32 [B, R]; position whose hidden state predicts the target.
      targets: int32 [B, R]; sampled ids.
      behaviour: float32 [B, R]; log-probs when they were sampled.
      advantages: float32 [B, R].
      weights: float32 [B, R]; they sum to the turn's weight over a turn.
      turn: int32 [B, R]; number of the turn within its row, -1 for padding.
      trajectory: int32 [B, R]; number of the sample within the call of `pack`, -1 for padding.
      step: int32 [B, R]; number of the turn within its episode.
      proximal, reference: float32 [B, R], or None where the loss needs none.
    """

    index: Leaf
    targets: Leaf
    behaviour: Leaf
    advantages: Leaf
    weights: Leaf
    turn: Leaf
    trajectory: Leaf
    step: Leaf
    proximal: Leaf | None = None
    reference: Leaf | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What a batch holds, tokens and turns and trajectories counted apart.

    Attributes:
      tokens: that are computed and needed.
      token_slots: B·T, padding included.
      separate_tokens: what the same turns take as one prompt each.
      patches, patch_slots: the same of the vision tower.
      responses: response tokens that have a loss.
      turns: that have a loss.
      trajectories: with at least one of those turns here; one that is split over batches counts in each.
      pairs: visible query-key pairs.
    """

    tokens: int
    token_slots: int
    separate_tokens: int
    patches: int
    patch_slots: int
    responses: int
    turns: int
    trajectories: int
    pairs: int

    @property
    def useful_share(self) -> float:
        """Share of the token slots that are no padding."""
        return self.tokens / self.token_slots

    @staticmethod
    def total(counts: list[Counts]) -> Counts:
        """The sum over batches."""
        names = [f.name for f in dataclasses.fields(Counts)]
        return Counts(**{name: sum(getattr(c, name) for c in counts) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch.

    Attributes:
      text, images, responses: numpy arrays of B rows; `images` is None in a batch without room for pictures.
      origins: per row, (sample, turn) of each turn number in `responses.turn`; samples are counted within `samples`.
      samples: what `pack` was called with.
      counts: what is in it.
      again: packs other samples in the same way, for an update that must leave one out.
    """

    text: TextInput
    images: VisionInput | None
    responses: Responses
    origins: tuple[tuple[tuple[int, int], ...], ...]
    samples: tuple[TrainSample, ...]
    counts: Counts
    again: Callable[[Sequence[TrainSample]], Iterable[PackedBatch]]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Rows, tokens, patches and response positions: batches of one shape share a compiled program."""
        rows, tokens = self.text.tokens.shape
        patches = 0 if self.images is None else self.images.patches.shape[1]
        return rows, tokens, patches, self.responses.index.shape[1]

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the samples that have a turn here, ascending."""
        return tuple(sorted({sample for row in self.origins for sample, _ in row}))

    @property
    def arrays(self) -> tuple[TextInput, VisionInput | None, Responses]:
        """What the compiled programs take."""
        return self.text, self.images, self.responses

    def by_turn(self, values: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
        """Values [B, R] of response positions, taken apart: (sample, turn) -> values of its response ids, in order."""
        found = {}
        for row, origins in enumerate(self.origins):
            numbers = np.asarray(self.responses.turn[row])
            for number, origin in enumerate(origins):
                found[origin] = np.asarray(values[row])[numbers == number]
        return found
