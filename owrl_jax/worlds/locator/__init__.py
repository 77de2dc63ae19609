"""The store locator: a map with pins and clusters, a list with filters, opening hours, appointments."""

from owrl_jax.worlds.locator.tasks import SITE

__all__ = ["SITE"]
