"""Every implementation against the reference, on ragged shapes, poisoned memory and every mask the models use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mless.kernels import reference, streaming


def causal(n_queries: int, n_keys: int, *, window: int | None = None, pads: tuple[int, ...] = (0,), left: bool = False):
    i = torch.arange(n_queries)[:, None] + n_keys - n_queries
    j = torch.arange(n_keys)[None]
    mask = i >= j
    if window:
        mask = mask & (i - j < window)
    real = torch.stack([(j[0] >= pad) if left else (j[0] < n_keys - pad) for pad in pads])
    whole = mask[None, None] & real[:, None, None, :]

    def visible(first: int, last: int, /) -> Tensor:
        return whole[:, :, first:last]

    return visible, real


CASES = [
    pytest.param(1, 4, 4, 63, 63, 16, {}, id="T63-H4"),
    pytest.param(2, 8, 2, 64, 64, 16, {}, id="T64-HQ8-H2"),
    pytest.param(1, 6, 1, 65, 65, 80, {}, id="T65-MQA-D80"),
    pytest.param(1, 4, 2, 1, 1, 8, {}, id="T1"),
    pytest.param(1, 4, 2, 2, 2, 8, {}, id="T2"),
    pytest.param(3, 4, 2, 41, 41, 8, {"pads": (0, 7, 30)}, id="right-padded"),
    pytest.param(3, 4, 2, 41, 41, 8, {"pads": (0, 7, 30), "left": True}, id="left-padded"),
    pytest.param(2, 4, 2, 70, 70, 8, {"window": 9, "pads": (0, 5)}, id="window9-padded"),
    pytest.param(1, 4, 2, 13, 50, 8, {}, id="13-queries-of-50-keys"),
]


@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "bias"])
@pytest.mark.parametrize(("batch", "heads", "kv", "n_q", "n_k", "dim", "mask"), CASES)
@pytest.mark.parametrize("rows", [7, 1 << 24], ids=["small-blocks", "one-block"])
def test_streaming_equals_reference(batch, heads, kv, n_q, n_k, dim, mask, extra, rows, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK_ELEMENTS", rows * batch * heads * n_k if rows == 7 else rows)
    generator = torch.Generator().manual_seed(n_q * 31 + dim)
    q = torch.randn(batch, heads, n_q, dim, generator=generator) * 3
    k = torch.randn(batch, kv, n_k, dim, generator=generator)
    visible, real = causal(n_q, n_k, **{"pads": (0,) * batch, **mask})
    later = real[:, n_k - n_q :]
    original = later & (torch.rand(batch, n_q, generator=generator) > 0.3)
    original[:, -1] |= later[:, -1]
    sets = torch.stack([later, original], dim=1)
    spans = torch.randint(0, 5, (batch, n_k), generator=generator)
    options = {
        "plain": {},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": torch.randn(heads, generator=generator)},
        "bias": {"bias": torch.randn(1, heads, n_q, n_k, generator=generator)},
    }[extra]
    arguments = {"scale": dim**-0.5, "visible": visible, "sets": sets, "spans": spans, "n_spans": 5, **options}
    truth = reference.received(q, k, **arguments)
    ours = streaming.received(q, k, **arguments)
    torch.testing.assert_close(ours.received.double(), truth.received, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.mass.double(), truth.mass, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.counts, truth.counts)
    if bool(original.any(-1).all()):
        torch.testing.assert_close(ours.mass.sum(-1), torch.ones(batch, heads), rtol=0, atol=1e-5)


def test_the_reference_is_the_definition():
    """Columns strictly below the diagonal, by a double loop over a softmax written out."""
    q, k = torch.randn(1, 2, 6, 4), torch.randn(1, 1, 6, 4)
    visible, _ = causal(6, 6)
    sets = torch.ones(1, 2, 6, dtype=torch.bool)
    sets[0, 1, 2:4] = False
    got = reference.received(q, k, scale=0.7, visible=visible, sets=sets, spans=torch.zeros(1, 6).long(), n_spans=1)
    for head in range(2):
        rows = [[float(q[0, head, i] @ k[0, 0, j]) * 0.7 for j in range(i + 1)] for i in range(6)]
        p = [torch.softmax(torch.tensor(row), 0) for row in rows]
        for s, members in enumerate([range(6), [0, 1, 4, 5]]):
            for j in range(6):
                want = sum(float(p[i][j]) for i in members if i > j)
                assert float(got.received[0, s, head, j]) == pytest.approx(want, abs=1e-6)
                assert int(got.counts[0, s, j]) == sum(i > j for i in members)


def test_padded_keys_may_hold_anything():
    """Memory behind the padding is poisoned; it must not reach a single sum."""
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    visible, real = causal(20, 20, pads=(6,))
    sets, spans = real[:, None].expand(-1, 2, -1), torch.zeros(1, 20).long()
    clean = streaming.received(q, k, scale=1.0, visible=visible, sets=sets, spans=spans, n_spans=1)
    q[:, :, 14:], k[:, :, 14:] = 1e6, 1e6
    poisoned = streaming.received(q, k, scale=1.0, visible=visible, sets=sets, spans=spans, n_spans=1)
    assert torch.equal(clean.received[..., :14], poisoned.received[..., :14])
    assert not poisoned.received[..., 14:].any()


def test_bf16_inputs_are_summed_in_fp32():
    q, k = torch.randn(1, 2, 300, 64).bfloat16(), torch.randn(1, 2, 300, 64).bfloat16()
    visible, real = causal(300, 300)
    arguments = {
        "scale": 0.125,
        "visible": visible,
        "sets": real[:, None],
        "spans": torch.zeros(1, 300).long(),
        "n_spans": 1,
    }
    ours, truth = streaming.received(q, k, **arguments), reference.received(q, k, **arguments)
    assert float((ours.received - truth.received).norm() / truth.received.norm()) < 1e-6


def test_never_more_than_a_block_of_rows():
    """What is asked of the mask shows what is held: no request spans all queries once the prompt is long."""
    asked: list[int] = []
    n = 3000
    keys = torch.arange(n)

    def visible(first: int, last: int, /) -> Tensor:
        asked.append(last - first)
        return (torch.arange(first, last)[:, None] >= keys)[None, None]

    q, k = torch.randn(1, 4, n, 4), torch.randn(1, 4, n, 4)
    sets = torch.ones(1, 1, n, dtype=torch.bool)
    streaming.received(q, k, scale=1.0, visible=visible, sets=sets, spans=torch.zeros(1, n).long(), n_spans=1)
    assert max(asked) * 4 * n <= streaming.BLOCK_ELEMENTS
    assert sum(asked) == n
