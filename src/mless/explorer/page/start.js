// Every folder's verdict, conditions and where it came from; a running study is asked for again while it runs.

import { addressOf } from "./address.js";
import { h, table } from "./dom.js";
import { ask, isExport } from "./source.js";

const AGAIN_MS = 3000;
const STATES = { finished: "finished", running: "running now", interrupted: "interrupted", refused: "refused" };

function progress(folder) {
  if (folder.stored === null) return null;
  return h("p", { class: "live" },
    h("progress", { max: folder.units, value: folder.stored, "aria-label": "units stored" }),
    ` ${folder.stored} of ${folder.units} units stored. `,
    folder.state === "running" ? "This page follows." : "The same command goes on from there.");
}

function card(folder, views) {
  const title = folder.model ? `${folder.model} on ${folder.task}` : folder.name;
  const links = (folder.views ?? []).filter((name) => name !== "start" && views[name]);
  return h("article", { class: "card", "aria-labelledby": `folder-${folder.number}` },
    h("header", null,
      h("h2", { id: `folder-${folder.number}` }, title),
      h("p", { class: "soft" }, folder.title ? `${folder.title} · ` : "", h("code", null, folder.name), " · ",
        h("span", { class: `state ${folder.state}` }, STATES[folder.state] ?? folder.state))),
    folder.why && h("p", { class: "refusal", role: "alert" }, folder.why),
    folder.damaged?.length ? h("p", { class: "refusal", role: "alert" }, `Not in this file: ${folder.damaged.join("; ")}`) : null,
    folder.units !== undefined && folder.state !== "finished" && progress(folder),
    folder.verdict?.length ? h("div", { class: "verdict" }, folder.verdict.map((line) => h("p", null, line))) : null,
    links.length ? h("p", { class: "links" }, links.map((name) =>
      h("a", { class: "button", href: addressOf(name, { folder: folder.number }) }, views[name].title))) : null,
    folder.conditions && h("details", { open: folder.state !== "finished" || null },
      h("summary", null, `${folder.conditions.length} conditions, ${folder.items} items`),
      table(null, [["condition"], ["what it does"]], folder.conditions.map((one) =>
        [one.name, one.control ? `${one.words} (A/A control)` : one.words]))),
    folder.control && h("p", { class: "control" }, folder.control),
    folder.facts && h("details", null, h("summary", null, "Where it came from"),
      h("dl", null, folder.facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
      h("p", { class: "soft" }, "Made with"), h("pre", { tabindex: 0 }, folder.command)));
}

export const view = {
  title: "Start",
  about: "Every folder's verdict",
  async show(place, state, tools) {
    let found = await ask("start");
    const cards = h("div", { class: "cards" });
    const draw = () => cards.replaceChildren(...found.folders.map((folder) => card(folder, tools.views)));
    draw();
    place.append(h("h1", null, found.folders.length > 1 ? `${found.folders.length} result folders` : "Result folder"),
      found.left_out ? h("p", { class: "soft" }, "This page holds a part of the results. All of them: ", h("code", null, "mless.show(…)"), " in Python, or ", h("code", null, "mless show"), " with the folder.") : "", cards);
    const lives = () => found.folders.some((folder) => folder.state === "running" || folder.state === "interrupted");
    if (isExport() || !lives()) return null;
    const timer = setInterval(async () => {
      const before = JSON.stringify(found);
      found = await ask("start").catch(() => found);
      if (JSON.stringify(found) !== before) {
        draw();
        tools.renewed(found.folders);
      }
      if (!lives()) clearInterval(timer);
    }, AGAIN_MS);
    return () => clearInterval(timer);
  },
};
