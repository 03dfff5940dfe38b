"""Log-probabilities of texts after a prompt, against a plain loop over the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from mless.capture import scoring
from mless.capture.branching import branches
from mless.capture.scoring import Scorer
from mless.errors import BadAttention, BadStudy
from mless.models import LoadedModel, widening
from mless.values import Prompt
from tiny import FAMILIES, prompt_of, tiny

TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [5, 6, 7, 20, 21], [30], [31, 32], [31, 33], [5, 6, 8]]
PROMPT = prompt_of(("start", 1), ("system", 4), ("filler", 3), ("question", 6))


def plain(model: LoadedModel, prompt: Prompt, text: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of all next tokens: one row, the model's whole forward, softmax in fp32."""
    ids = torch.tensor([[*prompt.token_ids, *text]])
    more = {}
    if prompt.position_ids is not None:
        last = prompt.position_ids[-1]
        more = {"position_ids": torch.tensor([[*prompt.position_ids, *range(last + 1, last + 1 + len(text))]])}
        more["attention_mask"] = torch.ones_like(ids)
    with torch.inference_mode():
        logits = model.model(input_ids=ids, use_cache=False, **more).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def of_tokens(every: torch.Tensor, text: Sequence[int]) -> np.ndarray:
    return every.gather(-1, torch.tensor(text)[:, None])[:, 0].double().numpy()


def check_equal(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_has_the_numbers_of_a_plain_loop(family: str) -> None:
    model = tiny(family, head=True)
    (found,) = Scorer(model)([branches(PROMPT, TEXTS)])
    for text, logp in zip(TEXTS, found.texts, strict=True):
        check_equal(logp, of_tokens(plain(model, PROMPT, text), text))
    along = plain(model, PROMPT, TEXTS[0])
    check_equal(found.entropy, -(along.exp() * along).sum(-1).double().numpy())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_positions_of_the_prompts_own(family: str) -> None:
    model = tiny(family, head=True)
    moved = replace(PROMPT, position_ids=(*range(5), *range(15, 24)))
    (found,) = Scorer(model)([branches(moved, TEXTS)])
    for text, logp in zip(TEXTS, found.texts, strict=True):
        check_equal(logp, of_tokens(plain(model, moved, text), text))


def test_hidden_filler_changes_nothing_where_it_keeps_no_position() -> None:
    """Without position encodings hidden tokens would be as if they were not there; with them the later ones keep their places."""
    model = tiny("llama", head=True)
    original = [PROMPT.token_ids[at] for at in PROMPT.original]
    without = Prompt("1", "none", tuple(original), prompt_of(("start", 1), ("system", 4), ("question", 6)).spans, "")
    gap = replace(without, position_ids=(*range(5), *range(8, 14)))
    (hidden,), (apart,) = (Scorer(model)([branches(one, TEXTS)]) for one in (replace(PROMPT, hidden=True), gap))
    for one, other in zip(hidden.texts, apart.texts, strict=True):
        check_equal(one, other)
    (seen,) = Scorer(model)([branches(PROMPT, TEXTS)])
    assert np.abs(seen.texts[0] - hidden.texts[0]).max() > 1e-3


def test_distances_from_another_prompts_distributions() -> None:
    model = tiny("qwen2", head=True)
    other = prompt_of(("start", 1), ("system", 4), ("question", 6), seed=3)
    scorer = Scorer(model)
    (first,) = scorer([branches(other, TEXTS)])
    (found,) = scorer([branches(PROMPT, TEXTS)], [first.states])
    theirs, ours = plain(model, other, TEXTS[0]), plain(model, PROMPT, TEXTS[0])
    check_equal(found.kl, (theirs.exp() * (theirs - ours)).sum(-1).double().numpy())
    assert found.agree.tolist() == (theirs.argmax(-1) == ours.argmax(-1)).double().tolist()
    (same,) = scorer([branches(other, TEXTS)], [first.states])
    assert same.kl.tolist() == [0.0] * len(TEXTS[0])
    assert same.agree.tolist() == [1.0] * len(TEXTS[0])
    assert np.isnan(first.kl).all()


def test_rows_beside_each_other_and_padding_change_no_number() -> None:
    model = tiny("gemma3_text", head=True)
    scorer = Scorer(model)
    rows = [branches(PROMPT, TEXTS), branches(prompt_of(("question", 9), seed=1), [[], [4, 5]])]
    alone = [scorer([row])[0] for row in rows]
    together = scorer(rows, count=4, length=64)
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one.texts, other.texts, strict=True):
            assert len(a) == len(b)
            if len(a):
                check_equal(a, b)


def test_the_model_is_as_before_afterwards_even_on_error() -> None:
    model = tiny("llama", head=True)
    ids = torch.tensor([PROMPT.token_ids])
    with torch.inference_mode():
        before = model.model(input_ids=ids).logits
    scorer = Scorer(model)
    scorer([branches(PROMPT, TEXTS)])
    with pytest.raises(BadStudy, match="the first text has 12 tokens, but is to be compared with one of 3"):
        scorer([branches(PROMPT, TEXTS)], [torch.zeros(3, 48)])
    with torch.inference_mode():
        assert torch.equal(model.model(input_ids=ids).logits, before)
    assert "forward" not in vars(model.model.get_decoder())


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    model = tiny("llama", head=True)
    with torch.no_grad():
        model.model.lm_head.weight[3] = torch.nan
    (found,) = Scorer(model)([branches(PROMPT, TEXTS)])
    with pytest.raises(BadAttention, match=r"item '1', condition 'mless': a log-probability is not finite"):
        _ = found.numbers


def test_rows_and_what_they_are_compared_with_must_be_as_many() -> None:
    model = tiny("llama", head=True)
    scorer, rows = Scorer(model), [branches(PROMPT, TEXTS)] * 2
    with pytest.raises(ValueError, match="shorter"):
        scorer(rows, [None])


@pytest.mark.parametrize("bias", [False, True])
def test_few_states_have_the_numbers_of_the_heads_own_product(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", head=True)
    head = model.model.get_output_embeddings()
    if bias:
        head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(head.weight)))
    found = [Scorer(model)([branches(PROMPT, TEXTS)])[0]]
    monkeypatch.setattr(scoring, "_FEW", 0)
    found.append(Scorer(model)([branches(PROMPT, TEXTS)])[0])
    for one, other in zip(found[0].texts, found[1].texts, strict=True):
        check_equal(one, other)


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_the_head_in_several_pieces_says_the_same(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few logits fit into memory, and whether those of the row to compare with are kept or not."""
    model = tiny("llama", head=True)
    other = replace(PROMPT, token_ids=(*PROMPT.token_ids[:-1], 40))
    head = model.model.get_output_embeddings()
    calls: list[int] = []
    head.register_forward_hook(lambda *given: calls.append(given[-1].shape[-2]))

    def found() -> list[scoring.Numbers]:
        scorer = Scorer(model)
        (first,) = scorer([branches(PROMPT, TEXTS)])
        calls.clear()
        rows = [scorer([branches(prompt, TEXTS)], [first.states])[0] for prompt in (other, PROMPT, other)]
        return [one.numbers for one in rows]

    whole = found()
    states = calls[-1]
    assert calls == [len(TEXTS[0]), states, states, states]
    monkeypatch.setattr(scoring, "_BLOCK_BYTES", 3 * 4 * len(head.weight))
    monkeypatch.setattr(scoring, "_KEPT_BYTES", kept)
    pieces = found()
    blocks, compared = -(-states // 3), len(TEXTS[0]) // 3
    assert max(calls) == 3
    assert len(calls) == 3 * blocks + compared * (1 if kept else 3)
    for one, wanted in zip(pieces, whole, strict=True):
        for mine, known in zip(
            (*one.texts, one.entropy, one.kl), (*wanted.texts, wanted.entropy, wanted.kl), strict=True
        ):
            assert np.abs(mine - known).max() <= 1e-5
        assert (one.agree == wanted.agree).all()
    assert (pieces[0].kl > 0).any()
    assert np.array_equal(pieces[0].kl, pieces[2].kl)
    assert not pieces[1].kl.any()


def test_a_head_that_is_widened_on_the_way_runs_once_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once for each piece of its logits, nor the other way round: it would be widened each time."""
    model = tiny("llama", head=True)
    monkeypatch.setattr(widening, "_SMALL", 0)
    widening.keep_narrow(model.model.to(torch.bfloat16))
    head = model.model.get_output_embeddings()
    (known,) = Scorer(model)([branches(PROMPT, TEXTS)])
    calls: list[int] = []
    head.register_forward_hook(lambda *given: calls.append(given[-1].shape[-2]))
    monkeypatch.setattr(scoring, "_few_through", None)
    monkeypatch.setattr(scoring, "_BLOCK_BYTES", 3 * 4 * len(head.weight))
    (found,) = Scorer(model)([branches(PROMPT, TEXTS)])
    assert len(calls) == 1
    for one, other in zip(found.texts, known.texts, strict=True):
        assert np.array_equal(one, other)
