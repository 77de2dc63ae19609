"""Checkpoints: a run's state on disk, complete or not there at all, and back onto any mesh."""

from owrl_jax.checkpoint.arrays import abstract
from owrl_jax.checkpoint.checkpoints import Checkpoints, verify
from owrl_jax.checkpoint.folders import CheckpointError, Saved

__all__ = ["CheckpointError", "Checkpoints", "Saved", "abstract", "verify"]
