"""The judge of a run: the model whose word is learned, and whom it is compared with on the way.

    async with judge_of(config.judge, folder, pictures) as judge:      # None where programs judge alone
        pool = LocalPool(judge=judge.call(tally), ...)
        numbers |= tally.take()

Where a local world's program knows the truth, it decides, or (`programs: compare`) the model decides and the program
only says how good that was. A held-out judge, against which nothing is trained, sees a share of the model's cases.
Every comparison is a line of `compared.jsonl`, and agreement is told for the program and the held-out judge apart.

When so many comparisons have come together (`drift_window`), they are tested: has the training judge become kinder
than the other (`agreement.drift`)? The windows are disjoint, because the test has its level per look.

A model that is down makes its verdict invalid, after the endpoint's own attempts: nothing is learned from the episode.
A held-out judge that is down costs a comparison. The spending limit of both together raises `JudgingStopped`.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from owrl_jax.agent.endpoint import Endpoint
from owrl_jax.agent.spend import Price, SpendLedger
from owrl_jax.config import ConfigError, EndpointSettings, JudgeSettings
from owrl_jax.judge.agreement import Agreement, Drift, Pair, agreement, drift
from owrl_jax.judge.archive import ReplyArchive, now
from owrl_jax.judge.chat import EndpointChat
from owrl_jax.judge.prompt import PromptSettings
from owrl_jax.judge.protocol import Evidence, gate
from owrl_jax.judge.vlm import RubricJudge
from owrl_jax.types import Trajectory, Verdict, VerdictValue

_log = logging.getLogger(__name__)
PROGRAM, SECOND = "program", "second"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """One line of `compared.jsonl`: the training judge's word and another's on one episode.

    Attributes:
      against: `program` or `second`.
      other: name of that judge.
      at: seconds since the epoch.
    """

    at: float
    group_id: str
    index: int
    judge: str
    value: VerdictValue
    against: str
    other: str
    other_value: VerdictValue


class Tally:
    """What came of the verdicts that were asked for in one place: an iteration, an evaluation."""

    def __init__(self) -> None:
        self.verdicts: collections.Counter[VerdictValue] = collections.Counter()
        self.pairs: dict[str, list[Pair]] = {PROGRAM: [], SECOND: []}
        self.drifts: list[Drift] = []

    def take(self) -> dict[str, float]:
        """Numbers for the log since the last call; only of what there was."""
        found = {f"judge/verdicts_{v.value}": float(self.verdicts[v]) for v in VerdictValue if self.verdicts}
        found |= _numbers(agreement(self.pairs[PROGRAM]), "judge/")
        found |= _numbers(agreement(self.pairs[SECOND]), "judge/second_")
        if self.drifts:
            worst = max(self.drifts, key=lambda seen: (seen.alarm, seen.gap))
            found |= {"judge/drift_gap_share": worst.gap, "judge/drift": float(worst.alarm)}
        self.__init__()
        return found

    def lines(self) -> list[str]:
        """For people; empty where nothing was compared."""
        lines: list[str] = []
        for against, pairs in self.pairs.items():
            if pairs:
                lines += [f"judge against {against}, as the truth", *(f"  {line}" for line in agreement(pairs).lines())]
        return lines


def _numbers(found: Agreement, prefix: str) -> dict[str, float]:
    numbers = {
        "agreement_share_per_verdict": found.accuracy,
        "precision_share_per_verdict": found.precision,
        "recall_share_per_verdict": found.recall,
        "f1_per_verdict": found.f1,
        "invalid_share_per_verdict": found.invalid_rate,
    }
    some = {f"{prefix}{name}": value for name, value in numbers.items() if value is not None}
    return some | {f"{prefix}compared_verdicts": float(found.compared)} if some else {}


class Panel:
    """See the head of the file.

    Args:
      judge: whose word is learned.
      second: held-out; None without one.
      settings: who decides, and what is compared.
      folder: where `compared.jsonl` lies.
      picture: bytes of a screenshot by content hash.
      ledger: the account of both.
      chats: to be closed at the end.
      seed: of the shares.
    """

    def __init__(
        self,
        judge: RubricJudge,
        second: RubricJudge | None,
        *,
        settings: JudgeSettings,
        folder: Path,
        picture: Callable[[str], bytes],
        ledger: SpendLedger,
        chats: tuple[EndpointChat, ...] = (),
        seed: int = 0,
    ) -> None:
        self.judge, self.second = judge, second
        self._settings, self._ledger, self._chats, self._seed = settings, ledger, chats, seed
        self._evidence = Evidence(picture=picture)
        self._file = folder / "compared.jsonl"
        self._window: dict[str, list[Pair]] = {PROGRAM: [], SECOND: []}

    async def __aenter__(self) -> Panel:
        return self

    async def __aexit__(self, *_: object) -> None:
        for chat in self._chats:
            await chat.close()

    def spent(self) -> dict[str, float]:
        """Calls and money since the run began."""
        return {"judge/calls": float(self._ledger.calls), "judge/cost_usd": self._ledger.spent_usd}

    def call(self, tally: Tally, *, measuring: bool = False) -> Callable[[Trajectory], Awaitable[Verdict]]:
        """The verdict to keep on an episode, as a pool asks for it; what came of it goes to `tally`.

        The trajectory comes with what a program said, where there was one. Raises `JudgingStopped`.

        Args:
          measuring: a program that knows decides whatever the settings: a policy that has learned to please the model
            must not be measured by it.
        """

        async def verdict(trajectory: Trajectory) -> Verdict:
            made = await self._verdict(trajectory, tally, measuring)
            tally.verdicts[made.value] += 1
            return made

        return verdict

    async def _verdict(self, trajectory: Trajectory, tally: Tally, measuring: bool) -> Verdict:
        settings, program = self._settings, trajectory.verdict
        learned = settings.programs == "compare"  # the model's word is
        decided = program if measuring or not learned else None
        share = 1.0 if learned else settings.compared_share
        if decided is not None and not self._chosen("program", trajectory, share):
            return decided
        bare = dataclasses.replace(trajectory, verdict=None)
        made = await self.judge.judge(bare, self._evidence)
        if program is not None:
            self._compare(trajectory, made, PROGRAM, program, tally)
        # Endings that settle the verdict without a look are the same for both and would only hide what they differ in.
        if (
            self.second is not None
            and self._chosen("second", trajectory, settings.second_share)
            and gate(bare, "") is None
        ):
            self._compare(trajectory, made, SECOND, await self.second.judge(bare, self._evidence), tally)
        return decided or made

    def _chosen(self, what: str, trajectory: Trajectory, share: float) -> bool:
        name = f"{self._seed}/{what}/{trajectory.group_id}/{trajectory.index}"
        return random.Random(name).random() < share

    def _compare(self, trajectory: Trajectory, made: Verdict, against: str, other: Verdict, tally: Tally) -> None:
        line = Compared(
            at=now(),
            group_id=trajectory.group_id,
            index=trajectory.index,
            judge=made.judge,
            value=made.value,
            against=against,
            other=other.judge,
            other_value=other.value,
        )
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        tally.pairs[against].append((made.value, other.value))
        window = self._window[against]
        window.append((made.value, other.value))
        if len(window) >= self._settings.drift_window:
            seen = drift(window)
            tally.drifts.append(seen)
            window.clear()
            (_log.warning if seen.alarm else _log.info)("%s against %s: %s", made.judge, other.judge, seen.line())


def judge_of(
    settings: JudgeSettings,
    folder: Path,
    picture: Callable[[str], bytes],
    *,
    seed: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Panel | None:
    """The judge that the settings describe; None where programs judge alone.

    Args:
      folder: for replies, comparisons and money; made if it is not there.
      picture: bytes of a screenshot by content hash, `ScreenshotStore.get`.
      environment: where keys are looked up; the process's own by default.
    Raises:
      ConfigError: if a key is not where the settings say.
    """
    if settings.kind == "program":
        return None
    folder.mkdir(parents=True, exist_ok=True)
    ledger = SpendLedger(folder / "spend.jsonl", limit_usd=settings.max_usd, limit_calls=settings.max_calls)
    archive = ReplyArchive(folder / "replies.jsonl")
    judges, chats = [], []
    for name, endpoint in (("judge.endpoint", settings.endpoint), ("judge.second", settings.second)):
        if endpoint.url:
            key = key_of(endpoint, name, environment)
            judge, chat = rubric_judge(settings, endpoint, key=key, ledger=ledger, archive=archive)
            judges.append(judge)
            chats.append(chat)
    return Panel(
        judges[0],
        judges[1] if len(judges) > 1 else None,
        settings=settings,
        folder=folder,
        picture=picture,
        ledger=ledger,
        chats=tuple(chats),
        seed=seed,
    )


def key_of(endpoint: EndpointSettings, name: str, environment: Mapping[str, str] | None = None) -> str:
    """The key of an endpoint, from the environment.

    Raises:
      ConfigError: if the variable is not there; `name` is the dotted path of the endpoint.
    """
    if not endpoint.key_env:
        return ""
    key = (os.environ if environment is None else environment).get(endpoint.key_env, "").strip()
    if not key:
        raise ConfigError(
            f"{name}.key_env names {endpoint.key_env}, and there is no such environment variable: set it to the key of "
            f"{endpoint.url}"
        )
    return key


def rubric_judge(
    settings: JudgeSettings, endpoint: EndpointSettings, *, key: str, ledger: SpendLedger, archive: ReplyArchive
) -> tuple[RubricJudge, EndpointChat]:
    """One model as a judge, and its connections, which the caller closes."""
    chat = EndpointChat(
        Endpoint(
            base_url=endpoint.url,
            model=endpoint.model,
            api_key=key,
            price=Price(
                usd_per_million_in=endpoint.usd_per_million_in, usd_per_million_out=endpoint.usd_per_million_out
            ),
            attempts=endpoint.attempts,
            attempt_s=endpoint.attempt_s,
            deadline_s=endpoint.deadline_s,
        ),
        ledger=ledger,
    )
    judge = RubricJudge(
        chat,
        settings=PromptSettings(screenshots=settings.screenshots, form=settings.form, coded=settings.coded),
        archive=archive,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        concurrency=settings.concurrency,
    )
    return judge, chat
