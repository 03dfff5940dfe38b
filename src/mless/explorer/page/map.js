// Layer × head, one panel a condition. Arrows move, Enter opens a head.

import { addressOf, go, note } from "./address.js";
import { choice, clear, h } from "./dom.js";
import { fixed, headName, interval, pWords, short } from "./formats.js";
import { picture } from "./picture.js";
import { proofButton, showProof } from "./proof.js";
import { amount, diverging, ink, inkOn } from "./scales.js";
import { ask, holds, isExport } from "./source.js";

const TOP = 40;
const LEFT = 34;
const GAP = 26;
const LEGEND = 46;
const BESIDE = 520; // where it is narrower, what the dots mean stands below the scale

// What a cell's colour says: its value, where that lies on the scale, and the ends of the scale.
function measureOf(name, found, mass) {
  if (name === "retained") {
    return { words: "retained share λ", value: (part, at) => part.retained[at], place: (value) => Math.log(value) / Math.log(2), colour: diverging,
      ends: [[-1, "0.5 or less"], [0, "1"], [1, "2 or more"]] };
  }
  if (name === "epsilon") {
    return { words: "dilution exponent ε", value: (part, at) => part.epsilon[at], place: (value) => -value / 1.5, colour: diverging,
      ends: [[-1, "1.5 or more"], [-2 / 3, "1"], [0, "0"], [1, "−1.5 or less"]] };
  }
  if (name === "difference") {
    const all = found.conditions.flatMap((one) => one.heads.difference).filter((one) => one !== null).map(Math.abs);
    const top = Math.max(...all, 1e-12);
    return { words: `${found.metric}: change against none`, value: (part, at) => part.difference[at], place: (value) => value / top, colour: diverging,
      ends: [[-1, short(-top)], [0, "0"], [1, short(top)]] };
  }
  const span = name.slice(5);
  const top = Math.max(...mass.conditions.flatMap((one) => one.mass[span]).filter((one) => one !== null), 1e-9);
  return { words: `mass on ${span}`, value: (part, at) => part.mass[span][at], place: (value) => value / top, colour: amount, ends: [[0, "0"], [1, fixed(top)]] };
}

// Where panels and cells lie on a canvas of this width.
function layout(width, panels, layers, columns) {
  const least = Math.max(150, LEFT + columns * 6);
  const across = Math.max(1, Math.min(panels, Math.floor((width + GAP) / (least + GAP))));
  const each = (width - GAP * (across - 1)) / across;
  const wide = Math.max(2, Math.min(26, (each - LEFT - 4) / columns));
  const tall = Math.max(8, Math.min(18, wide));
  const height = TOP + layers * tall + 20;
  return { across, wide, tall, height, at: (panel) => [(panel % across) * (each + GAP), Math.floor(panel / across) * height],
    total: Math.ceil(panels / across) * height + LEGEND + (width > BESIDE ? 0 : 18) };
}

export const view = {
  title: "Map",
  about: "Every layer and head, one panel a condition",
  keys: [["arrows", "move from cell to cell, and on to the next panel"], ["Enter", "open the head"], ["p", "proof of the marked cell"]],
  up: () => ["start", {}],
  async show(place, state, tools) {
    const folder = Number(state.folder ?? 1);
    const activations = tools.folder?.measured === "activations";
    const asked = activations
      ? { folder, metric: state.metric, scale: state.metric ? state.scale : undefined }
      : { folder, queries: state.queries ?? "original" };
    const found = await ask("map", asked);
    const heads = found.kind === "heads";
    const shown = heads ? state.show ?? "retained" : "difference";
    const byMass = shown.startsWith("mass-");
    let mass = byMass ? await ask("map/mass", { folder }) : null;
    const wholeLayers = heads && !byMass;
    const columns = wholeLayers ? [0, ...found.columns] : found.columns;
    // In a panel the layer's own value stands left of its heads.
    const parts = () => (byMass ? mass.conditions : found.conditions);
    let measure = measureOf(shown, found, mass);
    const part = (panel, column) => (wholeLayers && column === 0 ? parts()[panel].layers : parts()[panel].heads ?? parts()[panel]);
    const index = (row, column) => (wholeLayers ? (column === 0 ? row : row * found.columns.length + column - 1) : row * columns.length + column);
    const cursor = { panel: 0, row: 0, column: wholeLayers ? 1 : 0 };
    const start = parts().findIndex((one) => one.name === state.condition);
    if (start >= 0) cursor.panel = start;
    if (state.layer) cursor.row = Math.max(0, found.layers.indexOf(Number(state.layer)));
    if (state.head) cursor.column = Math.max(0, columns.indexOf(Number(state.head)));

    const readout = h("div", { class: "readout", role: "status", "aria-live": "polite" });
    const lay = (width) => layout(width, parts().length, found.layers.length, columns.length + (wholeLayers ? 0.5 : 0));
    const left = (place, column) => LEFT + place.wide * (column + (wholeLayers && column > 0 ? 0.5 : 0));

    const pic = picture({
      title: `${tools.folder?.model ?? ""}: ${measure.words}, by layer and ${heads ? "head" : "set of tokens"}`,
      name: `map-${shown}`,
      label: `Map of ${measure.words}. Use the arrow keys; the line above says the marked cell.`,
      attributes: { tabindex: 0, role: "application", class: "map" },
      size: (width) => lay(width).total,
      draw(pen, width) {
        const where = lay(width);
        const [text, soft, mark] = [ink("ink"), ink("soft"), ink("mark")];
        parts().forEach((one, panel) => {
          const [x, y] = where.at(panel);
          pen.text(x + LEFT, y + 14, one.label, { size: 13, weight: 600, fill: text });
          const every = Math.max(1, Math.ceil((heads ? 22 : 64) / where.wide));
          columns.forEach((name, column) => {
            if (column % every === (wholeLayers && every > 1 ? 1 : 0) || (wholeLayers && column === 0)) {
              pen.text(x + left(where, column) + where.wide / 2, y + TOP - 6, wholeLayers && column === 0 ? "all" : String(name),
                { size: 10, anchor: "middle", fill: soft });
            }
          });
          const rows = where.tall >= 11 ? 1 : 5;
          found.layers.forEach((layer, row) => {
            if (row % rows === 0) pen.text(x + LEFT - 6, y + TOP + (row + 0.5) * where.tall + 3.5, String(layer), { size: 10, anchor: "end", fill: soft });
            columns.forEach((_, column) => {
              const from = part(panel, column);
              const at = index(row, column);
              const value = measure.value(from, at);
              const colour = measure.colour(value === null || value === undefined ? null : measure.place(value));
              const [cx, cy] = [x + left(where, column), y + TOP + row * where.tall];
              pen.rect(cx, cy, Math.max(1, where.wide - 0.7), where.tall - 0.7, colour);
              const verdict = from.verdict?.[at];
              if (verdict === "undecided" && where.wide >= 6) {
                pen.dot(cx + where.wide / 2 - 0.35, cy + where.tall / 2 - 0.35, Math.min(1.8, where.wide / 6), inkOn(colour));
              }
            });
          });
        });
        const [x, y] = where.at(cursor.panel);
        if (pen.live) pen.frame(x + left(where, cursor.column) - 1, y + TOP + cursor.row * where.tall - 1, where.wide + 1, where.tall + 1, mark, 2);
        const low = where.total - LEGEND - (width > BESIDE ? 0 : 18) + 8;
        const wide = Math.min(240, width - 2 * LEFT);
        const ends = measure.ends.map(([at]) => at);
        const [lo, hi] = [Math.min(...ends), Math.max(...ends)];
        for (let at = 0; at < wide; at += 2) pen.rect(LEFT + at, low, 2.5, 10, measure.colour(lo + ((hi - lo) * at) / wide));
        for (const [at, words] of measure.ends) {
          pen.text(LEFT + ((at - lo) / (hi - lo)) * wide, low + 23, words, { size: 10, anchor: "middle", fill: soft });
        }
        if (!byMass) {
          const [dx, dy] = width > BESIDE ? [LEFT + wide + 38, low + 5] : [LEFT, low + 40];
          pen.dot(dx, dy, 1.8, text);
          pen.text(dx + 8, dy + 4, "undecided, by its interval", { size: 11, fill: soft });
        }
      },
      rows: () => [["condition", "layer", heads ? "head" : "tokens", measure.words, "lo", "hi", "p_adjusted", "verdict"],
        ...parts().flatMap((one, panel) => found.layers.flatMap((layer, row) => columns.map((name, column) => {
          const from = part(panel, column);
          const at = index(row, column);
          return [one.name, layer, name, measure.value(from, at), from.lo?.[at], from.hi?.[at], from.p_adjusted?.[at], from.verdict?.[at]];
        })))],
    });

    const here = () => ({ one: parts()[cursor.panel], from: part(cursor.panel, cursor.column), at: index(cursor.row, cursor.column),
      layer: found.layers[cursor.row], column: columns[cursor.column] });
    // A file holds the heads that shift most.
    const held = () => holds("head", { folder, condition: here().one.name, layer: here().layer, head: here().column, queries: found.queries });
    const opens = () => heads && here().column !== 0 && here().one.name !== "none" && found.curves !== undefined && held();
    const headAddress = () => ["head", { folder, condition: here().one.name, layer: here().layer, head: here().column, queries: state.queries }];

    function words() {
      const { one, from, at, layer, column } = here();
      if (byMass) {
        return [h("b", null, `${one.label}, ${headName(layer, column)}`), ` · ${measure.words} ${fixed(measure.value(from, at), 3)} · all: `,
          found.spans.map((span) => `${span} ${fixed(one.mass[span][at], 3)}`).join(", "),
          one.complete ? "" : ` · ${one.read} of ${mass.items} items read so far`];
      }
      const verdict = from.verdict[at] ?? "no verdict";
      if (!heads) {
        return [h("b", null, `${one.label}, layer ${layer}, ${column}`), ` · ${found.metric} ${short(from.none[at])} → ${short(from.value[at])}, change ${short(from.difference[at])} [${short(from.lo[at])}, ${short(from.hi[at])}], Holm ${pWords(from.p_adjusted[at])} · `,
          h("span", { class: verdict }, verdict), ` · ${from.n_items[at]} items`];
      }
      const beside = one.beside ? found.conditions.find((other) => other.name === "random") : null;
      const text = beside && (column === 0 && wholeLayers ? beside.layers : beside.heads).retained[at];
      return [h("b", null, `${one.label}, ${headName(layer, column)}`), ` · retained share λ ${fixed(from.retained[at], 3)}${interval(from.lo[at], from.hi[at], 3)} · `,
        h("span", { class: verdict }, verdict), ` · Holm ${pWords(from.p_adjusted[at])} · dilution exponent ε ${fixed(from.epsilon[at])}${interval(from.epsilon_lo[at], from.epsilon_hi[at])} · uniform dilution ${fixed(from.uniform[at])}`,
        text === null || text === undefined ? "" : ` · natural text ${fixed(text)}`, ` · ${from.n_items[at]} items`];
    }

    const proof = () => {
      const { one, layer, column } = here();
      if (byMass) return showProof(folder, "attention", { condition: one.name, layer, head: column, queries: "original" }, "The mean over the items of these rows' mass.");
      const row = heads ? { condition: one.name, layer, head: column, queries: found.queries } : { condition: one.name, layer, tokens: column, metric: found.metric, scale: found.scale };
      return showProof(folder, found.table, row);
    };
    function say() {
      clear(readout, h("p", null, words()), h("p", { class: "links" },
        opens() ? h("a", { class: "button", href: addressOf(...headAddress()) }, `Open ${headName(here().layer, here().column)}`) : null,
        isExport() && heads && here().column !== 0 && !held() ? h("span", { class: "soft small" }, "This head is not in the file; it holds those that shift most.") : null, proofButton(proof)));
    }
    function move(panel, row, column) {
      Object.assign(cursor, { panel, row, column });
      const { one, layer, column: name } = here();
      note("map", { ...state, folder, condition: one.name, layer, head: heads ? name : undefined });
      pic.redraw();
      say();
    }
    function cellAt(event) {
      const box = pic.canvas.getBoundingClientRect();
      const where = lay(Math.floor(box.width));
      const [px, py] = [event.clientX - box.left, event.clientY - box.top];
      for (let panel = 0; panel < parts().length; panel += 1) {
        const [x, y] = where.at(panel);
        const row = Math.floor((py - y - TOP) / where.tall);
        const column = columns.findIndex((_, at) => px >= x + left(where, at) && px < x + left(where, at) + where.wide);
        if (row >= 0 && row < found.layers.length && column >= 0) return [panel, row, column];
      }
      return null;
    }
    pic.canvas.addEventListener("mousemove", (event) => {
      const cell = cellAt(event);
      pic.canvas.style.cursor = cell ? "pointer" : "default";
      if (cell && (cell[0] !== cursor.panel || cell[1] !== cursor.row || cell[2] !== cursor.column)) move(...cell);
    });
    pic.canvas.addEventListener("click", (event) => {
      const cell = cellAt(event);
      if (!cell) return;
      move(...cell);
      if (opens()) go(...headAddress());
    });
    pic.canvas.addEventListener("keydown", (event) => {
      let { panel, row, column } = cursor;
      if (event.key === "ArrowRight") column += 1;
      else if (event.key === "ArrowLeft") column -= 1;
      else if (event.key === "ArrowDown") row += 1;
      else if (event.key === "ArrowUp") row -= 1;
      else if (event.key === "Home") column = 0;
      else if (event.key === "End") column = columns.length - 1;
      else if (event.key === "p") return void proof();
      else if (event.key === "Enter") return void (opens() && go(...headAddress()));
      else return;
      event.preventDefault();
      if (column >= columns.length) [panel, column] = panel + 1 < parts().length ? [panel + 1, 0] : [panel, columns.length - 1];
      if (column < 0) [panel, column] = panel > 0 ? [panel - 1, columns.length - 1] : [panel, 0];
      move(panel, Math.min(Math.max(row, 0), found.layers.length - 1), column);
    });

    const change = (values) => go("map", { ...state, folder, ...values });
    const choices = heads
      ? [choice("show", [["retained", "retained share λ"], ["epsilon", "dilution exponent ε"], ...found.spans.map((span) => [`mass-${span}`, `mass on ${span}`])], shown, (value) => change({ show: value })),
        byMass ? null : choice("queries", [["original", "original tokens (fair)"], ["later", "all later tokens (as published)"]], found.queries, (value) => change({ queries: value }))]
      : [choice("metric", found.metrics.map((one) => [one, one]), found.metric, (value) => change({ metric: value, scale: found.scale })),
        choice("scale", found.scales.map((one) => [one, one]), found.scale, (value) => change({ metric: found.metric, scale: value }))];
    say();
    place.append(h("h1", null, heads ? "Map of heads" : "Map of activations"),
      h("p", { class: "soft" }, byMass
        ? "One panel a condition, one row a layer, one column a head: which share of the original tokens' attention goes there, mean over items. Bluer is more."
        : heads
          ? "One panel a condition, one row a layer, one column a head; “all” is the whole layer. Orange: the question's tokens receive less with filler than without. Purple: more. Retained share λ: 1 is no change, 0.8 keeps 80 %. Dilution exponent ε: 0 is nothing lost, 1 as much as an even spread loses."
          : "One panel a condition, one row a layer, one column a set of tokens. Orange: less than without filler. Purple: more."),
      h("div", { class: "choices" }, choices), readout, pic.element);
    place.addEventListener("placed", () => pic.canvas.focus({ preventScroll: true }));

    let timer = null;
    if (byMass && !mass.complete) {
      // One request at a time, so that no late answer replaces a fuller one.
      const more = async () => {
        const fuller = await ask("map/mass", { folder }).catch(() => mass);
        if (timer === null) return;
        mass = fuller;
        measure = measureOf(shown, found, mass);
        pic.redraw();
        say();
        if (!mass.complete) timer = setTimeout(more, 600);
      };
      timer = setTimeout(more, 600);
    }
    return () => { clearTimeout(timer); timer = null; pic.end(); };
  },
};
