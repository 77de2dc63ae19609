"""For the smallest agents: few large targets, short words, one to three steps, fine steps of difficulty."""

from owrl_jax.worlds.starter.tasks import SITE

__all__ = ["SITE"]
