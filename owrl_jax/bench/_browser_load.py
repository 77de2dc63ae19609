"""Many episodes at once: time to the first observation, memory of each, steps per second. Ours and the peer's."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx
import psutil

from owrl_jax.bench._browser_pages import COUNT, PageServer
from owrl_jax.bench._browser_steps import Times, click, config_for, late_pictures, seen, task_for
from owrl_jax.browser.engine import BrowserEngine
from owrl_jax.pool.local import browser_pool
from owrl_jax.pool.pressure import PressureConfig
from owrl_jax.pool.sandboxes import SandboxPool, SandboxPoolConfig

_PEER = Path(__file__).with_name("_browser_peer.py")


@contextlib.asynccontextmanager
async def pool_for(server: PageServer, episodes: int, *, warm: bool) -> AsyncIterator[SandboxPool]:
    """A pool of `episodes` places; `warm` waits until its first browsers are up, as they are in a running system."""
    pool = browser_pool(
        SandboxPoolConfig(
            max_episodes=episodes,
            min_ready=None if warm else 0,
            # The bench loads the machine on purpose; admission would turn the measurement into a queue.
            pressure=PressureConfig(cpu_high=1.0, cpu_low=1.0),
        ),
        sandbox=config_for(server),
    )
    async with pool:
        if warm:
            while pool.audit().browsers.get("ready", 0) < pool.sizes.min_ready:  # noqa: ASYNC110 - before the clock runs
                await asyncio.sleep(0.01)
        yield pool


async def start_ours(server: PageServer, episodes: int, *, warm: bool) -> tuple[list[float], float]:
    """Seconds to the first observation of each of `episodes` started at once, and PSS in MiB of each while all live."""
    async with pool_for(server, episodes, warm=warm) as pool:
        held = []

        async def one() -> float:
            began = time.perf_counter()
            sandbox = await pool.acquire()
            held.append(sandbox)
            seen(await sandbox.reset(task_for(server, "/light?n=0")))
            return time.perf_counter() - began

        times = await asyncio.gather(*(one() for _ in range(episodes)))
        memory = pss_mib([psutil.Process(), *_below_us()]) / episodes  # with this process, which serves them all
        await asyncio.gather(*(sandbox.close() for sandbox in held))
    return times, memory


async def start_peer(binary_path: str, server: PageServer, episodes: int) -> tuple[list[float], float]:
    """The same with a server process and a browser process per episode."""
    processes: list[asyncio.subprocess.Process] = []

    async def one(client: httpx.AsyncClient) -> float:
        began = time.perf_counter()
        port = _free_port()
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(_PEER), str(port), binary_path, start_new_session=True
        )
        processes.append(process)
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"the peer's server ended with code {process.returncode}")
            try:
                await client.get(f"http://127.0.0.1:{port}/health", timeout=2.0)
                break
            except httpx.TransportError:
                await asyncio.sleep(0.05)
        answer = await client.post(f"http://127.0.0.1:{port}/reset", json={"url": f"{server.url}/light"}, timeout=300.0)
        answer.raise_for_status()
        return time.perf_counter() - began

    try:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False) as client:
            times = await asyncio.gather(*(one(client) for _ in range(episodes)))
            memory = pss_mib(_below_us()) / episodes
    finally:
        family = [p for process in processes for p in _family(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        await asyncio.gather(*(process.wait() for process in processes))
    return times, memory


async def late(server: PageServer, *, steps: int, episodes: int = 4) -> tuple[int, int, Times]:
    """`steps` steps on the late page, spread over `episodes` at once: stale pictures, empty pictures, times."""
    async with pool_for(server, episodes, warm=True) as pool:
        held = [await pool.acquire() for _ in range(episodes)]
        share = [steps // episodes + (number < steps % episodes) for number in range(episodes)]
        found = await asyncio.gather(
            *(late_pictures(sandbox, server, steps=n) for sandbox, n in zip(held, share, strict=True))
        )
    times = tuple(ms for _, _, each in found for ms in each)
    return sum(f[0] for f in found), sum(f[1] for f in found), Times(ms=times)


async def throughput(server: PageServer, *, episodes: int, seconds: float) -> float:
    """Steps per second of `episodes` episodes that click as fast as they can (each click repaints)."""
    async with pool_for(server, episodes, warm=True) as pool:
        done = 0

        async def one(end: float) -> None:
            nonlocal done
            async with pool.episode() as sandbox:
                seen(await sandbox.reset(task_for(server, "/light?n=0")))
                ready.append(1)
                while len(ready) < episodes:  # noqa: ASYNC110 - before the clock runs
                    await asyncio.sleep(0.005)
                stop = time.perf_counter() + end
                while time.perf_counter() < stop:
                    seen(await sandbox.step([click(COUNT)]))
                    done += 1

        ready: list[int] = []
        await asyncio.gather(*(one(seconds) for _ in range(episodes)))
    return done / seconds


async def raw_throughput(server: PageServer, *, episodes: int, seconds: float) -> float:
    """The same through raw CDP: input and one capture, each page in a browser of its own, as the pool has it."""
    from owrl_jax.bench._browser_pages import HEIGHT, WIDTH
    from owrl_jax.bench._browser_steps import RawPage

    engines = [BrowserEngine() for _ in range(episodes)]
    done = 0
    try:
        pages = []
        for engine in engines:
            await engine.start()
            handle = await engine.open_context(viewport={"width": WIDTH, "height": HEIGHT})
            page = await handle.new_page(width=WIDTH, height=HEIGHT)
            await page.goto(f"{server.url}/light?n=0", wait_until="commit")
            pages.append(RawPage(engine, page, await handle.context.new_cdp_session(page)))
        await asyncio.sleep(1.0)
        stop = time.perf_counter() + seconds

        async def one(raw: RawPage) -> None:
            nonlocal done
            while time.perf_counter() < stop:
                await raw.act("click", COUNT)
                await raw.capture()
                done += 1

        await asyncio.gather(*(one(raw) for raw in pages))
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
    return done / seconds


def pss_mib(processes: Iterable[psutil.Process]) -> float:
    """Proportional memory in MiB: shared pages divided among those who share them. NaN-free: gone processes count 0."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            rows = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += next((int(r.split()[1]) for r in rows if r.startswith("Pss:")), 0)
    return total / 1024


def _below_us() -> list[psutil.Process]:
    """Every process that this one has started, directly or not: servers, drivers, browsers."""
    return psutil.Process().children(recursive=True)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
