"""What a site is: data built from a seed, pages as functions, templates of tasks; and one episode on it.

    site.build(seed)  -> world     everything that never changes: goods, flights, articles (immutable, cached)
    site.start(world) -> state     everything that may change: one flat dict of JSON values
    page(episode, request) -> Response

An `Episode` owns its state; two episodes share the immutable world and nothing else. Its answers depend on seed, skin
and the requests before, on no clock and no global random state, so the same requests get the same bytes.

Not here: the wire (`http_server`), faults (`faults`), what counts as success (`goals`).
"""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from owrl_jax.types import Verdict
from owrl_jax.worlds import goals
from owrl_jax.worlds.faults import Faults, FaultState
from owrl_jax.worlds.goals import Decoy, Goal, State
from owrl_jax.worlds.html import e
from owrl_jax.worlds.messages import Request, Response, html_response
from owrl_jax.worlds.script import Move, Say
from owrl_jax.worlds.skins import SCRIPT, Skin

Handler = Callable[..., Response]

TRAIN, HELD_OUT_SEED, HELD_OUT_TEMPLATE = "train", "held_out_seed", "held_out_template"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One instance of a template: the words of the instruction, the goal, a solution and near misses.

    Attributes:
      words: fill the template's phrasings.
      goal: what must hold at the end.
      script: moves that reach the goal from `start`, without the closing `Say`.
      said: the right answer, as the solution words it.
      decoys: near misses particular to this template.
      start: path of the first page.
      state: entries put into the start state (a cart that is not empty).
    """

    words: Mapping[str, Any]
    goal: Goal
    script: tuple[Move, ...]
    said: str = "Done."
    decoys: tuple[Decoy, ...]
    start: str = "/"
    state: State = dataclasses.field(default_factory=dict)

    @property
    def moves(self) -> tuple[Move, ...]:
        """The whole solution."""
        why = "I have what was asked for." if self.goal.answer else "Everything that was asked for is done."
        return (*self.script, Say(self.said, why))

    @property
    def all_decoys(self) -> tuple[Decoy, ...]:
        """Particular and general near misses."""
        return self.decoys + goals.general_decoys(self.goal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """A kind of task.

    Attributes:
      name: unique within its site.
      level: 1 (a step or two) to 3 (several conditions, many steps); the starter site uses finer steps.
      phrasings: instructions with the words of a case in braces. The last one is kept out of the train split.
      make: builds a case from a world and a random generator that is seeded for this task.
      held_out: whether the whole template is kept out of the train split.
    """

    name: str
    level: float
    phrasings: tuple[str, ...]
    make: Callable[[Any, random.Random], Case]
    held_out: bool = False

    def split(self, seed: int) -> str:
        """Which split a task of this template belongs to: every tenth seed is held out."""
        if self.held_out:
            return HELD_OUT_TEMPLATE
        return HELD_OUT_SEED if seed % 10 == 9 else TRAIN


class Templates(dict[str, Template]):
    """The templates of one site; `add` is the decorator that puts a `make` function among them."""

    def add(
        self, *phrasings: str, level: float, held_out: bool = False
    ) -> Callable[[Callable[[Any, random.Random], Case]], Callable[[Any, random.Random], Case]]:
        def register(make: Callable[[Any, random.Random], Case]) -> Callable[[Any, random.Random], Case]:
            name = make.__name__
            if name in self or len(phrasings) < 2:
                raise ValueError(f"template {name!r} needs a name of its own and at least two phrasings")
            self[name] = Template(name=name, level=level, phrasings=phrasings, make=make, held_out=held_out)
            return make

        return register


class Routes:
    """Patterns such as `/p/{sku}` and the functions that answer them."""

    def __init__(self) -> None:
        self._table: list[tuple[str, re.Pattern[str], Handler]] = []

    def get(self, pattern: str) -> Callable[[Handler], Handler]:
        """Decorator: the function answers GET requests of this form; what stands in braces becomes an argument."""
        return self._add("GET", pattern)

    def post(self, pattern: str) -> Callable[[Handler], Handler]:
        """The same for POST."""
        return self._add("POST", pattern)

    def _add(self, method: str, pattern: str) -> Callable[[Handler], Handler]:
        regex = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern))

        def register(handler: Handler) -> Handler:
            self._table.append((method, regex, handler))
            return handler

        return register

    def find(self, request: Request) -> tuple[Handler, dict[str, str]] | None:
        for method, regex, handler in self._table:
            match = regex.fullmatch(request.path)
            if match and method == request.method:
                return handler, match.groupdict()
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A site and its tasks.

    Attributes:
      name: also its host name, as `name.localhost`.
      title: as its pages call it.
      about: one line for people.
      skins: looks, at least two.
      templates: kinds of tasks by name.
      routes: its pages.
      build: seed to world. Cached by the site.
      start: world to start state.
      menu: (id, label, path) of the navigation.
      viewport: (width, height) in CSS pixels for which it is made.
      goals_per_world: how many consecutive seeds share one world, so that one page serves several goals.
    """

    name: str
    title: str
    about: str
    skins: tuple[Skin, ...]
    templates: Mapping[str, Template]
    routes: Routes
    build: Callable[[int], Any]
    start: Callable[[Any], State]
    menu: tuple[tuple[str, str, str], ...] = ()
    viewport: tuple[int, int] = (1280, 1000)
    goals_per_world: int = 1

    def skin(self, name: str) -> Skin:
        """The skin of that name."""
        for skin in self.skins:
            if skin.name == name:
                return skin
        raise KeyError(f"{self.name} has no skin {name!r}; it has {', '.join(s.name for s in self.skins)}")

    def template(self, name: str) -> Template:
        """The template of that name."""
        if name not in self.templates:
            raise KeyError(f"{self.name} has no template {name!r}; it has {', '.join(self.templates)}")
        return self.templates[name]

    def case(self, template: str, seed: int) -> Case:
        """The task instance of a seed. The same arguments give an equal case."""
        world = self.build(seed // self.goals_per_world)
        return self.template(template).make(world, random.Random(f"{self.name}/{template}/{seed}"))


class NoSuchPage(Exception):
    """Raised by a page function for an unknown item: the visitor gets a 404 page."""


class Episode:
    """One visitor's stay: own state, own record of what was served.

    Attributes:
      state: as it is now; `initial` as it was at the start.
      seen: facts that the site recorded as served, for goals.
      requests: how many page requests were answered.
    """

    def __init__(self, site: Site, template: str, seed: int, *, skin: str = "", faults: Faults | None = None):
        self.site, self.template_name, self.seed = site, template, seed
        self.world = site.build(seed // site.goals_per_world)
        self.case = site.case(template, seed)
        self.skin = site.skin(skin) if skin else site.skins[0]
        self.initial: State = {**site.start(self.world), **self.case.state}
        self.state: State = copy.deepcopy(self.initial)
        self.seen: set[str] = set()
        self.faults = FaultState(faults or Faults())
        self.requests = 0

    @property
    def start(self) -> str:
        """Path of the first page."""
        return self.case.start

    @property
    def instruction(self) -> str:
        """Empty: the task's own instruction stands."""
        return ""

    def see(self, *facts: str) -> None:
        """Record that these were served."""
        self.seen.update(facts)

    def handle(self, request: Request) -> Response:
        """The answer of the site, faults included."""
        return self.faults.wrap(request, self._answer)

    def verdict(self, said: str | None) -> Verdict:
        """What the program says now; `said` is the text of `done`, None if it was not called."""
        return goals.verdict(
            self.case.goal,
            initial=self.initial,
            final=self.state,
            seen=self.seen,
            said=said,
            judge=f"program:{self.site.name}/{self.template_name}",
            blocked=self.faults.barred,
        )

    def page(self, title: str, *body: Any, here: str = "") -> Response:
        """A whole page in this episode's skin."""
        menu = [
            e.a(label, href=path, id=f"nav-{ident}", cls="here" if ident == here else None)
            for ident, label, path in self.site.menu
        ]
        brand = e.a(self.site.title, href="/", id="nav-home", cls="brand")
        header = e.header(brand, e.nav(menu)) if self.site.menu else None
        main = e.main(self.faults.page_furniture(), *body, id="main")
        document = e.html(
            e.head(
                e.meta(charset="utf-8"),
                e.meta(name="viewport", content="width=device-width, initial-scale=1"),
                e.title(f"{title} · {self.site.title}{self.faults.title_suffix()}"),
                e.link(rel="icon", href="data:,"),
                e.style(Markup(self.skin.css)),
                self.faults.head(),
            ),
            e.body(
                header,
                self.faults.late(main),
                self.faults.overlays(),
                e.script(Markup(SCRIPT)) if "data-" in main or "data-" in self.faults.overlays() else None,
                cls=f"{self.site.name} {self.skin.name}",
            ),
            lang="en",
        )
        return html_response(document)

    def _answer(self, request: Request) -> Response:
        self.requests += 1
        found = self.site.routes.find(request)
        if found is not None:
            handler, arguments = found
            try:
                return handler(self, request, **arguments)
            except NoSuchPage as missing:
                message = str(missing)
        else:
            message = f"There is no page {request.path}."
        page = self.page("Not found", e.h1("Page not found"), e.p(message), e.a("Back to the start", href="/"))
        return dataclasses.replace(page, status=404)
