"""Only the layers asked for are read and run, and they compute what the whole model computes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, INDEX, LAYERS, change_config, save_many_modal, save_model, save_tokenizer, weight_map
from transformers import AutoModelForCausalLM

import mless
from mless.capture import received
from mless.errors import BadStudy, TokenizerFault, UnknownModel, UnsupportedArchitecture
from mless.models import describe, load, processor
from mless.models.adapters import activation_of
from mless.models.loading import fingerprint
from mless.models.tokenizers import open_tokenizer
from mless.values import Prompt, Span

IDS = tuple(int(n) for n in np.random.default_rng(1).integers(2, 300, 40))
PROMPT = Prompt("1", "none", IDS, (Span("question", 0, len(IDS)),), "")
TOKENS = torch.tensor([IDS])


def states(model: Any) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        return model(input_ids=TOKENS, use_cache=False, output_hidden_states=True).hidden_states


def last_state(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS, use_cache=False).last_hidden_state


def drop_shards(folder: Path, needed: int) -> set[str]:
    """Delete every shard that holds nothing of the embeddings or of the first `needed` layers."""
    kept, gone = set[str](), set[str]()
    for key, file in weight_map(folder).items():
        numbers = [int(part) for part in key.split(".") if part.isdigit()]
        if (numbers and numbers[0] < needed) or any(name in key for name in ("embed_tokens", "embed_in", "wte", "wpe")):
            kept.add(file)
        else:
            gone.add(file)
    for file in gone - kept:
        (folder / file).unlink()
    return gone - kept


@pytest.mark.parametrize("family", list(CONFIGS))
def test_layer_1_opens_no_shard_it_does_not_need(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / family, family, shard="1KB")
    whole = mless.load(str(folder))
    gone = drop_shards(folder, 1)
    assert len(gone) > 20
    cut = mless.load(str(folder), layers=1)
    assert (cut.layers, cut.loaded_layers, cut.family, cut.heads) == (LAYERS, 1, family, 4)
    # The very states that the whole model hands from its first layer to its second.
    torch.testing.assert_close(last_state(cut.model), states(whole.model)[1], rtol=0, atol=0)
    ours, theirs = (next(received(model, [PROMPT], layers=[1])) for model in (cut, whole))
    np.testing.assert_array_equal(ours.received, theirs.received)
    np.testing.assert_array_equal(ours.mass, theirs.mass)
    with pytest.raises(UnknownModel, match=r"weight file 'model-\d+-of-\d+.safetensors' is missing .*fewer --layers"):
        mless.load(str(folder))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_the_whole_model_is_transformers_own_without_its_head(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / family, family)
    ours = mless.load(str(folder))
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    torch.testing.assert_close(last_state(ours.model), states(theirs)[-1], rtol=0, atol=0)
    names = {name for name, _ in ours.model.named_parameters()}
    assert not any("lm_head" in name or "embed_out" in name for name in names)
    assert sum(p.numel() for p in ours.model.parameters()) < sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("count", [2, 5, 6])
def test_a_cut_anywhere_hands_out_that_layers_states(tmp_path: Path, count: int) -> None:
    folder = save_model(tmp_path / "tiny", "gemma3_text", shard="1KB")
    expected = states(mless.load(str(folder)).model)[count]
    drop_shards(folder, count) if count < LAYERS else None
    cut = mless.load(str(folder), layers=[1, count])
    torch.testing.assert_close(last_state(cut.model), expected, rtol=0, atol=0)


def test_per_layer_lists_are_cut(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "gemma", "gemma3_text")
    kinds = mless.load(str(folder)).model.config.layer_types
    assert len(kinds) == LAYERS
    assert set(kinds) == {"sliding_attention", "full_attention"}
    cut = mless.load(str(folder), layers=2).model
    assert cut.config.layer_types == kinds[:2]
    assert len(cut.layers) == cut.config.num_hidden_layers == 2


def test_which_tensors_of_a_checkpoint_layer_1_needs() -> None:
    from mless.models.loading import _wanted  # pyright: ignore[reportPrivateUsage]

    needed = """model.embed_tokens.weight transformer.wte.weight transformer.wpe.weight gpt_neox.embed_in.weight
        model.layers.0.mlp.experts.7.up_proj.weight transformer.h.0.ln_1.weight model.embeddings.norm.weight
        model.embedding_norm.weight transformer.word_embeddings_layernorm.bias""".split()
    not_needed = """lm_head.weight embed_out.weight model.norm.weight transformer.ln_f.bias backbone.norm_f.weight
        gpt_neox.final_layer_norm.weight model.decoder.final_layer_norm.bias model.layers.1.input_layernorm.weight
        model.layers.10.mlp.up_proj.weight transformer.h.3.attn.c_attn.bias""".split()
    found = _wanted(dict.fromkeys(needed + not_needed, "model.safetensors"), 1, 12)
    assert sorted(found) == sorted(needed)
    whole = _wanted(dict.fromkeys(needed + not_needed, "model.safetensors"), 12, 12)
    assert sorted(set(needed + not_needed) - set(whole)) == ["embed_out.weight", "lm_head.weight"]


def test_layers_that_borrow_keys_are_counted_from_the_end() -> None:
    from mless.models.loading import _cut  # pyright: ignore[reportPrivateUsage]

    class Config:
        def __init__(self) -> None:
            self.num_hidden_layers, self.num_kv_shared_layers, self.layer_types = 35, 15, ["x"] * 35

    for count, left in ((35, 15), (30, 10), (20, 0), (1, 0)):
        config = Config()
        _cut(config, count)
        assert (config.num_hidden_layers, config.num_kv_shared_layers, len(config.layer_types)) == (count, left, count)


@pytest.mark.parametrize("old_names", [False, True], ids=["names-now", "names-before-4.52"])
def test_of_a_many_modal_model_the_text_part_alone_is_read(tmp_path: Path, old_names: bool) -> None:
    folder = save_many_modal(tmp_path / "gemma", old_names=old_names)
    eyes = [file for key, file in weight_map(folder).items() if "vision" in key or "projector" in key]
    assert len(eyes) > 50
    for file in eyes:
        (folder / file).unlink()
    model = mless.load(str(folder))
    assert (model.family, model.layers) == ("gemma3_text", LAYERS)
    assert not any("vision" in name for name, _ in model.model.named_parameters())
    prefix = "language_model.model." if old_names else "model.language_model."
    key = "layers.3.mlp.down_proj.weight"
    stored = load_file(folder / weight_map(folder)[prefix + key])[prefix + key]
    assert torch.equal(model.model.get_parameter(key), stored)
    assert mless.load(str(folder), layers=1).loaded_layers == 1


def test_weights_missing_from_the_checkpoint_are_never_random(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedArchitecture, match=r"1 weights were not in the checkpoint \(.*q_proj"):
        mless.load(str(folder), layers=1)


def test_the_final_norm_missing_is_a_fault_only_where_it_is_run(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert mless.load(str(folder), layers=LAYERS - 1).loaded_layers == LAYERS - 1
    with pytest.raises(UnsupportedArchitecture, match=r"not in the checkpoint \(norm.weight"):
        mless.load(str(folder))


def test_a_shard_that_lacks_what_the_index_says_is_a_fault(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", shard="1KB")
    names = weight_map(folder)
    names["model.layers.0.self_attn.q_proj.weight"] = names["model.embed_tokens.weight"]
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(UnknownModel, match="its index names 1 tensors that its files do not hold"):
        mless.load(str(folder), layers=1)


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = change_config(save_model(tmp_path / "tiny"), intermediate_size=40)
    with pytest.raises(UnsupportedArchitecture, match=r"do not belong together: .*\[.*48.*\] in the checkpoint"):
        mless.load(str(folder), layers=1)


@pytest.mark.parametrize("layers", [0, 7, -1, [1, 9]])
def test_a_layer_out_of_range_names_the_range(tmp_path: Path, layers: Any) -> None:
    folder = save_model(tmp_path / "tiny")
    with pytest.raises(BadStudy, match=r"no layer -?\d: tiny's layers are 1 to 6 \(numbered from 1\)"):
        mless.load(str(folder), layers=layers)


def test_layers_may_be_written_as_for_the_command(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "tiny"))
    assert mless.load(folder, layers="1-3").loaded_layers == 3
    assert mless.load(folder, layers="all").loaded_layers == 6
    with pytest.raises(BadStudy, match="cannot read 'every'; write 'all', a number, or a list"):
        mless.load(folder, layers="every")


def test_dtypes(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "tiny"))
    for dtype, expected in (("auto", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")):
        model = mless.load(folder, layers=1, dtype=dtype, device="cpu")
        assert model.dtype == expected
        assert {p.dtype for p in model.model.parameters()} == {getattr(torch, expected)}
    with pytest.raises(BadStudy, match=r"no dtype 'int4'; there are: auto, float32"):
        mless.load(folder, dtype="int4")


def test_above_a_billion_parameters_a_cpu_with_units_keeps_the_checkpoints_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "here", lambda: processor.Processor("x86_64", "avx512_bf16", None))
    folder = save_model(tmp_path / "tiny")
    tensors = {key: value.bfloat16() for key, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert mless.load(str(folder), device="cpu").dtype == "float32"
    monkeypatch.setattr("mless.models.processor.FP32_PARAMETERS", 30_000)
    assert mless.load(str(folder), device="cpu").dtype == "bfloat16"
    # What counts is what is read: the embedding and one layer are fewer.
    assert mless.load(str(folder), layers=1, device="cpu").dtype == "float32"


@pytest.mark.parametrize("device", ["tpu-of-my-dreams", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_named(tmp_path: Path, device: str) -> None:
    folder = save_model(tmp_path / "tiny")
    with pytest.raises(BadStudy, match=rf"no device '{device}' on this machine .*--device cpu"):
        mless.load(str(folder), device=device)


def test_the_fingerprint_tells_checkpoints_apart_and_nothing_else(tmp_path: Path) -> None:
    one = save_model(tmp_path / "one", shard="1KB")
    two = save_model(tmp_path / "two", shard="1KB")
    assert fingerprint(describe(str(one)).source) == fingerprint(describe(str(two)).source)
    assert mless.load(str(one), layers=2).fingerprint == mless.load(str(two), layers=2).fingerprint
    # Shards that are not needed may come and go.
    before = fingerprint(describe(str(one)).source)
    drop_shards(one, 1)
    assert fingerprint(describe(str(one)).source) == before
    key = "model.layers.0.self_attn.v_proj.weight"
    file = two / weight_map(two)[key]
    save_file({key: load_file(file)[key] + 0.01}, file, metadata={"format": "pt"})
    assert fingerprint(describe(str(two)).source) != before


_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaModel
Path({marker!r}).touch()
class MarkedConfig(LlamaConfig):
    model_type = "marked"
class MarkedModel(LlamaModel):
    config_class = MarkedConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder whose model brings its own code, and the file that appears when the code runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = save_model(tmp_path / "marked")
    (folder / "own_code.py").write_text(_CODE.format(marker=str(tmp_path / "marker")))
    own = {"AutoConfig": "own_code.MarkedConfig", "AutoModel": "own_code.MarkedModel"}
    return change_config(folder, model_type="marked", auto_map=own), tmp_path / "marker"


def test_code_from_elsewhere_does_not_run_unless_asked(with_code: tuple[Path, Path]) -> None:
    folder, marker = with_code
    with pytest.raises(UnsupportedArchitecture, match=r"its own code \(AutoConfig, AutoModel\).*--trust-remote-code"):
        mless.load(str(folder))
    assert not marker.exists()
    model = mless.load(str(folder), layers=1, trust_remote_code=True)
    assert marker.exists()
    assert type(model.model).__name__ == "MarkedModel"
    assert next(received(model, [PROMPT])).layers == [1]


def test_a_family_that_transformers_knows_needs_no_code_from_elsewhere(with_code: tuple[Path, Path]) -> None:
    folder, marker = with_code
    change_config(folder, model_type="llama")
    assert type(mless.load(str(folder), layers=1).model).__name__ == "LlamaModel"
    assert not marker.exists()


# ---- with the head, so that it can answer ------------------------------------------------------------------------------------


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize(
    ("family", "tied"),
    [  # each family in one of the two ways, in turn
        pytest.param(
            family, tied, id=f"{family}-{'tied' if tied else 'own-head'}", marks=[pytest.mark.slow] * ((n + tied) % 2)
        )
        for n, family in enumerate(CONFIGS)
        for tied in (False, True)
    ],
)
def test_with_its_head_it_is_transformers_own_model(tmp_path: Path, family: str, tied: bool) -> None:
    folder = save_model(tmp_path / family, family, shard="1KB", tie_word_embeddings=tied)
    assert tied != any("lm_head" in key or "embed_out" in key for key in weight_map(folder))
    model = load(str(folder), head=True)
    assert (model.layers, model.loaded_layers) == (LAYERS, LAYERS)
    assert torch.equal(logits(model.model), logits(AutoModelForCausalLM.from_pretrained(folder).eval()))
    assert torch.equal(logits(load(str(folder), head=True, layers=[1, LAYERS]).model), logits(model.model))


def test_without_the_head_asked_for_there_is_none(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama", shard="1KB")
    (folder / weight_map(folder)["lm_head.weight"]).unlink()
    assert not hasattr(load(str(folder)).model, "lm_head")


def test_a_head_needs_every_layer(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama")
    with pytest.raises(BadStudy, match="answers need every layer of llama; leave --layers out"):
        load(str(folder), head=True, layers=2)


def test_a_head_missing_from_the_checkpoint_is_never_random(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama", shard="1KB")
    index = folder / INDEX
    whole = json.loads(index.read_text())
    del whole["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(whole))
    with pytest.raises(UnsupportedArchitecture, match=r"1 weights were not in the checkpoint \(lm_head.weight"):
        load(str(folder), head=True)
    assert load(str(folder)).loaded_layers == LAYERS


def test_the_tokens_that_end_an_answer_come_with_the_head(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "_from_model_config": False}))
    assert load(str(folder), head=True).model.generation_config.eos_token_id == [1, 7]
    (folder / "generation_config.json").unlink()
    assert load(str(folder), head=True).layers == LAYERS


@pytest.mark.parametrize("old_names", [False, True], ids=["names-now", "names-before-4.52"])
def test_the_text_part_of_a_many_modal_model_gets_its_head(tmp_path: Path, old_names: bool) -> None:
    folder = save_many_modal(tmp_path / "gemma", old_names=old_names)
    for key, file in weight_map(folder).items():
        if "vision" in key or "projector" in key:
            (folder / file).unlink()
    model = load(str(folder), head=True)
    bare = load(str(folder))
    assert not any("vision" in name for name, _ in model.model.named_parameters())
    embedding = model.model.get_input_embeddings().weight.detach()  # Gemma's head is its embedding
    torch.testing.assert_close(logits(model.model), last_state(bare.model) @ embedding.T)


def test_the_fingerprint_with_the_head_sees_the_head(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "one", shard="1KB")
    source = describe(str(folder)).source
    bare, with_head = fingerprint(source, LAYERS), fingerprint(source, LAYERS, head=True)
    assert bare != with_head
    assert load(str(folder), head=True).fingerprint == with_head
    for key in ("lm_head.weight", "model.norm.weight"):
        file = folder / weight_map(folder)[key]
        held = load_file(file)
        save_file(held | {key: held[key] + 0.01}, file, metadata={"format": "pt"})
        assert fingerprint(source, LAYERS) == bare
        assert fingerprint(source, LAYERS, head=True) != with_head
        with_head = fingerprint(source, LAYERS, head=True)


def test_the_fingerprint_sees_every_bit_that_is_read(tmp_path: Path) -> None:
    """The first half of a tensor five times as large, and one bit of each tensor in turn, in either half."""
    rng = random.Random(0)
    folder = save_model(tmp_path / "one")
    source = describe(str(folder)).source
    file = folder / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    before = {count: fingerprint(source, count) for count in (1, LAYERS)}
    for key, entry in json.loads(content[8:start]).items():
        if key == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        for low, high in ((first, (first + last) // 2), ((first + last) // 2, last)):
            changed = bytearray(content)
            changed[start + rng.randrange(low, high)] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            behind = key in ("lm_head.weight", "model.norm.weight")
            assert (fingerprint(source, LAYERS) != before[LAYERS]) is not behind
            assert (fingerprint(source, 1) != before[1]) is ("embed" in key or "layers.0." in key)
    file.write_bytes(content)
    key = "model.layers.0.mlp.up_proj.weight"
    held = load_file(file)
    held[key][: len(held[key]) // 2] *= 5
    save_file(held, file, metadata={"format": "pt"})
    assert fingerprint(source) != before[1]


def test_a_tokenizer_alone(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "words", bos=True)
    (tmp_path / "empty").mkdir()
    for given in (folder, folder / "tokenizer.json"):
        assert open_tokenizer(str(given))("a").input_ids[0] == 0
    assert open_tokenizer("smollm2").chat_template
    with pytest.raises(TokenizerFault, match=r"is a folder without tokenizer\.json"):
        open_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(TokenizerFault, match=r"--tokenizer: .*no-such-tokenizer"):
        open_tokenizer(str(tmp_path / "no-such-tokenizer"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerFault, match=r"no tokenizer could be read from .*words.*--tokenizer"):
        open_tokenizer(str(folder))


def test_a_tokenizer_that_is_loaded_already(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    own = mless.load(str(folder)).tokenizer
    assert mless.load(str(folder), tokenizer=own).tokenizer is own
    large = open_tokenizer("smollm2")
    with pytest.raises(TokenizerFault, match=r"that was given has 49\d+ tokens, but the model .* knows 512"):
        mless.load(str(folder), tokenizer=large)


@pytest.mark.parametrize(
    ("family", "activation"), [("llama", "silu"), ("gemma3_text", "gelu_pytorch_tanh"), ("gpt2", "gelu_new")]
)
def test_what_a_description_says_of_the_mlps_and_the_size(tmp_path: Path, family: str, activation: str) -> None:
    described = describe(str(save_model(tmp_path, family)))
    assert activation_of(described.config) == activation
    whole = load(described).model
    assert described.built[1] == sum(one.numel() for one in whole.parameters())


def test_a_config_that_names_no_activation() -> None:
    from transformers import BloomConfig

    assert activation_of(BloomConfig()) is None
