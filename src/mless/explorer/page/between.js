// Several folders side by side, and heads' shifts against items whose answers turned.

import { addressOf, go } from "./address.js";
import { around, canvas, COLOURS, digitsFor, extent, forest, label, legend, linear, number, picture, readoutOf, shape, ticks, told } from "./chart.js";
import { choice, h, svg, table } from "./dom.js";
import { pValue, pWords } from "./formats.js";
import { refusals } from "./forest.js";
import { pairs } from "./pair.js";
import { ask, isExport } from "./source.js";

function lines(width, folders, found, digits) {
  const height = 300;
  const left = 58;
  const layers = folders.flatMap((one) => one.layers.map((row) => row.layer));
  const x = linear([Math.min(...layers), Math.max(...layers, Math.min(...layers) + 1)], [left + 10, width - 16]);
  const reach = extent(folders.flatMap((one) => one.layers.flatMap((row) => [row.value, row.lo, row.hi])), { zero: found.nothing });
  const y = linear(reach, [height - 42, 10]);
  const drawn = canvas(width, height);
  for (const [value, ends] of ticks(reach)) drawn.append(svg("line", { x1: left, x2: width - 6, y1: y(value), y2: y(value), class: "grid" }), label(left - 6, y(value) + 4, number(value, ends), { class: "tick", "text-anchor": "end" }));
  drawn.append(svg("line", { x1: left, x2: width - 6, y1: y(found.nothing), y2: y(found.nothing), class: "axis" }));
  for (const [value] of ticks([Math.min(...layers), Math.max(...layers)], Math.max(2, Math.floor(width / 90)))) {
    if (Number.isInteger(value)) drawn.append(label(x(value), height - 24, value, { class: "tick", "text-anchor": "middle" }));
  }
  drawn.append(label((left + width) / 2, height - 6, "layer (from 1)", { class: "tick", "text-anchor": "middle" }));
  folders.forEach((one, at) => {
    const colour = COLOURS[at % COLOURS.length];
    const known = one.layers.filter((row) => row.lo !== null && row.hi !== null);
    if (known.length > 1) drawn.append(svg("path", { d: `M${[...known.map((row) => [x(row.layer), y(row.hi)]), ...known.toReversed().map((row) => [x(row.layer), y(row.lo)])].join("L")}Z`, class: `area ${colour}` }));
    const points = one.layers.filter((row) => row.value !== null);
    if (points.length) drawn.append(svg("path", { d: `M${points.map((row) => [x(row.layer), y(row.value)]).join("L")}`, class: `line ${colour}` }));
    for (const row of one.layers) {
      if (row.value === null) continue;
      drawn.append(told(shape(at, x(row.layer), y(row.value), 3.8, { class: colour }), [`${one.label} (${one.name})`, `layer ${row.layer}: ${number(row.value, digits)}${around(row.lo, row.hi, digits)}`, `${row.n} items`]));
    }
  });
  return drawn;
}

// ---- heads and turned items

function grid(width, found) {
  const layers = [...new Set(found.rows.map((row) => row.layer))];
  const heads = [...new Set(found.rows.map((row) => row.head))];
  const left = 44;
  const cell = Math.max(7, Math.min(26, (width - left - 6) / heads.length));
  const drawn = canvas(width, layers.length * cell + 42);
  heads.forEach((head, at) => (at % Math.ceil(18 / cell) === 0) && drawn.append(label(left + (at + 0.5) * cell, 12, head, { class: "tick", "text-anchor": "middle" })));
  layers.forEach((layer, at) => (at % Math.ceil(13 / cell) === 0) && drawn.append(label(left - 6, 18 + (at + 0.5) * cell + 4, `L${layer}`, { class: "tick", "text-anchor": "end" })));
  const most = Math.max(...found.rows.map((row) => Math.abs(row.r ?? 0)), 1e-9);
  for (const row of found.rows) {
    const share = row.r === null ? 0 : Math.abs(row.r) / most;
    const box = svg("rect", { x: left + heads.indexOf(row.head) * cell, y: 18 + layers.indexOf(row.layer) * cell, width: cell - 1, height: cell - 1, class: `cell ${row.r < 0 ? "down" : "up"}${row.p_adjusted !== null && row.p_adjusted <= 0.05 ? " sure" : ""}`, "fill-opacity": (0.06 + 0.9 * share).toFixed(3) });
    drawn.append(told(box, [`L${row.layer}H${row.head}: r = ${number(row.r, 3, { sign: true })}`, `${pWords(row.p)} by itself; after Holm ${pWords(row.p_adjusted)}`, row.r < 0 ? "where it loses more, items turn right more" : "where it keeps more, items turn right more"]));
  }
  drawn.append(label(left + (heads.length * cell) / 2, layers.length * cell + 36, "head (from 1)", { class: "tick", "text-anchor": "middle" }));
  return drawn;
}

async function turned(place, values, tools, pairs) {
  place.append(h("h2", null, "Heads' shifts and items that turned"));
  if (!pairs.length) {
    place.append(h("p", { class: "soft" }, "Give `mless show` an attention folder and an accuracy folder of the same model and items, and each head's shift is correlated with what turned."));
    return;
  }
  const fit = pairs.filter((pair) => !pair.why);
  place.append(refusals(pairs.filter((pair) => pair.why).map((pair) => ({ name: pair.names.join(" and "), why: pair.why })), "pair") ?? "");
  if (!fit.length) return;
  const pair = fit.find((one) => `${one.heads}-${one.answers}` === values.pair) ?? fit[0];
  const condition = pair.conditions.includes(values.turned) ? values.turned : pair.conditions.includes("mless") ? "mless" : pair.conditions[0];
  place.append(h("div", { class: "choices" }, fit.length > 1 && choice("Folders", fit.map((one) => [`${one.heads}-${one.answers}`, one.names.join(" and ")]), `${pair.heads}-${pair.answers}`, (name) => go("between", { ...values, pair: name })),
    choice("Condition", pair.conditions.map((name) => [name, name]), condition, (name) => go("between", { ...values, turned: name }))));
  let found;
  try {
    found = await ask("between/heads", { heads: pair.heads, answers: pair.answers, condition });
  } catch (fault) {
    place.append(h("p", { class: "refusal", role: "alert" }, fault.message));
    return;
  }
  const sure = found.adjusted;
  const top = found.rows.filter((row) => row.r !== null).toSorted((a, b) => Math.abs(b.r) - Math.abs(a.r)).slice(0, 10);
  place.append(
    h("p", null, `${found.n} items that both folders have; under ${found.condition} ${found.right} turned right and ${found.wrong} turned wrong. Each head's shift (log λ by item, as ranks) is correlated with that.`),
    h("p", { class: "warning", role: "note" }, h("b", null, "Many tests at once. "), `${found.count} heads were looked at. About ${number(found.chance, 0)} would have p ≤ 0.05 by chance; ${found.small} have. After Holm ${sure ? `${sure} remain${sure === 1 ? "s" : ""}` : "none remains"}. With items in random order the largest |r| is as large as here in ${number(100 * found.largest_p, 1)} % of ${found.permutations.toLocaleString("en")} orders. A correlation is not a cause.`),
    picture(`Correlation of each head's shift with turning right, ${found.condition}`, (width) => grid(width, found), () => [["layer", "head", "r", "p", "p_adjusted"], ...found.rows.map((row) => [row.layer, row.head, row.r, row.p, row.p_adjusted])],
      { name: "heads-and-turned", caption: `Orange: r below 0, where the head loses more, items turn right more. Purple: above 0. The strongest colour is |r| = ${number(Math.max(...found.rows.map((row) => Math.abs(row.r ?? 0))), 2)}. Framed: p ≤ 0.05 after Holm.`, proof: [pair.heads, "shares", { condition: found.condition, queries: "original" }, `Log λ of each item, against what turned in answers.parquet of ${found.names[1]}.`] }),
    table("The ten largest, by |r|", [["head"], ["r", true], ["p", true], ["p (Holm)", true]], top.map((row) => [
      h("a", { href: addressOf("head", { folder: pair.heads, condition: found.condition, layer: row.layer, head: row.head }) }, `L${row.layer}H${row.head}`), number(row.r, 3, { sign: true }), pValue(row.p), pValue(row.p_adjusted)])));
}

export const view = {
  title: "Between folders",
  about: "Several models or settings side by side",
  async show(place, values, tools) {
    const found = await ask("between", { folder: values.folder ?? 1, condition: values.condition, readout: values.readout, metric: values.metric });
    const set = (changes) => go("between", { ...values, ...changes });
    const [readoutChoice, meaning] = readoutOf(found.readouts, found.readout, (readout) => set({ readout, metric: null }));
    const fit = found.folders.filter((one) => !one.why);
    const spread = fit.map((one) => Math.abs((one.all.hi ?? one.all.value) - (one.all.lo ?? one.all.value))).filter((one) => one > 0);
    const digits = Math.min(5, Math.max(1, digitsFor(spread.length ? Math.min(...spread) * 5 : 1)));
    const names = fit.map((one) => (fit.filter((other) => other.label === one.label).length > 1 ? `${one.label} (${one.name})` : one.label));
    const sign = { sign: found.nothing === 0 };
    place.append(h("h1", null, "Between folders"),
      h("p", { class: "soft" }, found.folders.length > 1 ? `${found.folders.length} folders measured ${found.measured}. They are put beside each other if their items and questions are the same; what else differs is named.`
        : `Only one of the given folders measured ${found.measured}. Choose another folder above, or give mless show several that measured the same.`, meaning ? ` ${meaning}` : ""),
      h("div", { class: "choices" }, choice("Condition", found.conditions.map((name) => [name, name]), found.condition, (condition) => set({ condition })),
        !isExport() && readoutChoice,
        !isExport() && found.metrics.length > 1 && choice("Metric", found.metrics.map((name) => [name, name]), found.metric, (metric) => set({ metric }))));
    const layers = new Set(fit.map((one) => one.layers.map((row) => row.layer).join()));
    if (layers.size > 1) place.append(h("p", { class: "warning", role: "note" }, "These folders measured different layers, so their means over layers are not of one thing. Compare them by layer, below."));
    const unit = found.unit ? `${found.words} (${found.unit})` : found.words;
    const rows = fit.map((one, at) => ({ label: names[at], ...one.all, colour: COLOURS[at % COLOURS.length], kind: at, words: `${number(one.all.value, digits, sign)}${around(one.all.lo, one.all.hi, digits, sign)}`,
      said: [names[at], `${found.words}: ${number(one.all.value, digits, sign)}${around(one.all.lo, one.all.hi, digits, sign)}`, `${one.all.n} items; folder ${one.name}`, one.differs.length ? `differs in ${one.differs.join("; ")}` : null] }));
    place.append(picture(`${unit}, ${found.condition}`, (width) => forest(width, rows, { nothing: found.nothing, unit }), () => [["folder", "label", "n", "value", "lo", "hi"], ...fit.map((one) => [one.name, one.label, one.all.n, one.all.value, one.all.lo, one.all.hi])],
      { name: "between", caption: `${fit.some((one) => one.layers.length) ? "Mean over all measured layers; those by themselves are below. " : ""}95 % intervals over items.` }));
    const deep = fit.filter((one) => one.layers.length);
    if (deep.length) {
      const marks = legend(deep.map((one) => ({ kind: fit.indexOf(one), colour: COLOURS[fit.indexOf(one) % COLOURS.length], words: names[fit.indexOf(one)] })));
      place.append(h("h2", null, "By layer"), marks,
        picture(`${found.words} by layer, ${found.condition}`, (width) => lines(width, deep, found, digits), () => [["folder", "label", "layer", "n", "value", "lo", "hi"], ...deep.flatMap((one) => one.layers.map((row) => [one.name, one.label, row.layer, row.n, row.value, row.lo, row.hi]))],
          { name: "between-layers", legend: marks, caption: "Means over heads with 95 % intervals over items." }));
    }
    const own = fit.find((one) => one.number === Number(values.folder ?? 1)) ?? fit[0];
    if (found.measured === "attention" && fit.length > 1 && !isExport()) await pairs(place, own, fit.filter((one) => one !== own), found.condition, values);
    const other = fit.filter((one) => one.differs.length);
    if (other.length) place.append(h("h2", null, "What else differs"), h("ul", null, other.map((one) => h("li", null, h("b", null, one.name), `: ${one.differs.join("; ")}`))));
    place.append(refusals(found.folders.filter((one) => one.why)) ?? "");
    if (found.elsewhere.length) place.append(h("p", { class: "soft small" }, `Not beside them, since they measured something else: ${found.elsewhere.map((one) => `${one.name} (${one.measured})`).join(", ")}.`));
    if (found.measured === "accuracy" && fit.length > 1 && !isExport()) {
      const first = fit[0];
      place.append(h("h2", null, "Which items one got wrong and the other not"), h("ul", null, fit.slice(1).map((one) => h("li", null,
        h("a", { href: addressOf("answers", { folder: one.number, other: first.number, condition: found.condition, against: found.condition, turned: "wrong" }) }, `right in ${first.label} (${first.name}), wrong in ${one.label} (${one.name})`), " · ",
        h("a", { href: addressOf("answers", { folder: one.number, other: first.number, condition: found.condition, against: found.condition, turned: "right" }) }, "the other way round")))));
    }
    await turned(place, values, tools, found.turned);
  },
};
