"""The bridge to MiniWoB++: its pages, served from the installed package, with our tools as the only hands.

The package (PyPI `miniwob`, MIT) is used for its HTML alone; nothing of its Selenium layer is imported. A page is
served as it is, with two scripts added. The first, right after its core library, seeds `Math.random` before the
page's own code runs and sets the clock to a fixed start, so that most tasks are the same on every visit. The second
starts the episode without the START cover and without a time limit, hides reward display and click marks, and reports
instruction and raw reward to the server, where the agent cannot reach them.

The task area is 160 by 210 CSS pixels, so a sandbox for these tasks has that viewport and a device pixel ratio of
about 4 (`VIEWPORT`, `DPR`). `zoom` scales the page by CSS instead, for a pool whose viewport is fixed; pages that
compute with mouse positions (drawing, dragging, sliders) do not take that well.

The instruction is made up by the page. Until it has loaded, a task says only that it stands in the yellow box; it does.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import mimetypes
from pathlib import Path

from owrl_jax.types import Task, Verdict, VerdictValue
from owrl_jax.worlds.messages import Request, Response

NAME = "miniwob"
VIEWPORT = (160, 210)
DPR = 4
SUCCESS = 1.0  # raw reward, without the time discount

# What differs between two visits with one seed although random numbers and clock are the same: animations that depend
# on when a frame is drawn. Found by loading every task twice and comparing the documents
# (tests/browser/test_worlds_miniwob).
NON_DETERMINISTIC = frozenset({"chase-circle", "click-pie", "moving-items", "stock-market"})

_UNKNOWN = "Do what the yellow box at the top of the page asks for."

_SEED = """<script>
Math.seedrandom(__SEED__);
(() => { // A clock that starts at a fixed moment.
  const Real = Date, shift = Real.UTC(2026, 0, 15, 12) - Real.now();
  window.Date = class extends Real {
    constructor(...args) { args.length ? super(...args) : super(Real.now() + shift); }
    static now() { return Real.now() + shift; }
  };
})();
</script>"""

_START = """<style>#reward-display, #click-canvas { display: none !important } html { zoom: __ZOOM__ }</style>
<script>
(() => {
  const tell = (data) => {
    const request = new XMLHttpRequest();
    request.open('POST', '/_wob', false); // the verdict may be asked for as soon as the click is answered
    request.setRequestHeader('Content-Type', 'application/x-www-form-urlencoded');
    request.send(new URLSearchParams(data).toString());
  };
  const begin = () => {
    if (window.WOB_TASK_READY === false) return setTimeout(begin, 10);
    if (!core.cover_div) core.startEpisode();
    Math.seedrandom(__SEED__);
    core.EPISODE_MAX_TIME = 1e9;
    core.countdownTimer = () => {};
    core.startEpisodeReal();
    const end = core.endEpisode;
    core.endEpisode = function (...args) {
      const running = core.EP_TIMER !== null;
      end.apply(core, args);
      if (!running) return;
      core.cover_div.textContent = 'FINISHED';
      core.cover_div.onclick = null;
      tell({event: 'end', reward: WOB_RAW_REWARD_GLOBAL, reason: String(WOB_REWARD_REASON || '')});
    };
    const said = core.getUtterance(); // a text, or a record with fields for a few tasks in free language
    tell({event: 'start', instruction: said.utterance || said});
  };
  window.addEventListener('load', () => setTimeout(begin));
})();
</script>"""


@functools.cache
def folder() -> Path | None:
    """Where the package keeps its pages, or None if it is not installed."""
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "html"
    return path if path.is_dir() else None


def installed() -> bool:
    """Whether the pages are there."""
    return folder() is not None


@functools.cache
def tasks() -> tuple[str, ...]:
    """Names of all tasks, alphabetically.

    Raises:
      ModuleNotFoundError: saying what to install.
    """
    root = folder()
    if root is None:
        raise ModuleNotFoundError(
            "the MiniWoB++ tasks need the package miniwob: pip install 'owrl-jax[dev]'", name="miniwob"
        )
    return tuple(sorted(p.stem for p in (root / "miniwob").glob("*.html")))


def make_task(name: str, seed: int, *, zoom: float = 1.0) -> Task:
    """A MiniWoB++ task.

    Raises:
      KeyError: for an unknown name.
    """
    if name not in tasks():
        raise KeyError(f"miniwob has no task {name!r}; it has {len(tasks())}, see `owrl worlds list --site miniwob`")
    metadata = {
        "template": name,
        "viewport": list(VIEWPORT),
        "dpr": DPR,
        "deterministic": name not in NON_DETERMINISTIC,
    }
    if zoom != 1:
        metadata |= {"zoom": zoom, "viewport": [round(v * zoom) for v in VIEWPORT], "dpr": 1}
    return Task(
        id=f"miniwob/{name}/{seed}",
        instruction=_UNKNOWN,
        start_url=f"http://{NAME}.localhost/miniwob/task.html",
        site=f"{NAME}.localhost",
        split="held_out_seed" if seed % 10 == 9 else "train",
        verifier=f"worlds:{NAME}/{name}",
        seed=seed,
        metadata=metadata,
    )


class MiniWobEpisode:
    """One visit of one task.

    Attributes:
      instruction: what the page asks for; empty until it has loaded.
      reward: raw reward, None while the page has not ended the task.
      reason: the page's own word on it, mostly empty.
    """

    def __init__(self, name: str, seed: int, *, zoom: float = 1.0):
        if name not in tasks():
            raise KeyError(f"miniwob has no task {name!r}")
        self.name, self.seed, self.zoom = name, seed, zoom
        self.instruction = ""
        self.reward: float | None = None
        self.reason = ""

    @property
    def start(self) -> str:
        """Path of the task's page: the same for all, since some names (login-user) would look like something else."""
        return "/miniwob/task.html"

    def handle(self, request: Request) -> Response:
        """A page or file of the package, or the report of our own script."""
        if request.path == "/_wob" and request.method == "POST":
            return self._take(request)
        root = folder()
        assert root is not None
        if request.path == self.start:
            text = (root / "miniwob" / f"{self.name}.html").read_text(encoding="utf-8", errors="replace")
            return Response(body=self._page(text).encode())
        path = (root / request.path.lstrip("/")).resolve()
        if not path.is_relative_to(root.resolve()) or not path.is_file():
            return Response(status=404, content_type="text/plain")
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return Response(body=path.read_bytes(), content_type=kind, headers=(("Cache-Control", "max-age=3600"),))

    def _page(self, text: str) -> str:
        seed, start = (s.replace("__SEED__", json.dumps(str(self.seed))) for s in (_SEED, _START))
        core = '<script src="../core/core.js"></script>'
        if core not in text:
            raise ValueError(f"miniwob/{self.name} does not load the core library in the expected way")
        return text.replace(core, core + seed, 1) + start.replace("__ZOOM__", f"{self.zoom:g}")

    def _take(self, request: Request) -> Response:
        match request.sent("event"):
            case "start" if not self.instruction:
                self.instruction = request.sent("instruction")
            case "end" if self.reward is None:
                self.reward, self.reason = float(request.sent("reward", "0")), request.sent("reason")
        return Response(status=204)

    def verdict(self, said: str | None) -> Verdict:
        """Success if the page has ended the task with the full raw reward. What was said does not matter."""
        if self.reward is None:
            value, why = VerdictValue.FAILURE, "the page has not ended the task"
        else:
            value = VerdictValue.SUCCESS if self.reward >= SUCCESS else VerdictValue.FAILURE
            why = f"raw reward {self.reward:g}" + (f" ({self.reason})" if self.reason else "")
        return Verdict(
            value=value,
            judge=f"program:{NAME}/{self.name}",
            rationale=why,
            reasons=() if value is VerdictValue.SUCCESS else (why,),
        )
