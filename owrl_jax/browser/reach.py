"""From a host name to a connection that the policy has agreed to.

`Reach.connect` resolves a name itself, asks the policy about every address the name has, and connects to one of exactly
those addresses. There is no second look-up between check and use, so a name that changes its answer (DNS rebinding)
gains nothing. If a single address of a name is refused, the name is refused: public sites have no private addresses.

Not here: HTTP (`egress_http`), accounting and access control (`egress`).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from owrl_jax.browser.addresses import IPAddress, host_text
from owrl_jax.browser.policy import Refusal, UrlPolicy
from owrl_jax.outcome import DETAILS, Reason

Resolve = Callable[[str], Awaitable[list[str]]]
Dial = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

BUFFER = 64 * 1024  # bytes an asyncio stream may hold before the sender is told to wait (twice that, by its rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """An upstream that could not be reached or answered badly.

    Attributes:
      detail: of `environment_error`: nav_dns, nav_refused, nav_timeout, nav_aborted, bad_response or page_hostile.
      host, port: what was asked for.
      message: one line for people.
    """

    detail: str
    host: str
    port: int
    message: str

    def __post_init__(self) -> None:
        if self.detail not in DETAILS[Reason.ENVIRONMENT_ERROR]:
            raise ValueError(f"failure detail {self.detail!r} is not one of environment_error")


class Refused(Exception):
    """The policy refused a host or an address."""

    def __init__(self, refusal: Refusal):
        super().__init__(refusal.message)
        self.refusal = refusal


class Unreachable(Exception):
    """The upstream could not be reached."""

    def __init__(self, failure: Failure):
        super().__init__(failure.message)
        self.failure = failure


class SystemResolver:
    """The host's resolver, in threads of its own so that a hanging name server cannot starve anything else."""

    def __init__(self, *, threads: int = 16):
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="owrl-dns")

    async def __call__(self, host: str) -> list[str]:
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(
            self._pool, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        )
        return [str(row[4][0]) for row in rows]

    def close(self) -> None:
        """Gives the threads up without waiting for a look-up that hangs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def dial(ip: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TCP connection to a literal address."""
    return await asyncio.open_connection(ip, port, limit=BUFFER)


class Reach:
    """Resolves, checks and connects.

    Args:
      resolve: name -> addresses, raising OSError (`socket.gaierror`) where there are none.
      dial: (address, port) -> streams; only ever called with an address that the policy has passed.
      dns_ttl_s: how long an answer is reused (errors for a sixth of it); 0 asks every time.
      dns_timeout_s, connect_timeout_s: limits of the two phases.
      stagger_s: head start of each address over the next (RFC 8305, "happy eyeballs").
    """

    def __init__(
        self,
        *,
        resolve: Resolve | None = None,
        dial: Dial = dial,
        dns_ttl_s: float = 30.0,
        dns_timeout_s: float = 5.0,
        connect_timeout_s: float = 10.0,
        stagger_s: float = 0.3,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._own_resolver = SystemResolver() if resolve is None else None
        self._resolve = resolve or self._own_resolver
        self._dial = dial
        self._dns_ttl_s, self._dns_timeout_s = dns_ttl_s, dns_timeout_s
        self._connect_timeout_s, self._stagger_s = connect_timeout_s, stagger_s
        self._clock = clock
        self._cache: collections.OrderedDict[str, tuple[float, list[IPAddress] | OSError]] = collections.OrderedDict()

    async def connect(
        self, host: str, port: int, policy: UrlPolicy
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, IPAddress]:
        """A connection to `host` (canonical name or address) and the address it leads to.

        Raises:
          Refused: by the policy, before any packet to the host.
          Unreachable: no address, nobody listening, or no answer in time.
        """
        refusal = policy.check_host(host, port)
        if refusal is not None:
            raise Refused(refusal)
        addresses = await self._addresses(host, port)
        for address in addresses:
            refusal = policy.check_address(address, port, host)
            if refusal is not None:
                raise Refused(refusal)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._race(addresses, port)
        except TimeoutError:
            raise self._unreachable(
                "nav_timeout", host, port, f"did not answer in {self._connect_timeout_s:g} s"
            ) from None
        except OSError as error:
            raise self._unreachable("nav_refused", host, port, error.strerror or str(error)) from error

    def close(self) -> None:
        """Gives up the resolver's threads."""
        if self._own_resolver is not None:
            self._own_resolver.close()

    async def _addresses(self, host: str, port: int) -> list[IPAddress]:
        try:
            return [ipaddress.ip_address(host)]
        except ValueError:
            pass  # a name
        now = self._clock()
        found: list[IPAddress] | OSError
        if host in self._cache and self._cache[host][0] > now:
            found = self._cache[host][1]
        else:
            found = await self._look_up(host, port)
            ttl = self._dns_ttl_s / 6 if isinstance(found, OSError) else self._dns_ttl_s
            self._cache[host] = (now + ttl, found)
            self._cache.move_to_end(host)
            while len(self._cache) > 4096:
                self._cache.popitem(last=False)
        if isinstance(found, OSError):
            raise self._unreachable("nav_dns", host, port, "has no address")
        return found

    async def _look_up(self, host: str, port: int) -> list[IPAddress] | OSError:
        assert self._resolve is not None
        if host == "localhost" or host.endswith(".localhost"):  # RFC 6761: loopback, whatever a resolver would say
            return [ipaddress.IPv4Address("127.0.0.1")]
        try:
            async with asyncio.timeout(self._dns_timeout_s):
                texts = await self._resolve(host)
        except TimeoutError:
            raise self._unreachable("nav_timeout", host, port, "could not be looked up in time") from None
        except (OSError, UnicodeError) as error:  # UnicodeError: getaddrinfo on an impossible label
            return error if isinstance(error, OSError) else OSError(str(error))
        addresses = list(dict.fromkeys(ipaddress.ip_address(text) for text in texts))
        # Two families take turns, IPv4 first: a host without IPv6 loses nothing, one with a black hole loses stagger_s.
        v4 = [a for a in addresses if a.version == 4]
        v6 = [a for a in addresses if a.version == 6]
        order = [a for pair in zip(v4, v6, strict=False) for a in pair]
        order += [a for a in v4 + v6 if a not in order]
        return order[:8] if order else OSError("empty answer")

    async def _race(
        self, addresses: list[IPAddress], port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, IPAddress]:
        """The first connection that stands; the losers are closed."""
        waiting = list(addresses)
        running: dict[asyncio.Task, IPAddress] = {}
        error: OSError = OSError("no address")
        try:
            while waiting or running:
                if waiting:
                    address = waiting.pop(0)
                    running[asyncio.ensure_future(self._dial(host_text(address), port))] = address
                done, _ = await asyncio.wait(
                    running, timeout=self._stagger_s if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    address = running.pop(task)
                    failure = task.exception()
                    if failure is None:
                        reader, writer = task.result()
                        return reader, writer, address
                    if not isinstance(failure, OSError):
                        raise failure
                    error = failure
            raise error
        finally:
            for task in running:
                task.cancel()
                task.add_done_callback(_close_loser)

    @staticmethod
    def _unreachable(detail: str, host: str, port: int, why: str) -> Unreachable:
        return Unreachable(Failure(detail=detail, host=host, port=port, message=f"{host}:{port} {why}"))


def _close_loser(task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[1].transport.abort()
