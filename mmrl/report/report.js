"use strict";
// The page is whole without this: it adds values under the pointer, tables that sort, and a slider over steps.

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;  // never as HTML: names and answers come from data and models
  if (name) made.className = name;
  return made;
}

function nearest(points, position) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - position) < Math.abs(best[0] - position)) best = point;
  return best;
}

function followValues(plot) {
  const chart = JSON.parse(plot.dataset.values);
  const curves = chart.curves.filter(([, points]) => points.length);
  if (chart.box.length !== 4 || !curves.length) return;
  const [left, , width] = chart.box, [start, end] = chart.limits;
  const [, top, , height] = chart.box;
  const positions = [...new Set(curves.flatMap(([, points]) => points.map((point) => point[0])))].sort((a, b) => a - b);
  const line = element("div", "", "cursor"), box = element("div", "", "values");
  line.hidden = box.hidden = true;
  line.style.top = `${100 * top}%`;
  line.style.height = `${100 * height}%`;
  plot.append(line, box);
  let place = positions.length - 1;
  function show(position) {
    const at = nearest(positions.map((each) => [each]), position)[0], share = left + width * (at - start) / (end - start);
    place = positions.indexOf(at);
    line.style.left = `${100 * share}%`;
    box.style[share > 0.5 ? "right" : "left"] = `${100 * (share > 0.5 ? 1 - share : share) + 2}%`;
    box.style[share > 0.5 ? "left" : "right"] = "auto";
    box.replaceChildren(element("strong", `${chart.axis} ${at}`));
    for (const [name, points] of curves) {
      const [found, value] = nearest(points, at);
      if (found === at) box.append(element("div", `${name} ${value}${chart.unit ? " " + chart.unit : ""}`));
    }
    line.hidden = box.hidden = false;
  }
  function hide() { line.hidden = box.hidden = true; }
  plot.addEventListener("pointermove", (event) => {
    const area = plot.getBoundingClientRect();
    show(start + (end - start) * ((event.clientX - area.left) / area.width - left) / width);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move) return;
    event.preventDefault();
    show(positions[Math.min(positions.length - 1, Math.max(0, place + move))]);
  });
}

function sortable(table) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = element("button", head.innerText.replace(/\s+/g, " ").trim() || "sort");
    button.type = "button";
    button.title = "sort by this column";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      for (const body of table.tBodies) {
        const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
        const key = (row) => row.cells[column] ? row.cells[column].textContent.trim() : "";
        const number = (text) => parseFloat(text.replace(/,/g, ""));
        rows.sort((first, second) => {
          const [a, b] = [key(first), key(second)], [x, y] = [number(a), number(b)];
          if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;  // dashes last
          const order = isNaN(x) ? a.localeCompare(b) : x - y;
          return down ? -order : order;
        });
        body.append(...rows);
      }
    });
  });
}

function slideSteps(section) {
  const steps = [...section.querySelectorAll("details.step")];
  if (steps.length < 2) return;
  const label = element("label", "step ", "slider"), range = element("input"), shown = element("output");
  range.type = "range";
  range.min = 0;
  range.max = steps.length - 1;
  range.step = 1;
  range.value = steps.length - 1;
  function show() {
    steps.forEach((step, place) => { step.hidden = place !== Number(range.value); step.open = !step.hidden; });
    shown.textContent = steps[range.value].dataset.step;
    range.setAttribute("aria-valuetext", `step ${shown.textContent}`);
  }
  range.addEventListener("input", show);
  label.append(range, shown);
  section.insertBefore(label, steps[0]);
  section.classList.add("sliding");
  show();
}

document.querySelectorAll("[data-values]").forEach(followValues);
document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll("section.steps").forEach(slideSteps);
