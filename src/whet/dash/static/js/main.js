// The router: the part of the address after # names a tab and what it shows.

import { openSession, say } from "./api.js";
import { h, replace } from "./dom.js";

const TABS = {
  runs: { title: "Runs", load: () => import("./runs.js") },
  run: { load: () => import("./run.js"), of: "runs" },
  compare: { title: "Compare", load: () => import("./compare.js") },
  data: { title: "Data", load: () => import("./data.js") },
  search: { title: "Search", load: () => import("./search.js") },
  chat: { title: "Chat", load: () => import("./chat.js") },
};

const main = document.querySelector("#main");
let leave = () => {};
let turn = 0;

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [tab, ...rest] = path.split("/").map(decodeURIComponent);
  return { tab: tab in TABS ? tab : "runs", name: rest.join("/"), query: new URLSearchParams(query ?? "") };
}

function drawTabs(current) {
  const shown = TABS[current].of ?? current;
  replace(document.querySelector("#tabs"), Object.entries(TABS).filter(([, tab]) => tab.title).map(([id, tab]) =>
    h("a", { href: `#/${id}`, "aria-current": id === shown ? "page" : null }, tab.title)));
}

async function show() {
  const place = route();
  const mine = ++turn;
  leave();
  leave = () => {};
  drawTabs(place.tab);
  document.title = `${place.name || TABS[place.tab].title} · whet`;
  try {
    const module = await TABS[place.tab].load();
    if (mine !== turn) return;
    replace(main, h("p", { class: "note" }, "Loading …"));
    const done = await module.show(main, place);
    if (mine === turn) leave = done ?? (() => {});
    else done?.();
  } catch (error) {
    if (mine !== turn) return;
    replace(main, h("section", {}, h("h2", {}, "This cannot be shown"), h("p", { class: "bad" }, error.message)));
  }
}

addEventListener("hashchange", show);
addEventListener("unhandledrejection", (event) => {
  if (event.reason?.name !== "AbortError") say(event.reason?.message ?? String(event.reason));
  event.preventDefault();
});
try {
  const shown = show(); // buttons need the session, the first look does not
  document.querySelector("#root").textContent = (await openSession()).root;
  await shown;
} catch (error) {
  replace(main, h("section", {}, h("h2", {}, "whet dash does not answer"), h("p", { class: "bad" }, error.message)));
}
