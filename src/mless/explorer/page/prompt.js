// What is said of a prompt, and the same item elsewhere.

import { addressOf } from "./address.js";
import { h } from "./dom.js";
import { holds, isExport } from "./source.js";

const SHORT = 300;

// The system text of a condition's prompt, and how the prompt is put together. A long text is opened by a click.
export function systemText(prompt, words = "System text") {
  if (!prompt || prompt.system === null) return null;
  const how = prompt.kind ? ` (${prompt.kind})` : "";
  if (!prompt.system.trim()) return h("p", { class: "system-text" }, h("span", { class: "soft" }, `${words}${how}: `), "none");
  return h("details", { class: "system-text", open: prompt.system.length <= SHORT }, h("summary", null, `${words}${how}`), h("div", { class: "text question", tabindex: 0, "aria-label": words }, prompt.system));
}

// Buttons to the same item in other views. `entries` have `words`, a view with its `values`, the request that it needs, and what differs there.
export function elsewhere(entries) {
  const there = entries.filter(({ request }) => holds(...request));
  if (!there.length) return entries.length && isExport() ? h("p", { class: "soft small" }, `Not in this file: ${entries.map(({ words }) => words).join(", ")}.`) : null;
  return h("p", { class: "links beside" }, there.map(({ words, view, values, differs }) => [h("a", { class: "button", href: addressOf(view, values) }, words),
    differs.length ? h("span", { class: "soft small" }, `with another prompt: ${differs.join("; ")}`) : null]));
}
