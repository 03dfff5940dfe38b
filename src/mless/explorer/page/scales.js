// From numbers to places and colours. The colours can be told apart by the colour-blind, in light and in dark.

export function linear([a, b], [from, to]) {
  const span = b - a || 1;
  return (value) => from + ((value - a) / span) * (to - from);
}

// Round numbers between two ends, about so many.
export function ticks(lo, hi, count = 5) {
  if (!(hi > lo)) return [lo];
  const rough = (hi - lo) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(lo / step - 1e-9) * step; at <= hi + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

const LIGHT = {
  falls: ["#f4f4f4", "#fdd0a2", "#f1a340", "#b35806"],
  grows: ["#f4f4f4", "#d8daeb", "#998ec3", "#542788"],
  amount: ["#f7fafc", "#b9dcf3", "#4c9fd0", "#00527f"],
  nothing: "#ffffff",
};
const DARK = {
  falls: ["#2b2f34", "#6a3d14", "#b8651f", "#ffa45c"],
  grows: ["#2b2f34", "#443a63", "#7a68ad", "#cdbcf5"],
  amount: ["#22262a", "#12496a", "#1f82b8", "#9bd8ff"],
  nothing: "#16181b",
};

export function isDark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function between(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const left = Math.min(Math.floor(at), stops.length - 2);
  const [a, b] = [channels(stops[left]), channels(stops[left + 1])];
  return `rgb(${a.map((one, i) => Math.round(one + (b[i] - one) * (at - left))).join(",")})`;
}

// −1 … 1 → orange … purple, nothing in the middle.
export function diverging(share) {
  const stops = isDark() ? DARK : LIGHT;
  if (share === null || Number.isNaN(share)) return stops.nothing;
  return share < 0 ? between(stops.falls, -share) : between(stops.grows, share);
}

// 0 … 1 → pale … blue.
export function amount(share) {
  const stops = isDark() ? DARK : LIGHT;
  return share === null || Number.isNaN(share) ? stops.nothing : between(stops.amount, share);
}

// Ink that can be read on a colour.
export function inkOn(colour) {
  const [r, g, b] = colour.startsWith("rgb") ? colour.match(/\d+/g).map(Number) : channels(colour);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#14171a" : "#ffffff";
}

// A colour of the style sheet.
export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function quantile(values, share) {
  const sorted = values.filter((one) => one !== null && Number.isFinite(one)).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 0;
}
