// Answers in pairs: what turned right, what turned wrong, by condition; filtered, searched, sorted, page by page.

import { addressOf, go } from "./address.js";
import { around, count, number, plural, tableHead, times } from "./chart.js";
import { byKeys, choice, h, put, table } from "./dom.js";
import { pValue } from "./formats.js";
import { ask, isExport } from "./source.js";

export const TURNED = {
  right: ["turned right", "▲"], wrong: ["turned wrong", "▼"], "stayed-right": ["stayed right", "✓"], "stayed-wrong": ["stayed wrong", "✗"], "stayed-mixed": ["stayed mixed", "≈"],
};
const SORTS = [["item", "order of the study"], ["turned", "what turned"], ["longest", "longest answer first"], ["shortest", "shortest answer first"],
  ["longer", "grew most first"], ["shorter", "shrank most first"]];
const PAGE = 50;

export function badge(turned) {
  const [words, sign] = TURNED[turned] ?? ["not paired", "–"];
  return h("span", { class: `badge ${turned}` }, h("span", { "aria-hidden": "true" }, `${sign} `), words);
}

// What is asked of the server: only what changes the answer.
export function wanted(values) {
  const given = { folder: values.folder ?? 1, condition: values.condition, against: values.against, other: values.other };
  if (given.against === "none" && !given.other) delete given.against;
  if (String(given.other ?? given.folder) === String(given.folder)) delete given.other;
  return given;
}

// An exported file has no server: the list in it is filtered here.
export async function list(values, { all = false } = {}) {
  if (!isExport()) {
    return ask("answers", { ...wanted(values), turned: values.turned, search: values.search, sort: values.sort, page: values.page, all: all ? 1 : undefined });
  }
  const found = await ask("answers", { ...wanted(values), all: 1 });
  const text = (values.search ?? "").toLowerCase();
  const rows = found.rows.filter((row) => (!values.turned || row.turned === values.turned || (values.turned === "changed" && (row.turned === "right" || row.turned === "wrong")))
    && (!text || [row.item, row.question, row.reference, row.before.extracted, row.after.extracted].some((one) => (one ?? "").toLowerCase().includes(text))));
  const order = Object.keys(TURNED);
  const grown = (row) => (row.after.tokens ?? NaN) - (row.before.tokens ?? NaN);
  const by = { turned: (row) => order.indexOf(row.turned), longest: (row) => -row.after.tokens, shortest: (row) => row.after.tokens, longer: (row) => -grown(row), shorter: grown }[values.sort];
  if (by) rows.sort((a, b) => by(a) - by(b));
  if (all) return { ...found, rows, pages: 1 };
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  const page = Math.min(Number(values.page ?? 1), pages);
  return { ...found, rows: rows.slice((page - 1) * PAGE, page * PAGE), sorted: rows.map((row) => row.item), found: rows.length, page, pages };
}

export function pager(view, values, found) {
  if (found.pages < 2) return null;
  const to = (page, words, rel) => (page < 1 || page > found.pages
    ? h("span", { class: "button off", "aria-disabled": "true" }, words)
    : h("a", { class: "button", rel, href: addressOf(view, { ...values, page }) }, words));
  return h("nav", { class: "pager", "aria-label": "Pages" }, to(found.page - 1, "← before", "prev"),
    h("span", null, `page ${count(found.page)} of ${count(found.pages)}`), to(found.page + 1, "after →", "next"));
}

function sideCell(side) {
  const right = side.score === 1 ? "✓" : side.score === 0 ? "✗" : side.score === null ? "–" : `${Math.round(100 * side.score)} %`;
  const how = side.stated === true ? "stated" : side.stated === false ? "guessed" : null;
  return [h("span", { class: side.score === 1 ? "good" : side.score === 0 ? "bad" : "soft", "aria-label": side.score === 1 ? "right" : side.score === 0 ? "wrong" : null }, right), " ",
    h("span", { class: "found" }, side.extracted ?? "no answer"),
    h("span", { class: "soft small" }, ["", how, side.tokens === null ? null : plural(Math.round(side.tokens), "token"), side.cut_off ? "cut off" : null].filter(Boolean).join(", ").replace(/^(?=.)/, " · "))];
}

function overview(found, values) {
  const to = (condition, turned, n) => h("a", { href: addressOf("answers", { ...values, condition, turned, page: null, search: null }), class: turned }, count(n));
  const mixed = found.overview.some((row) => row["stayed-mixed"]);
  const kinds = Object.keys(TURNED).filter((kind) => kind !== "stayed-mixed" || mixed);
  const tested = found.overview.some((row) => row.delta !== undefined);
  const columns = [["condition"], ...kinds.map((kind) => [TURNED[kind][0], true]), ["accuracy", true], ...(tested ? [["Δ points", true], ["p (Holm)", true], ["verdict"]] : [])];
  const rows = found.overview.map((row) => [
    h("a", { href: addressOf("answers", { ...values, condition: row.condition, turned: null, page: null }), "aria-current": row.condition === found.condition ? "true" : null, class: "into" }, row.condition === found.control ? `${row.condition} (A/A)` : row.condition),
    ...kinds.map((kind) => to(row.condition, kind, row[kind])),
    row.value === undefined || row.value === null ? "–" : `${number(100 * row.value, 1)} %`,
    ...(tested ? [row.delta === null || row.delta === undefined ? "–" : `${number(100 * row.delta, 1, { sign: true })}${around(times(row.delta_lo, 100), times(row.delta_hi, 100), 1, { sign: true })}`, pValue(row.p_adjusted),
      row.verdict ? h("span", { class: row.verdict }, row.verdict) : "–"] : []),
  ]);
  const cells = () => [["condition", ...kinds, "accuracy", "delta", "delta_lo", "delta_hi", "p", "p_adjusted", "verdict"],
    ...found.overview.map((row) => [row.condition, ...kinds.map((kind) => row[kind]), row.value, row.delta, row.delta_lo, row.delta_hi, row.p, row.p_adjusted, row.verdict])];
  return h("section", { "aria-label": "By condition" }, tableHead(`Answers that turned, compared with ${found.against}`, "turned", cells, [values.folder ?? 1, "accuracy", { condition: found.condition, split: "all" }, "Counts are of the items of answers.parquet, pair by pair."]),
    table(null, columns, rows, { class: "overview" }),
    h("p", { class: "soft small" }, "Stated: the text presents the result as its answer. Guessed: only the last number of the text was taken. A condition may make a model state its answer more often without being right more often: that part of a change is form, and docs/accuracy-statistics.md says how much of Δ it is."));
}

function filters(found, values) {
  const set = (changes) => go("answers", { ...values, page: null, ...changes });
  const total = Object.values(found.counts).reduce((sum, one) => sum + one, 0);
  const tile = (name, words, n, sign) => h("button", { type: "button", class: `tile ${name || "all"}`, "aria-pressed": String((values.turned ?? "") === name), onclick: () => set({ turned: name || null }) },
    h("span", { class: "big" }, count(n)), h("span", null, sign ? `${sign} ${words}` : words));
  const search = h("input", { type: "search", id: "search", placeholder: isExport() ? "Search ids, questions, results" : "Search questions and answers", "aria-label": "Search", value: values.search ?? "", maxlength: 200 });
  const form = h("form", { class: "search", role: "search", onsubmit: (event) => { event.preventDefault(); set({ search: search.value.trim() || null }); } },
    search, h("button", { class: "button", type: "submit" }, "Search"),
    values.search && h("button", { class: "button", type: "button", onclick: () => set({ search: null }) }, "Clear"));
  return [
    h("div", { class: "tiles", role: "group", "aria-label": "Filter by what turned" }, tile("", "all", total),
      Object.entries(TURNED).filter(([name]) => name !== "stayed-mixed" || found.counts[name]).map(([name, [words, sign]]) => tile(name, words, found.counts[name], sign))),
    h("div", { class: "choices" }, form, choice("Order", SORTS, values.sort ?? "item", (sort) => set({ sort: sort === "item" ? null : sort }))),
  ];
}

// Every row of the list, page by page: what is on the screen is one page.
export async function everyRow(list, values) {
  const rows = [];
  for (let page = 1; ; page += 1) {
    const found = await list({ ...values, page }, { all: true });
    rows.push(...found.rows);
    if (page >= found.pages) return rows;
  }
}

function rowsOf(found, values) {
  if (!found.rows.length) return h("p", { class: "empty" }, "No item fits. ", h("a", { href: addressOf("answers", { ...values, turned: null, search: null, page: null }) }, "Show all."));
  const to = (row) => addressOf("answer", { ...values, condition: found.condition, item: row.item });
  const asked = found.rows.some((row) => row.question);
  const body = found.rows.map((row) => h("tr", { class: row.turned },
    h("th", { scope: "row" }, h("a", { href: to(row), class: "into" }, row.item), h("span", { class: "soft small", title: "its place in the study" }, ` no. ${count(row.number)}`)),
    asked && h("td", { class: "question" }, row.question ?? ""), h("td", { "data-name": "reference" }, row.reference ?? "–"),
    h("td", { "data-name": found.own ? found.against : found.other_title }, sideCell(row.before)), h("td", { "data-name": found.own ? found.condition : found.title }, sideCell(row.after)), h("td", null, badge(row.turned))));
  const first = found.own ? found.against : `${found.other_title}, ${found.against}`;
  const second = found.own ? found.condition : `${found.title}, ${found.condition}`;
  const grid = h("div", { class: "wide" }, h("table", { class: "answers" },
    h("thead", null, h("tr", null, ["item", asked && "question", "reference", first, second, "turned"].filter(Boolean).map((name) => h("th", { scope: "col" }, name)))),
    byKeys(h("tbody", null, body))));
  const cells = async () => [["item", "reference", `${found.against}_extracted`, `${found.against}_score`, `${found.condition}_extracted`, `${found.condition}_score`, "turned"],
    ...(await everyRow(list, { ...values, condition: found.condition })).map((row) => [row.item, row.reference, row.before.extracted, row.before.score, row.after.extracted, row.after.score, row.turned])];
  return h("section", { "aria-label": "Items" }, tableHead(`${plural(found.found, "item")}${found.found !== found.items ? ` of ${count(found.items)}` : ""}`, "answers", cells, [values.folder ?? 1, "answers", { condition: found.condition }]), grid);
}

function pairing(found, values, tools) {
  const set = (changes) => go("answers", { ...values, page: null, ...changes });
  const folders = tools.folders.filter((one) => one.views?.includes("answers"));
  const mine = String(values.folder ?? 1);
  return h("div", { class: "choices" },
    choice("Condition", found.conditions.map((name) => [name, name]), found.condition, (condition) => set({ condition })),
    choice("against", found.other_conditions.map((name) => [name, name]), found.against, (against) => set({ against: against === "none" ? null : against })),
    folders.length > 1 && !isExport() && choice("of", folders.map((one) => [one.number, String(one.number) === mine ? "this folder" : `${one.model} · ${one.name}`]), values.other ?? mine,
      (other) => set({ other: other === mine ? null : other })));
}

export const view = {
  title: "Answers",
  about: "What turned right and what turned wrong",
  keys: [["/", "search the answers"], ["← →", "page before and after"]],
  async show(place, values, tools) {
    const found = await list(values);
    put(place, h("h1", null, `Answers: ${found.title}`),
      h("p", { class: "soft" }, found.own ? `${found.condition} against ${found.against}, item by item.` : `${found.condition} here against ${found.against} of ${found.other_title}, item by item.`,
        found.unpaired ? ` ${plural(found.unpaired, "item")} without an answer on one side.` : ""),
      pairing(found, values, tools), overview(found, values), filters(found, values), rowsOf(found, values), pager("answers", values, found));
    const onKey = (event) => {
      if (event.target.closest?.("input, select, textarea, dialog, .chart") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "/") {
        place.querySelector("#search").focus();
        event.preventDefault();
      } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
        place.querySelector(`.pager a[rel=${event.key === "ArrowRight" ? "next" : "prev"}]`)?.click();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  },
};
