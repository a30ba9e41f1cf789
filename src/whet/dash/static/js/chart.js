// A chart of uPlot in the dress of report.html: raw values faint, their average, evaluations as dots, events as lines.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { h, replace } from "./dom.js";
import * as format from "./format.js";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const PALETTE = ["--series-0", "--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6", "--series-7"];
export const seriesColor = (index) => color(PALETTE[index % PALETTE.length]);
const sync = uPlot.sync("whet");

// Ticks in the step of the axis; labels of hours have a unit.
const axisLabel = { step: "step", tokens: "tokens", time: "hours" };
const short = (value) => {
  if (value === null) return "";
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(4))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(6)));
};

const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((unit) => unit * 10 ** power)).flat();

// lines: {name, x, y, step, color, kind: "dots" | "line" | "marks", of}
// options: {title, unit, axis, log, small, legend, events, onPick(step), onZoom(low, high)}
export class CurveChart {
  constructor(options) {
    this.options = options;
    this.output = h("output", { "aria-live": "off" });
    this.legend = h("span", { class: "keys" });
    this.plot = h("div", { class: "canvas" });
    this.enlarge = options.small ? h("button", {
      type: "button", class: "enlarge", "aria-pressed": "false", "aria-label": `Enlarge ${options.title}`, title: "Enlarge", onclick: () => this.toggle(),
    }, "⤢") : null;
    this.element = h("figure", {
      class: `chart live-chart${options.small ? " small" : ""}`, tabindex: 0, "data-chart": options.id,
      role: "group", "aria-label": `${options.title}. Arrow keys move over steps, Enter opens one.`,
      onkeydown: (event) => this.key(event),
    }, h("figcaption", {}, h("b", {}, options.title, ["", "share", undefined].includes(options.unit) ? null : ` (${options.unit})`), this.legend, this.output, this.enlarge), this.plot);
    this.lines = [];
    this.events = [];
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.plot);
  }

  height() { return this.options.small && !this.isLarge ? 150 : innerWidth < 760 ? 240 : 320; }

  toggle() {
    this.isLarge = !this.isLarge;
    this.element.classList.toggle("large", this.isLarge);
    this.enlarge.setAttribute("aria-pressed", String(this.isLarge));
    this.u?.setSize({ width: this.plot.clientWidth, height: this.height() });
  }

  fit() {
    const width = this.plot.clientWidth;
    if (this.u && width > 0 && Math.abs(width - this.u.width) > 1) this.u.setSize({ width, height: this.height() });
    else if (!this.u && width > 0 && this.lines.length) this.build();
  }

  set(lines, events) {
    const shape = (each) => each.map(({ name, kind, color: own }) => `${name} ${kind} ${own}`).join("|");
    const same = this.u && shape(lines) === shape(this.lines) && this.drawn === this.look();
    this.lines = lines;
    this.events = events ?? this.events;
    if (same) this.u.setData(this.join());
    else this.build();
  }

  look() { return `${this.options.log} ${this.options.axis} ${color("--ink")}`; }

  join() {
    const log = this.options.log;
    const steps = new Map();
    for (const line of this.lines) line.x.forEach((x, i) => { if (line.step) steps.set(x, line.step[i]); });
    this.steps = steps;
    const tables = this.lines.map((line) => [line.x, log ? line.y.map((y) => (y > 0 ? y : null)) : line.y]);
    return tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[], []];
  }

  build() {
    this.u?.destroy();
    this.u = null;
    const width = this.plot.clientWidth;
    this.describe();
    if (!width || !this.lines.length) return;
    const { axis, log, unit, small } = this.options;
    const grid = { stroke: color("--grid"), width: 1 };
    const text = { stroke: color("--soft"), font: "11px system-ui, sans-serif", grid, ticks: { show: false } };
    this.drawn = this.look();
    this.u = new uPlot({
      width, height: this.height(), legend: { show: false }, padding: [8, 12, 0, 0],
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
        y: log ? { distr: 3 } : { range: (u, low, high) => yRange(low, high) },
      },
      cursor: {
        sync: { key: sync.key, setSeries: false }, drag: { x: true, y: false, dist: 6, setScale: false },
        points: { size: 7 }, focus: { prox: -1 },
      },
      focus: { alpha: 1 },
      series: [{}, ...this.lines.map((line) => seriesOptions(line))],
      axes: [
        { ...text, size: 30, values: (u, ticks) => ticks.map(short), space: small ? 60 : 80,
          ...(axis === "time" ? {} : { incrs: WHOLE }) },
        { ...text, size: 52, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : unit === "share" ? format.share(tick) : short(tick))), space: small ? 32 : 44 },
      ],
      hooks: {
        setCursor: [(u) => this.point(u.cursor.idx)],
        drawAxes: [(u) => this.drawEvents(u)], // below the points
        draw: [(u) => this.drawFaults(u)],
        setSelect: [(u) => this.select(u)],
      },
    }, this.join(), this.plot);
    this.u.over.addEventListener("click", () => {
      if (this.u.cursor.idx !== null && Date.now() - (this.zoomed ?? 0) > 400) this.pick(this.u.cursor.idx);
    });
    this.u.over.addEventListener("dblclick", () => this.options.onZoom?.(null, null));
    sync.sub(this.u);
    this.element.setAttribute("aria-roledescription", `chart by ${axisLabel[axis]}`);
  }

  describe() {
    replace(this.legend, this.options.legend !== false && (!this.options.small || new Set(this.lines.map(({ key, name }) => key ?? name)).size > 1)
      ? this.lines.filter(({ hidden }) => !hidden).map((line) =>
        h("span", { class: `key ${line.kind}`, style: { "--own": line.color } }, line.name)) : [],
    !this.options.small && this.events.some(({ kind }) => kind === "fault") ? h("span", { class: "key marks", style: { "--own": color("--bad") } }, "event") : null);
  }

  select(u) {
    if (u.select.width < 6) return;
    const low = u.posToVal(u.select.left, "x");
    const high = u.posToVal(u.select.left + u.select.width, "x");
    this.zoomed = Date.now();
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.options.onZoom?.(low, high);
  }

  // The data index that a position means: the nearest with a step of training.
  point(index) {
    if (index === null || index === undefined || !this.u) {
      this.output.textContent = "";
      return;
    }
    const x = this.u.data[0][index];
    const parts = this.lines.map((line, i) => [line, this.u.data[i + 1][index]])
      .filter(([, y]) => y !== null && y !== undefined)
      .map(([line, y]) => `${line.name} ${format.withUnit(y, this.options.unit)}`);
    const place = this.options.axis === "step" ? `step ${short(x)}`
      : this.options.axis === "tokens" ? `${format.count(x)} tokens` : format.hours(x);
    this.output.textContent = [place, ...parts].join(" · ");
  }

  pick(index) {
    const x = this.u.data[0][index];
    const step = this.steps.get(x);
    if (step) this.options.onPick?.(step);
  }

  key(event) {
    if (!this.u || event.target !== this.element) return;
    const last = this.u.data[0].length - 1;
    const now = this.u.cursor.idx ?? last;
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -last, End: last }[event.key];
    if (move !== undefined) {
      event.preventDefault();
      const index = Math.max(0, Math.min(last, now + move));
      this.u.setCursor({ left: this.u.valToPos(this.u.data[0][index], "x"), top: 10 });
    } else if (event.key === "Enter") this.pick(now);
    else if (event.key === "Escape") this.options.onZoom?.(null, null);
  }

  drawEvents(u) {
    const { ctx, bbox } = u;
    ctx.save();
    for (const { x, kind } of this.events) {
      if (x < u.scales.x.min || x > u.scales.x.max) continue;
      const at = Math.round(u.valToPos(x, "x", true)) + 0.5;
      ctx.globalAlpha = kind === "fault" ? 0.5 : 1;
      ctx.strokeStyle = color(kind === "checkpoint" ? "--line" : kind === "chosen" ? "--ink" : "--bad");
      ctx.lineWidth = devicePixelRatio * (kind === "chosen" ? 1.5 : 1);
      ctx.setLineDash(kind === "checkpoint" || kind === "chosen" ? [] : [4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(at, kind === "checkpoint" ? bbox.top + bbox.height - 7 * devicePixelRatio : bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // The values at the events themselves, so that a spike can be seen and clicked.
  drawFaults(u) {
    const { ctx } = u;
    const values = u.data[1 + this.lines.findIndex(({ step }) => step)];
    if (!values) return;
    ctx.save();
    ctx.fillStyle = color("--bad");
    for (const { x, kind } of this.events) {
      const y = kind === "fault" && x >= u.scales.x.min && x <= u.scales.x.max ? values[u.valToIdx(x)] : null;
      if (y === null || y === undefined || u.data[0][u.valToIdx(x)] !== x) continue;
      ctx.beginPath();
      ctx.arc(u.valToPos(x, "x", true), u.valToPos(y, "y", true), 3.5 * devicePixelRatio, 0, 2 * Math.PI);
      ctx.fill();
    }
    ctx.restore();
  }

  destroy() {
    this.resize.disconnect();
    if (this.u) sync.unsub(this.u);
    this.u?.destroy();
  }
}

// From 0, unless that would flatten the curve.
function yRange(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  const least = low > 0 && low < 0.6 * high ? 0 : low - 0.05 * (high - low);
  return [least, high + 0.05 * (high - low)];
}

function seriesOptions(line) {
  const points = (size) => ({ show: true, size, fill: line.color, stroke: line.color, width: 0 });
  if (line.kind === "line") return { stroke: line.color, width: 2, spanGaps: true, points: { show: false } };
  if (line.kind === "marks") return { stroke: line.color, width: 1.25, spanGaps: true, points: points(7) };
  return { stroke: line.color, width: line.x.length > 400 ? 1 : 0, spanGaps: false, paths: line.x.length > 400 ? undefined : () => null, points: line.x.length > 400 ? { show: false } : points(4) };
}

// The lines of a chart of the API: values as dots, their average as a line, evaluations as marks.
export function linesOf(chart, axis) {
  const lines = [];
  let marks = 0;
  for (const series of chart.series) {
    const name = series.key.replace(/^(val_loss\/|task\/)/, "");
    if (series.kind === "step") {
      const smooth = series.smooth && series.x.length > 20;
      lines.push({ name: smooth ? "each step" : name, x: series.x, y: series.y, step: series.step,
        color: color(smooth ? "--dots" : "--accent"), kind: smooth ? "dots" : "line", key: series.key, axis });
      if (smooth) {
        lines.push({ name: "average", x: series.x, y: series.smooth, step: series.step, color: color("--accent"),
          kind: "line", key: series.key, axis, smooth: true });
      }
    } else {
      lines.push({ name: series.key.startsWith("val_") && !series.key.includes("/") ? "validation" : name, x: series.x, y: series.y,
        color: marks ? seriesColor(marks + 1) : color("--validation"), kind: "marks", key: series.key, axis });
      marks += 1;
    }
  }
  return lines;
}
