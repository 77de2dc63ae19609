"""Plays a script against a site's state machine, without a browser: links are followed, forms are filled and sent.

It stands in for a browser that has no JavaScript, so what the sites' script does (calendar, suggestions, selects that
send their form) is done here by its effect: the field gets the value. It proves within milliseconds that every task is
solvable and that the goal recognises the solution; that the pixels work too is proved with a real browser.
"""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

from owrl_jax.worlds import script as moves
from owrl_jax.worlds.html import _VOID
from owrl_jax.worlds.messages import Request, Response
from owrl_jax.worlds.script import Move
from owrl_jax.worlds.site import Episode


class Stuck(AssertionError):
    """A script asks for what the page does not offer."""


class _Node:
    def __init__(self, tag: str, attributes: dict[str, str | None], parent: _Node | None):
        self.tag, self.attributes, self.parent, self.text = tag, attributes, parent, ""
        self.children: list[_Node] = []

    def get(self, name: str) -> str:
        return self.attributes.get(name) or ""

    def above(self, tag: str) -> _Node | None:
        node: _Node | None = self
        while node is not None and node.tag != tag:
            node = node.parent
        return node

    def walk(self):
        yield self
        for child in self.children:
            yield from child.walk()


class Page(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.root = self._at = _Node("", {}, None)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = _Node(tag, dict(attrs), self._at)
        self._at.children.append(node)
        if tag not in _VOID:
            self._at = node

    def handle_endtag(self, tag: str) -> None:
        node = self._at.above(tag)
        if node is not None and node.parent is not None:
            self._at = node.parent

    def handle_data(self, data: str) -> None:
        node: _Node | None = self._at
        while node is not None:
            node.text += data
            node = node.parent

    def by_id(self, ident: str) -> _Node:
        found = [n for n in self.root.walk() if n.get("id") == ident]
        if len(found) != 1:
            known = ", ".join(n.get("id") for n in self.root.walk() if n.get("id"))
            raise Stuck(f"{len(found)} elements have id {ident!r}; ids here: {known[:1500]}")
        return found[0]


class Driver:
    """A visitor without eyes: the current page and what it looks like.

    Attributes:
      page: parsed current page; `url` its path; `status` of the last answer.
      said: what `Say` said, None before.
    """

    def __init__(self, episode: Episode):
        self.episode = episode
        self.url, self.status, self.body = "", 0, b""
        self.page = Page("")
        self.said: str | None = None
        self.go(episode.case.start)

    def go(self, url: str) -> None:
        """Open a path of the site."""
        self._follow(self.episode.handle(Request.get_url(urljoin(self.url or "/", url))), urljoin(self.url or "/", url))

    def play(self, *steps: Move) -> None:
        """Make moves, in order.

        Raises:
          Stuck: if a target is not on the page.
        """
        for step in steps:
            match step:
                case moves.Click(target):
                    self._click(self.page.by_id(target))
                case moves.Fill(target, text, _, enter):
                    node = self._set(target, text)
                    if enter:
                        self._send(node.above("form"), None)
                case moves.Choose(target, value):
                    self._choose(target, value)
                case moves.PickDate(target, day):
                    self._set(target, day)
                case moves.Suggest(target, _, _, text):
                    self._set(target, text)
                case moves.Read(target):
                    self.page.by_id(target)
                case moves.Say(text):
                    self.said = text

    def _set(self, target: str, text: str) -> _Node:
        node = self.page.by_id(target)
        if node.tag == "textarea":
            node.text = text
        elif node.tag == "input":
            node.attributes["value"] = text
        else:
            raise Stuck(f"{target} is <{node.tag}>, not a field")
        return node

    def _choose(self, target: str, value: str) -> None:
        node = self.page.by_id(target)
        choices = [n for n in node.walk() if n.tag == "option"]
        if value not in [n.get("value") for n in choices]:
            raise Stuck(f"{target} has no option {value!r}")
        for option in choices:
            option.attributes.pop("selected", None)
            if option.get("value") == value:
                option.attributes["selected"] = ""
        if "data-auto" in node.attributes:
            self._send(node.above("form"), None)

    def _click(self, node: _Node) -> None:
        if node.tag == "label":
            node = next((n for n in node.walk() if n.tag == "input"), node)
        link = node.above("a")
        if link is not None:
            self.go(link.get("href"))
        elif node.tag == "input" and node.get("type") == "checkbox":
            if node.attributes.pop("checked", node) is node:
                node.attributes["checked"] = ""
        elif node.tag == "input" and node.get("type") == "radio":
            for other in (node.above("form") or self.page.root).walk():
                if other.get("type") == "radio" and other.get("name") == node.get("name"):
                    other.attributes.pop("checked", None)
            node.attributes["checked"] = ""
        elif node.tag in ("button", "input") and node.get("type") != "button":
            self._send(node.above("form"), node)

    def _send(self, form: _Node | None, button: _Node | None) -> None:
        if form is None:
            raise Stuck("there is no form to send")
        pairs = [pair for node in form.walk() for pair in _controls(node, button)]
        action = urljoin(self.url, form.get("action") or self.url)
        if form.get("method").lower() == "post":
            parts = urlsplit(action)
            query = tuple(parse_qsl(parts.query, keep_blank_values=True))
            request = Request(method="POST", path=parts.path, query=query, form=tuple(pairs))
            self._follow(self.episode.handle(request), action)
        else:
            self.go(urlsplit(action).path + "?" + urlencode(pairs))

    def _follow(self, response: Response, url: str) -> None:
        for _ in range(5):
            if response.status in (301, 302, 303) and response.location:
                url = urljoin(url, response.location)
                response = self.episode.handle(Request.get_url(url))
            else:
                self.url, self.status, self.body = url, response.status, response.body
                self.page = Page(response.body.decode())
                return
        raise Stuck(f"redirected five times, last to {url}")


def _controls(node: _Node, button: _Node | None) -> list[tuple[str, Any]]:
    name, kind = node.get("name"), node.get("type")
    if not name:
        return []
    if node.tag == "button":
        return [(name, node.get("value"))] if node is button else []
    if node.tag == "input" and kind in ("checkbox", "radio"):
        return [(name, node.attributes.get("value") or "on")] if "checked" in node.attributes else []
    if node.tag == "input":
        return [(name, node.get("value"))]
    if node.tag == "textarea":
        return [(name, node.text)]
    if node.tag == "select":
        choices = [n for n in node.walk() if n.tag == "option"]
        chosen = next((n for n in choices if "selected" in n.attributes), choices[0] if choices else None)
        return [(name, chosen.get("value"))] if chosen else []
    return []
