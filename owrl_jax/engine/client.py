"""The engine as its callers see it: the `Policy` protocol and the records that cross it.

The protocol is the harness's (`owrl_jax.agent.policy`), since it is the harness that asks; an engine implements it. CPU
hosts import this file, so nothing here may need jax.
"""

from owrl_jax.agent.policy import FailureKind, Generation, Leaf, Picture, Policy, PolicyFailed, Sampling, Scene

__all__ = ["FailureKind", "Generation", "Leaf", "Picture", "Policy", "PolicyFailed", "Sampling", "Scene"]
