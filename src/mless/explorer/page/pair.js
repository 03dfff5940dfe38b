// Two folders' heads side by side: each head's retained share in both, and the heads that differ most.

import { addressOf, go } from "./address.js";
import { around, canvas, extent, label, linear, number, picture, shape, ticks, told } from "./chart.js";
import { choice, h, svg, table } from "./dom.js";
import { headName, pValue, pWords } from "./formats.js";
import { ask } from "./source.js";

const MOST = 10;
const ratioOf = (row) => `${number(row.ratio, 3)}${around(row.lo, row.hi, 3)}`;

function scatter(width, found, open) {
  const side = Math.min(width, 460);
  const [left, low] = [56, side - 46];
  const known = found.rows.filter((row) => row.first > 0 && row.second > 0);
  const reach = extent(known.flatMap((row) => [Math.log(row.first), Math.log(row.second)]), { zero: 0 });
  const [x, y] = [linear(reach, [left + 6, side - 8]), linear(reach, [low, 8])];
  const drawn = canvas(side, side);
  for (const [value, digits] of ticks([Math.exp(reach[0]), Math.exp(reach[1])], 4)) {
    if (value <= 0) continue;
    const at = Math.log(value);
    drawn.append(svg("line", { x1: left, x2: side - 4, y1: y(at), y2: y(at), class: "grid" }), label(left - 6, y(at) + 4, number(value, digits), { class: "tick", "text-anchor": "end" }),
      label(x(at), low + 16, number(value, digits), { class: "tick", "text-anchor": "middle" }));
  }
  drawn.append(svg("line", { x1: x(reach[0]), y1: y(reach[0]), x2: x(reach[1]), y2: y(reach[1]), class: "axis" }),
    label((left + side) / 2, side - 8, `λ in ${found.names[0]}`, { class: "tick", "text-anchor": "middle" }),
    svg("text", { transform: `translate(14 ${low / 2}) rotate(-90)`, class: "tick", "text-anchor": "middle" }, `λ in ${found.names[1]}`));
  for (const row of known.toSorted((a, b) => Number(a.p_adjusted <= 0.05) - Number(b.p_adjusted <= 0.05))) {
    const sure = row.p_adjusted !== null && row.p_adjusted <= 0.05;
    drawn.append(told(shape("circle", x(Math.log(row.first)), y(Math.log(row.second)), 3.6, { class: `${sure ? (row.ratio < 1 ? "down" : "up") : "open"}${sure ? "" : " hollow"}` }),
      [headName(row.layer, row.head), `λ ${number(row.first, 3)} in ${found.names[0]}, ${number(row.second, 3)} in ${found.names[1]}`, `second over first ${ratioOf(row)}`, `${pWords(row.p)}; after Holm ${pWords(row.p_adjusted)}`, `${row.n} items`], { go: () => open(row) }));
  }
  return drawn;
}

// `others` are the folders that may stand beside the first one.
export async function pairs(place, first, others, condition, values) {
  const other = others.find((one) => String(one.number) === values.beside) ?? others[0];
  const picked = others.length > 1 ? h("div", { class: "choices" }, choice("Beside", others.map((one) => [one.number, one.name]), other.number, (number) => go("between", { ...values, beside: number }))) : null;
  let found;
  try {
    found = await ask("between/pair", { folder: first.number, other: other.number, condition });
  } catch (fault) {
    place.append(h("section", null, h("h2", null, "Head beside head"), picked, h("p", { class: "soft" }, fault.message)));
    return;
  }
  const sure = found.rows.filter((row) => row.p_adjusted !== null && row.p_adjusted <= 0.05).length;
  const top = found.rows.toSorted((a, b) => Math.abs(Math.log(b.ratio)) - Math.abs(Math.log(a.ratio))).slice(0, MOST);
  const open = (row) => go("head", { folder: first.number, condition: found.condition, layer: row.layer, head: row.head });
  place.append(h("section", null, h("h2", null, "Head beside head"), picked,
    h("p", null, `${found.rows.length} heads that both folders measured, over the ${found.n} items that both have. ${sure} differ after Holm (filled).`),
    picture(`Retained share λ of each head, ${found.condition}: ${found.names.join(" and ")}`, (width) => scatter(width, found, open),
      () => [["layer", "head", "first", "second", "ratio", "lo", "hi", "n", "p", "p_adjusted"], ...found.rows.map((row) => [row.layer, row.head, row.first, row.second, row.ratio, row.lo, row.hi, row.n, row.p, row.p_adjusted])],
      { name: "head-beside-head", proof: [first.number, "shares", { condition: found.condition, queries: "original" }, `λ of each item, against the same rows of ${found.names[1]}.`], caption: "On the line a head keeps as much in both. Below it, orange: less in the second folder. Above, purple: more." }),
    h("p", { class: "soft small" }, "The heads that differ most; the ratio is the second folder's λ over the first's, the geometric mean over items."),
    table(null, [["head"], ["λ, first", true], ["λ, second", true], ["second / first", true], ["p (Holm)", true]], top.map((row) => [
      h("a", { href: addressOf("head", { folder: first.number, condition: found.condition, layer: row.layer, head: row.head }) }, headName(row.layer, row.head)), number(row.first, 3), number(row.second, 3), ratioOf(row), pValue(row.p_adjusted)]))));
}
