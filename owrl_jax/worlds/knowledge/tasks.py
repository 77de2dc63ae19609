"""What one can be asked of the encyclopaedia: thirteen templates, most of them questions, and the site itself."""

from __future__ import annotations

import random

from owrl_jax.worlds.goals import All, Decoy, Goal, Like, Number, Text, YesNo
from owrl_jax.worlds.knowledge import data, pages
from owrl_jax.worlds.knowledge.data import KINDS, Article, Library, shown
from owrl_jax.worlds.knowledge.pages import REASONS
from owrl_jax.worlds.script import Choose, Click, Fill, Move, Read
from owrl_jax.worlds.site import Case, Site, Templates
from owrl_jax.worlds.skins import DUSK, PAPER, PLAIN

templates = Templates()

# Facts of the box at the side of an article: (kind, key, how a question names it).
_BOX = (
    ("country", "population", "population"),
    ("country", "area", "area in square kilometres"),
    ("river", "length", "length in kilometres"),
    ("mountain", "height", "height in metres"),
    ("person", "born", "year of birth"),
)
# Facts that stand in the running text only: (kind, section, key, question).
_DEEP = (
    ("river", "Culture", "bridges", "How many bridges are there over {title}?"),
    ("country", "Legacy", "parliament", "How many seats does the parliament of {title} have?"),
    ("person", "History", "siblings", "With how many brothers and sisters did {title} grow up?"),
)


def _open(a: Article) -> tuple[Move, ...]:
    return (
        Fill("q", a.title, f"I search for {a.title}.", enter=True),
        Click(f"hit-{a.slug}", f"The article on {a.title} is among the results."),
    )


def _fact(*articles: Article) -> tuple[str, ...]:
    return tuple(f"article:{a.slug}" for a in articles)


def _titles(articles: list[Article]) -> tuple[str, ...]:
    return tuple(a.title for a in articles)


@templates.add(
    "What is the {what} of {title}?",
    "Look up {title} and tell me the {what}.",
    "I need one number about {title}: the {what}.",
    level=1,
)
def box_fact(library: Library, rng: random.Random) -> Case:
    kind, key, what = rng.choice(_BOX)
    a = rng.choice(library.of(kind))
    value = int(a.facts[key])
    other = next(int(o.facts[key]) for o in library.of(kind) if o is not a)
    return Case(
        words={"what": what, "title": a.title},
        goal=Goal(answer=Number(value=value), facts=_fact(a)),
        script=(*_open(a), Read("box", f"The box at the side says {shown(value, key)}.")),
        said=shown(value, key),
        decoys=(
            Decoy(name="the number of another article", said=shown(other, key)),
            Decoy(name="off by one", said=str(value + 1)),
        ),
    )


@templates.add(
    "Add the article on {title} to the reading list.",
    "Put {title} on my reading list.",
    "I want to read about {title} later; save the article to the list.",
    level=1,
)
def save_article(library: Library, rng: random.Random) -> Case:
    a, other = rng.sample(list(library.articles.values()), 2)
    return Case(
        words={"title": a.title},
        goal=Goal(changes={f"list/{a.slug}": True}),
        script=(*_open(a), Click("save", "The button for the reading list is at the side.")),
        decoys=(
            Decoy(name="another article", changes={f"list/{other.slug}": True}),
            Decoy(name="another article as well", changes={f"list/{a.slug}": True, f"list/{other.slug}": True}),
        ),
    )


@templates.add(
    "Set the text size of this site to {size}.",
    "Make the text {size} in the settings.",
    "In the settings, choose {size} text.",
    level=1,
)
def text_size(library: Library, rng: random.Random) -> Case:
    size, other = rng.sample(("small", "large"), 2)
    return Case(
        words={"size": size},
        goal=Goal(changes={"text_size": size}),
        script=(
            Click("nav-settings", "Text size is a setting."),
            Click(f"text_size-{size}", f"I choose {size}."),
            Click("save", "The choice must be saved."),
        ),
        decoys=(Decoy(name="the other size", changes={"text_size": other}),),
    )


@templates.add(
    "{question}",
    "Find this out, please: {question}",
    "Somewhere in a long article is the answer: {question}",
    level=2,
)
def deep_fact(library: Library, rng: random.Random) -> Case:
    kind, section, key, question = rng.choice(_DEEP)
    a = rng.choice(library.of(kind))
    value = int(a.facts[key])
    return Case(
        words={"question": question.format(title=a.title)},
        goal=Goal(answer=Number(value=value), facts=_fact(a)),
        script=(*_open(a), Read(f"s-{section}", f"The section {section} has the number: {value}.")),
        said=str(value),
        decoys=(
            Decoy(name="off by one", said=f"It is {value - 1}."),
            Decoy(name="two candidates", said=f"{value} or {value + 2}"),
        ),
    )


_EXTREMES = (
    ("river", "length", "longest", "length in kilometres", True),
    ("mountain", "height", "lowest", "height in metres", False),
    ("mountain", "height", "highest", "height in metres", True),
    ("country", "population", "most populous", "population", True),
    ("person", "born", "earliest-born", "year of birth", False),
)


@templates.add(
    "Which of the {plural} in the list is the {most}? Give its name and {what}.",
    "From the list of {plural}, name the {most} one and its {what}.",
    "Use the list of {plural}: what is the {most} one called, and what is the {what}?",
    level=2,
)
def extreme(library: Library, rng: random.Random) -> Case:
    kind, key, most, what, down = rng.choice(_EXTREMES)
    ranked = sorted(library.of(kind), key=lambda a: int(a.facts[key]), reverse=down)
    a, second = ranked[0], ranked[1]
    value = shown(a.facts[key], key)
    sort = [Click(f"by-{key}", "A click on the heading sorts the table.")]
    if down:
        sort.append(Click(f"by-{key}", "Another click turns the order round."))
    return Case(
        words={"plural": KINDS[kind], "most": most, "what": what},
        goal=Goal(
            answer=All(parts=(Text(spellings=(a.title,), others=_titles(ranked[1:])), Number(value=int(a.facts[key])))),
            facts=(f"table:{kind}",),
        ),
        script=(
            Click(f"list-{kind}", f"There is a list of {KINDS[kind]}."),
            *sort,
            Read(f"row-{a.slug}", f"{a.title} is on top with {value}."),
        ),
        said=f"{a.title}, {value}",
        decoys=(
            Decoy(name="the second", said=f"{second.title}, {shown(second.facts[key], key)}"),
            Decoy(name="name of the second, number of the first", said=f"{second.title}, {value}"),
            Decoy(name="the other end", said=f"{ranked[-1].title}, {shown(ranked[-1].facts[key], key)}"),
        ),
    )


@templates.add(
    "How many of the mountains in the list are in {country}?",
    "Count the mountains of {country} in the list of mountains.",
    "According to the list of mountains, how many stand in {country}?",
    level=2,
)
def count_rows(library: Library, rng: random.Random) -> Case:
    country = rng.choice(library.of("country"))
    n = sum(a.facts["country"] == country.title for a in library.of("mountain"))
    return Case(
        words={"country": country.title},
        goal=Goal(answer=Number(value=n), facts=("table:mountain",)),
        script=(
            Click("list-mountain", "There is a list of mountains."),
            Click("by-country", "Sorted by country, they stand together."),
            Read("table", f"I count {n} in {country.title}."),
        ),
        said=str(n),
        decoys=(Decoy(name="one more", said=str(n + 1)), Decoy(name="two numbers", said=f"{n} or {n + 1}")),
    )


@templates.add(
    "Who was the first to climb {title}?",
    "Name the person who first climbed {title}.",
    "{title} was climbed for the first time by whom?",
    level=2,
)
def climber(library: Library, rng: random.Random) -> Case:
    a = rng.choice(library.of("mountain"))
    name = str(a.facts["climber"])
    others = tuple(p.title for p in library.of("person") if p.title != name)
    return Case(
        words={"title": a.title},
        goal=Goal(answer=Text(spellings=(name,), others=others), facts=_fact(a)),
        script=(*_open(a), Read("s-History", f"The history says that {name} was the first.")),
        said=name,
        decoys=(
            Decoy(name="somebody else", said=others[0]),
            Decoy(name="first name only", said=name.split()[0]),
            Decoy(name="two names", said=f"{name} or {others[1]}"),
        ),
    )


@templates.add(
    "What is the most important export of the country that {title} flows through?",
    "{title} flows through a country. What does that country mainly export?",
    "Find the country of {title}, then name that country's most important export.",
    level=3,
)
def two_hops(library: Library, rng: random.Random) -> Case:
    river = rng.choice(library.of("river"))
    country = library.articles[str(river.facts["country"]).lower()]
    good = str(country.facts["export"])
    others = tuple(str(c.facts["export"]) for c in library.of("country") if c is not country)
    return Case(
        words={"title": river.title},
        goal=Goal(answer=Text(spellings=(good,), others=others), facts=_fact(river, country)),
        script=(
            *_open(river),
            Read("box", f"{river.title} flows through {country.title}."),
            *_open(country),
            Read("s-Economy", f"{country.title} mainly exports {good}."),
        ),
        said=good,
        decoys=(
            Decoy(name="export of another country", said=others[0]),
            Decoy(name="country never opened", facts=_fact(river)),
        ),
    )


@templates.add(
    "Who was born earlier, {a} or {b}? And in which year was that person born?",
    "Compare {a} and {b}: name the one who was born first and the year of birth.",
    "Of {a} and {b}, who is older, and what is the year of birth?",
    level=3,
    held_out=True,
)
def older(library: Library, rng: random.Random) -> Case:
    a, b = rng.sample(library.of("person"), 2)
    first, second = sorted((a, b), key=lambda p: int(p.facts["born"]))
    year = int(first.facts["born"])
    return Case(
        words={"a": a.title, "b": b.title},
        goal=Goal(
            answer=All(parts=(Text(spellings=(first.title,), others=(second.title,)), Number(value=year))),
            facts=_fact(a, b),
        ),
        script=(
            *_open(a),
            Read("box", f"{a.title} was born in {a.facts['born']}."),
            *_open(b),
            Read("box", f"{b.title} was born in {b.facts['born']}."),
        ),
        said=f"{first.title}, born in {year}",
        decoys=(
            Decoy(name="the younger one", said=f"{second.title}, born in {second.facts['born']}"),
            Decoy(name="year of the other", said=f"{first.title}, born in {second.facts['born']}"),
            Decoy(name="only one article seen", facts=_fact(a)),
        ),
    )


@templates.add(
    "Does {a} border on {b}? Answer yes or no.",
    "Yes or no: do {a} and {b} share a border?",
    "Are {a} and {b} neighbours? Say yes or no.",
    level=2,
    held_out=True,
)
def border(library: Library, rng: random.Random) -> Case:
    a = rng.choice(library.of("country"))
    near = list(a.links)
    far = [c.slug for c in library.of("country") if c.slug not in near and c is not a]
    yes = rng.random() < 0.5
    b = library.articles[rng.choice(near if yes else far)]
    word = "yes" if yes else "no"
    return Case(
        words={"a": a.title, "b": b.title},
        goal=Goal(answer=YesNo(yes=yes), facts=_fact(a)),
        script=(*_open(a), Read("s-Geography", f"The neighbours are listed; the answer is {word}.")),
        said=word.capitalize(),
        decoys=(
            Decoy(name="the opposite", said="No" if yes else "Yes"),
            Decoy(name="both", said="Yes and no"),
        ),
    )


@templates.add(
    "How many kilometres longer is {a} than {b}?",
    "By how many kilometres does the length of {a} exceed that of {b}?",
    "{a} is longer than {b}. What is the difference in kilometres?",
    level=3,
)
def difference(library: Library, rng: random.Random) -> Case:
    a, b = sorted(rng.sample(library.of("river"), 2), key=lambda r: -int(r.facts["length"]))
    long, short = int(a.facts["length"]), int(b.facts["length"])
    return Case(
        words={"a": a.title, "b": b.title},
        goal=Goal(answer=Number(value=long - short, given=(shown(long), shown(short))), facts=("table:river",)),
        script=(
            Click("list-river", "The list of rivers has both lengths."),
            Read(f"row-{a.slug}", f"{a.title} is {long} km long."),
            Read(f"row-{b.slug}", f"{b.title} is {short} km long; the difference is {long - short}."),
        ),
        said=f"{long - short:,} km",
        decoys=(
            Decoy(name="the sum", said=str(long + short)),
            Decoy(name="one length", said=f"{long} km"),
        ),
    )


@templates.add(
    "Report a mistake in the article on {title}: section {section}, reason “{reason}”, details: {text}",
    "In the article on {title}, something in the section {section} needs a report. Reason: {reason}. Write: {text}",
    "Send a report about {title} (section {section}, reason {reason}) with the text: {text}",
    level=3,
)
def report(library: Library, rng: random.Random) -> Case:
    a, other = rng.sample(list(library.articles.values()), 2)
    reason = rng.choice(("wrong", "outdated", "spelling"))
    section = rng.choice(("Geography", "Economy", "Culture"))
    text = rng.choice(("The second sentence needs a source.", "This was changed last year.", "Please check the name."))
    right = {"article": a.slug, "reason": reason, "section": section, "text": Like(text)}
    return Case(
        words={"title": a.title, "reason": REASONS[reason], "section": section, "text": text},
        goal=Goal(changes={"report/1": right}),
        script=(
            *_open(a),
            Click("report", "The link to report a mistake is at the end of the article."),
            Click(f"reason-{reason}", f"The reason is: {REASONS[reason]}."),
            Choose("section", section, f"It is about the section {section}."),
            Fill("text", text, "These are the details."),
            Click("send", "The report is complete."),
        ),
        decoys=(
            Decoy(name="another article", changes={"report/1": {**right, "article": other.slug}}),
            Decoy(name="default reason", changes={"report/1": {**right, "reason": "other"}}),
            Decoy(name="default section", changes={"report/1": {**right, "section": "History"}}),
            Decoy(name="sent twice", changes={"report/1": right, "report/2": right}),
        ),
    )


@templates.add(
    "Put the {n} {most} {plural} on the reading list.",
    "Reading list, please: the {n} {most} of all {plural}.",
    "Save the articles on the {n} {most} {plural} for later.",
    level=3,
)
def save_top(library: Library, rng: random.Random) -> Case:
    kind, key, most, _, down = rng.choice([x for x in _EXTREMES if x[0] != "person"])
    n = 2
    ranked = sorted(library.of(kind), key=lambda a: int(a.facts[key]), reverse=down)
    order = [Click(f"by-{key}", "I sort the table.")] * (2 if down else 1)
    steps: list[Move] = []
    for a in ranked[:n]:
        steps += [
            Click("nav-home", "The lists are on the start page."),
            Click(f"list-{kind}", f"I open the list of {KINDS[kind]}."),
            *order,
            Click(f"row-{a.slug}", f"{a.title} is one of them."),
            Click("save", "I save it."),
        ]
    changes = {f"list/{a.slug}": True for a in ranked[:n]}
    wrong = {f"list/{a.slug}": True for a in (ranked[0], ranked[n])}
    return Case(
        words={"n": n, "most": most, "plural": KINDS[kind]},
        goal=Goal(changes=changes),
        script=tuple(steps[1:]),
        decoys=(
            Decoy(name="first and third", changes=wrong),
            Decoy(name="three of them", changes={**changes, **wrong}),
        ),
    )


SITE = Site(
    name="knowledge",
    title="Elsewhere",
    about="an encyclopaedia: search, long articles, sortable tables, links, reading list, reports",
    skins=(PAPER, PLAIN, DUSK),
    templates=templates,
    routes=pages.routes,
    build=data.build,
    start=pages.start,
    menu=(("start", "Start", "/"), ("reading", "Reading list", "/reading"), ("settings", "Settings", "/settings")),
)
