// The ledger as a flow: every conversation that was read, to what became of it; each branch opens its lines.

import { getJson } from "./api.js";
import { h, replace, section, svg, table } from "./dom.js";
import * as format from "./format.js";

// Where the branches begin and end. On a phone, sources stand above their branches.
const WIDE = { width: 900, from: 230, to: 560, above: 0 };
const NARROW = { width: 400, from: 4, to: 150, above: 38 };
const COLORS = { kept: "var(--good)", changed: "var(--validation)", dropped: "var(--bad)" };

// The branches of one source: {text, count, color, outcome, reason}
function branches(source) {
  const noted = Object.entries(source.kept_with ?? {});
  const changed = (source.truncated ?? 0) + (source.split ?? 0) + (source.duplicates ?? 0) + noted.reduce((sum, [, n]) => sum + (n ?? 0), 0);
  const dropped = Object.entries(source.reasons ?? {}).map(([reason, count]) => ({ text: `dropped: ${reason}`, count, color: COLORS.dropped, outcome: "dropped", reason }));
  const parts = [
    { text: "truncated", count: source.truncated, color: COLORS.changed, outcome: "truncated" },
    { text: "split", count: source.split, color: COLORS.changed, outcome: "split" },
    { text: "kept, exact copies", count: source.duplicates, color: COLORS.changed, outcome: "kept", reason: "duplicate" },
    ...noted.map(([note, count]) => ({ text: `kept: ${note}`, count, color: COLORS.changed, outcome: "kept", reason: note })),
  ].filter(({ count }) => count);
  // a conversation can be truncated and noted: what is left is at least this
  const plain = { text: "kept as they are", count: Math.max(0, (source.kept ?? 0) - changed), color: COLORS.kept };
  return [plain, ...parts, ...dropped].filter(({ count }) => count);
}

export function ledger(run, sources) {
  if (!sources?.length) return null;
  const lines = h("div", {});
  const missing = sources.map(({ unaccounted }) => unaccounted);
  const balance = missing.some((each) => each === null) ? h("span", {}, "The ledger lacks counts.")
    : missing.some(Boolean) ? h("span", { class: "bad" }, `${format.count(missing.reduce((sum, each) => sum + Math.abs(each), 0))} conversations are not accounted for.`)
      : h("span", { class: "good" }, "✓ Every conversation is accounted for: in = kept + dropped.");

  async function open(branch, start = 0) {
    const { lines: found, more, note } = await getJson("/api/run/ledger", { run, outcome: branch.outcome, reason: branch.reason, start });
    replace(lines, h("div", { class: "panel" }, h("h3", { tabindex: -1 }, branch.text),
      note || !found.length ? h("p", { class: "note" }, note ?? "The ledger names no lines of this branch.")
        : table(["use", "file", "line", "reason", "detail"], found.map((line) => [line.use, h("code", {}, line.file), line.line, line.reason, line.detail])),
      start ? h("button", { type: "button", onclick: () => open(branch, Math.max(0, start - 200)) }, "Back") : null,
      more ? h("button", { type: "button", onclick: () => open(branch, start + 200) }, "More") : null));
    lines.querySelector("h3").focus();
  }
  return section("Ledger", balance, flow(sources, open), lines,
    table(["source", "use", "in", "kept", "dropped", "tokens", "supervised", "EOS supervised"], sources.map((source) => [
      h("code", {}, source.name), source.use, format.count(source.total), format.count(source.kept), format.count(source.dropped), format.count(source.tokens),
      source.tokens ? `${format.count(source.supervised_tokens)} (${format.share(source.supervised_tokens / source.tokens)})` : "–", format.share(source.eos_supervised)])));
}

function flow(sources, open) {
  const { width, from, to, above } = innerWidth < 760 ? NARROW : WIDE;
  const total = Math.max(1, sources.reduce((sum, { total: all }) => sum + (all ?? 0), 0));
  const gap = 10;
  const shown = sources.map((source) => ({ source, parts: branches(source) })).filter(({ parts }) => parts.length);
  const rows = shown.reduce((sum, { parts }) => sum + parts.length, 0);
  const scale = Math.max(60, 26 * rows) / total;
  const thick = (count) => Math.max(2, count * scale);
  const content = [];
  let right = 14;
  for (const { source, parts } of shown) {
    const space = parts.reduce((sum, { count }) => sum + Math.max(18, thick(count)) + gap, 0);
    const whole = parts.reduce((sum, { count }) => sum + thick(count), 0);
    const name = above ? { x: from, y: right } : { x: from - 10, y: right + (space - gap) / 2 - 2, "text-anchor": "end" };
    right += above;
    let left = right + (space - gap - whole) / 2;
    content.push(svg("rect", { x: from, y: left, width: 8, height: whole, fill: "var(--accent)", rx: 2 }),
      svg("text", name, short(source.name)),
      svg("text", { ...name, y: name.y + 15, class: "soft" }, `${source.use}, ${format.count(source.total)} in`));
    for (const part of parts) {
      const height = thick(part.count);
      const room = Math.max(18, height);
      const y = right + (room - height) / 2;
      const act = (event) => { event.preventDefault(); open(part); };
      const path = svg("path", { d: ribbon(from + 8, left, to, y, height), fill: part.color, onclick: part.outcome ? act : null });
      const label = [
        svg("rect", { x: to, y: right, width: width - to, height: room, fill: "transparent" }), // easier to click than a line
        svg("rect", { x: to, y, width: 8, height, fill: part.color, rx: 2 }),
        svg("text", { x: to + 18, y: y + height / 2 + 4 }, part.text, svg("tspan", { class: "soft" }, `  ${format.count(part.count)}`)),
      ];
      content.push(svg("g", { class: part.outcome ? "branch" : null }, path,
        part.outcome ? svg("a", { href: "#", role: "button", "aria-label": `Lines: ${part.text}, ${part.count}`, onclick: act }, label) : label));
      left += height;
      right += room + gap;
    }
    right += 12;
  }
  return svg("svg", { class: "flow", viewBox: `0 0 ${width} ${right}`, role: "group", "aria-label": "What became of every conversation" }, content);
}

const short = (text) => (text.length > 30 ? `…${text.slice(-29)}` : text);

function ribbon(x, y, toX, toY, height) {
  const middle = (x + toX) / 2;
  return `M${x} ${y}C${middle} ${y} ${middle} ${toY} ${toX} ${toY}V${toY + height}C${middle} ${toY + height} ${middle} ${y + height} ${x} ${y + height}Z`;
}
