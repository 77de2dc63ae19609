"""Local, seeded, resettable web sites with goals that a program checks, and the bridge to MiniWoB++.

Reading order: `site` (what a site and an episode are), `goals` (what success is), one of the sites (`shop`), `script`
and `oracle` (how tasks are solved), `server` (how a browser gets to them).
"""

from owrl_jax.worlds.faults import Faults, named_faults
from owrl_jax.worlds.oracle import Oracle, PageProbe
from owrl_jax.worlds.registry import make_task, open_episode, site, sites, templates
from owrl_jax.worlds.server import Visit, WorldServer

__all__ = [
    "Faults",
    "Oracle",
    "PageProbe",
    "Visit",
    "WorldServer",
    "make_task",
    "named_faults",
    "open_episode",
    "site",
    "sites",
    "templates",
]
