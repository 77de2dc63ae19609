"""What a run folder holds, read for people: settings, metrics, evaluations, and one row for each episode.

    config.json       settings (owrl_jax.config)          evals.jsonl    evaluations (owrl_jax.obs.stats)
    metrics.jsonl     numbers (owrl_jax.obs.metrics)      screenshots/   pictures (owrl_jax.pool.store)
    journal.jsonl     episodes (owrl_jax.pool.journal)    tokenizer/     of the policy, in HF form

Any of them may be missing or damaged; `Run.remarks` then says so, and the rest is read all the same. Rows are small:
the ids of an episode are read again from the journal only where they are shown (`Run.trajectory`). A reward is what the
learner gives with this run's settings (`rl.advantage`), so the viewer and the update cannot disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from owrl_jax.config import ConfigError, RlSettings
from owrl_jax.obs import metrics, stats
from owrl_jax.obs.episode_parts import Decode
from owrl_jax.outcome import Owner
from owrl_jax.pool.journal import Entry, Journal, JournalError
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.rl.advantage import group_advantages, reward_of
from owrl_jax.types import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeRow:
    """One line of the journal, without its ids.

    Attributes:
      number: of its line among the episodes, from 0.
      offset: of its line in the journal, bytes.
      at: when it was written, seconds since the epoch.
      group, index, attempt: whose sibling, which of them, which try at that place.
      member: whether its group, once closed, counts it; False for a try that was replaced or a group never closed.
      iteration: that trains on it; None if none does.
      task, instruction, site, level, split: of its task.
      outcome, owner: `reason/detail` of the ending, and whose doing it was.
      verdict, judge: empty without one.
      reward: None if it says nothing about the policy.
      advantage: against the members of its closed group; None without a reward or without a second member.
      turns, tokens: turns, and sampled ids.
      version: of the policy at its first token; -1 for actors that are no model.
      timings_ms: wall time by phase.
    """

    number: int
    offset: int
    at: float
    group: str
    index: int
    attempt: int
    member: bool = False
    iteration: int | None = None
    task: str
    instruction: str
    site: str
    level: float | None
    split: str
    outcome: str
    owner: Owner
    verdict: str
    judge: str
    protocol: str
    reward: float | None
    advantage: float | None = None
    turns: int
    tokens: int
    version: int
    timings_ms: dict[str, float]

    @property
    def seconds(self) -> float | None:
        """How long it took, if it was measured."""
        total = self.timings_ms.get("total")
        return None if total is None else total / 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A closed group: how many members were asked for, the rows that count, why it was closed, the iteration."""

    group: str
    n: int
    members: tuple[int, ...]  # numbers of rows
    reason: str
    version: int
    iteration: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder, read once.

    Attributes:
      folder: where.
      config: settings as they stand in `config.json`; empty without it.
      settings: those that rewards depend on.
      records: metrics.
      evaluations: in the order of iterations.
      episodes: all, in the order in which they ended.
      groups: closed ones by id, in order.
      remarks: what is missing or damaged, in words.
      journal, pictures: to read from; None where there are none.
      decode: from ids to words; None without a tokenizer.
      control_ids: of the tokenizer, by their words.
    """

    folder: Path
    config: Mapping[str, Any]
    settings: RlSettings
    records: Sequence[metrics.Record]
    evaluations: Sequence[stats.Evaluation]
    episodes: Sequence[EpisodeRow]
    groups: Mapping[str, GroupRow]
    remarks: Sequence[str]
    journal: Journal | None = None
    pictures: ScreenshotStore | None = None
    decode: Decode | None = None
    control_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def trajectory(self, row: EpisodeRow) -> Trajectory:
        """The whole episode, read from the journal.

        Raises:
          JournalError: if its line is damaged.
        """
        assert self.journal is not None
        found = self.journal.entry(row.offset).trajectory
        assert found is not None
        return found


class NoRun(ValueError):
    """The folder holds nothing of a run; the message says what was looked for."""


def load_run(folder: str | Path, *, tokenizer: str | Path | None = None) -> Run:
    """Reads a run folder.

    Args:
      folder: the run.
      tokenizer: folder of the policy's tokenizer; left out, `tokenizer/` of the run.

    Raises:
      NoRun: if there is nothing to read.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in (metrics.FILE, stats.FILE, "journal.jsonl", "config.json")):
        raise NoRun(
            f"{folder} is no run folder: it has none of config.json, {metrics.FILE}, journal.jsonl, {stats.FILE}"
        )
    remarks: list[str] = []
    config, settings = _config(folder / "config.json", remarks)
    journal = _journal(folder / "journal.jsonl", remarks)
    episodes, groups = _episodes(journal, settings, remarks)
    if not (folder / metrics.FILE).exists():
        remarks.append(f"There is no {metrics.FILE}, so there are no curves.")
    pictures = ScreenshotStore(folder / "screenshots") if (folder / "screenshots").is_dir() else None
    if pictures is None and episodes:
        remarks.append("There is no folder screenshots/, so episodes are shown without pictures.")
    tokens = _tokenizer(Path(tokenizer) if tokenizer else folder / "tokenizer", remarks) if episodes else None
    return Run(
        folder=folder,
        config=config,
        settings=settings,
        records=metrics.read(folder),
        evaluations=stats.read_evaluations(folder),
        episodes=episodes,
        groups=groups,
        remarks=remarks,
        journal=journal,
        pictures=pictures,
        decode=None if tokens is None else functools.partial(_decoded, tokens),
        control_ids={} if tokens is None else {t.content: i for i, t in tokens.hf.added_tokens_decoder.items()},
    )


def _config(path: Path, remarks: list[str]) -> tuple[dict[str, Any], RlSettings]:
    if not path.exists():
        remarks.append("There is no config.json: rewards are computed with the default settings.")
        return {}, RlSettings()
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError(f"it holds {type(data).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        remarks.append(f"config.json cannot be read ({error}): rewards are computed with the default settings.")
        return {}, RlSettings()
    try:  # this part alone: a run of another version, or made by hand, may differ elsewhere
        return data, msgspec.convert(data.get("rl", {}), RlSettings)
    except (msgspec.ValidationError, ConfigError) as error:
        remarks.append(f"rl in config.json cannot be used ({error}): rewards are computed with the default settings.")
        return data, RlSettings()


def _journal(path: Path, remarks: list[str]) -> Journal | None:
    if not path.exists():
        remarks.append("There is no journal.jsonl, so there are no episodes to show.")
        return None
    try:
        journal = Journal(path, readonly=True)
    except (JournalError, OSError) as error:
        remarks.append(f"The journal cannot be read: {error}.")
        return None
    if journal.torn_bytes:
        remarks.append(f"The journal's last line is torn ({journal.torn_bytes} bytes) and was passed over.")
    return journal


def _episodes(
    journal: Journal | None, settings: RlSettings, remarks: list[str]
) -> tuple[list[EpisodeRow], dict[str, GroupRow]]:
    rows: list[EpisodeRow] = []
    groups: dict[str, GroupRow] = {}
    if journal is None:
        return rows, groups
    offsets = journal.offsets
    numbers = {offset: number for number, offset in enumerate(offsets)}
    spent = {group: iteration for iteration, names in journal.batches.items() for group in names}
    try:
        for entry in journal.entries():
            if entry.kind == "trajectory" and entry.trajectory is not None:
                rows.append(_row(entry, entry.trajectory, len(rows), offsets[len(rows)], settings))
            elif entry.kind == "group":
                members = tuple(numbers[offset] for offset in entry.members if offset in numbers)
                iteration = spent.get(entry.group_id)
                groups[entry.group_id] = GroupRow(
                    group=entry.group_id,
                    n=entry.n,
                    members=members,
                    reason=entry.reason,
                    version=entry.version,
                    iteration=iteration,
                )
                _close(rows, members, iteration, settings)
    except JournalError as error:
        remarks.append(f"Episodes after the damage are not shown: {error}.")
    return rows, groups


def _close(rows: list[EpisodeRow], members: Sequence[int], iteration: int | None, settings: RlSettings) -> None:
    """Gives the members of a group what only the whole group knows."""
    rewards = {number: reward for number in members if (reward := rows[number].reward) is not None}
    advantages: dict[int, float] = {}
    if len(rewards) > 1:
        advantages = dict(
            zip(rewards, group_advantages(list(rewards.values()), divide=settings.advantage_std), strict=True)
        )
    for number in members:
        rows[number] = dataclasses.replace(
            rows[number], member=True, iteration=iteration, advantage=advantages.get(number)
        )


def _row(entry: Entry, one: Trajectory, number: int, offset: int, settings: RlSettings) -> EpisodeRow:
    versions = (version for turn in one.turns for version in turn.versions)
    return EpisodeRow(
        number=number,
        offset=offset,
        at=entry.at,
        group=one.group_id,
        index=one.index,
        attempt=entry.attempt,
        task=one.task.id,
        instruction=one.task.instruction,
        site=one.task.site or "unknown",
        level=one.task.difficulty,
        split=one.task.split,
        outcome=one.outcome.key,
        owner=one.outcome.owner,
        verdict="" if one.verdict is None else one.verdict.value.value,
        judge="" if one.verdict is None else one.verdict.judge,
        protocol=one.protocol,
        reward=reward_of(one, settings),
        turns=len(one.turns),
        tokens=sum(len(turn.response_ids) for turn in one.turns),
        version=next(versions, -1),
        timings_ms=one.timings_ms,
    )


def _tokenizer(folder: Path, remarks: list[str]) -> Any:
    if not (folder / "tokenizer.json").is_file():
        remarks.append(f"There is no tokenizer at {folder}, so responses are shown as ids (--tokenizer FOLDER).")
        return None
    from owrl_jax.models.tokenizer import load_tokenizer

    try:
        return load_tokenizer(folder)
    except Exception as error:  # noqa: BLE001 - transformers fails in many ways; ids are shown then
        remarks.append(f"The tokenizer at {folder} cannot be used ({error}), so responses are shown as ids.")
        return None


def _decoded(tokens: Any, ids: Sequence[int]) -> str:
    try:
        return tokens.decode(ids)
    except Exception as error:  # noqa: BLE001 - ids of another vocabulary
        return f"[{len(ids)} ids that this tokenizer cannot read: {type(error).__name__}]"
