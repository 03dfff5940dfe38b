"""Products with weights in MKL's layout: torch's own bits, or torch's own product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mless.kernels import packed
from mless.kernels.packed import PackedWeights

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")


def linear(inner: int, outer: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(inner + outer)
    return nn.Linear(inner, outer, bias=bias)


def given(rows: int, inner: int) -> Tensor:
    return torch.randn(1, rows, inner, generator=torch.Generator().manual_seed(rows))


@needs_mkl
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(16, 16), (96, 40), (576, 192), (192, 576)])
def test_products_have_torchs_own_bits(inner: int, outer: int, bias: bool) -> None:
    module = linear(inner, outer, bias=bias)
    weights = PackedWeights([module])
    assert weights
    assert weights.has(module)
    with torch.inference_mode():
        for rows in (1, 2, 3, 7, 15, 16, 17, 31, 64, 130, 257):
            some = given(rows, inner)
            own = functional.linear(some, module.weight, module.bias)
            # The first product of a size asks; the next ones are made as it said.
            for _ in range(3):
                assert torch.equal(weights.product(module, some), own), rows


@needs_mkl
def test_where_the_bits_are_others_torchs_own_product_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module, some = linear(32, 48), given(40, 32)
    weights = PackedWeights([module])
    own = module(some)
    multiplied = []

    def other(*args: Any) -> Tensor:
        multiplied.append(args)
        return own + 1e-6

    monkeypatch.setattr(weights, "_multiply", other)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(weights.product(module, some), own)
        # Another size is asked about anew, and this one is not.
        assert len(multiplied) == 1
        weights.product(module, given(41, 32))
        assert len(multiplied) == 2


@needs_mkl
def test_other_numbers_of_threads_and_places_in_memory_are_asked_about_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    module, some = linear(32, 48), given(40, 32)
    shifted = torch.empty(some.numel() + 1)[1:].view_as(some).copy_(some)
    weights, count = PackedWeights([module]), list[int]()

    def multiply(some: Tensor, *_: Any) -> Tensor:
        count.append(torch.get_num_threads())
        return module(some)

    monkeypatch.setattr(weights, "_multiply", multiply)
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            for threads, one in ((1, some), (2, some), (1, shifted), (1, some), (2, some)):
                torch.set_num_threads(threads)
                assert torch.equal(weights.product(module, one), module(one))
    finally:
        torch.set_num_threads(before)
    assert len(weights._same) == 3
    assert count == [1, 2, 1, 1, 2]


@needs_mkl
def test_inputs_that_do_not_lie_together_and_empty_ones() -> None:
    module = linear(32, 48, bias=True)
    weights = PackedWeights([module])
    with torch.inference_mode():
        for some in (given(64, 64)[..., ::2], given(32, 40).mT, given(64, 32)[:, :0], given(3, 32)[0, 0]):
            for _ in range(2):
                assert torch.equal(weights.product(module, some), module(some))


@needs_mkl
def test_a_weight_that_two_modules_share_is_kept_once() -> None:
    one, other = linear(32, 48), linear(32, 48)
    other.weight = one.weight
    weights = PackedWeights([one, other])
    assert weights.has(one)
    assert weights.has(other)
    assert len(weights._packed) == 1


class Louder(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    "what", ["a subclass", "16 bit", "another forward", "no product", "too many", "no MKL", "fails"]
)
def test_what_cannot_be_packed_is_left_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: nn.Module = linear(32, 48)
    if what == "a subclass":
        module = Louder(32, 48)
    elif what == "16 bit":
        module = module.bfloat16()
    elif what == "another forward":
        module.forward = lambda some: some
    elif what == "no product":
        module = nn.LayerNorm(32)
    elif what == "too many":
        monkeypatch.setattr(packed, "_MOST", 100)
    elif what == "no MKL":
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    else:

        def fails(*_: Any) -> Tensor:
            raise RuntimeError("no memory")

        monkeypatch.setattr(packed, "_reordered", fails)
    weights = PackedWeights([module])
    assert not weights
    assert not weights.has(module)
