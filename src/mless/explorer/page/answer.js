// One item: its question, both answers as a diff, what was extracted and why each was judged so.

import { addressOf, go } from "./address.js";
import { badge, list, wanted } from "./answers.js";
import { count, plural } from "./chart.js";
import { h } from "./dom.js";
import { headName } from "./formats.js";
import { elsewhere, systemText } from "./prompt.js";
import { proofButton, showProof } from "./proof.js";
import { ask, isExport } from "./source.js";

async function neighbours(values) {
  if (!isExport()) return ask("answers/near", { ...wanted(values), item: values.item, turned: values.turned, search: values.search, sort: values.sort });
  const order = (await list(values)).sorted;
  const at = order.indexOf(values.item);
  return { place: at < 0 ? null : at + 1, found: order.length, previous: at > 0 ? order[at - 1] : null, next: at >= 0 ? order[at + 1] ?? null : null };
}

function facts(side, found) {
  if (!side) return h("p", { class: "soft" }, "No answer is stored.");
  const words = side.stated === true ? "stated: the text presents it as the result" : side.stated === false ? "guessed: only the last number of the text" : null;
  const rows = [
    ["extracted", side.extracted === null ? "no answer found" : h("code", null, side.extracted)],
    ["found by", [side.how || "–", words ? `, ${words}` : ""]],
    ["judged", [h("b", { class: side.correct ? "good" : "bad" }, side.correct ? "✓ right" : "✗ wrong"), side.why ? ` – ${side.why}` : ""]],
    found.grader && ["grader", found.grader],
    side.disagree && ["note", "the string rule and the symbolic rule judged differently"],
    side.samples > 1 && ["samples", `${side.right} of ${side.samples} right`],
    ["length", `${side.tokens === null ? "" : `${plural(side.tokens, "token")}, `}${plural(side.length, "character")}${side.cut_off ? ", cut off at the limit" : ""}`],
  ];
  return h("dl", { class: "judged" }, rows.filter(Boolean).map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

const SIGN = { gone: "only without", new: "only with" };
function pieces(diff, kinds) {
  return diff.filter(([kind]) => kinds.includes(kind)).map(([kind, text]) => (kind === "same" ? text : h(kind === "gone" ? "del" : "ins", { class: kind, title: SIGN[kind] }, text)));
}

function texts(found, values) {
  const inline = values.diff === "inline";
  const names = [found.own ? found.against : `${found.other_title}: ${found.against}`, found.own ? found.condition : `${found.title}: ${found.condition}`];
  const toggle = (name, words) => h("button", { type: "button", class: "button", "aria-pressed": String((values.diff ?? "") === name), onclick: () => go("answer", { ...values, diff: name || null }, { replace: true }) }, words);
  const same = found.diff.length === 1 && found.diff[0][0] === "same";
  const head = h("div", { class: "choices" }, h("h2", null, "The two texts"), toggle("", "side by side"), toggle("inline", "in one"),
    h("span", { class: "soft small" }, same ? "Both texts are the same." : [h("del", { class: "gone" }, `only ${names[0]}`), " ", h("ins", { class: "new" }, `only ${names[1]}`)]));
  const left = found.before?.left_out || found.after?.left_out;
  const body = inline
    ? h("div", { class: "text", tabindex: 0, "aria-label": "Both texts in one" }, pieces(found.diff, ["same", "gone", "new"]))
    : h("div", { class: "two" }, [["gone", names[0], found.before], ["new", names[1], found.after]].map(([kind, name, side]) =>
      h("section", { "aria-label": name }, h("h3", null, name), facts(side, found), side && h("div", { class: "text", tabindex: 0, "aria-label": `Text, ${name}` }, pieces(found.diff, ["same", kind])))));
  return [head, inline && h("div", { class: "two" }, [[names[0], found.before], [names[1], found.after]].map(([name, side]) => h("section", null, h("h3", null, name), facts(side, found)))), body,
    left ? h("p", { class: "soft small" }, `${count(left)} characters at the end are left out here; answers.parquet has them.`) : null];
}

// Of both sides where they differ.
function systemTexts({ prompt, prompt_against: other, condition, against }) {
  const same = prompt.system === other.system && prompt.kind === other.kind;
  return (same ? [systemText(prompt)] : [systemText(other, `System text, ${against}`), systemText(prompt, `System text, ${condition}`)]).filter(Boolean);
}

// The strip of the head that one came from, else of the one that shifts most.
function toStrips(found, values) {
  return elsewhere(found.strips.map((one) => {
    const place = values.layer && values.head ? { layer: values.layer, head: values.head } : { layer: one.layer, head: one.head };
    const wanted = { folder: one.folder, condition: one.condition, ...place, item: one.item };
    return { words: `What its tokens receive in ${headName(place.layer, place.head)}${values.layer && values.head ? "" : ", the head that shifts most"}${found.strips.length > 1 ? ` in ${one.name}` : ""}`, view: "strip", values: wanted, request: ["strip", { ...wanted, queries: "original" }], differs: one.differs };
  }));
}

export const view = {
  title: "Answer",
  inside: "answers",
  up: ({ item, diff, sample, ...values }) => ["answers", values],
  keys: [["j", "next item of the list"], ["k", "item before"], ["t", "texts side by side, or in one"]],
  async show(place, values) {
    const [found, near] = await Promise.all([ask("answers/item", { ...wanted(values), item: values.item, sample: values.sample }), neighbours(values)]);
    const to = (item) => addressOf("answer", { ...values, item, sample: null });
    const step = (item, words, rel) => (item ? h("a", { class: "button", href: to(item), rel }, words) : h("span", { class: "button off", "aria-disabled": "true" }, words));
    const { item: _, diff: __, sample: ___, ...rest } = values;
    place.append(
      h("p", { class: "crumbs" }, h("a", { href: addressOf("answers", rest) }, "Answers"), " › ", found.item),
      h("div", { class: "choices" }, h("h1", null, `Item ${found.item}`), badge(found.turned),
        h("nav", { class: "pager", "aria-label": "Items" }, step(near.previous, "← before", "prev"),
          h("span", { class: "soft" }, near.place === null ? "not in this list" : `${count(near.place)} of ${count(near.found)} in the list`), step(near.next, "after →", "next"))),
      h("p", { class: "soft" }, `${found.condition} against ${found.against}${found.own ? ` · ${found.title}` : ""}`),
      h("h2", null, "Question"), h("div", { class: "text question", tabindex: 0, "aria-label": "Question" }, found.question ?? "The question is not stored in this folder."),
      ...systemTexts(found),
      h("p", null, "Reference answer: ", h("code", { class: "reference" }, found.reference ?? "–")));
    place.append(toStrips(found, values) ?? "");
    if (found.samples > 1) {
      place.append(h("nav", { class: "samples", "aria-label": "Samples" }, "Sample ", Array.from({ length: found.samples }, (_one, at) =>
        h("a", { class: "button", href: addressOf("answer", { ...values, sample: at + 1 }), "aria-current": at + 1 === found.sample ? "true" : null }, at + 1))));
    }
    const others = found.others.map((one) => [one.condition, one.score]);
    for (const part of [...texts(found, values),
      h("h2", null, "The same item under every condition"),
      h("ul", { class: "chips" }, others.map(([name, score]) => h("li", null, h("a", { href: addressOf("answer", { ...values, condition: name === found.against ? found.condition : name, sample: null }), "aria-current": name === found.condition ? "true" : null },
        h("span", { class: score === 1 ? "good" : score === 0 ? "bad" : "soft" }, score === 1 ? "✓ " : score === 0 ? "✗ " : score === null ? "– " : `${Math.round(100 * score)} % `), name)))),
      h("p", { class: "links" }, proofButton(() => showProof(values.folder ?? 1, "answers", { condition: found.condition, item: found.item, sample: found.sample - 1 })))]) {
      if (part) place.append(part);
    }
    const onKey = (event) => {
      if (event.target.closest?.("input, select, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "j") place.querySelector(".pager a[rel=next]")?.click();
      else if (event.key === "k") place.querySelector(".pager a[rel=prev]")?.click();
      else if (event.key === "t") go("answer", { ...values, diff: values.diff ? null : "inline" }, { replace: true });
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  },
};
