"""Four things an agent in training must not do on other people's sites: buy, log in, open accounts, post.

A guard sees one action before it is made (a click, a key, typing) and the facts of the element it would touch, and
answers with a refusal or None. It stops the *last* step: a cart may be filled, a checkout or a login page may be looked
at, a search may be sent; an order is not placed, credentials are not typed or sent, a form that speaks to others is not
submitted. Refusals are told to the agent and are not faults of the site.

Rules, in order of trust: what the fields are (a password, a card), what the form is, then what the button says, in
English, German, French and Spanish. Words alone decide only for unmistakable captions on things that act; a link that
merely leads somewhere is refused only for "place order" and "continue with Google". This is a guard against accidents,
not a wall against a determined adversary: the sandbox holds no credentials and no money, which is the real protection.
"""

from __future__ import annotations

import dataclasses
import re
from urllib.parse import urlsplit

from owrl_jax.agent.page_text import one_line
from owrl_jax.browser import guard_words as words
from owrl_jax.browser.elements import ElementFacts, FormFacts
from owrl_jax.browser.policy import Refusal, is_excepted, url_host_port
from owrl_jax.browser.redact import is_card_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guards:
    """Which guards are on, and where none is.

    Attributes:
      purchase, login, account, posting: switches; a local world whose task is to buy turns one off.
      exceptions: (host, port) of worlds where nothing is guarded, as in `UrlPolicy`.
    """

    purchase: bool = True
    login: bool = True
    account: bool = True
    posting: bool = True
    exceptions: frozenset[tuple[str, int]] = frozenset()

    def check_click(self, element: ElementFacts | None) -> Refusal | None:
        """Whether a click on `element` may be made; None means yes. No element (empty page) is always fine."""
        if element is None or self._is_exempt(element):
            return None
        if not (element.is_button or element.submits):
            if element.tag == "a" and _matches(words.ORDER, element) and self.purchase:
                return _refuse("purchase_guard", element)
            return self._federated(element) if element.tag == "a" else None
        return self._check_act(element, element.caption)

    def check_key(self, key: str, element: ElementFacts | None) -> Refusal | None:
        """The same for a key or hotkey (`Enter`, `Control+Enter`, `Space`) while `element` has the focus."""
        if element is None or self._is_exempt(element):
            return None
        parts = {part.strip().lower() for part in re.split(r"(?<=.)\+", key)} if key != " " else {"space"}
        enter = bool(parts & {"enter", "return", "numpadenter"})
        if element.is_button:
            return self._check_act(element, element.caption) if enter or "space" in parts else None
        if not enter or element.tag in ("select",) or element.form is None:
            return None
        combined = bool(parts & {"control", "ctrl", "meta", "command", "cmd"})
        if element.field.is_long_text and not combined and not _is_chat(element):
            return None  # a line break
        return self._check_act(
            dataclasses.replace(element, submits=True), next((s for s in element.form.submits if s), "Enter")
        )

    def check_write(self, element: ElementFacts | None, text: str = "") -> Refusal | None:
        """Whether `text` may be typed into `element`: not into passwords, one-time codes and payment fields, and no
        card number anywhere."""
        if element is None or self._is_exempt(element):
            return None
        field = element.field
        if self.purchase and (field.is_card or is_card_number(text)):
            return _refuse("purchase_guard", element, "Nothing was typed: this is a payment field")
        new = "new-password" in field.autocomplete or _is_sign_up(element)
        if (field.is_password or field.is_code) and (self.account if new else self.login):
            kind = "account_guard" if new else "login_guard"
            return _refuse(kind, element, "Nothing was typed: this is a password or sign-in code field")
        return None

    # What an activated control would do, strongest evidence first.

    def _check_act(self, element: ElementFacts, caption: str) -> Refusal | None:
        form = element.form
        submits = element.submits and form is not None
        if self.purchase:
            buys = words.ORDER.match(caption) or words.BUY.match(caption)
            if words.CHECKOUT_PLACE.search(_path(element.url)):
                buys = buys or words.BUY_AT_CHECKOUT.match(caption)
            pays = submits and form is not None and any(f.is_card and f.filled for f in form.fields)
            if buys or (pays and not words.HARMLESS.search(caption)):
                return _refuse("purchase_guard", element, caption=caption)
        refusal = self._federated(element)
        if refusal is not None:
            return refusal
        if submits and form is not None and not form.is_search:
            refusal = self._check_identity(element, form, caption)
            if refusal is not None:
                return refusal
        return self._check_posting(element, form, caption) if self.posting else None

    def _check_identity(self, element: ElementFacts, form: FormFacts, caption: str) -> Refusal | None:
        """Login and account creation: a form with a password, or one that asks who you are in a place made for it."""
        asks_who = any(
            f.type in ("email", "tel") or "username" in f.autocomplete or "email" in f.name.lower() for f in form.fields
        )
        passwords = sum(f.is_password or f.is_code for f in form.fields)
        if words.HARMLESS.search(caption):
            return None
        sign_up = _is_sign_up(element) or bool(words.SIGN_UP.match(caption))
        if passwords:
            if sign_up and not words.LOG_IN.match(caption):
                return _refuse("account_guard", element, caption=caption) if self.account else None
            return _refuse("login_guard", element, caption=caption) if self.login else None
        if self.account and sign_up and asks_who:
            return _refuse("account_guard", element, caption=caption)
        in_login = words.LOGIN_PLACE.search(_path(element.url)) or words.LOGIN_PLACE.search(_path(form.action))
        if self.login and (asks_who or form.fields) and (words.LOG_IN.match(caption) or (in_login and asks_who)):
            return _refuse("login_guard", element, caption=caption)
        return None

    def _federated(self, element: ElementFacts) -> Refusal | None:
        """One click on "Continue with Google" and its kind may be a login or a new account."""
        if not _matches(words.FEDERATED, element):
            return None
        return _refuse("login_guard", element) if self.login else None

    def _check_posting(self, element: ElementFacts, form: FormFacts | None, caption: str) -> Refusal | None:
        if form is None or form.is_search or not element.submits:
            return None
        texts = [f for f in form.fields if f.is_long_text]
        written = any(f.filled for f in texts)
        if words.POST.match(caption) and (written or not words.OPENS.search(caption)) and (texts or form.real):
            return _refuse("posting_guard", element, caption=caption)
        if written and (words.SEND.match(caption) or caption in ("", "Enter") or form.method.lower() == "post"):
            harmless = words.HARMLESS.search(caption) or words.OPENS.search(caption)
            return None if harmless else _refuse("posting_guard", element, caption=caption)
        return None

    def _is_exempt(self, element: ElementFacts) -> bool:
        if not self.exceptions:
            return False
        place = url_host_port(element.url) or url_host_port(element.top)
        return place is not None and is_excepted(*place, self.exceptions)


_RULES = {
    "purchase_guard": "orders and payments are not made here; looking, comparing and filling a cart is fine",
    "login_guard": "this browser does not sign in anywhere; use what is visible without an account",
    "account_guard": "no accounts or subscriptions are made here; use what is visible without one",
    "posting_guard": "nothing is posted or sent to other people here; reading and searching is fine",
}


def _refuse(detail: str, element: ElementFacts, what: str = "", caption: str = "") -> Refusal:
    shown = one_line(caption or element.caption or element.tag, 60)
    lead = what or f'"{shown}" was not activated'
    place = url_host_port(element.url) or url_host_port(element.top)
    return Refusal(detail=detail, host=place[0] if place else "", message=f"{lead}: {_RULES[detail]}.")


def _matches(pattern: re.Pattern[str], element: ElementFacts) -> bool:
    return bool(pattern.match(element.text) or (not element.text and pattern.match(element.label)))


def _is_sign_up(element: ElementFacts) -> bool:
    """Whether the element's form makes an account: by its fields, its name, or the page's address."""
    form = element.form
    if form is not None:
        passwords = [f for f in form.fields if f.is_password]
        if len(passwords) > 1 or any("new-password" in f.autocomplete for f in passwords):
            return True
        if words.SIGNUP_PLACE.search(_path(form.action)) or words.SIGN_UP.match(form.heading.strip() or "-"):
            return True
    return bool(words.SIGNUP_PLACE.search(_path(element.url)))


def _is_chat(element: ElementFacts) -> bool:
    """A message box that sends on Enter: its only button says so, or its name does."""
    form = element.form
    sends = form is not None and any(
        re.match(r"\W*(?:send|senden|envoyer|enviar)\W*\Z", s, re.IGNORECASE) for s in form.submits
    )
    return sends or bool(
        re.search(r"\b(?:chat|message|nachricht|mensaje)\b", f"{element.name} {element.label}", re.IGNORECASE)
    )


def _path(url: str) -> str:
    """Path (and for single-page sites the fragment) of a URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return f"{parts.path} {parts.fragment}"
