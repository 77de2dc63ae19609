"""The small files beside the weights: tokenizer, chat template, image processor, generation defaults.

They are copied, byte for byte, from the folder that the model came from. What follows from the configuration is made
where that folder lacks it or there is no such folder; a tokenizer cannot be made.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.tokenizer import default_chat_template

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_OTHERS = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)
_END_OF_TEXT, _IM_END = 151643, 151645  # of the Qwen3 vocabulary


class ExportError(ValueError):
    """A model that cannot be exported as asked, with what to do."""


def sidecar_files(config: ModelConfig, source: str | pathlib.Path | None) -> dict[str, bytes]:
    """Name and content of every file of a model folder, other than weights and `config.json`.

    Raises:
      ExportError: if `source` is given and has no `tokenizer.json`.
    """
    files: dict[str, bytes] = {}
    if source is not None:
        folder = pathlib.Path(source).expanduser()
        if not (folder / "tokenizer.json").is_file():
            raise ExportError(f"{folder} has no tokenizer.json: give the folder that the model was loaded from")
        files = {name: (folder / name).read_bytes() for name in _TOKENIZER + _OTHERS if (folder / name).is_file()}
        if config.vision and not _has_template(files):
            files["chat_template.jinja"] = default_chat_template().encode()
    if config.vision and "preprocessor_config.json" not in files:
        vision = config.vision
        processor = ImageProcessor(patch_size=vision.patch, merge_size=vision.merge)
        files["preprocessor_config.json"] = _json(processor.to_hf())
    if "generation_config.json" not in files:
        qwen = config.text.vocab > _IM_END  # a smaller vocabulary is not Qwen's, and its ids are unknown here
        ids = {"bos_token_id": _END_OF_TEXT, "eos_token_id": [_IM_END, _END_OF_TEXT], "pad_token_id": _END_OF_TEXT}
        files["generation_config.json"] = _json(ids if qwen else {})
    return files


def _has_template(files: dict[str, bytes]) -> bool:
    settings = json.loads(files.get("tokenizer_config.json", b"{}"))
    return "chat_template.jinja" in files or "chat_template.json" in files or bool(settings.get("chat_template"))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
