"""Next-token distributions from logits: log p of some tokens, entropy, and how far a distribution is from another one.

On a GPU each row is read by one program of its own, so its numbers do not depend on the other rows, and nothing of the vocabulary's size is
written.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mless.kernels.choosing import triton_serves

#: Without our kernel a row of logits is filled up to a multiple of so many numbers, by tokens that are never drawn. (Not −∞: 0 · ∞ is no number.)
_ALIGNED, _NEVER = 64, -1e30


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


def _log_p(logits: Float[Tensor, "rows vocabulary"]) -> Float[Tensor, "rows wider"]:
    logits = logits.float()
    if logits.device.type != "cpu" and (missing := -logits.shape[1] % _ALIGNED):
        # A GPU sums a row in an order that depends on its address, and so on its place among others.
        logits = torch.nn.functional.pad(logits, (0, missing), value=_NEVER)
    return logits.log_softmax(-1)
