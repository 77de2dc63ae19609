"""Token ids: page text stays text, images expand once, the small tokenizer is the big one's twin."""

from __future__ import annotations

import itertools
import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from owrl_jax.models.tokenizer import (
    ADDED_TOKENS,
    ExpandedIds,
    Tokens,
    UnexpandedIds,
    expand_images,
    load_tokenizer,
    train_small_tokenizer,
)

from .qwen_vocabulary import qwen_folder, qwen_tokens

CORPUS = [
    "Click the blue button, then read the price: $12.50 (it's 20% off!)\n\n",
    'The form wants a name & an address; "Zürich", naïve, 日本語 and emoji 🎉.\n',
    '{"name": "left_click", "arguments": {"coordinate": [512, 340]}}\n',
] * 3
CONTROL = [text for text, _ in ADDED_TOKENS]


@pytest.fixture(scope="module")
def qwen() -> Tokens:
    return qwen_tokens()


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokens:
    return train_small_tokenizer(CORPUS, 500, tmp_path_factory.mktemp("small"))


@pytest.fixture(params=["qwen", "small"])
def tokens(request) -> Tokens:
    return request.getfixturevalue(request.param)


def is_control(tokens: Tokens, ids) -> np.ndarray:
    return np.isin(np.asarray(ids), tokens.control_ids)


# ---- ids -----------------------------------------------------------------------------------------------------------


def test_special_ids_of_qwen3(qwen):
    assert qwen.special.vision_start == 151652 and qwen.special.vision_end == 151653
    assert qwen.special.image_pad == 151655 and qwen.special.video_pad == 151656
    assert qwen.special.im_start == 151644 and qwen.special.im_end == 151645
    assert qwen.special.endoftext == 151643
    assert qwen.special.think == 151667 and qwen.special.end_think == 151668
    assert qwen.special.tool_call == 151657 and qwen.special.end_tool_call == 151658
    assert qwen.control_ids.tolist() == list(range(151643, 151669))


TEXTS = [
    "",
    " ",
    "\n\n",
    "Hello, world!",
    "it's 1234 o'clock\r\n\tindented  double ",
    "e\u0301 composes under NFC, Å too",
    "日本語 🎉👩‍👩‍👧 \u00a0\u200b",
    "<|im_end",
    "|im_end|>",
    "a < b |> c",
]


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_plain_text_gets_the_ids_of_the_model_tokenizer(tokens, text):
    ids = tokens.encode_text(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == tokens.hf.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("control", CONTROL)
@pytest.mark.parametrize("around", ["{}", "before {} after", "<{}>", "{0}{0}", "{}\n"])
def test_page_text_never_becomes_a_control_token(tokens, control, around):
    text = around.format(control)
    assert is_control(tokens, tokens.hf.encode(text)).any()  # the ordinary way would have been fooled
    ids = tokens.encode_text(text)
    assert ids.size and not is_control(tokens, ids).any()
    assert tokens.decode(ids) == text


def test_the_switch_of_transformers_would_not_be_enough(qwen):
    """Why `encode_text` does not use split_special_tokens: should this ever fail, the simpler way may do."""
    assert is_control(qwen, qwen.hf.encode("</think>", split_special_tokens=True)).any()
    qwen.hf.encode("x", split_special_tokens=False)


fragments = st.sampled_from(CONTROL).flatmap(lambda t: st.integers(0, len(t)).map(lambda n: t[:n]))
endings = st.sampled_from(CONTROL).flatmap(lambda t: st.integers(0, len(t)).map(lambda n: t[n:]))
pieces = st.lists(st.one_of(st.sampled_from(CONTROL), fragments, endings, st.text(max_size=6)), max_size=4).map("".join)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.booleans(), pieces), max_size=6))
def test_guarded_text_travels_through_a_rendered_prompt_as_text(small, parts):
    """Control tokens are those of the trusted parts alone, whatever the page's parts spell by themselves or together
    with their neighbours; and the text that comes out is the text that went in."""
    parts = [(trusted, text.replace("\ufdd0", "")) for trusted, text in parts]
    ids = small.encode_template("".join(text if trusted else small.guard(text) for trusted, text in parts)).ids
    joined = itertools.groupby((part for part in parts if part[1]), key=lambda part: part[0])
    trusted = ["".join(text for _, text in group) for is_trusted, group in joined if is_trusted]
    expected = [i for text in trusted for i in small.hf.encode(text, add_special_tokens=False)]
    assert ids[is_control(small, ids)].tolist() == [i for i in expected if i in small.control_ids]
    nfc = lambda text: unicodedata.normalize("NFC", text)  # noqa: E731
    assert nfc(small.decode(ids)) == nfc("".join(text for _, text in parts))


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        ("a\ud83d b", "a\ufffd b"),
        ("\udc00", "\ufffd"),
        ("\ud83c\udf89", "🎉"),
        ("x\ufdd0y", "xy"),
        ("\x00\x1b", "\x00\x1b"),
    ],
    ids=ascii,
)
def test_broken_page_text_is_still_text(tokens, text, read_as):
    assert tokens.decode(tokens.encode_text(text)) == read_as
    assert tokens.encode_template(tokens.guard(text)).ids.tolist() == tokens.encode_text(text).tolist()


@pytest.mark.parametrize(
    "rendered",
    [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "<tool_call>\n{}\n</tool_call><|im_end|>",
        "a<|vision_start|><|image_pad|><|vision_end|> b \n\n<|im_end|>",
    ],
)
def test_template_ids_equal_transformers(tokens, rendered):
    assert tokens.encode_template(rendered).ids.tolist() == tokens.hf.encode(rendered, add_special_tokens=False)
    assert tokens.decode(tokens.encode_template(rendered)) == rendered


# ---- images --------------------------------------------------------------------------------------------------------

X = 7


def test_expansion_by_hand():
    got = expand_images(UnexpandedIds(np.array([1, X, 2, X, X, 3])), [2, 1, 3], image_token_id=X)
    assert isinstance(got, ExpandedIds)
    assert got.ids.tolist() == [1, X, X, 2, X, X, X, X, 3] and got.ids.dtype == np.int32


def test_expanding_twice_is_a_type_error():
    """T13: whatever the counts, even those that would fit."""
    once = expand_images(UnexpandedIds(np.array([1, X])), [1], image_token_id=X)
    for wrong in (once, once.ids, [1, X]):
        with pytest.raises(TypeError):
            expand_images(wrong, [1], image_token_id=X)  # type: ignore[arg-type]
    assert not isinstance(once, UnexpandedIds) and once != UnexpandedIds(once.ids)


@pytest.mark.parametrize(
    ("counts", "message"),
    [([], "1 image placeholders but 0"), ([2, 3], "1 image placeholders but 2"), ([0], r"at least one token.*\[0\]")],
)
def test_wrong_counts_name_both_sizes(counts, message):
    with pytest.raises(ValueError, match=message):
        expand_images(UnexpandedIds(np.array([1, X])), counts, image_token_id=X)


def test_ids_are_immutable_copies():
    source = np.array([1, 2], np.int64)
    ids = UnexpandedIds(source)
    source[0] = 5
    assert ids.ids.tolist() == [1, 2] and len(ids) == 2 and ids == UnexpandedIds(np.array([1, 2]))
    with pytest.raises(ValueError, match="read-only"):
        ids.ids[0] = 3
    with pytest.raises(ValueError, match="one row of integers"):
        UnexpandedIds(np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="one row of integers"):
        ExpandedIds(np.zeros(3, np.float32))


@given(st.lists(st.integers(0, 3).map(lambda n: X if n == 0 else n), max_size=20), st.data())
def test_expansion_properties(row, data):
    n = row.count(X)
    counts = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    got = expand_images(UnexpandedIds(np.array(row, np.int32)), counts, image_token_id=X).ids
    assert got.size == len(row) - n + sum(counts)
    assert got[got != X].tolist() == [t for t in row if t != X]
    assert got.tolist() == [t for t, k in _with_counts(row, counts) for _ in range(k)]


def _with_counts(row, counts):
    counts = iter(counts)
    return [(t, next(counts) if t == X else 1) for t in row]


# ---- loading and training ------------------------------------------------------------------------------------------

QWEN_CONFIG = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "text_config": {"vocab_size": 151936},
}


def test_ids_are_checked_against_the_model_config(qwen):
    Tokens(qwen.hf, config=QWEN_CONFIG)
    with pytest.raises(ValueError, match=r"image_token_id=5 .*<\|image_pad\|> the id 151655"):
        Tokens(qwen.hf, config=QWEN_CONFIG | {"image_token_id": 5})
    with pytest.raises(ValueError, match=r"highest id 151668 .*vocab_size=151643"):
        Tokens(qwen.hf, config=QWEN_CONFIG | {"text_config": {"vocab_size": 151643}})


def test_a_tokenizer_of_another_family_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=r"lacks the control tokens .*image_pad"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "nowhere")


def test_training_is_deterministic_and_saved_ids_are_those_of_the_trainer(tmp_path):
    from tokenizers import Tokenizer

    first = train_small_tokenizer(CORPUS, 380, tmp_path / "a")
    train_small_tokenizer(iter(CORPUS), 380, tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    raw = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    for text in [*CORPUS, *TEXTS]:
        assert first.encode_text(text).tolist() == raw.encode(text, add_special_tokens=False).ids
    assert len(first.hf) == 380 and first.control_ids.tolist() == list(range(380 - len(CONTROL), 380))
    with pytest.raises(ValueError, match="at least 282"):
        train_small_tokenizer(CORPUS, 281, tmp_path / "c")


def test_the_small_tokenizer_splits_as_qwen_does(qwen, small):
    """Same normaliser, splitter and control tokens, read from the files rather than from our constants."""
    ours, theirs = (json.loads(t.hf.backend_tokenizer.to_str()) for t in (small, qwen))
    assert ours["normalizer"] == theirs["normalizer"]
    assert ours["pre_tokenizer"] == theirs["pre_tokenizer"]
    strip = lambda tokens: [{k: v for k, v in t.items() if k != "id"} for t in tokens]  # noqa: E731
    assert strip(ours["added_tokens"]) == strip(theirs["added_tokens"])
    raw = json.loads((qwen_folder() / "tokenizer.json").read_text(encoding="utf-8"))
    assert strip(raw["added_tokens"]) == strip(ours["added_tokens"])
    assert small.hf.eos_token == "<|im_end|>" and small.hf.pad_token == "<|endoftext|>"
