"""Answers of a model with cuts and patches: those of a plain loop without a cache, whatever runs beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_answerers import answering, ids_of

import mless
from mless.capture.cutting import cut_attached
from mless.capture.patching import patch_attached, places_of, record_prompts
from mless.changes import Cut, Patch
from mless.engines import cuts as cuts_module
from mless.engines.base import Changes, Decoding, Request, Way, by_way
from mless.engines.hf import HfEngine
from mless.errors import BadPrompt, BadStudy, EngineFault, ProofFailed, UnsupportedArchitecture
from mless.models import LoadedModel
from mless.redistribution import attached
from mless.values import ArmSettings, Prompt, Span, SpanName

#: Beyond every window; prefilled in chunks of 32.
PARTS: tuple[tuple[SpanName, int], ...] = (
    ("start", 2),
    ("system", 9),
    ("filler", 12),
    ("question", 14),
    ("end", 3),
)
#: Shorter than a prompt, and long enough to see the filler from its end.
WINDOW = {family: {"sliding_window": 30} for family in ("mistral", "gemma2", "gemma3_text", "gpt_oss")}
CUTS = {
    "answer": [Cut("answer", "filler")],
    "nobody": [Cut("original,answer", "filler")],
    "late": [Cut("question,end", "filler", layers="2-"), Cut("answer", "system", layers="1")],
    "generated": [Cut("answer", "answer", layers="2")],
    "head": [Cut("question,answer", "filler", heads="2"), Cut("answer", "question", heads="3-", layers="1,3")],
    "sink": [Cut("end,answer", "filler", to="sink"), Cut("answer", "question", layers="2", to="sink", heads="1,4")],
}


def prompt_of(item: int, *, filler: bool = True, more: int = 0) -> Prompt:
    spans: list[Span] = []
    ids: list[int] = []
    for number, (name, size) in enumerate(PARTS):
        if name == "filler" and not filler:
            continue
        size += more if name == "question" else 0
        # The filler and what comes before it are the same for all items.
        ids += ids_of(size, number + (10 * (item + 1) if number > 2 else 0))
        spans.append(Span(name, len(ids) - size, len(ids)))
    return Prompt(str(item), "mless" if filler else "none", tuple(ids), tuple(spans), "")


def moved(prompt: Prompt) -> Prompt:
    """The prompt without the filler, at the positions with it."""
    without = prompt_of(int(prompt.item), filler=False, more=len(prompt) - sum(size for _, size in PARTS))
    return replace(without, condition="position-only", position_ids=tuple(prompt.original))


def asked(prompts: Sequence[Prompt], condition: str = "cut", **changes: Any) -> list[Request]:
    return [
        Request(
            condition,
            one.item,
            0,
            int(one.item),
            one.token_ids,
            shared=11,
            position_ids=one.position_ids,
            changes=Changes(one, **changes) if changes else None,
        )
        for one in prompts
    ]


def greedy(engine: HfEngine, requests: Sequence[Request], new: int = 6, live: int | None = None) -> dict[str, Any]:
    return {reply.item: reply.token_ids for reply in engine.generate(requests, Decoding(new), live=live)}


def by_hand(
    model: LoadedModel, prompt: Prompt, new: int, changed: AbstractContextManager[Any] | None = None
) -> tuple[int, ...]:
    """A greedy answer by the model's own forward, all of it again for each token."""
    ids = list(prompt.token_ids)
    with changed or nullcontext(), torch.inference_mode():
        for _ in range(new):
            given = {"input_ids": torch.tensor([ids], device=model.device)}
            if prompt.position_ids is not None:
                last = prompt.position_ids[-1]
                positions = [*prompt.position_ids, *range(last + 1, last + 1 + len(ids) - len(prompt))]
                ones = torch.ones(1, len(ids), device=model.device)
                given |= {"position_ids": torch.tensor([positions], device=model.device), "attention_mask": ones}
            ids.append(int(model.model(**given, use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in CUTS),
        *((family, name) for family in ("mistral", "gemma2", "gpt_oss") for name in ("late", "sink", "head")),
        *((family, "late") for family in ("qwen3", "gemma3_text", "gpt2", "gpt_neox", "qwen3_moe")),
    ],
)
def test_greedy_answers_are_those_of_a_plain_loop_under_the_cut(family: str, name: str) -> None:
    model = answering(family, **WINDOW.get(family, {}))
    prompts = [prompt_of(0), prompt_of(1, more=20), prompt_of(2)]
    with HfEngine(model, length=80, slots=3) as engine:
        found = greedy(engine, asked(prompts, cut=tuple(CUTS[name])))
        plain = greedy(engine, asked(prompts, "mless"))
    for prompt in prompts:
        with mless.cut(model, *CUTS[name], prompts=prompt):
            assert found[prompt.item] == by_hand(model, prompt, 6), prompt.item
    assert found != plain


PATCHES = {
    "residual": [Patch("residual", layers="2")],
    "attention": [Patch("attention-output", layers="1", at="question,end"), Patch("attention-output", "3", heads="2")],
    "mlp": [Patch("mlp-output", layers="1-2", at="question"), Patch("mlp-activation", layers="3", at="original")],
    "keys": [Patch("keys-values", layers="2", at="question")],
    "put-in": [Patch("keys-values", at="filler")],
    "put-in-late": [Patch("keys-values", layers="2-", at="filler"), Patch("mlp-output", layers="1", at="question,end")],
}


def patched(model: LoadedModel, prompt: Prompt, source: Prompt, *patches: Patch) -> AbstractContextManager[Any]:
    runs = record_prompts(model, places_of(model.model, patches), [source])
    return mless.patch(model, *patches, prompts=prompt, runs=runs)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in PATCHES),
        *((family, "attention") for family in ("qwen3", "gemma3_text", "gpt_oss")),
        *((family, "residual") for family in ("gpt2", "qwen3_moe")),
        ("mistral", "keys"),
        ("gpt_oss", "put-in"),
    ],
)
def test_greedy_answers_are_those_of_a_plain_loop_under_the_patch(family: str, name: str) -> None:
    """Both ways of a patch: into a prompt without filler, and where positions must agree into one moved on."""
    model = answering(family, **({"sliding_window": 80} if (family, name) == ("gpt_oss", "put-in") else {}))
    sources = [prompt_of(0), prompt_of(1, more=20), prompt_of(2)]
    at_positions = any(one.part == "keys-values" for one in PATCHES[name])
    prompts = [
        moved(one) if at_positions else prompt_of(n, filler=False, more=20 * (n == 1)) for n, one in enumerate(sources)
    ]
    requests = [
        replace(request, changes=replace(request.changes, source=source))
        for request, source in zip(asked(prompts, patch=tuple(PATCHES[name])), sources, strict=True)
    ]
    with HfEngine(model, length=80, slots=2) as engine:
        found = greedy(engine, requests)
        plain = greedy(engine, asked(prompts, "none"))
        assert engine.self_check(requests, tokens=3)["forward"] < 1e-3
    for prompt, source in zip(prompts, sources, strict=True):
        with patched(model, prompt, source, *PATCHES[name]):
            assert found[prompt.item] == by_hand(model, prompt, 6), prompt.item
    assert found != plain


def test_the_embedded_model_under_a_cut_and_a_patch() -> None:
    model = mless.load("smollm2", head=True, dtype="float32", device="cpu")
    how = {"prompt": "raw", "length": 9, "system": "Answer briefly."}
    (source,), (prompt,) = (
        mless.prompts(model, ["Count on: one, two, three, four,"], name, **how) for name in ("mless", "none")
    )
    cut = (Cut("answer", "filler"), Cut("question", "filler", layers="5-12", heads="1-4"))
    patch = (Patch("attention-output", layers="2"), Patch("mlp-output", layers="1", at="question"))
    requests = [
        Request("cut", "1", 0, 0, source.token_ids, changes=Changes(source, cut)),
        Request("patch", "1", 0, 0, prompt.token_ids, changes=Changes(prompt, (), patch, source)),
    ]
    with HfEngine(model, length=len(source) + 2, slots=2) as engine:
        found = named(engine, requests, max_new_tokens=2)
    # Not through the doors, which prove all layers first.
    with cut_attached(model, cut, [source]):
        assert found[requests[0].key] == by_hand(model, source, 2)
    runs = record_prompts(model, places_of(model.model, patch), [source])
    with patch_attached(model, patch, [prompt], runs):
        assert found[requests[1].key] == by_hand(model, prompt, 2)


def test_everything_put_in_gives_the_other_conditions_answers_and_a_cut_source_its_own() -> None:
    model = answering("llama")
    sources, prompts = [prompt_of(n) for n in range(3)], [prompt_of(n, filler=False) for n in range(3)]
    everything, cut = (Patch("residual", at="question,end"), Patch("keys-values", at="filler")), tuple(CUTS["nobody"])
    filler_keys = [
        Request(
            "in",
            one.item,
            0,
            0,
            one.token_ids,
            position_ids=one.position_ids,
            changes=Changes(one, (), everything, source),
        )
        for one, source in zip(map(moved, sources), sources, strict=True)
    ]
    last = (Patch("residual", layers="3", at="end"),)
    of_cut = [
        Request("of-cut", one.item, 0, 0, one.token_ids, changes=Changes(one, (), last, source, cut))
        for one, source in zip(prompts, sources, strict=True)
    ]
    with HfEngine(model, length=80, slots=4) as engine:
        assert greedy(engine, filler_keys) == greedy(engine, asked(sources, "mless"))
        # The first token is that of the cut run: the last layer's last token is taken from it.
        firsts = {item: made[0] for item, made in greedy(engine, of_cut, new=1).items()}
        wanted = greedy(engine, asked(sources, cut=cut), new=1)
    assert firsts == {item: made[0] for item, made in wanted.items()}


# ---- nobody's answer depends on the others -----------------------------------------------------------------------------


def company() -> list[Request]:
    """Requests of many kinds, with prompts of several lengths."""
    found: list[Request] = []
    for n in range(5):
        source, prompt = prompt_of(n, more=7 * (n % 4)), prompt_of(n, filler=False, more=7 * (n % 4))
        found += asked([source], "mless")
        found += asked([source], "cut", cut=tuple(CUTS["late"]))
        found += asked([source], "sink", cut=tuple(CUTS["sink"]))
        found += asked(
            [prompt], "patched", cut=(Cut("answer", "system", layers=2),), patch=tuple(PATCHES["mlp"]), source=source
        )
    return found


def named(engine: HfEngine, requests: Sequence[Request], live: int | None = None, **decoding: Any) -> dict[Any, Any]:
    asked_for = Decoding(**{"max_new_tokens": 5} | decoding)
    return {reply.key: reply.token_ids for reply in engine.generate(requests, asked_for, live=live)}


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_alone_together_shuffled_and_resumed(how: dict[str, Any]) -> None:
    model, requests = answering("qwen2"), company()
    with HfEngine(model, length=80, slots=8) as engine:
        together = named(engine, requests, **how)
        assert len(together) == 20
        assert len(set(together.values())) > 14
        for request in requests[5:8]:
            assert named(engine, [request], **how) == {request.key: together[request.key]}
        mixed = random.Random(1).sample(requests, 20)
        assert named(engine, mixed, live=3, **how) == together
        replies = engine.generate(mixed, Decoding(5, **how))
        done = {reply.key: reply.token_ids for reply in (next(replies) for _ in range(9))}
        replies.close()
        left = [request for request in mixed if request.key not in done]
        assert done | named(engine, left, **how) == together


def test_logits_have_the_same_bits_alone_and_together_and_without_changes_those_of_before() -> None:
    model, requests = answering("llama"), company()
    plain = [request for request in requests if request.changes is None]
    with HfEngine(model, length=80, slots=8) as engine:
        before = engine._trace(plain[:3], 4)
        told = engine.self_check(requests, tokens=3)
        assert told["prompts"] == 12  # three of each way
        assert told["forward"] < 1e-4
        assert all(map(torch.equal, engine._trace(plain[:3], 4), before))
        assert engine._layout.cuts is None
        assert engine._layout.labels is None


def test_several_samples_of_a_changed_run() -> None:
    """Self-consistency: each sample has its own draws, and the patched prompt is run once."""
    model = answering("llama")
    source, prompt = prompt_of(0), prompt_of(0, filler=False)
    (one,) = asked([prompt], "patched", patch=tuple(PATCHES["residual"]), source=source)
    samples = [replace(one, sample=n, seed=n) for n in range(6)]
    with HfEngine(model, length=80, slots=4) as engine:
        made = named(engine, samples, temperature=1.5)
        assert len(set(made.values())) > 3
        assert named(engine, samples[4:5], temperature=1.5) == {samples[4].key: made[samples[4].key]}


def test_an_answer_may_end_with_the_first_token_of_a_patched_prompt() -> None:
    model = answering("llama")
    requests = [request for request in company() if request.condition == "patched"]
    with HfEngine(model, length=80, slots=2) as engine:
        made = named(engine, requests)
        assert named(engine, requests, max_new_tokens=1) == {key: tokens[:1] for key, tokens in made.items()}
        first = made[requests[0].key][0]
        engine._ends = {first}
        found = list(engine.generate(requests, Decoding(5)))
    ended = {reply.key: reply for reply in found}
    assert len(ended) == 5
    assert ended[requests[0].key].finish == "stop"
    assert ended[requests[0].key].text == ""
    for key, reply in ended.items():
        stop = made[key].index(first) + 1 if first in made[key] else 5
        assert reply.token_ids == made[key][:stop]


def test_arm_and_a_cut_together() -> None:
    model, arm = answering("llama"), ArmSettings(fraction=0.4, p1=99.0, layers=(1, 3))
    prompts = [prompt_of(n) for n in range(3)]
    cut = tuple(CUTS["late"])
    both = [replace(one, arm=arm, condition="both") for one in asked(prompts, cut=cut)]
    with HfEngine(model, length=80, slots=4) as engine:
        found = greedy(engine, both)
        assert greedy(engine, both[1:2]) == {both[1].item: found[both[1].item]}
        assert found != greedy(engine, asked(prompts, cut=cut))
        assert found != greedy(engine, [replace(one, changes=None) for one in both])
    for request in both:
        ids = torch.tensor([[*request.token_ids, *found[request.item][:-1]]])
        with mless.cut(model, *cut, prompts=request.changes.prompt), attached(model.model, arm) as handle:
            handle.rows(seeds=torch.tensor([request.seed]))
            with torch.inference_mode():
                logits = model.model(input_ids=ids, use_cache=False).logits
        assert tuple(logits[0, len(request.token_ids) - 1 :].argmax(-1).tolist()) == found[request.item]


# ---- what is found and refused -----------------------------------------------------------------------------------------


def test_a_cut_that_a_step_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = cuts_module.labels_of
    monkeypatch.setattr("mless.engines.hf.labels_of", lambda rows, slots: own([one[:5] for one in rows], slots))
    with (
        HfEngine(answering("llama"), length=80, slots=4) as engine,
        pytest.raises(ProofFailed, match="decoding in slots gives other logits than the model's own forward"),
    ):
        engine.self_check(asked([prompt_of(0), prompt_of(1)], cut=tuple(CUTS["answer"])))


def test_keys_that_do_not_arrive_in_the_slots_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from mless.engines.slots import SlotCache

    own = SlotCache.write
    monkeypatch.setattr(SlotCache, "write", lambda self, row, held: own(self, row, [(k * 1.5, v) for k, v in held]))
    requests = [one for one in company() if one.condition == "patched"]
    with (
        HfEngine(answering("llama"), length=80, slots=4) as engine,
        pytest.raises(ProofFailed, match="decoding in slots gives other logits than the model's own forward"),
    ):
        engine.self_check(requests)


def test_requests_by_the_way_the_model_runs() -> None:
    arm, cut = ArmSettings(fraction=0.4), (Cut("answer", "filler"),)
    plain, changed = asked([prompt_of(0)], "mless"), asked([prompt_of(1)], cut=cut)
    armed = [replace(changed[0], arm=arm, condition="both")]
    assert by_way([*armed, *changed, *plain]) == {Way(): plain, Way(cut=cut): changed, Way(arm, cut): armed}


WITHOUT = prompt_of(0, filler=False)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cut": (Cut("answer", "filler"),)}, BadPrompt, "names keys = 'filler', but the prompt has no such span"),
    ({"cut": (Cut("answer", "original"),)}, BadPrompt, "the first of 'answer', nothing to see but itself"),
    ({"cut": (Cut("answer", "system", layers="9"),)}, BadStudy, "no layer 9"),
    ({"patch": (Patch("residual"),)}, EngineFault, "but no prompt of that run is given"),
    ({"patch": (Patch("residual", at="filler"),), "source": prompt_of(0)}, BadPrompt, "which is not in both prompts"),
    ({"patch": (Patch("residual"),), "source": prompt_of(1)}, BadPrompt, "do not hold the same original tokens"),
    ({"patch": (Patch("residual"),), "source": replace(prompt_of(0), hidden=True)}, BadStudy, "nor with hidden filler"),
]


@pytest.mark.parametrize(("changes", "error", "why"), BAD)
def test_changes_that_mean_nothing_are_refused(changes: dict[str, Any], error: type[Exception], why: str) -> None:
    with HfEngine(answering("llama"), length=80, slots=2) as engine, pytest.raises(error, match=why):
        list(engine.generate(asked([WITHOUT], **changes), Decoding(2)))


def test_what_slots_cannot_hold_is_refused() -> None:
    source = prompt_of(0)
    put_in = {"patch": tuple(PATCHES["put-in"]), "source": source}
    with HfEngine(answering("mistral"), length=80, slots=2) as engine:
        why = "has layers that see 11 tokens, fewer than the 80 of the longest prompt"
        for ask in (engine.check_requests, lambda requests: list(engine.generate(requests, Decoding(2)))):
            with pytest.raises(UnsupportedArchitecture, match=why):
                ask(asked([moved(source)], **put_in))
        other = [replace(asked([source], cut=(Cut("answer", "filler"),))[0], token_ids=(1, 2, 3))]
        with pytest.raises(EngineFault, match="are for a prompt of other tokens"):
            list(engine.generate(other, Decoding(2)))
    with (
        HfEngine(answering("llama"), length=60, slots=2) as engine,
        pytest.raises(EngineFault, match=r"needs 70 cache slots \(40 tokens and 30 new ones\), but this engine has 64"),
    ):
        list(engine.generate(asked([moved(source)], **put_in), Decoding(30)))
