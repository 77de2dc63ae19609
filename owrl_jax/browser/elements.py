"""What a guard needs to know of the element that an action is about to touch.

`DESCRIBE_JS` is a JavaScript function of one element (the one under the point, or the focused one) that returns plain
JSON; `ElementFacts.read` makes the record of it. Evaluate it in an isolated world, where the page cannot have replaced
what it calls. It looks only at the element, the control it belongs to and the form or group of fields around it: its
cost does not grow with the page. Everything in it is the page's word: it is capped here and judged in `guards`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

# One element in, JSON out. Climbs through shadow roots; `group` stands in for a form where a page has none.
DESCRIBE_JS = r"""(start) => {
  const cut = (s, n) => String(s == null ? '' : s).replace(/\s+/g, ' ').trim().slice(0, n);
  const up = e => e.parentElement || (e.getRootNode() instanceof ShadowRoot ? e.getRootNode().host : null);
  const CONTROL = 'button,a[href],input,select,textarea,summary,label,[role=button],[role=link],[role=menuitem],'
    + '[role=tab],[role=checkbox],[role=radio],[role=option],[contenteditable=""],[contenteditable=true]';
  let el = start && start.nodeType === 1 ? start : null;
  if (!el) return null;
  for (let e = el, n = 0; e && n < 12; e = up(e), n++) if (e.matches(CONTROL)) { el = e; break; }
  if (el.tagName === 'LABEL' && el.control) el = el.control;
  const byId = (ids, e) => (ids || '').split(/\s+/).slice(0, 4).map(i => {
    const root = e.getRootNode(), t = i && root.getElementById && root.getElementById(i);
    return t ? t.textContent : ''; }).join(' ');
  const accessibleName = e => cut(byId(e.getAttribute('aria-labelledby'), e) || e.getAttribute('aria-label')
    || (e.labels && e.labels.length ? e.labels[0].textContent : '') || e.getAttribute('alt') || e.getAttribute('title')
    || e.getAttribute('placeholder') || '', 200);
  const isButtonInput = e => e.tagName === 'INPUT' && /^(submit|button|image|reset)$/.test(e.type);
  const textOf = e => isButtonInput(e) ? cut(e.value || (e.type === 'submit' ? 'Submit' : ''), 200)
    : /^(INPUT|TEXTAREA|SELECT)$/.test(e.tagName) ? ''
    : cut((e.innerText || e.textContent || '').slice(0, 2000), 200);
  const editable = e => e.isContentEditable && !/^(INPUT|TEXTAREA)$/.test(e.tagName);
  const field = e => ({
    tag: e.tagName.toLowerCase(), type: cut(e.type || (editable(e) ? 'richtext' : ''), 20),
    name: cut(e.name || e.id, 60), autocomplete: cut(e.getAttribute('autocomplete'), 60),
    label: accessibleName(e).slice(0, 80),
    filled: editable(e) ? !!e.textContent.trim() : /^(checkbox|radio|hidden)$/.test(e.type) ? false : !!e.value });
  const FIELDS = 'input:not([type=hidden]),textarea,select,[contenteditable=""],[contenteditable=true]';
  const isSubmit = e => (e.tagName === 'BUTTON' && (e.type === 'submit' || !e.form))
    || (e.tagName === 'INPUT' && /^(submit|image)$/.test(e.type)) || e.getAttribute('role') === 'button';
  let form = el.form || el.closest('form'), real = !!form;
  if (!form) for (let e = up(el), n = 0; e && n < 6 && !/^(BODY|HTML|MAIN)$/.test(e.tagName); e = up(e), n++) {
    const found = e.querySelectorAll('input[type=password],input[type=email],input[type=tel],textarea,'
      + '[contenteditable=""],[contenteditable=true],[autocomplete^=cc-]');
    if (found.length) { if (found.length <= 12) form = e; break; } }
  let facts = null;
  if (form) {
    const fields = [...form.querySelectorAll(FIELDS)].slice(0, 60).filter(e => !isButtonInput(e)).map(field);
    const submits = [...form.querySelectorAll('button,input[type=submit],input[type=image],[role=button]')].slice(0, 20)
      .filter(isSubmit).map(e => textOf(e) || accessibleName(e)).slice(0, 6);
    const title = form.querySelector('h1,h2,h3,legend');
    facts = { real, action: real ? cut(form.getAttribute('action'), 300) : '', method: real ? cut(form.method, 10) : '',
      search: form.getAttribute('role') === 'search' || !!form.closest('search,[role=search]'),
      id: cut(['id', 'name', 'aria-label'].map(a => form.getAttribute(a) || '').join(' '), 120),
      heading: cut((accessibleName(form) || '') + ' ' + (title ? title.textContent : ''), 120), fields, submits };
  }
  const origins = location.ancestorOrigins;
  return {
    tag: el.tagName.toLowerCase(), type: cut(el.type || (editable(el) ? 'richtext' : ''), 20),
    role: cut(el.getAttribute('role'), 20),
    text: textOf(el), label: accessibleName(el), name: cut((el.name || '') + ' ' + (el.id || ''), 120),
    autocomplete: cut(el.getAttribute('autocomplete'), 60), href: el.tagName === 'A' ? cut(el.href, 500) : '',
    submits: isSubmit(el) && (real || el.type !== 'reset'), form: facts,
    url: cut(location.href, 1000), title: cut(document.title, 200),
    top: origins && origins.length ? cut(origins[origins.length - 1], 300) : cut(location.origin, 300) };
}"""

_CARD_NAME = re.compile(
    r"(?:card|cc|credit|karten?|carte|tarjeta)[\s_\-]*(?:num(?:ber|ero|éro)?|no|nr|nummer)\b|\bccnum|\bcard[\s_\-]?pan\b"
    r"|\b(?:cvc|cvv|csc)2?\b|security[\s_\-]?code|prüfziffer|cryptogramme|\biban\b",
    re.IGNORECASE,
)
_CODE_NAME = re.compile(
    r"\b(?:otp|totp|2fa|mfa|one[\s_\-]?time[\s_\-]?(?:code|password)|verification[\s_\-]?code)\b", re.I
)
_PASSWORD_NAME = re.compile(
    r"pass(?:word|wd|phrase)|passwort|kennwort|mot[\s_\-]de[\s_\-]passe|contrase(?:ñ|n)a", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldFacts:
    """One field of a form. `type` is the input's type, `textarea`, `select-one` or `richtext`."""

    tag: str = ""
    type: str = ""
    name: str = ""
    autocomplete: str = ""
    label: str = ""
    filled: bool = False

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> FieldFacts:
        """From what the page script or a record says of an element; what is missing is empty."""
        tag, type_, name, autocomplete, label = (
            str(facts.get(key) or "") for key in ("tag", "type", "name", "autocomplete", "label")
        )
        return cls(tag=tag, type=type_, name=name, autocomplete=autocomplete, label=label)

    @property
    def is_password(self) -> bool:
        """A password: by type, or by its autocomplete hint (pages show passwords in text fields)."""
        return self.type == "password" or "-password" in self.autocomplete

    @property
    def is_code(self) -> bool:
        """A one-time code."""
        return "one-time-code" in self.autocomplete or bool(_CODE_NAME.search(f"{self.name} {self.label}"))

    @property
    def is_card(self) -> bool:
        """A payment card's number, code or expiry, or a bank account."""
        if re.search(r"\bcc-(?!name)", self.autocomplete):
            return True
        return self.tag == "input" and bool(_CARD_NAME.search(_words(f"{self.name} {self.label}")))

    @property
    def is_secret(self) -> bool:
        """Whether what is typed here must not be kept."""
        named = self.tag == "input" and self.type in ("text", "") and bool(_PASSWORD_NAME.search(_words(self.name)))
        return self.is_password or self.is_code or self.is_card or named

    @property
    def is_long_text(self) -> bool:
        """Something one writes sentences into."""
        return self.tag == "textarea" or self.type == "richtext"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormFacts:
    """The form around an element, or (`real` false) the group of fields that plays one.

    Attributes:
      action, method: as the form says.
      search: whether it is marked as a search.
      id, heading: what the page calls it.
      fields: visible and hidden-by-style fields, at most 60; never `type=hidden`.
      submits: texts of its submit buttons.
    """

    real: bool = True
    action: str = ""
    method: str = ""
    search: bool = False
    id: str = ""
    heading: str = ""
    fields: tuple[FieldFacts, ...] = ()
    submits: tuple[str, ...] = ()

    @property
    def is_search(self) -> bool:
        """A search or filter form: nothing is posted by it."""
        if any(f.is_secret for f in self.fields):
            return False
        names = {f.name.lower() for f in self.fields}
        queries = {
            "q",
            "query",
            "search",
            "s",
            "keyword",
            "keywords",
            "term",
            "k",
            "p",
            "field-keywords",
            "search_query",
        }
        return self.search or any(f.type == "search" for f in self.fields) or bool(names & queries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElementFacts:
    """The control under the pointer or in focus, its form, and the document it stands in.

    Attributes:
      tag, type, role: of the control (the button around a clicked icon, the input of a clicked label).
      text: its visible text (the value of a button input).
      label: accessible name beside the text.
      name, autocomplete, href: attributes.
      submits: whether activating it submits its form or acts for its group.
      url, title: of the document it stands in, which may be a frame's.
      top: origin of the page around all frames.
    """

    tag: str
    type: str = ""
    role: str = ""
    text: str = ""
    label: str = ""
    name: str = ""
    autocomplete: str = ""
    href: str = ""
    submits: bool = False
    form: FormFacts | None = None
    url: str = ""
    title: str = ""
    top: str = ""

    @classmethod
    def read(cls, data: Mapping[str, Any] | None) -> ElementFacts | None:
        """The record of what `DESCRIBE_JS` returned; None if there was no element.

        Raises:
          ValueError: if it is not of that form (a page cannot cause this; a different script can).
        """
        if data is None:
            return None
        try:
            form = data.get("form")
            facts = None
            if form is not None:
                fields = tuple(FieldFacts(**f) for f in form["fields"])
                facts = FormFacts(**{**form, "fields": fields, "submits": tuple(form["submits"])})
            return cls(**{**data, "form": facts})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not what DESCRIBE_JS returns: {error}") from error

    @property
    def field(self) -> FieldFacts:
        """The control itself seen as a field."""
        return FieldFacts(
            tag=self.tag, type=self.type, name=self.name, autocomplete=self.autocomplete, label=self.label
        )

    @property
    def is_secret(self) -> bool:
        """Whether what is typed here must not be kept (`redact.redact_call` asks)."""
        return self.field.is_secret

    @property
    def is_button(self) -> bool:
        """Whether a click on it acts, rather than leads somewhere or takes text."""
        if self.tag == "a":
            return self.role == "button" or not re.match(r"https?:", self.href)
        button_input = self.tag == "input" and self.type in ("submit", "button", "image")
        return self.tag in ("button", "summary") or self.role in ("button", "menuitem") or button_input

    @property
    def caption(self) -> str:
        """What a person would read on it: its text, else its accessible name."""
        return self.text or self.label


def _words(name: str) -> str:
    """`cardNumber_1` as words, so that word-based patterns see them."""
    return re.sub(r"[_\-.\[\]]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name))
