"""Manners towards hosts, on a clock that only moves when somebody sleeps."""

from __future__ import annotations

import asyncio
import random

import pytest

from owrl_jax.browser.hosts import HostGovernor, HostLimits, parse_retry_after


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def governor(clock: Clock, **limits) -> HostGovernor:
    return HostGovernor(HostLimits(**limits), clock=clock, sleep=clock.sleep, rng=random.Random(0))


async def test_navigations_are_paced_per_registrable_domain():
    clock = Clock()
    hosts = governor(clock, navigations_per_minute=60, navigation_burst=3, jitter_s=0)
    assert [await hosts.pace("www.shop.example") for _ in range(3)] == [0, 0, 0]
    assert await hosts.pace("api.shop.example") == pytest.approx(1.0)  # the same site
    assert await hosts.pace("other.example") == 0
    clock.now += 100
    assert [await hosts.pace("shop.example") for _ in range(3)] == [0, 0, 0]  # full again, and no fuller
    assert await hosts.pace("shop.example") == pytest.approx(1.0)
    # Navigations that clicks caused are paid for by the next one.
    for _ in range(5):
        hosts.debit("shop.example")
    assert await hosts.pace("shop.example") == pytest.approx(6.0)


async def test_siblings_that_arrive_together_are_spread():
    clock = Clock()
    started: list[float] = []

    async def sleep(seconds: float) -> None:
        started.append(seconds)
        await asyncio.sleep(0)

    limits = HostLimits(navigations_per_minute=60, navigation_burst=1, jitter_s=2)
    hosts = HostGovernor(limits, clock=clock, sleep=sleep, rng=random.Random(1))
    await asyncio.gather(*(hosts.pace("shop.example") for _ in range(8)))
    assert len(started) == 7  # the first goes at once
    for k, wait in enumerate(started, 1):
        assert k <= wait <= k + 2
    assert len({round(w - k, 3) for k, w in enumerate(started, 1)}) == 7  # jitter: no two alike


async def test_local_worlds_are_never_slowed_down():
    clock = Clock()
    hosts = HostGovernor(
        HostLimits(navigation_burst=1, episodes=1, connection_burst=1),
        exempt=["world.test"], clock=clock, sleep=clock.sleep,
    )  # fmt: skip
    for host in ("127.0.0.1", "::1", "localhost", "shop.localhost", "world.test"):
        for _ in range(5):
            await hosts.pace(host)
            await hosts.admit_connection(host)
            hosts.report(host, detail="bot_wall")
        async with hosts.visit(host), hosts.visit(host):
            pass
        assert hosts.cooling(host) == 0
    assert clock.slept == []


async def test_sub_resources_pass_and_a_storm_is_paced():
    clock = Clock()
    hosts = governor(clock, connections_per_s=50, connection_burst=100)
    for _ in range(100):
        await hosts.admit_connection("cdn.example")
    assert clock.slept == []
    await hosts.admit_connection("cdn.example")
    assert clock.slept == [pytest.approx(0.02)]


async def test_places_are_handed_over_in_order_and_none_is_lost():
    hosts = governor(Clock(), episodes=2)
    log: list[int] = []

    async def episode(k: int, leave: asyncio.Event) -> None:
        async with hosts.visit(f"{k}.shop.example"):
            log.append(k)
            await leave.wait()

    doors = [asyncio.Event() for _ in range(6)]
    tasks = [asyncio.create_task(episode(k, doors[k])) for k in range(6)]
    await asyncio.sleep(0)
    assert log == [0, 1] and hosts.visitors("shop.example") == 2
    tasks[2].cancel()  # while waiting
    doors[0].set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert log == [0, 1, 3]
    doors[1].set()
    await asyncio.sleep(0)  # 1 is leaving and hands its place to 4 …
    tasks[4].cancel()  # … which is cancelled at that moment
    for _ in range(4):
        await asyncio.sleep(0)
    assert log == [0, 1, 3, 5] and hosts.visitors("shop.example") == 2
    for door in doors:
        door.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert hosts.visitors("shop.example") == 0 and not hosts._queues


async def test_random_cancellations_lose_no_place():
    rng = random.Random(7)
    hosts = governor(Clock(), episodes=3)
    high = 0

    async def episode() -> None:
        nonlocal high
        async with hosts.visit("shop.example"):
            high = max(high, hosts.visitors("shop.example"))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)

    for _ in range(30):
        tasks = [asyncio.create_task(episode()) for _ in range(20)]
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
            rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert hosts.visitors("shop.example") == 0
    assert high == 3


def test_a_rate_limit_is_obeyed_at_once_and_as_long_as_the_host_says():
    clock = Clock()
    hosts = governor(clock, cooldown_s=60, max_cooldown_s=7200)
    hosts.report("www.shop.example", status=429, retry_after="600")
    assert hosts.cooling("shop.example") == 600
    assert hosts.cooling("other.example") == 0
    clock.now += 601
    assert hosts.cooling("shop.example") == 0  # for ever is not a time
    hosts.report("shop.example", status=429, retry_after="1000000")
    assert hosts.cooling("shop.example") == 7200
    clock.now += 7201
    hosts.report("shop.example", detail="captcha")  # third strike of its kind within hours: longer than the first 60 s
    assert hosts.cooling("shop.example") > 120


def test_one_strike_is_bad_luck_and_repeated_ones_cool_down_and_fade():
    clock = Clock()
    hosts = governor(clock, cooldown_s=60, strikes=3, half_life_s=3600)
    hosts.report("shop.example", detail="nav_dns")
    hosts.report("shop.example", detail="nav_timeout")
    assert hosts.cooling("shop.example") == 0
    hosts.report("shop.example", detail="http_5xx", status=503, note="start page")
    assert hosts.cooling("shop.example") == 60
    health = hosts.health("www.shop.example")
    assert health.score == pytest.approx(3.0) and [e.detail for e in health.evidence] == [
        "nav_dns",
        "nav_timeout",
        "http_5xx",
    ]
    assert health.evidence[-1].note == "start page"
    clock.now += 3600
    assert hosts.health("shop.example").score == pytest.approx(1.5)
    hosts.report("shop.example")  # a good visit halves it
    assert hosts.health("shop.example").score == pytest.approx(0.75)
    hosts.report("shop.example", detail="max_steps")  # the policy's own doing says nothing about the host
    assert hosts.health("shop.example").score == pytest.approx(0.75)


def test_state_survives_a_restart_and_recovered_hosts_are_forgotten(tmp_path):
    clock = Clock()
    hosts = governor(clock)
    hosts.report("shop.example", status=429, retry_after="600", note="x")
    hosts.report("fine.example")
    hosts.save(tmp_path / "state" / "hosts.json")
    clock.now += 100
    other = governor(clock)
    other.load(tmp_path / "state" / "hosts.json")
    assert other.cooling("shop.example") == pytest.approx(500)
    assert other.health("shop.example").evidence == hosts.health("shop.example").evidence
    clock.now += 90 * 86400
    other.save(tmp_path / "state" / "hosts.json")
    assert '"hosts": {}' in (tmp_path / "state" / "hosts.json").read_text()
    other.load(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match="no host health file"):
        other.load(tmp_path / "bad.json")
    assert not [p for p in (tmp_path / "state").iterdir() if p.name.startswith(".")]


def test_plain_host_lists_are_imported_with_an_expiry():
    clock = Clock()
    hosts = governor(clock)
    text = "# seen\nwww.shop.example\nshop.example  # twice\n\nhttps://news.example/path\nfoo.co.uk\n"
    assert hosts.import_list(text, name="list.txt", expiry_s=1000) == 3
    assert hosts.cooling("a.shop.example") == 1000 and hosts.cooling("foo.co.uk") == 1000
    assert hosts.health("news.example").evidence[-1].note == "list.txt, line 5"
    clock.now += 1001
    assert hosts.cooling("shop.example") == 0
    with pytest.raises(ValueError, match="line 2 of x holds no host"):
        hosts.import_list("ok.example\nnot a host\n", name="x")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("120", 120), (" 5 ", 5), ("0", 0), ("Tue, 14 Nov 2023 22:15:20 GMT", 120), ("Tue, 14 Nov 2023 22:00:00 GMT", 0),
     ("soon", None), ("-5", None), ("", None), (None, None), ("9" * 400, 999999999)],
)  # fmt: skip
def test_retry_after(value, seconds):
    assert parse_retry_after(value, 1_700_000_000.0) == seconds  # 2023-11-14 22:13:20 UTC


def test_limits_are_checked():
    with pytest.raises(ValueError, match="navigations_per_minute"):
        HostLimits(navigations_per_minute=0)
    with pytest.raises(ValueError, match="cooldown_s"):
        HostLimits(cooldown_s=float("nan"))
