"""One sandbox: a browser that an agent acts in. No accelerator stack, and no browser driver until one is started."""

from owrl_jax.browser.config import Deadlines, EngineConfig, SandboxConfig, SettleCaps
from owrl_jax.browser.engine import BrowserBinary, BrowserEngine, BrowserMissing, find_browser
from owrl_jax.browser.sandbox import Sandbox, SandboxProtocol

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
