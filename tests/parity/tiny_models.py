"""Tiny random Qwen models of `transformers`, the oracle of the parity tests.

A kind is one of `KINDS`: "tied" and "untied" (dense Qwen3-VL), "moe" (sparse Qwen3-VL), "text" (text-only Qwen3). Sizes
differ in pairs wherever a mix-up of two axes could otherwise go unseen. The weights are drawn here rather than by
`transformers`, whose norm scales of one and biases of zero would hide a norm or bias that is skipped.

torch and transformers are imported when a model is asked for, so that importing this module costs nothing.
"""

from __future__ import annotations

import copy
import pathlib
from typing import Any, Literal, get_args

Kind = Literal["tied", "untied", "moe", "text"]
KINDS: tuple[Kind, ...] = get_args(Kind)

VISION_START, VISION_END, IMAGE, VIDEO = 500, 501, 502, 503
"""Token ids inside the tiny vocabulary of 512."""

_ARCHITECTURES = {
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}
_MODEL_TYPE = {"tied": "qwen3_vl", "untied": "qwen3_vl", "moe": "qwen3_vl_moe", "text": "qwen3"}

_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "initializer_range": 0.02,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_VISION: dict[str, Any] = {
    "depth": 5,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0, 2, 3],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 49,
    "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
}


def tiny_hf_config(kind: Kind, **overrides: Any) -> dict[str, Any]:
    """The `config.json` of a tiny model.

    Args:
      kind: one of `KINDS`.
      overrides: replace a top-level value; a dict (`text_config`, `vision_config`) replaces values in the old one.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e6}
    family = _MODEL_TYPE[kind]
    common = {"model_type": family, "architectures": [_ARCHITECTURES[family][1]], "dtype": "float32"}
    if kind == "text":
        config = common | _TEXT | {"rope_parameters": rope, "tie_word_embeddings": True, "use_sliding_window": False}
    else:
        tied = kind == "tied"
        text = _TEXT | {
            "model_type": f"{family}_text",
            "rope_parameters": rope | {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
        }
        if kind == "moe":
            text |= _EXPERTS
        config = common | {
            "tie_word_embeddings": tied,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "text_config": text,
            "vision_config": _VISION | {"model_type": family},
        }
    for key, value in overrides.items():
        config[key] = config[key] | value if isinstance(value, dict) and key in config else value
    return copy.deepcopy(config)


def hf_model_of(config: dict[str, Any], *, device: str = "cpu") -> Any:
    """The `transformers` model of a `config.json`, fp32, eager attention and experts, in evaluation mode."""
    import torch
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in _ARCHITECTURES[config["model_type"]])
    parsed = config_class.from_dict(copy.deepcopy(config))
    parsed._attn_implementation = "eager"
    parsed._experts_implementation = "eager"
    with torch.device(device):
        return model_class._from_config(parsed, dtype=torch.float32).eval()


def tiny_hf_model(kind: Kind, seed: int = 0, **overrides: Any) -> Any:
    """A tiny `transformers` model whose every parameter is random, norm scales and biases included.

    Matrices have standard deviation 0.08, four times the usual initialisation: at width 64 smaller ones leave the
    residual stream almost untouched, and an error in a block would drown. The router's is larger, for clear choices.

    Args:
      kind: one of `KINDS`.
      seed: of the weights.
      overrides: as in `tiny_hf_config`.
    """
    import torch

    model = hf_model_of(tiny_hf_config(kind, **overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * (0.3 if name.endswith("mlp.gate.weight") else 0.08))
            elif name.endswith(".bias"):
                parameter.copy_(noise * 0.1)
            else:
                parameter.copy_(1 + noise * 0.2)
    return model


def save(model: Any, folder: str | pathlib.Path) -> pathlib.Path:
    """Write the model as `transformers` writes a checkpoint; returns the folder."""
    folder = pathlib.Path(folder)
    model.save_pretrained(folder)
    return folder
