"""The live view: what it shows, how often, and that it stays readable where there is no terminal."""

from __future__ import annotations

import io
import time

from rich.console import Console

from owrl_jax.obs.live import LiveView, duration

from .test_journal import episode


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def plain(every_s=10.0):
    out = io.StringIO()
    clock = Clock()
    console = Console(file=out, width=60, force_terminal=False)
    return out, clock, LiveView("quickstart", console=console, every_s=every_s, clock=clock)


def test_plain_lines_come_at_their_pace_and_at_the_ends_of_stages():
    out, clock, view = plain()
    with view:
        view.begin("rl", total=100, done=20)
        for n in range(21, 61):
            clock.now += 1
            view.log(n, {"reward/mean_per_trajectory": n / 100, "engine/tokens_per_s": 1234.5})
    lines = out.getvalue().splitlines()
    assert lines[0] == "rl: begins, 20 of 100 iterations done"
    assert len(lines) == 6  # begin, at 10, 20, 30 and 40 s, end
    assert lines[1] == "rl: 30/100 iterations, 10s, 1m 10s left | reward 0.300 | tokens/s 1,234"  # pace of this process
    assert lines[-1].endswith("over after 40 iterations in 40s")


def test_episodes_and_time_are_told():
    out, _, view = plain(every_s=0.0)
    with view:
        view.begin("rl", total=2)
        for n in range(3):
            view.ended(episode("g", n))
        view.log(1, {"time/browser_s": 6.0, "time/engine_s": 3.0, "time/idle_s": 1.0, "time/total_s": 10.0})
    last = out.getvalue().splitlines()[-1]
    assert "success 3 of 3 judged | valid 100% of the last 3 | episodes 3 ended" in last
    assert "outcomes completed/answered 3 | time browser 60%, engine 30%, idle 10%" in last


def test_hostile_words_are_shown_and_not_obeyed():
    out, _, view = plain()
    with view:
        view.note("[red]a[/red] \x1b[2Jb\rc")
    assert out.getvalue() == "[red]a[/red] �[2Jb�c\n"


def test_on_a_terminal_it_draws_few_times_however_much_comes_in():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=30)
    began = time.monotonic()
    with LiveView("run", console=console, per_s=4) as view:
        view.begin("rl", total=5000)
        while (n := time.monotonic() - began) < 0.6:
            view.log(int(n * 1000), {"loss/total": n})
        spent = time.monotonic() - began
    drawings = out.getvalue().count("▸ rl")
    assert 1 <= drawings <= 4 * spent + 3
    assert "✓ rl" in out.getvalue()


def test_calls_outside_of_the_block_do_no_harm():
    _, _, view = plain()
    view.log(3, {"loss/total": 1})
    view.ended(episode("g", 0))
    view.end()
    assert view.eta_s is None
    with view:
        view.begin("sft", total=None, unit="updates")
        view.log(2, {"loss/total": object()})


def test_durations():
    assert [duration(s) for s in (-3, 0.4, 41, 185, 7620)] == ["0s", "0s", "41s", "3m 05s", "2h 07m"]
