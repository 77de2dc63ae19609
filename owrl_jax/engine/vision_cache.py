"""Which image's embeddings lie in which rows of the device's pool.

The pool has one row per image token: its embedding and its DeepStack levels, nothing for text. An image is known by
(policy version, content hash): `clear` is called when weights change, and an entry that is still in use then is no
longer found, only finished. Entries nobody uses leave in order of their last use. The rows themselves are written by
`step.py`; here are only their numbers.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class Embedded:
    """Rows of one image; `ready` once the tower has written them."""

    __slots__ = ("digest", "live", "ready", "rows", "users")

    def __init__(self, digest: bytes, rows: np.ndarray) -> None:
        self.digest, self.rows = digest, rows
        self.users, self.ready, self.live = 0, False, True


class VisionCache:
    """Least recently used images over a pool of rows."""

    def __init__(self, rows: int) -> None:
        self.total = rows
        self._free = np.arange(rows, dtype=np.int32)
        self._entries: dict[bytes, Embedded] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self.hits = 0
        self.misses = 0

    @property
    def free(self) -> int:
        """Rows that hold nothing."""
        return len(self._free)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def use(self, digest: bytes, tokens: int) -> Embedded | None:
        """Pins an image's entry, made if it is not there; None if the pool has no room for it now.

        An entry that is not `ready` has to be filled by whoever asked, before anyone reads it.
        """
        entry = self._entries.get(digest)
        if entry is None:
            while len(self._free) < tokens and self._idle:
                self._evict()
            if len(self._free) < tokens:
                return None
            entry = Embedded(digest, self._free[:tokens])
            self._free = self._free[tokens:]
            self._entries[digest] = entry
            self.misses += 1
        else:
            self.hits += 1
        entry.users += 1
        self._idle.pop(digest, None)
        return entry

    def release(self, entry: Embedded) -> None:
        """Lets go of it.

        Raises:
          ValueError: if nobody uses it.
        """
        if entry.users < 1:
            raise ValueError("an image was let go more often than it was taken")
        entry.users -= 1
        if entry.users:
            return
        if entry.live and entry.ready:
            self._idle[entry.digest] = None
        else:
            self._forget(entry)

    def clear(self) -> None:
        """Nothing cached is found again."""
        for entry in list(self._entries.values()):
            entry.live = False
            self._entries.pop(entry.digest)
            if not entry.users:
                self._free = np.concatenate([self._free, entry.rows])
        self._idle.clear()

    def _evict(self) -> None:
        digest, _ = self._idle.popitem(last=False)
        self._forget(self._entries[digest])

    def _forget(self, entry: Embedded) -> None:
        if entry.live:
            del self._entries[entry.digest]
            entry.live = False
        self._free = np.concatenate([self._free, entry.rows])

    def check(self, held: list[Embedded]) -> None:
        """Raises AssertionError unless every row is free or in one entry, and `held` are the pins."""
        entries = {id(e): e for e in [*self._entries.values(), *held]}
        rows = np.concatenate([self._free, *(e.rows for e in entries.values())])
        assert len(rows) == self.total and len(np.unique(rows)) == self.total, "rows leaked or shared"
        for entry in entries.values():
            assert entry.users == sum(h is entry for h in held), "pins are miscounted"
