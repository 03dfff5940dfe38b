"""The same item elsewhere: from a prompt's attention to its answer and back, in one folder or in another of the same model and task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mless.errors import MlessError
from mless.explorer.folders import Folder, Folders
from mless.explorer.head import furthest_head
from mless.results.comparing import asked_of, differences
from mless.results.escaping import visible
from mless.results.reading import StoredStudy

#: What is the same in two studies of one model. The fingerprint is of the tensors that a study read, and answers need more of them than
#: attention does.
_MODEL = ("name", "revision", "family", "layers", "heads", "parameters")
#: A folder that differs in one of these holds another item under the same id.
_OTHER_ITEM = ("task", "questions or answers")
#: Each folder may have more items than the other, and its own seed.
_OWN = ("items", "seed")


def unlike_models(first: StoredStudy, second: StoredStudy) -> list[str]:
    """In which facts the models of two studies differ; none for one model."""
    both = {name: (first.model.get(name), second.model.get(name)) for name in _MODEL}
    if None in both["parameters"]:  # older folders do not say how many
        del both["parameters"]
    return [name for name, (mine, theirs) in both.items() if mine != theirs]


def unlike_prompts(first: StoredStudy, second: StoredStudy, condition: str) -> dict[str, str]:
    """What two studies asked otherwise under a condition, in words."""
    found = differences(asked_of(first, [condition]), asked_of(second, [condition]))
    return {name: words for name, words in found.items() if name not in _OWN}


def answers_beside(folders: Folders, folder: Folder, item: str, condition: str) -> list[dict[str, Any]]:
    """Where the answer to an item is that a strip is of."""
    return list(_beside(folders, folder, item, condition, lambda one: one.has("answers", "accuracy")))


def strips_beside(folders: Folders, folder: Folder, item: str, condition: str) -> list[dict[str, Any]]:
    """Where the strip of an item is that an answer is of: in the head that the condition shifts most."""
    found: list[dict[str, Any]] = []
    for one in _beside(
        folders, folder, item, condition, lambda one: one.has("attention", "prompts", "retained", "shares")
    ):
        other: Folder = folders[one["folder"] - 1]
        if (place := furthest_head(other, condition)) is not None:
            number = other.study.items.index(item) + 1
            found.append(one | {"layer": place[0], "head": place[1], "item": number})
    return found


def _beside(
    folders: Folders, folder: Folder, item: str, condition: str, wanted: Callable[[Folder], bool]
) -> Iterator[dict[str, Any]]:
    for other in folders:
        try:
            if not other.about().get("complete", True) or not wanted(other):
                continue
            if item not in other.study.items or condition not in other.study.conditions:
                continue
            differs = folder.kept(
                ("beside", other.number, other.state(), condition),
                lambda other=other: _differs(folder, other, condition),
            )
        except MlessError:  # the start page says what is wrong with it
            continue
        if differs is not None:
            yield {
                "folder": other.number,
                "name": visible(other.name, keep=""),
                "condition": condition,
                "differs": differs,
            }


def _differs(first: Folder, other: Folder, condition: str) -> list[str] | None:
    """What the two studies asked otherwise; None where an item of one is not an item of the other."""
    if other.number == first.number:
        return []
    if unlike_models(first.study, other.study):
        return None
    found = unlike_prompts(first.study, other.study, condition)
    return None if set(found) & set(_OTHER_ITEM) else [visible(words, keep="") for words in found.values()]
