"""A model's tokenizer: read, and refused where it is not the one the model was trained with."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from mless.errors import TokenizerFault, UnknownModel, first_line
from mless.models import gate
from mless.models.adapters import family_of
from mless.models.locating import TOKENIZER_FILES, Source, locate
from mless.models.quiet import quiet_transformers


def load_tokenizer(source: Source, given: Any, config: Any, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer, or `given`: a name, a path, or one that is loaded. Refused when it leaves out the BOS its model was trained with."""
    if given is None or isinstance(given, str | PathLike):
        name = source.name if given is None else str(given)
        folder = source.tokenizer if given is None else locate_tokenizer(name)
        tokenizer, whose = _read_tokenizer(folder, name, trust_remote_code), f"the tokenizer of {name!r}"
    else:
        tokenizer, whose = _loaded(given), "the tokenizer that was given"
    # Added tokens may lie beyond the embedding (Gemma's picture token does); plain ones mean another model's vocabulary.
    rows = getattr(config, "vocab_size", None)
    if rows is not None and tokenizer.vocab_size > rows:
        raise TokenizerFault(
            f"{whose} has {tokenizer.vocab_size} tokens, but the model {source.name!r} knows {rows}: it belongs to another model; "
            "give the model's own: --tokenizer DIR"
        )
    _check_bos(tokenizer, source, config)
    return tokenizer


def _loaded(given: Any) -> Any:
    from transformers import PreTrainedTokenizerBase

    if not isinstance(given, PreTrainedTokenizerBase):
        raise TokenizerFault(
            f"tokenizer: a name, a folder or a tokenizer of transformers expected, got {type(given).__name__}"
        )
    try:
        gate.check_normalizer(given)
    except ValueError as fault:
        raise TokenizerFault(f"the tokenizer that was given cannot be used: {fault}") from None
    return _fast(given, "the model")


def open_tokenizer(given: str, *, trust_remote_code: bool = False) -> Any:
    """A tokenizer alone, for a model that runs elsewhere."""
    return _read_tokenizer(locate_tokenizer(given), given, trust_remote_code)


def _read_tokenizer(folder: Path, name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    # transformers would make an empty tokenizer of nothing.
    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        raise TokenizerFault(f"{name!r} has no tokenizer.json; give a folder or a hub id that has one: --tokenizer DIR")
    gate.check_tokenizer_files(folder, name)
    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
            gate.check_normalizer(tokenizer)
            tokenizer("a 1")  # some faults show only then
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as fault:  # noqa: BLE001 -- tokenizers raises Exception itself, and a panic, which is none
        raise TokenizerFault(
            f"no tokenizer could be read from {name!r} ({first_line(fault)}); give one with --tokenizer"
        ) from None
    return _fast(tokenizer, repr(name))


def _fast(tokenizer: Any, whose: str) -> Any:
    if not tokenizer.is_fast:
        raise TokenizerFault(
            f"{whose} has a slow tokenizer, which cannot say where its tokens lie in the text; give a folder with a "
            "tokenizer.json: --tokenizer DIR"
        )
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
    """GGUF-derived tokenizers often drop the BOS; a model trained with one then gives nonsense without an error."""
    bos, reasons = needed_bos(tokenizer, source, config)
    if bos is not None and tokenizer("a").input_ids[:1] != [bos]:
        raise TokenizerFault(
            f"the tokenizer of {source.name!r} adds no BOS token (id {bos}), but the model needs it: {'; '.join(reasons)}. Give a tokenizer that adds it: "
            "--tokenizer DIR (a folder with the original tokenizer.json) or --tokenizer HUB-ID"
        )


def needed_bos(tokenizer: Any, source: Source, config: Any) -> tuple[int | None, list[str]]:
    """The token that the model needs in front of every prompt, with the reasons; None where there is no reason."""
    measured = source.notes.get("bos") or {}
    reasons: list[str] = []
    if family_of(config.model_type).bos:
        reasons.append(f"{family_of(config.model_type).label} models were trained with one")
    if source.notes.get("gguf", {}).get("add_bos_token"):
        reasons.append("the GGUF says add_bos_token")
    settings = gate.check_tokenizer_files(source.tokenizer, source.name)
    if settings.get("add_bos_token") is True:
        reasons.append("tokenizer_config.json says add_bos_token")
    # Without its BOS such a model's loss on plain text more than doubles; 1.5 leaves room on either side.
    if measured and measured["loss_without"] > 1.5 * measured["loss_with"]:
        reasons.append(
            f"its loss on plain text is {measured['loss_without']:.1f} without one and {measured['loss_with']:.1f} with it"
        )
    bos = tokenizer.bos_token_id
    if bos is None:
        bos = getattr(config, "bos_token_id", None)
    return bos if reasons else None, reasons
