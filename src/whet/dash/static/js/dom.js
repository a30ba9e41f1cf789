// Elements without HTML: text from data and models only ever becomes text.

const SVG = "http://www.w3.org/2000/svg";

// As in whet's terminal and reports: characters that hide or turn text around are shown as escapes.
const CONTROLS = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\u206a-\u206f\ufeff\ufff9-\ufffb]/g;
export const visible = (text) => text.replace(CONTROLS, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (typeof child === "string" ? visible(child) : child)));
  return element;
}

export const h = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

export const section = (title, note, ...content) =>
  h("section", { id: title.toLowerCase().replaceAll(/[^a-z]+/g, "-") },
    h("h2", {}, title), note ? h("p", { class: "note" }, note) : null, content);

const NUMBER = /^([<>−+-]?[\d.,]+(e-?\d+)?( ?[A-Za-z%/]{1,5}| min \d\d s| h \d\d min| \([\d.]+%\))?|–)?$/;

// rows: arrays of cells, or elements; a cell is text, a number or an element. Columns of numbers end at the right.
export const table = (head, rows, attributes) => {
  const titles = head.map((title) => (typeof title === "string" ? title : title.textContent));
  const made = rows.map((row) => (Array.isArray(row) ? tableRow(titles, row) : row));
  const heads = head.map((title) => h("th", { scope: "col" }, title));
  heads.forEach((each, i) => {
    const column = made.map((row) => row.children[i]);
    const isNumbers = column.length > 0 && column.every((cell) => NUMBER.test(cell?.textContent)) && column.some((cell) => /\d/.test(cell.textContent));
    [each, ...column].forEach((cell) => cell?.classList.toggle("num", isNumbers));
  });
  return h("table", attributes, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, made));
};

export const tableRow = (titles, cells) =>
  h("tr", {}, cells.map((cell, i) => h("td", { "data-label": titles[i] }, cell ?? "–")));

export const facts = (values) =>
  h("dl", { class: "facts" }, Object.entries(values)
    .filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== "–")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

export const tile = (value, label) => h("div", { class: "tile" }, h("strong", {}, value), h("span", {}, label));

export const chip = (text, kind) => h("span", { class: `chip ${kind ?? ""}` }, text);

// A row of buttons of which one is pressed.
export function choice(label, options, current, choose) {
  const buttons = options.map(([value, text]) =>
    h("button", {
      type: "button", "aria-pressed": String(value === current),
      onclick: () => {
        buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === value)));
        choose(value);
      },
    }, text));
  return h("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(Boolean));
  return element;
}
