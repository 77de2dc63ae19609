"""Being told to stop: finish the step, save, leave with an exit code that says "resume me".

A preempted machine sends SIGTERM and gives some seconds; a person presses Ctrl-C. Both set a flag that the loop reads
between two steps:

    with Shutdown() as shutdown:
        for step in ...:
            ...
            if shutdown.requested():
                checkpoints.save(...); checkpoints.close()
                return RESUME_EXIT_CODE

A second signal ends the process at once, as it would without this. Imports no jax unless there are several processes.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

RESUME_EXIT_CODE = 75
"""Saved before it was done: start the same command again, and it goes on (75 is EX_TEMPFAIL, "try again")."""


class Shutdown:
    """While entered, SIGTERM and SIGINT set a flag. Signals reach Python's main thread alone, so enter it there."""

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Shutdown:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in self.signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._flag.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        log.warning("%s: this step is finished, the state saved, and the run ends", signal.Signals(number).name)
        self._flag.set()

    def request(self) -> None:
        """Ask for the end from within, as at a deadline."""
        self._flag.set()

    def requested(self) -> bool:
        """Whether to save and end now. On several processes all call it at the same step, and all get one answer."""
        jax = sys.modules.get("jax")
        if jax is None or jax.process_count() == 1:
            return self._flag.is_set()
        import numpy as np
        from jax.experimental import multihost_utils

        return bool(np.any(multihost_utils.process_allgather(np.asarray(self._flag.is_set()))))
