"""When is a task done: the expected final state, the expected answer, and what the agent must have seen.

The state of a site is one flat dict from names to JSON values. A goal names the entries that change; **every other
entry must be as it was at the start**, so side effects fail without anybody having thought of them. The answer is
matched by rule, hedging ("41 or 42") and negation included. `facts` name pages or tables that must have been served
before an answer counts as found rather than guessed.

`verdict` is the only judge here. It reads program state and the answer, never page text, so nothing written on a page
can change it. Decoys (final states and answers that nearly fit) are data beside each goal, and tests prove they fail.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Mapping, Set
from typing import Any, Protocol

from owrl_jax.types import Verdict, VerdictValue

State = dict[str, Any]


def normal(text: str) -> str:
    """Case, accents, punctuation and spacing removed: words with single spaces between. Decimal points stay."""
    text = unicodedata.normalize("NFKD", text.casefold())
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"(?!(?<=\d)[.:](?=\d))[^\w]", " ", text)
    return " ".join(text.split())


class Matcher(Protocol):
    """An expected value that several actual values may fit."""

    @property
    def sample(self) -> Any:
        """One value that fits."""
        ...

    def fits(self, value: Any) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Like:
    """A text up to case, punctuation and spacing: what somebody was asked to type."""

    text: str

    @property
    def sample(self) -> str:
        return self.text

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and normal(value) == normal(self.text)


@dataclasses.dataclass(frozen=True)
class Anything:
    """Any text: what the instruction leaves to the agent. `text` is what the solution writes."""

    text: str = ""

    @property
    def sample(self) -> str:
        return self.text

    def fits(self, value: Any) -> bool:
        return isinstance(value, str)


class _Gone:
    """Expected value of an entry that must not be there any more."""

    def __repr__(self) -> str:
        return "gone"


GONE = _Gone()


def applied(initial: State, changes: Mapping[str, Any]) -> State:
    """The state after `changes`, matchers replaced by samples."""
    values = {**initial, **{k: v if v is GONE else concrete(v) for k, v in changes.items()}}
    return {k: v for k, v in values.items() if v is not GONE}


def same(expected: Any, actual: Any) -> bool:
    """Equality in which matchers may stand anywhere inside `expected`."""
    if hasattr(expected, "fits"):
        return expected.fits(actual)
    if isinstance(expected, Mapping):
        return (
            isinstance(actual, Mapping)
            and expected.keys() == actual.keys()
            and all(same(v, actual[k]) for k, v in expected.items())
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(actual, list | tuple)
            and len(expected) == len(actual)
            and all(same(x, y) for x, y in zip(expected, actual, strict=True))
        )
    return type(expected) is type(actual) and expected == actual


def concrete(expected: Any) -> Any:
    """`expected` with every matcher replaced by a value that fits."""
    if hasattr(expected, "fits"):
        return expected.sample
    if isinstance(expected, Mapping):
        return {k: concrete(v) for k, v in expected.items()}
    if isinstance(expected, list | tuple):
        return [concrete(v) for v in expected]
    return expected


class Answer(Protocol):
    """What the agent must say; `plain` is the shortest right answer."""

    @property
    def plain(self) -> str: ...

    def problem(self, said: str) -> str | None:
        """Why `said` is not the answer, or None if it is."""
        ...


_DENIAL = re.compile(r"\b(not|isn t|isnt|wasn t|never|neither|no|nor|cannot|can t|without|except)\b")


def _places(phrase: str, said: str) -> list[int]:
    return [m.start() for m in re.finditer(rf"(?<![\w.]){re.escape(phrase)}(?![\w]|[.:]\d)", said)]


def _affirmed(phrase: str, said: str) -> bool:
    """Whether `phrase` stands in `said` as whole words and is denied nowhere, by one of the four words before it."""
    places = _places(normal(phrase), said)
    return bool(places) and not any(_DENIAL.search(" ".join(said[:p].split()[-4:])) for p in places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """One of several spellings, and none of the tempting others.

    Attributes:
      spellings: any of them will do.
      others: wrong candidates; naming one beside the right one is hedging and fails. A part of a right spelling
        does not count.
    """

    spellings: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def plain(self) -> str:
        return self.spellings[0]

    def problem(self, said: str) -> str | None:
        text = normal(said)
        right = next((s for s in self.spellings if _affirmed(s, text)), None)
        if right is None:
            return f"the answer does not say {self.spellings[0]!r}"
        rest = text
        for spelling in sorted(map(normal, self.spellings), key=len, reverse=True):
            rest = rest.replace(spelling, " ")
        named = next((o for o in self.others if _places(normal(o), rest)), None)
        return None if named is None else f"the answer also names {named!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Number:
    """One number.

    Attributes:
      value: the right one; `within` is how far off the said one may be.
      given: texts whose numbers may be repeated freely (the instruction, names of products).
    """

    value: float
    within: float = 0.0
    given: tuple[str, ...] = ()

    @property
    def plain(self) -> str:
        return f"{self.value:g}" if self.value == round(self.value) else f"{self.value:.2f}"

    def problem(self, said: str) -> str | None:
        free = set(numbers(" ".join(self.given)))
        said_numbers = [n for n in numbers(said) if n not in free or abs(n - self.value) <= self.within]
        if _DENIAL.search(normal(said)) and not said_numbers:
            return "the answer says that there is none"
        wrong = [n for n in said_numbers if abs(n - self.value) > self.within + 1e-9]
        if not said_numbers:
            return f"the answer holds no number, expected {self.value:g}"
        if wrong:
            return f"the answer says {wrong[0]:g}, expected {self.value:g}"
        shown = [normal(m.group().rstrip(".,")) for m in _NUMBER.finditer(said)]
        if not any(_affirmed(s, normal(said)) for s in shown if float(s.lstrip("-")) in map(abs, said_numbers)):
            return f"the answer denies {self.value:g}"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class All:
    """Several answers at once: every part must be right."""

    parts: tuple[Answer, ...]

    @property
    def plain(self) -> str:
        return ", ".join(part.plain for part in self.parts)

    def problem(self, said: str) -> str | None:
        return next((p for p in (part.problem(said) for part in self.parts) if p is not None), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YesNo:
    """Yes or no, at the start of the answer or alone in it."""

    yes: bool

    @property
    def plain(self) -> str:
        return "yes" if self.yes else "no"

    def problem(self, said: str) -> str | None:
        text = normal(said)
        found = {w for w in text.split() if w in ("yes", "no")}
        if len(found) != 1:
            return "the answer is neither yes nor no" if not found else "the answer says both yes and no"
        return None if _affirmed(self.plain, text) else f"the answer is not {self.plain}"


_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?!\w)")


def numbers(text: str) -> list[float]:
    """The numbers of a text: thousands separators dropped, a currency sign in front or a unit apart from it ignored."""
    return [float(m.group().replace(",", "")) for m in _NUMBER.finditer(text)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """What must hold when the agent says that it is done.

    Attributes:
      changes: entries of the state that are new or different, with their expected values (matchers allowed). Whatever
        is not named here must be as it was.
      alternatives: other changes that will do as well, where the wording leaves a choice.
      answer: what `done` must say; None if any text will do.
      facts: names that must be among those the site has recorded as served.
    """

    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alternatives: tuple[Mapping[str, Any], ...] = ()
    answer: Answer | None = None
    facts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.changes and self.answer is None and not self.facts:
            raise ValueError("a goal without changes, answer and facts is reached by doing nothing")

    def problems(self, *, initial: State, final: State, seen: Set[str], said: str | None) -> tuple[str, ...]:
        """Everything that is wrong, one sentence each; empty if the goal is reached."""
        found = ["the agent never called done"] if said is None else []
        found += min((_differences(c, initial, final) for c in (self.changes, *self.alternatives)), key=len)
        found += [f"never seen: {fact}" for fact in self.facts if fact not in seen]
        if self.answer is not None and said is not None:
            problem = self.answer.problem(said)
            found += [problem] if problem else []
        return tuple(found)


def _differences(changes: Mapping[str, Any], initial: State, final: State) -> list[str]:
    found = []
    for name in sorted(initial.keys() | final.keys() | changes.keys()):
        start, end = initial.get(name, GONE), final.get(name, GONE)
        if name not in changes:
            if not same(start, end):
                found.append(f"{name} should be as it was, is {_short(end)}")
        elif changes[name] is not end and not same(changes[name], end):
            found.append(f"{name} is {_short(end)}, expected {_short(concrete(changes[name]))}")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"


def verdict(
    goal: Goal, *, initial: State, final: State, seen: Set[str], said: str | None, judge: str, blocked: str = ""
) -> Verdict:
    """Success, failure with the reasons, or invalid where the site itself barred the way (`blocked` says how)."""
    problems = goal.problems(initial=initial, final=final, seen=seen, said=said)
    if not problems:
        value, rationale = VerdictValue.SUCCESS, "final state, answer and facts are as expected"
    elif blocked:
        value, rationale = VerdictValue.INVALID, f"the site barred the way: {blocked}"
    else:
        value, rationale = VerdictValue.FAILURE, problems[0]
    return Verdict(value=value, judge=judge, rationale=rationale, reasons=problems)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoy:
    """An ending that nearly fits and must fail. What is None is as in the right ending.

    Attributes:
      name: what is wrong with it.
      changes: the entries of the state that differ from the start.
      said: the answer.
      facts: what was seen.
    """

    name: str
    changes: Mapping[str, Any] | None = None
    said: str | None = None
    facts: tuple[str, ...] | None = None


def general_decoys(goal: Goal) -> tuple[Decoy, ...]:
    """Wrong endings that exist for every goal: nothing done, half done, too much done, guessed, hedged, denied."""
    right = dict(goal.changes)
    found = []
    if right:
        found.append(Decoy(name="nothing was changed", changes={}))
        found.append(Decoy(name="one entry too many changed", changes={**right, "intruder": 1}))
        found += [
            Decoy(name=f"{name} was left out", changes={k: v for k, v in right.items() if k != name})
            for name in (right if len(right) > 1 else ())
        ]
    if goal.facts:
        found.append(Decoy(name="guessed, nothing was looked at", facts=()))
    if goal.answer is not None:
        found.append(Decoy(name="gave up", said="I could not find it."))
        found.append(Decoy(name="denied", said=f"It is not {goal.answer.plain}."))
    return tuple(found)
