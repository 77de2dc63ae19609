"""A model as a judge: gate, question, reply, strict reading, one more try, and a verdict that says when there is none.

    gate ── settled without asking ──────────────────────────────► verdict
      └─ question ─ ask ─ archive ─ read ── a verdict ───────────► verdict
                     │                └─ none: ask once more ────► verdict or invalid
                     └─ no reply (after all attempts) ───────────► invalid
                     └─ spending limit ──────────────────────────► JudgingStopped

Waiting out an outage is the endpoint's matter (`Endpoint.attempts`, `deadline_s`): an episode waits that long for its
verdict and goes invalid afterwards, and nothing is learned from it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from owrl_jax.agent.policy import FailureKind, PolicyFailed, Sampling
from owrl_jax.judge.archive import ReplyArchive, ReplyRecord, now
from owrl_jax.judge.chat import Chat, Reply
from owrl_jax.judge.parse import ParsedReply, parse_reply
from owrl_jax.judge.prompt import Case, PromptSettings, build_case
from owrl_jax.judge.protocol import Evidence, EvidenceMissing, JudgingStopped, gate, verdict
from owrl_jax.types import Trajectory, Verdict, VerdictValue


@dataclasses.dataclass(kw_only=True)
class JudgeCounts:
    """What a judge did so far; `invalid` by reason is on the verdicts."""

    gated: int = 0
    asked: int = 0
    asked_again: int = 0
    unreadable: int = 0
    unanswered: int = 0
    verdicts: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def invalid_rate(self) -> float:
        """Share of invalid verdicts among all; 0 if there are none. To be watched: a sick judge shows here first."""
        total = sum(self.verdicts.values())
        return self.verdicts.get(VerdictValue.INVALID.value, 0) / total if total else 0.0


class RubricJudge:
    """See the head of the file.

    Args:
      chat: the model.
      settings: what it is shown.
      archive: keeps every reply; None keeps none.
      max_tokens, temperature, seed: of a reply.
      concurrency: questions at one time; others wait.
    """

    def __init__(
        self,
        chat: Chat,
        *,
        settings: PromptSettings | None = None,
        archive: ReplyArchive | None = None,
        max_tokens: int = 2048,
        temperature: float = 0.0,
        seed: int = 42,
        concurrency: int = 8,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self._chat, self._settings, self._archive = chat, settings or PromptSettings(), archive
        self._sampling = Sampling(max_new_tokens=max_tokens, temperature=temperature, seed=seed)
        self._places = asyncio.Semaphore(concurrency)
        self.name = f"{chat.name}/rubric-{self._settings.id}"
        self.counts = JudgeCounts()

    async def judge(self, trajectory: Trajectory, evidence: Evidence) -> Verdict:
        """See `Judge`."""
        settled = gate(trajectory, self.name)
        if settled is not None:
            self.counts.gated += 1
            return self._counted(settled)
        try:
            case = await asyncio.to_thread(build_case, trajectory, evidence, self._settings)
        except EvidenceMissing as error:
            return self._counted(verdict(VerdictValue.INVALID, self.name, str(error), reasons=("evidence",)))
        async with self._places:
            began = time.perf_counter()
            try:
                parsed, asked = await self._ask(trajectory, case)
            except PolicyFailed as failed:
                parsed, asked = self._no_answer(trajectory, case, failed, began), case
        reasons = parsed.reasons if not parsed.problem else (parsed.problem,)
        return self._counted(
            verdict(
                parsed.value,
                self.name,
                parsed.rationale,
                reasons=reasons,
                evidence=tuple(shot.sha256 for shot in case.question.pictures),
                prompt_sha256=asked.question.sha256,
                latency_ms=(time.perf_counter() - began) * 1e3,
            )
        )

    async def _ask(self, trajectory: Trajectory, case: Case) -> tuple[ParsedReply, Case]:
        """The reading of the first reply that can be read, or of the second one; and the question it answers."""
        parsed = await self._attempt(trajectory, case, 0)
        if not parsed.problem:
            return parsed, case
        self.counts.asked_again += 1
        again = case.reminded()
        return await self._attempt(trajectory, again, 1), again

    async def _attempt(self, trajectory: Trajectory, case: Case, attempt: int) -> ParsedReply:
        self.counts.asked += 1
        began = time.perf_counter()
        sampling = dataclasses.replace(self._sampling, seed=self._sampling.seed + attempt)
        reply = await self._chat.ask(case.question, sampling)
        parsed = parse_reply(reply.text, finished=reply.finished, code=case.code)
        self.counts.unreadable += bool(parsed.problem)
        self._keep(trajectory, case, attempt, reply, parsed, began)
        return parsed

    def _no_answer(self, trajectory: Trajectory, case: Case, failed: PolicyFailed, began: float) -> ParsedReply:
        if failed.kind == FailureKind.BUDGET:
            raise JudgingStopped(f"judge {self.name}: {failed}") from failed
        self.counts.unanswered += 1
        problem = f"judge_{failed.kind.value}"
        parsed = ParsedReply(value=VerdictValue.INVALID, rationale=str(failed), problem=problem)
        self._keep(trajectory, case, 0, Reply(text="", finished=False), parsed, began)
        return parsed

    def _keep(
        self, trajectory: Trajectory, case: Case, attempt: int, reply: Reply, parsed: ParsedReply, began: float
    ) -> None:
        if self._archive is None:
            return
        self._archive.append(
            ReplyRecord(
                at=now(),
                judge=self.name,
                model=reply.model or self._chat.name,
                task_id=trajectory.task.id,
                group_id=trajectory.group_id,
                index=trajectory.index,
                attempt=attempt,
                prompt_sha256=case.question.sha256,
                prompt=f"{case.question.system}\n\n{case.question.text}",
                pictures=tuple(shot.sha256 for shot in case.question.pictures),
                reply=reply.text,
                value=parsed.value,
                problem=parsed.problem,
                finished=reply.finished,
                latency_ms=(time.perf_counter() - began) * 1e3,
                tokens_in=reply.tokens_in,
                tokens_out=reply.tokens_out,
            )
        )

    def _counted(self, made: Verdict) -> Verdict:
        name = made.value.value
        self.counts.verdicts[name] = self.counts.verdicts.get(name, 0) + 1
        return made
