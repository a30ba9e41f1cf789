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
  return section("Events", "Steps that went wrong, with their cause. They are dashed lines on the curves.",
    table(["step", "what", "action", "conversations"], found.slice(-50).map((event) => [
      event.step === null ? "–" : h("button", { type: "button", class: "fault", onclick: () => open(event.step) }, format.count(event.step)),
      `${event.kind}: ${event.reason}`, event.action ?? "–",
      event.conversations.length ? event.conversations.map((each) => h("div", {}, h("code", {}, `${each.source}:${each.line}`),
        each.loss === null || each.loss === undefined ? "" : ` loss ${format.number(each.loss)}`)) : event.layer ?? "–",
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

export function effect(found) {
  const modules = found?.modules ?? [];
  if (!modules.length) return null;
  const kinds = new Map();
  for (const each of modules) {
    const kind = String(each.module).replaceAll(/\.\d+(?=\.|$)/g, ".*");
    kinds.set(kind, [...(kinds.get(kind) ?? []), each]);
  }
  const all = (list, key) => {
    const n = list.filter((each) => each[key] === true).length;
    return h("span", { class: n === list.length ? "good" : "bad" }, n === list.length ? "all" : `${n} of ${list.length}`);
  };
  return section("Effect", `What training changed, at step ${format.count(found.step)}.`,
    table(["weight", "number", "got a gradient", "moved", "‖ΔW‖ ÷ ‖W‖"], [...kinds].map(([kind, list]) => {
      const changes = list.map(({ change }) => change).filter((change) => typeof change === "number");
      return [h("code", {}, kind), list.length, all(list, "gradient"), all(list, "moved"),
        changes.length ? `${format.number(Math.min(...changes), 2)} to ${format.number(Math.max(...changes), 2)}` : "–"];
    })));
}

export function certificates(found) {
  if (!found?.length) return null;
  return section("Exports", "Every export is loaded again and compared with the trained model.",
    table(["export", "verified", "dtype", "largest logit difference", "same next token", "conversations", "trained weights in it"], found.map((each) => [
      h("b", {}, each.kind), h("span", { class: each.verified === true ? "good" : "bad" }, each.verified === true ? "✓ verified" : `✗ ${(each.reasons ?? []).join("; ") || "not verified"}`),
      each.dtype ?? "–", format.number(each.max_logit_difference), format.share(each.same_next_token), format.count(each.conversations),
      each.effect ? `${each.effect.exported ?? "–"} of ${each.effect.weights ?? "–"}` : "–"])));
}

export function planFacts({ plan, status, model, summary, checkpoints, best_checkpoint: best }) {
  if (!plan) return null;
  const part = plan.trainable_parameters && plan.parameters ? ` of ${format.count(plan.parameters)} (${format.share(plan.trainable_parameters / plan.parameters)})` : "";
  const start = status?.first_step;
  return section("Plan and machine", null, facts({
    model, "trainable parameters": plan.trainable_parameters ? `${format.count(plan.trainable_parameters)}${part}` : null,
    device: plan.device_name ?? plan.device, processes: format.count(plan.world), precision: plan.precision, attention: plan.attention,
    packing: plan.packing, "packing efficiency": format.share(plan.efficiency), "row length": format.count(plan.row_length),
    "rows per micro-batch": format.count(plan.micro_rows), batch: plan.batch ? Object.entries(plan.batch).map(([unit, n]) => `${format.count(n)} ${unit}`).join(", ") : null,
    epochs: format.number(plan.epochs), "conversations planned": format.count(plan.conversations), "tokens planned": format.count(plan.tokens),
    host: summary.host, "Slurm job": summary.job === null ? null : String(summary.job), phase: status?.phase,
    "first step after": start ? format.seconds(start.first_step_s) : null, folder: h("code", {}, summary.folder),
  }), checkpoints?.length ? h("p", { class: "note" }, "Checkpoints: ", checkpoints.map((step) => chip(`${format.count(step)}${best === `step-${String(step).padStart(6, "0")}` ? " best" : ""}`))) : null);
}

export function configuration(text) {
  return text ? h("section", {}, h("details", {}, h("summary", {}, "Resolved configuration"), h("pre", {}, text))) : null;
}
