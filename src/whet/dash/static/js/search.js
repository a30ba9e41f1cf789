// A search: trials as lines through their parameters, how many survived each rung, and the best recipe.

import { getJson } from "./api.js";
import { h, replace, section, svg, table } from "./dom.js";
import * as format from "./format.js";
import { runLink } from "./runs.js";

const HEIGHT = 320;

export async function show(main, place) {
  const { searches } = await getJson("/api/searches");
  if (!searches.length) {
    replace(main, h("h1", {}, "Search"), h("div", { class: "empty" }, h("h2", {}, "No searches here yet"),
      h("p", {}, "A search appears while it runs: "), h("pre", {}, "whet search my.yaml")));
    return undefined;
  }
  const name = searches.includes(place.name) ? place.name : searches[0];
  const select = h("select", { "aria-label": "Search", onchange: () => { location.hash = `#/search/${select.value.split("/").map(encodeURIComponent).join("/")}`; } }, searches.map((each) => h("option", { value: each }, each)));
  select.value = name;
  const body = h("div", {}, h("p", { class: "note" }, "Reading the trials …"));
  replace(main, h("h1", {}, "Search"), h("div", { class: "controls" }, select), body);

  async function load() {
    const found = await getJson("/api/search", { name });
    const best = bestTrial(found);
    replace(body, h("p", { class: "summary" }, `${found.method ?? "search"}: ${found.trials.length} trials${found.finished ? "" : " so far"}`,
      best ? `. The best, trial ${best.number}, has ${found.metric} = ${format.loss(best.value)} after ${format.count(best.step)} steps.` : "."),
    section("Parameters", "A line for each trial, from its values to what it reached. Orange: the best. Faint: stopped at a rung.", parallel(found, best)),
    rungs(found), importance(found),
    section("Trials", null, table(["trial", "state", found.metric, "step", "tokens", ...names(found).map(shortName)], ranked(found).map((trial) => [
      trial.run ? h("a", { href: runLink(trial.run) }, String(trial.number)) : String(trial.number), trial.error ? h("span", { class: "bad", title: trial.error }, trial.state) : trial.state,
      trial === best ? h("b", {}, format.loss(trial.value)) : format.loss(trial.value), format.count(trial.step), format.count(trial.tokens),
      ...names(found).map((key) => (key in trial.values ? show_(trial.values[key]) : "–"))]))),
    found.recipe ? h("section", {}, h("details", {}, h("summary", {}, "The best recipe"), h("pre", {}, found.recipe))) : null);
    return found.finished;
  }
  let timer = null;
  const poll = async () => { if (!(await load())) timer = setTimeout(poll, 5000); };
  await poll();
  return () => clearTimeout(timer);
}

const names = (found) => [...new Set(found.trials.flatMap(({ values }) => Object.keys(values)))];
const shortName = (name) => name.split(".").slice(-2).join(".");
const show_ = (value) => (typeof value === "number" ? format.number(value) : String(value));

function ranked(found) {
  const sign = found.lower_is_better ? 1 : -1;
  return [...found.trials].sort((a, b) => (a.state === "complete" ? 0 : 1) - (b.state === "complete" ? 0 : 1) || (a.value === null ? 1 : b.value === null ? -1 : sign * (a.value - b.value)));
}
const bestTrial = (found) => found.trials.find(({ number }) => number === found.best.trial) ?? ranked(found).find(({ value }) => value !== null);

function parallel(found, best) {
  const keys = names(found);
  const reached = found.trials.filter(({ value }) => value !== null);
  if (!reached.length || !keys.length) return h("p", { class: "note" }, "No trial has reached a rung yet.");
  const axes = [...keys.map((key) => axis(shortName(key), reached.map(({ values }) => values[key]))), axis(found.metric, reached.map(({ value }) => value))];
  const width = innerWidth < 760 ? 150 + 160 * (axes.length - 1) : 1100; // on a phone it scrolls
  const x = (i) => 70 + (i * (width - 150)) / Math.max(1, axes.length - 1);
  const y = (share) => 30 + (1 - share) * (HEIGHT - 60);
  const lines = reached.map((trial) => {
    const places = [...keys.map((key, i) => (key in trial.values ? [x(i), y(axes[i].place(trial.values[key]))] : null)), [x(keys.length), y(axes.at(-1).place(trial.value))]].filter(Boolean);
    const kind = trial === best ? "best" : trial.state === "complete" ? "complete" : "stopped";
    const drawn = svg("path", { class: kind, d: `M${places.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}` }, svg("title", {}, `trial ${trial.number}: ${format.loss(trial.value)}`));
    return [kind === "best" ? 2 : kind === "complete" ? 1 : 0, trial.run ? svg("a", { href: runLink(trial.run), "aria-label": `Trial ${trial.number}` }, drawn) : drawn];
  }).sort((a, b) => a[0] - b[0]).map(([, element]) => element);
  const drawing = svg("svg", { class: "parallel", viewBox: `0 0 ${width} ${HEIGHT}`, style: { "--least": `${width}px` }, role: "group", "aria-label": `${reached.length} trials by their parameters` }, lines,
    axes.map((each, i) => svg("g", {}, svg("line", { x1: x(i), x2: x(i), y1: y(0), y2: y(1) }), svg("text", { x: x(i), y: 14, "text-anchor": "middle", class: "head" }, each.name),
      each.ticks.map(([share, text]) => svg("text", { x: x(i) + 6, y: y(share) + 4 }, text)))));
  return h("div", { class: "scrolling", tabindex: 0 }, drawing);
}

// Numbers over more than an order of magnitude are placed by their logarithm; words in order.
function axis(name, values) {
  const known = values.filter((value) => value !== undefined && value !== null);
  if (known.some((value) => typeof value !== "number")) {
    const words = [...new Set(known.map(String))].sort();
    const place = (value) => (words.indexOf(String(value)) + 0.5) / words.length;
    return { name, place, ticks: words.map((word) => [place(word), word]) };
  }
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const log = low > 0 && high / low > 10;
  const place = (value) => (high === low ? 0.5 : log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
  return { name: log ? `${name} (log)` : name, place, ticks: high === low ? [[0.5, format.number(low)]] : [[0, format.number(low)], [1, format.number(high)]] };
}

function rungs(found) {
  const brackets = new Map();
  for (const trial of found.trials) {
    const levels = brackets.get(trial.bracket) ?? new Map();
    for (const rung of Object.keys(trial.rungs ?? {})) levels.set(Number(rung), (levels.get(Number(rung)) ?? 0) + 1);
    brackets.set(trial.bracket, levels);
  }
  const shown = [...brackets].filter(([, levels]) => levels.size);
  if (!shown.length) return null;
  return section("Survival", "How many trials reached each rung.", shown.map(([bracket, levels]) => {
    const rows = [...levels].sort((a, b) => a[0] - b[0]);
    const most = Math.max(...rows.map(([, n]) => n));
    return h("div", { class: "survival" }, shown.length > 1 ? h("h3", {}, `bracket ${bracket}`) : null, rows.map(([rung, n]) => h("div", {},
      h("span", {}, `${format.count(rung)} ${found.unit ?? ""}`), h("span", { class: "meter wide" }, h("i", { style: { width: `${(100 * n) / most}%` } })), h("b", {}, String(n)))));
  }));
}

function importance(found) {
  const shares = Object.entries(found.importance).sort((a, b) => b[1] - a[1]);
  return shares.length ? section("Importance", "How much each parameter decides whether a trial is among the best.", h("div", { class: "survival" }, shares.map(([name, share]) => h("div", {},
    h("span", {}, shortName(name)), h("span", { class: "meter wide" }, h("i", { style: { width: `${100 * share}%` } })), h("b", {}, format.share(share)))))) : null;
}
