"""Opening the start page of an episode: one navigation if all goes well, a few tries with pauses if not.

The last try is made in a fresh context. Nothing is tried again that cannot end differently: a refused address, a
redirect loop, an answer of the server that says no. What is left after the last try is raised as a typed fault, owned
by the site unless our own browser was the reason.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from owrl_jax.agent import urls
from owrl_jax.browser import faults
from owrl_jax.browser.policy import Refusal
from owrl_jax.browser.reach import Failure
from owrl_jax.browser.settle import Settled, settle
from owrl_jax.outcome import DETAILS, Owner, Reason
from owrl_jax.types import Task

if TYPE_CHECKING:
    from owrl_jax.browser.sandbox import Sandbox

_log = logging.getLogger(__name__)
_FINAL = frozenset({"robots", "redirect_loop", "http_4xx", "forbidden", "rate_limited", "page_hostile"})


async def open_start_page(sandbox: Sandbox, task: Task) -> Settled:
    """Opens `task.start_url` in a fresh stage of `sandbox`.

    Raises:
      Fault, NavigationFailed: what kept it from opening, after the last try.
    """
    config = sandbox.config
    try:
        url = urls.normalise(task.start_url)
    except urls.BadUrl as error:
        raise faults.Fault(Reason.INIT_ERROR, "bad_task", f"start_url of task {task.id!r}: {error}") from error
    refusal = sandbox.rules.safety.policy.check(url)
    if refusal is not None:
        raise _refused(refusal)
    cooling = sandbox.rules.safety.hosts.cooling(host_of(url))
    if cooling > 0:
        message = f"{host_of(url)} kept us out a short while ago: not visited again for {cooling:.0f} s"
        raise faults.Fault(Reason.INIT_ERROR, "host_cooling_down", message)
    if not sandbox.rules.is_exception(url):
        await sandbox.take_place(host_of(url))
    await sandbox.open_stage()
    refusal = await sandbox.rules.visit(url)  # robots.txt is read through the way out that the stage opened
    if refusal is not None:
        raise _refused(refusal)
    for attempt in range(1, config.start_attempts + 1):
        last = attempt == config.start_attempts
        try:
            if last and attempt > 1:
                await sandbox.open_stage()
            return await _try(sandbox, url)
        except Exception as error:
            if last or not _may_differ(error) or not sandbox.engine.alive:
                raise
            _log.info("start page, try %d of %d: %s", attempt, config.start_attempts, error)
            pause = config.start_backoff_s * 2 ** (attempt - 1)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # siblings of a group do not come back together
    raise AssertionError("unreachable")


async def _try(sandbox: Sandbox, url: str) -> Settled:
    stage, actor, config = sandbox.current_stage(), sandbox.actor, sandbox.config
    async with stage.camera.running():
        tab = stage.active
        tab.begin()
        stage.begin_step()
        sandbox.navigations += 1
        failed = await actor.navigate(tab, url, config.deadlines.navigation_s)
        if failed:
            why = sandbox.rules.why(url)
            if why is not None:
                raise _refused(why)
            raise faults.NavigationFailed(url, failed if failed.startswith("net::") else _named(failed))
        settled = await settle(tab, config.settle, grace_s=0.0)
        if stage.hostile:
            raise faults.Fault(Reason.ENVIRONMENT_ERROR, "page_hostile", stage.hostile)
        if settled.reason == "crashed":
            raise faults.Fault(Reason.ENVIRONMENT_ERROR, "page_crash", f"{url} crashed its renderer")
        if settled.frozen:
            await sandbox.care.tend(tab, [])
        # Pages may open another tab or replace themselves while loading; the start page is where the policy begins.
        why = sandbox.rules.unreachable(tab.document)
        if why is not None:
            raise _refused(why)
        if tab.document.error:
            raise faults.NavigationFailed(url, tab.document.error)
        status = tab.document.status or 200
        if status >= 500:
            raise faults.Fault(Reason.ENVIRONMENT_ERROR, "http_5xx", f"{url} answered {status}")
        return settled


def _refused(why: Refusal | Failure) -> faults.Fault:
    """What the way out says, as a fault. A refused start page is the operator's business, not the policy's."""
    if isinstance(why, Failure):
        return faults.Fault(Reason.ENVIRONMENT_ERROR, why.detail, why.message)
    owner = Owner.OPERATOR if Owner.OPERATOR in DETAILS[why.reason][why.detail][0] else None
    return faults.Fault(why.reason, why.detail, why.message, owner=owner)


def _named(phrase: str) -> str:
    """Chromium's name for what `Actor.navigate` tells in words."""
    if "no answer" in phrase:
        return "net::ERR_TIMED_OUT"
    return "net::ERR_ABORTED"


def _may_differ(error: Exception) -> bool:
    if isinstance(error, faults.NavigationFailed):
        return faults.navigation_detail(error.error) not in _FINAL
    if not isinstance(error, faults.Fault):
        return True
    return error.detail not in _FINAL and error.reason is not Reason.POLICY_BLOCK


def host_of(url: str) -> str:
    """Host of a web address, lower case."""
    return (urlsplit(url).hostname or "").lower()
