"""The oracle of the attention tests: dense softmax attention with gradients in numpy fp64, and random prefix trees."""

import numpy as np


def operands(rng, batch, q_len, k_len, heads, kv_heads, head_dim, dtype=np.float32):
    """q, k, v and a cotangent of the output, standard normal."""
    shapes = [(batch, q_len, heads), (batch, k_len, kv_heads), (batch, k_len, kv_heads), (batch, q_len, heads)]
    return [rng.standard_normal((*shape, head_dim)).astype(dtype) for shape in shapes]


def dense_attention(q, k, v, out_bar, mask, scale=None):
    """(out, q_bar, k_bar, v_bar) in fp64. `mask [B,Tq,Tk]`; rows of the mask without a True give zeros."""
    q, k, v, out_bar = (np.asarray(x, np.float64) for x in (q, k, v, out_bar))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = k.repeat(group, 2), v.repeat(group, 2)
    scores = np.where(mask[:, None], np.einsum("bqhn,bshn->bhqs", q, wide_k) * scale, -np.inf)
    weights = np.where(mask[:, None], np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300)), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bhqs,bshn->bqhn", weights, wide_v)
    weights_bar = np.einsum("bqhn,bshn->bhqs", out_bar, wide_v)
    scores_bar = weights * (weights_bar - (weights * weights_bar).sum(-1, keepdims=True)) * scale

    def per_kv_head(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)

    q_bar = np.einsum("bhqs,bshn->bqhn", scores_bar, wide_k)
    k_bar = per_kv_head(np.einsum("bhqs,bqhn->bshn", scores_bar, q))
    return out, q_bar, k_bar, per_kv_head(np.einsum("bhqs,bqhn->bshn", weights, out_bar))


def random_tree(rng, length):
    """A depth-first walk of a random forest: `visible_until [T]` and the mask `[T,T]` "is an ancestor or oneself".

    Nodes are tokens. The mask follows parent links, so it knows nothing of intervals.
    """
    parent, path = np.full(length, -1), []
    for token in range(length):
        # Mostly go deeper, now and then climb back to a random ancestor (or start a new root).
        if path and rng.random() < 0.15:
            path = path[: rng.integers(0, len(path))]
        parent[token] = path[-1] if path else -1
        path = [*path, token]
    mask, until = np.zeros((length, length), bool), np.arange(1, length + 1)
    for token in range(length):
        node = token
        while node >= 0:
            mask[token, node] = True
            until[node] = max(until[node], token + 1)
            node = parent[node]
    return until, mask
