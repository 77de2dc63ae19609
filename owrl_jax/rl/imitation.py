"""Supervised samples, and how well a model reproduces them.

A demonstration is a trajectory whose every response is a target, in the context in which it was written; packing and
gradient are those of the learner with another loss (`NllSettings`). The measure beside the cross-entropy is strict: a
turn counts as reproduced if at each of its positions the demonstrated token is the likeliest one, which is to say that
greedy decoding from its prompt gives exactly the demonstrated response.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.run import Params
from owrl_jax.rl.batch import PackedBatch, TrainSample
from owrl_jax.rl.update import Learner
from owrl_jax.types import Trajectory


def demonstrations(trajectories: Iterable[Trajectory]) -> list[TrainSample]:
    """The samples of supervised training: each turn's response has a loss, except of turns that broke the format."""
    return [
        TrainSample(
            name=f"{trajectory.group_id}/{trajectory.index}",
            turns=trajectory.turns,
            turn_weights=tuple(float(turn.parsed and bool(turn.response_ids)) for turn in trajectory.turns),
            group=trajectory.group_id,
        )
        for trajectory in trajectories
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reproduced:
    """How much of some demonstrations a model would write itself.

    Attributes:
      turns: number with a response.
      exact: of them, whose response greedy decoding would give, to the last token.
      tokens, right: response tokens, and those that are the likeliest.
      nats: sum of minus the log-probs of all response tokens.
      wrong: (sample, turn) of the turns that are not exact, samples counted in the order in which they were packed.
    """

    turns: int
    exact: int
    tokens: int
    right: int
    nats: float
    wrong: tuple[tuple[int, int], ...] = ()

    @property
    def share(self) -> float:
        """Share of turns reproduced exactly."""
        return self.exact / max(self.turns, 1)


class Scorer:
    """Compiled once per shape of batch.

    Args:
      learner: whose model and placement of batches are used.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._likeliest = jax.jit(self._program)

    def __call__(self, params: Params, batches: Iterable[PackedBatch]) -> Reproduced:
        """Scores every turn of the batches that has a response. On one process."""
        turns = exact = tokens = right = 0
        nats = 0.0
        wrong: list[tuple[int, int]] = []
        for batch in batches:
            hit, logp = jax.device_get(self._likeliest(params, self._learner._put(batch)))
            for origin, hits in batch.by_turn(hit).items():
                turns, exact = turns + 1, exact + bool(hits.all())
                tokens, right = tokens + len(hits), right + int(hits.sum())
                if not hits.all():
                    wrong.append(origin)
            nats -= float(sum(values.sum() for values in batch.by_turn(logp).values()))
        return Reproduced(turns=turns, exact=exact, tokens=tokens, right=right, nats=nats, wrong=tuple(wrong))

    def _program(self, params: Params, arrays):
        text, images, responses = arrays
        model = self._learner.model
        visual = None if images is None else model.encode(params, images)
        hidden = model.hidden(params, text, visual)
        return likeliest(model, params, hidden, responses.index, responses.targets, chunk=self._learner.chunk)


def likeliest(
    model: Qwen3VL,
    params: Params,
    hidden: Float[Array, "B T D"],
    index: Int[Array, "B R"],
    targets: Int[Array, "B R"],
    *,
    chunk: int = 256,
) -> tuple[Bool[Array, "B R"], Float[Array, "B R"]]:
    """Whether each target is the token with the largest logit (ties: the smallest id), and its log-prob.

    Arguments as of `Qwen3VL.logprobs`.
    """

    def some(at):
        index, targets = at
        logits = model.logits(params, jnp.take_along_axis(hidden, index[..., None], axis=1))
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        return jnp.argmax(logits, axis=-1) == targets, logp

    batch, asked = index.shape
    chunk = min(chunk, asked)
    pad = -asked % chunk
    split = lambda x: jnp.pad(x, ((0, 0), (0, pad))).reshape(batch, -1, chunk).swapaxes(0, 1)  # noqa: E731
    join = lambda x: x.swapaxes(0, 1).reshape(batch, -1)[:, :asked]  # noqa: E731
    hit, logp = jax.lax.map(some, (split(index), split(targets)))
    return join(hit), join(logp)


def chance(samples: Sequence[TrainSample]) -> float:
    """Share of turns that the most frequent response of these samples answers: what a model gets that sees nothing."""
    responses = [turn.response_ids for sample in samples for turn in sample.turns if turn.response_ids]
    if not responses:
        return 0.0
    _, counts = np.unique(np.array([hash(ids) for ids in responses]), return_counts=True)
    return float(counts.max()) / len(responses)
