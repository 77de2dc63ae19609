"""Requests and responses as values: what the server reads and writes, and what tests make by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode, urlsplit

Pairs = tuple[tuple[str, str], ...]


def _last(pairs: Pairs, name: str, default: str) -> str:
    return next((v for k, v in reversed(pairs) if k == name), default)


def whole(text: str, default: int = -1) -> int:
    """The number that a text spells in plain digits, at most nine of them; else `default`."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One request to a site.

    Attributes:
      method: GET or POST.
      path: decoded path, starting with a slash.
      query, form: (name, value) pairs in order; a name may repeat.
      host, cookies, headers: what the server saw; header names in lower case.
    """

    method: str = "GET"
    path: str = "/"
    query: Pairs = ()
    form: Pairs = ()
    host: str = ""
    cookies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def get_url(cls, url: str) -> Request:
        """A GET of a path with its query."""
        parts = urlsplit(url)
        return cls(path=parts.path or "/", query=tuple(parse_qsl(parts.query, keep_blank_values=True)))

    def get(self, name: str, default: str = "") -> str:
        """The last value of a query parameter, stripped."""
        return _last(self.query, name, default).strip()

    def sent(self, name: str, default: str = "") -> str:
        """The last value of a form field, stripped."""
        return _last(self.form, name, default).strip()

    def all_sent(self, name: str) -> tuple[str, ...]:
        """Every value of a form field, in order."""
        return tuple(v for k, v in self.form if k == name)

    @property
    def url(self) -> str:
        """Path with query."""
        return self.path + ("?" + urlencode(self.query) if self.query else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
    """One answer. `hang` means: send nothing, ever (a fault)."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/html; charset=utf-8"
    headers: Pairs = ()
    delay_s: float = 0.0
    hang: bool = False

    @property
    def location(self) -> str | None:
        """Where a redirect leads."""
        return _last(self.headers, "Location", "") or None


def html_response(text: str, status: int = 200) -> Response:
    """A page; `text` is what follows the document type."""
    return Response(status=status, body=f"<!doctype html>{text}".encode())


def json_response(data: bytes) -> Response:
    """JSON, already encoded."""
    return Response(body=data, content_type="application/json")


def see_other(location: str) -> Response:
    """A redirect after a POST, so that going back or reloading does not post again."""
    return Response(status=303, headers=(("Location", location),))
