"""The parameter table: one row per stored tensor kind, from which everything about parameters derives.

A row says where the parameter lives in our tree, what Hugging Face calls it, its shape, how its values are laid out
there, its logical axes, how it is initialised and what multiplies with it. Initialisation, loading, export, sharding,
FLOP counts and the completeness test all read these rows and nothing else; there is no second list of parameters.

Tree (all leaves are arrays; `deep`, `layers` and `vision.stage*` carry a leading layer axis and are run by
`lax.scan`):

    embed.table                     [V, D]
    deep.*, layers.*                decoder layers that take DeepStack features, and the rest
    norm.scale, head.kernel         final norm; head only when untied
    vision.patch, vision.position   patch embedding, learned position table
    vision.stage0 … stageS          blocks up to and including each DeepStack tap, then the remaining blocks
    vision.merger, vision.deepstack final merger; DeepStack mergers, stacked

Letters: V vocab, D model, H query heads, K kv heads, N head_dim, F mlp, E experts, W vision model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from owrl_jax.models.qwen3_vl.config import ModelConfig, TextConfig, VisionConfig

Unit = Literal["token", "patch", "image_token", "response", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a tensor's values lie in a Hugging Face file, as an exactly invertible rearrangement.

    `hf_shape` is the stored shape. From the file: reshape to `view`, transpose by `order`, reshape to ours.
    """

    hf_shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]

    def from_hf(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Our array of `shape` from a stored one."""
        return array.reshape(self.view).transpose(self.order).reshape(shape)

    def to_hf(self, array: Any) -> Any:
        """The stored array from one of ours, of numpy or jax."""
        permuted = array.reshape([self.view[axis] for axis in self.order])
        return permuted.transpose(np.argsort(self.order)).reshape(self.hf_shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of parameter.

    Attributes:
      path: keys in our tree.
      hf: name in a Hugging Face file; `{layer}` stands for the index of a stacked layer there.
      shape: shape of one layer's parameter in our tree, without the stacking axis.
      axes: logical axis of each dimension of `shape` (None: never sharded).
      layout: how the file stores it.
      layers: file indices of the stacked layers, in order; empty if not stacked.
      init: "normal" (std `std`), "ones" or "zeros".
      unit: what it is multiplied with once: every token, patch, merged image token or asked response position.
      share: fraction of the parameter used per unit (experts: top_k / experts).
      expert: whether the leading axes hold expert weights (their file layout differs between transformers versions).
    """

    path: tuple[str, ...]
    hf: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    layout: Layout
    layers: tuple[int, ...] = ()
    init: Literal["normal", "ones", "zeros"] = "normal"
    std: float = 0.02
    unit: Unit = "none"
    share: float = 1.0
    expert: bool = False

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{self.name}: {len(self.axes)} axes for shape {self.shape}")
        if math.prod(self.shape) != math.prod(self.layout.hf_shape):
            raise ValueError(
                f"{self.name}: our shape {self.shape} and the file's {self.layout.hf_shape} differ in size"
            )

    @property
    def name(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape in our tree, stacking axis first."""
        return (len(self.layers), *self.shape) if self.layers else self.shape

    @property
    def full_axes(self) -> tuple[str | None, ...]:
        """Logical axes in our tree, `layers` first when stacked."""
        return ("layers", *self.axes) if self.layers else self.axes

    @property
    def size(self) -> int:
        """Number of values, all layers."""
        return math.prod(self.full_shape)

    def hf_names(self) -> tuple[str, ...]:
        """Names in the file, in stacking order."""
        return tuple(self.hf.format(layer=i) for i in self.layers) if self.layers else (self.hf,)


def _same(shape: tuple[int, ...]) -> Layout:
    return Layout(hf_shape=shape, view=shape, order=tuple(range(len(shape))))


def _linear(shape: tuple[int, ...], inputs: int) -> Layout:
    """torch keeps [out, in]; ours is [in…, out…] with `inputs` leading input axes."""
    n_in, n_out = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    return Layout(hf_shape=(n_out, n_in), view=(n_out, n_in), order=(1, 0))


class _Rows:
    """Collects rows under a path and a file prefix, so that the table below reads like the model."""

    def __init__(self, path: tuple[str, ...], hf: str, layers: tuple[int, ...] = (), std: float = 0.02):
        self.path, self.hf, self.layers, self.std = path, hf, layers, std
        self.rows: list[Row] = []

    def add(
        self, path: str, hf: str, shape: tuple[int, ...], axes: tuple[str | None, ...], layout: Layout, **kw: Any
    ) -> None:
        full = (*self.path, *path.split("."))
        self.rows.append(
            Row(
                path=full,
                hf=self.hf + hf,
                shape=shape,
                axes=axes,
                layout=layout,
                layers=self.layers,
                std=self.std,
                **kw,
            )
        )

    def linear(
        self, path: str, hf: str, shape: tuple[int, ...], axes: tuple[str | None, ...], unit: Unit, inputs: int = 1
    ) -> None:
        self.add(path, f"{hf}.weight", shape, axes, _linear(shape, inputs), unit=unit)

    def biased(
        self, path: str, hf: str, shape: tuple[int, ...], axes: tuple[str | None, ...], unit: Unit, inputs: int = 1
    ) -> None:
        self.linear(f"{path}.kernel", hf, shape, axes, unit, inputs)
        out = shape[inputs:]
        layout = Layout(hf_shape=(math.prod(out),), view=out, order=tuple(range(len(out))))
        self.add(f"{path}.bias", f"{hf}.bias", out, axes[inputs:], layout, init="zeros")

    def scale(self, path: str, hf: str, n: int) -> None:
        self.add(path, f"{hf}.weight", (n,), (None,), _same((n,)), init="ones")

    def layer_norm(self, path: str, hf: str, n: int) -> None:
        self.scale(f"{path}.scale", hf, n)
        self.add(f"{path}.bias", f"{hf}.bias", (n,), (None,), _same((n,)), init="zeros")


def _decoder_layers(c: TextConfig, group: str, prefix: str, layers: tuple[int, ...]) -> list[Row]:
    r = _Rows((group,), f"{prefix}layers.{{layer}}.", layers, c.init_std)
    d, h, k, n, f = c.model, c.heads, c.kv_heads, c.head_dim, c.mlp
    r.scale("attn_norm.scale", "input_layernorm", d)
    r.linear("attn.q", "self_attn.q_proj", (d, h, n), ("embed", "heads", "head_dim"), "token")
    r.linear("attn.k", "self_attn.k_proj", (d, k, n), ("embed", "kv_heads", "head_dim"), "token")
    r.linear("attn.v", "self_attn.v_proj", (d, k, n), ("embed", "kv_heads", "head_dim"), "token")
    r.linear("attn.o", "self_attn.o_proj", (h, n, d), ("heads", "head_dim", "embed"), "token", inputs=2)
    r.scale("attn.q_norm.scale", "self_attn.q_norm", n)
    r.scale("attn.k_norm.scale", "self_attn.k_norm", n)
    r.scale("mlp_norm.scale", "post_attention_layernorm", d)
    if c.moe is None:
        r.linear("mlp.gate", "mlp.gate_proj", (d, f), ("embed", "mlp"), "token")
        r.linear("mlp.up", "mlp.up_proj", (d, f), ("embed", "mlp"), "token")
        r.linear("mlp.down", "mlp.down_proj", (f, d), ("mlp", "embed"), "token")
        return r.rows
    e, i, share = c.moe.experts, c.moe.mlp, c.moe.top_k / c.moe.experts
    r.linear("mlp.router", "mlp.gate", (d, e), ("embed", None), "token")
    # Files keep expert weights input-major, gate and up as the two halves of one tensor.
    r.add(
        "mlp.gate_up", "mlp.experts.gate_up_proj", (e, d, 2, i), ("expert", "embed", None, "mlp"),
        Layout(hf_shape=(e, d, 2 * i), view=(e, d, 2, i), order=(0, 1, 2, 3)), unit="token", share=share, expert=True,
    )  # fmt: skip
    r.add(
        "mlp.down", "mlp.experts.down_proj", (e, i, d), ("expert", "mlp", "embed"), _same((e, i, d)),
        unit="token", share=share, expert=True,
    )  # fmt: skip
    return r.rows


def _vision_blocks(c: VisionConfig, stage: int, prefix: str, layers: tuple[int, ...]) -> list[Row]:
    r = _Rows(("vision", f"stage{stage}"), f"{prefix}blocks.{{layer}}.", layers, c.init_std)
    w, h, n, f = c.model, c.heads, c.head_dim, c.mlp
    r.layer_norm("norm1", "norm1", w)
    r.biased("attn.qkv", "attn.qkv", (w, 3, h, n), ("vis_embed", None, "vis_heads", "head_dim"), "patch")
    r.biased("attn.proj", "attn.proj", (h, n, w), ("vis_heads", "head_dim", "vis_embed"), "patch", inputs=2)
    r.layer_norm("norm2", "norm2", w)
    r.biased("mlp.fc1", "mlp.linear_fc1", (w, f), ("vis_embed", "vis_mlp"), "patch")
    r.biased("mlp.fc2", "mlp.linear_fc2", (f, w), ("vis_mlp", "vis_embed"), "patch")
    return r.rows


def _merger(c: VisionConfig, path: str, hf: str, layers: tuple[int, ...]) -> list[Row]:
    r = _Rows(("vision", path), hf, layers, c.init_std)
    merged = c.model * c.merge**2
    r.layer_norm("norm", "norm", merged if layers else c.model)  # DeepStack mergers normalise after grouping
    r.biased("fc1", "linear_fc1", (merged, merged), ("vis_embed", "vis_mlp"), "image_token")
    r.biased("fc2", "linear_fc2", (merged, c.out), ("vis_mlp", "vis_embed"), "image_token")
    return r.rows


def _vision(c: VisionConfig, prefix: str) -> list[Row]:
    r = _Rows(("vision",), prefix, std=c.init_std)
    w = c.model
    kernel = (c.temporal, c.patch_values, w)
    conv = (w, c.channels, c.temporal, c.patch, c.patch)
    # Conv3d with kernel = stride is a matmul; time goes first, for a still picture sums the two frames' kernels.
    layout = Layout(hf_shape=conv, view=(w, c.channels, c.temporal, c.patch * c.patch), order=(2, 1, 3, 0))
    r.add(
        "patch.kernel",
        "patch_embed.proj.weight",
        kernel,
        (None, None, "vis_embed"),
        layout,
        unit="patch",
        share=1 / c.temporal,
    )
    r.add("patch.bias", "patch_embed.proj.bias", (w,), ("vis_embed",), _same((w,)), init="zeros")
    table = (c.positions**2, w)
    r.add("position.table", "pos_embed.weight", table, (None, "vis_embed"), _same(table))
    rows = r.rows
    for stage, (start, end) in enumerate(c.stages):
        rows += _vision_blocks(c, stage, prefix, tuple(range(start, end)))
    rows += _merger(c, "merger", f"{prefix}merger.", ())
    if c.taps:
        rows += _merger(c, "deepstack", f"{prefix}deepstack_merger_list.{{layer}}.", tuple(range(len(c.taps))))
    return rows


@functools.cache
def table(config: ModelConfig) -> tuple[Row, ...]:
    """Every parameter of the model, each exactly once."""
    c = config.text
    prefix = "model.language_model." if config.vision else "model."
    r = _Rows((), "", std=c.init_std)
    r.add(
        "embed.table", f"{prefix}embed_tokens.weight", (c.vocab, c.model), ("vocab", "embed"), _same((c.vocab, c.model))
    )
    rows = r.rows
    split = config.deep_layers
    if split:
        rows += _decoder_layers(c, "deep", prefix, tuple(range(split)))
    if split < c.layers:
        rows += _decoder_layers(c, "layers", prefix, tuple(range(split, c.layers)))
    last = _Rows((), "", std=c.init_std)
    last.scale("norm.scale", f"{prefix}norm", c.model)
    if not c.tied:
        last.linear("head.kernel", "lm_head", (c.model, c.vocab), ("embed", "vocab"), "response")
    rows += last.rows
    if config.vision:
        rows += _vision(config.vision, "model.visual.")
    return tuple(rows)


def build_tree(config: ModelConfig, leaf) -> dict[str, Any]:
    """A parameter tree whose leaf for each row is `leaf(row)`."""
    tree: dict[str, Any] = {}
    for row in table(config):
        node = tree
        for key in row.path[:-1]:
            node = node.setdefault(key, {})
        node[row.path[-1]] = leaf(row)
    return tree


def leaves(config: ModelConfig, tree: dict[str, Any]) -> Iterator[tuple[Row, Any]]:
    """Each row with its leaf in `tree`.

    Raises:
      KeyError: naming the row that the tree lacks.
    """
    for row in table(config):
        node: Any = tree
        for key in row.path:
            if not isinstance(node, dict) or key not in node:
                raise KeyError(f"the parameter tree lacks {row.name}")
            node = node[key]
        yield row, node


def parameter_count(config: ModelConfig) -> int:
    """Number of stored values; a tied head counts once."""
    return sum(row.size for row in table(config))


def forward_flops(
    config: ModelConfig, *, tokens: int, pairs: int, patches: int = 0, patch_pairs: int = 0, responses: int = 0
) -> float:
    """Floating-point operations of one forward pass, counted by formula (a multiply-add is two).

    Matrix products come from the table; attention from visible (query, key) pairs; norms, rotations and activations are
    left out, as is usual. A backward pass is twice this.

    Args:
      tokens: tokens that run through the decoder.
      pairs: visible query-key pairs over all rows (causal row of length T: T(T+1)/2).
      patches: patches that run through the tower.
      patch_pairs: visible pairs of patches (an image of n patches: n²).
      responses: positions at which log-probs are asked.
    """
    merge = config.vision.merge**2 if config.vision else 1
    units = {"token": tokens, "patch": patches, "image_token": patches // merge, "response": responses, "none": 0}
    total = sum(2.0 * row.size * row.share * units[row.unit] for row in table(config))
    text, vision = config.text, config.vision
    if text.tied:
        total += 2.0 * text.model * text.vocab * responses
    total += 4.0 * text.layers * text.heads * text.head_dim * pairs  # scores and weighted values
    if vision:
        total += 4.0 * vision.depth * vision.model * patch_pairs
    return total
