// The list of runs: filter, sort, select for comparison; rows change while runs go on.

import { getJson, listen } from "./api.js";
import { chip, h, replace, section, table, tableRow } from "./dom.js";
import * as format from "./format.js";

const FIRST_ROWS = 100; // more on request: a browser takes a millisecond for each
const COLUMNS = [
  { id: "name", title: "run", sort: (run) => run.name },
  { id: "state", title: "state", sort: (run) => run.state },
  { id: "progress", title: "progress", sort: (run) => run.progress ?? -1 },
  { id: "loss", title: "loss", sort: (run) => run.loss ?? Infinity },
  { id: "best", title: "best", sort: (run) => run.best ?? Infinity },
  { id: "tokens", title: "tokens", sort: (run) => run.tokens ?? -1 },
  { id: "hours", title: "device time", sort: (run) => run.device_hours ?? -1 },
  { id: "speed", title: "tokens/s", sort: (run) => run.tokens_per_s ?? -1 },
  { id: "age", title: "last sign", sort: (run) => run.last_sign ?? 0 },
];

const NUMBERS = { step: "step", loss: "loss", best: "best", tokens: "tokens", hours: "device_hours", speed: "tokens_per_s" };
const TITLES = COLUMNS.map(({ title }) => title);

export const runLink = (name) => `#/run/${name.split("/").map(encodeURIComponent).join("/")}`;
export const stateBadge = (state) => h("span", { class: `state ${state}` }, state);

export function progressBar(run) {
  if (run.step === null) return "–";
  const text = run.steps ? `${format.count(run.step)} of ${format.count(run.steps)}` : format.count(run.step);
  const done = Math.min(1, run.progress ?? 0);
  return h("div", { class: "progress" },
    h("progress", { max: 1, value: done, "aria-label": `${text} steps` }), h("span", {}, text));
}

export async function show(main) {
  const answer = await getJson("/api/runs");
  const runs = new Map(answer.runs.map((run) => [run.name, run]));
  const selected = new Set();
  const view = { text: "", state: "", by: "age", down: true, rows: FIRST_ROWS };
  const made = new Map(); // the rows in the page: one that has not changed is made once

  const search = h("input", {
    type: "search", placeholder: "Filter by name, tag, project, host, loss<0.5", "aria-label": "Filter the runs",
    oninput: () => { view.text = search.value.toLowerCase(); draw(); },
  });
  const states = h("div", { class: "choice", role: "group", "aria-label": "State" });
  const compare = h("button", { type: "button", class: "primary", disabled: true, onclick: () => {
    location.hash = `#/compare?${[...selected].map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
  } }, "Compare");
  const list = h("div", {});
  const notes = h("div", {});

  // A word is in the text of the run, or compares a number of it: loss<0.5
  const matches = (run) => {
    const text = [run.name, run.project, run.host, run.state, ...run.tags].join(" ").toLowerCase();
    const holds = (word) => {
      const [, name, sign, limit] = word.match(/^([a-z]+)([<>])([\d.e+-]+)$/) ?? [];
      const value = name in NUMBERS ? run[NUMBERS[name]] : undefined;
      if (value === undefined || Number.isNaN(Number(limit))) return text.includes(word);
      return value !== null && (sign === "<" ? value < Number(limit) : value > Number(limit));
    };
    return view.text.split(/\s+/).every(holds) && (!view.state || run.state === view.state);
  };

  function drawStates() {
    const counts = new Map();
    for (const run of runs.values()) counts.set(run.state, (counts.get(run.state) ?? 0) + 1);
    if (view.state && !counts.has(view.state)) view.state = "";
    replace(states, [["", `all ${runs.size}`], ...[...counts].sort().map(([state, n]) => [state, `${state} ${n}`])]
      .map(([state, text]) => h("button", {
        type: "button", "aria-pressed": String(view.state === state), onclick: () => { view.state = state; draw(); },
      }, text)));
  }

  function row(run) {
    const text = JSON.stringify([run, format.age(run.last_sign)]);
    if (made.get(run.name)?.text !== text) made.set(run.name, { text, element: tableRow(TITLES, cells(run)) });
    return made.get(run.name).element;
  }

  function cells(run) {
    const box = h("input", {
      type: "checkbox", "aria-label": `Select ${run.name}`, onchange: () => {
        if (box.checked) selected.add(run.name); else selected.delete(run.name);
        updateButton();
      },
    });
    box.checked = selected.has(run.name);
    return [
      h("div", { class: "name" }, box, h("div", {},
        h("a", { href: runLink(run.name) }, run.name),
        run.project ? h("span", { class: "soft" }, ` ${run.project}`) : null,
        run.tags.map((tag) => h("button", { type: "button", class: "chip", onclick: () => {
          search.value = tag; view.text = tag.toLowerCase(); draw();
        } }, tag)))),
      h("span", { title: run.note }, stateBadge(run.state)),
      progressBar(run),
      format.loss(run.loss),
      run.best === null ? "–" : h("span", { title: run.best_metric }, format.loss(run.best)),
      format.count(run.tokens), format.hours(run.device_hours || null), format.count(run.tokens_per_s),
      h("span", { class: "age", title: run.host ?? "" }, format.age(run.last_sign)),
    ];
  }

  function updateButton() {
    compare.disabled = selected.size < 2;
    compare.textContent = selected.size > 1 ? `Compare ${selected.size}` : "Compare";
  }

  function draw() {
    drawStates();
    updateButton();
    const column = COLUMNS.find(({ id }) => id === view.by);
    const found = [...runs.values()].filter(matches).sort((a, b) => {
      const [x, y] = [column.sort(a), column.sort(b)];
      return (x < y ? -1 : x > y ? 1 : a.name < b.name ? -1 : 1) * (view.down ? -1 : 1);
    });
    const head = COLUMNS.map(({ id, title }) => h("button", {
      type: "button", class: "sort", "data-id": id,
      "aria-label": `Sort by ${title}`,
      onclick: () => {
        view.down = view.by === id ? !view.down : ["age", "progress", "tokens", "hours", "speed"].includes(id);
        view.by = id;
        draw();
        list.querySelector(`[data-id=${id}]`)?.focus();
      },
    }, title, view.by === id ? h("span", { "aria-hidden": "true" }, view.down ? " ↓" : " ↑") : null));
    if (!runs.size) {
      replace(list, h("div", { class: "empty" }, h("h2", {}, "No runs here yet"),
        h("p", {}, "Start one, and it appears by itself: "), h("pre", {}, "whet train my.yaml"),
        h("p", { class: "note" }, "New here? whet demo fine-tunes a small real model in a few minutes.")));
      return;
    }
    replace(list, table(head, found.slice(0, view.rows).map(row), { class: "runs" }),
      found.length ? null : h("p", { class: "note" }, "No run matches."),
      found.length > view.rows ? h("button", { type: "button", onclick: () => { view.rows = Infinity; draw(); } }, `Show all ${format.count(found.length)}`) : null);
    const problems = [...runs.values()].flatMap((run) =>
      [...(run.note && ["stalled", "failed", "killed", "unreachable"].includes(run.state) ? [`${run.name}: ${run.note}`] : []),
        ...run.problems]);
    replace(notes, problems.length ? h("ul", { class: "problems" },
      [...new Set(problems)].slice(0, 12).map((problem) => h("li", {}, problem))) : null);
  }

  replace(main, h("h1", {}, "Runs"), h("div", { class: "controls" }, search, states, compare), notes, list,
    models(answer.models, runs));
  draw();
  const ages = setInterval(draw, 30000);
  const end = listen({}, {
    runs: ({ changed, gone }) => {
      gone.forEach((name) => { runs.delete(name); selected.delete(name); });
      changed.forEach((run) => runs.set(run.name, run));
      draw();
    },
    again: async () => {
      const fresh = await getJson("/api/runs");
      runs.clear();
      fresh.runs.forEach((run) => runs.set(run.name, run));
      draw();
    },
  });
  return () => { clearInterval(ages); end(); };
}

function models(found, runs) {
  if (!found.length) return null;
  const byFolder = new Map([...runs.values()].map((run) => [run.folder, run.name]));
  return section("Models", "The registry: whet models keeps exports by name, version and alias.",
    table(["model", "newest", "aliases", "kind", "run", "added"], found.map((model) => (model.problem
      ? [model.name ?? "–", h("span", { class: "bad" }, model.problem), "–", "–", "–", "–"]
      : [h("code", {}, `models:${model.name}`), `${model.newest} of ${model.versions}`,
        model.aliases.length ? model.aliases.map((alias) => chip(alias)) : "–", model.kind,
        byFolder.has(model.run) ? h("a", { href: runLink(byFolder.get(model.run)) }, byFolder.get(model.run)) : "–",
        `${format.age(model.time)} by ${model.user}`]))));
}
