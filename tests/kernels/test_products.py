"""The process's switch for short products, which must be as it was afterwards and must not round what others of us compute."""

from __future__ import annotations

import threading

import pytest
import torch

from mless.kernels.products import products, short_serve

needs_units = pytest.mark.skipif(not short_serve(), reason="no AMX, or a torch without the switch")


def precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]


@needs_units
def test_bf16_numbers_lose_nothing_and_others_are_rounded() -> None:
    a, b = (torch.randn(128, 128, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    short_a, short_b = a.bfloat16().float(), b.bfloat16().float()
    with products(short=True):
        short, rounded = short_a @ short_b, a @ b
    with products(short=False):
        whole = a @ b
    torch.testing.assert_close(short.double(), short_a.double() @ short_b.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert (rounded - whole).norm() > 1e-4 * whole.norm(), "this switch does nothing here"


@needs_units
@pytest.mark.parametrize("set_before", ["none", "ieee", "tf32"])
def test_the_switch_is_as_it_was_also_after_a_fault_and_where_several_use_it(set_before: str) -> None:
    found = precision()
    torch.backends.mkldnn.matmul.fp32_precision = set_before  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with pytest.raises(RuntimeError, match="in the middle"), products(short=True):
            raise RuntimeError("in the middle")
        assert precision() == set_before
        with products(short=True):
            with products(short=True):
                pass
            assert precision() == "bf16"
        assert precision() == set_before
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = found  # pyright: ignore[reportAttributeAccessIssue]


@needs_units
def test_who_must_not_be_rounded_waits() -> None:
    seen: list[str] = []

    def exact() -> None:
        with products(short=False):
            seen.append(precision())

    with products(short=True):
        other = threading.Thread(target=exact)
        other.start()
        other.join(0.2)
        assert other.is_alive()
        assert not seen
    other.join(10)
    assert seen == ["none"]


def test_who_wants_the_same_does_not_wait() -> None:
    inside = threading.Barrier(2, timeout=10)

    def exact() -> None:
        with products(short=False):
            inside.wait()

    other = threading.Thread(target=exact)
    other.start()
    exact()
    other.join(10)
    assert not other.is_alive()
