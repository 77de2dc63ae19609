"""The pages of the shop.

State: `cart/<sku>/<colour>/<size>` quantity in the cart; `wish/<sku>` True; `coupon` code or empty; `order/<n>` what
was ordered. Facts: `product:<sku>`, `reviews:<sku>`, `list:<category>`, `sorted:<category>:<order>`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from owrl_jax.worlds.goals import State, normal
from owrl_jax.worlds.html import children, e, field, hidden, options, radios, table
from owrl_jax.worlds.messages import Request, Response, see_other, whole
from owrl_jax.worlds.shop.data import CATEGORIES, COUPONS, SHIPPING, Product, Shop
from owrl_jax.worlds.site import Episode, NoSuchPage, Routes

routes = Routes()
ORDERS = {
    "relevance": "Relevance",
    "price_up": "Price: low to high",
    "price_down": "Price: high to low",
    "rating": "Customer rating",
}
PER_PAGE = 12
_FACETS = ("brand", "colour", "attribute", "max", "stars")


def start(shop: Shop) -> State:
    """An empty cart."""
    return {"coupon": ""}


def cart_key(product: Product, colour: str, size: str) -> str:
    """The state entry of a variant."""
    return f"cart/{product.sku}/{colour}/{size or '-'}"


def cart_lines(episode: Episode) -> list[tuple[str, Product, str, str, int]]:
    """(state entry, product, colour, size, quantity) of everything in the cart."""
    found = []
    for key, quantity in episode.state.items():
        if key.startswith("cart/"):
            _, sku, colour, size = key.split("/")
            found.append((key, episode.world.by_sku[sku], colour, size, quantity))
    return found


def money(cents: int) -> str:
    """A price as the shop writes it."""
    return f"${cents / 100:,.2f}"


def _product(episode: Episode, sku: str) -> Product:
    if sku not in episode.world.by_sku:
        raise NoSuchPage(f"We sell nothing with the number {sku}.")
    return episode.world.by_sku[sku]


def _search_box(text: str = "") -> Any:
    box = e.input(type="search", name="q", id="q", value=text, placeholder="What are you looking for?", size=40)
    return e.form(box, e.button("Search", id="search"), action="/s", cls="row")


@routes.get("/")
def home(episode: Episode, request: Request) -> Response:
    cards = [e.a(name.capitalize(), href=f"/s?cat={name}", id=f"cat-{name}", cls="card") for name in CATEGORIES]
    return episode.page("Home", _search_box(), e.h1("Departments"), e.div(cards, cls="cards"))


def _matches(product: Product, request: Request) -> bool:
    words = normal(request.get("q")).split()
    text = normal(f"{product.name} {product.category} {product.attribute}").split()
    limit, stars = whole(request.get("max")), whole(request.get("stars"))
    return (
        all(w in text or w.removesuffix("s") in text for w in words)
        and request.get("cat") in ("", product.category)
        and request.get("brand") in ("", product.brand)
        and (not request.get("colour") or request.get("colour") in product.colours)
        and request.get("attribute") in ("", product.attribute)
        and (limit < 0 or product.cents <= limit * 100)
        and (stars < 0 or product.rating >= stars * 10)
    )


def _ordered(products: list[Product], order: str) -> list[Product]:
    match order:
        case "price_up":
            return sorted(products, key=lambda p: p.cents)
        case "price_down":
            return sorted(products, key=lambda p: -p.cents)
        case "rating":
            return sorted(products, key=lambda p: -p.rating)
    return products


def _facet(request: Request, name: str, label: str, values: list[tuple[str, str]]) -> Any:
    chosen = request.get(name)
    kept = [(k, v) for k, v in request.query if k not in (name, "page") and v]
    links = [
        e.a(
            f"✓ {text}" if value == chosen else text,
            href="/s?" + urlencode(kept if value == chosen else [*kept, (name, value)]),
            id=f"f-{name}-{value.replace(' ', '')}",
        )
        for value, text in values
    ]
    return children(e.b(label), links)


@routes.get("/s")
def listing(episode: Episode, request: Request) -> Response:
    """Search results or a department, with facets, sort order and pages."""
    shop: Shop = episode.world
    category, order = request.get("cat"), request.get("sort", "relevance")
    found = _ordered([p for p in shop.products if _matches(p, request)], order)
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(max(1, whole(request.get("page"), 1)), pages)
    episode.see(f"list:{category}", f"sorted:{category}:{order}")
    kind = CATEGORIES.get(category)
    pool = [p for p in shop.products if category in ("", p.category)]
    facets = [
        _facet(request, "brand", "Brand", [(b, b) for b in sorted({p.brand for p in pool})]),
        _facet(request, "colour", "Colour", [(c, c) for c in sorted({c for p in pool for c in p.colours})]),
        _facet(request, "attribute", kind[1].capitalize(), [(v, v) for v in kind[2]]) if kind else None,
        _facet(request, "max", "Price", [(str(m), f"up to ${m}") for m in (50, 100, 200, 400)]),
        _facet(request, "stars", "Rating", [(str(s), f"{s} stars and more") for s in (4, 3)]),
    ]
    keep = {k: request.get(k) for k in ("q", "cat", *_FACETS) if request.get(k)}
    sort = e.form(
        hidden(**keep),
        e.label("Sort by ", e.select(options(ORDERS.items(), order), name="sort", id="sort", data_auto=True)),
        action="/s",
    )
    cards = [
        e.div(
            e.a(p.name, href=f"/p/{p.sku}", id=f"p-{p.sku}", cls="name"),
            e.div(e.span(p.price, cls="price"), " ", e.span(f"★ {p.stars}", cls="muted")),
            e.div(", ".join(p.colours), cls="muted"),
            cls="card",
        )
        for p in found[(page - 1) * PER_PAGE : page * PER_PAGE]
    ]
    pager = [
        e.a(
            str(n),
            href="/s?" + urlencode({**keep, "sort": order, "page": n}),
            id=f"page-{n}",
            cls="chip on" if n == page else "chip",
        )
        for n in range(1, pages + 1)
    ]
    return episode.page(
        category.capitalize() or "Search",
        _search_box(request.get("q")),
        e.h1(category.capitalize() or f"Results for “{request.get('q')}”"),
        e.div(
            e.div(facets, cls="side"),
            e.div(
                e.div(e.span(f"{len(found)} items", id="count"), sort, cls="row"),
                e.div(cards, cls="cards") if cards else e.p("Nothing matches these filters."),
                e.p(pager) if pages > 1 else None,
                cls="grow",
            ),
            cls="split",
        ),
    )


@routes.get("/p/{sku}")
def product(episode: Episode, request: Request, sku: str) -> Response:
    p = _product(episode, sku)
    episode.see(f"product:{sku}")
    attribute = CATEGORIES[p.category][1]
    facts = [
        ("Brand", p.brand),
        (attribute.capitalize(), p.attribute),
        ("Warranty", f"{p.warranty_years} years"),
        ("Delivery", f"{p.delivery_days} days"),
        ("Item number", p.sku),
    ]
    wished = episode.state.get(f"wish/{sku}", False)
    form = e.form(
        field("Colour", radios("colour", [(c, c) for c in p.colours], p.colours[0]), "colour"),
        field("Size", radios("size", [(s, s) for s in p.sizes], p.sizes[0]), "size") if p.sizes else None,
        field("Quantity", e.input(name="quantity", id="quantity", value="1", size=3, inputmode="numeric"), "quantity"),
        e.button("Add to cart", id="add"),
        method="post",
        action=f"/cart/add/{sku}",
    )
    wish = e.form(
        e.button("Remove from wishlist" if wished else "Save to wishlist", id="wish", cls="quiet"),
        method="post",
        action=f"/wish/{sku}",
    )
    return episode.page(
        p.name,
        _search_box(),
        e.h1(p.name, id="title"),
        e.div(
            e.div(
                e.p(e.span(p.price, cls="price", id="price"), " · ", f"★ {p.stars} ", id="rating"),
                form,
                e.p(wish),
                cls="grow",
            ),
            e.div(
                table(("Details", ""), facts, id="details"),
                e.p(e.a(f"Read {len(p.reviews)} reviews", href=f"/p/{sku}/reviews", id="reviews")),
                cls="grow",
            ),
            cls="split",
        ),
    )


@routes.get("/p/{sku}/reviews")
def reviews(episode: Episode, request: Request, sku: str) -> Response:
    p = _product(episode, sku)
    episode.see(f"reviews:{sku}")
    cards = [
        e.div(e.b(f"{r.author} · {'★' * r.stars}{'☆' * (5 - r.stars)}"), e.p(r.text), cls="card", id=f"by-{r.author}")
        for r in p.reviews
    ]
    back = e.a("Back to the product", href=f"/p/{sku}", id="product")
    return episode.page(f"Reviews of {p.name}", e.h1(f"Reviews of {p.name}"), e.p(back), cards)


@routes.post("/wish/{sku}")
def wish(episode: Episode, request: Request, sku: str) -> Response:
    _product(episode, sku)
    if episode.state.pop(f"wish/{sku}", None) is None:
        episode.state[f"wish/{sku}"] = True
    return see_other(f"/p/{sku}")


@routes.get("/wishlist")
def wishlist(episode: Episode, request: Request) -> Response:
    wished = [episode.world.by_sku[k.removeprefix("wish/")] for k in episode.state if k.startswith("wish/")]
    rows = [e.p(e.a(p.name, href=f"/p/{p.sku}", id=f"p-{p.sku}"), " ", p.price) for p in wished]
    return episode.page("Wishlist", e.h1("Wishlist"), rows or e.p("Nothing saved yet."), here="wishlist")


@routes.post("/cart/add/{sku}")
def add(episode: Episode, request: Request, sku: str) -> Response:
    p = _product(episode, sku)
    quantity, colour, size = whole(request.sent("quantity")), request.sent("colour"), request.sent("size")
    size = size if p.sizes else ""
    if not 1 <= quantity <= 20 or colour not in p.colours or (p.sizes and size not in p.sizes):
        message = "Please choose a colour and a quantity from 1 to 20."
        return episode.page("Not added", e.p(message, cls="note"), e.a("Back", href=f"/p/{sku}", id="product"))
    key = cart_key(p, colour, size)
    episode.state[key] = episode.state.get(key, 0) + quantity
    return see_other("/cart")


@routes.get("/cart")
def cart(episode: Episode, request: Request) -> Response:
    lines = cart_lines(episode)
    if not lines:
        return episode.page("Cart", e.h1("Cart"), e.p("Your cart is empty."), here="cart")
    rows = []
    for key, p, colour, size, quantity in lines:
        tag = key.removeprefix("cart/").replace("/", "-")
        change = e.form(
            hidden(key=key),
            e.input(name="quantity", id=f"n-{tag}", value=quantity, size=3),
            e.button("Update", id=f"update-{tag}", cls="quiet"),
            method="post",
            action="/cart/set",
            cls="row",
        )
        remove = e.form(
            hidden(key=key, quantity="0"),
            e.button("Remove", id=f"remove-{tag}", cls="quiet"),
            method="post",
            action="/cart/set",
        )
        kind = colour if size == "-" else f"{colour}, {size}"
        rows.append((e.a(p.name, href=f"/p/{p.sku}"), kind, change, money(p.cents * quantity), remove))
    coupon = e.form(
        e.input(name="code", id="code", value=episode.state["coupon"], placeholder="Coupon"),
        e.button("Apply", id="apply", cls="quiet"),
        method="post",
        action="/cart/coupon",
        cls="row",
    )
    note = f"{COUPONS[episode.state['coupon']]} % off with this coupon" if episode.state["coupon"] else None
    return episode.page(
        "Cart",
        e.h1("Cart"),
        table(("Item", "Variant", "Quantity", "Price", ""), rows),
        coupon,
        e.p(note) if note else None,
        e.p(e.b("Total "), money(_total(episode)), id="total"),
        e.a("Go to checkout", href="/checkout", id="checkout", cls="button"),
        here="cart",
    )


def _total(episode: Episode) -> int:
    total = sum(p.cents * quantity for _, p, _, _, quantity in cart_lines(episode))
    return total - total * COUPONS.get(episode.state["coupon"], 0) // 100


@routes.post("/cart/set")
def set_quantity(episode: Episode, request: Request) -> Response:
    key, quantity = request.sent("key"), whole(request.sent("quantity"))
    if key in episode.state and key.startswith("cart/") and 0 <= quantity <= 20:
        if quantity:
            episode.state[key] = quantity
        else:
            del episode.state[key]
    return see_other("/cart")


@routes.post("/cart/coupon")
def coupon(episode: Episode, request: Request) -> Response:
    code = request.sent("code").upper()
    if code not in COUPONS:
        return episode.page(
            "Cart", e.p(f"There is no coupon {code}.", cls="note"), e.a("Back", href="/cart", id="back")
        )
    episode.state["coupon"] = code
    return see_other("/cart")


_ADDRESS = (("name", "Full name"), ("street", "Street and number"), ("city", "City"), ("zip", "Postcode"))


@routes.get("/checkout")
def checkout(episode: Episode, request: Request) -> Response:
    fields = [field(label, e.input(name=name, id=name, size=34, required=True), name) for name, label in _ADDRESS]
    ways = [(name, f"{label} ({money(cents)})") for name, (label, cents) in SHIPPING.items()]
    return episode.page(
        "Checkout",
        e.h1("Delivery"),
        e.form(
            fields,
            field("Shipping", radios("shipping", ways, "standard"), "shipping"),
            e.button("Review order", id="review"),
            method="post",
            action="/checkout/review",
        ),
    )


@routes.post("/checkout/review")
def review_order(episode: Episode, request: Request) -> Response:
    values = {name: request.sent(name) for name, _ in _ADDRESS}
    way = request.sent("shipping")
    if not all(values.values()) or way not in SHIPPING or not cart_lines(episode):
        return episode.page(
            "Checkout", e.p("Something is missing.", cls="note"), e.a("Back", href="/checkout", id="back")
        )
    total = _total(episode) + SHIPPING[way][1]
    return episode.page(
        "Review order",
        e.h1("Review your order"),
        table(("Item", "Quantity"), [(f"{p.name}, {c}", n) for _, p, c, _, n in cart_lines(episode)]),
        e.p(", ".join(values.values())),
        e.p(SHIPPING[way][0]),
        e.p(e.b("Total "), money(total), id="total"),
        e.form(
            hidden(**values, shipping=way), e.button("Place order", id="place"), method="post", action="/checkout/place"
        ),
    )


@routes.post("/checkout/place")
def place(episode: Episode, request: Request) -> Response:
    lines = cart_lines(episode)
    way = request.sent("shipping")
    if not lines or way not in SHIPPING:
        return see_other("/cart")
    number = 1 + sum(k.startswith("order/") for k in episode.state)
    episode.state[f"order/{number}"] = {
        "items": {key.removeprefix("cart/"): quantity for key, _, _, _, quantity in lines},
        "to": {name: request.sent(name) for name, _ in _ADDRESS},
        "shipping": way,
        "total": _total(episode) + SHIPPING[way][1],
    }
    for key, *_ in lines:
        del episode.state[key]
    episode.state["coupon"] = ""
    return see_other(f"/order/{number}")


@routes.get("/order/{number}")
def order(episode: Episode, request: Request, number: str) -> Response:
    placed = episode.state.get(f"order/{number}")
    if placed is None:
        raise NoSuchPage(f"There is no order {number}.")
    return episode.page(
        "Thank you",
        e.h1("Thank you for your order"),
        e.p(f"Order {number}, total {money(placed['total'])}.", id="total"),
    )
