"""Prompts with explicit positions, as under the condition `position-only`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from mless.errors import BadPrompt, TokenizerFault, UnsupportedArchitecture
from mless.models import LoadedModel
from mless.values import Prompt


def check_reach(model: LoadedModel, prompts: Sequence[Prompt]) -> None:
    """Every prompt's tokens and its last position are ones that the model has."""
    rows = _embedding_rows(model)
    for prompt in prompts:
        if rows is not None and max(prompt.token_ids) >= rows:
            raise TokenizerFault(
                f"item {prompt.item!r} holds token {max(prompt.token_ids)} under condition {prompt.condition!r}, but {model.label} knows {rows} tokens: the "
                "tokenizer belongs to another model; give the model's own: --tokenizer DIR"
            )
        if prompt.reach > model.context:
            what = f"is {len(prompt)} tokens" if prompt.position_ids is None else f"reaches position {prompt.reach - 1}"
            raise BadPrompt(
                f"item {prompt.item!r} {what} under condition {prompt.condition!r}, but {model.label} takes {model.context}; "
                "leave it out of the data, or use a smaller --length"
            )


def _embedding_rows(model: LoadedModel) -> int | None:
    rows = getattr(model.model.get_input_embeddings(), "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def check_position_ids(model: LoadedModel, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts with explicit positions for a model that takes no position ids."""
    own = next((prompt for prompt in prompts if prompt.position_ids is not None), None)
    if own is not None and not _takes_position_ids(model):
        raise UnsupportedArchitecture(
            f"{model.label} ({model.family}) takes no position ids, so `{own.condition}` cannot be run on it; leave it out of --conditions"
        )


def own_positions(model: LoadedModel, prompts: Sequence[Prompt], longest: int) -> Int[Tensor, "rows tokens"] | None:
    """Position ids for rows padded on the right to `longest`; None where every prompt counts 0, 1, 2, …

    A forward with position ids needs a mask too: without one, transformers reads a jump in positions as the border between packed texts.
    """
    if all(prompt.position_ids is None for prompt in prompts):
        return None
    if not _takes_position_ids(model):
        raise UnsupportedArchitecture(
            f"{model.family!r} takes no position ids, so effects of positions and of filler cannot be separated; see docs/adding-a-model.md"
        )
    positions = torch.arange(longest).repeat(len(prompts), 1)
    for row, prompt in enumerate(prompts):
        if prompt.position_ids is not None:
            positions[row, : len(prompt)] = torch.tensor(prompt.position_ids)
    return positions


def _takes_position_ids(model: LoadedModel) -> bool:
    return "position_ids" in inspect.signature(model.model.forward).parameters
