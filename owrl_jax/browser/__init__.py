"""One sandbox: a browser that an agent acts in. No accelerator stack, and no browser driver until one is started.

Public names are loaded when they are first asked for, so that taking one small module costs no more than that module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from owrl_jax.browser.config import Deadlines, EngineConfig, SandboxConfig, SettleCaps
    from owrl_jax.browser.engine import BrowserBinary, BrowserEngine, BrowserMissing, find_browser
    from owrl_jax.browser.sandbox import Sandbox
    from owrl_jax.browser.turn import SandboxProtocol

__all__ = [
    "BrowserBinary",
    "BrowserEngine",
    "BrowserMissing",
    "Deadlines",
    "EngineConfig",
    "Sandbox",
    "SandboxConfig",
    "SandboxProtocol",
    "SettleCaps",
    "find_browser",
]
_MODULE_OF = {
    **dict.fromkeys(("Deadlines", "EngineConfig", "SandboxConfig", "SettleCaps"), "config"),
    **dict.fromkeys(("BrowserBinary", "BrowserEngine", "BrowserMissing", "find_browser"), "engine"),
    "Sandbox": "sandbox",
    "SandboxProtocol": "turn",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
