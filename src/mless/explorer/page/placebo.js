// Named fillers among arbitrary edits: a dot for each edit, the fillers below.

import { around, canvas, columnFor, COLOURS, cut, digitsFor, extent, fitted, label, legend, linear, metricOf, number, picture, shape, ticks, times, told } from "./chart.js";
import { h, svg, table } from "./dom.js";
import { pValue, pWords } from "./formats.js";
import { VERDICT_COLOUR } from "./likelihood.js";
import { ask } from "./source.js";

const DOT = 9;

function draw(width, edits, fillers, metric, kinds, digits, said) {
  const by = metric.by;
  const MEAN = "mean of the edits";
  const names = columnFor([MEAN, ...fillers.map((row) => row.condition)], 60, width * 0.4 - 16) + 16;
  const ends = fillers.flatMap((row) => [row.delta, row.delta_lo, row.delta_hi, row.edits_lo, row.edits_hi]).concat(edits.map((row) => row.delta));
  const reach = extent(ends.map((one) => (one === null ? null : one * by)), { zero: 0 });
  const x = linear(reach, [names, width - 14]);
  // Dots that would overlap lie on each other.
  const stacks = new Map();
  const dots = edits.toSorted((a, b) => a.delta - b.delta).map((row) => {
    const bin = Math.round(x(times(row.delta, by)) / DOT);
    stacks.set(bin, (stacks.get(bin) ?? 0) + 1);
    return [row, stacks.get(bin)];
  });
  const top = Math.max(3, ...stacks.values()) * DOT + 14;
  const line = 28;
  const bottom = top + (fillers.length + 1) * line + 8;
  const drawn = canvas(width, bottom + 40);
  for (const [value, ends2] of ticks(reach, width < 480 ? 3 : 6)) {
    drawn.append(svg("line", { x1: x(value), x2: x(value), y1: 4, y2: bottom, class: "grid" }), label(x(value), bottom + 15, number(value, ends2, { sign: true }), { class: "tick", "text-anchor": "middle" }));
  }
  drawn.append(svg("line", { x1: x(0), x2: x(0), y1: 4, y2: bottom, class: "axis" }), label((names + width) / 2, bottom + 33, `Δ ${metric.name}, ${metric.unit}`, { class: "tick", "text-anchor": "middle" }),
    label(names - 12, top - 2, `${edits.length} edits`, { class: "name", "text-anchor": "end" }));
  for (const [row, place] of dots) {
    const at = kinds.indexOf(row.kind);
    const mark = shape(at, x(times(row.delta, by)), top - place * DOT + 3, 3.9, { class: COLOURS[at % COLOURS.length] });
    drawn.append(told(mark, [`an edit: ${said[row.kind] ?? row.kind}`, `Δ ${number(times(row.delta, by), digits, { sign: true })}${around(times(row.lo, by), times(row.hi, by), digits, { sign: true })} ${metric.unit}`, `text: ${JSON.stringify(cut(row.text, 48))}`]));
  }
  const first = fillers[0];
  const rows = [{ name: MEAN, value: first.edits_mean, lo: first.edits_lo, hi: first.edits_hi, colour: "ink", kind: "diamond",
    told: ["the mean of all edits", `Δ ${number(times(first.edits_mean, by), digits, { sign: true })}${around(times(first.edits_lo, by), times(first.edits_hi, by), digits, { sign: true })}`, `edits differ by ${number(times(first.edits_sd, by), digits)} (sd without the items' noise)`] },
  ...fillers.map((row) => ({ name: row.condition, value: row.delta, lo: row.delta_lo, hi: row.delta_hi, colour: VERDICT_COLOUR[row.verdict] ?? "open", kind: "square", hollow: row.verdict === "undecided",
    told: [row.condition, `Δ ${number(times(row.delta, by), digits, { sign: true })}${around(times(row.delta_lo, by), times(row.delta_hi, by), digits, { sign: true })} ${metric.unit}`, `beyond an arbitrary edit ${number(times(row.specific, by), digits, { sign: true })}${around(times(row.specific_lo, by), times(row.specific_hi, by), digits, { sign: true })}`,
      `above ${number(times(row.percentile, 100), 0)} % of the edits; ${pWords(row.p)}`, `verdict: ${row.verdict}`] }))];
  rows.forEach((row, at) => {
    const y = top + at * line + line / 2 + 8;
    const group = svg("g", null, svg("rect", { x: 0, y: y - line / 2, width, height: line, class: "hit" }), fitted(names - 12, y + 4, row.name, names - 14, { class: "name", "text-anchor": "end" }));
    if (row.lo !== null && row.hi !== null) group.append(svg("line", { x1: x(times(row.lo, by)), x2: x(times(row.hi, by)), y1: y, y2: y, class: `whisker ${row.colour}` }));
    group.append(shape(row.kind, x(times(row.value, by)), y, 5.2, { class: `${row.colour}${row.hollow ? " hollow" : ""}` }));
    drawn.append(told(group, row.told));
  });
  return drawn;
}

export const view = {
  title: "Placebo",
  about: "Is this filler special?",
  async show(place, values) {
    const found = await ask("placebo", { folder: values.folder ?? 1 });
    const [metric, metricChoice] = metricOf("placebo", values, found.metrics);
    const by = metric.by;
    const edits = found.edits.filter((row) => row.metric === metric.name);
    const fillers = found.fillers.filter((row) => row.metric === metric.name);
    const kinds = Object.keys(found.kinds).filter((kind) => edits.some((row) => row.kind === kind));
    const digits = Math.min(5, digitsFor(Math.max(...edits.map((row) => Math.abs(times(row.delta, by))), 1e-9)));
    const marks = legend(kinds.map((kind, at) => ({ kind: at, colour: COLOURS[at % COLOURS.length], words: found.kinds[kind] })));
    place.append(h("h1", null, `Placebo: ${found.title}`),
      h("p", { class: "soft" }, "Each dot is an arbitrary edit of the same length at the same place: its mean change against no filler. A filler that does what any edit does lies among the dots."),
      h("div", { class: "choices" }, metricChoice),
      marks,
      picture(`Fillers among ${edits.length} arbitrary edits: Δ ${metric.name}`, (width) => draw(width, edits, fillers, metric, kinds, digits, found.kinds), () => [["condition", "kind", "metric", "delta", "lo", "hi", "text"],
        ...edits.map((row) => [row.condition, row.kind, row.metric, row.delta, row.lo, row.hi, row.text]), ...fillers.map((row) => [row.condition, "filler", row.metric, row.delta, row.delta_lo, row.delta_hi, ""])],
      { name: `placebo-${metric.name}`, legend: marks, proof: [values.folder ?? 1, "edits", { metric: metric.name }, "The fillers stand in placebo.parquet."] }),
      h("h2", null, "Each filler in words"),
      table(null, [["filler"], ["Δ", true], ["beyond an arbitrary edit", true], ["above so many edits", true], ["p", true], ["verdict"]], fillers.map((row) => [row.condition,
        `${number(times(row.delta, by), digits, { sign: true })}${around(times(row.delta_lo, by), times(row.delta_hi, by), digits, { sign: true })}`, `${number(times(row.specific, by), digits, { sign: true })}${around(times(row.specific_lo, by), times(row.specific_hi, by), digits, { sign: true })}`,
        `${number(times(row.percentile, 100), 0)} %${around(times(row.percentile_lo, 100), times(row.percentile_hi, 100), 0)}`, pValue(row.p), h("span", { class: row.verdict }, row.verdict)])),
      h("p", { class: "soft small" }, `p is never below 1 / (edits + 1) = ${number(1 / (edits.length + 1), 3)}, and it is of one filler by itself.`));
  },
};
