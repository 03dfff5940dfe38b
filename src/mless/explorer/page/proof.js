// From a number to its proof: the table and row it stands in, what computed it, and the commands that check it and make it again.

import { clear, h } from "./dom.js";
import { ask } from "./source.js";

const dialog = h("dialog", { class: "proof", "aria-label": "Where this number comes from" });

function literal(value) {
  return typeof value === "number" ? String(value) : JSON.stringify(value);
}

// `row` are the columns that name the row, such as {condition: "mless", layer: 1}.
export async function showProof(folder, tableName, row, words) {
  const found = await ask("proof", { folder });
  const filter = Object.entries(row).map(([name, value]) => `${name}=${literal(value)}`).join(", ");
  const file = `${found.path}/${tableName}.parquet`;
  const digest = found.tables[tableName];
  const facts = [
    ["table", h("code", null, file)],
    digest ? ["SHA-256", h("code", null, digest)] : null,
    ["row", h("code", null, filter)],
    ["model", found.model],
    found.implementations ? ["computed by", found.implementations] : null,
    found.engine ? ["engine", found.engine] : null,
    found.device ? ["device", found.device] : null,
  ].filter(Boolean);
  clear(dialog, h("h2", null, "Where this number comes from"), words && h("p", null, words),
    h("dl", null, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
    h("p", { class: "soft" }, "Read the row"), h("pre", { tabindex: 0 }, `import polars as pl\nprint(pl.read_parquet(${literal(file)}).filter(${filter}))`),
    h("p", { class: "soft" }, "Check the folder, and compute a sample of it again"), h("pre", { tabindex: 0 }, found.verify),
    h("p", { class: "soft" }, "Make the folder again"), h("pre", { tabindex: 0 }, found.command),
    h("form", { method: "dialog" }, h("button", { class: "button" }, "Close")));
  if (!dialog.isConnected) document.body.append(dialog);
  dialog.showModal();
}

export function proofButton(act) {
  return h("button", { class: "button proof-button", type: "button", onclick: act }, "Proof");
}
