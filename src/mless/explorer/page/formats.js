// Numbers as people read them. A number that is none is a dash.

const missing = (value) => value === null || value === undefined || Number.isNaN(value);
const signed = (text) => text.replace("-", "−");

export function fixed(value, digits = 2) {
  return missing(value) ? "–" : signed(value.toFixed(digits));
}

// Three significant digits, for numbers of any size.
export function short(value) {
  if (missing(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return signed(size >= 0.001 && size < 10000 ? String(Number(value.toPrecision(3))) : value.toExponential(1));
}

export function interval(lo, hi, digits = 2) {
  return missing(lo) || missing(hi) ? "" : ` [${fixed(lo, digits)}, ${fixed(hi, digits)}]`;
}

// What is to be said where an interval of a mean passes all of its items, which happens where they are few.
export function beyondItems(n, lo, hi, least, most) {
  if ([lo, hi, least, most].some(missing) || (lo >= least && hi <= most)) return null;
  return `The 95 % interval reaches beyond all ${n} items: it says where the mean of many such items may lie, and so few leave that wide open.`;
}

export function pValue(p) {
  if (missing(p)) return "–";
  return p < 0.001 ? "< 0.001" : p < 0.1 ? p.toFixed(3) : p.toFixed(2);
}

export function pWords(p) {
  const shown = pValue(p);
  return shown === "–" ? "p unknown" : shown.startsWith("<") ? `p ${shown}` : `p = ${shown}`;
}

// A text with every sign visible: control, direction-changing and invisible ones are escaped, as escaping.py does it.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;
const NAMED = { "\r": "\\r" };
export function visible(text) {
  if (!/[^\x20-\x7e]/.test(text)) return text;
  return text.replace(UNSEEN, (sign) => {
    if (sign === "\n" || sign === "\t") return sign;
    const code = sign.codePointAt(0);
    return NAMED[sign] ?? (code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`);
  });
}

export function headName(layer, head) {
  return head ? `L${layer}H${head}` : `layer ${layer}`;
}

// One line of CSV a row. A cell that a spreadsheet would compute gets an apostrophe; a number stays one, its sign too.
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
export function csv(rows) {
  const cell = (value) => {
    if (missing(value)) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) && !NUMBER.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
