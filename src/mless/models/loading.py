"""A located model → the layers asked for, in memory. Shards that hold nothing needed are not opened, nor downloaded."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mless.errors import BadStudy, TokenizerFault, UnknownModel, UnsupportedArchitecture
from mless.models.adapters import family_of
from mless.models.converting import FP32_PARAMETERS
from mless.models.locating import Source, locate
from mless.models.quiet import quiet_transformers

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_TEXT_PART = r"^(?:model\.)?language_model\.(?:model\.)?"
_INDEX = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder cut after the last layer asked for, without its language-model head, and its tokenizer."""

    name: str
    label: str
    family: str
    model: Any
    tokenizer: Any
    layers: int
    loaded_layers: int
    heads: int
    context: int
    device: torch.device
    dtype: str
    fingerprint: str
    tokenizer_fingerprint: str
    omit_first: bool

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))


@dataclass(frozen=True)
class Description:
    """What can be said of a model before any weight is read."""

    source: Source
    config: Any
    layers: int
    heads: int
    context: int
    family: str


def describe(
    name: str, *, trust_remote_code: bool = False, say: Callable[[str], None] = lambda line: None
) -> Description:
    """Locate a model and read its config."""
    from transformers import CONFIG_MAPPING, AutoConfig

    source = locate(name, trust_remote_code=trust_remote_code, say=say)
    try:
        raw: Any = json.loads((source.folder / "config.json").read_text())
    except ValueError as fault:
        raise UnknownModel(f"{name!r}: its config.json is broken: {fault}") from None
    if not isinstance(raw, dict):
        raise UnknownModel(f"{name!r}: its config.json is broken: an object was expected, not a {type(raw).__name__}")
    # A family that transformers knows itself needs no code from elsewhere, whatever its repository brings.
    if raw.get("auto_map") and not trust_remote_code and raw.get("model_type") not in CONFIG_MAPPING:
        raise UnsupportedArchitecture(
            f"{name!r} brings its own code ({', '.join(sorted(raw['auto_map']))}), which is not run unless you type --trust-remote-code"
        )
    try:
        with quiet_transformers():
            whole: Any = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except _BUILD_FAULTS as fault:
        if raw.get("model_type") in CONFIG_MAPPING:
            raise UnknownModel(f"{name!r}: its config.json is broken: {_first_line(fault)}") from None
        raise UnsupportedArchitecture(
            f"{name!r}: transformers does not know the architecture {raw.get('model_type')!r} ({_first_line(fault)}); a newer transformers may"
        ) from None
    if getattr(whole, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(f"{whole.model_type!r} is an encoder-decoder; only decoders are measured")
    config = whole.get_text_config()
    for needed in ("num_hidden_layers", "num_attention_heads"):
        if not isinstance(getattr(config, needed, None), int):
            raise UnsupportedArchitecture(
                f"{config.model_type!r} has no single {needed}, so heads cannot be told apart; see docs/adding-a-model.md"
            )
    context = getattr(config, "max_position_embeddings", None) or 1 << 30
    return Description(source, config, config.num_hidden_layers, config.num_attention_heads, context, config.model_type)


def load(
    name: str,
    *,
    layers: Sequence[int] | int | None = None,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Load `name` up to its last asked layer (all by default).

    `layers` are numbered from 1. `dtype` auto is float32 on a CPU up to a billion loaded parameters, the checkpoint's own above
    that, and bfloat16 on a GPU.
    """
    described = describe(name, trust_remote_code=trust_remote_code, say=say)
    source, config = described.source, described.config
    asked = [layers] if isinstance(layers, int) else list(layers or [described.layers])
    for layer in asked:
        if not 1 <= layer <= described.layers:
            raise BadStudy(f"no layer {layer}: {source.label}'s layers are 1 to {described.layers} (numbered from 1)")
    count = max(asked)
    place = _device(device)
    tokens = load_tokenizer(source, tokenizer, config, trust_remote_code=trust_remote_code)
    model = _load_layers(described, count, dtype, place, trust_remote_code)
    return LoadedModel(
        name=name,
        label=source.label,
        family=described.family,
        model=model,
        tokenizer=tokens,
        layers=described.layers,
        loaded_layers=count,
        heads=described.heads,
        context=described.context,
        device=place,
        dtype=str(model.dtype).removeprefix("torch."),
        fingerprint=fingerprint(source, count),
        tokenizer_fingerprint=_digest(
            json.dumps(tokens.get_vocab(), sort_keys=True).encode(), str(tokens.chat_template).encode()
        )[:16],
        omit_first=family_of(described.family).omit_first,
    )


def _device(asked: str) -> torch.device:
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as fault:
        raise BadStudy(
            f"no device {asked!r} on this machine ({str(fault).splitlines()[0]}); try --device cpu"
        ) from None
    return device


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def load_tokenizer(source: Source, given: str | None, config: Any, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer, or `given`; refused when it leaves out the BOS its model was trained with."""
    from transformers import AutoTokenizer

    folder = locate_tokenizer(given) if given else source.tokenizer
    # transformers would make an empty tokenizer of nothing.
    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        raise TokenizerFault(
            f"{given or source.name!r} has no tokenizer.json; give a folder or a hub id that has one: --tokenizer DIR"
        )
    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (*_BUILD_FAULTS, _tokenizers_fault()) as fault:
        raise TokenizerFault(
            f"no tokenizer could be read from {given or source.name!r} ({_first_line(fault)}); give one with --tokenizer"
        ) from None
    if not tokenizer.is_fast:
        raise TokenizerFault(
            f"{given or source.name!r} has a slow tokenizer, which cannot say where its tokens lie in the text; give a folder with a tokenizer.json: --tokenizer DIR"
        )
    # Added tokens may lie beyond the embedding (Gemma's picture token does); plain ones mean another model's vocabulary.
    rows = getattr(config, "vocab_size", None)
    if rows is not None and tokenizer.vocab_size > rows:
        raise TokenizerFault(
            f"the tokenizer of {given or source.name!r} has {tokenizer.vocab_size} tokens, but the model knows {rows}: it belongs to another model; "
            "give the model's own: --tokenizer DIR"
        )
    _check_bos(tokenizer, source, config)
    return tokenizer


def locate_tokenizer(given: str) -> Path:
    path = Path(given).expanduser()
    if path.is_file() and path.name == "tokenizer.json":
        path = path.parent
    if path.is_dir():
        if not any((path / file).exists() for file in TOKENIZER_FILES):
            raise TokenizerFault(
                f"--tokenizer {given!r} is a folder without tokenizer.json; give one that has it, or a hub id"
            )
        return path
    try:
        return locate(given).tokenizer
    except UnknownModel as fault:
        raise TokenizerFault(f"--tokenizer: {fault}") from None


def _check_bos(tokenizer: Any, source: Source, config: Any) -> None:
    """GGUF-derived tokenizers often drop the BOS; a model trained with one then computes nonsense, quietly."""
    bos = tokenizer.bos_token_id
    measured = source.notes.get("bos") or {}
    if bos is None:
        bos = getattr(config, "bos_token_id", None)
    reasons: list[str] = []
    if family_of(config.model_type).bos:
        reasons.append(f"{family_of(config.model_type).label} models were trained with one")
    if source.notes.get("gguf", {}).get("add_bos_token"):
        reasons.append("the GGUF says add_bos_token")
    settings = source.tokenizer / "tokenizer_config.json"
    if settings.exists() and json.loads(settings.read_text()).get("add_bos_token") is True:
        reasons.append("tokenizer_config.json says add_bos_token")
    # Without its BOS such a model's loss on plain text more than doubles; 1.5 leaves room on either side.
    if measured and measured["loss_without"] > 1.5 * measured["loss_with"]:
        reasons.append(
            f"its loss on plain text is {measured['loss_without']:.1f} without one and {measured['loss_with']:.1f} with it"
        )
    ids = tokenizer("a").input_ids
    if reasons and bos is not None and (not ids or ids[0] != bos):
        raise TokenizerFault(
            f"the tokenizer of {source.name!r} adds no BOS token (id {bos}), but the model needs it: {'; '.join(reasons)}. Give a tokenizer that adds it: "
            "--tokenizer DIR (a folder with the original tokenizer.json) or --tokenizer HUB-ID"
        )


# ---- weights ---------------------------------------------------------------------------------------------------------


def _load_layers(described: Description, count: int, dtype: str, device: torch.device, trust_remote_code: bool) -> Any:
    from transformers import AutoModel

    source, config = described.source, described.config
    weight_map = _weight_map(source)
    wanted = {key: file for key, file in weight_map.items() if _needed(key, count, weight_map)}
    _cut(config, count)
    config.dtype = _dtype(dtype, config, device, source, wanted)
    options: dict[str, Any] = {}
    if any(re.match(_TEXT_PART, key) for key in wanted):
        options["key_mapping"] = {_TEXT_PART: ""}
    with tempfile.TemporaryDirectory(prefix="mless-") as view:
        # A view of the checkpoint that names only what is needed; transformers then opens nothing else.
        folder = Path(view)
        for file in sorted(set(wanted.values())):
            (folder / file).symlink_to(source.weight_file(file).resolve())
        (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": wanted}))
        if set(wanted.values()) == {"model.safetensors"}:
            (folder / _INDEX).unlink()
        for file in source.folder.glob("*.py"):
            (folder / file.name).symlink_to(file.resolve())
        config.save_pretrained(folder)
        try:
            with quiet_transformers():
                model, info = AutoModel.from_pretrained(
                    folder,
                    config=config,
                    dtype=config.dtype,
                    attn_implementation="sdpa",
                    output_loading_info=True,
                    trust_remote_code=trust_remote_code,
                    local_files_only=True,
                    use_safetensors=True,
                    **options,
                )
        except ValueError as fault:
            if "sdpa" not in str(fault) and "scaled_dot_product" not in str(fault):
                raise UnsupportedArchitecture(
                    f"{source.name!r} could not be built: {str(fault).splitlines()[0]}"
                ) from fault
            with quiet_transformers():
                model, info = AutoModel.from_pretrained(
                    folder,
                    config=config,
                    dtype=config.dtype,
                    attn_implementation="eager",
                    output_loading_info=True,
                    local_files_only=True,
                    **options,
                )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UnsupportedArchitecture(
            f"{source.name!r}: {len(missing)} weights were not in the checkpoint ({', '.join(missing[:3])}…); measuring random ones would be silently wrong"
        )
    return model.eval().to(device)


def _weight_map(source: Source) -> dict[str, str]:
    """Tensor name → file, from the index or from the single file's own header."""
    index = source.folder / _INDEX
    if index.exists():
        try:
            return json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as fault:
            raise UnknownModel(f"{source.name!r}: its {_INDEX} is broken ({fault!r})") from None
    from safetensors import SafetensorError, safe_open

    file = source.weight_file("model.safetensors")
    try:
        with safe_open(file, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), file.name)
    except SafetensorError as fault:
        raise UnknownModel(f"{source.name!r}: model.safetensors is broken ({fault}); fetch it again") from None


def _needed(key: str, count: int, all_keys: dict[str, str]) -> bool:
    if re.match(r"^(?:\w+\.)?lm_head\.", key) or key.startswith(("embed_out.", "output.")):
        return False
    if any(re.match(_TEXT_PART, other) for other in all_keys) and not re.match(_TEXT_PART, key):
        return False  # the picture and sound towers of a many-modal model
    layer = _LAYER.search(key)
    return layer is None or int(layer[1]) < count


def _cut(config: Any, count: int) -> None:
    """Fewer layers, with every per-layer list cut to match."""
    full = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == full:
            setattr(config, name, value[:count])
    config.num_hidden_layers = count


def _dtype(asked: str, config: Any, device: torch.device, source: Source, wanted: dict[str, str]) -> torch.dtype:
    if asked in DTYPES:
        return DTYPES[asked]
    if asked != "auto":
        raise BadStudy(f"no dtype {asked!r}; there are: auto, {', '.join(DTYPES)}")
    if device.type != "cpu":
        return torch.bfloat16
    from safetensors import safe_open

    elements = 0
    stored = torch.float32
    for file in sorted(set(wanted.values())):
        with safe_open(source.weight_file(file), "pt") as tensors:
            for key in set(tensors.keys()) & wanted.keys():
                part = tensors.get_slice(key)
                shape = part.get_shape()
                elements += int(torch.Size(shape).numel())
                stored = {"BF16": torch.bfloat16, "F16": torch.float16}.get(part.get_dtype(), stored)
    return torch.float32 if elements <= FP32_PARAMETERS else stored


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def fingerprint(source: Source) -> str:
    """What tells one checkpoint from another: a GGUF's own hash; else the config, every header and a sample of each file's bytes."""
    if source.gguf_sha256:
        return source.gguf_sha256[:16]
    parts = [json.dumps(json.loads((source.folder / "config.json").read_text()), sort_keys=True).encode()]
    index = source.folder / _INDEX
    if index.exists():
        parts.append(index.read_bytes())
    for path in sorted(source.folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            parts += [path.name.encode(), str(size).encode()]
            for at in range(0, size, max(1, size // 16)):
                file.seek(at)
                parts.append(file.read(1 << 14))
    return _digest(*parts)[:16]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
