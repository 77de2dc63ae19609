"""Policies that are no model: scripts, oracles, chance, and recordings, all behind the one `Policy` protocol.

An `Actor` thinks in words: it looks at a `Scene` and gives a response as text, or as reasoning and calls. `ActorPolicy`
turns the words into ids, so that the harness parses, feeds back and records an oracle's episode exactly as a model's,
and its turns can serve as demonstrations. Such ids have log-prob 0 and version -1: nobody drew them.

Not here: models (`owrl_jax.engine`), remote endpoints (`openai_client.py`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from owrl_jax.agent.chat import ChatTokens, encode_response
from owrl_jax.agent.parser import write
from owrl_jax.agent.policy import FailureKind, Generation, Leaf, PolicyFailed, Sampling, Scene
from owrl_jax.geometry import GRID
from owrl_jax.types import StepResult, ToolCall, Trajectory

NO_VERSION = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """A response in parts: what was thought, and the calls."""

    reasoning: str
    calls: tuple[ToolCall, ...]


class Actor(Protocol):
    """Whoever answers in words."""

    async def act(self, scene: Scene) -> Reply | str:
        """The response to a scene: its parts, or its whole text, tags included.

        Raises:
          PolicyFailed: if there is none.
        """
        ...


class ActorPolicy:
    """An actor as a policy."""

    def __init__(self, actor: Actor, tokens: ChatTokens) -> None:
        self._actor, self._tokens = actor, tokens

    async def generate(self, trunk: tuple[int, ...], leaf: Leaf, sampling: Sampling) -> Generation:
        """See `Policy`. A response that is too long is cut, as a model's would be."""
        if leaf.scene is None:
            raise ValueError("an actor needs the scene; the harness puts it on every leaf")
        reply = await self._actor.act(leaf.scene)
        text = reply if isinstance(reply, str) else write(reply.reasoning, reply.calls)
        return spoken(encode_response(self._tokens, text), sampling)


def spoken(ids: Sequence[int], sampling: Sampling, *, finished: bool = True) -> Generation:
    """Ids that were written, not drawn, as a generation, cut to the limit."""
    kept = tuple(ids[: sampling.max_new_tokens])
    whole = finished and len(kept) == len(ids)
    return Generation(
        ids=kept,
        logprobs=(0.0,) * len(kept),
        versions=(NO_VERSION,) * len(kept),
        finish="stop" if whole else "length",
    )


class Script:
    """An actor that gives one reply after another, whatever it sees; for tests and fixed demonstrations."""

    def __init__(self, replies: Sequence[Reply | str]) -> None:
        self._replies = tuple(replies)

    async def act(self, scene: Scene) -> Reply | str:
        """The reply of this turn's number."""
        if scene.turn >= len(self._replies):
            raise PolicyFailed(FailureKind.EXHAUSTED, f"the script has {len(self._replies)} replies, all were given")
        return self._replies[scene.turn]


class Solver(Protocol):
    """A solution being played; `owrl_jax.worlds.oracle.Oracle` is one."""

    async def act(self, probe: Any, last: StepResult | None) -> tuple[str, Sequence[ToolCall]]: ...


class OracleActor:
    """A solver as an actor: it may look at the running page through a probe, and acts by calls like everybody else.

    Args:
      solver: the solution.
      probe: makes the probe of a sandbox, `owrl_jax.worlds.oracle.PageProbe` for instance.
    """

    def __init__(self, solver: Solver, probe: Callable[[Any], Any]) -> None:
        self._solver, self._probe = solver, probe

    async def act(self, scene: Scene) -> Reply:
        """The solver's next turn."""
        last = StepResult(results=scene.results, observation=scene.observation) if scene.turn else None
        reasoning, calls = await self._solver.act(self._probe(scene.sandbox), last)
        return Reply(reasoning=reasoning, calls=tuple(calls))


class RandomActor:
    """Calls tools by chance, with arguments that are valid. The floor that every other policy is compared with.

    The choice depends on seed, task and turn alone, so an episode on a resettable world can be repeated.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    async def act(self, scene: Scene) -> Reply:
        """One call. `done` is chosen about half as often as the others, so that episodes are not over at once."""
        rng = random.Random(f"{self._seed}/{scene.task.id}/{scene.turn}")
        names = [schema["function"]["name"] for schema in scene.tools]
        name = rng.choice(names)
        if name == "done" and rng.random() < 0.5:
            name = rng.choice(names)
        call = ToolCall(name=name, arguments=_CHANCE[name](rng, len(scene.observation.tabs)))
        return Reply(reasoning="I try something.", calls=(call,))


def _point(rng: random.Random) -> list[int]:
    return [rng.randint(0, GRID), rng.randint(0, GRID)]


_WORDS = ("yes", "no", "1", "2", "10", "red", "blue", "search", "hotel", "shoes")
_CHANCE: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "click": lambda rng, tabs: {"point_2d": _point(rng)},
    "write": lambda rng, tabs: {"message": rng.choice(_WORDS)},
    "press_keys": lambda rng, tabs: {"keys": [rng.choice(("Enter", "Tab", "Escape", "PageDown", "PageUp"))]},
    "scroll": lambda rng, tabs: {"direction": rng.choice(("up", "down")), "amount": rng.choice((0.3, 0.5, 1.0))},
    "wait": lambda rng, tabs: {"seconds": 1},
    "done": lambda rng, tabs: {"response": rng.choice(_WORDS)},
    "goto_url": lambda rng, tabs: {"url": "/"},
    "go_back": lambda rng, tabs: {},
    "drag": lambda rng, tabs: {"start_point_2d": _point(rng), "end_point_2d": _point(rng)},
    "hover": lambda rng, tabs: {"point_2d": _point(rng)},
    "new_tab": lambda rng, tabs: {},
    "switch_tab": lambda rng, tabs: {"tab_index": rng.randrange(max(tabs, 1))},
    "close_tab": lambda rng, tabs: {},
}


class ReplayedPolicy:
    """The responses of a recorded trajectory, id for id, with their log-probs and versions."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._turns = trajectory.turns
        self._next = 0

    async def generate(self, trunk: tuple[int, ...], leaf: Leaf, sampling: Sampling) -> Generation:
        """The next recorded response. The prompt may differ from the recorded one: live pages change."""
        if self._next >= len(self._turns):
            raise PolicyFailed(FailureKind.EXHAUSTED, f"the recording has {len(self._turns)} turns, all were replayed")
        turn = self._turns[self._next]
        self._next += 1
        kept = min(len(turn.response_ids), sampling.max_new_tokens)
        return Generation(
            ids=turn.response_ids[:kept],
            logprobs=turn.logprobs[:kept],
            versions=turn.versions[:kept],
            finish="stop" if turn.response_ids and kept == len(turn.response_ids) else "length",
        )
