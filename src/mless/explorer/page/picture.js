// A picture: a canvas with a title, a reading of its numbers, and buttons that copy it as SVG, PNG or CSV.

import { h } from "./dom.js";
import { csv } from "./formats.js";
import { CanvasPen, SvgPen } from "./pen.js";
import { ink } from "./scales.js";

function save(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Where a browser or a frame does not let a page copy, the picture is saved as a file.
async function copy(kinds, name, blob, said) {
  try {
    await navigator.clipboard.write([new ClipboardItem(kinds)]);
    said("copied");
  } catch {
    try {
      save(name, await blob);
      said(`saved as ${name}`);
    } catch (fault) {
      said(fault.message);
    }
  }
}

function png(text, width, height) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    image.onload = () => {
      const canvas = h("canvas", { width: width * 2, height: height * 2 });
      const to = canvas.getContext("2d");
      to.scale(2, 2);
      to.drawImage(image, 0, 0, width, height);
      URL.revokeObjectURL(address);
      canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no picture"))), "image/png");
    };
    image.onerror = () => reject(new Error("no picture"));
    image.src = address;
  });
}

// The buttons. `drawn` gives {element, width, height} of an SVG, and is null for a table; `cut` says what is not in it. `rows` gives the numbers,
// with a heading, or a promise of them.
export function copying(name, drawn, rows) {
  const said = h("span", { class: "said", role: "status" });
  let timer = null;
  const say = (words) => {
    said.textContent = words;
    clearTimeout(timer);
    timer = setTimeout(() => (said.textContent = ""), 4000);
  };
  const sayOf = (cut) => (words) => say(cut ? `${words}: ${cut}` : words);
  const text = () => new XMLSerializer().serializeToString(drawn().element);
  const tools = [
    ["SVG", () => copy({ "text/plain": new Blob([text()], { type: "text/plain" }) }, `${name}.svg`, new Blob([text()], { type: "image/svg+xml" }), sayOf(drawn().cut))],
    ["PNG", () => {
      const { width, height, cut } = drawn();
      const made = png(text(), width, height);
      return copy({ "image/png": made }, `${name}.png`, made, sayOf(cut));
    }],
    ["CSV", () => {
      const made = Promise.resolve(rows()).then(csv);
      return copy({ "text/plain": made.then((words) => new Blob([words], { type: "text/plain" })) }, `${name}.csv`, made.then((words) => new Blob([words], { type: "text/csv" })), say);
    }],
  ].filter(([words]) => drawn || words === "CSV");
  return h("div", { class: "copying", role: "group", "aria-label": drawn ? "Copy this picture" : "Copy this table" }, said, h("span", null, "copy"),
    tools.map(([words, act]) => h("button", { type: "button", "aria-label": `Copy as ${words}`, onclick: act }, words)));
}

// `size(width)` → height; `draw(pen, width)` draws; `rows()` the numbers. Returns {element, canvas, redraw}.
export function picture({ title, name, size, draw, rows, label, attributes }) {
  const canvas = h("canvas", { role: "img", "aria-label": label ?? title, ...attributes });
  const frame = h("div", { class: "canvas" }, canvas);
  let width = 0;
  const redraw = () => {
    if (!width) return;
    draw(new CanvasPen(canvas, width, size(width)), width);
  };
  const drawn = () => {
    const wide = width || 900;
    const pen = new SvgPen(wide, size(wide), title, ink("page"));
    draw(pen, wide);
    return { element: pen.element, width: wide, height: pen.height };
  };
  const watch = new ResizeObserver(() => {
    const now = Math.floor(frame.clientWidth);
    if (now && now !== width) {
      width = now;
      redraw();
    }
  });
  watch.observe(frame);
  const onTheme = () => redraw();
  addEventListener("theme", onTheme);
  const element = h("figure", { class: "picture" },
    h("div", { class: "title" }, h("figcaption", null, title), copying(name, drawn, rows)), frame);
  return { element, canvas, redraw, end: () => { watch.disconnect(); removeEventListener("theme", onTheme); } };
}
