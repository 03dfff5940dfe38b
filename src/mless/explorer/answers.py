"""The answers of an accuracy study in pairs: what turned right, what turned wrong, and one item's two texts side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute
from jaxtyping import Bool, Float64, Int

from mless.errors import BadFolder
from mless.explorer.asking import NotThere, Query, request_text
from mless.explorer.batches import batches, of_conditions, rows_at
from mless.explorer.beside import strips_beside
from mless.explorer.diffing import word_diff
from mless.explorer.folders import Folder, Folders
from mless.explorer.listing import page_of
from mless.explorer.questions import prompt_of, questions
from mless.explorer.views import Chosen, View
from mless.results.answers import StoredAnswers, shown_rows

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

T = TypeVar("T")

Turned = Literal["right", "wrong", "stayed-right", "stayed-wrong", "stayed-mixed"]
TURNED: tuple[Turned, ...] = get_args(Turned)
#: Characters of a short text in the list, and of an answer or question that is shown.
SHORT, LONG = 160, 200_000
#: A larger table of prompts is not read for the list.
PROMPTS_BYTES = 16 << 20


# ---- numbers of all items ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Side:
    """A condition's answers in the order of the study's items: the share that is right, tokens, stated; NaN where nothing is known."""

    score: Float64[np.ndarray, " items"]
    tokens: Float64[np.ndarray, " items"]
    stated: Float64[np.ndarray, " items"]


@dataclass(frozen=True, slots=True)
class Index:
    """What the list needs of a folder: numbers, and results cut short. It holds no answers' texts, so 160,000 of them take some 30 megabytes.

    `rows` gives for each condition the row of `short` with an item's first sample, −1 where there is none.
    """

    folder: StoredAnswers
    items: tuple[str, ...]
    places: Mapping[str, int]
    sides: Mapping[str, Side]
    short: pa.Table
    rows: Mapping[str, Int[np.ndarray, " items"]]
    #: For each row of the table its condition and item, and the sample.
    keys: Int[np.ndarray, " rows"]
    sample: Float64[np.ndarray, " rows"]

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        return len(self.items) * (32 * len(self.sides) + 200) + self.short.nbytes + 16 * len(self.keys)

    def rows_of(self, condition: str, item: str) -> list[int]:
        """The numbers of an item's rows, in the samples' order."""
        at = self.places.get(item)
        if at is None:
            return []
        number = list(self.folder.conditions).index(condition)
        mine = np.flatnonzero(self.keys == number * len(self.items) + at)
        return mine[np.argsort(self.sample[mine], kind="stable")].tolist()


def index_of(folder: Folder) -> Index:
    """The index of a folder, kept while it does not change."""
    return folder.kept("answers", lambda: _index(folder), lambda made: made.size)


def _index(folder: Folder) -> Index:
    stored = StoredAnswers(folder.path, folder.about())
    columns = ["condition", "item", "sample", "correct", "n_tokens", "extracted", "reference", "finish"]
    table = pa.concat_tables([_cut_short(one) for one in batches(folder, "answers", columns, newer=["stated"])])
    items = pa.array(stored.items, pa.string())
    places = pc.index_in(table["item"], value_set=items).to_numpy(zero_copy_only=False)
    names = list(stored.conditions)
    which = pc.index_in(table["condition"], value_set=pa.array(names, pa.string())).to_numpy(zero_copy_only=False)
    correct, tokens, sample = (_numbers(table[name]) for name in ("correct", "n_tokens", "sample"))
    stated = _numbers(table["stated"]) if "stated" in table.column_names else np.full(len(correct), np.nan)
    found: dict[str, Side] = {}
    rows: dict[str, Int[np.ndarray, " items"]] = {}
    for number, name in enumerate(names):
        mine = np.flatnonzero(which == number)
        if not len(mine):
            continue
        at = places[mine].astype(np.int64)
        score, length, said = (_mean(at, values[mine], len(items)) for values in (correct, tokens, stated))
        if stored.conditions[name].get("samples") is not None:  # a vote is right or wrong as a whole
            votes = stored.scores(name)
            score = np.array([votes.get(item, np.nan) for item in stored.items])
        found[name] = Side(score, length, said)
        rows[name] = np.full(len(items), -1)
        order = np.argsort(-sample[mine], kind="stable")  # the first sample is written last, and stays
        rows[name][at[order]] = mine[order]
    kept = [name for name in ("extracted", "reference", "finish", "stated") if name in table.column_names]
    places_of = {item: at for at, item in enumerate(stored.items)}
    keys = which.astype(np.int64) * len(items) + places.astype(np.int64)
    return Index(stored, tuple(stored.items), places_of, found, table.select(kept).combine_chunks(), rows, keys, sample)


def _cut_short(table: pa.Table) -> pa.Table:
    for name in ("extracted", "reference"):
        cut = pc.utf8_slice_codeunits(table[name], 0, SHORT + 1)
        table = table.set_column(table.column_names.index(name), name, cut)
    return table


def _numbers(column: pa.ChunkedArray) -> Float64[np.ndarray, " rows"]:
    return (
        column.cast(pa.float64() if not pa.types.is_boolean(column.type) else pa.int8()).cast(pa.float64()).to_numpy()
    )


def _mean(
    places: Int[np.ndarray, " rows"], values: Float64[np.ndarray, " rows"], items: int
) -> Float64[np.ndarray, " items"]:
    known = ~np.isnan(values)
    total = np.bincount(places[known], values[known], items)
    count = np.bincount(places[known], minlength=items)
    return np.divide(total, count, out=np.full(items, np.nan), where=count > 0)


# ---- pairs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conditions, of one folder or of two, over the items that both answered. Places are those of the second's items."""

    before: Index
    against: str
    after: Index
    condition: str

    @property
    def own(self) -> bool:
        return self.before is self.after

    def sides(self) -> tuple[Side, Side]:
        first = self.before.sides[self.against]
        if not self.own:
            at = np.array([self.before.places.get(item, -1) for item in self.after.items])
            first = Side(
                *(np.where(at >= 0, values[at], np.nan) for values in (first.score, first.tokens, first.stated))
            )
        return first, self.after.sides[self.condition]

    def turned(self) -> Int[np.ndarray, " items"]:
        """Item → number in `TURNED`; −1 where one of the two has no answer."""
        first, second = self.sides()
        change = np.round(second.score - first.score, 9)  # 2/3 and 1 − 1/3 are no change
        kept = np.where(second.score == 1, 2, np.where(second.score == 0, 3, 4))
        found = np.where(change > 0, 0, np.where(change < 0, 1, kept))
        return np.where(np.isnan(change), -1, found)


def _other(query: Query) -> Folder:
    """The folder that is compared with; without `other` the same."""
    return query.folders[query.whole("other", 1, len(query.folders), default=query.folder().number) - 1]


def pair_of(query: Query) -> Pair:
    """The two sides that a query names: `folder` and `condition`, `other` (a folder) and `against`."""
    mine, other = query.folder(), _other(query)
    after = index_of(mine)
    before = after if other.number == mine.number else index_of(other)
    against = query.word("against", list(before.sides), default="none")
    condition = query.word("condition", list(after.sides), default=_usual(after, against))
    if before is not after:
        check_same_questions(before.folder, after.folder)
    return Pair(before, against, after, condition)


def _usual(index: Index, against: str) -> str:
    others = [name for name in index.sides if name not in (against, index.folder.control)] or list(index.sides)
    return next((name for name in (index.folder.study.get("primary"), "mless") if name in others), others[0])


def check_same_questions(first: StoredAnswers, other: StoredAnswers) -> None:
    """Refuse folders whose items are not the same questions."""
    digests = [(one.about.get("identity") or {}).get("data") for one in (first, other)]
    common = len(set(first.items) & set(other.items))
    if first.task != other.task or not common:
        why = f"their tasks are {first.task} and {other.task}, with {common} items in common"
    elif first.items == other.items and None not in digests and digests[0] != digests[1]:
        why = "questions or answers differ under the same ids"
    else:
        return
    raise BadFolder(
        f"{other.path} does not fit {first.path}: {why}; answers are compared item by item, so give folders of one data set"
    )


# ---- the list ------------------------------------------------------------------------------------------------------------


def _list(query: Query) -> dict[str, Any]:
    """A page of items of a pair, with what of all items turned; filtered by `turned` and `search`, ordered by `sort`."""
    pair = pair_of(query)
    turned = pair.turned()
    order = _ordered(pair, turned, query)
    at = page_of(query, len(order))
    shown = order[at.start : at.stop]
    folder = pair.after.folder
    return {
        "against": pair.against,
        "condition": pair.condition,
        "own": pair.own,
        "title": folder.title,
        "other_title": pair.before.folder.title,
        "conditions": list(pair.after.sides),
        "other_conditions": list(pair.before.sides),
        "control": folder.control,
        "counts": _counts(turned),
        "unpaired": int(np.count_nonzero(turned < 0)),
        "overview": _overview(pair),
        "found": len(order),
        "items": len(turned),
        "page": at.page,
        "pages": at.pages,
        "rows": _rows(query.folder(), pair, turned, shown.tolist()),
    }


def _counts(turned: Int[np.ndarray, " items"]) -> dict[str, int]:
    return {name: int(np.count_nonzero(turned == number)) for number, name in enumerate(TURNED)}


def _overview(pair: Pair) -> list[dict[str, Any]]:
    """Every condition beside the one that is compared with: counts, and what accuracy.parquet says of it."""
    heads = shown_rows(pair.after.folder.accuracy(), pair.after.folder.conditions)
    found: list[dict[str, Any]] = []
    for name in pair.after.sides:
        if pair.own and name == pair.against:
            continue
        head = heads.get(name)
        said = {} if head is None else {key: getattr(head, key) for key in ("metric", "n", "value", "lo", "hi")}
        if head is not None and pair.own and pair.against == "none":
            said |= {key: getattr(head, key) for key in ("delta", "delta_lo", "delta_hi", "p", "p_adjusted", "verdict")}
        counts = _counts(Pair(pair.before, pair.against, pair.after, name).turned())
        found.append({"condition": name, **counts, **said})
    return found


def _ordered(pair: Pair, turned: Int[np.ndarray, " items"], query: Query) -> Int[np.ndarray, " found"]:
    kept = turned >= 0
    wanted = query.word("turned", ["", "changed", *TURNED], default="")
    if wanted:
        kept &= np.isin(turned, [0, 1] if wanted == "changed" else [TURNED.index(cast("Turned", wanted))])
    if text := query.text("search").strip()[:200]:
        kept &= _matching(pair, text, query)
    order = np.flatnonzero(kept)
    first, second = pair.sides()
    keys = {
        "item": order,
        "turned": turned[order],
        "longest": -second.tokens[order],
        "shortest": second.tokens[order],
        "longer": -(second.tokens - first.tokens)[order],
        "shorter": (second.tokens - first.tokens)[order],
    }
    return order[np.argsort(keys[query.word("sort", list(keys), default="item")], kind="stable")]  # NaN last


def _matching(pair: Pair, text: str, query: Query) -> Bool[np.ndarray, " items"]:
    """Items where the text occurs, in small or large letters: in either answer, what was extracted, the reference, the question or the id."""
    found: set[str] = set()
    for folder, conditions in _read_of(pair, query):
        found.update(*_searched(folder, conditions, text).values())
    return np.array([item in found for item in pair.after.items])


def _read_of(pair: Pair, query: Query) -> list[tuple[Folder, list[str]]]:
    """Which conditions of which folder a pair is: one scan of a table is enough for both."""
    if pair.own:
        return [(query.folder(), list(dict.fromkeys([pair.against, pair.condition])))]
    return [(_other(query), [pair.against]), (query.folder(), [pair.condition])]


def _at_once(
    folder: Folder, key: str, conditions: Sequence[str], scan: Callable[[], Mapping[str, T]], size: Callable[[T], int]
) -> dict[str, T]:
    """Something of each condition, kept by itself, and made for all of them in one scan."""
    made: dict[str, T] = {}

    def of(name: str) -> T:
        if name not in made:
            made.update(scan())
        return made[name]

    return {name: folder.kept((key, name), functools.partial(of, name), size) for name in conditions}


def _searched(folder: Folder, conditions: Sequence[str], text: str) -> dict[str, frozenset[str]]:
    """Ids of the items, by condition. The texts pass through in batches."""

    def has(table: pa.Table, columns: Sequence[str]) -> Any:
        hits = [
            pc.fill_null(pc.match_substring(table[name], text, ignore_case=True), fill_value=False) for name in columns
        ]
        return functools.reduce(pc.or_, hits)

    def scan() -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = {name: set() for name in conditions}
        columns = ("text", "item", "extracted", "reference")
        mine, asked = of_conditions(conditions), of_conditions(["none"])
        hits = batches(
            folder, "answers", ["condition", *columns], where=lambda rows: pc.and_(mine(rows), has(rows, columns))
        )
        for batch in hits:
            for row in batch.select(["condition", "item"]).to_pylist():
                found[row["condition"]].add(row["item"])
        if folder.has("prompts"):
            prompts = batches(
                folder,
                "prompts",
                ["condition", "item", "text"],
                where=lambda rows: pc.and_(asked(rows), has(rows, ("text",))),
            )
            for batch in prompts:
                for ids in found.values():
                    ids.update(batch["item"].to_pylist())
        return {name: frozenset(ids) for name, ids in found.items()}

    return _at_once(folder, f"search {text}", conditions, scan, lambda ids: 100 + 100 * len(ids))


def _rows(folder: Folder, pair: Pair, turned: Int[np.ndarray, " items"], places: Sequence[int]) -> list[dict[str, Any]]:
    items = [pair.after.items[at] for at in places]
    first, second = pair.sides()
    before = _short_answers(pair.before, pair.against, items)
    after = _short_answers(pair.after, pair.condition, items)
    asked = _short_questions(folder, items)
    return [
        {
            "item": item,
            "number": at + 1,
            "turned": TURNED[turned[at]],
            "question": asked.get(item),
            "reference": next((one.get("reference") for one in (after.get(item), before.get(item)) if one), None),
            "before": before.get(item, {}) | {"score": _plain(first.score[at]), "tokens": _plain(first.tokens[at])},
            "after": after.get(item, {}) | {"score": _plain(second.score[at]), "tokens": _plain(second.tokens[at])},
        }
        for at, item in zip(places, items, strict=True)
    ]


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _short_answers(index: Index, condition: str, items: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What was extracted of each item's first sample."""
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        at = index.places.get(item, -1)
        row = int(index.rows[condition][at]) if at >= 0 else -1
        if row >= 0:
            one = {name: index.short[name][row].as_py() for name in index.short.column_names}
            found[item] = {
                "extracted": _cut(one["extracted"], SHORT),
                "reference": _cut(one["reference"], SHORT),
                "cut_off": one["finish"] == "length",
                "stated": one.get("stated"),
            }
    return found


def _short_questions(folder: Folder, items: Sequence[str]) -> dict[str, str]:
    file = folder.path / "prompts.parquet"
    if not folder.about().get("questions") and file.exists() and file.stat().st_size > PROMPTS_BYTES:
        return {}
    return {item: _cut(text, SHORT) or "" for item, text in questions(folder, items).items()}


def _cut(text: str | None, most: int) -> str | None:
    return text if text is None or len(text) <= most else text[: most - 1] + "…"


# ---- one item --------------------------------------------------------------------------------------------------------------


def _item(query: Query) -> dict[str, Any]:
    """Both answers to one item, as a diff, with what was extracted and why each was judged so."""
    pair = pair_of(query)
    at = _place(pair, query)
    item = pair.after.items[at]
    before, after = _answers(pair, query, item)
    sample = query.whole("sample", 1, max(len(before), len(after), 1), default=_telling(before, after))
    sides = [answers[min(sample, len(answers)) - 1] if answers else None for answers in (before, after)]
    texts = [_cut("" if side is None else side["text"], LONG) or "" for side in sides]
    turned = pair.turned()[at]
    folder = pair.after.folder
    return {
        "item": item,
        "number": at + 1,
        "items": len(pair.after.items),
        "against": pair.against,
        "condition": pair.condition,
        "own": pair.own,
        "title": folder.title,
        "other_title": pair.before.folder.title,
        "turned": TURNED[turned] if turned >= 0 else None,
        "question": _cut(questions(query.folder(), [item]).get(item), LONG),
        "prompt": prompt_of(query.folder(), pair.condition),
        "prompt_against": prompt_of(_other(query), pair.against),
        "strips": strips_beside(query.folders, query.folder(), item, pair.condition),
        "reference": _cut(next((side["reference"] for side in sides if side), None), LONG),
        "grader": folder.settings.get("grader"),
        "before": _side(before, sides[0]),
        "after": _side(after, sides[1]),
        "sample": sample,
        "samples": max(len(before), len(after)),
        "diff": [list(piece) for piece in word_diff(*texts)],
        "others": _elsewhere(pair.after, item),
    }


def _place(pair: Pair, query: Query) -> int:
    item = query.text("item")
    if item not in pair.after.places:
        raise NotThere(
            f"item: no {item[:60]!r} here; there are {len(pair.after.items):,}, the first is {pair.after.items[0][:60]!r}"
        )
    return pair.after.places[item]


def _near(query: Query) -> dict[str, Any]:
    """Which items stand before and after one in the list as it is filtered and ordered."""
    pair = pair_of(query)
    at = _place(pair, query)
    order = _ordered(pair, pair.turned(), query).tolist()
    if at not in order:
        return {"place": None, "found": len(order), "previous": None, "next": None}
    place = order.index(at)
    return {
        "place": place + 1,
        "found": len(order),
        "previous": pair.after.items[order[place - 1]] if place else None,
        "next": pair.after.items[order[place + 1]] if place + 1 < len(order) else None,
    }


def _telling(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> int:
    """The first sample whose judgement differs; else the first."""
    for number, (old, new) in enumerate(zip(before, after, strict=False), start=1):
        if old["correct"] != new["correct"]:
            return number
    return 1


_COLUMNS = [
    "condition",
    "item",
    "sample",
    "text",
    "extracted",
    "correct",
    "why",
    "n_tokens",
    "finish",
    "reference",
    "how",
]


def _answers(pair: Pair, query: Query, item: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """An item's answers on both sides, in the samples' order. Of the tables only their rows are kept, and some beside them."""
    before = pair.before.rows_of(pair.against, item)
    after = pair.after.rows_of(pair.condition, item)
    if pair.own:  # one reading is enough for both
        both = _read(query.folder(), [*before, *after])
        return both[: len(before)], both[len(before) :]
    return _read(_other(query), before), _read(query.folder(), after)


def _read(folder: Folder, rows: Sequence[int]) -> list[dict[str, Any]]:
    return rows_at(folder, "answers", _COLUMNS, rows, newer=["stated", "disagree"]).to_pylist()


def _side(answers: Sequence[Mapping[str, Any]], one: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if one is None:
        return None
    text = one["text"] or ""
    return {
        "correct": bool(one["correct"]),
        "right": sum(bool(answer["correct"]) for answer in answers),
        "samples": len(answers),
        "extracted": _cut(one["extracted"], LONG),
        "how": one["how"] or "",
        "why": _cut(one["why"] or "", LONG),
        "stated": one.get("stated"),
        "disagree": one.get("disagree"),
        "tokens": one["n_tokens"],
        "cut_off": one["finish"] == "length",
        "length": len(text),
        "left_out": max(0, len(text) - LONG + 1) if len(text) > LONG else 0,
    }


def _elsewhere(index: Index, item: str) -> list[dict[str, Any]]:
    """The same item under every condition of the folder."""
    at = index.places[item]
    return [{"condition": name, "score": _plain(side.score[at])} for name, side in index.sides.items()]


# ---- the export ------------------------------------------------------------------------------------------------------------

#: Items of a condition whose texts an exported file holds: those that turned come first.
EXPORTED_ITEMS = 60


def _of(folder: Folder) -> bool:
    return folder.has("answers", "accuracy") and "none" in folder.study.conditions and len(folder.study.conditions) > 1


def _exported(folders: Folders, chosen: Chosen) -> Iterator[str]:
    """Every condition's list, and the texts of the items that turned and of those chosen."""
    for folder in filter(_of, folders):
        index = index_of(folder)
        for condition in (name for name in index.sides if name != "none"):
            yield request_text("answers", all=1, condition=condition, folder=folder.number)
            turned = Pair(index, "none", index, condition).turned()
            named = [number - 1 for number in chosen.items.get(folder.number, ()) if number <= len(turned)]
            moved = np.flatnonzero((turned == 0) | (turned == 1)).tolist()
            for at in list(dict.fromkeys([*named, *moved, *range(len(turned))]))[: max(EXPORTED_ITEMS, len(named))]:
                yield request_text("answers/item", condition=condition, folder=folder.number, item=index.items[at])
        yield request_text("answers", all=1, folder=folder.number)


VIEW = View("Answers", {"answers": _list, "answers/item": _item, "answers/near": _near}, of=_of, exported=_exported)
