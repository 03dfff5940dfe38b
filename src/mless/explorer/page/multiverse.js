// The specification curve: one comparison in every specification, sorted by Δ, above a matrix of the settings.

import { go } from "./address.js";
import { around, canvas, columnFor, digitsFor, extent, fitted, label, legend, linear, metricOf, number, picture, shape, ticks, times, told, VERDICT_SHAPE } from "./chart.js";
import { choice, h, svg, table } from "./dom.js";
import { pValue, pWords } from "./formats.js";
import { VERDICT_COLOUR } from "./likelihood.js";
import { ask } from "./source.js";

function draw(width, curve, metric, settings, digits) {
  const by = metric.by;
  const rows = curve.rows;
  const tall = 190;
  const line = 15;
  const lines = Object.entries(curve.varied).flatMap(([name, values]) => [{ heading: settings[name] ?? name }, ...values.map((value) => ({ name, value }))]);
  const font = { size: 11, weight: 650 };
  const left = columnFor(lines.map((one) => one.heading ?? String(one.value)), 60, width * 0.4, font) + 12;
  const height = tall + lines.length * line + 18;
  const x = linear([-0.7, rows.length - 0.3], [left, width - 8]);
  const reach = extent(rows.flatMap((row) => [times(row.delta, by), times(row.lo, by), times(row.hi, by)]), { zero: 0 });
  const y = linear(reach, [tall - 14, 10]);
  const size = Math.min(5, Math.max(1.4, (0.36 * (width - left)) / Math.max(1, rows.length)));
  const drawn = canvas(width, height);
  for (const [value, ends] of ticks(reach)) drawn.append(svg("line", { x1: left, x2: width - 6, y1: y(value), y2: y(value), class: "grid" }), label(left - 6, y(value) + 4, number(value, ends, { sign: true }), { class: "tick", "text-anchor": "end" }));
  drawn.append(svg("line", { x1: left, x2: width - 6, y1: y(0), y2: y(0), class: "axis" }));
  const median = times(curve.test.median, by);
  drawn.append(svg("line", { x1: left, x2: width - 6, y1: y(median), y2: y(median), class: "dashed" }));
  lines.forEach((one, at) => {
    const place = tall + at * line + 10;
    drawn.append(fitted(left - 8, place + 4, one.heading ?? one.value, left - 10, { class: one.heading ? "heading small" : "tick", "text-anchor": "end" }, font));
    if (!one.heading) drawn.append(svg("line", { x1: left, x2: width - 6, y1: place, y2: place, class: "grid" }));
  });
  rows.forEach((row, at) => {
    const colour = VERDICT_COLOUR[row.verdict] ?? "open";
    const group = svg("g", null, svg("rect", { x: x(at) - Math.max(2, (width - left) / rows.length / 2), y: 4, width: Math.max(4, (width - left) / rows.length), height: height - 8, class: "hit" }));
    if (row.lo !== null && row.hi !== null) group.append(svg("line", { x1: x(at), x2: x(at), y1: y(times(row.lo, by)), y2: y(times(row.hi, by)), class: `whisker thin ${colour}` }));
    group.append(shape(VERDICT_SHAPE[row.verdict] ?? "circle", x(at), y(times(row.delta, by)), size, { class: colour }));
    lines.forEach((one, n) => {
      if (!one.heading && row[one.name] === one.value) group.append(shape("square", x(at), tall + n * line + 10, Math.min(size, 3.6), { class: colour }));
    });
    drawn.append(told(group, [`specification ${row.specification}: Δ ${number(times(row.delta, by), digits, { sign: true })}${around(times(row.lo, by), times(row.hi, by), digits, { sign: true })} ${metric.unit}`, `${pWords(row.p)}; ${row.verdict}; ${row.n} items`,
      ...Object.keys(curve.varied).map((name) => `${settings[name] ?? name}: ${row[name] ?? "–"}`), row.skewed && "a few items decide it"]));
  });
  return drawn;
}

export const view = {
  title: "Multiverse",
  about: "One comparison in many specifications",
  async show(place, values) {
    const found = await ask("multiverse", { folder: values.folder ?? 1 });
    const condition = found.conditions.includes(values.condition) ? values.condition : found.conditions[0];
    const there = found.metrics.filter((one) => found.curves.some((curve) => curve.condition === condition && curve.metric === one.name));
    const [metric, metricChoice] = metricOf("multiverse", values, there);
    const curve = found.curves.find((one) => one.condition === condition && one.metric === metric.name);
    const by = metric.by;
    const digits = Math.min(5, digitsFor(Math.max(...curve.rows.map((row) => Math.abs(times(row.delta, by))), 1e-9)));
    const effects = found.effects.filter((row) => row.condition === condition && row.metric === metric.name);
    const marks = legend(["rises", "drops", "equivalent", "undecided"].filter((word) => curve.rows.some((row) => row.verdict === word)).map((word) => ({ kind: VERDICT_SHAPE[word], colour: VERDICT_COLOUR[word], words: word })));
    place.append(h("h1", null, `Multiverse: ${found.title}`),
      h("p", { class: "soft" }, "Each mark is one specification, with its 95 % interval over items, sorted. The squares below say which value of each setting it has. A setting that decides has its squares of one value on one side."),
      h("div", { class: "choices" }, choice("Condition", found.conditions.map((name) => [name, name]), condition, (name) => go("multiverse", { ...values, condition: name })),
        metricChoice),
      h("div", { class: "verdict" }, h("p", null, `${condition}, ${metric.name}: ${curve.words}.`), h("p", null, `Median Δ ${number(times(curve.test.median, by), digits, { sign: true })} ${metric.unit} (${pWords(curve.test.p_median)}); so many one way: ${pWords(curve.test.p_either)}.`)),
      marks,
      picture(`${condition}: Δ ${metric.name} in ${curve.rows.length} specifications`, (width) => draw(width, curve, metric, found.settings, digits), () => [["specification", "condition", "metric", ...Object.keys(curve.varied), "n", "delta", "lo", "hi", "p", "verdict"],
        ...curve.rows.map((row) => [row.specification, row.condition, row.metric, ...Object.keys(curve.varied).map((name) => row[name]), row.n, row.delta, row.lo, row.hi, row.p, row.verdict])],
      { name: `specifications-${metric.name}`, legend: marks, caption: "Dashed: the median.", proof: [values.folder ?? 1, "specifications", { condition, metric: metric.name }] }));
    if (curve.reasons.length) place.append(h("p", { class: "refusal" }, `Left out: ${curve.test.left_out} specifications. ${curve.reasons.join("; ")}`));
    if (effects.length) {
      place.append(h("h2", null, "Which setting decides"), table(null, [["setting"], ["value"], ["specifications", true], ["rises", true], ["drops", true], ["mean Δ", true], ["range of the setting", true], ["p (Holm)", true], ["turns the verdict in"]],
        effects.map((row) => [found.settings[row.setting] ?? row.setting, row.value, row.specifications, row.rises, row.drops, number(times(row.delta, by), digits, { sign: true }), number(times(row.range, by), digits), pValue(row.range_p_adjusted), `${row.turned} of ${row.pairs} pairs`])));
    }
  },
};
