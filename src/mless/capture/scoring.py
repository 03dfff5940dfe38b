"""Log-probabilities of given texts after a prompt, and how the next-token distributions along the first text differ from another prompt's.

No tensor of tokens × vocabulary is kept: states of the tokens that are asked about go through the model's own head a block at a time. A row's
bits depend on its own tokens, on the row's padded length and on the number of rows, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from mless import kernels
from mless.capture.branching import Branches, BranchMask, own_rule
from mless.capture.copies import Started, leaving, sent
from mless.capture.forwards import own_forward, sdpa_forward
from mless.capture.seam import Call, attending
from mless.errors import BadAttention, BadStudy
from mless.kernels.packed import PackedWeights
from mless.models import LoadedModel
from mless.models.seams import replaced_forward
from mless.models.widening import Narrow

#: States that go through the head at once, on a GPU; always so many, so that a row's bits do not depend on its neighbours.
HEAD_BLOCK = 512
#: Bytes of logits at once on a CPU. From 32 MB on, glibc takes memory from the system and gives it back each time: a sixth of a study's time.
_BLOCK_BYTES = 30 << 20
#: Bytes that are kept to compare with: those of 200 states with the largest vocabularies.
_KEPT_BYTES = 400 << 20
#: Up to so many states a float32 head is 1.6 to 1.9 times as quick the other way round, on a CPU (benchmarks/tried.md).
_FEW = 15


@dataclass(frozen=True)
class Numbers:
    """What the model says of every token after the prompt of one row."""

    #: log p of each text's tokens, given what is before them on their way.
    texts: tuple[Float64[np.ndarray, " _"], ...]
    #: Of the distribution that each token of the first text is drawn from, in nats.
    entropy: Float64[np.ndarray, " first"]
    #: Against the distributions given as `against`; NaN where none were given. kl = Σ p log(p / q), where q is this row's.
    kl: Float64[np.ndarray, " first"]
    #: Whether both have the same most likely token; NaN where none were given.
    agree: Float64[np.ndarray, " first"]


class Scores:
    """One row of a forward. On a GPU its numbers may still be computed: whoever asks for them waits."""

    def __init__(self, forward: _Forward, row: int, states: Float[Tensor, "first width"]) -> None:
        self._forward, self._row = forward, row
        #: The states from which the first text's tokens are predicted.
        self.states = states

    @property
    def numbers(self) -> Numbers:
        found = self._forward.rows()[self._row]
        if isinstance(found, BadAttention):
            raise found
        return found

    @property
    def texts(self) -> tuple[Float64[np.ndarray, " _"], ...]:
        return self.numbers.texts

    @property
    def entropy(self) -> Float64[np.ndarray, " first"]:
        return self.numbers.entropy

    @property
    def kl(self) -> Float64[np.ndarray, " first"]:
        return self.numbers.kl

    @property
    def agree(self) -> Float64[np.ndarray, " first"]:
        return self.numbers.agree


class Scorer:
    """Reads log-probabilities from a model that was loaded with its head."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._decoder: nn.Module = model.model.get_decoder()
        #: The states that the last row was compared with, and what they predict by the first one's place and their number.
        self._kept: tuple[Tensor | None, dict[tuple[int, int], kernels.Kept]] = None, {}
        #: What the decoder returns.
        self._kind: type[Any] = BaseModelOutputWithPast
        #: Weights of the model that are kept a second time, for quicker products; the head's product is made with them here.
        self.packed: PackedWeights | None = None

    def __call__(
        self,
        rows: Sequence[Branches],
        against: Sequence[Float[Tensor, "_ width"] | None] | None = None,
        *,
        count: int | None = None,
        length: int | None = None,
        tell: Callable[[Int64[Tensor, "rows tokens"]], None] | None = None,
        skipped: int = 0,
    ) -> list[Scores]:
        """One forward of the rows, filled up to `count` rows of `length` tokens. `tell` gets each token's place on its way, before it.

        `skipped`: so many tokens, the first ones of each row and none that a text is predicted from, are not computed. Their keys and values have to
        be put in (`starting`).
        """
        against = against or [None] * len(rows)
        with torch.inference_mode():
            states = self._states(rows, count or len(rows), length or max(map(len, rows)), tell, skipped)
            if not states.is_cpu:
                return self._read(rows, states, against, skipped)
            # Each by itself: what the head makes of a row must not depend on how many there are.
            each = zip(rows, states[: len(rows)].split(1), against, strict=True)
            return [self._read([row], own, [other], skipped)[0] for row, own, other in each]

    def forget(self) -> None:
        """Let go of what was kept to compare with."""
        self._kept = None, {}

    def forward(self, rows: Sequence[Branches], *, count: int | None = None, length: int | None = None) -> None:
        """The same forward without a head, for what others read in it."""
        with torch.inference_mode():
            self._states(rows, count or len(rows), length or max(map(len, rows)), None)

    # ---- from tokens to states

    def _states(
        self,
        rows: Sequence[Branches],
        count: int,
        length: int,
        tell: Callable[[Tensor], None] | None,
        skipped: int = 0,
    ) -> Float[Tensor, "rows tokens width"]:
        place = self._model.device
        ids, positions, depth = (torch.zeros(count, length, dtype=torch.long) for _ in range(3))
        # What fills up sees itself only.
        end = torch.arange(1, length + 1).repeat(count, 1)
        real = torch.zeros(count, length, dtype=torch.long)
        real[:, skipped] = 1  # a row of nothing but padding has no softmax
        hidden = torch.zeros(count, 2, dtype=torch.long)
        for at, row in enumerate(rows):
            own = slice(0, len(row))
            ids[at, own], positions[at, own] = torch.from_numpy(row.ids), torch.from_numpy(row.positions)
            depth[at, own], end[at, own] = torch.from_numpy(row.depth), torch.from_numpy(row.end)
            real[at, own] = 1
            hidden[at] = torch.tensor(row.hidden or (0, 0))
        given: dict[str, Any] = {}
        branched = bool(skipped) or any(row.own_mask for row in rows)
        if branched or any(row.prompt.position_ids is not None for row in rows):
            given["position_ids"] = sent(positions[:, skipped:], place)
        if tell is not None:
            tell(sent(depth, place))
        seen = (sent(end, place), sent(depth, place), sent(hidden, place) if bool(hidden.any()) else None)
        ids, real = ids[:, skipped:], real[:, skipped:]
        with _seeing(self._model.model, *seen, skipped) if branched else nullcontext():
            out = self._decoder(input_ids=sent(ids, place), attention_mask=sent(real, place), use_cache=False, **given)
        self._kind = type(out)
        return out.last_hidden_state

    # ---- from states to numbers

    def _read(
        self,
        rows: Sequence[Branches],
        states: Float[Tensor, "rows tokens width"],
        against: Sequence[Float[Tensor, "_ width"] | None],
        skipped: int,
    ) -> list[Scores]:
        length = states.shape[1]
        asked = [_Asked(row, at * length - skipped) for at, row in enumerate(rows)]
        firsts = sum(len(one.first) for one in asked)
        # The states before the first texts' tokens, then all others: only the first are compared.
        at = np.concatenate([*(one.first for one in asked), *(one.others for one in asked)])
        flat = states.reshape(-1, states.shape[-1])
        wanted = flat.index_select(0, sent(torch.from_numpy(at), flat.device))
        partners = _partner_states(asked, against, wanted)
        place = np.zeros(len(rows) * length, np.int64)
        place[at] = np.arange(len(at))
        # Predictions in the order of the states that they are made from.
        state = np.concatenate([place[one.origin] for one in asked])
        token = np.concatenate([row.predicted for row in rows])
        order = np.argsort(state, kind="stable")
        block_of = self._block_of(wanted)
        bounds = np.searchsorted(state[order], range(0, len(at) + block_of, block_of))
        of_state, of_token = (sent(torch.from_numpy(one[order]), flat.device) for one in (state, token))
        logp: list[Tensor] = []
        along: list[Tensor] = []
        for number, (first, block) in enumerate(self._blocks(wanted, block_of)):
            here = slice(bounds[number], bounds[number + 1])
            theirs = None
            if partners is not None and first < firsts:
                theirs = self._partners(against, first, partners[first : first + len(block)], len(block))
            found, curves = kernels.described(self._logits(block), theirs, of_state[here] - first, of_token[here])
            logp.append(found)
            if first < firsts:
                along.append(curves)
        forward = _Forward(
            rows,
            asked,
            [one is not None for one in against],
            order,
            torch.cat(logp).double() if logp else torch.empty(0, dtype=torch.double),
            torch.cat(along, dim=1)[:, :firsts].double() if along else torch.empty(3, 0, dtype=torch.double),
        )
        parts = wanted[:firsts].split([len(one.first) for one in asked])
        return [Scores(forward, number, states) for number, states in enumerate(parts)]

    def _block_of(self, states: Float[Tensor, "states width"]) -> int:
        """How many states go through the head at once."""
        head = self._model.model.get_output_embeddings()
        # Other heads are widened, or fetched from elsewhere, once for each block.
        if not states.is_cpu or not _is_plain(head):
            return HEAD_BLOCK
        most = min(HEAD_BLOCK, max(1, _BLOCK_BYTES // (4 * len(head.weight))))
        # Blocks of about one size: a product of few states costs almost as much as one of many.
        return max(1, -(-len(states) // max(1, -(-len(states) // most))))

    def _blocks(
        self, states: Float[Tensor, "states width"], block_of: int
    ) -> Iterator[tuple[int, Float[Tensor, "block width"]]]:
        for first in range(0, len(states), block_of):
            yield first, self._filled(states[first : first + block_of], block_of)

    def _filled(self, states: Float[Tensor, "some width"], count: int) -> Float[Tensor, "block width"]:
        """On a GPU so many states: products of another size may have other bits, and their number depends on the neighbours."""
        if states.device.type == "cpu" or len(states) == count:
            return states
        return torch.cat([states, states.new_zeros(count - len(states), states.shape[1])])

    def _partners(
        self, against: Sequence[Tensor | None], first: int, states: Float[Tensor, "some width"], count: int
    ) -> Float[Tensor, "block vocabulary"] | kernels.Kept:
        """What to compare with. On a CPU one row after another is compared with the same states, so it is kept."""
        if not states.is_cpu:
            return self._logits(self._filled(states, count))
        (one,) = against
        if self._kept[0] is not one:
            self._kept = one, {}
        kept, place = self._kept[1], (first, len(states))
        if place not in kept:
            found = kernels.Kept(self._logits(states))
            if found.nbytes + sum(other.nbytes for other in kept.values()) > _KEPT_BYTES:
                return found
            kept[place] = found
        return kept[place]

    def _logits(self, states: Float[Tensor, "block width"]) -> Float[Tensor, "block vocabulary"]:
        """The head as the model itself runs it, with its scales and caps: its decoder answers with these states."""
        model, head = self._model.model, self._model.model.get_output_embeddings()
        few = states.is_cpu and len(states) <= _FEW and _is_plain(head) and torch.backends.mkl.is_available()
        with ExitStack() as stack:
            stack.enter_context(
                replaced_forward(self._decoder, lambda *_, **__: self._kind(last_hidden_state=states[None]))
            )
            if few:
                stack.enter_context(replaced_forward(head, lambda given: _few_through(head, given)))
            elif self.packed is not None and self.packed.has(head) and "forward" not in vars(head):
                stack.enter_context(replaced_forward(head, partial(self.packed.product, head)))
            ids = torch.zeros(1, len(states), dtype=torch.long, device=self._model.device)
            return model(input_ids=ids, use_cache=False).logits[0]


class _Asked:
    """Which of a row's states predict what is asked about; places in the states of all rows, one after another."""

    def __init__(self, row: Branches, offset: int) -> None:
        self.origin = offset + row.origin
        self.first = self.origin[row.texts[0]] if row.texts else np.empty(0, np.int64)
        self.others = np.setdiff1d(self.origin, self.first)


def _partner_states(
    asked: Sequence[_Asked], against: Sequence[Tensor | None], wanted: Float[Tensor, "states width"]
) -> Float[Tensor, "firsts width"] | None:
    """The states to compare with, in the order of the first texts' own."""
    if all(one is None for one in against):
        return None
    for row, one in zip(asked, against, strict=True):
        if one is not None and len(one) != len(row.first):
            raise BadStudy(
                f"the first text has {len(row.first)} tokens, but is to be compared with one of {len(one)}; give the same text"
            )
    rows = [
        wanted.new_zeros(len(row.first), wanted.shape[1]) if one is None else one.to(wanted.device)
        for row, one in zip(asked, against, strict=True)
    ]
    return torch.cat(rows)


class _Forward:
    """The numbers of all rows of a forward, on their way from the device: one copy for all of it."""

    def __init__(
        self,
        rows: Sequence[Branches],
        asked: Sequence[_Asked],
        compared: Sequence[bool],
        order: Int64[np.ndarray, " predictions"],
        logp: Float64[Tensor, " predictions"],
        along: Float64[Tensor, "3 firsts"],
    ) -> None:
        self._rows, self._asked, self._compared, self._order = rows, asked, compared, order
        self._logp, self._along = leaving(logp), leaving(along)
        self._copied = Started([logp, along])
        self._found: list[Numbers | BadAttention] | None = None
        self._lock = Lock()

    def rows(self) -> list[Numbers | BadAttention]:
        """Every row's numbers; the fault instead, of one whose numbers are of no use."""
        with self._lock:
            if self._found is None:
                self._copied.wait()
                self._found = list(self._apart())
        return self._found

    def _apart(self) -> Iterator[Numbers | BadAttention]:
        """Each row's own numbers."""
        logp = np.empty(len(self._order))
        logp[self._order] = self._logp.numpy()
        along = self._along.numpy()
        token = first = 0
        for row, one, compared in zip(self._rows, self._asked, self._compared, strict=True):
            own = logp[token : token + len(row.predicted)]
            entropy, kl, agree = (values[first : first + len(one.first)] for values in along)
            token, first = token + len(own), first + len(one.first)
            if not (np.isfinite(own).all() and np.isfinite(entropy).all()):
                yield BadAttention(
                    f"item {row.prompt.item!r}, condition {row.prompt.condition!r}: a log-probability is not finite (NaN or infinite); try --dtype "
                    "float32, or check the checkpoint"
                )
                continue
            nothing = np.full(len(one.first), np.nan)
            texts = tuple(own[text] for text in row.texts)
            yield Numbers(texts, entropy, kl if compared else nothing, agree if compared else nothing)


@contextmanager
def _seeing(
    model: nn.Module,
    end: Int64[Tensor, "rows tokens"],
    depth: Int64[Tensor, "rows tokens"],
    hidden: Int64[Tensor, "rows 2"] | None,
    skipped: int,
) -> Generator[None]:
    """Inside the block every token sees its own way only."""
    made: dict[tuple[int, torch.device], tuple[Any, BranchMask]] = {}

    def mask(call: Call) -> BranchMask:
        own, place = own_rule(call), call.query.device
        # The rule is kept beside the mask, so that its id is not given to another.
        if (id(own), place) not in made:
            there = None if hidden is None else hidden.to(place)
            made[id(own), place] = own, BranchMask(end.to(place), depth.to(place), there, own, skipped)
        return made[id(own), place][1]

    def attend(call: Call) -> Tensor:
        seen = replace(call, mask=call.mask.on(mask(call)))
        plain = all(call.score[name] is None for name in ("softcap", "sinks"))
        return sdpa_forward(seen) if plain else own_forward(seen)

    with attending(model, attend):
        yield


def _is_plain(head: nn.Module) -> bool:
    """A float32 product and nothing around it: accelerate's hooks bring weights that lie elsewhere, and narrower ones are widened on the way."""
    return (
        type(head) is nn.Linear
        and not isinstance(head.weight, Narrow)
        and head.weight.dtype == torch.float32
        and head.weight.is_cpu
        and "forward" not in vars(head)
    )


def _few_through(head: nn.Linear, states: Float[Tensor, "1 states width"]) -> Float[Tensor, "1 states vocabulary"]:
    """The head's product the other way round. MKL copies what comes second into another layout first, and the head is a thousand times as large."""
    found = (head.weight @ states[0].T).T[None]
    bias = cast("Tensor | None", head.bias)
    return found if bias is None else found + bias
