"""Shapes of Qwen3-VL (dense and MoE) and of text-only Qwen3, read from a Hugging Face `config.json`.

The configuration holds shapes and constants only. How a model runs (dtypes, rematerialisation, mesh) is said where it
is run, so the same configuration serves policy, judge and tests. `PRESETS` repeats the published sizes for random
initialisation; a checkpoint's own `config.json` always wins.

Invariant: `from_hf(to_hf(c)) == c`. A setting that this port does not implement is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, Literal

Family = Literal["qwen3_vl", "qwen3_vl_moe", "qwen3"]


class ConfigError(ValueError):
    """A model configuration that cannot be run, with the field, its value and what is supported."""


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sparse MLP: `experts` experts of width `mlp`, `top_k` per token, weights renormalised over the chosen ones."""

    experts: int
    top_k: int
    mlp: int

    def __post_init__(self) -> None:
        _need(1 <= self.top_k <= self.experts, f"num_experts_per_tok={self.top_k} must lie in 1..{self.experts}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The decoder. Letters: V vocab, D model, L layers, H heads, K kv_heads, N head_dim, F mlp.

    `mrope_section` counts rotary frequencies for (time, height, width); they sum to N/2. Text-only Qwen3 has plain
    rotary positions, which interleaved M-RoPE reproduces when its three axes are equal.
    """

    vocab: int
    model: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    moe: MoEConfig | None = None
    rope_theta: float = 5e6
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    rms_eps: float = 1e-6
    tied: bool = True
    max_positions: int = 262144
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab", "model", "layers", "heads", "kv_heads", "head_dim", "mlp"):
            _need(getattr(self, name) >= 1, f"text {name}={getattr(self, name)} must be at least 1")
        _need(
            self.heads % self.kv_heads == 0,
            f"num_attention_heads={self.heads} must be a multiple of num_key_value_heads={self.kv_heads}",
        )
        _need(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even for rotary positions")
        _need(
            sum(self.mrope_section) == self.head_dim // 2,
            f"mrope_section={self.mrope_section} must sum to head_dim/2={self.head_dim // 2}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower: patches of `patch`² pixels, merged `merge`×`merge` into one token of width `out`.

    `taps` are the block indices after which DeepStack features leave the tower; tap k is added to the decoder's hidden
    state at visual tokens after decoder layer k. `positions` is the side of the square learned position table.
    """

    depth: int
    model: int
    heads: int
    mlp: int
    out: int
    taps: tuple[int, ...]
    patch: int = 16
    temporal: int = 2
    merge: int = 2
    channels: int = 3
    positions: int = 48
    eps: float = 1e-6
    rope_theta: float = 1e4
    init_std: float = 0.02

    def __post_init__(self) -> None:
        _need(self.model % self.heads == 0, f"vision hidden_size={self.model} must be a multiple of {self.heads} heads")
        _need(
            self.head_dim % 4 == 0, f"vision head_dim={self.head_dim} must be a multiple of 4 for 2-D rotary positions"
        )
        _need(
            list(self.taps) == sorted(set(self.taps)) and all(0 <= t < self.depth for t in self.taps),
            f"deepstack_visual_indexes={list(self.taps)} must be increasing block indices below depth={self.depth}",
        )

    @property
    def head_dim(self) -> int:
        """N of the tower."""
        return self.model // self.heads

    @property
    def patch_values(self) -> int:
        """Values of one patch of one frame, in order (channel, row, column)."""
        return self.channels * self.patch * self.patch

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Half-open block ranges: one up to and including each tap, then the rest. Each stage is one scan."""
        ends = [tap + 1 for tap in self.taps]
        if not ends or ends[-1] < self.depth:
            ends.append(self.depth)
        return tuple(zip([0, *ends[:-1]], ends, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. `vision` is None for text-only Qwen3; token ids are those of the tokenizer's control tokens."""

    text: TextConfig
    vision: VisionConfig | None = None
    image_token: int = 151655
    video_token: int = 151656
    vision_start: int = 151652
    vision_end: int = 151653

    def __post_init__(self) -> None:
        if self.vision is not None:
            _need(
                self.vision.out == self.text.model,
                f"vision out_hidden_size={self.vision.out} must equal text hidden_size={self.text.model}",
            )
            _need(
                len(self.vision.taps) <= self.text.layers,
                f"{len(self.vision.taps)} DeepStack taps need as many decoder layers, got {self.text.layers}",
            )
            _need(
                self.image_token < self.text.vocab,
                f"image_token_id={self.image_token} is outside vocab {self.text.vocab}",
            )

    @property
    def family(self) -> Family:
        """Hugging Face model type."""
        if self.vision is None:
            return "qwen3"
        return "qwen3_vl_moe" if self.text.moe else "qwen3_vl"

    @property
    def deep_layers(self) -> int:
        """How many decoder layers take DeepStack features."""
        return len(self.vision.taps) if self.vision else 0


_ARCHITECTURE = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
}


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: transformers 5 writes `rope_parameters`, 4.57 wrote `rope_scaling` beside `rope_theta`."""
    new = text.get("rope_parameters") or {}
    old = text.get("rope_scaling") or {}
    kind = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
    _need(
        kind in ("default", "mrope"), f"rope_type={kind!r} is not supported; Qwen3-VL uses 'default' with mrope_section"
    )
    section = new.get("mrope_section") or old.get("mrope_section")
    interleaved = new.get("mrope_interleaved", old.get("mrope_interleaved", True))
    _need(
        interleaved is True,
        "mrope_interleaved=false is the layout of Qwen2-VL; this port implements Qwen3-VL's interleaved one",
    )
    theta = new.get("rope_theta") or text.get("rope_theta")
    _need(
        theta is not None, "config.json has neither rope_parameters.rope_theta nor rope_theta: positions are undefined"
    )
    return {"theta": theta, "section": section}


def _get(source: dict[str, Any], where: str, key: str) -> Any:
    if source.get(key) is None:
        raise ConfigError(
            f"config.json: {where} lacks {key!r}, which decides a shape. Is this a Qwen3-VL or Qwen3 folder?"
        )
    return source[key]


def _text_from_hf(text: dict[str, Any], *, tied: bool, moe: bool, where: str) -> TextConfig:
    _need(not text.get("attention_bias"), f"{where}.attention_bias=true is not supported: no released Qwen3-VL has it")
    _need(
        text.get("hidden_act", "silu") == "silu",
        f"{where}.hidden_act={text.get('hidden_act')!r}: only 'silu' is supported",
    )
    _need(not text.get("use_sliding_window"), f"{where}.use_sliding_window=true is not supported")
    if moe:
        _need(
            (text.get("decoder_sparse_step") or 1) == 1 and not text.get("mlp_only_layers"),
            f"{where}: decoder_sparse_step={text.get('decoder_sparse_step')} and "
            f"mlp_only_layers={text.get('mlp_only_layers')}; only models whose every layer is sparse are supported",
        )
        _need(
            text.get("norm_topk_prob", True) is not False,
            f"{where}.norm_topk_prob=false is not what Qwen3-VL-MoE computes",
        )
    heads = _get(text, where, "num_attention_heads")
    head_dim = text.get("head_dim") or _get(text, where, "hidden_size") // heads
    rope = _rope(text)
    half = head_dim // 2
    side = half * 5 // 16  # 20 of 64
    return TextConfig(
        vocab=_get(text, where, "vocab_size"),
        model=_get(text, where, "hidden_size"),
        layers=_get(text, where, "num_hidden_layers"),
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp=_get(text, where, "intermediate_size"),
        moe=MoEConfig(
            experts=text.get("num_experts") or _get(text, where, "num_local_experts"),
            top_k=_get(text, where, "num_experts_per_tok"),
            mlp=_get(text, where, "moe_intermediate_size"),
        )
        if moe
        else None,
        rope_theta=float(rope["theta"]),
        mrope_section=tuple(rope["section"] or (half - 2 * side, side, side)),
        rms_eps=text.get("rms_norm_eps", 1e-6),
        tied=tied,
        max_positions=text.get("max_position_embeddings", 262144),
        init_std=text.get("initializer_range", 0.02),
    )


def _vision_from_hf(vision: dict[str, Any]) -> VisionConfig:
    where = "vision_config"
    table = _get(vision, where, "num_position_embeddings")
    side = round(table**0.5)
    _need(side * side == table, f"{where}.num_position_embeddings={table} is not a square")
    act = vision.get("hidden_act", "gelu_pytorch_tanh")
    _need(act == "gelu_pytorch_tanh", f"{where}.hidden_act={act!r}: only 'gelu_pytorch_tanh' is supported")
    rope = vision.get("rope_parameters") or {}
    return VisionConfig(
        depth=_get(vision, where, "depth"),
        model=_get(vision, where, "hidden_size"),
        heads=_get(vision, where, "num_heads"),
        mlp=_get(vision, where, "intermediate_size"),
        out=_get(vision, where, "out_hidden_size"),
        taps=tuple(_get(vision, where, "deepstack_visual_indexes")),
        patch=vision.get("patch_size", 16),
        temporal=vision.get("temporal_patch_size", 2),
        merge=vision.get("spatial_merge_size", 2),
        channels=vision.get("in_channels", 3),
        positions=side,
        rope_theta=float(rope.get("rope_theta") or 1e4),
        init_std=vision.get("initializer_range", 0.02),
    )


def from_hf(hf: dict[str, Any]) -> ModelConfig:
    """The configuration that a Hugging Face `config.json` describes.

    Args:
      hf: the parsed file, of model type qwen3_vl, qwen3_vl_moe or qwen3 (older and newer key layouts).
    Raises:
      ConfigError: naming the field and its value, if something is missing or not implemented here.
    """
    kind = hf.get("model_type")
    _need(kind in _ARCHITECTURE, f"model_type={kind!r} is not supported; expected one of {', '.join(_ARCHITECTURE)}")
    if kind == "qwen3":
        return ModelConfig(
            text=_text_from_hf(hf, tied=bool(hf.get("tie_word_embeddings", False)), moe=False, where="config")
        )
    # The tie flag of the whole model stands at the top level: the 30B text part says true while the model is untied.
    text = _text_from_hf(
        _get(hf, "config", "text_config"),
        tied=bool(hf.get("tie_word_embeddings", False)),
        moe=kind == "qwen3_vl_moe",
        where="text_config",
    )
    return ModelConfig(
        text=text,
        vision=_vision_from_hf(_get(hf, "config", "vision_config")),
        image_token=hf.get("image_token_id", 151655),
        video_token=hf.get("video_token_id", 151656),
        vision_start=hf.get("vision_start_token_id", 151652),
        vision_end=hf.get("vision_end_token_id", 151653),
    )


def to_hf(config: ModelConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` that `transformers` reads back as the same model; `dtype` is that of the stored tensors."""
    text = config.text
    body: dict[str, Any] = {
        "vocab_size": text.vocab,
        "hidden_size": text.model,
        "num_hidden_layers": text.layers,
        "num_attention_heads": text.heads,
        "num_key_value_heads": text.kv_heads,
        "head_dim": text.head_dim,
        "intermediate_size": text.mlp,
        "hidden_act": "silu",
        "max_position_embeddings": text.max_positions,
        "rms_norm_eps": text.rms_eps,
        "attention_bias": False,
        "initializer_range": text.init_std,
        "tie_word_embeddings": text.tied,
        "dtype": dtype,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": text.rope_theta}
    architecture = {"architectures": [_ARCHITECTURE[config.family]], "model_type": config.family, "dtype": dtype}
    if config.vision is None:
        return {
            **architecture,
            **body,
            "rope_theta": text.rope_theta,
            "rope_parameters": rope,
            "use_sliding_window": False,
        }
    rope |= {"mrope_section": list(text.mrope_section), "mrope_interleaved": True}
    body |= {
        "model_type": f"{config.family}_text",
        "rope_parameters": rope,
        # transformers 4.57 reads these two instead of rope_parameters
        "rope_theta": text.rope_theta,
        "rope_scaling": {"rope_type": "default", "mrope_section": list(text.mrope_section), "mrope_interleaved": True},
    }
    if text.moe:
        body |= {
            "num_experts": text.moe.experts,
            "num_experts_per_tok": text.moe.top_k,
            "moe_intermediate_size": text.moe.mlp,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    vision = config.vision
    return {
        **architecture,
        "tie_word_embeddings": text.tied,
        "image_token_id": config.image_token,
        "video_token_id": config.video_token,
        "vision_start_token_id": config.vision_start,
        "vision_end_token_id": config.vision_end,
        "text_config": body,
        "vision_config": {
            "model_type": config.family,
            "depth": vision.depth,
            "hidden_size": vision.model,
            "num_heads": vision.heads,
            "intermediate_size": vision.mlp,
            "out_hidden_size": vision.out,
            "deepstack_visual_indexes": list(vision.taps),
            "patch_size": vision.patch,
            "temporal_patch_size": vision.temporal,
            "spatial_merge_size": vision.merge,
            "in_channels": vision.channels,
            "num_position_embeddings": vision.positions**2,
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": vision.init_std,
            "dtype": dtype,
        },
    }


def read_config(folder: str | pathlib.Path) -> ModelConfig:
    """The configuration of the model in `folder`.

    Raises:
      ConfigError: if there is no readable `config.json`, or it describes a model this port does not implement.
    """
    path = pathlib.Path(folder) / "config.json"
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: give a folder with a Hugging Face model") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): download it again") from None
    try:
        return from_hf(hf)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _dense(model: int, layers: int, heads: int, mlp: int, *, tied: bool, vision: VisionConfig) -> ModelConfig:
    text = TextConfig(
        vocab=151936, model=model, layers=layers, heads=heads, kv_heads=8, head_dim=128, mlp=mlp, tied=tied
    )
    return ModelConfig(text=text, vision=dataclasses.replace(vision, out=model))


def _sparse(model: int, layers: int, heads: int, expert_mlp: int, mlp: int) -> ModelConfig:
    text = TextConfig(
        vocab=151936, model=model, layers=layers, heads=heads, kv_heads=4, head_dim=128, mlp=mlp, tied=False,
        moe=MoEConfig(experts=128, top_k=8, mlp=expert_mlp),
    )  # fmt: skip
    return ModelConfig(text=text, vision=dataclasses.replace(_VISION_LARGE, out=model))


_VISION_SMALL = VisionConfig(depth=24, model=1024, heads=16, mlp=4096, out=2048, taps=(5, 11, 17))
_VISION_LARGE = VisionConfig(depth=27, model=1152, heads=16, mlp=4304, out=4096, taps=(8, 16, 24))

PRESETS: dict[str, ModelConfig] = {
    "2b": _dense(2048, 28, 16, 6144, tied=True, vision=_VISION_SMALL),
    "4b": _dense(2560, 36, 32, 9728, tied=True, vision=_VISION_SMALL),
    "8b": _dense(4096, 36, 32, 12288, tied=False, vision=_VISION_LARGE),
    "32b": _dense(5120, 64, 64, 25600, tied=False, vision=_VISION_LARGE),
    "30b-a3b": _sparse(2048, 48, 32, 768, 6144),
    "235b-a22b": _sparse(4096, 94, 64, 1536, 12288),
}

TINY = ModelConfig(
    text=TextConfig(
        vocab=4096, model=256, layers=6, heads=4, kv_heads=2, head_dim=64, mlp=768, mrope_section=(12, 10, 10)
    ),
    vision=VisionConfig(depth=4, model=128, heads=2, mlp=512, out=256, taps=(0, 1, 2)),
    image_token=4000, video_token=4001, vision_start=4002, vision_end=4003,
)  # fmt: skip
"""No published size: some eight million parameters, for tests of whole runs and benchmarks on a laptop CPU."""

NANO = ModelConfig(
    text=TextConfig(
        vocab=1024, model=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=384, mrope_section=(6, 5, 5)
    ),
    vision=VisionConfig(depth=3, model=64, heads=2, mlp=192, out=128, taps=(0, 1), positions=16),
    image_token=1000, video_token=1001, vision_start=1002, vision_end=1003,
)  # fmt: skip
"""No published size: about one million parameters, to learn a small world from nothing on a laptop CPU."""


def preset(name: str) -> ModelConfig:
    """A published size by name, or "tiny" or "nano".

    Raises:
      ConfigError: naming the known sizes.
    """
    sizes = PRESETS | {"tiny": TINY, "nano": NANO}
    if name not in sizes:
        raise ConfigError(f"unknown model size {name!r}; known: {', '.join(sizes)}")
    return sizes[name]
