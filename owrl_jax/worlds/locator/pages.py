"""The pages of the store locator.

State: `my_store` number or None; `visit/<n>` an appointment; `call/<n>` a request to be called back.
Facts: `map:<column>-<row>` (zoomed), `map`, `store:<n>`, `list`, `way:<a>:<b>`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from owrl_jax.worlds.goals import State, normal
from owrl_jax.worlds.html import checkbox, e, element, field, options, radios, table
from owrl_jax.worlds.locator.data import (
    COLUMNS,
    DAYS,
    DISTRICTS,
    HEIGHT,
    ROWS,
    SERVICES,
    SLOTS,
    WIDTH,
    Store,
    Town,
    km,
)
from owrl_jax.worlds.messages import Request, Response, see_other, whole
from owrl_jax.worlds.site import Episode, NoSuchPage, Routes

routes = Routes()


def start(town: Town) -> State:
    """No store chosen."""
    return {"my_store": 0}


def hours_text(hours: tuple[int, int] | None) -> str:
    """Opening hours of a day."""
    return f"{hours[0]}:00–{hours[1]}:00" if hours else "closed"


def _store(episode: Episode, number: str) -> Store:
    found = episode.world.store(whole(number))
    if found is None:
        raise NoSuchPage(f"There is no store {number}.")
    return found


def crowded(town: Town, cell: tuple[int, int]) -> bool:
    """Whether the cell shows one cluster instead of pins."""
    return sum(s.cell == cell for s in town.stores) > 1


def _pin(x: float, y: float, size: float, label: str, href: str, ident: str, colour: str) -> Markup:
    circle = e.circle(cx=x, cy=y, r=size, fill=colour, stroke="#fff", stroke_width=size / 7)
    style = f"font-size:{size * 1.05:.0f}px;font-weight:700"
    text = e.text(label, x=x, y=y + size * 0.36, text_anchor="middle", fill="#fff", style=style)
    return e.a(circle, text, href=href, id=ident)


def _map(town: Town, zoom: tuple[int, int] | None, my_store: int) -> Markup:
    streets = [
        e.line(x1=x, y1=0, x2=x + 60, y2=HEIGHT, stroke="#c4c9d1", stroke_width=9) for x in range(-40, WIDTH, 130)
    ]
    streets += [
        e.line(x1=0, y1=y, x2=WIDTH, y2=y - 50, stroke="#c4c9d1", stroke_width=9) for y in range(60, HEIGHT + 50, 110)
    ]
    water = e.path(d=f"M0 {HEIGHT * 0.52} Q 300 {HEIGHT * 0.35} 560 {HEIGHT * 0.6} T 1000 {HEIGHT * 0.5}", fill="none")
    river = element("g", water, stroke="#8ec7e8", stroke_width=26)
    size = 17.0 if zoom is None else 7.5
    marks = [
        e.g(
            e.rect(x=x - size * 0.6, y=y - size * 0.6, width=size * 1.2, height=size * 1.2, fill="#2b2b2b"),
            e.text(name, x=x, y=y + size * 1.6, text_anchor="middle", fill="#111", style=f"font-size:{size:.0f}px"),
        )
        for name, (x, y) in town.landmarks.items()
    ]
    pins, seen = [], set()
    for s in town.stores:
        if zoom is None and crowded(town, s.cell):
            if s.cell not in seen:
                seen.add(s.cell)
                group = [o for o in town.stores if o.cell == s.cell]
                x, y = sum(o.x for o in group) / len(group), sum(o.y for o in group) / len(group)
                c, r = s.cell
                pins.append(_pin(x, y, 25, f"{len(group)}×", f"/?c={c}&r={r}", f"cluster-{c}-{r}", "#5b4b9a"))
        else:
            colour = "#1c8c4e" if s.number == my_store else "#c92a2a"
            pins.append(_pin(s.x, s.y, size, str(s.number), f"/store/{s.number}", f"pin-{s.number}", colour))
    if zoom is None:
        box = f"0 0 {WIDTH} {HEIGHT}"
    else:
        # A little more than the cell, so that its pins never stand at the very edge.
        w, h = WIDTH / COLUMNS, HEIGHT / ROWS
        box = f"{zoom[0] * w - 20:g} {zoom[1] * h - 16:g} {w + 40:g} {h + 32:g}"
    back = e.rect(x=-40, y=-40, width=WIDTH + 80, height=HEIGHT + 80, fill="#eef0ea")
    return e.svg(back, river, streets, marks, pins, viewBox=box, width=760, height=486, id="map", role="img")


@routes.get("/")
def home(episode: Episode, request: Request) -> Response:
    """The map: whole town with clusters, or one cell of it."""
    c, r = whole(request.get("c")), whole(request.get("r"))
    zoom = None
    if 0 <= c < COLUMNS and 0 <= r < ROWS:
        zoom = (c, r)
        episode.see(f"map:{c}-{r}")
    else:
        episode.see("map")
    out = e.a("Whole town", href="/", id="zoom-out", cls="chip") if zoom else None
    hint = "Numbers are stores; a purple circle holds several of them, click it to zoom in."
    mine = episode.world.store(episode.state["my_store"])
    return episode.page(
        "Map",
        e.h1("Our stores"),
        e.p(hint, cls="muted"),
        e.p(f"Your store: {mine.name}") if mine else None,
        out,
        e.div(_map(episode.world, zoom, episode.state["my_store"])),
        here="map",
    )


def _fits(s: Store, request: Request) -> bool:
    words = normal(request.get("q")).split()
    text = normal(f"{s.name} {s.district}").split()
    services = [v for k, v in request.query if k == "service"]
    return (
        all(w in text for w in words)
        and request.get("district") in ("", s.district)
        and (request.get("sunday") != "on" or s.hours[6] is not None)
        and all(v in s.services for v in services)
    )


@routes.get("/list")
def listing(episode: Episode, request: Request) -> Response:
    found = [s for s in episode.world.stores if _fits(s, request)]
    episode.see("list")
    wanted = [v for k, v in request.query if k == "service"]
    districts = [("", "any district"), *((d, d) for d in DISTRICTS)]
    form = e.form(
        e.input(type="search", name="q", id="q", value=request.get("q"), placeholder="Street", size=24),
        e.select(options(districts, request.get("district")), name="district", id="district"),
        checkbox("sunday", "Open on Sunday", request.get("sunday") == "on"),
        [checkbox("service", s, s in wanted, s) for s in SERVICES],
        e.button("Filter", id="filter"),
        action="/list",
        cls="row",
    )
    cards = [
        e.div(
            e.a(f"{s.number} · {s.name}", href=f"/store/{s.number}", id=f"store-{s.number}", cls="name"),
            e.div(s.district),
            e.div(", ".join(s.services) or "no extra services", cls="muted"),
            cls="card",
        )
        for s in found
    ]
    return episode.page(
        "List",
        e.h1("All stores"),
        form,
        e.p(f"{len(found)} stores", id="count"),
        e.div(cards, cls="cards"),
        here="list",
    )


@routes.get("/store/{number}")
def store(episode: Episode, request: Request, number: str) -> Response:
    s = _store(episode, number)
    episode.see(f"store:{s.number}")
    mine = episode.state["my_store"] == s.number
    choose = e.form(
        e.button("This is your store" if mine else "Make this my store", id="choose", disabled=mine),
        method="post",
        action=f"/store/{number}/choose",
    )
    rows = [(day, hours_text(h)) for day, h in zip(DAYS, s.hours, strict=True)]
    facts = [
        ("Address", f"{s.street}, {s.district}"),
        ("Phone", s.phone),
        ("Services", ", ".join(s.services) or "none"),
    ]
    others = [(str(o.number), o.name) for o in episode.world.stores if o is not s]
    way = e.form(
        e.label("Way to ", e.select(options(others, ""), name="to", id="to")),
        e.button("Show distance", id="way", cls="quiet"),
        action=f"/store/{number}/way",
        cls="row",
    )
    links = e.div(
        e.a("Make an appointment", href=f"/store/{number}/visit", id="visit", cls="button"),
        e.a("Call me back", href=f"/store/{number}/call", id="call", cls="button"),
        choose,
        cls="row",
    )
    return episode.page(
        s.name,
        e.h1(s.name),
        links,
        e.div(
            e.div(table(("", ""), facts, id="facts"), e.h2("Way"), way, cls="grow"),
            e.div(e.h2("Opening hours"), table(("Day", "Hours"), rows, id="hours"), cls="grow"),
            cls="split",
        ),
    )


@routes.post("/store/{number}/choose")
def choose(episode: Episode, request: Request, number: str) -> Response:
    episode.state["my_store"] = _store(episode, number).number
    return see_other(f"/store/{number}")


@routes.get("/store/{number}/way")
def way(episode: Episode, request: Request, number: str) -> Response:
    a, b = _store(episode, number), _store(episode, request.get("to"))
    episode.see(f"way:{a.number}:{b.number}")
    text = f"From {a.name} to {b.name} it is {km(a, b)} km."
    return episode.page(
        "Way", e.h1("Distance"), e.p(text, id="distance"), e.a("Back", href=f"/store/{number}", id="back")
    )


@routes.get("/store/{number}/visit")
def visit(episode: Episode, request: Request, number: str) -> Response:
    s = _store(episode, number)
    if not s.services:
        return episode.page("Appointment", e.p("This store offers no services.", cls="note"))
    form = e.form(
        field("Service", radios("service", [(x, x) for x in s.services], s.services[0]), "service"),
        field("Day", e.select(options([(d, d) for d in DAYS[:5]], "Monday"), name="day", id="day"), "day"),
        field("Time", radios("time", [(t, t) for t in SLOTS], SLOTS[0]), "time"),
        field("Name", e.input(name="name", id="name", size=30), "name"),
        e.button("Book appointment", id="book"),
        method="post",
        action=f"/store/{number}/visit",
    )
    return episode.page("Appointment", e.h1(f"Appointment at {s.name}"), form)


@routes.post("/store/{number}/visit")
def book(episode: Episode, request: Request, number: str) -> Response:
    s = _store(episode, number)
    values = {k: request.sent(k) for k in ("service", "day", "time", "name")}
    if values["service"] not in s.services or values["time"] not in SLOTS or not values["name"]:
        return _incomplete(episode, f"/store/{number}/visit")
    return _keep(episode, "visit", {"store": s.number, **values})


@routes.get("/store/{number}/call")
def call(episode: Episode, request: Request, number: str) -> Response:
    s = _store(episode, number)
    form = e.form(
        field("Your number", e.input(name="phone", id="phone", size=24), "phone"),
        field("About", e.input(name="about", id="about", size=44), "about"),
        e.button("Request call", id="send"),
        method="post",
        action=f"/store/{number}/call",
    )
    return episode.page("Call", e.h1(f"{s.name} calls you back"), form)


@routes.post("/store/{number}/call")
def request_call(episode: Episode, request: Request, number: str) -> Response:
    s = _store(episode, number)
    values = {k: request.sent(k) for k in ("phone", "about")}
    if not all(values.values()):
        return _incomplete(episode, f"/store/{number}/call")
    return _keep(episode, "call", {"store": s.number, **values})


def _incomplete(episode: Episode, back: str) -> Response:
    return episode.page("Incomplete", e.p("Please fill in everything.", cls="note"), e.a("Back", href=back, id="back"))


def _keep(episode: Episode, kind: str, value: dict[str, Any]) -> Response:
    n = 1 + sum(k.startswith(f"{kind}/") for k in episode.state)
    episode.state[f"{kind}/{n}"] = value
    return see_other("/thanks?" + urlencode({"kind": kind}))


@routes.get("/thanks")
def thanks(episode: Episode, request: Request) -> Response:
    return episode.page("Thank you", e.h1("Thank you"), e.p("Your request was received."))
