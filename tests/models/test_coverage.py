"""The committed table of families is what a walk over them finds, and the walk finds what is wrong."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import transformers

from mless.errors import BadStudy, UnsupportedArchitecture
from mless.kernels import streaming
from mless.models import describe, load
from mless.study import load_study, run_study
from models import walking
from models.tiny_models import save_tokenizer
from models.walking import NOT_DECODERS, committed, families, save, visit

VERSION, TABLE = committed()
#: Those that have to work whatever happens to the rest.
NAMED = (
    "llama llama4 llama4_text qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text mistral mixtral "
    "ministral ministral3 phi phi3 phimoe phi4_multimodal gpt2 gptj gpt_neox opt bloom falcon mpt olmo olmo2 olmo3 granite starcoder2 cohere "
    "cohere2 glm4 gpt_oss deepseek_v2 deepseek_v3 smollm3 stablelm nemotron hunyuan_v1_dense hunyuan_v1_moe minimax exaone4 ernie4_5 "
    "ernie4_5_moe"
).split()
#: Of these, one for each way to attend; a visit takes a second, so all the others are in the slow tier.
FEW = (
    "llama llama4_text qwen3_next qwen3_moe gemma2 gemma3 gemma4_text mistral gpt2 gptj bloom falcon mpt cohere2 gpt_oss deepseek_v3 stablelm "
    "minimax"
).split()
OTHERS = sorted(set(TABLE) - set(FEW))

pinned = pytest.mark.skipif(
    transformers.__version__ != VERSION,
    reason=f"the table is of transformers {VERSION}: make it anew (tests/models/walking.py)",
)


@pinned
def test_every_family_of_the_mapping_has_its_row():
    assert {kind: row.model for kind, row in TABLE.items()} == families()


def test_those_left_out_are_left_out_for_a_reason():
    left_out = {kind: row.why for kind, row in TABLE.items() if row.attention == "left out"}
    assert left_out == NOT_DECODERS
    assert all(left_out.values())


def test_ninety_five_in_a_hundred_work_and_every_refusal_has_its_reason():
    counted = [row for row in TABLE.values() if row.attention != "left out"]
    assert sum(row.attention == "works" for row in counted) >= 0.95 * len(counted)
    assert not [row for row in counted if "failed" in (row.attention, row.activations)]
    assert all(row.why for row in counted if "refused" in (row.attention, row.activations))


def test_the_named_families_work():
    assert [kind for kind in NAMED if TABLE[kind].attention != "works"] == []


@pinned
@pytest.mark.parametrize("kind", FEW)
def test_a_family_of_each_kind_is_as_the_table_says(kind):
    assert visit(kind) == TABLE[kind]


@pinned
@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_every_other_family_is_as_the_table_says(kind):
    assert visit(kind) == TABLE[kind]


@pinned
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(NOT_DECODERS))
def test_none_that_is_left_out_is_measured_in_silence(kind, monkeypatch):
    monkeypatch.setattr(walking, "NOT_DECODERS", {})
    assert visit(kind).attention in ("refused", "failed")


#: Checkpoints of a family differ; here are settings that compute otherwise than the tiny model of the walk.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "every query head its own key head (Llama 1)": ("llama", {"num_key_value_heads": 4}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "biases (InternLM in Llama's form)": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "heads of 80": ("llama", {"head_dim": 80}),
    "windows in the later layers": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 7}),
    "no window": ("mistral", {"sliding_window": None}),
    "no soft cap": ("gemma2", {"attn_logit_softcapping": None}),
    "norm after, projected embeddings (OPT 350M)": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "one after the other": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "in parallel, normed heads": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "normed queries and keys": ("cohere", {"use_qk_norm": True}),
    "queries of full rank": ("deepseek_v2", {"q_lora_rank": None}),
    "ALiBi (Falcon RW)": ("falcon", {"alibi": True, "multi_query": False, "new_decoder_architecture": False}),
    "grouped heads (Falcon 40B)": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "every layer attends": ("granitemoehybrid", {"layer_types": ["full_attention"] * 4}),
    "shorter chunks": ("llama4_text", {"attention_chunk_size": 3}),
}


@pytest.mark.parametrize(
    "variant", [pytest.param(one, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, one in enumerate(VARIANTS)]
)
def test_a_variant_of_a_family_works_as_well(variant, monkeypatch):
    kind, settings = VARIANTS[variant]
    monkeypatch.setitem(walking.SETTINGS, kind, walking.SETTINGS.get(kind, {}) | settings)
    if variant.startswith("ALiBi"):
        # transformers' own eager attention adds Falcon's ALiBi twice (its model has put it into the mask); SDPA and ours do so once.
        monkeypatch.setattr(walking, "_eager_matrices", lambda model, layers: None)
    found = visit(kind)
    assert found.attention == "works", found.why


def test_the_worked_example_of_a_row_is_a_row_of_the_file():
    root = walking.TABLE.parents[1]
    page = (root / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    (row,) = re.findall(r'^    "\w+": Family\(.*\),$', page, flags=re.MULTILINE)
    assert row in (root / "src" / "mless" / "models" / "adapters.py").read_text(encoding="utf-8")
    (function,) = re.findall(r"^def \w+\(.*?(?=^```)", page, flags=re.MULTILINE | re.DOTALL)
    assert function in (root / "src" / "mless" / "models" / "unregistered.py").read_text(encoding="utf-8")


# ---- the walk finds what is wrong --------------------------------------------------------------------------------------


def test_numbers_that_are_not_eager_s_are_found_out(monkeypatch):
    def a_little_off(*args, **kwargs):
        sums = streaming.received(*args, **kwargs)
        sums.received[:, :, -1] *= 1.01
        return sums

    monkeypatch.setattr(walking, "received", partial(walking.received, kernel=a_little_off))
    verdict = visit("llama")
    assert verdict.attention == "failed"
    assert "layer 1: received differs from the model's own eager matrices" in verdict.why


def test_an_activation_read_in_the_wrong_place_is_found_out(monkeypatch):
    def before_the_non_linearity(model, layers):
        points = walking_points(model, layers)
        return [dataclasses.replace(point, act=point.owner.gate_proj) for point in points]

    walking_points = walking.activation_points
    monkeypatch.setattr(walking, "activation_points", before_the_non_linearity)
    verdict = visit("llama")
    assert verdict.activations == "failed"
    assert "not linear in the activation that was read" in verdict.why


def test_a_family_that_is_not_built_counts_as_a_miss(monkeypatch):
    monkeypatch.setitem(walking.SETTINGS, "llama", {"num_attention_heads": 5})
    verdict = visit("llama")
    assert (verdict.attention, verdict.activations) == ("failed", "failed")
    assert verdict.why.startswith("not built")


# ---- what a user sees --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Four layers, of which the second and the fourth attend."""
    folder = tmp_path_factory.mktemp("models") / "hybrid"
    folder.mkdir()
    save("olmo_hybrid", folder)
    return save_tokenizer(folder, bos=True)


def test_only_the_layers_of_a_hybrid_that_attend_are_measured(hybrid, tmp_path):
    assert describe(str(hybrid)).attending() == [4]
    small = {"model": str(hybrid), "limit": 2, "length": 5, "conditions": "none,mless"}
    folder = run_study(load_study("quick", small), tmp_path / "all").folder
    import polars as pl

    assert pl.read_parquet(folder / "attention.parquet")["layer"].unique().to_list() == [4]


@pytest.mark.parametrize("layers", ["1", "2-4"])
def test_a_layer_that_does_not_attend_is_refused_by_name_before_anything_is_loaded(hybrid, tmp_path, layers):
    study = load_study("quick", {"model": str(hybrid), "layers": layers})
    says = rf"layer {layers[0]} of hybrid is no softmax attention.*its attention layers are 4 \(numbered from 1\).*--layers"
    with pytest.raises(BadStudy, match=says):
        run_study(study, tmp_path / "none")


def test_and_so_it_is_by_the_instrument_itself(hybrid):
    model = load(str(hybrid), dtype="float32")
    with pytest.raises(BadStudy, match=r"layer 2 of OlmoHybridModel is no softmax attention.*attention layers are 4"):
        list(walking.received(model, [walking._prompt()], layers=[2, 4]))
    (attention,) = walking.received(model, [walking._prompt()])
    assert attention.layers == [4]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("reformer", r"ReformerModel: no attention modules.*no row that says how.*see docs/adding-a-model\.md"),
        (
            "deepseek_v4",
            r"layer 1: DeepseekV4Attention adds keys that stand for several tokens each.*docs/adding-a-model\.md",
        ),
        ("minimax_m3_vl_text", r"MiniMaxM3VLAttention's heads see different keys.*docs/adding-a-model\.md"),
    ],
)
def test_a_family_that_cannot_be_measured_is_refused_by_name_with_the_way_out(tmp_path, kind, says):
    save(kind, tmp_path)
    model = load(str(save_tokenizer(tmp_path, bos=True)), dtype="float32")
    with pytest.raises(UnsupportedArchitecture, match=says):
        list(walking.received(model, [walking._prompt()]))
