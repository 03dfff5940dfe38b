// The shell: menu, routing, theme, keys. Views draw into <main>.

import { addressOf, arrived, go, readAddress } from "./address.js";
import { hideTip } from "./chart.js";
import { clear, h } from "./dom.js";
import { ask, isExport } from "./source.js";
import { VIEWS } from "./views.js";

const main = h("main", { id: "main", tabindex: -1 });
const menu = h("nav", { "aria-label": "Views" });
const chooser = h("div", { class: "chooser" });
const help = h("dialog", { class: "help", "aria-label": "Keys" });
let leave = null;
let shown = 0;
let folders = [];

// ---- theme: the system's, unless it is switched

const THEMES = ["auto", "light", "dark"];
function stored(value) {
  // A sandboxed frame has no storage.
  try {
    if (value !== undefined) localStorage.setItem("mless-theme", value);
    return localStorage.getItem("mless-theme");
  } catch {
    return null;
  }
}
function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  theme.textContent = { auto: "◐", light: "☀", dark: "☾" }[name];
  theme.setAttribute("aria-label", `Colours: ${name}; press to switch`);
  theme.title = `Colours: ${name}`;
  theme.dataset.now = name;
  stored(name);
  dispatchEvent(new CustomEvent("theme"));
}
function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(theme.dataset.now) + 1) % THEMES.length]);
}
const theme = h("button", { class: "icon", type: "button", onclick: nextTheme });
// The one listener for the system's colours: pictures hear "theme" and take themselves off when they are left.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new CustomEvent("theme")));

// ---- keys

const KEYS = [
  ["?", "these keys"],
  ["1 … 9", "views, in the order of the menu"],
  ["[ and ]", "folder before and after"],
  ["d", "light, dark, as the system has it"],
  ["arrows", "move in a picture"],
  ["Enter", "go into what is marked"],
  ["Esc", "go up: strip → head → map → start"],
];
function showKeys() {
  const here = VIEWS[readAddress().view]?.keys ?? [];
  clear(help, h("h2", null, "Keys"),
    h("dl", null, [...KEYS, ...here].map(([key, what]) => [h("dt", null, h("kbd", null, key)), h("dd", null, what)])),
    h("form", { method: "dialog" }, h("button", { class: "button", autofocus: true }, "Close")));
  help.showModal();
}
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest?.("input, textarea, select")) return;
  const { view, values } = readAddress();
  if (event.key === "?") showKeys();
  else if (event.key === "d") nextTheme();
  else if (/^[1-9]$/.test(event.key)) {
    const name = shownViews()[Number(event.key) - 1];
    if (name) go(name, { folder: folderOf(name, values.folder) ?? values.folder });
  } else if ((event.key === "[" || event.key === "]") && folders.length > 1) {
    const now = Number(values.folder ?? 1) + (event.key === "]" ? 1 : -1);
    if (now >= 1 && now <= folders.length) go(VIEWS[view]?.inside ?? view, { folder: now });
  } else if (event.key === "Escape" && view !== "start") {
    const up = VIEWS[view]?.up?.(values) ?? ["start", {}];
    go(up[0], up[1]);
  } else return;
  event.preventDefault();
}

// ---- routing

// The folder that a view is opened of: the one that is shown, or, where none was chosen, the first that has the view.
function folderOf(name, chosen) {
  if (chosen !== undefined) return folders[Number(chosen) - 1]?.views?.includes(name) ? chosen : undefined;
  return folders.find((one) => one.views?.includes(name))?.number;
}
function shownViews() {
  const { folder } = readAddress().values;
  return Object.keys(VIEWS).filter((name) => !VIEWS[name].inside && (name === "start" || folderOf(name, folder) !== undefined));
}

function drawMenu(view, values) {
  const top = VIEWS[view]?.inside ?? view;
  clear(menu, shownViews().map((name) =>
    h("a", { href: addressOf(name, { folder: folderOf(name, values.folder) ?? values.folder }), "aria-current": name === top ? "page" : null, title: VIEWS[name].about }, VIEWS[name].title)));
  clear(chooser);
  if (folders.length > 1 && view !== "start") {
    const select = h("select", { "aria-label": "Result folder", onchange: () => go(VIEWS[view]?.inside ?? view, { folder: select.value }) },
      folders.map((one) => h("option", { value: one.number, selected: one.number === Number(values.folder ?? 1) },
        one.model ? `${one.name} · ${one.model} · ${one.task}` : one.name)));
    chooser.append(select);
  }
}

// What the folders are now: a study that ends has more views than while it ran.
function renewed(fresh) {
  folders = fresh;
  const { view, values } = readAddress();
  drawMenu(view, values);
}
async function renew() {
  if (isExport() || !folders.some((one) => one.state === "running" || one.state === "interrupted")) return;
  await ask("start").then((found) => renewed(found.folders)).catch(() => {});
}

// Another view begins at its top, one that is gone back to where it was left; a choice inside a view moves nothing.
const left = new Map();
let before = null;
history.scrollRestoration = "manual";
function scrolled(view) {
  const was = history.state;
  try {
    history.replaceState({ seen: true }, "", location.href);
  } catch {
    // A frame that may not: its views begin at the top.
  }
  if (was?.seen) scrollTo(0, left.get(location.hash) ?? 0);
  else if (view !== before) scrollTo(0, 0);
  before = view;
}

async function route(event) {
  if (event?.oldURL) left.set(new URL(event.oldURL).hash, scrollY);
  const { view, values } = readAddress();
  const mine = ++shown;
  leave?.();
  leave = null;
  hideTip();
  main.setAttribute("aria-busy", "true");
  if (view !== "start") await renew();
  if (mine !== shown) return;
  const known = VIEWS[view];
  const place = h("div", { class: `view ${known ? view : "lost"}` });
  drawMenu(view, values);
  let end = null;
  try {
    if (!known) throw new Error(`There is no view “${view}” in this version.`);
    const folder = folders[Number(values.folder ?? 1) - 1];
    end = await known.show(place, values, { views: VIEWS, folders, folder, go, addressOf, renewed });
  } catch (fault) {
    clear(place, h("p", { class: "refusal", role: "alert" }, fault.message),
      h("p", null, h("a", { class: "button", href: "#start" }, "To the start")));
  }
  if (mine !== shown) {
    end?.();
    return;
  }
  leave = end;
  clear(main, place);
  arrived();
  main.setAttribute("aria-busy", "false");
  // The view is drawn where it can be measured only now.
  place.dispatchEvent(new CustomEvent("placed"));
  scrolled(view);
  document.title = `${known?.title ?? "mless"} – mless`;
}

async function begin() {
  const top = h("header", { class: "top" },
    h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); } }, "To the content"),
    h("a", { class: "name", href: "#start" }, "mless"), menu, chooser,
    h("span", { class: "gap" }),
    h("button", { class: "icon", type: "button", "aria-label": "Keys", title: "Keys (?)", onclick: showKeys }, "?"), theme);
  document.body.append(top, main, help);
  setTheme(THEMES.includes(stored()) ? stored() : "auto");
  document.documentElement.classList.toggle("exported", isExport());
  try {
    folders = (await ask("start")).folders;
  } catch (fault) {
    main.append(h("p", { class: "refusal", role: "alert" }, fault.message));
    return;
  }
  // A page in a notebook's frame says which view comes first.
  const first = document.getElementById("answers")?.dataset.open;
  if (first && !location.hash) history.replaceState(null, "", `#${first}`);
  addEventListener("hashchange", route);
  addEventListener("keydown", onKey);
  await route();
}

begin();
