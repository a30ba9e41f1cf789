// Two runs or more: curves over each other, what differs in their settings, and whether a difference is luck.

import { getJson } from "./api.js";
import { CurveChart, seriesColor } from "./chart.js";
import { choice, h, replace, section, table } from "./dom.js";
import * as format from "./format.js";
import { runLink } from "./runs.js";

const FORMATS = {
  step: format.count, supervised_tokens: format.count, tokens_per_s: format.count, train_s: format.seconds,
  peak_gib: (value) => `${format.number(value)} GiB`, state: (value) => value,
};

export async function show(main, place) {
  const chosen = place.query.getAll("run");
  const { runs } = await getJson("/api/runs");
  const picker = h("select", { "aria-label": "Add a run", onchange: () => {
    if (picker.value) go([...chosen, picker.value]);
  } }, h("option", { value: "" }, "Add a run …"),
  runs.filter(({ name }) => !chosen.includes(name)).map(({ name }) => h("option", { value: name }, name)));
  const go = (names) => { location.hash = `#/compare?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`; };
  const chips = h("div", { class: "controls" }, chosen.map((name, i) => h("span", { class: "chip picked" },
    h("i", { class: "dot", style: { background: seriesColor(i) } }), h("a", { href: runLink(name.split("@")[0]) }, name),
    h("button", { type: "button", class: "remove", "aria-label": `Remove ${name}`, onclick: () => go(chosen.filter((each) => each !== name)) }, "✕"))), runs.length ? picker : null);
  if (chosen.length < 2) {
    replace(main, h("h1", {}, "Compare"), chips, h("div", { class: "empty" },
      h("h2", {}, chosen.length ? "One more run" : "Choose two runs or more"),
      h("p", { class: "note" }, runs.length < 2 ? "There are fewer than two runs in this folder." : "Here, or with the boxes in the list of runs. The others are compared with the first one.")));
    return undefined;
  }
  const result = await getJson("/api/compare", { run: chosen });
  const view = { axis: "step", log: false, smoothing: null };
  const charts = h("div", {});
  const drawn = new Map();

  async function draw() {
    const answers = await Promise.all(chosen.map((name) =>
      getJson("/api/run/curves", { run: name.split("@")[0], x: view.axis, points: 600, smoothing: view.smoothing })));
    const ids = [...new Set(answers.flatMap((answer) => answer.charts.map(({ id }) => id)))];
    for (const id of ids) {
      const parts = answers.map((answer) => answer.charts.find((chart) => chart.id === id));
      const first = parts.find(Boolean);
      const lines = parts.flatMap((chart, i) => (chart ? chart.series.map((series) => ({
        name: chosen[i] + (series.kind === "step" || series.key === "val_loss" ? (series.kind === "step" ? "" : " validation") : ` ${series.key}`),
        x: series.x, y: series.smooth ?? series.y, step: series.step, color: seriesColor(i),
        kind: series.kind === "step" ? "line" : "marks", hidden: series.kind !== "step" && chart.series.length > 1,
      })) : []));
      if (!drawn.has(id)) {
        const chart = new CurveChart({ id, title: first.title, unit: first.unit, small: id !== "loss", legend: id === "loss" });
        drawn.set(id, chart);
      }
      Object.assign(drawn.get(id).options, { axis: view.axis, log: view.log });
      drawn.get(id).set(lines, []);
    }
  }

  const settings = Object.entries(result.settings);
  const metrics = Object.entries(result.metrics);
  replace(main, h("h1", {}, "Compare"), chips,
    section("Is it luck?", "Validation losses, paired by conversation; p is that of a permutation test.",
      h("ul", { class: "verdicts" }, result.paired.map((found, i) => h("li", {
        class: found.problem ? "" : !found.significant ? "" : found.difference < 0 ? "good" : "bad",
      }, result.sentences[i])))),
    section("Curves", null, h("div", { class: "controls" },
      choice("Horizontal axis", [["step", "step"], ["tokens", "tokens"], ["time", "time"]], view.axis, (axis) => { view.axis = axis; draw(); }),
      h("label", {}, "smoothing", h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0.8, onchange: (event) => { view.smoothing = Number(event.target.value); draw(); } })),
      h("label", {}, h("input", { type: "checkbox", onchange: (event) => { view.log = event.target.checked; draw(); } }), "log scale")), charts),
    section("Settings that differ", null, settings.length
      ? table(["setting", ...result.runs], settings.map(([key, values]) => [h("code", {}, key), ...values.map(format.value)]))
      : h("p", { class: "note" }, "The settings are the same.")),
    section("Metrics", "The last value of each.", table(["metric", ...result.runs],
      metrics.map(([key, values]) => [key, ...values.map((value) => (value === null ? "–" : (FORMATS[key] ?? format.loss)(value)))]))));
  await draw();
  const [loss, ...others] = [...drawn.values()];
  if (loss) replace(charts, loss.element, h("div", { class: "charts" }, others.map(({ element }) => element)));
  return () => drawn.forEach((chart) => chart.destroy());
}
