"""What appeared and what vanished in view since the last observation, in one line.

Compares two lists made by `page.js` `snapshot` as multisets; linear in their size. A list that was cut short by its
deadline, or that belongs to another document, says nothing about what vanished, so nothing is claimed.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from owrl_jax.agent.page_text import one_line

SHOWN = 5
_LABEL = 50
BUDGET_MS = 250
LIMIT = 1500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was in view.

    Attributes:
      document: id of the document it was taken from, tab included.
      items: (kind, input type, label) of each thing in view.
      hash: of items, values, states and scroll position.
      truncated: whether the list is incomplete.
    """

    document: str
    items: tuple[tuple[str, str, str], ...]
    hash: str
    truncated: bool

    @classmethod
    def read(cls, raw: dict[str, Any], document: str) -> Snapshot:
        """From the answer of `page.js`."""
        items = tuple((str(kind), str(type_), str(label)) for kind, type_, label in raw["items"])
        return cls(document=document, items=items, hash=str(raw["hash"]), truncated=bool(raw["truncated"]))


def summary(before: Snapshot | None, after: Snapshot) -> str:
    """At most five things that appeared and five that vanished; empty if nothing did or if it cannot be told."""
    if before is None or before.document != after.document or before.truncated or after.truncated:
        return ""
    old, new = collections.Counter(before.items), collections.Counter(after.items)
    parts = [
        f"{title}: {_listed(difference)}"
        for title, difference in (("Appeared", new - old), ("Vanished", old - new))
        if difference
    ]
    return "; ".join(parts)


def _listed(items: collections.Counter[tuple[str, str, str]]) -> str:
    names = [_name(item) + (f" ×{count}" if count > 1 else "") for item, count in items.items()]
    shown = ", ".join(names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _name(item: tuple[str, str, str]) -> str:
    kind, type_, label = item
    what = f"{kind} {type_}" if type_ and type_ != "text" else kind
    return f'{one_line(what, 30)} "{one_line(label, _LABEL)}"' if label else one_line(what, 30)
