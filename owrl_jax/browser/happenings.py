"""What a page did besides changing: dialogs, new tabs, downloads, file choosers, crashes. Collected, then told.

Each call gets the happenings since the call before; nothing is told twice and nothing is lost. Texts are the page's and
are neutralised here, on their way in.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata

from owrl_jax.agent.page_text import one_line

_DIALOG_TEXT = 160
_RESERVED = re.compile(r"^(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", re.IGNORECASE)


@dataclasses.dataclass
class Happenings:
    """Since the last `take`.

    Attributes:
      lines: one sentence each, ready for feedback.
      dialogs, popups: how many.
      followed: a tab opened by the acted page became the active one.
      facts: the same for programs.
    """

    lines: list[str] = dataclasses.field(default_factory=list)
    dialogs: int = 0
    popups: int = 0
    followed: bool = False
    facts: list[dict[str, object]] = dataclasses.field(default_factory=list)

    def dialog(self, kind: str, text: str, answer: str) -> None:
        """A dialog was shown and answered."""
        self.dialogs += 1
        if self.dialogs <= 3:
            self.lines.append(
                f"the page showed a{'n' if kind[0] in 'aeiou' else ''} {kind} dialog: "
                f'"{one_line(text, _DIALOG_TEXT)}"; it was {answer}'
            )
        elif self.dialogs == 4:
            self.lines.append("more dialogs followed")
        self.facts.append({"event": "dialog", "type": kind, "text": text[:1000], "answer": answer})

    def note(self, line: str, **facts: object) -> None:
        """Anything else."""
        self.lines.append(line)
        if facts:
            self.facts.append(facts)

    def take(self) -> Happenings:
        """What happened so far; from here on it counts anew."""
        taken = dataclasses.replace(self, lines=list(self.lines), facts=list(self.facts))
        self.lines.clear()
        self.facts.clear()
        self.dialogs = self.popups = 0
        self.followed = False
        return taken


def safe_filename(name: str, *, default: str = "download") -> str:
    """A file name without path, control characters, leading dots or reserved names, at most 100 characters long."""
    text = unicodedata.normalize("NFKC", name.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    text = re.split(r"[/\\]", text)[-1]
    text = "".join(c for c in text if unicodedata.category(c)[0] != "C")
    text = re.sub(r'[<>:"|?*%\x00-\x1f]', "_", text).strip(" .")
    if not text or _RESERVED.match(text):
        text = default + ("_" + text if text else "")
    stem, dot, suffix = text.rpartition(".")
    if len(text) > 100:
        text = (stem[: 99 - len(suffix)] + dot + suffix) if dot and len(suffix) <= 10 else text[:100]
    return text
