// One prompt's own text. Each token is coloured by what it receives, without filler above and with filler below; only what is visible is drawn.

import { addressOf, go, note } from "./address.js";
import { count as grouped, plural } from "./chart.js";
import { choice, clear, h } from "./dom.js";
import { fixed, headName, short } from "./formats.js";
import { CanvasPen, linesOf, SvgPen, textWidth } from "./pen.js";
import { copying } from "./picture.js";
import { elsewhere, systemText } from "./prompt.js";
import { proofButton, showProof } from "./proof.js";
import { amount, diverging, ink, inkOn, quantile } from "./scales.js";
import { ask } from "./source.js";

const SIZE = 13;
const ROW = 21; // one row of text
const BAR = 5; // one stripe
const PAD = 7;
const SIDE = 12;
const MOST = 4000; // tokens in a copied picture

// Tokens in lines of this width: for each line its tokens with their places.
function tokenLines(tokens, breaks, widths, width) {
  const ends = new Set(breaks);
  const lines = [];
  let line = [];
  let x = SIDE;
  tokens.forEach((_, at) => {
    const wide = Math.min(widths[at], width - 2 * SIDE);
    if (line.length && x + wide > width - SIDE) {
      lines.push(line);
      line = [];
      x = SIDE;
    }
    line.push([at, x, wide]);
    x += wide + 2;
    if (ends.has(at)) {
      lines.push(line);
      line = [];
      x = SIDE;
    }
  });
  if (line.length) lines.push(line);
  return lines;
}

function measured(tokens) {
  const known = new Map();
  return tokens.map((text) => {
    if (!known.has(text)) known.set(text, Math.max(9, Math.ceil(textWidth(text, { size: SIZE, mono: true })) + 4));
    return known.get(text);
  });
}

const ratio = (a, b) => (a === null || b === null || a === undefined || b === undefined || !(b > 0) ? null : a / b);
const onScale = (value) => (value === null || !(value > 0) ? null : Math.log(value) / Math.log(4));

export const view = {
  title: "Strip",
  inside: "map",
  keys: [["← → ↑ ↓", "token by token, line by line"], ["m", "the token of the question that loses most, then the next"], ["n, b", "next item, item before"], ["p", "proof"]],
  up: (values) => ["head", { ...values, item: undefined, token: undefined }],
  async show(place, state, tools) {
    const folder = Number(state.folder ?? 1);
    const queries = state.queries ?? "original";
    const [layer, head] = [Number(state.layer), Number(state.head)];
    const condition = state.condition;
    const asked = { folder, condition, layer, head, item: Number(state.item), queries };
    const [map, found] = await Promise.all([ask("map", { folder, queries }), ask("strip", asked)]);
    const { values, tokens } = found;
    const filler = found.span_names.indexOf("filler");
    const to = (changes) => ({ ...state, folder, ...changes });
    const widths = measured(tokens);
    const top = Math.max(quantile([...(values.with ?? []), ...(values.without ?? [])], 0.97), 1e-12);
    const share = (value) => (value === null || value === undefined ? null : Math.sqrt(value / top));
    const stripes = [
      ["with / without", (at) => ratio(values.with[at], values.without[at])],
      ...(values.even_with && values.even_without ? [["an even spread", (at) => ratio(values.even_with[at], values.even_without[at])]] : []),
      ...(values.text ? [["natural text", (at) => ratio(values.text[at], values.without[at])]] : []),
    ];
    const tall = 2 * ROW + stripes.length * (BAR + 1) + PAD + 6;

    const canvas = h("canvas", { class: "strip", tabindex: 0, role: "application", "aria-label": "The prompt, token by token. Arrow keys move; the line above says the numbers." });
    const spacer = h("div", { class: "spacer" });
    const scroller = h("div", { class: "scroller" }, h("div", { class: "pinned" }, canvas), spacer);
    const readout = h("div", { class: "readout", role: "status", "aria-live": "polite" });
    let lines = [];
    let width = 0;
    let cursor = Number(state.token ?? found.spans.indexOf(found.span_names.indexOf("question")));
    if (!(cursor >= 0 && cursor < tokens.length)) cursor = 0;

    function drawToken(pen, at, x, y, wide) {
      const rows = [values.without, values.with];
      rows.forEach((row, number) => {
        const mine = y + number * ROW;
        if (number === 0 && found.spans[at] === filler) return;
        const value = row?.[at] ?? null;
        const colour = value === null ? ink("card") : amount(share(value));
        pen.rect(x, mine, wide, ROW - 2, colour);
        pen.text(x + 2, mine + 14, tokens[at], { size: SIZE, mono: true, fill: value === null ? ink("soft") : inkOn(colour) });
        if (found.spans[at] === filler) pen.rect(x, mine + ROW - 3.5, wide, 1.5, ink("mark"));
      });
      stripes.forEach(([, of], number) => {
        const value = of(at);
        if (value !== null) pen.rect(x, y + 2 * ROW + number * (BAR + 1), wide, BAR, diverging(onScale(value)));
      });
      if (pen.live && at === cursor) pen.frame(x - 1, y - 1, wide + 2, tall - PAD - 2, ink("mark"), 2);
    }

    function draw() {
      if (!width) return;
      const height = scroller.clientHeight;
      const pen = new CanvasPen(canvas, width, height);
      const first = Math.max(0, Math.floor((scroller.scrollTop - PAD) / tall));
      const last = Math.min(lines.length, Math.ceil((scroller.scrollTop + height) / tall) + 1);
      for (let row = first; row < last; row += 1) {
        for (const [at, x, wide] of lines[row]) drawToken(pen, at, x, row * tall - scroller.scrollTop + PAD, wide);
      }
    }

    const legendWords = () => [`Text: bluer receives more, up to ${short(top)} or more.`, `Stripes, from the top: ${stripes.map(([words]) => words).join(", ")}. Orange ÷ 4 or more, purple × 4 or more.`];
    const drawn = () => {
      const wide = width || 900;
      let count = 0;
      const kept = lines.filter((line) => (count += line.length) <= MOST);
      const shown = kept.reduce((sum, line) => sum + line.length, 0);
      // A larger picture is one that no program opens. What is missing is said in it, and beside the button.
      const cut = shown < tokens.length ? `the first ${plural(shown, "token")} of ${grouped(tokens.length)}` : null;
      const said = [...legendWords(), ...(cut ? [cut] : [])].flatMap((words) => linesOf(words, wide - 2 * SIDE, { size: SIZE }));
      const height = kept.length * tall + 2 * PAD + said.length * ROW;
      const pen = new SvgPen(wide, height, `${found.item} in ${headName(layer, head)}, ${condition}: attention that each token receives, without filler above and with filler below`, ink("page"));
      kept.forEach((line, row) => line.forEach(([at, x, w]) => drawToken(pen, at, x, row * tall + PAD, w)));
      said.forEach((words, row) => pen.text(SIDE, height - PAD - (said.length - 1 - row) * ROW, words, { size: SIZE, fill: ink("soft") }));
      return { element: pen.element, width: wide, height: pen.height, cut };
    };
    const rows = () => [["position", "token", "span", "without", "with", "even_without", "even_with", "natural_text"],
      ...tokens.map((text, at) => [at, text, found.span_names[found.spans[at]], ...["without", "with", "even_without", "even_with", "text"].map((name) => values[name]?.[at])])];

    // Tokens of the question, the one that loses most first.
    const losing = tokens.map((_, at) => at).filter((at) => found.span_names[found.spans[at]] === "question" && stripes[0][1](at) !== null).sort((a, b) => stripes[0][1](a) - stripes[0][1](b));
    const nextLosing = () => losing.length && move(losing[(losing.indexOf(cursor) + 1) % losing.length]);
    const proof = () => showProof(folder, "attention", { condition, item: found.item, layer, head, queries }, `Token ${cursor} is place ${cursor} of the list “received”, from 0.`);
    function say() {
      const at = cursor;
      const [now, before] = [values.with?.[at] ?? null, values.without?.[at] ?? null];
      clear(readout, h("p", null, h("b", null, h("code", null, tokens[at])), ` · token ${at} · ${found.span_names[found.spans[at]]} · `,
        found.spans[at] === filler ? `filler, receives ${short(now)}` : [`receives ${short(before)} without, ${short(now)} with filler`,
          ...stripes.map(([words, of]) => ` · ${words} ${fixed(of(at), 3)}`), at === tokens.length - 1 ? " · no token follows the last one, so it receives nothing" : ""]));
    }
    function move(at, scroll = true) {
      cursor = Math.min(Math.max(at, 0), tokens.length - 1);
      note("strip", to({ token: cursor }));
      if (scroll) {
        const row = lines.findIndex((line) => line[line.length - 1][0] >= cursor);
        if (row * tall < scroller.scrollTop) scroller.scrollTop = row * tall;
        else if ((row + 1) * tall + PAD > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = (row + 1) * tall + PAD - scroller.clientHeight;
      }
      draw();
      say();
    }
    function tokenAt(event) {
      const box = canvas.getBoundingClientRect();
      const row = Math.floor((event.clientY - box.top + scroller.scrollTop - PAD) / tall);
      const x = event.clientX - box.left;
      return lines[row]?.find(([, left, wide]) => x >= left && x < left + wide + 2)?.[0];
    }
    canvas.addEventListener("mousemove", (event) => {
      const at = tokenAt(event);
      if (at !== undefined && at !== cursor) move(at, false);
    });
    canvas.addEventListener("click", (event) => {
      const at = tokenAt(event);
      if (at !== undefined) move(at, false);
    });
    const besides = (row, step) => {
      const line = lines[row + step];
      if (!line) return cursor;
      const x = lines[row].find(([at]) => at === cursor)[1];
      return line.reduce((best, one) => (Math.abs(one[1] - x) < Math.abs(best[1] - x) ? one : best))[0];
    };
    canvas.addEventListener("keydown", (event) => {
      const row = lines.findIndex((line) => line[line.length - 1][0] >= cursor);
      const page = Math.max(1, Math.floor(scroller.clientHeight / tall) - 1);
      const next = { ArrowRight: () => cursor + 1, ArrowLeft: () => cursor - 1, ArrowDown: () => besides(row, 1), ArrowUp: () => besides(row, -1), Home: () => 0, End: () => tokens.length - 1,
        PageDown: () => (lines[row + page] ?? lines[lines.length - 1])[0][0], PageUp: () => (lines[row - page] ?? lines[0])[0][0] }[event.key];
      if (!next) return;
      move(next());
      event.preventDefault();
      event.stopPropagation();
    });
    let waiting = false;
    scroller.addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; draw(); });
    });
    const watch = new ResizeObserver(() => {
      const now = Math.floor(scroller.clientWidth);
      if (now && now !== width) {
        width = now;
        lines = tokenLines(tokens, found.breaks, widths, width);
        const all = lines.length * tall + 2 * PAD;
        scroller.style.height = `${Math.min(all, Math.max(260, Math.round(innerHeight * 0.62)))}px`;
        spacer.style.height = `${Math.max(0, all - scroller.clientHeight)}px`;
        scroller.scrollTop = 0;
        move(cursor);
      }
    });
    watch.observe(scroller);
    const onTheme = () => { draw(); drawLegend(); };
    addEventListener("theme", onTheme);

    const legend = h("div", { class: "legend" });
    function drawLegend() {
      const bar = (colour, from, until, left, right) => h("span", { class: "bar" }, h("i", null, left),
        h("span", { class: "ramp" }, Array.from({ length: 24 }, (_, i) => h("b", { style: { background: colour(from + ((until - from) * i) / 23) } }))), h("i", null, right));
      clear(legend, h("span", null, "Text: upper row without filler, lower row with. Colour, what a token receives (mean weight from later tokens): ", bar(amount, 0, 1, "0", `${short(top)} or more`)),
        h("span", null, `Stripes, from the top: ${stripes.map(([words]) => words).join(", ")}. Colour, times what it receives without filler: `, bar(diverging, -1, 1, "÷ 4 or more", "× 4 or more")));
    }
    drawLegend();

    const step = (by) => {
      const next = found.number + by;
      if (next >= 1 && next <= found.items) go("strip", to({ item: next, token: undefined }));
    };
    place.append(h("p", { class: "crumbs" }, h("a", { href: addressOf("map", { folder, condition, layer, head, queries: state.queries }) }, "Map"), " › ",
      h("a", { href: addressOf(...view.up(state)) }, headName(layer, head)), " › ", found.item),
    h("h1", null, `${found.item} in ${headName(layer, head)} under ${map.conditions.find((one) => one.name === condition)?.label ?? condition}`),
    h("div", { class: "choices" },
      choice("condition", map.conditions.map((one) => [one.name, one.label]), condition, (value) => go("strip", to({ condition: value, token: undefined }))),
      choice("layer", map.layers.map((one) => [one, one]), layer, (value) => go("strip", to({ layer: value }))),
      choice("head", map.columns.map((one) => [one, one]), head, (value) => go("strip", to({ head: value }))),
      h("button", { class: "button", type: "button", disabled: found.number <= 1, onclick: () => step(-1) }, "← item"),
      h("span", { class: "soft" }, `${found.number} of ${found.items}`),
      h("button", { class: "button", type: "button", disabled: found.number >= found.items, onclick: () => step(1) }, "item →"),
      h("button", { class: "button", type: "button", disabled: !losing.length, title: "To the token of the question that loses most; once more: the next (key m)", onclick: nextLosing }, "to what loses most"),
      proofButton(proof)),
    elsewhere(found.answers.map((one) => ({ words: found.answers.length > 1 ? `Its answer in ${one.name}` : "Its answer", view: "answer", differs: one.differs,
      values: { folder: one.folder, condition: one.condition, item: found.id, layer, head }, request: ["answers/item", { folder: one.folder, condition: one.condition, item: found.id }] }))) ?? "",
    systemText(found.prompt) ?? "", readout, legend, h("div", { class: "title" }, h("span", { class: "soft small" }, `${tokens.length} tokens, numbered from 0`), copying(`strip-${headName(layer, head)}-${found.number}`, drawn, rows)), scroller);
    place.addEventListener("placed", () => canvas.focus({ preventScroll: true }));
    const keys = (event) => {
      if (document.querySelector("dialog[open]") || event.target.closest?.("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "n") step(1);
      else if (event.key === "b") step(-1);
      else if (event.key === "m") nextLosing();
      else if (event.key === "p") proof();
    };
    document.addEventListener("keydown", keys);
    return () => {
      watch.disconnect();
      removeEventListener("theme", onTheme);
      document.removeEventListener("keydown", keys);
    };
  },
};
