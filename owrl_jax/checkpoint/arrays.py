"""The arrays of a state by name: flattened for the disk, put together again, and fingerprinted.

Names are paths of the tree ("params.layers.attn.q"), so a saved state does not depend on the classes of an optimiser
library. Typed random keys are saved as their key data, and arrays without elements, which the array format cannot
hold, by shape and dtype alone.

The fingerprint of an array is a sum over its bits, weighted by position, modulo 2³². It is exact and independent of how
the array is split over devices, so the value computed where the state lay when it was saved must come out again on
whatever mesh it is restored to.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from owrl_jax.checkpoint.folders import CheckpointError

Flat = dict[str, Any]


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys, or stands for one."""
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def flatten(state: Any) -> Flat:
    """Arrays by name; leaves are jax or numpy arrays, or stand for one (`ShapeDtypeStruct`).

    Raises:
      CheckpointError: on a leaf that is no array, or two leaves of one name.
    """
    flat: Flat = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = _name(path)
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{name} is a {type(leaf).__name__} ({leaf!r}), not an array: put plain values into the record"
            )
        if name in flat:
            raise CheckpointError(f"two leaves of the state are both called {name}: rename one")
        flat[name] = leaf
    return flat


def unflatten(like: Any, flat: Flat) -> Any:
    """The tree of the shape of `like` with the leaves of `flat`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[_name(path)], like)


def key_data(leaf: Any) -> Any:
    """The numbers of typed random keys; anything else as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def as_keys(data: jax.Array, like: Any) -> jax.Array:
    """The inverse of `key_data`, for keys of the dtype of `like`.

    Raises:
      CheckpointError: if this jax has no such algorithm.
    """
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype == like.dtype:
            return jax.random.wrap_key_data(data, impl=impl)
    raise CheckpointError(f"random keys of type {like.dtype} cannot be restored: use one of jax's own algorithms")


def describe(flat: Flat) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each array as saved, and of random keys their algorithm."""
    facts: dict[str, dict[str, Any]] = {}
    for name, leaf in flat.items():
        shape, dtype = saved_form(leaf)
        facts[name] = {"shape": list(shape), "dtype": np.dtype(dtype).name}
        if is_key(leaf):
            facts[name]["key"] = str(leaf.dtype)
    return facts


def saved_form(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype in which a leaf is saved."""
    if not is_key(leaf):
        return tuple(leaf.shape), leaf.dtype
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return data.shape, data.dtype


def nbytes(state: Any) -> int:
    """Bytes of all arrays of a state, uncompressed, all shards together."""
    total = 0
    for leaf in flatten(state).values():
        shape, dtype = saved_form(leaf)
        total += int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return total


def abstract(state: Any, shardings: Any = None) -> Any:
    """What `Checkpoints.restore` needs to know of a state: shapes, dtypes and target shardings.

    Args:
      state: arrays, or `ShapeDtypeStruct`s from `jax.eval_shape`.
      shardings: one for all leaves, or a tree of them; None takes those that the leaves have.
    Returns:
      A tree of `ShapeDtypeStruct`s with shardings. numpy leaves stay and are restored as numpy arrays.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, state)

    def one(leaf, sharding):
        if isinstance(leaf, np.ndarray | np.generic) and shardings is None:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    if shardings is None:
        return jax.tree.map(lambda leaf: one(leaf, getattr(leaf, "sharding", None)), state)
    return jax.tree.map(one, state, shardings)


def fingerprints(flat: Flat) -> dict[str, int]:
    """Fingerprint of each array. Device arrays are summed where they lie; the call waits for them."""
    on_device = {name: leaf for name, leaf in flat.items() if isinstance(leaf, jax.Array)}
    on_host = {name: np.asarray(leaf) for name, leaf in flat.items() if name not in on_device}
    sums = {name: _fingerprint_host(leaf) for name, leaf in on_host.items()}
    # One by one: leaves may lie on different devices, and arrays of one shape share a compiled program.
    pending = {name: _fingerprint(leaf) for name, leaf in on_device.items()}
    return sums | {name: int(value) for name, value in pending.items()}


def _words(dtype: Any) -> np.dtype:
    return np.dtype({1: "uint8", 2: "uint16"}.get(np.dtype(dtype).itemsize, "uint32"))


def _weights(at: Any) -> Any:
    """An odd number for each place, scattered so that moved values do not cancel (the mixing steps of MurmurHash3)."""
    at = at * np.uint32(0x9E3779B1)
    at = (at ^ (at >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    return at | np.uint32(1)


@jax.jit
def _fingerprint(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, _words(x.dtype)).astype(jnp.uint32)
    at = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        at = at * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits * _weights(at), dtype=jnp.uint32)


def _fingerprint_host(x: np.ndarray) -> int:
    x = np.ascontiguousarray(x)
    x = x.astype(np.uint8) if x.dtype == np.bool_ else x
    bits = x.reshape(-1).view(_words(x.dtype)).astype(np.uint32)
    return int(np.sum(bits * _weights(np.arange(bits.size, dtype=np.uint32)), dtype=np.uint32))
