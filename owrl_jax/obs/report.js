// The report's behaviour: curves that can be read off, a filtered list of episodes, and a viewer of one episode or a
// whole group. Data stands in JSON blocks of the page; words of episodes are set as text, never as markup. Whole
// episodes are <template>s that were escaped when the page was written, and are copied as they are.
"use strict";
(() => {
  const data = (id) => JSON.parse(document.getElementById(id).textContent);
  const make = (tag, text, className) => {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = text;
    if (className) node.className = className;
    return node;
  };

  // --- Curves: the nearest point under the mouse -------------------------------------------------------------------
  const charts = data("charts");
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const curves = charts[Number(figure.dataset.chart)];
    const svg = figure.querySelector("svg");
    const readout = figure.querySelector(".readout");
    const cursor = svg.querySelector(".cursor");
    const rest = readout.textContent;
    svg.addEventListener("mousemove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const said = [];
      let where = null;
      for (const curve of curves) {
        let best = -1;
        for (let i = 0; i < curve.at.length; i++) {
          if (best < 0 || Math.abs(curve.at[i] - at) < Math.abs(curve.at[best] - at)) best = i;
        }
        if (best < 0) continue;
        where = where ?? { at: curve.at[best], x: curve.x[best] };
        said.push(curves.length > 1 ? `${curve.label} ${curve.y[best]}` : curve.y[best]);
      }
      if (!where) return;
      cursor.setAttribute("x1", where.at);
      cursor.setAttribute("x2", where.at);
      readout.textContent = `${where.x}: ${said.join(", ")}`;
    });
    svg.addEventListener("mouseleave", () => {
      cursor.setAttribute("x1", -9);
      cursor.setAttribute("x2", -9);
      readout.textContent = rest;
    });
  }

  // --- Settings: a filter over names and values --------------------------------------------------------------------
  const settings = document.getElementById("settings-filter");
  if (settings) {
    settings.addEventListener("input", () => {
      const wanted = settings.value.toLowerCase();
      for (const row of document.querySelectorAll("#settings-table tr")) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
      }
    });
  }

  // --- Episodes: the list ------------------------------------------------------------------------------------------
  if (!document.getElementById("episodes")) return;
  const episodes = data("episodes");
  const pictures = data("pictures");
  const byNumber = new Map(episodes.map((e) => [e.number, e]));
  const filters = document.getElementById("filters");
  const search = filters.querySelector("input");
  const selects = [...filters.querySelectorAll("select")];
  const body = document.querySelector("#rows tbody");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const viewer = document.getElementById("viewer");
  const PAGE = 200;
  let found = episodes;
  let shown = PAGE;
  let open = null; // {number, mode}

  for (const select of selects) {
    const values = [...new Set(episodes.map((e) => String(e[select.dataset.field] ?? "")))];
    values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    for (const value of values) {
      const option = make("option", value === "" ? "none" : value);
      option.value = `=${value}`;
      select.append(option);
    }
    select.addEventListener("change", refilter);
  }
  search.addEventListener("input", refilter);
  filters.querySelector("button").addEventListener("click", () => {
    search.value = "";
    for (const select of selects) select.value = "";
    refilter();
  });
  more.addEventListener("click", () => {
    shown += PAGE;
    list();
  });

  function refilter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    found = episodes.filter(
      (e) =>
        selects.every((s) => s.value === "" || s.value === `=${e[s.dataset.field] ?? ""}`) &&
        words.every((w) => `${e.task} ${e.instruction} ${e.group} ${e.outcome}`.toLowerCase().includes(w)),
    );
    shown = PAGE;
    list();
  }

  const signed = (v) => (v === null ? "–" : (v > 0 ? "+" : "") + v.toFixed(2));

  function list() {
    body.replaceChildren();
    for (const e of found.slice(0, shown)) {
      const row = make("tr");
      row.dataset.number = e.number;
      row.tabIndex = 0;
      const cell = (text, className) => row.append(make("td", text, className));
      cell(e.iteration ?? "–", "n");
      cell(e.instruction, "task");
      row.lastChild.title = e.task;
      cell(e.site);
      cell(e.outcome);
      const verdict = make("td");
      if (e.verdict) verdict.append(make("span", e.verdict, `badge ${e.verdict}`));
      row.append(verdict);
      cell(e.reward === null ? "–" : String(e.reward), "n");
      cell(signed(e.advantage), "n");
      cell(e.turns, "n");
      cell(e.seconds === null ? "–" : `${e.seconds.toFixed(1)} s`, "n");
      cell(e.full ? "●" : "", "n");
      body.append(row);
    }
    const most = Math.min(shown, found.length);
    count.textContent = `${found.length} of ${episodes.length} episodes` + (most < found.length ? `, first ${most}` : "");
    more.hidden = found.length <= shown;
    mark();
  }

  function mark() {
    for (const row of body.children) row.classList.toggle("open", open !== null && Number(row.dataset.number) === open.number);
  }

  function chosen(event) {
    const row = event.target.closest("tr");
    if (row) show(Number(row.dataset.number), open ? open.mode : "episode");
  }
  body.addEventListener("click", chosen);
  body.addEventListener("keydown", (event) => {
    if (event.key === "Enter") chosen(event);
  });

  // --- The viewer --------------------------------------------------------------------------------------------------
  function whole(number) {
    const template = document.getElementById(`episode-${number}`);
    if (!template) {
      const e = byNumber.get(number);
      const note = make("p", null, "muted");
      note.textContent =
        `The turns of this episode are not in this file. To have them: owrl report RUN --groups '${e.group}'`;
      return note;
    }
    const copy = template.content.cloneNode(true);
    for (const image of copy.querySelectorAll("img[data-shot]")) {
      const source = pictures[image.dataset.shot];
      if (source) image.src = source;
      else image.replaceWith(make("div", "this screenshot is not in this file", "none"));
    }
    return copy;
  }

  function step(by) {
    const at = found.findIndex((e) => e.number === open.number);
    const next = found[at + by];
    if (next) show(next.number, open.mode);
  }

  function show(number, mode, keepPlace) {
    const e = byNumber.get(number);
    if (!e) return;
    open = { number, mode };
    viewer.replaceChildren();
    const bar = make("div", null, "bar-row");
    const button = (text, action, on, off) => {
      const node = make("button", text, on ? "on" : "");
      node.type = "button";
      node.disabled = Boolean(off);
      node.addEventListener("click", action);
      bar.append(node);
    };
    const siblings = episodes.filter((s) => s.group === e.group);
    const at = found.findIndex((f) => f.number === number);
    button("← previous", () => step(-1), false, at <= 0);
    button("next →", () => step(1), false, at < 0 || at >= found.length - 1);
    button("this episode", () => show(number, "episode"), mode === "episode");
    button(`its group (${siblings.length})`, () => show(number, "group"), mode === "group");
    bar.append(make("span", e.trained, "count"));
    viewer.append(bar, make("h3", e.instruction, "ask"));
    if (mode === "group") {
      const sides = make("div", null, "sides");
      const rows = 3 + Math.max(...siblings.map((s) => s.turns)); // head, verdict, turns, the end
      sides.style.gridTemplateRows = `repeat(${rows}, auto)`;
      siblings.sort((a, b) => a.index - b.index || a.attempt - b.attempt);
      for (const s of siblings) {
        const side = make("div", null, "side");
        side.style.gridRow = `span ${rows}`;
        const head = make("div", null, "head");
        head.title = "show this episode alone";
        head.append(make("b", `member ${s.index}${s.member ? "" : ` (try ${s.attempt}, not counted)`} `));
        if (s.verdict) head.append(make("span", s.verdict, `badge ${s.verdict}`));
        head.append(make("div", `${s.outcome} (${s.owner})`));
        const reward = s.reward === null ? "none" : s.reward;
        head.append(make("div", `reward ${reward}, advantage ${signed(s.advantage)}, ${s.turns} turns`, "muted"));
        head.addEventListener("click", () => show(s.number, "episode"));
        side.append(head, whole(s.number));
        sides.append(side);
      }
      viewer.append(sides);
    } else {
      viewer.append(whole(number));
    }
    mark();
    history.replaceState(null, "", `#${mode}-${number}`);
    if (!keepPlace) viewer.scrollIntoView({ block: "start" });
  }

  document.addEventListener("keydown", (event) => {
    if (open === null || event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey) return;
    if (event.key === "j" || event.key === "ArrowRight") step(1);
    if (event.key === "k" || event.key === "ArrowLeft") step(-1);
  });

  list();
  const asked = /^#(episode|group)-(\d+)$/.exec(location.hash);
  if (asked) show(Number(asked[2]), asked[1]);
  else {
    const first = episodes.find((e) => e.full);
    if (first) show(first.number, "group", true);
  }
})();
