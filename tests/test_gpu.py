"""On a CUDA device: the same numbers as on the CPU, in fp32 closely and in bf16 within its rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mless.capture import received
from mless.kernels import reference, streaming
from mless.proofs import prove
from tiny import FAMILIES, prompt_of, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = [
    prompt_of(("start", 1), ("system", 6), ("filler", 9), ("question", 44), ("end", 3), seed=1),
    prompt_of(("system", 3), ("filler", 9), ("system", 1), ("question", 5), seed=2, item="2"),
]


def moved(model, device: str, dtype: torch.dtype):
    model.model.to(device=device, dtype=dtype)
    object.__setattr__(model, "device", torch.device(device))
    object.__setattr__(model, "dtype", str(dtype).removeprefix("torch."))
    return model


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_fp32_equals_cpu(family, batch_size):
    here = list(received(tiny(family), PROMPTS))
    there = list(received(moved(tiny(family), "cuda", torch.float32), PROMPTS, batch_size=batch_size))
    for a, b in zip(here, there, strict=True):
        np.testing.assert_allclose(a.received, b.received, atol=1e-4)
        np.testing.assert_allclose(a.mass, b.mass, atol=1e-4)
        np.testing.assert_array_equal(a.n, b.n)


@pytest.mark.parametrize("family", FAMILIES)
def test_proofs_hold_in_bf16(family):
    result = prove(moved(tiny(family), "cuda", torch.bfloat16), PROMPTS[0], [1, 2, 3])
    assert result["received"] < 1e-4


def test_streaming_in_bf16_is_exact_given_its_inputs():
    q, k = (torch.randn(1, heads, 2048, 128, device="cuda").bfloat16() for heads in (8, 2))
    t = torch.arange(2048, device="cuda")

    def visible(first: int, last: int, /) -> torch.Tensor:
        return (t[first:last, None] >= t)[None, None]

    sets, spans = torch.ones(1, 1, 2048, dtype=torch.bool, device="cuda"), torch.zeros(1, 2048, device="cuda").long()
    arguments = {"scale": 128**-0.5, "visible": visible, "sets": sets, "spans": spans, "n_spans": 1}
    ours, truth = streaming.received(q, k, **arguments), reference.received(q, k, **arguments)
    assert float((ours.received - truth.received).norm() / truth.received.norm()) < 1e-6
    assert torch.equal(streaming.received(q, k, **arguments).received, ours.received)
