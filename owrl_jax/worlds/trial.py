"""Oracle episodes in a real browser, one after another: sandbox, world server, oracle and verdict put together.

    async with Trial(site.viewport) as trial:
        result = await trial.run(task)

This is the shortest loop there is: no policy, no prompt, no journal. `agent.episode` runs episodes of policies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from owrl_jax.outcome import Outcome
from owrl_jax.types import Task, ToolCall, Verdict, VerdictValue
from owrl_jax.worlds.miniwob_oracle import MiniWobOracle
from owrl_jax.worlds.oracle import Lost, Oracle, PageProbe
from owrl_jax.worlds.server import Visit, WorldServer
from owrl_jax.worlds.site import Episode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one episode.

    Attributes:
      verdict: of the program.
      outcome: how the sandbox ended it, None if it did not.
      turns: (reasoning, calls, feedback) of each turn.
      lost: where the oracle gave up; empty if it did not.
      said: the answer, None if `done` was never called.
    """

    verdict: Verdict
    outcome: Outcome | None
    turns: tuple[tuple[str, tuple[ToolCall, ...], tuple[str, ...]], ...]
    lost: str = ""
    said: str | None = None

    @property
    def solved(self) -> bool:
        """Whether the program says success."""
        return self.verdict.value is VerdictValue.SUCCESS

    @property
    def why(self) -> str:
        """One line on what went wrong."""
        return self.lost or (self.outcome.key if self.outcome and self.said is None else self.verdict.rationale)


def oracle_for(visit: Visit) -> Oracle | MiniWobOracle:
    """The oracle of an open episode.

    Raises:
      KeyError: for a MiniWoB++ task without a solver.
    """
    if isinstance(visit.episode, Episode):
        return Oracle(visit.episode.case.moves)
    return MiniWobOracle(visit.task.metadata["template"])


class Trial:
    """A browser, a world server and a sandbox; an async context manager.

    Args:
      viewport: in CSS pixels.
      dpr: device pixels per CSS pixel.
      engine: a started `BrowserEngine` to use; by default one is launched and closed.
      max_turns: turns after which an episode is stopped.
    """

    def __init__(self, viewport: tuple[int, int], *, dpr: float = 1.0, engine: Any = None, max_turns: int = 60):
        self._viewport, self._dpr, self._max_turns = viewport, dpr, max_turns
        self._own_engine = engine is None
        self.engine = engine
        self.worlds = WorldServer()

    async def __aenter__(self) -> Trial:
        from owrl_jax.browser.config import SandboxConfig
        from owrl_jax.browser.engine import BrowserEngine
        from owrl_jax.browser.safety import Safety
        from owrl_jax.browser.sandbox import Sandbox

        await self.worlds.start()
        if self.engine is None:
            self.engine = BrowserEngine()
            await self.engine.start()
        safety = Safety.for_local_worlds(self.worlds.exceptions)
        self.sandbox = Sandbox(self.engine, SandboxConfig(viewport=self._viewport, dpr=self._dpr, safety=safety))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.sandbox.close()
        await self.worlds.close()
        if self._own_engine:
            await self.engine.close()

    async def run(self, task: Task) -> Result:
        """One episode of the task's oracle, in a fresh context with fresh state."""
        visit = await self.worlds.open(task)
        turns, said, lost = [], None, ""
        last = await self.sandbox.reset(visit.task)
        outcome = last.outcome
        oracle, probe = oracle_for(visit), PageProbe(self.sandbox)
        while outcome is None and len(turns) < self._max_turns:
            try:
                reasoning, calls = await oracle.act(probe, last if turns else None)
            except Lost as error:
                lost = str(error)
                break
            last = await self.sandbox.step(calls)
            turns.append((reasoning, tuple(calls), tuple(r.feedback for r in last.results)))
            outcome, said = last.outcome, last.answer
        verdict = visit.verdict(said)
        self.worlds.forget(visit.key)
        return Result(verdict=verdict, outcome=outcome, turns=tuple(turns), lost=lost, said=said)
