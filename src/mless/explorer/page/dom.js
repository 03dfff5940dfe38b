// Elements. Texts go in as text only, so nothing in a result folder can become markup; and every sign of them can be seen.

import { visible } from "./formats.js";

const SVG = "http://www.w3.org/2000/svg";

// Attributes that people read or hear.
const READ = new Set(["aria-label", "title", "placeholder", "data-name"]);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : READ.has(name) ? visible(String(value)) : String(value));
  }
  put(element, ...children);
  return element;
}

// Put children behind those that are there: elements, texts, lists of them; nothing for null.
export function put(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
  return element;
}

export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

export function clear(element, ...children) {
  element.replaceChildren();
  return put(element, ...children);
}

// Up and down walk over the links of a table's rows.
export function byKeys(body) {
  body.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = event.target.closest?.("tr");
    if (!step || !row || event.ctrlKey || event.metaKey || event.altKey) return;
    const links = [...body.querySelectorAll("tr")].map((one) => one.querySelector("a")).filter(Boolean);
    const at = links.indexOf(row.querySelector("a"));
    if (at < 0) return;
    links[Math.min(links.length - 1, Math.max(0, at + step))].focus();
    event.preventDefault();
    event.stopPropagation();
  });
  return body;
}

// A labelled choice. `options` are [value, words] pairs.
export function choice(label, options, chosen, changed, attributes) {
  const select = h("select", { "aria-label": label, onchange: () => changed(select.value), ...attributes },
    options.map(([value, words]) => h("option", { value, selected: String(value) === String(chosen) }, words)));
  return h("label", { class: "choice" }, h("span", null, label), select);
}

// A small table. `columns` are [heading, numeric] pairs; cells are texts or elements. A broad one is a list of rows on a phone, each cell with its heading.
export function table(caption, columns, rows, attributes) {
  const kind = [attributes?.class, columns.length > 4 ? "broad" : null].filter(Boolean).join(" ");
  return h("div", { class: "wide" }, h("table", { ...attributes, class: kind || null },
    caption && h("caption", null, caption),
    h("thead", null, h("tr", null, columns.map(([name, numeric]) => h("th", { scope: "col", class: numeric ? "n" : null }, name)))),
    byKeys(h("tbody", null, rows.map((row) => h("tr", null, row.map((cell, at) => h(at ? "td" : "th", { scope: at ? null : "row", class: columns[at][1] ? "n" : null, "data-name": at ? columns[at][0] : null }, cell))))))));
}
