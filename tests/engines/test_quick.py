"""What makes a decoding step quicker changes nothing but the last digit, and goes without a trace. On a GPU: test_hf_gpu.py."""

from __future__ import annotations

import pytest
import torch
from tiny_answerers import answering
from torch import nn

from mless.engines import quick
from mless.engines.quick import packed_products, quick_steps, replacing

bf16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this CPU has no matrix products in bfloat16",
)
ROWS = 8


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


def test_without_a_gpu_and_in_fp32_nothing_is_replaced() -> None:
    net = model(torch.float32)
    assert packed_products(net, ROWS) == []
    with quick_steps(net):
        assert not any("forward" in vars(module) for module in net.modules())
