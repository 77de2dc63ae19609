"""`owrl worlds …` as a person runs it: another process, its printed lines, its exit code."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from owrl_jax.worlds import registry
from owrl_jax.worlds.cli import main


@contextlib.contextmanager
def worlds(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running `owrl worlds` with pipes; killed at the end if it is still there."""
    command = [sys.executable, "-u", "-m", "owrl_jax.cli", "worlds", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def visit(address: str, **options) -> httpx.Response:
    """The page at an address of a local world, redirects and cookies followed. The name is told to the client here."""
    parts = urlsplit(address)
    cookies: dict[str, str] = {}
    method, path = options.pop("method", "GET"), parts.path
    for _ in range(5):
        answer = httpx.request(
            method,
            f"http://127.0.0.1:{parts.port}{path}",
            headers={"Host": parts.netloc, "Cookie": "; ".join(f"{k}={v}" for k, v in cookies.items())},
            trust_env=False,
            timeout=30,
        )
        cookies |= dict(answer.cookies)
        if not answer.is_redirect:
            then = options.pop("then", None)
            if then is None:
                return answer
            method, path = then
            continue
        method, path = "GET", urlsplit(answer.headers["Location"]).path
    raise AssertionError(f"{address} redirects without end")


def printed(process: subprocess.Popen[str], start: str) -> str:
    """The rest of the next printed line that begins with `start`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.removeprefix(start).strip()
    raise AssertionError(f"no line {start!r}; {process.stderr.read() if process.stderr else ''}")


def test_serve_offers_every_site_until_it_is_interrupted() -> None:
    with worlds("serve", "--port", "0") as process:
        addresses = {name: printed(process, f"{name} ") for name in registry.OWN}
        printed(process, "Interrupt")
        for name, address in addresses.items():
            assert urlsplit(address).hostname == f"{name}.localhost"
            page = visit(address)
            assert page.status_code == 200 and "<html" in page.text.lower(), name
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        with pytest.raises(httpx.TransportError):
            visit(addresses["shop"])
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_play_gives_the_verdict_of_what_was_really_done() -> None:
    task = registry.make_task("shop", "wish", 3)
    episode = registry.open_episode(task)
    sku = next(iter(episode.case.goal.changes)).removeprefix("wish/")  # type: ignore[union-attr]
    for does_it, verdict, code in ((True, "success", 0), (False, "failure", 1)):
        with worlds("play", "--site", "shop", "--template", "wish", "--seed", "3", "--no-open") as process:
            assert printed(process, "Task:") == task.instruction
            address = printed(process, "Open:")
            then = ("POST", f"/wish/{sku}") if does_it else None
            assert visit(address, then=then).status_code == 200
            out, error = process.communicate("\n", timeout=30)
            assert verdict in out and process.returncode == code, (out, error)


@pytest.mark.parametrize("how", ["end of input", "interrupt"])
def test_play_ends_when_the_player_leaves(how: str) -> None:
    with worlds("play", "--site", "starter", "--template", registry.templates("starter")[0], "--no-open") as process:
        printed(process, "Open:")
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30) if how == "end of input" else process.communicate(None, timeout=30)
        assert process.returncode == (1 if how == "end of input" else 130) and "Traceback" not in error, (out, error)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("play", "--site", "shop", "--template", "nothing"), "nothing"),
        (("play", "--site", "moon", "--template", "price"), "moon"),
        (("play", "--site", "shop", "--template", "price", "--seed", "-1"), "0 or more"),
        (("serve", "--port", "0", "--template", "shop/nothing"), "nothing"),
        (("list", "--site", "moon"), "moon"),
    ],
)
def test_wrong_calls_say_what_there_is(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture) -> None:
    assert main(list(arguments)) == 2
    assert says in capsys.readouterr().err


def test_the_list_as_json_names_every_template(capsys: pytest.CaptureFixture) -> None:
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {t["name"] for t in found["shop"]["templates"]} == set(registry.templates("shop"))
    assert set(registry.OWN) <= set(found)
