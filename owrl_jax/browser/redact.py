"""Secrets out of everything that is written: typed passwords, card numbers, and tokens in URLs.

What a field is decides first (a password, a one-time code, a card field: all of its text goes), what the text is
decides second (a payment card number, a bearer token, `api_key=…` go wherever they stand). `redact_call` is for
trajectories, `redact_text` and `redact_url` for feedback and logs, `RedactingFilter` for Python logging.

Redaction is idempotent and keeps text that holds no secret as it is, byte for byte: `?state=CA` and "Password: at least
8 characters" are part of the web that an agent has to work with.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import unquote

from owrl_jax.types import ToolCall

REDACTED = "[redacted]"
_SHIFTED = str.maketrans("1234567890", "!@#$%^&*()")


class SecretField(Protocol):
    """What `redact_call` asks of a field (`guards.ElementFacts`)."""

    @property
    def is_secret(self) -> bool:
        """Whether what is typed here must not be kept: passwords, one-time codes, cards."""
        ...


# Keys whose value is always a secret, with any prefix (`user_password`, `csrf-token`, `X-Api-Key`).
_STRONG = (
    r"(?:[a-z0-9]+[_\-.])*(?:(?:new|old|user|access|refresh|id|auth|csrf|xsrf|client)?"
    r"(?:password|passwd|passwort|passphrase|pwd|secret|token)|api[_\-]?key|access[_\-]?key|authorization|credentials?"
    r"|session[_\-]?id|jsessionid|phpsessid|card[_\-]?number|otp|cvc|cvv|jwt|code_verifier|client[_\-]?secret)"
)
# Keys that often carry one, but also harmless words: only an opaque value goes.
_WEAK = r"(?:[a-z0-9]+[_\-.])*(?:session|sid|auth|sig|signature|sso|ticket|pin|code|state|key|nonce|hash|saml\w*)"
_STRONG_KEY = re.compile(rf"{_STRONG}\Z", re.IGNORECASE)
_WEAK_KEY = re.compile(rf"{_WEAK}\Z", re.IGNORECASE)
_OPAQUE = re.compile(r"(?=[^\s]*\d)(?=[^\s]*[A-Za-z])[^\s]{12,}\Z")
# In running text only unmistakable assignments: `password=hunter2`, `"api_key": "a1b2c3"`; not "Password: required".
_ASSIGNMENT = re.compile(
    rf"(?<![A-Za-z0-9])(?P<key>{_STRONG})(?P<mid>[\"']?(?:=|\s?:\s?)[\"']?)(?P<value>[^\s\"'&;,<>]{{3,}})",
    re.IGNORECASE,
)
_SCHEME = re.compile(
    r"(?P<header>authorization[\"']?\s*[:=]\s*[\"']?)?\b(?P<scheme>Bearer|Basic|Token)\s+"
    r"(?P<value>[A-Za-z0-9._~+/\-]{8,}=*)",
    re.IGNORECASE,
)
_JWT = re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*")
_KNOWN_TOKEN = re.compile(
    r"\b(?:sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|xox[abprs]-[A-Za-z0-9\-]{10,}|AKIA[0-9A-Z]{16})"
)
_DIGITS = re.compile(r"(?<![\w.])\d(?:[ \-]?\d){12,18}(?![\w])")
_ISSUERS = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|5[1-5]\d{14}|2(?:2[2-9]|[3-6]\d|7[01])\d{13}|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}"
    r"|35\d{14}|6(?:011|4[4-9]\d|5\d\d|2\d\d)\d{12}(?:\d{3})?"
)
_URL = re.compile(r"\b(?:https?|wss?)://[^\s<>\"'`]+", re.IGNORECASE)
_USER_INFO = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*:/*)[^/?#]*@")


def luhn(digits: str) -> bool:
    """Whether a digit string passes the check of payment card numbers (ISO/IEC 7812)."""
    total = 0
    for i, c in enumerate(reversed(digits)):
        n = int(c) * (2 if i % 2 else 1)
        total += n - 9 if n > 9 else n
    return total % 10 == 0


def is_card_number(text: str) -> bool:
    """Whether `text` (digits, spaces, hyphens) is a payment card number: issuer prefix, length and check digit.

    The check digit alone would catch one ISBN, timestamp or tracking number in ten.
    """
    digits = re.sub(r"[ \-]", "", text)
    return bool(_ISSUERS.fullmatch(digits)) and luhn(digits)


def redact_url(url: str) -> str:
    """`url` without user info and without the values of keys that carry secrets, in query and fragment."""
    url = _USER_INFO.sub(rf"\1{REDACTED}@", url)
    head, mark, rest = url.partition("?")
    if not mark:
        head, mark, rest = url.partition("#")
        return _path(head) + mark + _pairs(rest)
    query, hash_mark, fragment = rest.partition("#")
    return _path(head) + mark + _pairs(query) + hash_mark + _pairs(fragment)


def redact_text(text: str) -> str:
    """`text` without card numbers, tokens, credentials in URLs and plain `password=…` assignments."""
    text = _URL.sub(lambda m: redact_url(m.group()), text)
    text = _SCHEME.sub(_credential, text)
    text = _ASSIGNMENT.sub(_assigned, text)
    return _tokens(text)


def redact_call(call: ToolCall, field: SecretField | None = None) -> ToolCall:
    """The call as it may be stored.

    Args:
      call: as the policy wrote it.
      field: the focused field for `write` and `press_keys`; None if unknown.
    """
    if field is not None and field.is_secret:
        if call.name == "write":
            hidden = {k: REDACTED if isinstance(v, str) else v for k, v in call.arguments.items()}
            return dataclasses.replace(call, arguments=hidden)
        if call.name == "press_keys":
            # Single characters spell the secret; names such as Enter or Tab do not.
            return dataclasses.replace(call, arguments={k: _hide_keys(v) for k, v in call.arguments.items()})
    return dataclasses.replace(call, arguments={k: _deep(v) for k, v in call.arguments.items()})


def spelt(key: str) -> str:
    """The character that a key of `press_keys` types (`a`, `Shift+a`); empty for names such as Enter."""
    if len(key) != 1 and key[-2:-1] != "+":
        return ""
    shifted = "shift+" in key.lower()
    return key[-1].upper().translate(_SHIFTED) if shifted else key[-1]


class RedactingFilter(logging.Filter):
    """Attach to a handler: no record of any logger then carries a secret that `redact_text` knows."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrites the record in place; always lets it pass."""
        message = record.getMessage()
        redacted = redact_text(message)
        if redacted != message:
            record.msg, record.args = redacted, None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact_text(record.exc_text)
        return True


def _deep(value: object) -> object:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {
            k: REDACTED if isinstance(v, str) and _is_secret_pair(str(k), v) else _deep(v) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_deep(v) for v in value]
    return value


def _hide_keys(value: object) -> object:
    if isinstance(value, list):
        return [_hide_keys(v) for v in value]
    if not isinstance(value, str) or not spelt(value):
        return value
    return value[:-1] + REDACTED


def _credential(match: re.Match[str]) -> str:
    """ "Basic authentication" and "bearer certificates" are English; a header or a digit makes it a credential."""
    if match["header"] is None and not re.search(r"\d", match["value"]):
        return match.group()
    return f"{match['header'] or ''}{match['scheme']} {REDACTED}"


def _assigned(match: re.Match[str]) -> str:
    value = match["value"]
    said_with_colon = ":" in match["mid"]
    if value.startswith(REDACTED) or (said_with_colon and not re.search(r"(?=.*\d).{6,}", value)):
        return match.group()
    return f"{match['key']}{match['mid']}{REDACTED}"


def _is_secret_pair(key: str, value: str) -> bool:
    return bool(_STRONG_KEY.match(key)) or bool(_WEAK_KEY.match(key) and _OPAQUE.match(value))


def _path(text: str) -> str:
    """The part of a URL before its query; `;jsessionid=…` is a parameter of a path."""
    path, semicolon, parameters = text.partition(";")
    return _tokens(path) + semicolon + _pairs(parameters)


def _pairs(text: str) -> str:
    """Query-like text with the values of secret keys replaced; separators and order stay."""
    parts = re.split(r"([&;])", text)
    for i in range(0, len(parts), 2):
        key, equals, value = parts[i].partition("=")
        # `user[password]`, also percent-encoded, is asked by its inner name.
        name = unquote(key).rpartition("[")[2].rstrip("]")
        if equals and value and _is_secret_pair(name, unquote(value)):
            parts[i] = f"{key}={REDACTED}"
        else:
            parts[i] = _tokens(parts[i])
    return "".join(parts)


def _tokens(text: str) -> str:
    """Without what is a secret by its form alone."""
    text = _JWT.sub(REDACTED, text)
    text = _KNOWN_TOKEN.sub(REDACTED, text)
    return _DIGITS.sub(lambda m: REDACTED if is_card_number(m.group()) else m.group(), text)
