"""The sandbox: one episode of an agent in a browser, told truthfully.

    engine = BrowserEngine()
    await engine.start()
    sandbox = Sandbox(engine, SandboxConfig())
    first = await sandbox.reset(task)
    result = await sandbox.step([ToolCall(name="click", arguments={"point_2d": [500, 120]})])
    await sandbox.close()

`reset` and `step` never raise for anything a page, a browser or a policy can do: what went wrong is in the `Outcome`
of the result, with an owner. Every call of a turn gets exactly one line of feedback, whatever happens. An episode has
one outcome; once it has one, further steps change nothing and repeat it. Each await has a deadline, and the deadlines
nest.

The reading order of a step: check the call (`agent.tools`), act (`actions`), let the page settle (`settle`), follow
  what it opened (`stage`), verify, tell (`feedback`), and after the last call look (`observe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from owrl_jax.agent.tools import CheckedCall, check_call
from owrl_jax.agent.tools import Refusal as BadCall
from owrl_jax.browser import faults, feedback, observe, rules
from owrl_jax.browser.actions import Actor
from owrl_jax.browser.care import Care
from owrl_jax.browser.changes import Snapshot
from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.effects import Answer, Effect
from owrl_jax.browser.engine import BrowserEngine
from owrl_jax.browser.rules import Rules
from owrl_jax.browser.settle import Settled, settle
from owrl_jax.browser.stage import Stage
from owrl_jax.browser.start import open_start_page
from owrl_jax.browser.tabs import DocumentState, Tab
from owrl_jax.browser.turn import SandboxProtocol, Turn, bare, result, shown_name, skipped
from owrl_jax.outcome import Outcome, Phase, Reason
from owrl_jax.types import CallResult, CallStatus, Observation, StepResult, Task, ToolCall

_log = logging.getLogger(__name__)

MAX_CALLS = 20
_BLANK_S = 3.0
_PAGES = ("text/html", "application/xhtml+xml", "")  # a picture or a PDF is no wall
# Endings of pages that may still be keeping a processor busy.
_BUSY = frozenset({"page_frozen", "page_hostile", "step_deadline", "cdp_timeout", "nav_timeout"})
# Calls that mean something whatever page is shown; all others were meant for the page that the policy saw.
_FREE = frozenset({"wait", "done", "goto_url", "new_tab", "switch_tab"})
_KEYBOARD = frozenset({"write", "press_keys"})


class Sandbox:
    """A browser episode. One task at a time; `reset` may be called again after an episode has ended.

    Args:
      engine: a started browser; several sandboxes may share one.
      config: viewport, limits, deadlines, safety.
      episode: name for logs, downloads and the audit; a random one if not given.
    """

    def __init__(
        self, engine: BrowserEngine, config: SandboxConfig | None = None, *, episode: str | None = None
    ) -> None:
        self.engine = engine
        self.config = config or SandboxConfig()
        self.episode = episode or uuid.uuid4().hex[:12]
        self.rules = Rules(self.config.safety)
        self.outcome: Outcome | None = None
        self.stage: Stage | None = None
        self.gate: Any = None
        self.navigations = 0
        self._place = contextlib.AsyncExitStack()
        self._judged: DocumentState | None = None
        self._start_url = ""
        self._actor: Actor | None = None
        self._snapshot: Snapshot | None = None
        self._care: Care | None = None
        self._busy = asyncio.Lock()
        self._started = 0.0
        self._inside_s = 0.0
        self._closing: asyncio.Task[None] | None = None

    async def reset(self, task: Task) -> StepResult:
        """Opens the task's start page in a fresh context and looks at it."""
        async with self._busy:
            await self._depart()
            self.outcome, self._snapshot, self._inside_s, self.navigations = None, None, 0.0, 0
            self._judged, self._start_url = None, task.start_url
            self._started = time.monotonic()
            try:
                async with asyncio.timeout(self.config.deadlines.reset_s):
                    return await self._reset(task)
            except TimeoutError:
                error = faults.Fault(
                    Reason.ENVIRONMENT_ERROR,
                    "nav_timeout",
                    f"the start page was not there within {self.config.deadlines.reset_s:g} s",
                )
                return await self._ended(error, Phase.RESET, self._started, ())
            except Exception as error:  # noqa: BLE001 - the one place where a reset's exceptions become an outcome
                return await self._ended(error, Phase.RESET, self._started, ())
            finally:
                self._inside_s += time.monotonic() - self._started

    async def step(self, calls: Sequence[ToolCall]) -> StepResult:
        """Executes the calls of one turn in order, then looks at the page."""
        if self._busy.locked():
            raise RuntimeError("a step is still running: one at a time")
        async with self._busy:
            if self.outcome is not None:
                return StepResult(
                    results=tuple(skipped(c, "the episode has ended") for c in calls),
                    observation=None,
                    outcome=self.outcome,
                )
            if self.stage is None:
                raise RuntimeError("there is no episode: call reset first")
            started = time.monotonic()
            over = self._over_time(started)
            if over is not None:
                self.outcome = over
                return StepResult(
                    results=tuple(skipped(c, "the time of the episode is used up") for c in calls),
                    observation=None,
                    outcome=over,
                )
            turn = Turn()
            checked = [check_call(call, base_url=self._url()) for call in calls]
            waits = sum(c.arguments["seconds"] for c in checked if isinstance(c, CheckedCall) and c.name == "wait")
            try:
                # A wait that was asked for does not eat into the time of everything else.
                async with asyncio.timeout(self.config.deadlines.step_s + waits):
                    async with self.stage.camera.running():
                        return await self._step(calls, checked, turn, started)
            except TimeoutError:
                seconds = self.config.deadlines.step_s + waits
                return await self._ended(faults.DeadlineExceeded("step", seconds), Phase.STEP, started, calls, turn)
            except Exception as error:  # noqa: BLE001 - the one place where a step's exceptions become an outcome
                return await self._ended(error, Phase.STEP, started, calls, turn)
            finally:
                self._inside_s += time.monotonic() - started

    async def close(self) -> None:
        """Closes the context and everything in it. Idempotent; a cancelled caller does not stop it."""
        if self._closing is None or self._closing.done():
            self._closing = asyncio.ensure_future(self._depart())
        await asyncio.shield(self._closing)

    @property
    def actor(self) -> Actor:
        """Who executes the calls.

        Raises:
          Fault: if there is no stage.
        """
        if self._actor is None:
            raise faults.Fault(Reason.SANDBOX_ERROR, "lease_lost", "the sandbox was closed while it worked")
        return self._actor

    @property
    def care(self) -> Care:
        """Who looks after pages in trouble; raises as `actor` does."""
        if self._care is None:
            raise faults.Fault(Reason.SANDBOX_ERROR, "lease_lost", "the sandbox was closed while it worked")
        return self._care

    # ---- reset ----------------------------------------------------------------------------------------------------

    async def _reset(self, task: Task) -> StepResult:
        started = time.monotonic()
        settled = await open_start_page(self, task)
        opened = time.monotonic()
        stage = self.current_stage()
        async with stage.camera.running():
            ended = await self._judge_page(Phase.RESET, started)
            observation = await self._look(settled)
        status = stage.active.document.status or 200
        if ended is None and status >= 400:
            message = f"the start page answered {status}"
            kind = "http_5xx" if status >= 500 else "http_4xx"
            ended = Outcome(reason=Reason.ENVIRONMENT_ERROR, detail=kind, phase=Phase.RESET, message=message)
            self.outcome = ended
        timings = {"open": (opened - started) * 1e3, "capture": (time.monotonic() - opened) * 1e3}
        return StepResult(results=(), observation=observation, outcome=ended, timings_ms=timings)

    async def open_stage(self) -> Stage:
        """A fresh context in place of the present one, behind the egress gate where there is one."""
        await self._leave()
        options: dict[str, Any] = {}
        if self.engine.egress is not None:
            safety = self.rules.safety
            self.gate = self.rules.gate = self.engine.egress.open(episode=self.episode, policy=safety.policy)
            self.gate.subscribe(safety.on_event)
            options["proxy"] = self.gate.playwright_proxy()
        folder = self.config.download_dir / self.episode if self.config.download_dir else None
        self.stage = stage = await Stage.open(self.engine, self.config, downloads=folder, **options)
        self._actor = Actor(stage, self.rules, self.config)
        self._care = Care(stage, self._actor, self.config)
        if self.gate is not None:
            async with stage.camera.running():
                await self.gate.sign_in(stage.context, stage.active.page, timeout_s=self.config.deadlines.cdp_s)
        return stage

    async def take_place(self, host: str) -> None:
        """Waits for one of the places that a host has for episodes; it is given back at the end.

        Raises:
          Fault: if there is none in time.
        """
        try:
            async with asyncio.timeout(self.config.deadlines.reset_s / 2):
                await self._place.enter_async_context(self.rules.safety.hosts.visit(host))
        except TimeoutError:
            raise faults.Fault(
                Reason.INIT_ERROR, "no_capacity", f"as many episodes as may be are on {host} already"
            ) from None

    async def _depart(self) -> None:
        await self._leave()
        await self._place.aclose()

    async def _leave(self) -> None:
        stage, self.stage, self._actor, self._care = self.stage, None, None, None
        gate, self.gate, self.rules.gate = self.gate, None, None
        if stage is not None:
            await stage.close()
        if gate is not None:
            await gate.close()
            self.rules.safety.finish(self.episode)

    # ---- step -----------------------------------------------------------------------------------------------------

    async def _step(
        self, calls: Sequence[ToolCall], checked: Sequence[CheckedCall | BadCall], turn: Turn, started: float
    ) -> StepResult:
        stage = self.current_stage()
        stage.begin_step()
        for number, (call, known) in enumerate(zip(calls, checked, strict=True), 1):
            why = turn.stop or self._moot(known, turn)
            if not why and number > MAX_CALLS:
                why = f"at most {MAX_CALLS} calls are run in one turn"
            if why:
                turn.results.append(skipped(call, why))
                continue
            if isinstance(known, BadCall):
                turn.results.append(result(call.name, CallStatus.FAILED, [known.message]))
                turn.stop = f"call {number} ({shown_name(call)}) failed"
                continue
            # The address may have changed since the turn began, and a path is meant for the present one.
            known = check_call(call, base_url=self._url())
            assert isinstance(known, CheckedCall)
            await self._call(known, number, turn)
            if stage.hostile:
                raise faults.Fault(Reason.ENVIRONMENT_ERROR, "page_hostile", stage.hostile)
            if turn.answer is not None:
                turn.stop = "the task was ended by done"
        looked = time.monotonic()
        if not calls:
            turn.settled = await settle(stage.active, self.config.settle, grace_s=0.0, until=looked + 5.0)
        if not turn.settled or turn.settled.reason in ("closed", "crashed", "frozen"):
            await self.care.tend(stage.active, [])
        outcome = None if turn.answer is not None else await self._judge_page(Phase.STEP, started)
        observation = await self._look(turn.settled)
        timings = {
            "act": turn.act_ms,
            "settle": turn.settle_ms,
            "capture": (time.monotonic() - looked) * 1e3,
            "total": (time.monotonic() - started) * 1e3,
        }
        if turn.answer is not None:
            outcome = Outcome(reason=Reason.COMPLETED, detail="answered", phase=Phase.STEP, latency_ms=timings["total"])
            self.outcome = outcome
        return StepResult(
            results=tuple(turn.results),
            observation=observation,
            answer=turn.answer,
            outcome=outcome,
            timings_ms={name: round(ms, 1) for name, ms in timings.items()},
        )

    def _moot(self, call: CheckedCall | BadCall, turn: Turn) -> str:
        """Why a call no longer means what it meant when the turn was written; empty if it does."""
        if call.name in _FREE:
            return ""
        return turn.moved or (turn.keys if call.name in _KEYBOARD else "")

    async def _call(self, call: CheckedCall, number: int, turn: Turn) -> None:
        """One call from act to feedback; appends its result and notes in `turn` what that means for the next ones."""
        stage, actor, deadlines = self.current_stage(), self.actor, self.config.deadlines
        tab = stage.active
        if tab.navigating and call.name not in _FREE:
            await self.care.arrive(tab)
        before_document, before_url = tab.document, tab.url
        extra = call.arguments.get("seconds", 0.0) if call.name == "wait" else 0.0
        start = time.monotonic()
        until = start + deadlines.call_s + extra
        tab.begin()
        notes: list[str] = []
        try:
            effect = await faults.within(until - start, actor.run(call.name, call.arguments), call.name)
        except Exception as error:  # noqa: BLE001 - told if the page can go on, raised again if not
            effect = await self._not_done(tab, call, error)
        acted = time.monotonic()
        turn.act_ms += (acted - start) * 1e3
        answer = Answer()
        if effect.answer is None:
            shown = stage.active if stage.active is not tab else tab
            settled = await settle(shown, self.config.settle, grace_s=effect.grace_s, until=until)
            front = await stage.follow(tab)
            if front is not shown:
                settled = await settle(front, self.config.settle, grace_s=0.0, until=max(until, time.monotonic() + 3.0))
            if settled.reason in ("frozen", "crashed", "closed") or tab.unanswered_input:
                front = await self.care.tend(front, notes)
            turn.settled = settled
            if settled.reason == "cap:reloads":
                notes.append("the page loads itself again and again; it was stopped")
                await self.care.stop(front)
            answer = await self._verify(effect)
            turn.settle_ms += (time.monotonic() - acted) * 1e3
        front = stage.active
        ok = effect.ok and answer.ok
        happened = stage.happenings.take()
        moved, where = self._where(tab, front, before_document, before_url, call)
        parts = [effect.text, answer.text, *notes, *where, *happened.lines]
        changed = await self._visibly_changed(front, moved or bool(happened.lines) or not effect.quiet)
        if effect.quiet and ok and changed is False and not answer.text and not notes:
            parts.append("nothing visibly changed")
        if call.notes:
            parts.append("note: " + "; ".join(call.notes))
        status = CallStatus.OK if ok else CallStatus.FAILED
        facts = dict(effect.facts) | dict(answer.facts)
        facts |= {"url": front.url, "events": happened.facts, "settle": turn.settled.reason if turn.settled else ""}
        if effect.refusal is not None:
            facts["policy_block"] = effect.refusal.detail
        turn.results.append(
            CallResult(name=call.name, status=status, feedback=feedback.line(status, parts), facts=facts)
        )
        turn.answer = effect.answer if ok else None
        if not ok:
            turn.stop = f"call {number} ({call.name}) failed"
        elif moved:
            turn.moved = f"the page changed after call {number} ({call.name}); look at it first"
        turn.keys = f"the focus moved after call {number} ({call.name})" if facts.get("focus_moved") else ""

    async def _not_done(self, tab: Tab, call: CheckedCall, error: Exception) -> Effect:
        """A call that raised: a fact to tell if the page can go on, else a fault."""
        if isinstance(error, faults.Fault) or not self.engine.alive:
            raise error
        if tab.closed or tab.crashed or faults.is_gone(error):
            return Effect(ok=False, text=f"{call.name} was interrupted: the page went away")
        if isinstance(error, faults.DeadlineExceeded):
            return Effect(
                ok=False, text=f"{call.name} took longer than {error.seconds:.0f} s; the page does not answer"
            )
        if faults.is_stale_context(error):
            return Effect(ok=False, text=f"{call.name} was interrupted: the page was replaced by another one meanwhile")
        raise error

    async def _verify(self, effect: Effect) -> Answer:
        if effect.verify is None or self.current_stage().active.navigating:
            return Answer()
        try:
            return await faults.within(self.config.deadlines.cdp_s, effect.verify(), "verify")
        except Exception as error:
            if isinstance(error, faults.DeadlineExceeded) or faults.is_gone(error) or faults.is_stale_context(error):
                return Answer()  # the page went on; the screenshot shows where
            raise

    def _where(self, tab: Tab, front: Tab, document: Any, url: str, call: CheckedCall) -> tuple[bool, list[str]]:
        """Whether the policy is on another page now, and what to say of it."""
        said: list[str] = []
        if front is not tab:
            if front.document.url != "about:blank":
                said.append(f"the page shown is {feedback.address(front.url)}")
            return True, said
        new = tab.document
        if new is not document:
            why = self.rules.unreachable(new)
            if new.error or why is not None:
                if call.name != "goto_url":
                    reason = why.message.rstrip(".") if why else new.error
                    said.append(f"{feedback.address(new.url)} could not be opened: {reason}")
            else:
                if call.name != "goto_url":
                    self.rules.charge(new.url)
                if call.name != "goto_url" or bare(new.url) != bare(str(call.arguments["url"])):
                    said.append(f"the page is now {feedback.address(new.url)}")
                if new.status is not None and new.status >= 400:
                    said.append(f"the server answered {new.status}")
            return True, said
        if tab.navigating:
            said.append("the next page is still loading; wait for it")
            return True, said
        if tab.aborted and call.name != "goto_url":
            said.append("the server answered without a new page, so this page stays")
        if tab.url != url:
            said.append(f"the address is now {feedback.address(tab.url)}")
            routed = call.name in ("click", "press_keys", "go_back")
            return routed and urlsplit(tab.url).path != urlsplit(url).path, said
        return False, said

    async def _visibly_changed(self, tab: Tab, surely: bool) -> bool | None:
        """Whether what is in view differs from the last look; None if it cannot be told."""
        if surely or self._snapshot is None or not tab.usable or tab.navigating:
            return True
        try:
            now = await observe.snapshot(tab)
        except Exception as error:
            if isinstance(error, faults.DeadlineExceeded) or faults.is_gone(error) or faults.is_stale_context(error):
                return None
            raise
        if now.truncated or self._snapshot.truncated:
            return None
        return (now.document, now.hash) != (self._snapshot.document, self._snapshot.hash)

    # ---- looking, and pages in trouble ----------------------------------------------------------------------------

    async def _look(self, settled: Settled | None) -> Observation:
        stage = self.current_stage()
        record = settled.settle if settled else None
        tab = stage.active
        try:
            seen = await observe.look(stage, self.config, before=self._snapshot, settled=record)
        except Exception as error:
            if not (tab.crashed or isinstance(error, faults.DeadlineExceeded)) or not self.engine.alive:
                raise
            await self.care.tend(tab, [])
            seen = await observe.look(stage, self.config, before=None, settled=record)
        self._snapshot = seen.snapshot
        self.actor.image_size, self.actor.css_width = seen.observation.screen_size, seen.css_width
        return seen.observation

    async def _judge_page(self, phase: Phase, started: float) -> Outcome | None:
        """Ends the episode early where the site keeps us out; looks at each document once."""
        tab = self.current_stage().active
        if tab.document is self._judged or not tab.usable or tab.navigating or tab.document.error:
            return None
        if self.rules.unreachable(tab.document) is not None or tab.document.mime not in _PAGES:
            return None
        self._judged = tab.document
        try:
            excepted = self.rules.is_exception(tab.url)
            wall = await rules.wall(tab, self._start_url, excepted=excepted)
            patience = time.monotonic() + _BLANK_S
            while wall is not None and wall.detail == "blank_page" and time.monotonic() < patience:
                # A page drawn by scripts may be empty for a while; a blank one stays so.
                await tab.pulse.wait(0.5)
                await settle(tab, self.config.settle, grace_s=0.0, until=time.monotonic() + 2.0)
                wall = await rules.wall(tab, self._start_url, excepted=excepted)
        except Exception as error:
            if isinstance(error, faults.DeadlineExceeded) or faults.is_gone(error) or faults.is_stale_context(error):
                self._judged = None  # the document was replaced meanwhile: the next one is looked at
                return None
            raise
        self.rules.report(tab.url, tab.document, wall.detail if wall else "")
        if wall is None:
            return None
        latency = round((time.monotonic() - started) * 1e3, 1)
        self.outcome = dataclasses.replace(wall.outcome(phase=phase), latency_ms=latency)
        return self.outcome

    # ---- endings --------------------------------------------------------------------------------------------------

    async def _ended(
        self, error: Exception, phase: Phase, started: float, calls: Sequence[ToolCall], turn: Turn | None = None
    ) -> StepResult:
        """The one way in which an exception leaves: as an outcome, with a line for every call."""
        vanished = faults.is_gone(error) or (isinstance(error, faults.Fault) and error.detail == "page_hostile")
        alive = await self.engine.look_alive() if vanished else self.engine.alive
        outcome = faults.outcome_of(
            error,
            phase=phase,
            browser_alive=alive,
            crashed=self.stage is not None and any(t.crashed for t in self.stage.open_tabs),
            latency_ms=round((time.monotonic() - started) * 1e3, 1),
            rss_mib=self.engine.rss_mib() if alive else None,
        )
        if phase is Phase.RESET:
            self.rules.report(self._start_url, None, outcome.detail)
        if outcome.detail == "unknown":
            _log.error("unmapped exception in %s: %s", phase.value, outcome.traceback)
        self.outcome = outcome
        if outcome.detail in _BUSY:
            # Not to be waited for, but not to be left running either: siblings share the browser.
            self._closing = asyncio.ensure_future(self._depart())
        results = list(turn.results) if turn else []
        for number, call in enumerate(calls[len(results) :]):
            if number == 0:
                parts = [f"the episode ended during this call ({outcome.detail})"]
                results.append(result(call.name, CallStatus.FAILED, parts))
            else:
                results.append(skipped(call, "the episode has ended"))
        return StepResult(results=tuple(results), observation=None, outcome=outcome)

    def _over_time(self, now: float) -> Outcome | None:
        """An outcome once the episode's time is used up; owned by whoever used most of it."""
        used = now - self._started
        if used <= self.config.deadlines.episode_s:
            return None
        message = (
            f"{used:.0f} s of {self.config.deadlines.episode_s:g} s, {self._inside_s:.0f} s of them in the sandbox"
        )
        if self._inside_s > used / 2:
            return Outcome(reason=Reason.SANDBOX_ERROR, detail="sandbox_timeout", message=message)
        return Outcome(reason=Reason.CANCELLED, detail="deadline", message=message)

    def current_stage(self) -> Stage:
        """The stage; raises as `actor` does."""
        if self.stage is None:
            raise faults.Fault(Reason.SANDBOX_ERROR, "lease_lost", "the sandbox was closed while it worked")
        return self.stage

    def _url(self) -> str:
        return self.stage.active.url if self.stage is not None and self.stage.open_tabs else "about:blank"


__all__ = ["Sandbox", "SandboxProtocol"]
