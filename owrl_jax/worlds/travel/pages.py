"""The pages of the travel agency.

State: `trip/<reference>` a booked flight, `stay/<n>` a booked hotel. New flight bookings get the reference `NEW<n>`.
Facts: `flights:<from>:<to>:<day>`, `hotels:<city>`, `hotel:<id>`, `trip:<reference>`.
"""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

from markupsafe import Markup

from owrl_jax.worlds.goals import State, normal
from owrl_jax.worlds.html import checkbox, e, field, hidden, options, radios, table
from owrl_jax.worlds.messages import Request, Response, json_response, see_other, whole
from owrl_jax.worlds.site import Episode, NoSuchPage, Routes
from owrl_jax.worlds.travel.data import AMENITIES, CITIES, MEALS, TODAY, Flight, Hotel, Travel, clock, label

routes = Routes()
FLIGHT_ORDERS = {"departure": "Departure", "price": "Price", "duration": "Duration", "arrival": "Arrival"}
HOTEL_ORDERS = {"name": "Name", "price": "Price", "rating": "Guest rating"}


def start(travel: Travel) -> State:
    """The bookings that the visitor already has."""
    return {f"trip/{ref}": booking(f, "", meal, bag) for ref, f, meal, bag in travel.trips}


def booking(f: Flight, passenger: Any, meal: str, bag: bool) -> dict[str, Any]:
    """The state entry of a booked flight."""
    return {"flight": f.ident, "from": f.origin, "to": f.to, "passenger": passenger, "meal": meal, "bag": bag}


def city_code(text: str) -> str | None:
    """The code of a city written as `Oslo (OSL)`, `Oslo` or `OSL`."""
    match = re.search(r"\(([A-Z]{3})\)", text)
    wanted = match.group(1) if match else text.strip()
    for code, name in CITIES.items():
        if normal(wanted) in (normal(code), normal(name)):
            return code
    return None


def _day(text: str) -> str | None:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        return None


def _flight(episode: Episode, ident: str) -> Flight:
    match = re.fullmatch(r"[A-E]([A-Z])([A-Z])\d{3}-(\d{4}-\d\d-\d\d)", ident)
    if match and _day(match.group(3)):
        for a in (c for c in CITIES if c[0] == match.group(1)):
            for b in (c for c in CITIES if c[0] == match.group(2) and c != a):
                for f in episode.world.flights(a, b, match.group(3)):
                    if f.ident == ident:
                        return f
    raise NoSuchPage(f"There is no flight {ident}.")


@routes.get("/suggest")
def suggest(episode: Episode, request: Request) -> Response:
    """Cities for what was typed so far, as (code, label) pairs."""
    text = normal(request.get("q"))
    found = [
        (c, label(c)) for c, name in CITIES.items() if text and (normal(name).startswith(text) or normal(c) == text)
    ]
    return json_response(json.dumps(found).encode())


def _city_field(name: str, text: str, value: str = "") -> Markup:
    box = e.input(name=name, id=name, value=value, data_suggest="/suggest", autocomplete="off", size=22)
    return field(text, box, name)


def _date_field(name: str, text: str, value: str = "") -> Markup:
    box = e.input(name=name, id=name, value=value, data_date=TODAY.isoformat(), readonly=True, size=12)
    return field(text, box, name)


@routes.get("/")
def home(episode: Episode, request: Request) -> Response:
    flight = e.form(
        e.div(_city_field("from", "From"), _city_field("to", "To"), _date_field("day", "Day"), cls="row"),
        e.button("Search flights", id="search"),
        action="/flights",
        cls="card",
    )
    return episode.page(
        "Flights",
        e.h1("Where do you want to fly?"),
        e.p(f"Today is {TODAY:%d %B %Y}.", cls="muted"),
        flight,
        here="flights",
    )


def _ordered(flights: tuple[Flight, ...], order: str) -> list[Flight]:
    keys = {"price": lambda f: f.price, "duration": lambda f: f.lasts, "arrival": lambda f: f.arrives}
    return sorted(flights, key=keys.get(order, lambda f: f.departs))


@routes.get("/flights")
def flights(episode: Episode, request: Request) -> Response:
    a, b, day = city_code(request.get("from")), city_code(request.get("to")), _day(request.get("day"))
    if a is None or b is None or day is None or a == b:
        note = e.p("Please choose two different cities from the suggestions, and a day.", cls="note")
        again = e.a("Search again", href="/", id="again")
        return episode.page("Flights", e.h1("We need a little more"), note, again, here="flights")
    if day < TODAY.isoformat():
        return episode.page(
            "Flights", e.p("This day has passed.", cls="note"), e.a("Search again", href="/", id="again")
        )
    order, nonstop = request.get("sort", "departure"), request.get("nonstop") == "1"
    found = [f for f in _ordered(episode.world.flights(a, b, day), order) if not nonstop or f.stops == 0]
    episode.see(f"flights:{a}:{b}:{day}")
    keep = {"from": label(a), "to": label(b), "day": day}
    tools = e.form(
        hidden(**keep),
        e.label("Sort by ", e.select(options(FLIGHT_ORDERS.items(), order), name="sort", id="sort", data_auto=True)),
        checkbox("nonstop", "Non-stop only", nonstop, "1"),
        e.button("Apply", id="apply", cls="quiet"),
        action="/flights",
        cls="row",
    )
    rows = [
        (
            f"{f.airline} {f.number}",
            clock(f.departs),
            clock(f.arrives),
            f"{f.lasts // 60} h {f.lasts % 60:02d}",
            "non-stop" if not f.stops else f"{f.stops} stop{'s' if f.stops > 1 else ''}",
            f"€{f.price}",
            e.a("Select", href=f"/book/{f.ident}", id=f"select-{f.number}", cls="button"),
        )
        for f in found
    ]
    head = ("Flight", "Departs", "Arrives", "Duration", "Stops", "Price", "")
    title = f"{CITIES[a]} to {CITIES[b]}, {day}"
    return episode.page(
        title, e.h1(title), e.p(f"{len(rows)} flights", id="count"), tools, table(head, rows, id="list")
    )


@routes.get("/book/{ident}")
def book(episode: Episode, request: Request, ident: str) -> Response:
    f = _flight(episode, ident)
    return episode.page(
        "Passenger",
        e.h1("Who is flying?"),
        e.p(f"{f.airline} {f.number}, {CITIES[f.origin]} to {CITIES[f.to]}, {f.day}, {clock(f.departs)}, €{f.price}"),
        e.form(
            field("First name", e.input(name="first", id="first", required=True), "first"),
            field("Last name", e.input(name="last", id="last", required=True), "last"),
            field("Meal", radios("meal", MEALS.items(), "standard"), "meal"),
            e.p(checkbox("bag", "One checked bag (€30)")),
            e.button("Continue", id="continue"),
            method="post",
            action=f"/book/{ident}/review",
        ),
    )


@routes.post("/book/{ident}/review")
def review(episode: Episode, request: Request, ident: str) -> Response:
    f = _flight(episode, ident)
    first, last, meal, bag = (request.sent(n) for n in ("first", "last", "meal", "bag"))
    if not first or not last or meal not in MEALS:
        back = e.a("Back", href=f"/book/{ident}", id="back")
        return episode.page("Passenger", e.p("First and last name are needed.", cls="note"), back)
    rows = [
        ("Flight", f"{f.airline} {f.number}"),
        ("Route", f"{CITIES[f.origin]} to {CITIES[f.to]}"),
        ("Day", f"{f.day}, {clock(f.departs)}"),
        ("Passenger", f"{first} {last}"),
        ("Meal", MEALS[meal]),
        ("Checked bag", "yes" if bag else "no"),
        ("Total", f"€{f.price + (30 if bag else 0)}"),
    ]
    form = e.form(
        hidden(first=first, last=last, meal=meal, bag=bag),
        e.button("Confirm booking", id="confirm"),
        method="post",
        action=f"/book/{ident}/confirm",
    )
    return episode.page("Review", e.h1("Is everything right?"), table(("", ""), rows), form)


@routes.post("/book/{ident}/confirm")
def confirm(episode: Episode, request: Request, ident: str) -> Response:
    f = _flight(episode, ident)
    first, last, meal = request.sent("first"), request.sent("last"), request.sent("meal")
    if not first or not last or meal not in MEALS:
        return see_other(f"/book/{ident}")
    reference = f"NEW{1 + sum(k.startswith('trip/NEW') for k in episode.state)}"
    episode.state[f"trip/{reference}"] = booking(f, f"{first} {last}", meal, request.sent("bag") == "on")
    return see_other(f"/trips/{reference}")


@routes.get("/trips")
def trips(episode: Episode, request: Request) -> Response:
    rows = []
    for key, trip in episode.state.items():
        if key.startswith("trip/"):
            ref, f = key.removeprefix("trip/"), _flight(episode, trip["flight"])
            link = e.a("Open", href=f"/trips/{ref}", id=f"trip-{ref}")
            rows.append((ref, f"{CITIES[f.origin]} to {CITIES[f.to]}", f.day, link))
    stays = [
        e.p(f"{s['hotel']}: {s['from']} to {s['until']}") for k, s in episode.state.items() if k.startswith("stay/")
    ]
    head = ("Reference", "Route", "Day", "")
    return episode.page("My trips", e.h1("My trips"), table(head, rows), e.h2("Hotels"), stays, here="trips")


def _trip(episode: Episode, ref: str) -> dict[str, Any]:
    if f"trip/{ref}" not in episode.state:
        raise NoSuchPage(f"There is no booking {ref}.")
    return episode.state[f"trip/{ref}"]


@routes.get("/trips/{ref}")
def trip(episode: Episode, request: Request, ref: str) -> Response:
    t = _trip(episode, ref)
    f = _flight(episode, t["flight"])
    episode.see(f"trip:{ref}")
    rows = [
        ("Flight", f"{f.airline} {f.number}"),
        ("Route", f"{CITIES[f.origin]} to {CITIES[f.to]}"),
        ("Day", f.day),
        ("Departs", clock(f.departs)),
        ("Arrives", clock(f.arrives)),
        ("Meal", MEALS[t["meal"]]),
        ("Checked bag", "yes" if t["bag"] else "no"),
    ]
    change = e.form(
        field("Meal", radios("meal", MEALS.items(), t["meal"]), "meal"),
        e.p(checkbox("bag", "One checked bag (€30)", t["bag"])),
        e.button("Save changes", id="save"),
        method="post",
        action=f"/trips/{ref}/change",
    )
    cancel = e.a("Cancel this booking", href=f"/trips/{ref}/cancel", id="cancel")
    return episode.page(
        f"Booking {ref}",
        e.h1(f"Booking {ref}"),
        table(("", ""), rows, id="details"),
        e.h2("Change"),
        change,
        e.p(cancel),
    )


@routes.post("/trips/{ref}/change")
def change(episode: Episode, request: Request, ref: str) -> Response:
    t = _trip(episode, ref)
    if request.sent("meal") in MEALS:
        episode.state[f"trip/{ref}"] = {**t, "meal": request.sent("meal"), "bag": request.sent("bag") == "on"}
    return see_other(f"/trips/{ref}")


@routes.get("/trips/{ref}/cancel")
def ask_cancel(episode: Episode, request: Request, ref: str) -> Response:
    _trip(episode, ref)
    form = e.form(e.button("Yes, cancel it", id="yes"), method="post", action=f"/trips/{ref}/cancel")
    keep = e.a("No, keep it", href=f"/trips/{ref}", id="keep")
    return episode.page("Cancel", e.h1(f"Cancel booking {ref}?"), e.p("This cannot be undone."), form, e.p(keep))


@routes.post("/trips/{ref}/cancel")
def cancel(episode: Episode, request: Request, ref: str) -> Response:
    _trip(episode, ref)
    del episode.state[f"trip/{ref}"]
    return see_other("/trips")


@routes.get("/hotels")
def hotels(episode: Episode, request: Request) -> Response:
    city, order = city_code(request.get("city")), request.get("sort", "name")
    arrival, leaving = _day(request.get("from")), _day(request.get("until"))
    wanted = [a for a in AMENITIES if request.get(a) == "1"]
    form = e.form(
        e.div(
            _city_field("city", "City", label(city) if city else ""),
            _date_field("from", "Arrival", arrival or ""),
            _date_field("until", "Departure", leaving or ""),
            cls="row",
        ),
        e.div(
            [
                e.label(e.input(type="checkbox", name=a, value="1", id=a, checked=a in wanted), f" {a}")
                for a in AMENITIES
            ],
            e.label(" Sort by ", e.select(options(HOTEL_ORDERS.items(), order), name="sort", id="sort")),
            cls="row",
        ),
        e.button("Search hotels", id="search"),
        action="/hotels",
        cls="card",
    )
    cards: list[Markup] = []
    if city:
        episode.see(f"hotels:{city}")
        keys = {"price": lambda h: h.price, "rating": lambda h: -h.rating}
        found = [h for h in episode.world.in_city(city) if set(wanted) <= set(h.amenities)]
        query = f"?from={arrival or ''}&until={leaving or ''}"
        cards = [
            e.div(
                e.a(h.name, href=f"/hotels/{h.ident}{query}", id=f"hotel-{h.ident}", cls="name"),
                e.div(f"{'★' * h.stars} · guests: {h.rating / 10:.1f} of 10"),
                e.div(e.span(f"€{h.price}", cls="price"), " a night"),
                e.div(", ".join(h.amenities), cls="muted"),
                cls="card",
            )
            for h in sorted(found, key=keys.get(order, lambda h: h.name))
        ]
    return episode.page(
        "Hotels", e.h1("Hotels"), form, e.h2(f"{len(cards)} found"), e.div(cards, cls="cards"), here="hotels"
    )


def _hotel(episode: Episode, ident: str) -> Hotel:
    for h in episode.world.hotels:
        if h.ident == ident:
            return h
    raise NoSuchPage(f"There is no hotel {ident}.")


@routes.get("/hotels/{ident}")
def hotel(episode: Episode, request: Request, ident: str) -> Response:
    h = _hotel(episode, ident)
    episode.see(f"hotel:{ident}")
    form = e.form(
        e.div(
            _date_field("from", "Arrival", _day(request.get("from")) or ""),
            _date_field("until", "Departure", _day(request.get("until")) or ""),
            field("Guests", e.select(options([(str(n), str(n)) for n in range(1, 5)], "1"), name="n", id="n"), "n"),
            cls="row",
        ),
        field("Name", e.input(name="name", id="name", required=True), "name"),
        e.button("Book", id="book"),
        method="post",
        action=f"/hotels/{ident}/book",
    )
    rows = [
        ("Stars", h.stars),
        ("Guest rating", f"{h.rating / 10:.1f} of 10"),
        ("Price a night", f"€{h.price}"),
        ("Amenities", ", ".join(h.amenities)),
    ]
    return episode.page(h.name, e.h1(h.name), table(("", ""), rows, id="details"), e.h2("Book a room"), form)


@routes.post("/hotels/{ident}/book")
def book_hotel(episode: Episode, request: Request, ident: str) -> Response:
    h = _hotel(episode, ident)
    arrival, leaving, name = _day(request.sent("from")), _day(request.sent("until")), request.sent("name")
    if not name or not arrival or not leaving or arrival >= leaving or not 1 <= whole(request.sent("n")) <= 4:
        back = e.a("Back", href=f"/hotels/{ident}", id="back")
        return episode.page("Book", e.p("Two days in the right order and a name are needed.", cls="note"), back)
    n = 1 + sum(k.startswith("stay/") for k in episode.state)
    episode.state[f"stay/{n}"] = {
        "hotel": h.name,
        "from": arrival,
        "until": leaving,
        "guests": whole(request.sent("n")),
        "name": name,
    }
    return see_other("/trips")
