"""A town with stores and landmarks from a seed. Places are map units; a hundred of them are a kilometre."""

from __future__ import annotations

import dataclasses
import functools
import math
import random

WIDTH, HEIGHT, COLUMNS, ROWS = 1000, 640, 4, 3
DISTRICTS = ("Northgate", "Harbour", "Old Town", "Riverside", "Parkside", "Westend")
LANDMARKS = ("Central Station", "City Museum", "Lighthouse", "Airport")
SERVICES = ("repair", "engraving", "gift wrap", "parking", "café")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SLOTS = ("09:30", "11:00", "14:00", "15:30", "17:00")
_STREETS = (
    "Anvil Street",
    "Birch Avenue",
    "Canal Row",
    "Dock Road",
    "Elder Lane",
    "Foundry Square",
    "Garden Walk",
    "Hill Street",
    "Iron Bridge Road",
    "Juniper Way",
    "King's Parade",
    "Lantern Lane",
    "Market Place",
    "Orchard Road",
    "Pier Street",
    "Quarry Hill",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """One store; `hours` per weekday as (opens, closes) in full hours, None where closed."""

    number: int
    street: str
    district: str
    x: int
    y: int
    phone: str
    services: tuple[str, ...]
    hours: tuple[tuple[int, int] | None, ...]

    @property
    def name(self) -> str:
        return f"Fernhill {self.street}"

    @property
    def cell(self) -> tuple[int, int]:
        """Column and row of the map's grid."""
        return self.x * COLUMNS // WIDTH, self.y * ROWS // HEIGHT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Town:
    """The town of one seed."""

    stores: tuple[Store, ...]
    landmarks: dict[str, tuple[int, int]]

    def store(self, number: int) -> Store | None:
        """The store of that number."""
        return next((s for s in self.stores if s.number == number), None)

    def by_distance(self, x: int, y: int) -> list[Store]:
        """Stores, the nearest first."""
        return sorted(self.stores, key=lambda s: math.hypot(s.x - x, s.y - y))


def km(a: Store, b: Store) -> str:
    """Distance as the directions page gives it."""
    return f"{math.hypot(a.x - b.x, a.y - b.y) / 100:.1f}"


def _place(rng: random.Random, taken: list[tuple[int, int]], gap: int) -> tuple[int, int]:
    while True:
        x, y = rng.randint(45, WIDTH - 45), rng.randint(45, HEIGHT - 45)
        if all(math.hypot(x - a, y - b) >= gap for a, b in taken):
            taken.append((x, y))
            return x, y


@functools.lru_cache(maxsize=64)
def build(seed: int) -> Town:
    """14 stores, 4 landmarks. For every landmark the nearest store is nearer than the next by a visible margin."""
    rng = random.Random(f"locator/{seed}")
    while True:
        taken: list[tuple[int, int]] = []
        landmarks = {name: _place(rng, taken, 170) for name in LANDMARKS}
        stores = []
        for number, street in enumerate(rng.sample(_STREETS, 14), start=1):
            x, y = _place(rng, taken, 62)
            opens = rng.randint(7, 10)
            hours = [(opens, rng.randint(17, 19)) for _ in range(5)]
            hours += [(opens + 1, 16) if rng.random() < 0.8 else None, (11, 16) if rng.random() < 0.4 else None]
            late = rng.randrange(5)
            hours[late] = (opens, 21)
            stores.append(
                Store(
                    number=number,
                    street=street,
                    district=DISTRICTS[3 * (y * 2 // HEIGHT) + x * 3 // WIDTH],
                    x=x,
                    y=y,
                    phone=f"0{rng.randint(30, 89)} {rng.randint(1000, 9999)}",
                    services=tuple(s for s in SERVICES if rng.random() < 0.45),
                    hours=tuple(hours),
                )
            )
        town = Town(stores=tuple(stores), landmarks=landmarks)
        if all(_margin(town, x, y) > 35 for x, y in landmarks.values()):
            return town


def _margin(town: Town, x: int, y: int) -> float:
    first, second = town.by_distance(x, y)[:2]
    return math.hypot(second.x - x, second.y - y) - math.hypot(first.x - x, first.y - y)
