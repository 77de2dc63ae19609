"""Every reply of a judge, kept as it came: JSON lines beside the journal.

Without the replies nobody can say later how often a parser erred, what a judge saw, or whether another one would have
said the same. A line holds the question's hash and words, the hashes of its pictures, the reply, how it was read, who
answered, how long it took and how many tokens. Appended whole, so that a crash costs at most a torn last line, which
reading skips.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from owrl_jax.types import VerdictValue


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplyRecord:
    """One attempt to get a verdict.

    Attributes:
      at: seconds since the epoch.
      judge, model: its name, and what answered.
      task_id, group_id, index: of the trajectory.
      attempt: from 0.
      prompt_sha256: of the question; `prompt` are its words.
      pictures: content hashes of what was shown.
      reply: as it came; empty if none did, then `problem` says why.
      value, problem: how it was read.
    """

    at: float
    judge: str
    model: str
    task_id: str
    group_id: str
    index: int
    attempt: int
    prompt_sha256: str
    prompt: str
    pictures: tuple[str, ...]
    reply: str
    value: VerdictValue
    problem: str = ""
    finished: bool = True
    latency_ms: float = 0.0
    tokens_in: int | None = None
    tokens_out: int | None = None


class ReplyArchive:
    """A file of `ReplyRecord`s; any number of processes may append to it.

    Args:
      path: the file; made with its folder if missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file() and self.path.stat().st_size and not self._ends_whole():
            self._write(b"\n")  # a torn last line must not swallow the next one

    def append(self, record: ReplyRecord) -> None:
        """Adds a line, in one write.

        Raises:
          OSError: if it cannot be written.
        """
        self._write(msgspec.json.encode(record) + b"\n")

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _write(self, data: bytes) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, data)
        finally:
            os.close(file)

    def records(self) -> Iterator[ReplyRecord]:
        """All whole lines, oldest first."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            for line in file:
                try:
                    yield msgspec.json.decode(line, type=ReplyRecord)
                except msgspec.DecodeError:
                    continue  # torn by a crash


def now() -> float:
    """Seconds since the epoch."""
    return time.time()
