// Pictures drawn by hand as SVG: scales, marks that can be hovered and walked with the keyboard, and what belongs under a picture.

import { go } from "./address.js";
import { choice, h, svg } from "./dom.js";
import { textWidth, titled } from "./pen.js";
import { copying } from "./picture.js";
import { proofButton, showProof } from "./proof.js";

export const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
const SHAPES = ["circle", "square", "triangle", "diamond", "down", "plus", "cross", "ring"];

// ---- numbers

export function number(value, digits = 3, { sign = false } = {}) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const text = value.toFixed(digits);
  const shown = Number(text) === 0 ? text.replace("-", "") : sign && value > 0 ? `+${text}` : text;
  return shown.replace("-", "−");
}
// A number in another unit. What is not known stays so: null times something is 0 otherwise.
export function times(value, by) {
  return value === null || value === undefined ? null : value * by;
}
export function around(lo, hi, digits, options) {
  return lo === null || lo === undefined || hi === null || hi === undefined ? "" : ` [${number(lo, digits, options)}, ${number(hi, digits, options)}]`;
}
export function count(value) {
  return value.toLocaleString("en").replaceAll(",", " ");
}
// Digits after the point so that numbers of this size differ.
export function digitsFor(reach) {
  return reach > 0 ? Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(reach)))) : 2;
}
export function plural(n, word) {
  return `${count(n)} ${word}${n === 1 ? "" : "s"}`;
}

// ---- scales

export function linear([from, to], [start, end]) {
  const by = to === from ? 0 : (end - start) / (to - from);
  return (value) => start + (value - from) * by;
}
export function extent(values, { zero = null, room = 0.06 } = {}) {
  const known = values.filter((one) => one !== null && one !== undefined && Number.isFinite(one));
  if (zero !== null) known.push(zero);
  if (!known.length) return [-1, 1];
  const low = Math.min(...known);
  const high = Math.max(...known);
  const more = (high - low || Math.abs(high) || 1) * room;
  return [low - more, high + more];
}
export function ticks([low, high], wanted = 5) {
  const rough = (high - low) / Math.max(1, wanted);
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * size).find((one) => one >= rough) ?? rough;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  if (found.length < 3 && wanted < 10) return ticks([low, high], wanted + 2);
  const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9)));
  return found.map((value) => [value, digits]);
}

// ---- marks

export function shape(kind, x, y, size, attributes) {
  const s = size;
  const at = (points) => svg("path", { d: `M${points.map(([a, b]) => `${x + a * s},${y + b * s}`).join("L")}Z`, ...attributes });
  switch (typeof kind === "number" ? SHAPES[kind % SHAPES.length] : kind) {
    case "square": return svg("rect", { x: x - 0.85 * s, y: y - 0.85 * s, width: 1.7 * s, height: 1.7 * s, ...attributes });
    case "triangle": return at([[0, -1.15], [1.05, 0.85], [-1.05, 0.85]]);
    case "down": return at([[0, 1.15], [1.05, -0.85], [-1.05, -0.85]]);
    case "diamond": return at([[0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]]);
    case "plus": return at([[-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4], [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4], [-1.1, 0.4], [-1.1, -0.4], [-0.4, -0.4]]);
    case "cross": return at([[-1, -0.55], [-0.55, -1], [0, -0.45], [0.55, -1], [1, -0.55], [0.45, 0], [1, 0.55], [0.55, 1], [0, 0.45], [-0.55, 1], [-1, 0.55], [-0.45, 0]]);
    case "ring": return svg("circle", { cx: x, cy: y, r: s, ...attributes, class: `${attributes.class} hollow` });
    default: return svg("circle", { cx: x, cy: y, r: s, ...attributes });
  }
}
export const VERDICT_SHAPE = { rises: "triangle", drops: "down", equivalent: "square", undecided: "circle" };

export function label(x, y, text, attributes) {
  return svg("text", { x, y, ...attributes }, text);
}
// A text of at most so many letters; a longer one ends with ….
export function cut(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
// A label in so much room. One that has to be cut says all of its text to whoever points at it.
export function fitted(x, y, text, room, attributes, font) {
  let shown = cut(String(text), 200);
  while (shown.length > 2 && textWidth(shown, font) > room) shown = `${shown.replace(/…$/, "").slice(0, -1)}…`;
  const made = label(x, y, shown, attributes);
  if (shown !== String(text)) made.append(svg("title", null, text));
  return made;
}
// The width that a column of names needs, within bounds.
export function columnFor(names, least, most, font) {
  return Math.min(most, Math.max(least, ...names.map((name) => Math.ceil(textWidth(name, font)) + 1)));
}

// ---- the picture with its numbers

const tip = h("div", { class: "tip", role: "status" });
function showTip(mark, lines) {
  tip.replaceChildren(...lines.map((line, at) => h("div", { class: at ? null : "first" }, line)));
  document.body.append(tip);
  const box = mark.getBoundingClientRect();
  const own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(6, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 6);
  const above = box.top - own.height - 8;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(above < 4 ? box.bottom + 8 : above) + scrollY}px`;
}
export function hideTip() {
  tip.remove();
}

// Give an element numbers: on hover, on focus, and for screen readers.
export function told(mark, lines, { go = null } = {}) {
  const said = lines.filter(Boolean);
  mark.classList.add("mark");
  mark.setAttribute("role", go ? "link" : "img");
  mark.setAttribute("tabindex", "-1");
  mark.setAttribute("aria-label", said.join("; "));
  mark.addEventListener("pointerenter", () => showTip(mark, said));
  mark.addEventListener("pointerleave", hideTip);
  mark.addEventListener("focus", () => showTip(mark, said));
  mark.addEventListener("blur", hideTip);
  if (go) {
    mark.addEventListener("click", go);
    mark.addEventListener("keydown", (event) => event.key === "Enter" && go());
  }
  return mark;
}

// One tab stop; arrows walk over the marks in their order.
function walked(picture) {
  const marks = () => [...picture.querySelectorAll(".mark")];
  const first = marks()[0];
  if (first) first.setAttribute("tabindex", "0");
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const all = marks();
    const at = all.indexOf(document.activeElement);
    if (at < 0) return;
    const next = all[Math.min(all.length - 1, Math.max(0, at + step))];
    all[at].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
    event.preventDefault();
    event.stopPropagation();
  });
}

// The drawing with its colours written into it, so that it looks the same elsewhere.
const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "font-family", "font-size", "font-weight", "text-anchor", "paint-order"];
function styled(drawn) {
  const copy = drawn.cloneNode(true);
  const from = [...drawn.querySelectorAll("*")];
  [...copy.querySelectorAll("*")].forEach((element, at) => {
    const seen = getComputedStyle(from[at]);
    for (const name of STYLES) element.setAttribute(name, seen.getPropertyValue(name));
    for (const name of ["class", "tabindex", "role", "style", "aria-label"]) element.removeAttribute(name);
  });
  return [...copy.childNodes];
}
// The legend of the page as part of a drawing.
function drawnLegend(list, width) {
  const group = svg("g");
  const { color, fontFamily } = getComputedStyle(list);
  let [x, y] = [0, 0];
  for (const entry of list.children) {
    const wide = 20 + textWidth(entry.textContent) + 14;
    if (x && x + wide > width) [x, y] = [0, y + 18];
    group.append(svg("g", { transform: `translate(${x} ${y})` }, styled(entry.querySelector("svg")), svg("text", { x: 20, y: 11, "font-size": 12, "font-family": fontFamily, fill: color }, entry.textContent)));
    x += wide;
  }
  return { element: group, height: y + 24 };
}
function standalone(drawn, title, legend) {
  const [width, height] = [drawn.width.baseVal.value, drawn.height.baseVal.value];
  const made = titled(width, height, title, getComputedStyle(document.body).backgroundColor, legend && drawnLegend(legend, width - 16));
  made.inside.append(...styled(drawn));
  return { element: made.element, width, height: made.height };
}

// A picture that is drawn again when its width changes. `draw(width)` gives an SVG element; `rows()` the numbers as a table; `proof` is
// [folder, table, row]: where they stand. `legend` is the one of the page, which a copy has too.
export function picture(title, draw, rows, { caption = null, name = "picture", proof = null, legend = null } = {}) {
  const room = h("div", { class: "room" });
  let width = 0;
  const redraw = () => {
    const drawn = draw(width);
    drawn.setAttribute("role", "group");
    drawn.setAttribute("aria-label", `${title}. Arrows walk over the marks.`);
    room.replaceChildren(drawn);
    walked(drawn);
  };
  const look = new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now > 40 && now !== width) {
      width = now;
      redraw();
    }
  });
  look.observe(room);
  const drawn = () => standalone(room.firstElementChild, title, legend);
  return h("figure", { class: "picture chart" },
    h("div", { class: "title" }, h("figcaption", null, title), h("div", { class: "tools" }, proofOf(proof), copying(name, drawn, rows))), room,
    caption && h("p", { class: "soft small reading" }, caption));
}

function proofOf(proof) {
  return proof && proofButton(() => showProof(...proof));
}

// What stands above a table of numbers: its title, and how to copy and check it.
export function tableHead(title, name, rows, proof) {
  return h("div", { class: "title" }, h("h2", null, title), h("div", { class: "tools" }, proofOf(proof), copying(name, null, rows)));
}

export function canvas(width, height, ...children) {
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "drawn" }, ...children);
}

// A legend as text with marks, outside of the picture so that it can wrap.
export function legend(entries) {
  return h("ul", { class: "marks-legend" }, entries.map(({ kind, colour, words, hollow }) =>
    h("li", null, svg("svg", { width: 16, height: 14, "aria-hidden": "true" }, shape(kind, 8, 7, 4.5, { class: `${colour}${hollow ? " hollow" : ""}` })), words)));
}

// The metric that the address names, else the first; and a choice of it, with units.
export function metricOf(view, values, metrics) {
  const metric = metrics.find((one) => one.name === values.metric) ?? metrics[0];
  return [metric, choice("Metric", metrics.map((one) => [one.name, `${one.name} (${one.unit})`]), metric.name, (name) => go(view, { ...values, metric: name }))];
}

// The choice of a readout in words, and what the chosen one means.
export function readoutOf(readouts, chosen, changed) {
  const one = readouts.find(({ name }) => name === chosen);
  return [readouts.length > 1 && choice("Readout", readouts.map(({ name, words }) => [name, words]), chosen, changed), one.meaning];
}

// ---- rows with intervals: the one forest that several views draw

// rows: {label, value, lo, hi, kind, colour, said, heading, href, size, thin}; numbers as they are shown. With `over` each row's name stands above its line.
export function forest(width, rows, { nothing = 0, band = null, unit = "", ratio = false, right = true, sign = !ratio, over = false } = {}) {
  const wanted = columnFor(rows.filter((row) => !row.heading).map((row) => row.label ?? ""), 50, Infinity) + 16;
  // In a narrow picture each name stands above its line, with its numbers, which have no room beside it.
  const above = over || (width <= 640 && (right || wanted > width * 0.34));
  const names = above ? 12 : Math.min(width * 0.34, wanted);
  const words = right && width > 640 ? 210 : 0;
  const line = above ? 42 : 26;
  const height = rows.length * line + 46;
  const values = rows.flatMap((row) => [row.value, row.lo, row.hi]);
  const reach = extent([...values, ...(band ? [band[0], band[1]] : [])], { zero: nothing });
  const log = ratio && reach[0] > 0;
  const place = (value) => (log ? Math.log(value) : value);
  const known = log ? extent(values.filter((one) => one > 0).map(Math.log), { zero: Math.log(nothing) }) : reach;
  const x = linear(known, [names, width - words - 10]);
  const drawn = canvas(width, height);
  const bottom = rows.length * line + 8;
  if (band) drawn.append(svg("rect", { x: x(place(band[0])), y: 4, width: Math.max(0, x(place(band[1])) - x(place(band[0]))), height: bottom - 4, class: "band" }));
  const marks = log ? ticks([Math.exp(known[0]), Math.exp(known[1])]) : ticks(known, width < 480 ? 3 : 5);
  for (const [value, digits] of marks) {
    if (log && value <= 0) continue;
    drawn.append(svg("line", { x1: x(place(value)), x2: x(place(value)), y1: 4, y2: bottom, class: "grid" }),
      label(x(place(value)), bottom + 16, number(value, digits, { sign }), { class: "tick", "text-anchor": "middle" }));
  }
  drawn.append(svg("line", { x1: x(place(nothing)), x2: x(place(nothing)), y1: 4, y2: bottom, class: "axis" }));
  if (unit) drawn.append(label((names + width - words) / 2, bottom + 34, unit, { class: "tick", "text-anchor": "middle" }));
  rows.forEach((row, at) => {
    const top = at * line + 4;
    const y = above ? top + 31 : top + line / 2;
    if (row.heading) {
      drawn.append(fitted(2, y + 4, row.label, width - 20, { class: "heading" }, { weight: 650 }));
      return;
    }
    const group = svg("g", null, svg("rect", { x: 0, y: top, width, height: line, class: "hit" }));
    if (above) {
      const room = width - 8 - textWidth(row.label) - textWidth(row.words ?? "", { size: 11.5 });
      group.append(fitted(4, top + 16, row.label, width - 8, { class: "name halo" }));
      if (right && row.words && room > 12) group.append(label(width - 4, top + 16, row.words, { class: "words halo", "text-anchor": "end" }));
    } else group.append(fitted(names - 12, y + 4, row.label, names - 14, { class: "name", "text-anchor": "end" }));
    const colour = row.colour ?? "c1";
    if (row.lo !== null && row.lo !== undefined && row.hi !== null && row.hi !== undefined) {
      group.append(svg("line", { x1: x(place(row.lo)), x2: x(place(row.hi)), y1: y, y2: y, class: `whisker ${colour}${row.thin ? " thin" : ""}` }));
    }
    if (row.value !== null && row.value !== undefined) group.append(shape(row.kind ?? "circle", x(place(row.value)), y, row.size ?? 5, { class: `${colour}${row.hollow ? " hollow" : ""}` }));
    if (words && row.words) group.append(label(width - words + 8, y + 4, row.words, { class: "words" }));
    drawn.append(told(group, row.said ?? [row.label], { go: row.go }));
  });
  return drawn;
}
