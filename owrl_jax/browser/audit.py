"""An append-only record of every host that an episode asked for, and of what the rules said.

One JSON object per line, one `write` per line on a descriptor opened with O_APPEND: lines of several processes do not
mix, and a crash can at most tear the last one. A host is written when it is first met (so that a crash loses no visit),
and its totals when the episode is finished. Paths, queries, headers and bodies are never written.

A log that cannot be written (a full disk) never ends an episode: the fault is kept in `fault`, told once to `on_fault`,
and every lost line is counted, so that whoever must not run without an audit can stop.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from owrl_jax.browser.egress_gate import EgressEvent

logger = logging.getLogger(__name__)

Fsync = Literal["always", "interval", "never"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditFault:
    """Why lines are being lost. `detail` is a detail of `sandbox_error` (disk_full or unknown)."""

    detail: str
    message: str


@dataclasses.dataclass(kw_only=True)
class _Totals:
    count: int = 0
    sent: int = 0
    received: int = 0
    statuses: dict[str, int] = dataclasses.field(default_factory=dict)


class AuditLog:
    """The log of one process.

    Args:
      path: file to append to; its folder is made.
      fsync: `always` after every line, `interval` at most every `fsync_interval_s` and at the end of an episode (what a
        power cut can lose), or `never`.
      on_fault: called once when writing starts to fail.
    Raises:
      OSError: if the file cannot be opened at all; that is an operator's mistake and best known at the start.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fsync: Fsync = "interval",
        fsync_interval_s: float = 5.0,
        on_fault: Callable[[AuditFault], None] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._fsync, self._fsync_interval_s, self._on_fault, self._clock = fsync, fsync_interval_s, on_fault, clock
        self._synced = clock()
        self._torn = False
        self._episodes: dict[str, dict[tuple[str, int, str, str], _Totals]] = collections.defaultdict(dict)
        self.fault: AuditFault | None = None
        self.lost = 0

    def on_event(self, event: EgressEvent) -> None:
        """Takes one event of the egress proxy; pass it as `EgressProxy(on_event=…)`."""
        hosts = self._episodes[event.episode]
        verdict = "allowed" if event.verdict == "closed" else event.verdict
        key = (event.host, event.port, verdict, event.detail)
        totals = hosts.get(key)
        if totals is None:
            totals = hosts[key] = _Totals()
            self.record(
                event.episode, host=event.host, port=event.port, verdict=verdict, detail=event.detail, time=event.time
            )
        if event.verdict == "closed":
            totals.sent += event.sent
            totals.received += event.received
            if event.status is not None:
                totals.statuses[str(event.status)] = totals.statuses.get(str(event.status), 0) + 1
        else:
            totals.count += 1

    def record(self, episode: str, *, host: str, port: int, verdict: str, **fields: object) -> None:
        """Appends one line at once."""
        time_s = fields.pop("time", None)
        row = {"time": self._clock() if time_s is None else time_s, "episode": episode, "host": host, "port": port}
        self._append(row | {"verdict": verdict} | {k: v for k, v in fields.items() if v not in ("", None)})

    def finish(self, episode: str) -> None:
        """Writes the totals of an episode's hosts, and forgets them."""
        for (host, port, verdict, detail), totals in self._episodes.pop(episode, {}).items():
            fields = {"detail": detail, "total": True, "count": totals.count}
            if verdict == "allowed":
                fields |= {"sent": totals.sent, "received": totals.received, "statuses": totals.statuses or None}
            self.record(episode, host=host, port=port, verdict=verdict, **fields)
        if self._fsync == "interval":
            self._sync()

    def close(self) -> None:
        """Writes what is still counted and closes the file. May be called twice."""
        if self._fd < 0:
            return
        for episode in list(self._episodes):
            self.finish(episode)
        if self._fsync != "never":
            self._sync()
        os.close(self._fd)
        self._fd = -1

    def _append(self, row: dict[str, object]) -> None:
        line = json.dumps(row, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        # After a torn line, a line end first: the reader loses one line and not two.
        data = b"\n" + line if self._torn else line
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                self._torn = True
                raise OSError(errno.ENOSPC, "the line was cut short")
            self._torn = False
            self.fault = None
            if self._fsync == "always" or (
                self._fsync == "interval" and self._clock() - self._synced >= self._fsync_interval_s
            ):
                self._sync()
        except OSError as error:
            self.lost += 1
            self._fail(error)

    def _sync(self) -> None:
        self._synced = self._clock()
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):  # a pipe or device has nothing to sync
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        first = self.fault is None
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        message = f"the audit log {self.path.name} cannot be written: {error.strerror}. Free space, or end the run."
        self.fault = AuditFault(detail="disk_full" if full else "unknown", message=message)
        if first:
            logger.error("%s", message)
            if self._on_fault is not None:
                self._on_fault(self.fault)


def read_audit(path: str | os.PathLike[str]) -> Iterator[dict]:
    """The whole lines of an audit log, in order; torn ones are passed over with a warning."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError:
                logger.warning("%s line %d is torn and was left out", Path(path).name, number)
