// One chart: curves over a common axis, with a cursor that all charts share.

const MARGIN = { left: 56, right: 14, top: 14, bottom: 40 };
const STRIP = 10; // below the axis: where signs of events stand

function smoothed(values, amount) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = amount * sum + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return sum / weight;
  });
}

// The place of the value nearest to x; what is no number is passed over.
function nearest(curve, x) {
  const { xs, ys } = curve;
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  let best = -1;
  for (const [start, way] of [[low, 1], [low - 1, -1]]) {
    let place = start;
    while (place >= 0 && place < xs.length && (ys[place] === null || xs[place] === null)) place += way;
    if (place >= 0 && place < xs.length && (best < 0 || Math.abs(xs[place] - x) < Math.abs(xs[best] - x))) best = place;
  }
  return best;
}

class Chart {
  constructor(spec, page, isFirst) {
    this.spec = spec;
    this.page = page;
    this.legend = make("ul", { class: "legend" });
    this.svg = draw("svg", { tabindex: 0, role: "slider", "aria-label": `${spec.title}: cursor`, "aria-orientation": "horizontal" });
    this.tip = make("div", { class: "tip", hidden: true });
    this.element = make("figure", { class: isFirst ? "card chart first" : "card chart", "data-chart": spec.id },
      make("div", { class: "head" }, make("h3", {}, spec.title), this.legend, saveButtons(this)), this.svg, this.tip);
    this.height = isFirst ? 310 : 200;
    this.listen();
  }

  // -- what is drawn ------------------------------------------------------------------------------------------

  curves() {
    const { page } = this, { settings, runs } = page, found = [];
    for (const [index, run] of runs.entries()) {
      if (settings.hidden.has(index)) continue;
      for (const [place, name] of this.spec.names.entries()) {
        const curve = run.curves[name];
        if (!curve) continue;
        const xs = run.places[curve.at][settings.axis], isEvaluation = name.startsWith("eval_");
        const one = { run, name, xs, ys: curve.values, colour: page.colourOf(index, place), isDashed: runs.length > 1 && place > 0,
          isDotted: isEvaluation || xs.length < 30, label: runs.length > 1 ? (this.spec.names.length > 1 ? `${run.name} · ${name}` : run.name) : name };
        if (settings.smoothing > 0 && this.spec.smooths && !isEvaluation && curve.count > 8) {
          const base = curve.means || curve;
          one.smooth = { xs: run.places[base.at][settings.axis], ys: smoothed(base.values, settings.smoothing) };
        }
        found.push(one);
      }
    }
    return found;
  }

  render() {
    const { settings } = this.page, width = this.element.clientWidth ? this.svg.clientWidth || 600 : 600;
    const { left, right, top } = MARGIN, bottom = this.height - MARGIN.bottom;
    this.shown = this.curves();
    this.width = width;
    const [first, last] = this.page.range();
    this.x = (value) => left + ((value - first) / (last - first || 1)) * (width - left - right);
    this.unx = (pixel) => first + ((pixel - left) / (width - left - right)) * (last - first);
    const inside = (x) => x !== null && x >= first && x <= last;
    const values = this.shown.flatMap((one) => one.ys.filter((y, index) => y !== null && inside(one.xs[index])));
    const isLog = settings.log && values.some((value) => value > 0) && !values.some((value) => value < 0);
    let [low, high] = values.reduce(([low, high], value) =>
      isLog && value <= 0 ? [low, high] : [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    if (low > high) [low, high] = [0, 1];
    if (this.spec.form === "percent" && !isLog) low = Math.min(low, 0);
    const pad = isLog ? Math.max((high / low) ** 0.04, 1.02) : (high - low || Math.abs(high) || 1) * 0.05;
    [low, high] = isLog ? [low / pad, high * pad] : [low >= 0 ? Math.max(low - pad, 0) : low - pad, high + pad];
    const along = isLog ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
    this.y = (value) => (isLog && value <= 0 ? null : bottom - along(value) * (bottom - top));
    const clip = `clip-${this.spec.id.replace(/[^\w]/g, "-")}-${this.page.charts.indexOf(this)}`;
    const parts = [draw("clipPath", { id: clip }, draw("rect", { x: left - 4, y: 0, width: Math.max(width - left - right + 8, 1), height: this.height }))];
    parts.push(...this.axes(isLog ? logTicks(low, high) : ticks(low, high, bottom > 200 ? 6 : 5, this.spec.form), first, last, bottom));
    const body = draw("g", { "clip-path": `url(#${clip})` });
    body.append(...this.marks(inside, top, bottom));
    for (const one of this.shown) body.append(...this.curve(one, inside, top));
    this.cursor = draw("g", { "aria-hidden": "true" });
    this.selection = draw("rect", { class: "range", y: top, height: bottom - top, visibility: "hidden" });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.replaceChildren(...parts, body, this.selection, this.cursor);
    this.follow();
  }

  axes(values, first, last, bottom) {
    const { axis } = this.page.settings, { left, right } = MARGIN, parts = [];
    const step = values.length > 1 ? values[1] - values[0] : 0;
    for (const value of values) {
      const y = this.y(value);
      parts.push(draw("line", { class: "grid", x1: left, x2: this.width - right, y1: y, y2: y }),
        draw("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, tickText(value, this.spec.form, step)));
    }
    parts.push(draw("line", { class: "axis", x1: left, x2: this.width - right, y1: bottom, y2: bottom }));
    const along = ticks(first, last, Math.max(2, Math.floor(this.width / (axis === "seconds" ? 84 : 60))), axis), stride = along[1] - along[0];
    for (const value of along) {
      const x = this.x(value), anchor = x > this.width - 36 ? "end" : "middle";
      parts.push(draw("text", { x: anchor === "end" ? this.width - right : x, y: this.height - 6, "text-anchor": anchor },
        axis === "seconds" ? tickText(value, "seconds", stride) : shortNumber(value)));
    }
    return parts;
  }

  curve(one, inside, top) {
    const parts = [], dash = one.isDashed ? "6 4" : null;
    const style = (width, opacity) => ({ class: "curve", stroke: one.colour, "stroke-width": width, "stroke-opacity": opacity, "stroke-dasharray": dash });
    parts.push(draw("path", { ...style(one.smooth ? 1 : 1.75, one.smooth ? 0.28 : 1), d: this.path(one) }));
    if (one.smooth) parts.push(draw("path", { ...style(2, 1), d: this.path(one.smooth) }));
    if (one.isDotted && one.xs.length <= 120) {
      one.ys.forEach((y, index) => {
        if (y === null || !inside(one.xs[index]) || this.y(y) === null) return;
        parts.push(draw("circle", { cx: this.x(one.xs[index]).toFixed(1), cy: this.y(y).toFixed(1), r: 2.6, fill: one.colour }));
      });
    }
    one.ys.forEach((y, index) => { // what was no number leaves a gap, and a sign at the top
      if (y === null && inside(one.xs[index])) parts.push(draw("path", { class: "lost", d: SHAPES.skip, transform: `translate(${this.x(one.xs[index]).toFixed(1)} ${top - 5})` }));
    });
    return parts;
  }

  path({ xs, ys }) {
    let text = "", isOpen = false;
    for (let index = 0; index < xs.length; index++) {
      const y = ys[index] === null || xs[index] === null ? null : this.y(ys[index]);
      if (y === null) { isOpen = false; continue; }
      const next = ys[index + 1] === undefined || ys[index + 1] === null;
      text += `${isOpen ? "L" : "M"}${this.x(xs[index]).toFixed(1)} ${y.toFixed(1)}${!isOpen && next ? "h.01" : ""}`;
      isOpen = true;
    }
    return text;
  }

  marks(inside, top, bottom) {
    const { settings } = this.page;
    if (!settings.events) return [];
    return this.page.marks().filter((mark) => inside(mark[settings.axis])).map((mark) => sign(mark.kind, this.x(mark[settings.axis]), top, LINES.has(mark.kind) ? bottom : bottom + STRIP));
  }

  // -- the cursor ---------------------------------------------------------------------------------------------

  listen() {
    const { page, svg } = this;
    const at = (event) => event.clientX - svg.getBoundingClientRect().left;
    let from = null;
    svg.addEventListener("pointermove", (event) => {
      const x = at(event);
      if (from !== null && event.pointerType !== "touch" && Math.abs(x - from) > 4) this.select(from, x);
      page.point(Math.min(Math.max(this.unx(x), page.range()[0]), page.range()[1]), this);
    });
    svg.addEventListener("pointerdown", (event) => { from = event.button === 0 ? at(event) : null; page.point(this.unx(at(event)), this); });
    svg.addEventListener("pointerup", (event) => {
      const start = from;
      from = null;
      this.selection.setAttribute("visibility", "hidden");
      if (start !== null && event.pointerType !== "touch" && Math.abs(at(event) - start) > 8) page.zoom([this.unx(start), this.unx(at(event))].sort((a, b) => a - b));
    });
    svg.addEventListener("pointerleave", (event) => { from = null; this.selection.setAttribute("visibility", "hidden"); if (event.pointerType !== "touch") page.point(null, null); });
    svg.addEventListener("dblclick", () => page.zoom(null));
    svg.addEventListener("focus", () => { if (page.cursor === null && svg.matches(":focus-visible")) page.point(page.range()[1], this); });
    svg.addEventListener("blur", () => page.point(null, null));
    svg.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const { page } = this, [first, last] = page.range();
    const stops = [...new Set(this.shown.flatMap((one) => one.xs.filter((x, index) => one.ys[index] !== null && x >= first && x <= last)))].sort((a, b) => a - b);
    const now = page.cursor === null ? last : page.cursor;
    const by = (count) => {
      const place = stops.reduce((best, x, index) => (Math.abs(x - now) < Math.abs(stops[best] - now) ? index : best), 0);
      return stops[Math.min(Math.max(place + count, 0), stops.length - 1)];
    };
    const pace = event.shiftKey ? 10 : 1, many = Math.max(10, Math.round(stops.length / 10));
    const moves = { ArrowRight: () => by(pace), ArrowUp: () => by(pace), ArrowLeft: () => by(-pace), ArrowDown: () => by(-pace),
      PageUp: () => by(many), PageDown: () => by(-many), Home: () => stops[0], End: () => stops[stops.length - 1], Escape: () => null };
    if (event.key === "+" || event.key === "-") {
      const half = ((last - first) / 2) * (event.key === "+" ? 0.5 : 2);
      page.zoom([now - half, now + half]);
    } else if (event.key === "0") page.zoom(null);
    else if (event.key in moves && stops.length) page.point(moves[event.key](), this);
    else return;
    event.preventDefault();
  }

  select(from, to) {
    const { left, right } = MARGIN, [low, high] = [from, to].sort((a, b) => a - b).map((x) => Math.min(Math.max(x, left), this.width - right));
    fill(this.selection, { x: low, width: high - low, visibility: "visible" }, []);
  }

  // Show the numbers at the cursor, or the last ones.
  follow() {
    const { page, spec } = this, x = page.cursor, top = MARGIN.top, bottom = this.height - MARGIN.bottom, parts = [];
    const told = this.shown.map((one) => {
      const place = nearest(one, x === null ? Infinity : x), value = place < 0 ? null : one.ys[place];
      const smooth = one.smooth && place >= 0 ? one.smooth.ys[nearest(one.smooth, x === null ? Infinity : x)] : undefined;
      if (x !== null && place >= 0 && this.y(value) !== null) parts.push(draw("circle", { class: "point", cx: this.x(one.xs[place]), cy: this.y(value), r: 4, fill: one.colour }));
      return { one, place, value, smooth };
    });
    if (x !== null) parts.unshift(draw("line", { class: "cursor", x1: this.x(x), x2: this.x(x), y1: top, y2: bottom }));
    this.cursor.replaceChildren(...parts);
    this.legend.replaceChildren(...told.map(({ one, value }) => {
      const broken = one.run.curves[one.name].broken;
      return make("li", {}, make("span", { class: one.isDashed ? "swatch dashed" : "swatch", style: { backgroundColor: one.colour } }), one.label, make("b", {}, numberText(value, spec.form)),
        broken ? make("span", { class: "none" }, `${broken.toLocaleString("en-US")} × no number`) : null);
    }));
    const words = told.map(({ one, value }) => `${one.label} ${numberText(value, spec.form)}`).join(", ");
    const [first, last] = page.range();
    fill(this.svg, { "aria-valuemin": first, "aria-valuemax": last, "aria-valuenow": x === null ? last : x,
      "aria-valuetext": `${x === null ? "end" : placeText(page.settings.axis, this.snapped(told, x))}: ${words || "no values"}` }, []);
    this.showTip(x, told);
  }

  snapped(told, x) {
    const places = told.filter(({ place }) => place >= 0).map(({ one, place }) => one.xs[place]);
    return places.length ? places.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best)) : x;
  }

  showTip(x, told) {
    const { page, spec } = this, { axis } = page.settings;
    this.tip.hidden = x === null || page.pointed !== this;
    if (this.tip.hidden) return;
    const rows = told.filter(({ place }) => place >= 0).map(({ one, value, smooth }) => make("div", { class: "row" },
      make("span", { class: "dot", style: { backgroundColor: one.colour } }), one.label, make("b", {}, numberText(value, spec.form) + (smooth === undefined || smooth === null ? "" : `  (smooth ${numberText(smooth, spec.form)})`))));
    const near = page.settings.events ? page.marks().filter((mark) => mark[axis] !== null && Math.abs(this.x(mark[axis]) - this.x(x)) < 6).slice(0, 4) : [];
    const events = near.map((mark) => make("div", { class: "event" }, `${mark.title}${mark.text ? ": " + mark.text : ""}`));
    this.tip.replaceChildren(make("p", {}, placeText(axis, this.snapped(told, x))), ...rows, ...events);
    const box = this.svg.getBoundingClientRect(), outer = this.element.getBoundingClientRect();
    const pixel = this.x(x) + box.left - outer.left, isRight = pixel > this.element.clientWidth / 2;
    fill(this.tip, { style: { left: isRight ? "auto" : `${pixel + 14}px`, right: isRight ? `${this.element.clientWidth - pixel + 14}px` : "auto", top: `${box.top - outer.top + 14}px` } }, []);
  }
}
