"""Cities, flights, hotels and bookings from a seed. A day's flights follow from seed, pair of cities and day."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import random

CITIES = {
    "OSL": "Oslo",
    "LIS": "Lisbon",
    "VIE": "Vienna",
    "ATH": "Athens",
    "DUB": "Dublin",
    "PRG": "Prague",
    "WAW": "Warsaw",
    "MAD": "Madrid",
    "HEL": "Helsinki",
    "ROM": "Rome",
    "BUD": "Budapest",
    "CPH": "Copenhagen",
}
AIRLINES = ("Albatross", "Blue Heron", "Cirrus", "Driftline", "Evenwing")
AMENITIES = ("pool", "breakfast", "parking", "gym", "sauna")
MEALS = {"standard": "Standard", "vegetarian": "Vegetarian", "vegan": "Vegan", "none": "No meal"}
TODAY = datetime.date(2031, 5, 12)
_HOTELS = ("Anchor", "Belvedere", "Corona", "Dolphin", "Esplanade", "Fontana", "Grand", "Harbour")


def label(code: str) -> str:
    """How a field shows a city."""
    return f"{CITIES[code]} ({code})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flight:
    """One flight; times are minutes after midnight."""

    number: str
    airline: str
    origin: str
    to: str
    day: str
    departs: int
    lasts: int
    stops: int
    price: int

    @property
    def ident(self) -> str:
        return f"{self.number}-{self.day}"

    @property
    def arrives(self) -> int:
        return self.departs + self.lasts


def clock(minutes: int) -> str:
    """Minutes after midnight as HH:MM."""
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hotel:
    """One hotel; `rating` in tenths of ten, `price` per night."""

    ident: str
    name: str
    city: str
    stars: int
    rating: int
    price: int
    amenities: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Travel:
    """The world of one seed."""

    seed: int
    hotels: tuple[Hotel, ...]
    trips: tuple[tuple[str, Flight, str, bool], ...]  # reference, flight, meal, bag

    def flights(self, origin: str, to: str, day: str) -> tuple[Flight, ...]:
        """That day's flights by departure. Prices, departures and arrivals are all different."""
        return _flights(self.seed, origin, to, day)

    def in_city(self, city: str) -> list[Hotel]:
        """The hotels of a city."""
        return [h for h in self.hotels if h.city == city]


@functools.lru_cache(maxsize=4096)
def _flights(seed: int, origin: str, to: str, day: str) -> tuple[Flight, ...]:
    rng = random.Random(f"flights/{seed}/{origin}/{to}/{day}")
    n = rng.randint(4, 7)
    prices, departures = rng.sample(range(49, 420), n), sorted(rng.sample(range(24, 80), n))
    found, arrivals = [], set()
    for i, (price, slot) in enumerate(zip(prices, departures, strict=True)):
        # The first two are non-stop, so that there is always a choice.
        stops = 0 if i < 2 else rng.choice((0, 0, 1, 2))
        lasts = rng.randint(70, 200) + 95 * stops
        while slot * 15 + lasts in arrivals:
            lasts += 1
        arrivals.add(slot * 15 + lasts)
        airline = rng.choice(AIRLINES)
        found.append(
            Flight(
                number=f"{airline[0]}{origin[0]}{to[0]}{rng.randint(1, 9)}{i}{rng.randint(1, 9)}",
                airline=airline,
                origin=origin,
                to=to,
                day=day,
                departs=slot * 15,
                lasts=lasts,
                stops=stops,
                price=price,
            )
        )
    return tuple(found)


@functools.lru_cache(maxsize=64)
def build(seed: int) -> Travel:
    """Six hotels a city, four bookings of the visitor."""
    rng = random.Random(f"travel/{seed}")
    hotels = []
    for code in CITIES:
        prices, ratings = rng.sample(range(48, 330), 6), rng.sample(range(58, 98), 6)
        for name, price, rating in zip(rng.sample(_HOTELS, 6), prices, ratings, strict=True):
            amenities = tuple(sorted(rng.sample(AMENITIES, rng.randint(1, 4))))
            hotels.append(
                Hotel(
                    ident=f"{code.lower()}{len(hotels):02d}",
                    name=f"Hotel {name} {CITIES[code]}",
                    city=code,
                    stars=rng.randint(2, 5),
                    rating=rating,
                    price=price,
                    amenities=amenities,
                )
            )
    trips = []
    for target in rng.sample(list(CITIES), 4):
        origin = rng.choice([c for c in CITIES if c != target])
        day = (TODAY + datetime.timedelta(days=rng.randint(5, 60))).isoformat()
        reference = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(6))
        trips.append((reference, rng.choice(_flights(seed, origin, target, day)), rng.choice(list(MEALS)), False))
    return Travel(seed=seed, hotels=tuple(hotels), trips=tuple(trips))
