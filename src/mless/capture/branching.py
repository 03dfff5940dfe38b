"""A prompt with several texts after it in one row: each text sees the prompt and itself, and beginnings that texts share are there once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from mless.capture.seam import Call, GivenMask, LazyMask
from mless.errors import UnsupportedArchitecture
from mless.values import Prompt

#: Queries whose mask is made at once: a long row's whole mask would take gigabytes.
_QUERIES = 2048


@dataclass(frozen=True)
class Branches:
    """A prompt's tokens, then those of the texts after it, each after the one it follows: a tree in preorder. A text's last token is only predicted:
    where no other text goes on from it, it is not among them.

    Token i sees token j where j ≤ i < `end[j]`: just the tokens on its own way.
    """

    prompt: Prompt
    ids: Int64[np.ndarray, " tokens"]
    #: The token before it on its way; −1 for the first.
    parent: Int64[np.ndarray, " tokens"]
    #: The first token that does not follow it.
    end: Int64[np.ndarray, " tokens"]
    #: How many tokens come before it on its way.
    depth: Int64[np.ndarray, " tokens"]
    #: All that is predicted, each once: which token, and from where.
    predicted: Int64[np.ndarray, " predictions"]
    origin: Int64[np.ndarray, " predictions"]
    #: Each text's predictions, in the order in which the texts were given.
    texts: tuple[Int64[np.ndarray, " _"], ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def positions(self) -> Int64[np.ndarray, " tokens"]:
        """Position ids; after a prompt with positions of its own they go on from its last one."""
        given = self.prompt.position_ids
        if given is None:
            return self.depth
        own, known = np.array(given, np.int64), len(self.prompt)
        return np.where(self.depth < known, own[np.minimum(self.depth, known - 1)], own[-1] + 1 + self.depth - known)

    @property
    def branched(self) -> bool:
        """Whether a token has two that follow it, so that a plain causal forward would be wrong."""
        return bool((self.parent[1:] != np.arange(len(self) - 1)).any())

    @property
    def own_mask(self) -> bool:
        """Whether its tokens do not see just all before them."""
        return self.branched or self.hidden is not None

    @property
    def hidden(self) -> tuple[int, int] | None:
        """The tokens that no other token sees."""
        return self.prompt.hidden_filler


def branches(prompt: Prompt, texts: Sequence[Sequence[int]]) -> Branches:
    """The prompt with these texts after it, all in one row."""
    children: list[dict[int, int]] = [{}]
    tokens: list[int] = [-1]
    before: list[int] = [-1]
    ways: list[list[int]] = []
    for text in texts:
        at, way = 0, list[int]()
        for token in text:
            if (there := children[at].get(token)) is None:
                there = children[at][token] = len(tokens)
                tokens.append(token)
                before.append(at)
                children.append({})
            at = there
            way.append(at)
        ways.append(way)
    known = len(prompt)
    ids, parent, depth = list(prompt.token_ids), list(range(-1, known - 1)), list(range(known))
    place: dict[int, int] = {0: known - 1}
    # Without recursion: a text may be longer than Python's stack is deep.
    waiting = list(reversed(children[0].values()))
    while waiting:
        node = waiting.pop()
        if not children[node]:
            continue
        place[node] = len(ids)
        ids.append(tokens[node])
        parent.append(place[before[node]])
        depth.append(depth[place[before[node]]] + 1)
        waiting += reversed(children[node].values())
    end = list(range(1, len(ids) + 1))
    for at in range(len(ids) - 1, 0, -1):
        end[parent[at]] = max(end[parent[at]], end[at])
    return Branches(
        prompt,
        *(np.array(one, np.int64) for one in (ids, parent, end, depth)),
        predicted=np.array(tokens[1:], np.int64),
        origin=np.array([place[node] for node in before[1:]], np.int64),
        texts=tuple(np.array(way, np.int64) - 1 for way in ways),
    )


class BranchMask(GivenMask):
    """What each token of such rows sees in one layer: its own way, as far as the layer looks back."""

    def __init__(
        self,
        end: Int64[Tensor, "rows tokens"],
        depth: Int64[Tensor, "rows tokens"],
        hidden: Int64[Tensor, "rows 2"] | None,
        own: LazyMask,
        before: int = 0,
    ) -> None:
        """`before`: so many of the rows' tokens, the first ones, are no queries."""
        self._end, self._depth, self._hidden, self._own, self._before = end, depth, hidden, own, before
        self._whole: Tensor | None = None
        self.plain_causal = self.causal_for_real = False

    def __call__(self, first: int, last: int, /) -> Bool[Tensor, "rows 1 queries keys"]:
        tokens = self._end.shape[1]
        first, last = first + self._before, last + self._before
        if tokens > _QUERIES:
            return self._block(first, last)
        if self._whole is None:
            self._whole = self._block(0, tokens)  # one for all layers
        return self._whole[:, :, first:last]

    def _block(self, first: int, last: int) -> Bool[Tensor, "rows 1 queries keys"]:
        device = self._end.device
        query = torch.arange(first, last, device=device)[None, :, None]
        key = torch.arange(self._end.shape[1], device=device)[None, None]
        seen = (key <= query) & (query < self._end[:, None])
        look = self._own.rule
        if look is not causal_mask_function:
            # The layer's own rule (a window, chunks), asked about places on the way and not in the row.
            row = torch.arange(len(self._end), device=device)[:, None, None]
            seen &= look(row, torch.zeros_like(row), self._depth[:, first:last, None], self._depth[:, None])
        if self._hidden is not None:
            start, stop = self._hidden[:, 0, None, None], self._hidden[:, 1, None, None]
            seen &= (key < start) | (key >= stop) | ((query >= start) & (query < stop))
        return seen[:, None]

    def windowed(self, size: int) -> BranchMask:
        return BranchMask(self._end, self._depth, self._hidden, self._own.windowed(size), self._before)


def own_rule(call: Call) -> LazyMask:
    """The layer's mask, if it is a rule that can be asked about other places than those in the row."""
    mask = call.mask.base
    if not isinstance(mask, LazyMask) or call.score["bias"] is not None:
        what = "a bias for each pair of places" if call.score["bias"] is not None else "a mask of its own making"
        raise UnsupportedArchitecture(
            f"layer {call.layer}: {type(call.module).__name__} has {what}, so texts cannot share a row; see docs/adding-a-model.md"
        )
    return mask
