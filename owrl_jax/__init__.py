"""owrl_jax: online multi-turn reinforcement learning of visual web agents, in JAX and Flax.

Importing this package imports nothing else: no jax, no torch, no browser. Take what you need from its modules;
the reading order stands in README.md and the map of the rooms in docs/architecture.md.
"""

__version__ = "0.1.0"
