// Charts as SVG, drawn in the width that they have, with one cursor over all of them.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190, LEFT = 50, RIGHT = 8, TOP = 8, BOTTOM = 22, MARKED = 40, SOLID = 4;
const DASHES = ["none", "7 3", "2 3", "9 3 2 3"];
const drawn = new Map(); // figure to what its cursor needs
let cursor = null; // a step; null for the newest

export function h(tag, attributes = {}, ...children) {
  // text only ever becomes text: nothing here reads HTML
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

function s(tag, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
}

export function number(value) {
  if (value === undefined || value === null) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9) + 1e-12; i++) found.push(i * step || 0);
  return found;
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

function scales(chart, width) {
  const values = chart.series.flatMap((one) => [one.mean, one.low ?? [], one.high ?? []]).flat();
  const log = chart.log && values.every((value) => value > 0);
  const bend = log ? Math.log10 : (value) => value;
  let [first, last] = range(chart.series.flatMap((one) => one.step));
  if (first === last) { first -= 1; last += 1; }
  if (first > 0 && first < 0.02 * last) first = 0;
  let [low, high] = range(values.map(bend));
  const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  if (chart.unit === "%" && !log) [low, high] = [Math.max(0, low - room), Math.min(100, high + room)];
  else [low, high] = [low >= 0 && low < room ? 0 : low - room, high + room];
  if (low === high) high += 1;
  const marks = log ? ticks(Math.floor(low), Math.ceil(high), 4).filter((e) => e >= low && e <= high) : ticks(low, high, 4);
  return {
    first, last, marks: marks.map((mark) => [mark, log ? 10 ** mark : mark]),
    x: (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT),
    y: (value) => TOP + (1 - (bend(value) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM),
    level: (mark) => TOP + (1 - (mark - low) / (high - low)) * (HEIGHT - TOP - BOTTOM),
    step: (x) => Math.min(last, Math.max(first, first + ((x - LEFT) / (width - LEFT - RIGHT)) * (last - first))),
  };
}

function style(chart, runs, colours) {
  // several runs: a colour a run and a dash a metric; else a colour a metric, with dashes where colours are many
  const labels = [...new Set(chart.series.map((one) => one.label))];
  return (one) => {
    const run = runs.indexOf(one.run), metric = labels.indexOf(one.label);
    const colour = runs.length > 1 ? run : metric;
    const dash = runs.length > 1 && labels.length > 1 ? metric : Math.floor(colour / SOLID);
    return { colour: colours[colour % colours.length], dash: DASHES[dash % DASHES.length] };
  };
}

export function swatch({ colour, dash }) {
  const icon = s("svg", { viewBox: "0 0 24 8", class: "swatch", "aria-hidden": "true" });
  icon.append(s("line", { x1: 0, x2: 24, y1: 4, y2: 4, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash }));
  return icon;
}

function curve(svg, one, scale, { colour, dash }) {
  const path = (values) => one.step.map((step, i) => `${scale.x(step).toFixed(1)},${scale.y(values[i]).toFixed(1)}`);
  if (one.low && one.high && !one.interval) {
    const points = [...path(one.high), ...path(one.low).reverse()].join(" ");
    svg.append(s("polygon", { points, fill: colour, opacity: 0.18 }));
  }
  const line = { points: path(one.mean).join(" "), fill: "none", stroke: colour, "stroke-width": 1.8 };
  svg.append(s("polyline", { ...line, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
  if (!one.interval && one.step.length > 1) return;
  one.step.slice(0, MARKED).forEach((step, i) => {
    const x = scale.x(step);
    if (one.low && one.high) {
      svg.append(s("line", { x1: x, x2: x, y1: scale.y(one.low[i]), y2: scale.y(one.high[i]), stroke: colour }));
    }
    svg.append(s("circle", { cx: x, cy: scale.y(one.mean[i]), r: 3, fill: colour }));
  });
}

export function sharedPath(runs) {
  // characters of the folders that all names begin with
  const parts = runs.map((run) => run.split("/").slice(0, -1));
  let same = 0;
  while (parts.length > 1 && parts.every((own) => same < own.length && own[same] === parts[0][same])) same += 1;
  return same ? parts[0].slice(0, same).join("/").length + 1 : 0;
}

export function draw(figure, chart, runs, colours) {
  const width = Math.max(240, figure.clientWidth - 28);
  const key = JSON.stringify([chart, runs, width]);
  if (figure.dataset.key === key) return;
  figure.dataset.key = key;
  const scale = scales(chart, width), styled = style(chart, runs, colours);
  const svg = s("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, tabindex: 0, role: "slider", "aria-label": `${chart.title}, step`,
    "aria-valuemin": scale.first, "aria-valuemax": scale.last, "aria-orientation": "horizontal",
  });
  for (const [mark, value] of scale.marks) {
    const y = scale.level(mark);
    svg.append(s("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, class: "grid" }));
    svg.append(s("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, number(value)));
  }
  for (const step of ticks(scale.first, scale.last, width / 90).filter(Number.isInteger)) {
    const x = scale.x(step), anchor = x > width - 30 ? "end" : "middle";
    svg.append(s("text", { x: Math.min(x, width - 2), y: HEIGHT - 5, "text-anchor": anchor }, step.toLocaleString("en")));
  }
  for (const one of chart.series) curve(svg, one, scale, styled(one));
  const line = s("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor" });
  svg.append(line);
  const values = chart.series.map(() => h("span", { class: "value" }));
  const shared = sharedPath(runs), several = runs.length > 1;
  const labels = new Set(chart.series.map((one) => one.label)).size > 1 || !several;
  const legend = h("ul", { class: "legend" }, ...chart.series.map((one, i) => {
    const name = [several ? one.run.slice(shared) : null, labels ? one.label : null].filter(Boolean).join(" · ");
    return h("li", { title: chart.about?.[one.label] ?? "" }, swatch(styled(one)), h("span", { class: "name" }, name), values[i]);
  }));
  const unit = chart.unit ? `, ${chart.unit}` : "";
  const focused = figure.contains(document.activeElement);
  figure.replaceChildren(h("h3", {}, chart.title + unit), svg, legend);
  if (focused) svg.focus();
  drawn.set(figure, { chart, scale, svg, line, values });
  listen(svg, scale, width);
  show(figure);
}

function listen(svg, scale, width) {
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    setCursor(scale.step(((event.clientX - box.left) / box.width) * width));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", () => setCursor(null));
  svg.addEventListener("keydown", (event) => {
    const stride = Math.max(1, (scale.last - scale.first) / 50), at = cursor ?? scale.last;
    const to = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: scale.first, End: scale.last, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    setCursor(to === null ? null : Math.min(scale.last, Math.max(scale.first, to)));
  });
}

export function setCursor(step) {
  cursor = step;
  for (const figure of drawn.keys()) {
    if (figure.isConnected) show(figure);
    else drawn.delete(figure);
  }
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

function show(figure) {
  const { chart, scale, svg, line, values } = drawn.get(figure);
  const step = Math.min(scale.last, Math.max(scale.first, cursor ?? scale.last));
  line.setAttribute("visibility", cursor === null ? "hidden" : "visible");
  line.setAttribute("x1", scale.x(step));
  line.setAttribute("x2", scale.x(step));
  const texts = chart.series.map((one, i) => {
    const at = nearest(one.step, step);
    const ends = one.low && one.high && one.low[at] !== one.high[at];
    const text = number(one.mean[at]) + (ends ? ` [${number(one.low[at])}, ${number(one.high[at])}]` : "");
    values[i].textContent = cursor === null ? text : `${text} at ${one.step[at].toLocaleString("en")}`;
    return `${one.label} ${text}`;
  });
  svg.setAttribute("aria-valuenow", Math.round(step));
  svg.setAttribute("aria-valuetext", `step ${Math.round(step)}: ${texts.slice(0, 8).join(", ")}`);
}
