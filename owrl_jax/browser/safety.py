"""What a sandbox needs to know about safety, in one record: safe by default, loosened explicitly.

    safety = Safety()                                         # public web, all guards on, robots.txt honoured
    safety = Safety.for_local_worlds({("127.0.0.1", 8123)})   # plus one local site, where buying may be the task

`Safety` only carries settings and the shared objects; the rules live in `policy` (URLs and addresses), `egress` (the
proxy that enforces them), `guards` (purchase, login, account, posting), `hosts` (rate, concurrency, cool-down, health),
`robots`, `blocks` (walls), `redact` and `audit`.

The seam, in call order of an episode:

    async with EgressProxy(governor=safety.hosts, on_event=safety.on_event) as proxy:  # one per process
        launch args: [*EGRESS_FLAGS, *proxy.launch_flags()]               # fails closed outside a gate
        gate = proxy.open(episode="e1", policy=safety.policy)             # one per episode
        context = await browser.new_context(proxy=gate.playwright_proxy(), service_workers="block")
        await gate.sign_in(context, page)                                 # once; leaves no history entry
        async with safety.hosts.visit(host):                              # a place on the site, for the whole episode
            await safety.check_visit(url, gate) -> Refusal | None         # scheme, address, lists, robots.txt
            await safety.hosts.pace(host)                                 # before each navigation we start
            safety.guards.check_click(e) / check_key(key, e) / check_write(e, text) -> Refusal | None
            gate.refusal_for(url), gate.failure_for(url)                  # why a navigation or tunnel failed
            blocks.classify(PageFacts.read(...)) -> Wall | None
            safety.hosts.report(host, detail=..., status=..., retry_after=...)
        await gate.close(); safety.finish("e1")
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from owrl_jax.browser.audit import AuditLog
from owrl_jax.browser.egress_gate import EgressEvent, EgressGate
from owrl_jax.browser.guards import Guards
from owrl_jax.browser.hosts import HostGovernor
from owrl_jax.browser.policy import Refusal, UrlPolicy, url_host_port
from owrl_jax.browser.robots import Robots


@functools.lru_cache(maxsize=1)
def process_governor() -> HostGovernor:
    """The host manners of this process: shared, since a host does not care which sandbox visits it."""
    return HostGovernor()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Safety:
    """All safety settings of a sandbox. The defaults are the safe ones.

    Attributes:
      policy: which URLs and addresses may be visited.
      guards: what must not be done there.
      robots: how robots.txt is treated; applies to visits that the agent or a task chose.
      hosts: rate, concurrency, cool-down and health per registrable domain; one per process unless given.
      audit: where visited hosts are written; None keeps no log.
    """

    policy: UrlPolicy = dataclasses.field(default_factory=UrlPolicy)
    guards: Guards = dataclasses.field(default_factory=Guards)
    robots: Robots = dataclasses.field(default_factory=Robots)
    hosts: HostGovernor = dataclasses.field(default_factory=process_governor)
    audit: AuditLog | None = None

    @classmethod
    def for_local_worlds(cls, exceptions: Iterable[tuple[str, int]], **settings) -> Safety:
        """Safe towards the web, and without rules towards the (host, port) pairs in `exceptions`.

        `settings` are other fields; a given `policy` or `guards` is taken as the base.
        """
        pairs = frozenset(exceptions)
        policy, guards = settings.pop("policy", UrlPolicy()), settings.pop("guards", Guards())
        policy = dataclasses.replace(policy, exceptions=policy.exceptions | pairs)
        guards = dataclasses.replace(guards, exceptions=guards.exceptions | pairs)
        return cls(policy=policy, guards=guards, **settings)

    async def check_visit(self, url: str, gate: EgressGate) -> Refusal | None:
        """Whether the agent or a task may navigate to `url`: its text, then robots.txt (local worlds have none)."""
        refusal = self.policy.check(url)
        place = url_host_port(url)
        if refusal is not None or place is None or self.policy.is_exception(*place):
            return refusal
        return await self.robots.check(url, gate.fetch_text)

    def on_event(self, event: EgressEvent) -> None:
        """Takes an event of the egress proxy to the audit log, if there is one."""
        if self.audit is not None:
            self.audit.on_event(event)

    def finish(self, episode: str) -> None:
        """Writes the audit totals of an episode."""
        if self.audit is not None:
            self.audit.finish(episode)


__all__ = ["Guards", "Refusal", "Safety", "UrlPolicy", "process_governor"]
