// The charts of a run. They grow by themselves; a selection zooms all of them, and reads more points there.

import { getJson } from "./api.js";
import { CurveChart, linesOf } from "./chart.js";
import { choice, h, replace, section } from "./dom.js";
import * as format from "./format.js";

const RELOAD_AFTER = 300; // points that were added one by one, before the server chooses new ones

export class Curves {
  // opened: what shows the conversations of a step, below the first chart
  constructor(run, details, opened, pick) {
    this.opened = opened;
    this.run = run;
    this.details = details;
    this.pick = pick;
    this.view = { axis: "step", smoothing: null, log: false, low: null, high: null };
    this.charts = new Map();
    this.grown = 0;
    this.chosen = null;
    this.place = h("div", {});
    this.progress = h("p", { class: "note", hidden: true }, "Reading metrics.jsonl …");
    this.reset = h("button", { type: "button", hidden: true, onclick: () => this.zoom(null, null) }, "Reset zoom");
    this.amount = h("output", {});
    this.slider = h("input", {
      type: "range", min: 0, max: 0.99, step: 0.01,
      onchange: () => { this.view.smoothing = Number(this.slider.value); this.reload(); },
    });
    this.element = section("Curves", null,
      h("div", { class: "controls" },
        choice("Horizontal axis", [["step", "step"], ["tokens", "tokens"], ["time", "time"]], "step",
          (axis) => { Object.assign(this.view, { axis, low: null, high: null }); this.reload(); }),
        h("label", {}, "smoothing", this.slider, this.amount),
        h("label", {}, h("input", { type: "checkbox", onchange: (event) => { this.view.log = event.target.checked; this.reload(); } }), "log scale"),
        this.reset, h("span", { class: "soft end" }, "Click a point: its conversations. Drag: zoom.")),
      this.progress, this.place);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => this.reload();
    this.scheme.addEventListener("change", this.recolour);
  }

  async load() {
    const { axis, smoothing, low, high } = this.view;
    this.pending?.abort();
    this.pending = new AbortController();
    const points = Math.min(4000, Math.max(400, Math.round(innerWidth * 1.2)));
    const answer = await getJson("/api/run/curves", { run: this.run, x: axis, smoothing, low, high, points }, this.pending.signal);
    this.grown = 0;
    this.answer = answer;
    this.slider.value = answer.smoothing;
    this.amount.textContent = format.number(answer.smoothing, 2);
    this.draw(answer);
    this.progress.hidden = answer.complete;
    if (!answer.complete) this.timer = setTimeout(() => this.reload(), 400);
  }

  reload() {
    clearTimeout(this.timer);
    return this.load().catch((error) => { if (error.name !== "AbortError") throw error; });
  }

  draw(answer) {
    const created = [];
    for (const chart of answer.charts) {
      if (!this.charts.has(chart.id)) {
        this.charts.set(chart.id, new CurveChart({
          id: chart.id, title: chart.title, unit: chart.unit, small: chart.id !== "loss", onPick: (step) => this.pick(step),
          onZoom: (low, high) => this.zoom(low, high),
        }));
        created.push(chart.id);
      }
    }
    if (created.length) {
      const [first, ...others] = [...this.charts.values()];
      replace(this.place, first.element, this.opened, h("div", { class: "charts" }, others.map(({ element }) => element)));
    }
    if (!answer.charts.length) replace(this.place, h("p", { class: "note" }, "No step is finished yet. The curves appear by themselves."));
    for (const chart of answer.charts) {
      const drawn = this.charts.get(chart.id);
      Object.assign(drawn.options, { axis: this.view.axis, log: this.view.log });
      drawn.set(linesOf(chart, this.view.axis), this.marks());
    }
  }

  // Events, checkpoints and the chosen step, where they are on the axis.
  marks() {
    const steps = this.answer.charts.flatMap(({ series }) => series).find(({ kind }) => kind === "step");
    if (!steps) return [];
    const at = (step) => {
      if (this.view.axis === "step") return step;
      const index = steps.step.findIndex((each) => each >= step);
      return index < 0 ? null : steps.x[index];
    };
    const marks = [
      ...(this.details.checkpoints ?? []).map((step) => ({ x: at(step), kind: "checkpoint" })),
      ...(this.details.events ?? []).map(({ step }) => ({ x: at(step), kind: "fault" })),
      ...(this.chosen === null ? [] : [{ x: at(this.chosen), kind: "chosen" }]),
    ];
    return marks.filter(({ x }) => x !== null);
  }

  mark(step) {
    this.chosen = step;
    for (const chart of this.charts.values()) { chart.events = this.marks(); chart.u?.redraw(false); }
  }

  zoom(low, high) {
    Object.assign(this.view, { low, high });
    this.reset.hidden = low === null;
    this.reload();
  }

  // New steps: appended at once; now and then the server chooses the points anew.
  grow(lines) {
    if (!this.answer || this.view.high !== null) return;
    this.grown += lines.length;
    const first = this.answer.charts.flatMap(({ series }) => series).find(({ kind }) => kind === "step");
    if (!first || this.grown > RELOAD_AFTER || this.view.axis === "time") { this.reload(); return; }
    for (const chart of this.answer.charts) {
      for (const series of chart.series.filter(({ kind }) => kind === "step")) {
        for (const line of lines) {
          const x = this.view.axis === "step" ? line.step : line.tokens;
          if (x <= series.x.at(-1) || !(series.key in line)) continue;
          series.x.push(x);
          series.step.push(line.step);
          series.y.push(line[series.key]);
          if (series.smooth) {
            const before = series.smooth.at(-1) ?? line[series.key];
            const beta = this.answer.smoothing;
            series.smooth.push(line[series.key] === null ? before : beta * before + (1 - beta) * line[series.key]);
          }
        }
      }
    }
    this.draw(this.answer);
  }

  destroy() {
    clearTimeout(this.timer);
    this.pending?.abort();
    this.scheme.removeEventListener("change", this.recolour);
    for (const chart of this.charts.values()) chart.destroy();
  }
}
