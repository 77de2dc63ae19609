"""The ledger of browsers and leases: who may use which browser, until when, and that everything taken is given back.

A lease is the right to one browser context for one episode. It names the browser by its `generation` (the running
number of its launch, so a handle from before a crash can never touch the browser that came after), it ends by itself
when nobody gives a sign of life for `ttl_s` seconds, and it is given back exactly once however often release is
called.

Invariant, checked by `LeaseBook.audit`: acquired == released + live, and a browser's leases are exactly the live ones
that name it. This module is bookkeeping alone: no I/O, no tasks, no clock of its own; `pool/fleet.py` starts and ends
the processes and `pool/sandboxes.py` decides who waits.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import time
import uuid
from collections.abc import Callable


class BrowserState(enum.StrEnum):
    """The life of one browser process."""

    COLD = "cold"  # wanted, not started
    LAUNCHING = "launching"
    READY = "ready"  # idle and warm
    LEASED = "leased"  # at least one episode on it
    DRAINING = "draining"  # takes no new episode; ends when the last one leaves
    DEAD = "dead"


_NEXT: dict[BrowserState, frozenset[BrowserState]] = {
    BrowserState.COLD: frozenset({BrowserState.LAUNCHING, BrowserState.DEAD}),
    BrowserState.LAUNCHING: frozenset({BrowserState.READY, BrowserState.DEAD}),
    BrowserState.READY: frozenset({BrowserState.LEASED, BrowserState.DRAINING, BrowserState.DEAD}),
    BrowserState.LEASED: frozenset({BrowserState.READY, BrowserState.DRAINING, BrowserState.DEAD}),
    BrowserState.DRAINING: frozenset({BrowserState.DEAD}),
    BrowserState.DEAD: frozenset(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """The right to one context of one browser.

    Attributes:
      id: unique, never reused.
      generation: which launch of a browser it stands on.
      granted_s: when, on the ledger's clock, in seconds.
      ttl_s: seconds without a heartbeat after which it is taken back.
    """

    id: str
    generation: int
    granted_s: float
    ttl_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The balance of the ledger. `balanced` is false only if this program has lost track of a lease."""

    acquired: int
    released: int
    live: int
    browsers: dict[str, int]

    @property
    def balanced(self) -> bool:
        return self.acquired == self.released + self.live


@dataclasses.dataclass
class _Browser:
    state: BrowserState = BrowserState.COLD
    episodes: int = 0  # granted so far
    leases: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class _Entry:
    lease: Lease
    heartbeat_s: float
    releasing: bool = False


class LeaseBook:
    """Browsers, leases and the rules between them.

    Args:
      contexts_per_browser: how many episodes may share one browser.
      recycle_after: episodes after which a browser drains.
      clock: seconds, monotonic.
    """

    def __init__(
        self, *, contexts_per_browser: int, recycle_after: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if contexts_per_browser < 1 or recycle_after < 1:
            raise ValueError(
                "contexts_per_browser and recycle_after must be at least 1, got "
                f"{contexts_per_browser} and {recycle_after}"
            )
        self._width = contexts_per_browser
        self._recycle_after = recycle_after
        self._clock = clock
        self._browsers: dict[int, _Browser] = {}
        self._entries: dict[str, _Entry] = {}
        self._last_generation = 0
        self._acquired = 0
        self._released = 0

    # Browsers.

    def add_browser(self) -> int:
        """A new, cold browser; returns its generation."""
        self._last_generation += 1
        self._browsers[self._last_generation] = _Browser()
        return self._last_generation

    def move(self, generation: int, state: BrowserState) -> None:
        """Takes a browser to its next state. A dead browser is forgotten once its leases are given back.

        Raises:
          ValueError: for a step the life of a browser does not have.
        """
        browser = self._browsers[generation]
        if state not in _NEXT[browser.state]:
            raise ValueError(f"browser {generation} cannot go from {browser.state.value} to {state.value}")
        browser.state = state
        self._forget_if_over(generation)

    def state(self, generation: int) -> BrowserState:
        """The state of a browser; DEAD for one that has been forgotten."""
        browser = self._browsers.get(generation)
        return browser.state if browser else BrowserState.DEAD

    def episodes(self, generation: int) -> int:
        """How many leases a living browser has given."""
        return self._browsers[generation].episodes

    def leases_of(self, generation: int) -> tuple[Lease, ...]:
        """The live leases of a browser, those being given back included."""
        browser = self._browsers.get(generation)
        return tuple(self._entries[i].lease for i in sorted(browser.leases)) if browser else ()

    def generations(self, *states: BrowserState) -> tuple[int, ...]:
        """Browsers in any of these states, oldest first."""
        return tuple(g for g, b in self._browsers.items() if b.state in states)

    def free_places(self) -> int:
        """Episodes that could start now without a launch."""
        return sum(self._places(b) for b in self._browsers.values())

    def coming_places(self) -> int:
        """Episodes that browsers on their way up will have room for."""
        coming = self.generations(BrowserState.COLD, BrowserState.LAUNCHING)
        return len(coming) * min(self._width, self._recycle_after)

    def place(self) -> int | None:
        """The browser for the next episode: the one with the fewest leases, the oldest of equals; None if all are full.

        Spreading first and doubling up second is right because each browser paints on one thread.
        """
        open_ = [(len(b.leases), g) for g, b in self._browsers.items() if self._places(b) > 0]
        return min(open_)[1] if open_ else None

    # Leases.

    def grant(self, generation: int, *, ttl_s: float) -> Lease:
        """A lease on a browser that has room; the browser drains when this was its last episode.

        Raises:
          ValueError: if it has no room.
        """
        browser = self._browsers[generation]
        if self._places(browser) < 1:
            raise ValueError(f"browser {generation} ({browser.state.value}) has no room for another lease")
        if not ttl_s > 0:
            raise ValueError(f"a lease needs a positive ttl_s, got {ttl_s}")
        now = self._clock()
        lease = Lease(id=uuid.uuid4().hex, generation=generation, granted_s=now, ttl_s=ttl_s)
        self._entries[lease.id] = _Entry(lease=lease, heartbeat_s=now)
        browser.leases.add(lease.id)
        browser.episodes += 1
        self._acquired += 1
        if browser.state is BrowserState.READY:
            self.move(generation, BrowserState.LEASED)
        if browser.episodes >= self._recycle_after:
            self.move(generation, BrowserState.DRAINING)
        return lease

    def heartbeat(self, lease_id: str) -> bool:
        """A sign of life. False if the lease is over or being given back."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.releasing:
            return False
        entry.heartbeat_s = self._clock()
        return True

    def valid(self, lease_id: str) -> bool:
        """Whether the holder may still act: live, not being given back, its browser not dead, its time not over."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.releasing or self.state(entry.lease.generation) is BrowserState.DEAD:
            return False
        return self._clock() - entry.heartbeat_s <= entry.lease.ttl_s

    def expired(self) -> tuple[Lease, ...]:
        """Leases whose holder has been silent too long."""
        now = self._clock()
        return tuple(e.lease for e in self._entries.values() if not e.releasing and now - e.heartbeat_s > e.lease.ttl_s)

    def begin_release(self, lease_id: str) -> bool:
        """Starts giving a lease back. True for the first caller alone: that one must call `finish_release`."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.releasing:
            return False
        entry.releasing = True
        return True

    def finish_release(self, lease_id: str) -> None:
        """The context is gone: the place is free again.

        Raises:
          KeyError: if the lease is not being given back (released twice, or never begun): a bug of the caller.
        """
        entry = self._entries.get(lease_id)
        if entry is None or not entry.releasing:
            raise KeyError(f"lease {lease_id} is not being given back")
        del self._entries[lease_id]
        self._released += 1
        browser = self._browsers[entry.lease.generation]
        browser.leases.discard(lease_id)
        if browser.state is BrowserState.LEASED and not browser.leases:
            self.move(entry.lease.generation, BrowserState.READY)
        self._forget_if_over(entry.lease.generation)

    def audit(self) -> Audit:
        """The balance, after checking that both sides of the ledger agree.

        Raises:
          RuntimeError: if a browser and the leases disagree.
        """
        on_browsers = {i for b in self._browsers.values() for i in b.leases}
        if on_browsers != set(self._entries):
            raise RuntimeError(f"ledger torn: browsers hold {sorted(on_browsers)}, leases are {sorted(self._entries)}")
        states = collections.Counter(b.state.value for b in self._browsers.values())
        return Audit(acquired=self._acquired, released=self._released, live=len(self._entries), browsers=dict(states))

    def _places(self, browser: _Browser) -> int:
        if browser.state not in (BrowserState.READY, BrowserState.LEASED):
            return 0
        return min(self._width - len(browser.leases), self._recycle_after - browser.episodes)

    def _forget_if_over(self, generation: int) -> None:
        browser = self._browsers[generation]
        if browser.state is BrowserState.DEAD and not browser.leases:
            del self._browsers[generation]
