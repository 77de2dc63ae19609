"""Token ids: made once, from trusted and untrusted text by different doors, and never expanded twice.

Three rules hold here.

1. *Text from a page is data.* `Tokens.encode_text` cannot yield a control token, whatever the text spells: it runs the
   same normaliser, splitter and merges as the model's tokenizer, but knows no added tokens at all. (The switch
   `split_special_tokens` of `transformers` is not enough: it leaves `<tool_call>`, `<think>` and other added tokens
   that are not marked special, and it changes the state of a shared tokenizer.) Text that must travel through the
   chat template is passed through `guard` first; `encode_template` cuts the rendered prompt at the genuine control
   tokens and drops the guard from what lies between.
2. *One placeholder per image becomes one per visual token exactly once.* `UnexpandedIds` and `ExpandedIds` are
   different types; handing one to the entry of the other is a `TypeError` before anything is computed.
3. *Text is derived from ids*, never the reverse: `Tokens.decode`.

transformers is imported inside `load_tokenizer` only. This file does not know what a model's weights look like.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

# Order = ids in Qwen's vocabulary from 151643 on; True marks what HF calls "special".
ADDED_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)
# Qwen's splitting rule: contractions, words with one leading sign, single digits, punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A Unicode noncharacter, reserved for internal use: put into a control string it makes it an ordinary one. It is
# dropped before anything is encoded, so no text can carry it and no id stands for it.
_GUARD = "\ufdd0"


@dataclasses.dataclass(frozen=True, eq=False)
class _Ids:
    ids: np.ndarray

    def __post_init__(self):
        ids = np.asarray(self.ids)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"ids must be one row of integers [T], got shape {ids.shape}, dtype {ids.dtype}")
        ids = ids.astype(np.int32)  # a copy: the caller's array may change, this one may not
        ids.flags.writeable = False
        object.__setattr__(self, "ids", ids)

    def __len__(self) -> int:
        return self.ids.size

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and np.array_equal(self.ids, other.ids)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, eq=False)
class UnexpandedIds(_Ids):
    """int32 [T] ids in which one `<|image_pad|>` stands for one whole image, as chat templates write it."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExpandedIds(_Ids):
    """int32 [T] ids in which one `<|image_pad|>` stands for one visual token, as the model reads it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Ids of the control tokens that the rest of the system names."""

    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int
    im_start: int
    im_end: int
    endoftext: int
    think: int
    end_think: int
    tool_call: int
    end_tool_call: int


_SPECIAL_STRINGS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image_pad": "<|image_pad|>",
    "video_pad": "<|video_pad|>",
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
    "endoftext": "<|endoftext|>",
    "think": "<think>",
    "end_think": "</think>",
    "tool_call": "<tool_call>",
    "end_tool_call": "</tool_call>",
}
_CONFIG_KEYS = {
    "image_token_id": "image_pad",
    "video_token_id": "video_pad",
    "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
}


class Tokens:
    """A model's tokenizer behind the rules of this file.

    Attributes:
      hf: the `transformers` tokenizer, for `apply_chat_template` and saving.
      special: ids of the control tokens.
      control_ids: int32 [K], ids of all added tokens, sorted.
    """

    def __init__(self, hf: Any, *, config: dict[str, Any] | None = None):
        """Args:
          hf: a fast `transformers` tokenizer.
          config: contents of the model's `config.json`; its image and vision token ids and vocabulary size are
            checked against the tokenizer.

        Raises:
          ValueError: if the tokenizer is not a fast one, lacks a control token, or disagrees with the config.
        """
        from tokenizers import Tokenizer

        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(hf).__name__} is no fast tokenizer: the model folder needs a tokenizer.json")
        self.hf = hf
        added = {token.content: id_ for id_, token in hf.added_tokens_decoder.items()}
        missing = sorted(text for text in _SPECIAL_STRINGS.values() if text not in added)
        if missing:
            raise ValueError(f"the tokenizer lacks the control tokens {missing}: it is not one of the Qwen3-VL family")
        self.special = SpecialIds(**{name: added[text] for name, text in _SPECIAL_STRINGS.items()})
        self.control_ids = np.array(sorted(added.values()), np.int32)
        self._added = added
        # Longest first, as an alternation takes the first branch that fits.
        self._control = re.compile("|".join(re.escape(text) for text in sorted(added, key=len, reverse=True)))
        self._openers = re.compile("|".join(re.escape(opener) for opener in sorted({text[0] for text in added})))
        # Shares the merges, so it costs no memory; has no added tokens, so it cannot produce one.
        self._plain = Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        if config is not None:
            self._check_config(config)

    def encode_text(self, text: str) -> np.ndarray:
        """int32 [T] ids of `text` as mere text: never a control token, even where the text spells one.

        Lone surrogates, which JavaScript strings may hold, become U+FFFD; the noncharacter U+FDD0 is dropped.
        """
        ids = np.array(self._plain.encode(_well_formed(text), add_special_tokens=False).ids, np.int32)
        if np.isin(ids, self.control_ids).any():
            raise ValueError(
                "the vocabulary's merges can build a control token: retrain it with control tokens added last"
            )
        return ids

    def guard(self, text: str) -> str:
        """`text` in a form that `encode_template` takes as mere text, for untrusted parts of a chat message.

        A guarded part neither holds a control string nor completes one together with its neighbours. It looks the same
        on a screen but no longer begins or contains what a template might search for: guard the page's own words,
        not the tags that the harness puts around them.
        """
        return _GUARD + self._openers.sub(lambda found: found[0] + _GUARD, text) if text else text

    def encode_template(self, rendered: str) -> UnexpandedIds:
        """Ids of a rendered chat template: control strings become control tokens, guarded ones become text.

        Without guarded parts this equals the `transformers` tokenizer, id for id.
        """
        ids: list[int] = []
        end = 0
        for found in self._control.finditer(rendered):
            ids += self.encode_text(rendered[end : found.start()]).tolist()
            ids.append(self._added[found[0]])
            end = found.end()
        ids += self.encode_text(rendered[end:]).tolist()
        return UnexpandedIds(np.array(ids, np.int32))

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """The chat template's text for `messages`; `options` (tools, add_generation_prompt, ...) go to the template.

        Parts of the messages that come from a page belong through `guard` first.
        """
        return self.hf.apply_chat_template(list(messages), tokenize=False, **options)

    def decode(self, ids: UnexpandedIds | ExpandedIds | np.ndarray | Sequence[int]) -> str:
        """The text of ids, control tokens included, white space untouched."""
        row = ids.ids if isinstance(ids, _Ids) else np.asarray(ids)
        return self.hf.decode(row.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def expand_images(self, ids: UnexpandedIds, token_counts: Sequence[int]) -> ExpandedIds:
        """`expand_images` with this tokenizer's placeholder."""
        return expand_images(ids, token_counts, image_token_id=self.special.image_pad)

    def _check_config(self, config: dict[str, Any]) -> None:
        for key, name in _CONFIG_KEYS.items():
            ours = getattr(self.special, name)
            if key in config and config[key] != ours:
                raise ValueError(
                    f"config.json says {key}={config[key]} but the tokenizer gives {_SPECIAL_STRINGS[name]} "
                    f"the id {ours}: tokenizer and weights are of different models"
                )
        vocab_size = config.get("text_config", config).get("vocab_size")
        highest = int(self.control_ids[-1])
        if vocab_size is not None and highest >= vocab_size:
            raise ValueError(f"the tokenizer's highest id {highest} is outside of the model's vocab_size={vocab_size}")


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace(_GUARD, "")


def expand_images(ids: UnexpandedIds, token_counts: Sequence[int], *, image_token_id: int) -> ExpandedIds:
    """Repeats the placeholder of image n `token_counts[n]` times.

    Args:
      ids: ids with one placeholder per image.
      token_counts: `Patches.tokens` of each image, in order.
      image_token_id: id of the placeholder.

    Raises:
      TypeError: if the ids are not `UnexpandedIds`; expanding twice would multiply the images.
      ValueError: if placeholders and counts differ in number, or a count is below 1.
    """
    if not isinstance(ids, UnexpandedIds):
        raise TypeError(
            f"expand_images takes UnexpandedIds, got {type(ids).__name__}: images are expanded once, and only from a "
            "prompt with one placeholder per image"
        )
    places = np.flatnonzero(ids.ids == image_token_id)
    counts = np.asarray(token_counts, np.int64)
    if places.size != counts.size:
        raise ValueError(f"the prompt has {places.size} image placeholders but {counts.size} images were given")
    if counts.size and counts.min() < 1:
        raise ValueError(f"every image takes at least one token, got counts {counts.tolist()}")
    repeats = np.ones(len(ids), np.int64)
    repeats[places] = counts
    return ExpandedIds(np.repeat(ids.ids, repeats))


def default_chat_template() -> str:
    """The chat template shipped with the package, for model folders that have none."""
    return resources.files("owrl_jax.models").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def load_tokenizer(folder: str | Path) -> Tokens:
    """The tokenizer of a model folder, checked against its `config.json` where there is one.

    The folder's own chat template wins (in `tokenizer_config.json`, `chat_template.jinja` or `chat_template.json`);
    without one the package's template is set.

    Raises:
      FileNotFoundError: if the folder has no `tokenizer.json`.
      ValueError: as `Tokens`.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json: is this a model folder?")
    hf = AutoTokenizer.from_pretrained(str(folder))
    if not hf.chat_template:
        legacy = folder / "chat_template.json"  # where processors of transformers 4 kept it
        hf.chat_template = (
            json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
            if legacy.is_file()
            else default_chat_template()
        )
    config = folder / "config.json"
    return Tokens(hf, config=json.loads(config.read_text(encoding="utf-8")) if config.is_file() else None)


def train_small_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Tokens:
    """Trains a byte-level BPE in Qwen's manner and saves it as a model folder's tokenizer.

    Same normaliser, splitting rule and control tokens as Qwen3, with the control tokens after the merges. The ids
    depend on `texts` and `vocab_size` alone.

    Args:
      texts: the corpus.
      vocab_size: size wanted, control tokens included; small corpora may give less.
      folder: where to write; created if missing.

    Raises:
      ValueError: if `vocab_size` does not hold the 256 bytes and the control tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    smallest = 256 + len(ADDED_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest} (256 bytes and the control tokens), got {vocab_size}")
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in ADDED_TOKENS])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 262144,
        "extra_special_tokens": {},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(default_chat_template(), encoding="utf-8")
    return load_tokenizer(folder)
