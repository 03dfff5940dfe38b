"""Cuts and patches as values: how they are written, said and stored."""

from __future__ import annotations

import json

from mless import Condition, Cut, Patch
from mless.changes import NAMED_SPANS, spans_of
from mless.values import condition_of, condition_words, stored_condition


def test_spans_are_kept_as_they_were_named_and_in_order() -> None:
    cut = Cut("end+question", ["answer", "original"], layers=[2, 3], heads=1)
    assert cut == Cut(("question", "end"), "original, answer", layers="2,3", heads="1")
    assert spans_of(cut.keys) == ("start", "system", "question", "end", "answer")
    assert spans_of(("all",)) == NAMED_SPANS
    assert Patch("residual").at == ("all",)


def test_words() -> None:
    assert Cut("question,end", "filler", layers="2-", heads="1-3").words() == (
        "question+end → filler cut in layers 2-, heads 1-3"
    )
    assert Cut("all", "filler", to="sink").words() == "all → filler cut in all layers, weight to the sink"
    patch = Patch("attention-output", layers=1, at="question", heads=4, source="mless")
    assert patch.words() == "attention-output of mless in layer 1, head 4 at question"
    condition = Condition("x", "repeat", " /", 5, cut=(Cut("answer", "filler"),))
    assert condition_words(condition) == "5 × ' /', before-question, answer → filler cut in all layers"


def test_a_stored_condition_comes_back() -> None:
    patches = (Patch("residual", layers="1-", at="original", source="mless"), Patch("mlp-output", source="mless"))
    one = Condition("x", "none", cut=(Cut("question", "system", heads="1", to="sink"),), patch=patches)
    assert condition_of("x", json.loads(json.dumps(stored_condition(one)))) == one
    plain = Condition("mless", "repeat", " /", 5)
    assert "cut" not in stored_condition(plain)
    assert condition_of("mless", json.loads(json.dumps(stored_condition(plain)))) == plain
