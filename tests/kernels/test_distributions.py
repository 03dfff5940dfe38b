"""Next-token distributions: the torch path against double precision, and Triton's kernel against the torch path, interpreted in a process of its own.

On a GPU: tests/kernels/test_distributions_gpu.py.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from mless import kernels
from mless.kernels import distributions

ROWS, SIZE, BLOCK = 4, 300, 128
ROW, TOKEN = torch.tensor([0, 0, 1, 3]), torch.tensor([0, 299, 7, 128])


def logits_of(kind: str, seed: int = 0) -> Tensor:
    made = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(seed)) * 4
    if kind == "equals":  # as a 16-bit model's: many tokens share a score
        made = (made / 2).round()
    if kind == "hidden":
        made[:, 1::3] = -torch.inf
        made[0, 0] = 60.0
    return made


KINDS = ("floats", "equals", "hidden")


def main(path: str) -> None:
    from interpreting import patch_the_language_once
    from mless.kernels import distributions_triton

    patch_the_language_once()
    distributions_triton._BLOCK = BLOCK
    found = {kind: distributions_triton.described(logits_of(kind), logits_of(kind, 1)) for kind in KINDS}
    found["none"] = distributions_triton.described(logits_of("floats"), None)
    found["itself"] = distributions_triton.described(logits_of("floats"), logits_of("floats").clone())
    found["alone"] = distributions_triton.described(logits_of("floats")[2:3], logits_of("floats", 1)[2:3])
    apart = torch.full((ROWS, 2 * SIZE), torch.nan)
    apart[:, :SIZE] = logits_of("floats")
    found["apart"] = distributions_triton.described(apart[:, :SIZE], logits_of("floats", 1))
    broken = logits_of("floats")
    broken[1, 5] = torch.nan
    found["broken"] = distributions_triton.described(broken, None)
    torch.save(found, path)


def expected(kind: str) -> tuple[Tensor, Tensor]:
    """By double precision: the log of the sum, and the curves."""
    ours, theirs = logits_of(kind).double(), logits_of(kind, 1).double()
    p, q = ours.log_softmax(-1), theirs.log_softmax(-1)
    entropy = torch.where(p.exp() == 0, 0.0, -p.exp() * p).sum(-1)
    kl = torch.where(q.exp() == 0, 0.0, q.exp() * (q - p)).sum(-1)
    return ours.logsumexp(-1), torch.stack([entropy, kl, (p.argmax(-1) == q.argmax(-1)).double()])


WAYS = (kernels.described, distributions._without_kernel)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_by_torch(kind, way):
    logp, curves = way(logits_of(kind), logits_of(kind, 1), ROW, TOKEN)
    whole, known = expected(kind)
    torch.testing.assert_close(logp.double(), logits_of(kind).double()[ROW, TOKEN] - whole[ROW], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(curves.double(), known, rtol=1e-5, atol=1e-5)
    _, same = way(logits_of(kind), logits_of(kind)[:2], ROW, TOKEN)
    assert same[1].tolist() == [0.0] * ROWS
    assert same[2].tolist() == [1.0] * ROWS
    assert way(logits_of(kind), None, ROW, TOKEN)[1][1:].isnan().all()


@pytest.mark.parametrize("way", WAYS)
def test_by_torch_a_token_that_one_row_never_draws(way):
    ours, theirs = logits_of("floats"), logits_of("floats")
    ours[1, 5] = theirs[2, 5] = -torch.inf
    _, curves = way(ours, theirs, ROW, TOKEN)
    assert curves[1].isinf().tolist() == [False, True, False, False]
    assert curves[1][2] > 0
    assert curves[0].isfinite().all()


def test_by_torch_a_row_against_itself_is_0_in_a_vocabulary_that_threads_share():
    ours = torch.randn(7, 49_152, generator=torch.Generator().manual_seed(0)) * 4
    for count in range(1, 8):
        _, curves = kernels.described(ours, ours[:count].clone(), ROW, TOKEN)
        assert not curves[1].any(), count
        assert curves[2].all()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_by_torch_a_few_rows_at_once_say_the_same(step, monkeypatch):
    """However many rows are read at once, also where `theirs` ends among them, and where a row's numbers do not lie together."""
    ours, theirs = logits_of("floats"), logits_of("floats", 1)[:3]
    apart = ours.T.contiguous().T
    found = kernels.described(ours, theirs, ROW, TOKEN)
    monkeypatch.setattr(distributions, "_CACHED", step * SIZE)
    for given in (ours, apart):
        for mine, known in zip(kernels.described(given, theirs, ROW, TOKEN), found, strict=True):
            torch.testing.assert_close(mine, known, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("step", [1, 2, 3, ROWS])
@pytest.mark.parametrize("count", range(ROWS + 1))
def test_by_torch_what_is_kept_says_the_same_bits(step, count, monkeypatch):
    """Also where it has fewer rows, and where it serves several blocks."""
    monkeypatch.setattr(distributions, "_CACHED", step * SIZE)
    theirs = logits_of("hidden", 1)[:count]
    kept = kernels.Kept(theirs.clone())
    for seed in range(3):
        ours = logits_of("hidden", seed)
        known = kernels.described(ours, theirs, ROW, TOKEN)
        for mine, own in zip(kernels.described(ours, kept, ROW, TOKEN), known, strict=True):
            assert torch.equal(mine, own)
        same = kernels.described(ours, kernels.Kept(ours[:count]), ROW, TOKEN)[1]
        assert not same[1].any()
        assert same[2].all()


def test_by_torch_what_is_kept_does_not_change_with_the_logits():
    theirs, ours = logits_of("floats", 1), logits_of("floats")
    kept, known = kernels.Kept(theirs[:3]), kernels.described(ours, theirs[:3].clone(), ROW, TOKEN)
    assert 0 < kept.nbytes <= 2 * theirs.nbytes
    theirs.zero_()
    for mine, own in zip(kernels.described(ours, kept, ROW, TOKEN), known, strict=True):
        assert torch.equal(mine, own)


def test_by_torch_what_is_no_number_is_not_hidden():
    broken = logits_of("floats")
    broken[1, 5] = torch.nan
    logp, curves = kernels.described(broken, None, ROW, TOKEN)
    assert curves[0].isnan().tolist() == [False, True, False, False]
    assert logp.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_says_what_double_precision_says(answers, kind):
    whole, known = expected(kind)
    torch.testing.assert_close(answers[kind].double(), torch.cat([whole[None], known]), rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_others_and_equals_are_exactly_equal(answers):
    assert torch.equal(answers["alone"][:, 0], answers["floats"][:, 2])
    assert torch.equal(answers["apart"], answers["floats"])
    assert answers["itself"][2].tolist() == [0.0] * ROWS
    assert answers["itself"][3].tolist() == [1.0] * ROWS
    assert torch.equal(answers["none"][:2], answers["floats"][:2])
    assert answers["none"][2:].isnan().all()


def test_what_is_no_number_is_not_hidden(answers):
    assert answers["broken"][:2, 1].isnan().all()
    assert answers["broken"][:2, [0, 2, 3]].isfinite().all()


if __name__ == "__main__":
    main(*sys.argv[1:])
