"""Solvers for some of the MiniWoB++ tasks, played with the agent's tools, for benchmarks and demonstrations.

A solver is one JavaScript function that looks at the page and says what to do next: click an element, or click it and
write. It is asked again after every turn, so it needs no memory beyond the number of the turn. It reads the document
where an agent reads the picture; it acts through grid points and tool calls alone.
"""

from __future__ import annotations

from owrl_jax.geometry import pixel_to_grid_point
from owrl_jax.types import StepResult, ToolCall
from owrl_jax.worlds.oracle import Lost, PageProbe, Turn

# `q` the instruction, `quoted` its quoted parts, `n` the number of the turn, `all(css)` elements, `click(el)` and
# `write(el, text)` what a solver may answer, `text(el)` the trimmed text of an element.
_FRAME = """
([n]) => {
  if (WOB_DONE_GLOBAL) return {done: true};
  const all = (css) => [...document.querySelectorAll(css)], text = (el) => el.textContent.trim();
  const q = core.getUtterance(), quoted = [...q.matchAll(/"([^"]*)"/g)].map((m) => m[1]);
  const click = (el) => ({el}), write = (el, message) => ({el, message});
  const fill = (el, message) => el.value === message ? null : write(el, message);
  const submit = () => click(document.querySelector('#subbtn') || all('#area button').at(-1));
  const act = (() => { __BODY__ })();
  if (!act || !act.el) return null;
  act.el.scrollIntoViewIfNeeded();
  const box = act.el.getClientRects()[0];
  return {x: box.left + box.width / 2, y: box.top + box.height / 2, width: innerWidth, height: innerHeight,
    message: act.message ?? null, what: act.el.tagName.toLowerCase() + ' ' + text(act.el).slice(0, 30)};
}
"""

_CHECKBOXES = """
  const wanted = q.match(/^Select (.*) and click/)[1].split(', ');
  const open = all('#boxes label').find((l) => wanted.includes(text(l)) && !l.querySelector('input').checked);
  return open ? click(open.querySelector('input')) : submit();
"""
_BUTTON_TEXT = "return click(all('#area button').find((b) => b.textContent === quoted[0]));"
_NTH_INPUT = "return click(all('#area input')[Number((q.match(/(\\d)(st|nd|rd|th)/) || [0, 1])[1]) - 1]);"

SOLVERS: dict[str, str] = {
    "click-button": _BUTTON_TEXT,
    "click-button-sequence": "return click(all('#area button').find((b) => text(b) === (n ? 'TWO' : 'ONE')));",
    "click-checkboxes": _CHECKBOXES,
    "click-checkboxes-transfer": _CHECKBOXES,
    "click-collapsible": """
      const head = document.querySelector('#area h3');
      return head.getAttribute('aria-expanded') === 'true' ? submit() : click(head);
    """,
    "click-dialog": "return click(document.querySelector('.ui-dialog-titlebar-close'));",
    "click-dialog-2": """
      const buttons = all('.ui-dialog-buttonpane button');
      return click(quoted[0] === 'x' ? document.querySelector('.ui-dialog-titlebar-close')
        : buttons.find((b) => text(b) === quoted[0]));
    """,
    "click-link": "return click(all('#area .alink').find((a) => text(a) === quoted[0]));",
    "click-option": """
      const label = all('#area label').find((l) => text(l) === q.match(/^Select (.*) and click/)[1]);
      const radio = label.querySelector('input');
      return radio.checked ? submit() : click(radio);
    """,
    "click-tab": """
      return click(all('#area a').find((a) => text(a) === q.match(/Tab #\\d/)[0]));
    """,
    "click-test": "return click(document.querySelector('#area button'));",
    "click-test-2": "return click(all('#area button').find((b) => text(b) === 'ONE'));",
    "click-test-transfer": "return click(all('#area button').find((b) => text(b) === 'ONE'));",
    "click-widget": "return click(document.querySelector(`#area [data-type='${quoted[0]}']`));",
    "choose-list": """
      const list = document.querySelector('#options'), wanted = q.match(/^Select (.*) from the list/)[1];
      return text(list.selectedOptions[0]) === wanted ? submit() : write(list, wanted);
    """,
    "enter-password": "return fill(all('#password')[0], quoted[0]) || fill(all('#verify')[0], quoted[0]) || submit();",
    "enter-text": "return fill(document.querySelector('#tt'), quoted[0]) || submit();",
    "enter-text-dynamic": "return fill(document.querySelector('#tt'), quoted[0]) || submit();",
    "focus-text": _NTH_INPUT,
    "focus-text-2": _NTH_INPUT,
    "login-user": """
      return fill(all('#username')[0], quoted[0]) || fill(all('#password')[0], quoted[1]) || submit();
    """,
    "unicode-test": _BUTTON_TEXT,
}


class MiniWobOracle:
    """One MiniWoB++ task being solved.

    Args:
      name: one of `SOLVERS`.
      patience: turns after which it gives up.
    """

    def __init__(self, name: str, *, patience: int = 20):
        if name not in SOLVERS:
            raise KeyError(f"there is no solver for miniwob/{name}; there are {', '.join(SOLVERS)}")
        self._name, self._patience = name, patience
        self._turn = 0
        self._waited = False
        self.finished = False

    async def act(self, probe: PageProbe, last: StepResult | None = None) -> Turn:
        """The next turn: reasoning and calls.

        Raises:
          Lost: if the solver finds nothing to do and the page has not ended the task.
        """
        seen = await probe.evaluate(_FRAME.replace("__BODY__", SOLVERS[self._name]), [self._turn])
        if seen is not None and seen.get("done"):
            self.finished = True
            return "The page says that it is finished.", [ToolCall(name="done", arguments={"response": "Done."})]
        if self._turn >= self._patience or (seen is None and self._waited):
            raise Lost(f"miniwob/{self._name}: nothing to do at turn {self._turn}")
        if seen is None:
            self._waited = True
            return "I wait for the page.", [ToolCall(name="wait", arguments={"seconds": 1})]
        self._turn += 1
        point = pixel_to_grid_point(
            (int(seen["x"]), int(seen["y"])), image_size=(round(seen["width"]), round(seen["height"]))
        )
        calls = [ToolCall(name="click", arguments={"point_2d": list(point)})]
        if seen["message"] is not None:
            calls.append(ToolCall(name="write", arguments={"message": seen["message"]}))
        return f"I act on the {seen['what']}.".replace("\n", " "), calls
