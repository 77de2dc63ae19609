"""The encyclopaedia: search, long articles, tables, links between articles, a reading list, reports of mistakes."""

from owrl_jax.worlds.knowledge.tasks import SITE

__all__ = ["SITE"]
