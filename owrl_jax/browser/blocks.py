"""Pages that keep visitors out: bot walls, CAPTCHAs, refusals, login and geo walls, consent dead-ends, blank skeletons.

`classify` is conservative: it names a wall only if the page is *mainly* a wall. Words alone never suffice on a page
that has anything else to offer, so an article about Cloudflare, a shop that sells a book on CAPTCHAs or a form with a
badge in the corner are pages like others. A missed wall costs an episode; a false one hides a mistake of the policy
from the reward, which is worse.

A wall is the site's doing (owner = site), so it never reaches the loss. Not here: network failures (`egress_gate`),
pages of our own proxy (ask `EgressGate.is_own_answer` first), and what to do about a wall.
"""

from __future__ import annotations

import dataclasses
import re
from urllib.parse import urlsplit

from owrl_jax.browser import wall_words as words
from owrl_jax.browser.guard_words import LOGIN_PLACE
from owrl_jax.browser.page_facts import PageFacts
from owrl_jax.outcome import DETAILS, Outcome, Owner, Phase, Reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wall:
    """A page that is a wall.

    Attributes:
      detail: bot_wall, captcha, consent_dead_end, forbidden, rate_limited, login_wall, geo_block (reason `blocked`), or
        http_5xx, blank_page (reason `environment_error`).
      confidence: 0 to 1; nothing below 0.8 is ever returned.
      evidence: what decided, one short phrase each.
    """

    detail: str
    confidence: float
    evidence: tuple[str, ...]

    @property
    def reason(self) -> Reason:
        """The outcome reason that the detail belongs to."""
        return Reason.BLOCKED if self.detail in DETAILS[Reason.BLOCKED] else Reason.ENVIRONMENT_ERROR

    def outcome(self, *, phase: Phase = Phase.OBSERVE) -> Outcome:
        """The ending of an episode that stops at this wall."""
        message = f"{self.detail} ({self.confidence:.2f}): {'; '.join(self.evidence)}"
        return Outcome(reason=self.reason, detail=self.detail, owner=Owner.SITE, phase=phase, message=message)


_VENDOR_FRAME = re.compile(
    r"captcha-delivery\.com|/recaptcha/|hcaptcha\.com|challenges\.cloudflare\.com|arkoselabs\.com|funcaptcha|geetest"
    r"|/_Incapsula_Resource",
    re.IGNORECASE,
)
_VENDOR_SCRIPT = re.compile(
    r"/cdn-cgi/challenge-platform/h/|captcha-delivery\.com|client\.perimeterx\.net|/_Incapsula_Resource"
    r"|awswaf\.com/.*/challenge",
    re.IGNORECASE,
)
_VENDOR_HEADER = {"cf-mitigated": "challenge", "x-datadome": "protected", "x-amzn-waf-action": ""}


def classify(facts: PageFacts) -> Wall | None:
    """The wall that the page is, or None for a page like others (which includes every doubtful one)."""
    if facts.url.startswith("about:"):
        return None
    return _by_status(facts) or _challenge(facts) or _overlay(facts) or _place(facts) or _blank(facts)


def _is_bare(facts: PageFacts) -> bool:
    """Whether the page has next to nothing beside what it says: the precondition for believing its words."""
    return (
        facts.text_chars <= 1500
        and facts.links <= 8
        and facts.landmarks <= 2
        and facts.fields <= 2
        and not facts.truncated
    )


def _is_rich(facts: PageFacts) -> bool:
    """Whether there plainly is content, whatever the status line says."""
    return facts.text_chars > 4000 and facts.links > 40


def _by_status(facts: PageFacts) -> Wall | None:
    status = facts.status
    if status is None or status < 400 or _is_rich(facts):
        return None
    said = f"HTTP {status}"
    if status == 429:
        return Wall(detail="rate_limited", confidence=1.0, evidence=(said,))
    if status == 451:
        return Wall(detail="geo_block", confidence=0.95, evidence=(said,))
    if status in (401, 403, 503):
        challenge = _challenge(facts)
        if challenge is not None:
            return dataclasses.replace(challenge, confidence=1.0, evidence=(said, *challenge.evidence))
        if status != 503 and _is_bare(facts) and words.GEO.search(facts.text):
            return Wall(detail="geo_block", confidence=0.95, evidence=(said, "says so"))
    if status in (401, 403):
        return Wall(detail="forbidden", confidence=1.0, evidence=(said,))
    if status >= 500:
        return Wall(detail="http_5xx", confidence=1.0, evidence=(said,))
    return None  # 404 and its kind are pages: the agent has gone to a wrong address


def _challenge(facts: PageFacts) -> Wall | None:
    """Bot walls and CAPTCHAs: two independent signs on a bare page, or the vendor's own header."""
    evidence = []
    for header, value in _VENDOR_HEADER.items():
        found = facts.headers.get(header)
        if found is not None and value in found.lower() and (header == "cf-mitigated" or (facts.status or 200) >= 400):
            evidence.append(f"header {header}")
    sure = "header cf-mitigated" in evidence
    if not sure and not _is_bare(facts):
        return None
    # A widget counts where it is most of what there is: not a badge, not one field of a form.
    widgets = [f for f in facts.frames if _VENDOR_FRAME.search(f.src) and f.height >= 60 and f.width >= 200]
    marks = [m for m in facts.marks if m.height >= 50 and m.width >= 150]
    if (widgets or marks) and facts.fields <= 1:
        evidence.append("challenge widget")
    if any(_VENDOR_SCRIPT.search(s) for s in facts.scripts):
        evidence.append("challenge script")
    if words.CHALLENGE_TITLE.match(facts.title):
        evidence.append("title of a challenge")
    if words.CHALLENGE.search(facts.text[:600]):
        evidence.append("words of a challenge")
    # Title and words may both be an article's; an article is not this short and offers a way on.
    strong = sum(e in ("challenge widget", "challenge script") or e.startswith("header") for e in evidence)
    enough = (
        sure or (len(evidence) >= 2 and (strong or facts.text_chars <= 900)) or (strong and facts.text_chars <= 200)
    )
    if not enough and "words of a challenge" in evidence:
        enough = facts.text_chars <= 500 and facts.links <= 3 and facts.landmarks == 0
    if not enough:
        return None
    captcha = "challenge widget" in evidence or bool(words.CAPTCHA.search(facts.text[:1500]))
    confidence = 1.0 if sure else 0.95 if len(evidence) >= 2 else 0.85
    return Wall(detail="captcha" if captcha else "bot_wall", confidence=confidence, evidence=tuple(evidence))


def _overlay(facts: PageFacts) -> Wall | None:
    """Something over the page that cannot be answered: consent without a button, a login without a way round it."""
    overlay = facts.overlay
    if overlay is None or overlay.share < 0.8 or overlay.framed:
        return None
    # A caption without letters is a glyph, and a glyph on an overlay closes it.
    if any(words.WAY_OUT.search(action) or not re.search(r"[^\W\d_]{2}", action) for action in overlay.actions):
        return None
    covered = f"{overlay.share:.0%} of the view is covered"
    if overlay.passwords or words.LOGIN.search(overlay.text):
        return Wall(detail="login_wall", confidence=0.85, evidence=(covered, "asks to sign in", "no way round it"))
    if words.CONSENT.search(overlay.text) and not overlay.actions and not overlay.fields:
        return Wall(detail="consent_dead_end", confidence=0.85, evidence=(covered, "asks for consent", "no button"))
    return None


def _place(facts: PageFacts) -> Wall | None:
    """Login walls and geo blocks that are pages of their own."""
    if facts.text_chars <= 1500 and facts.links <= 25 and not facts.truncated:
        if facts.links <= 8 and facts.fields == 0 and words.GEO.search(facts.text[:1000]):
            return Wall(detail="geo_block", confidence=0.9, evidence=("says it is not available here",))
        asked, got = _path(facts.requested_url), _path(facts.url)
        sent = bool(facts.requested_url) and not LOGIN_PLACE.search(asked) and bool(LOGIN_PLACE.search(got))
        if facts.passwords and sent:
            return Wall(detail="login_wall", confidence=0.95, evidence=("redirected to a login page", "password field"))
        if (
            facts.passwords
            and facts.links <= 12
            and words.LOGIN.search(facts.text[:600])
            and not LOGIN_PLACE.search(asked or got)
        ):
            return Wall(detail="login_wall", confidence=0.85, evidence=("asks to sign in first", "password field"))
    return None


def _blank(facts: PageFacts) -> Wall | None:
    """Nothing to see and nothing to do, though the page has loaded. A PDF has no elements and is no blank page."""
    if "html" not in facts.headers.get("content-type", "text/html"):
        return None
    if facts.truncated or facts.text_chars > 20 or (facts.text_chars > 0 and facts.elements < 10):
        return None
    if facts.links or facts.fields or facts.media or facts.buttons or any(f.share > 0.02 for f in facts.frames):
        return None
    what = f"{facts.elements} elements, {facts.text_chars} characters, no picture, nothing to use"
    return Wall(detail="blank_page", confidence=0.9, evidence=(what,))


def _path(url: str) -> str:
    try:
        return urlsplit(url).path
    except ValueError:
        return ""
