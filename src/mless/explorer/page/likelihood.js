// A likelihood study: effects of every condition on a metric, and items ranked by their change.

import { addressOf, go } from "./address.js";
import { along } from "./along.js";
import { everyRow, pager } from "./answers.js";
import { around, digitsFor, forest, legend, metricOf, number, picture, plural, tableHead, VERDICT_SHAPE } from "./chart.js";
import { choice, h, put, table } from "./dom.js";
import { beyondItems, pValue, pWords } from "./formats.js";
import { ask, isExport } from "./source.js";

export const VERDICT_COLOUR = { rises: "up", drops: "down", equivalent: "same", undecided: "open" };
const SORTS = [["rises", "largest rise first"], ["drops", "largest drop first"], ["size", "largest change first"], ["item", "order of the study"]];
const PAGE = 50;

async function list(values, { all = false } = {}) {
  const asked = { folder: values.folder ?? 1, condition: values.condition, metric: values.metric };
  if (!isExport()) return ask("likelihood", { ...asked, sort: values.sort, page: values.page, search: values.search, all: all ? 1 : undefined });
  if (Boolean(asked.condition) !== Boolean(asked.metric)) {
    const usual = await ask("likelihood", { folder: asked.folder, all: 1 });
    asked.condition ??= usual.condition;
    asked.metric ??= usual.metric;
  }
  const found = await ask("likelihood", { ...asked, all: 1 });
  const text = (values.search ?? "").toLowerCase();
  const rows = found.rows.filter((row) => !text || row.item.toLowerCase().includes(text));
  const by = { rises: (row) => -row.delta, drops: (row) => row.delta, size: (row) => -Math.abs(row.delta), item: (row) => row.number }[values.sort ?? "rises"];
  rows.sort((a, b) => by(a) - by(b));
  if (all) return { ...found, rows, pages: 1 };
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  const page = Math.min(Number(values.page ?? 1), pages);
  return { ...found, sort: values.sort ?? "rises", rows: rows.slice((page - 1) * PAGE, page * PAGE), found: rows.length, page, pages };
}

function effects(found, metric, values) {
  const rows = found.effects.filter((row) => row.metric === metric.name);
  const by = metric.by;
  const reach = Math.max(...rows.map((row) => Math.abs((row.hi ?? row.delta) - (row.lo ?? row.delta)) * by || Math.abs(row.delta * by)), 1e-9);
  const digits = Math.min(5, digitsFor(reach));
  const shown = (value) => (value === null || value === undefined ? null : value * by);
  const say = (value) => number(shown(value), digits, { sign: true });
  const margin = rows.find((row) => row.margin !== null)?.margin;
  const lines = rows.map((row) => ({
    label: row.condition === found.control ? `${row.condition} (A/A)` : row.condition,
    value: shown(row.delta), lo: shown(row.lo), hi: shown(row.hi),
    kind: row.condition === found.control ? "diamond" : VERDICT_SHAPE[row.verdict] ?? "circle",
    colour: row.condition === found.control ? "open" : VERDICT_COLOUR[row.verdict] ?? "open", hollow: row.verdict === "undecided",
    words: `${say(row.delta)}${around(shown(row.lo), shown(row.hi), digits, { sign: true })}${row.skewed ? " †" : ""}`,
    said: [row.condition, `Δ ${say(row.delta)}${around(shown(row.lo), shown(row.hi), digits, { sign: true })} ${metric.unit}`,
      row.p_adjusted === null ? (row.condition === found.control ? "A/A control: none once more" : "described, not tested") : `${pWords(row.p)}; after Holm ${pWords(row.p_adjusted)}`,
      row.verdict && `verdict: ${row.verdict}`, row.words, row.mde !== null && `smallest effect these ${row.n} items could show: ${number(shown(row.mde), digits)}`, row.skewed && "† a few items decide this row"],
    go: () => go("likelihood", { ...values, condition: row.condition, metric: metric.name, page: null }),
  }));
  const cells = () => [["condition", "metric", "n", "none", "value", "delta", "lo", "hi", "p", "p_adjusted", "mde", "verdict"],
    ...rows.map((row) => [row.condition, row.metric, row.n, row.none, row.value, row.delta, row.lo, row.hi, row.p, row.p_adjusted, row.mde, row.verdict])];
  const tested = rows.filter((row) => row.p_adjusted !== null);
  const fewest = Math.min(...tested.map((row) => row.n));
  const mine = rows.find((row) => row.condition === found.condition);
  const wide = found.limits && mine ? beyondItems(mine.n, mine.lo, mine.hi, ...found.limits) : null;
  const band = margin ? [-margin * by, margin * by] : null;
  const marks = legend([{ kind: "triangle", colour: "up", words: "rises" }, { kind: "down", colour: "down", words: "drops" }, { kind: "square", colour: "same", words: "equivalent" },
    { kind: "circle", colour: "open", hollow: true, words: "undecided" }, { kind: "diamond", colour: "open", words: "A/A control" }]);
  return h("div", null,
    picture(`Δ ${metric.name}: ${metric.words}`, (width) => forest(width, lines, { band, unit: `Δ ${metric.unit}` }), cells, {
      name: `effects-${metric.name}`, legend: marks, proof: [values.folder ?? 1, "effects", { metric: metric.name }],
      caption: `Mean change against none, item by item, with its 95 % interval.${band ? ` Grey: ± the margin of ${number(band[1], digits)}.` : ""}${rows.some((row) => row.skewed) ? " †: a few items decide it." : ""} Click a row for its items.`,
    }),
    marks,
    h("details", { open: true }, h("summary", null, "As a table"), table(null, [["condition"], ["none", true], ["with", true], ["Δ", true], ["p", true], ["p (Holm)", true], ["verdict"]],
      rows.map((row) => [row.condition, number(shown(row.none), digits), number(shown(row.value), digits), `${say(row.delta)}${around(shown(row.lo), shown(row.hi), digits, { sign: true })}`, pValue(row.p), pValue(row.p_adjusted),
        row.verdict ? h("span", { class: row.verdict }, row.verdict) : "–"])),
      h("p", { class: "soft small" }, `p: against none.${found.control ? " Holm's p is of the larger of two: against none, and against the A/A control." : ""} It is over the conditions of this metric.`)),
    wide && h("p", { class: "soft" }, wide),
    tested.length && 2 ** (1 - fewest) * tested.length > 0.05 ? h("p", { class: "soft" }, `With ${fewest} items and ${tested.length} conditions no p can come to 0.05 after Holm, however large the change: more items are needed.`) : null);
}

// A bar from the middle: to the right where it rises.
export function bar(delta, most) {
  const share = most > 0 ? Math.min(1, Math.abs(delta) / most) : 0;
  return h("span", { class: "delta-bar", "aria-hidden": "true" }, h("span", { class: delta < 0 ? "down" : "up", style: { width: `${50 * share}%`, [delta < 0 ? "right" : "left"]: "50%" } }));
}

function ranked(found, metric, values) {
  const set = (changes) => go("likelihood", { ...values, condition: found.condition, metric: metric.name, page: null, ...changes });
  const most = found.limits ? Math.max(Math.abs(found.limits[0]), Math.abs(found.limits[1])) : 0;
  const digits = digitsFor(most * metric.by);
  const search = h("input", { type: "search", id: "search", "aria-label": "Search item ids", placeholder: "Search item ids", value: values.search ?? "", maxlength: 200 });
  const rows = found.rows.map((row) => [
    h("a", { class: "into", href: addressOf("tokens", { folder: values.folder, condition: found.condition, metric: metric.name, item: row.item }) }, row.item),
    number(row.none * metric.by, digits), number(row.value * metric.by, digits), [bar(row.delta, most), " ", number(row.delta * metric.by, digits, { sign: true })], row.tokens]);
  return h("section", { "aria-label": "Items" },
    tableHead(`Items by Δ ${metric.name}, ${found.condition}`, `items-${metric.name}`, async () => [["item", "none", "value", "delta", "n_tokens"], ...(await everyRow(list, { ...values, condition: found.condition, metric: metric.name })).map((row) => [row.item, row.none, row.value, row.delta, row.tokens])],
      [values.folder ?? 1, "likelihood", { condition: found.condition, metric: metric.name }]),
    h("div", { class: "choices" },
      h("form", { class: "search", role: "search", onsubmit: (event) => { event.preventDefault(); set({ search: search.value.trim() || null }); } }, search, h("button", { class: "button", type: "submit" }, "Search")),
      choice("Order", SORTS, found.sort, (sort) => set({ sort: sort === "rises" ? null : sort }))),
    found.rows.length ? table(`${plural(found.found, "item")}. Open one to see ${found.solutions ? "Δ along its solution" : "what was scored"}.`, [["item"], ["none", true], ["with", true], [`Δ ${metric.unit}`, true], ["tokens", true]], rows, { class: "ranked" })
      : h("p", { class: "empty" }, "No item fits."));

}

export const view = {
  title: "Likelihood",
  about: "Is the right answer likelier?",
  keys: [["/", "search the items"]],
  async show(place, values) {
    const found = await list(values);
    const [metric, metricChoice] = metricOf("likelihood", { ...values, page: null, condition: found.condition, metric: found.metric }, found.metrics);
    const set = (changes) => go("likelihood", { ...values, page: null, ...changes });
    put(place, h("h1", null, `Likelihood: ${found.title}`),
      h("p", { class: "soft" }, `Log-probabilities of ${found.scored}, against none. Nothing is generated.`),
      h("div", { class: "choices" }, metricChoice,
        choice("Condition", found.conditions.map((name) => [name, name]), found.condition, (condition) => set({ condition, metric: found.metric }))),
      effects(found, metric, values), found.solutions && along(values.folder ?? 1, found.condition), ranked(found, metric, values), pager("likelihood", values, found));
    const onKey = (event) => {
      if (event.key !== "/" || event.target.closest?.("input, select, textarea, dialog")) return;
      place.querySelector("#search").focus();
      event.preventDefault();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  },
};
