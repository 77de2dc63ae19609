"""The proxy's reading of requests: what could be read in two ways is refused. The second reader is h11."""

from __future__ import annotations

import asyncio
import contextlib

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from owrl_jax.browser.egress_http import BadMessage, parse_request, parse_response, read_head

GET = "GET http://example.com/a?b HTTP/1.1\r\nHost: example.com\r\n"

REFUSED = {
    "two hosts": GET + "Host: other.example\r\n",
    "two lengths": "POST http://e.com/ HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n",
    "a list of lengths": "POST http://e.com/ HTTP/1.1\r\nContent-Length: 3, 3\r\n",
    "negative length": "POST http://e.com/ HTTP/1.1\r\nContent-Length: -1\r\n",
    "signed length": "POST http://e.com/ HTTP/1.1\r\nContent-Length: +3\r\n",
    "hexadecimal length": "POST http://e.com/ HTTP/1.1\r\nContent-Length: 0x3\r\n",
    "transfer encoding": "POST http://e.com/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n",
    "hidden transfer encoding": "POST http://e.com/ HTTP/1.1\r\nTransfer-Encoding : chunked\r\n",
    "too long": "POST http://e.com/ HTTP/1.1\r\nContent-Length: 999999999999\r\n",
    "folded line": GET + "X: a\r\n b: c\r\n",
    "space before the colon": GET + "X : a\r\n",
    "no colon": GET + "nonsense\r\n",
    "empty name": GET + ": a\r\n",
    "bare line feed": GET + "X: a\nY: b\r\n",
    "bare carriage return": GET + "X: a\rY: b\r\n",
    "NUL": GET + "X: a\0b\r\n",
    "origin form": "GET /a HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    "https in plain form": "GET https://example.com/ HTTP/1.1\r\n",
    "file": "GET file:///etc/passwd HTTP/1.1\r\n",
    "user info": "GET http://a@b.example/ HTTP/1.1\r\n",
    "user info in CONNECT": "CONNECT a@b.example:443 HTTP/1.1\r\n",
    "CONNECT without a port": "CONNECT example.com HTTP/1.1\r\n",
    "CONNECT to port 0": "CONNECT example.com:0 HTTP/1.1\r\n",
    "CONNECT to port 70000": "CONNECT example.com:70000 HTTP/1.1\r\n",
    "CONNECT with a body": "CONNECT example.com:443 HTTP/1.1\r\nContent-Length: 3\r\n",
    "CONNECT to a URL": "CONNECT http://example.com:443 HTTP/1.1\r\n",
    "zone id": "GET http://[fe80::1%25eth0]/ HTTP/1.1\r\n",
    "two ports": "GET http://example.com:80:81/ HTTP/1.1\r\n",
    "space in the target": "GET http://example.com/a b HTTP/1.1\r\n",
    "HTTP/2": "GET http://example.com/ HTTP/2.0\r\n",
    "no version": "GET http://example.com/\r\n",
    "broken address": "GET http://256.0.0.1/ HTTP/1.1\r\n",
    "two credentials": GET + "Proxy-Authorization: Basic a\r\nProxy-Authorization: Basic b\r\n",
}  # fmt: skip


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED.keys())
def test_ambiguous_requests_are_refused(head):
    with pytest.raises(BadMessage) as caught:
        parse_request((head + "\r\n").encode("latin-1"), max_body=1000)
    assert 400 <= caught.value.status < 600


def test_what_is_forwarded_is_what_was_read_and_nothing_of_the_hop():
    head = (
        "POST HTTP://Example.COM:8080?q=1 HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 5\r\nCookie: a=b\r\n"
        "Proxy-Authorization: Basic xyz\r\nProxy-Connection: keep-alive\r\n"
        "Connection: keep-alive, X-Drop, Content-Length\r\n"
        "X-Drop: 1\r\nUpgrade: websocket\r\nTE: trailers\r\nExpect: 100-continue\r\n\r\n"
    )
    request = parse_request(head.encode(), max_body=1000)
    assert (request.method, request.host, request.port, request.path) == ("POST", "example.com", 8080, "/?q=1")
    server = h11.Connection(h11.SERVER)
    server.receive_data(request.forwarded())
    event = server.next_event()
    assert isinstance(event, h11.Request)
    assert (event.method, event.target) == (b"POST", b"/?q=1")
    assert dict(event.headers) == {
        b"host": b"example.com:8080", b"connection": b"close", b"content-length": b"5", b"cookie": b"a=b",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("http://0x7f.1/", "127.0.0.1"),
        ("http://[::FFFF:127.0.0.1]/", "::ffff:7f00:1"),
        ("http://LOCALHOST./", "localhost"),
        ("http://%31%32%37.1/", "127.0.0.1"),
    ],
)
def test_hosts_are_made_canonical_before_anyone_judges_them(target, host):
    assert parse_request(f"GET {target} HTTP/1.1\r\n\r\n".encode(), max_body=0).host == host


_line = st.text(st.characters(codec="latin-1"), max_size=30)


@given(st.lists(_line, max_size=6), st.sampled_from(["GET http://e.com/ HTTP/1.1", "CONNECT e.com:443 HTTP/1.1", ""]))
def test_an_accepted_request_is_one_request_to_a_second_reader(lines, first):
    head = "\r\n".join(([first] if first else []) + lines) + "\r\n\r\n"
    try:
        request = parse_request(head.encode("latin-1"), max_body=10**6)
    except BadMessage:
        return
    if request.method == "CONNECT":
        return
    server = h11.Connection(h11.SERVER)
    server.receive_data(request.forwarded() + b"x" * request.length)
    event = server.next_event()
    assert isinstance(event, h11.Request)
    while not isinstance(server.next_event(), h11.EndOfMessage):
        pass
    assert server.trailing_data == (b"", False)


@given(st.binary(max_size=200))
def test_responses_of_any_bytes_are_answered(data):
    with contextlib.suppress(BadMessage):
        parse_response(data).forwarded()


def test_a_response_loses_hop_headers_and_any_imitation_of_our_marker():
    head = b"HTTP/1.0 200 OK\nX-Owrl-Egress: forged\nKeep-Alive: 5\nConnection: keep-alive\nContent-Type: text/html\n\n"
    response = parse_response(head)
    assert response.forwarded() == b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n"


async def test_heads_are_bounded_and_split_from_what_follows():
    def reader(data: bytes) -> asyncio.StreamReader:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        return stream

    assert await read_head(reader(b"a\r\n\r\nbody"), 100, strict=True) == (b"a\r\n\r\n", b"body")
    assert await read_head(reader(b"\nb\n\nrest"), 100, strict=False, first=b"a") == (b"a\nb\n\n", b"rest")
    with pytest.raises(BadMessage) as caught:
        await read_head(reader(b"a" * 1000 + b"\r\n\r\n"), 100, strict=True)
    assert caught.value.status == 431
    with pytest.raises(BadMessage):
        await read_head(reader(b"GET"), 100, strict=True)
    with pytest.raises(EOFError):
        await read_head(reader(b""), 100, strict=True)
