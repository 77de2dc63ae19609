"""What one can be asked to do in the shop: the templates of level three."""

from __future__ import annotations

import random

from owrl_jax.worlds.goals import Decoy, Goal, Like
from owrl_jax.worlds.script import Choose, Click, Fill, Move, Read
from owrl_jax.worlds.shop.data import CATEGORIES, SHIPPING, Product, Shop
from owrl_jax.worlds.shop.pages import cart_key
from owrl_jax.worlds.shop.tasks import (
    any_product,
    browse,
    default_key,
    find,
    others_of,
    put_in_cart,
    singular,
    templates,
)
from owrl_jax.worlds.site import Case


def _deep_search(shop: Shop, rng: random.Random) -> tuple[str, str, int, list[Product]]:
    """(category, attribute, price limit, fitting products): three or more fit, and the limit excludes something."""
    while True:
        category = rng.choice(list(CATEGORIES))
        attribute = rng.choice(CATEGORIES[category][2])
        limit = rng.choice((50, 100, 200, 400))
        kind = [p for p in shop.of(category) if p.attribute == attribute]
        fitting = [p for p in kind if p.cents <= limit * 100]
        if 2 <= len(fitting) < len(kind):
            return category, attribute, limit, fitting


@templates.add(
    "Find {category} with {label} {attribute} for at most ${limit}, sort them by customer rating and put the first one "
    "into the cart. Any colour will do; take size small if there are sizes.",
    "From the {category} whose {label} is {attribute} and which cost no more than ${limit}, add the best-rated one to "
    "the cart, in any colour (and in small, if it has sizes).",
    "Put the highest-rated {one} ({label}: {attribute}, up to ${limit}) into the cart; the colour does not matter, the "
    "size, where there is one, should be small.",
    level=3,
)
def attribute_filter_sort(shop: Shop, rng: random.Random) -> Case:
    category, attribute, limit, fitting = _deep_search(shop, rng)
    ranked = sorted(fitting, key=lambda p: -p.rating)
    p, second = ranked[0], ranked[1]
    colours = _each_colour(p)
    over = max(
        (o for o in shop.of(category) if o.attribute == attribute and o.cents > limit * 100), key=lambda o: o.rating
    )
    return Case(
        words={
            "category": category,
            "one": singular(category),
            "label": CATEGORIES[category][1],
            "attribute": attribute,
            "limit": limit,
        },
        goal=Goal(changes=colours[0], alternatives=tuple(colours[1:])),
        script=(
            Click(f"cat-{category}", f"I open {category}."),
            Click(f"f-attribute-{attribute.replace(' ', '')}", f"I filter by {attribute}."),
            Click(f"f-max-{limit}", f"The price limit is ${limit}."),
            Choose("sort", "rating", "The best-rated shall come first."),
            Click(f"p-{p.sku}", f"{p.name} leads with {p.stars} stars."),
            *put_in_cart(p, p.colours[0]),
        ),
        decoys=(
            Decoy(name="the second best", changes={default_key(second): 1}),
            Decoy(name="too expensive", changes={default_key(over): 1}),
        ),
    )


def _each_colour(p: Product) -> list[dict[str, int]]:
    """What the cart may hold where any colour will do."""
    return [{cart_key(p, colour, p.sizes[0] if p.sizes else ""): 1} for colour in p.colours]


@templates.add(
    "Order the {name} in {colour} with {shipping} shipping to {person}, {street}, {city}, {zip}.",
    "Buy one {colour} {name}. Deliver to {person}, {street}, {city}, postcode {zip}; shipping: {shipping}.",
    "Place an order, please: {name}, {colour}, one piece, {shipping} shipping, to {person}, {street}, {city} ({zip}).",
    level=3,
)
def checkout(shop: Shop, rng: random.Random) -> Case:
    p = rng.choice([p for p in shop.products if not p.sizes])
    colour, way = rng.choice(p.colours), rng.choice(list(SHIPPING))
    person = f"{rng.choice(('Mara', 'Theo', 'Lina', 'Emil'))} {rng.choice(('Holm', 'Brandt', 'Sato', 'Okoye'))}"
    street = f"{rng.choice(('Mill Lane', 'Harbour Road', 'Elm Street'))} {rng.randint(1, 99)}"
    city, code = rng.choice(("Brookfield", "Eastport", "Linden")), str(rng.randint(10000, 99999))
    order = {
        "items": {cart_key(p, colour, "").removeprefix("cart/"): 1},
        "to": {"name": Like(person), "street": Like(street), "city": Like(city), "zip": code},
        "shipping": way,
        "total": p.cents + SHIPPING[way][1],
    }
    other_way = next(w for w in SHIPPING if w != way)
    wrong = next(c for c in p.colours if c != colour)
    return Case(
        words={
            "name": p.name,
            "colour": colour,
            "shipping": way,
            "person": person,
            "street": street,
            "city": city,
            "zip": code,
        },
        goal=Goal(changes={"order/1": order}),
        script=(
            *find(p),
            *put_in_cart(p, colour),
            Click("checkout", "The cart holds the right thing; on to the checkout."),
            Fill("name", person, "Name of the recipient."),
            Fill("street", street, "The street."),
            Fill("city", city, "The city."),
            Fill("zip", code, "The postcode."),
            Click(f"shipping-{way}", f"Shipping shall be {way}."),
            Click("review", "All fields are filled."),
            Click("place", "Everything is right on the summary; I place the order."),
        ),
        decoys=(
            Decoy(name="only in the cart", changes={cart_key(p, colour, ""): 1}),
            Decoy(name="wrong shipping", changes={"order/1": {**order, "shipping": other_way}}),
            Decoy(
                name="wrong colour",
                changes={"order/1": {**order, "items": {cart_key(p, wrong, "").removeprefix("cart/"): 1}}},
            ),
            Decoy(
                name="wrong postcode", changes={"order/1": {**order, "to": {**order["to"], "zip": code[::-1] + "0"}}}
            ),
        ),
    )


@templates.add(
    "Which is cheaper, the {a} or the {b}? Put the cheaper one on the wishlist.",
    "Compare the prices of the {a} and the {b} and save the less expensive one to the wishlist.",
    "Save to my wishlist whichever costs less: {a} or {b}.",
    level=3,
    held_out=True,
)
def compare(shop: Shop, rng: random.Random) -> Case:
    a = any_product(shop, rng)
    b = rng.choice(others_of(shop, a))
    low, high = sorted((a, b), key=lambda p: p.cents)
    return Case(
        words={"a": a.name, "b": b.name},
        goal=Goal(changes={f"wish/{low.sku}": True}, facts=(f"product:{a.sku}", f"product:{b.sku}")),
        script=(
            *find(high),
            Read("price", f"The {high.name} costs {high.price}."),
            *find(low),
            Read("price", f"The {low.name} costs {low.price}, which is less than {high.price}."),
            Click("wish", "So this is the one to save."),
        ),
        decoys=(
            Decoy(name="the dearer one", changes={f"wish/{high.sku}": True}),
            Decoy(name="both", changes={f"wish/{low.sku}": True, f"wish/{high.sku}": True}),
            Decoy(name="looked at one only", facts=(f"product:{low.sku}",)),
        ),
    )


@templates.add(
    "Put the cheapest {one_a} and the cheapest {one_b} on the wishlist.",
    "Save two things to the wishlist: the lowest-priced {one_a} and the lowest-priced {one_b}.",
    "I am collecting bargains. Wishlist, please: cheapest {one_a}, cheapest {one_b}.",
    level=3,
)
def two_bargains(shop: Shop, rng: random.Random) -> Case:
    first, second = rng.sample(list(CATEGORIES), 2)
    low = {c: min(shop.of(c), key=lambda p: p.cents) for c in (first, second)}
    dear = sorted(shop.of(first), key=lambda p: p.cents)[1]
    steps: list[Move] = []
    for c in (first, second):
        steps += [
            Click("nav-home", "I go to the departments."),
            *browse(c, "price_up", "The cheapest shall come first."),
            Click(f"p-{low[c].sku}", f"That is {low[c].name} for {low[c].price}."),
            Click("wish", "I save it."),
        ]
    return Case(
        words={"one_a": singular(first), "one_b": singular(second)},
        goal=Goal(changes={f"wish/{p.sku}": True for p in low.values()}),
        script=tuple(steps[1:]),
        decoys=(
            Decoy(
                name="the second cheapest",
                changes={f"wish/{dear.sku}": True, f"wish/{low[second].sku}": True},
            ),
        ),
    )
