"""The answers of an accuracy study in pairs: what turned right, what turned wrong, and one item's two texts side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute
from jaxtyping import Bool, Float64, Int

from mless.errors import BadFolder
from mless.explorer.asking import NotThere, Query, request_text
from mless.explorer.diffing import word_diff
from mless.explorer.folders import Folder, Folders
from mless.explorer.listing import page_of
from mless.explorer.views import Chosen, View
from mless.results.answers import StoredAnswers, shown_rows
from mless.results.schemas import Answer

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

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
    """What the list needs of a folder. It holds no texts, so 160,000 answers are a few megabytes."""

    folder: StoredAnswers
    items: tuple[str, ...]
    places: Mapping[str, int]
    sides: Mapping[str, Side]

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        return len(self.items) * (24 * len(self.sides) + 200)


def index_of(folder: Folder) -> Index:
    """The index of a folder, kept while it does not change."""
    return folder.kept("answers", lambda: _index(StoredAnswers(folder.path, folder.about())), lambda made: made.size)


def _index(folder: StoredAnswers) -> Index:
    table = folder.table("answers", ["condition", "item", "sample", "correct", "n_tokens"], newer=["stated"])
    items = pa.array(folder.items, pa.string())
    places = pc.index_in(table["item"], value_set=items).to_numpy(zero_copy_only=False)
    names = list(folder.conditions)
    which = pc.index_in(table["condition"], value_set=pa.array(names, pa.string())).to_numpy(zero_copy_only=False)
    correct, tokens = _numbers(table["correct"]), _numbers(table["n_tokens"])
    stated = _numbers(table["stated"]) if "stated" in table.column_names else np.full(len(correct), np.nan)
    found: dict[str, Side] = {}
    for number, name in enumerate(names):
        mine = which == number
        if not mine.any():
            continue
        at = places[mine].astype(np.int64)
        score, length, said = (_mean(at, values[mine], len(items)) for values in (correct, tokens, stated))
        if folder.conditions[name].get("samples") is not None:  # a vote is right or wrong as a whole
            votes = folder.scores(name)
            score = np.array([votes.get(item, np.nan) for item in folder.items])
        found[name] = Side(score, length, said)
    return Index(folder, tuple(folder.items), {item: at for at, item in enumerate(folder.items)}, found)


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


def pair_of(query: Query) -> Pair:
    """The two sides that a query names: `folder` and `condition`, `other` (a folder) and `against`."""
    mine = query.folder()
    other: Folder = query.folders[query.whole("other", 1, len(query.folders), default=mine.number) - 1]
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
        "rows": _rows(pair, turned, shown.tolist()),
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
    mine = query.folder()
    other: Folder = query.folders[query.whole("other", 1, len(query.folders), default=mine.number) - 1]
    found = _searched(mine, pair.condition, text) | _searched(other, pair.against, text)
    return np.array([item in found for item in pair.after.items])


def _searched(folder: Folder, condition: str, text: str) -> frozenset[str]:
    """The scan keeps only ids in memory."""

    def has(column: str) -> Any:
        return pc.match_substring(pc.field(column), text, ignore_case=True)

    def scan() -> frozenset[str]:
        where = (pc.field("condition") == condition) & (has("text") | has("item") | has("extracted") | has("reference"))
        found = set(folder.table("answers", ["item"], where)["item"].to_pylist())
        if folder.has("prompts"):
            asked = (pc.field("condition") == "none") & has("text")
            found |= set(folder.table("prompts", ["item"], asked)["item"].to_pylist())
        return frozenset(found)

    return folder.kept(("search", condition, text), scan, lambda found: 100 + 100 * len(found))


def _rows(pair: Pair, turned: Int[np.ndarray, " items"], places: Sequence[int]) -> list[dict[str, Any]]:
    items = [pair.after.items[at] for at in places]
    first, second = pair.sides()
    before = _short_answers(pair.before.folder, pair.against, items)
    after = _short_answers(pair.after.folder, pair.condition, items)
    asked = _short_questions(pair.after.folder, items)
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


def _short_answers(folder: StoredAnswers, condition: str, items: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each item's first sample what was extracted; no text of an answer is read."""
    where = (pc.field("condition") == condition) & pc.field("item").isin(pa.array(items, pa.string()))
    columns = ["item", "sample", "extracted", "reference", "finish"]
    rows: list[dict[str, Any]] = folder.table("answers", columns, where, newer=["stated"]).to_pylist()
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["sample"]):
        found.setdefault(
            row["item"],
            {
                "extracted": _cut(row["extracted"], SHORT),
                "reference": _cut(row["reference"], SHORT),
                "cut_off": row["finish"] == "length",
                "stated": row.get("stated"),
            },
        )
    return found


def _short_questions(folder: StoredAnswers, items: Sequence[str]) -> dict[str, str]:
    file = folder.path / "prompts.parquet"
    if not folder.about.get("questions") and file.exists() and file.stat().st_size > PROMPTS_BYTES:
        return {}
    return {item: _cut(text, SHORT) or "" for item, text in folder.questions(items).items()}


def _cut(text: str | None, most: int) -> str | None:
    return text if text is None or len(text) <= most else text[: most - 1] + "…"


# ---- one item --------------------------------------------------------------------------------------------------------------


def _item(query: Query) -> dict[str, Any]:
    """Both answers to one item, as a diff, with what was extracted and why each was judged so."""
    pair = pair_of(query)
    at = _place(pair, query)
    item = pair.after.items[at]
    before = pair.before.folder.answers(pair.against, [item]).get(item, [])
    after = pair.after.folder.answers(pair.condition, [item]).get(item, [])
    sample = query.whole("sample", 1, max(len(before), len(after), 1), default=_telling(before, after))
    sides = [answers[min(sample, len(answers)) - 1] if answers else None for answers in (before, after)]
    texts = [_cut("" if side is None else side.text, LONG) or "" for side in sides]
    turned = pair.turned()[at]
    folder = pair.after.folder
    stated = {name: _stated(index.folder, condition, item) for name, index, condition in (
        ("before", pair.before, pair.against), ("after", pair.after, pair.condition))}  # fmt: skip
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
        "question": _cut(folder.questions([item]).get(item), LONG),
        "reference": _cut(next((side.reference for side in sides if side), None), LONG),
        "grader": folder.settings.get("grader"),
        "before": _side(before, sides[0], stated["before"]),
        "after": _side(after, sides[1], stated["after"]),
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


def _telling(before: Sequence[Answer], after: Sequence[Answer]) -> int:
    """The first sample whose judgement differs; else the first."""
    for number, (old, new) in enumerate(zip(before, after, strict=False), start=1):
        if old.correct != new.correct:
            return number
    return 1


def _stated(folder: StoredAnswers, condition: str, item: str) -> dict[int, dict[str, Any]]:
    where = (pc.field("condition") == condition) & (pc.field("item") == item)
    rows: list[dict[str, Any]] = folder.table("answers", ["sample"], where, newer=["stated", "disagree"]).to_pylist()
    return {row["sample"]: row for row in rows}


def _side(
    answers: Sequence[Answer], one: Answer | None, stated: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any] | None:
    if one is None:
        return None
    known = stated.get(one.sample, {})
    return {
        "correct": one.correct,
        "right": sum(answer.correct for answer in answers),
        "samples": len(answers),
        "extracted": _cut(one.extracted, LONG),
        "how": one.how,
        "why": _cut(one.why, LONG),
        "stated": known.get("stated"),
        "disagree": known.get("disagree"),
        "tokens": one.n_tokens,
        "cut_off": one.finish == "length",
        "length": len(one.text),
        "left_out": max(0, len(one.text) - LONG + 1) if len(one.text) > LONG else 0,
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
