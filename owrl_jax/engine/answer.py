"""Ids of an answer to what a chat client gets, while they come: text, reasoning, content, calls, stop strings.

    ids → bytes → text → (cut at a stop string) → reasoning │ content │ calls

What was handed out is never taken back: bytes wait for the rest of their character, text waits while it could be the
beginning of a stop string or a tag, and everything from the first `<tool_call>` on waits for the end, because either
all calls of an answer can be read or none is one (`agent/parser.py`). So the pieces of a stream, joined, are exactly
the answer given at once; a test holds it. Calls that cannot be read come out as the words that they are.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from owrl_jax.agent.parser import CALL, END_THINK, THINK, parse
from owrl_jax.engine.request import Token
from owrl_jax.types import ToolCall


class TokenBytes:
    """The bytes that each id of a byte-level vocabulary stands for."""

    def __init__(self, tokens: Any) -> None:
        self._hf = tokens.hf
        self._added = {id_: token.content.encode() for id_, token in tokens.hf.added_tokens_decoder.items()}
        self._byte = _byte_alphabet()
        self._known: dict[int, bytes] = {}

    def __call__(self, id_: int) -> bytes:
        """Empty for an id that the vocabulary does not have: models are padded beyond it."""
        found = self._known.get(id_)
        if found is None:
            found = self._known[id_] = self._look_up(id_)
        return found

    def _look_up(self, id_: int) -> bytes:
        if id_ in self._added:
            return self._added[id_]
        piece = self._hf.convert_ids_to_tokens(id_)
        if piece is None:
            return b""
        if all(c in self._byte for c in piece):
            return bytes(self._byte[c] for c in piece)
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes a byte as itself where that is printable, and as a character from U+0100 on where not."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(rest)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What can be handed out now."""

    reasoning: str = ""
    content: str = ""
    tokens: tuple[Token, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tokens)


class AnswerReader:
    """Reads one answer.

    Args:
      token_bytes: of the vocabulary.
      end_ids: ids that end a turn; they have no text.
      stop: strings that end the answer and are not part of it.
      thinking: whether the prompt opened the reasoning.
      tools: names of the tools on offer; without any, calls are words.

    Attributes:
      stopped: whether a stop string came; nothing that is fed later counts.
      tokens: that count so far.
      calls: of the answer, after `end`.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        end_ids: Sequence[int],
        stop: Sequence[str] = (),
        thinking: bool = False,
        tools: Sequence[str] = (),
    ) -> None:
        self._bytes, self._end_ids, self._stop = token_bytes, frozenset(end_ids), tuple(stop)
        self._tools = tuple(tools)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._uncut = ""  # text that may hold the beginning of a stop string
        self._held = ""  # text that may hold the beginning of a tag
        self._state: Literal["start", "reasoning", "content", "calls"] = "start"
        self._thinking = thinking
        self._begun = False  # something of the present part was handed out
        self._gap = ""  # white space between the content and the first call
        self.stopped = False
        self.tokens: list[Token] = []
        self.calls: tuple[ToolCall, ...] = ()

    def feed(self, tokens: Sequence[Token]) -> Piece:
        """Takes the next tokens; gives what is certain now."""
        counted, text = [], ""
        for token in tokens:
            if self.stopped:
                break
            counted.append(token)
            if token.id not in self._end_ids:
                text += self._cut(self._utf8.decode(self._bytes(token.id)))
        self.tokens += counted
        words = [t for t in counted if t.id not in self._end_ids]
        return self._split(text, final=False, tokens=tuple(words))

    def end(self, *, whole: bool = True) -> Piece:
        """The answer is over; gives the rest, and sets `calls`.

        Args:
          whole: whether it was not cut off by the limit of its length.
        """
        text = "" if self.stopped else self._cut(self._utf8.decode(b"", True), final=True)
        piece = self._split(text, final=True)
        if self._state != "calls":
            return piece
        parsed = parse(self._held, tools=self._tools, reasoning_required=False) if whole else None
        if parsed is not None and parsed.ok:
            self.calls = parsed.calls
            return piece
        return dataclasses.replace(piece, content=piece.content + self._gap + self._held)

    def _cut(self, text: str, *, final: bool = False) -> str:
        """The text up to a stop string, or up to what could become one."""
        if not self._stop:
            return text
        self._uncut += text
        found = min((at for s in self._stop if (at := self._uncut.find(s)) >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            return self._uncut[:found]
        keep = 0 if final else _partial(self._uncut, self._stop)
        given = self._uncut[: len(self._uncut) - keep]
        self._uncut = self._uncut[len(given) :]
        return given

    def _split(self, text: str, *, final: bool, tokens: tuple[Token, ...] = ()) -> Piece:
        self._held += text
        reasoning = content = ""
        final = final or self.stopped
        if self._state == "start":
            begin = self._held.lstrip()
            if begin.startswith(THINK):
                self._held, self._state = begin.removeprefix(THINK), "reasoning"
            elif final or not THINK.startswith(begin):
                self._state = "reasoning" if self._thinking else "content"
                self._begun = self._state == "content"  # without reasoning, the content is given as it is
        if self._state == "reasoning":
            thought, tag, rest = self._held.partition(END_THINK)
            if tag:
                reasoning, self._held = self._give(thought).rstrip(), rest
                self._state, self._begun = "content", False
            else:
                reasoning = self._release((END_THINK,), final=final)
        if self._state == "content":
            words, tag, rest = self._held.partition(CALL) if self._tools else (self._held, "", "")
            if tag:
                content = self._give(words).rstrip()
                self._gap = words[len(words.rstrip()) :]
                self._held, self._state = tag + rest, "calls"
            else:
                content = self._release((CALL,) if self._tools else (), final=final)
        return Piece(reasoning=reasoning, content=content, tokens=tokens)

    def _release(self, tags: tuple[str, ...], *, final: bool) -> str:
        """Held text that can be no part of a tag; white space at its end waits for what follows."""
        keep = 0 if final else _partial(self._held, tags)
        words = self._held[: len(self._held) - keep]
        if not final or self._state == "reasoning":
            words = words.rstrip()
        self._held = self._held[len(words) :] if not final else ""
        return self._give(words)

    def _give(self, words: str) -> str:
        """Words of the present part; line breaks at its beginning belong to the format."""
        if not self._begun:
            words = words.lstrip("\n") if self._state == "content" else words.lstrip()
        self._begun = self._begun or bool(words)
        return words


def _partial(text: str, words: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of one of the words."""
    longest = max((len(word) - 1 for word in words), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(word.startswith(tail) for word in words):
            return size
    return 0
