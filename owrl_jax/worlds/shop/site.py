"""The shop, put together."""

from owrl_jax.worlds.shop import data, hard_tasks, pages
from owrl_jax.worlds.site import Site
from owrl_jax.worlds.skins import DUSK, PAPER, PLAIN

SITE = Site(
    name="shop",
    title="Fernhill",
    about="a shop: search, facets, sort, variants, reviews, cart, wishlist, checkout",
    skins=(PLAIN, DUSK, PAPER),
    templates=hard_tasks.templates,
    routes=pages.routes,
    build=data.build,
    start=pages.start,
    menu=(("wishlist", "Wishlist", "/wishlist"), ("cart", "Cart", "/cart")),
)
