"""Which token of which prompt each place of the forward under way is: padding, a prompt's span, or the answer after it.

The decoder's own arguments say it: rows may be padded on either side, and with a cache a forward holds only the last tokens.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int8, Int64
from torch import Tensor, nn

from mless.changes import ANSWER, NAMED_SPANS
from mless.errors import BadPrompt, BadStudy, UnsupportedArchitecture
from mless.models.activations import decoder_of
from mless.values import Prompt

#: The label of padding; labels of tokens are places in `NAMED_SPANS`.
PADDING = len(NAMED_SPANS)
_ANSWER = NAMED_SPANS.index(ANSWER)


@dataclass(eq=False)
class Places:
    """The places of one forward, those in its cache included."""

    #: Each row's prompt; None for a row that only fills the batch.
    prompts: Sequence[Prompt | None]
    #: Where each row's first token is, and the place after its last one.
    starts: Sequence[int]
    ends: Sequence[int]
    #: How many tokens are in the cache, and how many come with this forward.
    before: int
    tokens: int
    #: The forward's token ids, where it brings ids.
    ids: Tensor | None = None
    #: How many tokens come before each one on its own way, where texts share a row.
    depths: Sequence[Int64[np.ndarray, " _"]] | None = None
    _kept: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)

    @property
    def total(self) -> int:
        return self.before + self.tokens

    @cached_property
    def labels(self) -> Int8[np.ndarray, "rows total"]:
        """The span of every place, as a number."""
        found = np.full((len(self.prompts), self.total), PADDING, np.int8)
        for row, (prompt, start, end) in enumerate(zip(self.prompts, self.starts, self.ends, strict=True)):
            if prompt is None:
                continue
            found[row, start:end] = _ANSWER
            known = np.array(prompt.span_ids, np.int8)[: max(0, end - start)]
            found[row, start : start + len(known)] = known
        return found

    def labels_on(self, device: torch.device) -> Int8[Tensor, "rows total"]:
        return self.kept(("labels", device), lambda: torch.from_numpy(self.labels).to(device))

    def kept(self, key: object, make: Callable[[], Any]) -> Any:
        """What follows from the places alone, made once for all layers."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


#: By a model's decoder: how many follow its forwards.
_FOLLOWED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def decoder(model: nn.Module) -> nn.Module:
    """The part of the model that is given token ids and runs the layers."""
    own: Any = getattr(model, "get_decoder", None)
    found: Any = own() if callable(own) else None
    # ModernBERT calls its last matrix the decoder.
    takes_ids = isinstance(found, nn.Module) and "input_ids" in inspect.signature(found.forward).parameters
    return found if takes_ids else decoder_of(model)[0]


def followed(model: nn.Module) -> bool:
    """Whether an instrument follows the model's forwards, so that only the prompts it knows may run."""
    return any(_FOLLOWED.values()) and bool(_FOLLOWED.get(decoder(model)))


class Follower:
    """Follows the forwards of a model's decoder; `places` is about the one under way.

    `prompts`: one for each row. Rows that are several times as many are as `generate` makes them for several answers a prompt.
    """

    def __init__(self, model: nn.Module, prompts: Sequence[Prompt]) -> None:
        self._decoder = decoder(model)
        self._names = tuple(inspect.signature(self._decoder.forward).parameters)
        self._prompts: list[Prompt | None] = []
        self._lengths: Sequence[int] | None = None
        self._depths: Sequence[Int64[np.ndarray, " _"]] | None = None
        self._before = 0
        self._current: Places | None = None
        self._count = 0
        self.rows(prompts)
        self._hooks = [self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)]
        _FOLLOWED[self._decoder] = _FOLLOWED.get(self._decoder, 0) + 1

    def rows(
        self,
        prompts: Sequence[Prompt | None],
        lengths: Sequence[int] | None = None,
        depths: Sequence[Int64[np.ndarray, " _"]] | None = None,
        before: int = 0,
    ) -> None:
        """The prompts of the forwards to come. `lengths`: how many tokens their rows have, each from place 0 on; nothing is then read from the
        forward, rows without a prompt (None) are left as they are, and rows beyond the prompts only fill the batch. `depths`: as in `Places`.
        `before`: so many of the rows' tokens, the first ones, do not come with the forwards.
        """
        for prompt in prompts:
            if not isinstance(prompt, Prompt) and (prompt is not None or lengths is None):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise BadPrompt(
                    f"a prompt is what mless.prompts(model, items, condition) makes, token ids with spans; got {type(prompt).__name__}"
                )
        if not prompts:
            raise BadPrompt("no prompt is given, so it is not known which tokens are which; give one for each row")
        self._prompts, self._lengths, self._depths, self._before = list(prompts), lengths, depths, before

    @property
    def places(self) -> Places:
        if self._current is None:
            raise BadStudy(
                "this layer ran outside a forward of the model's decoder, so its tokens are not known; call the whole model"
            )
        return self._current

    @property
    def forwards(self) -> int:
        """How many forwards have begun."""
        return self._count

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
            _FOLLOWED[self._decoder] -= 1
        self._hooks, self._current = [], None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        kwargs = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        ids = kwargs.get("input_ids")
        given = ids if isinstance(ids, Tensor) else kwargs.get("inputs_embeds")
        if not isinstance(given, Tensor):
            raise UnsupportedArchitecture(
                f"{type(module).__name__} was called with neither input_ids nor inputs_embeds by name, so its tokens are not known"
            )
        rows, tokens = int(given.shape[0]), int(given.shape[1])
        cache = kwargs.get("past_key_values")
        before = int(cache.get_seq_length()) if cache is not None else self._before
        self._count += 1
        if self._lengths is not None:
            more = rows - len(self._prompts)
            ends = [*self._lengths, *[1] * more]
            prompts = [*self._prompts, *[None] * more]
            self._current = Places(prompts, [0] * rows, ends, before, tokens, None, self._depths)
            return
        starts, ends = self._real(kwargs.get("attention_mask"), rows, before + tokens)
        known = ids if isinstance(ids, Tensor) else None
        self._current = Places(self._of_rows(rows), starts, ends, before, tokens, known)
        if known is not None:
            self._check_tokens(known)

    def _real(self, mask: object, rows: int, total: int) -> tuple[list[int], list[int]]:
        """Where each row's tokens begin and end, by the forward's own mask."""
        if mask is None:
            return [0] * rows, [total] * rows
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise UnsupportedArchitecture(
                f"this forward brings a ready-made mask ({type(mask).__name__}), which does not say which tokens are padding; give a 2-D attention_mask"
            )
        real = mask.detach().cpu().numpy().astype(bool)[:, :total]
        if not real.any(1).all():
            raise BadPrompt("a row of the batch is padding only; leave it out")
        return real.argmax(1).tolist(), (real.shape[1] - real[:, ::-1].argmax(1)).tolist()

    def _of_rows(self, rows: int) -> list[Prompt | None]:
        known = len(self._prompts)
        if rows % known:
            raise BadPrompt(f"the forward has {rows} rows, but {known} prompts were given; give one for each row")
        return [prompt for prompt in self._prompts for _ in range(rows // known)]

    def _check_tokens(self, ids: Int64[Tensor, "rows tokens"]) -> None:
        """Refuse rows that hold other tokens than their prompts: the spans would be elsewhere."""
        assert self._current is not None
        places, found = self._current, None
        for row, prompt in enumerate(places.prompts):
            first = max(places.before - places.starts[row], 0)
            last = min(places.total - places.starts[row], len(prompt) if prompt is not None else 0)
            if prompt is None or first >= last:
                continue
            found = ids.detach().cpu() if found is None else found
            at = places.starts[row] - places.before
            if found[row, at + first : at + last].tolist() != list(prompt.token_ids[first:last]):
                raise BadPrompt(
                    f"row {row + 1} of the forward does not hold the tokens of item {prompt.item!r} under {prompt.condition!r}; give the prompts in "
                    "the order of the rows, and the rows' own attention_mask"
                )
            if places.before == 0 and places.ends[row] - places.starts[row] < last - first:
                raise BadPrompt(
                    f"row {row + 1} of the forward ends inside the prompt of item {prompt.item!r}; check its attention_mask"
                )
