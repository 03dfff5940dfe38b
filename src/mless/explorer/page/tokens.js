// One item of a likelihood study: Δ log p along the solution, in the text itself.

import { addressOf, go } from "./address.js";
import { digitsFor, number, plural, tableHead, told } from "./chart.js";
import { choice, h, table } from "./dom.js";
import { bar } from "./likelihood.js";
import { systemText } from "./prompt.js";
import { ask } from "./source.js";

// Colours end at the size that 95 % of the tokens do not pass.
function limitOf(tokens) {
  const sizes = tokens.map((one) => Math.abs(one.delta)).sort((a, b) => a - b);
  return sizes.length ? Math.max(sizes[Math.floor(0.95 * (sizes.length - 1))], 1e-6) : 1;
}
function colour(delta, limit) {
  const share = Math.round(Math.min(1, Math.abs(delta) / limit) * 78);
  return `color-mix(in srgb, var(--${delta < 0 ? "down" : "up"}) ${share}%, transparent)`;
}
const visible = (text) => (text.trim() === "" ? text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅" : text);

function strip(found, limit) {
  const digits = 3;
  const box = h("div", { class: "solution", role: "group", "aria-label": "The solution's tokens, coloured by Δ log p. Arrows walk over them." });
  for (const token of found.tokens) {
    const one = h("span", { class: "token", style: { backgroundColor: colour(token.delta, limit) } }, visible(token.text));
    told(one, [`token ${token.position + 1} of ${found.tokens.length}: ${JSON.stringify(token.text)}`, `Δ log p ${number(token.delta, digits, { sign: true })}`, `log p ${number(token.none, digits)} without, ${number(token.value, digits)} with`,
      `p ${number(Math.exp(token.none), 3)} → ${number(Math.exp(token.value), 3)}`, token.kl === null ? null : `KL ${number(token.kl, 4)}, entropy ${number(token.entropy, 2)}`]);
    box.append(one);
    if (token.text.includes("\n")) box.append(h("br"));
  }
  const marks = box.querySelectorAll(".mark");
  marks[0]?.setAttribute("tabindex", "0");
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const at = [...marks].indexOf(document.activeElement);
    if (!step || at < 0) return;
    const next = marks[Math.min(marks.length - 1, Math.max(0, at + step))];
    marks[at].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
    event.preventDefault();
  });
  return box;
}

// The tokens that change most, in words: colours end at a size that several may pass.
function largest(found) {
  const top = found.tokens.toSorted((a, b) => Math.abs(b.delta) - Math.abs(a.delta)).slice(0, 10);
  return table("The ten tokens that change most", [["token"], ["text"], ["log p without", true], ["with", true], ["Δ nats", true]],
    top.map((one) => [one.position + 1, h("code", null, visible(one.text)), number(one.none, 3), number(one.value, 3), number(one.delta, 3, { sign: true })]));
}

function scale(limit) {
  const step = (share) => h("span", { style: { backgroundColor: colour(share * limit, limit) } });
  return h("p", { class: "scale soft small" }, `less likely: −${number(limit, 3)} or more `, h("span", { class: "steps", "aria-hidden": "true" }, [-1, -0.66, -0.33, 0, 0.33, 0.66, 1].map(step)), ` +${number(limit, 3)} or more: likelier (nats)`);
}

export const view = {
  title: "Item",
  inside: "likelihood",
  up: ({ item, ...values }) => ["likelihood", values],
  keys: [["arrows", "walk over the tokens"]],
  async show(place, values) {
    const found = await ask("likelihood/item", { folder: values.folder ?? 1, condition: values.condition, item: values.item });
    const { item: _, ...rest } = values;
    const limit = limitOf(found.tokens);
    const sum = found.tokens.reduce((total, one) => total + one.delta, 0);
    place.append(h("p", { class: "crumbs" }, h("a", { href: addressOf("likelihood", rest) }, "Likelihood"), " › ", found.item),
      h("h1", null, `Item ${found.item}`), h("p", { class: "soft" }, `${found.title} · item ${found.number} of ${found.items}`),
      h("div", { class: "choices" }, choice("Condition", found.conditions.map((name) => [name, name]), found.condition, (condition) => go("tokens", { ...values, condition }))));
    if (found.question) place.append(h("details", null, h("summary", null, "The prompt without filler"), h("div", { class: "text", tabindex: 0 }, found.question)));
    place.append(systemText(found.prompt) ?? "");
    if (found.tokens.length) {
      place.append(h("section", { "aria-label": "Solution" }, tableHead("Δ along the solution", "solution-tokens", () => [["position", "text", "logp_none", "logp", "delta", "entropy", "kl"], ...found.tokens.map((one) => [one.position, one.text, one.none, one.value, one.delta, one.entropy, one.kl])],
        [values.folder ?? 1, "tokens", { condition: found.condition, item: found.item }]), h("p", { class: "soft" }, `${plural(found.tokens.length, "token")}, together ${number(sum, 3, { sign: true })} nats under ${found.condition}. Hover a token, or walk with the arrows. Tokens are counted from 1.`),
        scale(limit), strip(found, limit), largest(found), found.left_out ? h("p", { class: "soft" }, `${plural(found.left_out, "further token")} in tokens.parquet.`) : null));
    } else if (found.solutions) {
      place.append(h("h2", null, "Δ along the solution"), h("p", { class: "empty" }, found.scores.some((row) => row.metric === "solution")
        ? "Tokens of the solution are not stored in this folder: tokens.parquet was left out." : "This item has no reference solution."));
    }
    const table1 = h("section", null, h("h2", null, "This item by metric"), table(null, [["metric"], ["none", true], ["with", true], ["Δ", true], ["unit"]], found.scores.map((row) => {
      const digits = Math.min(5, Math.max(3, digitsFor(Math.abs(row.delta * row.by))));
      return [row.metric, number(row.none * row.by, digits), number(row.value * row.by, digits), number(row.delta * row.by, digits, { sign: true }), row.unit];
    })));
    place.append(table1);
    if (found.candidates.length) {
      const most = Math.max(...found.candidates.map((one) => Math.abs(one.delta)), 1e-9);
      place.append(h("section", null, h("h2", null, "What else was scored after the prompt"), table(null, [["role"], ["text"], ["log p without", true], ["with", true], ["Δ nats", true]],
        found.candidates.map((one) => [one.role, h("span", { class: "found" }, one.text), number(one.none, 3), number(one.value, 3), [bar(one.delta, most), " ", number(one.delta, 3, { sign: true })]]))));
    }
  },
};
