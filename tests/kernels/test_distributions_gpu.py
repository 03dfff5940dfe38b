"""Next-token distributions on a GPU, over a whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from mless import kernels

pytestmark = pytest.mark.gpu

ROWS = 64


@pytest.mark.parametrize("size", [152064, 50257])  # rows that begin at multiples of 16 bytes, and rows that do not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_says_what_torch_says(size, dtype):
    generator = torch.Generator().manual_seed(1)
    ours, theirs = ((torch.randn(ROWS, size, generator=generator) * 3).to(dtype) for _ in range(2))
    row, token = torch.arange(ROWS), torch.randint(0, size, (ROWS,), generator=generator)
    known = kernels.described(ours.double().float(), theirs.float(), row, token)
    here = [one.cuda() for one in (ours, theirs, row, token)]
    found = kernels.described(*here)
    for mine, other in zip(found, known, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=1e-4)
    few = torch.tensor([5, 60, 17], device="cuda")
    again = kernels.described(here[0][few], here[1][few], torch.arange(3, device="cuda"), here[3][few])
    assert torch.equal(again[0], found[0][few])
    assert torch.equal(again[1], found[1][:, few])
    itself = kernels.described(here[0], here[0].clone(), here[2], here[3])[1]
    assert not itself[1].any()
    assert bool(itself[2].all())


@pytest.mark.parametrize("size", [151936, 50257])
def test_what_is_compiled_ahead_is_what_runs(size):
    from mless.kernels.distributions_triton import _described_kernel

    def compiled():
        return sum(len(caches[0]) for caches in _described_kernel.device_caches.values())

    device = torch.device("cuda")
    kernels.compile_described(size, torch.float16, device)
    known = compiled()
    logits = torch.randn(512, size, device=device).half()
    place = torch.arange(512, device=device)
    for other in (None, logits.clone()):
        kernels.described(logits, other, place, place)
    assert compiled() == known > 0
