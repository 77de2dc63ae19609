"""Which URLs and addresses an episode may visit, and how a refusal is told.

`UrlPolicy` is asked twice. `check(url)` reads the text of a URL before it is opened: scheme, spelling of the host,
deny and allow lists; its answer is written for the agent. `check_address` is asked by the egress proxy for each address
that a name resolved to, before a connection is made, and it is the one that counts: a name that passes `check` may
still resolve to this machine.

Not here: what an element does when clicked (`guards`), and whether a host wants to be visited now (`hosts`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

from owrl_jax.agent.page_text import one_line
from owrl_jax.browser.addresses import (
    BadHost,
    IPAddress,
    host_text,
    is_local_name,
    is_metadata_or_link_local,
    parse_host,
    private_reason,
)
from owrl_jax.outcome import DETAILS, Outcome, Owner, Phase, Reason

DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_SHOWN = 80  # characters of a URL or host that a message may carry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A safety rule said no.

    Attributes:
      detail: one of `outcome.DETAILS[reason]`.
      message: one line for the agent: what was refused and why.
      host: canonical host, empty where there is none.
      reason: `policy_block`, or `blocked` for robots.txt.
    """

    detail: str
    message: str
    host: str = ""
    reason: Reason = Reason.POLICY_BLOCK

    def __post_init__(self) -> None:
        if self.detail not in DETAILS[self.reason]:
            raise ValueError(f"refusal detail {self.detail!r} does not belong to {self.reason.value!r}")
        if "\n" in self.message or "\r" in self.message:
            raise ValueError(f"a refusal's message is one line, got {self.message!r}")

    def outcome(self, *, phase: Phase = Phase.STEP, owner: Owner | None = None) -> Outcome:
        """The ending, for a caller that ends the episode over it. `owner` defaults to the policy (site for robots)."""
        owners = DETAILS[self.reason][self.detail][0]
        default = Owner.POLICY if Owner.POLICY in owners else Owner.SITE
        return Outcome(
            reason=self.reason, detail=self.detail, owner=owner or default, phase=phase, message=self.message
        )


@functools.lru_cache(maxsize=1)
def _suffixes():
    try:
        from publicsuffixlist import PublicSuffixList
    except ImportError as error:
        raise ImportError("the browser sandbox needs publicsuffixlist: pip install 'owrl-jax[host]'") from error
    return PublicSuffixList()


@functools.lru_cache(maxsize=4096)
def registrable_domain(host: str) -> str:
    """The domain one registers (public suffix plus one label): `shop.example.co.uk` -> `example.co.uk`.

    An IP address, a single label and a bare public suffix are their own registrable domain. The list is the one bundled
    with `publicsuffixlist`; nothing is downloaded.
    """
    try:
        parsed = parse_host(f"[{host}]" if ":" in host else host)
    except BadHost:
        return host.lower()
    if not isinstance(parsed, str):
        return host_text(parsed)
    return _suffixes().privatesuffix(parsed) or parsed


def split_url(url: str) -> tuple[str, str | IPAddress | None, int | None]:
    """(scheme, parsed host, port) of a URL as a browser reads it; host and port are None where the scheme has none.

    Raises:
      BadHost: if a browser would not accept it.
    """
    text = re.sub(r"[\t\n\r]", "", url).strip("".join(map(chr, range(0x21))))
    match = re.match(r"([A-Za-z][A-Za-z0-9+.\-]*):", text)
    if match is None:
        raise BadHost(f"{_shown(url)!r} has no scheme")
    scheme = match.group(1).lower()
    if scheme not in DEFAULT_PORTS:
        return scheme, None, None
    # Browsers take backslashes for slashes here, and any number of slashes before the host.
    rest = text[match.end() :].replace("\\", "/").lstrip("/")
    netloc = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    host, colon, port_text = netloc.rpartition(":")
    if not colon or "]" in port_text:
        host, port_text = netloc, ""
    if port_text and not re.fullmatch(r"[0-9]{1,10}", port_text):
        raise BadHost(f"{_shown(url)!r} has a bad port")
    port = int(port_text) if port_text else DEFAULT_PORTS[scheme]
    if port > 65535:
        raise BadHost(f"{_shown(url)!r} has a bad port")
    return scheme, parse_host(host), port


@dataclasses.dataclass(frozen=True, kw_only=True)
class UrlPolicy:
    """Where an episode may go. The default is the whole public web over http and https, and `about:blank`.

    Attributes:
      deny: domains that are never visited, each with all its subdomains (`example.com`, `ads.example.com`).
      allow: if given, the only domains that are visited, same form.
      exceptions: (host, port) pairs that are let through whatever the other rules say, for local worlds: a name, an IP
        address, or `*.name` for all its subdomains. An excepted *name* may resolve to a private address but never to a
        metadata or link-local one.
    Raises:
      ValueError: for an entry that is no host.
    """

    deny: frozenset[str] = frozenset()
    allow: frozenset[str] | None = None
    exceptions: frozenset[tuple[str, int]] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "deny", frozenset(_domain_entry(d) for d in self.deny))
        if self.allow is not None:
            object.__setattr__(self, "allow", frozenset(_domain_entry(d) for d in self.allow))
        object.__setattr__(self, "exceptions", frozenset(_exception_entry(e) for e in self.exceptions))

    def check(self, url: str) -> Refusal | None:
        """Whether the agent, or a page, may open `url`; None means yes. Decides by the text alone, resolves nothing."""
        if url.strip().lower() in ("about:blank", "about:blank#", "about:srcdoc"):
            return None
        try:
            scheme, host, port = split_url(url)
        except BadHost:
            return Refusal(
                detail="scheme", message=f"{_shown(url)} was not opened: it is not a valid http or https address."
            )
        if scheme not in ("http", "https") or host is None or port is None:
            why = f"only http and https pages may be visited, not {_shown(scheme)}:"
            return Refusal(detail="scheme", message=f"{_shown(url)} was not opened: {why}.")
        return self.check_host(host, port)

    def check_host(self, host: str | IPAddress, port: int) -> Refusal | None:
        """The same for a host (name or address, already parsed or as text) and a port."""
        if isinstance(host, str):
            try:
                host = parse_host(f"[{host}]" if ":" in host and not host.startswith("[") else host)
            except BadHost:
                return Refusal(detail="scheme", message=f"{_shown(host)} is not a valid host name.")
        name = host_text(host)
        if self.is_exception(name, port):
            return None
        if not isinstance(host, str):
            why = private_reason(host)
            if why is not None:
                return self._private(name, why)
        elif is_local_name(name):
            return self._private(name, "a name of this machine or its network")
        if _matches(name, self.deny):
            return Refusal(
                detail="deny_list", host=name, message=f"{_shown(name)} is on the list of sites not to visit."
            )
        if self.allow is not None and not _matches(name, self.allow):
            return Refusal(
                detail="deny_list",
                host=name,
                message=f"{_shown(name)} is not on the list of sites that may be visited.",
            )
        return None

    def check_address(self, ip: str | IPAddress, port: int, host: str) -> Refusal | None:
        """Whether a connection to `ip`:`port`, to which `host` has resolved, may be made. The proxy asks this."""
        name = host.lower().rstrip(".")
        address = parse_host(f"[{ip}]" if ":" in ip else ip) if isinstance(ip, str) else ip
        if isinstance(address, str):
            raise ValueError(f"check_address needs an IP address, got {ip!r}")
        why = private_reason(address)
        if why is None:
            return None
        if self.is_exception(name, port) and (name == host_text(address) or not is_metadata_or_link_local(address)):
            return None
        return self._private(name, f"{why}, {address}" if name != str(address) else why)

    def is_exception(self, host: str, port: int) -> bool:
        """Whether `host`:`port` is one of the explicit exceptions (canonical text of the host)."""
        return is_excepted(host, port, self.exceptions)

    @staticmethod
    def _private(name: str, why: str) -> Refusal:
        return Refusal(
            detail="private_address",
            host=name,
            message=f"{_shown(name)} was not opened: it is {why}, and only the public web may be visited.",
        )


def is_excepted(host: str, port: int, exceptions: frozenset[tuple[str, int]]) -> bool:
    """Whether (host, port) is among `exceptions`, by itself or as a subdomain of a `*.name` entry."""
    if (host, port) in exceptions:
        return True
    parents = host.split(".")[1:] if exceptions else []
    return any(("*." + ".".join(parents[i:]), port) in exceptions for i in range(len(parents)))


def _matches(host: str, domains: Iterable[str]) -> bool:
    """Whether `host` is one of `domains` or below one of them."""
    labels = host.split(".")
    return any(".".join(labels[i:]) in domains for i in range(len(labels)))


def _domain_entry(text: str) -> str:
    """One entry of a list: a bare host; `www.` is dropped, since lists in the wild mix both forms."""
    try:
        host = host_text(parse_host(text.strip().removeprefix("*.")))
    except BadHost as error:
        raise ValueError(f"{text!r} is not a host for a deny or allow list: give names like example.com") from error
    return host.removeprefix("www.") if host.count(".") > 1 else host


def _exception_entry(entry: tuple[str, int]) -> tuple[str, int]:
    host, port = entry
    star = "*." if host.startswith("*.") else ""
    try:
        bare = host.removeprefix("*.")
        parsed = parse_host(f"[{bare}]" if ":" in bare and not bare.startswith("[") else bare)
    except BadHost as error:
        raise ValueError(f"{entry!r} is not a (host, port) exception, e.g. ('127.0.0.1', 8000)") from error
    if not (isinstance(port, int) and 0 < port < 65536):
        raise ValueError(f"{entry!r} is not a (host, port) exception: the port must be 1 to 65535")
    return star + host_text(parsed), port


def _shown(text: str) -> str:
    """Untrusted text as one short printable line; whole URLs lose user info, query and fragment."""
    text = re.split(r"[?#]", text, maxsplit=1)[0]
    return one_line(re.sub(r"//[^/@]*@", "//", text), _SHOWN)


def url_host_port(url: str) -> tuple[str, int] | None:
    """(canonical host, port) of an http(s)/ws(s) URL, or None if it has none or cannot be read."""
    try:
        _, host, port = split_url(url)
    except BadHost:
        return None
    return None if host is None or port is None else (host_text(host), port)
