"""The shop: search, facets, sort, product pages with variants and reviews, cart, wishlist, checkout."""

from owrl_jax.worlds.shop.site import SITE

__all__ = ["SITE"]
