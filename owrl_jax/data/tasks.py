"""Where tasks come from: local worlds by name, tables of tasks by path; what to train on next, and what to measure on.

A source has *kinds*: the templates of a world, the sites of a table. `draw(number)` gives the task of a draw by its
number; it depends on the seed, the number and what was observed before, and on nothing else, so a run that is resumed
draws what it would have drawn. Held-out tasks are other instances (of worlds: seeds that are never trained on, beyond
those that are), always the same ones, spread evenly over the kinds.

Adaptive sampling. A group whose members all fail or all succeed teaches nothing, so a kind is drawn with a weight of
p (1 - p) of its success rate p, a moving mean over valid outcomes alone, and never with less than a tenth of an even
share.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from owrl_jax.config import ConfigError, DataSettings
from owrl_jax.types import Task, Trajectory, VerdictValue

WORLDS = "worlds:"
MEMORY = 0.9
"""What a moving mean keeps per observed group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Tasks that are alike.

    Attributes:
      name: `starter/pair_colour`, or a site.
      instances: how many there are to train on.
      make: the instance of a number below `instances`.
      held_out: the held-out instance of a number, from 0; None where there are no more.
    """

    name: str
    instances: int
    make: Callable[[int], Task]
    held_out: Callable[[int], Task | None]


class TaskSource:
    """Draws tasks.

    Args:
      kinds: at least one.
      seed: of the draws.
      adaptive: see the head of this file.
    """

    def __init__(self, kinds: Sequence[Kind], *, seed: int, adaptive: bool = False) -> None:
        if not kinds:
            raise ConfigError("data.tasks names no task at all: name a table or a world")
        self.kinds = tuple(kinds)
        self._seed, self._adaptive = seed, adaptive
        self._rates: dict[str, float] = {}

    def some(self, number: int) -> Iterable[Task]:
        """The first `number` training tasks of each kind."""
        return (kind.make(i) for kind in self.kinds for i in range(min(number, kind.instances)))

    @classmethod
    def of(cls, data: DataSettings, *, seed: int) -> TaskSource:
        """The source that the settings describe.

        Raises:
          ConfigError: if a name or a table is unknown, unreadable, or has nothing to train on.
        """
        kinds: list[Kind] = []
        for name in data.tasks:
            kinds += _world_kinds(name.removeprefix(WORLDS), data) if name.startswith(WORLDS) else _table(name, data)
        twice = {k.name for k in kinds if sum(other.name == k.name for other in kinds) > 1}
        if twice:
            raise ConfigError(f"data.tasks names {', '.join(sorted(twice))} twice")
        return cls(kinds, seed=seed, adaptive=data.sampling == "adaptive")

    def draw(self, number: int) -> Task:
        """The task of a draw."""
        rng = random.Random(f"{self._seed}/draw/{number}")
        kind = rng.choices(self.kinds, weights=self.weights())[0]
        return kind.make(rng.randrange(kind.instances))

    def weights(self) -> list[float]:
        """Share of each kind in the draws; they sum to 1."""
        if not self._adaptive:
            return [1 / len(self.kinds)] * len(self.kinds)
        # An unknown kind counts as half solved: it is looked at first.
        spread = [p * (1 - p) for p in (self._rates.get(k.name, 0.5) for k in self.kinds)]
        total = sum(spread)
        floor = 0.1 / len(self.kinds)
        shares = [(s / total if total > 0 else 1 / len(self.kinds)) for s in spread]
        return [floor + 0.9 * share for share in shares]

    def observe(self, trajectories: Iterable[Trajectory]) -> None:
        """Takes the valid ones of a group into the success rate of their kind."""
        valid = [t for t in trajectories if t.valid and t.verdict is not None]
        if valid:
            name = kind_of(valid[0].task)
            share = sum(t.verdict.value == VerdictValue.SUCCESS for t in valid if t.verdict) / len(valid)
            self._rates[name] = MEMORY * self._rates.get(name, share) + (1 - MEMORY) * share

    def state(self) -> dict[str, Any]:
        """What was observed, for the checkpoint."""
        return {"rates": dict(sorted(self._rates.items()))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state` gave."""
        self._rates = dict(state["rates"])

    def held_out(self, count: int) -> tuple[Task, ...]:
        """`count` tasks that are never drawn, spread evenly over the kinds.

        Raises:
          ConfigError: if there are not that many.
        """
        found: list[Task] = []
        for number in range(count):
            round, at = divmod(number, len(self.kinds))
            task = self.kinds[at].held_out(round)
            if task is not None:
                found.append(task)
        if len(found) < count:
            raise ConfigError(f"eval.tasks={count}, but data.tasks has only {len(found)} held-out tasks in that spread")
        return tuple(found)


def kind_of(task: Task) -> str:
    """Name of the kind that a task is of."""
    return task.verifier.removeprefix(WORLDS) if task.verifier.startswith(WORLDS) else task.site


def _world_kinds(name: str, data: DataSettings) -> list[Kind]:
    from owrl_jax.worlds import miniwob, registry
    from owrl_jax.worlds.site import TRAIN

    where, _, what = name.partition("/")
    try:
        names = (what,) if what else registry.templates(where)
        makers = [_maker(where, each) for each in names]
        for make in makers:
            make(0)
    except KeyError as error:
        raise ConfigError(f"data.tasks: {error.args[0]}") from None
    kinds = []
    for each, make in zip(names, makers, strict=True):
        if where == miniwob.NAME:
            training, beyond = list(range(data.instances)), lambda n: data.instances + n
        else:
            template = registry.template(where, each)
            training = [seed for seed in range(data.instances) if template.split(seed) == TRAIN]
            beyond = _held_out_seed(template, data.instances)
        if training:
            kinds.append(_world_kind(f"{where}/{each}", make, training, beyond))
        elif what:
            raise ConfigError(f"data.tasks: {WORLDS}{name} is held out as a whole and cannot be trained on")
    return kinds


def _maker(where: str, what: str) -> Callable[[int], Task]:
    from owrl_jax.worlds import registry

    return lambda seed: registry.make_task(where, what, seed)


def task_words(task: Task) -> list[str]:
    """What a task says, and of local worlds also what its oracle says on the way."""
    from owrl_jax.worlds import registry

    said = [task.instruction]
    if task.verifier.startswith(WORLDS) and task.seed is not None:
        where, what = task.verifier.removeprefix(WORLDS).split("/")
        if where in registry.OWN:
            case = registry.site(where).case(what, task.seed)
            said += [move.why for move in case.moves] + [case.said]
    return said


def beside(task: Task) -> list[Task]:
    """The training tasks, this one among them, that begin on the very page of a task of a local world.

    Sites draw several goals for a world, so one screenshot can serve them all. Of other tasks: the task alone.
    """
    from owrl_jax.worlds import registry

    where, _, what = task.verifier.removeprefix(WORLDS).partition("/")
    if not task.verifier.startswith(WORLDS) or task.seed is None or where not in registry.OWN:
        return [task]
    goals = registry.site(where).goals_per_world
    first, skin = task.seed - task.seed % goals, task.metadata["skin"]
    found = [registry.make_task(where, what, seed, skin=skin) for seed in range(first, first + goals)]
    return [other for other in found if other.split == task.split and other.start_url == task.start_url]


def _held_out_seed(template: Any, start: int) -> Callable[[int], int]:
    from owrl_jax.worlds.site import TRAIN

    def seed(number: int) -> int:
        at = start
        while True:
            if template.split(at) != TRAIN:
                if number == 0:
                    return at
                number -= 1
            at += 1

    return seed


def _world_kind(name: str, make: Callable[[int], Task], training: list[int], beyond: Callable[[int], int]) -> Kind:
    return Kind(
        name=name,
        instances=len(training),
        make=lambda number: make(training[number]),
        held_out=lambda number: make(beyond(number)),
    )


def _table(name: str, data: DataSettings) -> list[Kind]:
    """Kinds of a table: JSON lines, each a `types.Task`."""
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"data.tasks: there is no table {name}; local worlds are named {WORLDS}NAME")
    tasks: list[Task] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                tasks.append(msgspec.json.decode(line, type=Task))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ConfigError(f"data.tasks: {name}, line {number}: {error}") from None
    sites: dict[str, tuple[list[Task], list[Task]]] = {}
    for task in tasks:
        training, held_out = sites.setdefault(kind_of(task), ([], []))
        (training if task.split == data.split else held_out).append(task)
    kinds = [
        Kind(
            name=site,
            instances=len(training),
            make=training.__getitem__,
            held_out=lambda number, rest=held_out: rest[number] if number < len(rest) else None,
        )
        for site, (training, held_out) in sorted(sites.items())
        if training
    ]
    if not kinds:
        raise ConfigError(f"data.tasks: {name} has no task of split {data.split!r}")
    return kinds
