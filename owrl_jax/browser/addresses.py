"""Which hosts and IP addresses belong to the public web, however they are spelled.

`parse_host` reads the host of a URL the way a browser does (WHATWG URL standard, host parsing), so that `127.1`,
`0x7f000001`, `017700000001`, `%31%32%37.0.0.1`, `１２７。０。０。１` and `[::ffff:7f00:1]` are seen as what they are.
`private_reason` says why an address is not part of the public internet; the tables follow the IANA special-purpose
registries (RFC 6890 and successors) and name the cloud metadata services.

Invariant: an address that this module cannot place is refused, never let through. Not here: which names and addresses a
particular run may visit; that is `policy.UrlPolicy`.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from urllib.parse import unquote_to_bytes

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_V4 = [
    ("169.254.169.254/32", "a cloud metadata address"),
    ("168.63.129.16/32", "a cloud metadata address"),  # Azure's host agent, inside otherwise public space
    ("100.100.100.200/32", "a cloud metadata address"),
    ("192.0.0.192/32", "a cloud metadata address"),
    ("0.0.0.0/8", "an address of this host"),
    ("10.0.0.0/8", "a private network address"),
    ("100.64.0.0/10", "a carrier network address"),
    ("127.0.0.0/8", "a loopback address"),
    ("169.254.0.0/16", "a link-local address"),
    ("172.16.0.0/12", "a private network address"),
    ("192.0.0.0/24", "a reserved address"),
    ("192.0.2.0/24", "a reserved address"),
    ("192.88.99.0/24", "a reserved address"),
    ("192.168.0.0/16", "a private network address"),
    ("198.18.0.0/15", "a reserved address"),
    ("198.51.100.0/24", "a reserved address"),
    ("203.0.113.0/24", "a reserved address"),
    ("224.0.0.0/4", "a multicast address"),
    ("240.0.0.0/4", "a reserved address"),
]
# Only 2000::/3 is global unicast today; these are the holes in it. Everything outside is refused without a table.
_V6_HOLES = [
    ("2001::/23", "a reserved address"),  # IETF protocol assignments, Teredo (2001::/32) among them
    ("2001:db8::/32", "a reserved address"),
    ("2002::/16", "a 6to4 address"),
    ("3fff::/20", "a reserved address"),
]
_V6_NAMED = [
    ("fd00:ec2::/32", "a cloud metadata address"),
    ("fd20:ce::/32", "a cloud metadata address"),
    ("::/128", "an address of this host"),
    ("::1/128", "a loopback address"),
    ("fc00::/7", "a private network address"),
    ("fe80::/10", "a link-local address"),
    ("ff00::/8", "a multicast address"),
]
_V4_TABLE = [(ipaddress.IPv4Network(net), why) for net, why in _V4]
_V6_TABLE = [(ipaddress.IPv6Network(net), why) for net, why in _V6_NAMED + _V6_HOLES]
_V6_GLOBAL = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_METADATA = "a cloud metadata address"

# Names that mean this machine or its network on every host (RFC 6761, 6762, 8375) or a metadata service.
_LOCAL_SUFFIXES = ("localhost", "local", "internal", "home.arpa", "localdomain", "onion")

_FORBIDDEN = re.compile(r"[\x00-\x20#/<>?@\\^|%:\[\]\x7f\"{}`*]")


class BadHost(ValueError):
    """The host of a URL cannot be read; a browser would refuse it too."""


def private_reason(address: IPAddress | str) -> str | None:
    """Why `address` is not on the public internet ("a loopback address"), or None if it is.

    IPv4 inside IPv6 (mapped, NAT64) is judged by the inner address; 6to4, Teredo and IPv4-compatible forms are refused.
    Raises:
      ValueError: if a string is no IP address.
    """
    ip = ipaddress.ip_address(address) if isinstance(address, str) else address
    if isinstance(ip, ipaddress.IPv4Address):
        return next((why for net, why in _V4_TABLE if ip in net), None)
    if ip.ipv4_mapped is not None:
        return private_reason(ip.ipv4_mapped)
    if ip in _NAT64:
        return private_reason(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    if ip.scope_id is not None:
        return "a link-local address"
    for net, why in _V6_TABLE:
        if ip in net:
            return why
    return None if ip in _V6_GLOBAL else "a reserved address"


def is_metadata_or_link_local(address: IPAddress) -> bool:
    """Whether it is a metadata service or link-local: never reachable by an exception that names a host."""
    return private_reason(address) in (_METADATA, "a link-local address")


def is_local_name(host: str) -> bool:
    """Whether a (parsed) name means this machine or its network by convention, wherever it may resolve to."""
    return any(host == suffix or host.endswith("." + suffix) for suffix in _LOCAL_SUFFIXES)


def parse_host(host: str) -> str | IPAddress:
    """What a browser makes of the host part of an http(s) URL.

    Percent-escapes are decoded, compatibility forms folded (full-width digits, circled digits, ideographic full stops),
    names lower-cased and put in their ASCII form without a trailing dot, and every numeric form becomes an IP address.

    Args:
      host: as written, IPv6 in brackets.
    Returns:
      a name in ASCII, or an address.
    Raises:
      BadHost: if no browser would accept it.
    """
    if host.startswith("["):
        if not host.endswith("]"):
            raise BadHost(f"unclosed bracket in host {host!r}")
        try:  # a zone id ("%eth0") is not allowed in URLs
            if "%" in host:
                raise ValueError
            return ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise BadHost(f"{host!r} is not an IPv6 address") from None
    try:
        text = unquote_to_bytes(host).decode("utf-8")
    except UnicodeError:
        raise BadHost(f"host {host!r} is not UTF-8") from None
    text = (
        unicodedata.normalize("NFKC", text).replace("\u3002", ".").replace("\u00ad", "").replace("\u200b", "").lower()
    )
    text = unicodedata.normalize("NFKC", text)
    if not text.isascii():
        text = ".".join(_ascii_label(label) for label in text.split("."))
    if not text or len(text) > 255 or _FORBIDDEN.search(text):
        raise BadHost(f"host {host!r} is not a domain name or an address")
    labels = text.split(".")
    if labels[-1] == "" and len(labels) > 1:
        labels.pop()
    if _is_number(labels[-1]):
        return _parse_ipv4(labels, host)
    if "" in labels or any(len(label) > 63 for label in labels):
        raise BadHost(f"host {host!r} has an empty or too long label")
    return ".".join(labels)


def host_text(host: str | IPAddress) -> str:
    """The canonical text of a parsed host, IPv6 without brackets."""
    return str(host)


def _ascii_label(label: str) -> str:
    """Punycode of an already folded label (UTS 46, non-transitional: ß stays ß, unlike in Python's own codec)."""
    return label if label.isascii() else "xn--" + label.encode("punycode").decode("ascii")


def _is_number(label: str) -> bool:
    return bool(re.fullmatch(r"[0-9]+|0x[0-9a-f]*", label))


def _parse_ipv4(labels: list[str], host: str) -> ipaddress.IPv4Address:
    """The WHATWG IPv4 parser: one to four parts, decimal, octal (0…) or hex (0x…), the last one filling the rest."""
    if len(labels) > 4 or not all(_is_number(label) for label in labels):
        raise BadHost(f"{host!r} looks like an IPv4 address and is none")
    try:
        numbers = [_parse_number(label) for label in labels]
    except ValueError:
        raise BadHost(f"{host!r} looks like an IPv4 address and is none") from None
    if any(n > 255 for n in numbers[:-1]) or numbers[-1] >= 256 ** (5 - len(numbers)):
        raise BadHost(f"{host!r} is out of range for an IPv4 address")
    value = numbers[-1] + sum(n << (8 * (3 - i)) for i, n in enumerate(numbers[:-1]))
    return ipaddress.IPv4Address(value)


def _parse_number(label: str) -> int:
    if label.startswith("0x"):
        return int(label[2:] or "0", 16)
    if len(label) > 1 and label.startswith("0"):
        return int(label, 8)
    return int(label)
