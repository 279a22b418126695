// Elements of the page. Texts become text nodes, so that no name or value is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// What happened, as it is drawn on the axis: saves and the like as signs at its foot, the rest as lines.
const LINES = new Set(["resume", "stop", "fail"]);
const SHAPES = {
  save: "M-3.2,0 A3.2,3.2 0 1 1 3.2,0 A3.2,3.2 0 1 1 -3.2,0 Z",
  best: "M0,-5.4 L1.5,-1.8 5.2,-1.7 2.3,0.8 3.3,4.4 0,2.3 -3.3,4.4 -2.3,0.8 -5.2,-1.7 -1.5,-1.8 Z",
  note: "M0,-4 L4,0 0,4 -4,0 Z",
  skip: "M-3.2,-3.2 L3.2,3.2 M3.2,-3.2 L-3.2,3.2",
};
const KINDS = { save: "checkpoint", best: "best so far", resume: "resumed", stop: "interrupted", fail: "failed or died", skip: "left out", note: "other events" };

function sign(kind, x, top, bottom) {
  if (LINES.has(kind)) return draw("line", { class: `mark ${kind}`, x1: x, x2: x, y1: top, y2: bottom });
  return draw("path", { class: `mark ${kind}`, d: SHAPES[kind], transform: `translate(${x.toFixed(1)} ${bottom})` });
}

function keyOf(kinds) {
  return make("div", { class: "key", id: "key" }, Object.keys(KINDS).filter((kind) => kinds.has(kind)).map((kind) =>
    make("span", {}, draw("svg", { viewBox: "-7 -7 14 14", "aria-hidden": "true" }, LINES.has(kind) ? sign(kind, 0, -7, 7) : sign(kind, 0, 0, 0)), KINDS[kind])));
}
