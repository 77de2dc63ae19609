"""What one can be asked to do in the shop: the templates of levels one and two."""

from __future__ import annotations

import random

from owrl_jax.worlds.goals import GONE, All, Decoy, Goal, Number, Text
from owrl_jax.worlds.script import Choose, Click, Fill, Move, Read
from owrl_jax.worlds.shop.data import CATEGORIES, Product, Shop
from owrl_jax.worlds.shop.pages import cart_key, money
from owrl_jax.worlds.site import Case, Templates

templates = Templates()


def singular(category: str) -> str:
    return CATEGORIES[category][0]


def find(p: Product) -> tuple[Move, ...]:
    """From any page with a search box to the product's page."""
    return (
        Fill("q", p.name, f"I look for {p.name} with the search box.", enter=True),
        Click(f"p-{p.sku}", f"{p.name} is among the results; I open it."),
    )


def browse(category: str, order: str, why: str) -> tuple[Move, ...]:
    return (
        Click(f"cat-{category}", f"{category.capitalize()} is one of the departments."),
        Choose("sort", order, why),
    )


def put_in_cart(p: Product, colour: str = "", size: str = "", quantity: int = 1) -> tuple[Move, ...]:
    """On a product's page: choose the variant and add it."""
    steps: list[Move] = []
    if colour and colour != p.colours[0]:
        steps.append(Click(f"colour-{colour}", f"The colour must be {colour}."))
    if size and size != p.sizes[0]:
        steps.append(Click(f"size-{size}", f"The size must be {size}."))
    if quantity != 1:
        steps.append(Fill("quantity", str(quantity), f"I need {quantity} of them."))
    return (*steps, Click("add", "Now I add it to the cart."))


def default_key(p: Product) -> str:
    return cart_key(p, p.colours[0], p.sizes[0] if p.sizes else "")


def any_product(shop: Shop, rng: random.Random) -> Product:
    """A product of the whole shop."""
    return rng.choice(shop.products)


def others_of(shop: Shop, p: Product) -> list[Product]:
    return [o for o in shop.of(p.category) if o.sku != p.sku]


@templates.add(
    "Save the {name} to the wishlist.",
    "Put {name} on my wishlist, please.",
    "I want to remember the {name}: add it to the wishlist.",
    level=1,
)
def wish(shop: Shop, rng: random.Random) -> Case:
    p = any_product(shop, rng)
    other = rng.choice(others_of(shop, p))
    return Case(
        words={"name": p.name},
        goal=Goal(changes={f"wish/{p.sku}": True}),
        script=(*find(p), Click("wish", "The wishlist button saves it.")),
        decoys=(
            Decoy(name="another product", changes={f"wish/{other.sku}": True}),
            Decoy(name="into the cart instead", changes={default_key(p): 1}),
        ),
    )


@templates.add(
    "What does the {name} cost?",
    "Tell me the price of the {name}.",
    "How much is the {name} in this shop?",
    level=1,
)
def price(shop: Shop, rng: random.Random) -> Case:
    p = any_product(shop, rng)
    other = next(o for o in others_of(shop, p) if o.cents != p.cents)
    return Case(
        words={"name": p.name},
        goal=Goal(answer=Number(value=p.cents / 100, given=(p.name,)), facts=(f"product:{p.sku}",)),
        script=(*find(p), Read("price", f"The page says {p.price}.")),
        said=f"The {p.name} costs {p.price}.",
        decoys=(
            Decoy(name="price of another product", said=f"It costs {other.price}."),
            Decoy(name="a cent too much", said=money(p.cents + 1)),
            Decoy(name="two prices", said=f"It is {p.price} or {other.price}."),
        ),
    )


@templates.add(
    "Put one {name} in {colour} into the cart.",
    "Add a {colour} {name} to my cart.",
    "I would like the {name} in {colour}: one of it in the cart, please.",
    level=1,
)
def add_colour(shop: Shop, rng: random.Random) -> Case:
    p = rng.choice([p for p in shop.products if not p.sizes])
    colour = rng.choice(p.colours)
    wrong = next(c for c in p.colours if c != colour)
    key = cart_key(p, colour, "")
    return Case(
        words={"name": p.name, "colour": colour},
        goal=Goal(changes={key: 1}),
        script=(*find(p), *put_in_cart(p, colour)),
        decoys=(
            Decoy(name="wrong colour", changes={cart_key(p, wrong, ""): 1}),
            Decoy(name="two of it", changes={key: 2}),
            Decoy(name="both colours", changes={key: 1, cart_key(p, wrong, ""): 1}),
        ),
    )


@templates.add(
    "Put {quantity} {name} into the cart, {colour}, size {size}.",
    "Add the {name} to the cart: {colour}, {size}, {quantity} pieces.",
    "I need {quantity} of the {name} in size {size} and colour {colour}. Put them into the cart.",
    level=2,
)
def add_variant(shop: Shop, rng: random.Random) -> Case:
    p = rng.choice([p for p in shop.products if p.sizes])
    colour, size, quantity = rng.choice(p.colours), rng.choice(p.sizes), rng.randint(2, 6)
    key = cart_key(p, colour, size)
    other_size = next(s for s in p.sizes if s != size)
    return Case(
        words={"name": p.name, "colour": colour, "size": size, "quantity": quantity},
        goal=Goal(changes={key: quantity}),
        script=(*find(p), *put_in_cart(p, colour, size, quantity)),
        decoys=(
            Decoy(name="one too few", changes={key: quantity - 1}),
            Decoy(name="wrong size", changes={cart_key(p, colour, other_size): quantity}),
        ),
    )


@templates.add(
    "Which of the {category} is the cheapest, and what does it cost?",
    "Name the cheapest item among the {category} and its price.",
    "Find the lowest-priced {one} and tell me name and price.",
    level=2,
)
def cheapest(shop: Shop, rng: random.Random) -> Case:
    category = rng.choice(list(CATEGORIES))
    ranked = sorted(shop.of(category), key=lambda p: p.cents)
    p, second = ranked[0], ranked[1]
    return Case(
        words={"category": category, "one": singular(category)},
        goal=Goal(
            answer=_name_and_price(p, tuple(o.name for o in ranked[1:])),
            facts=(f"list:{category}",),
        ),
        script=(
            *browse(category, "price_up", "Sorted by price, the cheapest comes first."),
            Read(f"p-{p.sku}", f"The first is {p.name} for {p.price}."),
        ),
        said=f"The {p.name} for {p.price}.",
        decoys=(
            Decoy(name="the second cheapest", said=f"The {second.name} for {second.price}."),
            Decoy(name="right name, wrong price", said=f"The {p.name} for {second.price}."),
            Decoy(name="the dearest", said=f"The {ranked[-1].name} for {ranked[-1].price}."),
        ),
    )


def _name_and_price(p: Product, others: tuple[str, ...]) -> All:
    return All(parts=(Text(spellings=(p.name,), others=others), Number(value=p.cents / 100, given=(p.name,))))


@templates.add(
    "Add the best-rated {one} that comes in {colour} to the cart, in {colour}.",
    "Of all {category} available in {colour}, put the one with the highest rating into the cart (in {colour}).",
    "I want the highest-rated {colour} {one}. Put it into my cart.",
    level=2,
)
def best_in_colour(shop: Shop, rng: random.Random) -> Case:
    category = rng.choice([c for c in CATEGORIES if not shop.of(c)[0].sizes])
    colour = rng.choice(sorted({c for p in shop.of(category) for c in p.colours}))
    ranked = sorted((p for p in shop.of(category) if colour in p.colours), key=lambda p: -p.rating)
    p = ranked[0]
    best = max(others_of(shop, p), key=lambda o: o.rating)
    wrong = next(c for c in p.colours if c != colour)
    return Case(
        words={"one": singular(category), "category": category, "colour": colour},
        goal=Goal(changes={cart_key(p, colour, ""): 1}),
        script=(
            Click(f"cat-{category}", f"I open {category}."),
            Click(f"f-colour-{colour}", f"I keep only what comes in {colour}."),
            Choose("sort", "rating", "Sorted by rating, the best comes first."),
            Click(f"p-{p.sku}", f"{p.name} is on top with {p.stars} stars."),
            *put_in_cart(p, colour),
        ),
        decoys=(
            Decoy(name="another one of the department", changes={default_key(best): 1}),
            Decoy(name="right one in the wrong colour", changes={cart_key(p, wrong, ""): 1}),
        ),
    )


@templates.add(
    "How many years of warranty does the {name} have?",
    "Find out for how many years the {name} is under warranty.",
    "What is the warranty on the {name}, in years?",
    level=1,
)
def warranty(shop: Shop, rng: random.Random) -> Case:
    p = any_product(shop, rng)
    return Case(
        words={"name": p.name},
        goal=Goal(answer=Number(value=p.warranty_years, given=(p.name,)), facts=(f"product:{p.sku}",)),
        script=(*find(p), Read("details", f"The details say {p.warranty_years} years.")),
        said=f"{p.warranty_years} years",
        decoys=(
            Decoy(name="one year more", said=f"{p.warranty_years + 1} years"),
            Decoy(name="days of delivery", said=f"{p.delivery_days + p.warranty_years} days"),
        ),
    )


@templates.add(
    "How many stars did {author} give to the {name}?",
    "Look up the review by {author} of the {name}: how many stars?",
    "In the reviews of the {name}, what was {author}'s rating in stars?",
    level=2,
    held_out=True,
)
def review_stars(shop: Shop, rng: random.Random) -> Case:
    p = any_product(shop, rng)
    r = rng.choice(p.reviews)
    wrong = r.stars % 5 + 1
    return Case(
        words={"name": p.name, "author": r.author},
        goal=Goal(answer=Number(value=r.stars, given=(p.name,)), facts=(f"reviews:{p.sku}",)),
        script=(
            *find(p),
            Click("reviews", "The reviews are on a page of their own."),
            Read(f"by-{r.author}", f"{r.author} gave {r.stars} of 5."),
        ),
        said=f"{r.author} gave it {r.stars} stars.",
        decoys=(
            Decoy(name="another number", said=f"{wrong} stars"),
            Decoy(name="only the product page seen", facts=(f"product:{p.sku}",)),
        ),
    )


def _filled_cart(shop: Shop, rng: random.Random, n: int) -> dict[str, int]:
    return {default_key(p): rng.randint(1, 4) for p in rng.sample(shop.products, n)}


def _tag(key: str) -> str:
    return key.removeprefix("cart/").replace("/", "-")


def _named(shop: Shop, key: str) -> str:
    return shop.by_sku[key.split("/")[1]].name


@templates.add(
    "Take the {name} out of the cart and leave the rest as it is.",
    "Remove the {name} from my cart.",
    "I no longer want the {name}: delete it from the cart, nothing else.",
    level=1,
)
def remove(shop: Shop, rng: random.Random) -> Case:
    cart = _filled_cart(shop, rng, 3)
    key, other, _ = rng.sample(sorted(cart), 3)
    return Case(
        words={"name": _named(shop, key)},
        goal=Goal(changes={key: GONE}),
        script=(
            Click("nav-cart", "I open the cart."),
            Click(f"remove-{_tag(key)}", f"I remove the {_named(shop, key)}."),
        ),
        state=cart,
        decoys=(
            Decoy(name="another item removed", changes={other: GONE}),
            Decoy(name="both removed", changes={key: GONE, other: GONE}),
            Decoy(name="only fewer of it", changes={key: cart[key] + 1}),
        ),
    )


@templates.add(
    "Change the quantity of the {name} in the cart to {quantity}.",
    "There should be {quantity} of the {name} in my cart.",
    "Set the {name} in the cart to {quantity} pieces.",
    level=2,
)
def change_quantity(shop: Shop, rng: random.Random) -> Case:
    cart = _filled_cart(shop, rng, 3)
    key, other, _ = rng.sample(sorted(cart), 3)
    quantity = rng.choice([n for n in range(2, 9) if n != cart[key]])
    return Case(
        words={"name": _named(shop, key), "quantity": quantity},
        goal=Goal(changes={key: quantity}),
        script=(
            Click("nav-cart", "I open the cart."),
            Fill(f"n-{_tag(key)}", str(quantity), f"I change the quantity of the {_named(shop, key)}."),
            Click(f"update-{_tag(key)}", "The change must be confirmed."),
        ),
        state=cart,
        decoys=(
            Decoy(name="added instead of set", changes={key: cart[key] + quantity}),
            Decoy(name="another item changed", changes={other: quantity + cart[other]}),
        ),
    )


@templates.add(
    "How many {category} are in stock with {label} {attribute} and a rating of at least {stars} stars?",
    "Count the {category} whose {label} is {attribute} and that have {stars} stars or more.",
    "Tell me the number of {category} ({label}: {attribute}) rated {stars} stars and better.",
    level=2,
    held_out=True,
)
def count_filtered(shop: Shop, rng: random.Random) -> Case:
    category = rng.choice(list(CATEGORIES))
    attribute, stars = rng.choice(CATEGORIES[category][2]), rng.choice((3, 4))
    kind = [p for p in shop.of(category) if p.attribute == attribute]
    n = sum(p.rating >= 10 * stars for p in kind)
    return Case(
        words={"category": category, "label": CATEGORIES[category][1], "attribute": attribute, "stars": stars},
        goal=Goal(answer=Number(value=n), facts=(f"list:{category}",)),
        script=(
            Click(f"cat-{category}", f"I open {category}."),
            Click(f"f-attribute-{attribute.replace(' ', '')}", f"I filter by {attribute}."),
            Click(f"f-stars-{stars}", f"At least {stars} stars."),
            Read("count", f"The list says {n} items."),
        ),
        said=str(n),
        decoys=(
            Decoy(name="rating forgotten", said=str(len(kind) + (len(kind) == n))),
            Decoy(name="off by one", said=f"There are {n + 1}."),
        ),
    )
