// The tables below the charts.

const cell = (value, kind) => make("td", kind ? { class: kind } : {}, value === null || value === undefined ? "–" : value);

// Long names may break after an underscore or a slash.
const breakable = (text) => text.replace(/([_/])/g, "$1\u200b");

function table(head, rows, label) {
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    make("table", {}, make("thead", {}, make("tr", {}, head.map(([text, kind]) => make("th", { class: kind, scope: "col" }, breakable(text))))), make("tbody", {}, rows)));
}

function card(title, id, ...children) {
  return make("section", { class: "card", id }, make("div", { class: "with-copy" }, make("h2", {}, title), copyButton(title)), ...children);
}

// Copies the table of a card as text that spreadsheets take: a line for each row, with tabs between cells.
function copyButton(title) {
  const button = make("button", { type: "button", class: "copy", "aria-label": `Copy ${title.toLowerCase()}`, onclick: async () => {
    const copied = await copyText(tableText(button.closest(".card").querySelector("table")));
    button.textContent = copied ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return button;
}

const tableText = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.replace(/\u200b/g, "").replace(/\s+/g, " ").trim()).join("\t")).join("\n");

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch (error) { // not allowed, or no secure page
    const area = make("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

function evaluationTable(run) {
  const { columns, rows, left_out: leftOut } = run.evaluations;
  if (!rows.length) return null;
  const body = rows.map((row) => make("tr", row.is_best ? { class: "best" } : {}, cell(row.step.toLocaleString("en-US"), "number"), cell(tidy((row.epoch || 0).toFixed(3)), "number"),
    row.values.map((value) => cell(value, "number")), cell(row.is_best ? "best" : "")));
  const head = [["step", "number"], ["epoch", "number"], ...columns.map((name) => [name, "number"]), ["", ""]];
  const section = card("Evaluations", null, leftOut ? make("p", { class: "empty" }, `The last ${rows.length} and the best; ${leftOut.toLocaleString("en-US")} more are in the history.`) : null,
    table(head, body.reverse(), `Evaluations of ${run.name}`));
  if (columns.length > 3) section.classList.add("wide");
  return section;
}

function checkpointTable(run) {
  if (!run.checkpoints.length) return null;
  // What is still there comes first, the best of it before the others.
  const rank = (one) => (one.is_there === false ? 2 : one.is_best ? 0 : 1);
  const ordered = [...run.checkpoints].reverse().sort((one, other) => rank(one) - rank(other));
  const body = ordered.map((one) => make("tr", { class: [one.is_best && "best", one.is_there === false && "gone"].filter(Boolean).join(" ") || null },
    cell(one.step.toLocaleString("en-US"), "number"), make("td", { class: "code name", title: one.path }, one.name), cell(one.why), cell(secondsText(one.took), "number"), cell(momentText(one.time), "tight"),
    cell(one.is_best ? "best" : one.is_there === false ? "deleted" : "", "tight")));
  return card("Checkpoints", null, table([["step", "number"], ["folder", ""], ["why", ""], ["took", "number"], ["when", ""], ["", ""]], body, `Checkpoints of ${run.name}`));
}

function eventTable(run) {
  if (!run.marks.length) return null;
  const body = run.marks.map((mark) => make("tr", {}, make("td", {}, make("span", { class: `event-kind kind-${mark.kind}` }, mark.title)), cell(mark.step === null ? "–" : mark.step.toLocaleString("en-US"), "number"),
    cell(momentText(mark.time), "tight"), cell(mark.text, "long")));
  return card("Events", null, table([["event", ""], ["step", "number"], ["when", ""], ["", ""]], body, `Events of ${run.name}`));
}

// What callbacks recorded as tables: samples with their predictions, one evaluation at a time.
function sampleTable(run) {
  if (!run.samples.length) return null;
  const parts = run.samples.map(({ name, records, left_out: leftOut }) => {
    const body = make("div", {}), position = make("output", {}, "");
    const slider = make("input", { type: "range", min: 0, max: records.length - 1, value: records.length - 1, "aria-label": `Step of ${name}`, oninput: () => show() });
    function show() {
      const { step, columns, rows } = records[Number(slider.value)];
      position.textContent = `step ${step.toLocaleString("en-US")}`;
      body.replaceChildren(table(columns.map((column) => [column, ""]), rows.map((row) => make("tr", {}, row.map(sampleCell))), `${name} at step ${step}`));
    }
    show();
    const hint = leftOut ? make("span", {}, `${leftOut.toLocaleString("en-US")} earlier ones are in the history`) : null;
    return [make("div", { class: "sample-step" }, make("h3", {}, name), records.length > 1 ? slider : null, position, hint), body];
  });
  return card("Samples", "samples", ...parts.flat());
}

const sampleCell = (value) => (value && value.image ? make("td", {}, make("img", { class: "sample", src: value.image, alt: value.text, title: value.text })) : cell(String(value), "sample"));

// Where a run stands: no two runs have it in common, and no result depends on it.
const PLACES = new Set(["output_dir", "run_name", "resume", "folder", "script", "command"]);

// Settings of all runs side by side, of which those that differ come first in a comparison.
function settingsTable(title, field, runs, id) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run[field])))];
  if (!names.length) return null;
  const differs = (name) => !PLACES.has(name) && new Set(runs.map((run) => run[field][name])).size > 1;
  const rows = names.map((name) => ({ name, differs: differs(name), text: [name, ...runs.map((run) => run[field][name] || "")].join(" ").toLowerCase(),
    element: make("tr", differs(name) ? { class: "differs" } : {}, make("th", { scope: "row", class: "code" }, name), runs.map((run) => make("td", { class: "code" }, run[field][name] ?? "–"))) }));
  const isComparison = runs.length > 1, anyDiffers = rows.some((row) => row.differs);
  const body = make("tbody", {});
  const search = make("input", { class: "search", type: "search", placeholder: "Search", "aria-label": `Search ${title.toLowerCase()}`, oninput: () => show() });
  const only = make("input", { type: "checkbox", onchange: () => show() });
  only.checked = isComparison && anyDiffers;
  const none = make("p", { class: "empty", hidden: true }, "Nothing of that kind.");
  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => (!only.checked || row.differs) && words.every((word) => row.text.includes(word)));
    body.replaceChildren(...found.map((row) => row.element));
    none.hidden = found.length > 0;
  }
  show();
  const head = isComparison ? make("thead", {}, make("tr", {}, make("th", { scope: "col" }, ""), runs.map((run) => make("th", { scope: "col" }, run.name)))) : null;
  return make("section", { class: "card", id }, make("div", { class: "with-search" }, make("h2", {}, title), copyButton(title),
    isComparison ? make("label", {}, only, anyDiffers ? "only what differs" : "only what differs (nothing does)") : null, search), none,
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, make("table", {}, head, body)));
}

function runTable(runs, page) {
  const names = [...new Set(runs.flatMap((run) => run.figures.map(([name]) => name)))].filter((name) => !["Samples", "Epochs"].includes(name));
  const rows = runs.map((run, index) => {
    const box = make("input", { type: "checkbox", onchange: () => page.toggle(index) });
    box.checked = !page.settings.hidden.has(index);
    const figures = new Map(run.figures);
    return make("tr", {}, make("td", {}, make("label", { title: run.path }, box, make("span", { class: "dot", style: { backgroundColor: page.colourOf(index, 0) } }), run.name)),
      make("td", {}, make("span", { class: `chip ${run.status}` }, run.status)), names.map((name) => cell(figures.get(name) ?? "", "number")));
  });
  const section = card("Runs", "runs", table([["shown", ""], ["", ""], ...names.map((name) => [name, "number"])], rows, "Runs"));
  section.classList.add("runs");
  return section;
}
