"""What one can be asked to do with the store locator: thirteen templates, and the site itself."""

from __future__ import annotations

import random

from owrl_jax.worlds.goals import Decoy, Goal, Like, Number, Text
from owrl_jax.worlds.locator import data, pages
from owrl_jax.worlds.locator.data import DAYS, DISTRICTS, LANDMARKS, SERVICES, SLOTS, Store, Town, km
from owrl_jax.worlds.locator.pages import crowded, hours_text
from owrl_jax.worlds.script import Choose, Click, Fill, Move, Read
from owrl_jax.worlds.site import Case, Site, Templates
from owrl_jax.worlds.skins import DUSK, PAPER, PLAIN

templates = Templates()


def _on_map(town: Town, s: Store) -> tuple[Move, ...]:
    """From the start page to a store by its pin."""
    steps: list[Move] = []
    if crowded(town, s.cell):
        steps.append(Click(f"cluster-{s.cell[0]}-{s.cell[1]}", "Several stores stand close together; I zoom in."))
    return (*steps, Click(f"pin-{s.number}", f"There is pin {s.number}."))


def _in_list(s: Store) -> tuple[Move, ...]:
    return (
        Click("nav-list", "The list has a search field."),
        Fill("q", s.street, f"I search for {s.street}.", enter=True),
        Click(f"store-{s.number}", f"{s.name} is listed; I open it."),
    )


def _two(town: Town, rng: random.Random) -> tuple[Store, Store]:
    a, b = rng.sample(town.stores, 2)
    return a, b


def _streets(town: Town, but: Store) -> tuple[str, ...]:
    return tuple(s.street for s in town.stores if s is not but)


@templates.add(
    "What is the phone number of the store with pin {number} on the map?",
    "Click pin {number} on the map and tell me the phone number of that store.",
    "Store number {number}: find it on the map. What is its phone number?",
    level=1,
)
def phone_of_pin(town: Town, rng: random.Random) -> Case:
    s, other = _two(town, rng)
    return Case(
        words={"number": s.number},
        goal=Goal(
            answer=Text(
                spellings=(s.phone, s.phone.replace(" ", ""), s.phone.replace(" ", "-")), others=(other.phone,)
            ),
            facts=(f"store:{s.number}",),
        ),
        script=(*_on_map(town, s), Read("facts", f"The phone number is {s.phone}.")),
        said=s.phone,
        decoys=(
            Decoy(name="another store", said=other.phone),
            Decoy(name="two numbers", said=f"{s.phone} or {other.phone}"),
        ),
    )


@templates.add(
    "Make {name} my store.",
    "Choose {name} as my store.",
    "I always shop at {name}; set it as my store.",
    level=1,
)
def choose_named(town: Town, rng: random.Random) -> Case:
    s, other = _two(town, rng)
    return Case(
        words={"name": s.name},
        goal=Goal(changes={"my_store": s.number}),
        script=(*_in_list(s), Click("choose", "The button makes it my store.")),
        decoys=(Decoy(name="another store", changes={"my_store": other.number}),),
    )


@templates.add(
    "Until when is {name} open on {day}?",
    "At what time does {name} close on {day}?",
    "I want to visit {name} on a {day}. When does it close?",
    level=1,
)
def closing_time(town: Town, rng: random.Random) -> Case:
    s = rng.choice(town.stores)
    day = rng.randrange(5)
    hours = s.hours[day]
    assert hours is not None
    right, opens = hours[1], hours[0]
    return Case(
        words={"name": s.name, "day": DAYS[day]},
        goal=Goal(
            answer=Text(
                spellings=(f"{right}:00", f"{right - 12} pm", f"{right - 12}:00 pm", f"{right - 12}pm", str(right)),
                others=tuple(f"{h}:00" for h in range(16, 23) if h != right),
            ),
            facts=(f"store:{s.number}",),
        ),
        script=(*_in_list(s), Read("hours", f"{DAYS[day]}: {hours_text(hours)}.")),
        said=f"{right}:00",
        decoys=(
            Decoy(name="opening time", said=f"{opens}:00"),
            Decoy(name="an hour later", said=f"{right + 1}:00"),
        ),
    )


@templates.add(
    "Which store is nearest to the {landmark}? Make it my store.",
    "Find the store closest to the {landmark} on the map and set it as my store.",
    "I live at the {landmark}. Make the nearest store mine.",
    level=2,
)
def nearest(town: Town, rng: random.Random) -> Case:
    landmark = rng.choice(LANDMARKS)
    ranked = town.by_distance(*town.landmarks[landmark])
    s = ranked[0]
    return Case(
        words={"landmark": landmark},
        goal=Goal(changes={"my_store": s.number}),
        script=(*_on_map(town, s), Click("choose", f"{s.name} is the nearest; I make it my store.")),
        decoys=(
            Decoy(name="the second nearest", changes={"my_store": ranked[1].number}),
            Decoy(name="the farthest", changes={"my_store": ranked[-1].number}),
        ),
    )


@templates.add(
    "How many stores are open on Sunday?",
    "Count the stores that open on Sundays.",
    "On a Sunday, how many of the stores can one visit?",
    level=1,
)
def count_sunday(town: Town, rng: random.Random) -> Case:
    n = sum(s.hours[6] is not None for s in town.stores)
    return Case(
        words={},
        goal=Goal(answer=Number(value=n), facts=("list",)),
        script=(
            Click("nav-list", "The list can be filtered."),
            Click("sunday", "Only those open on Sunday."),
            Click("filter", "I apply the filter."),
            Read("count", f"There are {n}."),
        ),
        said=str(n),
        decoys=(
            Decoy(name="all stores", said=str(len(town.stores))),
            Decoy(name="one more", said=f"{n + 1} stores"),
        ),
    )


@templates.add(
    "How many stores in {district} offer {service}?",
    "Count the stores with {service} in the district {district}.",
    "In {district}, how many stores have {service}?",
    level=2,
)
def count_service(town: Town, rng: random.Random) -> Case:
    district, service = rng.choice(sorted({s.district for s in town.stores})), rng.choice(SERVICES)
    there = [s for s in town.stores if s.district == district]
    n = sum(service in s.services for s in there)
    return Case(
        words={"district": district, "service": service},
        goal=Goal(answer=Number(value=n), facts=("list",)),
        script=(
            Click("nav-list", "The list can be filtered."),
            Choose("district", district, f"The district is {district}."),
            Click(f"service-{service}", f"They must offer {service}."),
            Click("filter", "I apply both filters."),
            Read("count", f"There are {n}."),
        ),
        said=f"{n} stores",
        decoys=(
            Decoy(name="service forgotten", said=str(len(there) + (len(there) == n))),
            Decoy(name="off by one", said=str(n + 1)),
        ),
    )


@templates.add(
    "How far is it from {a} to {b}, in kilometres?",
    "Look up the distance between {a} and {b}.",
    "I walk from {a} to {b}. How many kilometres is that?",
    level=2,
)
def distance(town: Town, rng: random.Random) -> Case:
    a, b = _two(town, rng)
    value = km(a, b)
    other = next(s for s in town.stores if s not in (a, b) and km(a, s) != value)
    return Case(
        words={"a": a.name, "b": b.name},
        # The page of the way back says the same.
        goal=Goal(answer=Number(value=float(value)), facts=(f"way:{a.number}:{b.number}",)),
        script=(
            *_in_list(a),
            Choose("to", str(b.number), f"The way to {b.name}."),
            Click("way", "I ask for the distance."),
            Read("distance", f"It is {value} km."),
        ),
        said=f"{value} km",
        decoys=(
            Decoy(name="way to another store", said=f"{km(a, other)} km"),
            Decoy(name="rounded", said=f"{float(value) + 0.6:.1f} km"),
        ),
    )


def _with_service(town: Town, rng: random.Random) -> tuple[Store, str]:
    s = rng.choice([s for s in town.stores if len(s.services) >= 2])
    return s, rng.choice(s.services[1:])


@templates.add(
    "Make an appointment for {service} at {name} on {day} at {time}, name {person}.",
    "Book {service} at {name}: {day}, {time}, for {person}.",
    "{person} wants an appointment at {name} for {service}, on {day} at {time}.",
    level=3,
)
def appointment(town: Town, rng: random.Random) -> Case:
    s, service = _with_service(town, rng)
    day, time = rng.choice(DAYS[1:5]), rng.choice(SLOTS[1:])
    person = f"{rng.choice(('Mara', 'Theo', 'Lina'))} {rng.choice(('Holm', 'Sato', 'Reyes'))}"
    right = {"store": s.number, "service": service, "day": day, "time": time, "name": Like(person)}
    return Case(
        words={"service": service, "name": s.name, "day": day, "time": time, "person": person},
        goal=Goal(changes={"visit/1": right}),
        script=(
            *_in_list(s),
            Click("visit", "There is a button for appointments."),
            Click(f"service-{service}", f"The service is {service}."),
            Choose("day", day, f"The day is {day}."),
            Click(f"time-{time}", f"The time is {time}."),
            Fill("name", person, "The name."),
            Click("book", "Everything is right; I book."),
        ),
        decoys=(
            Decoy(name="default day", changes={"visit/1": {**right, "day": "Monday"}}),
            Decoy(name="default time", changes={"visit/1": {**right, "time": SLOTS[0]}}),
            Decoy(name="default service", changes={"visit/1": {**right, "service": s.services[0]}}),
            Decoy(name="booked twice", changes={"visit/1": right, "visit/2": right}),
        ),
    )


@templates.add(
    "Ask {name} to call me back on {phone} about “{about}”.",
    "Request a call from {name}: my number is {phone}, it is about “{about}”.",
    "I would like {name} to ring me ({phone}) because of “{about}”.",
    level=2,
)
def call_back(town: Town, rng: random.Random) -> Case:
    s, other = _two(town, rng)
    phone = f"0{rng.randint(100, 999)} {rng.randint(10000, 99999)}"
    about = rng.choice(("a broken zip", "my last order", "a missing receipt"))
    right = {"store": s.number, "phone": Like(phone), "about": Like(about)}
    return Case(
        words={"name": s.name, "phone": phone, "about": about},
        goal=Goal(changes={"call/1": right}),
        script=(
            *_in_list(s),
            Click("call", "There is a button for it."),
            Fill("phone", phone, "My number."),
            Fill("about", about, "What it is about."),
            Click("send", "I send the request."),
        ),
        decoys=(
            Decoy(name="another store", changes={"call/1": {**right, "store": other.number}}),
            Decoy(name="a digit missing", changes={"call/1": {**right, "phone": phone[:-1]}}),
        ),
    )


@templates.add(
    "Of the stores in {district} with {service}, make the one my store that is open latest on {day}.",
    "In {district} I need a store with {service}. Choose the one that closes last on {day} as my store.",
    "Make my store: in {district}, with {service}, and with the latest closing time on {day}.",
    level=3,
)
def latest_with_service(town: Town, rng: random.Random) -> Case:
    pairs = [(d, v, i) for d in DISTRICTS for v in SERVICES for i in range(5)]
    rng.shuffle(pairs)
    for district, service, day in pairs:
        fitting = [s for s in town.stores if s.district == district and service in s.services]
        ranked = sorted(fitting, key=lambda s: -_closes(s, day))
        if len(ranked) == 2 and _closes(ranked[0], day) > _closes(ranked[1], day):
            break
    else:  # no pair differs: one store with a service nobody else there has will do
        district, service, day, ranked = _lonely(town)
    best = ranked[0]
    steps: list[Move] = []
    for s in (*ranked[1:], best):
        steps += [
            Click("nav-list", "The list can be filtered."),
            Choose("district", district, f"The district is {district}."),
            Click(f"service-{service}", f"It must offer {service}."),
            Click("filter", "I apply both."),
            Click(f"store-{s.number}", f"I look at {s.name}."),
            Read("hours", f"On {DAYS[day]} it closes at {_closes(s, day)}:00."),
        ]
    wrong = next(s for s in town.stores if s is not best)
    return Case(
        words={"district": district, "service": service, "day": DAYS[day]},
        goal=Goal(changes={"my_store": best.number}),
        script=(*steps, Click("choose", "This is the one that closes last.")),
        decoys=tuple(
            Decoy(name="another store", changes={"my_store": s.number}) for s in {wrong, *ranked[1:]} if s is not best
        ),
    )


def _closes(s: Store, day: int) -> int:
    hours = s.hours[day]
    return hours[1] if hours else 0


def _lonely(town: Town) -> tuple[str, str, int, list[Store]]:
    for s in town.stores:
        for service in s.services:
            if [o for o in town.stores if o.district == s.district and service in o.services] == [s]:
                return s.district, service, 0, [s]
    raise ValueError("no store of this town has a service of its own in its district")


@templates.add(
    "In which district is the store nearest to the {landmark}?",
    "Find the store closest to the {landmark}. In what district is it?",
    "Name the district of the store that is nearest to the {landmark}.",
    level=2,
    held_out=True,
)
def district_of_nearest(town: Town, rng: random.Random) -> Case:
    landmark = rng.choice(LANDMARKS)
    s = town.by_distance(*town.landmarks[landmark])[0]
    others = tuple(d for d in DISTRICTS if d != s.district)
    return Case(
        words={"landmark": landmark},
        goal=Goal(answer=Text(spellings=(s.district,), others=others), facts=(f"store:{s.number}",)),
        script=(*_on_map(town, s), Read("facts", f"{s.name} is in {s.district}.")),
        said=s.district,
        decoys=(
            Decoy(name="another district", said=others[0]),
            Decoy(name="all districts", said=", ".join(DISTRICTS)),
        ),
    )


@templates.add(
    "Does {name} offer {service}, and on which street is it? Make it my store only if it does offer {service}.",
    "Check whether {name} has {service}. If so, make it my store, otherwise leave all as it is. Name its street.",
    "If {name} offers {service}, choose it as my store; if not, change nothing. Either way, tell me its street.",
    level=3,
    held_out=True,
)
def conditional(town: Town, rng: random.Random) -> Case:
    s = rng.choice([s for s in town.stores if s.services and len(s.services) < len(SERVICES)])
    yes = rng.random() < 0.6
    service = rng.choice(s.services if yes else [v for v in SERVICES if v not in s.services])
    steps: list[Move] = [*_in_list(s), Read("facts", f"Its services are: {', '.join(s.services)}.")]
    if yes:
        steps.append(Click("choose", f"It offers {service}, so I choose it."))
    opposite = {} if yes else {"my_store": s.number}
    return Case(
        words={"name": s.name, "service": service},
        goal=Goal(
            changes={"my_store": s.number} if yes else {},
            answer=Text(spellings=(s.street,), others=_streets(town, s)),
            facts=(f"store:{s.number}",),
        ),
        script=tuple(steps),
        said=f"It is on {s.street}.",
        decoys=(
            Decoy(name="the opposite", changes=opposite),
            Decoy(name="another street", said=_streets(town, s)[0]),
        ),
    )


@templates.add(
    "Make the store at pin {number} my store.",
    "On the map, click pin {number} and make that store mine.",
    "My store should be number {number} on the map.",
    level=2,
)
def choose_pin(town: Town, rng: random.Random) -> Case:
    s = rng.choice([s for s in town.stores if crowded(town, s.cell)])
    other = next(o for o in town.stores if o.cell == s.cell and o is not s)
    return Case(
        words={"number": s.number},
        goal=Goal(changes={"my_store": s.number}),
        script=(*_on_map(town, s), Click("choose", "The button makes it my store.")),
        decoys=(Decoy(name="its neighbour", changes={"my_store": other.number}),),
    )


SITE = Site(
    name="locator",
    title="Fernhill stores",
    about="a store locator: map with pins and clusters, list with filters, hours, distances, appointments",
    skins=(PLAIN, DUSK, PAPER),
    templates=templates,
    routes=pages.routes,
    build=data.build,
    start=pages.start,
    menu=(("map", "Map", "/"), ("list", "List", "/list")),
)
