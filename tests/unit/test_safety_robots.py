"""robots.txt by RFC 9309; the expected answers are worked by hand from its text."""

from __future__ import annotations

import asyncio

import pytest

from owrl_jax.browser.robots import Robots, RobotsRules
from owrl_jax.outcome import Reason

FILE = """
# comment
User-agent: other
Disallow: /

User-Agent: owrl
User-agent: third
Disallow: /private
Allow: /private/open
Disallow: /*.pdf$
Disallow: /search?*sort=
Allow: /page
Disallow: /page
Disallow: /caf%C3%A9
Sitemap: https://x.example/map

User-agent: *
Disallow: /everything
"""


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/", True),
        ("/private", False),
        ("/private/x", False),
        ("/privateer", False),  # rules are prefixes
        ("/private/open/x", True),  # the longer rule wins, whatever the order
        ("/a/b.pdf", False),
        ("/a/b.pdf?x", True),  # anchored
        ("/search?q=1&sort=up", False),
        ("/search?q=1", True),
        ("/page", True),  # equal length: allow
        ("/café", False),  # compared as octets
        ("/caf%c3%a9/x", False),
        ("/everything", True),  # the group for * is not ours
        ("/robots.txt", True),
    ],
)
def test_the_longest_rule_of_our_group_wins(path, allowed):
    assert RobotsRules.parse(FILE, "OWRL").allows(path) is allowed


def test_groups():
    assert not RobotsRules.parse(FILE, "nobody").allows("/everything")
    assert not RobotsRules.parse(FILE, "third").allows("/private")
    assert RobotsRules.parse("User-agent: owrl\nDisallow:\n\nUser-agent: *\nDisallow: /", "owrl").allows("/x")
    assert RobotsRules.parse("Disallow: /", "owrl").allows("/x")  # a rule of no group
    assert RobotsRules.parse("<html>not robots</html>", "owrl").allows("/x")
    split = "User-agent: owrl\nDisallow: /a\n\nUser-agent: x\nDisallow: /\n\nUser-agent: owrl\nDisallow: /b"
    assert not RobotsRules.parse(split, "owrl").allows("/b")  # groups of one agent are joined
    assert not RobotsRules.parse(split, "owrl").allows("/a")
    many = RobotsRules(rules=(("/" + "*a" * 200 + "$", False),))
    assert many.allows("/" + "a" * 5000 + "b")  # no backtracking: this returns


class Server:
    def __init__(self, status: int = 200, text: str = "User-agent: *\nDisallow: /no"):
        self.status, self.text, self.asked = status, text, []

    async def fetch(self, url: str, /, *, max_bytes: int) -> tuple[int, str]:
        self.asked.append(url)
        await asyncio.sleep(0)
        if self.status == 0:
            raise OSError("unreachable")
        return self.status, self.text


async def test_honor_refuses_report_lets_pass_and_ignore_does_not_ask(caplog):
    server = Server()
    refusal = await Robots("honor").check("http://x.example/no/1?a", server.fetch)
    assert (refusal.reason, refusal.detail) == (Reason.BLOCKED, "robots")
    assert await Robots("honor").check("http://x.example/yes", server.fetch) is None
    caplog.set_level("INFO")
    assert await Robots("report").check("http://x.example/no", server.fetch) is None
    assert "disallows" in caplog.text
    asked = len(server.asked)
    assert await Robots("ignore").check("http://x.example/no", server.fetch) is None
    assert len(server.asked) == asked
    with pytest.raises(ValueError, match="honor, report or ignore"):
        Robots("obey")


@pytest.mark.parametrize(
    ("status", "passes"), [(404, True), (403, True), (301, True), (500, False), (503, False), (0, False)]
)
async def test_what_a_failed_robots_txt_means(status, passes):
    server = Server(status)
    assert (await Robots("honor").check("http://x.example/a", server.fetch) is None) is passes


async def test_one_fetch_per_origin_and_day_and_outages_are_asked_again_sooner():
    now = [0.0]
    server = Server()
    robots = Robots("honor", clock=lambda: now[0])
    await asyncio.gather(*(robots.check(f"http://user:pw@x.example/{k}", server.fetch) for k in range(8)))
    assert server.asked == ["http://x.example/robots.txt"]
    await robots.check("https://x.example/", server.fetch)
    await robots.check("http://x.example:81/", server.fetch)
    assert len(server.asked) == 3
    now[0] = 86401
    await robots.check("http://x.example/", server.fetch)
    assert len(server.asked) == 4
    server.status = 503
    now[0] *= 2
    assert await robots.check("http://x.example/", server.fetch) is not None
    server.status = 200
    now[0] += 600
    assert await robots.check("http://x.example/", server.fetch) is None
    assert not robots._locks
