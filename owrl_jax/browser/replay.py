"""Replaying a recorded episode: the same calls on the same recorded traffic, and the first step that went differently.

The network is not touched: every request is answered from the recording, and one that is not in it fails. So a replay
tells whether the sandbox (or the browser under it) changed: feedback, addresses, tabs, pictures. It is not an
environment to learn in, since whatever leaves the recorded path meets aborted requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from owrl_jax.browser.config import EngineConfig, SandboxConfig
from owrl_jax.browser.engine import BrowserEngine
from owrl_jax.browser.record import FORMAT, Entry, Meta, screenshot_path
from owrl_jax.browser.redact import REDACTED, redact_text, redact_url
from owrl_jax.types import StepResult, ToolCall

PIXEL_STEP = 8  # a channel that differs by less is the same colour: rounding of anti-aliased edges


class BadRecording(ValueError):
    """The folder cannot be replayed; the message says what is missing or broken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording, read and checked."""

    folder: Path
    meta: Meta
    entries: tuple[Entry, ...]

    @property
    def har(self) -> Path:
        return self.folder / "traffic.har"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that went otherwise: in which step, what, and both sides of it as text."""

    step: int
    what: str
    recorded: str
    replayed: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """How many steps agreed (the reset counts as one), of how many, and the first difference if there is one."""

    agreed: int
    steps: int
    difference: Difference | None


def _playable(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    """The calls with letters in place of those that were a secret: as many, so that the page lives through the same."""

    def key(name: Any) -> Any:
        return name.replace(REDACTED, "x") if isinstance(name, str) else name

    return tuple(
        dataclasses.replace(c, arguments={**c.arguments, "keys": [key(k) for k in c.arguments["keys"]]})
        if c.name == "press_keys" and isinstance(c.arguments.get("keys"), list)
        else c
        for c in calls
    )


def load(folder: Path) -> Recording:
    """Reads a recording.

    Raises:
      BadRecording: if the folder is none, or one of another format. A last line torn by a crash is left out.
    """
    try:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=Meta)
        lines = (folder / "actions.jsonl").read_text(encoding="utf-8").split("\n")
    except (OSError, msgspec.DecodeError) as error:
        raise BadRecording(f"{folder} is not a recording: {error}") from error
    if meta.format != FORMAT:
        raise BadRecording(f"{folder} has format {meta.format}; this version reads format {FORMAT}")
    entries = []
    for number, line in enumerate(lines[:-1]):  # what follows the last line end was never finished
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except msgspec.DecodeError as error:
            raise BadRecording(f"{folder}/actions.jsonl, line {number + 1}: {error}") from error
    if not entries:
        raise BadRecording(f"{folder} holds no finished step: the episode ended before its first observation")
    return Recording(folder=folder, meta=meta, entries=tuple(entries))


async def replay(
    recording: Recording,
    *,
    engine: EngineConfig | None = None,
    config: SandboxConfig | None = None,
    picture_tolerance: float = 0.002,
    live: bool = False,
    open_sandbox: Callable[[Any, SandboxConfig], Any] | None = None,
) -> ReplayReport:
    """Runs the recorded calls again and compares step by step, up to the first difference.

    Args:
      engine: which browser.
      config: sandbox settings besides those the recording fixes (viewport, picture format, exceptions).
      picture_tolerance: share of pixels that may differ; 0 asks for the same bytes.
      live: use the network instead of the recorded traffic.
      open_sandbox: makes the sandbox; None for the real one.
    Raises:
      BadRecording: without `live`, if the recording has no traffic.
    """
    if not live and not recording.har.exists():
        raise BadRecording(f"{recording.har} is missing: the episode was not closed, or was recorded without traffic")
    meta = recording.meta
    config = dataclasses.replace(
        config or SandboxConfig(),
        viewport=meta.viewport,
        dpr=meta.dpr,
        image_format=meta.image_format,
        replay_har=None if live else recording.har,
        safety=_safety(meta),
    )
    running = BrowserEngine(engine)
    await running.start()
    try:
        sandbox = (open_sandbox or _sandbox)(running, config)
        try:
            for agreed, entry in enumerate(recording.entries):
                result = await (sandbox.reset(meta.task) if entry.step == 0 else sandbox.step(_playable(entry.calls)))
                difference = compare(recording, entry, result, picture_tolerance)
                if difference is not None or result.outcome is not None:
                    agreed += difference is None
                    return ReplayReport(agreed=agreed, steps=len(recording.entries), difference=difference)
        finally:
            await asyncio.shield(sandbox.close())
    finally:
        await asyncio.shield(running.close())
    return ReplayReport(agreed=len(recording.entries), steps=len(recording.entries), difference=None)


def compare(recording: Recording, entry: Entry, result: StepResult, picture_tolerance: float) -> Difference | None:
    """The first difference between a recorded step and its replay, in the order a person would look."""
    seen = result.observation
    pairs: list[tuple[str, Any, Any]] = [
        ("statuses", [r.status.value for r in entry.results], [r.status.value for r in result.results]),
        ("feedback", [r.feedback for r in entry.results], [redact_text(r.feedback) for r in result.results]),
        ("outcome", entry.outcome and entry.outcome.key, result.outcome and result.outcome.key),
        ("url", entry.url, redact_url(seen.active_tab.url) if seen else None),
        ("tabs", entry.tabs, len(seen.tabs) if seen else 0),
        ("title", entry.title, redact_text(seen.active_tab.title) if seen else None),
    ]
    for what, recorded, replayed in pairs:
        if recorded != replayed and REDACTED not in str(recorded):
            return Difference(step=entry.step, what=what, recorded=str(recorded), replayed=str(replayed))
    shot = seen.screenshot if seen else None
    if entry.screenshot is None or shot is None or entry.screenshot == shot.sha256:
        return None
    share = 1.0
    if picture_tolerance > 0:
        path = screenshot_path(recording.folder, entry.screenshot, shot.format)
        share = changed_share(path.read_bytes(), shot.data) if path.exists() else 1.0
    if share <= picture_tolerance:
        return None
    return Difference(
        step=entry.step,
        what="screenshot",
        recorded=entry.screenshot,
        replayed=f"{shot.sha256} ({share:.2%} of the pixels differ, {picture_tolerance:.2%} allowed)",
    )


def changed_share(one: bytes, other: bytes) -> float:
    """Share of pixels in which two encoded pictures differ visibly; 1.0 if their sizes differ."""
    from PIL import Image

    with Image.open(io.BytesIO(one)) as left, Image.open(io.BytesIO(other)) as right:
        if left.size != right.size:
            return 1.0
        a = np.asarray(left.convert("RGB"), dtype=np.int16)
        b = np.asarray(right.convert("RGB"), dtype=np.int16)
    return float((np.abs(a - b).max(axis=-1) >= PIXEL_STEP).mean())


def _sandbox(engine: BrowserEngine, config: SandboxConfig) -> Any:
    from owrl_jax.browser.sandbox import Sandbox

    return Sandbox(engine, config)


def _safety(meta: Meta) -> Any:
    from owrl_jax.browser.safety import Safety

    return Safety.for_local_worlds(set(meta.exceptions)) if meta.exceptions else Safety()
