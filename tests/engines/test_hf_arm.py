"""Answers of a model with ARM: as row-stable as those without, as transformers' own generate gives them, and nothing of it stays behind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_answerers import answering, asked

from mless.engines.base import Decoding, Request, by_arm
from mless.engines.hf import HfEngine
from mless.errors import BadStudy, UnsupportedArchitecture
from mless.models import LoadedModel
from mless.redistribution import attached
from mless.values import ArmSettings

#: So strong that the tokens of a tiny model change.
ARM = ArmSettings(fraction=0.4, p1=99.0, layers=(1, 3))
LENGTHS = [1, 2, 12, 32, 33, 34, 64, 65, *range(5, 29)]


def armed(requests: Sequence[Request], arm: ArmSettings | None = ARM, condition: str = "arm") -> list[Request]:
    return [replace(request, arm=arm, condition=condition) for request in requests]


def greedy(engine: HfEngine, requests: Sequence[Request], live: int | None = None) -> dict[str, tuple[int, ...]]:
    return {reply.item: reply.token_ids for reply in engine.generate(requests, Decoding(8), live=live)}


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return answering("llama")


@pytest.fixture(scope="module")
def whole(llama: LoadedModel) -> dict[str, tuple[int, ...]]:
    with HfEngine(llama, length=80, slots=32) as engine:
        return greedy(engine, armed(asked(*LENGTHS)))


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_thirty_two_prompts_alone_in_fours_shuffled_and_resumed(
    llama: LoadedModel, whole: dict[str, tuple[int, ...]], every: int
) -> None:
    requests = armed(asked(*LENGTHS))
    assert len(requests) == len(whole) == 32
    assert len(set(whole.values())) > 16  # a model that says one thing would agree with itself
    with HfEngine(llama, length=80, slots=32) as engine:
        for request in requests[::every]:
            assert greedy(engine, [request]) == {request.item: whole[request.item]}
        assert greedy(engine, requests, live=4) == whole
        assert greedy(engine, random.Random(1).sample(requests, 32)) == whole
        assert greedy(engine, requests[20:]) == {request.item: whole[request.item] for request in requests[20:]}
        engine.self_check([*asked(*LENGTHS), *requests])


def test_it_is_arm_as_the_plain_forward_has_it(llama: LoadedModel, whole: dict[str, tuple[int, ...]]) -> None:
    for request in armed(asked(*LENGTHS))[:12]:
        made = whole[request.item]
        ids = torch.tensor([[*request.token_ids, *made[:-1]]])
        with attached(llama.model, ARM) as handle, torch.inference_mode():
            handle.rows(seeds=torch.tensor([request.seed]))
            logits = llama.model(input_ids=ids, use_cache=False).logits
        assert logits[0, len(request.token_ids) - 1 :].argmax(-1).tolist() == list(made)


def test_it_changes_answers_and_leaves_those_without_it_alone(
    llama: LoadedModel, whole: dict[str, tuple[int, ...]]
) -> None:
    plain = asked(*LENGTHS)
    with HfEngine(llama, length=80, slots=8) as engine:
        before = greedy(engine, plain)
        other = armed(plain, ArmSettings(fraction=0.4, p1=99.0, layers=(1, 3), seed=7), "other")
        both: dict[tuple[str, str], tuple[int, ...]] = {}
        for reply in engine.generate([*armed(plain), *plain, *other], Decoding(8)):
            both[reply.condition, reply.item] = reply.token_ids
        assert {item: both["none", item] for item in before} == before
        assert greedy(engine, plain) == before
    assert sum(both["arm", item] != before[item] for item in before) > 8
    assert sum(both["arm", item] != both["other", item] for item in before) > 8  # another seed draws otherwise
    assert not any(module._forward_hooks for module in llama.model.modules())


def test_a_broken_off_run_leaves_no_arm_behind(llama: LoadedModel) -> None:
    plain = asked(5, 9, 12)
    with HfEngine(llama, length=80, slots=2) as engine:
        before = greedy(engine, plain)
        drawing = engine.generate(armed(plain), Decoding(8))
        next(drawing)
        drawing.close()
        assert greedy(engine, plain) == before


def test_a_shared_beginning_is_not_shared_with_arm(llama: LoadedModel) -> None:
    """What ARM draws there is of the row's own seed."""
    requests = [replace(r, token_ids=(7,) * 40 + r.token_ids) for r in armed(asked(5, 9))]
    with HfEngine(llama, length=80, slots=2) as engine:
        assert greedy(engine, [replace(r, shared=40) for r in requests]) == greedy(engine, requests)


@pytest.mark.parametrize("scope", ["sequence", "tensor"])
def test_scopes_that_pool_a_call_are_refused(llama: LoadedModel, scope: str) -> None:
    requests = armed(asked(5), ArmSettings(c=0.1, scope=scope))  # pyright: ignore[reportArgumentType]
    with HfEngine(llama, length=80, slots=2) as engine, pytest.raises(BadStudy, match=f"{scope}.*use scope token"):
        list(engine.generate(requests, Decoding(2)))


def test_a_model_without_a_place_for_it_is_refused_by_name() -> None:
    model = answering("gpt_oss")
    with (
        HfEngine(model, length=80, slots=2) as engine,
        pytest.raises(UnsupportedArchitecture, match="mixture of experts"),
    ):
        list(engine.generate(armed(asked(5)), Decoding(2)))


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "gpt2", "opt"])
def test_gated_fused_and_plain_mlps(family: str) -> None:
    model = answering(family)
    requests = armed(asked(1, 12, 33, 40))
    with HfEngine(model, length=80, slots=4) as engine:
        together, alone = greedy(engine, requests), greedy(engine, requests, live=1)
        assert together == alone
        assert together != greedy(engine, asked(1, 12, 33, 40))


def test_those_without_it_come_first_and_settings_apart() -> None:
    a, b = ArmSettings(c=0.1), ArmSettings(c=0.2)
    mixed = [replace(request, arm=arm) for request, arm in zip(asked(1, 2, 3, 4), (a, None, b, a), strict=True)]
    assert {arm: [r.item for r in rows] for arm, rows in by_arm(mixed).items()} == {
        None: ["1"],
        a: ["0", "3"],
        b: ["2"],
    }
