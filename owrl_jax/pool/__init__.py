"""Many sandboxes on one machine: leases, browsers kept ready, admission by pressure."""

from owrl_jax.browser.source import NoSandbox
from owrl_jax.pool.leased import LeasedSandbox
from owrl_jax.pool.leases import Audit, BrowserState, Lease
from owrl_jax.pool.pressure import PressureConfig, PressureReading
from owrl_jax.pool.sandboxes import SandboxPool, SandboxPoolConfig

__all__ = [
    "Audit",
    "BrowserState",
    "Lease",
    "LeasedSandbox",
    "NoSandbox",
    "PressureConfig",
    "PressureReading",
    "SandboxPool",
    "SandboxPoolConfig",
]
