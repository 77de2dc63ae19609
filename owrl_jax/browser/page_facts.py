"""What a wall classifier needs to know of a page, collected in one evaluate.

`COLLECT_JS` is an expression that returns plain JSON. It stops at a number of nodes and after a number of milliseconds,
so a huge page costs no more than a large one; `truncated` says that it stopped. Evaluate it in an isolated world of the
main frame after the page has settled. What it returns is the page's word; it is judged in `blocks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

COLLECT_JS = r"""(() => {
  const MAX_NODES = 20000, MAX_MS = 60, MAX_TEXT = 20000, SAMPLE = 3000, started = performance.now();
  const cut = (s, n) => String(s == null ? '' : s).replace(/\s+/g, ' ').trim().slice(0, n);
  const W = innerWidth || 1, H = innerHeight || 1, area = W * H;
  const box = e => e.getBoundingClientRect();
  const shown = e => e.checkVisibility ? e.checkVisibility({opacityProperty: true, visibilityProperty: true})
    : !!e.getClientRects().length;
  const size = e => ({width: Math.round(box(e).width), height: Math.round(box(e).height)});
  const share = r => Math.max(0, Math.min(r.right, W) - Math.max(r.left, 0))
    * Math.max(0, Math.min(r.bottom, H) - Math.max(r.top, 0)) / area;
  const out = {url: location.href, title: cut(document.title, 300), text: '', text_chars: 0, elements: 0, links: 0,
    buttons: [], fields: 0, passwords: 0, media: 0, landmarks: 0, frames: [], scripts: [], marks: [], overlay: null,
    truncated: false};
  if (!document.body) return out;
  // One walk in document order: text, controls, media.
  const WIDGET = /recaptcha|hcaptcha|turnstile|captcha|arkoselabs|funcaptcha|geetest|px-captcha|challenge/i;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, {
    acceptNode: n => n.nodeType === 1 && (/^(SCRIPT|STYLE|NOSCRIPT|TEMPLATE)$/.test(n.tagName) || !shown(n))
      && getComputedStyle(n).display !== 'contents' ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT});
  let seen = 0, text = '';
  for (let n = walker.nextNode(); n; n = walker.nextNode()) {
    const late = ++seen % 200 === 0 && performance.now() - started > MAX_MS;
    if (seen > MAX_NODES || late) { out.truncated = true; break; }
    if (n.nodeType === 3) {
      const t = n.data.slice(0, MAX_TEXT).replace(/\s+/g, ' ').trim();
      if (t) { out.text_chars += t.length; if (text.length < SAMPLE) text += t + ' '; }
      continue;
    }
    out.elements++;
    const tag = n.tagName;
    if (tag === 'A' && n.href) out.links++;
    else if (tag === 'BUTTON' || n.getAttribute('role') === 'button'
        || (tag === 'INPUT' && /^(submit|button)$/.test(n.type))) {
      if (out.buttons.length < 40) out.buttons.push(cut(tag === 'INPUT' ? n.value || 'Submit'
        : n.textContent || n.getAttribute('aria-label'), 60));
    } else if (tag === 'INPUT' || tag === 'TEXTAREA' || tag === 'SELECT') {
      if (n.type !== 'hidden') { out.fields++; if (n.type === 'password') out.passwords++; }
    } else if (/^(IMG|VIDEO|CANVAS|svg|EMBED|OBJECT)$/.test(tag)) {
      const r = box(n); if (r.width * r.height >= 32 * 32) out.media++;
    } else if (/^(ARTICLE|NAV|FOOTER|HEADER|ASIDE)$/.test(tag)) out.landmarks++;
    else if (tag === 'IFRAME' && out.frames.length < 20) {
      out.frames.push({src: cut(n.src, 300), ...size(n), share: share(box(n))});
    }
    const mark = ['id', 'class', 'action'].map(a => n.getAttribute(a) || '').join(' ');
    if (out.marks.length < 10 && (WIDGET.test(mark) || n.hasAttribute('data-sitekey')))
      out.marks.push({name: cut(mark, 120), ...size(n)});
  }
  out.text = cut(text, SAMPLE);
  out.scripts = [...document.scripts].slice(0, 80).map(s => cut(s.src, 200)).filter(Boolean).slice(0, 40);
  // What covers the view: the fixed or absolute box under most of 25 points.
  const hits = new Map();
  for (let i = 0; i < 5; i++) for (let j = 0; j < 5; j++) {
    let top = null, painted = false;
    let e = document.elementFromPoint((i + .5) * W / 5, (j + .5) * H / 5);
    for (let k = 0; e && k < 40; e = e.parentElement, k++) {
      const s = getComputedStyle(e);
      if (!painted && s.backgroundImage.includes('url(')) { painted = true; out.media++; }
      if (s.position === 'fixed' || (s.position === 'absolute' && +s.zIndex >= 100)) top = e;
      if (e.tagName === 'DIALOG' && e.open) top = e;
    }
    if (top) hits.set(top, (hits.get(top) || 0) + 1);
  }
  const most = [...hits].sort((a, b) => b[1] - a[1])[0];
  if (most && most[1] >= 10) {
    const e = most[0];
    const acts = [...e.querySelectorAll('button,a[href],[role=button],input[type=submit],input[type=button]')]
      .slice(0, 60).filter(shown);
    const caption = a => cut([a.value || a.innerText, a.getAttribute('aria-label'), a.title].filter(Boolean).join(' ')
      || 'icon', 60);
    const frames = [...e.querySelectorAll('iframe')].filter(shown);
    out.overlay = {share: most[1] / 25, text: cut((e.innerText || '').slice(0, 6000), 1500),
      actions: acts.slice(0, 30).map(caption), framed: frames.some(f => share(box(f)) > .05),
      fields: e.querySelectorAll('input:not([type=hidden]),textarea,select').length,
      passwords: e.querySelectorAll('input[type=password]').length};
  }
  return out;
})()"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameFacts:
    """A visible iframe: address, size in CSS pixels, share of the viewport it covers (0 to 1)."""

    src: str
    width: int
    height: int
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkFacts:
    """An element whose id, class or form action names a challenge, and its size in CSS pixels."""

    name: str
    width: int
    height: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlayFacts:
    """What lies over the page: share of the viewport, text, captions of what can be activated in it.

    `framed` says that a sizeable iframe is inside, whose content is not seen here.
    """

    share: float
    text: str
    actions: tuple[str, ...]
    fields: int
    framed: bool
    passwords: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageFacts:
    """One settled page. Only what is visible counts.

    Attributes:
      url, title: of the main document.
      status: HTTP status of the main document's response, None if unknown.
      headers: its headers, lower-case names.
      requested_url: what was asked for before redirects, empty if unknown.
      text: the first 3,000 characters; text_chars: how many there are (up to where collecting stopped).
      elements, links, fields, passwords, media, landmarks: counts; `fields` are inputs other than buttons, `media`
        images, videos and drawings of at least 32×32 pixels, `landmarks` article, nav, header, footer, aside.
      buttons: captions, at most 40.
      frames, scripts, marks, overlay: see there.
      truncated: whether collecting stopped before the end of the page.
    """

    url: str
    title: str = ""
    status: int | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    requested_url: str = ""
    text: str = ""
    text_chars: int = 0
    elements: int = 0
    links: int = 0
    fields: int = 0
    passwords: int = 0
    media: int = 0
    landmarks: int = 0
    buttons: tuple[str, ...] = ()
    frames: tuple[FrameFacts, ...] = ()
    scripts: tuple[str, ...] = ()
    marks: tuple[MarkFacts, ...] = ()
    overlay: OverlayFacts | None = None
    truncated: bool = False

    @classmethod
    def read(
        cls,
        data: Mapping[str, Any],
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        requested_url: str = "",
    ) -> PageFacts:
        """The record of what `COLLECT_JS` returned.

        Raises:
          ValueError: if it is not of that form.
        """
        try:
            overlay = data["overlay"]
            fields = {
                **data,
                "buttons": tuple(data["buttons"]),
                "scripts": tuple(data["scripts"]),
                "frames": tuple(FrameFacts(**f) for f in data["frames"]),
                "marks": tuple(MarkFacts(**m) for m in data["marks"]),
                "overlay": OverlayFacts(**{**overlay, "actions": tuple(overlay["actions"])}) if overlay else None,
            }
            return cls(status=status, headers=dict(headers or {}), requested_url=requested_url, **fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not what COLLECT_JS returns: {error}") from error
