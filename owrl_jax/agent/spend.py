"""What calls to paid endpoints cost, written down before they are made.

Each call first reserves the most that it can cost, then is made, then its true cost is settled. A process that dies
in between leaves its reservation standing, so no crash and no restart can spend the same money twice. The file is the
truth: lines of JSON, appended under a lock and flushed to the disk; any number of processes may share it. A call that
would exceed the limit is refused, and nothing ever raises the limit by itself.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import uuid
from pathlib import Path


class SpendingLimit(Exception):
    """The next call could exceed the limit; it was not made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """Dollars per million tokens."""

    usd_per_million_in: float = 0.0
    usd_per_million_out: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"{field.name} must be 0 or more, got {getattr(self, field.name)}")

    def usd(self, tokens_in: int, tokens_out: int) -> float:
        """Cost of one call."""
        return (tokens_in * self.usd_per_million_in + tokens_out * self.usd_per_million_out) / 1e6


class SpendLedger:
    """The account of one run or project.

    Args:
      path: the file; made if it is not there.
      limit_usd: highest sum of settled costs and open reservations; None for no limit.
      limit_calls: highest number of calls that were made or are being made; None for no limit.
    """

    def __init__(self, path: str | Path, *, limit_usd: float | None = None, limit_calls: int | None = None) -> None:
        self._path = Path(path)
        self._limit_usd, self._limit_calls = limit_usd, limit_calls
        self._costs: dict[str, float] = {}  # of each call: reserved, or settled
        self._read_bytes = 0
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            pass

    @property
    def spent_usd(self) -> float:
        """Settled costs and open reservations of all processes."""
        with self._locked():
            return sum(self._costs.values())

    @property
    def calls(self) -> int:
        """Calls that were made or are being made."""
        with self._locked():
            return len(self._costs)

    def reserve(self, usd: float, what: str = "") -> str:
        """Writes down that a call of at most this cost is about to be made. Gives its name.

        Raises:
          SpendingLimit: if it could exceed a limit; then nothing was written.
        """
        with self._locked() as file:
            spent = sum(self._costs.values())
            if self._limit_calls is not None and len(self._costs) >= self._limit_calls:
                raise SpendingLimit(f"the limit of {self._limit_calls} calls is reached ({self._path})")
            if self._limit_usd is not None and spent + usd > self._limit_usd:
                raise SpendingLimit(
                    f"a call of up to ${usd:.4f} would exceed the limit of ${self._limit_usd:.2f}, of which "
                    f"${spent:.4f} are spent or reserved ({self._path})"
                )
            call = uuid.uuid4().hex
            self._append(file, {"call": call, "reserved_usd": usd, "what": what})
            self._costs[call] = usd
            return call

    def settle(self, call: str, usd: float) -> None:
        """Replaces a reservation by the true cost, 0 if the call certainly cost nothing."""
        with self._locked() as file:
            if call not in self._costs:
                raise KeyError(f"there is no reservation {call!r} in {self._path}")
            self._append(file, {"call": call, "settled_usd": usd})
            self._costs[call] = usd

    def cancel(self, call: str) -> None:
        """Takes back the reservation of a call that was never made or was refused; it no longer counts as a call."""
        with self._locked() as file:
            self._append(file, {"call": call, "cancelled": True})
            self._costs.pop(call, None)

    def _locked(self) -> _Lock:
        return _Lock(self)

    def _append(self, file: int, entry: dict[str, object]) -> None:
        line = (json.dumps(entry) + "\n").encode()
        os.write(file, line)
        os.fsync(file)
        self._read_bytes += len(line)

    def _catch_up(self, file: int) -> None:
        """Reads what other processes wrote. A torn last line of a process that died counts as written: it is
        completed."""
        data = b""
        while chunk := os.pread(file, 1 << 20, self._read_bytes + len(data)):
            data += chunk
        if data and not data.endswith(b"\n"):
            os.write(file, b"\n")
            data += b"\n"
        for line in data.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # torn before its call was made: the write comes first
            if "settled_usd" in entry:
                self._costs[entry["call"]] = entry["settled_usd"]
            elif "cancelled" in entry:
                self._costs.pop(entry["call"], None)
            else:
                self._costs[entry["call"]] = entry["reserved_usd"]
        self._read_bytes += len(data)


class _Lock:
    """The file, locked, with everything read that others have written."""

    def __init__(self, ledger: SpendLedger) -> None:
        self._ledger = ledger

    def __enter__(self) -> int:
        self._file = os.open(self._ledger._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._ledger._catch_up(self._file)
        return self._file

    def __exit__(self, *_: object) -> None:
        os.close(self._file)  # closing gives the lock back
