// Asks the server every two seconds what is new, and puts it on the page.

import { draw, h, number, setCursor, sharedPath, swatch } from "./draw.js";

const EVERY_MS = 2000, FIRST = 4, LISTED = 10;
const FOLDED = { characters: 600, lines: 12 };
const MARKS = { running: "● running", finished: "✓ finished", failed: "✕ failed", stopped: "■ stopped", waiting: "○ waiting" };
const TONES = { finished: "good", failed: "bad", stopped: "bad" };
const at = (id) => document.getElementById(id);
const cards = new Map();
let overview = null, chosen = null, shownSamples = "", clock = 0, colours = [];

async function ask(path, query = {}) {
  const text = new URLSearchParams(query).toString();
  const response = await fetch(text ? `${path}?${text}` : path, { cache: "no-cache", credentials: "same-origin" });
  if (!response.ok) throw new Error(await response.text());
  clock = Date.parse(response.headers.get("Date")) / 1000; // of the machine of the runs
  return response.json();
}

function duration(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(Math.max(0, seconds))} s`;
}

function stateMark(state) {
  return h("span", { class: TONES[state] ?? "" }, MARKS[state] ?? state);
}

function selected() {
  return overview.runs.map((run) => run.name).filter((name) => chosen.has(name));
}

function showRuns() {
  const sorted = [...overview.runs].sort((a, b) =>
    (b.state === "running") - (a.state === "running") || (b.updated ?? 0) - (a.updated ?? 0));
  if (chosen === null && sorted.length) chosen = new Set(sorted.slice(0, FIRST).map((run) => run.name));
  const order = sorted.length > LISTED ? sorted : overview.runs;
  order.forEach((run, i) => {
    const card = cards.get(run.name) ?? makeCard(run.name);
    fillCard(card, run);
    const place = i < LISTED ? at("runs") : at("other-runs");
    if (card.root.parentNode !== place) place.append(card.root);
  });
  at("others").hidden = order.length <= LISTED;
}

function makeCard(name) {
  const box = h("input", { type: "checkbox", checked: chosen.has(name), onchange: () => {
    if (box.checked) chosen.add(name);
    else chosen.delete(name);
    showRuns();
    showCurves();
  } });
  const card = { box, mark: h("span"), body: h("div"), root: null };
  card.root = h("div", { class: "card" }, h("div", { class: "row" }, h("label", {}, box, " ", card.mark, name)), card.body);
  cards.set(name, card);
  return card;
}

function fillCard(card, run) {
  const index = selected().indexOf(run.name), several = chosen.size > 1;
  const look = { colour: colours[index % colours.length], dash: index < 4 ? "none" : "7 3" };
  card.mark.replaceChildren(...(index >= 0 && several ? [swatch(look)] : []));
  const facts = [
    run.steps ? `step ${run.step.toLocaleString("en")} of ${run.steps.toLocaleString("en")}` : null,
    run.left_s === null ? null : `${duration(run.left_s)} left`,
    run.updated ? `updated ${duration(clock - run.updated)} ago` : null,
  ].filter(Boolean).join(" · ");
  const total = run.stages.reduce((sum, [, seconds]) => sum + seconds, 0);
  // a label that does not fit into its part is only in the title
  const fits = (stage, seconds) => seconds / total > 0.012 * `${stage} ${number(seconds)} s`.length;
  const stages = h("div", { class: "stages", role: "img", "aria-label": `Seconds of the newest step: ${run.stages.map(([stage, seconds]) => `${stage} ${seconds}`).join(", ")}` },
    ...run.stages.map(([stage, seconds]) => {
      const part = h("span", { title: `${stage}: ${number(seconds)} s` }, fits(stage, seconds) ? `${stage} ${number(seconds)} s` : "");
      part.style.flex = `${seconds / total} 1 0`;
      return part;
    }));
  card.body.replaceChildren(
    h("div", { class: "row" }, stateMark(run.state), h("span", { class: "soft" }, facts)),
    run.state === "running" && run.steps ? h("progress", { max: run.steps, value: run.step, "aria-label": `Steps of ${run.name}` }) : "",
    run.reason ? h("p", { class: "bad" }, run.reason) : "",
    h("div", { class: "headline" }, ...run.headline.map(([title, value]) => h("span", {}, h("span", { class: "soft" }, `${title} `), h("b", {}, value)))),
    run.stages.length && index >= 0 ? stages : "",
    run.notes.length ? h("ul", { class: "notes" }, ...run.notes.map((note) => h("li", {}, note))) : "",
  );
}

function table(head, rows) {
  return [
    h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, ...rows.map(([first, ...cells]) =>
      h("tr", {}, h("th", { scope: "row" }, first), ...cells.map((cell) => h("td", {}, String(cell)))))),
  ];
}

function showComparisons() {
  const key = JSON.stringify(overview.comparisons);
  if (at("comparisons").dataset.key === key) return;
  at("comparisons").dataset.key = key;
  const open = at("comparisons").querySelector("details")?.open ?? false;
  at("comparisons").replaceChildren(...overview.comparisons.map((comparison) => {
    const counts = Object.entries(comparison.counts).map(([state, count]) => `${count} ${state}`).join(", ");
    const arms = comparison.arms.filter((arm) => arm.n);
    const rows = arms.map((arm) => [arm.arm, arm.difference, arm.mean, arm.n, arm.chosen || "–"]);
    const done = comparison.counts.finished ?? 0;
    return h("div", {},
      h("h2", {}, `Comparison ${comparison.name}`),
      h("p", {}, counts),
      h("progress", { max: comparison.queue.length, value: done, "aria-label": "Finished runs" }),
      arms.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Arms so far" },
        h("table", {}, ...table(["arm", comparison.difference, comparison.metric, "seeds", "chosen"], rows))) : "",
      h("details", { open }, h("summary", {}, `Queue of ${comparison.queue.length} runs`),
        h("ul", { class: "queue" }, ...comparison.queue.map((entry) =>
          h("li", {}, stateMark(entry.state), ` ${entry.label}`, entry.reason ? h("span", { class: "bad" }, `: ${entry.reason}`) : "")))));
  }));
}

async function showCurves() {
  const runs = selected();
  const found = await ask("curves.json", { runs: runs.join("\0"), more: at("more").open ? 1 : 0 });
  place(at("curves"), found.charts.filter((chart) => !chart.more), runs);
  place(at("more-curves"), found.charts.filter((chart) => chart.more), runs);
  at("settings").hidden = found.differences.length === 0;
  const rows = found.differences.map(({ option, values }) => [option, ...values]);
  at("differences").replaceChildren(...table(["option", ...runs.map((run) => run.slice(sharedPath(runs)))], rows));
}

function place(parent, charts, runs) {
  const old = new Map([...parent.children].map((figure) => [figure.dataset.title, figure]));
  const figures = charts.map((chart) => {
    const figure = old.get(chart.title) ?? h("figure", { "data-title": chart.title });
    old.delete(chart.title);
    return figure;
  });
  for (const figure of old.values()) figure.remove();
  figures.forEach((figure, i) => { if (parent.children[i] !== figure) parent.insertBefore(figure, parent.children[i] ?? null); });
  figures.forEach((figure, i) => draw(figure, charts[i], runs, colours));
}

function sampledRun() {
  return overview.runs.find((run) => run.name === at("sample-run").value);
}

function showSampleControls() {
  const names = overview.runs.filter((run) => run.sample_steps.length).map((run) => run.name);
  const select = at("sample-run"), now = [...select.options].map((option) => option.value);
  if (JSON.stringify(now) !== JSON.stringify(names)) {
    const kept = names.includes(select.value) ? select.value : selected().find((name) => names.includes(name)) ?? names[0];
    select.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === kept }, name)));
  }
  const steps = sampledRun()?.sample_steps ?? [], slider = at("slider");
  slider.max = Math.max(0, steps.length - 1);
  if (at("newest").checked) slider.value = slider.max;
  const step = steps[slider.value];
  at("sample-step").textContent = step ?? "–";
  slider.setAttribute("aria-valuetext", `step ${step}`);
}

async function showSamples() {
  showSampleControls();
  const run = sampledRun(), step = run?.sample_steps[at("slider").value];
  const key = `${run?.name} ${step}`;
  if (key === shownSamples) return;
  shownSamples = key;
  if (step === undefined) {
    at("samples").replaceChildren(h("p", { class: "soft" }, "No samples yet."));
    return;
  }
  const found = await ask("samples.json", { run: run.name, step });
  if (key !== shownSamples) return; // the slider went on
  const videos = found.videos.map((path) => h("video", { src: file(run.name, path), controls: true, loop: true, muted: true, "aria-label": path }));
  at("samples").replaceChildren(
    ...(videos.length ? [h("div", { class: "media" }, ...videos)] : []),
    ...Object.entries(found.splits).flatMap(([split, rows]) => [
      h("h3", {}, split === "eval" ? "Evaluated tasks" : split === "train" ? "Training rollouts" : split),
      h("div", { class: "tasks" }, ...tasks(rows).map((group) => taskCard(run.name, group))),
    ]));
}

function tasks(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.id + row.prompt, [...(groups.get(row.id + row.prompt) ?? []), row]);
  return [...groups.values()];
}

function taskCard(run, rows) {
  const [first] = rows;
  return h("div", { class: rows.length > 1 ? "card whole" : "card" },
    h("p", { class: "soft small" }, first.id),
    pictures(run, first.images ?? [], "image of the task"),
    h("div", { class: "text" }, first.question),
    first.question === first.prompt ? "" : h("details", { class: "small" }, h("summary", {}, "the prompt as the model saw it"), h("div", { class: "text" }, first.prompt)),
    first.answer ? h("p", { class: "small" }, h("span", { class: "soft" }, "reference: "), first.answer) : "",
    h("div", { class: "answers" }, ...rows.map((row) => answer(run, row))));
}

function answer(run, row) {
  const facts = [
    row.reward === undefined ? null : `reward ${number(row.reward)}`,
    row.advantage === undefined ? null : `advantage ${number(row.advantage)}`,
    ...Object.entries(row.terms).map(([term, value]) => `${term} ${number(value)}`),
    row.finish || null,
  ].filter(Boolean).join(" · ");
  const verdict = row.correct === undefined ? "" : h("b", { class: row.correct ? "good" : "bad" }, row.correct ? "✓ correct " : "✕ incorrect ");
  return h("div", {},
    pictures(run, row.outputs ?? [], "drawn image"),
    row.response ? response(row.response) : "",
    h("p", { class: "small" }, verdict, h("span", { class: "soft" }, facts)));
}

// Long responses, such as those of a model that repeats itself to the limit, open on request.
function response(text) {
  const lines = text.split("\n");
  if (text.length <= FOLDED.characters && lines.length <= FOLDED.lines) return h("div", { class: "text" }, text);
  const head = lines.slice(0, FOLDED.lines).join("\n").slice(0, FOLDED.characters / 2);
  return h("details", {}, h("summary", {}, `${head} … (${text.length.toLocaleString("en")} characters)`), h("div", { class: "text" }, text));
}

function pictures(run, paths, title) {
  return paths.length === 0 ? "" : h("div", { class: "media" }, ...paths.map((path, i) => {
    const image = h("img", { src: file(run, path), loading: "lazy", alt: `${title} ${i + 1}` });
    image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth < 128));
    return image;
  }));
}

function file(run, path) {
  return `file?${new URLSearchParams({ run, path })}`;
}

async function update() {
  let wait = EVERY_MS;
  try {
    if (!document.hidden || overview === null) {
      overview = await ask("runs.json");
      colours = overview.colours;
      if (overview.behind) wait = 50;
      showRuns();
      showComparisons();
      await showCurves();
      await showSamples();
      const running = overview.runs.filter((run) => run.state === "running").length;
      at("state").textContent = overview.behind ? "reading long files …" : `${overview.runs.length === 1 ? "1 run" : `${overview.runs.length} runs`}, ${running} running`;
      document.title = running === 1 ? title(overview.runs.find((run) => run.state === "running")) : "mmrl watch";
    }
  } catch (error) {
    at("state").textContent = `no response: ${error.message}. Is \`mmrl watch\` still running?`;
  }
  setTimeout(update, wait);
}

function title(run) {
  return run.steps ? `${Math.floor((100 * run.step) / run.steps)}% ${run.name}` : run.name;
}

at("slider").addEventListener("input", () => {
  at("newest").checked = false;
  showSamples();
  setCursor(sampledRun()?.sample_steps[at("slider").value] ?? null);
});
at("newest").addEventListener("change", showSamples);
at("sample-run").addEventListener("change", showSamples);
at("more").addEventListener("toggle", showCurves);
addEventListener("resize", () => { if (overview) showCurves(); });
update();
