"""Waiting until a page has done what an action caused, and not a moment longer.

There is no sleep and no "network idle" here. Whoever acts has subscribed before (`tabs.Tab`). Afterwards one loop
looks at the facts and asks what is still missing:

    a navigation was asked for             -> wait for its document                           (commit)
    a new tab was asked for                -> wait until it is there, to be followed          (popup)
    the action may still ask for one       -> wait a short grace, no longer than quiet takes  (grace)
    the document is not parsed             -> wait                                            (load)
    fonts, or images in view, are loading  -> wait, but a hanging one does not hold us        (fonts, images)
    the page's own site is still answering -> wait for young requests, never for polls        (requests, render)
    the DOM is changing                    -> wait until it is still                          (quiet)

Every wait has a cap, and reaching one ends that wait and not the step. What ended the waiting and how long it took is
part of the observation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from typing import Any

from owrl_jax.browser import faults
from owrl_jax.browser.config import SettleCaps
from owrl_jax.browser.tabs import Tab
from owrl_jax.types import Settle

_POLL_S = 0.03  # longest time between two looks: images and fonts send no event that we see
_BUSY_S = 1.0  # a probe that takes longer means that the page's main thread is busy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """How the waiting ended.

    Attributes:
      reason: `quiet`; `cap:<what>` if something was given up on; `closed`, `crashed`, `frozen`.
      ms: how long it took.
      waited_ms: how long each kind of thing held us.
      probe: the last look at the page, None if it could not be had.
    """

    reason: str
    ms: float
    waited_ms: dict[str, float]
    probe: dict[str, Any] | None

    @property
    def frozen(self) -> bool:
        """Whether the page's main thread did not answer any more."""
        return self.reason == "frozen"

    @property
    def settle(self) -> Settle:
        """The record for the observation."""
        return Settle(reason=self.reason, ms=round(self.ms, 1))


async def settle(tab: Tab, caps: SettleCaps, *, grace_s: float | None = None, until: float = math.inf) -> Settled:
    """Waits for `tab` as described above.

    Args:
      tab: the page that was acted in; `tab.begin()` was called before the action.
      caps: limits.
      grace_s: overrides `caps.grace_s`; 0 for actions that cannot navigate.
      until: time (monotonic) by which to have ended, whatever is still missing.
    """
    start = time.monotonic()
    grace_until = start + (caps.grace_s if grace_s is None else grace_s)
    since, commits = start, tab.commits
    waited: dict[str, float] = {}
    capped: set[str] = set()
    probe: dict[str, Any] | None = None
    busy_since: float | None = None

    def done(reason: str) -> Settled:
        return Settled(reason=reason, ms=(time.monotonic() - start) * 1e3, waited_ms=waited, probe=probe)

    while True:
        now = time.monotonic()
        if tab.crashed:
            return done("crashed")
        if tab.closed or tab.failed is not None:
            return done("closed")
        if now > until:
            return done("frozen" if busy_since is not None else "cap:deadline")
        if tab.commits != commits:
            commits, since, busy_since = tab.commits, now, None
            capped.clear()
            if commits > caps.reloads:
                return done("cap:reloads")
        if tab.navigating:
            asked = max(tab.navigating_since or start, start)
            if now - asked > caps.commit_s:
                return done("cap:commit")
            await _wait(tab, min(asked + caps.commit_s, until) - now, "commit", waited)
            continue
        if tab.opening and now - start < caps.popup_s:
            await _wait(tab, min(start + caps.popup_s, until) - now, "popup", waited)
            continue
        if now - since > caps.total_s:
            return done("frozen" if busy_since is not None else "cap:total")
        try:
            seen = probe = await tab.world.call("probe", timeout_s=min(_BUSY_S, tab.timeout_s))
            busy_since = None
        except faults.DeadlineExceeded:
            busy_since = busy_since or now
            waited["script"] = waited.get("script", 0.0) + (time.monotonic() - now) * 1e3
            continue
        except Exception as error:
            # The page went away under the question, or its document did: look again at the facts.
            if not (faults.is_gone(error) or faults.is_stale_context(error)):
                raise
            await _wait(tab, _POLL_S, "commit", waited)
            if faults.is_gone(error) and not (tab.closed or tab.crashed or tab.navigating):
                return done("closed")
            continue
        now = time.monotonic()
        missing, left = _missing(tab, seen, caps, now=now, since=since, grace_until=grace_until, capped=capped)
        if missing is None:
            if "quiet" in capped:
                tab.document.restless = True
            return done(f"cap:{sorted(capped)[0]}" if capped else "quiet")
        await _wait(tab, min(left, _POLL_S), missing, waited)


def _missing(
    tab: Tab,
    probe: dict[str, Any],
    caps: SettleCaps,
    *,
    now: float,
    since: float,
    grace_until: float,
    capped: set[str],
) -> tuple[str | None, float]:
    """What is still to wait for, and for how long at most; notes in `capped` what was given up on."""
    elapsed = now - since
    still_for = probe["quiet"] / 1e3
    quiet_cap = caps.restless_again_s if tab.document.restless else caps.restless_s
    loading = probe["state"] != "complete"
    wishes: tuple[tuple[str, bool, float], ...] = (
        ("load", probe["state"] == "loading", caps.load_s),
        ("load", loading and bool(tab.foreign_blocking(caps.foreign_s)), caps.load_s),
        ("fonts", probe["fonts"] == "loading", caps.fonts_s),
        ("images", probe["images"] > 0, caps.images_s),
        ("requests", bool(tab.own_requests(caps.request_s, caps.request_again_s, caps.silent_s)), caps.total_s),
        ("render", now - tab.last_own_finish < caps.render_s, caps.total_s),
        ("quiet", still_for < caps.quiet_s, max(quiet_cap, tab.last_own_finish - since + quiet_cap)),
    )
    for name, wanted, cap in wishes:
        if not wanted:
            continue
        if elapsed < cap:
            return name, max(caps.quiet_s - still_for, 0.001) if name == "quiet" else _POLL_S
        capped.add(name)
    if now < grace_until and tab.commits == 0:
        return "grace", grace_until - now
    return None, 0.0


async def _wait(tab: Tab, seconds: float, what: str, waited: dict[str, float]) -> None:
    start = time.monotonic()
    await tab.pulse.wait(seconds)
    # Events come in bursts; one look serves them all.
    await asyncio.sleep(0)
    waited[what] = waited.get(what, 0.0) + (time.monotonic() - start) * 1e3
