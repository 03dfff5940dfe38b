"""The prompts of a study: every item under every condition, as token ids."""

from __future__ import annotations

from typing import Any

from mless import tasks
from mless.prompting import build_prompts, resolve_kind, with_filler_ids
from mless.study.bench import Bench, Measurement, Written
from mless.study.changing import check_prompts
from mless.study.subject import Subject, check_pairs, check_prompt, check_questions


def write_prompts(measurement: Measurement, bench: Bench, subject: Subject) -> Written:
    """Every condition's prompts as token ids; None where there is no tokenizer and a server gets text."""
    spec = bench.spec
    if subject.tokenizer is None:
        return Written("text", None, bench.conditions)
    kind = resolve_kind(spec.prompt, subject.tokenizer, subject.label)
    check_questions(subject.tokenizer, subject.context, subject.label, bench.items)
    sentences = tasks.filler_sentences()
    rendered: dict[Any, Any] = {}
    prompts = {
        condition.name: list(
            build_prompts(
                subject.tokenizer,
                bench.items,
                condition,
                kind=kind,
                system=spec.system,
                seed=spec.seed,
                sentences=sentences,
                rendered_before=rendered,
            )
        )
        for condition in bench.conditions
    }
    if measurement.pairs_tokens:
        check_pairs(prompts)
    check_prompts(bench.conditions, prompts, answer=measurement.reads_answers)
    if subject.loaded is not None:
        for rows in prompts.values():
            for prompt in rows:
                check_prompt(subject.loaded, prompt)
    return Written(kind, prompts, with_filler_ids(subject.tokenizer, bench.conditions, sentences))
