"""The travel agency: flights, hotels, date pickers, suggestions, forms of several steps, bookings to change."""

from owrl_jax.worlds.travel.tasks import SITE

__all__ = ["SITE"]
