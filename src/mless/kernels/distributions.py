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

#: Without our kernel a row of logits is filled up to a multiple of so many numbers, by tokens that are never drawn. (Not −∞: 0 · ∞ is no number.)
_ALIGNED, _NEVER = 64, -1e30
#: Numbers that a CPU reads at once, so that what is made of them stays in its caches.
_CACHED = 1 << 18


def described(
    ours: Float[Tensor, "rows vocabulary"],
    theirs: Float[Tensor, "some vocabulary"] | None,
    row: Int64[Tensor, " tokens"],
    token: Int64[Tensor, " tokens"],
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, "3 rows"]]:
    """log p of each `token` in its `row`; and of every row its entropy, its distance from `theirs` and whether both have the same likeliest token.

    In nats. The distance is Σ p log(p / q), where q is ours; NaN without `theirs`, 0 for rows that `theirs` does not reach.
    """
    if triton_serves(ours):
        from mless.kernels import distributions_triton

        found = distributions_triton.described(ours, theirs)
        return ours[row, token].float() - found[0][row], found[1:]
    if ours.is_cpu:
        whole, curves = _by_few(ours, theirs)
        return ours[row, token].float() - whole[row], curves
    known = _log_p(ours)
    logp = known[row, token]
    # Of the whole block: sums over another number of rows may have other bits.
    entropy = -(known.exp() * known).sum(-1)
    if theirs is None:
        return logp, torch.stack([entropy, *[torch.full_like(entropy, torch.nan)] * 2])
    other = _log_p(theirs)
    if len(other) < len(known):
        other = torch.cat([other, known[len(other) :]])
    kl = (other.exp() * (other - known)).sum(-1)
    return logp, torch.stack([entropy, kl, (other.argmax(-1) == known.argmax(-1)).to(kl.dtype)])


def _by_few(
    ours: Float[Tensor, "rows vocabulary"], theirs: Float[Tensor, "some vocabulary"] | None
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "3 rows"]]:
    """The log of every row's sum, and the curves: a few rows after another."""
    # Read row by row, so each row has to lie together.
    ours, theirs = ours.contiguous(), None if theirs is None else theirs.contiguous()
    whole, curves = torch.empty(len(ours)), torch.zeros(3, len(ours))
    if theirs is None:
        curves[1:] = torch.nan
    else:
        curves[2, len(theirs) :] = 1.0
    step = max(1, _CACHED // max(1, ours.shape[1]))
    for first in range(0, len(ours), step):
        here = slice(first, min(first + step, len(ours)))
        one = _Few(ours[here])
        whole[here], curves[0, here] = one.top + one.log_sum, one.entropy()
        if theirs is not None and first < len(theirs):
            there = slice(first, min(first + step, len(theirs)))
            curves[1, there], curves[2, there] = one.distance_of(_Few(theirs[there]))
    return whole, curves


class _Few:
    """A few rows of logits, less the largest of each."""

    def __init__(self, logits: Float[Tensor, "rows vocabulary"]) -> None:
        given = logits.float()
        self.top = given.amax(-1)
        self.below = (given - self.top[:, None]).clamp_(min=_NEVER)
        # Of what is in the caches by now, and numpy's is several times as fast as torch's.
        self.likeliest = torch.from_numpy(np.argmax(self.below.numpy(), axis=-1))
        self.exp = self.below.exp()
        self.sum = self.exp.sum(-1)
        self.log_sum = self.sum.log()

    def entropy(self) -> Float[Tensor, " rows"]:
        return self.log_sum - (self.exp * self.below).sum(-1) / self.sum

    def distance_of(self, other: _Few) -> tuple[Float[Tensor, " some"], Bool[Tensor, " some"]]:
        """How far these rows' distributions are from the other's, of which there may be fewer; and whether the same token is likeliest."""
        some = len(other.sum)
        between = (other.below - self.below[:some]).mul_(other.exp).sum(-1) / other.sum
        return between + (self.log_sum[:some] - other.log_sum), other.likeliest == self.likeliest[:some]


def _log_p(logits: Float[Tensor, "rows vocabulary"]) -> Float[Tensor, "rows wider"]:
    logits = logits.float()
    if missing := -logits.shape[1] % _ALIGNED:
        # A GPU sums a row in an order that depends on its address, and so on its place among others.
        logits = torch.nn.functional.pad(logits, (0, missing), value=_NEVER)
    return logits.log_softmax(-1)
