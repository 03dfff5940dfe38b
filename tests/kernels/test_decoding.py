"""A decoding step's kernels against plain torch, under Triton's interpreter, in a process of its own (this file, as a program).

On a GPU they run in every test of tests/engines/test_hf_gpu.py.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

ROWS, LENGTH = 5, 300
#: Slots of the rows' last tokens: alone in the cache, at the edges of a program's part, in the middle, and at the end.
AT = torch.tensor([[0], [127], [128], [200], [299]])
SIZES = {"GQA7-D64": (14, 2, 64), "MHA-D16": (3, 3, 16), "MQA-D128": (4, 1, 128)}
DTYPES = {"float32": torch.float32, "float16": torch.float16}  # the interpreter multiplies no bfloat16
#: Each of the two with one size; the interpreter takes half a second for each.
FEW = {"float32": ["GQA7-D64"], "float16": ["MQA-D128"]}


def given(size: str, dtype: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, kv, dim = SIZES[size]
    generator = torch.Generator().manual_seed(dim)
    # Heads side by side, as a model leaves them; what lies behind a row's own slot is poison.
    q = torch.randn(ROWS, 1, heads, dim, generator=generator).transpose(1, 2).to(DTYPES[dtype])
    keys, values = (torch.randn(ROWS, kv, LENGTH, dim, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    mask = torch.zeros(ROWS, 1, 1, LENGTH)
    mask[3, ..., 5:140] = -torch.inf  # hidden filler: more than one program sees nothing at all
    mask.masked_fill_(torch.arange(LENGTH) > AT[:, :, None, None], -torch.inf)
    for row, at in enumerate(AT[:, 0].tolist()):
        keys[row, :, at + 1 :] = torch.nan
        values[row, :, at + 1 :] = torch.nan
    return q, keys, values, mask.to(DTYPES[dtype])


def expected(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    groups = q.shape[1] // keys.shape[1]
    k, v = (part.nan_to_num().double().repeat_interleave(groups, 1) for part in (keys, values))
    p = torch.softmax(q.double() @ k.transpose(-1, -2) * 0.3 + mask.double(), -1)
    return (p @ v).transpose(1, 2)


def small(dtype: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DTYPES[dtype])

    angle = torch.randn(3, 1, 32, generator=generator)
    return {
        "x": random(3, 1, 200) * 3, "weight": random(200), "gate": random(3, 1, 1500) * 4, "up": random(3, 1, 1500),
        "q": random(3, 1, 4, 32).transpose(1, 2), "k": random(3, 1, 2, 32).transpose(1, 2),
        "cos": angle.cos().to(DTYPES[dtype]), "sin": angle.sin().to(DTYPES[dtype]),
        # No size is a multiple of a program's rows or of its block of inputs.
        "one": random(1, 1, 1300), "a": random(37, 1300) / 36, "b": random(5, 1300) / 36, "c": random(6, 1300) / 36, "bias": random(5),
    }  # fmt: skip


def main(path: str, *everything: str) -> None:
    from interpreting import patch_the_language_once
    from mless.kernels import decoding_triton as subject

    patch_the_language_once()
    found: dict[str, Tensor] = {}
    for dtype in DTYPES:
        for size in SIZES if everything else FEW[dtype]:
            q, keys, values, mask = given(size, dtype)
            found[f"{size} {dtype}"] = subject.attention(q, keys, values, mask, AT, 0.3)
            one = slice(2, 3)
            alone = subject.attention(q[one], keys[one], values[one], mask[one], AT[one], 0.3)
            found[f"{size} {dtype} alone"] = alone
        parts = small(dtype)
        found[f"norm {dtype}"] = subject.rms_norm(parts["x"], parts["weight"], 1e-6)
        found[f"gated {dtype}"] = subject.gated(parts["gate"], parts["up"])
        turned = subject.rotary(parts["q"], parts["k"], parts["cos"], parts["sin"])
        found[f"q {dtype}"], found[f"k {dtype}"] = turned
        biases = (None, parts["bias"], None)
        for name, made in zip("abc", subject.products(parts["one"], [parts[w] for w in "abc"], biases), strict=True):
            found[f"product {name} {dtype}"] = made
        keys, values = torch.zeros(3, 2, 6, 32, dtype=DTYPES[dtype]), torch.zeros(3, 2, 6, 32, dtype=DTYPES[dtype])
        subject.store(parts["k"], parts["k"] * 2, keys, values, torch.tensor([[0], [5], [3]]))
        found[f"keys {dtype}"], found[f"values {dtype}"] = keys, values
    torch.save(found, path)


def rounding(dtype: str) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 2e-5} if dtype == "float32" else {"rtol": 4e-3, "atol": 4e-3}


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (size, dtype) if size in FEW[dtype] else pytest.param(size, dtype, marks=pytest.mark.slow)
        for size in SIZES
        for dtype in DTYPES
    ],
)
def test_attention_over_the_filled_cache(answers, size, dtype):
    got = answers[f"{size} {dtype}"]
    torch.testing.assert_close(got.double(), expected(*given(size, dtype)), **rounding(dtype))
    assert torch.equal(answers[f"{size} {dtype} alone"][0], got[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_stands_between_products(answers, dtype):
    parts = {name: value.double() for name, value in small(dtype).items()}
    x = parts["x"]
    norm = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * parts["weight"]
    torch.testing.assert_close(answers[f"norm {dtype}"].double(), norm, **rounding(dtype))
    gated = torch.nn.functional.silu(parts["gate"]) * parts["up"]
    torch.testing.assert_close(answers[f"gated {dtype}"].double(), gated, **rounding(dtype))
    for name in "qk":
        half = torch.cat([-parts[name][..., 16:], parts[name][..., :16]], -1)
        turned = parts[name] * parts["cos"][:, None] + half * parts["sin"][:, None]
        torch.testing.assert_close(answers[f"{name} {dtype}"].double(), turned, **rounding(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_vector_times_three_matrices(answers, dtype):
    parts = {name: value.double() for name, value in small(dtype).items()}
    for name in "abc":
        wanted = parts[name] @ parts["one"].flatten() + (parts["bias"] if name == "b" else 0)
        torch.testing.assert_close(answers[f"product {name} {dtype}"].double(), wanted, **rounding(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_stored_at_its_own_rows_slot_and_nowhere_else(answers, dtype):
    k = small(dtype)["k"]
    for name, factor in (("keys", 1), ("values", 2)):
        wanted = torch.zeros(3, 2, 6, 32, dtype=DTYPES[dtype])
        for row, slot in enumerate((0, 5, 3)):
            wanted[row, :, slot] = k[row, :, 0] * factor
        assert torch.equal(answers[f"{name} {dtype}"], wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
