"""Curves of received attention: aligned by dropping the filler or along the full sequence, the mean over items or one item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from mless.errors import BadFolder
from mless.results.along import fewest
from mless.results.reading import StoredPrompt, StoredResults
from mless.stats import band
from mless.values import QuerySet


@dataclass(frozen=True, slots=True)
class Curve:
    """Received attention by position, the mean of `n` items there; `lo` and `hi` are NaN where there is no band."""

    at: Int[np.ndarray, " positions"]
    mean: Float[np.ndarray, " positions"]
    lo: Float[np.ndarray, " positions"]
    hi: Float[np.ndarray, " positions"]
    n: Int[np.ndarray, " positions"]

    @property
    def top(self) -> float:
        """The highest value drawn."""
        drawn = np.concatenate([self.mean, self.hi])
        drawn = drawn[np.isfinite(drawn)]
        return float(drawn.max()) if drawn.size else 0.0


@dataclass(frozen=True, slots=True)
class FillerPlace:
    """Where the filler lies in the full sequence: the place in most items, or only the range over items."""

    runs: tuple[tuple[int, int], ...]
    share: float

    @property
    def varies(self) -> bool:
        """No place holds for more than half of the items, so `runs` is the range."""
        return self.share <= 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """What the curves of one folder are made from: only the heads, conditions and items asked for."""

    folder: StoredResults
    items: tuple[str, ...]
    one: bool
    first: int
    prompts: Mapping[str, Mapping[str, StoredPrompt]]
    received: Mapping[tuple[str, int, int], Mapping[str, Float[np.ndarray, " tokens"]]]

    @property
    def fewest(self) -> int:
        """A mean is drawn where at least this many items remain; half of a folder that holds fewer than usual."""
        return fewest(len(self.items))

    def curve(self, condition: str, layer: int, head: int, *, aligned: bool) -> Curve:
        """The mean with its 95 % band, or the one item's values; `aligned` keeps the original tokens only."""
        by_item = self.received[condition, layer, head]
        rows = [by_item[item] for item in self.items]
        if aligned:
            rows = [row[self.prompts[condition][item].original] for item, row in zip(self.items, rows, strict=True)]
        longest = max(len(row) for row in rows)
        values = np.full((len(rows), longest), np.nan)
        for row, given in zip(values, rows, strict=True):
            row[: len(given)] = given
        if self.one:
            mean, lo, hi = values[0], np.full(longest, np.nan), np.full(longest, np.nan)
            n = np.isfinite(mean).astype(int)
        else:
            found = band(values, 0.95)
            n = np.asarray(found.n)
            enough = n >= self.fewest
            mean, lo, hi = (np.where(enough, part, np.nan) for part in (found.mean, found.lo, found.hi))
        last = int(np.flatnonzero(np.isfinite(mean)).max(initial=self.first)) + 1
        keep = slice(self.first, last)
        return Curve(np.arange(longest)[keep], mean[keep], lo[keep], hi[keep], n[keep])

    def filler(self, conditions: Sequence[str]) -> FillerPlace | None:
        """Where the conditions' filler sits along the full sequence."""
        places = Counter(
            self.prompts[condition][item].filler
            for condition in conditions
            for item in self.items
            if self.prompts[condition][item].filler
        )
        if not places:
            return None
        place, count = places.most_common(1)[0]
        share = count / places.total()
        if share <= 0.5:
            runs = [run for found in places for run in found]
            place = ((min(start for start, _ in runs), max(stop for _, stop in runs)),)
        return FillerPlace(place, share)

    def tokens(self, condition: str, *, aligned: bool) -> dict[int, str]:
        """Position → token text of the one item; of a filler's run only its first and last token."""
        prompt = self.prompts[condition][self.items[0]]
        if aligned:
            return dict(enumerate(prompt.tokens[i] for i in prompt.original))
        inside = {i for start, stop in prompt.filler for i in range(start + 1, stop - 1)}
        return {i: token for i, token in enumerate(prompt.tokens) if i not in inside}


def measure(
    folder: StoredResults,
    conditions: Sequence[str],
    heads: Sequence[tuple[int, int]],
    queries: QuerySet,
    *,
    item: str | None,
    omit_first: bool | None,
) -> Measured:
    """Read what the curves of these (layer, head) pairs need; items that lack a condition are left out of all of them."""
    chosen = None if item is None else folder.item_id(item)
    prompts = folder.prompts(conditions, item=chosen, tokens=chosen is not None)
    layers = sorted({layer for layer, _ in heads})
    received = folder.received(conditions, layers, sorted({head for _, head in heads}), queries, item=chosen)
    common: set[str] | None = None
    for condition in conditions:
        for layer, head in heads:
            found = set(received.get((condition, layer, head), {})) & set(prompts.get(condition, {}))
            if not found:
                raise BadFolder(
                    f"{folder.path}: attention.parquet and prompts.parquet hold no item with condition {condition!r}, layer {layer}, "
                    f"head {head}, queries {queries!r}{'' if chosen is None else f', item {chosen!r}'}; run the study again"
                )
            common = found if common is None else common & found
    items = tuple(dict.fromkeys([*[name for name in folder.items if name in (common or ())], *sorted(common or ())]))
    if not items:
        raise BadFolder(
            f"{folder.path}: no item was measured under all of {', '.join(conditions)}; run the study again"
        )
    for condition in conditions:
        for layer, head in heads:
            for name in items:
                expected = prompts[condition][name].spans[-1].stop
                if (got := len(received[condition, layer, head][name])) != expected:
                    raise BadFolder(
                        f"{folder.path}: item {name!r}, condition {condition!r}: {expected} tokens in prompts.parquet, "
                        f"{got} in attention.parquet; the tables are of different runs, run the study again"
                    )
    first = int(folder.omit_first if omit_first is None else omit_first)
    return Measured(folder, items, chosen is not None, first, prompts, received)
