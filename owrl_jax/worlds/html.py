"""HTML as Python calls: `e.a("Cart", href="/cart", cls="link")`. Text is escaped, attributes too; there is no other
way in.

Attribute names: `cls` is class, a trailing underscore is dropped (`for_`), an underscore inside becomes a dash
(`stroke_width`). True gives a bare attribute; None and False leave it out. Children may be strings, numbers, `Markup`,
iterables of those, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from markupsafe import Markup, escape

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


def children(*items: Any) -> Markup:
    """Items one after another, escaped unless they are markup already."""
    parts: list[str] = []
    for item in items:
        if item is None or item is False:
            continue
        if isinstance(item, str | int | float):
            parts.append(escape(item))
        elif isinstance(item, Iterable):
            parts.append(children(*item))
        else:
            raise TypeError(f"cannot put {type(item).__name__} into a page: {item!r:.60}")
    return Markup("".join(parts))


def element(tag: str, *content: Any, **attributes: Any) -> Markup:
    """One element."""
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is True:
            parts.append(f" {_name(name)}")
        elif value is not None and value is not False:
            parts.append(f' {_name(name)}="{escape(value)}"')
    parts.append(">")
    if tag not in _VOID:
        parts += [children(*content), f"</{tag}>"]
    return Markup("".join(parts))


def _name(attribute: str) -> str:
    return "class" if attribute == "cls" else attribute.rstrip("_").replace("_", "-")


class _Elements:
    def __getattr__(self, tag: str) -> Callable[..., Markup]:
        return lambda *content, **attributes: element(tag, *content, **attributes)


e = _Elements()


def raw(text: str) -> Markup:
    """Text of ours (CSS, a script) that goes into the page as it is. Never for anything seeded or typed."""
    return Markup(text)


def options(pairs: Iterable[tuple[str, str]], chosen: str) -> list[Markup]:
    """`<option>`s of a select from (value, label) pairs."""
    return [e.option(label, value=value, selected=value == chosen) for value, label in pairs]


def hidden(**fields: str) -> list[Markup]:
    """Hidden inputs of a form."""
    return [e.input(type="hidden", name=name, value=value) for name, value in fields.items()]


def field(label: str, control: Markup, for_: str) -> Markup:
    """A labelled control of a form."""
    return e.div(e.label(label, for_=for_), control, cls="field")


def radios(name: str, pairs: Iterable[tuple[str, str]], chosen: str) -> Markup:
    """Radio buttons with ids `name-value`; the label is part of the target."""
    return e.div(
        [
            e.label(
                e.input(type="radio", name=name, value=value, id=f"{name}-{value}", checked=value == chosen),
                " ",
                label,
                cls="choice",
            )
            for value, label in pairs
        ],
        cls="choices",
    )


def checkbox(name: str, label: str, checked: bool = False, value: str = "on") -> Markup:
    """One checkbox with id `name` (or `name-value` for one of several)."""
    ident = name if value == "on" else f"{name}-{value}"
    return e.label(
        e.input(type="checkbox", name=name, value=value, id=ident, checked=checked), " ", label, cls="choice"
    )


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]], **attributes: Any) -> Markup:
    """A table with one head row. A row may be a sequence of cells, or a whole `<tr>` already."""
    return e.table(
        e.thead(e.tr([e.th(cell) for cell in head])),
        e.tbody([row if isinstance(row, Markup) else e.tr([e.td(cell) for cell in row]) for row in rows]),
        **attributes,
    )
