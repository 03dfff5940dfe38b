"""Which implementation serves. No GPU is needed to ask: a tensor that only says where it would lie is enough."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mless.errors import BadStudy
from mless.kernels import Intervals, choosing, implementation, received, streaming

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed; it exists for Linux only"
)


def heads(dim: int = 128, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", queries: int = 8):
    return torch.ones(1, 4, queries, dim, dtype=dtype, device=device), torch.ones(
        1, 2, 8, dim, dtype=dtype, device=device
    )


def mask(*, whole: bool = True) -> Intervals:
    starts = torch.zeros(1, 8, dtype=torch.int32)
    if not whole:
        starts[0, 4:] = 2
    return Intervals(starts, 8, whole=whole)


def function(first: int, last: int, /) -> Tensor:
    return torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()[:, :, first:last]


SETS = torch.ones(1, 2, 8, dtype=torch.bool)


@pytest.mark.parametrize("visible", [mask(), mask(whole=False), function], ids=["whole", "intervals", "function"])
def test_a_cpu_is_served_by_streaming(visible, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert implementation(*heads(), visible, SETS) == "streaming"


def test_what_serves_is_what_is_said(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 8, 16, generator=generator), torch.randn(1, 2, 8, 16, generator=generator)
    arguments = {"scale": 0.25, "sets": SETS, "spans": torch.zeros(1, 8, dtype=torch.long), "n_spans": 1}
    chosen = received(q, k, visible=mask(), **arguments)
    directly = streaming.received(q, k, visible=mask(), **arguments)
    assert torch.equal(chosen.received, directly.received)
    assert torch.equal(chosen.mass, directly.mass)


def test_sums_keep_no_graph_of_what_they_were_made_of():
    q, k = (x.float().requires_grad_() for x in heads(16))
    sums = received(q, k, scale=1.0, visible=mask(), sets=SETS, spans=torch.zeros(1, 8, dtype=torch.long), n_spans=1)
    assert not sums.received.requires_grad
    assert not sums.mass.requires_grad


@needs_triton
def test_the_interpreter_is_asked_for_what_it_can_do(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert implementation(*heads(dtype=torch.float32), mask(), SETS) == "triton"
    assert implementation(*heads(dtype=torch.float16), mask(), SETS) == "triton"
    assert implementation(*heads(dtype=torch.bfloat16), mask(), SETS) == "streaming"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A GPU that is there as far as one can ask; Hopper, unless a test says otherwise."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield monkeypatch


@needs_triton
def test_plain_causal_attention_in_16_bits_goes_to_hopper_s_own(gpu):
    for dim in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float16):
            assert implementation(*heads(dim, dtype, "cuda"), mask(), SETS) == "hopper"


@needs_triton
@pytest.mark.parametrize(
    ("dim", "dtype", "whole", "plain"),
    [
        (128, torch.bfloat16, True, False),  # a soft cap, a bias
        (128, torch.bfloat16, False, True),  # a window, padding on the left
        (96, torch.bfloat16, True, True),
        (192, torch.float16, True, True),
        (128, torch.float32, True, True),
    ],
)
def test_the_rest_goes_to_the_general_kernel(gpu, dim, dtype, whole, plain):
    assert implementation(*heads(dim, dtype, "cuda"), mask(whole=whole), SETS, plain=plain) == "triton"


@needs_triton
@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "streaming"), ((8, 0), "triton"), ((10, 0), "triton")])
def test_other_chips(gpu, capability, expected):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert implementation(*heads(device="cuda"), mask(), SETS) == expected


@needs_triton
def test_a_triton_without_gluon_has_the_general_kernel(gpu):
    from mless.kernels import received_hopper

    gpu.setattr(received_hopper, "gluon", None)
    assert implementation(*heads(device="cuda"), mask(), SETS) == "triton"


@needs_triton
def test_what_triton_cannot_do_is_streamed_on_a_gpu_too(gpu):
    q, k = heads(device="cuda")
    assert implementation(q, k, mask(), SETS) != "streaming"
    assert implementation(q, k, function, SETS) == "streaming"
    assert implementation(q, k, mask(), SETS[:, :1].expand(-1, 3, -1)) == "streaming"
    assert implementation(q.double(), k.double(), mask(), SETS) == "streaming"
    assert implementation(*heads(device="cuda", queries=0), mask(), SETS[..., :0]) == "streaming"
    gpu.setattr(choosing, "_HAS_TRITON", False)
    assert implementation(q, k, mask(), SETS) == "streaming"


def test_where_torch_rounds_what_it_multiplies_nothing_is_measured() -> None:
    """Either it is refused, or the numbers are right: on a processor without units for it the setting does nothing."""
    q, k = (torch.randn(1, n, 40, 64, generator=torch.Generator().manual_seed(n)) for n in (4, 2))
    visible = Intervals(torch.zeros(1, 40, dtype=torch.int32), 40, whole=True)
    sets, spans = torch.ones(1, 1, 40, dtype=torch.bool), torch.zeros(1, 40, dtype=torch.long)
    asked: dict[str, Any] = {"scale": 0.125, "visible": visible, "sets": sets, "spans": spans, "n_spans": 1}
    exact = received(q, k, **asked).received
    before = torch.get_float32_matmul_precision()
    choosing._rounds.cache_clear()
    try:
        torch.set_float32_matmul_precision("medium")
        for call in (lambda: received(q, k, **asked), lambda: (choosing.attended(q, k, k, **asked) or (None, None))[1]):
            found, refused = None, ""
            try:
                found = call()
            except BadStudy as fault:
                refused = str(fault)
            assert not refused or re.search(r"multiplies fp32 matrices in bf16 on cpu.*'highest'", refused)
            if found is not None:
                # Another routine may serve, so the last bits may differ; nothing is rounded to bf16.
                torch.testing.assert_close(found.received, exact, rtol=2e-6, atol=1e-6)
        torch.set_float32_matmul_precision("highest")
        assert torch.equal(received(q, k, **asked).received, exact)
    finally:
        torch.set_float32_matmul_precision(before)
