"""Weights kept in 16 bits compute as the same weights loaded in float32 do, bit for bit, wherever a model is used."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import change_config, save_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import mless
from interrupted import about_changed
from mless import redistribution
from mless.engines.base import Decoding, Request
from mless.engines.hf import HfEngine
from mless.models import LoadedModel, processor, widening
from mless.models.processor import Processor
from mless.models.widening import Narrow, as_stored, keep_narrow, raw, widened
from mless.proofs import prove
from mless.values import ArmSettings, Prompt, Span
from tiny import BASE, FAMILIES

#: Tied embeddings (Gemma, GPT-2, OPT), experts, learned positions with an offset (OPT), convolutions beside attention (LFM2, Falcon H1).
WIDENED: dict[str, dict[str, Any]] = FAMILIES | {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "bloom": {},
    "lfm2": {},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
}
PLAIN = Processor("x86_64", None, None)
UNITS = Processor("x86_64", "amx_bf16", None)


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tiny models were large, on a processor without 16-bit units."""
    monkeypatch.setattr(widening, "_SMALL", 1)
    monkeypatch.setattr(processor, "FP32_PARAMETERS", 1000)
    monkeypatch.setattr(processor, "here", lambda: PLAIN)


def saved(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    settings = BASE | WIDENED[family]
    if family == "gpt2":
        settings = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}
    # Ten times the usual spread, so that a wrong weight shows.
    settings |= {"initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def both(folder: Path) -> tuple[Any, Any]:
    """The model loaded in float32, and the model whose weights stay as they are stored."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with as_stored():
        narrow = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    keep_narrow(narrow)
    return plain, narrow


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("family", WIDENED)
def test_bits_are_those_of_the_model_in_float32(family: str, tmp_path: Path) -> None:
    plain, narrow = both(saved(tmp_path, family))
    wide = [weight for weight in narrow.parameters() if weight.ndim > 1]
    assert all(isinstance(weight, Narrow) and raw(weight).dtype == torch.bfloat16 for weight in wide)
    assert narrow.dtype == torch.float32
    for one, other in zip(plain.parameters(), narrow.parameters(), strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one, widened(other))
    for (name, one), (_, other) in zip(plain.named_buffers(), narrow.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    ids = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours, theirs = narrow(input_ids=ids, use_cache=True), plain(input_ids=ids, use_cache=True)
        assert torch.equal(ours.logits, theirs.logits)
        assert type(ours.logits) is torch.Tensor
        if family != "falcon_h1":  # what it keeps between two steps is no business of the weights
            step = torch.full((2, 1), 7)
            after = [
                model(input_ids=step, past_key_values=out.past_key_values).logits
                for model, out in ((narrow, ours), (plain, theirs))
            ]
            assert torch.equal(*after)


@pytest.mark.usefixtures("every_size")
def test_float16_is_widened_too(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    tensors = {name: value.half() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain, narrow = both(folder)
    assert raw(narrow.lm_head.weight).dtype == torch.float16
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(narrow(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.usefixtures("every_size")
def test_tied_weights_stay_tied_and_are_kept_once(tmp_path: Path) -> None:
    _, narrow = both(saved(tmp_path, "gemma3_text"))
    embedding, head = narrow.get_input_embeddings().weight, narrow.get_output_embeddings().weight
    assert embedding is head
    assert isinstance(head, Narrow)
    assert isinstance(head, nn.Parameter)


def test_a_checkpoint_keeps_what_it_has_wide(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full((48,), 1 + 2.0**-12)  # no bf16 number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain, narrow = both(folder)
    assert torch.equal(plain.model.norm.weight, narrow.model.norm.weight)


def test_transformers_plans_as_before_afterwards() -> None:
    before = PreTrainedModel._get_dtype_plan
    with as_stored():
        assert PreTrainedModel._get_dtype_plan is not before
    assert PreTrainedModel._get_dtype_plan is before
    with pytest.raises(RuntimeError, match="stop"), as_stored():
        raise RuntimeError("stop")
    assert PreTrainedModel._get_dtype_plan is before


class _Seen(torch.overrides.TorchFunctionMode):
    """The sizes of every float32 tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and type(out) is torch.Tensor:
            self.sizes.append(out.numel())
        return out


def test_of_an_embedding_only_the_rows_are_widened_and_of_experts_only_the_asked() -> None:
    weight = torch.randn(1000, 8).bfloat16()
    table = nn.Embedding(1000, 8)
    table.weight = nn.Parameter(weight.as_subclass(Narrow), requires_grad=False)
    with _Seen() as seen:
        found = table(torch.tensor([3, 999]))
    assert torch.equal(found, weight[[3, 999]].float())
    assert max(seen.sizes) <= 16
    experts = torch.randn(4, 6, 5).bfloat16().as_subclass(Narrow)
    one = experts[2]
    assert isinstance(one, Narrow)
    x = torch.randn(3, 5)
    assert torch.equal(nn.functional.linear(x, one), nn.functional.linear(x, raw(experts)[2].float()))
    assert torch.equal(x @ one.T, x @ raw(one).float().T)


def test_products_share_memory_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (torch.randn(6, 5).bfloat16().as_subclass(Narrow) for _ in range(2))
    x = torch.randn(3, 5)
    expected = [nn.functional.linear(x, widened(weight)) for weight in (one, other)]
    with torch.inference_mode():
        found = [nn.functional.linear(x, weight) for weight in (one, other)]
    with torch.no_grad():  # what was made inside inference mode serves outside too
        found += [nn.functional.linear(x, weight) for weight in (one, other)]
        found += [torch.matmul(x, weight.T) for weight in (one, other)]
        assert torch.equal(torch.addmm(torch.ones(5), torch.ones(3, 6), one), 1 + torch.ones(3, 6) @ widened(one))
        assert torch.equal(torch.matmul(one, other.T), widened(one) @ widened(other).T)
        monkeypatch.setattr(widening, "_REUSED", 10)
        found += [nn.functional.linear(x, weight) for weight in (one, other)]
    assert all(torch.equal(ours, expected[n % 2]) for n, ours in enumerate(found))
    # With gradients the input's may need the weight again.
    x.requires_grad_()
    sum(nn.functional.linear(x, weight).sum() for weight in (one, other)).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], widened(one).sum(0) + widened(other).sum(0))


def test_a_narrow_weight_is_float32_to_whoever_asks() -> None:
    numbers = torch.randn(40, 30).bfloat16()
    weight = nn.Parameter(numbers.as_subclass(Narrow), requires_grad=False)
    assert weight.dtype == torch.float32
    assert weight.shape == (40, 30)
    assert weight.device.type == "cpu"
    assert weight.float().dtype == weight.to(torch.float32).dtype == torch.float32
    assert type(weight + 1) is torch.Tensor
    assert torch.equal(torch.cat([weight, weight]), torch.cat([numbers, numbers]).float())
    assert torch.equal(torch.einsum("ij,kj->ik", weight, weight), numbers.float() @ numbers.float().T)
    again = copy.deepcopy({"weight": weight})["weight"]
    assert torch.equal(raw(again), numbers)
    assert raw(again).data_ptr() != raw(weight).data_ptr()
    assert "computes in float32" in repr(weight)
    assert widened(numbers) is numbers


@pytest.mark.usefixtures("every_size")
def test_a_write_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    plain, narrow = both(saved(tmp_path, "llama"))
    weight = narrow.lm_head.weight
    before = raw(weight).clone()
    with pytest.raises(RuntimeError, match=r"copy_ would write to a float32 copy .*load with dtype float32"):
        narrow.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    with pytest.raises(RuntimeError, match="__setitem__ would write"):
        weight[0] = 0
    with pytest.raises(RuntimeError, match="mul_ would write"):
        weight *= 2
    with pytest.raises(RuntimeError, match="zero_ would write"):
        weight.data.zero_()
    with pytest.raises(RuntimeError, match="add with out= would write"):
        torch.add(before.float(), 1, out=weight)
    with pytest.raises(RuntimeError, match="setting data would write"):
        weight.data = torch.zeros(weight.shape)
    with pytest.raises(RuntimeError, match="setting data would write"):
        narrow.double()
    assert torch.equal(raw(weight), before)
    narrow.to("cpu").float().requires_grad_(False)  # changes nothing
    assert raw(narrow.lm_head.weight).dtype == torch.bfloat16


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # Gemma ties its embeddings
def test_saved_weights_are_the_16_bit_ones(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "first", family)
    plain, narrow = both(folder)
    state = narrow.state_dict()
    assert not any(isinstance(value, Narrow) for value in state.values())
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "state.safetensors")
    expected = plain.state_dict()
    stored = load_file(tmp_path / "state.safetensors")
    assert stored.keys() == expected.keys()
    for name, value in stored.items():
        assert torch.equal(value.float(), expected[name]), name
    part = narrow.model.layers[0].state_dict()
    assert part["self_attn.q_proj.weight"].dtype == torch.bfloat16
    for number, model in enumerate((narrow, copy.deepcopy(narrow))):
        model.save_pretrained(tmp_path / str(number))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(number), dtype=torch.float32)
        for one, other in zip(plain.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("every_size")
def test_a_copied_module_has_parameters_of_its_own(tmp_path: Path) -> None:
    _, narrow = both(saved(tmp_path, "gemma3_text"))
    copied = copy.deepcopy(narrow)
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in narrow.named_parameters()]
    assert copied.get_input_embeddings().weight is copied.get_output_embeddings().weight
    for one, other in zip(narrow.parameters(), copied.parameters(), strict=True):
        assert isinstance(other, nn.Parameter)
        assert isinstance(other, Narrow) == isinstance(one, Narrow)
        assert not other.requires_grad
        assert raw(one).data_ptr() != raw(other).data_ptr()
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(narrow(input_ids=ids).logits, copied(input_ids=ids).logits)


# ---- in the house: loading, proofs, capture, ARM, answers, study.json ------------------------------------------------


def stored_in_bf16(folder: Path) -> str:
    save_model(folder, max_position_embeddings=2048)
    tensors = {key: value.bfloat16() for key, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(change_config(folder, dtype="bfloat16"))


@pytest.fixture
def pair(tmp_path: Path, every_size: None, monkeypatch: pytest.MonkeyPatch) -> tuple[LoadedModel, LoadedModel]:
    """The same checkpoint, with weights kept in bf16 and loaded in float32; both can answer."""
    folder = stored_in_bf16(tmp_path / "tiny")
    narrow = mless.load(folder, head=True, device="cpu")
    return narrow, mless.load(folder, head=True, device="cpu", dtype="float32")


def prompt(seed: int = 0) -> Prompt:
    ids = torch.randint(2, 300, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
    spans = (Span("start", 0, 1), Span("system", 1, 6), Span("filler", 6, 14), Span("question", 14, 24))
    return Prompt(str(seed), "mless", (0, *ids[1:]), spans, "")


def test_loading_says_what_it_computes_in_and_why(pair: tuple[LoadedModel, LoadedModel]) -> None:
    narrow, wide = pair
    assert (narrow.dtype, narrow.stored) == ("float32", "bfloat16")
    assert narrow.why is not None
    assert narrow.why.endswith("no bf16 units on this processor (x86_64)")
    assert (wide.dtype, wide.stored, wide.why) == ("float32", "float32", "asked for")
    assert narrow.computing() == {
        "dtype": "float32",
        "weights": "bfloat16",
        "why": narrow.why,
        "threads": torch.get_num_threads(),
        "processor": {"machine": "x86_64", "bfloat16": None, "float16": None, "limit": None},
    }
    held = sum(raw(weight).nbytes for weight in narrow.model.parameters())
    assert held < 0.55 * sum(weight.nbytes for weight in wide.model.parameters())


def test_masks_among_the_weights_are_not_counted(
    tmp_path: Path, every_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older GPT-NeoX checkpoints keep their causal masks, as BOOL or U8."""
    folder = save_model(tmp_path / "tiny", "gpt_neox")
    tensors = {key: value.bfloat16() for key, value in load_file(folder / "model.safetensors").items()}
    parameters = sum(value.numel() for key, value in tensors.items() if "embed_out" not in key)
    for n, kind in enumerate((torch.bool, torch.uint8, torch.int64)):
        tensors[f"gpt_neox.layers.{n}.attention.bias"] = torch.ones(1, 1, 300, 300).to(kind)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = mless.load(str(folder), device="cpu")
    assert (model.dtype, model.stored) == ("float32", "bfloat16")
    monkeypatch.setattr(processor, "FP32_PARAMETERS", parameters)  # the masks alone are more
    assert mless.load(str(folder), device="cpu").stored == "float32"


def test_with_units_a_large_model_computes_in_its_own(
    tmp_path: Path, every_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "here", lambda: UNITS)
    said: list[str] = []
    model = mless.load(stored_in_bf16(tmp_path / "tiny"), layers=1, device="cpu", say=said.append)
    assert (model.dtype, model.stored, said) == ("bfloat16", "bfloat16", [])
    assert not any(isinstance(weight, Narrow) for weight in model.model.parameters())


def test_asked_for_bf16_without_units_is_said_loudly(tmp_path: Path, every_size: None) -> None:
    said: list[str] = []
    model = mless.load(stored_in_bf16(tmp_path / "tiny"), layers=1, dtype="bfloat16", device="cpu", say=said.append)
    assert model.dtype == "bfloat16"
    assert len(said) == 1
    assert said[0].startswith("WARNING: bfloat16 is emulated here")
    assert said[0].endswith("leave --dtype out, or use --dtype float32")


def test_the_instruments_read_the_same_bits(pair: tuple[LoadedModel, LoadedModel]) -> None:
    ids = torch.tensor([prompt(2).token_ids])
    sums: list[torch.Tensor] = []
    for model in pair:
        with mless.capturing(model.model, layers=[1, 6]) as recorder, torch.inference_mode():
            model.model(input_ids=ids)
        sums.append(torch.stack([recorder.sums[layer].received for layer in (1, 6)]))
    assert torch.equal(*sums)
    settings = ArmSettings(c=0.3)
    found: list[torch.Tensor] = []
    for model in pair:
        with redistribution.attached(model.model, settings), torch.inference_mode():
            found.append(model.model(input_ids=ids).logits)
    assert torch.equal(*found)
    cut = [
        mless.load(model.name, layers=2, device="cpu", dtype=dtype)
        for model, dtype in zip(pair, ("auto", "float32"), strict=True)
    ]
    assert [model.stored for model in cut] == ["bfloat16", "float32"]
    assert prove(cut[0], prompt(3), [1, 2]) == prove(cut[1], prompt(3), [1, 2])


@pytest.mark.parametrize("mode", ["row-stable", "batch-invariant"])
def test_answers_are_the_same_tokens(pair: tuple[LoadedModel, LoadedModel], mode: Any) -> None:
    requests = [Request("none", str(n), seed=n, token_ids=prompt(n).token_ids) for n in range(3)]
    answers: list[dict[str, tuple[int, ...]]] = []
    for model in pair:
        with HfEngine(model, length=64, slots=16, mode=mode) as engine:
            engine.self_check(requests)
            assert engine.about()["computing"]["weights"] == model.stored
            answers.append({r.item: r.token_ids for r in engine.generate(requests, Decoding(max_new_tokens=5))})
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3


def test_a_study_records_it_and_is_resumed_by_the_name_of_the_dtype(
    tmp_path: Path, every_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored_in_bf16(tmp_path / "tiny")
    asked = {"model": folder, "layers": "1", "limit": 2, "device": "cpu", "out": tmp_path / "out"}
    mless.run("quick", **asked)
    device = json.loads((tmp_path / "out" / "study.json").read_text())["device"]
    assert (device["kind"], device["dtype"], device["weights"]) == ("cpu", "float32", "bfloat16")
    assert device["processor"]["bfloat16"] is None
    monkeypatch.setattr(processor, "here", lambda: UNITS)
    (tmp_path / "out" / "retained.parquet").unlink()
    with about_changed(tmp_path / "out") as about:
        about["complete"] = False
    with pytest.raises(mless.MlessError, match="it differs in dtype in use; choose another --out"):
        mless.run("quick", **asked)
