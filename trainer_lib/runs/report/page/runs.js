// The page of all runs in a folder: search, sorting, and links to the reports.

const COLUMNS = [
  ["run", "", (run) => run.name], ["state", "", (run) => run.status], ["step", "number", (run) => run.step ?? -1], ["loss", "number", (run) => last(run.losses) ?? Infinity],
  ["", "", null], ["best", "number", (run) => (run.best ? run.best.value ?? Infinity : Infinity)], ["time", "number", (run) => run.seconds ?? -1],
  ["begun", "", (run) => run.created], ["checkpoint", "number", (run) => run.saved ?? -1],
];
const last = (values) => values.filter((value) => value !== null).pop();

class Runs {
  constructor(data) {
    this.data = data;
    this.order = { column: COLUMNS.findIndex(([name]) => name === "begun"), down: true };
    this.chosen = new Set();
    this.search = make("input", { class: "search", type: "search", placeholder: "Search", "aria-label": "Search runs", oninput: () => this.show() });
    this.compare = make("button", { type: "button", id: "compare", hidden: true, onclick: () => this.open([...this.chosen]) });
    this.body = make("tbody", {});
    this.heads = COLUMNS.map(([name, kind, key], column) => make("th", { scope: "col", class: kind, "aria-sort": "none" },
      key ? make("button", { type: "button", class: "sort", onclick: () => this.sort(column) }, name) : name));
    this.none = make("p", { class: "empty", hidden: true });
    document.getElementById("top").replaceChildren(make("div", { class: "title" }, make("h1", {}, "Runs"), data.live ? make("span", { class: "chip live", id: "live" }, "live") : ""),
      make("p", { class: "where code" }, data.folder));
    document.getElementById("main").replaceChildren(make("section", { class: "card all-runs" }, make("div", { class: "with-search" }, make("h2", { id: "count" }), copyButton("runs"), this.compare, this.search, themeButton()),
      this.none, make("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Runs" }, make("table", {}, make("thead", {}, make("tr", {}, this.heads)), this.body))));
    this.show();
  }

  sort(column) {
    this.order = { column, down: this.order.column === column ? !this.order.down : false };
    this.show();
  }

  show() {
    const { runs, live, written } = this.data, [, , key] = COLUMNS[this.order.column], way = this.order.down ? -1 : 1;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => [run.name, run.status, run.best ? run.best.metric : ""].join(" ").toLowerCase();
    const found = runs.filter((run) => words.every((word) => text(run).includes(word)))
      .sort((one, other) => way * (key(one) < key(other) ? -1 : key(one) > key(other) ? 1 : 0));
    this.heads.forEach((head, column) => head.setAttribute("aria-sort", column !== this.order.column ? "none" : this.order.down ? "descending" : "ascending"));
    const names = new Set(runs.map((run) => run.name)), focused = document.activeElement && document.activeElement.getAttribute("aria-label");
    this.chosen = new Set([...this.chosen].filter((name) => names.has(name)));
    this.body.replaceChildren(...found.map((run) => this.row(run)));
    if (focused && !document.activeElement.getAttribute("aria-label")) {
      const again = [...this.body.querySelectorAll("input")].find((box) => box.getAttribute("aria-label") === focused);
      if (again) again.focus({ preventScroll: true });
    }
    document.getElementById("count").textContent = found.length === runs.length ? `${runs.length} runs` : `${found.length} of ${runs.length} runs`;
    this.none.hidden = found.length > 0;
    this.none.textContent = runs.length ? "No run has all of these words." : "There are no runs in this folder yet.";
    this.compare.hidden = this.chosen.size < 2 || this.chosen.size > 24;
    this.compare.textContent = `Compare ${this.chosen.size}`;
    document.getElementById("foot").replaceChildren(make("p", {}, live ? "Choose several runs to compare them." : "Reports are linked where they were written."),
      make("p", {}, `Written ${momentText(written)} by trainer_lib.`));
  }

  row(run) {
    const total = run.max_steps === null ? "" : ` of ${run.max_steps.toLocaleString("en-US")}`;
    const best = run.best ? `${run.best.metric} ${numberText(run.best.value)} at ${run.best.step}` : "–";
    const name = this.data.live ? make("a", { href: this.link([run.name]) }, run.name) : run.report ? make("a", { href: run.report }, run.name) : run.name;
    const box = make("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, onchange: () => { if (!this.chosen.delete(run.name)) this.chosen.add(run.name); this.show(); } });
    box.checked = this.chosen.has(run.name);
    return make("tr", { "data-run": run.name }, make("td", { title: run.path }, this.data.live ? box : "", name), make("td", {}, make("span", { class: `chip ${run.status}` }, run.status)),
      cell(run.step === null ? "–" : run.step.toLocaleString("en-US") + total, "number"), cell(numberText(last(run.losses)), "number"), make("td", {}, sparkline(run.losses)),
      cell(best, "number"), cell(secondsText(run.seconds), "number"), cell(momentText(run.created), "tight"), make("td", { class: "number", title: run.checkpoint }, run.checkpoint ? run.checkpoint.replace(/^checkpoint-0*(?=\d)/, "") : "–"));
  }

  link(names) {
    return names.map(encodeURIComponent).join("+") + "/";
  }

  open(names) {
    location.href = this.link(names);
  }

  async poll() {
    const chip = document.getElementById("live");
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const data = await answer.json();
      chip.textContent = "live";
      const isSame = JSON.stringify({ ...data, written: 0 }) === JSON.stringify({ ...this.data, written: 0 });
      this.data = data;
      if (!isSame) this.show();
    } catch (error) {
      chip.textContent = "not connected";
    }
    setTimeout(() => this.poll(), 2000);
  }
}

function sparkline(values) {
  const known = values.filter((value) => value !== null), low = Math.min(...known), high = Math.max(...known);
  if (known.length < 2) return "";
  const points = values.map((value, index) => (value === null ? null : `${((index / (values.length - 1)) * 96 + 2).toFixed(1)},${(22 - (20 * (value - low)) / (high - low || 1)).toFixed(1)}`)).filter(Boolean);
  return draw("svg", { class: "spark", viewBox: "0 0 100 24", role: "img", "aria-label": `loss from ${numberText(known[0])} to ${numberText(last(known))}` }, draw("polyline", { points: points.join(" ") }));
}

const page = new Runs(JSON.parse(document.getElementById("data").textContent));
if (page.data.live) setTimeout(() => page.poll(), 2000);
