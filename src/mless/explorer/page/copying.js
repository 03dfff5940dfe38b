// Copy or save what is on the screen: SVG, PNG, CSV. Nothing leaves this machine.

import { h } from "./dom.js";

const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight", "font-style", "text-anchor", "paint-order"];

// The drawing with its colours written into it, so that it looks the same elsewhere.
export function standalone(drawn, title) {
  const copy = drawn.cloneNode(true);
  const from = [drawn, ...drawn.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((element, at) => {
    const seen = getComputedStyle(from[at]);
    for (const name of STYLES) {
      const value = seen.getPropertyValue(name);
      if (value) element.setAttribute(name, value);
    }
    for (const name of ["class", "tabindex", "role", "style"]) element.removeAttribute(name);
  });
  const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ width: "100%", height: "100%", fill: getComputedStyle(document.body).backgroundColor })) back.setAttribute(name, value);
  copy.prepend(back);
  const words = document.createElementNS("http://www.w3.org/2000/svg", "title");
  words.textContent = title;
  copy.prepend(words);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

async function png(drawn, title) {
  const text = standalone(drawn, title);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const by = 2;
  const sheet = document.createElement("canvas");
  sheet.width = drawn.width.baseVal.value * by;
  sheet.height = drawn.height.baseVal.value * by;
  const pen = sheet.getContext("2d");
  pen.scale(by, by);
  pen.drawImage(image, 0, 0);
  return new Promise((done) => { sheet.toBlob(done, "image/png"); });
}

// Rows are lists of cells, the first their names. A cell that a spreadsheet would run as a formula gets a sign before it.
export function csv(rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "number" ? String(value) : String(value).replace(/^[=+\-@\t\r]/, "'$&");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return `${rows.map((row) => row.map(cell).join(",")).join("\n")}\n`;
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function place(kind, blob, name, said) {
  // Where the clipboard is not to be had (a page from disk, a frame), it is saved as a file.
  try {
    const type = blob.type === "image/png" ? blob.type : "text/plain";
    const content = type === blob.type ? blob : new Blob([await blob.text()], { type });
    await navigator.clipboard.write([new ClipboardItem({ [type]: content })]);
    said.textContent = `${kind} copied.`;
  } catch {
    save(blob, name);
    said.textContent = `${kind} saved as ${name}.`;
  }
}

// The buttons under a picture or table. `picture()` gives the SVG element, or is left out for a table; `rows()` the numbers.
export function copying(figure, { name, picture = null, rows = null, command = null }) {
  const said = h("span", { class: "soft small said", role: "status" });
  const title = () => figure.querySelector("figcaption, caption, h2")?.textContent ?? name;
  const button = (kind, make) => h("button", { class: "copy", type: "button", onclick: async () => place(kind, await make(), `${name}.${kind.toLowerCase()}`, said) }, kind);
  return h("div", { class: "copying" }, h("span", { class: "soft small" }, "Copy"),
    picture && button("SVG", async () => new Blob([standalone(picture(), title())], { type: "image/svg+xml" })),
    picture && button("PNG", () => png(picture(), title())),
    rows && button("CSV", async () => new Blob([csv(rows())], { type: "text/csv" })), said,
    command && h("details", { class: "proof" }, h("summary", null, "Where these numbers come from"), h("pre", { tabindex: 0 }, command)));
}
