"""A small GET for the sandbox itself (robots.txt, downloads of a known URL) that obeys an episode's egress rules.

It uses the same `reach.Reach` and policy as the proxy, so there is no second way out. HTTP/1.1, no cookies, no
decompression, at most five redirects, each checked again. Not a browser: nothing here sees pages.
"""

from __future__ import annotations

import asyncio
import functools
import re
import ssl
from urllib.parse import urljoin

from owrl_jax.browser.addresses import host_text
from owrl_jax.browser.egress_http import BadMessage, parse_response, read_head
from owrl_jax.browser.policy import UrlPolicy, split_url
from owrl_jax.browser.reach import Reach, Refused, Unreachable

_REDIRECTS = (301, 302, 303, 307, 308)


class FetchError(OSError):
    """The resource could not be had: refused by policy, unreachable, or not HTTP."""


async def fetch_text(
    url: str,
    /,
    *,
    reach: Reach,
    policy: UrlPolicy,
    max_bytes: int,
    timeout_s: float = 10.0,
    user_agent: str = "owrl",
    tls: ssl.SSLContext | None = None,
) -> tuple[int, str]:
    """(status, text of at most `max_bytes`) of `url` after redirects; a sixth redirect is returned as it is.

    Raises:
      FetchError: with the reason.
    """
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(6):
                status, location, body = await _get(url, reach, policy, max_bytes, user_agent, tls)
                if status not in _REDIRECTS or not location:
                    break
                url = urljoin(url, location)
    except TimeoutError:
        raise FetchError(f"no answer within {timeout_s:g} s") from None
    except (Refused, Unreachable, BadMessage, EOFError) as error:
        raise FetchError(str(error) or "the connection was closed without an answer") from error
    return status, body.decode("utf-8", "replace")


async def _get(
    url: str, reach: Reach, policy: UrlPolicy, max_bytes: int, user_agent: str, tls: ssl.SSLContext | None
) -> tuple[int, str | None, bytes]:
    refusal = policy.check(url)
    if refusal is not None:
        raise Refused(refusal)
    scheme, host, port = split_url(url)
    assert host is not None and port is not None  # `check` has seen both
    name = host_text(host)
    reader, writer, _ = await reach.connect(name, port, policy)
    try:
        if scheme == "https":
            await writer.start_tls(tls or _tls(), server_hostname=name)
        authority = (f"[{name}]" if ":" in name else name) + ("" if port in (80, 443) else f":{port}")
        tail = url.split("//", 1)[1]
        cut = min((tail.find(c) for c in "/?" if c in tail), default=-1)
        path = "/" if cut < 0 else tail[cut:].partition("#")[0]
        path = path if path.startswith("/") else "/" + path
        if not path.isascii() or not path.isprintable() or " " in path:
            raise BadMessage("the path of the URL is not plain ASCII")
        lines = [f"GET {path} HTTP/1.1", f"Host: {authority}", f"User-Agent: {user_agent}"]
        lines += ["Accept: text/plain, */*;q=0.5", "Accept-Encoding: identity", "Connection: close"]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
        head, rest = await read_head(reader, 64 * 1024, strict=False)
        response = parse_response(head)
        if "chunked" in (response.header("transfer-encoding") or "").lower():
            body = await _chunked(reader, rest, max_bytes)
        else:
            length = response.header("content-length") or ""
            limit = min(int(length), max_bytes) if length.isdigit() else max_bytes
            body = await _until(reader, rest, limit)
        return response.status, response.header("location"), body
    finally:
        writer.transport.abort()


async def _until(reader: asyncio.StreamReader, data: bytes, limit: int) -> bytes:
    """Reads on until `limit` bytes or the end."""
    while len(data) < limit:
        chunk = await reader.read(limit - len(data))
        if not chunk:
            break
        data += chunk
    return data[:limit]


async def _chunked(reader: asyncio.StreamReader, data: bytes, max_bytes: int) -> bytes:
    """The body of a chunked message, at most `max_bytes` of it."""
    body = b""
    while len(body) < max_bytes:
        while b"\r\n" not in data:
            more = await reader.read(16384)
            if not more:
                return body
            data += more
            if len(data) > 2 * 65536:
                raise BadMessage("a chunk without a size")
        line, data = data.split(b"\r\n", 1)
        size_text = line.split(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", size_text):
            raise BadMessage("a chunk without a size")
        size = int(size_text, 16)
        wanted = min(size, max_bytes - len(body))
        if len(data) < wanted + 2:
            data = await _until(reader, data, wanted + 2)
        body, data = body + data[:wanted], data[wanted + 2 :]
        if size == 0 or wanted < size or (not data and reader.at_eof()):
            break
    return body


@functools.lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
