// The conversations of a step: text, mask, losses.

import { getJson } from "./api.js";
import { h, replace, section } from "./dom.js";
import * as format from "./format.js";

// A conversation with its supervised text marked, or with the loss of each token.
export function conversation(each, rank) {
  const text = h("p", { class: "tokens", tabindex: 0 });
  if (each.losses) {
    each.losses.forEach(([piece, loss]) => text.append(loss === null
      ? h("span", { class: "context" }, piece)
      : h("span", { class: "token", style: { background: heat(loss) }, title: `loss ${format.number(loss)}, probability ${format.share(Math.exp(-loss))}` }, piece)));
  } else {
    each.segments.forEach(([piece, supervised]) => text.append(h("span", { class: supervised ? "learned" : "context" }, piece)));
  }
  if (each.shown < each.tokens) text.append(h("span", { class: "soft" }, ` … and ${format.count(each.tokens - each.shown)} more tokens`));
  return h("article", { class: "conversation", "data-document": each.document },
    h("header", {}, rank ? h("span", {}, `${rank}.`) : null,
      each.loss === undefined || each.loss === null ? null : h("b", {}, `loss ${format.number(each.loss, 4)}`),
      h("span", {}, `${format.count(each.supervised)} of ${format.count(each.tokens)} tokens supervised`),
      h("code", { class: "place" }, `${each.source}:${each.line}`)), text);
}

// From the colour of the mask, for what the model knows, to red at a loss of 6 nats.
export function heat(loss) {
  const share = Math.max(0, Math.min(1, loss / 6));
  return share < 0.02 ? "var(--mask)" : `rgba(var(--hot), ${(0.08 + 0.72 * share).toFixed(3)})`;
}

export const scale = () => h("span", { class: "scale" }, "loss 0", h("i", {}), "6");

export function conversations(run) {
  const body = h("div", {});
  const element = section("Conversations of a step", null, body);
  replace(body, h("p", { class: "note" }, "Click a point of a curve, or move to it with the arrow keys and press Enter."));
  let turn = 0;

  async function open(step) {
    const mine = ++turn;
    replace(body, h("p", { class: "note" }, `Reading step ${step} …`));
    element.scrollIntoView({ block: "nearest" });
    try {
      const answer = await getJson("/api/run/step", { run, step });
      if (mine !== turn) return;
      replace(body, h("p", { class: "note" }, `Step ${format.count(step)}: ${format.count(answer.of)} conversations`,
        answer.conversations.length < answer.of ? `, the first ${answer.conversations.length} of them` : "", ". Green text is trained on."),
      answer.conversations.map((each, i) => conversation(each, i + 1)));
    } catch (error) {
      if (mine === turn) replace(body, h("p", { class: "bad" }, error.message));
    }
  }
  return { element, open };
}
