"""What makes a decoding step quicker changes nothing but the last digit, and goes without a trace. On a GPU: test_hf_gpu.py."""

from __future__ import annotations

import pytest
import torch
from tiny_answerers import answering
from torch import nn

from mless.engines import quick
from mless.engines.quick import packed_products, quick_steps, replacing
from mless.models import processor

bf16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this CPU has no matrix products in bfloat16",
)
ROWS = 8


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this processor had units for bf16; where oneDNN emulates them the products are the same, only slow."""
    monkeypatch.setattr(processor, "here", lambda: processor.Processor("x86_64", "avx512_bf16", None))


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return answering("qwen2", dtype=dtype).model


def logits(net: nn.Module, rows: int = ROWS) -> torch.Tensor:
    ids = torch.arange(rows)[:, None] + 3
    with torch.inference_mode():
        return net(input_ids=ids, use_cache=False).logits


@bf16
def test_packed_products_are_the_models_own_up_to_rounding_and_leave_no_trace() -> None:
    net = model()
    packed = packed_products(net, ROWS)
    linear = [module for module in net.modules() if type(module) is nn.Linear]
    assert [module for module, _ in packed] == linear
    before = logits(net)
    with replacing(packed):
        inside = logits(net)
        # Another number of rows is nothing they were made for.
        assert torch.equal(logits(net, 5), _outside(net, 5))
    assert torch.equal(logits(net), before)
    assert not any("forward" in vars(module) for module in linear)
    assert float((inside.float() - before.float()).norm() / before.float().norm()) < 0.05


def _outside(net: nn.Module, rows: int) -> torch.Tensor:
    kept = {module: vars(module).pop("forward") for module in net.modules() if "forward" in vars(module)}
    try:
        return logits(net, rows)
    finally:
        for module, forward in kept.items():
            module.forward = forward


@bf16
def test_the_model_is_as_before_after_an_exception_too() -> None:
    net = model()
    with pytest.raises(RuntimeError, match="stop"), replacing(packed_products(net, ROWS)):
        raise RuntimeError("stop")
    assert not any("forward" in vars(module) for module in net.modules())


@bf16
def test_whoever_listens_or_has_a_forward_of_his_own_is_left_alone() -> None:
    net = model()
    first, second = [module for module in net.modules() if type(module) is nn.Linear][:2]
    first.register_forward_hook(lambda module, args, output: None)
    packed = packed_products(net, ROWS)
    assert first not in [module for module, _ in packed]
    own = second.forward
    second.forward = own
    with replacing(packed):
        assert vars(second)["forward"] is own
    assert vars(second)["forward"] is own


@bf16
def test_a_large_model_is_not_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "_PACKED_BYTES", 1000)
    assert packed_products(model(), ROWS) == []


def test_where_bf16_is_emulated_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "here", lambda: processor.Processor("x86_64", None, None))
    assert packed_products(model(), ROWS) == []


def test_without_a_gpu_and_in_fp32_nothing_is_replaced() -> None:
    net = model(torch.float32)
    assert packed_products(net, ROWS) == []
    with quick_steps(net):
        assert not any("forward" in vars(module) for module in net.modules())


# ---- queries, keys and values of one row, by one kernel --------------------------------------------------------------


@pytest.fixture
def asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel itself is tested in tests/kernels; here plain products stand for it, and are counted."""
    decoding = pytest.importorskip("mless.kernels.decoding_triton")
    calls: list[int] = []

    def products(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
        calls.append(len(weights))
        return [nn.functional.linear(x, w, b).flatten() for w, b in zip(weights, biases, strict=True)]

    monkeypatch.setattr(decoding, "products", products)
    return calls


def test_one_row_asks_once_for_queries_keys_and_values(asked_of_the_kernel: list[int]) -> None:
    net = model(torch.float32)
    joined = [one for module in net.modules() for one in quick._joined_of(module)]
    layers = net.config.num_hidden_layers
    assert len(joined) == 3 * layers
    before = logits(net, 1), logits(net, 3)
    asked_of_the_kernel.clear()
    with replacing(joined):
        torch.testing.assert_close(logits(net, 1), before[0])
        assert len(asked_of_the_kernel) == layers
        # For several rows the model's own products serve.
        assert torch.equal(logits(net, 3), before[1])
        assert len(asked_of_the_kernel) == layers


def test_keys_of_another_input_are_not_those_of_the_one_before(asked_of_the_kernel: list[int]) -> None:
    net = model(torch.float32)
    attention = next(module for module in net.modules() if hasattr(module, "q_proj"))
    (_, first), (key, second), _ = quick._joined_of(attention)
    one, other = torch.randn(2, 1, 1, key.in_features)
    first(one)
    torch.testing.assert_close(second(one), key(one))
    torch.testing.assert_close(second(other), key(other))
    first(torch.randn(1, 2, key.in_features))
    torch.testing.assert_close(second(one), key(one))


def test_quantised_and_listened_products_are_left_alone(asked_of_the_kernel: list[int]) -> None:
    class Packed(torch.Tensor):
        """As quantised loads have it: a linear layer's weight that is a tensor of a kind of its own."""

    net = model(torch.float32)
    attentions = [module for module in net.modules() if hasattr(module, "q_proj")]
    attentions[0].k_proj.register_forward_hook(lambda module, args, output: None)
    weight = attentions[1].v_proj.weight.detach().as_subclass(Packed)
    attentions[1].v_proj.weight = nn.Parameter(weight, requires_grad=False)
    assert type(attentions[1].v_proj.weight) is not nn.Parameter
    assert [bool(quick._joined_of(module)) for module in attentions] == [False, False] + [True] * (len(attentions) - 2)
