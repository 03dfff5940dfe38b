"""On a CUDA device: row-stable in bf16 with a captured graph, batch-invariant over slots, and memory that really runs out.

Needs torch, transformers and pytest only, so that it also runs on a bare GPU machine (``--noconftest``).
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_answerers import answering, asked, by_transformers, ids_of
from torch.profiler import ProfilerActivity, profile

from mless.engines.base import Decoding, OutOfMemory, Request
from mless.engines.hf import HfEngine
from mless.engines.quick import quick_steps
from mless.errors import ProofFailed
from mless.models import LoadedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
#: Of the size at which cuBLAS chooses among its kernels by the number of rows.
SIZES: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}


def on_gpu(model: LoadedModel, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    model.model.to(device="cuda", dtype=dtype)
    return replace(model, device=torch.device("cuda"), dtype=str(dtype).removeprefix("torch."))


@pytest.fixture(scope="module")
def qwen() -> LoadedModel:
    model = answering("qwen2", **SIZES)
    with torch.no_grad():
        for name, weight in model.model.named_parameters():  # at this width the tiny models' sharpening is too much
            if weight.ndim > 1 and not any(part in name for part in ("embed", "lm_head")):
                weight.div_(3.0)
    return on_gpu(model)


def company(n: int = 64) -> list[Request]:
    """Prompts of many lengths, a third of them with a beginning in common."""
    lengths = random.Random(4).choices(range(1, 300), k=n)
    front = ids_of(90, 77, SIZES["vocab_size"])
    made: list[Request] = []
    for k, length in enumerate(lengths):
        ids = ids_of(length, k, SIZES["vocab_size"])
        made.append(Request("none", str(k), 0, k, front + ids if k % 3 == 0 else ids, shared=90 if k % 3 == 0 else 0))
    return made


def made_by(
    engine: HfEngine, requests: Sequence[Request], live: int | None = None, **decoding: Any
) -> dict[str, tuple[int, ...]]:
    asked_for = Decoding(**{"max_new_tokens": 32} | decoding)
    return {reply.item: reply.token_ids for reply in engine.generate(requests, asked_for, live=live)}


def shuffled(requests: Sequence[Request], seed: int) -> list[Request]:
    return random.Random(seed).sample(list(requests), len(requests))


# ---- row-stable ----------------------------------------------------------------------------------------------------------


def test_64_prompts_alone_in_eights_all_together_shuffled_and_resumed(qwen: LoadedModel) -> None:
    requests = company()
    with HfEngine(qwen, length=430, slots=64) as engine:
        assert engine.about()["decode"] == "graph-captured"
        assert engine.about()["attention"].startswith("over the filled cache (own kernel)")
        assert engine.self_check(requests)["prompts"] == 3
        together = made_by(engine, requests)
        assert len(together) == len(set(together.values())) == 64
        assert sum(len(set(tokens)) > 8 for tokens in together.values()) > 50  # none that only repeats itself
        for seed, live in enumerate((8, 64, 17, None)):
            assert made_by(engine, shuffled(requests, seed), live=live) == together, live
        alone: dict[str, tuple[int, ...]] = {}
        for request in requests:
            alone |= made_by(engine, [request])
        assert alone == together
        replies = engine.generate(requests, Decoding(32))
        done = {reply.item: reply.token_ids for reply in (next(replies) for _ in range(20))}
        replies.close()
        left = [request for request in requests if request.item not in done]
        assert done | made_by(engine, shuffled(left, 9)) == together
    # Another engine, another process's worth of state: the same.
    with HfEngine(qwen, length=430, slots=64) as engine:
        assert made_by(engine, shuffled(requests, 5)) == together


def test_sampling_is_the_seeds_own(qwen: LoadedModel) -> None:
    requests = company(32)
    with HfEngine(qwen, length=430, slots=32) as engine:
        first = made_by(engine, requests, temperature=1.0, top_p=0.95)
        assert made_by(engine, shuffled(requests, 1), live=5, temperature=1.0, top_p=0.95) == first
        other = [replace(request, seed=request.seed + 1000) for request in requests]
        assert not any(tokens == first[item] for item, tokens in made_by(engine, other, temperature=1.0).items())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gemma2", "gpt_oss", "gpt2", "qwen3_moe"])
def test_tiny_families_in_fp32_are_transformers_own(family: str) -> None:
    model = on_gpu(answering(family), torch.float32)
    requests = asked(1, 12, 33, 34, 66, 100)
    with HfEngine(model, length=128, slots=8) as engine:
        engine.self_check(requests)
        made = made_by(engine, requests, max_new_tokens=8)
        again = made_by(engine, shuffled(requests, 1), live=1, max_new_tokens=8)
    assert made == again
    for request in requests:
        assert made[request.item] == by_transformers(model, request.token_ids, 8), len(request.token_ids)


def test_hidden_filler_and_shifted_positions_in_the_graph() -> None:
    model = on_gpu(answering("llama"), torch.float32)
    front, rest = ids_of(6, 1), ids_of(45, 2)
    hidden = [Request("c", str(token), 0, 0, front + (token,) * 9 + rest, hidden=(6, 15)) for token in (3, 11, 40)]
    shifted = Request("c", "s", 0, 0, front + rest, position_ids=(*range(6), *range(15, 60)))
    plain = Request("c", "p", 0, 0, front + rest)
    with HfEngine(model, length=100, slots=4) as engine:
        made = made_by(engine, [*hidden, shifted, plain], max_new_tokens=8)
        assert made["3"] == made["11"] == made["40"] == made["s"]
        # A slot that held hidden tokens hides nothing of the next row.
        assert (
            made_by(engine, [plain], max_new_tokens=8)["p"] == made["p"] == by_transformers(model, plain.token_ids, 8)
        )


def test_a_product_that_depends_on_the_neighbours_is_found_out(
    qwen: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = torch.nn.functional.linear

    def nosy(value: torch.Tensor, *others: Any) -> torch.Tensor:
        out = honest(value, *others)
        return out + 0.05 * out.mean(0, keepdim=True)

    monkeypatch.setattr(torch.nn.functional, "linear", nosy)
    with (
        HfEngine(qwen, length=430, slots=16) as engine,
        pytest.raises(ProofFailed, match="got other logits with neighbours than alone, on cuda in bfloat16"),
    ):
        engine.self_check(company(12))


# ---- whatever the number of slots ----------------------------------------------------------------------------------------


def test_batch_invariant_over_slots(qwen: LoadedModel) -> None:
    requests = company()
    made: list[dict[str, tuple[int, ...]]] = []
    for count in (32, 64, 128):
        with HfEngine(qwen, length=430, slots=count, mode="batch-invariant") as engine:
            made.append(made_by(engine, shuffled(requests, count)))
    assert made[0] == made[1] == made[2]


# ---- the backend and the memory ------------------------------------------------------------------------------------------


def test_attention_runs_on_kernels_that_repeat_their_bits(qwen: LoadedModel) -> None:
    with HfEngine(qwen, length=430, slots=16) as engine:
        requests = company(8)
        made_by(engine, requests, max_new_tokens=2)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
            engine._graph = None  # so that a decoding step, too, passes through the profiler
            made_by(engine, requests, max_new_tokens=2)
    names = {event.key for event in seen.key_averages()}
    assert any("_scaled_dot_product_efficient_attention" in name for name in names)  # prefill
    assert any("_attention_kernel" in name for name in names)  # decoding
    others = ("_scaled_dot_product_cudnn", "_scaled_dot_product_flash", "_scaled_dot_product_attention_math")
    assert not [name for name in names if any(other in name for other in others)]


def test_norms_gates_and_rotations_are_replaced_while_a_step_is_captured(qwen: LoadedModel) -> None:
    module = sys.modules[type(qwen.model.model.layers[0]).__module__]
    own = module.apply_rotary_pos_emb
    with quick_steps(qwen.model):
        replaced = [name for name, part in qwen.model.named_modules() if "forward" in vars(part)]
        assert sum(name.endswith("norm") for name in replaced) == 2 * SIZES["num_hidden_layers"] + 1
        assert sum(name.endswith("mlp") for name in replaced) == SIZES["num_hidden_layers"]
        assert module.apply_rotary_pos_emb is not own
    assert module.apply_rotary_pos_emb is own
    assert not any("forward" in vars(part) for part in qwen.model.modules())


def test_memory_that_really_runs_out(qwen: LoadedModel) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.memory_allocated()
    row = 2 * SIZES["num_hidden_layers"] * 2 * 64 * 512 * 2  # keys and values, layers, heads, width, tokens, bytes
    slots = 1 << ((2 << 30) // row).bit_length()  # 2 GiB of cache and more
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 30)) / total)
        with pytest.raises(
            OutOfMemory, match=rf"{slots} rows of 512 tokens do not fit.*accuracy\.slots={slots // 2}"
        ) as caught:
            HfEngine(qwen, length=512, slots=slots)
        assert caught.value.slots == slots
        del caught
        gc.collect()
        assert torch.cuda.memory_allocated() < before + (256 << 20)  # what was taken is given back
        with HfEngine(qwen, length=512, slots=16) as engine:
            assert len(made_by(engine, company(8), max_new_tokens=2)) == 8
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_memory_is_given_back(qwen: LoadedModel) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with HfEngine(qwen, length=512, slots=256) as engine:
            made_by(engine, company(8), max_new_tokens=2)
        del engine
        gc.collect()
        assert torch.cuda.memory_allocated() < before + (64 << 20)
