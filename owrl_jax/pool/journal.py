"""The journal of a run: every finished trajectory, durable before anyone may train on it, and which batch used which.

One file, one JSON object a line, appended and synced, never rewritten. Three kinds of lines:

    trajectory   an episode that ended, rejected and faulty attempts too, with its verdict
    group        the siblings of one task are complete (or given up on): which lines they are
    batch        an iteration will train on these groups

A crash leaves at most a torn last line, which the next opening cuts off; nothing that `append` returned from is lost.
The `batch` line is written before the update that uses it. So a restart that comes back to the beginning of iteration i
finds the groups it had already collected for i, and the ones of earlier iterations are spent: the same batch is trained
exactly once in the life of the parameters, and no finished episode is played again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from owrl_jax.types import Group, GroupRequest, Task, Trajectory

Kind = Literal["trajectory", "group", "batch"]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One line.

    Attributes:
      kind: see the head of this file.
      at: seconds since the epoch.
      group_id: of a trajectory or a group.
      attempt: of a trajectory: number of this attempt at its place in the group, from 0.
      trajectory: the episode.
      task: of a group.
      n: of a group: members that were asked for.
      members: of a group: byte offsets of the lines of its trajectories, in the order of their index.
      version: of a group: policy version when its first episode began.
      reason: of a group: why it is closed (`complete`, `given_up`, `cancelled`).
      iteration: of a batch.
      groups: of a batch: group ids, in order.
    """

    kind: Kind
    at: float
    group_id: str = ""
    attempt: int = 0
    trajectory: Trajectory | None = None
    task: Task | None = None
    n: int = 0
    members: tuple[int, ...] = ()
    version: int = -1
    reason: str = ""
    iteration: int = -1
    groups: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Head:
    """The part of a line that the index needs; msgspec skips the rest without building it."""

    kind: Kind
    group_id: str = ""
    members: tuple[int, ...] = ()
    iteration: int = -1
    groups: tuple[str, ...] = ()


class JournalError(RuntimeError):
    """The journal cannot be opened or read; the message says where it is damaged and what to do."""


class Journal:
    """The journal in `path`. One process writes; any number may read.

    Args:
      path: the file; made if missing.
      readonly: open for looking only; a torn last line is then passed over instead of cut off.

    Attributes:
      torn_bytes: length of the torn last line that was found.

    Raises:
      JournalError: if another process writes into it, or a line that is not the last is damaged.
    """

    def __init__(self, path: str | Path, *, readonly: bool = False) -> None:
        self.path = Path(path)
        self._groups: dict[str, int] = {}
        self._batches: dict[int, tuple[str, ...]] = {}
        self._trajectories: list[int] = []
        self.torn_bytes = 0
        self._writer: int | None = None
        if not readonly:
            self._writer = self._lock()
        elif not self.path.exists():
            raise JournalError(f"there is no journal at {self.path}: give the folder of a run that has collected some")
        try:
            self._index()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. All that was appended is on disk already."""
        writer, self._writer = self._writer, None
        if writer is not None:
            os.close(writer)

    # --- Writing ---------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> int:
        """Writes and syncs one line; gives its byte offset.

        Raises:
          OSError: if it cannot be written (disk full). The file is then as it was before.
        """
        if self._writer is None:
            raise JournalError(f"{self.path} was opened for reading only, or is closed")
        if entry.kind == "batch" and self._batches.get(entry.iteration, entry.groups) != entry.groups:
            raise JournalError(
                f"iteration {entry.iteration} has a batch already, of other groups: it would be trained twice"
            )
        line = msgspec.json.encode(entry) + b"\n"
        offset = self._end
        try:
            # No buffer of Python's: what could not be written must not come out later.
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._writer, rest) :]
            os.fsync(self._writer)
        except OSError:
            with contextlib.suppress(OSError):  # else the next opening cuts the torn line off
                os.ftruncate(self._writer, offset)
            raise
        self._end = offset + len(line)
        self._note(entry, offset)
        return offset

    def add_trajectory(self, trajectory: Trajectory, *, attempt: int) -> int:
        """Appends a finished episode."""
        return self.append(
            Entry(
                kind="trajectory",
                at=time.time(),
                group_id=trajectory.group_id,
                attempt=attempt,
                trajectory=trajectory,
            )
        )

    def add_group(self, request: GroupRequest, members: Iterable[int], *, version: int, reason: str) -> int:
        """Closes a group: `members` are the offsets that `add_trajectory` gave."""
        return self.append(
            Entry(
                kind="group",
                at=time.time(),
                group_id=request.group_id,
                task=request.task,
                n=request.n,
                members=tuple(members),
                version=version,
                reason=reason,
            )
        )

    def add_batch(self, iteration: int, groups: Iterable[str]) -> int:
        """Says that `iteration` trains on these groups. To be called before it does."""
        return self.append(Entry(kind="batch", at=time.time(), iteration=iteration, groups=tuple(groups)))

    # --- Reading ---------------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """All lines, in order."""
        end, at = self._end, 0
        with self.path.open("rb") as file:
            while at < end:
                line = file.readline()
                yield self._decode(line, at, Entry)
                at += len(line)

    def __len__(self) -> int:
        """How many trajectories it holds."""
        return len(self._trajectories)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the lines of its trajectories begin, in order; the `members` of a group are some of these."""
        return tuple(self._trajectories)

    def entry(self, offset: int) -> Entry:
        """The line that begins at a byte offset."""
        return self._read(offset)

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Ids of all closed groups, in order."""
        return tuple(self._groups)

    @property
    def batches(self) -> dict[int, tuple[str, ...]]:
        """Group ids by iteration."""
        return dict(self._batches)

    def group(self, group_id: str) -> Group:
        """A closed group with its trajectories.

        Raises:
          KeyError: if no group of that id was closed.
        """
        if group_id not in self._groups:
            raise KeyError(f"{self.path} has no closed group {group_id!r}")
        head = self._read(self._groups[group_id])
        assert head.task is not None
        members = tuple(t for offset in head.members if (t := self._read(offset).trajectory) is not None)
        request = GroupRequest(task=head.task, group_id=group_id, n=head.n)
        return Group(request=request, trajectories=members)

    def version_of(self, group_id: str) -> int:
        """Policy version when the group's first episode began."""
        return self._read(self._groups[group_id]).version

    def unspent(self) -> tuple[str, ...]:
        """Closed groups that no batch names, oldest first."""
        spent = {g for groups in self._batches.values() for g in groups}
        return tuple(g for g in self._groups if g not in spent)

    # --- The file --------------------------------------------------------------------------------------------------

    def _lock(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        writer = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(writer)
            raise JournalError(
                f"another process is writing into {self.path}: one run, one process. End it, or give another name"
            ) from None
        return writer

    def _read(self, offset: int) -> Entry:
        with self.path.open("rb") as file:
            file.seek(offset)
            return self._decode(file.readline(), offset, Entry)

    def _decode(self, line: bytes, offset: int, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise JournalError(
                f"{self.path} is damaged at byte {offset}: {error}. Everything before is good: keep a copy, cut the "
                f"file there (truncate --size={offset}), and start again"
            ) from error

    def _index(self) -> None:
        at = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    self.torn_bytes = len(line)
                    break
                self._note(self._decode(line, at, _Head), at)
                at += len(line)
        self._end = at
        if self.torn_bytes and self._writer is not None:
            os.ftruncate(self._writer, at)
            os.fsync(self._writer)

    def _note(self, entry: Entry | _Head, offset: int) -> None:
        if entry.kind == "trajectory":
            self._trajectories.append(offset)
        elif entry.kind == "group":
            self._groups[entry.group_id] = offset
        else:
            self._batches[entry.iteration] = entry.groups
