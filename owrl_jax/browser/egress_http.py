"""Reading HTTP/1.1 heads strictly enough that two parties cannot read them differently.

The egress proxy forwards **one request per connection** and says `Connection: close` to both sides, so neither side can
hide a second message behind the first. What remains is to refuse every request whose framing or target could be read in
two ways: bare line feeds, folded lines, spaces around names, several hosts or lengths, a transfer encoding.

Responses are read leniently in form (bare line feeds happen) but never carry hop-by-hop headers or our own marker on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re

from owrl_jax.browser.addresses import BadHost, host_text, parse_host

Headers = list[tuple[str, str]]

MARKER = "X-Owrl-Egress"  # on answers of the proxy itself: "<gate's nonce> <verdict> <detail>"
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
    *("te", "trailer", "upgrade", "expect", "http2-settings"),
}
_BAD_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class BadMessage(Exception):
    """A head that is refused; `status` is what to answer a client."""

    def __init__(self, why: str, status: int = 400):
        super().__init__(why)
        self.status = status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One request to the proxy. `path` is empty for CONNECT; `length` is the body's size in bytes."""

    method: str
    host: str
    port: int
    path: str
    length: int
    headers: Headers

    def header(self, name: str) -> str | None:
        """The only value of a header, None if absent."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def forwarded(self) -> bytes:
        """The head to send upstream, in origin form."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == 80 else f":{self.port}"
        lines = [f"{self.method} {self.path} HTTP/1.1", f"Host: {host}{port}", "Connection: close"]
        lines += [f"{k}: {v}" for k, v in end_to_end(self.headers) if k.lower() != "host"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
    """The head of one response."""

    status: int
    phrase: str
    headers: Headers

    def header(self, name: str) -> str | None:
        """The first value of a header, None if absent."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def forwarded(self) -> bytes:
        """The head to send to the browser; an interim (1xx) one carries no `Connection`."""
        lines = [f"HTTP/1.1 {self.status} {self.phrase}".rstrip()]
        lines += [f"{k}: {v}" for k, v in end_to_end(self.headers) if k.lower() != MARKER.lower()]
        lines += ["Connection: close"] if self.status >= 200 else []
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def end_to_end(headers: Headers) -> Headers:
    """Without the headers that concern one connection only, and those that `Connection` names."""
    named = {t.strip().lower() for k, v in headers if k.lower() == "connection" for t in v.split(",")}
    # Framing headers are never dropped on a peer's word: that would change where the message ends.
    drop = _HOP_BY_HOP | (named - {"content-length", "transfer-encoding", "host"})
    return [(k, v) for k, v in headers if k.lower() not in drop]


async def read_head(
    reader: asyncio.StreamReader, limit: int, *, strict: bool, first: bytes = b""
) -> tuple[bytes, bytes]:
    """(head with its empty line, bytes already read beyond it); `first` was read before and stands in front.

    Raises:
      EOFError: the peer closed before sending a byte.
      BadMessage: closed within the head, or the head is over `limit` bytes.
    """
    data = b""
    chunk = first
    pattern = re.compile(rb"\r\n\r\n" if strict else rb"\r?\n\r?\n")
    while True:
        chunk = chunk or await reader.read(16384)
        if not chunk:
            if not data:
                raise EOFError
            raise BadMessage("closed within the head")
        start = max(len(data) - 3, 0)
        data += chunk
        chunk = b""
        match = pattern.search(data, start)
        if match:
            if match.end() > limit:
                break
            return data[: match.end()], data[match.end() :]
        if len(data) > limit:
            break
    raise BadMessage(f"head over {limit} bytes", 431)


def parse_request(head: bytes, *, max_body: int) -> Request:
    """The request in `head`.

    Raises:
      BadMessage: for anything that could be read in two ways, and for what a browser never sends to a proxy.
    """
    lines = _lines(head, strict=True)
    parts = lines[0].split(" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadMessage("bad request line")
    method, target, _ = parts
    if not re.fullmatch(r"[\x21-\x7e]+", target):
        raise BadMessage("bad request target")
    headers = _headers(lines[1:], strict=True)
    for name in ("host", "content-length", "transfer-encoding", "proxy-authorization"):
        if sum(k.lower() == name for k, _ in headers) > 1:
            raise BadMessage(f"several {name} headers")
    if any(k.lower() == "transfer-encoding" for k, _ in headers):
        raise BadMessage("request bodies need a content-length", 501)
    length_text = next((v for k, v in headers if k.lower() == "content-length"), "0")
    if not re.fullmatch(r"[0-9]{1,15}", length_text):
        raise BadMessage("bad content-length")
    if int(length_text) > max_body:
        raise BadMessage(f"request body over {max_body} bytes", 413)
    if method == "CONNECT":
        if int(length_text):
            raise BadMessage("CONNECT with a body")
        host, port = _authority(target, None)
        return Request(method=method, host=host, port=port, path="", length=0, headers=headers)
    match = re.fullmatch(r"http://([^/?#]+)(/[^#]*|\?[^#]*)?", target, re.IGNORECASE)
    if match is None:
        raise BadMessage("a proxy is asked with an absolute http:// URL or CONNECT")
    host, port = _authority(match.group(1), 80)
    path = match.group(2) or "/"
    path = path if path.startswith("/") else "/" + path
    return Request(method=method, host=host, port=port, path=path, length=int(length_text), headers=headers)


def parse_response(head: bytes) -> Response:
    """The response in `head`.

    Raises:
      BadMessage: if it is none.
    """
    lines = _lines(head, strict=False)
    match = re.fullmatch(r"HTTP/1\.[01] ([1-9][0-9]{2})(?: (.*))?", lines[0])
    if match is None:
        raise BadMessage("no HTTP/1.1 status line", 502)
    phrase = re.sub(r"[^\x20-\x7e]", "", match.group(2) or "")
    return Response(status=int(match.group(1)), phrase=phrase, headers=_headers(lines[1:], strict=False))


def _authority(text: str, default_port: int | None) -> tuple[str, int]:
    """Canonical host and port of `host[:port]`; user info is refused."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@]+)(?::([0-9]{1,5}))?", text)
    if match is None or (match.group(2) is None and default_port is None):
        raise BadMessage("bad host or port in the request target")
    try:
        host = host_text(parse_host(match.group(1)))
    except BadHost as error:
        raise BadMessage("bad host in the request target") from error
    port = int(match.group(2)) if match.group(2) else default_port
    if port is None or not 0 < port < 65536:
        raise BadMessage("bad port in the request target")
    return host, port


def _lines(head: bytes, *, strict: bool) -> list[str]:
    text = head.decode("latin-1")
    if strict:
        lines = text[: -len("\r\n\r\n")].split("\r\n")
        if any("\n" in line or "\r" in line for line in lines):
            raise BadMessage("bare line end in the head")
        return lines
    return re.split(r"\r?\n", text.rstrip("\r\n"))


def _headers(lines: list[str], *, strict: bool) -> Headers:
    headers: Headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        value = value.strip(" \t")
        if not colon or not _TOKEN.fullmatch(name) or _BAD_VALUE.search(value):
            if strict:
                raise BadMessage("bad header line")
            continue  # a browser skips such a line too
        headers.append((name, value))
    return headers
