"""Answers from a model in this process: transformers' own tokens, and nobody's answer depends on who else is asked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy import stats
from tiny_answerers import CONTEXT, FAMILIES, answering, asked, by_transformers, ids_of
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from mless.engines import slots as slots_module
from mless.engines.base import Decoding, OutOfMemory, Reply, Request
from mless.engines.hf import HfEngine, default_slots
from mless.engines.slots import SlotLayer
from mless.errors import BadStudy, EngineFault, ProofFailed, UnsupportedArchitecture
from mless.models import LoadedModel, load
from mless.prompting import build_prompts, shared_beginning
from mless.tasks import load_items
from mless.values import Condition
from units import bf16_units

#: One token less is prefilled, in chunks of 32 and caches of 64: borders lie at 33 and 65. 12 is beyond every window.
LENGTHS = (1, 12, 32, 33, 34, 64, 65, 66)


def tokens_of(replies: Iterator[Reply]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for reply in replies:
        assert reply.item not in found, "answered twice"
        found[reply.item] = reply.token_ids
    return found


def greedy(engine: HfEngine, requests: Sequence[Request], new: int = 6, live: int | None = None) -> dict[str, Any]:
    return tokens_of(engine.generate(requests, Decoding(new), live=live))


def shuffled(requests: Sequence[Request], seed: int) -> list[Request]:
    return random.Random(seed).sample(list(requests), len(requests))


@torch.inference_mode()
def follows(model: LoadedModel, request: Request, made: Sequence[int]) -> bool:
    """Whether a plain forward with the request's own positions would choose each of these tokens in turn."""
    ids = [*request.token_ids, *made[:-1]]
    given = list(request.position_ids or range(len(request.token_ids)))
    positions = given + [given[-1] + 1 + n for n in range(len(made) - 1)]
    # Without a mask, transformers would take a jump of positions for the beginning of another sequence.
    given_ids = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    logits = model.model(**given_ids, position_ids=torch.tensor([positions]), use_cache=False).logits
    return logits[0, len(request.token_ids) - 1 :].argmax(-1).tolist() == list(made)


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return answering("llama")


# ---- transformers' own tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers_own(family: str) -> None:
    model = answering(family)
    requests = asked(*LENGTHS)
    with HfEngine(model, length=80, slots=3) as engine:
        made = greedy(engine, requests)
    for request in requests:
        assert follows(model, request, made[request.item]), len(request.token_ids)
    for request in (requests[1], requests[4], requests[-1]):
        assert made[request.item] == by_transformers(model, request.token_ids, 6)
    # A model that only repeats its last token would agree with anything.
    assert len({token for tokens in made.values() for token in tokens}) > 8


@pytest.mark.parametrize("family", ["gemma3_text", "gemma2", "mistral"])
def test_an_answer_that_outgrows_window_and_bucket(family: str) -> None:
    model = answering(family)
    requests = asked(3, 60)
    with HfEngine(model, length=140, slots=2) as engine:
        made = greedy(engine, requests, new=70)
    assert all(follows(model, request, made[request.item]) for request in requests)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_shared_beginning_changes_no_token(family: str) -> None:
    model = answering(family)
    front, rests = ids_of(70, 3), [ids_of(length, 9) for length in (1, 2, 34)]
    with HfEngine(model, length=110, slots=4) as engine:
        for shared in (1, 32, 33, 64, 65):
            plain = [Request("none", str(n), 0, 0, front[:shared] + rest) for n, rest in enumerate(rests)]
            expected = greedy(engine, plain, new=3)
            assert greedy(engine, [replace(request, shared=shared) for request in plain], new=3) == expected, shared
        # Of a prompt that is all beginning the last token is still the prompt's own.
        assert greedy(engine, [replace(request, shared=500) for request in plain], new=3) == expected


def test_a_beginning_is_computed_once(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    front = ids_of(64, 1)
    requests = [Request("none", str(n), 0, 0, front + ids_of(5 + n, n), shared=64) for n in range(6)]
    sizes: list[int] = []
    forward = type(llama.model.model).forward

    def counting(self: Any, input_ids: torch.Tensor, **others: Any) -> Any:
        sizes.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **others)

    with HfEngine(llama, length=100, slots=2) as engine:
        monkeypatch.setattr(type(llama.model.model), "forward", counting)
        greedy(engine, requests, new=2)
        assert sizes.count(64) == 1
        assert sizes.count(32) == 3  # two prompts at a time, as there are two slots
        # Other positions or other hidden tokens in it make it another beginning.
        sizes.clear()
        positions = tuple(range(3, 3 + len(requests[0].token_ids)))
        greedy(engine, [replace(requests[0], position_ids=positions), replace(requests[1], hidden=(4, 9))], new=2)
        assert sizes.count(64) == 2


def test_a_padded_prefill_may_be_longer_than_the_cache(llama: LoadedModel) -> None:
    request = Request("none", "1", token_ids=ids_of(60), shared=10)
    with HfEngine(llama, length=64, slots=2) as engine:
        assert greedy(engine, [request], new=4)["1"] == by_transformers(llama, request.token_ids, 4)


def test_padding_needs_no_position_that_the_model_lacks() -> None:
    model = answering("gpt2", max_position_embeddings=100)
    request = Request("none", "1", token_ids=ids_of(98))
    with HfEngine(model, length=100, slots=2) as engine:
        assert greedy(engine, [request], new=2)["1"] == by_transformers(model, request.token_ids, 2)


# ---- nobody's answer depends on the others -------------------------------------------------------------------------------


def company(n: int = 64) -> list[Request]:
    """Prompts of many lengths, a third of them with a beginning in common."""
    lengths = random.Random(4).choices(range(1, 90), k=n)
    front = ids_of(40, 77)
    made = [
        replace(request, token_ids=front + request.token_ids, shared=40) if k % 3 == 0 else request
        for k, request in enumerate(asked(*lengths))
    ]
    return made


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
def test_64_prompts_alone_in_eights_all_together_shuffled_and_resumed(dtype: torch.dtype) -> None:
    requests = company()
    with HfEngine(answering("qwen2", dtype=dtype), length=140, slots=64) as engine:
        together = greedy(engine, requests, new=4)
        assert set(together) == {request.item for request in requests}
        assert greedy(engine, shuffled(requests, 1), new=4, live=8) == together
        for request in requests[::16]:
            assert greedy(engine, [request], new=4) == {request.item: together[request.item]}
        # Stopped half-way; the rest is asked for later, in other company.
        replies = engine.generate(shuffled(requests, 2), Decoding(4))
        done = [next(replies) for _ in range(25)]
        replies.close()
        left = [request for request in requests if request.item not in {reply.item for reply in done}]
        assert tokens_of(iter(done)) | greedy(engine, shuffled(left, 3), new=4, live=17) == together
    assert len(set(together.values())) > 50


@pytest.mark.parametrize(
    ("family", "dtype"),
    [  # each family in one of the two, in turn
        pytest.param(family, dtype, id=f"{family}-{name}", marks=[pytest.mark.slow] * ((n + m) % 2))
        for n, family in enumerate(FAMILIES)
        for m, (name, dtype) in enumerate({"fp32": torch.float32, "bf16": torch.bfloat16}.items())
    ],
)
def test_every_family_gives_the_same_bits_alone_and_together(family: str, dtype: torch.dtype) -> None:
    requests = asked(1, 20, 70, 33)
    with HfEngine(answering(family, dtype=dtype), length=140, slots=8) as engine:
        told = engine.self_check(requests, tokens=2)
    assert (told["prompts"], told["tokens"]) == (3, 2)
    assert told["logits"] == "same bits alone and together, in other slots"
    assert 0 <= told["forward"] < (1e-4 if dtype == torch.float32 else 0.1)


def test_a_much_longer_neighbour_is_not_noticed_in_fp32() -> None:
    # SDPA over another number of keys rounds otherwise from some 300 tokens on, though all that is added is masked.
    model = answering("llama", max_position_embeddings=1024)
    rows = asked(300, 412, 700, 40)
    with HfEngine(model, length=760, slots=4) as engine:
        short = engine._trace(rows[:1], 3)[0]
        assert torch.equal(engine._trace(rows, 3)[0], short)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_the_filled_slots_only(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits up to rounding as with all slots; and the same bits whoever stands beside."""
    model = answering("qwen2", dtype=dtype, max_position_embeddings=1024)
    requests = asked(*(3 + 5 * n for n in range(22)), 340, 600)
    with HfEngine(model, length=700, slots=24) as engine:
        assert engine.about()["attention"] == "sdpa over the filled cache"
        short = engine._trace(requests, 4)
        for one in (0, 12, 22, 23):
            assert torch.equal(engine._trace([requests[one]], 4)[0], short[one])
    monkeypatch.setattr("mless.engines.hf.rows_are_apart", lambda cache, groups: False)
    with HfEngine(model, length=700, slots=24) as engine:
        assert engine.about()["attention"] == "sdpa"
        for all_slots, filled in zip(engine._trace(requests, 1), short, strict=True):
            gap = (all_slots[0].float() - filled[0].float()).norm() / all_slots[0].float().norm()
            assert gap < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_decoding_that_is_not_the_models_own_is_found_out(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HfEngine._set

    def some_positions_on(self: HfEngine, rows: Any, starts: Any) -> None:
        real(self, rows, starts)
        self._positions[torch.tensor([row.slot for row in rows])] += 7

    monkeypatch.setattr(HfEngine, "_set", some_positions_on)
    with (
        HfEngine(llama, length=140, slots=8) as engine,
        pytest.raises(ProofFailed, match="other logits than the model's own forward"),
    ):
        engine.self_check(asked(1, 20, 70))


def test_a_row_that_breaks_down_spoils_no_later_one_in_its_slot() -> None:
    for family in ("llama", "gemma2"):
        model = answering(family)
        with torch.no_grad():
            model.model.model.embed_tokens.weight[5] = torch.nan
            model.model.lm_head.weight[5] = 0.0
        broken = Request("none", "broken", token_ids=(5,) * 120)
        sound = [replace(r, token_ids=tuple(6 if i == 5 else i for i in r.token_ids)) for r in asked(1, 50, 70)]
        with HfEngine(model, length=140, slots=1) as engine:
            expected = greedy(engine, sound, new=20, live=1)
            again = replace(broken, item="broken again")
            made = greedy(engine, [broken, sound[0], again, *sound[1:]], new=20, live=1)
        assert {item: made[item] for item in expected} == expected
        assert all(len(set(tokens)) > 1 for tokens in expected.values())


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load("smollm2", head=True, dtype="float32", device="cpu")


def sums(model: LoadedModel, n: int = 64) -> list[Request]:
    condition = Condition("mless", "repeat", " /", 20)
    _, items = load_items(f"arithmetic:2:{n}", limit=n)
    prompts = build_prompts(model.tokenizer, items, condition, kind="chat", system="Answer with the number only.")
    return [
        Request(prompt.condition, prompt.item, 0, k, prompt.token_ids, shared=shared_beginning(prompt, condition))
        for k, prompt in enumerate(prompts)
    ]


def test_the_embedded_model(smollm2: LoadedModel) -> None:
    requests = sums(smollm2, 3)
    longest = max(len(request.token_ids) for request in requests)
    with HfEngine(smollm2, length=longest + 2, slots=2) as engine:
        engine.self_check(requests[:2], tokens=1)
        together = greedy(engine, requests, new=2)
        assert greedy(engine, requests[2:], new=2) == {requests[2].item: together[requests[2].item]}
    assert len(set(together.values())) == 3


@pytest.mark.slow
@bf16_units
def test_the_embedded_model_in_bf16_alone_8_and_64() -> None:
    model = load("smollm2", head=True, dtype="bfloat16", device="cpu")
    requests = sums(model)
    longest = max(len(request.token_ids) for request in requests)
    with HfEngine(model, length=longest + 32, slots=64) as engine:
        engine.self_check(requests)
        together = greedy(engine, requests, new=32)
        for seed, live in enumerate((8, 64)):
            assert greedy(engine, shuffled(requests, seed), new=32, live=live) == together
        # Alone, every step is a forward of 64 rows: a few answers whole, of the others the first tokens.
        for n, request in enumerate(requests):
            new = 4 if n % 8 else 32
            assert greedy(engine, [request], new=new) == {request.item: together[request.item][:new]}
        replies = engine.generate(requests, Decoding(32))
        done = tokens_of(iter([next(replies) for _ in range(20)]))
        replies.close()
        assert done | greedy(engine, [r for r in requests if r.item not in done], new=32) == together


# ---- the self-check can fail ----------------------------------------------------------------------------------------------


def test_attention_that_looks_at_the_neighbours_is_found_out(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = slots_module.attend

    def nosy(*args: Any, **others: Any) -> torch.Tensor:
        out = honest(*args, **others)
        return out + 1e-6 * out.mean(0, keepdim=True)

    monkeypatch.setattr(slots_module, "attend", nosy)
    with (
        HfEngine(llama, length=80, slots=8) as engine,
        pytest.raises(
            ProofFailed, match=r"3 of 3 prompts got other logits with neighbours than alone, on cpu in float32; try"
        ),
    ):
        engine.self_check(asked(3, 20, 70, 40))


@pytest.mark.parametrize("fault", ["neighbours", "place"])
def test_a_matrix_product_that_is_not_row_stable_is_found_out(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    honest = torch.nn.functional.linear

    def unstable(value: torch.Tensor, *others: Any) -> torch.Tensor:
        out = honest(value, *others)
        if fault == "neighbours":
            return out + 1e-6 * out.mean(0, keepdim=True)
        place = torch.arange(out.shape[0], dtype=out.dtype).reshape(-1, *[1] * (out.ndim - 1))
        return out * (1 + 1e-6 * place)

    with HfEngine(llama, length=80, slots=8) as engine:
        engine.self_check(asked(3, 20, 70, 40))
        monkeypatch.setattr(torch.nn.functional, "linear", unstable)
        with pytest.raises(ProofFailed, match="row-stable decoding does not hold here"):
            engine.self_check(asked(3, 20, 70, 40))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_self_check_fits_into_few_slots_and_a_full_cache(llama: LoadedModel, n: int) -> None:
    with HfEngine(llama, length=64, slots=n) as engine:
        told = engine.self_check(asked(3, 5, 10, 62))
        assert {key: told[key] for key in ("prompts", "tokens", "logits")} == {
            "prompts": n,
            "tokens": 3,
            "logits": "same bits alone and together, in other slots",
        }
        assert engine.self_check([])["prompts"] == 0


# ---- whatever the number of slots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("llama", torch.bfloat16, id="llama-bf16"),
        pytest.param("gpt2", torch.float32, id="gpt2-fp32"),
        pytest.param("llama", torch.float32, id="llama-fp32", marks=pytest.mark.slow),
        pytest.param("gpt2", torch.bfloat16, id="gpt2-bf16", marks=pytest.mark.slow),
    ],
)
def test_batch_invariant_tokens_are_the_same_for_any_number_of_slots(family: str, dtype: torch.dtype) -> None:
    model = answering(family, dtype=dtype)
    requests = company(20)
    made: list[dict[str, Any]] = []
    bits: list[torch.Tensor] = []
    for count in (16, 32, 64):
        with HfEngine(model, length=140, slots=count, mode="batch-invariant") as engine:
            assert "any number of slots" in engine.about()["promise"]
            made.append(greedy(engine, requests, new=3))
            bits.append(torch.stack(engine._trace(requests[:5], 3)))
    assert made[0] == made[1] == made[2]
    assert torch.equal(bits[0], bits[1])
    assert torch.equal(bits[0], bits[2])


def test_batch_invariant_slots_come_in_blocks(llama: LoadedModel) -> None:
    with pytest.raises(BadStudy, match=r"blocks of 16 rows, so slots must be a multiple of 16, got 24"):
        HfEngine(llama, length=80, slots=24, mode="batch-invariant")


# ---- drawn by chance ------------------------------------------------------------------------------------------------------


def drawn(engine: HfEngine, requests: Sequence[Request], live: int | None = None, **decoding: Any) -> dict[str, Any]:
    return tokens_of(
        engine.generate(requests, Decoding(**{"temperature": 1.0, "max_new_tokens": 8} | decoding), live=live)
    )


def test_a_seed_draws_the_same_tokens_in_any_company(llama: LoadedModel) -> None:
    requests = asked(*range(1, 17))
    with HfEngine(llama, length=80, slots=8) as engine:
        first = drawn(engine, requests)
        assert drawn(engine, shuffled(requests, 5), live=3) == first
        assert drawn(engine, requests[4:5]) == {"4": first["4"]}
        other = drawn(engine, [replace(request, seed=request.seed + 10**6) for request in requests])
        assert sum(other[item] == tokens for item, tokens in first.items()) == 0
        # The n-th token's luck does not depend on how many are asked for.
        assert all(tokens == first[item][:3] for item, tokens in drawn(engine, requests, max_new_tokens=3).items())
        # Two conditions with one seed share their luck; a seed of any size will do.
        twins = [Request("none", "a", 0, 2**63 + 5, ids_of(9)), Request("mless", "b", 0, 2**63 + 5, ids_of(9))]
        assert len(set(drawn(engine, twins).values())) == 1


@pytest.fixture(scope="module")
def once() -> Iterator[tuple[HfEngine, list[Request], np.ndarray]]:
    """A prompt of one token asked 2,000 times, and the logits of its first token."""
    model = answering("llama")
    with torch.inference_mode():
        logits = model.model(input_ids=torch.tensor([[7]])).logits[0, -1].double().numpy()
    with HfEngine(model, length=64, slots=128) as engine:
        yield engine, [Request("none", str(n), n, n, (7,)) for n in range(2000)], logits


def chances(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.25, 0.1])
def test_frequencies_are_the_models_probabilities(once: Any, temperature: float) -> None:
    engine, requests, logits = once
    made = drawn(engine, requests, max_new_tokens=1, temperature=temperature)
    counts = Counter(token for (token,) in made.values())
    expected = chances(logits, temperature) * len(requests)
    common = expected >= 5
    seen = np.array([counts[token] for token in range(len(logits))])
    observed = [*seen[common], seen[~common].sum()] if (~common).any() else list(seen)
    wanted = [*expected[common], expected[~common].sum()] if (~common).any() else list(expected)
    assert stats.chisquare(observed, wanted).pvalue > 0.001
    # The test would notice: twice the temperature is another distribution.
    wrong = chances(logits, 2 * temperature) * len(requests)
    wrong = [*wrong[common], wrong[~common].sum()] if (~common).any() else list(wrong)
    assert stats.chisquare(observed, wrong).pvalue < 0.001


def test_top_k_and_top_p_draw_from_the_top_only(once: Any) -> None:
    engine, requests, logits = once
    by_chance = np.argsort(-logits)
    made = drawn(engine, requests[:400], max_new_tokens=1, temperature=0.3, top_k=4)
    assert {token for (token,) in made.values()} == set(by_chance[:4].tolist())
    # The smallest set that holds half of the probability.
    held = np.cumsum(chances(logits, 0.3)[by_chance])
    nucleus = by_chance[: int(np.searchsorted(held, 0.5)) + 1]
    made = drawn(engine, requests[:1000], max_new_tokens=1, temperature=0.3, top_p=0.5)
    assert {token for (token,) in made.values()} <= set(nucleus.tolist())
    assert len({token for (token,) in made.values()}) > len(nucleus) // 2
    assert set(drawn(engine, requests[:100], max_new_tokens=1, top_k=1).values()) == {(int(by_chance[0]),)}


def test_a_temperature_near_zero_is_greedy(llama: LoadedModel) -> None:
    requests = asked(*range(1, 17))
    with HfEngine(llama, length=80, slots=8) as engine:
        assert drawn(engine, requests, temperature=1e-4) == greedy(engine, requests, new=8)


# ---- where an answer ends -------------------------------------------------------------------------------------------------


def answer(model: LoadedModel, length: int = 20, **decoding: Any) -> Reply:
    with HfEngine(model, length=80, slots=2) as engine:
        (reply,) = engine.generate(asked(length), Decoding(**{"max_new_tokens": 10} | decoding))
    return reply


def letters(model: LoadedModel, ids: Sequence[int]) -> str:
    return model.tokenizer.decode(list(ids), skip_special_tokens=True)


def test_an_answer_of_full_length() -> None:
    model = answering("qwen2")
    reply = answer(model)
    assert (reply.finish, reply.n_tokens, len(reply.token_ids)) == ("length", 10, 10)
    assert reply.text == letters(model, reply.token_ids)
    assert answer(model, max_new_tokens=1).token_ids == reply.token_ids[:1]


@pytest.mark.parametrize("holder", ["generation config, a list", "config", "tokenizer"])
def test_end_tokens_by_whoever_names_them(holder: str) -> None:
    model = answering("qwen2")
    free = answer(model).token_ids
    cut = next(n for n in range(2, 10) if free[n] not in free[:n])
    if holder == "tokenizer":
        model.tokenizer.eos_token_id = free[cut]
    elif holder == "config":
        model.model.config.eos_token_id = free[cut]
    else:
        model.model.generation_config.eos_token_id = [96, free[cut]]
    reply = answer(model)
    assert (reply.finish, reply.n_tokens, reply.token_ids) == ("stop", cut + 1, free[: cut + 1])
    assert reply.text == letters(model, free[:cut])  # the token that ends it is counted and not shown
    # An end with the last token allowed is an end.
    assert answer(model, max_new_tokens=cut + 1).finish == "stop"
    assert answer(model, max_new_tokens=cut).finish == "length"


def test_an_answer_that_ends_at_once() -> None:
    model = answering("qwen2")
    model.tokenizer.eos_token_id = answer(model).token_ids[0]
    reply = answer(model)
    assert (reply.text, reply.n_tokens, reply.finish) == ("", 1, "stop")


def test_stop_texts_end_an_answer_and_are_not_part_of_it() -> None:
    model = answering("qwen2")
    free = letters(model, answer(model).token_ids)
    for text in (free[4:6], free[0], free[3:8], free):
        at = free.find(text)
        reply = answer(model, stop=("never so", text))
        assert (reply.text, reply.finish, reply.n_tokens) == (free[:at], "stop", at + len(text))
    # The first one in the text counts, whichever comes first in the list.
    assert answer(model, stop=(free[5:7], free[1:3])).text == free[: free.find(free[1:3])]
    assert answer(model, stop=("never so",)).finish == "length"


def test_a_stop_text_of_many_tokens() -> None:
    model = answering("qwen2")
    free = letters(model, answer(model, max_new_tokens=50).token_ids)
    reply = answer(model, max_new_tokens=50, stop=(free[2:48],))
    assert (reply.finish, reply.text) == ("stop", free[: free.find(free[2:48])])


def test_a_slot_set_free_is_used_by_the_next_and_replies_come_as_they_finish() -> None:
    model = answering("qwen2")
    requests = asked(5, 9, 14, 20, 33, 40, 66)
    with HfEngine(model, length=80, slots=2) as engine:
        free = greedy(engine, requests, new=10)
    model.tokenizer.eos_token_id = Counter(t for tokens in free.values() for t in set(tokens)).most_common(1)[0][0]
    with HfEngine(model, length=80, slots=2) as engine:
        replies = list(engine.generate(requests, Decoding(10), live=2))
    for reply in replies:
        whole = free[reply.item]
        end = whole.index(model.tokenizer.eos_token_id) + 1 if model.tokenizer.eos_token_id in whole else 10
        assert reply.token_ids == whole[:end]
        assert reply.finish == ("stop" if whole[end - 1] == model.tokenizer.eos_token_id else "length")
    assert len({reply.n_tokens for reply in replies}) > 1


# ---- position-only controls -----------------------------------------------------------------------------------------------


def with_filler(filler: int, hidden: bool, n: int = 6) -> list[Request]:
    made: list[Request] = []
    for k, length in enumerate(range(3, 3 + n)):
        front, rest = ids_of(length, 5), ids_of(40 + length, 6)
        span = (length, length + 9) if hidden else None
        made.append(Request("c", str(k), 0, 0, front + (filler,) * 9 + rest, hidden=span))
    return made


@pytest.mark.parametrize(
    ("family", "shared"),
    [
        ("llama", 3),
        ("llama", 30),
        ("gemma3_text", 0),
        ("gemma2", 12),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("llama", 0), ("llama", 12), ("gpt2", 0))),
    ],
)
def test_hidden_filler_is_seen_by_no_other_token(family: str, shared: int) -> None:
    with HfEngine(answering(family), length=80, slots=4) as engine:
        one, other = ([replace(r, shared=shared) for r in with_filler(token, hidden=True)] for token in (11, 23))
        assert greedy(engine, one, new=4) == greedy(engine, other, new=4)
        seen, seen_other = (greedy(engine, with_filler(token, hidden=False), new=4) for token in (11, 23))
        assert sum(seen[item] != seen_other[item] for item in seen) > 2


def test_hidden_filler_is_a_shift_of_positions(llama: LoadedModel) -> None:
    hidden = with_filler(11, hidden=True)
    shifts: list[Request] = []
    for request in hidden:
        assert request.hidden is not None
        start, stop = request.hidden
        ids = request.token_ids[:start] + request.token_ids[stop:]
        shifts.append(
            replace(request, token_ids=ids, hidden=None, position_ids=(*range(start), *range(stop, len(ids) + 9)))
        )
    with HfEngine(llama, length=80, slots=4) as engine:
        made = greedy(engine, hidden)
        assert greedy(engine, shifts) == made
        plain = greedy(engine, [replace(request, position_ids=None) for request in shifts])
    assert sum(plain[item] != made[item] for item in made) > 2


@pytest.mark.parametrize(
    ("family", "shared"),
    [
        pytest.param(family, shared, marks=[pytest.mark.slow] * ((n + m) % 2))
        for n, family in enumerate(["llama", "qwen3", "gpt2", "gpt_neox"])
        for m, shared in enumerate([0, 7])
    ],
)
def test_shifted_positions_are_those_the_model_gets(family: str, shared: int) -> None:
    model = answering(family)
    requests = [
        replace(request, shared=shared, position_ids=tuple(i + 55 * (i >= 4) for i in range(len(request.token_ids))))
        for request in asked(1, 5, 34, 65)
    ]
    with HfEngine(model, length=80, slots=3) as engine:
        made = greedy(engine, requests)
        plain = greedy(engine, [replace(request, position_ids=None) for request in requests])
    for request in requests:
        assert follows(model, request, made[request.item]), len(request.token_ids)
    assert made != plain


# ---- what is refused ------------------------------------------------------------------------------------------------------


def test_longer_than_the_model_takes(llama: LoadedModel) -> None:
    with pytest.raises(
        BadStudy, match=rf"up to {CONTEXT + 1} tokens, but tiny-llama takes {CONTEXT}; use a smaller --max-new-tokens"
    ):
        HfEngine(llama, length=CONTEXT + 1, slots=2)
    HfEngine(llama, length=CONTEXT, slots=2).close()


def test_requests_that_cannot_be_answered(llama: LoadedModel) -> None:
    with HfEngine(llama, length=60, slots=2) as engine:
        assert engine.length == 64
        with pytest.raises(EngineFault, match="item 'q': the hf engine takes token ids, and this request has none"):
            next(engine.generate([Request("none", "q", messages=(("user", "hello"),))], Decoding(4)))
        long = replace(asked(61)[0], item="q")
        with pytest.raises(
            EngineFault, match=r"item 'q' under 'none' needs 65 cache slots \(61 tokens and 4 new ones\).*has 64"
        ):
            next(engine.generate([long], Decoding(4)))
        assert len(greedy(engine, [long], new=3)["q"]) == 3
        assert list(engine.generate([], Decoding(4))) == []
        far = replace(asked(3)[0], position_ids=(0, 1, CONTEXT - 3))
        assert len(greedy(engine, [far], new=3)["0"]) == 3
        with pytest.raises(
            BadStudy, match=rf"item '0' under 'none' reaches position {CONTEXT + 1}, but tiny-llama has {CONTEXT}"
        ):
            next(engine.generate([far], Decoding(4)))


def test_a_rotary_scale_that_rows_would_choose_for_each_other() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [30.0] * 6}
    rope |= {"original_max_position_embeddings": 80, "factor": 4.0}
    model = answering("phi3", rope_parameters=rope, original_max_position_embeddings=80)
    with pytest.raises(BadStudy, match="up to 81 tokens, but tiny-phi3 takes 80"):
        HfEngine(model, length=81, slots=2)
    requests = asked(3, 50, 74)
    with HfEngine(model, length=80, slots=2) as engine:
        made = greedy(engine, requests)
    assert all(made[request.item] == by_transformers(model, request.token_ids, 6) for request in requests)


STATES: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"lru_width": 48, "attention_window_size": 16, "num_key_value_heads": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}


@pytest.mark.parametrize("family", STATES)
def test_a_state_outside_of_the_cache(family: str) -> None:
    model = answering(family, **STATES[family])
    with pytest.raises(
        UnsupportedArchitecture, match=rf"'{family}' keeps some of its state outside.*--engine vllm or openai"
    ):
        HfEngine(model, length=64, slots=2)


# ---- memory ---------------------------------------------------------------------------------------------------------------


def refused_by_a_gpu() -> None:
    raise torch.OutOfMemoryError("no room")


def refused_by_the_system() -> None:
    """What torch raises on a CPU, a plain RuntimeError: no system has so much memory."""
    torch.empty(1 << 58)


@pytest.mark.parametrize("refuse", [refused_by_a_gpu, refused_by_the_system])
def test_no_memory_at_the_start(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[], None]
) -> None:
    whole = SlotLayer.lazy_initialization

    def short(self: SlotLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape[0] > 8:
            refuse()
        whole(self, keys, values)

    monkeypatch.setattr(SlotLayer, "lazy_initialization", short)
    with pytest.raises(
        OutOfMemory, match=r"32 rows of 128 tokens do not fit into the memory of cpu.*accuracy\.slots=16"
    ) as caught:
        HfEngine(llama, length=100, slots=32)
    assert caught.value.slots == 32
    assert isinstance(caught.value, EngineFault)
    HfEngine(llama, length=100, slots=8).close()


@pytest.mark.parametrize("refuse", [refused_by_a_gpu, refused_by_the_system])
def test_no_memory_half_way(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[], None]) -> None:
    calls = 0
    forward = type(llama.model).forward

    def short(self: Any, **given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 14:
            refuse()
        return forward(self, **given)

    requests = asked(*range(1, 13))
    with HfEngine(llama, length=80, slots=4) as engine:
        expected = greedy(engine, requests, live=4)
        monkeypatch.setattr(type(llama.model), "forward", short)
        replies, done = engine.generate(requests, Decoding(6), live=4), list[Reply]()
        with pytest.raises(OutOfMemory, match=r"accuracy\.slots=2") as caught:
            done.extend(replies)
        assert caught.value.slots == 4
        monkeypatch.undo()
        # What was handed over stands, and the engine goes on.
        assert 0 < len(done) < len(requests)
        assert tokens_of(iter(done)).items() <= expected.items()
        assert greedy(engine, requests) == expected


def test_slots_by_default(llama: LoadedModel) -> None:
    assert default_slots(llama, 512) == 128
    big = answering("llama", head_dim=1024, num_hidden_layers=1)
    row = 2 * 1 * 2 * 1024 * 4  # keys and values, layers, heads, width, bytes
    fits = default_slots(replace(big, layers=1), 8192)
    assert fits & (fits - 1) == 0
    assert fits * row * 8192 <= 3 << 30 < 2 * fits * row * 8192
    assert default_slots(replace(big, layers=1), 1 << 20) == 8


# ---- the model afterwards -------------------------------------------------------------------------------------------------


def state(model: LoadedModel) -> tuple[Any, ...]:
    with torch.inference_mode():
        logits = model.model(input_ids=torch.tensor([ids_of(30)]), use_cache=False).logits
    configs = [module.config for module in model.model.modules() if hasattr(module, "config")]
    return (
        logits.numpy().tobytes(),
        [(config._attn_implementation, config._experts_implementation) for config in configs],
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
        [len(module._forward_hooks) for module in model.model.modules()],
        {name: value.data_ptr() for name, value in model.model.named_parameters()},
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_the_model_is_as_before(family: str) -> None:
    model = answering(family)
    before = state(model)
    with HfEngine(model, length=80, slots=4) as engine:
        greedy(engine, asked(3, 40))
        assert state(model) == before  # between answers too
        replies = engine.generate(asked(3, 40, 5, 9, 11), Decoding(6))
        next(replies)
    replies.close()
    engine.close()
    engine.close()
    assert state(model) == before


def test_closing_lets_go_of_the_memory(llama: LoadedModel) -> None:
    engine = HfEngine(llama, length=80, slots=4)
    greedy(engine, asked(3, 40))
    assert engine._cache.ready
    engine.close()
    assert not engine._cache.ready


def test_what_is_recorded_of_it(llama: LoadedModel) -> None:
    with HfEngine(llama, length=80, slots=4) as engine:
        about = engine.about()
    assert about == {
        "engine": "hf",
        "mode": "row-stable",
        "slots": 4,
        "length": 128,
        "attention": "sdpa over the filled cache",
        "decode": "eager",
        "dtype": "float32",
        "computing": llama.computing(),
        "device": "cpu",
        "device_name": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "promise": "same tokens for any number of live rows, any order and after a resume, with 4 slots",
    }


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"slots": 0}, "slots: expected at least 1, got 0"),
        ({"slots": -1}, "slots: expected at least 1"),
        ({"slots": 10**18}, "at most 65,536 rows"),
        ({"mode": "evil"}, "no mode 'evil' of decoding; there are: row-stable, batch-invariant"),
    ],
)
def test_slots_and_modes_that_there_are_not(given: dict[str, Any], why: str) -> None:
    with pytest.raises(BadStudy, match=why):
        HfEngine(answering("llama"), length=16, **given)
