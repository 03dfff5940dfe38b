// One effect in several models: `mless compare` as a live picture.

import { go } from "./address.js";
import { around, digitsFor, forest, number, picture, readoutOf } from "./chart.js";
import { choice, h, put } from "./dom.js";
import { pWords } from "./formats.js";
import { ask, isExport } from "./source.js";

function lines(found, digits) {
  const rows = [];
  const sign = { sign: found.change };
  const said = (value, lo, hi) => `${number(value, digits, sign)}${around(lo, hi, digits, sign)}`;
  found.blocks.forEach((block, at) => {
    const colour = `c${(at % 8) + 1}`;
    const heaviest = Math.max(...block.rows.map((row) => row.weight ?? 0), 1e-9);
    if (found.models > 1 && found.blocks.length > 1) rows.push({ heading: true, label: block.condition });
    for (const row of block.rows) {
      rows.push({ label: found.models > 1 ? row.label : block.condition, value: row.value, lo: row.lo, hi: row.hi, colour, kind: "square", size: 3 + 3.5 * Math.sqrt((row.weight ?? heaviest) / heaviest), words: said(row.value, row.lo, row.hi),
        said: [`${row.label}, ${block.condition}`, `${found.words}: ${said(row.value, row.lo, row.hi)}`, `${row.n} items; weight ${number(100 * (row.weight ?? 1), 0)} %`, row.folder] });
    }
    const mean = block.pooled;
    if (mean) {
      rows.push({ label: `mean of ${mean.k} models`, value: mean.mean, lo: mean.lo, hi: mean.hi, colour: "ink", kind: "diamond", size: 6, words: said(mean.mean, mean.lo, mean.hi),
        said: [`random-effects mean over ${mean.k} models, ${block.condition}`, `${said(mean.mean, mean.lo, mean.hi)}; ${pWords(mean.p)}`, `models differ: τ² = ${number(mean.tau2, 5)}, I² = ${number(100 * mean.i2, 0)} %`] });
      if (mean.predicted_lo !== null) {
        rows.push({ label: "a further model", value: null, lo: mean.predicted_lo, hi: mean.predicted_hi, colour: "ink", thin: true, words: around(mean.predicted_lo, mean.predicted_hi, digits, sign).trim(), said: ["where a further model's effect is expected", around(mean.predicted_lo, mean.predicted_hi, digits, sign).trim()] });
      }
    }
  });
  return rows;
}

export function refusals(refused, what = "folder") {
  if (!refused.length) return null;
  return h("section", { "aria-label": `What does not fit` }, h("h3", null, refused.length > 1 ? `${refused.length} ${what}s do not fit` : `One ${what} does not fit`),
    refused.map((one) => h("p", { class: "refusal" }, h("b", null, one.name), ": ", one.why)));
}

export const view = {
  title: "Forest",
  about: "One effect in several models",
  async show(place, values) {
    const found = await ask("forest", { folder: values.folder ?? 1, readout: values.readout, condition: values.condition, metric: values.metric, layer: values.layer });
    const set = (changes) => go("forest", { ...values, ...changes });
    const spread = found.blocks.flatMap((block) => block.rows.map((row) => Math.abs((row.hi ?? row.value) - (row.lo ?? row.value)))).filter((one) => one > 0);
    const digits = Math.min(5, Math.max(1, digitsFor(spread.length ? Math.min(...spread) * 5 : 1)));
    const rows = lines(found, digits);
    const [readoutChoice, meaning] = readoutOf(found.readouts, found.readout, (readout) => set({ readout, metric: null }));
    put(place, h("h1", null, "Forest of models"),
      h("p", { class: "soft" }, `${found.words}; ${found.task}, ${found.items} items. ${meaning ? `${meaning} ` : ""}${found.models > 1 ? "Squares: one model each with its 95 % interval over items, larger the more it weighs. Diamond: the random-effects mean." : "One model: nothing is pooled. Give mless show the folders of several models to compare them."}`),
      h("div", { class: "choices" }, readoutChoice,
        !isExport() && choice("Condition", [["all", "all"], ...found.conditions.map((name) => [name, name])], found.condition, (condition) => set({ condition })),
        !isExport() && found.metrics.length > 1 && choice("Metric", found.metrics.map((name) => [name, name]), found.metric, (metric) => set({ metric })),
        !isExport() && found.layers && choice("Layer", [["", "all"], ...found.layers.map((one) => [one, one])], found.layer ?? "", (layer) => set({ layer: layer || null }))),
      picture(found.words, (width) => forest(width, rows, { nothing: found.nothing, ratio: found.ratio, unit: found.words }), () => [["condition", "label", "folder", "n", "value", "lo", "hi", "weight"],
        ...found.blocks.flatMap((block) => [...block.rows.map((row) => [block.condition, row.label, row.folder, row.n, row.value, row.lo, row.hi, row.weight]), ...(block.pooled ? [[block.condition, "mean", "", block.pooled.k, block.pooled.mean, block.pooled.lo, block.pooled.hi, 1]] : [])])],
      { name: "forest" }), h("p", { class: "soft small" }, "Made again by "), h("pre", { tabindex: 0 }, found.command), refusals(found.refused));
  },
};
