"""One episode, from an empty browser to its one outcome.

    open sandbox → reset → [ prompt → generate → parse → step ]* → outcome → release

The loop is the algorithm and reads from top to bottom in `_play`. All that can go wrong ends it in exactly one typed
`Outcome`, decided once (`_end`: the first word stands): a fault of the sandbox is the sandbox's, of the engine the
engine's, and only what the policy did is the policy's. Turns that were finished stay, whatever ended the episode. It
may be cancelled at any await; the sandbox is given back in every case.

The harness gives each turn's ids to the record as they were made and sampled. It does not judge, retry or store: that
is done by those who run episodes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from owrl_jax.agent.context import Context, Prompt, UnusablePicture
from owrl_jax.agent.harness import Harness
from owrl_jax.agent.ledger import TimeLedger
from owrl_jax.agent.parser import Parsed
from owrl_jax.agent.policy import FailureKind, Generation, Leaf, Policy, PolicyFailed, Sampling, Scene
from owrl_jax.agent.prompt import feedback_lines
from owrl_jax.outcome import Outcome, Owner, Phase, Reason, from_exception
from owrl_jax.types import CallResult, CallStatus, Observation, StepResult, Task, ToolCall, Trajectory, Turn

_log = logging.getLogger(__name__)

_PHASES = {
    "queue": Phase.QUEUE,
    "reset": Phase.RESET,
    "prompt": Phase.OBSERVE,
    "generate": Phase.GENERATE,
    "parse": Phase.PARSE,
    "step": Phase.STEP,
    "release": Phase.RELEASE,
}


class Sandbox(Protocol):
    """What an episode acts in. Leased and remote ones also have `finish(outcome)`, and are told how it ended."""

    async def reset(self, task: Task) -> StepResult: ...
    async def step(self, calls: Sequence[ToolCall]) -> StepResult: ...
    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeenTurn:
    """One turn with everything around it, for viewers, stores and judges; the trajectory keeps the `turn` alone.

    Attributes:
      turn: the record.
      observation: what the policy saw.
      said: its response in words.
      parsed: what that was read as.
      result: what the sandbox answered; None if nothing was run.
    """

    turn: Turn
    observation: Observation
    said: str
    parsed: Parsed | None
    result: StepResult | None


class Episode:
    """One try at one task.

    Args:
      task: what to do.
      harness: the fixed part of all episodes.
      policy: whatever answers.
      open_sandbox: gives the sandbox of this episode; waiting for it counts as `queue`. An exception with an attribute
        `outcome` ends the episode with that outcome.
      sampling: how responses are drawn. Its `max_new_tokens` is replaced by what fits, its `seed` is mixed with the
        names of group, member and turn.
      group_id, index: which of which group.
      deadline_s: of the whole episode after it got its sandbox; None leaves it to the sandbox.
      generate_s: of one response.
      instruction: asked after the reset for the words of the task, where only the loaded page knows them.
      on_turn: told of each turn as it is finished.
      clock: seconds, for the time ledger.

    Attributes:
      outcome: how it ended; None while it runs.
      trajectory: the record; None while it runs. There even when `run` was cancelled.
      observation: the last one there was.
    """

    def __init__(
        self,
        task: Task,
        *,
        harness: Harness,
        policy: Policy,
        open_sandbox: Callable[[], Awaitable[Sandbox]],
        sampling: Sampling | None = None,
        group_id: str = "",
        index: int = 0,
        deadline_s: float | None = None,
        generate_s: float = 300.0,
        instruction: Callable[[], str] | None = None,
        on_turn: Callable[[SeenTurn], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.task, self.group_id, self.index = task, group_id or task.id, index
        self._harness, self._policy, self._open_sandbox = harness, policy, open_sandbox
        self._sampling = sampling or Sampling(max_new_tokens=harness.budgets.max_response_tokens)
        self._deadline_s, self._generate_s = deadline_s, generate_s
        self._instruction, self._on_turn = instruction, on_turn
        self._ledger = TimeLedger(clock)
        self._turns: list[Turn] = []
        self._answer: str | None = None
        self._running: asyncio.Task[Any] | None = None
        self._wish: str | None = None  # the detail of a `cancel` that was asked for
        self.outcome: Outcome | None = None
        self.trajectory: Trajectory | None = None
        self.observation: Observation | None = None

    def cancel(self, detail: str = "operator") -> None:
        """Ends the episode as soon as it awaits; `run` then returns its trajectory.

        Args:
          detail: one of `outcome.DETAILS[Reason.CANCELLED]`.
        """
        wish = Outcome(reason=Reason.CANCELLED, detail=detail)  # refuses an unknown detail here, not later
        if self.outcome is None and self._wish is None:
            self._wish = wish.detail
            if self._running is not None:
                self._running.cancel()

    async def run(self) -> Trajectory:
        """Plays the episode. Once.

        Raises:
          asyncio.CancelledError: if the task that runs it is cancelled from outside; `trajectory` is there all the
          same.
        """
        if self._running is not None or self.outcome is not None:
            raise RuntimeError("an episode is played once; make another one")
        self._running = asyncio.current_task()
        sandbox: Sandbox | None = None
        try:
            if self._wish is not None:
                raise asyncio.CancelledError
            with self._ledger.during("queue"):
                sandbox = await self._open_sandbox()
            async with asyncio.timeout(self._deadline_s) as limit:
                await self._play(sandbox)
        except asyncio.CancelledError:
            self._end_as(Reason.CANCELLED, self._wish or "operator")
            if self._wish is None:
                raise
            assert self._running is not None
            self._running.uncancel()
        except PolicyFailed as failed:
            self._end(failed.outcome(self._ledger.phase_ms))
        except UnusablePicture as error:
            self._end(from_exception(error, reason=Reason.SANDBOX_ERROR, detail="capture_failed", phase=Phase.CAPTURE))
        except Exception as error:  # noqa: BLE001 - every episode ends in an outcome, a bug of ours included
            self._end(self._outcome_of(error, expired=sandbox is not None and limit.expired()))
        finally:
            await self._release(sandbox)
        assert self.trajectory is not None
        return self.trajectory

    async def _play(self, sandbox: Sandbox) -> None:
        harness, ledger = self._harness, self._ledger
        with ledger.during("reset"):
            first = await sandbox.reset(self.task)
        ledger.within("reset", first.timings_ms)
        if self._over(first):
            return
        assert first.observation is not None
        if self._instruction is not None:
            self.task = dataclasses.replace(self.task, instruction=self._instruction())
        context = harness.context(self.task, first.observation)
        results: tuple[CallResult, ...] = ()
        problem, failures = "", 0

        for number in range(harness.budgets.max_steps):
            if self._wish is not None:  # somebody swallowed the cancellation
                raise asyncio.CancelledError
            mark = ledger.mark()
            with ledger.during("prompt"):
                prompt = context.prompt()
                room = harness.room(prompt)
                if room < 1:
                    self._end_as(Reason.GENERATION_LIMIT, "context_overflow")
                    return
                leaf = self._leaf(context, prompt, number, results, problem, sandbox)
            with ledger.during("generate"):
                generation = await self._generate(prompt, leaf, self._drawn(number, room))
            with ledger.during("parse"):
                said = context.respond(generation.ids)
                parsed = harness.parse(said) if generation.finish == "stop" else None
            if parsed is None:  # cut off: neither read nor run
                full = room < harness.budgets.max_response_tokens
                self._keep(prompt, generation, context, said, None, None, mark)
                self._end_as(Reason.GENERATION_LIMIT, "context_overflow" if full else "response_cap")
                return
            if not parsed.ok:
                self._keep(prompt, generation, context, said, parsed, None, mark)
                failures += 1
                if failures >= harness.budgets.max_parse_failures:
                    self._end_as(Reason.FORMAT_ERROR, "consecutive_parse_failures", parsed.feedback)
                    return
                results, problem = (), parsed.feedback
                context.retry([parsed.feedback])
                continue
            failures, problem = 0, ""
            with ledger.during("step"):
                result = await self._step(sandbox, parsed.calls)
            ledger.within("step", result.timings_ms)
            results = result.results
            self._keep(prompt, generation, context, said, parsed, result, mark)
            if self._over(result):
                return
            assert result.observation is not None
            with ledger.during("prompt"):
                context.observe(
                    feedback_lines(results, result.observation, parsed.notes, harness.style), result.observation
                )
        self._end_as(Reason.STEP_BUDGET, "max_steps")

    async def _generate(self, prompt: Prompt, leaf: Leaf, sampling: Sampling) -> Generation:
        limit = asyncio.timeout(self._generate_s)
        try:
            async with limit:
                return await self._policy.generate(prompt.trunk, leaf, sampling)
        except TimeoutError:
            if not limit.expired():
                raise
            why = f"the policy gave no response within {self._generate_s:g} s"
            raise PolicyFailed(FailureKind.UNAVAILABLE, why) from None

    async def _step(self, sandbox: Sandbox, calls: tuple[ToolCall, ...]) -> StepResult:
        """Runs the calls. Those after `done` never reach the sandbox."""
        last = next((n for n, call in enumerate(calls) if call.name == "done"), len(calls) - 1)
        result = await sandbox.step(calls[: last + 1])
        skipped = tuple(
            CallResult(name=call.name, status=CallStatus.SKIPPED, feedback="Skipped: nothing is run after done.")
            for call in calls[last + 1 :]
        )
        return dataclasses.replace(result, results=(*result.results, *skipped)) if skipped else result

    def _leaf(
        self,
        context: Context,
        prompt: Prompt,
        number: int,
        results: tuple[CallResult, ...],
        problem: str,
        sandbox: Sandbox,
    ) -> Leaf:
        scene = Scene(
            task=self.task,
            turn=number,
            observation=context.observation,
            results=results,
            problem=problem,
            messages=context.messages(self._harness.style.system_prompt()),
            tools=self._harness.tools,
            sandbox=sandbox,
        )
        return Leaf(ids=prompt.leaf, pictures=prompt.pictures, scene=scene)

    def _drawn(self, number: int, room: int) -> Sampling:
        name = f"{self._sampling.seed}/{self.group_id}/{self.index}/{number}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        return dataclasses.replace(self._sampling, max_new_tokens=room, seed=seed)

    def _keep(
        self,
        prompt: Prompt,
        generation: Generation,
        context: Context,
        said: str,
        parsed: Parsed | None,
        result: StepResult | None,
        mark: dict[str, float],
    ) -> None:
        newest = prompt.pictures[-1] if prompt.pictures else None
        turn = Turn(
            trunk_ids=prompt.extension,
            leaf_ids=prompt.leaf,
            response_ids=generation.ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            screenshot=newest.screenshot.sha256 if newest else None,
            grid=newest.grid if newest else None,
            older_pictures=tuple((p.screenshot.sha256, p.grid) for p in prompt.pictures[:-1]),
            calls=parsed.calls if parsed else (),
            results=result.results if result else (),
            parsed=parsed is not None and parsed.ok,
            timings_ms=self._ledger.since(mark),
        )
        self._turns.append(turn)
        if self._on_turn is not None:
            self._on_turn(SeenTurn(turn=turn, observation=context.observation, said=said, parsed=parsed, result=result))

    def _over(self, result: StepResult) -> bool:
        """Whether the sandbox's answer ends the episode; sets outcome and answer."""
        self.observation = result.observation or self.observation
        self._answer = result.answer if self._answer is None else self._answer
        if result.outcome is not None:
            self._end(result.outcome)
        elif result.answer is not None:
            self._end_as(Reason.COMPLETED, "answered")
        elif result.observation is None:
            why = "the sandbox gave neither an observation nor an outcome"
            self._end_as(Reason.SANDBOX_ERROR, "unknown", why, owner=Owner.ENV)
        return self.outcome is not None

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome

    def _end_as(self, reason: Reason, detail: str, message: str = "", **fields: Any) -> None:
        phase, ms = _PHASES[self._ledger.phase], self._ledger.phase_ms
        self._end(Outcome(reason=reason, detail=detail, message=message, phase=phase, latency_ms=ms, **fields))

    def _outcome_of(self, error: Exception, *, expired: bool) -> Outcome:
        phase = _PHASES[self._ledger.phase]
        if expired:
            message = f"the episode's {self._deadline_s:g} s were over"
            return Outcome(reason=Reason.CANCELLED, detail="deadline", phase=phase, message=message)
        carried = getattr(error, "outcome", None)  # the refusal of a source of sandboxes says why
        if isinstance(carried, Outcome):
            return carried
        _log.error("episode of task %s: unexpected %s", self.task.id, type(error).__name__, exc_info=error)
        return from_exception(error, reason=Reason.SANDBOX_ERROR, detail="unknown", phase=phase, owner=Owner.ENV)

    async def _release(self, sandbox: Sandbox | None) -> None:
        assert self.outcome is not None
        if sandbox is not None:
            finish = getattr(sandbox, "finish", None)
            if finish is not None:
                finish(self.outcome)
            closing = asyncio.ensure_future(sandbox.close())
            try:
                with self._ledger.during("release"):
                    await asyncio.shield(closing)
            except asyncio.CancelledError:
                # The closing goes on by itself; the sandbox bounds it. Its exception, if any, must not go unheard.
                closing.add_done_callback(_report)
                self._record()
                raise
            except Exception as error:  # noqa: BLE001 - the episode is over; how it ended is already said
                _log.error("closing the sandbox of task %s failed", self.task.id, exc_info=error)
        self._record()

    def _record(self) -> None:
        assert self.outcome is not None
        last = self.observation.screenshot if self.observation is not None else None
        self.trajectory = Trajectory(
            task=self.task,
            group_id=self.group_id,
            index=self.index,
            protocol=self._harness.protocol,
            turns=tuple(self._turns),
            outcome=self.outcome,
            answer=self._answer,
            final_screenshot=last.sha256 if last is not None else None,
            timings_ms=self._ledger.total(),
        )


def _report(closing: asyncio.Future[None]) -> None:
    if not closing.cancelled() and closing.exception() is not None:
        _log.error("closing a sandbox failed", exc_info=closing.exception())
