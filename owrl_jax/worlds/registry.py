"""Which sites there are, and tasks from them by name and seed.

A `Task` made here carries everything that rebuilds its episode: `verifier` names site and template, `seed` the
instance, `metadata` skin and faults. Its `start_url` has no port yet; `WorldServer.open` gives the real one.
"""

from __future__ import annotations

import functools
import importlib
import random
from typing import Any

from owrl_jax.types import Task
from owrl_jax.worlds import miniwob
from owrl_jax.worlds.faults import Faults
from owrl_jax.worlds.miniwob import MiniWobEpisode
from owrl_jax.worlds.site import TRAIN, Episode, Site, Template

OWN = ("starter", "shop", "travel", "knowledge", "desk", "locator")
VERIFIER = "worlds:"


@functools.cache
def site(name: str) -> Site:
    """One of our own sites.

    Raises:
      KeyError: naming those there are.
    """
    if name not in OWN:
        raise KeyError(f"there is no site {name!r}; there are {', '.join(sites())}")
    return importlib.import_module(f"owrl_jax.worlds.{name}").SITE


def sites() -> tuple[str, ...]:
    """Names of all sites; `miniwob` among them where its package is installed."""
    return OWN + ((miniwob.NAME,) if miniwob.installed() else ())


def templates(name: str) -> tuple[str, ...]:
    """Names of a site's templates, easier ones first."""
    if name == miniwob.NAME:
        return miniwob.tasks()
    return tuple(t.name for t in sorted(site(name).templates.values(), key=lambda t: t.level))


def template(name: str, kind: str) -> Template:
    """A template of one of our own sites."""
    return site(name).template(kind)


def make_task(
    name: str,
    kind: str,
    seed: int,
    *,
    skin: str | None = None,
    faults: Faults | None = None,
    phrasing: int | None = None,
) -> Task:
    """The task of a template and a seed. The same arguments always give an equal task.

    Args:
      name: a site.
      kind: one of its templates.
      seed: 0 or more; every tenth (9, 19, …) is held out, and so are whole templates.
      skin: name of a look; by default the seed chooses.
      faults: what goes wrong; by default nothing.
      phrasing: which wording; by default the seed chooses, in the train split never the last one.

    Raises:
      KeyError: for an unknown site, template or skin, naming those there are.
    """
    if seed < 0:
        raise ValueError(f"a seed is 0 or more, got {seed}")
    if name == miniwob.NAME:
        return miniwob.make_task(kind, seed)
    where, what = site(name), template(name, kind)
    case = where.case(kind, seed)
    rng = random.Random(f"{name}/{kind}/{seed}/look")
    split = what.split(seed)
    wordings = len(what.phrasings) - (split == TRAIN)
    chosen = rng.randrange(wordings) if phrasing is None else phrasing
    look = rng.choice(where.skins).name if skin is None else where.skin(skin).name
    changed = (faults or Faults()).changed()
    metadata: dict[str, Any] = {
        "template": kind,
        "skin": look,
        "phrasing": chosen,
        "viewport": list(where.viewport),
        "oracle_moves": len(case.moves),
    }
    ident = f"{name}/{kind}/{seed}/{look}"
    if changed:
        metadata["faults"] = changed
        ident += "/" + "+".join(f"{k}={v}" for k, v in sorted(changed.items()))
    return Task(
        id=ident,
        instruction=what.phrasings[chosen].format(**case.words),
        start_url=f"http://{name}.localhost{case.start}",
        site=f"{name}.localhost",
        split=split,
        difficulty=what.level,
        rubric=tuple(f"must have seen {fact}" for fact in case.goal.facts),
        verifier=f"{VERIFIER}{name}/{kind}",
        seed=seed,
        metadata=metadata,
    )


def open_episode(task: Task) -> Episode | MiniWobEpisode:
    """Fresh state for a task that `make_task` made, here or elsewhere.

    Raises:
      ValueError: if the task is not of a world.
    """
    if not task.verifier.startswith(VERIFIER) or task.seed is None:
        raise ValueError(f"task {task.id!r} is not a task of a local world (verifier {task.verifier!r})")
    name, _, kind = task.verifier.removeprefix(VERIFIER).partition("/")
    if name == miniwob.NAME:
        return MiniWobEpisode(kind, task.seed, zoom=float(task.metadata.get("zoom", 1)))
    faults = Faults(**task.metadata.get("faults", {}))
    return Episode(site(name), kind, task.seed, skin=task.metadata.get("skin", ""), faults=faults)
