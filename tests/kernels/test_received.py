"""Every implementation against the reference, on ragged shapes, poisoned memory and every mask the models use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mless import kernels
from mless.kernels import reference, streaming
from mless.kernels.signature import Visible


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


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_ROWS", "CPU_KEYS", "CPU_KEYS_AT_FIRST"):
        monkeypatch.setattr(streaming, name, 16)


def log_sum_exp(q: Tensor, k: Tensor, scale: float, visible: Visible, *, softcap=None, sinks=None, bias=None) -> Tensor:
    """As a forward hands it out, a learned sink in it."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores + bias.double() if bias is not None else scores
    scores = scores.masked_fill(~visible(0, q.shape[2]), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.logsumexp(-1).float()


@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "bias"])
@pytest.mark.parametrize(("batch", "heads", "kv", "n_q", "n_k", "dim", "mask"), CASES)
@pytest.mark.parametrize("tiles", ["small", "usual"])
@pytest.mark.parametrize("lse", ["found", "given"])
@pytest.mark.parametrize("kind", ["mask", "intervals"])
def test_streaming_equals_reference(batch, heads, kv, n_q, n_k, dim, mask, extra, tiles, lse, kind, monkeypatch):
    if tiles == "small":
        small_tiles(monkeypatch)
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
    arguments = {"scale": dim**-0.5, "sets": sets, "spans": spans, "n_spans": 5, **options}
    truth = reference.received(q, k, visible=visible, **arguments)
    given = log_sum_exp(q, k, dim**-0.5, visible, **options) if lse == "given" else None
    seen = visible
    if kind == "intervals":
        seen = kernels.intervals(visible, later, n_k)
        assert seen is not None
    ours = streaming.received(q, k, visible=seen, lse=given, **arguments)
    torch.testing.assert_close(ours.received.double(), truth.received, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.mass.double(), truth.mass, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.counts, truth.counts)
    if bool(original.any(-1).all()):
        torch.testing.assert_close(ours.mass.sum(-1), torch.ones(batch, heads), rtol=0, atol=1e-5)


@pytest.mark.parametrize("given", [False, True], ids=["lse-found", "lse-given"])
@pytest.mark.parametrize(("tokens", "tiles"), [(90, "small"), (700, "usual")])
@pytest.mark.parametrize("window", [None, 37])
def test_the_same_bits_alone_and_in_a_padded_batch(tokens, tiles, window, given, monkeypatch):
    if tiles == "small":
        small_tiles(monkeypatch)
    torch.manual_seed(tokens)
    lengths = [tokens, 1, tokens // 3, tokens - 1, 17]
    q, k = torch.randn(5, 6, tokens, 16) * 2, torch.randn(5, 2, tokens, 16)
    pads = tuple(tokens - length for length in lengths)
    mask, real = causal(tokens, tokens, window=window, pads=pads)
    lse = log_sum_exp(q, k, 0.25, mask).nan_to_num(0.0, 0.0, 0.0) if given else None
    sets = torch.stack([real, real & (torch.arange(tokens) % 3 != 1)], 1)
    spans = torch.randint(0, 4, (5, tokens))
    sinks = None if given else torch.randn(6)

    def summed(rows: slice, length: int) -> kernels.Sums:
        seen = kernels.intervals(lambda first, last: mask(first, last)[rows, ..., :length], real[rows, :length], length)
        return streaming.received(
            q[rows, :, :length], k[rows, :, :length], scale=0.25, visible=seen, sets=sets[rows, :, :length],
            spans=spans[rows, :length], n_spans=4, sinks=sinks, lse=lse[rows, :, :length] if lse is not None else None,
        )  # fmt: skip

    together, again = summed(slice(None), tokens), summed(slice(None), tokens)
    assert torch.equal(together.received, again.received)
    assert torch.equal(together.mass, again.mass)
    for row, length in enumerate(lengths):
        alone = summed(slice(row, row + 1), length)
        assert torch.equal(alone.received[0], together.received[row, ..., :length])
        assert torch.equal(alone.counts[0], together.counts[row, ..., :length])
        assert torch.equal(alone.mass[0], together.mass[row])
        assert not together.received[row, ..., length:].any()


def test_sets_that_are_one_tensor_are_one_sum():
    q, k = torch.randn(2, 4, 50, 8), torch.randn(2, 2, 50, 8)
    visible, real = causal(50, 50, pads=(0, 0))
    expanded = real[:, None].expand(-1, 2, -1)
    arguments = {"scale": 0.3, "visible": visible, "spans": torch.zeros(2, 50).long(), "n_spans": 2}
    one = streaming.received(q, k, sets=expanded, **arguments)
    two = streaming.received(q, k, sets=expanded.clone(), **arguments)
    assert one.received.shape == two.received.shape == (2, 2, 4, 50)
    torch.testing.assert_close(one.received, two.received, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one.mass, two.mass, rtol=1e-6, atol=1e-6)
    assert torch.equal(one.counts, two.counts)


def test_scores_that_underflow_and_overflow():
    """Hundreds apart, so that e to most of them is 0, and above the diagonal it would be infinite."""
    q, k = torch.randn(1, 4, 80, 16) * 60, torch.randn(1, 2, 80, 16) * 5
    visible, real = causal(80, 80)
    seen = kernels.intervals(visible, real, 80)
    arguments = {"scale": 0.25, "sets": real[:, None], "spans": torch.zeros(1, 80).long(), "n_spans": 1}
    truth = reference.received(q, k, visible=visible, **arguments)
    for lse in (None, log_sum_exp(q, k, 0.25, visible)):
        ours = streaming.received(q, k, visible=seen, lse=lse, **arguments)
        # A score of a thousand has lost three digits before anything is computed with it.
        torch.testing.assert_close(ours.received.double(), truth.received, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n_q", [0, 3])
def test_nobody_asks(n_q):
    """No query at all, or none that is in a set."""
    seen = kernels.Intervals(torch.zeros(2, n_q, dtype=torch.int32), 7, whole=True)
    sets = torch.zeros(2, 2, n_q, dtype=torch.bool)
    ours = streaming.received(
        torch.randn(2, 4, n_q, 8), torch.randn(2, 2, 7, 8), scale=1.0, visible=seen, sets=sets,
        spans=torch.zeros(2, 7).long(), n_spans=3, sinks=torch.randn(4),
    )  # fmt: skip
    assert ours.received.shape == (2, 2, 4, 7)
    assert ours.mass.shape == (2, 4, 4)
    assert not ours.received.any()
    assert not ours.mass.any()


def test_not_finite_stays_not_finite():
    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    q[0, 1, 30] = torch.nan
    visible, real = causal(40, 40)
    seen = kernels.intervals(visible, real, 40)
    ours = streaming.received(
        q, k, scale=1.0, visible=seen, sets=real[:, None], spans=torch.zeros(1, 40).long(), n_spans=1
    )
    assert torch.isnan(ours.received[0, 0, 1, :30]).all()
    assert torch.isfinite(ours.received[0, 0, 0]).all()


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


@pytest.mark.parametrize("poison", [1e6, torch.inf, torch.nan])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("kind", ["mask", "intervals"])
def test_padding_may_hold_anything(kind, left, poison):
    """Memory behind or before a prompt is poisoned; it must not reach a single sum."""
    q, k, lse = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20)
    visible, real = causal(20, 20, pads=(6,), left=left)
    seen = visible if kind == "mask" else kernels.intervals(visible, real, 20)
    arguments = {
        "scale": 1.0,
        "visible": seen,
        "sets": real[:, None].expand(-1, 2, -1),
        "spans": torch.zeros(1, 20).long(),
    }
    clean = [streaming.received(q, k, **arguments, n_spans=1, lse=given) for given in (None, lse)]
    for values in (q, k, lse[..., None]):
        values[:, :, ~real[0]] = poison
    for before, given in zip(clean, (None, lse), strict=True):
        poisoned = streaming.received(q, k, **arguments, n_spans=1, lse=given)
        assert torch.equal(before.received, poisoned.received)
        assert torch.equal(before.mass, poisoned.mass)
        assert not poisoned.received[..., ~real[0]].any()


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
