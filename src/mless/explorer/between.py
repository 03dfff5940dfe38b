"""Several folders side by side: layers of attention, effects; and heads' shifts against items whose answers turned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mless.errors import BadFolder, MlessError
from mless.explorer.answers import index_of
from mless.explorer.asking import NotThere, Query, request_text
from mless.explorer.beside import unlike_models, unlike_prompts
from mless.explorer.folders import Folder, Folders
from mless.explorer.forest import alike
from mless.explorer.measures import readout_rows
from mless.explorer.views import Chosen, View
from mless.results.comparing import asked_by, differences
from mless.results.escaping import visible
from mless.results.reading import StoredStudy
from mless.results.readouts import READOUTS, Readout, readouts_of
from mless.stats import holm
from mless.stats.intervals import interval_p, mean_intervals

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

#: Without these alike, numbers are not of one thing. Other settings may differ, and are named.
_ALIKE = ("task", "items", "questions or answers", "kind of prompt")
#: Fewer items, or fewer of them turned, say nothing about heads.
LEAST_ITEMS, LEAST_TURNED = 10, 4


# ---- side by side --------------------------------------------------------------------------------------------------------


def _between(query: Query) -> dict[str, Any]:
    """The folders that measured the same thing as one of them, what each of them says, and what differs."""
    first = query.folder()
    names = list(readouts_of(first.measured))
    if not names:
        raise NotThere(f"a study of {first.measured} cannot be put beside others; there is {', '.join(READOUTS)}")
    readout = query.word("readout", names, default=names[0])
    known = _compared(first.study)
    condition = query.word("condition", known, default="mless" if "mless" in known else known[0])
    row = READOUTS.get(readout)
    metrics = row.metrics(first.study, condition)
    metric = query.word("metric", metrics, default=metrics[0])
    shown: list[dict[str, Any]] = []
    for folder in alike(query.folders, first):
        one = {
            "number": folder.number,
            "name": visible(folder.name, keep=""),
            "label": visible(folder.study.label, keep=""),
        }
        try:
            one |= {"differs": _differs(first, folder, row, condition), **_read(folder, readout, condition, metric)}
        except MlessError as fault:
            one["why"] = visible(str(fault), keep="")
        shown.append(one)
    scale = row.scale(metric)
    return {
        "measured": first.measured,
        "readout": readout,
        "readouts": readout_rows(names, first.study, condition),
        "condition": condition,
        "conditions": known,
        "metric": metric,
        "metrics": metrics,
        "words": scale.words,
        "unit": scale.unit,
        "nothing": scale.nothing,
        "folders": shown,
        "elsewhere": [
            {"number": one.number, "name": visible(one.name, keep=""), "measured": _measured(one)}
            for one in query.folders
            if _measured(one) != first.measured
        ],
        "turned": _turned_pairs(query.folders),
    }


def _measured(folder: Folder) -> str:
    try:
        return folder.measured
    except MlessError:
        return "refused"


def _compared(study: StoredStudy) -> list[str]:
    return [name for name, one in study.conditions.items() if name != "none" and not one.get("again")]


def _differs(first: Folder, other: Folder, row: Readout, condition: str) -> list[str]:
    """What differs from the first folder's study; what must not differ is refused."""
    if other.number == first.number:
        return []
    other.study.need_conditions([condition])
    found = differences(*(asked_by(one.study, row, [condition], None) for one in (first, other)))
    if wrong := [words for name, words in found.items() if name in _ALIKE]:
        raise BadFolder(
            f"{other.path} does not fit {first.path}: they differ in {'; '.join(wrong)}; run one study on the same items for each model"
        )
    return [visible(words, keep="") for words in found.values()]


def _read(folder: Folder, readout: str, condition: str, metric: str) -> dict[str, Any]:
    row = READOUTS.get(readout)
    scale = row.scale(metric)

    def said(layer: int | None) -> dict[str, Any]:
        reading = row.read(folder.study, condition, metric, layer)
        ends = {name: getattr(reading, name) for name in ("value", "lo", "hi")}
        return {"n": reading.n} | {name: scale.shown(end) if math.isfinite(end) else None for name, end in ends.items()}

    layers = [int(layer) for layer in folder.about().get("layers") or ()] if row.by_layer else []
    return folder.kept(
        ("between", readout, condition, metric),
        lambda: {"all": said(None), "layers": [{"layer": layer, **said(layer)} for layer in layers]},
    )


# ---- heads and turned items ----------------------------------------------------------------------------------------------


def _turned_pairs(folders: Folders) -> list[dict[str, Any]]:
    """Every pair of an attention folder and an answers folder, and why a pair does not fit."""
    attention = [one for one in folders if _measured(one) == "attention" and one.has("shares")]
    answers = [one for one in folders if _measured(one) == "accuracy" and one.has("answers", "accuracy")]
    found: list[dict[str, Any]] = []
    for one in attention:
        for other in answers:
            pair: dict[str, Any] = {
                "heads": one.number,
                "answers": other.number,
                "names": [visible(folder.name, keep="") for folder in (one, other)],
            }
            try:
                common = [name for name in _compared(one.study) if name in other.study.conditions]
                if not common:
                    raise BadFolder("they have no condition in common")
                fit = [name for name in common if _fits(one, other, name)]
                if not fit:
                    _check_pair(one, other, common[0])
                pair["conditions"] = fit
            except MlessError as fault:
                pair["why"] = visible(str(fault), keep="")
            found.append(pair)
    return found


def _fits(one: Folder, other: Folder, condition: str) -> bool:
    try:
        _check_pair(one, other, condition)
    except MlessError:
        return False
    return True


def _check_pair(one: Folder, other: Folder, condition: str) -> None:
    """Refuse folders of two models, of other prompts, or with too few items in common."""
    first, second = one.study, other.study
    if unlike := unlike_models(first, second):
        said = (f"{unlike[0]} {str(study.model.get(unlike[0]))[:40]}" for study in (first, second))
        raise BadFolder(
            f"{one.path} and {other.path} are of two models: {first.label} and {second.label} ({' and '.join(said)})"
        )
    # Each of them may have more items than the other; which they share is looked at below.
    if wrong := unlike_prompts(first, second, condition):
        raise BadFolder(f"{other.path} does not fit {one.path}: they differ in {'; '.join(list(wrong.values())[:4])}")
    common = len(set(first.items) & set(second.items))
    if common < LEAST_ITEMS:
        raise BadFolder(
            f"{one.path} and {other.path} have {common} items in common; expected at least {LEAST_ITEMS}. Run both with the same --limit"
        )


def _heads(query: Query) -> dict[str, Any]:
    """Over items: the correlation of each head's shift with whether the item turned right (+1), wrong (−1) or stayed (0)."""
    # Its import takes two seconds, which the first page would wait for.
    from mless.stats.associated import PERMUTATIONS, associations

    folders = query.folders
    one: Folder = folders[query.whole("heads", 1, len(folders)) - 1]
    other: Folder = folders[query.whole("answers", 1, len(folders)) - 1]
    if _measured(one) != "attention" or not one.has("shares") or _measured(other) != "accuracy":
        raise NotThere("heads: a folder of attention expected, and answers: one of accuracy")
    common = [name for name in _compared(one.study) if name in other.study.conditions]
    if not common:
        raise NotThere("the two folders have no condition in common that could be compared with none")
    condition = query.word("condition", common, default="mless" if "mless" in common else common[0])
    _check_pair(one, other, condition)
    index = index_of(other)
    score, before = index.sides[condition].score, index.sides["none"].score
    moved = {
        item: float(score[at] - before[at])
        for item, at in index.places.items()
        if not math.isnan(score[at] - before[at])
    }
    items = [item for item in one.study.items if item in moved]
    change = np.array([moved[item] for item in items])
    right, wrong = int(np.count_nonzero(change > 0)), int(np.count_nonzero(change < 0))
    if right + wrong < LEAST_TURNED:
        raise NotThere(
            f"only {right + wrong} of the {len(items)} common items turned under {condition!r}; expected at least {LEAST_TURNED} to correlate with"
        )
    places, shifts = _shifts(one, condition, items)
    found = associations(shifts, change, np.random.default_rng(0))
    return {
        "condition": condition,
        "conditions": common,
        "title": one.study.title,
        "names": [visible(folder.name, keep="") for folder in (one, other)],
        "heads": one.number,
        "answers": other.number,
        "n": found.n,
        "right": right,
        "wrong": wrong,
        "count": len(places),
        "chance": 0.05 * len(places),
        "small": int(np.count_nonzero(found.p <= 0.05)),
        "adjusted": int(np.count_nonzero(found.p_adjusted <= 0.05)),
        "largest_p": found.largest_p,
        "permutations": PERMUTATIONS,
        "rows": [
            {"layer": layer, "head": head, "r": r, "p": p, "p_adjusted": adjusted}
            for (layer, head), r, p, adjusted in zip(places, found.r, found.p, found.p_adjusted, strict=True)
        ],
    }


def _shifts(folder: Folder, condition: str, items: list[str]) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Layer and head of each column, and log λ by item."""
    where = (pc.field("condition") == condition) & (pc.field("queries") == "original") & (pc.field("head") > 0)
    table = folder.table("shares", ["item", "layer", "head", "retained"], where)
    at = pc.index_in(table["item"], value_set=pa.array(items, pa.string())).to_numpy(zero_copy_only=False)
    layer, head = (table[name].to_numpy().astype(np.int64) for name in ("layer", "head"))
    keys, column = np.unique(np.stack([layer, head], axis=1), axis=0, return_inverse=True)
    grid = np.full((len(items), len(keys)), np.nan)
    with np.errstate(divide="ignore"):
        logs = np.log(table["retained"].to_numpy().astype(np.float64))
    kept = ~np.isnan(at) & np.isfinite(logs)
    grid[at[kept].astype(np.int64), column.reshape(-1)[kept]] = logs[kept]
    return [(int(one), int(two)) for one, two in keys], grid


# ---- head beside head ----------------------------------------------------------------------------------------------------


def _pair(query: Query) -> dict[str, Any]:
    """Each head's retained share in two folders, and the ratio of the two over the items that both have."""
    one = query.folder()
    other: Folder = query.folders[query.whole("other", 1, len(query.folders)) - 1]
    if any(_measured(folder) != "attention" or not folder.has("shares") for folder in (one, other)):
        raise NotThere("heads beside heads: two folders of attention with shares.parquet expected")
    known = [name for name in _compared(one.study) if name in other.study.conditions]
    if not known:
        raise NotThere("the two folders have no condition in common that could be compared with none")
    condition = query.word("condition", known, default="mless" if "mless" in known else known[0])
    first, second = ([folder.study.model.get(name) for name in ("layers", "heads")] for folder in (one, other))
    if first != second:
        raise NotThere(
            f"{one.study.label} has {first[0]} layers of {first[1]} heads, {other.study.label} {second[0]} of {second[1]}: no head has a partner"
        )
    if wrong := [words for name, words in unlike_prompts(one.study, other.study, condition).items() if name in _ALIKE]:
        raise NotThere(f"the two folders do not fit: they differ in {'; '.join(wrong)}")
    there = set(other.study.items)
    items = [item for item in one.study.items if item in there]
    rows = one.kept(
        ("pair", other.number, other.state(), condition), lambda: _heads_of_both(one, other, condition, items)
    )
    names = [visible(folder.name, keep="") for folder in (one, other)]
    return {"condition": condition, "names": names, "other": other.number, "n": len(items), "rows": rows}


def _heads_of_both(one: Folder, other: Folder, condition: str, items: list[str]) -> list[dict[str, Any]]:
    (mine, first), (theirs, second) = (_shifts(folder, condition, items) for folder in (one, other))
    places = sorted(set(mine) & set(theirs))
    first = first[:, [mine.index(place) for place in places]]
    second = second[:, [theirs.index(place) for place in places]]
    apart = second - first  # NaN where either lacks the item
    both = np.isfinite(apart)
    found, p = mean_intervals(apart), interval_p(apart)
    adjusted = holm(p)
    means = [mean_intervals(np.where(both, side, np.nan)).mean for side in (first, second)]
    with np.errstate(over="ignore"):
        shown = {
            name: np.exp(logs)
            for name, logs in zip(
                ("first", "second", "ratio", "lo", "hi"), (*means, found.mean, found.lo, found.hi), strict=True
            )
        }
    return [
        {
            "layer": layer,
            "head": head,
            **{name: values[at] for name, values in shown.items()},
            "n": int(found.n[at]),
            "p": p[at],
            "p_adjusted": adjusted[at],
        }
        for at, (layer, head) in enumerate(places)
        if found.n[at]
    ]


def _of(folder: Folder) -> bool:
    return bool(readouts_of(folder.measured)) and bool(_compared(folder.study))


def _exported(folders: Folders, chosen: Chosen) -> Iterator[str]:
    if len(folders) < 2:
        return
    for folder in folders:
        if _measured(folder) != "refused" and _of(folder):
            yield request_text("between", folder=folder.number)
            for condition in _compared(folder.study):
                yield request_text("between", condition=condition, folder=folder.number)
    for pair in _turned_pairs(folders):
        for condition in pair.get("conditions", ()):
            yield request_text("between/heads", answers=pair["answers"], condition=condition, heads=pair["heads"])


VIEW = View(
    "Between folders",
    {"between": _between, "between/heads": _heads, "between/pair": _pair},
    of=_of,
    exported=_exported,
)
