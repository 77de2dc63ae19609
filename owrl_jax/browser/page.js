// What the sandbox asks of a page, in one object. It runs in an isolated world: the page can neither see it nor replace
// what it calls. Every function is bounded, linear in what it looks at, and leaves the page as it found it, except for
// those that act (scroll, choose, assign, selectAll, guardPicker). Nothing here waits.
(() => {
  "use strict";
  const TEXT_TYPES = new Set(["", "text", "search", "url", "tel", "email", "password", "number"]);
  const CHOICE_TYPES = new Set(["date", "time", "datetime-local", "month", "week", "color", "range"]);
  const ROLES = new Set([
    "button", "link", "checkbox", "radio", "switch", "tab", "option", "menuitem", "menuitemcheckbox", "menuitemradio",
    "combobox", "listbox", "textbox", "searchbox", "slider", "spinbutton", "treeitem", "gridcell", "alert", "dialog",
    "alertdialog", "status", "tooltip",
  ]);
  const INTERACTIVE = new Set(["a", "button", "input", "select", "textarea", "summary", "option", "label", "details"]);
  const SKIPPED = new Set(["SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE", "HEAD", "META", "LINK", "TITLE"]);
  const SECRET = /^(cc-|one-time-code|current-password|new-password)/;

  const tagOf = (el) => (el.localName || "").toLowerCase();
  const attr = (el, name) => (el.getAttribute && el.getAttribute(name)) || "";
  const up = (el) => el.parentElement || el.getRootNode?.().host || null;
  const squeeze = (text, n) => String(text || "").slice(0, 4 * n).replace(/\s+/g, " ").trim().slice(0, n);

  // The first n characters that can be read in an element, without laying out or copying the rest.
  function shortText(el, n) {
    let out = "", seen = 0;
    const walk = document.createTreeWalker(el, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT, (node) =>
      node.nodeType === 1 && SKIPPED.has(node.tagName) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
    for (let node = walk.nextNode(); node && out.length < n && seen < 400; node = walk.nextNode(), seen++) {
      if (node.nodeType === 3) out += " " + node.data.slice(0, 4 * n);
      else if (node.tagName === "IMG" && node.alt) out += " " + node.alt;
      out = out.length > 4 * n ? out.slice(0, 4 * n) : out;
    }
    return squeeze(out, n);
  }

  function labelOf(el, n) {
    const tag = tagOf(el);
    const ids = attr(el, "aria-labelledby").split(/\s+/).filter(Boolean).slice(0, 3);
    const byId = ids.map((id) => el.getRootNode().getElementById?.(id)).filter(Boolean).map((e) => shortText(e, n)).join(" ");
    const named = attr(el, "aria-label") || byId;
    if (named) return squeeze(named, n);
    if (tag === "input" && ["submit", "button", "reset"].includes(el.type)) return squeeze(el.value || el.type, n);
    if (["input", "select", "textarea"].includes(tag)) {
      const label = el.labels && el.labels[0] ? shortText(el.labels[0], n) : "";
      return squeeze(label || attr(el, "placeholder") || attr(el, "title") || attr(el, "name"), n);
    }
    return shortText(el, n) || squeeze(attr(el, "alt") || attr(el, "title"), n);
  }

  function interactive(el) {
    return INTERACTIVE.has(tagOf(el)) || ROLES.has(attr(el, "role")) || el.hasAttribute("onclick") ||
      el.isContentEditable || (el.hasAttribute("tabindex") && el.tabIndex >= 0);
  }

  // How text gets into an element: text, multiline, rich, select, choice, none; unknown where it cannot be told.
  function editableKind(el) {
    const tag = tagOf(el);
    if (tag === "textarea") return "multiline";
    if (tag === "select") return "select";
    if (tag === "input") return TEXT_TYPES.has(el.type) ? "text" : CHOICE_TYPES.has(el.type) ? "choice" : "none";
    if (el.isContentEditable || el.ownerDocument?.designMode === "on") return "rich";
    if (["canvas", "embed", "object", "iframe", "frame"].includes(tag)) return "unknown";
    if (["textbox", "searchbox", "combobox"].includes(attr(el, "role"))) return "unknown";
    return tag.includes("-") && !el.shadowRoot ? "unknown" : "none";
  }

  function secret(el) {
    return el.type === "password" || SECRET.test(attr(el, "autocomplete").trim().split(/\s+/).pop() || "");
  }

  function valueOf(el) {
    const tag = tagOf(el);
    if (tag === "select") {
      return [...el.selectedOptions].slice(0, 20).map((o) => squeeze(o.label || o.text, 80)).join(", ");
    }
    if (tag === "input" || tag === "textarea") return String(el.value).slice(0, 12000);
    if (el.isContentEditable || el.ownerDocument?.designMode === "on") return String(el.innerText || "").slice(0, 12000);
    return "";
  }

  // Where a link leads. In SVG `href` is an object that holds the text as it was written.
  function linkOf(el) {
    const href = el.href;
    if (typeof href === "string") return href;
    try {
      return new URL(href.baseVal, document.baseURI).href;
    } catch {
      return "";
    }
  }

  function facts(el) {
    const tag = tagOf(el), kind = editableKind(el), hidden = secret(el);
    const out = {
      tag, type: el.type && typeof el.type === "string" ? el.type : attr(el, "type"), role: attr(el, "role"),
      label: labelOf(el, 80), id: el.id || "", name: attr(el, "name"), href: tag === "a" ? linkOf(el) : "",
      autocomplete: attr(el, "autocomplete"), inputmode: attr(el, "inputmode"), placeholder: attr(el, "placeholder"),
      maxlength: Number.isInteger(el.maxLength) && el.maxLength >= 0 ? el.maxLength : null,
      title: attr(el, "title"), classes: attr(el, "class").slice(0, 200), target: attr(el, "target"),
      kind, secret: hidden, value: hidden ? "" : valueOf(el), length: kind === "none" ? 0 : valueOf(el).length,
      disabled: !!el.disabled || attr(el, "aria-disabled") === "true", readonly: !!el.readOnly,
      multiple: !!el.multiple, dropdown: tag === "select" && !el.multiple && el.size <= 1,
      checked: ["checkbox", "radio"].includes(el.type) && tag === "input" ? el.checked
        : attr(el, "aria-checked") ? attr(el, "aria-checked") === "true" : null,
      expanded: attr(el, "aria-expanded") || (tag === "details" ? String(el.open) : ""),
      pressed: attr(el, "aria-pressed"), selected: attr(el, "aria-selected"),
      editing: kind === "rich" && !!el.isContentEditable,
    };
    if (tag === "select") {
      out.options = [...el.options].slice(0, 60).map((o) => ({
        label: squeeze(o.label || o.text, 80), value: o.value.slice(0, 80),
        disabled: o.disabled || !!o.parentElement.disabled,
      }));
      out.optionCount = el.options.length;
    }
    return out;
  }

  // The element itself, and the nearest one around it that one can interact with.
  function describe(el) {
    if (el.nodeType === 3) el = el.parentElement;
    if (!el || el.nodeType !== 1) return null;
    let around = el;
    for (let n = 0; around && n < 30 && !interactive(around); n++) around = up(around);
    const control = around && interactive(around) ? (tagOf(around) === "label" && around.control) || around : null;
    const out = facts(control || el);
    out.inner = control && control !== el ? { tag: tagOf(el), label: labelOf(el, 60) } : null;
    out.interactive = !!control;
    out.attached = el.isConnected;
    return out;
  }

  const host = (el) => {
    while (el && el.parentElement && el.parentElement.isContentEditable) el = el.parentElement;
    return el;
  };
  const control = (el) => {
    if (el.nodeType === 3) el = el.parentElement;
    let around = el;
    for (let n = 0; around && n < 30 && !interactive(around); n++) around = up(around);
    return around ? (tagOf(around) === "label" && around.control) || around : el;
  };

  function innerDocument(el) {
    if (!["iframe", "frame", "object"].includes(tagOf(el))) return null;
    try { return el.contentDocument; } catch { return null; }
  }

  // The deepest element under a point, through open shadow roots and frames of this process.
  function pick(x, y) {
    let root = document, offsetX = 0, offsetY = 0, el = null;
    for (let depth = 0; depth < 20; depth++) {
      const next = root.elementFromPoint(x - offsetX, y - offsetY);
      if (!next || next === el) break;
      el = next;
      const inner = innerDocument(el);
      if (inner) {
        const [ox, oy] = origin(el);
        offsetX += ox;
        offsetY += oy;
        root = inner;
      } else if (el.shadowRoot) root = el.shadowRoot;
      else break;
    }
    return el;
  }

  // Where a frame's own coordinates begin, in those of its parent.
  function origin(el) {
    const box = el.getBoundingClientRect(), style = getComputedStyle(el);
    const pad = (side) => parseFloat(side) || 0;
    return [box.x + el.clientLeft + pad(style.paddingLeft), box.y + el.clientTop + pad(style.paddingTop)];
  }

  // The deepest focused element, through open shadow roots and frames of this process; null if nothing has the focus.
  function focused() {
    let el = document.activeElement;
    for (let depth = 0; el && depth < 20; depth++) {
      const inner = innerDocument(el);
      const within = inner && (inner.designMode === "on" ? inner.body : inner.activeElement);
      const next = inner ? within : el.shadowRoot?.activeElement;
      if (!next) break;
      el = next;
    }
    if (!el || el === el.ownerDocument.documentElement) return null;
    if (tagOf(el) === "body" && !el.isContentEditable && el.ownerDocument.designMode !== "on") return null;
    return el;
  }

  // ---- readiness -------------------------------------------------------------------------------------------------

  const watch = { count: 0, last: performance.now(), observer: null };
  function observe() {
    if (watch.observer || !document.documentElement) return;
    watch.observer = new MutationObserver((records) => {
      // A style attribute that changes is an animation; content does not arrive that way.
      if (records.some((r) => r.type !== "attributes" || r.attributeName !== "style")) {
        watch.count += records.length;
        watch.last = performance.now();
      }
    });
    watch.observer.observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
  }

  const inView = (b) =>
    b.width > 1 && b.height > 1 && b.bottom > 0 && b.right > 0 && b.top < innerHeight && b.left < innerWidth;

  function pendingImages() {
    let pending = 0;
    for (let i = 0, n = Math.min(document.images.length, 400); i < n && pending < 5; i++) {
      const image = document.images[i];
      if (!image.complete && (image.currentSrc || image.src) && inView(image.getBoundingClientRect())) pending++;
    }
    return pending;
  }

  function probe() {
    observe();
    return {
      url: location.href, title: document.title.slice(0, 500), state: document.readyState,
      fonts: document.fonts ? document.fonts.status : "loaded", images: pendingImages(),
      mutations: watch.count, quiet: performance.now() - watch.last,
      scroll: [Math.round(scrollX), Math.round(scrollY)], width: innerWidth, height: innerHeight, dpr: devicePixelRatio,
      refresh: !!document.querySelector("meta[http-equiv='refresh' i]"),
    };
  }

  // ---- what is in view ------------------------------------------------------------------------------------------

  function snapshot(budgetMs, limit) {
    const start = performance.now(), items = [], seen = new Set();
    let hash = 0, nodes = 0, truncated = false, chars = 0;
    const mix = (text) => { for (let i = 0; i < text.length; i++) hash = (Math.imul(hash, 31) + text.charCodeAt(i)) | 0; };
    const ownText = (el) => {
      let out = "";
      for (let c = el.firstChild; c && out.length < 200; c = c.nextSibling) {
        if (c.nodeType === 3) out += c.data.slice(0, 400);
      }
      return squeeze(out, 60);
    };
    const hasText = (el) => {
      for (let c = el.firstChild, n = 0; c && n < 50; c = c.nextSibling, n++) {
        if (c.nodeType === 3 && /\S/.test(c.data)) return true;
      }
      return false;
    };
    const filter = (el) => (SKIPPED.has(el.tagName) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
    const isShown = (el, dx, dy) => {
      const b = el.getBoundingClientRect();
      return b.width > 1 && b.height > 1 && b.bottom + dy > 0 && b.right + dx > 0 && b.top + dy < innerHeight &&
        b.left + dx < innerWidth && el.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
    };
    const visit = (root, dx, dy, depth) => {
      const walk = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT, filter);
      for (let el = walk.nextNode(); el; el = walk.nextNode()) {
        if (truncated) return;
        if (items.length >= limit || nodes > 60000 || ((++nodes & 63) === 0 && performance.now() - start > budgetMs)) {
          truncated = true;
          return;
        }
        // Cheapest tests first: most elements of a long page hold no text of their own, or are out of view.
        const tag = tagOf(el), role = el.hasAttribute("role") ? attr(el, "role") : "";
        const active = INTERACTIVE.has(tag) || ROLES.has(role) || el.hasAttribute("onclick");
        if ((active || tag === "img" || hasText(el)) && tag !== "option" && isShown(el, dx, dy)) {
          const label = ownText(el) || (active || tag === "img" ? labelOf(el, 60) : "");
          if (label || active) {
            const kind = ROLES.has(role) ? role : active || tag === "img" ? tag : "text";
            const item = [kind, tag === "input" ? el.type : "", label];
            items.push(item);
            mix(item.join("|"));
            chars += label.length;
          }
          if (active) {
            mix(secret(el) ? String(valueOf(el).length) : valueOf(el));
            mix(`${el.checked}|${attr(el, "aria-expanded")}|${attr(el, "aria-pressed")}|${attr(el, "aria-selected")}`);
          }
        }
        if (el.shadowRoot && depth < 8) visit(el.shadowRoot, dx, dy, depth + 1);
        const inner = depth < 4 && innerDocument(el);
        if (inner && !seen.has(inner)) {
          seen.add(inner);
          const [ox, oy] = origin(el);
          visit(inner, dx + ox, dy + oy, depth + 1);
        }
      }
    };
    if (document.documentElement) visit(document.documentElement, 0, 0, 0);
    mix(`${Math.round(scrollX)},${Math.round(scrollY)}`);
    return { items, hash: String(hash), truncated, nodes, chars, ms: performance.now() - start };
  }

  // ---- acting ---------------------------------------------------------------------------------------------------

  function canScroll(el, horizontal) {
    const room = horizontal ? el.scrollWidth - el.clientWidth : el.scrollHeight - el.clientHeight;
    if (room <= 1) return false;
    if (el === el.ownerDocument.scrollingElement) {
      const style = getComputedStyle(el);
      return (horizontal ? style.overflowX : style.overflowY) !== "hidden";
    }
    return /auto|scroll|overlay/.test(horizontal ? getComputedStyle(el).overflowX : getComputedStyle(el).overflowY);
  }

  function scrollerAt(el, horizontal) {
    for (let n = 0; el && n < 200; n++, el = up(el)) if (canScroll(el, horizontal)) return el;
    return null;
  }

  // The page's own scroller, or, where the page itself cannot scroll, the largest scrollable area in view.
  function mainScroller(horizontal) {
    const page = document.scrollingElement || document.documentElement;
    if (page && canScroll(page, horizontal)) return page;
    let best = null, size = 0;
    for (const fx of [0.5, 0.25, 0.75]) for (const fy of [0.5, 0.25, 0.75]) {
      const el = scrollerAt(pick(innerWidth * fx, innerHeight * fy), horizontal);
      const area = el ? el.clientWidth * el.clientHeight : 0;
      if (area > size) [best, size] = [el, area];
    }
    return best;
  }

  function scroll(el, direction, amount) {
    const horizontal = direction === "left" || direction === "right";
    const sign = direction === "up" || direction === "left" ? -1 : 1;
    const scroller = el ? scrollerAt(el, horizontal) || mainScroller(horizontal) : mainScroller(horizontal);
    if (!scroller) return { scrollable: false };
    const size = horizontal ? scroller.clientWidth : scroller.clientHeight;
    const room = (horizontal ? scroller.scrollWidth : scroller.scrollHeight) - size;
    const place = () => Math.abs(horizontal ? scroller.scrollLeft : scroller.scrollTop);
    const before = place();
    const step = Math.round(sign * amount * size);
    scroller.scrollBy({ left: horizontal ? step : 0, top: horizontal ? 0 : step, behavior: "instant" });
    const after = place();
    const page = scroller === scroller.ownerDocument.scrollingElement;
    return {
      scrollable: true, page, label: page ? "" : labelOf(scroller, 40), tag: tagOf(scroller), moved: after - before,
      position: room > 0 ? after / room : 0, start: after <= 1, end: after >= room - 1,
      screens: (room + size) / Math.max(size, 1),
    };
  }

  function announce(el) {
    el.dispatchEvent(new Event("input", { bubbles: true, composed: true }));
    el.dispatchEvent(new Event("change", { bubbles: true }));
  }

  // Chooses the option that a text names: by label, by value, or by the one label that begins with or contains it.
  function choose(el, text) {
    const fold = (t) => squeeze(t, 400).toLowerCase(), wanted = fold(text);
    const options = [...el.options].filter((o) => !o.disabled && !o.parentElement.disabled);
    const tests = [
      (o) => fold(o.label || o.text) === wanted, (o) => fold(o.value) === wanted,
      (o) => wanted && fold(o.label || o.text).startsWith(wanted),
      (o) => wanted && fold(o.label || o.text).includes(wanted),
    ];
    for (const test of tests) {
      const hits = options.filter(test);
      if (hits.length > 1 && tests.indexOf(test) > 1) {
        return { chosen: null, ambiguous: hits.slice(0, 10).map((o) => squeeze(o.label || o.text, 80)) };
      }
      if (hits.length) {
        if (el.multiple) for (const o of el.options) o.selected = false;
        hits[0].selected = true;
        announce(el);
        return { chosen: squeeze(hits[0].label || hits[0].text, 80), ambiguous: [] };
      }
    }
    return { chosen: null, ambiguous: [] };
  }

  // Gives a date, time, colour or range input its value; a value it does not accept leaves the old one in place.
  function assign(el, text) {
    const setter = Object.getOwnPropertyDescriptor(el.ownerDocument.defaultView.HTMLInputElement.prototype, "value").set;
    const before = el.value;
    setter.call(el, text);
    const taken = el.type === "range" ? el.value !== "" && Number(el.value) === Number(text)
      : el.type === "color" ? el.value.toLowerCase() === text.toLowerCase() : el.value !== "" || text === "";
    const real = el.value;
    if (!taken && el.type !== "range") setter.call(el, before);
    else announce(el);
    return { taken, value: el.value, tried: real, min: el.min || "", max: el.max || "", step: el.step || "" };
  }

  function selectAll(el) {
    if (el.select && tagOf(el) !== "select") { el.select(); return true; }
    const doc = el.ownerDocument, editing = el.isContentEditable ? host(el) : doc.body;
    const selection = doc.getSelection();
    if (!selection || !editing) return false;
    selection.selectAllChildren(editing);
    return true;
  }

  // A native popup (list of options, calendar, colour chooser) is painted but takes no clicks here, and it swallows the
  // next one. For the coming click the control is focused and its popup stays shut. Page handlers still run.
  function guardPicker(el) {
    const type = tagOf(el) === "select" ? "mousedown" : "click";
    const guard = (event) => {
      if (!event.defaultPrevented) { event.preventDefault(); el.focus({ preventScroll: true }); }
    };
    el.addEventListener(type, guard, { once: true });
    setTimeout(() => el.removeEventListener(type, guard), 3000);
  }

  observe();
  return {
    describe, facts, pick, origin, focused, probe, snapshot, scroll, choose, assign, selectAll, guardPicker, control,
  };
})()
