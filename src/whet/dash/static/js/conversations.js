// The conversations of a step, and of the whole run by their losses: text, mask, and the loss of each token.

import { getJson, postLines } from "./api.js";
import { choice, h, replace, section, svg, table } from "./dom.js";
import * as format from "./format.js";

const HOT = 6; // nats at which a token is as red as it gets

// A conversation with its supervised text marked, or with the loss of each token.
export function conversation(each, rank) {
  const text = h("p", { class: "tokens", tabindex: 0 });
  drawTokens(text, each);
  return h("article", { class: "conversation", "data-document": each.document },
    h("header", {}, rank ? h("span", {}, `${rank}.`) : null,
      each.loss === undefined || each.loss === null ? null : h("b", {}, `loss ${format.number(each.loss, 4)}`),
      h("span", {}, `${format.count(each.supervised)} of ${format.count(each.tokens)} tokens supervised`),
      h("code", { class: "place" }, `${each.source}:${each.line}`)), text);
}

function drawTokens(text, each) {
  replace(text, each.losses
    ? merged(each.losses).map(({ piece, losses }) => (losses.length
      ? h("span", { class: "token", style: { background: heat(Math.max(...losses)) }, title: describe(losses) }, piece)
      : h("span", { class: "context" }, piece)))
    : each.segments.map(([piece, supervised]) => h("span", { class: supervised ? "learned" : "context" }, piece)),
  each.shown < each.tokens ? h("span", { class: "soft" }, ` … and ${format.count(each.tokens - each.shown)} more tokens`) : null);
}

// The tokens of one character, of which all but the last have no text, are shown together.
function merged(tokens) {
  const shown = [];
  let waiting = [];
  tokens.forEach(([piece, loss], i) => {
    if (loss !== null) waiting.push(loss);
    if (piece === "" && i < tokens.length - 1) return;
    shown.push({ piece: piece || "▯", losses: waiting });
    waiting = [];
  });
  return shown;
}

const describe = (losses) => (losses.length === 1 ? `loss ${format.number(losses[0])}, probability ${format.share(Math.exp(-losses[0]))}`
  : `loss ${losses.map((loss) => format.number(loss)).join(" + ")}, the bytes of one character`);

// From the colour of the mask, for what the model knows, to red.
export function heat(loss) {
  const share = Math.max(0, Math.min(1, loss / HOT));
  return share < 0.02 ? "var(--mask)" : `rgba(var(--hot), ${(0.06 + 0.74 * share).toFixed(3)})`;
}

const scale = () => h("span", { class: "scale" }, "loss of a token: 0", h("i", {}), `${HOT} or more`);

export function conversations(run) {
  const body = h("div", {});
  const close = h("button", { type: "button", onclick: () => { pending?.abort(); element.hidden = true; } }, "Close");
  const element = h("section", { class: "opened-step", hidden: true, "aria-label": "Conversations of a step" }, close, body);
  let pending = null;

  async function open(step) {
    pending?.abort();
    pending = new AbortController();
    const { signal } = pending;
    replace(body, h("p", { class: "note" }, `Reading step ${step} …`));
    element.hidden = false;
    element.scrollIntoView({ block: "nearest" });
    try {
      const answer = await getJson("/api/run/step", { run, step }, signal);
      const status = h("p", { class: "note", role: "status" }, "Computing the loss of each token …");
      const list = h("div", {}, answer.conversations.map((each, i) => conversation(each, i + 1)));
      replace(body, h("h2", {}, `Step ${format.count(step)}: ${format.count(answer.of)} conversations`), h("p", { class: "note" },
        answer.conversations.length < answer.of ? `${answer.conversations.length} of them here. ` : "",
        answer.recorded ? "The highest loss first." : ""), status, list);
      await replay(run, step, answer, list, status, signal);
    } catch (error) {
      if (error.name !== "AbortError") replace(body, h("p", { class: "bad" }, error.message));
    }
  }
  return { element, open };
}

async function replay(run, step, answer, list, status, signal) {
  let found = null;
  for await (const event of postLines("/api/run/replay", { run, step }, signal)) {
    if (event.error) {
      replace(status, `Green text is trained on. The loss of each token is not known: ${event.error}`);
      return;
    }
    found = event;
  }
  if (!found) return;
  const byDocument = new Map(found.conversations.map((each) => [each.document, each]));
  for (const each of answer.conversations) {
    const replayed = byDocument.get(each.document);
    if (!replayed) continue;
    Object.assign(each, { losses: replayed.losses, loss: each.loss ?? replayed.loss });
  }
  answer.conversations.sort((a, b) => (b.loss ?? Infinity) - (a.loss ?? Infinity));
  replace(list, answer.conversations.map((each, i) => conversation(each, i + 1)));
  replace(status, scale(), found.exact
    ? ` at this step${found.replayed ? `, computed again from the checkpoint ${format.count(found.replayed)} steps before` : ""}.`
    : ` with the weights after step ${format.count(found.weights)}, the nearest checkpoint: replaying up to this step would take over a minute.`);
}

// Every conversation's own loss over the epochs.

const PATTERNS = [["", "all"], ["never-learned", "never learned"], ["forgotten", "forgotten"], ["suspicious", "suspicious labels"]];
const NOTES = {
  "": "The loss of each conversation whenever it was seen, before the step changed the weights.",
  "never-learned": "Seen at least twice, and the last loss is above 90 % of the first.",
  forgotten: "The last loss is above 1.5 times the lowest.",
  suspicious: "The last loss is four standard deviations above those of others at that time, as with wrong labels.",
};
const PAGE = 10;

export async function histories(run) {
  const view = { pattern: "", sort: "last", ascending: false, start: 0 };
  let answer = await getJson("/api/run/losses", { run, limit: PAGE });
  if (!answer.seen) return null; // a run of an earlier whet
  const note = h("p", { class: "note" });
  const list = h("div", {});
  const chooser = h("div", { class: "controls" });

  async function load() {
    answer = await getJson("/api/run/losses", { run, limit: PAGE, ...view });
    draw();
  }
  const head = (id, title) => h("button", { type: "button", class: "sort", "aria-label": `Sort by ${title}`, onclick: () => {
    view.ascending = view.sort === id ? !view.ascending : false;
    Object.assign(view, { sort: id, start: 0 });
    load();
  } }, title, view.sort === id ? (view.ascending ? " ↑" : " ↓") : "");

  function draw() {
    note.textContent = `${format.count(answer.seen)} of ${format.count(answer.total)} conversations were seen. ${NOTES[view.pattern]}`;
    const rows = answer.rows.map((each) => [
      h("button", { type: "button", class: "link", onclick: (event) => toggle(event.currentTarget, each) }, `${each.source}:${each.line}`),
      spark(each.losses), format.number(each.first, 4), h("b", {}, format.number(each.last, 4)), each.visits, each.tokens, format.number(each.score, 2),
    ]);
    replace(list, rows.length ? table(["conversation", "loss over time", head("first", "first"), head("last", "last"), head("visits", "seen"), head("tokens", "supervised tokens"), head("score", "outlier score")], rows, { class: "histories" })
      : h("p", { class: "good" }, "None."),
    h("div", { class: "controls" },
      view.start ? h("button", { type: "button", onclick: () => { view.start -= PAGE; load(); } }, "Back") : null,
      answer.matching > view.start + PAGE ? h("button", { type: "button", onclick: () => { view.start += PAGE; load(); } }, "More") : null));
  }

  async function toggle(button, each) {
    const row = button.closest("tr");
    if (row.nextSibling?.classList?.contains("opened")) { row.nextSibling.remove(); return; }
    const found = await getJson("/api/run/conversation", { run, document: each.document });
    row.after(h("tr", { class: "opened" }, h("td", { colspan: 7 }, conversation({ ...found, loss: each.last }))));
  }
  replace(chooser, choice("Which conversations", PATTERNS.map(([id, text]) => [id, id ? `${text} ${answer.patterns[id]}` : text]), "", (pattern) => {
    Object.assign(view, { pattern, start: 0 });
    load();
  }));
  draw();
  return section("Conversations by loss", null, note, chooser, list);
}

export function spark(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return h("span", { class: "soft" }, "seen once");
  const [low, high] = [0, Math.max(...known)];
  const points = values.map((value, i) => (value === null ? null : `${(i / (values.length - 1)) * 100} ${28 - ((value - low) / (high - low || 1)) * 26}`)).filter(Boolean);
  return svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": `from ${format.number(known[0])} to ${format.number(known.at(-1))}` },
    svg("path", { d: `M${points.join("L")}` }));
}
