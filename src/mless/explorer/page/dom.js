// Elements. Texts go in as text only, so nothing in a result folder can become markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  put(element, ...children);
  return element;
}

// Put children behind those that are there: elements, texts, lists of them; nothing for null.
export function put(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

export function clear(element, ...children) {
  element.replaceChildren();
  return put(element, ...children);
}

// A labelled choice. `options` are [value, words] pairs.
export function choice(label, options, chosen, changed, attributes) {
  const select = h("select", { "aria-label": label, onchange: () => changed(select.value), ...attributes },
    options.map(([value, words]) => h("option", { value, selected: String(value) === String(chosen) }, words)));
  return h("label", { class: "choice" }, h("span", null, label), select);
}

// A small table. `columns` are [heading, numeric] pairs; cells are texts or elements.
export function table(caption, columns, rows, attributes) {
  return h("div", { class: "wide" }, h("table", attributes,
    caption && h("caption", null, caption),
    h("thead", null, h("tr", null, columns.map(([name, numeric]) => h("th", { scope: "col", class: numeric ? "n" : null }, name)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map((cell, at) => h(at ? "td" : "th", { scope: at ? null : "row", class: columns[at][1] ? "n" : null }, cell)))))));
}
