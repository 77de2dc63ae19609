"""Fifteen templates from "red" to "write, pick, send", and the starter site itself.

The fraction of a level orders the templates within it: 1.0 is the first thing to learn, 3.2 the last.
"""

from __future__ import annotations

import random

from owrl_jax.worlds.goals import Decoy, Goal, Like, Number, Text
from owrl_jax.worlds.script import Click, Fill, Read
from owrl_jax.worlds.site import Case, Site, Templates
from owrl_jax.worlds.starter import pages
from owrl_jax.worlds.starter.pages import COLOURS, PLACES, SHAPES, WORDS, Scene

templates = Templates()


def _hit(page: str, index: int, count: int, why: str, **words: str) -> Case:
    """Click one thing of a page."""
    right, wrong = f"{page}-{index}", f"{page}-{(index + 1) % count}"
    return Case(
        words=words,
        goal=Goal(changes={"hits": [right]}),
        script=(Click(right, why),),
        start=f"/{page}",
        decoys=(
            Decoy(name="the one beside it", changes={"hits": [wrong]}),
            Decoy(name="another one first", changes={"hits": [wrong, right]}),
            Decoy(name="twice", changes={"hits": [right, right]}),
        ),
    )


def _found(scene: Scene, index: int) -> str:
    """The four in words, and again the one that is meant.

    What an agent says before it decides is what a small one can learn: to see, then to copy the name it was asked for,
    then to copy what followed that name. Without the name, the last step is two at once, and stays at chance for long.
    """
    each = [f"{c} {s} {place}" for (c, s), place in zip(scene.quad, PLACES, strict=True)]
    return f"I see {', '.join(each)}. So {each[index]}."


def _unique(items: list[str], rng: random.Random) -> int | None:
    """The index of a random item that occurs once."""
    single = [i for i, x in enumerate(items) if items.count(x) == 1]
    return rng.choice(single) if single else None


@templates.add("click the {colour} one", "{colour}", "hit {colour}", level=1.0)
def pair_colour(scene: Scene, rng: random.Random) -> Case:
    i = rng.randrange(2)
    sides = ("left", "right")
    seen = ", ".join(f"{colour} {side}" for (colour, _), side in zip(scene.pair, sides, strict=True))
    colour = scene.pair[i][0]
    return _hit("pair", i, 2, f"I see {seen}. So {colour} {sides[i]}.", colour=colour)


@templates.add("click {word}", "{word}", "hit {word}", level=1.1)
def word(scene: Scene, rng: random.Random) -> Case:
    i = rng.randrange(4)
    return _hit("words", i, 4, f"The button {scene.words[i]} is there.", word=scene.words[i])


@templates.add("click the {colour} {shape}", "{colour} {shape}", "hit the {colour} {shape}", level=1.2)
def colour_shape(scene: Scene, rng: random.Random) -> Case:
    i = rng.randrange(4)
    colour, shape = scene.quad[i]
    return _hit("quad", i, 4, _found(scene, i), colour=colour, shape=shape)


@templates.add("click the only {what} one", "only {what}", "hit the one that is {what}", level=1.3)
def single(scene: Scene, rng: random.Random) -> Case:
    """A colour or a shape that occurs once; where none does, colour and shape together."""
    kinds = [[c for c, _ in scene.quad], [s for _, s in scene.quad]]
    rng.shuffle(kinds)
    for items in kinds:
        i = _unique(items, rng)
        if i is not None:
            return _hit("quad", i, 4, _found(scene, i), what=items[i])
    i = rng.randrange(4)
    return _hit("quad", i, 4, _found(scene, i), what=" ".join(scene.quad[i]))


@templates.add("click {place}", "{place}", "hit the one at the {place}", level=1.4, held_out=True)
def place(scene: Scene, rng: random.Random) -> Case:
    i = rng.randrange(4)
    return _hit("quad", i, 4, f"It is at the {PLACES[i]}.", place=PLACES[i])


@templates.add(
    "next, then {colour} {shape}", "click next, then the {colour} {shape}", "next and {colour} {shape}", level=2.0
)
def next_then_hit(scene: Scene, rng: random.Random) -> Case:
    i = rng.randrange(4)
    colour, shape = scene.quad[i]
    right, wrong = f"quad-{i}", f"quad-{(i + 2) % 4}"
    return Case(
        words={"colour": colour, "shape": shape},
        goal=Goal(changes={"hits": [right]}),
        script=(Click("next", "First next."), Click(right, f"Now the {colour} {shape}.")),
        start="/door",
        decoys=(Decoy(name="another one", changes={"hits": [wrong]}),),
    )


def _two_hits(page: str, first: int, second: int, names: tuple[str, str]) -> Case:
    a, b = f"{page}-{first}", f"{page}-{second}"
    return Case(
        words={"a": names[0], "b": names[1]},
        goal=Goal(changes={"hits": [a, b]}),
        script=(Click(a, f"First {names[0]}."), Click(b, f"Then {names[1]}.")),
        start=f"/{page}",
        decoys=(
            Decoy(name="wrong order", changes={"hits": [b, a]}),
            Decoy(name="only the first", changes={"hits": [a]}),
            Decoy(name="only the second", changes={"hits": [b]}),
        ),
    )


@templates.add("{a} then {b}", "click {a}, then {b}", "first {a}, after that {b}", level=2.1)
def two_words(scene: Scene, rng: random.Random) -> Case:
    i, j = rng.sample(range(4), 2)
    return _two_hits("words", i, j, (scene.words[i], scene.words[j]))


@templates.add("{a} then {b}", "click the {a}, then the {b}", "first the {a}, after that the {b}", level=2.2)
def two_shapes(scene: Scene, rng: random.Random) -> Case:
    i, j = rng.sample(range(4), 2)
    return _two_hits("quad", i, j, (" ".join(scene.quad[i]), " ".join(scene.quad[j])))


@templates.add("how many {colour}?", "count {colour}", "number of {colour} ones?", level=2.3)
def count_colour(scene: Scene, rng: random.Random) -> Case:
    colour = rng.choice(list(COLOURS))
    return _count(scene, colour, sum(c == colour for c, _ in scene.quad))


@templates.add("how many {colour}?", "count each {colour}", "number of {colour} things?", level=2.4, held_out=True)
def count_shape(scene: Scene, rng: random.Random) -> Case:
    shape = rng.choice(SHAPES)
    return _count(scene, shape, sum(s == shape for _, s in scene.quad))


def _count(scene: Scene, what: str, n: int) -> Case:
    return Case(
        words={"colour": what},
        goal=Goal(answer=Number(value=n), facts=("quad",)),
        script=(Read("quad-0", f"I see {n}."),),
        said=str(n),
        start="/quad",
        decoys=(Decoy(name="one more", said=str(n + 1)), Decoy(name="two numbers", said=f"{n} {n + 1}")),
    )


@templates.add("pick {word}, send", "{word}, send", "choose {word} and send", level=2.5)
def pick_send(scene: Scene, rng: random.Random) -> Case:
    return _form(scene, "", rng.choice(scene.options))


@templates.add("write {text}, send", "type {text}, send", "enter {text} and send it", level=2.6)
def write_send(scene: Scene, rng: random.Random) -> Case:
    return _form(scene, rng.choice(WORDS), "")


def _form(scene: Scene, text: str, pick: str) -> Case:
    steps = []
    if text:
        steps.append(Fill("text", text, f"I write {text}."))
    if pick:
        steps.append(Click(f"label-{pick}", f"I pick {pick}."))
    other = next(w for w in scene.options if w != pick)
    near = next(w for w in WORDS if w != text)
    return Case(
        words={"text": text, "word": pick},
        goal=Goal(changes={"sent": {"text": Like(text) if text else "", "pick": pick}}),
        script=(*steps, Click("send", "Now send.")),
        start="/form",
        decoys=(
            Decoy(name="the other choice", changes={"sent": {"text": text, "pick": other}}),
            Decoy(name="another text", changes={"sent": {"text": near, "pick": pick}}),
            Decoy(name="clicked elsewhere", changes={"sent": {"text": text, "pick": pick}, "hits": ["quad-0"]}),
        ),
    )


@templates.add("which word is at the {place}?", "say the {place} word", "read the word at the {place}", level=2.7)
def read_word(scene: Scene, rng: random.Random) -> Case:
    i = rng.randrange(4)
    right = scene.words[i]
    others = tuple(w for w in scene.words if w != right)
    return Case(
        words={"place": PLACES[i]},
        goal=Goal(answer=Text(spellings=(right,), others=others), facts=("words",)),
        script=(Read(f"words-{i}", f"It says {right}."),),
        said=right,
        start="/words",
        decoys=(Decoy(name="another word", said=others[0]), Decoy(name="all words", said=" ".join(scene.words))),
    )


@templates.add("{a}, {b}, {c}", "click {a}, {b}, {c}", "in this order: {a}, {b}, {c}", level=3.0)
def three_words(scene: Scene, rng: random.Random) -> Case:
    order = rng.sample(range(4), 3)
    ids = [f"words-{i}" for i in order]
    names = [scene.words[i] for i in order]
    return Case(
        words=dict(zip("abc", names, strict=True)),
        goal=Goal(changes={"hits": ids}),
        script=tuple(Click(i, f"Now {name}.") for i, name in zip(ids, names, strict=True)),
        start="/words",
        decoys=(
            Decoy(name="backwards", changes={"hits": ids[::-1]}),
            Decoy(name="one missing", changes={"hits": ids[:2]}),
        ),
    )


@templates.add(
    "write {text}, pick {word}, send", "{text}, {word}, send", "enter {text}, choose {word}, send", level=3.2
)
def write_pick_send(scene: Scene, rng: random.Random) -> Case:
    return _form(scene, rng.choice(WORDS), rng.choice(scene.options))


SITE = Site(
    name="starter",
    title="starter",
    about="for the smallest agents: shapes, words and one small form on pages of 128 to 320 pixels",
    skins=pages.SKINS,
    templates=templates,
    routes=pages.routes,
    build=pages.build,
    start=pages.start,
    viewport=(224, 224),
    goals_per_world=8,
)
