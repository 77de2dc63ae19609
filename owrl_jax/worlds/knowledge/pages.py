"""The pages of the encyclopaedia.

State: `list/<slug>` an article on the reading list; `report/<n>` a reported mistake; `language` of the menus.
Facts: `article:<slug>`, `table:<kind>`, `search:<words>`.
"""

from __future__ import annotations

from typing import Any

from owrl_jax.worlds.goals import State, normal
from owrl_jax.worlds.html import e, field, options, radios, table
from owrl_jax.worlds.knowledge.data import COLUMNS, KINDS, Article, Library, shown
from owrl_jax.worlds.messages import Request, Response, see_other
from owrl_jax.worlds.site import Episode, NoSuchPage, Routes

routes = Routes()
REASONS = {"wrong": "A fact is wrong", "outdated": "Out of date", "spelling": "Spelling", "other": "Something else"}


def start(library: Library) -> State:
    """An empty reading list."""
    return {"text_size": "normal"}


def _article(episode: Episode, slug: str) -> Article:
    if slug not in episode.world.articles:
        raise NoSuchPage(f"There is no article {slug}.")
    return episode.world.articles[slug]


def _search_box(text: str = "") -> Any:
    box = e.input(type="search", name="q", id="q", value=text, placeholder="Search articles", size=40)
    return e.form(box, e.button("Search", id="search"), action="/search", cls="row")


@routes.get("/")
def home(episode: Episode, request: Request) -> Response:
    links = [
        e.a(f"List of {plural}", href=f"/list/{kind}", id=f"list-{kind}", cls="card") for kind, plural in KINDS.items()
    ]
    return episode.page(
        "Start", e.h1("The atlas of elsewhere"), _search_box(), e.h2("Browse"), e.div(links, cls="cards"), here="start"
    )


@routes.get("/search")
def search(episode: Episode, request: Request) -> Response:
    """Articles whose title has all words, then those whose facts do."""
    words = normal(request.get("q")).split()
    episode.see("search:" + " ".join(words))

    def rank(a: Article) -> int:
        title = normal(a.title)
        text = title + " " + normal(" ".join(str(v) for v in a.facts.values()))
        return 0 if all(w in title for w in words) else 1 if all(w in text for w in words) else 2

    found = sorted(
        (a for a in episode.world.articles.values() if words and rank(a) < 2), key=lambda a: (rank(a), a.title)
    )
    results = [
        e.p(e.a(a.title, href=f"/a/{a.slug}", id=f"hit-{a.slug}"), e.span(f" · {a.kind}", cls="muted"))
        for a in found[:15]
    ]
    return episode.page("Search", _search_box(request.get("q")), e.h1("Results"), results or e.p("Nothing was found."))


@routes.get("/list/{kind}")
def listing(episode: Episode, request: Request, kind: str) -> Response:
    """All articles of a kind as a table, which can be sorted by a column."""
    if kind not in KINDS:
        raise NoSuchPage(f"There is no list {kind}.")
    episode.see(f"table:{kind}")
    by, columns = request.get("by"), COLUMNS[kind]
    articles = episode.world.of(kind)
    if by in dict(columns):
        articles = sorted(articles, key=lambda a: a.facts[by], reverse=request.get("down") == "1")
    head = [
        "Name",
        *(
            e.a(
                label,
                href=f"/list/{kind}?by={key}" + ("&down=1" if by == key and not request.get("down") else ""),
                id=f"by-{key}",
            )
            for key, label in columns
        ),
    ]
    rows = [
        e.tr(
            e.td(e.a(a.title, href=f"/a/{a.slug}", id=f"row-{a.slug}")),
            [e.td(shown(a.facts[k], k)) for k, _ in columns],
        )
        for a in articles
    ]
    title = f"List of {KINDS[kind]}"
    return episode.page(title, e.h1(title), e.p("Click a heading to sort."), table(head, rows, id="table"))


@routes.get("/a/{slug}")
def article(episode: Episode, request: Request, slug: str) -> Response:
    a = _article(episode, slug)
    episode.see(f"article:{slug}")
    listed = f"list/{slug}" in episode.state
    save = e.form(
        e.button("Remove from reading list" if listed else "Add to reading list", id="save", cls="quiet"),
        method="post",
        action=f"/a/{slug}/save",
    )
    related = [e.a(episode.world.articles[s].title, href=f"/a/{s}", id=f"see-{s}", cls="chip") for s in a.links]
    return episode.page(
        a.title,
        _search_box(),
        e.div(
            e.div(
                e.h1(a.title),
                e.p(f"{a.title} is one of the {KINDS[a.kind]} described in this atlas."),
                [
                    e.section(e.h2(name), [e.p(p) for p in paragraphs], id=f"s-{name}")
                    for name, paragraphs in a.sections
                ],
                e.h2("See also"),
                e.p(related),
                e.p(e.a("Report a mistake", href=f"/a/{slug}/report", id="report")),
                cls="grow",
            ),
            e.div(table((a.title, ""), a.box, id="box"), save, cls="side", style="width:310px"),
            cls="split",
        ),
    )


@routes.post("/a/{slug}/save")
def save(episode: Episode, request: Request, slug: str) -> Response:
    _article(episode, slug)
    if episode.state.pop(f"list/{slug}", None) is None:
        episode.state[f"list/{slug}"] = True
    return see_other(f"/a/{slug}")


@routes.get("/reading")
def reading(episode: Episode, request: Request) -> Response:
    slugs = [k.removeprefix("list/") for k in episode.state if k.startswith("list/")]
    items = [e.p(e.a(_article(episode, s).title, href=f"/a/{s}", id=f"item-{s}")) for s in slugs]
    return episode.page("Reading list", e.h1("Reading list"), items or e.p("It is empty."), here="reading")


@routes.get("/a/{slug}/report")
def report(episode: Episode, request: Request, slug: str) -> Response:
    a = _article(episode, slug)
    form = e.form(
        field("What is wrong?", radios("reason", REASONS.items(), "other"), "reason"),
        field(
            "Section",
            e.select(options([(s, s) for s, _ in a.sections], "History"), name="section", id="section"),
            "section",
        ),
        field("Details", e.textarea(name="text", id="text"), "text"),
        e.button("Send report", id="send"),
        method="post",
        action=f"/a/{slug}/report",
    )
    return episode.page("Report a mistake", e.h1(f"Report a mistake in {a.title}"), form)


@routes.post("/a/{slug}/report")
def send_report(episode: Episode, request: Request, slug: str) -> Response:
    _article(episode, slug)
    if request.sent("reason") not in REASONS or not request.sent("text"):
        back = e.a("Back", href=f"/a/{slug}/report", id="back")
        return episode.page("Report", e.p("Please say what is wrong.", cls="note"), back)
    n = 1 + sum(k.startswith("report/") for k in episode.state)
    episode.state[f"report/{n}"] = {
        "article": slug,
        "reason": request.sent("reason"),
        "section": request.sent("section"),
        "text": request.sent("text"),
    }
    return episode.page("Thank you", e.h1("Thank you"), e.p("An editor will look at it."))


@routes.get("/settings")
def settings(episode: Episode, request: Request) -> Response:
    sizes = (("small", "Small"), ("normal", "Normal"), ("large", "Large"))
    form = e.form(
        field("Text size", radios("text_size", sizes, episode.state["text_size"]), "text_size"),
        e.button("Save", id="save"),
        method="post",
        action="/settings",
    )
    return episode.page("Settings", e.h1("Settings"), form, here="settings")


@routes.post("/settings")
def save_settings(episode: Episode, request: Request) -> Response:
    if request.sent("text_size") in ("small", "normal", "large"):
        episode.state["text_size"] = request.sent("text_size")
    return see_other("/settings")
