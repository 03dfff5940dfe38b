"""The kernel against the sorted path, bit for bit, under Triton's interpreter; on a GPU: tests/test_redistribution_gpu.py.

Whether a kernel is interpreted is settled when Triton is imported, so it runs in a process of its own: this file, as a program.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mless
from mless.arm_rules import ArmRule
from mless.errors import BadStudy

ROWS = {
    "normal": lambda x: x,
    "silu": nn.functional.silu,
    "relu": nn.functional.relu,
    "zeros": torch.zeros_like,
    "negative zeros": lambda x: -torch.zeros_like(x),
    "equal": lambda x: torch.full_like(x, 0.5),
    "two sizes": lambda x: torch.sign(x) * 0.25,
    "one positive": lambda x: torch.cat([-x[..., :1].abs() - 1, x[..., 1:2].abs() + 1, -x[..., 2:].abs()], -1),
    "all negative": lambda x: -x.abs() - 0.01,
    "large": lambda x: x * 1e37,
    "largest": lambda x: torch.sign(x) * (2.9e38 + x.abs() * 1e37).clamp(max=3.3e38),
    "tiny": lambda x: x * 1e-37,
    "coarse": lambda x: torch.round(x * 2) / 2,
}
CHOICES: dict[str, dict[str, Any]] = {
    "c": {"c": 0.13},
    "c, p1 30": {"c": 0.32, "p1": 30.0},
    "c 0": {"c": 0.0, "p1": 52.0},
    "c 9": {"c": 9.0, "p1": 100.0},
    "fraction": {"fraction": 0.25, "p1": 85.0},
    "most": {"fraction": 0.97, "p1": 49.0},
    "add": {"c": 0.2, "rule": "add", "p1": 95.0},
}
#: A third rule, from outside mless: the old value's half, whatever is drawn.
HALVED = ArmRule(lambda old, drawn: old / 2)
UNITS = (96, 100, 258, 1000)
ACTS = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh")}


#: Every third pair of kind and choice, with the numbers of units in turn: a token takes the interpreter a third of a second.
CASES = [
    (UNITS[(2 * i + j) % len(UNITS)], kind, choice)
    for i, kind in enumerate(ROWS)
    for j, choice in enumerate(CHOICES)
    if (i + j) % 3 == 1
]
#: Every choice and every number of units at least once; the other kinds of rows are in the slow tier.
OF_KIND = [[case for case in CASES if case[1] == kind] for kind in ROWS]
OF_EACH = [cases[i // 4 % len(cases)] for i, cases in enumerate(OF_KIND)]
FEW = [next(case for case in OF_EACH if case[2] == choice) for choice in CHOICES]
SEED = (3 << 33) + 5


def values(units: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(units)
    return ROWS[kind](torch.randn(1, 1, units, generator=generator)).bfloat16()


def given(units: int, choice: str) -> dict[str, Any]:
    """A position and a seed of its own for half of the choices."""
    if list(CHOICES).index(choice) % 2:
        return {}
    return {"positions": torch.tensor([[99_991 * units]]), "seeds": torch.tensor([7919 << 30])}


def gate_and_up() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    gate, up = (torch.randn(1, 1, 512, generator=generator).bfloat16() * 2 for _ in range(2))
    return gate, up


def interpreted(path: str, *everything: str) -> None:
    """What the kernel answers to what is asked here; of the cases to a few only, unless everything is asked."""
    from tiny_answerers import answering, ids_of

    from interpreting import patch_the_language_once
    from mless.kernels import redistributing
    from mless.redistribution import arm, redistribute
    from mless.values import arm_settings

    patch_the_language_once()
    found: dict[str, Any] = {}
    for units, kind, choice in CASES if everything else FEW:
        a = values(units, kind)
        assert redistributing.fits(a)
        found[f"{units} {kind} {choice}"] = redistribute(a, **CHOICES[choice], **given(units, choice), seed=SEED)
    for act in ACTS:
        gate, up = gate_and_up()
        found[f"{act} alone"] = redistributing.rows(gate, arm_settings(c=0.2), act=act)
        found[f"{act} up"] = redistributing.rows(gate, arm_settings(c=0.2), act=act, up=up)

    # In a model: act, selection and times-up in one, unless someone listens or trains.
    model: Any = answering("llama", dtype=torch.bfloat16, num_hidden_layers=1).model
    mlp, ids = model.model.layers[0].mlp, torch.tensor([ids_of(2)])
    calls: list[str] = []
    fused = redistributing.rows

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append("up" if kwargs.get("up") is not None else "values")
        return fused(*args, **kwargs)

    redistributing.rows = counted
    mless.register("arm_rules", "halved", HALVED)
    found["halved"] = redistribute(values(96, "normal"), c=0.2, rule="halved")
    with torch.inference_mode(), arm(model, fraction=0.25, rule="halved"):
        found["halved in a model"], found["halved calls"] = model(input_ids=ids).logits, list(calls)
    with torch.inference_mode():
        found["plain"] = model(input_ids=ids).logits
        with arm(model, fraction=0.25):
            found["fused"], found["fused calls"] = model(input_ids=ids).logits, list(calls)
        calls.clear()
        heard: list[Tensor] = []
        hook = mlp.act_fn.register_forward_hook(lambda module, args, output: heard.append(output.clone()))
        found["heard plain"] = (model(input_ids=ids), heard.pop())[1]
        with arm(model, fraction=0.25):
            found["listened"], found["listened calls"] = model(input_ids=ids).logits, list(calls)
        found["heard"] = heard.pop()
        hook.remove()
        found["after"], found["left"] = model(input_ids=ids).logits, "forward" in vars(mlp)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].self_attn.requires_grad_(False)
    for norm in (model.model.layers[0].input_layernorm, model.model.layers[0].post_attention_layernorm):
        norm.requires_grad_(False)
    with arm(model, fraction=0.25):
        model(input_ids=ids).logits.float().square().sum().backward()
    found["gradient"] = mlp.gate_proj.weight.grad
    torch.save(found, path)


@pytest.mark.parametrize(
    ("units", "kind", "choice"),
    [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_the_kernel_is_the_sorted_path_bit_for_bit(answers, units, kind, choice):
    from mless.kernels import redistributing
    from mless.redistribution import redistribute

    a = values(units, kind)
    assert not redistributing.fits(a)
    expected = redistribute(a, **CHOICES[choice], **given(units, choice), seed=SEED)
    assert torch.equal(answers[f"{units} {kind} {choice}"].view(torch.int16), expected.view(torch.int16))


def test_a_rule_without_a_kernel_is_the_same_on_every_device(answers, outside):
    from mless.kernels import redistributing
    from mless.redistribution import redistribute
    from mless.values import arm_settings

    mless.register("arm_rules", "halved", HALVED)
    a = values(96, "normal")
    expected = redistribute(a, c=0.2, rule="halved")
    assert torch.equal(answers["halved"], expected)
    changed = expected != a
    assert torch.equal(expected[changed], (a[changed].float() / 2).bfloat16())
    assert answers["halved calls"] == []
    assert not torch.equal(answers["halved in a model"], answers["plain"])
    assert not torch.equal(answers["halved in a model"], answers["fused"])
    with pytest.raises(BadStudy, match=r"the kernel .* has none for scope 'token' and rule 'halved'"):
        redistributing.rows(a, arm_settings(rule="halved"))


@pytest.mark.parametrize("act", ACTS)
def test_the_activation_and_the_product_are_part_of_it(answers, act):
    from mless.redistribution import redistribute

    gate, up = gate_and_up()
    alone = answers[f"{act} alone"]
    plain = ACTS[act](gate)
    expected = redistribute(plain, c=0.2)
    # The activation may round to a neighbour of torch's own, and a value at the edge of the chosen may change places with another.
    near = torch.isclose(alone.float(), expected.float(), rtol=0.02, atol=1e-3)
    assert near.float().mean() > 0.99
    assert not torch.isclose(plain.float(), expected.float(), rtol=0.02, atol=1e-3).all()
    assert torch.equal(answers[f"{act} up"], alone * up)


def test_in_a_model_one_kernel_does_it_all(answers):
    assert answers["fused calls"] == ["up"]
    torch.testing.assert_close(answers["fused"], answers["listened"], rtol=0.05, atol=0.05)
    assert not torch.allclose(answers["fused"], answers["plain"], rtol=0.05, atol=0.05)
    assert torch.equal(answers["after"], answers["plain"])
    assert not answers["left"]


def test_who_listened_before_is_heard_all_the_same(answers):
    from mless.redistribution import redistribute

    assert answers["listened calls"] == ["values"]
    assert torch.equal(answers["heard"], redistribute(answers["heard plain"], fraction=0.25))


def test_what_is_trained_gets_its_gradient(answers):
    assert answers["gradient"] is not None
    assert answers["gradient"].abs().sum() > 0


def test_what_the_kernel_is_for():
    from mless.kernels.redistributing import activation_of, fits

    # Not here: no GPU, no interpreter.
    assert not fits(torch.zeros(1, 1, 64, dtype=torch.bfloat16))
    assert not fits(torch.zeros(1, 1, 64))
    assert {name: activation_of(module) for name, module in ACTS.items()} == {name: name for name in ACTS}
    assert activation_of(nn.ReLU()) is None


if __name__ == "__main__":
    interpreted(*sys.argv[1:])
