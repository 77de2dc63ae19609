"""What one can be asked to do at the travel agency: thirteen templates, and the site itself."""

from __future__ import annotations

import datetime
import random
from typing import Any

from owrl_jax.worlds.goals import GONE, All, Decoy, Goal, Like, Number, Text
from owrl_jax.worlds.script import Choose, Click, Fill, Move, PickDate, Read, Suggest
from owrl_jax.worlds.site import Case, Site, Templates
from owrl_jax.worlds.skins import DUSK, PAPER, PLAIN
from owrl_jax.worlds.travel import data, pages
from owrl_jax.worlds.travel.data import AMENITIES, CITIES, MEALS, TODAY, Flight, Hotel, Travel, clock, label
from owrl_jax.worlds.travel.pages import booking

templates = Templates()


def _route(travel: Travel, rng: random.Random) -> tuple[str, str, str, tuple[Flight, ...]]:
    a, b = rng.sample(list(CITIES), 2)
    day = (TODAY + datetime.timedelta(days=rng.randint(2, 75))).isoformat()
    return a, b, day, travel.flights(a, b, day)


def spoken(day: str) -> str:
    """A day as people write it."""
    d = datetime.date.fromisoformat(day)
    return f"{d.day} {d:%B %Y}"


def _city(field: str, code: str, why: str) -> Move:
    return Suggest(field, CITIES[code][:4], code, label(code), why)


def _search(a: str, b: str, day: str) -> tuple[Move, ...]:
    return (
        _city("from", a, f"The flight starts in {CITIES[a]}."),
        _city("to", b, f"It goes to {CITIES[b]}."),
        PickDate("day", day, f"The day is {spoken(day)}."),
        Click("search", "The form is complete."),
    )


def _words(a: str, b: str, day: str, **more: Any) -> dict[str, Any]:
    return {"a": CITIES[a], "b": CITIES[b], "day": spoken(day), **more}


def _fact(a: str, b: str, day: str) -> tuple[str, ...]:
    return (f"flights:{a}:{b}:{day}",)


def _person(rng: random.Random) -> tuple[str, str]:
    return rng.choice(("Mara", "Theo", "Lina", "Emil", "Noor")), rng.choice(
        ("Holm", "Brandt", "Sato", "Okoye", "Reyes")
    )


@templates.add(
    "How many flights are there from {a} to {b} on {day}?",
    "Count the flights from {a} to {b} on {day}.",
    "I want to fly from {a} to {b} on {day}. How many flights can I choose from?",
    level=1,
)
def count_flights(travel: Travel, rng: random.Random) -> Case:
    a, b, day, flights = _route(travel, rng)
    return Case(
        words=_words(a, b, day),
        goal=Goal(answer=Number(value=len(flights), given=(spoken(day), day)), facts=_fact(a, b, day)),
        script=(*_search(a, b, day), Read("count", f"The page says {len(flights)} flights.")),
        said=f"There are {len(flights)} flights.",
        decoys=(
            Decoy(name="one more", said=str(len(flights) + 1)),
            Decoy(name="the way back", facts=_fact(b, a, day)),
        ),
    )


@templates.add(
    "What does the cheapest flight from {a} to {b} on {day} cost?",
    "Find the lowest price for a flight from {a} to {b} on {day}.",
    "I need the cheapest way to fly from {a} to {b} on {day}: what is the price?",
    level=2,
)
def cheapest_price(travel: Travel, rng: random.Random) -> Case:
    a, b, day, flights = _route(travel, rng)
    ranked = sorted(flights, key=lambda f: f.price)
    return Case(
        words=_words(a, b, day),
        goal=Goal(
            answer=Number(value=ranked[0].price, given=(spoken(day), day, ranked[0].number)), facts=_fact(a, b, day)
        ),
        script=(
            *_search(a, b, day),
            Choose("sort", "price", "Sorted by price, the cheapest is on top."),
            Read(f"select-{ranked[0].number}", f"The first costs €{ranked[0].price}."),
        ),
        said=f"The cheapest flight costs €{ranked[0].price}.",
        decoys=(
            Decoy(name="the second cheapest", said=f"€{ranked[1].price}"),
            Decoy(name="both", said=f"€{ranked[0].price} or €{ranked[1].price}"),
        ),
    )


@templates.add(
    "When does the first non-stop flight from {a} to {b} on {day} leave?",
    "Departure time of the earliest non-stop flight, {a} to {b}, {day}?",
    "I want to fly non-stop from {a} to {b} on {day}, as early as possible. When does that flight depart?",
    level=2,
)
def first_nonstop(travel: Travel, rng: random.Random) -> Case:
    a, b, day, flights = _route(travel, rng)
    times = [clock(f.departs) for f in flights if f.stops == 0]
    every = {clock(f.departs) for f in flights} - {times[0]}
    return Case(
        words=_words(a, b, day),
        goal=Goal(
            answer=Text(spellings=(times[0], times[0].lstrip("0")), others=tuple(sorted(every))), facts=_fact(a, b, day)
        ),
        script=(
            *_search(a, b, day),
            Click("nonstop-1", "Only non-stop flights count."),
            Click("apply", "The filter must be applied."),
            Read("list", f"The first one leaves at {times[0]}."),
        ),
        said=times[0],
        decoys=(
            Decoy(name="the next one", said=times[1]),
            Decoy(name="several times", said=f"{times[0]} and {times[1]}"),
        ),
    )


@templates.add(
    "Which airline gets me from {a} to {b} earliest on {day}, and when does it arrive?",
    "Of the flights from {a} to {b} on {day}, which arrives first? Give airline and arrival time.",
    "I must be in {b} as early as possible on {day}, coming from {a}. Airline and time of arrival?",
    level=2,
    held_out=True,
)
def earliest_arrival(travel: Travel, rng: random.Random) -> Case:
    a, b, day, flights = _route(travel, rng)
    ranked = sorted(flights, key=lambda f: f.arrives)
    f, other = ranked[0], ranked[1]
    time = clock(f.arrives)
    return Case(
        words=_words(a, b, day),
        goal=Goal(
            answer=All(
                parts=(
                    Text(spellings=(f.airline,), others=tuple(x for x in data.AIRLINES if x != f.airline)),
                    Text(spellings=(time, time.lstrip("0")), others=tuple({clock(o.arrives) for o in ranked[1:]})),
                )
            ),
            facts=_fact(a, b, day),
        ),
        script=(
            *_search(a, b, day),
            Choose("sort", "arrival", "Sorted by arrival, the earliest is on top."),
            Read("list", f"{f.airline} arrives at {time}."),
        ),
        said=f"{f.airline}, arriving at {time}",
        decoys=(
            Decoy(name="time of the second", said=f"{f.airline}, arriving at {clock(other.arrives)}"),
            Decoy(name="departure instead", said=f"{f.airline}, {clock(f.departs)}"),
        ),
    )


def _book_moves(f: Flight, first: str, last: str, meal: str, bag: bool) -> tuple[Move, ...]:
    steps: list[Move] = [
        Click(f"select-{f.number}", f"I select {f.airline} {f.number}."),
        Fill("first", first, "First name of the passenger."),
        Fill("last", last, "Last name of the passenger."),
    ]
    if meal != "standard":
        steps.append(Click(f"meal-{meal}", f"The meal shall be: {MEALS[meal].lower()}."))
    if bag:
        steps.append(Click("bag", "One bag is to be checked."))
    return (
        *steps,
        Click("continue", "The passenger is complete."),
        Click("confirm", "Everything is right; I confirm."),
    )


def _near_bookings(right: dict[str, Any], other: Flight, meal: str) -> tuple[Decoy, ...]:
    wrong_meal = next(m for m in MEALS if m != meal)
    return (
        Decoy(name="another flight", changes={"trip/NEW1": {**right, "flight": other.ident}}),
        Decoy(name="another meal", changes={"trip/NEW1": {**right, "meal": wrong_meal}}),
        Decoy(name="bag the other way round", changes={"trip/NEW1": {**right, "bag": not right["bag"]}}),
        Decoy(name="somebody else", changes={"trip/NEW1": {**right, "passenger": "Max Power"}}),
        Decoy(name="booked twice", changes={"trip/NEW1": right, "trip/NEW2": right}),
    )


@templates.add(
    "Book {airline} flight {number} from {a} to {b} on {day} for {first} {last}. Standard meal, no bag.",
    "Please book {number} ({airline}), {a} to {b}, {day}, passenger {first} {last}, without a bag, standard meal.",
    "{first} {last} wants to fly from {a} to {b} on {day} with {airline} {number}. Book it: no bag, standard meal.",
    level=2,
)
def book_named(travel: Travel, rng: random.Random) -> Case:
    a, b, day, flights = _route(travel, rng)
    f, other = rng.sample(flights, 2)
    first, last = _person(rng)
    right = booking(f, Like(f"{first} {last}"), "standard", False)
    return Case(
        words=_words(a, b, day, airline=f.airline, number=f.number, first=first, last=last),
        goal=Goal(changes={"trip/NEW1": right}),
        script=(*_search(a, b, day), *_book_moves(f, first, last, "standard", False)),
        decoys=_near_bookings(right, other, "standard"),
    )


@templates.add(
    "Book the cheapest non-stop flight from {a} to {b} on {day} for {first} {last}, {meal} meal, with one checked bag.",
    "{first} {last} needs the lowest-priced non-stop flight, {a} to {b}, {day}. Meal: {meal}; one bag. Book it.",
    "Book the cheapest direct flight from {a} to {b} on {day}: passenger {first} {last}, meal {meal}, one bag.",
    level=3,
)
def book_cheapest_nonstop(travel: Travel, rng: random.Random) -> Case:
    a, b, day, flights = _route(travel, rng)
    ranked = sorted((f for f in flights if f.stops == 0), key=lambda f: f.price)
    f = ranked[0]
    first, last = _person(rng)
    meal = rng.choice(("vegetarian", "vegan"))
    right = booking(f, Like(f"{first} {last}"), meal, True)
    return Case(
        words=_words(a, b, day, first=first, last=last, meal=meal),
        goal=Goal(changes={"trip/NEW1": right}),
        script=(
            *_search(a, b, day),
            Click("nonstop-1", "Only non-stop flights will do."),
            Choose("sort", "price", "The cheapest shall be on top."),
            *_book_moves(f, first, last, meal, True),
        ),
        decoys=_near_bookings(right, ranked[1], meal),
    )


@templates.add(
    "When does my flight with booking reference {ref} leave?",
    "What is the departure time of booking {ref}?",
    "I forgot at what time my trip {ref} departs. Look it up.",
    level=1,
)
def departure_of_booking(travel: Travel, rng: random.Random) -> Case:
    ref, f, _, _ = rng.choice(travel.trips)
    time, arrival = clock(f.departs), clock(f.arrives)
    return Case(
        words={"ref": ref},
        goal=Goal(answer=Text(spellings=(time, time.lstrip("0")), others=(arrival,)), facts=(f"trip:{ref}",)),
        script=(
            Click("nav-trips", "My bookings are under My trips."),
            Click(f"trip-{ref}", f"I open {ref}."),
            Read("details", f"It departs at {time}."),
        ),
        said=time,
        decoys=(Decoy(name="arrival", said=arrival), Decoy(name="both times", said=f"{time} or {arrival}")),
    )


@templates.add(
    "Cancel my booking {ref}.",
    "I cannot travel to {b}. Cancel the booking with reference {ref}.",
    "Please cancel trip {ref} and keep my other trips.",
    level=1,
)
def cancel_booking(travel: Travel, rng: random.Random) -> Case:
    (ref, f, _, _), (other, *_) = rng.sample(travel.trips, 2)
    return Case(
        words={"ref": ref, "b": CITIES[f.to]},
        goal=Goal(changes={f"trip/{ref}": GONE}),
        script=(
            Click("nav-trips", "My bookings are under My trips."),
            Click(f"trip-{ref}", f"I open {ref}."),
            Click("cancel", "There is a link to cancel."),
            Click("yes", "I confirm that it shall be cancelled."),
        ),
        decoys=(
            Decoy(name="another booking", changes={f"trip/{other}": GONE}),
            Decoy(name="two bookings", changes={f"trip/{ref}": GONE, f"trip/{other}": GONE}),
        ),
    )


@templates.add(
    "Change the meal of my flight to {b} to {meal} and add a checked bag.",
    "On my trip to {b} I want a {meal} meal and one checked bag. Change the booking.",
    "Update the booking to {b}: meal {meal}, one checked bag.",
    level=3,
    held_out=True,
)
def change_booking(travel: Travel, rng: random.Random) -> Case:
    ref, f, meal, _ = rng.choice(travel.trips)
    wanted = rng.choice([m for m in ("vegetarian", "vegan") if m != meal])
    start = booking(f, "", meal, False)
    key = f"trip/{ref}"
    return Case(
        words={"b": CITIES[f.to], "meal": wanted},
        goal=Goal(changes={key: {**start, "meal": wanted, "bag": True}}),
        script=(
            Click("nav-trips", "My bookings are under My trips."),
            Click(f"trip-{ref}", f"The one to {CITIES[f.to]} is {ref}."),
            Click(f"meal-{wanted}", f"The meal shall be {wanted}."),
            Click("bag", "A checked bag is wanted."),
            Click("save", "The changes must be saved."),
        ),
        decoys=(
            Decoy(name="bag forgotten", changes={key: {**start, "meal": wanted}}),
            Decoy(name="meal forgotten", changes={key: {**start, "bag": True}}),
        ),
    )


@templates.add(
    "Which of the days {days} is the cheapest for a flight from {a} to {b}, and what does that flight cost?",
    "I am flexible: {days}. On which of these days is the cheapest flight from {a} to {b}, and at what price?",
    "Compare flights from {a} to {b} on {days}. Name the day with the lowest price, and the price.",
    level=3,
)
def cheapest_day(travel: Travel, rng: random.Random) -> Case:
    a, b, first, _ = _route(travel, rng)
    start = datetime.date.fromisoformat(first)
    days = [(start + datetime.timedelta(days=i)).isoformat() for i in range(2)]
    low = {d: min(f.price for f in travel.flights(a, b, d)) for d in days}
    best, other = sorted(days, key=lambda d: (low[d], d))
    names = {d: spoken(d).rsplit(" ", 1)[0] for d in days}
    given = (*days, *map(spoken, days))
    steps: list[Move] = []
    for d in (other, best):
        steps += [
            *_search(a, b, d),
            Choose("sort", "price", "The cheapest on top."),
            Read("list", f"On {names[d]} the cheapest is €{low[d]}."),
            Click("nav-flights", "On to the next search."),
        ]
    return Case(
        words={"a": CITIES[a], "b": CITIES[b], "days": " and ".join(spoken(d) for d in days)},
        goal=Goal(
            answer=All(
                parts=(
                    Text(spellings=_date_spellings(best), others=_date_spellings(other)),
                    Number(value=low[best], given=given),
                )
            ),
            facts=(*_fact(a, b, days[0]), *_fact(a, b, days[1])),
        ),
        script=tuple(steps[:-1]),
        said=f"{names[best]}, for €{low[best]}",
        decoys=(
            Decoy(name="the other day", said=f"{names[other]}, for €{low[best]}"),
            Decoy(name="a euro more", said=f"{names[best]}, for €{low[best] + 1}"),
            Decoy(name="only one day seen", facts=_fact(a, b, best)),
        ),
    )


def _date_spellings(day: str) -> tuple[str, ...]:
    d = datetime.date.fromisoformat(day)
    ordinal = {1: "st", 2: "nd", 3: "rd"}.get(d.day % 10 if d.day not in (11, 12, 13) else 0, "th")
    months = (f"{d:%B}", f"{d:%b}")
    return (
        *(f"{d.day} {m}" for m in months),
        *(f"{m} {d.day}" for m in months),
        *(f"{d.day}{ordinal} {m}" for m in months),
        *(f"{d.day}{ordinal} of {m}" for m in months),
        *(f"{m} {d.day}{ordinal}" for m in months),
        day,
    )


def _stay(rng: random.Random) -> tuple[str, str]:
    arrival = TODAY + datetime.timedelta(days=rng.randint(3, 50))
    return arrival.isoformat(), (arrival + datetime.timedelta(days=rng.randint(1, 6))).isoformat()


@templates.add(
    "What does a night at {hotel} cost?",
    "Find the price of one night at {hotel}.",
    "How much is {hotel} per night?",
    level=1,
)
def hotel_price(travel: Travel, rng: random.Random) -> Case:
    h = rng.choice(travel.hotels)
    other = next(o for o in travel.in_city(h.city) if o.ident != h.ident)
    return Case(
        words={"hotel": h.name},
        goal=Goal(answer=Number(value=h.price), facts=(f"hotels:{h.city}",)),
        script=(
            Click("nav-hotels", "Hotels have a page of their own."),
            _city("city", h.city, f"The hotel is in {CITIES[h.city]}."),
            Click("search", "I search."),
            Read(f"hotel-{h.ident}", f"{h.name} costs €{h.price}."),
        ),
        said=f"€{h.price}",
        decoys=(Decoy(name="another hotel", said=f"€{other.price}"),),
    )


def _hotel_case(
    h: Hotel, days: tuple[str, str], name: str, guests: int, finding: tuple[Move, ...], **words: Any
) -> Case:
    stay = {"hotel": h.name, "from": days[0], "until": days[1], "guests": guests, "name": Like(name)}
    steps: list[Move] = [*finding, Click(f"hotel-{h.ident}", f"I open {h.name}.")]
    if guests > 1:
        steps.append(Choose("n", str(guests), f"There are {guests} guests."))
    return Case(
        words={"arrival": spoken(days[0]), "leaving": spoken(days[1]), "name": name, "guests": guests, **words},
        goal=Goal(changes={"stay/1": stay}),
        script=(
            *steps,
            Fill("name", name, "The booking is under this name."),
            Click("book", "Days, guests and name are right; I book."),
        ),
        decoys=(
            Decoy(name="leaves a day early", changes={"stay/1": {**stay, "until": days[0]}}),
            Decoy(name="one guest more", changes={"stay/1": {**stay, "guests": guests + 1}}),
            Decoy(name="another hotel", changes={"stay/1": {**stay, "hotel": "Hotel Elsewhere"}}),
        ),
    )


def _find_hotels(city: str, days: tuple[str, str], *filters: Move) -> tuple[Move, ...]:
    return (
        Click("nav-hotels", "Hotels have a page of their own."),
        _city("city", city, f"The city is {CITIES[city]}."),
        PickDate("from", days[0], f"Arrival on {spoken(days[0])}."),
        PickDate("until", days[1], f"Departure on {spoken(days[1])}."),
        *filters,
        Click("search", "I search."),
    )


@templates.add(
    "Book {hotel} from {arrival} to {leaving} for {guests} guests, name {name}.",
    "Reserve a room at {hotel}, {arrival} until {leaving}, {guests} guests, under the name {name}.",
    "{name} and company ({guests} guests in all) stay at {hotel} from {arrival} to {leaving}. Book it in that name.",
    level=2,
)
def book_hotel(travel: Travel, rng: random.Random) -> Case:
    h, days, name = rng.choice(travel.hotels), _stay(rng), " ".join(_person(rng))
    return _hotel_case(h, days, name, rng.randint(2, 4), _find_hotels(h.city, days), hotel=h.name)


@templates.add(
    "Book the best-rated hotel in {city} that has a {amenity}, from {arrival} to {leaving}, one guest, name {name}.",
    "In {city}, find the hotel with {amenity} that guests rate best and book it for {name}, {arrival} to "
    "{leaving}, one guest.",
    "{name} travels alone to {city}, {arrival} until {leaving}, and wants {amenity}. Book the hotel that guests rate "
    "best.",
    level=3,
)
def book_best_hotel(travel: Travel, rng: random.Random) -> Case:
    while True:
        city, amenity = rng.choice(list(CITIES)), rng.choice(("pool", "gym", "sauna"))
        fitting = sorted((h for h in travel.in_city(city) if amenity in h.amenities), key=lambda h: -h.rating)
        if len(fitting) >= 2:
            break
    days, name = _stay(rng), " ".join(_person(rng))
    finding = _find_hotels(
        city,
        days,
        Click(amenity, f"It must have a {amenity}."),
        Choose("sort", "rating", "The best rating on top."),
    )
    assert amenity in AMENITIES
    return _hotel_case(fitting[0], days, name, 1, finding, city=CITIES[city], amenity=amenity)


SITE = Site(
    name="travel",
    title="Windrose",
    about="a travel agency: flights, hotels, date pickers, suggestions, forms of several steps, bookings",
    skins=(PLAIN, PAPER, DUSK),
    templates=templates,
    routes=pages.routes,
    build=data.build,
    start=pages.start,
    menu=(("flights", "Flights", "/"), ("hotels", "Hotels", "/hotels"), ("trips", "My trips", "/trips")),
)
