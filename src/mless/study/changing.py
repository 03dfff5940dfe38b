"""Cuts and patches of conditions: what is refused before anything is loaded, and how a group's forwards run with them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mless.changes import ANSWER, Cut, Patch
from mless.errors import BadStudy
from mless.values import Condition, Prompt, numbers_of

if TYPE_CHECKING:
    from mless.models import LoadedModel


def check_changes(conditions: Sequence[Condition], layers: int, heads: int, *, answer: bool) -> None:
    """Refuse layers and heads that the model lacks, and answers where none follow the prompts."""
    for condition in conditions:
        for what, one in (*(("cut", one) for one in condition.cut), *(("patch", one) for one in condition.patch)):
            where = f"condition {condition.name!r}, {what}: "
            try:
                numbers_of(one.layers, layers, "layer")
                if one.heads is not None:
                    numbers_of(one.heads, heads, "head")
            except BadStudy as fault:
                raise BadStudy(f"{where}{fault}") from None
            named = (one.queries, one.keys) if isinstance(one, Cut) else (one.at,)
            if not answer and any(ANSWER in names for names in named):
                raise BadStudy(
                    f"{where}it names the answer, but only prompts are read here and nothing follows them; use mless run likelihood, or leave answer out"
                )


def check_prompts(conditions: Sequence[Condition], prompts: Mapping[str, Sequence[Prompt]], *, answer: bool) -> None:
    """Refuse cuts and patches that mean nothing in one of the prompts."""
    if not any(one.cut or one.patch for one in conditions):
        return
    from mless.capture.cutting import check_cuts
    from mless.capture.pairing import check_patch

    for condition in conditions:
        for number, prompt in enumerate(prompts[condition.name]):
            if condition.cut:
                check_cuts(condition.cut, prompt, answer=answer)
            for patch in condition.patch:
                check_patch(patch, prompt, prompts[patch.source][number], answer=answer)


def refuse_put_in(conditions: Sequence[Condition], prompts: Mapping[str, Sequence[Prompt]], why: str) -> None:
    """Refuse patches that put a filler's keys into a prompt without it."""
    from mless.capture.pairing import inserts

    for condition in conditions:
        for patch in condition.patch:
            if inserts(patch, prompts[condition.name][0], prompts[patch.source][0]):
                raise BadStudy(
                    f"condition {condition.name!r} puts the filler's keys and values into a prompt without it, which {why}; leave it out of --conditions, and "
                    "use mless run likelihood for it"
                )


def refuse_several_softmaxes(conditions: Sequence[Condition], purpose: str) -> None:
    """Refuse cuts after which the heads of a layer do not all attend by one plain softmax."""
    for condition in conditions:
        if any(one.heads is not None or one.to == "sink" for one in condition.cut):
            raise BadStudy(
                f"condition {condition.name!r} cuts some heads only, or sends weight to the sink, which leaves no single softmax {purpose}; cut all heads "
                'with to = "rest", or use mless run likelihood'
            )


def prove_changes(
    model: LoadedModel, conditions: Sequence[Condition], prompts: Mapping[str, Sequence[Prompt]]
) -> dict[str, Any]:
    """Every condition's cuts and patches, proved on this model; empty where there are none."""
    from mless.intervening import prove_cuts, prove_patches

    found: dict[str, Any] = {}
    for condition in conditions:
        if cuts := loaded_cuts(condition, model):
            found[f"cuts of {condition.name}"] = prove_cuts(model.model, cuts, prompts[condition.name][0])
    # All at once: there may be hundreds.
    patches = {patch: condition.name for condition in conditions for patch in loaded_patches(condition, model)}
    if patches:
        first = prompts[next(iter(patches.values()))][0]
        found["patches"] = prove_patches(model.model, list(patches), first)
    return found


def loaded_cuts(condition: Condition, model: LoadedModel) -> list[Cut]:
    """The condition's cuts in the layers that are loaded. Layers after the last measured one change nothing that is measured."""
    return [replace(one, layers=layers) for one in condition.cut if (layers := _loaded(one, model))]


def loaded_patches(condition: Condition, model: LoadedModel) -> list[Patch]:
    return [replace(one, layers=layers) for one in condition.patch if (layers := _loaded(one, model))]


def _loaded(one: Cut | Patch, model: LoadedModel) -> str:
    if one.layers == "all":
        return "all"
    return ",".join(
        str(layer) for layer in numbers_of(one.layers, model.layers, "layer") if layer <= model.loaded_layers
    )


@contextmanager
def changed(
    model: LoadedModel,
    condition: Condition,
    prompts: Sequence[Prompt],
    sources: Sequence[Prompt],
    of_source: Condition | None,
) -> Generator[None]:
    """Inside the block one forward of these prompts, in this order, runs with the condition's cuts and patches.

    `sources`: the same items' prompts under the condition that the patches take their values from. They run here first.
    """
    from mless.capture.cutting import cut_attached
    from mless.capture.patching import patch_attached, places_of, record_prompts

    cuts, patches = loaded_cuts(condition, model), loaded_patches(condition, model)
    with ExitStack() as stack:
        runs: list[Any] = []
        if patches and of_source is not None:
            with ExitStack() as first:
                if theirs := loaded_cuts(of_source, model):
                    first.enter_context(cut_attached(model, theirs, sources, answer=False))
                runs = record_prompts(model, places_of(model.model, patches), sources)
        if cuts:
            stack.enter_context(cut_attached(model, cuts, prompts, answer=False))
        if patches:
            stack.enter_context(patch_attached(model, patches, prompts, runs, answer=False))
        yield
