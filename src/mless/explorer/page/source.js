// Where data come from: the server, or the answers inside an exported file. Both are asked with the same text.

let inside = null;

// ask("map", {folder: 1}) → "map?folder=1"; keys in order, as request_text in asking.py writes it.
export function requestText(path, values) {
  const pairs = Object.entries(values ?? {})
    .filter(([, value]) => value !== undefined && value !== null)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([key, value]) => `${encodeURIComponent(key)}=${encodeURIComponent(value)}`);
  return path + (pairs.length ? `?${pairs.join("&")}` : "");
}

export function isExport() {
  return document.getElementById("answers") !== null;
}

// Whether a view that needs this answer can be opened: a server has it, a file may not.
export function holds(path, values) {
  if (!isExport()) return true;
  inside ??= JSON.parse(document.getElementById("answers").textContent);
  return Object.hasOwn(inside, requestText(path, values));
}

export class NotThere extends Error {}

export async function ask(path, values) {
  const text = requestText(path, values);
  if (isExport()) {
    inside ??= JSON.parse(document.getElementById("answers").textContent);
    if (!Object.hasOwn(inside, text)) {
      throw new NotThere("This file does not hold that part. `mless show` on the result folder shows it; `mless export --items … --heads …` puts more of it into a file.");
    }
    const found = inside[text];
    // What was damaged when the file was made: its reason stands in its place.
    if (found?.error) throw new NotThere(found.error);
    return found;
  }
  let reply;
  try {
    reply = await fetch(`api/${text}`, { cache: "no-store", redirect: "error" });
  } catch {
    throw new Error("The server does not answer. Was `mless show` ended? Start it again and open the address it prints.");
  }
  const found = await reply.json();
  if (!reply.ok) throw new NotThere(found.error ?? `The server answered ${reply.status}.`);
  return found;
}
