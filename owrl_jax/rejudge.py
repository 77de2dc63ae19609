"""`owrl judge RUN`: another look at the finished episodes of a run, by another judge, and how far the two agree.

    owrl judge runs/first --endpoint http://127.0.0.1:8730/v1 --model judge-8b
    owrl judge runs/first --endpoint https://api.example.com/v1 --model big --key-file key --max-usd 5 --last 200

Reads the journal and the screenshots, changes neither. Verdicts go to `RUN/judge/verdicts.jsonl`, replies to
`RUN/judge/replies.jsonl`, money to `RUN/judge/spend.jsonl`. The same command goes on where it was stopped: an episode
that this judge could judge is not asked about again. Where the run has a verdict of its own, agreement is printed;
where that came from a model judge, the drift alarm too.

Exit codes: 0 done, 1 the drift alarm rang, 2 a wrong call, 3 the spending limit stopped it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from owrl_jax.agent.spend import SpendLedger
from owrl_jax.config import EndpointSettings, JudgeSettings
from owrl_jax.judge.agreement import Pair, agreement, drift
from owrl_jax.judge.archive import ReplyArchive
from owrl_jax.judge.panel import rubric_judge
from owrl_jax.judge.protocol import Evidence, JudgingStopped
from owrl_jax.judge.vlm import RubricJudge
from owrl_jax.obs.stats import wilson
from owrl_jax.pool.journal import Journal, JournalError
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.types import Trajectory, Verdict, VerdictValue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `owrl judge`."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    endpoint: str
    """Base address of an OpenAI-compatible server, up to and with /v1."""
    model: str
    """The judge's name there."""
    key_file: Path | None = None
    """A file that holds the key and nothing else."""
    max_usd: float | None = None
    """What all looks at this run may cost together; needs the two prices to mean anything."""
    max_calls: int | None = None
    """How many calls they may take together."""
    usd_per_million_in: float = 0.0
    """Price of prompt tokens."""
    usd_per_million_out: float = 0.0
    """Price of reply tokens."""
    screenshots: int = 3
    """How many of the newest pictures are shown, the one after the last action included."""
    form: Literal["line", "json"] = "line"
    """How the judge is asked to give its verdict."""
    coded: bool = True
    """Whether it repeats a code with it that no page can know; off for judges trained on a form of their own."""
    last: int | None = None
    """Only the newest so many episodes."""
    concurrency: int = 8
    """Questions at one time."""
    deadline_s: float = 300.0
    """How long a judge that is down is waited for, for each episode."""
    attempts: int = 5
    """How often it is asked in that time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """One line of `verdicts.jsonl`: which line of the journal, and what this judge said."""

    offset: int
    group_id: str
    index: int
    verdict: Verdict


def main(argv: list[str]) -> int:
    """`owrl judge`."""
    options = tyro.cli(Options, args=argv, prog="owrl judge", description=__doc__)
    try:
        return asyncio.run(rejudge(options))
    except (JournalError, OSError, ValueError) as error:
        print(f"owrl judge: {error}", file=sys.stderr)  # noqa: T201 - a command talks to its user
        return 2


async def rejudge(options: Options) -> int:
    """Judges what is not judged yet, and prints what came of it. Returns the exit code.

    Raises:
      JournalError, OSError, ValueError: if the run cannot be read or the options do not fit.
    """
    folder = options.run / "judge"
    journal = Journal(options.run / "journal.jsonl", readonly=True)
    store = ScreenshotStore(options.run / "screenshots")
    endpoint = EndpointSettings(
        url=options.endpoint,
        model=options.model,
        usd_per_million_in=options.usd_per_million_in,
        usd_per_million_out=options.usd_per_million_out,
        attempts=options.attempts,
        deadline_s=options.deadline_s,
    )
    settings = JudgeSettings(
        kind="rubric",
        endpoint=endpoint,
        screenshots=options.screenshots,
        form=options.form,
        coded=options.coded,
        concurrency=options.concurrency,
        max_usd=options.max_usd,
        max_calls=options.max_calls,
    )
    ledger = SpendLedger(folder / "spend.jsonl", limit_usd=settings.max_usd, limit_calls=settings.max_calls)
    archive = ReplyArchive(folder / "replies.jsonl")
    judge, chat = rubric_judge(settings, endpoint, key=_key(options.key_file), ledger=ledger, archive=archive)
    path = folder / "verdicts.jsonl"
    offsets = journal.offsets if options.last is None else journal.offsets[-options.last :] if options.last else ()
    known = {one.offset: one for one in _read(path) if one.verdict.judge == judge.name}
    made: dict[int, Verdict] = {
        n: one.verdict
        for n, one in known.items()
        if n in set(offsets) and one.verdict.value is not VerdictValue.INVALID
    }
    evidence = Evidence(picture=store.get)
    stopped = ""

    async def one(offset: int) -> None:
        nonlocal stopped
        if stopped:
            return
        trajectory = journal.entry(offset).trajectory
        assert trajectory is not None
        try:
            said = await judge.judge(dataclasses.replace(trajectory, verdict=None), evidence)
        except JudgingStopped as limit:
            stopped = str(limit)
            return
        made[offset] = said
        _append(path, Judged(offset=offset, group_id=trajectory.group_id, index=trajectory.index, verdict=said))

    try:
        todo = [offset for offset in offsets if offset not in made]
        width = 4 * options.concurrency  # trajectories in memory at a time
        for start in range(0, len(todo), width):
            await asyncio.gather(*(one(offset) for offset in todo[start : start + width]))
    finally:
        await chat.close()
    said = {offset: journal.entry(offset).trajectory for offset in made}
    alarm = _tell(judge, made, {n: t for n, t in said.items() if t is not None}, len(offsets))
    journal.close()
    if stopped:
        print(f"owrl judge: stopped. {stopped}", file=sys.stderr)  # noqa: T201
        return 3
    return 1 if alarm else 0


def _tell(judge: RubricJudge, made: dict[int, Verdict], of: dict[int, Trajectory], total: int) -> bool:
    """Prints counts, agreement by the run's own judge, and drift. Gives whether the alarm rang."""
    counts = collections.Counter(verdict.value.value for verdict in made.values())
    shown = ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
    lines = [f"judge            {judge.name}", f"episodes         {len(made)} of {total} judged: {shown}"]
    reasons = collections.Counter(
        reason for v in made.values() if v.value is VerdictValue.INVALID for reason in v.reasons
    )
    lines += [f"invalid          {count} {reason}" for reason, count in reasons.most_common()]
    alarm = False
    groups: dict[str, list[Pair]] = collections.defaultdict(list)
    for offset, verdict in made.items():
        own = of[offset].verdict
        if own is not None and own.judge != judge.name and of[offset].outcome.trains:
            groups["program" if own.judge.startswith("program") else own.judge].append((verdict.value, own.value))
    for name, pairs in sorted(groups.items()):
        found = agreement(pairs)
        low, high = wilson(found.hits + found.rejections, found.compared)
        lines += ["", f"against {name}, as the truth", *found.lines()]
        lines.append(f"accuracy lies between {100 * low:.1f} % and {100 * high:.1f} % (95 %)")
        if name != "program":
            seen = drift((own, held_out) for held_out, own in pairs)
            alarm = alarm or seen.alarm
            lines.append(f"{name} against this held-out judge: {seen.line()}")
    print("\n".join(lines))  # noqa: T201
    return alarm


def _read(path: Path) -> Iterable[Judged]:
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield msgspec.json.decode(line, type=Judged)
        except msgspec.DecodeError:
            continue  # torn by a crash: that episode is asked about again


def _append(path: Path, one: Judged) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(one) + b"\n")


def _key(path: Path | None) -> str:
    return path.read_text(encoding="utf-8").strip() if path is not None else ""
