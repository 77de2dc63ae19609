"""An invented corner of the world from a seed: countries, rivers, mountains, people, and articles about them.

Everything is made up, so that no answer can be known without looking. Numbers of one kind are all different.
"""

from __future__ import annotations

import dataclasses
import functools
import random

_HEADS = (
    "Bal",
    "Cor",
    "Dra",
    "Eld",
    "Fen",
    "Gal",
    "Hal",
    "Ist",
    "Jor",
    "Kel",
    "Lun",
    "Mar",
    "Nor",
    "Orl",
    "Pel",
    "Quo",
    "Ras",
    "Sel",
    "Tor",
    "Ulm",
    "Ver",
    "Wes",
    "Yar",
    "Zan",
)
_TAILS = ["avia", "eth", "imar", "ona", "usk", "and", "ova", "iel", "andor", "essa", "ik", "umar", "eda", "oria"]
_FIRST = (
    "Alma",
    "Bruno",
    "Celia",
    "Dorian",
    "Elsa",
    "Farid",
    "Greta",
    "Henrik",
    "Isolde",
    "Jonas",
    "Katya",
    "Ludo",
    "Mirela",
    "Nadir",
    "Olga",
    "Pavel",
)
_LAST = (
    "Abend",
    "Borg",
    "Castell",
    "Dvorin",
    "Ekholm",
    "Farkas",
    "Grell",
    "Hollis",
    "Ivers",
    "Jansky",
    "Kovar",
    "Lindt",
    "Morrow",
    "Novik",
    "Oster",
    "Prell",
)
_THINGS = (
    "tide clock",
    "rain organ",
    "pocket loom",
    "salt lamp",
    "wind plough",
    "echo compass",
    "glass kite",
    "steam abacus",
    "moon dial",
    "ice drill",
    "paper lens",
    "star sextant",
)
_LANGUAGES = ("Old Coastal", "Highland", "Lake", "Plain", "River", "Forest")
_GOODS = ("wool", "amber", "timber", "salt", "copper", "cheese", "glass", "tea", "honey", "slate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Article:
    """One article: `box` are the facts at its side, `sections` its (title, paragraphs), `facts` all that is true."""

    slug: str
    title: str
    kind: str
    box: tuple[tuple[str, str], ...]
    sections: tuple[tuple[str, tuple[str, ...]], ...]
    facts: dict[str, int | str]
    links: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """All articles by slug."""

    articles: dict[str, Article]

    def of(self, kind: str) -> list[Article]:
        """Articles of a kind, by title."""
        return sorted((a for a in self.articles.values() if a.kind == kind), key=lambda a: a.title)


KINDS = {"country": "countries", "river": "rivers", "mountain": "mountains", "person": "people"}
COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "country": (("capital", "Capital"), ("population", "Population"), ("area", "Area (km²)"), ("founded", "Founded")),
    "river": (("length", "Length (km)"), ("country", "Country"), ("mouth", "Mouth")),
    "mountain": (("height", "Height (m)"), ("country", "Country"), ("climbed", "First climbed")),
    "person": (("born", "Born"), ("country", "Country"), ("invention", "Invention"), ("year", "Year of invention")),
}


def shown(value: int | str, key: str = "") -> str:
    """A fact as an article writes it: thousands separated, years not."""
    if isinstance(value, int) and key not in ("founded", "climbed", "born", "year"):
        return f"{value:,}"
    return str(value)


def _filler(rng: random.Random, name: str, n: int) -> tuple[str, ...]:
    starts = (
        f"Travellers of the last century describe {name} in warm words.",
        f"Several festivals a year are connected with {name}.",
        f"Painters have been drawn to {name} for generations.",
        f"The archives about {name} were moved twice and are now open to the public.",
        f"A small museum keeps what is known about {name}.",
        f"School children learn a song about {name}.",
        f"Opinions about {name} have changed with the times.",
    )
    ends = (
        "Most of the sources are letters and account books.",
        "Little of that has been studied in detail.",
        "The oldest maps differ on this point.",
        "Visitors come mostly in late spring and early autumn.",
        "It has been a subject of quiet dispute among scholars.",
        "A revised edition of the standard work is in preparation.",
    )
    return tuple(
        " ".join((rng.choice(starts), *rng.sample(ends, 3), rng.choice(starts), *rng.sample(ends, 2))) for _ in range(n)
    )


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


@functools.lru_cache(maxsize=64)
def build(seed: int) -> Library:
    """8 countries, 12 rivers, 12 mountains, 12 people."""
    rng = random.Random(f"knowledge/{seed}")
    names = [h + t for h in _HEADS for t in _TAILS]
    rng.shuffle(names)
    take = iter(names)
    articles: dict[str, Article] = {}

    def add(
        kind: str, title: str, facts: dict[str, int | str], lines: dict[str, str], links: list[str], own: str
    ) -> None:
        order = ["History", "Geography", "Economy", "Culture", "Legacy"]
        sections = [
            (name, (*_filler(rng, own, 2), *([lines[name]] if name in lines else []), *_filler(rng, own, 1)))
            for name in order
        ]
        labels = dict(COLUMNS[kind])
        box = tuple((labels[k].split(" (")[0], shown(v, k) + _unit(k)) for k, v in facts.items() if k in labels)
        articles[_slug(title)] = Article(
            slug=_slug(title),
            title=title,
            kind=kind,
            box=box,
            sections=tuple(sections),
            facts=facts,
            links=tuple(links),
        )

    countries = [next(take) for _ in range(8)]
    populations, areas = rng.sample(range(200, 9800), 8), rng.sample(range(11, 480), 8)
    founded = rng.sample(range(1100, 1900), 8)
    goods = rng.sample(_GOODS, 8)
    for i, name in enumerate(countries):
        # Borders are a ring, so that every country has exactly two neighbours.
        neighbours = sorted((countries[i - 1], countries[(i + 1) % 8]))
        facts = {
            "capital": next(take),
            "population": populations[i] * 1000,
            "area": areas[i] * 100,
            "founded": founded[i],
            "language": rng.choice(_LANGUAGES),
            "export": goods[i],
            "parliament": rng.randint(51, 399),
        }
        lines = {
            "Economy": f"The most important export of {name} is {facts['export']}.",
            "Geography": f"{name} borders on {neighbours[0]} and {neighbours[1]}.",
            "Legacy": f"The parliament of {name} has {facts['parliament']} seats; its language is {facts['language']}.",
        }
        add("country", name, facts, lines, [_slug(n) for n in neighbours], name)
    lengths = rng.sample(range(120, 3900), 12)
    for length in lengths:
        title, country = f"River {next(take)}", rng.choice(countries)
        capital = str(articles[_slug(country)].facts["capital"])
        facts = {"length": length, "country": country, "mouth": f"{next(take)} Bay", "bridges": rng.randint(3, 60)}
        lines = {
            "Geography": f"On its way through {country} it passes the capital, {capital}.",
            "Culture": f"There are {facts['bridges']} bridges over {title}.",
        }
        add("river", title, facts, lines, [_slug(country)], title)
    heights, climbed = rng.sample(range(1200, 7900), 12), rng.sample(range(1790, 1960), 12)
    people = [f"{a} {b}" for a, b in zip(rng.sample(_FIRST, 12), rng.sample(_LAST, 12), strict=True)]
    for i, height in enumerate(heights):
        title, country = f"Mount {next(take)}", rng.choice(countries)
        facts = {"height": height, "country": country, "climbed": climbed[i], "climber": people[i]}
        lines = {"History": f"{people[i]} was the first to climb {title}, in {climbed[i]}."}
        add("mountain", title, facts, lines, [_slug(country)], title)
    born = rng.sample(range(1740, 1930), 12)
    things = rng.sample(_THINGS, 12)
    for i, person in enumerate(people):
        country = rng.choice(countries)
        facts = {
            "born": born[i],
            "country": country,
            "invention": things[i],
            "year": born[i] + rng.randint(22, 60),
            "siblings": rng.randint(2, 11),
        }
        lines = {
            "History": f"{person} grew up with {facts['siblings']} brothers and sisters.",
            "Legacy": f"The {things[i]} was shown to the public for the first time in {facts['year']}.",
        }
        add("person", person, facts, lines, [_slug(country)], person)
    return Library(articles=articles)


def _unit(key: str) -> str:
    return {"length": " km", "height": " m", "area": " km²"}.get(key, "")
