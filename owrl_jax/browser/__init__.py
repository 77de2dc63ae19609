"""One sandbox: a browser that an agent acts in. No accelerator stack, and no browser driver until one is started."""

from owrl_jax.browser.config import Deadlines, EngineConfig, SandboxConfig, SettleCaps
from owrl_jax.browser.engine import BrowserBinary, BrowserEngine, BrowserMissing, find_browser

__all__ = [
    "BrowserBinary",
    "BrowserEngine",
    "BrowserMissing",
    "Deadlines",
    "EngineConfig",
    "SandboxConfig",
    "SettleCaps",
    "find_browser",
]
