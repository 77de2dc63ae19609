"""One Chromium process group of ours: started with an explicit environment, watched, measured, and killed as a group.

The browser gets a session of its own, so one signal ends it and all its children; a thread waits for it, so no zombie
stays even while the event loop is busy; and it holds the far end of a pipe of ours, so it ends by itself when this
process is killed. Nothing of the caller's environment reaches it but what `child_environment` lists.

Not here: speaking to the browser (`engine.py`), deciding when to replace one (`pool/fleet.py`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

TAG_FLAG = "--owrl-tag"
_READY_FILE = "DevToolsActivePort"

# What a browser process may know of its surroundings: where programs are, which language and time zone it is in.
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "FONTCONFIG_PATH", "FONTCONFIG_FILE", "LD_LIBRARY_PATH")

BASE_ARGS = (
    "--no-first-run",
    "--no-default-browser-check",
    "--no-service-autorun",
    "--no-pings",
    "--password-store=basic",
    "--use-mock-keychain",
    "--mute-audio",
    "--hide-scrollbars",
    "--disable-gpu",  # software painting; see child_environment for what this flag alone does not stop
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-back-forward-cache",  # a page restored from memory would not send the events that settling listens to
    "--disable-breakpad",
    "--disable-client-side-phishing-detection",
    "--disable-component-extensions-with-background-pages",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-hang-monitor",
    "--disable-ipc-flooding-protection",
    "--disable-popup-blocking",  # popups are capped and reported by the sandbox instead of vanishing silently
    "--disable-prompt-on-repost",
    "--disable-search-engine-choice-screen",
    "--disable-sync",
    "--disable-quic",  # UDP would go around the egress proxy
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--metrics-recording-only",
    "--allow-pre-commit-input",
    "--enable-unsafe-swiftshader",
    "--disable-features=Translate,OptimizationHints,MediaRouter,DialMediaRouteProvider,HttpsUpgrades,"
    "AcceptCHFrame,AutofillServerCommunication,InterestFeedContentSuggestions,DestroyProfileOnBrowserClose,"
    "LensOverlay,PaintHolding,ThirdPartyStoragePartitioning,AvoidUnnecessaryBeforeUnloadCheckSync",
)
BEGIN_FRAME_ARGS = (
    "--enable-begin-frame-control",
    "--run-all-compositor-stages-before-draw",
    "--disable-new-content-rendering-timeout",
)


def child_environment(parent: Mapping[str, str], home: Path) -> dict[str, str]:
    """The whole environment of a browser process.

    Software GL is forced by name: `--disable-gpu` alone still enumerates EGL devices, and concurrent browsers then
    block in a vendor driver before their first frame.
    """
    environment = {name: parent[name] for name in _INHERITED if name in parent}
    environment.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    return environment | {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_RUNTIME_DIR": str(home),
        "TMPDIR": str(home),
        "DBUS_SESSION_BUS_ADDRESS": "disabled:",
        "LIBGL_ALWAYS_SOFTWARE": "1",
        "__GLX_VENDOR_LIBRARY_NAME": "mesa",
        "__EGL_VENDOR_LIBRARY_FILENAMES": "",
        "CUDA_VISIBLE_DEVICES": "",
    }


class LaunchError(RuntimeError):
    """The browser did not come up; the message says what it printed last and what to try."""


class BrowserProcess:
    """A running Chromium. Made by `launch` alone."""

    def __init__(self, pid: int, home: Path, lifeline: int, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = pid
        self.pgid = pid  # leader of its own session
        self.home = home
        self.returncode: int | None = None
        self.exited = asyncio.Event()
        self._lifeline = lifeline
        self._loop = loop
        self._waiter = threading.Thread(target=self._wait, name=f"browser-{pid}", daemon=True)
        self._waiter.start()

    @classmethod
    async def launch(cls, path: str, args: Sequence[str], *, tag: str, timeout_s: float) -> tuple[BrowserProcess, str]:
        """Starts `path` and waits until it accepts connections.

        Returns:
          The process, and the WebSocket address of its DevTools endpoint on loopback.

        Raises:
          LaunchError: it ended, or was not ready in time; nothing of it is left.
        """
        process = await _spawned(path, args, tag)
        try:
            address = await process._ready(timeout_s)
        except BaseException:
            # Also when cancelled: a half-started browser is ours to end.
            await asyncio.shield(process.end(polite_s=0.0))
            raise
        return process, address

    @property
    def alive(self) -> bool:
        """Whether the browser itself (not merely one of its children) is running."""
        return self.returncode is None

    def rss_mib(self) -> float:
        """Resident memory of the whole group in MiB; shared pages count once per process: an upper bound."""
        total = 0
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total / 2**20

    def members(self) -> list[psutil.Process]:
        """Every living process of the group; the dead that init has not reaped yet do not count."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getpgid(pid) == self.pgid:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    async def end(self, *, polite_s: float = 1.0) -> None:
        """Ends the group: closes the lifeline, waits, then kills. Idempotent; returns when the browser is reaped."""
        self._cut_lifeline()
        if polite_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), polite_s)
        self.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.exited.wait(), 5.0)
        deadline = time.monotonic() + 5.0
        while self.members() and time.monotonic() < deadline:  # noqa: ASYNC110 - no event tells of them
            await asyncio.sleep(0.01)
        await asyncio.to_thread(shutil.rmtree, self.home, True)

    def kill(self) -> None:
        """SIGKILL to the whole group, at once and without a loop; nothing happens if it is gone."""
        self._cut_lifeline()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pgid, signal.SIGKILL)

    def discard(self) -> None:
        """Ends a browser that nobody wants, without a loop; its folder goes as soon as it is reaped."""
        self.kill()

        def clear() -> None:
            self._waiter.join(5.0)
            shutil.rmtree(self.home, ignore_errors=True)

        threading.Thread(target=clear, name=f"browser-{self.pid}-clear", daemon=True).start()

    def _cut_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _wait(self) -> None:
        try:
            _, status = os.waitpid(self.pid, 0)
            code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            code = -1  # somebody else reaped it
        self.returncode = code
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self.exited.set)

    async def _ready(self, timeout_s: float) -> str:
        ready = self.home / "profile" / _READY_FILE
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise LaunchError(
                    f"the browser ended at once with code {self.returncode}: {_tail(self.home / 'stderr')} "
                    "Run `owrl browser doctor` for what is missing on this machine."
                )
            lines = ready.read_text().split("\n") if ready.exists() else []
            if len(lines) >= 2 and lines[1].startswith("/"):
                return f"ws://127.0.0.1:{int(lines[0])}{lines[1]}"
            await asyncio.sleep(0.01)
        raise LaunchError(
            f"the browser was not ready within {timeout_s:g} s: {_tail(self.home / 'stderr')} "
            "The machine may be overloaded: lower the number of launches at one time."
        )


def sweep(tag: str, *, spare: frozenset[int] = frozenset()) -> list[int]:
    """Kills process groups that carry our tag and whose parent is gone.

    Args:
      tag: the tag given at launch; other browsers are never touched.
      spare: group ids that are in use.

    Returns:
      The group ids that were killed.
    """
    killed: list[int] = []
    for process in psutil.process_iter(["pid", "ppid", "cmdline"]):
        with contextlib.suppress(psutil.Error, OSError):
            if f"{TAG_FLAG}={tag}" not in (process.info["cmdline"] or ()):
                continue
            group = os.getpgid(process.pid)
            # The leader of a live browser is a child of the process that launched it; an orphan's parent is init.
            if group in spare or group in killed or process.pid != group or process.info["ppid"] != 1:
                continue
            os.killpg(group, signal.SIGKILL)
            killed.append(group)
    return killed


async def _spawned(path: str, args: Sequence[str], tag: str) -> BrowserProcess:
    """`_spawn` in a thread. If the caller is cancelled meanwhile, whatever the thread starts is ended at once."""
    loop = asyncio.get_running_loop()
    started: concurrent.futures.Future[BrowserProcess] = concurrent.futures.Future()
    started.set_running_or_notify_cancel()  # a thread cannot be called back

    def work() -> None:
        try:
            started.set_result(_spawn(path, args, tag, loop))
        except BaseException as error:  # noqa: BLE001 - handed over to whoever waits
            started.set_exception(error)

    threading.Thread(target=work, name="browser-spawn", daemon=True).start()
    try:
        return await asyncio.wrap_future(started)
    except asyncio.CancelledError:
        # Without the loop, which may be closing: runs in the thread above, or here if that is done already.
        started.add_done_callback(_abandon)
        raise


def _abandon(started: concurrent.futures.Future[BrowserProcess]) -> None:
    if started.exception() is None:
        started.result().discard()


def _spawn(path: str, args: Sequence[str], tag: str, loop: asyncio.AbstractEventLoop) -> BrowserProcess:
    home = Path(tempfile.mkdtemp(prefix="owrl-browser-"))
    argv = [
        path,
        *args,
        *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # Chromium's own sandbox refuses to run as root
        "--remote-debugging-address=127.0.0.1",
        "--remote-debugging-port=0",
        "--remote-debugging-pipe",  # never spoken to: the browser ends when our end of it closes
        # No --disk-cache-dir: a headless shell gives it to every context, and the second waits for its lock forever.
        f"--user-data-dir={home / 'profile'}",
        f"{TAG_FLAG}={tag}",
        "about:blank",
    ]
    from_us, lifeline = os.pipe()
    to_nobody, from_it = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(home / "stderr", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        pid = os.posix_spawn(
            path,
            argv,
            child_environment(os.environ, home),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, null, 1),
                (os.POSIX_SPAWN_DUP2, errors, 2),
                (os.POSIX_SPAWN_DUP2, from_us, 3),
                (os.POSIX_SPAWN_DUP2, from_it, 4),
            ],
            setsid=True,
        )
    except OSError as error:
        os.close(lifeline)
        shutil.rmtree(home, ignore_errors=True)
        raise LaunchError(f"{path} could not be started: {error}") from error
    finally:
        for descriptor in (from_us, to_nobody, from_it, null, errors):
            os.close(descriptor)
    return BrowserProcess(pid, home, lifeline, loop)


def _tail(path: Path) -> str:
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return f"its last words were {lines[-1][:300]!r}." if lines else "it printed nothing."
