"""Redaction: secrets go everywhere, and everything else stays byte for byte."""

from __future__ import annotations

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from owrl_jax.browser.elements import ElementFacts, FieldFacts
from owrl_jax.browser.redact import RedactingFilter, is_card_number, luhn, redact_call, redact_text, redact_url, spelt
from owrl_jax.types import ToolCall

R = "[redacted]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pay with 4111 1111 1111 1111 now", f"pay with {R} now"),
        ("378282246310005", R),
        ("5555-5555-5555-4444", R),
        ("Authorization: Bearer abcdefghijk", f"Authorization: Bearer {R}"),
        ("curl -H 'authorization: Basic dXNlcjpwYXNz'", f"curl -H 'authorization: Basic {R}'"),
        ("password=hunter2&x=1", f"password={R}&x=1"),
        ('{"api_key": "a1b2c3d4e5"}', f'{{"api_key": "{R}"}}'),
        ("csrf_token=zzz", f"csrf_token={R}"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln end", f"jwt {R} end"),
        ("key sk-abcdefghijklmnop1234", f"key {R}"),
        ("see https://u:p@h.example/?token=abc&q=1.", f"see https://{R}@h.example/?token={R}&q=1."),
    ],
)
def test_secrets_go(text, expected):
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Password: at least 8 characters",
        "ISBN 978-0-306-40615-7, order 9780306406157",
        "4111 1111 1111 1112 fails the check digit",
        "call 1-800-555-0199 or 0049 30 1234567890",
        "timestamp 1700000000000, id 12345678901234567890",
        "basic authentication and bearer certificates explained",
        "tokenizer: state of the art; secret santa",
        "http://h.example/?state=CA&code=SPRING20&sort=price&page=2&key=value",
        "https://h.example/tokens?monkey=1&keyboard=qwerty12345678",
    ],
)
def test_harmless_text_stays(text):
    assert redact_text(text) == text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h/?access_token=a&x=1", f"http://h/?access_token={R}&x=1"),
        ("http://h/#id_token=a&state=b", f"http://h/#id_token={R}&state=b"),
        ("http://h/?state=9f8e7d6c5b4a3210&code=4/0AX4XfWh", f"http://h/?state={R}&code={'4/0AX4XfWh'}"),
        ("http://h/?user%5Bpassword%5D=a&b=c", f"http://h/?user%5Bpassword%5D={R}&b=c"),
        ("http://h/?X-Amz-Signature=abc123def456&X-Api-Key=1", f"http://h/?X-Amz-Signature={R}&X-Api-Key={R}"),
        ("https://user:pw@h/path", f"https://{R}@h/path"),
        ("http://h/?token=", "http://h/?token="),
        ("http://h/a@b?q=a@b", "http://h/a@b?q=a@b"),
        ("http://h/;jsessionid=1A2B3C?x=1", f"http://h/;jsessionid={R}?x=1"),
    ],
)
def test_urls(url, expected):
    assert redact_url(url) == expected


@given(st.text(max_size=120))
def test_redaction_is_idempotent(text):
    once = redact_text(text)
    assert redact_text(once) == once


@given(st.integers(0, 10**15 - 1))
def test_every_card_number_goes_however_it_is_grouped(body):
    digits = f"4{body:015d}"[:15]
    check = next(d for d in "0123456789" if luhn(digits + d))  # exactly one digit completes it
    card = digits + check
    assert is_card_number(card)
    for text in (card, " ".join(card[i : i + 4] for i in range(0, 16, 4)), f"({card})"):
        assert card[-4:] not in redact_text(text)


def test_calls_into_secret_fields_lose_their_text_and_others_only_secrets():
    password = FieldFacts(tag="input", type="password")
    call = ToolCall(name="write", arguments={"message": "hunter2"})
    assert redact_call(call, password).arguments == {"message": R}
    assert redact_call(call, FieldFacts(tag="input", type="text")).arguments == {"message": "hunter2"}
    assert redact_call(call, ElementFacts(tag="input", autocomplete="cc-number")).arguments == {"message": R}
    keys = ToolCall(name="press_keys", arguments={"keys": ["h", "Shift+u", "+", "Enter"], "is_hotkey": False})
    assert redact_call(keys, password).arguments == {"keys": [R, f"Shift+{R}", R, "Enter"], "is_hotkey": False}
    assert [spelt(key) for key in ("h", "Shift+u", "shift+1", "+", "Enter")] == ["h", "U", "!", "+", ""]
    card = ToolCall(name="write", arguments={"message": "4111111111111111"})
    assert redact_call(card).arguments == {"message": R}
    goto = ToolCall(name="goto_url", arguments={"url": "http://h/?token=a", "deep": [{"password": "x", "n": 1}]})
    assert redact_call(goto).arguments == {"url": f"http://h/?token={R}", "deep": [{"password": R, "n": 1}]}
    assert goto.arguments["url"] == "http://h/?token=a"  # the original is untouched


@pytest.mark.parametrize(
    ("facts", "secret"),
    [
        ({"type": "password"}, True),
        ({"type": "text", "autocomplete": "current-password"}, True),
        ({"type": "text", "name": "user_password"}, True),
        ({"type": "text", "autocomplete": "one-time-code"}, True),
        ({"type": "tel", "autocomplete": "cc-number"}, True),
        ({"type": "text", "autocomplete": "billing cc-csc"}, True),
        ({"type": "text", "name": "cardNumber"}, True),
        ({"type": "text", "name": "x", "label": "Security code"}, True),
        ({"type": "text", "label": "Mot de passe", "name": "mot_de_passe"}, True),
        ({"type": "text", "autocomplete": "cc-name"}, False),
        ({"type": "text", "name": "postcard"}, False),
        ({"type": "email", "name": "email"}, False),
        ({"type": "search", "name": "q", "label": "Search gift cards"}, False),
    ],
)
def test_which_fields_are_secret(facts, secret):
    assert FieldFacts(tag="input", **facts).is_secret is secret


def test_the_logging_filter_covers_messages_arguments_and_tracebacks():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter())
    logger = logging.getLogger("owrl.test.redact")
    logger.addHandler(handler)
    logger.propagate = False
    logger.warning("goto %s with %d", "http://h/?token=abcdef", 3)
    try:
        raise ValueError("password=hunter2")
    except ValueError:
        logger.exception("failed")
    logger.warning("100%% of %s", "nothing")
    text = stream.getvalue()
    logger.removeHandler(handler)
    assert "abcdef" not in text and "hunter2" not in text
    assert f"goto http://h/?token={R} with 3" in text and "100% of nothing" in text and "ValueError" in text
