// Base and tuned model side by side: any checkpoint, streaming, the probability of each token, thumbs.

import { getJson, postJson, postLines, say } from "./api.js";
import { h, replace } from "./dom.js";
import * as format from "./format.js";

const KNOBS = [
  ["temperature", 0, 2, 0.05, 0], ["top_k", 0, 200, 1, 50], ["top_p", 0.05, 1, 0.05, 1], ["min_p", 0, 1, 0.01, 0],
  ["repetition_penalty", 0.5, 2, 0.05, 1], ["max_new_tokens", 1, 1024, 1, 256], ["seed", 0, 1000, 1, 0],
];
const WHOLE = ["top_k", "max_new_tokens", "seed"];

export async function show(main, place) {
  const { runs } = await getJson("/api/chat/models");
  if (!runs.length) {
    replace(main, h("h1", {}, "Chat"), h("div", { class: "empty" }, h("h2", {}, "No model to talk to yet"), h("p", { class: "note" }, "A run can be talked to after its first checkpoint.")));
    return undefined;
  }
  let run = runs.find(({ run: name }) => name === place.name) ?? runs[0];
  let pending = null;
  let conversations = [[], []];
  const sides = ["tuned", "base"].map((name) => ({ name, list: h("div", { class: "turns", tabindex: 0, "aria-label": `Conversation with the ${name} model`, "aria-live": "polite" }), title: h("h2", {}, name) }));
  const withBase = h("input", { type: "checkbox", checked: true, onchange: () => { columns.classList.toggle("one", !withBase.checked); reset(); } });
  withBase.checked = true;
  const step = h("input", { type: "range", min: 0, step: 1, "aria-label": "Checkpoint", oninput: () => drawTitle(), onchange: () => reset() });
  const stepText = h("output", {});
  const select = h("select", { "aria-label": "Run", onchange: () => { run = runs.find(({ run: name }) => name === select.value); useRun(); } },
    runs.map(({ run: name }) => h("option", { value: name }, name)));
  select.value = run.run;
  const system = h("input", { type: "text", placeholder: "System message (optional)", "aria-label": "System message", onchange: () => reset() });
  const knobs = Object.fromEntries(KNOBS.map(([name, min, max, stride, value]) => [name, h("input", { type: "number", min, max, step: stride, value })]));
  const prompt = h("textarea", { rows: 3, placeholder: "Ask both models. Enter sends, Shift+Enter starts a line.", "aria-label": "Message", onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  } });
  const button = h("button", { type: "button", class: "primary", onclick: () => (pending ? pending.abort() : send()) }, "Send");
  const columns = h("div", { class: "chat" }, sides.map(({ title, list }) => h("section", {}, title, list)));

  function useRun() {
    step.max = run.steps.length - 1;
    step.value = run.steps.length - 1;
    reset();
  }
  function drawTitle() {
    const chosen = run.steps[Number(step.value)];
    stepText.textContent = `step ${format.count(chosen)}`;
    sides[0].title.textContent = `${run.run} at step ${format.count(chosen)}`;
    sides[1].title.textContent = "its base model";
  }
  function reset() {
    pending?.abort();
    conversations = [[], []];
    sides.forEach(({ list }) => replace(list));
    drawTitle();
  }

  async function send() {
    const text = prompt.value.trim();
    if (!text || pending) return;
    const used = withBase.checked ? [0, 1] : [0];
    const opening = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    const asked = { role: "user", content: text };
    const answers = used.map((i) => {
      const body = h("p", { class: "tokens" });
      const status = h("p", { class: "note" }, i === 0 ? "Loading the model …" : "Waiting …");
      sides[i].list.append(h("div", { class: "turn user" }, text), h("div", { class: "turn" }, body, status));
      sides[i].list.scrollTop = sides[i].list.scrollHeight;
      return { body, status, side: i };
    });
    prompt.value = "";
    pending = new AbortController();
    button.textContent = "Stop";
    try {
      const request = {
        run: run.run, step: run.steps[Number(step.value)], with_base: withBase.checked,
        messages: used.map((i) => [...opening, ...conversations[i], asked]),
        sampling: Object.fromEntries(Object.entries(knobs).map(([name, input]) => [name, WHOLE.includes(name) ? Math.round(Number(input.value)) : Number(input.value)])),
      };
      for await (const event of postLines("/api/chat", request, pending.signal)) {
        if (event.error) { say(event.error); break; }
        if (event.loading) continue;
        const answer = answers[event.model];
        if (event.text !== undefined) {
          answer.status.textContent = "";
          follow(sides[answer.side].list, () => answer.body.append(event.text));
        } else finish(answer, event, request, asked);
      }
    } catch (error) {
      if (error.name !== "AbortError") say(error.message);
    }
    answers.filter(({ done }) => !done).forEach(({ status }) => { status.textContent = "stopped"; });
    pending = null;
    button.textContent = "Send";
    prompt.focus();
  }

  function finish(answer, event, request, asked) {
    answer.done = true;
    const i = answer.side;
    const reply = { role: "assistant", content: event.answer };
    const messages = [...request.messages[i], reply];
    conversations[i] = [...conversations[i], asked, reply];
    follow(sides[i].list, () => {
      replace(answer.body, event.explain.length ? event.explain.map(token) : event.answer || "(empty)");
      replace(answer.status, `${format.count(event.tokens)} tokens${event.stopped === "length" ? ", cut at the limit" : ""} `,
        event.answer ? thumbs(run.run, request.step, sides[i].name, messages) : null);
    });
  }
  function thumbs(name, at, model, messages) {
    const buttons = [true, false].map((good) => h("button", { type: "button", class: "thumb", "aria-label": good ? "Good answer" : "Bad answer", onclick: async () => {
      const { file } = await postJson("/api/feedback", { run: name, step: at, model, good, messages });
      buttons.forEach((each) => { each.disabled = true; });
      say(`Written to ${file}. Train on it: data.sources: [{path: ${file}}]`, "good");
    } }, good ? "good" : "bad"));
    return buttons;
  }

  replace(main, h("h1", {}, "Chat"),
    h("div", { class: "controls" }, select, h("label", {}, "checkpoint", step, stepText), h("label", {}, withBase, "beside its base model"),
      h("button", { type: "button", onclick: reset }, "New conversation")),
    h("details", {}, h("summary", {}, "System message and sampling"), h("div", { class: "controls" }, system,
      Object.entries(knobs).map(([name, input]) => h("label", {}, name.replaceAll("_", " "), input)))),
    columns, h("div", { class: "ask" }, prompt, button));
  useRun();
  return () => pending?.abort();
}

// A conversation that is scrolled to its end stays there while it grows.
function follow(list, change) {
  const atEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 8;
  change();
  if (atEnd) list.scrollTop = list.scrollHeight;
}

// Sure tokens are plain, unsure ones are marked; hovering shows what else was likely.
function token({ token: text, probability, likeliest }) {
  const others = likeliest.map((each) => `${JSON.stringify(each.token)} ${format.share(each.probability)}`).join("\n");
  const doubt = 1 - probability;
  return h("span", { class: "token", title: `${format.share(probability)}\n\n${others}`, style: { background: doubt < 0.02 ? "transparent" : `rgba(var(--hot), ${(0.05 + 0.5 * doubt).toFixed(3)})` } }, text);
}
