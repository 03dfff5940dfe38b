"""The strip: one prompt's own text, each token with what it receives, without and with filler, beside the two yardsticks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mless.explorer.asking import NotThere, Query, numbers, request_text
from mless.explorer.beside import answers_beside
from mless.explorer.folders import Folder, Folders
from mless.explorer.head import asked_head, heads_shown
from mless.explorer.questions import prompt_of
from mless.explorer.slices import READERS, Tokens, even, received, tokens_of
from mless.explorer.views import Chosen, View
from mless.prompting import align
from mless.results.escaping import visible
from mless.results.wording import random_is_yardstick
from mless.values import SPAN_NAMES


def _strip(query: Query) -> Mapping[str, Any]:
    folder, condition, layer, head, queries = asked_head(query)
    if not folder.has("attention", "prompts"):
        raise NotThere(f"{folder.name} holds no attention by token and prompts, so it has no strips")
    study = folder.study
    number = query.whole("item", 1, len(study.items))
    item = study.items[number - 1]
    tokens = _need(tokens_of(folder, condition, item), folder, condition, item)
    plain = _need(tokens_of(folder, "none", item), folder, "none", item)
    # Refused where the original tokens are not the same: arbitrary edits change them.
    places, length = align(plain.prompt, tokens.prompt), len(tokens.texts)
    beside = random_is_yardstick(condition, study.conditions)
    # Each reading decodes a row group of its own, so they run side by side.
    reads = {
        name: READERS.submit(received, folder, name, number, layer, head, queries)
        for name in (condition, "none", *(["random"] if beside else []))
    }
    spreads = {name: READERS.submit(even, folder, name, number, layer, queries) for name in (condition, "none")}
    own = {name: one.result() for name, one in reads.items()}
    spread = {name: one.result() for name, one in spreads.items()}
    values = {
        "with": own[condition],
        "without": _moved(own["none"], places, length),
        "even_with": spread[condition],
        "even_without": _moved(spread["none"], places, length),
        "text": None,
    }
    if beside and (text := own["random"]) is not None:
        natural = _need(tokens_of(folder, "random", item), folder, "random", item)
        values["text"] = _moved(text[align(plain.prompt, natural.prompt)], places, length)
    return {
        "item": visible(item, keep=""),
        "number": number,
        "items": len(study.items),
        "tokens": [_written(text) for text in tokens.texts],
        "breaks": [at for at, text in enumerate(tokens.texts) if "\n" in text],
        "spans": tokens.spans,
        "span_names": list(SPAN_NAMES),
        "prompt": prompt_of(folder, condition),
        "answers": answers_beside(query.folders, folder, item, condition),
        "id": item,
        "values": {name: None if one is None else numbers(one, 4) for name, one in values.items()},
    }


def _need(found: Tokens | None, folder: Folder, condition: str, item: str) -> Tokens:
    if found is None:
        raise NotThere(f"{folder.name} holds no prompt of item {item[:60]!r} under {condition[:60]!r}")
    return found


def _moved(values: Any, places: Any, length: int) -> Any:
    """Values of the original tokens at their places among all tokens."""
    if values is None:
        return None
    found = np.full(length, np.nan)
    found[places] = values
    return found


def _written(text: str) -> str:
    """A token as it is shown: every sign can be seen, a blank stays a blank."""
    return visible(text, keep="") or "∅"


# ---- what an export holds --------------------------------------------------------------------------------------------


def _exported(folders: Folders, chosen: Chosen) -> Iterable[str]:
    for folder in folders:
        if not folder.has("attention", "prompts"):
            continue
        for condition, layer, head in heads_shown(folder, chosen):
            for item in chosen.items.get(folder.number, ()):
                yield request_text(
                    "strip",
                    folder=folder.number,
                    condition=condition,
                    layer=layer,
                    head=head,
                    item=item,
                    queries="original",
                )


VIEW = View("Strip", {"strip": _strip}, exported=_exported)
