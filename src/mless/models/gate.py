"""The gate for model folders: configs, weight maps, safetensors headers and small files are checked before anything is made of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from mless import gates, limits
from mless.errors import MlessError, TokenizerFault, UnknownModel
from mless.gates import Refuse, kind_of, shown
from mless.limits import Limit

INDEX = "model.safetensors.index.json"
#: Read by transformers where they are there.
_SMALL_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "vocab.json",
    "tekken.json",
)
_OTHER_FILES = ("tokenizer.json", "chat_template.jinja", "tokenizer.model", "spiece.model", "merges.txt", "vocab.txt")
#: Counts of parts: each part is built, so a huge one would never end.
_COUNTS = re.compile(r"(?:num|n)_\w+|\w+_(?:layers|heads|experts|depth|groups|labels|blocks)|depth")
#: Not parts, though their names look like it.
_NO_COUNTS = re.compile(r"param|token|position|ctx|step|sample|frame|pixel|vocab|embd|inner|hidden_size|words")
_LAYERS = re.compile(r"(?:num|n)_(?:hidden_)?layers?|(?:encoder|decoder)_layers")
_WIDTHS = re.compile(r"\w+_(?:size|dim|rank|width)|n_embd|n_inner|d_model|vocab_size")
#: What must be there at least once.
_AT_LEAST_ONE = re.compile(
    r"num_hidden_layers|n_layers?|num_attention_heads|n_heads?|num_key_value_heads|hidden_size|n_embd|vocab_size|head_dim|"
    r"intermediate_size|max_position_embeddings"
)
_DTYPE = re.compile(r"(?:torch\.)?(?:b?float\d+\w{0,20}|half|float|double|u?int\d+|bool|complex\d+)")
#: Bits of one value, by safetensors' names.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}


# ---- config.json -----------------------------------------------------------------------------------------------------


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """config.json, its types and ranges checked: what transformers builds of it ends, and fits what it may ask for."""

    def refuse(message: str) -> UnknownModel:
        return UnknownModel(f"{shown(name)}: its config.json is broken: {message}; fetch it again")

    # Some families write Infinity into their configs.
    raw = gates.read_json(folder / "config.json", limits.CONFIG_BYTES, refuse, finite=False)
    content = gates.an_object(raw, refuse)
    _check_names(content, refuse)
    for path, table in _tables(content):
        for key, value in table.items():
            if key != "head_dim" or not table.get(
                "kv_lora_rank"
            ):  # latent attention has widths of its own, and may say 0 here
                _check_number(f"{path}{key}", key, value, refuse)
        kind = table.get("model_type")
        # transformers writes an empty one into inner configs (MPT, DBRX).
        empty = kind == "" and bool(path)
        if kind is not None and not empty and (not isinstance(kind, str) or not re.fullmatch(r"[\w.-]{1,100}", kind)):
            raise refuse(f"{path}model_type should be a short name, not {_found(kind)}")
        for key in ("dtype", "torch_dtype"):
            _check_dtype(f"{path}{key}", table.get(key), refuse)
    return content


def _check_names(content: dict[str, Any], refuse: Refuse) -> None:
    from transformers import PreTrainedConfig

    for key in content:
        if callable(getattr(PreTrainedConfig, key, None)):
            raise refuse(f"{key!r} is a method of transformers' configs and no field")
    own = content.get("auto_map")
    if own is not None and (not isinstance(own, dict) or not all(map(_is_code, cast("dict[str, Any]", own).values()))):
        raise refuse(f"auto_map should name code files, not {_found(own)}")
    for key, value in content.items():
        if key.endswith("_config") and value is not None and not isinstance(value, dict):
            raise refuse(f"{key} should be an object, not {_found(value)}")
    architectures = content.get("architectures")
    listed = isinstance(architectures, list) and all(isinstance(one, str) for one in cast("list[Any]", architectures))
    if architectures is not None and not listed:
        raise refuse(f"architectures should be a list of names, not {_found(architectures)}")


def _is_code(value: Any) -> bool:
    several: list[Any] = value if isinstance(value, list) else [value]
    return all(one is None or isinstance(one, str) for one in several)


def _tables(content: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The config and the configs inside it; the reader has limited how deep they go."""
    yield path, content
    for key, value in content.items():
        if key.endswith("_config") and isinstance(value, dict) and key != "quantization_config":
            yield from _tables(cast("dict[str, Any]", value), f"{path}{key}.")


def _check_number(path: str, key: str, value: Any, refuse: Refuse) -> None:
    least = 1 if _AT_LEAST_ONE.fullmatch(key) else None
    limit: Limit | None = None
    if _LAYERS.fullmatch(key):
        limit = limits.LAYERS
    elif _WIDTHS.fullmatch(key):
        limit = limits.WIDTH
    elif _COUNTS.fullmatch(key) and not _NO_COUNTS.search(key):
        limit = limits.COUNT
    values: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int | float):
            # transformers names a field of another type; no family takes text, or true, for these.
            if one is not None and least is not None and not isinstance(one, dict | list):
                raise refuse(f"{path} should be a whole number, not {_found(one)}")
            continue
        if limit is not None and one > limit.value:
            raise refuse(f"{path} is {_found(one)}; expected {limit}")
        if least is not None and (one < least or not float(one).is_integer()):
            raise refuse(f"{path} should be a whole number of at least {least}, not {_found(one)}")
    if limit is not None and len(values) > limits.COUNT.value:
        raise refuse(f"{path} lists {len(values):,} values; expected {limits.COUNT}")


def _check_dtype(path: str, value: Any, refuse: Refuse) -> None:
    if value is None or value == "auto":
        return
    if not isinstance(value, str) or not _DTYPE.fullmatch(value):
        raise refuse(f"{path} should be a dtype such as bfloat16, not {_found(value)}")


def _found(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return gates.shown_number(value)
    return shown(value, 60) if isinstance(value, str | float) else kind_of(value)


def check_resolved(config: Any, name: str) -> None:
    """The config as transformers read it: names that differ by family are the same ones now."""

    def refuse(message: str) -> UnknownModel:
        return UnknownModel(f"{shown(name)}: its config.json is broken: {message}; fetch it again")

    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size"):
        _check_number(key, key, same_for_all(config, key), refuse)
    if not getattr(config, "kv_lora_rank", None):
        _check_number("head_dim", "head_dim", same_for_all(config, "head_dim"), refuse)
    # Beyond the vocabulary it is no fault by itself: GPT-2 has no row for it, and needs none.
    if isinstance(pad := getattr(config, "pad_token_id", None), int) and pad > limits.WIDTH.value:
        raise refuse(f"pad_token_id is {_found(pad)}; expected {limits.WIDTH}")
    heads, groups = same_for_all(config, "num_attention_heads"), same_for_all(config, "num_key_value_heads")
    if isinstance(groups, int) and isinstance(heads, int) and groups > heads:
        raise refuse(f"num_key_value_heads is {groups}, but there are {heads} heads")
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared is not None and (not isinstance(shared, int) or not 0 <= shared <= config.num_hidden_layers):
        raise refuse(
            f"num_kv_shared_layers should count some of the {config.num_hidden_layers} layers, not {_found(shared)}"
        )


def same_for_all(config: Any, key: str) -> Any:
    """A field that all layers share; None where it is not there, or differs from layer to layer and transformers raises an error (Gemma 4)."""
    try:
        return getattr(config, key, None)
    except RuntimeError:
        return None


def check_widths(config: Any, tensors: dict[str, Any], name: str, *, packed: bool) -> None:
    """Refuse a config that describes a far larger model than the weights hold, before memory for it is asked for.

    No width of a model is larger than its weights' longest side; `packed` values of a quantised model may be several to a number.
    """
    longest = max((side for entry in tensors.values() for side in entry["shape"]), default=0) * (32 if packed else 1)
    for key in ("vocab_size", "hidden_size", "intermediate_size"):
        value = getattr(config, key, None)
        if longest and isinstance(value, int) and value > longest:
            raise UnknownModel(
                f"{shown(name)}: config.json and weights do not belong together: {key} is {value:,}, but no tensor is longer than {longest:,}; "
                "fetch both again"
            )


# ---- weights ---------------------------------------------------------------------------------------------------------


def read_index(path: Path, name: str) -> dict[str, str]:
    """The index's weight map: tensor name → file."""

    def refuse(message: str) -> UnknownModel:
        return UnknownModel(f"{shown(name)}: its {INDEX} is broken ({message}); fetch it again")

    content = gates.an_object(gates.read_json(path, limits.HEADER_BYTES, refuse), refuse)
    given: Any = content.get("weight_map")
    if not isinstance(given, dict) or not given:
        raise refuse(
            f"weight_map should name a file for each tensor, found {'nothing' if given == {} else kind_of(given)}"
        )
    weight_map = cast("dict[str, Any]", given)
    for key, file in weight_map.items():
        _check_tensor_name(key, refuse)
        if not isinstance(file, str) or len(file) > 255:
            raise refuse(f"{shown(key)} should lie in a file, found {_found(file)}")
    return weight_map


def read_header(path: Path, file_name: str, name: str) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensors (dtype, shape, data_offsets) and where their data begin; no tensor is read."""

    def refuse(message: str) -> UnknownModel:
        return UnknownModel(f"{shown(name)}: {file_name} is broken ({message}); fetch it again")

    gates.check_file(path, Limit("", 1 << 62, "bytes", ""), refuse)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise refuse(f"its {size} bytes do not hold the header")
        if length > limits.HEADER_BYTES.value:
            raise refuse(f"its header has {length:,} bytes; expected {limits.HEADER_BYTES}")
        text = gates.text_of(file.read(length), refuse)
    tensors = gates.an_object(gates.json_of(text, refuse, where="header"), refuse)
    _check_metadata(tensors.pop("__metadata__", {}), refuse)
    if not tensors:
        raise refuse("it holds no tensors")
    end = 8 + length + _check_tensors(tensors, refuse)
    if end != size:
        raise refuse(f"it is {size} bytes long, its header says {end}")
    return tensors, 8 + length


def _check_metadata(value: Any, refuse: Refuse) -> None:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in cast("dict[str, Any]", value).values()):
        raise refuse("its metadata should be texts by name")


def _check_tensors(tensors: dict[str, Any], refuse: Refuse) -> int:
    """Every tensor's dtype, shape and place; together they fill the data without a gap. How many bytes that is."""
    places: list[tuple[int, int, str]] = []
    for key, entry in tensors.items():
        _check_tensor_name(key, refuse)
        if not isinstance(entry, dict):
            raise refuse(f"tensor {shown(key)} should be described by an object, not {kind_of(entry)}")
        dtype: Any = entry.get("dtype")
        bits = _BITS.get(dtype) if isinstance(dtype, str) else None
        if bits is None:
            raise refuse(f"tensor {shown(key)} has no known dtype")
        shape: Any = entry.get("shape")
        if not _are_counts(shape) or len(shape) > 16:
            raise refuse(f"tensor {shown(key)} has no shape")
        place: Any = entry.get("data_offsets")
        if not _are_counts(place) or len(place) != 2:
            raise refuse(f"tensor {shown(key)} has no place in the file")
        if (place[1] - place[0]) * 8 != math.prod(shape) * bits:
            raise refuse(
                f"tensor {shown(key)} takes {place[1] - place[0]} bytes, but its shape and dtype say otherwise"
            )
        places.append((place[0], place[1], key))
    at = 0
    for first, last, key in sorted(places):
        if first != at:
            raise refuse(f"tensor {shown(key)} begins at byte {first}, but the one before it ends at {at}")
        at = last
    return at


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 62 for one in cast("list[Any]", value)
    )


def _check_tensor_name(key: str, refuse: Refuse) -> None:
    if not key or len(key) > 1000 or not key.isprintable() or re.search(r"\d{10}", key):
        raise refuse(f"{shown(key, 60)} is no name of a tensor")


# ---- small files -----------------------------------------------------------------------------------------------------


def check_tokenizer_files(folder: Path, name: str) -> dict[str, Any]:
    """Every file of a tokenizer that transformers may read is a file, not too large, and JSON where it should be.

    Returns tokenizer_config.json, empty where there is none.
    """

    def refused(file: str) -> Refuse:
        return lambda message: TokenizerFault(
            f"the tokenizer of {shown(name)}: {file} {message}; fetch it again, or give --tokenizer DIR"
        )

    for file in _OTHER_FILES:
        if (folder / file).exists():
            gates.check_file(folder / file, limits.TOKENIZER_BYTES, refused(file))
    settings: dict[str, Any] = {}
    for file in _SMALL_FILES:
        if not (folder / file).exists():
            continue
        content = gates.read_json(folder / file, limits.CONFIG_BYTES, refused(file), finite=False)
        found = gates.an_object(content, refused(file))
        if file == "tokenizer_config.json":
            settings = found
    _check_settings(settings, refused("tokenizer_config.json"))
    return settings


def _check_settings(settings: dict[str, Any], refuse: Refuse) -> None:
    longest = settings.get("model_max_length")
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int | float)):
        raise refuse(f"holds a model_max_length that is no number but {kind_of(longest)}")
    names: Any = settings.get("model_input_names")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(one, str) for one in cast("list[Any]", names))
    ):
        raise refuse("holds model_input_names that are no list of names")


def check_normalizer(tokenizer: Any) -> None:
    """Refuse one that adds a very long text to every prompt: merging its tokens takes hours."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    left: list[Any] = [] if normalizer is None else [json.loads(normalizer.__getstate__())]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            # The map of single characters, which is compiled and long.
            left += [value for key, value in one.items() if key != "precompiled_charsmap"]
        elif isinstance(one, list):
            left += one
        elif isinstance(one, str) and len(one) > limits.NORMALIZER_TEXT.value:
            raise ValueError(f"its normalizer holds {len(one):,} characters; expected {limits.NORMALIZER_TEXT}")


def check_generation_config(folder: Path, name: str) -> bool:
    """Whether there is a generation_config.json; the tokens that end an answer are whole numbers in it."""
    path = folder / "generation_config.json"
    if not path.exists():
        return False

    def refuse(message: str) -> MlessError:
        return UnknownModel(f"{shown(name)}: its generation_config.json {message}; fetch it again, or remove it")

    content = gates.an_object(gates.read_json(path, limits.CONFIG_BYTES, refuse, finite=False), refuse)
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value: Any = content.get(key)
        for one in cast("list[Any]", value) if isinstance(value, list) else [value]:
            if one is not None and (
                isinstance(one, bool) or not isinstance(one, int) or not -1 <= one < limits.WIDTH.value
            ):
                raise refuse(f"names {_found(one)} as {key}, which is no token id")
    return True


def read_notes(folder: Path) -> dict[str, Any] | None:
    """mless.json, what a GGUF's conversion noted; None where it did not finish, or is not as mless writes it."""
    try:
        notes = gates.read_json(folder / "mless.json", limits.CONFIG_BYTES, UnknownModel)
    except UnknownModel:
        return None  # converted again, or an ordinary folder
    if not isinstance(notes, dict):
        return None
    gguf, bos = cast("dict[str, Any]", notes).get("gguf"), cast("dict[str, Any]", notes).get("bos")
    if not isinstance(gguf, dict) or not isinstance(bos, dict | None):
        return None
    name: Any = cast("dict[str, Any]", gguf).get("name")
    numbers = [cast("dict[str, Any]", bos).get(key) for key in ("id", "loss_with", "loss_without")] if bos else []
    if not isinstance(name, str | None) or not all(isinstance(one, int | float) for one in numbers):
        return None
    return cast("dict[str, Any]", notes)


def quantised_by(config: Any) -> str | None:
    """The method by which the checkpoint is quantised; None where it is not."""
    settings = getattr(config, "quantization_config", None) or {}
    return settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
