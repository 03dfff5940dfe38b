// Where along the solution a condition changes it: the mean over items by position.

import { around, digitsFor, forest, number, picture } from "./chart.js";
import { h } from "./dom.js";
import { ask } from "./source.js";

const SIGN = { sign: true };
const nameOf = ({ first, last }) => (first === last ? `token ${first}` : `tokens ${first}–${last}`);

// A section that fills itself: reading every token of a large folder takes a while, and the rest of the page need not wait.
export function along(folder, condition) {
  const room = h("section", { "aria-label": "Along the solution" });
  const fill = async () => {
    const found = await ask("likelihood/along", { folder, condition }).catch(() => null);
    if (!found?.bins.length) return;
    const digits = Math.min(5, digitsFor(Math.max(...found.bins.map((bin) => Math.abs((bin.hi ?? bin.delta) - (bin.lo ?? bin.delta))), 1e-9)));
    const rows = found.bins.map((bin) => {
      const shown = `${number(bin.delta, digits, SIGN)}${around(bin.lo, bin.hi, digits, SIGN)}`;
      return { label: nameOf(bin), value: bin.delta, lo: bin.lo, hi: bin.hi, colour: bin.lo > 0 ? "up" : bin.hi < 0 ? "down" : "open", hollow: !(bin.lo > 0 || bin.hi < 0), words: shown,
        said: [`${nameOf(bin)} of the solution`, `Δ log p ${shown} nats a token`, `${bin.n} of ${found.items} items are as long`] };
    });
    room.append(h("h2", null, `Where along the solution, ${found.condition}`),
      picture(`Δ log p by position in the solution, ${found.condition}`, (width) => forest(width, rows, { unit: "Δ nats a token" }),
        () => [["first", "last", "items", "delta", "lo", "hi"], ...found.bins.map((bin) => [bin.first, bin.last, bin.n, bin.delta, bin.lo, bin.hi])],
        { name: `along-${found.condition}`, proof: [folder, "tokens", { condition: found.condition }, "Means over items of these rows' log p, less those of none."], caption: "Tokens are counted from 1. Each mark is the mean over items of an item's mean in these tokens, with its 95 % interval. Filled: the interval does not hold 0." }));
  };
  fill();
  return room;
}
