// Charts as files: SVG, and PNG with twice as many pixels.

const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "stroke-linejoin", "stroke-linecap", "opacity", "font-size"];

// A chart with its title and legend, which needs nothing of the page.
function chartFile(chart) {
  const head = 46, width = chart.width, height = chart.height + head;
  const copy = chart.svg.cloneNode(true);
  const before = chart.svg.querySelectorAll("*"), after = copy.querySelectorAll("*");
  before.forEach((element, index) => {
    const style = getComputedStyle(element);
    for (const name of DRAWN) after[index].setAttribute(name, style.getPropertyValue(name));
    after[index].removeAttribute("class");
  });
  const page = getComputedStyle(document.body), ink = page.color;
  const texts = [draw("text", { x: MARGIN.left, y: 18, fill: ink, "font-size": 14, "font-weight": 600 }, chart.spec.title)];
  let x = MARGIN.left;
  for (const item of chart.legend.children) {
    const label = item.textContent;
    texts.push(draw("rect", { x, y: 30, width: 14, height: 3, fill: getComputedStyle(item.querySelector(".swatch")).backgroundColor }),
      draw("text", { x: x + 20, y: 35, fill: ink, "font-size": 11 }, item.childNodes[1].textContent));
    x += 44 + 6.2 * label.length;
  }
  const whole = draw("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`, "font-family": page.fontFamily },
    draw("rect", { width, height, fill: getComputedStyle(chart.element).backgroundColor }), ...texts,
    draw("g", { transform: `translate(0 ${head})` }, ...copy.childNodes));
  return { text: new XMLSerializer().serializeToString(whole), width, height };
}

function saveChart(chart, kind) {
  const { text, width, height } = chartFile(chart), name = `${chart.spec.id.replace(/[^\w-]+/g, "-")}.${kind}`;
  const source = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  if (kind === "svg") return download(source, name);
  const picture = new Image();
  picture.onload = () => {
    const canvas = make("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(picture, 0, 0, 2 * width, 2 * height);
    download(canvas.toDataURL("image/png"), name);
  };
  picture.src = source;
}

function download(source, name) {
  const link = make("a", { href: source, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

const saveButtons = (chart) => make("span", { class: "save" }, ["svg", "png"].map((kind) =>
  make("button", { type: "button", class: "copy", "aria-label": `Save ${chart.spec.title} as ${kind.toUpperCase()}`, onclick: () => saveChart(chart, kind) }, kind.toUpperCase())));
