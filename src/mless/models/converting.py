"""GGUF → safetensors, once. Reading quantised blocks takes tens of seconds; the converted model opens in under two."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mless.errors import UnknownModel, UnsupportedArchitecture
from mless.models import processor
from mless.models.gguf_gate import check_gguf
from mless.models.quiet import counting_gguf_tensors, quiet_transformers, reading_gguf_once
from mless.models.widening import keep_narrow

#: How long each part takes, in seconds of one run; only the proportions matter. The last three are per billion weights.
_HEADER, _TOKENIZER, _CONFIG, _NAMES = 1, 1, 3, 6
_TENSORS, _WRITING, _CHECKING = 9, 3, 5

_PASSAGE = (
    "The harbour was quiet in the early morning. A few boats moved slowly against the ropes that held them, and the water under "
    "the pier was as grey as the sky above it. An old man sat on a crate and mended a net, the way he had done every morning since "
    "he was a boy."
)


def convert_gguf(path: Path, folder: Path, name: str, reach: Callable[[float], None] = lambda share: None) -> None:
    """Write the model, its tokenizer and what was noticed on the way (`mless.json`) into `folder`.

    `reach` gets the share of the work that is done, from 0 to 1; it never goes back.
    """
    with reading_gguf_once():
        _convert(path, folder, name, reach)


def _convert(path: Path, folder: Path, name: str, reach: Callable[[float], None]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # How many weights there are is not known before the config is read; quantised ones take about a byte each.
    billions = path.stat().st_size / 1e9
    by_size = (billions * seconds for seconds in (_TENSORS, _WRITING, _CHECKING))
    progress = _Parts(reach, [_HEADER, _TOKENIZER, _CONFIG, _NAMES, *by_size])
    metadata = _metadata(path, name)
    progress.next()
    try:
        with quiet_transformers(progress.part), counting_gguf_tensors(progress.part):
            tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            progress.next()
            config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            progress.next()
            parameters = sum(p.numel() for p in _empty(AutoModelForCausalLM, config).parameters())
            # Larger ones are kept in bf16: fp32 would fill a disk for no measurable gain.
            dtype = torch.float32 if parameters <= processor.FP32_PARAMETERS else torch.bfloat16
            progress.next()
            model: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, config=config, dtype=dtype
            )
            progress.next()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, ImportError) as fault:
        cause = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise UnsupportedArchitecture(
            f"{name!r}: transformers cannot read this GGUF (architecture {metadata.get('architecture')!r}): {cause}; "
            "use the model's safetensors instead"
        ) from fault
    dense = _dense(model)
    del model
    with quiet_transformers():
        dense.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    progress.next()
    # In float32 on every machine: bf16 products may take 100 times as long, and the losses should not depend on the processor.
    keep_narrow(dense)
    with progress.through(dense):
        losses = _bos_loss(dense, tokenizer)
    notes = {"gguf": metadata, "dtype": str(dtype).removeprefix("torch."), "bos": losses}
    (folder / "mless.json").write_text(json.dumps(notes, indent=1))
    progress.end()


class _Parts:
    """Progress over several parts, as one share that never goes back."""

    def __init__(self, reach: Callable[[float], None], parts: Sequence[float | int]) -> None:
        self._reach, self._parts = reach, parts
        self._reported, self._at = 0.0, 0
        reach(0)

    def part(self, done: int, of: int) -> None:
        """Set how much of the current part is done."""
        now = (sum(self._parts[: self._at]) + self._parts[self._at] * done / of) / sum(self._parts)
        # Reading and placing the tensors are counted in turn; only new progress is reported.
        if now > self._reported:
            self._reported = now
            self._reach(min(now, 1.0))

    def next(self) -> None:
        self.part(1, 1)
        self._at += 1

    def end(self) -> None:
        self._at = len(self._parts) - 1
        self.part(1, 1)

    @contextmanager
    def through(self, model: nn.Module) -> Generator[None]:
        """Inside the block a forward reports how many of the model's layers it has passed."""
        config: Any = model.config
        count: int = config.get_text_config().num_hidden_layers
        lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == count]
        layers = list(lists[0]) if lists else []
        hooks = [
            layer.register_forward_hook(lambda *_, done=number: self.part(done, count))
            for number, layer in enumerate(layers, start=1)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _metadata(path: Path, name: str) -> dict[str, Any]:
    from gguf import GGUFReader

    check_gguf(path, name)
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
    # Buffers outside the state dict (rotary tables) are still on the meta device. They are not saved, but the loss below runs the model, so
    # copy them too.
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
    # Both in one forward; padding after a text does not change it.
    tokens = torch.tensor([[bos, *ids], [*ids, ids[-1]]])
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits
    losses = [
        nn.functional.cross_entropy(rows[:-1].float(), torch.tensor(ids[1:])).item()
        for rows in (logits[0, 1:], logits[1, :-1])
    ]
    return {"id": bos, "loss_with": losses[0], "loss_without": losses[1]}
