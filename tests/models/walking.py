"""The walk: every family of transformers' AutoModelForCausalLM as a tiny random model, saved, loaded as mless loads it, and measured.

docs/coverage.json keeps what it found, docs/make_pages.py prints that, and test_coverage.py holds it to the truth. To make it anew:

PYTHONPATH=tests python -m models.walking               and then: make docs
PYTHONPATH=tests python -m models.walking MODEL_TYPE …  only show what becomes of these
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mless.capture import received
from mless.capture.activations import read_activations
from mless.errors import MlessError, UnsupportedArchitecture
from mless.models import LoadedModel, load
from mless.models.activations import activation_points, decoder_of
from mless.models.quiet import quiet_transformers
from mless.models.seams import attention_modules, configs_of
from mless.proofs import prove, prove_reading
from models.tiny_models import save_tokenizer
from tiny import prompt_of

TABLE = Path(__file__).resolve().parents[2] / "docs" / "coverage.json"
TOKENS = 40
VOCABULARY = 400
#: A model that is larger was not made tiny.
_MOST_PARAMETERS = 30_000_000

#: Small values for what configs call their sizes; a config takes those that it has a field for.
SIZES: dict[str, Any] = (
    dict.fromkeys("vocab_size vocab_size_per_layer_input".split(), VOCABULARY)
    | dict.fromkeys("max_position_embeddings n_positions n_ctx max_seq_len max_target_positions".split(), 256)
    | dict.fromkeys("hidden_size d_model n_embd emb_dim embedding_size".split(), 64)
    | dict.fromkeys(
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff ffn_hidden_size".split(), 96
    )
    | dict.fromkeys("dense_intermediate_size intermediate_size_mlp".split(), 96)
    | dict.fromkeys("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers".split(), 4)
    | dict.fromkeys("num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads".split(), 4)
    | dict.fromkeys("encoder_attention_heads".split(), 4)
    | dict.fromkeys("num_key_value_heads global_num_key_value_heads num_global_key_value_heads".split(), 2)
    | dict.fromkeys(
        "head_dim kv_channels dim_head attention_head_size linear_head_dim query_pre_attn_scalar".split(), 16
    )
    # shorter than the prompt, so that it bites
    | dict.fromkeys("sliding_window attention_chunk_size window_size local_attention attention_window_size".split(), 7)
    | dict.fromkeys("sliding_window_size".split(), 7)
    | dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 4)
    | dict.fromkeys("num_experts_per_tok moe_topk moe_k num_experts_per_token".split(), 2)
    | dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size".split(), 32)
    | dict.fromkeys("shared_intermediate_size moe_shared_expert_intermediate_size".split(), 32)
    | dict.fromkeys("n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts".split(), 1)
    | dict.fromkeys("first_k_dense_replace num_dense_layers moe_layer_start_index".split(), 1)
    # a key that is longer than its value
    | {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "rotary_dim": 8, "hidden_size_per_layer_input": 16}
    | dict.fromkeys("mamba_d_state state_size ssm_state_size linear_key_head_dim linear_value_head_dim".split(), 16)
    | dict.fromkeys("mamba_n_heads mamba_num_heads n_mamba_heads linear_num_value_heads linear_num_heads".split(), 4)
    | dict.fromkeys("linear_num_key_heads".split(), 2)
    | dict.fromkeys("mamba_n_groups n_groups mamba_ngroups".split(), 1)
    | dict.fromkeys("mamba_chunk_size chunk_size block_size".split(), 16)
    | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    | dict.fromkeys("attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout".split(), 0.0)
    | {"image_size": 28, "patch_size": 14}
)
_HYBRID = ["linear_attention", "full_attention"] * 2
_WINDOWS = ["sliding_attention", "full_attention"] * 2
#: What a family needs besides, by the model_type of its config or of the part of it that is meant.
SETTINGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_local_encoder": {"hidden_size_global": 128},
    "blt_local_decoder": {"hidden_size_global": 128},
    "blt_global_transformer": {"hidden_size": 128},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "gemma2": {"attn_logit_softcapping": 2.0, "layer_types": _WINDOWS},  # low, so that the cap bites
    "gemma3_text": {"layer_types": _WINDOWS},
    "gemma3n_text": {
        "layer_types": _WINDOWS,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "hrm_text": {"H_cycles": 2, "L_cycles": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _HYBRID},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mpt": {"attn_config": {"alibi": True}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": (16, 16),
        "axial_pos_embds_dim": (32, 32),
        "attn_layers": ["local", "lsh"] * 2,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    # towers beside the decoder
    "got_ocr2": {"image_seq_length": 4},
}

#: No softmax-attention decoders, each with its reason. They are not counted.
NOT_DECODERS: dict[str, str] = (
    dict.fromkeys("falcon_mamba mamba mamba2".split(), "state-space: no attention in any layer")
    | dict.fromkeys("rwkv xlstm".split(), "recurrent: no softmax attention in any layer")
    | dict.fromkeys(
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet bert-generation".split(),
        "the decoder half of an encoder-decoder",
    )
    | dict.fromkeys("trocr whisper".split(), "the decoder half of an encoder-decoder that reads pictures or sound")
    | dict.fromkeys("musicgen musicgen_melody".split(), "sound codes out of a text encoder's states")
    | dict.fromkeys(
        "bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm "
        "roc_bert roformer xlm-roberta xlm-roberta-xl xmod".split(),
        "an encoder: its tokens see both ways",
    )
    | dict.fromkeys(
        "gemma4_assistant gemma4_unified_assistant".split(),
        "a drafting head: it has no keys of its own, it attends to those of the model it drafts for",
    )
    | dict.fromkeys("xlm xlnet".split(), "trained to see both ways (masked or permuted)")
    | {"cpmant": "reads its prompt both ways, behind tokens of its own"}
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one family: `works`, `refused`, `failed` or `left out`, for attention and for activations, and why."""

    model_type: str
    model: str
    attention: str
    activations: str
    why: str = ""


def families() -> dict[str, str]:
    """model_type → class, as the installed transformers maps them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return {kind: name if isinstance(name, str) else name[0] for kind, name in NAMES.items()}


# ---- a tiny random model ---------------------------------------------------------------------------------------------


def tiny_config(model_type: str, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return _tiny(CONFIG_MAPPING[model_type], SETTINGS.get(model_type, {}) | changes)


def _tiny(kind: Any, besides: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    known = {field.name for field in dataclasses.fields(kind)}
    settings = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:  # such families mean the rotated part of a head by it
        settings |= {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
    for name, part in (getattr(kind, "sub_configs_defaults", None) or kind.sub_configs).items():
        inner = getattr(part, "config_class", part)
        inner = CONFIG_MAPPING[part.model_type] if inner.__name__ == "AutoConfig" else inner
        if name in known and name not in besides and inner.model_type:
            settings[name] = _tiny(inner, SETTINGS.get(inner.model_type, {}))
    return kind(**settings | besides)


def build(model_type: str, **changes: Any) -> Any:
    """A model of the mapping's class. Fresh weights are near zero, which makes every attention nearly even; these are not."""
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    config = tiny_config(model_type, **changes)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size} parameters are not tiny")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=1.5 / module.in_features**0.5)
            elif isinstance(module, Conv1D):
                module.weight.normal_(std=1.5 / module.nx**0.5)
        for name, weight in model.named_parameters():
            if weight.ndim == 3 and "expert" in name:
                weight.normal_(std=1.0 / weight.shape[-1] ** 0.5)
            if "sink" in name:
                weight.normal_()
    return model


def save(model_type: str, folder: Path) -> None:
    """The family's tiny model as a checkpoint of it is published."""
    if model_type == "gemma3n":
        # Its eyes need a package that is not here, and mless reads the text part alone.
        text = build("gemma3n_text")
        config = tiny_config("gemma3n")
        config.architectures = [families()["gemma3n"]]
        config.save_pretrained(folder)
        weights = {key.replace("model.", "model.language_model.", 1): value for key, value in text.state_dict().items()}
        weights.pop("lm_head.weight")  # tied
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    build(model_type).save_pretrained(folder)
    if model_type == "deepseek_v4":
        # transformers cannot read back the names that it writes; published ones have no prefix.
        weights = load_file(folder / "model.safetensors")
        save_file(
            {key.removeprefix("model."): value for key, value in weights.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )


# ---- one family ------------------------------------------------------------------------------------------------------


def visit(model_type: str) -> Verdict:
    model_class = families()[model_type]
    if model_type in NOT_DECODERS:
        return Verdict(model_type, model_class, "left out", "left out", NOT_DECODERS[model_type])
    with (
        tempfile.TemporaryDirectory(prefix="mless-walk-") as place,
        warnings.catch_warnings(),
        quiet_transformers(),
    ):
        warnings.simplefilter("ignore")
        folder = Path(place)
        try:
            save(model_type, folder)
        except Exception as fault:  # noqa: BLE001 -- whatever it is, the family was not built
            return Verdict(model_type, model_class, "failed", "failed", f"not built: {_line(fault)}")
        save_tokenizer(folder, bos=True)
        try:
            model = load(str(folder), dtype="float32", device="cpu")
        except Exception as fault:  # noqa: BLE001
            return Verdict(model_type, model_class, _kind(fault), _kind(fault), _line(fault))
        attention, first = _judged(_check_attention, model)
        activations, second = _judged(_check_activations, model)
        return Verdict(model_type, model_class, attention, activations, "; ".join(filter(None, [first, second])))


def _judged(check: Any, model: LoadedModel) -> tuple[str, str]:
    try:
        return "works", check(model)
    except Exception as fault:  # noqa: BLE001
        return _kind(fault), _line(fault)


def _kind(fault: Exception) -> str:
    return "refused" if isinstance(fault, UnsupportedArchitecture) else "failed"


def _line(fault: Exception) -> str:
    """The reason alone: neither the folder, nor the class, nor the way out, which are the same for all."""
    text = (str(fault).strip().splitlines() or [""])[0]
    if not isinstance(fault, MlessError):
        return f"{type(fault).__name__}: {text}"
    shorter = {
        r"^[\w.-]+: ": "",
        r"^layers \d+ and \d+": "layers",
        r"^layer \d+:? (is an? )?": "",
        r"of layer \d+": "of a layer",
    }
    for pattern, instead in shorter.items():
        text = re.sub(pattern, instead, text)
    return re.split(r", (?:so|whose|and its) |; see docs/", text)[0]


def _prompt() -> Any:
    return prompt_of(("start", 1), ("system", 9), ("filler", 8), ("question", TOKENS - 18), seed=1)


def _check_attention(model: LoadedModel) -> str:
    """The proofs, and every matrix that the model materialises by itself with eager attention; says what was not to be had."""
    layers = sorted(attention_modules(model.model))
    prove(model, _prompt(), layers)
    (ours,) = received(model, [_prompt()], layers=layers)
    said: list[str] = []
    if set(range(1, model.loaded_layers + 1)) - set(layers):
        said.append("not every layer attends")
    matrices = _eager_matrices(model, layers)
    if matrices is None:
        said.append("returns no eager matrices, so only the proofs were held against eager")
    else:
        for at, (layer, matrix) in enumerate(zip(layers, matrices, strict=True)):
            truth = torch.tril(matrix[0].double(), diagonal=-1).sum(-2)
            if ours.mass[at, :, -1].max() > 1e-3 and float(matrix.sum(-1).min()) > 1 - 1e-4:
                said.append("its eager matrices leave the sink out, so only the proofs were held against eager")
                break
            mine = torch.from_numpy(ours.received[0, at] * ours.n[0, at]).double()
            mine = torch.where(torch.from_numpy(ours.n[0, at]) > 0, mine, 0.0)
            error = float(((mine - truth).abs() / truth.clamp(min=1.0)).max())
            if not error < 1e-4:
                raise AssertionError(
                    f"layer {layer}: received differs from the model's own eager matrices by {error:.2g}"
                )
    return "; ".join(said)


def _eager_matrices(model: LoadedModel, layers: list[int]) -> list[Tensor] | None:
    """What the model itself returns with eager attention, for the layers asked for; None where it returns nothing of the kind."""
    ids = torch.tensor([_prompt().token_ids])
    plain: Any = model.model
    before = [(config, config._attn_implementation) for config in configs_of(plain).values()]
    try:
        for config, _ in before:
            config._attn_implementation = "eager"
        with torch.inference_mode():
            found = plain(input_ids=ids, use_cache=False, output_attentions=True).attentions or ()
    finally:
        for config, name in before:
            config._attn_implementation = name
    if len(found) == model.loaded_layers:  # an entry for every layer, whatever it is
        found = [found[layer - 1] for layer in layers]
    square = [
        one for one in found if isinstance(one, Tensor) and one.ndim == 4 and one.shape[-1] == one.shape[-2] == TOKENS
    ]
    if square and len(square) != len(layers):
        raise AssertionError(f"{len(square)} eager matrices for {len(layers)} layers")
    return square or None


def _check_activations(model: LoadedModel) -> str:
    """What is read is what the MLP goes on with: its output is linear in it, and changes when it does."""
    blocks = decoder_of(model.model)[1]
    whole = list(range(1, len(blocks) + 1))
    placed: list[int] = []
    refused: dict[str, None] = {}
    for layer in whole:
        try:
            (point,) = activation_points(model.model, [layer])
            read_activations(model, [_prompt()], layers=[layer], take=lambda row, rows: None)
            _check_linear(model, point, blocks[layer - 1])
            placed.append(layer)
        except UnsupportedArchitecture as fault:
            refused[_line(fault)] = None
    if not placed:
        raise UnsupportedArchitecture("; ".join(refused))
    prove_reading(model, _prompt(), placed)
    return "; ".join(f"some layers: {why}" for why in refused)


def _check_linear(model: LoadedModel, point: Any, block: nn.Module) -> None:
    """Times 0, 1 and 2: the input of the next matrix or norm of the layer that moves with the activation must be linear in it."""
    ids = torch.tensor([_prompt().token_ids])

    def after(factor: float) -> list[Tensor]:
        kept: list[Tensor] = []
        begun = False

        def change(module: nn.Module, given: Any, out: Tensor) -> Tensor:
            nonlocal begun
            begun = True
            return out * factor

        def keep(module: nn.Module, given: Any) -> None:
            if begun and given:
                kept.append(given[0].double())

        parts = [
            part
            for part in block.modules()
            if part is not point.act and "weight" in dict(part.named_parameters(recurse=False))
        ]
        hooks = [point.act.register_forward_hook(change), *(part.register_forward_pre_hook(keep) for part in parts)]
        try:
            with torch.inference_mode():
                model.model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return kept

    for none, once, twice in zip(after(0.0), after(1.0), after(2.0), strict=True):
        size = float((once - none).norm())
        if size > 1e-6 * float(once.norm()):
            if not float((twice - 2 * once + none).norm()) < 1e-4 * size:
                raise AssertionError(f"layer {point.layer}: what follows is not linear in the activation that was read")
            return
    raise AssertionError(f"layer {point.layer}: nothing in the MLP depends on the activation that was read")


# ---- the table -------------------------------------------------------------------------------------------------------


def committed() -> tuple[str, dict[str, Verdict]]:
    """The version of transformers that was walked, and what was found."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return table["transformers"], {row["model_type"]: Verdict(**row) for row in table["families"]}


def main(arguments: list[str]) -> None:
    rows: list[dict[str, Any]] = []
    for kind in arguments or sorted(families()):
        rows.append(dataclasses.asdict(visit(kind)))
        print(*rows[-1].values(), sep=" | ", flush=True)
    if not arguments:
        import transformers

        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        text = f'{{"transformers": "{transformers.__version__}", "families": [\n{lines}\n]}}\n'
        TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
