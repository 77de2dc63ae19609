"""How often, how many at once, and whether now: manners towards the hosts that episodes visit.

Everything is kept per registrable domain (`shop.example.co.uk` and `www.example.co.uk` are one site).

- **Navigations** pass a token bucket (`pace`), with jitter as soon as one has to wait, since the siblings of a GRPO
  group would otherwise arrive together. A navigation that a click caused is charged afterwards (`debit`).
- **Episodes** at once are capped (`visit`).
- **Connections** are paced far more loosely (`admit_connection`, asked by the egress proxy): sub-resources must not be
  throttled to uselessness, only a storm is.
- **Cool-down and health** (`report`, `cooling`): a rate limit is obeyed at once and for as long as `Retry-After` says;
  other faults add to a score that decays, and only repeated ones cool a host down, longer each time. Nothing is
  for ever, and every score keeps its evidence. The state is JSON on disk (`save`, `load`).

Hosts of this machine (local worlds) are never slowed down. Not here: robots.txt (`robots`), deny lists (`policy`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import email.utils
import json
import math
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

from owrl_jax.browser.addresses import BadHost, is_local_name, parse_host, private_reason
from owrl_jax.browser.policy import registrable_domain, url_host_port

# What a fault adds to the score. Walls are the host's wish not to be visited now; the rest may be bad luck.
_WALLS: dict[str, float] = {"bot_wall": 1.0, "captcha": 1.0, "rate_limited": 1.0, "forbidden": 0.5, "geo_block": 1.0}
_SURE = ("nav_dns", "nav_refused", "nav_tls", "nav_timeout", "nav_aborted", "bad_response", "http_5xx", "redirect_loop")
_MAYBE = ("blank_page", "page_hostile", "page_frozen", "page_crash", "site_timeout")
_FAULTS: dict[str, float] = {**dict.fromkeys(_SURE, 1.0), **dict.fromkeys(_MAYBE, 0.5)}
_EVIDENCE = 5  # newest reports kept per host


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLimits:
    """Manners, per registrable domain. Times in seconds.

    Attributes:
      navigations_per_minute, navigation_burst: token bucket of page loads.
      jitter_s: up to this much is added at random to every wait.
      episodes: live episodes at once.
      connections_per_s, connection_burst: token bucket of connection starts, over all episodes.
      cooldown_s, max_cooldown_s: first cool-down, doubled with each strike, and the longest.
      strikes: score at which faults that are not walls cool a host down.
      half_life_s: after this long a score has halved.
    """

    navigations_per_minute: float = 30.0
    navigation_burst: int = 4
    jitter_s: float = 2.0
    episodes: int = 6
    connections_per_s: float = 50.0
    connection_burst: int = 200
    cooldown_s: float = 60.0
    max_cooldown_s: float = 12 * 3600.0
    strikes: float = 3.0
    half_life_s: float = 6 * 3600.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = 0.0 if field.name == "jitter_s" else 1e-9
            if not (math.isfinite(value) and value >= low):
                raise ValueError(f"HostLimits.{field.name} must be positive, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """One report about a host; `detail` is an outcome detail, `note` one line for people."""

    time: float
    detail: str
    status: int | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostHealth:
    """What is known of one registrable domain now. `cooling_s` is the time until it may be visited again."""

    host: str
    score: float
    cooling_s: float
    evidence: tuple[Evidence, ...]


class _Bucket:
    """Tokens that fill at a rate up to a burst; may go into debt, which later callers wait for."""

    def __init__(self, rate_per_s: float, burst: float, now: float):
        self.rate, self.burst, self.tokens, self.at = rate_per_s, burst, float(burst), now

    def take(self, now: float) -> float:
        """Takes a token and says how many seconds it lies in the future."""
        self.tokens = min(self.burst, self.tokens + max(now - self.at, 0.0) * self.rate) - 1.0
        self.at = now
        return max(-self.tokens / self.rate, 0.0)


@dataclasses.dataclass(kw_only=True)
class _Host:
    score: float = 0.0
    scored_at: float = 0.0
    cool_until: float = 0.0
    evidence: list[Evidence] = dataclasses.field(default_factory=list)


class HostGovernor:
    """The manners of one process. Not thread-safe; belongs to one event loop.

    Args:
      limits: see `HostLimits`.
      exempt: hosts that are never slowed down, beside those of this machine.
      clock: wall time in seconds (state outlives the process); sleep and rng: replaceable for tests.
    """

    def __init__(
        self,
        limits: HostLimits | None = None,
        *,
        exempt: Iterable[str] = (),
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        rng: random.Random | None = None,
    ):
        self.limits = limits or HostLimits()
        self._exempt = frozenset(exempt)
        self._clock, self._sleep, self._rng = clock, sleep, rng or random.Random()
        self._hosts: dict[str, _Host] = {}
        self._navigations: dict[str, _Bucket] = {}
        self._connections: dict[str, _Bucket] = {}
        self._visitors: collections.Counter[str] = collections.Counter()
        self._queues: dict[str, collections.deque[asyncio.Future[None]]] = {}

    # Rate and concurrency.

    async def pace(self, host: str) -> float:
        """Waits until a navigation to `host` is due; returns the seconds waited."""
        if self._is_exempt(host):
            return 0.0
        limits = self.limits
        wait = self._take(self._navigations, host, limits.navigations_per_minute / 60.0, limits.navigation_burst)
        if wait > 0.0:
            wait += self._rng.uniform(0.0, limits.jitter_s)
            await self._sleep(wait)
        return wait

    def debit(self, host: str) -> None:
        """Charges a navigation that has already happened (a click, a redirect, a script)."""
        if not self._is_exempt(host):
            limits = self.limits
            self._take(self._navigations, host, limits.navigations_per_minute / 60.0, limits.navigation_burst)

    async def admit_connection(self, host: str) -> None:
        """Waits until a connection to `host` may start; immediate below the burst."""
        if self._is_exempt(host):
            return
        wait = self._take(self._connections, host, self.limits.connections_per_s, self.limits.connection_burst)
        if wait > 0.0:
            await self._sleep(wait)

    @contextlib.asynccontextmanager
    async def visit(self, host: str) -> AsyncIterator[None]:
        """Holds one of the host's places for a live episode; waits in line for it, first come first served."""
        key = registrable_domain(host)
        if self._is_exempt(host):
            yield
            return
        queue = self._queues.setdefault(key, collections.deque())
        if self._visitors[key] < self.limits.episodes and not queue:
            self._visitors[key] += 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.append(turn)
            try:
                await turn  # whoever leaves hands the place over: the count does not change
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave(key)  # the place arrived together with the cancellation
                else:
                    with contextlib.suppress(ValueError):  # `_leave` passes over, and drops, what was cancelled
                        queue.remove(turn)
                raise
        try:
            yield
        finally:
            self._leave(key)

    def visitors(self, host: str) -> int:
        """Live episodes on the host's registrable domain."""
        return self._visitors[registrable_domain(host)]

    def _leave(self, key: str) -> None:
        queue = self._queues.get(key)
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._queues.pop(key, None)
        self._visitors[key] -= 1
        if not self._visitors[key]:
            del self._visitors[key]

    # Health and cool-down.

    def report(
        self, host: str, *, detail: str = "", status: int | None = None, retry_after: str | None = None, note: str = ""
    ) -> None:
        """Says how a visit to `host` went.

        Args:
          host: name as visited.
          detail: an outcome detail (`bot_wall`, `nav_timeout`, …); empty for a good visit, which halves the score.
            Details that are not the host's doing are ignored.
          status: HTTP status of the page, if known; 429 and 503 count as they are, without a detail.
          retry_after: the header's value, in seconds or as a date.
          note: one line of evidence for people.
        """
        if self._is_exempt(host):
            return
        if not detail and status in (429, 503):
            detail = "rate_limited" if status == 429 else "http_5xx"
        now = self._clock()
        state = self._hosts.setdefault(registrable_domain(host), _Host(scored_at=now))
        score = self._decayed(state, now)
        if not detail:
            state.score, state.scored_at = score / 2, now
            return
        weight = _WALLS.get(detail, _FAULTS.get(detail))
        if weight is None:
            return
        state.score, state.scored_at = score + weight, now
        state.evidence = [*state.evidence, Evidence(time=now, detail=detail, status=status, note=note)][-_EVIDENCE:]
        limits = self.limits
        cool = 0.0
        if detail in _WALLS:
            cool = limits.cooldown_s * 2.0 ** max(state.score - 1.0, 0.0)
        elif state.score >= limits.strikes:
            cool = limits.cooldown_s * 2.0 ** (state.score - limits.strikes)
        cool = max(cool, parse_retry_after(retry_after, now) or 0.0)
        if cool > 0.0:
            state.cool_until = max(state.cool_until, now + min(cool, limits.max_cooldown_s))

    def cooling(self, host: str) -> float:
        """Seconds until `host` may be visited again; 0 if it may now."""
        state = self._hosts.get(registrable_domain(host))
        return 0.0 if state is None or self._is_exempt(host) else max(state.cool_until - self._clock(), 0.0)

    def health(self, host: str) -> HostHealth:
        """What is known of the host's registrable domain."""
        key = registrable_domain(host)
        state = self._hosts.get(key, _Host())
        score = self._decayed(state, self._clock())
        return HostHealth(host=key, score=score, cooling_s=self.cooling(host), evidence=tuple(state.evidence))

    def import_list(self, text: str, *, name: str = "imported list", expiry_s: float = 30 * 86400.0) -> int:
        """Takes a plain list of hosts, one a line, `#` for comments, as bad until `expiry_s` from now.

        Returns the number of distinct registrable domains; lines that hold no host raise ValueError with their number.
        """
        now = self._clock()
        seen = set()
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.partition("#")[0].strip()
            if not line:
                continue
            try:
                found = url_host_port(line) if "://" in line else (str(parse_host(line.partition("/")[0])), 0)
            except BadHost:
                found = None
            if found is None:
                raise ValueError(f"line {number} of {name} holds no host: {line[:80]!r}")
            key = registrable_domain(found[0])
            seen.add(key)
            state = self._hosts.setdefault(key, _Host(scored_at=now))
            state.cool_until = max(state.cool_until, now + expiry_s)
            note = Evidence(time=now, detail="imported", note=f"{name}, line {number}")
            state.evidence = [*state.evidence, note][-_EVIDENCE:]
        return len(seen)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes health and cool-downs as JSON, replacing the file in one step; recovered hosts are left out."""
        now = self._clock()
        hosts = {
            key: dataclasses.asdict(state)
            for key, state in sorted(self._hosts.items())
            if state.cool_until > now or self._decayed(state, now) >= 0.05
        }
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps({"version": 1, "hosts": hosts}, indent=1))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Adds what `save` wrote; a missing file is an empty one.

        Raises:
          ValueError: if the file is something else.
        """
        target = Path(path)
        if not target.exists():
            return
        try:
            data = json.loads(target.read_text())
            if data["version"] != 1:
                raise ValueError(f"version {data['version']!r}")
            hosts = {
                key: _Host(**row | {"evidence": [Evidence(**e) for e in row["evidence"]]})
                for key, row in data["hosts"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{target} is no host health file ({error}); move it away to start afresh") from error
        self._hosts.update(hosts)

    def _decayed(self, state: _Host, now: float) -> float:
        return state.score * 0.5 ** (max(now - state.scored_at, 0.0) / self.limits.half_life_s)

    def _take(self, table: dict[str, _Bucket], host: str, rate_per_s: float, burst: float) -> float:
        now = self._clock()
        key = registrable_domain(host)
        if key not in table:
            if len(table) > 4096:  # full buckets say nothing: forget them
                for old in [k for k, b in table.items() if b.tokens + (now - b.at) * b.rate >= b.burst]:
                    del table[old]
            table[key] = _Bucket(rate_per_s, burst, now)
        return table[key].take(now)

    def _is_exempt(self, host: str) -> bool:
        if host in self._exempt:
            return True
        try:
            parsed = parse_host(f"[{host}]" if ":" in host else host)
        except BadHost:
            return False
        return is_local_name(parsed) if isinstance(parsed, str) else private_reason(parsed) is not None


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Seconds that a `Retry-After` header asks for (RFC 9110, 10.2.3), None if absent or unreadable."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - now, 0.0)
    except (TypeError, ValueError):
        return None
