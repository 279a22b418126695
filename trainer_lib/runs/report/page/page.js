// The page: what it says, how it is looked at, and where the data comes from.

const AXES = [["step", "Steps"], ["seconds", "Time"], ["samples", "Samples"]];

class Page {
  constructor(data) {
    this.settings = { axis: "step", log: false, events: true, smoothing: 0, zoom: null, hidden: new Set() };
    this.cursor = null;
    this.pointed = null;
    this.charts = [];
    this.take(data);
    this.settings.events = this.runs.length === 1; // of several they hide one another
    if (this.runs.some((run) => Object.values(run.curves).some((curve) => curve.count > 200))) this.settings.smoothing = 0.6;
    this.build();
    new ResizeObserver(() => this.render()).observe(document.getElementById("main"));
  }

  take(data) {
    this.data = data;
    this.runs = data.runs;
    this.shownMarks = null;
  }

  colourOf(index, place) {
    return `var(--c${(this.runs.length > 1 ? index : place) % 8})`;
  }

  // -- how it is looked at ------------------------------------------------------------------------------------

  range() {
    if (this.settings.zoom) return this.settings.zoom;
    let low = Infinity, high = -Infinity;
    this.runs.forEach((run, index) => {
      if (this.settings.hidden.has(index)) return;
      for (const place of run.places) {
        for (const x of place[this.settings.axis]) if (x !== null) { low = Math.min(low, x); high = Math.max(high, x); }
      }
      for (const { kind, [this.settings.axis]: x } of run.marks) if (x !== null && LINES.has(kind)) { low = Math.min(low, x); high = Math.max(high, x); }
    });
    if (low > high) return [0, 1];
    if (low > 0 && low < 0.2 * high) low = 0; // where runs begin, unless this one went on from far away
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  marks() {
    if (!this.shownMarks) {
      this.shownMarks = this.runs.filter((run, index) => !this.settings.hidden.has(index))
        .flatMap((run) => shownMarks(run).map((mark) => (this.runs.length > 1 ? { ...mark, title: `${run.name} · ${mark.title}` } : mark)));
    }
    return this.shownMarks;
  }

  set(name, value) {
    this.settings[name] = value;
    if (name === "axis") { this.settings.zoom = null; this.cursor = null; }
    this.render();
  }

  toggle(index) {
    const { hidden } = this.settings;
    if (!hidden.delete(index)) hidden.add(index);
    this.shownMarks = null;
    this.render();
  }

  zoom(range) {
    this.settings.zoom = null;
    const [low, high] = this.range();
    if (range) {
      const inside = [Math.max(range[0], low), Math.min(range[1], high)];
      if (inside[1] - inside[0] < high - low && inside[1] > inside[0]) this.settings.zoom = inside;
    }
    this.render();
  }

  point(x, chart) {
    if (x === null && this.charts.some((one) => one.svg === document.activeElement && one.svg.matches(":focus-visible")) && chart === null && this.cursor === null) return;
    this.cursor = x;
    this.pointed = chart;
    for (const one of this.charts) one.follow();
  }

  render() {
    const key = document.getElementById("key");
    if (key) key.hidden = !this.settings.events;
    document.getElementById("unzoom").hidden = !this.settings.zoom;
    for (const chart of this.charts) chart.render();
  }

  // -- what it says -------------------------------------------------------------------------------------------

  build() {
    const isOnly = this.runs.length === 1;
    document.getElementById("top").replaceChildren(...this.head(isOnly));
    this.charts = this.data.charts.map((spec, index) => new Chart(spec, this, index === 0));
    const kinds = new Set(this.marks().map(({ kind }) => kind));
    const charts = make("section", { id: "charts", "aria-label": "Charts" },
      this.charts.length ? [make("div", { class: "charts" }, this.charts.map((chart) => chart.element)), kinds.size ? keyOf(kinds) : null] : make("p", { class: "card empty" }, "Nothing was logged yet."));
    document.getElementById("main").replaceChildren(...[this.controls(), isOnly ? null : runTable(this.runs, this), charts,
      ...(isOnly ? this.tablesOf(this.runs[0]) : []),
      ...this.settingsTables(isOnly),
      ...(isOnly ? [] : this.runs.map((run) => make("details", {}, make("summary", { class: "card" }, run.name), ...this.tablesOf(run)))),
    ].filter(Boolean));
    document.getElementById("foot").replaceChildren(make("p", {}, "Arrow keys move the cursor in a chart, with Shift by ten; + and − zoom, 0 shows everything. Drag to zoom, double-click for everything. "),
      make("p", {}, `Written ${momentText(this.data.written)} by trainer_lib.`));
    this.render();
  }

  tablesOf(run) {
    const samples = sampleTable(run);
    const tables = [evaluationTable(run), checkpointTable(run)].filter(Boolean);
    if (run.traceback) {
      const text = make("pre", { class: "scroll code", tabindex: 0 }, run.traceback);
      tables.unshift(make("section", { class: "card wide traceback" }, make("h2", {}, "Traceback"), text));
      requestAnimationFrame(() => { text.scrollTop = text.scrollHeight; }); // the error stands at its end
    }
    if (tables.some((section) => section.classList.contains("wide"))) tables.forEach((section) => section.classList.add("wide"));
    return [tables.length ? make("div", { class: "columns" }, tables) : null, samples, eventTable(run)].filter(Boolean);
  }

  settingsTables(isOnly) {
    const tables = [settingsTable("Arguments", "arguments", this.runs, "arguments"), settingsTable("Environment", "environment", this.runs, "environment")].filter(Boolean);
    return isOnly && tables.length ? [make("div", { class: "columns" }, tables)] : tables;
  }

  head(isOnly) {
    const live = this.data.live ? make("span", { class: "chip live", id: "live" }, "live") : null;
    if (!isOnly) return [make("div", { class: "title" }, make("h1", {}, `${this.runs.length} runs compared`), live)];
    const [run] = this.runs;
    const reason = run.reason || run.marks.filter((mark) => ["stop", "fail", "end"].includes(mark.kind)).map((mark) => mark.text).pop();
    return [make("div", { class: "title" }, make("h1", {}, run.name), make("span", { class: `chip ${run.status}` }, run.status), live), make("p", { class: "where code" }, run.path),
      reason && !["finished", "running"].includes(run.status) ? make("p", { class: `reason ${run.status}` }, reason) : null,
      make("dl", { class: "figures" }, run.figures.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))))].filter(Boolean);
  }

  controls() {
    const { settings } = this;
    const choice = (name, value, text) => {
      const input = make("input", { type: "radio", name, value, onchange: () => this.set(name, value) });
      input.checked = settings[name] === value;
      return make("label", {}, input, text);
    };
    const box = (name, text) => {
      const input = make("input", { type: "checkbox", id: name, onchange: () => this.set(name, input.checked) });
      input.checked = settings[name];
      return make("label", {}, input, text);
    };
    const shown = make("output", {}, settings.smoothing.toFixed(2));
    const slider = make("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: settings.smoothing,
      oninput: () => { shown.textContent = Number(slider.value).toFixed(2); this.set("smoothing", Number(slider.value)); } });
    return make("div", { class: "bar", role: "toolbar", "aria-label": "How the charts are drawn" },
      make("fieldset", {}, make("legend", { class: "unseen" }, "Axis"), make("span", { class: "choice" }, AXES.map(([value, text]) => choice("axis", value, text)))),
      make("label", {}, "Smoothing", slider, shown), box("log", "Log scale"), box("events", "Events"),
      make("span", { class: "end" }, make("button", { id: "unzoom", type: "button", hidden: !settings.zoom, onclick: () => this.zoom(null) }, "Show everything"),
        themeButton()));
  }

  // -- live ---------------------------------------------------------------------------------------------------

  async poll() {
    const chip = document.getElementById("live");
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const data = await answer.json();
      const isSame = JSON.stringify({ ...data, written: 0 }) === JSON.stringify({ ...this.data, written: 0 });
      chip.textContent = "live";
      if (!isSame) this.refresh(data);
    } catch (error) {
      chip.textContent = "not connected";
    }
    setTimeout(() => this.poll(), this.runs.some((run) => run.status === "running") ? 2000 : 10000);
  }

  refresh(data) {
    const focused = document.activeElement, label = focused && (focused.id || focused.getAttribute("aria-label"));
    const isBusy = focused && focused.matches("input.search") && focused.value;
    this.take(data);
    if (isBusy) { this.render(); return; } // a search is not taken away from under somebody's hands
    const left = window.scrollY;
    this.build();
    window.scrollTo(0, left);
    if (label) {
      const again = document.getElementById(label) || [...document.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === label);
      if (again) again.focus({ preventScroll: true });
    }
  }
}

// A best evaluation is saved: one sign is enough for both.
function shownMarks(run) {
  const best = new Set(run.marks.filter(({ kind }) => kind === "best").map(({ step }) => step));
  return run.marks.filter(({ kind, step }) => kind in KINDS && !(kind === "save" && best.has(step)));
}

const page = new Page(JSON.parse(document.getElementById("data").textContent));
if (page.data.live) setTimeout(() => page.poll(), 2000);
