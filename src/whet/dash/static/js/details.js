// The sections of a run below its curves, each from a part of what the server tells of it; null without data.

import { say } from "./api.js";
import { chip, facts, h, section, table } from "./dom.js";
import * as format from "./format.js";

export function command(text) {
  const copy = h("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "copied";
    } catch {
      say("The browser does not allow copying here: select the text instead");
    }
  } }, "copy");
  return h("div", { class: "command" }, h("code", { tabindex: 0 }, text), copy);
}

export function events(found, open) {
  if (!found?.length) return null;
  return section("Events", "Steps that went wrong, with their cause. They are red on the curves.",
    table(["step", "what", "action", "conversations"], found.slice(-50).map((event) => [
      event.step === null ? "–" : h("button", { type: "button", class: "fault", onclick: () => open(event.step) }, format.count(event.step)),
      `${event.kind}: ${event.reason}`, event.action ?? "–",
      event.conversations.length ? h("div", {}, event.conversations.map((each) => h("div", {}, h("code", {}, `${each.source}:${each.line}`),
        each.loss === null || each.loss === undefined ? "" : ` loss ${format.number(each.loss)}`))) : event.layer ?? "–",
    ])));
}

const interval = (part) => (part.score === null ? "–" : h("span", {}, h("b", {}, format.share(part.score)),
  part.interval ? ` [${format.share(Math.max(0, part.interval[0]))}, ${format.share(part.interval[1])}]` : "",
  part.of ? h("span", { class: "soft" }, ` of ${format.count(part.of)}`) : ""));

export function scores({ scores: tasks, flipped, validation }) {
  const names = { val_loss: "loss", val_bpb: "bits per byte", val_accuracy: "token accuracy" };
  const rows = Object.entries(validation ?? {}).filter(([key]) => key in names || key.startsWith("val_loss/"))
    .map(([key, values]) => [names[key] ?? `loss on ${key.slice(9)}`, ...values.map((value) => (key === "val_accuracy" ? format.share(value) : format.number(value, 4)))]);
  if (!tasks?.length && !rows.length) return null;
  return section("Scores", tasks?.length ? "With 95 % bootstrap intervals." : null,
    tasks?.length ? table(["task", "before", "after", "at step"], tasks.map((task) => [task.task, interval(task.before), interval(task.after), format.count(task.after_step)])) : null,
    rows.length ? table(["validation", "before", "after"], rows) : null,
    flipped?.length ? h("details", {}, h("summary", {}, `${flipped.length} answers flipped: ${flipped.filter(({ right }) => right).length} became right, ${flipped.filter(({ right }) => !right).length} wrong`),
      flipped.map((each) => h("article", {}, h("pre", { class: "prompt" }, each.prompt), h("div", { class: "answers" },
        h("div", {}, h("h3", {}, "expected"), h("pre", {}, each.expected)),
        h("div", { class: each.right ? "wrong" : "right" }, h("h3", {}, `step ${each.steps[0]}`), h("pre", {}, each.before || "(empty)")),
        h("div", { class: each.right ? "right" : "wrong" }, h("h3", {}, `step ${each.steps[1]}`), h("pre", {}, each.after || "(empty)")))))) : null);
}

const STATES = { proven: "proven by this run's files", broken: "broken", open: "not proven yet" };

export function promises(found) {
  if (!found) return null;
  return section("Six promises", "What this run's files prove, and the command that proves it again.",
    h("div", { class: "promises" }, found.map((each) => h("div", { class: `promise ${each.state}` },
      h("b", { title: STATES[each.state] }, each.title), h("p", {}, each.evidence), command(each.command)))));
}

const meter = (share) => h("span", { class: "meter" }, h("i", { style: { width: `${(100 * share).toFixed(1)}%` } }));

export function coverage(plan) {
  if (!plan?.coverage?.length) return null;
  return section("Adapter coverage", "The weights of the layers that the adapter reaches, by class of module.",
    table(["module", "reached", "adapted", "not adapted"], plan.coverage.map((each) => [
      h("code", {}, each.module), h("span", {}, meter(each.reached / Math.max(1, each.parameters)), format.share(each.reached / Math.max(1, each.parameters))),
      each.reached_names.join(", ") || "–", each.missed_names.join(", ") || "–"])));
}

const STYLES = { good: ["span", "good"], bad: ["span", "bad"], code: ["code", null], strong: ["b", null] };
const cell = (each) => {
  if (each === null || typeof each === "string") return each;
  const [name, kind] = STYLES[each.style];
  return h(name, { class: kind }, each.text);
};

// Sections of the report, as the server wrote them.
export function reported(sections) {
  return (sections ?? []).map(({ title, note, blocks }) => section(title, cell(note), blocks.map((block) => (block.head
    ? table(block.head, block.rows.map((row) => row.map(cell)))
    : facts(Object.fromEntries(Object.entries(block.facts).map(([name, each]) => [name, cell(each)])))))));
}

export function prompts(found) {
  if (!found?.length) return null;
  return section("Prompts over time", "The most likely answer at every evaluation.", found.map(({ prompt, answers }) => {
    const slider = h("input", { type: "range", min: 0, max: answers.length - 1, value: answers.length - 1, "aria-label": "Evaluation", oninput: () => draw() });
    const shown = h("pre", { class: "over-time" });
    const at = h("output", {});
    const draw = () => { const { step, answer } = answers[Number(slider.value)]; at.textContent = `step ${format.count(step)}`; shown.textContent = answer || "(empty)"; };
    draw();
    return h("article", {}, h("pre", { class: "prompt" }, prompt), h("div", { class: "controls inside" }, slider, at), shown);
  }));
}

const MEASURES = [
  ["time", "seconds", format.seconds], ["device time", "device_hours", format.hours], ["peak memory", "peak_gib", (value) => `${format.number(value)} GiB`],
  ["energy", "kwh", (value) => `${format.number(value)} kWh`], ["price", "money", format.number],
];

export function costs({ costs: found, checkpoints, best_checkpoint: best }) {
  const { predicted = {}, measured = {} } = found ?? {};
  const known = (value) => value !== null && value !== undefined;
  const rows = MEASURES.filter(([, key]) => known(predicted[key]) || known(measured[key])).map(([name, key, show]) => {
    const both = known(predicted[key]) && known(measured[key]) && predicted[key] > 0;
    return [name, known(predicted[key]) ? show(predicted[key]) : "–", known(measured[key]) ? show(measured[key]) : "–",
      both ? signed(measured[key] / predicted[key] - 1) : "–"];
  });
  if (!rows.length && !checkpoints?.length) return null;
  const isPredicted = rows.some(([, expected]) => expected !== "–"); // not of a run of a few steps on a CPU
  return section("Predicted and measured", rows.length ? `${isPredicted ? "" : "Nothing was predicted: the run is too short, or has only begun. "}Time of the whole run, all starts together, is predicted after the first steps; memory by the worst batch before step 1, on a GPU.` : null,
    rows.length ? isPredicted ? table(["measure", "predicted", "measured", "difference"], rows) : table(["measure", "measured"], rows.map(([name, , found]) => [name, found])) : null,
    checkpoints?.length ? h("p", { class: "note checkpoints" }, "Checkpoints: ", checkpoints.map((step) => chip(`${format.count(step)}${best === `step-${String(step).padStart(6, "0")}` ? " best" : ""}`))) : null);
}

const signed = (share) => `${share < 0 ? "−" : "+"}${format.share(Math.abs(share))}`;

export function configuration(text) {
  return text ? h("section", {}, h("details", {}, h("summary", {}, "Resolved configuration"), h("pre", {}, text))) : null;
}
