"""What an accuracy study asks: a request for every item, condition and sample. What cannot be asked or compared is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mless import stats, tasks
from mless.changes import ANSWER
from mless.engines import ENGINES
from mless.engines.base import Changes, Request
from mless.errors import BadData, BadStudy
from mless.gates import check_count
from mless.limits import ANSWERS
from mless.prompting import build_messages, shared_beginning
from mless.study.bench import Bench
from mless.study.identity import digest
from mless.study.spec import AccuracyTable, StudySpec
from mless.values import Condition, Item, Prompt

#: A shared beginning shorter than this is not computed separately.
_WORTH_SHARING = 16

#: By condition and item (numbered from 0), the requests of its samples.
Requests = dict[tuple[str, int], list[Request]]


def write_requests(bench: Bench, settings: AccuracyTable) -> Requests:
    """From prompts as token ids, or from conversations in text where there is no tokenizer."""
    found: Requests = {}
    for condition in bench.conditions:
        if bench.prompts is not None:
            for number, prompt in enumerate(bench.prompts[condition.name]):
                changes = _changes(bench, condition, number)
                found[condition.name, number] = _of_prompt(bench.spec, settings, condition, prompt, changes)
            continue
        sentences = tasks.filler_sentences()
        spec = bench.spec
        conversations = build_messages(
            bench.items,
            condition,
            system=spec.system,
            seed=spec.seed,
            sentences=sentences,
            one_turn=spec.prompt == "user",
        )
        for number, (item, messages) in enumerate(zip(bench.items, conversations, strict=True)):
            found[condition.name, number] = [
                Request(
                    condition.name,
                    item.id,
                    sample,
                    _seed(spec, condition, item.id, sample),
                    messages=messages,
                    arm=condition.arm,
                )
                for sample in range(samples_of(settings, condition))
            ]
    return found


def _changes(bench: Bench, condition: Condition, number: int) -> Changes | None:
    """The condition's cuts and patches for one item's prompt, and the prompt of the run that patches take their values from."""
    if not (condition.cut or condition.patch):
        return None
    prompt = bench.prompts_of(condition.name)[number]
    if not condition.patch:
        return Changes(prompt, condition.cut)
    source = next(one for one in bench.conditions if one.name == condition.patch[0].source)
    return Changes(prompt, condition.cut, condition.patch, bench.prompts_of(source.name)[number], source.cut)


def _of_prompt(
    spec: StudySpec, settings: AccuracyTable, condition: Condition, prompt: Prompt, changes: Changes | None
) -> list[Request]:
    shared = shared_beginning(prompt, condition)
    return [
        Request(
            condition.name,
            prompt.item,
            sample,
            _seed(spec, condition, prompt.item, sample),
            token_ids=prompt.token_ids,
            shared=shared if shared >= _WORTH_SHARING and condition.arm is None else 0,
            arm=condition.arm,
            position_ids=prompt.position_ids,
            hidden=prompt.hidden_filler,
            changes=changes,
        )
        for sample in range(samples_of(settings, condition))
    ]


def digest_of(requests: Requests) -> str:
    """A digest of all that is asked: a template may write today's date."""
    return digest([_rendered(request) for rows in requests.values() for request in rows])


def _rendered(request: Request) -> list[Any]:
    drawn = [request.key, request.seed, request.token_ids, request.messages, request.position_ids, request.hidden]
    drawn += [] if request.arm is None else [asdict(request.arm)]
    return drawn if request.changes is None else [*drawn, _changed(request.changes)]


def _changed(changes: Changes) -> list[Any]:
    """What is cut and put in, and which tokens these are."""
    source = changes.source
    taken = None if source is None else [source.token_ids, source.position_ids, source.span_ids]
    said = [[one.words() for one in some] for some in (changes.cut, changes.patch, changes.source_cut)]
    return [changes.prompt.span_ids, said, taken]


def samples_of(settings: AccuracyTable, condition: Condition) -> int:
    """How many answers an item gets."""
    return condition.samples or settings.samples


def _seed(spec: StudySpec, condition: Condition, item: str, sample: int) -> int:
    """A function of study seed, item and sample. All conditions share it; the A/A control has a seed of its own."""
    text = f"{spec.seed}/{'again' if condition.again else 'first'}/{item}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# ---- what is refused before anything is drawn ------------------------------------------------------------------------


def check_conditions(conditions: Sequence[Condition], settings: AccuracyTable) -> None:
    """Refuse what cannot be compared, before any answer is drawn."""
    kind = ENGINES.get(settings.engine)
    controls = [condition for condition in conditions if condition.again]
    if len(controls) > 1:
        raise BadStudy(
            f"one A/A control expected, got {', '.join(one.name for one in controls)}; leave out all but one, none-again with "
            "--set accuracy.again=false"
        )
    if all(condition.name == "none" or condition.again for condition in conditions):
        raise BadStudy(
            "answers are compared with those of none, and no other condition is asked for; add one, as --conditions none,mless"
        )
    for condition in controls:
        if condition.samples is not None:
            raise BadStudy(
                f"condition {condition.name!r} is none once more (again = true), so it cannot vote; take away its samples = {condition.samples}"
            )
    for condition in conditions:
        kind.check_arm(condition)
        kind.check_changes(condition, settings.engine)
        _check_patches(condition, {one.name: one for one in conditions})
        samples = samples_of(settings, condition)
        if samples > 1 and settings.decoding(condition.temperature).greedy:
            raise BadStudy(
                f"condition {condition.name!r}: {samples} samples at temperature 0 are all the same answer; give it a temperature above 0, as "
                f"--set condition.{condition.name}.temperature=0.7"
            )


def _check_patches(condition: Condition, there: Mapping[str, Condition]) -> None:
    """Refuse patches of what is not there before an answer is drawn."""
    for patch in condition.patch:
        if ANSWER in patch.at:
            raise BadStudy(
                f"condition {condition.name!r}: a patch names at = 'answer', but answers are drawn, and another run's has other tokens; leave it out of at, "
                "or use mless run likelihood, where both runs have the same"
            )
        hides = next((one for one in (condition, there[patch.source]) if one.hidden), None)
        if hides is not None:
            raise BadStudy(
                f"condition {condition.name!r} takes values from another run, which cannot be joined with hidden filler ({hides.name}); use a cut instead: "
                '{ queries = "original,answer", keys = "filler" }'
            )


def check_amount(conditions: Sequence[Condition], items: Sequence[Item], settings: AccuracyTable) -> None:
    """Refuse more answers than fit into memory, before any is asked for."""
    asked = len(items) * sum(samples_of(settings, condition) for condition in conditions)
    check_count(asked, "answers, items × conditions × samples", ANSWERS, BadStudy)


def check_split(items: Sequence[Item], settings: AccuracyTable, seed: int) -> None:
    """Refuse a split with an empty side, before any answer is drawn."""
    try:
        stats.split_items([item.cluster or item.id for item in items], settings.dev_share, seed)
    except BadStudy as fault:
        raise BadStudy(f"{fault}, or do without the split: --set accuracy.dev_share=0") from None


def check_answers(items: Sequence[Item], spec: StudySpec) -> None:
    missing = [item.id for item in items if item.answer is None or not item.answer.strip()]
    if len(missing) == len(items):
        raise BadData(
            f"{spec.data!r} has no answers to judge by; say which field holds them: --answer-field NAME, or use a task with answers, as arithmetic"
        )
    if missing:
        raise BadData(
            f"{spec.data!r}: {len(missing)} of {len(items)} items have no answer (first: {missing[0]!r}); fill them in, or remove those items"
        )


def check_room(prompts: Sequence[Prompt], settings: AccuracyTable, context: int | None, label: str) -> None:
    """No prompt is too long for the model with its answer."""
    for prompt in prompts:
        room = None if context is None else context - prompt.reach
        if room is not None and settings.max_new_tokens > room:
            way = f"use --max-new-tokens {room} or fewer, or leave that item out" if room > 0 else "leave that item out"
            raise BadStudy(
                f"item {prompt.item!r} is {prompt.reach} tokens under {prompt.condition!r} and may be answered with {settings.max_new_tokens}, but "
                f"{label} takes {context} in all; {way}"
            )
