// One head: what it does, its curve without and with filler, its items by how far they shift.

import { addressOf, go } from "./address.js";
import { byKeys, choice, clear, h } from "./dom.js";
import { beyondItems, fixed, headName, interval, pWords, short } from "./formats.js";
import { textWidth } from "./pen.js";
import { picture } from "./picture.js";
import { proofButton, showProof } from "./proof.js";
import { ink, linear, quantile, ticks } from "./scales.js";
import { ask } from "./source.js";

const HEIGHT = 300;
const LEFT = 58;
const ROWS = 100;
const ROLES = { without: ["without filler", "none", []], with: ["with filler", "with", []], text: ["natural text of the same length", "text", [5, 4]] };

// Where the entries of the legend stand: side by side, on a further line where there is no room.
function legendOf(roles, width) {
  let [x, y] = [LEFT, 16];
  return roles.map((role) => {
    const wide = 26 + textWidth(ROLES[role][0]);
    if (x > LEFT && x + wide > width - 4) [x, y] = [LEFT, y + 18];
    const place = { role, x, y };
    x += wide + 18;
    return place;
  });
}

function drawCurves(pen, width, found, cursor) {
  const [text, soft, line] = [ink("ink"), ink("soft"), ink("line")];
  const entries = legendOf(Object.keys(found.curves), width);
  const box = { left: LEFT, right: width - 12, top: entries[entries.length - 1].y + 18, low: HEIGHT - 44 };
  const longest = Math.max(...Object.values(found.curves).map((one) => one.mean.length), 1);
  const tops = Object.values(found.curves).flatMap((one) => one.hi.map((hi, at) => hi ?? one.mean[at])).filter((one) => one !== null);
  const top = Math.max(quantile(tops, 0.995) * 1.15, 1e-9);
  const x = linear([found.first, found.first + Math.max(1, longest - 1)], [box.left, box.right]);
  const y = linear([0, top], [box.low, box.top]);
  for (const tick of ticks(0, top, 4)) {
    pen.line([[box.left, y(tick)], [box.right, y(tick)]], line, 1);
    pen.text(box.left - 6, y(tick) + 4, short(tick), { size: 11, anchor: "end", fill: soft });
  }
  for (const tick of ticks(found.first, found.first + longest - 1, Math.max(3, width / 110))) {
    if (Number.isInteger(tick)) pen.text(x(tick), box.low + 17, String(tick), { size: 11, anchor: "middle", fill: soft });
  }
  pen.text((box.left + box.right) / 2, HEIGHT - 8, "position among the original tokens (from 0)", { size: 12, anchor: "middle", fill: soft });
  pen.text(14, (box.top + box.low) / 2, "attention received", { size: 12, anchor: "middle", fill: soft, turn: -90 });
  for (const { role, x: at, y: high } of entries) {
    const curve = found.curves[role];
    const [words, name, dash] = ROLES[role];
    const colour = ink(name);
    const clip = (value) => Math.max(box.top - 6, y(value));
    if (role !== "text") {
      const known = curve.mean.map((_, i) => i).filter((i) => curve.lo[i] !== null);
      pen.area([...known.map((i) => [x(found.first + i), clip(curve.hi[i])]), ...known.reverse().map((i) => [x(found.first + i), Math.min(clip(curve.lo[i]), box.low)])], colour, 0.16);
    }
    pen.line(curve.mean.map((value, i) => (value === null ? null : [x(found.first + i), clip(value)])), colour, role === "text" ? 1.2 : 1.7, dash);
    pen.line([[at, high], [at + 20, high]], colour, 2, dash);
    pen.text(at + 26, high + 4, words, { size: 12, fill: text });
  }
  if (pen.live && cursor !== null) pen.line([[x(cursor), box.top], [x(cursor), box.low]], ink("mark"), 1);
  return { box, x, longest };
}

export const view = {
  title: "Head",
  inside: "map",
  keys: [["← →", "head before and after (in the page), position (in the curve)"], ["↑ ↓", "layer above and below (in the page), item (in the list)"], ["p", "proof"]],
  up: (values) => ["map", { folder: values.folder, condition: values.condition, layer: values.layer, head: values.head, queries: values.queries }],
  async show(place, state, tools) {
    const folder = Number(state.folder ?? 1);
    const queries = state.queries ?? "original";
    const [layer, head] = [Number(state.layer), Number(state.head)];
    const condition = state.condition;
    const asked = { folder, condition, layer, head, queries };
    const [map, found] = await Promise.all([ask("map", { folder, queries }), ask("head", asked)]);
    const one = map.conditions.find((other) => other.name === condition);
    const at = map.layers.indexOf(layer) * map.columns.length + map.columns.indexOf(head);
    const cell = (name) => one?.heads[name][at];
    const to = (changes) => ({ ...state, folder, ...changes });
    const verdict = cell("verdict") ?? "no verdict";
    const beside = one?.beside ? map.conditions.find((other) => other.name === "random")?.heads.retained[at] : null;
    const proof = () => showProof(folder, "retained", { condition, layer, head, queries });

    const summary = h("div", { class: "facts" },
      [["retained share λ", `${fixed(cell("retained"), 3)}${interval(cell("lo"), cell("hi"), 3)}`], ["verdict", h("span", { class: verdict }, verdict)],
        ["p (Holm)", pWords(cell("p_adjusted")).replace(/^p (= )?/, "")], ["dilution exponent ε", `${fixed(cell("epsilon"))}${interval(cell("epsilon_lo"), cell("epsilon_hi"))}`],
        ["uniform dilution", fixed(cell("uniform"), 3)], beside === null || beside === undefined ? null : ["natural text", fixed(beside, 3)]]
        .filter(Boolean).map(([name, value]) => h("div", null, h("span", null, name), h("b", null, value))));

    const own = found.shifts?.retained.filter((value) => value !== null) ?? [];
    const wide = own.length ? beyondItems(own.length, cell("lo"), cell("hi"), Math.min(...own), Math.max(...own)) : null;

    const choices = h("div", { class: "choices" },
      choice("condition", map.conditions.map((other) => [other.name, other.label]), condition, (value) => go("head", to({ condition: value }))),
      choice("layer", map.layers.map((value) => [value, value]), layer, (value) => go("head", to({ layer: value }))),
      choice("head", map.columns.map((value) => [value, value]), head, (value) => go("head", to({ head: value }))),
      choice("queries", [["original", "original tokens (fair)"], ["later", "all later tokens"]], queries, (value) => go("head", to({ queries: value }))),
      proofButton(proof));

    // ---- the curve, which comes as its items are read

    const curves = h("section", { "aria-label": "Curve by position" });
    const ends = [];
    let timer = null;
    if (found.curves) {
      let curve = await ask("head/curve", asked);
      let cursor = null;
      const readout = h("p", { class: "readout small", role: "status", "aria-live": "polite" });
      const progress = h("p", { class: "soft small", role: "status" });
      let drawn = null;
      const pic = picture({
        title: `${headName(layer, head)}, ${one?.label ?? condition}: attention received by position, mean over items with 95 % band`, name: `curve-${headName(layer, head)}-${condition}`,
        label: "Curves of received attention by position. Arrow keys move along; the line below says the numbers.",
        attributes: { tabindex: 0, role: "application" },
        size: () => HEIGHT,
        draw: (pen, width) => { drawn = drawCurves(pen, width, curve, cursor); },
        rows: () => [["position", ...Object.keys(curve.curves).flatMap((role) => [role, `${role}_lo`, `${role}_hi`, `${role}_n`])],
          ...curve.curves.without.mean.map((_, i) => [curve.first + i, ...Object.values(curve.curves).flatMap((part) => [part.mean[i], part.lo[i], part.hi[i], part.n[i]])])],
      });
      const say = () => {
        if (cursor === null) return void clear(readout, "Point at the curve for numbers. Once it is chosen (a click, or Tab), ← and → move along it; elsewhere on the page they lead to the next head.");
        const i = cursor - curve.first;
        clear(readout, h("b", null, `position ${cursor}`), ...Object.entries(curve.curves).map(([role, part]) =>
          ` · ${ROLES[role][0]} ${short(part.mean[i])}${part.lo[i] === null || part.lo[i] === undefined ? "" : ` [${short(part.lo[i])}, ${short(part.hi[i])}]`}`),
          ` · ${curve.curves.with.n[i] ?? 0} items`);
      };
      const tell = () => { progress.textContent = curve.complete ? "" : `${curve.read} of ${curve.items} items read so far; the rest follows.`; };
      const move = (value) => {
        cursor = Math.min(Math.max(value, curve.first), curve.first + drawn.longest - 1);
        pic.redraw();
        say();
      };
      pic.canvas.addEventListener("mousemove", (event) => {
        const box = pic.canvas.getBoundingClientRect();
        const share = (event.clientX - box.left - drawn.box.left) / (drawn.box.right - drawn.box.left);
        move(Math.round(curve.first + share * (drawn.longest - 1)));
      });
      pic.canvas.addEventListener("keydown", (event) => {
        if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
        move((cursor ?? curve.first - 1) + (event.key === "ArrowRight" ? 1 : -1));
        event.preventDefault();
        event.stopPropagation();
      });
      say();
      tell();
      curves.append(pic.element, h("p", { class: "soft small" }, "What a token receives: the mean weight, from 0 to 1, that later tokens give it in this head."), readout, progress);
      ends.push(pic.end);
      if (!curve.complete) {
        // One request at a time, so that no late answer replaces a fuller one.
        const more = async () => {
          const found = await ask("head/curve", asked).catch(() => curve);
          if (timer === null) return;
          curve = found;
          pic.redraw();
          tell();
          if (!curve.complete) timer = setTimeout(more, 500);
        };
        timer = setTimeout(more, 500);
      }
    } else {
      curves.append(h("p", { class: "soft" }, "This folder does not hold attention by token together with its prompts, so it has no curves and strips."));
    }

    // ---- items

    const items = h("section", { "aria-label": "Items by shift" });
    if (found.shifts) {
      const shifts = found.shifts;
      const columns = [["#", null], ["item", "item"], ["λ", "retained"], ["ε", "epsilon"], ["uniform", "uniform"], ...(shifts.random ? [["natural text", "random"]] : [])];
      let order = shifts.number.map((_, i) => i);
      let sorted = null;
      let wanted = "";
      let most = ROWS;
      const body = byKeys(h("tbody"));
      const note = h("p", { class: "soft small" });
      const draw = () => {
        const kept = order.filter((i) => shifts.item[i].toLowerCase().includes(wanted));
        clear(body, kept.slice(0, most).map((i) => h("tr", null, h("td", { class: "n soft" }, order.indexOf(i) + 1),
          h("th", { scope: "row" }, found.curves ? h("a", { href: addressOf("strip", to({ item: shifts.number[i] })) }, shifts.item[i]) : shifts.item[i]),
          ...columns.slice(2).map(([, name]) => h("td", { class: "n" }, fixed(shifts[name][i], 3))))));
        clear(note, kept.length > most ? [`${most} of ${kept.length} items. `, h("button", { class: "button", type: "button", onclick: () => { most = Infinity; draw(); } }, "Show all")] : `${kept.length} items.`);
      };
      const sortBy = (name) => {
        const down = sorted === name;
        sorted = down ? null : name;
        order = shifts.number.map((_, i) => i);
        if (name) order.sort((a, b) => {
          const [p, q] = [shifts[name][a], shifts[name][b]];
          const sign = p === q ? 0 : p === null ? 1 : q === null ? -1 : p < q ? -1 : 1;
          return down ? -sign : sign;
        });
        draw();
      };
      const search = h("input", { type: "search", placeholder: "find an item", "aria-label": "Find an item", oninput: () => { wanted = search.value.toLowerCase(); draw(); } });
      draw();
      items.append(h("h2", null, "Items, the most shifted first"), h("div", { class: "choices" }, search, h("span", { class: "soft small" }, "press a heading to sort; an item opens its prompt. λ: retained share; ε: dilution exponent; uniform: the λ of an even spread; natural text: the λ with ordinary text in place of the filler")),
        h("div", { class: "wide" }, h("table", { class: "items" }, h("thead", null, h("tr", null, columns.map(([words, name]) => h("th", { scope: "col", class: name === "item" ? null : "n" },
          name === null ? words : h("button", { type: "button", class: "sort", onclick: () => sortBy(name) }, words))))), body)), note);
    } else {
      items.append(h("p", { class: "soft" }, "This folder was made before items' shares were stored, so items are not ranked."));
    }

    place.append(h("p", { class: "crumbs" }, h("a", { href: addressOf(...view.up(state)) }, "Map"), " › ", headName(layer, head), ` · ${cell("n_items") ?? found.items} items`),
      h("h1", null, `${headName(layer, head)} under ${one?.label ?? condition}`), choices, summary, wide ? h("p", { class: "soft small" }, wide) : "", curves, items);

    const keys = (event) => {
      if (document.querySelector("dialog[open]") || event.target.closest?.("canvas, input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
      const [l, c] = [map.layers.indexOf(layer), map.columns.indexOf(head)];
      const next = { ArrowRight: { head: map.columns[c + 1] }, ArrowLeft: { head: map.columns[c - 1] }, ArrowDown: { layer: map.layers[l + 1] }, ArrowUp: { layer: map.layers[l - 1] } }[event.key];
      if (event.key === "p") proof();
      else if (next && Object.values(next)[0] !== undefined) go("head", to(next));
      else return;
      event.preventDefault();
    };
    document.addEventListener("keydown", keys);
    return () => {
      clearTimeout(timer);
      timer = null;
      document.removeEventListener("keydown", keys);
      ends.forEach((end) => end());
    };
  },
};
