"""Scenes and pages of the starter site.

A scene is two or four coloured shapes, four word buttons and a small form, laid out to fill a viewport of any size from
128 to 320 pixels. Eight consecutive seeds share a scene, so a captured page serves several goals.

State: `hits` ids of clicked things in order; `sent` what the form sent, None before. Facts: `pair`, `quad`, `words`,
`form`.
"""

from __future__ import annotations

import dataclasses
import functools
import random

from markupsafe import Markup

from owrl_jax.worlds.goals import State
from owrl_jax.worlds.html import e, hidden
from owrl_jax.worlds.messages import Request, Response, see_other
from owrl_jax.worlds.site import Episode, NoSuchPage, Routes
from owrl_jax.worlds.skins import Skin

routes = Routes()
COLOURS = {"red": "#d62728", "green": "#2ca02c", "blue": "#1f55d6", "yellow": "#f2c40f"}
SHAPES = ("box", "disc", "cone")
WORDS = ("go", "cat", "sun", "pen", "cup", "map", "key", "ice", "owl", "tea", "hat", "fig")
PLACES = ("top left", "top right", "bottom left", "bottom right")

_CSS = """
*{box-sizing:border-box}html,body,main{margin:0;height:100%;width:100%}body{background:var(--page);color:var(--ink);
 font:bold 9vmin sans-serif}main form{margin:0}.grid{display:grid;width:100%;height:100%;gap:3%;padding:3%}
.two{grid-template-columns:1fr 1fr}.four{grid-template-columns:1fr 1fr;grid-template-rows:1fr 1fr}
button{font:inherit;color:var(--ink);background:var(--card);border:2px solid var(--line);border-radius:8px;padding:0;
 width:100%;height:100%}.hit{border:6px solid var(--ink)}svg{width:86%;height:86%}
.stack{display:flex;flex-direction:column;gap:4%;padding:4%;height:100%}.stack>*{flex:1;min-height:0}
input[type=text]{font:inherit;width:100%;border:2px solid
var(--line);background:var(--card);color:var(--ink);padding:0 4%} .pick{display:grid;grid-template-columns:1fr
1fr;gap:4%}.pick label{border:2px solid var(--line);background:var(--card);
 display:flex;align-items:center;justify-content:center;gap:6%;border-radius:8px}
.pick input{width:7vmin;height:7vmin;margin:0}.ok{background:var(--go);color:#fff}
"""


def _skin(name: str, page: str, ink: str, card: str, line: str, go: str) -> Skin:
    return Skin(name=name, css=f":root{{--page:{page};--ink:{ink};--card:{card};--line:{line};--go:{go}}}{_CSS}")


SKINS = (
    _skin("bright", "#ffffff", "#111111", "#f4f4f4", "#888888", "#1b7f3b"),
    _skin("dark", "#20242c", "#f5f5f5", "#39404d", "#9aa3b2", "#7a3fb0"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What the pages show. Shapes are (colour, shape); all of a scene's are different, and so are its words."""

    pair: tuple[tuple[str, str], ...]
    quad: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    options: tuple[str, str]


@functools.lru_cache(maxsize=1024)
def build(seed: int) -> Scene:
    """The two of the pair differ in colour only; the four of the quad share colours and shapes among them."""
    rng = random.Random(f"starter/{seed}")
    shape = rng.choice(SHAPES)
    every = [(c, s) for c in COLOURS for s in SHAPES]
    words = rng.sample(WORDS, 6)
    return Scene(
        pair=tuple((c, shape) for c in rng.sample(list(COLOURS), 2)),
        quad=tuple(rng.sample(every, 4)),
        words=tuple(words[:4]),
        options=(words[4], words[5]),
    )


def start(scene: Scene) -> State:
    """Nothing clicked, nothing sent."""
    return {"hits": [], "sent": None}


def _picture(colour: str, shape: str) -> Markup:
    fill = COLOURS[colour]
    match shape:
        case "box":
            body = e.rect(x=8, y=8, width=84, height=84, fill=fill)
        case "disc":
            body = e.circle(cx=50, cy=50, r=45, fill=fill)
        case _:
            body = e.polygon(points="50,4 97,94 3,94", fill=fill)
    return e.svg(body, viewBox="0 0 100 100")


def _hit_button(episode: Episode, page: str, index: int, content: Markup | str) -> Markup:
    ident = f"{page}-{index}"
    marked = "hit" if ident in episode.state["hits"] else None
    button = e.button(content, id=ident, cls=marked)
    return e.form(hidden(hit=ident, back=f"/{page}"), button, method="post", action="/hit")


def _grid(episode: Episode, page: str, contents: list[Markup | str]) -> Response:
    episode.see(page)
    cells = [_hit_button(episode, page, i, content) for i, content in enumerate(contents)]
    return episode.page(page, e.div(cells, cls="grid two" if len(cells) == 2 else "grid four"))


@routes.get("/pair")
def pair(episode: Episode, request: Request) -> Response:
    return _grid(episode, "pair", [_picture(*x) for x in episode.world.pair])


@routes.get("/quad")
def quad(episode: Episode, request: Request) -> Response:
    return _grid(episode, "quad", [_picture(*x) for x in episode.world.quad])


@routes.get("/words")
def words(episode: Episode, request: Request) -> Response:
    return _grid(episode, "words", list(episode.world.words))


@routes.get("/door")
def door(episode: Episode, request: Request) -> Response:
    return episode.page("door", e.div(e.form(e.button("next", id="next", cls="ok"), action="/quad"), cls="grid"))


@routes.post("/hit")
def hit(episode: Episode, request: Request) -> Response:
    ident, back = request.sent("hit"), request.sent("back")
    if back not in ("/pair", "/quad", "/words"):
        raise NoSuchPage("There is nothing to hit.")
    episode.state["hits"] = [*episode.state["hits"], ident]
    return see_other(back)


@routes.get("/form")
def form(episode: Episode, request: Request) -> Response:
    episode.see("form")
    sent = episode.state["sent"] or {}
    picks = [
        e.label(
            e.input(type="radio", name="pick", value=w, id=f"pick-{w}", checked=sent.get("pick") == w),
            w,
            id=f"label-{w}",
        )
        for w in episode.world.options
    ]
    field = e.input(type="text", name="text", id="text", value=sent.get("text", ""), autocomplete="off")
    button = e.button("sent" if sent else "send", id="send", cls="ok")
    return episode.page(
        "form", e.form(field, e.div(picks, cls="pick"), button, method="post", action="/send", cls="stack")
    )


@routes.post("/send")
def send(episode: Episode, request: Request) -> Response:
    episode.state["sent"] = {"text": request.sent("text"), "pick": request.sent("pick")}
    return see_other("/form")


@routes.get("/")
def home(episode: Episode, request: Request) -> Response:
    return see_other(episode.case.start if episode.case.start != "/" else "/quad")
