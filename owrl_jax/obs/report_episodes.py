"""The trajectory browser's share of a report: which episodes are shown whole, their HTML, their pictures.

Every episode has a row in the list. Whole episodes are `<template>`s, which a browser neither runs nor draws until the
viewer copies one; a picture that many turns share is embedded once.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from owrl_jax.obs.episode_parts import escape, facts, reading, shot_box, turn_section
from owrl_jax.obs.run_data import EpisodeRow, Run
from owrl_jax.pool.journal import JournalError
from owrl_jax.pool.store import MissingScreenshot
from owrl_jax.types import ToolCall, Trajectory, Verdict

_log = logging.getLogger(__name__)

_KINDS = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp"}
_SMALL_BYTES = 24_000
"""A picture of up to so many bytes is embedded as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of a run goes into one file.

    Attributes:
      episodes: shown whole.
      picture_bytes: of all embedded pictures, as they stand in the file.
      exact_pictures: embed every picture as it was seen; by default large ones become WebP, which looks the same and
        takes a tenth.
      groups: ids of groups to show whole before any other.
    """

    episodes: int = 60
    picture_bytes: int = 40_000_000
    exact_pictures: bool = False
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.episodes < 0 or self.picture_bytes < 0:
            raise ValueError(
                f"limits cannot be negative, got {self.episodes} episodes, {self.picture_bytes} picture bytes"
            )


class Pictures:
    """The pictures of one page: each hash once, until the limit is reached.

    Attributes:
      urls: data URLs by hash.
      left_out: how many the limit kept out; missing: how many are not in the store.
    """

    def __init__(self, run: Run, limits: Limits) -> None:
        self._store, self._limits = run.pictures, limits
        self.urls: dict[str, str] = {}
        self.bytes = 0
        self._out: set[str] = set()
        self._missing: set[str] = set()

    @property
    def left_out(self) -> int:
        return len(self._out)

    @property
    def missing(self) -> int:
        return len(self._missing)

    def tag(self, name: str | None) -> str:
        """HTML of a picture that the viewer fills in; empty without a name."""
        if name is None:
            return ""
        if name not in self.urls and name not in self._out and name not in self._missing:
            self._add(name)
        return f'<img alt="screenshot" data-shot="{escape(name)}">'

    def _add(self, name: str) -> None:
        try:
            if self._store is None:
                raise MissingScreenshot("no store")
            kind, data = _KINDS.get(self._store.path(name).suffix[1:], "png"), self._store.get(name)
        except (MissingScreenshot, OSError):
            self._missing.add(name)
            return
        if not self._limits.exact_pictures and len(data) > _SMALL_BYTES:
            kind, data = _smaller(kind, data)
        url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        if self.bytes + len(url) > self._limits.picture_bytes:
            self._out.add(name)
            return
        self.urls[name] = url
        self.bytes += len(url)


def _smaller(kind: str, data: bytes) -> tuple[str, bytes]:
    from PIL import Image

    try:
        out = io.BytesIO()
        with Image.open(io.BytesIO(data)) as image:
            image.convert("RGB").save(out, "WEBP", quality=82, method=2)
    except (OSError, ValueError) as error:
        _log.debug("a picture stays as it is: %s", error)
        return kind, data
    return ("webp", out.getvalue()) if out.tell() < len(data) else (kind, data)


def choose(run: Run, limits: Limits) -> list[EpisodeRow]:
    """The episodes to show whole, in the order in which they ended.

    Whole groups with all their attempts: first those that were asked for, then in turn the newest one and one from
    evenly over the run, so that what the policy did at the beginning stays beside what it does now. A group that no
    longer fits ends the choice, but one is always shown.
    """
    by_group: dict[str, list[EpisodeRow]] = {}
    for row in run.episodes:
        by_group.setdefault(row.group, []).append(row)
    names = list(by_group)
    asked = [name for name in limits.groups if name in by_group]
    order = dict.fromkeys([*asked, *_spread_and_newest(names)])
    chosen: list[EpisodeRow] = []
    for name in order:
        rows = by_group[name]
        if chosen and name not in asked and len(chosen) + len(rows) > limits.episodes:
            break
        if limits.episodes or name in asked:
            chosen += rows
    return sorted(chosen, key=lambda row: row.number)


def _spread_and_newest(names: Sequence[str]) -> Iterator[str]:
    """Alternately from the end backwards, and over the whole: the first, the middle, the quarters, the eighths …"""
    last = len(names) - 1
    places = [0]
    for power in range(1, len(names).bit_length() + 1):
        places += [round(last * k / 2**power) for k in range(1, 2**power, 2)]
    for n in range(len(names)):
        yield names[last - n]
        if n < len(places):
            yield names[places[n]]


def episode_template(run: Run, row: EpisodeRow, pictures: Pictures) -> str:
    """A whole episode as a template of the page."""
    try:
        body = _episode(run, row, run.trajectory(row), pictures)
    except JournalError as error:
        body = f'<p class="muted">{escape(error)}</p>'
    return f'<template id="episode-{row.number}"><div class="episode">{body}</div></template>'


def _episode(run: Run, row: EpisodeRow, one: Trajectory, pictures: Pictures) -> str:
    turns = []
    for number, turn in enumerate(one.turns):
        said = None if run.decode is None else run.decode(turn.response_ids).removesuffix("<|im_end|>")
        turns.append(
            turn_section(
                number,
                turn,
                shot=shot_box(pictures.tag(turn.screenshot), turn.calls),
                said=said,
                parsed=None if said is None else reading(turn, said),
                decode=run.decode,
            )
        )
    end = ""
    if one.final_screenshot is not None:
        calls: tuple[ToolCall, ...] = ()
        end = (
            f'<section class="turn">{shot_box(pictures.tag(one.final_screenshot), calls)}'
            "<div><h2>After the last action</h2></div></section>"
        )
    further = [
        ("attempt", str(row.attempt) if row.attempt else ""),
        ("policy version", str(row.version) if row.version >= 0 else ""),
        ("reward", "none: it says nothing about the policy" if row.reward is None else f"{row.reward:g}"),
        ("advantage", "" if row.advantage is None else f"{row.advantage:+.3f}"),
    ]
    return facts(one, None, further) + _verdict(one.verdict, pictures) + "".join(turns) + end


def _verdict(verdict: Verdict | None, pictures: Pictures) -> str:
    """What the judge said, and the pictures that it saw."""
    if verdict is None:
        return '<div class="verdict"><p class="muted">no verdict</p></div>'
    took = "" if verdict.latency_ms is None else f", {verdict.latency_ms:.0f} ms"
    prompt = f", prompt {verdict.prompt_sha256[:12]}" if verdict.prompt_sha256 else ""
    reasons = "".join(f"<p>· {escape(reason)}</p>" for reason in verdict.reasons)
    seen = "".join(pictures.tag(name) for name in verdict.evidence)
    return (
        f'<div class="verdict {verdict.value.value}"><p><b>{verdict.value.value}</b> '
        f'<span class="muted">by {escape(verdict.judge)}{took}{escape(prompt)}</span></p>'
        f"<p>{escape(verdict.rationale)}</p>{reasons}"
        + (f'<details><summary>what it saw</summary><div class="evidence">{seen}</div></details>' if seen else "")
        + "</div>"
    )


def row_data(run: Run, row: EpisodeRow, *, full: bool) -> dict[str, Any]:
    """What the list and the viewer know of an episode; all words are set as text there."""
    group = run.groups.get(row.group)
    if row.iteration is not None:
        trained = f"trained on in iteration {row.iteration}"
    elif group is None:
        trained = "its group was never closed"
    elif not row.member:
        trained = "a try that was replaced"
    else:
        trained = f"group closed ({group.reason}), not trained on"
    return {
        "number": row.number,
        "group": row.group,
        "index": row.index,
        "attempt": row.attempt,
        "member": row.member,
        "iteration": row.iteration,
        "task": row.task,
        "instruction": row.instruction,
        "site": row.site,
        "level": row.level,
        "outcome": row.outcome,
        "owner": row.owner.value,
        "verdict": row.verdict,
        "reward": row.reward,
        "advantage": row.advantage,
        "turns": row.turns,
        "seconds": row.seconds,
        "trained": trained,
        "full": full,
    }
