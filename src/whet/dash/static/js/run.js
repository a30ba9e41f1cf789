// One run: what it is doing, its curves, and what its files prove.

import { getJson, listen, postJson, say } from "./api.js";
import { conversations, histories } from "./conversations.js";
import { Curves } from "./curves.js";
import { configuration, costs, coverage, events, promises, prompts, reported, scores } from "./details.js";
import { h, replace, section, tile, visible } from "./dom.js";
import * as format from "./format.js";
import { ledger } from "./ledger.js";
import { progressBar, stateBadge } from "./runs.js";

const ACTIVE = ["queued", "requeued", "starting", "running", "stopping", "stalled"];

export async function show(main, place) {
  const name = place.name;
  const details = await getJson("/api/run", { run: name });
  const header = h("header", {});
  const chosen = conversations(name);
  const open = (step) => { curves.mark(step); chosen.open(step); };
  const curves = new Curves(name, details, chosen.element, open);
  const log = logView(name, details.ranks, (rank) => { end(); end = start(rank); });
  const losses = h("div", {});
  const parts = [
    curves.element, losses, ...[
      () => events(details.events, open), () => scores(details), () => prompts(details.prompts), () => ledger(name, details.sources),
      () => promises(details.promises), () => costs(details), () => coverage(details.plan), () => reported(details.reported),
    ].map(guarded), log.element, configuration(details.config),
  ].flat().filter(Boolean);
  const jump = h("nav", { class: "jump", "aria-label": "Sections" }, parts.filter(({ id }) => id).map(jumpTo));
  drawHeader(header, name, details.summary, details);
  replace(main, header, jump,
    details.damage?.length ? h("ul", { class: "problems" }, details.damage.map((text) => h("li", {}, text))) : null, parts);
  await curves.load();
  log.load();
  histories(name).then((found) => {
    if (!found) return;
    losses.replaceWith(found);
    jump.firstChild.after(jumpTo(found));
  });
  const step = Number(place.query.get("step"));
  if (step) open(step);

  let summary = details.summary;
  const start = (rank) => listen({ run: name, rank }, {
    steps: (lines) => curves.grow(lines),
    evaluation: () => curves.reload(),
    reset: () => curves.reload(),
    log: log.add,
    state: (newest) => {
      const ended = ACTIVE.includes(summary.state) && !ACTIVE.includes(newest.state);
      summary = newest;
      drawHeader(header, name, summary, details);
      if (ended) getJson("/api/run", { run: name }).then((fresh) => drawHeader(header, name, fresh.summary, fresh));
    },
    again: () => { log.load(); curves.reload(); },
  });
  let end = start(0);
  return () => { end(); curves.destroy(); };
}

function jumpTo(part) {
  const title = part.querySelector("h2");
  return h("a", { href: `#${part.id}`, onclick: (event) => {
    event.preventDefault();
    part.scrollIntoView();
    title.setAttribute("tabindex", "-1");
    title.focus();
  } }, title.textContent);
}

// A part made from a damaged file does not take the others with it.
function guarded(make) {
  try {
    return make();
  } catch (error) {
    return h("p", { class: "bad" }, `A part of this run cannot be shown: ${error.message}`);
  }
}

function drawHeader(header, name, summary, details) {
  const act = (verb, button) => async () => {
    button.disabled = true;
    try {
      say((await postJson(`/api/run/${verb}`, { run: name })).message, "good");
    } catch (error) {
      say(error.message);
      button.disabled = false;
    }
  };
  const stop = h("button", { type: "button", class: "danger", title: "Saves a checkpoint after the current step, then ends" }, "Stop");
  const resume = h("button", { type: "button", title: "Continues from the newest checkpoint" }, "Resume");
  stop.addEventListener("click", act("stop", stop));
  resume.addEventListener("click", act("resume", resume));
  const link = name.split("/").map(encodeURIComponent).join("/");
  const left = summary.state === "running" && summary.progress && summary.tokens && summary.tokens_per_s
    ? (1 / summary.progress - 1) * (summary.tokens / summary.tokens_per_s) : null;
  replace(header,
    h("div", { class: "title" }, h("h1", {}, name), stateBadge(summary.state), progressBar(summary),
      h("div", { class: "actions" },
        ["running", "starting", "queued", "requeued", "stalled"].includes(summary.state) ? stop : null,
        ["stopped", "failed", "killed"].includes(summary.state) ? resume : null,
        h("a", { class: "button", href: `#/compare?run=${encodeURIComponent(name)}` }, "Compare"),
        h("a", { class: "button", href: `#/data/${link}` }, "Data"), h("a", { class: "button", href: `#/chat/${link}` }, "Chat"))),
    h("p", { class: "summary" }, details.sentence ?? ""),
    summary.note ? h("p", { class: ["failed", "killed", "stalled"].includes(summary.state) ? "bad" : "note" }, summary.note) : null,
    h("div", { class: "tiles" },
      tile(format.loss(summary.loss), "loss"),
      summary.best === null ? null : tile(format.loss(summary.best), `best ${summary.best_metric}`),
      tile(format.count(summary.tokens), "tokens"),
      tile(format.count(summary.tokens_per_s), "tokens per second"),
      tile(format.hours(summary.device_hours || null), "device time"),
      left === null ? tile(format.age(summary.last_sign), "last sign of life") : tile(format.seconds(left), "left")));
}

// The log of one rank, as it grows; listenTo(rank): another one's lines are wanted from now on.
function logView(name, ranks, listenTo) {
  const lines = h("pre", { class: "log", tabindex: 0, "aria-label": "Log" });
  let [rank, end] = [ranks[0] ?? 0, 0];
  const append = (added) => {
    const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8;
    lines.append(...added.map((line) => visible(`${line}\n`)));
    while (lines.childNodes.length > 2000) lines.firstChild.remove();
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  };
  const load = async () => {
    if (!ranks.length) return;
    const found = await getJson("/api/run/log", { run: name, rank });
    replace(lines);
    end = found.end;
    append(found.lines);
  };
  const select = ranks.length > 1
    ? h("label", { class: "controls" }, "rank", h("select", { onchange: (event) => { rank = Number(event.target.value); load(); listenTo(rank); } },
      ranks.map((each) => h("option", { value: each }, String(each))))) : null;
  return {
    element: section("Log", ranks.length ? null : "This run has no log yet.", select, lines),
    load,
    add: (event) => {
      if (event.rank !== rank || event.end <= end) return;
      if (event.start === end || !ranks.length) { end = event.end; append(event.lines); } else load();
    },
  };
}
