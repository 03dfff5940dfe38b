"""Which heads of which layers of which folder a figure shows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mless.errors import BadStudy
from mless.results.reading import StoredResults
from mless.values import FigureSpec, matched_models, parse_numbers

MOST_SHIFTED = "most-shifted:3"


@dataclass(frozen=True, slots=True)
class ChosenPanel:
    """One head of one layer, in the folder it is read from."""

    folder: StoredResults
    layer: int
    head: int


def choose_panels(
    spec: FigureSpec, folders: Sequence[StoredResults], *, layer: int | None, heads: str | None
) -> list[ChosenPanel]:
    """The published panels on the given folders, with the layer and heads the user asks for in their place."""
    chosen: list[ChosenPanel] = []
    for folder, pairs in zip(folders, _published(spec, folders), strict=True):
        folder.need_conditions(spec.conditions)
        captured = folder.captured()
        layers = [layer] if layer is not None else list(dict.fromkeys(pair[0] for pair in pairs)) or [1]
        for wanted in layers:
            folder.need_layer(wanted, captured)
        asked = heads if heads is not None or pairs else MOST_SHIFTED
        if asked is None:
            pairs = list(dict.fromkeys((layer if layer is not None else own, head) for own, head in pairs))
        elif spec.kind == "layers":  # the same heads in every layer, so that the layers can be compared
            pairs = [(own, head) for head in _heads(asked, folder, spec, layers[0]) for own in layers]
        else:
            pairs = [(own, head) for own in layers for head in _heads(asked, folder, spec, own)]
        for own, head in pairs:
            folder.need_head(own, head, captured)
            chosen.append(ChosenPanel(folder, own, head))
    return chosen


def _published(spec: FigureSpec, folders: Sequence[StoredResults]) -> list[list[tuple[int, int]]]:
    """For each folder the (layer, head) pairs published for the model it stands for."""
    models = list(dict.fromkeys(panel.model for panel in spec.panels))
    if not models:
        return [[] for _ in folders]
    names = [[folder.label, str(folder.model.get("name", ""))] for folder in folders]
    return [
        [(panel.layer, panel.head) for panel in spec.panels if panel.model == model]
        for model in matched_models(models, names)
    ]


def _heads(asked: str, folder: StoredResults, spec: FigureSpec, layer: int) -> list[int]:
    shifted = re.fullmatch(r"\s*most-shifted(?::(\d+))?\s*", asked)
    if shifted is None:
        highest = int(folder.model.get("heads") or 0) or max(max(found) for found in folder.captured().values())
        try:
            return parse_numbers(asked, highest, "head")
        except BadStudy as fault:
            raise BadStudy(f"{fault}; or --heads {MOST_SHIFTED}") from None
    count = int(shifted[1] or 3)
    if count < 1:
        raise BadStudy(f"--heads {asked.strip()}: ask for at least one head, such as {MOST_SHIFTED}")
    condition = next((name for name in spec.conditions if folder.conditions[name].get("kind") != "none"), None)
    if condition is None:
        raise BadStudy(
            f"--heads {asked.strip()} compares with filler, but figure {spec.id} shows no condition with filler"
        )
    shift = {
        int(row["head"]): abs(math.log(row["retained"]))
        for row in folder.retained("original")
        if row["condition"] == condition and row["layer"] == layer and row["head"] and (row["retained"] or 0) > 0
    }
    if not shift:
        raise BadStudy(
            f"--heads {asked.strip()}: {folder.path} holds no retained share for layer {layer} of condition {condition!r}; "
            f"name the heads instead, such as --heads 1,2"
        )
    return sorted(sorted(shift, key=lambda head: (-shift[head], head))[:count])
