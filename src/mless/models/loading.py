"""A located model → the layers asked for, in memory. Shards that hold nothing needed are not opened, nor downloaded."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import math
import os
import re
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from mless import gates, limits
from mless.errors import BadStudy, UnknownModel, UnsupportedArchitecture, first_line
from mless.gates import shown
from mless.models import gate, placing, processor
from mless.models.adapters import family_of
from mless.models.hashing import hash_parts
from mless.models.locating import Say, Source, Step, counted, hash_memory, locate, silent
from mless.models.quiet import quiet_transformers
from mless.models.seams import among, attention_layers, check_heads
from mless.models.tokenizers import load_tokenizer, needed_bos
from mless.models.widening import as_stored, keep_narrow
from mless.values import numbers_of

#: Names outside the layers: the language-model head, and the norm that follows the last layer.
_HEAD = re.compile(r"^(?:\w+\.){0,2}(?:lm_head|embed_out)\.|^output\.")
_FINAL_NORM = re.compile(
    r"^(?:(?:model|transformer|gpt_neox|decoder|language_model|text_model|backbone)\.)*"
    r"(?:norm|norm_f|ln_f|ln_out|final_norm|final_layer_?norm)\.(?:weight|bias)$"
)
_TEXT_PART = r"^(?:model\.)?language_model\.(?:model\.)?"
_TEXT_HEAD = r"^(?:model\.)?language_model\.lm_head\."
#: Read with the language-model head only: it names the tokens that end an answer.
_ANSWERING = ("generation_config.json",)
_UNUSED = ("transformers_version", "_name_or_path")
#: What transformers raises when a config or a checkpoint is not what it expects.
_BUILD_FAULTS = (
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    OSError,
    StrictDataclassError,
    # of fields that only one family has, which no gate can know
    ArithmeticError,
    AssertionError,
    LookupError,
    MemoryError,
)
_QUANTISED = "its quantisation's scales were made for it"
_UNQUANTISED, _WIDER = "a checkpoint that is not quantised is faster here", "leave --dtype out, or use --dtype float32"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder cut after the last layer asked for, without its language-model head unless that was asked for, and its tokenizer.

    `bos` is the token every prompt must begin with, because the model was trained with it; None where that is not known. `dtype` is what it
    computes in, `stored` what its weights are kept in (narrower ones are widened as they are used), `why` the reason.
    """

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
    bos: int | None = None
    stored: str | None = None
    why: str | None = None
    #: Which of its parts lie where, of a model that was placed by a device map; `device` takes its input then.
    placed: Mapping[str, str] | None = None

    @property
    def kind(self) -> str:
        """The kind of device that computes. A spread model has no fused or recorded steps, so its last digits may differ."""
        return f"{self.device.type}, spread" if placing.is_spread(self.model) else self.device.type

    def computing(self) -> dict[str, Any]:
        """What it computes in, for study.json."""
        kept = {"dtype": self.dtype, "weights": self.stored or self.dtype, "why": self.why}
        # Sums over other numbers of threads differ in their last bits.
        here = {"processor": processor.here().about(), "threads": torch.get_num_threads()}
        placed = {"placed": dict(self.placed)} if self.placed is not None else {}
        return kept | (here if self.device.type == "cpu" else {}) | placed

    def numbered(self, layers: object) -> list[int]:
        """Layers as a person may give them, of those that were loaded."""
        try:
            return numbers_of(layers, self.loaded_layers, "layer", "the loaded")
        except BadStudy as fault:
            if self.loaded_layers == self.layers:
                raise
            raise BadStudy(f"{fault}; of the model's {self.layers} mless.load(…, layers=…) loads more") from None


@dataclass(frozen=True)
class Description:
    """What can be said of a model before any weight is read."""

    source: Source
    config: Any
    layers: int
    heads: int
    context: int
    family: str

    def attending(self, asked: Sequence[int] | None = None) -> list[int]:
        """The requested layers, by default all with attention (in a hybrid model not all have it). One without is refused by name."""
        return among(self.built[0], asked, self.source.label)

    @cached_property
    def built(self) -> tuple[list[int], int | None]:
        """Of a model without weights: layers with attention, and how many parameters there are (None: unknown) without the head."""
        every = list(range(1, self.layers + 1))
        if getattr(self.config, "auto_map", None):
            return every, None  # remote code is not run for this; its layers are checked when they are asked for
        from transformers import AutoModel

        config = copy.deepcopy(self.config)
        kind: Any = _text_class(config, head=False)
        try:
            with torch.device("meta"), quiet_transformers():
                empty: nn.Module = kind(config) if kind else AutoModel.from_config(config)
            return attention_layers(empty), sum(one.numel() for one in empty.parameters())
        except (*_BUILD_FAULTS, UnsupportedArchitecture):
            return every, None  # loading and measuring it will say why


def describe(name: str, *, trust_remote_code: bool = False, say: Say = silent, step: Step = silent) -> Description:
    """Locate a model and read its config."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    source = locate(name, trust_remote_code=trust_remote_code, say=say, step=step)
    raw = gate.read_config(source.folder, name)
    # A family that transformers knows needs no remote code, whatever its repository contains.
    if raw.get("auto_map") and not trust_remote_code and raw.get("model_type") not in CONFIG_MAPPING:
        raise UnsupportedArchitecture(
            f"{name!r} brings its own code ({', '.join(sorted(raw['auto_map']))}), which is not run unless you type --trust-remote-code"
        )
    try:
        with quiet_transformers():
            whole: Any = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except _BUILD_FAULTS as fault:
        if raw.get("model_type") in CONFIG_MAPPING:
            raise UnknownModel(f"{name!r}: its config.json is broken: {first_line(fault)}") from None
        raise UnsupportedArchitecture(
            f"{name!r}: transformers does not know the architecture {raw.get('model_type')!r} ({first_line(fault)}); a newer transformers may"
        ) from None
    if getattr(whole, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(f"{whole.model_type!r} is an encoder-decoder; only decoders are measured")
    config = whole.get_text_config()
    if not isinstance(config, PreTrainedConfig):
        raise UnknownModel(
            f"{name!r}: its config.json is broken: {whole.model_type!r} has no text_config; fetch it again"
        )
    for needed in ("num_hidden_layers", "num_attention_heads"):
        if not isinstance(gate.same_for_all(config, needed), int):
            raise UnsupportedArchitecture(
                f"{config.model_type!r} has no single {needed}, so heads cannot be told apart; see docs/adding-a-model.md"
            )
    gate.check_resolved(config, name)
    config.return_dict = True  # outputs are read by name
    context = getattr(config, "max_position_embeddings", None) or 1 << 30
    return Description(source, config, config.num_hidden_layers, config.num_attention_heads, context, config.model_type)


def load(
    name: str | Description,
    *,
    layers: Sequence[int] | int | str | None = None,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    device_memory: str | None = None,
    head: bool = False,
    trust_remote_code: bool = False,
    say: Say = silent,
    step: Step = silent,
) -> LoadedModel:
    """Load `name`, or what `describe` said of it, up to its last asked layer (all by default).

    `layers` are numbered from 1, or a text as the command takes it (``"all"``, ``"1-3,7"``). With `head` the
    whole model is loaded, language-model head included, so that it can answer. `tokenizer` is another one than the model's own: a folder, a
    hub id, or one that is loaded already.
    `device_map` "auto" spreads the layers over all GPUs, CPU memory and, if `device_memory` allows it, disk ("cuda:0=20GiB,cpu=60GiB,disk").
    `dtype` auto is bfloat16 on a GPU. On a CPU it is float32 up to a billion loaded parameters. Above that it is the checkpoint's own dtype
    where the processor has units for it. Otherwise weights stay as they are and are widened to float32 when used (docs/method.md). `say`
    gets messages about slow steps, `step` their progress (what, done, of how many).
    """
    if isinstance(name, Description):
        described = name
    else:
        described = describe(name, trust_remote_code=trust_remote_code, say=say, step=step)
    source, config = described.source, described.config
    asked = numbers_of("all" if layers is None else layers, described.layers, "layer", f"{source.label}'s")
    if not asked:
        raise BadStudy("no layer was asked for; name some, or leave layers out for all of them")
    if head and layers is not None and max(asked) < described.layers:
        raise BadStudy(f"answers need every layer of {source.label}; leave --layers out")
    count = described.layers if head else max(asked)
    place = placing.chosen(device, device_map, device_memory)
    tokens = load_tokenizer(source, tokenizer, config, trust_remote_code=trust_remote_code)
    model, choice, on, placed = _load_layers(described, count, dtype, place, head, trust_remote_code, say, step)
    return LoadedModel(
        name=source.name,
        label=source.label,
        family=described.family,
        model=model,
        tokenizer=tokens,
        layers=described.layers,
        loaded_layers=count,
        heads=described.heads,
        context=described.context,
        device=on,
        dtype=str(model.dtype).removeprefix("torch."),
        fingerprint=fingerprint(source, count, head=head, step=step),
        tokenizer_fingerprint=_digest(
            json.dumps(tokens.get_vocab(), sort_keys=True).encode(), str(tokens.chat_template).encode()
        )[:16],
        omit_first=family_of(described.family).omit_first,
        bos=needed_bos(tokens, source, config)[0],
        stored=choice.stored,
        why=choice.why,
        placed=placed,
    )


# ---- weights ---------------------------------------------------------------------------------------------------------


# Over 60 lines: the steps of one load, in their order.
def _load_layers(
    described: Description,
    count: int,
    dtype: str,
    place: placing.Place,
    head: bool,
    trust_remote_code: bool,
    say: Say,
    step: Step,
) -> tuple[Any, processor.Choice, torch.device, Mapping[str, str] | None]:
    source, config = described.source, copy.deepcopy(described.config)
    weight_map = _weight_map(source)
    # transformers finds torchao's tensors by their saved names, so such a model is read whole and its decoder taken out.
    whole_class = head or gate.quantised_by(config) == "torchao"
    wanted = _wanted(weight_map, count, described.layers, head=whole_class)
    if not wanted:
        raise UnknownModel(f"{source.name!r}: its weights hold no tensor of a language model's layers; fetch it again")
    tensors = _check_weights(source, wanted, config)
    choice = _dtype(dtype, place.device, source, wanted, config)
    if place.mapped and choice.widened:
        choice = processor.as_it_is(choice.compute, choice.why)  # hooks put plain weights into the modules
    slow = processor.warning(choice.compute) if place.device.type == "cpu" else None
    if slow is not None:
        say(f"{slow}; {_UNQUANTISED if choice.why == _QUANTISED else _WIDER}")
    kept = DTYPES[choice.compute]
    _cut(config, count)
    config.dtype = kept
    # transformers logs what it could not place; here it is read from the loading report instead, and refused.
    options: dict[str, Any] = {"config": config, "dtype": kept, "trust_remote_code": trust_remote_code}
    options |= {"output_loading_info": True, "local_files_only": True, "use_safetensors": True}
    options |= {"ignore_mismatched_sizes": True}
    if any(re.match(_TEXT_PART, key) for key in wanted):
        # For a multimodal model only the text part; its head is stored beside it.
        inner = {_TEXT_HEAD: "lm_head.", _TEXT_PART: "model."} if whole_class else {_TEXT_PART: ""}
        options["key_mapping"] = inner
    elif not whole_class and _text_class(config, whole_class):
        options["key_mapping"] = {r"^model\.": ""}
    needed = placing.size(tensors, None if gate.quantised_by(config) else kept)
    with ExitStack() as view:
        # A view of the checkpoint that names only what is needed; transformers then opens nothing else.
        folder = Path(view.enter_context(tempfile.TemporaryDirectory(prefix="mless-")))
        options |= place.options(needed, folder, source.label)
        files = sorted(set(wanted.values()))
        for file in files:
            (folder / file).symlink_to(source.weight_file(file).resolve())
        if files != ["model.safetensors"]:
            (folder / gate.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": wanted}))
        for file in source.folder.glob("*.py") if trust_remote_code else ():
            (folder / file.name).symlink_to(file.resolve())
        config.save_pretrained(folder)
        # It names the tokens that end an answer, sometimes more of them than the tokenizer does.
        if head and gate.check_generation_config(source.folder, source.name):
            (folder / "generation_config.json").symlink_to((source.folder / "generation_config.json").resolve())
        with as_stored() if choice.widened else nullcontext():
            model, info = _build(source, folder, options, whole_class, step)
        if placing.is_spread(model):  # what lies on disk is read through the view
            weakref.finalize(model.base_model, view.pop_all().close)
    if mismatched := sorted(info["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        raise UnsupportedArchitecture(
            f"{source.name!r}: config.json and weights do not belong together: {key} is {list(stored)} in the checkpoint, {list(expected)} by the config"
        )
    whole = count == described.layers
    missing = sorted(key for key in info["missing_keys"] if whole or not _FINAL_NORM.search(key))
    if missing:
        raise UnsupportedArchitecture(
            f"{source.name!r}: {len(missing)} weights were not in the checkpoint ({', '.join(missing[:3])}…); measuring random ones would be silently wrong"
        )
    if not whole:
        # The final norm belongs after the last layer; a cut model gives its last layer's hidden states as they are.
        for path in [path for path, _ in model.named_modules() if _FINAL_NORM.search(f"{path}.weight")]:
            model.set_submodule(path, nn.Identity())
    check_heads(model, described.heads, source.name)
    device, held = place.taken(model, needed, source.label, say) if place.mapped else (place.device, None)
    if whole_class and not head:
        model = getattr(model, model.base_model_prefix)
    model = model.eval() if placing.is_spread(model) else model.eval().to(device)
    if choice.widened:
        keep_narrow(model)
    return model, choice, device, held


def _check_weights(source: Source, wanted: dict[str, str], config: Any) -> dict[str, Any]:
    """The headers of what will be read: they are right, name what the index says, and are as wide as the config says."""
    tensors: dict[str, Any] = {}
    for file in sorted(set(wanted.values())):
        tensors |= _header(source, file)[0]
    if absent := sorted(wanted.keys() - tensors.keys()):
        raise UnknownModel(
            f"{source.name!r}: its index names {len(absent)} tensors that its files do not hold ({shown(absent[0])}); fetch it again"
        )
    gate.check_widths(config, tensors, source.name, packed=gate.quantised_by(config) is not None)
    return {key: tensors[key] for key in wanted}


def _build(source: Source, folder: Path, options: dict[str, Any], head: bool, step: Step) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModel, AutoModelForCausalLM

    auto: Any = _text_class(options["config"], head) or (AutoModelForCausalLM if head else AutoModel)

    def placed(done: int, of: int) -> None:
        step(f"loading {source.label}, weights", done, of)

    fault: Exception | None = None
    # SDPA knows no soft cap; some versions of transformers refuse it then, and others leave the cap out.
    capped = getattr(options["config"], "attn_logit_softcapping", None) is not None
    for attention in ("eager",) if capped else ("sdpa", "eager"):
        try:
            with quiet_transformers(placed):
                return auto.from_pretrained(folder, attn_implementation=attention, **options)
        except _BUILD_FAULTS as raised:
            fault = raised
            if "sdpa" not in str(raised) and "scaled_dot_product" not in str(raised):
                break
    assert fault is not None
    raise UnsupportedArchitecture(
        f"{source.name!r} could not be built: {first_line(fault)}; see docs/adding-a-model.md"
    ) from fault


def _text_class(config: Any, head: bool) -> Any:
    """The class of a text part that transformers' own table leaves out (Llama 3.2 Vision's, Emu 3's), from its family's file."""
    from transformers import MODEL_MAPPING, PreTrainedModel

    home = type(config).__module__
    if type(config) in MODEL_MAPPING or not home.startswith("transformers.models."):
        return None
    there = vars(importlib.import_module(home.replace(".configuration_", ".modeling_"))).values()
    models = [one for one in there if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    ending = "ForCausalLM" if head else "TextModel"
    found = [one for one in models if one.config_class is type(config) and one.__name__.endswith(ending)]
    return found[0] if len(found) == 1 else None


def _weight_map(source: Source) -> dict[str, str]:
    """Tensor name → file, from the index or from the single file's own header."""
    index = source.folder / gate.INDEX
    if index.exists():
        return gate.read_index(index, source.name)
    name = "model.safetensors"
    return dict.fromkeys(_header(source, name)[0], name)


def whole_folder(source: Source) -> Path:
    """The model's folder with all of its weights in it, for engines that read it themselves."""
    for file in sorted(set(_weight_map(source).values())):
        source.weight_file(file)
    return source.folder


def _header(source: Source, name: str) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensors (dtype, shape, data_offsets) and where their data begin; no tensor is read."""
    return gate.read_header(source.weight_file(name), name, source.name)


def _wanted(weight_map: dict[str, str], count: int, full: int, *, head: bool = False) -> dict[str, str]:
    """The part of a weight map that the first `count` of `full` layers need, and the `head` where it is wanted."""
    many_modal = any(re.match(_TEXT_PART, key) for key in weight_map)

    def needed(key: str) -> bool:
        if _HEAD.search(key) or re.match(_TEXT_HEAD, key):
            return head
        if many_modal and not re.match(_TEXT_PART, key):
            return False  # the picture and sound towers
        layer = placing.LAYER.search(key)
        if layer is None:
            return count == full or not _FINAL_NORM.search(key)
        return int(layer[1]) < count

    return {key: file for key, file in weight_map.items() if needed(key)}


def _cut(config: Any, count: int) -> None:
    """Fewer layers, with every per-layer list cut to match."""
    full = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == full:
            setattr(config, name, value[:count])
    # Counted from the end: that many last layers use the keys of earlier ones.
    if shared := getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers = max(0, shared - (full - count))
    config.num_hidden_layers = count


def _dtype(asked: str, device: torch.device, source: Source, wanted: dict[str, str], config: Any) -> processor.Choice:
    if asked != "auto" and asked not in DTYPES:
        raise BadStudy(f"no dtype {asked!r}; there are: auto, {', '.join(DTYPES)}")
    if asked == "auto" and gate.quantised_by(config) and config.dtype in DTYPES.values():
        return processor.as_it_is(str(config.dtype).removeprefix("torch."), _QUANTISED)
    if asked == "auto" and device.type != "cpu":
        return processor.as_it_is("bfloat16", "on a GPU")
    elements: Counter[str] = Counter()
    for file in sorted(set(wanted.values())) if asked == "auto" else ():
        for key, entry in _header(source, file)[0].items():
            if key in wanted and entry["dtype"].startswith(("F", "BF")):  # masks and counters are no weights
                elements[entry["dtype"]] += math.prod(entry["shape"])
    # Most of it counts: norms are often kept wider than the rest. Other kinds (F8, F64) are read as float32.
    known = {"BF16": "bfloat16", "F16": "float16"} if elements.keys() <= {"BF16", "F16", "F32"} else {}
    most = max(elements, key=elements.__getitem__, default="")
    return processor.choose(asked, known.get(most, "float32"), elements.total())


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def fingerprint(source: Source, count: int = 1, *, head: bool = False, step: Step = silent, anew: bool = False) -> str:
    """What identifies the weights that are used: SHA-256 over name, dtype, shape and bytes of each tensor, and the config.

    These are the tensors of the first `count` layers, or with `head` all of them; other files are not opened. A converted GGUF is known by what
    it was converted to, since that is what is read. Digests of files that have not changed are remembered, unless `anew`.
    """
    weight_map = _weight_map(source)
    # With the head everything is read; without it the final norm never is.
    wanted = _wanted(weight_map, count, count if head else count + 1, head=head)
    files = {name: _header(source, name) for name in sorted(set(wanted.values()))}
    parts = {
        name: {
            key: tuple(start + at for at in tensors[key]["data_offsets"])
            for key in sorted(tensors.keys() & wanted.keys())
        }
        for name, (tensors, start) in files.items()
    }
    size = sum(stop - start for some in parts.values() for start, stop in some.values())
    reach = counted(f"hashing {source.label}, MB", size, step)
    lines = [f"{name} {_plain_json(source.folder / name)}" for name in ("config.json", *(_ANSWERING if head else ()))]
    for name, some in parts.items():
        digests = hash_parts(source.weight_file(name), some, hash_memory(), reach, anew=anew)
        tensors = files[name][0]
        lines += [f"{key} {tensors[key]['dtype']} {tensors[key]['shape']} {digests[key]}" for key in some]
    # Sorted by tensor, so that the same weights in other files are the same weights.
    return _digest(*(line.encode(errors="surrogatepass") for line in sorted(lines)))


def _plain_json(path: Path) -> str:
    """A JSON file whatever its spacing; none where it is not there."""
    if not os.path.lexists(path):
        return "none"
    content = gates.read_json(
        path, limits.CONFIG_BYTES, lambda why: UnknownModel(f"{path}: {why}; fetch it again"), finite=False
    )
    # Which version wrote it, and where it lay, computes nothing.
    plain = {k: v for k, v in content.items() if k not in _UNUSED} if isinstance(content, dict) else content
    return json.dumps(plain, sort_keys=True)
