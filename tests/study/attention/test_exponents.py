"""The dilution exponent from attention to table: what it is for heads of known shape, and that a study's tables agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import mless
from mless import kernels, stats
from mless.capture import Attention
from mless.study.attention import tables
from mless.values import SPAN_NAMES, Prompt, Span

SHARES = (0.1, 0.3, 0.6, 0.95)


def prompt_of(original: int, filler: int, item: str) -> Prompt:
    """Start token, a fifth of system text, filler, then the question and a tail of two."""
    system = max(2, original // 5)
    lengths = {"start": 1, "system": system, "filler": filler, "question": original - system - 3, "end": 2}
    spans: list[Span] = []
    at = 0
    for name, length in lengths.items():
        if length:
            spans.append(Span(name, at, at + length))  # pyright: ignore[reportArgumentType]
            at += length
    ids = [i for name, length in lengths.items() for i in [len(name)] * length]
    return Prompt(item, "mless" if filler else "none", tuple(ids), tuple(spans), "")


def attention_of(prompt: Prompt, *, over_start: bool) -> Attention:
    """Heads that give `SHARES` of every query's attention to the start token and spread the rest evenly, through the kernel of a study.

    The rest goes to every key that the query sees, the start token among them (`over_start`), or to all others.
    """
    size = len(prompt)
    seen = torch.arange(1, size + 1, dtype=torch.float64)
    shares = torch.tensor(SHARES, dtype=torch.float64)[:, None]
    if over_start:
        scores = torch.log1p(shares * seen / (1 - shares))
    else:
        scores = torch.log(shares * (seen - 1).clamp(min=1) / (1 - shares))
    q = scores.float()[None, :, :, None]
    k = torch.zeros(1, 1, size, 1)
    k[0, 0, 0] = 1.0
    original = torch.zeros(size, dtype=torch.bool)
    original[prompt.original] = True
    sets = torch.stack([torch.ones(size, dtype=torch.bool), original])[None]
    visible = kernels.Intervals(torch.zeros(1, size, dtype=torch.int32), size, whole=True)
    same = {
        "visible": visible,
        "sets": sets,
        "spans": torch.tensor([prompt.span_ids]),
        "n_spans": len(SPAN_NAMES),
        "scale": 1.0,
    }
    sums = kernels.received(q, k, **same)
    even = kernels.received(torch.zeros(1, 1, size, 1), k, **same)
    counts = sums.counts[0].numpy()
    with np.errstate(invalid="ignore"):
        received = (sums.received[0].numpy() / counts[:, None])[:, None].astype(np.float32)
        uniform = (even.received[0].numpy() / counts[:, None])[:, :1].astype(np.float32)
    heads = list(range(1, len(SHARES) + 1))
    mass = sums.mass[0].numpy().astype(np.float32)[None]
    return Attention(prompt, [1], heads, received, counts[:, None], uniform, mass, {1: "streaming"})


def exponents(original: int, filler: int, *, over_start: bool) -> list[float]:
    pair = [attention_of(prompt_of(original, length, "a"), over_start=over_start) for length in (0, filler)]
    return [share.epsilon for share in mless.retained(pair[:1], pair[1:])]


@pytest.mark.parametrize(("original", "filler"), [(50, 10), (50, 55), (200, 55), (500, 55), (1500, 500), (5000, 600)])
def test_a_fixed_share_for_the_start_token_has_exponent_one(original: int, filler: int) -> None:
    for found in exponents(original, filler, over_start=True):
        assert found == pytest.approx(1, abs=0.001)


@pytest.mark.parametrize(("original", "off"), [(50, 0.03), (100, 0.015), (500, 0.004), (5000, 0.001)])
def test_where_the_rest_leaves_the_start_token_out(original: int, off: float) -> None:
    """Such a head spreads over one key fewer than the yardstick counts, so it is diluted a little more; the less, the longer the prompt."""
    for found in exponents(original, max(55, original // 5), over_start=False):
        assert off / 10 < found - 1 < off


def test_nothing_inserted_has_no_exponent_and_a_long_prompt_with_little_filler_neither() -> None:
    logs = np.array([[[-0.1, -0.2]], [[-0.3, 0.1]]])
    found = stats.dilution_exponents(logs, np.array([[0.0], [-0.049]]))
    assert np.isnan(found).all()
    rows = tables.share_rows(
        logs, np.array([[0.0], [-0.2]]), [1], [1, 2], np.random.default_rng(0), margins=stats.Margins()
    )
    assert [row["epsilon_items"] for row in rows] == [1, 1, 1]
    assert [row["epsilon"] for row in rows] == pytest.approx([0.5, 1.5, -0.5])
    assert all(math.isnan(row["epsilon_lo"]) for row in rows)
    assert [row["n_items"] for row in rows] == [2, 2, 2]


def test_a_layers_exponent_is_the_mean_over_heads_item_by_item() -> None:
    rng = np.random.default_rng(1)
    logs, even = rng.normal(-0.3, 0.1, size=(6, 2, 3)), rng.uniform(-1, -0.3, size=(6, 2))
    logs[:, 1, 2] = math.nan  # a head that no item defines is left out
    logs[4, 0, 0] = math.nan  # an item that a head lacks is left out of its layer
    epsilons = stats.dilution_exponents(logs, even)
    layer = stats.layer_exponents(epsilons)
    for item in range(6):
        assert layer[item, 1] == pytest.approx(np.mean([logs[item, 1, h] / even[item, 1] for h in (0, 1)]))
        if item != 4:
            assert layer[item, 0] == pytest.approx(np.mean([logs[item, 0, h] / even[item, 0] for h in range(3)]))
    assert np.isnan(layer[4, 0])
    rows = tables.share_rows(logs, even, [1, 2], [1, 2, 3], rng, margins=stats.Margins())
    by_place = {(row["layer"], row["head"]): row for row in rows}
    assert by_place[1, 0]["epsilon"] == pytest.approx(np.nanmean(layer[:, 0]))
    assert by_place[1, 0]["epsilon_items"] == 5
    assert by_place[2, 2]["epsilon"] == pytest.approx(np.mean(epsilons[:, 1, 1]))
    assert math.isnan(by_place[2, 3]["epsilon"])
    assert all(row["epsilon_lo"] < row["epsilon"] < row["epsilon_hi"] for row in rows if row["epsilon_items"] > 1)
