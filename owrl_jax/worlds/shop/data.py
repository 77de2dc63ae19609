"""What the shop sells: a catalogue from a seed. Immutable; names are invented, prices whole cents."""

from __future__ import annotations

import dataclasses
import functools
import random

COLOURS = ("black", "white", "red", "green", "blue", "grey", "yellow")
SIZES = ("small", "medium", "large")
# Category: what one is called, attribute, its values, price range in whole units.
CATEGORIES: dict[str, tuple[str, str, tuple[str, ...], tuple[int, int]]] = {
    "lamps": ("lamp", "material", ("brass", "oak", "glass", "paper"), (18, 160)),
    "chairs": ("chair", "material", ("beech", "steel", "rattan", "leather"), (45, 420)),
    "backpacks": ("backpack", "volume", ("15 l", "22 l", "30 l", "45 l"), (25, 190)),
    "headphones": ("headphones", "type", ("in-ear", "on-ear", "over-ear"), (20, 380)),
    "kettles": ("kettle", "capacity", ("0.8 l", "1.2 l", "1.7 l"), (15, 120)),
    "tents": ("tent", "type", ("1-person", "2-person", "4-person"), (60, 640)),
}
_BRANDS = ("Norvik", "Aldea", "Tamsin", "Ostro", "Pellar", "Quent", "Brisa", "Kolme")
_MODELS = (
    "Arc",
    "Fjord",
    "Vela",
    "Mira",
    "Tarn",
    "Lumo",
    "Otso",
    "Pika",
    "Rune",
    "Sable",
    "Thistle",
    "Umber",
    "Wren",
    "Yarrow",
    "Zephyr",
    "Cairn",
    "Delta",
    "Ember",
    "Fable",
    "Gale",
    "Heron",
    "Iris",
    "Juno",
    "Kelp",
    "Larch",
    "Moss",
    "Nimbus",
    "Onda",
    "Petrel",
    "Quill",
    "Reed",
    "Sorrel",
)
_AUTHORS = (
    "Ada",
    "Ben",
    "Carla",
    "Dev",
    "Edda",
    "Femi",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Leo",
    "Maja",
    "Nils",
    "Oona",
    "Paul",
    "Rosa",
    "Sven",
    "Tara",
    "Udo",
)
_OPINIONS = {
    5: ("Exactly what I wanted.", "Could not be happier with it.", "Worth every penny."),
    4: ("Good, with small flaws.", "Solid, arrived on time.", "I would buy it again."),
    3: ("It does its job.", "Neither good nor bad.", "Expected a little more."),
    2: ("Broke after a month.", "Not as described.", "Feels cheap."),
    1: ("Sent it back.", "A waste of money.", "Arrived damaged."),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Review:
    """What a customer wrote."""

    author: str
    stars: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One thing on sale; `cents` is the price, `rating` the mean stars in tenths."""

    sku: str
    name: str
    brand: str
    category: str
    cents: int
    rating: int
    colours: tuple[str, ...]
    sizes: tuple[str, ...]
    attribute: str
    warranty_years: int
    delivery_days: int
    reviews: tuple[Review, ...]

    @property
    def price(self) -> str:
        return f"${self.cents / 100:,.2f}"

    @property
    def stars(self) -> str:
        return f"{self.rating / 10:.1f}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shop:
    """The catalogue, in the order in which the shop lists it."""

    products: tuple[Product, ...]
    by_sku: dict[str, Product]

    def of(self, category: str) -> list[Product]:
        """What a category holds."""
        return [p for p in self.products if p.category == category]


@functools.lru_cache(maxsize=64)
def build(seed: int) -> Shop:
    """96 products, 16 a category. Names are unique; within a category so are prices and ratings."""
    rng = random.Random(f"shop/{seed}")
    products = []
    for category, (_, _, values, (low, high)) in CATEGORIES.items():
        prices = rng.sample(range(low, high), 16)
        ratings = rng.sample(range(21, 50), 16)
        for model, price, rating in zip(rng.sample(_MODELS, 16), prices, ratings, strict=True):
            brand = rng.choice(_BRANDS)
            authors = rng.sample(_AUTHORS, rng.randint(4, 9))
            stars = [min(5, max(1, round(rating / 10 + rng.uniform(-1.6, 1.4)))) for _ in authors]
            products.append(
                Product(
                    sku=f"{category[:2]}{len(products):03d}",
                    name=f"{brand} {model} {CATEGORIES[category][0]}",
                    brand=brand,
                    category=category,
                    cents=price * 100 + rng.choice((0, 49, 90, 95, 99)),
                    rating=rating,
                    colours=tuple(sorted(rng.sample(COLOURS, rng.randint(2, 4)))),
                    sizes=SIZES if category in ("backpacks", "chairs") else (),
                    attribute=rng.choice(values),
                    warranty_years=rng.randint(1, 7),
                    delivery_days=rng.randint(1, 9),
                    reviews=tuple(
                        Review(author=a, stars=s, text=rng.choice(_OPINIONS[s]))
                        for a, s in zip(authors, stars, strict=True)
                    ),
                )
            )
    rng.shuffle(products)
    return Shop(products=tuple(products), by_sku={p.sku: p for p in products})


COUPONS = {"SPRING10": 10, "WELCOME5": 5}
SHIPPING = {"standard": ("Standard, 5 days", 490), "express": ("Express, next day", 1290), "pickup": ("Pick-up", 0)}
