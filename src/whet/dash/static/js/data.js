// What a run was trained on: conversations with their masks, a search in them, histograms, near-duplicates.

import { getJson } from "./api.js";
import { conversation } from "./conversations.js";
import { choice, h, replace, section, svg, tile } from "./dom.js";
import * as format from "./format.js";

export async function show(main, place) {
  const { runs } = await getJson("/api/runs");
  const names = runs.map(({ name }) => name);
  if (!names.length) {
    replace(main, h("h1", {}, "Data"), h("div", { class: "empty" }, h("h2", {}, "No runs here yet"), h("p", { class: "note" }, "The data of a run appears once it is prepared.")));
    return undefined;
  }
  const view = { run: place.name, use: "train", start: 0, query: "" };
  if (!names.includes(place.name)) view.run = await firstWithData(names);
  const list = h("div", {});
  const shapes = h("div", {});
  const twins = h("div", {});
  const select = h("select", { "aria-label": "Run", onchange: () => { view.run = select.value; open(); } }, names.map((name) => h("option", { value: name }, name)));
  select.value = view.run;
  const search = h("input", { type: "search", placeholder: "Search in the text", "aria-label": "Search in the text", onchange: () => { Object.assign(view, { query: search.value, start: 0 }); load(); } });
  let turn = 0;

  async function guarded(target, work) {
    try { await work(); } catch (error) { replace(target, h("p", { class: "bad" }, error.message)); }
  }
  async function load(back = []) {
    const mine = ++turn;
    replace(list, h("p", { class: "note" }, view.query ? "Searching …" : "Loading …"));
    await guarded(list, async () => {
      const answer = await getJson("/api/data", view);
      if (mine !== turn) return;
      const where = view.query ? `${answer.documents.length} found${answer.next === null ? "" : `, up to conversation ${format.count(answer.next)} of ${format.count(answer.total)}`}`
        : `${format.count(view.start + 1)} to ${format.count(view.start + answer.documents.length)} of ${format.count(answer.total)}`;
      replace(list, h("p", { class: "note" }, answer.total ? `Conversations: ${where}. Green text is trained on.` : "The store is empty."),
        answer.documents.map((each) => conversation(each)),
        h("div", { class: "controls" },
          back.length ? h("button", { type: "button", onclick: () => { view.start = back.at(-1); load(back.slice(0, -1)); } }, "Back") : null,
          answer.next === null ? null : h("button", { type: "button", onclick: () => { const from = view.start; view.start = answer.next; load([...back, from]); } }, view.query ? "Search on" : "More")));
    });
  }
  async function open() {
    view.start = 0;
    replace(twins);
    await guarded(shapes, async () => {
      const { problem } = await getJson("/api/data/problem", { run: view.run, use: view.use });
      content.hidden = problem !== null;
      if (problem) {
        replace(shapes, h("div", { class: "empty" }, h("h2", {}, "No data to show"), h("p", { class: "note" }, problem)));
        return;
      }
      load();
      const found = await getJson("/api/data/histograms", { run: view.run, use: view.use });
      replace(shapes, h("div", { class: "tiles" }, tile(format.count(found.documents), "conversations"), tile(format.count(found.tokens), "tokens"),
        tile(format.share(found.tokens ? found.supervised / found.tokens : null), "supervised"), tile(format.count(found.lengths.median), "median tokens"), tile(format.count(found.lengths.longest), "longest")),
      h("div", { class: "row" }, histogram("tokens of a conversation", found.lengths, format.count), histogram("supervised share", found.shares, format.share)));
    });
  }
  async function findTwins() {
    replace(twins, h("p", { class: "note" }, "Comparing …"));
    await guarded(twins, async () => {
      const found = await getJson("/api/data/duplicates", { run: view.run, use: view.use });
      replace(twins, h("p", { class: "note found" }, `${found.found === 1 ? "1 pair" : `${format.count(found.found)} pairs`} among ${format.count(found.compared)} of ${format.count(found.total)} conversations.`),
        found.pairs.map((pair) => h("details", {}, h("summary", {}, `${format.share(pair.similarity)} alike: ${pair.documents.map((each) => `${each.source}:${each.line}`).join(" and ")}`),
          h("div", { class: "twins" }, pair.documents.map((each) => conversation(each))))));
    });
  }
  const content = h("div", {},
    section("Near-duplicates", "Pairs that share at least 80 % of their sequences of five tokens.", h("button", { type: "button", onclick: findTwins }, "Find near-duplicates"), twins), section("Conversations", null, list));
  replace(main, h("h1", {}, "Data"), h("div", { class: "controls" }, select,
    choice("Part", [["train", "training"], ["validation", "validation"]], "train", (use) => { view.use = use; open(); }), search), shapes, content);
  await open();
  return undefined;
}

// A run that has only begun has no data yet; of many such, the first will do.
async function firstWithData(names) {
  for (const run of names.slice(0, 10)) {
    if ((await getJson("/api/data/problem", { run, use: "train" })).problem === null) return run;
  }
  return names[0];
}

export function histogram(title, { edges, counts }, show) {
  const most = Math.max(1, ...counts);
  const bars = counts.map((count, i) => svg("rect", { x: (i / counts.length) * 400 + 0.5, y: 100 - (count / most) * 96, width: 400 / counts.length - 1, height: Math.max(count ? 1 : 0, (count / most) * 96), fill: "var(--accent)" },
    svg("title", {}, `${show(edges[i])} to ${show(edges[i + 1])}: ${format.count(count)}`)));
  return h("figure", { class: "chart small" }, h("figcaption", {}, h("b", {}, title)),
    svg("svg", { class: "histogram", viewBox: "0 0 400 100", preserveAspectRatio: "none", role: "img", "aria-label": `${title}: from ${show(edges[0])} to ${show(edges.at(-1))}` }, bars),
    h("p", { class: "ends" }, h("span", {}, show(edges[0])), h("span", {}, show(edges.at(-1)))));
}
