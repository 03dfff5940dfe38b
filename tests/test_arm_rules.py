"""ARM's rules: one table for the plain path and the kernel, and a rule from outside the package."""

from __future__ import annotations

import importlib

import pytest
import torch

import mless
from mless.arm_rules import ARM_RULES, ArmRule
from mless.errors import BadPlugin, BadStudy
from mless.redistribution import redistribute
from mless.values import ArmSettings
from outside import Outside

HALVING = """
import mless
from mless.arm_rules import ArmRule

mless.register("arm_rules", "halved", ArmRule(lambda old, drawn: old / 2))
"""


def test_the_rules_that_come_with_mless() -> None:
    old, drawn = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -0.25])
    assert ARM_RULES.names()[:2] == ["replace", "add"]
    assert torch.equal(ARM_RULES.get("replace").new(old, drawn), drawn)
    assert torch.equal(ARM_RULES.get("add").new(old, drawn), old + drawn)


def test_unknown_rules_are_refused_with_the_nearest() -> None:
    with pytest.raises(BadStudy, match=r"no ARM rule 'replaced' \(did you mean 'replace'\?\); there are: replace, add"):
        ArmSettings(c=0.1, rule="replaced")
    with pytest.raises(BadPlugin, match=r"ARM rule 'halved' must be an mless.arm_rules.ArmRule, got a list"):
        mless.register("arm_rules", "halved", [])


def test_a_rule_from_outside(outside: Outside) -> None:
    outside.write("halving", HALVING)
    importlib.import_module("halving")
    assert isinstance(ARM_RULES.get("halved"), ArmRule)
    a = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    new = redistribute(a, fraction=0.25, rule="halved")
    changed = new != a
    assert changed.sum() == 2 * 3 * 16
    assert torch.equal(new[changed], a[changed] / 2)
    code = "from mless.values import ArmSettings; print(ArmSettings(c=0.1, rule='halved').rule)"
    assert outside.in_another_process(code) == "halved"


def test_a_study_takes_a_rule_from_outside(outside: Outside) -> None:
    from mless.study.spec import ArmTable

    outside.write("halving", HALVING)
    outside.name_plugins("halving")
    assert ArmTable(rule="halved").settings().rule == "halved"
