"""Looks. One base style with named colours and sizes; a skin sets them and may move navigation and lists elsewhere.

The same page in two skins has the same elements with the same ids in other places, colours and type, so a policy that
has learned positions instead of reading fails on the second. Generic font families only: nothing is fetched.

`SCRIPT` is the whole of the sites' JavaScript (`widgets.js`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

_HERE = Path(__file__).parent
_BASE = (_HERE / "base.css").read_text()
SCRIPT = (_HERE / "widgets.js").read_text()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skin:
    """A name and the complete style sheet."""

    name: str
    css: str


def _skin(name: str, extra: str = "", **variables: str) -> Skin:
    setting = ";".join(f"--{k.replace('_', '-')}:{v}" for k, v in variables.items())
    return Skin(name=name, css=f":root{{{setting}}}{_BASE}{extra}")


PLAIN = _skin(
    "plain",
    page="#fff",
    ink="#1b1f24",
    link="#0a58ca",
    bar="#14335c",
    bar_ink="#fff",
    accent="#d9480f",
    accent_ink="#fff",
    line="#c9ced6",
    card="#fff",
    tint="#eef2f7",
    round="6px",
    font="15px/1.45 sans-serif",
)
# Navigation at the side, dark, filters on the right.
DUSK = _skin(
    "dusk",
    "body{padding-left:190px}header{position:fixed;left:0;top:0;bottom:0;width:190px;flex-direction:column;"
    "align-items:flex-start}header nav{flex-direction:column;gap:4px}.split{flex-direction:row-reverse}"
    "header .here{border-bottom:0;border-left:4px solid var(--accent);padding-left:8px}",
    page="#1e2430",
    ink="#e8ebf0",
    link="#8ec5ff",
    bar="#11151d",
    bar_ink="#cfd8e6",
    accent="#2f9e6e",
    accent_ink="#fff",
    line="#454e5e",
    card="#283040",
    tint="#323c4e",
    round="14px",
    font="16px/1.5 sans-serif",
)
# Serif on cream, lists as rows instead of cards, navigation on the right.
PAPER = _skin(
    "paper",
    "header{border-bottom:3px double var(--line);justify-content:space-between}.cards{display:block}"
    ".cards .card{display:flex;gap:18px;align-items:center;justify-content:space-between;border-width:0 0 1px}"
    "button,.button{text-transform:none;border:2px solid var(--ink)}main{margin:0 auto;max-width:1080px}",
    page="#fbf6e9",
    ink="#2b2118",
    link="#8a2b0e",
    bar="#f3ead3",
    bar_ink="#2b2118",
    accent="#e8d48b",
    accent_ink="#2b2118",
    line="#b9a984",
    card="#fffdf5",
    tint="#f1e7cc",
    round="0",
    font="17px/1.5 serif",
)
