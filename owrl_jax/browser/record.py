"""Recording an episode as it runs: a folder from which it can be read, looked at and replayed without a network.

    meta.json            task, viewport, browser, version of this format
    actions.jsonl        one line per reset and step: calls, results, address, screenshot hash, settling, ending
    screenshots/<sha>.*  each picture once
    traffic.har          all requests with their bodies (written by the browser context when it closes)

Lines are appended and flushed as they happen, so a crash or a full disk loses nothing that was recorded before; a
recording that cannot go on ends its episode with `sandbox_error/disk_full` instead of silently having a hole. What
was typed into fields that hold secrets, cookies and credentials are taken out before anything is written here, and
out of the HAR when the episode closes. `browser/replay.py` reads these folders.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, quote_plus

import msgspec

from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.elements import FieldFacts
from owrl_jax.browser.redact import REDACTED, redact_call, redact_text, redact_url, spelt
from owrl_jax.browser.safety import Safety
from owrl_jax.outcome import Outcome, Phase, Reason
from owrl_jax.types import CallResult, Screenshot, Settle, StepResult, Task, ToolCall

_log = logging.getLogger(__name__)

FORMAT = 1
_SHORTEST = 3  # characters of a secret that is looked for everywhere
_SECRET_HEADERS = frozenset({"cookie", "set-cookie", "authorization", "proxy-authorization"})


class _Sandbox(Protocol):
    async def reset(self, task: Task) -> StepResult: ...
    async def step(self, calls: Sequence[ToolCall]) -> StepResult: ...
    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """What a replay must know before it starts. `exceptions`: (host, port) pairs that the safety policy let through."""

    task: Task
    viewport: tuple[int, int]
    dpr: float
    image_format: str
    exceptions: tuple[tuple[str, int], ...] = ()
    format: int = FORMAT
    package: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of actions.jsonl. `step` 0 is the reset; the first step is 1."""

    step: int
    calls: tuple[ToolCall, ...]
    results: tuple[CallResult, ...]
    url: str | None
    title: str | None
    tabs: int
    changes: str
    screenshot: str | None
    screen_size: tuple[int, int] | None
    settle: Settle | None
    answer: str | None
    outcome: Outcome | None
    timings_ms: dict[str, float]


class RecordingSandbox:
    """A sandbox that writes down everything it does. The same protocol as the sandbox inside it.

    Args:
      inner: the sandbox; its own configuration must have `record_har` inside `folder`.
      folder: made if missing; must not hold a recording already.
      config: the sandbox's configuration, for the meta record.
    """

    def __init__(self, inner: _Sandbox, folder: Path, *, config: SandboxConfig) -> None:
        self.inner = inner
        self.folder = folder
        self._config = config
        self._step = 0
        self._secrets = _Secrets()
        self._failed: Outcome | None = None
        self._closed = False

    async def reset(self, task: Task) -> StepResult:
        """Opens the start page and begins the recording."""
        failed = await self._write(lambda: self._begin(task), Phase.RESET)
        if failed is not None:
            return StepResult(results=(), observation=None, outcome=failed)
        result = await self.inner.reset(task)
        return await self._keep((), result, Phase.RESET)

    async def step(self, calls: Sequence[ToolCall]) -> StepResult:
        """Runs the calls and records them with their results."""
        result = await self.inner.step(calls)
        self._step += 1
        return await self._keep(calls, result, Phase.STEP)

    async def close(self) -> None:
        """Closes the sandbox, which writes the HAR, and takes the secrets out of it."""
        await self.inner.close()
        if not self._closed:
            self._closed = True
            await self._write(
                lambda: redact_har(self.folder / "traffic.har", self._secrets.texts, self._secrets.typed),
                Phase.RELEASE,
            )

    async def _keep(self, calls: Sequence[ToolCall], result: StepResult, phase: Phase) -> StepResult:
        shot = result.observation.screenshot if result.observation else None
        self._secrets.note(calls, result.results)
        entry = _entry(self._step, calls, result)
        failed = await self._write(lambda: self._append(entry, shot), phase)
        return result if failed is None or result.outcome is not None else dataclasses.replace(result, outcome=failed)

    async def _write(self, work: Any, phase: Phase) -> Outcome | None:
        """Runs file work in a thread. After the first failure nothing more is written, and every call says so."""
        if self._failed is None:
            try:
                await asyncio.to_thread(work)
            except OSError as error:
                _log.error("recording in %s stopped: %s", self.folder, error)
                self._failed = Outcome(
                    reason=Reason.SANDBOX_ERROR,
                    detail="disk_full",
                    phase=phase,
                    message=f"the recording in {self.folder} could not be written: {error}",
                )
        return self._failed

    def _begin(self, task: Task) -> None:
        from owrl_jax import __version__

        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "screenshots").mkdir(exist_ok=True)
        meta = Meta(
            task=task,
            viewport=self._config.viewport,
            dpr=self._config.dpr,
            image_format=self._config.image_format,
            exceptions=tuple(sorted((self._config.safety or Safety()).policy.exceptions)),
            package=__version__,
        )
        with open(self.folder / "meta.json", "xb") as file:  # x: never over another recording
            file.write(msgspec.json.format(msgspec.json.encode(meta), indent=2))

    def _append(self, entry: Entry, shot: Screenshot | None) -> None:
        if shot is not None:
            path = screenshot_path(self.folder, shot.sha256, shot.format)
            if not path.exists():
                path.write_bytes(shot.data)
        line = msgspec.json.encode(self._blank(entry)).decode()
        with open(self.folder / "actions.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _blank(self, entry: Entry) -> Entry:
        """The entry without secrets, in whatever the policy or the page put into it; names of ours stay as they are."""
        if not self._secrets.texts:
            return entry
        clean = self._secrets.clean
        return dataclasses.replace(
            entry,
            calls=tuple(dataclasses.replace(c, arguments=clean(c.arguments)) for c in entry.calls),
            results=tuple(
                dataclasses.replace(r, feedback=clean(r.feedback), facts=clean(r.facts)) for r in entry.results
            ),
            url=clean(entry.url),
            title=clean(entry.title),
            changes=clean(entry.changes),
            answer=clean(entry.answer),
        )


def screenshot_path(folder: Path, sha256: str, format: str) -> Path:
    """Where a recording keeps a picture."""
    return folder / "screenshots" / f"{sha256}.{format}"


def redact_har(path: Path, secrets: Iterable[str], typed: bool) -> None:
    """Takes cookies, credentials and `secrets` out of a HAR, in place; the old file stands until the new one is whole.

    Where a secret was `typed`, bodies of requests go altogether, since pages send fields letter by letter. (A replay
    then aborts requests that are told apart by their body alone.) A HAR that does not exist (the context never opened)
    is no error.
    """
    if not path.exists():
        return
    har = json.loads(path.read_text(encoding="utf-8"))
    for entry in har["log"]["entries"]:
        posted = entry["request"].get("postData")
        if typed and posted:
            posted.update({"text": REDACTED, "params": []})
        for message in (entry["request"], entry["response"]):
            message["headers"] = [h for h in message["headers"] if h["name"].lower() not in _SECRET_HEADERS]
            message["cookies"] = []
    text = json.dumps(har, ensure_ascii=False)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(json.dumps(secret, ensure_ascii=False)[1:-1], REDACTED)
    fresh = path.with_suffix(".part")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def _quote_all(text: str) -> str:
    return quote(text, safe="")


def _field(result: CallResult) -> FieldFacts | None:
    """The field that a call typed into, as the sandbox describes it; None if it typed into none."""
    facts = result.facts.get("field")
    return FieldFacts.of(facts) if facts else None


class _Secrets:
    """What was typed into fields that hold secrets, as it is and as it stands in URLs and forms.

    Attributes:
      texts: to be taken out wherever they stand. Text of one or two characters is not: it would take everything.
      typed: whether there was any, however short.
    """

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.typed = False
        self._spelt = ""  # by single keys, over any number of calls

    def note(self, calls: Sequence[ToolCall], results: Sequence[CallResult]) -> None:
        """Learns what calls typed, from the fields that their results name."""
        for call, result in zip(calls, results, strict=False):
            field = _field(result)
            if field is None or not field.is_secret or call.name not in ("write", "press_keys"):
                self._spelt = ""
                continue
            self.typed = True
            if call.name == "write":
                self._spelt = ""
                self._note_text(call.arguments.get("message"))
                continue
            keys = call.arguments.get("keys")
            for key in [keys] if isinstance(keys, str) else keys or ():
                # A named key may lead to another field: what is spelt after it is a text of its own.
                if not spelt(key):
                    self._note_text(self._spelt)
                self._spelt = self._spelt + spelt(key) if spelt(key) else ""
            self._note_text(self._spelt)

    def clean(self, value: Any) -> Any:
        """`value` (text, or lists and mappings of it) without the texts."""
        if isinstance(value, str):
            for text in sorted(self.texts, key=len, reverse=True):
                value = value.replace(text, REDACTED)
            return value
        if isinstance(value, Mapping):
            return {key: self.clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean(item) for item in value]
        return value

    def _note_text(self, text: object) -> None:
        if isinstance(text, str) and len(text.strip()) >= _SHORTEST:
            # Pages send a field letter by letter: the better part of a secret is one.
            parts = {text} | {text[:end] for end in range(max(_SHORTEST + 2, len(text) // 2 + 1), len(text))}
            self.texts |= {form(part) for part in parts for form in (str, quote, _quote_all, quote_plus)}


def _entry(step: int, calls: Sequence[ToolCall], result: StepResult) -> Entry:
    seen = result.observation
    shot = seen.screenshot if seen else None
    fields = [_field(r) for r in result.results] + [None] * len(calls)
    return Entry(
        step=step,
        calls=tuple(redact_call(call, field) for call, field in zip(calls, fields, strict=False)),
        results=tuple(dataclasses.replace(r, feedback=redact_text(r.feedback)) for r in result.results),
        url=redact_url(seen.active_tab.url) if seen else None,
        title=redact_text(seen.active_tab.title) if seen else None,
        tabs=len(seen.tabs) if seen else 0,
        changes=seen.changes if seen else "",
        screenshot=shot.sha256 if shot else None,
        screen_size=seen.screen_size if seen else None,
        settle=seen.settle if seen else None,
        answer=result.answer,
        outcome=result.outcome,
        timings_ms=result.timings_ms,
    )
