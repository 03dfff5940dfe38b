"""The doors to cuts and patches, and the proofs that are made when one is entered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mless
from mless.capture import cutting, forwards, patching
from mless.capture.seam import changed
from mless.changes import PARTS
from mless.errors import BadPrompt, BadStudy, ProofFailed
from mless.intervening import prove_cuts, prove_patches, starts_anywhere
from tiny import FAMILIES, prompt_of, tiny

WITH = prompt_of(("start", 2), ("system", 4), ("filler", 5), ("question", 6), ("end", 3))
WITHOUT = replace(
    prompt_of(("start", 2), ("system", 4), ("question", 6), ("end", 3), condition="none"),
    token_ids=tuple(WITH.token_ids[at] for at in WITH.original),
)
CUT = mless.Cut("question,answer", "filler")


def logits(model: Any, prompt: mless.Prompt, *answer: int) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[*prompt.token_ids, *answer]]), use_cache=False).logits


def test_both_doors_in_a_forward_of_ones_own() -> None:
    model = tiny("llama", head=True)
    before = logits(model.model, WITH, 3, 4)
    with mless.cut(model, CUT, prompts=WITH):
        cut = logits(model.model, WITH, 3, 4)
    assert torch.equal(cut[:, :11], before[:, :11])
    assert not torch.allclose(cut[:, 11:], before[:, 11:])
    with mless.recording(model.model, [WITH], parts="residual", layers="2-") as recorder:
        logits(model.model, WITH, 3, 4)
    with mless.patch(model, mless.Patch("residual", layers=3), prompts=[WITHOUT], runs=recorder.runs()):
        patched = logits(model.model, WITHOUT, 3, 4)
    assert torch.allclose(patched[0], before[0, [*WITH.original, 20, 21]], atol=1e-5)
    assert torch.equal(logits(model.model, WITH, 3, 4), before)
    assert not changed(model.model)


def test_the_handle_takes_the_prompts_of_the_next_forward() -> None:
    model = tiny("qwen2", head=True)
    other = prompt_of(("start", 1), ("filler", 3), ("question", 4), seed=9, item="2")
    with mless.cut(model, CUT, prompts=WITH) as handle:
        first = logits(model.model, WITH)
        handle.rows([other])
        second = logits(model.model, other)
        with pytest.raises(BadPrompt, match="names keys = 'filler', but the prompt has no such span"):
            handle.rows([WITHOUT])
    for prompt, found in ((WITH, first), (other, second)):
        with mless.cut(model, CUT, prompts=prompt):
            assert torch.equal(logits(model.model, prompt), found)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_proofs_hold_in_every_family(family: str) -> None:
    model = tiny(family, head=True).model
    found = prove_cuts(model, [CUT, mless.Cut("question", "system", heads=1, to="sink")], WITH)
    assert found["output"] < 1e-5
    assert found["uncut"] < 1e-5
    parts = [part for part in PARTS if (family, part) != ("gpt_oss", "mlp-activation")]
    assert prove_patches(model, [mless.Patch(part) for part in parts], WITH)["own"] == 0.0


def test_an_edge_that_was_not_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = cutting.EdgeMask.cut

    def none(self: Any, *given: Any) -> torch.Tensor:
        return torch.zeros_like(own(self, *given))

    monkeypatch.setattr(cutting.EdgeMask, "attended", lambda *_: None)
    monkeypatch.setattr(cutting.EdgeMask, "cut", none)
    with pytest.raises(ProofFailed, match="attention with its edges cut differs from the definition"):
        prove_cuts(tiny("llama", head=True).model, [CUT], WITH)


def test_a_weight_that_is_only_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of each cut key, too little to be seen among the rest."""
    own = forwards.weighed

    def leaking(call: Any, change: Any) -> torch.Tensor:
        return own(call, lambda first, p, seen: change(first, p, seen) + 1e-7)

    monkeypatch.setattr(cutting, "weighed", leaking)
    with pytest.raises(ProofFailed, match="a cut edge still has weight: 'question' changes with the values"):
        prove_cuts(tiny("llama", head=True).model, [mless.Cut("question", "filler", to="sink")], WITH)


def test_a_model_that_was_moved_is_proved_again() -> None:
    model = tiny("llama", head=True).model
    first = prove_cuts(model, [CUT], WITH)
    assert prove_cuts(model, [CUT], WITH) is first
    assert prove_cuts(model.double(), [CUT], WITH) is not first


def test_an_attention_that_changes_the_uncut_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = cutting.attention_of
    monkeypatch.setattr(cutting, "attention_of", lambda call: own(call) * 1.1)
    with pytest.raises(ProofFailed, match="attention without any cut changes the model's states"):
        prove_cuts(tiny("llama", head=True).model, [CUT], WITH)


def test_values_that_do_not_arrive_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching.PatchHandle, "_act", lambda *_: None)
    with pytest.raises(ProofFailed, match="the residual of layer 1 does not hold what was put there"):
        prove_patches(tiny("llama", head=True).model, [mless.Patch("residual", layers=1)], WITH)


def test_values_that_arrive_changed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = patching.PatchHandle.after
    monkeypatch.setattr(patching.PatchHandle, "after", lambda *given: own(*given) * 1.01)
    with pytest.raises(ProofFailed, match="putting a run's own attention-output back changes its states"):
        prove_patches(tiny("llama", head=True).model, [mless.Patch("attention-output", layers=1)], WITH)


def test_what_is_no_model_and_no_prompt() -> None:
    model = tiny("llama", head=True)
    with pytest.raises(BadStudy, match=r"a torch module\), got str; for a pipeline"), mless.cut("x", CUT, prompts=WITH):
        pass
    compiled = torch.compile(model.model)
    with pytest.raises(BadStudy, match="the model is compiled"), mless.cut(compiled, CUT, prompts=WITH):
        pass
    with pytest.raises(BadPrompt, match=r"a prompt is what mless\.prompts"), mless.cut(model, CUT, prompts=["text"]):
        pass
    with pytest.raises(BadStudy, match="no part 'mlp' to patch"), mless.recording(model, WITH, parts="mlp"):
        pass


def test_the_row_stable_engine_does_not_answer_without_a_cut_that_is_in_force() -> None:
    model = tiny("llama", head=True)
    with mless.cut(model, CUT, prompts=WITH), pytest.raises(BadStudy, match="cuts and patches are in force"):
        mless.HfEngine(model, length=64, slots=1)
    with (
        mless.recording(model, WITH, parts="residual", layers=1),
        pytest.raises(BadStudy, match="cuts and patches are in force"),
    ):
        mless.HfEngine(model, length=64, slots=1)


def test_a_layer_that_needs_more_of_an_earlier_one_than_its_stream_is_found() -> None:
    """As where layers share keys. Patched runs are then whole."""
    assert starts_anywhere(tiny("llama", head=True).model, 2, WITH) == ""
    model: Any = tiny("llama", head=True).model
    left: list[bool] = []
    first, second = model.model.layers[:2]
    first.self_attn.register_forward_hook(lambda *_: left.append(True))
    second.register_forward_pre_hook(lambda *_: left.clear() if left else left.pop())
    assert "IndexError" in starts_anywhere(model, 2, WITH)
