"""The draw of a token: the torch path against its definition, and Triton's kernel against the torch path, interpreted in a process of its own.

On a GPU: tests/kernels/test_sampling_gpu.py.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mless import kernels

#: Less than a block of the kernel's, and more; and so many parts that the few highest are looked for in each. Few rows: the interpreter needs
#: a tenth of a second for each.
ROWS, BLOCK, PART = 3, 256, 64
CUTS = {
    "all": (1.0, 0, 1.0),
    "cooler": (0.3, 0, 1.0),
    "the 5 highest": (1.0, 5, 1.0),
    "half of the 7 highest": (1.0, 7, 0.503),
    "more than there are": (1.0, 5000, 1.0),
    "half": (1.0, 0, 0.503),
    "nearly all": (1.3, 0, 0.947),
    "hardly any": (1.0, 0, 1e-20),
    "ice": (1e-39, 0, 1.0),
    "both": (0.7, 40, 0.903),
    "the highest": (2.0, 1, 0.3007),
}


def logits_of(size: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(ROWS, size, generator=generator) * 3
    if kind == "equals":  # as a 16-bit model's: many tokens share a score
        logits = (logits * 2).round() / 2
        logits[0] = 0.0
        logits[1] = -0.0
        logits[1, ::2] = 0.0
    if kind == "hidden":
        logits[:, 1::3] = -torch.inf
    if kind == "low equals":  # the cuts fall on scores below 0
        logits = (logits * 2).round() / 4 - 20
    if kind == "nearly all hidden":
        logits[:, 4:] = -torch.inf
    return logits


#: Of so many equals transformers leaves so many at this p.
EQUALS = [(10, 0.9, 9), (3, 1 / 3, 1), (20, 0.95, 19), (5, 0.8, 4), (10, 0.7, 7), (8, 0.5, 4)]
FEW_EQUALS = EQUALS[:1]


def draws_of(size: int) -> Tensor:
    draws = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(size + 1), dtype=torch.float64)
    draws[1], draws[2] = 0.0, 1 - 2**-53
    return draws


NOTHING = {"all hidden": -torch.inf, "no numbers": torch.nan}
SHORT = [torch.float16, torch.bfloat16]
#: Few, because the interpreter takes seconds for each; on a GPU there are more (test_sampling_gpu.py).
CASES = [
    (size, kind, name) for size, kind in ((1, "floats"), (300, "equals"), (300, "nearly all hidden")) for name in CUTS
]
FEW = [
    *((300, "equals", name) for name in ("half of the 7 highest", "both")),
    (300, "nearly all hidden", "nearly all"),
    (1, "floats", "all"),
]
SHORT_CASES = [
    (dtype, kind, name)
    for dtype in SHORT
    for kind in ("floats", "low equals")
    for name in ("both", "half of the 7 highest")
]
#: Each of the two once.
FEW_SHORT = [SHORT_CASES[i] for i in (0, 7)]


def main(path: str, *everything: str) -> None:
    from interpreting import patch_the_language_once
    from mless.kernels import sampling_triton
    from mless.kernels.sampling import CLOSE

    patch_the_language_once()
    sampling_triton._BLOCK, sampling_triton._PART = BLOCK, PART

    def tokens(logits: Tensor, draws: Tensor, name: str) -> Tensor:
        temperature, top_k, top_p = CUTS[name]
        return sampling_triton.drawn(logits, draws, temperature, top_k, top_p, close=CLOSE)

    found = {
        f"{size}, {kind}, {name}": tokens(logits_of(size, kind), draws_of(size), name)
        for size, kind, name in (CASES if everything else FEW)
    }
    logits, draws = logits_of(300, "equals"), draws_of(300)
    apart = torch.full((ROWS, 700), torch.nan)
    apart[:, :300] = logits
    found["apart"] = tokens(apart[:, :300], draws, "both")
    found["alone"] = tokens(logits[2:], draws[2:], "both")
    for dtype, kind, name in SHORT_CASES if everything else FEW_SHORT:
        found[f"{dtype}, {kind}, {name}"] = tokens(logits_of(300, kind).to(dtype), draws, name)
    # What a memory held before must not become a token.
    torch.empty = lambda *size, dtype=None, device=None: torch.full(size, 1234567, dtype=dtype, device=device)
    for name, value in NOTHING.items():
        found[name] = tokens(torch.full((1, 300), value), draws[:1], "the 5 highest")
    for size, top_p, _ in EQUALS if everything else FEW_EQUALS:
        found[f"{size} equals, {top_p}"] = sampling_triton.drawn(
            torch.zeros(1, size), torch.zeros(1, 1).double(), 1.0, 0, top_p, close=CLOSE
        )
    torch.save(found, path)


def by_torch(logits: Tensor, draws: Tensor, name: str) -> Tensor:
    temperature, top_k, top_p = CUTS[name]
    return kernels.drawn(logits, draws, temperature=temperature, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize(
    ("size", "kind", "name"), [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_kernel_draws_what_torch_draws(answers, size, kind, name):
    expected = by_torch(logits_of(size, kind), draws_of(size), name)
    assert torch.equal(answers[f"{size}, {kind}, {name}"], expected)


def test_rows_that_lie_apart_and_a_row_alone(answers):
    assert torch.equal(answers["apart"], answers["300, equals, both"])
    assert torch.equal(answers["alone"], answers["300, equals, both"][2:])


@pytest.mark.parametrize(
    ("dtype", "kind", "name"),
    [case if case in FEW_SHORT else pytest.param(*case, marks=pytest.mark.slow) for case in SHORT_CASES],
    ids=str,
)
def test_16_bits(answers, dtype, kind, name):
    expected = by_torch(logits_of(300, kind).to(dtype), draws_of(300), name)
    assert torch.equal(answers[f"{dtype}, {kind}, {name}"], expected)


@pytest.mark.parametrize("name", list(NOTHING))
def test_where_nothing_can_be_drawn_it_is_a_token_still(answers, name):
    assert ((answers[name] >= 0) & (answers[name] < 300)).all()


@pytest.mark.parametrize(
    ("size", "top_p", "left"),
    [case if case in FEW_EQUALS else pytest.param(*case, marks=pytest.mark.slow) for case in EQUALS],
)
def test_a_cut_that_falls_on_a_token_is_transformers_own(answers, size, top_p, left):
    from transformers import TopPLogitsWarper  # here, because the interpreted program needs no transformers

    equals = torch.zeros(1, size)
    theirs = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.long), equals)
    assert int(torch.isfinite(theirs).sum()) == left
    # The lowest draw falls on the first that stays.
    none = torch.zeros(1, 1, dtype=torch.float64)
    assert int(kernels.drawn(equals, none, temperature=1.0, top_p=top_p)) == size - left
    assert int(answers[f"{size} equals, {top_p}"]) == size - left


@st.composite
def rows(draw):
    size = draw(st.integers(1, 40))
    # Few values, so that equals stand at the cuts.
    logits = draw(st.lists(st.integers(-6, 3), min_size=size, max_size=size))
    return (
        np.array(logits) * 0.75,
        draw(st.sampled_from([0.5, 1.0, 2.0])),
        draw(st.integers(0, size + 2)),
        draw(st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.9, 1.0])),
        draw(st.floats(0, 1, exclude_max=True)),
    )


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, bool]:
    """The chances of what stays, by the definition; and whether some cut is so close that rounding may decide it."""
    scores = logits / temperature
    stays = np.ones(len(scores), bool) if not top_k else scores >= np.sort(scores)[::-1][: top_k or None][-1]
    weights = np.where(stays, np.exp(scores - scores.max()), 0.0)
    weights /= weights.sum()
    if top_p == 1:
        return weights, False
    # Lowest first, of equals the first first, as long as what goes holds no more than 1 − p.
    held, close = 0.0, False
    for token in sorted(range(len(scores)), key=lambda token: (weights[token], token))[:-1]:
        held += weights[token]
        close |= abs(held - (1 - top_p)) < 1e-5
        if held <= 1 - top_p:
            weights[token] = 0.0
    return weights / weights.sum(), close


@given(rows())
@settings(max_examples=150, deadline=None)
def test_a_token_is_drawn_from_what_stays_by_its_chance(case):
    logits, temperature, top_k, top_p, draw = case
    chances, close = kept(logits, temperature, top_k, top_p)
    if close:
        return
    token = int(
        kernels.drawn(
            torch.tensor(logits[None], dtype=torch.float32), torch.tensor([[draw]], dtype=torch.float64),
            temperature=temperature, top_k=top_k, top_p=top_p,
        )
    )  # fmt: skip
    upto = np.cumsum(chances)
    assert chances[token] > 0
    assert upto[token] - chances[token] - 1e-6 <= draw <= upto[token] + 1e-6


if __name__ == "__main__":
    main(*sys.argv[1:])
