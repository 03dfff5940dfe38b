"""GGUF → safetensors, once. Reading quantised blocks takes tens of seconds; the converted model opens in under two."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mless.errors import UnknownModel, UnsupportedArchitecture
from mless.models.quiet import counting_gguf_tensors, quiet_transformers

#: Above this many parameters the dequantised weights are kept in bf16: fp32 would fill a disk for no measurable gain.
FP32_PARAMETERS = 1_000_000_000
#: How long reading takes by itself, and each gigabyte on top: seconds of one run on two cores, of which only the proportion counts.
_HEADER, _TOKENIZER, _CONFIG, _NAMES = 4, 5, 4, 14
_TENSORS_PER_GB, _WRITING_PER_GB = 20, 8

_PASSAGE = (
    "The harbour was quiet in the early morning. A few boats moved slowly against the ropes that held them, and the water under "
    "the pier was as grey as the sky above it. An old man sat on a crate and mended a net, the way he had done every morning since "
    "he was a boy."
)


def convert_gguf(path: Path, folder: Path, name: str, reach: Callable[[float], None] = lambda share: None) -> None:
    """Write the model, its tokenizer and what was noticed on the way (`mless.json`) into `folder`.

    `reach` is told the share of the work that is done, from 0 to 1.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    gigabytes = path.stat().st_size / 1e9
    reading = _HEADER + _TOKENIZER + _CONFIG + _NAMES
    total = reading + (_TENSORS_PER_GB + _WRITING_PER_GB) * gigabytes

    def tensors(done: int, of: int) -> None:
        reach((reading + _TENSORS_PER_GB * gigabytes * done / of) / total)

    reach(0)
    metadata = _metadata(path, name)
    reach(_HEADER / total)
    try:
        with quiet_transformers(), counting_gguf_tensors(tensors):
            tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            reach((_HEADER + _TOKENIZER) / total)
            config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            reach((_HEADER + _TOKENIZER + _CONFIG) / total)
            parameters = sum(p.numel() for p in _empty(AutoModelForCausalLM, config).parameters())
            dtype = torch.float32 if parameters <= FP32_PARAMETERS else torch.bfloat16
            model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, ImportError) as fault:
        cause = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise UnsupportedArchitecture(
            f"{name!r}: transformers cannot read this GGUF (architecture {metadata.get('architecture')!r}): {cause}; "
            "use the model's safetensors instead"
        ) from fault
    dense = _dense(model)
    with quiet_transformers():
        dense.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    notes = {"gguf": metadata, "dtype": str(dtype).removeprefix("torch."), "bos": _bos_loss(dense, tokenizer)}
    (folder / "mless.json").write_text(json.dumps(notes, indent=1))


def _metadata(path: Path, name: str) -> dict[str, Any]:
    from gguf import GGUFReader

    try:
        fields = GGUFReader(path).fields
    except (ValueError, OSError, IndexError, KeyError, OverflowError) as fault:
        raise UnknownModel(
            f"{name!r} is not a readable GGUF file, or is cut short ({str(fault).strip()}); fetch it again"
        ) from fault

    def value(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    if (value("split.count") or 1) > 1:
        raise UnknownModel(f"{name!r} is one part of a split GGUF; merge it first: llama-gguf-split --merge FIRST OUT")
    return {
        "architecture": value("general.architecture"),
        "name": value("general.name"),
        "add_bos_token": value("tokenizer.ggml.add_bos_token"),
    }


def _empty(auto: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        return auto.from_config(config)


def _dense(model: Any) -> Any:
    """The same weights in a model that knows nothing of quantisation, so that it can be saved as plain safetensors."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        dense = type(model)(config)
    missing, unexpected = dense.load_state_dict(model.state_dict(), strict=False, assign=True)
    dense.tie_weights()
    left = [key for key, value in dense.state_dict().items() if value.is_meta]
    if left or unexpected:
        raise UnsupportedArchitecture(
            f"{type(model).__name__}: GGUF conversion left {left or unexpected} without a place (missing: {missing})"
        )
    # Buffers that are no part of a state dict (rotary tables) still lie on the meta device; only the weights are saved,
    # but the loss below runs the model itself, so they are taken over too.
    for (path, buffer), (_, given) in zip(list(dense.named_buffers()), list(model.named_buffers()), strict=True):
        if buffer.is_meta:
            owner, _, leaf = path.rpartition(".")
            setattr(dense.get_submodule(owner), leaf, given)
    return dense.eval()


def _bos_loss(model: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Whether the model misses its BOS: its loss on plain text with and without one."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    ids = tokenizer(_PASSAGE, add_special_tokens=False).input_ids

    def loss(prefix: list[int]) -> float:
        tokens = torch.tensor([prefix + ids])
        with torch.inference_mode():
            logits = model(input_ids=tokens, use_cache=False).logits[0, -len(ids) : -1].float()
        return nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item()

    return {"id": bos, "loss_with": loss([bos]), "loss_without": loss([])}
