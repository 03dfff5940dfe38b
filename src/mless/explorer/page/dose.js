// How much filler, and where: Δ by length, a line for each place, a panel for each filler.

import { around, canvas, COLOURS, digitsFor, extent, label, legend, linear, metricOf, number, picture, plural, shape, ticks, times, told } from "./chart.js";
import { h, svg, table } from "./dom.js";
import { pValue, pWords } from "./formats.js";
import { ask } from "./source.js";

const PLACES = ["before-system", "before-question", "end", "before-answer", "anywhere"];
const styleOf = (placement) => {
  const at = Math.max(0, PLACES.indexOf(placement));
  return { kind: ["square", "circle", "triangle", "diamond", "down"][at], colour: COLOURS[at] };
};

function panel(width, points, tests, metric, reach, digits) {
  const height = Math.round(Math.min(330, Math.max(220, width * 0.55)));
  const left = 62;
  const by = metric.by;
  const lengths = [0, ...new Set(points.map((row) => row.length))].sort((a, b) => a - b);
  const at = (length) => Math.log2(1 + length);
  const x = linear([0, at(lengths.at(-1))], [left + 8, width - 18]);
  const y = linear(reach, [height - 44, 10]);
  const drawn = canvas(width, height);
  for (const [value, ends] of ticks(reach)) {
    drawn.append(svg("line", { x1: left, x2: width - 6, y1: y(value), y2: y(value), class: "grid" }),
      label(left - 6, y(value) + 4, number(value, ends, { sign: true }), { class: "tick", "text-anchor": "end" }));
  }
  drawn.append(svg("line", { x1: left, x2: width - 6, y1: y(0), y2: y(0), class: "axis" }));
  let last = -99;
  for (const length of lengths) {
    if (x(at(length)) - last < 34) continue;
    last = x(at(length));
    drawn.append(label(last, height - 26, length.toLocaleString("en"), { class: "tick", "text-anchor": "middle" }));
  }
  drawn.append(label((left + width) / 2, height - 6, "filler (tokens)", { class: "tick", "text-anchor": "middle" }));
  const places = [...new Set(points.map((row) => row.placement))];
  const curves = places.map((placement) => points.filter((row) => row.placement === placement));
  curves.forEach((curve, n) => {
    const { colour } = styleOf(places[n]);
    const known = curve.filter((row) => row.lo_all !== null && row.hi_all !== null);
    if (known.length) {
      const edge = [[x(0), y(0)], ...known.map((row) => [x(at(row.length)), y(times(row.hi_all, by))]), ...known.toReversed().map((row) => [x(at(row.length)), y(times(row.lo_all, by))])];
      drawn.append(svg("path", { d: `M${edge.join("L")}Z`, class: `area ${colour}` }));
    }
    drawn.append(svg("path", { d: `M${[[x(0), y(0)], ...curve.map((row) => [x(at(row.length)), y(times(row.delta, by))])].join("L")}`, class: `line ${colour}` }));
  });
  curves.forEach((curve, n) => {
    const { kind, colour } = styleOf(places[n]);
    for (const row of curve) {
      const sure = row.p_adjusted !== null && row.p_adjusted <= 0.05;
      const mark = svg("g", null, svg("circle", { cx: x(at(row.length)), cy: y(times(row.delta, by)), r: 11, class: "hit" }), shape(kind, x(at(row.length)), y(times(row.delta, by)), 4.2, { class: `${colour}${sure ? "" : " hollow"}` }));
      drawn.append(told(mark, [`${row.filler}, ${plural(row.length, "token")} ${row.placement}`, `Δ ${metric.name} ${number(times(row.delta, by), digits, { sign: true })}${around(times(row.lo, by), times(row.hi, by), digits, { sign: true })} ${metric.unit}`,
        row.lo_all === null ? null : `for all lengths at once${around(times(row.lo_all, by), times(row.hi_all, by), digits, { sign: true })}`, `${pWords(row.p)}; after Holm ${pWords(row.p_adjusted)}`, `${row.n} items`, row.skewed && "a few items decide this point"]));
    }
    const test = tests.find((one) => one.placement === places[n] && one.chosen && one.test_delta !== null);
    if (test) {
      const px = x(at(test.best_length)) + 9;
      const star = svg("g", null, test.test_lo !== null && svg("line", { x1: px, x2: px, y1: y(times(test.test_lo, by)), y2: y(times(test.test_hi, by)), class: "whisker ink" }), shape("cross", px, y(times(test.test_delta, by)), 5.5, { class: "ink" }));
      drawn.append(told(star, [`best on the dev items: ${plural(test.best_length, "token")} ${test.placement}`, `on the other ${test.test_n} items Δ ${number(times(test.test_delta, by), digits, { sign: true })}${around(times(test.test_lo, by), times(test.test_hi, by), digits, { sign: true })}`, pWords(test.test_p)]));
    }
  });
  return drawn;
}

export const view = {
  title: "Dose",
  about: "How much filler, and where",
  async show(place, values) {
    const found = await ask("dose", { folder: values.folder ?? 1 });
    const [metric, metricChoice] = metricOf("dose", values, found.metrics);
    const points = found.points.filter((row) => row.metric === metric.name);
    const tests = found.tests.filter((row) => row.metric === metric.name);
    const by = metric.by;
    const reach = extent([...points.flatMap((row) => [times(row.delta, by), times(row.lo_all, by), times(row.hi_all, by)]),
      ...tests.filter((row) => row.chosen).flatMap((row) => [row.test_lo, row.test_hi].map((end) => times(end, by)))], { zero: 0 });
    const digits = Math.min(5, digitsFor((reach[1] - reach[0]) / 3));
    const fillers = [...new Set(points.map((row) => row.filler))];
    const places = [...new Set(points.map((row) => row.placement))];
    const marks = legend([...places.map((name) => ({ ...styleOf(name), words: name })), { kind: "circle", colour: "ink", words: "filled: p ≤ 0.05 after Holm" }, { kind: "circle", colour: "ink", hollow: true, words: "hollow: not" }, { kind: "cross", colour: "ink", words: "best on dev items: Δ of the others" }]);
    place.append(h("h1", null, `Dose: ${found.title}`), h("p", { class: "soft" }, "Mean change against no filler, by the filler's length. Bands hold for all lengths of a line at once."),
      h("div", { class: "choices" }, metricChoice),
      marks,
      h("div", { class: "panels" }, fillers.map((filler) => {
        const own = points.filter((row) => row.filler === filler);
        return picture(`${filler}: Δ ${metric.name} by length, ${metric.unit}`, (width) => panel(width, own, tests.filter((row) => row.filler === filler), metric, reach, digits), () => [["filler", "placement", "length", "metric", "n", "delta", "lo", "hi", "lo_all", "hi_all", "p", "p_adjusted"],
          ...own.map((row) => [row.filler, row.placement, row.length, row.metric, row.n, row.delta, row.lo, row.hi, row.lo_all, row.hi_all, row.p, row.p_adjusted])], { name: `dose-${filler}`, legend: marks, proof: [values.folder ?? 1, "dose", { filler, metric: metric.name }] });
      })),
      h("h2", null, "Every line in words"),
      table(null, [["filler"], ["place"], ["slope per doubling", true], ["p (Holm)", true], ["peak: p (Holm)", true], ["best on dev items", true], ["Δ of the other items", true], ["p", true]], tests.map((row) => [row.filler, row.placement,
        `${number(times(row.slope, by), digits, { sign: true })}${around(times(row.slope_lo, by), times(row.slope_hi, by), digits, { sign: true })}`, pValue(row.slope_p_adjusted), pValue(row.peak_p_adjusted),
        `${row.best_length.toLocaleString("en")}${row.chosen ? " (chosen)" : ""}`, row.test_delta === null ? "–" : `${number(times(row.test_delta, by), digits, { sign: true })}${around(times(row.test_lo, by), times(row.test_hi, by), digits, { sign: true })}`, pValue(row.test_p)])),
      h("p", { class: "soft small" }, `Only the row “chosen” is one comparison. Beside it, ${found.published}.`));
  },
};
