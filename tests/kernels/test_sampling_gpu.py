"""The draw of a token on a GPU, over a whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from mless import kernels

pytestmark = pytest.mark.gpu

ROWS = 128
CUTS = [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 50, 1.0), (1.0, 0, 0.95), (0.7, 20, 0.8), (1.0, 1, 0.5), (0.01, 0, 0.9)]


@pytest.mark.parametrize("size", [152064, 50257])  # rows that begin at multiples of 16 bytes, and rows that do not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CUTS)
def test_the_kernel_draws_what_torch_draws(size, dtype, temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(ROWS, size, generator=generator) * 3).to(dtype)
    draws = torch.rand(ROWS, 1, generator=generator, dtype=torch.float64)
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    expected = kernels.drawn(logits, draws, **asked)
    on_gpu, numbers = logits.cuda(), draws.cuda()
    made = kernels.drawn(on_gpu, numbers, **asked)
    # A draw within rounding of the border between two tokens may fall on the other side.
    assert int((made.cpu() == expected).sum()) >= ROWS - 1
    for _ in range(5):
        assert torch.equal(kernels.drawn(on_gpu, numbers, **asked), made)
    few = torch.tensor([5, 100, 17], device="cuda")
    assert torch.equal(kernels.drawn(on_gpu[few], numbers[few], **asked), made[few])
    assert int(kernels.drawn(on_gpu[9:10], numbers[9:10], **asked)) == int(made[9])
