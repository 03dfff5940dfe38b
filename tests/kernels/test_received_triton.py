"""The general kernel against the reference, under Triton's interpreter; on a GPU: test_received_gpu.py.

Whether a kernel is interpreted is settled when Triton is imported, so it runs in a process of its own: this file, as a program.
"""

from __future__ import annotations

import math
import sys
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mless.kernels import reference

SPANS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """What is asked. A block is 32 tokens in fp32 and above 128 dimensions, else 64."""

    id: str
    batch: int = 1
    heads: int = 2
    kv: int = 1
    queries: int = 40
    keys: int = 40
    dim: int = 16
    dtype: str = "fp32"
    window: int | None = None
    chunk: int | None = None
    documents: int | None = None
    left: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    extra: tuple[str, ...] = ()
    sets: str = "two"
    lse: bool = False
    layout: str = "model"
    poison: bool = False
    #: Other inputs only where another case's should not do.
    seed: str = field(default="")


CASES = [
    Case("T1", queries=1, keys=1),
    Case("T2-one-set", queries=2, keys=2, sets="one"),
    Case("H3", heads=3, kv=3, queries=70, keys=70),
    Case("GQA", batch=2, heads=4, kv=2, dtype="bf16"),
    Case("MQA", heads=4, kv=1, dtype="fp16"),
    Case("bf16-three-blocks", queries=150, keys=150, heads=1, dtype="bf16"),
    # head sizes; those that are no power of two are taken in two parts
    *(Case(f"D{dim}-{dtype}", dim=dim, dtype=dtype, queries=24, keys=24)
      for dim, dtype in ((8, "fp32"), (64, "bf16"), (80, "fp16"), (80, "fp32"), (96, "bf16"), (128, "fp16"), (192, "bf16"), (256, "bf16"))),
    Case("D256-fp32-two-blocks", dim=256, heads=1),
    # masks
    Case("window5", window=5, queries=70, keys=70),
    Case("window33", window=33, queries=70, keys=70, heads=1),
    Case("window-longer-than-the-prompt", window=99, queries=24, keys=24),
    Case("chunks-of-16", chunk=16, queries=70, keys=70, heads=1),
    Case("chunks-of-30-bf16", chunk=30, queries=70, keys=70, heads=1, dtype="bf16"),
    Case("packed", batch=2, documents=3, queries=50, keys=50, heads=1),
    Case("right-padded", batch=3, right=(0, 7, 35)),
    Case("left-padded", batch=3, left=(0, 7, 35)),
    Case("left-padded-window", batch=2, left=(0, 9), window=6, heads=1),
    Case("ragged-on-both-sides", batch=2, left=(3, 0), right=(0, 12), dtype="bf16", heads=1),
    # a cache: the queries are the last of the keys' tokens
    Case("13-queries-of-50-keys", queries=13, keys=50),
    Case("40-queries-of-75-keys", queries=40, keys=75, heads=1),
    Case("1-query-of-65-keys-bf16", queries=1, keys=65, dtype="bf16"),
    Case("20-queries-of-60-keys-window", queries=20, keys=60, window=25, heads=1),
    # scores
    Case("softcap", extra=("softcap",)),
    Case("sinks", extra=("sinks",), heads=3, kv=1),
    Case("bias", batch=2, extra=("bias",), queries=24, keys=24),
    Case("bias-for-all-rows", batch=2, extra=("bias over rows",), queries=24, keys=24),
    Case("bias-for-all-heads", batch=2, extra=("bias over heads",), queries=24, keys=24, dtype="bf16"),
    Case("bias-for-all", batch=2, extra=("bias over both",), queries=24, keys=24),
    Case("all-at-once", batch=2, extra=("softcap", "sinks", "bias"), window=20, left=(0, 5), dtype="bf16", heads=2, kv=2),
    Case("bias-of-a-cache", extra=("bias",), queries=13, keys=50),
    # the forward's own log-sum-exp
    Case("given-lse", lse=True),
    Case("given-lse-bf16-padded", lse=True, dtype="bf16", batch=2, right=(0, 11)),
    Case("given-lse-with-a-sink", lse=True, extra=("sinks",)),
    # query sets
    Case("one-set", sets="one"),
    Case("one-set-for-two", sets="expanded"),
    Case("a-first-set-with-gaps", sets="gaps"),
    # memory
    Case("heads-apart", layout="heads", queries=24, keys=24),
    Case("strided", layout="strided", queries=24, keys=24),
    Case("poisoned-right", batch=2, right=(0, 11), poison=True),
    Case("poisoned-left", batch=2, left=(0, 11), poison=True, dtype="bf16"),
    Case("poisoned-right-with-all", batch=2, right=(4, 11), poison=True, extra=("softcap", "sinks", "bias"), queries=24, keys=24),
]  # fmt: skip

#: One of a kind: each takes the interpreter a second, so its neighbours are in the slow tier.
FEW = {
    "T1", "H3", "GQA", "D80-fp16", "D192-bf16", "window33", "packed", "left-padded-window", "40-queries-of-75-keys", "all-at-once",
    "given-lse", "one-set-for-two", "a-first-set-with-gaps", "strided", "poisoned-right-with-all",
}  # fmt: skip

#: Rows of a batch, and each alone: the same bits.
ROWS = [
    Case("causal", batch=3, keys=70, queries=70, right=(0, 37, 69), dtype="bf16"),
    Case("window", batch=3, right=(0, 7, 35), window=9, heads=1, extra=("softcap", "sinks")),
    Case("given-lse", batch=2, right=(0, 9), lse=True, heads=1, sets="expanded"),
]


def mask_of(case: Case) -> tuple[Tensor, Tensor]:
    """Who sees whom, and which keys are real tokens."""
    i = torch.arange(case.keys - case.queries, case.keys)[:, None]
    j = torch.arange(case.keys)[None]
    seen = i >= j
    if case.window:
        seen = seen & (i - j < case.window)
    if case.chunk:
        seen = seen & (i // case.chunk == j // case.chunk)
    seen = seen.expand(case.batch, -1, -1).clone()
    for row in range(case.batch if case.documents else 0):
        # Another cut in every row.
        document = torch.arange(case.keys) * case.documents // (case.keys - 3 * row)
        seen[row] &= document[case.keys - case.queries :, None] == document
    left, right = (pads or (0,) * case.batch for pads in (case.left, case.right))
    place = torch.arange(case.keys)
    real = torch.stack([(place >= a) & (place < case.keys - b) for a, b in zip(left, right, strict=True)])
    return (seen & real[:, None])[:, None], real


def asked(case: Case) -> dict[str, Any]:
    """Everything a kernel is given but the mask, which is there as a square; values beyond the real tokens are clean."""
    generator = torch.Generator().manual_seed(zlib.crc32((case.seed or case.id).encode()))

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dtype, dim = DTYPES[case.dtype], case.dim
    q = (values(case.batch, case.queries, case.heads, dim) * 3).to(dtype).transpose(1, 2)
    k = values(case.batch, case.keys, case.kv, dim).to(dtype).transpose(1, 2)
    if case.layout == "heads":
        q, k = q.contiguous(), k.contiguous()
    elif case.layout == "strided":
        q, k = (x.repeat_interleave(2, -1)[..., ::2] for x in (q, k))
    seen, real = mask_of(case)
    later = real[:, case.keys - case.queries :]
    some = later & (torch.rand(later.shape, generator=generator) > 0.4)
    some |= later & ~some.any(-1, keepdim=True)
    sets = {
        "one": later[:, None],
        "two": torch.stack([later, some], 1),
        "expanded": later[:, None].expand(-1, 2, -1),
        "gaps": torch.stack([some, some & (torch.arange(case.queries) % 2 == 0)], 1),
    }[case.sets]
    score: dict[str, Any] = {}
    for extra in case.extra:
        if extra == "softcap":
            score["softcap"] = 1.5
        elif extra == "sinks":
            score["sinks"] = values(case.heads)
        else:
            rows = 1 if extra in ("bias over rows", "bias over both") else case.batch
            heads = 1 if extra in ("bias over heads", "bias over both") else case.heads
            score["bias"] = values(rows, heads, case.queries, case.keys)
    spans = torch.randint(0, SPANS, (case.batch, case.keys), generator=generator)
    found = {"q": q, "k": k, "seen": seen, "real": real, "scale": dim**-0.5, "sets": sets, "spans": spans, **score}
    if case.lse:
        found["lse"] = exact_lse(found)
    return found


def exact_lse(given: dict[str, Any]) -> Tensor:
    keys = given["k"].double().repeat_interleave(given["q"].shape[1] // given["k"].shape[1], 1)
    scores = given["q"].double() @ keys.transpose(-1, -2) * given["scale"]
    scores = scores.masked_fill(~given["seen"], -torch.inf)
    if "sinks" in given:
        sink = given["sinks"].double()[None, :, None, None].expand_as(scores[..., :1])
        scores = torch.cat([scores, sink], -1)
    return scores.logsumexp(-1).float()


def poisoned(given: dict[str, Any]) -> dict[str, Any]:
    """NaN wherever there is no real token."""
    nobody, later = ~given["real"], ~given["real"][:, -given["q"].shape[2] :]
    found = given | {
        "q": given["q"].masked_fill(later[:, None, :, None], torch.nan),
        "k": given["k"].masked_fill(nobody[:, None, :, None], torch.nan),
    }
    if "bias" in given:
        found["bias"] = given["bias"].masked_fill(later[:, None, :, None] | nobody[:, None, None], torch.nan)
    return found


def row(given: dict[str, Any], at: int) -> dict[str, Any]:
    """One row of a batch without its padding on the right."""
    size = int(given["real"][at].sum())
    here = slice(at, at + 1)
    alone = {name: given[name][here, :, :size] for name in ("q", "k")}
    alone |= {"seen": given["seen"][here, :, :size, :size], "sets": given["sets"][here, :, :size]}
    alone |= {name: given[name][here, :size] for name in ("real", "spans")}
    if "lse" in given:
        alone["lse"] = given["lse"][here, :, :size]
    return given | alone


def truth(given: dict[str, Any]) -> Any:
    whole = {name: value for name, value in given.items() if name not in ("seen", "real")}
    seen = given["seen"]
    return reference.received(visible=lambda first, last, /: seen[:, :, first:last], n_spans=SPANS, **whole)


def teach_the_interpreter_bf16() -> None:
    """It holds bf16 as 16 bits and would multiply those (triton-lang/triton#11584); a GPU does not."""
    import numpy as np
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(x: Any) -> Any:
        if str(x.dtype.scalar) != "bf16":
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)

    builder.create_dot = lambda self, a, b, *others: dot(self, widened(a), widened(b), *others)


def interpreted(path: str, *everything: str) -> None:
    """What the kernel answers to everything asked here."""
    from interpreting import patch_the_language_once
    from mless.kernels import implementation, intervals, received_triton
    from mless.kernels.received_triton import received

    # Mass from several stretches of keys, as a prompt of thousands has it.
    received_triton._STRETCH, received_triton._TOGETHER = 32, 16

    patch_the_language_once()
    teach_the_interpreter_bf16()

    def answer(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(given)
        seen, real = given.pop("seen"), given.pop("real")
        visible = intervals(
            lambda first, last, /: seen[:, :, first:last], real[:, -given["q"].shape[2] :], given["k"].shape[2]
        )
        assert visible is not None
        plain = "softcap" not in given and "bias" not in given
        # A kernel that this interpreter gets wrong is not chosen.
        expected = "streaming" if given["q"].dtype == torch.bfloat16 else "triton"
        assert implementation(given["q"], given["k"], visible, given["sets"], plain=plain) == expected
        sums = received(visible=visible, n_spans=SPANS, **given)
        return sums.received, sums.counts, sums.mass

    found: dict[str, Any] = {}
    for case in CASES:
        if not everything and case.id not in FEW:
            continue
        given = asked(case)
        found[case.id] = answer(poisoned(given) if case.poison else given)
    for case in ROWS:
        given = asked(case)
        found[f"together {case.id}"] = answer(given)
        for at in range(case.batch):
            found[f"alone {case.id} {at}"] = answer(row(given, at))
    level = asked(Case("given-lse", lse=True))
    found["double"] = answer(level | {"lse": level["lse"] + math.log(2)})
    found["again"] = answer(asked(GQA))
    found["both the same"] = answer(asked(ONE) | {"sets": asked(ONE)["sets"].contiguous()})
    found["nobody"] = answer(nobody_in_the_second())
    found["prepared"] = prepared()
    torch.save(found, path)


def members_and_levels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    members = torch.rand(2, 2, 1500, generator=generator) > 0.3
    return members & members[:, :1], torch.randn(2, 3, 1500, generator=generator)


def prepared() -> tuple[Tensor, Tensor]:
    """What Hopper's kernels read by query; they themselves cannot be interpreted."""
    from mless.kernels import received_hopper as hopper

    members, lse = members_and_levels()
    level, weights = torch.full((2, 3, 1500 + hopper._PAST), torch.nan), torch.full((2, 1500 + hopper._PAST), torch.nan)
    given = (lse, members.view(torch.int8), level, weights, 3, 1500)
    hopper._prepare[(6, 2)](*given, SETS=2, PAST=hopper._PAST, BLOCK=1024)
    return level, weights


GQA, ONE = (next(case for case in CASES if case.id == name) for name in ("GQA", "one-set-for-two"))


def nobody_in_the_second() -> dict[str, Any]:
    given = asked(Case("T24", queries=24, keys=24))
    given["sets"] = torch.stack([given["sets"][:, 0], torch.zeros_like(given["sets"][:, 0])], 1)
    return given


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=[] if case.id in FEW else [pytest.mark.slow]) for case in CASES],
)
def test_the_kernel_is_the_reference(answers, case):
    given = asked(case)
    expected = truth(given)
    received, counts, mass = answers[case.id]
    assert torch.isfinite(received).all()
    # fp32 scores are themselves rounded; 16-bit products are exact in fp32.
    error = float((received - expected.received).norm() / expected.received.norm().clamp(min=1e-30))
    assert error <= (2e-6 if case.dtype == "fp32" else 1e-6)
    torch.testing.assert_close(mass.double(), expected.mass, rtol=0, atol=1e-6)
    torch.testing.assert_close(mass.sum(-1), torch.ones_like(mass[..., 0]), rtol=0, atol=3e-6)
    assert torch.equal(counts, expected.counts)
    # Padding receives nothing at all.
    padding = ~given["real"][:, None, None].expand_as(received)
    assert not received[padding].any()


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.id)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(answers, case):
    received, counts, mass = answers[f"together {case.id}"]
    real = asked(case)["real"]
    for at in range(case.batch):
        size = int(real[at].sum())
        alone = answers[f"alone {case.id} {at}"]
        assert torch.equal(alone[0][0], received[at, :, :, :size])
        assert torch.equal(alone[1][0], counts[at, :, :size])
        assert torch.equal(alone[2][0], mass[at])


def test_the_given_log_sum_exp_is_the_one_used(answers):
    """Twice the denominator: half of everything."""
    whole, half = answers["given-lse"], answers["double"]
    torch.testing.assert_close(half[0] * 2, whole[0], rtol=2e-6, atol=0)
    torch.testing.assert_close(half[2] * 2, whole[2], rtol=2e-6, atol=0)


def test_the_same_call_gives_the_same_bits(answers):
    assert all(torch.equal(a, b) for a, b in zip(answers["GQA"], answers["again"], strict=True))


def test_one_set_for_two_is_summed_as_two_would_be(answers):
    assert all(torch.equal(a, b) for a, b in zip(answers[ONE.id], answers["both the same"], strict=True))


def test_a_set_of_nobody_has_no_mass(answers):
    received, _, mass = answers["nobody"]
    assert received[:, 0].any()
    assert not received[:, 1].any()
    assert not mass.any()


def test_hopper_reads_nothing_of_a_query_that_is_no_member_or_past_the_last(answers):
    level, weights = answers["prepared"]
    members, lse = members_and_levels()
    torch.testing.assert_close(level[..., :1500], torch.where(members[:, :1], -lse / math.log(2), -torch.inf))
    assert torch.equal(weights[:, :1500], members[:, 1].float())
    assert bool((level[..., 1500:] == -torch.inf).all())
    assert not weights[:, 1500:].any()


def test_the_cases_are_what_they_say():
    """A mask that hides nothing, or a cap that does not bite, would make its case the plain one."""
    plain = replace(next(case for case in CASES if case.id == "softcap"), extra=())
    for changes in ({"extra": ("softcap",)}, {"extra": ("sinks",)}, {"extra": ("bias",)}, {"window": 5}, {"chunk": 16}, {"documents": 3}):  # fmt: skip
        changed = replace(plain, seed="same", **changes)
        gap = truth(asked(changed)).received - truth(asked(replace(plain, seed="same"))).received
        assert float(gap.norm()) > 0.1, changes


if __name__ == "__main__":
    interpreted(*sys.argv[1:])
