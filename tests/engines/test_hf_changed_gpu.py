"""Cuts and patches on a CUDA device: a captured step has the cuts, and answers are those of a plain loop, alone and in company."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_hf_changed import CUTS, PATCHES, WINDOW, asked, by_hand, company, greedy, moved, named, patched, prompt_of
from test_hf_gpu import on_gpu
from tiny_answerers import answering

import mless
from mless.changes import Cut
from mless.engines.base import Changes, Decoding, Request
from mless.engines.hf import HfEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every step that an engine captures: whether a graph came of it."""
    found: list[bool] = []
    own = HfEngine._capture

    def noting(self: HfEngine) -> None:
        own(self)
        found.append(self._graph is not None)

    monkeypatch.setattr(HfEngine, "_capture", noting)
    return found


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"])
def test_a_captured_step_has_the_cut(family: str, name: str, captured: list[bool]) -> None:
    model = on_gpu(answering(family, **WINDOW.get(family, {})), torch.float32)
    prompts = [prompt_of(0), prompt_of(1, more=20), prompt_of(2)]
    with HfEngine(model, length=80, slots=4) as engine:
        step = engine.about()["decode"] == "graph-captured"
        assert step or family == "gpt_oss"  # experts may branch on their own numbers
        plain = greedy(engine, asked(prompts, "mless"))
        found = greedy(engine, asked(prompts, cut=tuple(CUTS[name])))
        assert captured == ([True, True] if step else [False])
        # Afterwards the step without cuts is used again.
        assert greedy(engine, asked(prompts, "mless")) == plain
        assert captured == ([True, True] if step else [False])
        assert engine.self_check(asked(prompts, cut=tuple(CUTS[name])), tokens=3)["forward"] < 1e-3
    for prompt in prompts:
        with mless.cut(model, *CUTS[name], prompts=prompt):
            assert found[prompt.item] == by_hand(model, prompt, 6), prompt.item


@pytest.mark.parametrize("name", PATCHES)
def test_answers_go_on_from_a_patched_prompt(name: str) -> None:
    model = on_gpu(answering("llama"), torch.float32)
    sources = [prompt_of(n) for n in range(3)]
    at_positions = any(one.part == "keys-values" for one in PATCHES[name])
    prompts = [moved(one) if at_positions else prompt_of(n, filler=False) for n, one in enumerate(sources)]
    requests = [
        replace(request, changes=Changes(prompt, (), tuple(PATCHES[name]), source))
        for request, prompt, source in zip(asked(prompts), prompts, sources, strict=True)
    ]
    with HfEngine(model, length=80, slots=2) as engine:
        found = greedy(engine, requests)
    for prompt, source in zip(prompts, sources, strict=True):
        with patched(model, prompt, source, *PATCHES[name]):
            assert found[prompt.item] == by_hand(model, prompt, 6), prompt.item


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_in_bf16_alone_together_shuffled_resumed_and_in_another_engine(how: dict[str, Any]) -> None:
    model = on_gpu(answering("qwen2", hidden_size=64))
    requests: list[Request] = company()
    with HfEngine(model, length=80, slots=16) as engine:
        assert engine.about()["attention"].startswith("over the filled cache (own kernel)")
        engine.self_check(requests)
        together = named(engine, requests, max_new_tokens=12, **how)
        for request in requests[::3]:
            alone = named(engine, [request], max_new_tokens=12, **how)
            assert alone == {request.key: together[request.key]}
        mixed = random.Random(1).sample(requests, len(requests))
        assert named(engine, mixed, live=5, max_new_tokens=12, **how) == together
        replies = engine.generate(mixed, Decoding(12, **how))
        done = {reply.key: reply.token_ids for reply in (next(replies) for _ in range(7))}
        replies.close()
        left = [request for request in mixed if request.key not in done]
        assert done | named(engine, left, max_new_tokens=12, **how) == together
    with HfEngine(model, length=80, slots=16) as engine:
        assert named(engine, mixed, max_new_tokens=12, **how) == together


def test_a_row_without_cuts_has_the_bits_it_had_before(captured: list[bool]) -> None:
    model = on_gpu(answering("qwen2", hidden_size=64))
    plain = asked([prompt_of(n) for n in range(4)], "mless")
    with HfEngine(model, length=80, slots=8) as engine:
        before = engine._trace(plain, 4)
        named(engine, asked([prompt_of(5)], cut=(Cut("answer", "filler", heads="1-2"),)))
        assert all(map(torch.equal, engine._trace(plain, 4), before))
    assert captured == [True, True]
