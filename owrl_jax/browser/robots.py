"""robots.txt, as RFC 9309 says: the longest rule wins, `*` and `$` are understood, 5xx means no.

`Robots.check` is asked before a navigation that the agent or a task chose. In mode `honor` a disallowed URL is refused
(`blocked/robots`), in mode `report` it is logged and visited, in mode `ignore` nothing is fetched. robots.txt itself
comes through the episode's egress gate, so it obeys the same rules as every page.

The standard library's parser is not used: it takes the first rule instead of the longest and reads `*` literally.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol
from urllib.parse import quote, unquote, urlsplit

from owrl_jax.browser.policy import Refusal, split_url
from owrl_jax.outcome import Reason

logger = logging.getLogger(__name__)

RobotsMode = Literal["honor", "report", "ignore"]
_MAX_BYTES = 512 * 1024  # RFC 9309, 2.5: at least 500 KiB must be read


class Fetch(Protocol):
    """Gets a small resource (`egress_fetch.fetch_text` with a gate bound)."""

    def __call__(self, url: str, /, *, max_bytes: int) -> Awaitable[tuple[int, str]]:
        """(status, text) after redirects; OSError if the host could not be reached."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobotsRules:
    """The rules of one robots.txt for one agent: (pattern, allowed), as written."""

    rules: tuple[tuple[str, bool], ...]

    @classmethod
    def parse(cls, text: str, agent: str) -> RobotsRules:
        """The groups that name `agent` (case-insensitive product token), else those for `*`."""
        groups: dict[str, list[tuple[str, bool]]] = collections.defaultdict(list)
        agents: list[str] = []
        naming = False
        for raw in text.lstrip("\ufeff").splitlines():
            key, colon, value = raw.partition("#")[0].partition(":")
            key, value = key.strip().lower(), value.strip()
            if not colon:
                continue
            if key == "user-agent":
                if not naming:
                    agents = []
                agents.append(value.lower())
                groups[value.lower()]  # a group without rules still counts: it allows everything
                naming = True
            elif key in ("allow", "disallow"):
                naming = False
                for name in agents:
                    if value:
                        groups[name].append((value, key == "allow"))
        token = agent.lower()
        chosen = groups[token] if token in groups else groups.get("*", [])
        return cls(rules=tuple(chosen))

    def allows(self, path: str) -> bool:
        """Whether `path` (with its query) may be visited. Equal lengths: allow wins."""
        if path == "/robots.txt":
            return True
        path = _normal(path)
        best_length, best = -1, True
        for pattern, allowed in self.rules:
            if _matches(pattern, path):
                length = len(pattern)
                if length > best_length or (length == best_length and allowed):
                    best_length, best = length, allowed
        return best


class Robots:
    """robots.txt of all hosts, cached.

    Args:
      mode: `honor`, `report` or `ignore`.
      agent: product token to look for; the one in the User-Agent suffix, if there is one.
      ttl_s: how long an answer holds (RFC 9309 allows a day); unreachable ones a tenth of an hour.
    """

    def __init__(
        self,
        mode: RobotsMode = "honor",
        *,
        agent: str = "owrl",
        ttl_s: float = 86400.0,
        clock: Callable[[], float] = time.time,
    ):
        if mode not in ("honor", "report", "ignore"):
            raise ValueError(f"robots mode must be honor, report or ignore, got {mode!r}")
        self.mode, self.agent, self._ttl_s, self._clock = mode, agent, ttl_s, clock
        self._cache: collections.OrderedDict[str, tuple[float, RobotsRules | None]] = collections.OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def check(self, url: str, fetch: Fetch) -> Refusal | None:
        """A refusal if the URL's robots.txt disallows it and the mode is `honor`; None otherwise."""
        if self.mode == "ignore":
            return None
        scheme, host, _ = split_url(url)
        if scheme not in ("http", "https") or host is None:
            return None
        parts = urlsplit(url.strip())
        origin = f"{scheme}://{parts.netloc.rpartition('@')[2]}"
        rules = await self._rules(origin, fetch)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if rules is not None and rules.allows(path):
            return None
        why = "its robots.txt cannot be read" if rules is None else "its robots.txt asks automated visitors not to"
        logger.info("robots.txt of %s disallows a visit (%s); mode %s", host, why, self.mode)
        if self.mode == "report":
            return None
        message = f"This page of {host} was not opened: {why}."
        return Refusal(reason=Reason.BLOCKED, detail="robots", host=str(host), message=message)

    async def _rules(self, origin: str, fetch: Fetch) -> RobotsRules | None:
        """The rules of an origin; None stands for "no", after 5xx or no answer."""
        lock = self._locks.setdefault(origin, asyncio.Lock())
        async with lock:  # siblings of a group ask at the same moment: one of them fetches
            now = self._clock()
            if origin in self._cache and self._cache[origin][0] > now:
                return self._cache[origin][1]
            try:
                status, text = await fetch(f"{origin}/robots.txt", max_bytes=_MAX_BYTES)
            except OSError as error:
                logger.info("robots.txt of %s could not be fetched: %s", origin, error)
                status, text = 599, ""
            rules: RobotsRules | None
            if status >= 500:
                rules, ttl_s = None, min(self._ttl_s, 360.0)
            elif status >= 300:  # 4xx, or more redirects than one follows: nothing is asked for
                rules, ttl_s = RobotsRules(rules=()), self._ttl_s
            else:
                rules, ttl_s = RobotsRules.parse(text, self.agent), self._ttl_s
            self._cache[origin] = (now + ttl_s, rules)
            while len(self._cache) > 2048:
                self._cache.popitem(last=False)
        if not lock.locked():
            self._locks.pop(origin, None)
        return rules


def _normal(text: str) -> str:
    """One spelling of percent-escapes, so that rule and path compare octet by octet."""
    return quote(unquote(text), safe="/?&=*$:@!'(),;+~-._[]%|{}^\"<>\\`#")


def _matches(pattern: str, path: str) -> bool:
    """Whether a rule matches from the start of `path`: the pieces between its stars, in turn, no backtracking."""
    pattern = _normal(pattern)
    anchored = pattern.endswith("$")
    pieces = re.split(r"\*+", pattern.removesuffix("$"))
    if not path.startswith(pieces[0]):
        return False
    at = len(pieces[0])
    for piece in pieces[1:-1]:
        found = path.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    if len(pieces) == 1:
        return not anchored or at == len(path)
    last = pieces[-1]
    if anchored:
        return path.endswith(last) and len(path) - len(last) >= at
    return path.find(last, at) >= 0
