"""`owrl journal ls | show | export`: the episodes of a run on the terminal, and for other programs.

    owrl journal ls runs/tiny --verdict failure --last 20
    owrl journal show runs/tiny g0007            # a group; g0007/2 is one member, g0007/2/1 its second attempt
    owrl journal export runs/tiny out.jsonl --format openai --verdict success

Words of pages and models are printed with their control characters made visible: they could rewrite a terminal.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from owrl_jax.obs.episode_parts import reading
from owrl_jax.obs.journal_export import CannotExport, Format, conversations, episode_record, write_jsonl, write_parquet
from owrl_jax.obs.run_data import EpisodeRow, NoRun, Run, load_run
from owrl_jax.pool.journal import JournalError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which episodes."""

    site: str | None = None
    """Of this site."""
    outcome: str | None = None
    """With this ending: reason, or reason/detail."""
    verdict: Literal["success", "failure", "invalid", "none"] | None = None
    """With this verdict."""
    iteration: int | None = None
    """That this iteration trains on."""
    group: str | None = None
    """Of this group."""
    task: str | None = None
    """Whose task id or instruction holds these words."""
    counted: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only members of closed groups that have a reward: what statistics are over."""
    last: int | None = None
    """Only the newest so many of these."""

    def of(self, episodes: Sequence[EpisodeRow]) -> list[EpisodeRow]:
        """The chosen ones, in order."""
        found = [row for row in episodes if self._fits(row)]
        return found[max(0, len(found) - self.last) :] if self.last is not None else found

    def _fits(self, row: EpisodeRow) -> bool:
        words = "" if self.task is None else self.task.lower()
        return (
            self.site in (None, row.site)
            and (self.outcome is None or self.outcome in (row.outcome, row.outcome.partition("/")[0]))
            and (self.verdict is None or self.verdict == (row.verdict or "none"))
            and self.iteration in (None, row.iteration)
            and self.group in (None, row.group)
            and words in f"{row.task} {row.instruction}".lower()
            and (not self.counted or (row.member and row.reward is not None))
        )


def ls(run: tyro.conf.Positional[Path], choice: tyro.conf.OmitArgPrefixes[Choice]) -> int:
    """One line for each episode, and how they ended.

    Args:
        run: the run folder.
        choice: which episodes.
    """
    loaded = _load(run, tokenizer=None)
    rows = choice.of(loaded.episodes)
    width = max((len(_name(row)) for row in rows), default=5)
    for row in rows:
        cells = [
            f"{_name(row):<{width}}",
            f"{'-' if row.iteration is None else row.iteration:>4}",
            f"{row.site:<18.18}",
            f"{row.outcome:<32.32}",
            f"{row.verdict or '-':<8}",
            f"{'-' if row.reward is None else format(row.reward, 'g'):>4}",
            f"{row.turns:>3} turns",
            f"{'' if row.seconds is None else format(row.seconds, '.1f') + ' s':>8}",
            f" {row.instruction}",
        ]
        _say("  ".join(cells))
    endings = Counter(f"{row.outcome} ({row.owner.value})" for row in rows)
    _say(f"{len(rows)} episodes; " + ", ".join(f"{key} {n}" for key, n in endings.most_common()))
    return 0 if rows else 1


def show(run: tyro.conf.Positional[Path], which: tyro.conf.Positional[str], tokenizer: Path | None = None) -> int:
    """What happened in an episode, or in those of a group, turn by turn.

    Args:
        run: the run folder.
        which: GROUP, GROUP/INDEX or GROUP/INDEX/ATTEMPT.
        tokenizer: folder of the policy's tokenizer; left out, tokenizer/ of the run.
    """
    loaded = _load(run, tokenizer=tokenizer)
    rows = [row for row in loaded.episodes if which in (row.group, f"{row.group}/{row.index}", _name(row))]
    for row in rows:
        _show(loaded, row)
    if not rows:
        some = ", ".join(dict.fromkeys(row.group for row in loaded.episodes[-40:]))
        _say(f"owrl journal: there is no {which!r} in {run}; groups are, for instance, {some or 'none'}", error=True)
    return 0 if rows else 1


def export(
    run: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    choice: tyro.conf.OmitArgPrefixes[Choice],
    format: Format = "jsonl",
    per: Literal["episode", "turn"] = "episode",
    ids: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    inline: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    tokenizer: Path | None = None,
) -> int:
    """Writes episodes into a file.

    Args:
        run: the run folder.
        out: the file.
        choice: which episodes.
        format: jsonl has an episode a line, parquet a turn a row with ids and log-probs, openai a conversation a line.
        per: of openai: whole episodes with all pictures, or each turn exactly as the policy saw it.
        ids: of jsonl: token ids and log-probs as well.
        inline: of openai: pictures as data URLs, not as paths relative to the run.
        tokenizer: folder of the policy's tokenizer; left out, tokenizer/ of the run.
    """
    loaded = _load(run, tokenizer=tokenizer)
    rows = choice.of(loaded.episodes)
    if not rows:
        _say("owrl journal: no episode fits, so nothing was written", error=True)
        return 1
    beside = out.with_name(f".{out.name}.part")
    try:
        if format == "parquet":
            n, what = write_parquet(loaded, rows, beside), "turns"
        elif format == "openai":
            lines = (line for row in rows for line in conversations(loaded, row, per=per, inline=inline))
            n, what = write_jsonl(lines, beside), "conversations"
        else:
            n, what = write_jsonl((episode_record(loaded, row, ids=ids) for row in rows), beside), "episodes"
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)
    _say(f"{out}: {n} {what}")
    return 0


_COMMANDS = {"ls": ls, "show": show, "export": export}


def main(argv: list[str]) -> int:
    """`owrl journal`. Exit code 2 for a wrong call, 1 if no episode fits or something it needs is missing."""
    if not argv or argv[0] not in _COMMANDS:
        asked = argv[:1] in (["-h"], ["--help"])
        _say((__doc__ or "").strip(), error=not asked)
        return 0 if asked else 2
    try:
        return tyro.cli(_COMMANDS[argv[0]], args=argv[1:], prog=f"owrl journal {argv[0]}")
    except (NoRun, JournalError, CannotExport, OSError) as error:
        _say(f"owrl journal: {error}", error=True)
        return 1


def _load(run: Path, *, tokenizer: Path | None) -> Run:
    loaded = load_run(run, tokenizer=tokenizer)
    if loaded.journal is None:
        raise NoRun(" ".join(loaded.remarks))
    return loaded


def _name(row: EpisodeRow) -> str:
    return f"{row.group}/{row.index}/{row.attempt}"


def _show(run: Run, row: EpisodeRow) -> None:
    one = run.trajectory(row)
    lines = [
        f"── {_name(row)}  {row.task}",
        f"task      {row.instruction}",
        f"outcome   {row.outcome} ({row.owner.value}){f': {one.outcome.message}' if one.outcome.message else ''}",
    ]
    for number, turn in enumerate(one.turns):
        said = None if run.decode is None else run.decode(turn.response_ids)
        parsed = None if said is None else reading(turn, said)
        thought = f"{len(turn.response_ids)} ids" if said is None else parsed.reasoning if parsed else said
        lines.append(f"turn {number:<4} {' '.join(thought.split())}")
        for n, call in enumerate(turn.calls):
            lines.append(f"          {call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
            lines += [f"            → {turn.results[n].feedback}"] if n < len(turn.results) else []
        if parsed is not None and not parsed.ok:
            lines.append(f"          {parsed.feedback}")
        if turn.screenshot is not None and run.pictures is not None and turn.screenshot in run.pictures:
            lines.append(f"          {run.pictures.path(turn.screenshot)}")
    if one.answer is not None:
        lines.append(f"answer    {one.answer}")
    if one.verdict is not None:
        lines.append(f"verdict   {one.verdict.value.value} by {one.verdict.judge}: {one.verdict.rationale}")
    reward = "none" if row.reward is None else f"{row.reward:g}"
    lines.append(f"reward    {reward}" + ("" if row.advantage is None else f", advantage {row.advantage:+.3f}"))
    for line in lines:
        _say(line)


def _say(text: str, *, error: bool = False) -> None:
    shown = "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
    print(shown, file=sys.stderr if error else sys.stdout)
