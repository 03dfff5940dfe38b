// The address holds the state: #view?key=value. A link shows the same view; back and forward work.

export function readAddress(hash = location.hash) {
  const [name, rest] = hash.replace(/^#/, "").split("?", 2);
  const values = {};
  for (const [key, value] of new URLSearchParams(rest ?? "")) values[key] = value;
  return { view: name || "start", values };
}

export function addressOf(view, values) {
  const given = Object.entries(values ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = given.map(([key, value]) => `${encodeURIComponent(key)}=${encodeURIComponent(value)}`).join("&");
  return `#${view}${text ? `?${text}` : ""}`;
}

// Go to a view. With `replace` the step back is not kept: for small choices such as a moved cursor.
export function go(view, values, { replace = false } = {}) {
  const hash = addressOf(view, values);
  write();
  if (hash === location.hash) return;
  placed = false;
  if (replace) {
    history.replaceState(null, "", hash);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = hash;
  }
}

// Note a choice in the address without drawing the view anew: once it rests, or with the next click. Browsers refuse an address that changes
// with every move of the mouse.
const REST_MS = 250;
let noted = null;
let timer = null;
// Whether the view that the address names is on the page. Until it is, the one before still hears keys, and its choices are not noted.
let placed = false;
export function arrived() {
  placed = true;
}
export function note(view, values) {
  if (!placed) return;
  noted = addressOf(view, values);
  clearTimeout(timer);
  timer = setTimeout(write, REST_MS);
}
function write() {
  clearTimeout(timer);
  if (noted !== null && noted !== location.hash) history.replaceState(history.state, "", noted);
  noted = null;
}
addEventListener("click", write, { capture: true });
// Another view is shown: what was noted belongs to the one before.
addEventListener("hashchange", () => { noted = null; placed = false; });
