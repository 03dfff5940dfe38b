"""Next-token distributions from logits: log p of some tokens, entropy, and how far a distribution is from another one.

On a GPU each row is read by one program of its own, so its numbers do not depend on the other rows, and nothing of the vocabulary's size is
written.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mless.kernels.choosing import triton_serves

#: In place of −∞, which tokens have that are never drawn: 0 · ∞ is no number. And distances that come of it: a token that one row never draws.
_NEVER, _ENDLESS = -1e30, 1e20
#: On a GPU without our kernel a row of logits is filled up to a multiple of so many numbers, by tokens that are never drawn.
_ALIGNED = 64
#: Numbers that a CPU reads at once: 1 MB, so that what is made of them stays in its caches.
_CACHED = 1 << 18


class Kept:
    """Distributions that one block after another is compared with, on a CPU: what is made of their logits is made once."""

    def __init__(self, logits: Float[Tensor, "some vocabulary"]) -> None:
        logits = logits.detach().contiguous()
        step = _step(logits)
        whole = len(logits) - len(logits) % step
        self._rows = [_Rows(logits[first : first + step]) for first in range(0, whole, step)]
        self._left = logits[whole:].clone()

    @property
    def nbytes(self) -> int:
        return self._left.nbytes + sum(one.below.nbytes + one.exp.nbytes for one in self._rows)

    def beside(self, ours: Float[Tensor, "rows vocabulary"], number: int) -> _Rows | None:
        """Those that this block's rows of that number are compared with, as many; None where there are none."""
        if number < len(self._rows):
            return self._rows[number]
        if number > len(self._rows) or not len(self._left):
            return None
        # As many rows as ours: sums over another number of rows may have other bits.
        return _Rows(torch.cat([self._left, ours[len(self._left) :]]))


def described(
    ours: Float[Tensor, "rows vocabulary"],
    theirs: Float[Tensor, "some vocabulary"] | Kept | None,
    row: Int64[Tensor, " tokens"],
    token: Int64[Tensor, " tokens"],
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, "3 rows"]]:
    """log p of each `token` in its `row`; and of every row its entropy, its distance from `theirs` and whether both have the same likeliest token.

    In nats. The distance is Σ p log(p / q), where q is ours; NaN without `theirs`, 0 for rows that `theirs` does not reach.
    """
    if ours.is_cpu:
        return _on_cpu(ours, Kept(theirs) if isinstance(theirs, Tensor) else theirs, row, token)
    assert not isinstance(theirs, Kept)
    if triton_serves(ours):
        from mless.kernels import distributions_triton

        found = distributions_triton.described(ours, theirs)
        return ours[row, token].float() - found[0][row], found[1:]
    return _without_kernel(ours, theirs, row, token)


def compile_described(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernel for logits like these: without and with what it compares with."""
    # As many rows as Triton takes for any multiple of 16.
    logits = torch.zeros(16, vocabulary, dtype=dtype, device=device)
    if triton_serves(logits):
        from mless.kernels import distributions_triton

        for other in (None, logits):
            distributions_triton.described(logits, other)


def _without_kernel(
    ours: Float[Tensor, "rows vocabulary"],
    theirs: Float[Tensor, "some vocabulary"] | None,
    row: Int64[Tensor, " tokens"],
    token: Int64[Tensor, " tokens"],
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, "3 rows"]]:
    """On other devices: all rows at once."""
    known = _log_p(ours)
    logp = known[row, token]
    logp = logp.masked_fill(logp < -_ENDLESS, -torch.inf)
    # Of the whole block: sums over another number of rows may have other bits.
    entropy = -(known.exp() * known).sum(-1)
    if theirs is None:
        return logp, torch.stack([entropy, *[torch.full_like(entropy, torch.nan)] * 2])
    other = _log_p(theirs)
    if len(other) < len(known):
        other = torch.cat([other, known[len(other) :]])
    kl = _endless((other.exp() * (other - known)).sum(-1))
    return logp, torch.stack([entropy, kl, (other.argmax(-1) == known.argmax(-1)).to(kl.dtype)])


def _log_p(logits: Float[Tensor, "rows vocabulary"]) -> Float[Tensor, "rows wider"]:
    logits = logits.float()
    if missing := -logits.shape[1] % _ALIGNED:
        # A GPU sums a row in an order that depends on its address, and so on its place among others.
        logits = torch.nn.functional.pad(logits, (0, missing), value=_NEVER)
    return logits.clamp(min=_NEVER).log_softmax(-1)


def _endless(distance: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    return distance.masked_fill(distance > _ENDLESS, torch.inf)


def _step(logits: Float[Tensor, "rows vocabulary"]) -> int:
    return max(1, _CACHED // max(1, logits.shape[1]))


def _on_cpu(
    ours: Float[Tensor, "rows vocabulary"],
    theirs: Kept | None,
    row: Int64[Tensor, " tokens"],
    token: Int64[Tensor, " tokens"],
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, "3 rows"]]:
    """A few rows after another."""
    # Read row by row, so the numbers of each have to lie together.
    ours = ours.detach().contiguous()
    top, log_sum = torch.empty(2, len(ours))
    curves = torch.full((3, len(ours)), torch.nan)
    for number, some in enumerate(ours.split(_step(ours))):
        here = slice(number * _step(ours), number * _step(ours) + len(some))
        one = _Rows(some)
        top[here], log_sum[here], curves[0, here] = one.top, one.log_sum, one.entropy()
        if theirs is None:
            continue
        other = theirs.beside(some, number)
        if other is None:
            curves[1, here], curves[2, here] = 0.0, 1.0
        else:
            curves[1, here], curves[2, here] = one.distance_of(other)
    return (ours[row, token].float() - top[row]) - log_sum[row], curves


class _Rows:
    """A few rows of logits, less the largest of each."""

    def __init__(self, logits: Float[Tensor, "rows vocabulary"]) -> None:
        given = logits.float()
        # Several times as fast as torch's.
        self.likeliest = torch.from_numpy(np.argmax(given.numpy(), axis=-1))
        top = given.gather(-1, self.likeliest[:, None])
        self.top = top[:, 0]
        self.below = (given - top).clamp_(min=_NEVER)
        self.exp = self.below.exp()
        self.sum = self.exp.sum(-1)
        self.log_sum = self.sum.log()

    def entropy(self) -> Float[Tensor, " rows"]:
        return self.log_sum - (self.exp * self.below).sum(-1) / self.sum

    def distance_of(self, other: _Rows) -> tuple[Float[Tensor, " rows"], Bool[Tensor, " rows"]]:
        """How far these rows' distributions are from the other's, and whether the same token is likeliest."""
        between = (other.below - self.below).mul_(other.exp).sum(-1) / other.sum
        return _endless(between + (self.log_sum - other.log_sum)), other.likeliest == self.likeliest
