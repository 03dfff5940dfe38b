// What a filler's effect is made of: who has to see it (ladder), through which part of which layer it acts (causes), and the published chain.

import { go, note } from "./address.js";
import { around, canvas, cut, digitsFor, forest, label, legend, number, picture, plural, tableHead, times, told } from "./chart.js";
import { choice, clear, h, put, svg, table } from "./dom.js";
import { pValue, pWords, short } from "./formats.js";
import { proofButton, showProof } from "./proof.js";
import { ask } from "./source.js";

const SIGN = { sign: true };
const NO_SHARE = "The whole effect's interval holds 0, so no share is known.";
const share = (row) => {
  if (row.share === null) return "–";
  // As in verdicts (results/caused.py): from ten times the effect on it is no per cent.
  const [scale, unit, digits] = Math.abs(row.share) >= 10 ? [1, "×", 1] : [100, "%", 0];
  return `${number(scale * row.share, digits)} ${unit}${around(times(row.share_lo, scale), times(row.share_hi, scale), digits)}`;
};

// The metric that is shown, a choice of it, and how its changes are written.
function shown(view, found, values) {
  const metric = found.metrics.find((one) => one.name === values.metric) ?? found.metrics[0];
  const chosen = h("div", { class: "choices" }, choice("Metric", found.metrics.map((one) => [one.name, `${one.name} (${one.unit})`]), metric.name, (name) => go(view, { ...values, metric: name })));
  const of = (rows) => rows.filter((row) => row.metric === metric.name);
  const spread = (rows, name) => Math.min(5, digitsFor(Math.max(...rows.map((row) => Math.abs(times(row[name], metric.by) ?? 0)), 1e-9)));
  const change = (value, lo, hi, digits) => `${number(times(value, metric.by), digits, SIGN)}${around(times(lo, metric.by), times(hi, metric.by), digits, SIGN)}`;
  return { metric, chosen, of, spread, change };
}
const csvOf = (names, rows) => () => [names, ...rows.map((row) => names.map((name) => row[name]))];

// ---- ladder

export const ladder = {
  title: "Ladder",
  about: "Who has to see the filler?",
  async show(place, values) {
    const folder = values.folder ?? 1;
    const found = await ask("ladder", { folder });
    const { metric, chosen, of, spread, change } = shown("ladder", found, values);
    const steps = of(found.steps);
    const digits = spread(steps, "delta");
    const rung = (step) => steps.find((row) => row.step === step && row.against === "none");
    const part = (step) => steps.find((row) => row.step === step && row.adds_up);
    const mark = (row, words, look) => row && { label: words, value: times(row.delta, metric.by), lo: times(row.lo, metric.by), hi: times(row.hi, metric.by), words: change(row.delta, row.lo, row.hi, digits), ...look,
      said: [words, `Δ ${metric.name} ${change(row.delta, row.lo, row.hi, digits)} ${metric.unit}`, row.against === null ? "all − question − answer + nobody" : `against ${row.against}`,
        row.p_adjusted === null ? pWords(row.p) : `${pWords(row.p)}; after Holm ${pWords(row.p_adjusted)}`, plural(row.n, "item"), row.skewed && "a few items decide this mean"] };
    const rows = [{ heading: true, label: "Change against none" }, ...found.rungs.map(([step, words]) => mark(rung(step), words, { kind: "diamond", colour: "ink" })),
      { heading: true, label: "Seen by all is the sum of" }, ...found.changes.map(([step, words]) => mark(part(step), words, { kind: "circle", colour: "c2", hollow: !part(step)?.sure }))].filter(Boolean);
    const names = ["step", "against", "adds_up", "metric", "n", "delta", "lo", "hi", "p", "p_adjusted"];
    put(place, h("h1", null, `Ladder: ${found.title}`),
      h("p", { class: "soft" }, "Mean change against no filler: with positions moved only, with the filler there and seen by nobody, by the question, by the answer, by all. Below it the five changes that add up to the last."),
      chosen,
      legend([{ kind: "diamond", colour: "ink", words: "change against none" }, { kind: "circle", colour: "c2", words: "filled: p ≤ 0.05 after Holm over the five" }, { kind: "circle", colour: "c2", hollow: true, words: "hollow: not" }]),
      picture(`Who sees the filler: Δ ${metric.name}`, (width) => forest(width, rows, { unit: `Δ ${metric.name}, ${metric.unit}`, over: width < 560 }), csvOf(names, steps),
        { name: `ladder-${metric.name}`, proof: [folder, "ladder", { metric: metric.name }], caption: "95 % intervals over items. A hidden filler's weight goes to the other tokens, so hiding it is a change too." }),
      h("h2", null, "As a table"),
      table(null, [["change"], ["against"], ["Δ", true], ["p", true], ["p (Holm)", true], ["items", true]], [...found.rungs.map(([step, words]) => [rung(step), words]), ...found.changes.slice(1).map(([step, words]) => [part(step), words])].filter(([row]) => row).map(([row, words]) => [words,
        row.against ?? "–", change(row.delta, row.lo, row.hi, digits), pValue(row.p), pValue(row.p_adjusted), row.n])));
  },
};

// ---- map

const WAYS = ["in", "out"];
const LEAST = 9;
const keyOf = (cell) => [cell.direction, cell.part, cell.head ?? "", cell.layer].join("|");

// Where panels, rows and layers lie. Where layers do not fit side by side, they go on in a further band.
function layout(width, layers, rows) {
  const heads = rows.some(([, head]) => head !== null);
  const names = width < 560 ? 104 : heads ? 164 : 118;
  const two = Math.max(96, layers * 17) + names <= (width - 28) / 2;
  const each = two ? (width - 28) / 2 : width;
  const room = each - names - 6;
  const bands = Math.max(1, Math.ceil(layers / Math.max(1, Math.floor(room / LEAST))));
  const across = Math.ceil(layers / bands);
  const wide = Math.min(40, room / across);
  const tall = rows.length > 14 ? 15 : 22;
  const band = rows.length * tall + 30;
  const panel = 24 + bands * band;
  return { names, two, each, across, wide, tall, bands, total: (two ? 1 : 2) * panel + 48,
    start: (way) => [two ? WAYS.indexOf(way) * (each + 28) : 0, two ? 0 : WAYS.indexOf(way) * panel],
    at: (way, row, layer) => [(two ? WAYS.indexOf(way) * (each + 28) : 0) + names + (layer % across) * wide, (two ? 0 : WAYS.indexOf(way) * panel) + 24 + Math.floor(layer / across) * band + row * tall] };
}

// Diagonal lines over a box.
function hatch(x, y, wide, tall) {
  let path = "";
  for (let k = 4; k < wide + tall; k += 6) path += `M${x + Math.max(0, k - tall)},${y + Math.min(k, tall)}L${x + Math.min(k, wide)},${y + Math.max(0, k - wide)}`;
  return path;
}

function rowName(parts, [part, head], narrow) {
  return head === null ? parts[part] : narrow ? `… head ${head}` : `${parts[part]}, head ${head}`;
}

function drawMap(width, found, cells, limit, said, state, choose) {
  const where = layout(width, found.layers.length, found.rows);
  const drawn = canvas(width, where.total);
  const look = (one) => ({ class: `cell ${one < 0 ? "down" : "up"}`, "fill-opacity": (0.06 + 0.9 * Math.min(1, Math.abs(one) / limit)).toFixed(3) });
  const marks = new Map();
  let blank = "";
  for (const way of WAYS) {
    const [left, top] = where.start(way);
    drawn.append(label(left + where.names, top + 14, found.directions[way], { class: "heading" }));
    const every = [1, 2, 5, 10, 20, 50].find((step) => step * where.wide >= 22) ?? 100;
    found.layers.forEach((layer, at) => {
      const [x, y] = where.at(way, found.rows.length, at);
      const first = at % where.across === 0;
      if (first || (every === 1 || layer % every === 0) && (at % where.across) * where.wide >= 18) drawn.append(label(x + where.wide / 2, y + 14, layer, { class: "tick", "text-anchor": "middle" }));
      if (first) found.rows.forEach((row, n) => drawn.append(label(left + where.names - 8, where.at(way, n, at)[1] + where.tall / 2 + 4, cut(rowName(found.parts, row, where.names < 110), where.names - 8, 9.5), { class: "tick", "text-anchor": "end" })));
    });
    found.rows.forEach(([part, head], n) => found.layers.forEach((layer, at) => {
      const [x, y] = where.at(way, n, at);
      const cell = cells.get(keyOf({ direction: way, part, head, layer }));
      const box = { x, y, width: Math.max(1, where.wide - 1), height: where.tall - 1 };
      if (!cell) {
        drawn.append(svg("rect", { ...box, class: "band" }));
        return;
      }
      const known = cell.share !== null;
      if (!known) blank += hatch(x, y, box.width, box.height);
      const strong = known && Math.abs(cell.share) > 0.5 * limit;
      const mark = told(svg("g", null, svg("rect", { ...box, ...(known ? look(cell.share) : { class: "cell hit" }) }),
        cell.sure && svg("circle", { cx: x + box.width / 2, cy: y + box.height / 2, r: Math.max(1.2, Math.min(2.6, where.wide / 5)), class: `dot${strong ? " on" : ""}` })), said(cell), { go: () => choose(cell) });
      mark.setAttribute("role", "button");
      marks.set(`${way}|${n}|${at}`, mark);
      mark.addEventListener("keydown", (event) => {
        const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [0, 0];
        if (!down && !right) return;
        event.preventDefault();
        event.stopPropagation();
        let [to, row, column] = [way, n, at];
        do {
          [row, column] = [row + down, column + right];
          // Past the end of a row the other panel goes on.
          const over = column >= found.layers.length ? 1 : column < 0 ? -1 : 0;
          if (over) [to, column] = [WAYS[WAYS.indexOf(to) + over], over > 0 ? 0 : found.layers.length - 1];
          if (to === undefined || row < 0 || row >= found.rows.length) return;
        } while (!marks.has(`${to}|${row}|${column}`));
        const next = marks.get(`${to}|${row}|${column}`);
        mark.setAttribute("tabindex", "-1");
        next.setAttribute("tabindex", "0");
        next.focus();
      });
      drawn.append(mark);
    }));
  }
  if (blank) drawn.append(svg("path", { d: blank, class: "hatch" }));
  const frame = svg("rect", { class: "chosen" });
  drawn.append(frame);
  state.place = () => {
    const now = state.cell;
    const row = now ? found.rows.findIndex(([part, head]) => part === now.part && head === now.head) : -1;
    const [x, y] = now ? where.at(now.direction, row, found.layers.indexOf(now.layer)) : [-99, -99];
    for (const [name, value] of Object.entries({ x: x - 1, y: y - 1, width: where.wide + 1, height: where.tall + 1 })) frame.setAttribute(name, value);
  };
  state.place();
  const low = where.total - 36;
  const wide = Math.min(240, width - where.names - 40);
  for (let at = 0; at < 40; at += 1) drawn.append(svg("rect", { x: where.names + (at * wide) / 40, y: low, width: wide / 40 + 0.3, height: 10, ...look(limit * ((at + 0.5) / 20 - 1)) }));
  for (const end of [-1, 0, 1]) drawn.append(label(where.names + ((end + 1) / 2) * wide, low + 24, `${number(100 * limit * end, 0)} %`, { class: "tick", "text-anchor": "middle" }));
  if (width > 700) drawn.append(label(where.names + wide + 26, low + 9, "share of the effect; colours end at the ends of the scale", { class: "tick" }));
  return drawn;
}

export const causes = {
  title: "Causes",
  about: "Through which part of which layer?",
  keys: [["arrows", "move from cell to cell, and on to the other panel"], ["Enter", "show the cell's numbers"]],
  async show(place, values) {
    const folder = values.folder ?? 1;
    const found = await ask("causes", { folder });
    const { metric, chosen, of, spread, change } = shown("causes", found, values);
    const own = of(found.cells);
    const cells = new Map(own.map((cell) => [keyOf(cell), cell]));
    const digits = spread(own, "whole");
    const limit = own.some((cell) => Math.abs(cell.share ?? 0) > 0.5) ? 1 : 0.5;
    const named = (cell) => `layer ${cell.layer}, ${found.parts[cell.part]}${cell.head === null ? "" : ` of head ${cell.head}`}`;
    const effect = (cell) => change(cell.effect, cell.lo, cell.hi, digits);
    const said = (cell) => [`${named(cell)}, ${found.directions[cell.direction]}`, cell.share === null ? NO_SHARE : `share ${share(cell)}`, `effect ${effect(cell)} ${metric.unit}`,
      `${pWords(cell.p)}; after Holm ${pWords(cell.p_adjusted)}`, `${plural(cell.n, "item")}; base: ${found.bases[cell.base] ?? cell.base}`];
    const readout = h("div", { class: "readout", role: "status", "aria-live": "polite" });
    const state = { cell: cells.get([values.direction, values.part, values.head ?? "", values.layer].join("|")) ?? null, place: () => {} };
    const say = () => {
      const cell = state.cell;
      if (!cell) return clear(readout, h("p", { class: "soft" }, "Click a cell, or press Enter on it, for its numbers."));
      const row = Object.fromEntries(["metric", "layer", "part", "head", "direction"].filter((name) => cell[name] !== null).map((name) => [name, cell[name]]));
      return clear(readout, h("p", null, h("b", null, `${named(cell)}, ${found.directions[cell.direction]}`), ` · share ${cell.share === null ? "not known" : share(cell)} · effect ${effect(cell)} ${metric.unit} · whole effect ${change(cell.whole, cell.whole_lo, cell.whole_hi, digits)} · ${pWords(cell.p)} · after Holm ${pWords(cell.p_adjusted)} · ${plural(cell.n, "item")} · base: ${found.bases[cell.base] ?? cell.base}`,
        cell.share === null ? ` · ${NO_SHARE}` : null, cell.skewed ? " · A few items decide this effect." : null), h("p", { class: "links" }, proofButton(() => showProof(folder, "cause", row))));
    };
    const choose = (cell) => {
      state.cell = cell;
      state.place();
      say();
      note("causes", { ...values, folder, metric: metric.name, layer: cell.layer, part: cell.part, head: cell.head, direction: cell.direction });
    };
    say();
    const names = ["layer", "part", "head", "direction", "base", "metric", "n", "whole", "whole_lo", "whole_hi", "effect", "lo", "hi", "p", "p_adjusted", "share", "share_lo", "share_hi"];
    const sure = own.filter((cell) => cell.sure).toSorted((a, b) => Math.abs(b.effect) - Math.abs(a.effect));
    const blank = own.filter((cell) => cell.share === null);
    put(place, h("h1", null, `Causes: ${found.title}`),
      h("p", { class: "soft" }, "One column a layer (numbers above), one row a part. Put in: the run without filler takes the part's value from the run with it; the share of the effect that this gives. Taken out: the other way round; the share that is lost. Purple: the filler's way. Orange: the other way."),
      chosen,
      blank.length === own.length ? h("p", { class: "warning", role: "note" }, `No share is known: the whole effect is ${change(own[0].whole, own[0].whole_lo, own[0].whole_hi, digits)} ${metric.unit}. Its interval holds 0.`) : null,
      picture(`Share of the filler's effect by layer and part: ${metric.name}`, (width) => drawMap(width, found, cells, limit, said, state, choose), csvOf(names, own),
        { name: `causes-${metric.name}`, proof: [folder, "cause", { metric: metric.name }], caption: `Dot: the patch changes the metric, p ≤ 0.05 after Holm over all cells of the metric.${blank.length ? ` Hatched: no share is known, because the whole effect's interval holds 0.` : ""} Colours end at ${number(-100 * limit, 0)} % and ${number(100 * limit, 0)} %. Shares need not add up to 100 %: each part also hands on what earlier parts gave it.` }),
      readout,
      tableHead("What is shown after Holm", `causes-shown-${metric.name}`, csvOf(names, sure)), h("p", { class: "soft" }, sure.length ? `${sure.length} of ${own.length} cells, the largest effect first${sure.length > 12 ? "; 12 of them here" : ""}.` : `None of ${own.length} cells.`),
      sure.length ? table(null, [["part"], ["direction"], ["share", true], ["effect", true], ["p (Holm)", true]], sure.slice(0, 12).map((cell) => [named(cell), found.directions[cell.direction], share(cell), effect(cell), pValue(cell.p_adjusted)])) : null);
  },
};

// ---- chain

// Shares beyond these are cut, or one wide interval would make the others dots.
const ENDS = [-150, 250];
const inside = (value) => (value === null ? null : Math.min(ENDS[1], Math.max(ENDS[0], 100 * value)));

export const chain = {
  title: "Chain",
  about: "The published chain as three numbers",
  async show(place, values) {
    const folder = values.folder ?? 1;
    const found = await ask("chain", { folder });
    const { metric, chosen, of, spread, change } = shown("chain", found, values);
    const own = of(found.rows);
    const digits = spread(own, "effect");
    const words = Object.fromEntries(found.links);
    const whole = of(found.wholes)[0];
    const known = own.filter((row) => row.share !== null);
    const cuts = known.some((row) => [row.share, row.share_lo, row.share_hi].some((end) => end !== null && inside(end) !== 100 * end));
    const said = (row) => [`${words[row.link]}, ${found.directions[row.direction]}`, `share ${share(row)}`, `effect ${change(row.effect, row.lo, row.hi, digits)} ${metric.unit}`, `${pWords(row.p)}, by itself`, plural(row.n, "item"), row.note];
    const rows = found.links.filter(([link]) => link !== "both").flatMap(([link, name]) => {
      const mine = known.filter((row) => row.link === link);
      return mine.length ? [{ heading: true, label: name }, ...mine.map((row) => ({ label: found.directions[row.direction], value: inside(row.share), lo: inside(row.share_lo), hi: inside(row.share_hi), kind: row.direction === "in" ? "circle" : "square",
        colour: row.direction === "in" ? "c1" : "c5", hollow: !row.sure, words: share(row), said: said(row) }))] : [];
    });
    const arm = own.find((row) => row.link === "arm");
    const moved = own.find((row) => row.link === "mlp-activation")?.moved ?? null;
    const names = ["link", "direction", "metric", "n", "effect", "lo", "hi", "p", "share", "share_lo", "share_hi", "moved", "note"];
    const blank = `No share is known: the whole effect${whole ? `, ${change(whole.delta, whole.lo, whole.hi, digits)} ${metric.unit},` : ""} may be 0.`;
    put(place, h("h1", null, `Chain: ${found.title}`),
      h("p", { class: "soft" }, "How much of the filler's effect passes through layer 1's attention output, through the first MLP's activation, and elsewhere. Put in: the share that the part alone gives. Taken out: the share that is lost without it."),
      chosen,
      known.length ? [legend([{ kind: "circle", colour: "c1", words: found.directions.in }, { kind: "square", colour: "c5", words: found.directions.out }, { kind: "circle", colour: "ink", words: "filled: p ≤ 0.05, each by itself" }, { kind: "circle", colour: "ink", hollow: true, words: "hollow: not" }]),
        picture(`The chain: shares of the effect on ${metric.name}`, (width) => forest(width, rows, { unit: "share of the effect (%)", band: [0, 100], sign: false }), csvOf(names, own),
          { name: `chain-${metric.name}`, proof: [folder, "chain", { metric: metric.name }], caption: `95 % intervals over items; grey: 0 to 100 %.${cuts ? " What lies beyond the edges is cut." : ""} Shares need not add up to 100 %: what passes through the first part may pass through the second too.` })]
        : h("p", { class: "warning", role: "note" }, blank),
      words["mlp-activation"] ? null : h("p", { class: "soft" }, "This model's MLP activation cannot be patched, so “elsewhere” holds it too."),
      arm ? h("p", { class: "soft" }, `ARM is beside the chain, to compare.${arm.moved !== null && moved !== null ? ` Layer 1's activations move by ${short(moved)} (root mean square) with the filler, by ${short(arm.moved)} with ARM.` : ""}${arm.note ? ` ${arm.note}.` : ""}`) : null,
      tableHead("As a table", `chain-table-${metric.name}`, csvOf(names, own), [folder, "chain", { metric: metric.name }]),
      table(null, [["link"], ["direction"], ["share", true], [`effect, ${metric.unit}`, true], ["p", true], ["items", true]], found.links.flatMap(([link, name]) => own.filter((row) => row.link === link).map((row) => [name, found.directions[row.direction], share(row), change(row.effect, row.lo, row.hi, digits), pValue(row.p), row.n]))));
  },
};
