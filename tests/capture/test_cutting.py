"""Cut edges of attention, against eager attention with the same weights removed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from mless.capture import capturing, cutting, received
from mless.capture.cutting import check_cuts, cut_attached, first_cut, runs_of
from mless.changes import NAMED_SPANS, Cut
from mless.errors import BadPrompt, BadStudy, UnsupportedArchitecture
from mless.models import LoadedModel
from mless.values import Prompt
from tiny import FAMILIES, prompt_of, tiny

PROMPT = prompt_of(("start", 2), ("system", 4), ("filler", 5), ("question", 6), ("end", 3))
ANSWER = (5, 6, 7, 8, 9)
#: Both kinds of edges: those that leave whole runs, and those between tokens of one span.
CUTS = {
    "answer-filler": [Cut("answer", "filler")],
    "late layers": [Cut("question,end,answer", "filler", layers="2-")],
    "one head": [Cut("all", "filler", heads=2), Cut("answer", "question", layers=1, heads="3-")],
    "group": [Cut("original,answer", "filler")],
    "one span": [Cut("question", "question"), Cut("filler", "filler", layers="1,3")],
    "sink": [Cut("question,end,answer", "filler", to="sink"), Cut("answer", "system", layers=2)],
    "sink of heads": [Cut("question", "filler", heads="1,4", to="sink")],
}


def labels_of(prompt: Prompt, count: int) -> list[str]:
    names = [span.name for span in prompt.spans for _ in range(len(span))]
    return [*names, *["answer"] * (count - len(names))]


def spans(names: Sequence[str]) -> list[str]:
    groups = {"all": list(NAMED_SPANS), "original": ["start", "system", "question", "end"]}
    return [one for name in names for one in groups.get(name, [name])]


def numbers(text: str | None, highest: int) -> set[int]:
    """Numbers as cuts have them, read by other code than the package's."""
    if text in (None, "all"):
        return set(range(1, highest + 1))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found |= set(range(int(first), (int(last) if last else highest) + 1)) if dash else {int(first)}
    return found


def without(
    matrix: torch.Tensor, cuts: Sequence[Cut], layer: int, labels: Sequence[Sequence[str]], layers: int, sinks: bool
) -> torch.Tensor:
    """The weights with cut ones removed, edge by edge."""
    matrix = matrix.double().clone()
    rows, heads, queries, keys = matrix.shape
    for row in range(rows):
        for head in range(heads):
            own = [
                one for one in cuts if layer in numbers(one.layers, layers) and head + 1 in numbers(one.heads, heads)
            ]
            for at in range(queries):
                query = at + keys - queries
                gone = {"rest": [], "sink": []}
                for key in range(query):
                    ways = {
                        one.to
                        for one in own
                        if labels[row][query] in spans(one.queries) and labels[row][key] in spans(one.keys)
                    }
                    if ways:
                        gone["rest" if "rest" in ways else "sink"].append(key)
                weights = matrix[row, head, at]
                lost = weights[gone["rest"]].sum()
                weights[gone["rest"]] = 0
                weights /= 1 - lost
                moved = weights[gone["sink"]].sum()
                weights[gone["sink"]] = 0
                if not sinks:
                    weights[int((weights > 0).nonzero()[0])] += moved
    return matrix.float()


@contextmanager
def eager(model: LoadedModel, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """The model by its family's own eager attention, with its weights changed; nothing of the package's is used."""
    module: Any = sys.modules[type(model.model).__module__]
    own = module.eager_attention_forward

    def attend(of: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        _, matrix = own(of, query, key, value, mask, **more)
        matrix = change(of, matrix)
        values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return (matrix @ values).transpose(1, 2).contiguous(), matrix

    before = model.model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    module.eager_attention_forward = attend
    try:
        yield
    finally:
        module.eager_attention_forward = own
        model.model.set_attn_implementation(before)


def logits(model: LoadedModel, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(input_ids=ids, use_cache=False, **more).logits


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_cuts_equal_eager_attention_with_the_same_weights_removed(family: str, name: str) -> None:
    model = tiny(family, head=True)
    ids = torch.tensor([[*PROMPT.token_ids, *ANSWER]])
    labels = [labels_of(PROMPT, ids.shape[1])]

    def change(of: Any, matrix: torch.Tensor) -> torch.Tensor:
        return without(matrix, CUTS[name], of.layer_idx + 1, labels, 3, family == "gpt_oss")

    plain = logits(model, ids)
    with eager(model, change):
        wanted = logits(model, ids)
    with cut_attached(model, CUTS[name], [PROMPT]):
        found = logits(model, ids)
    close(found, wanted)
    assert float((plain - wanted).abs().max()) > 1e-3
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_rows_of_a_batch_have_their_own_spans(family: str) -> None:
    """Padding on either side; the numbers are those of the rows alone."""
    model = tiny(family, head=True)
    other = prompt_of(("start", 1), ("system", 2), ("filler", 3), ("question", 4), seed=2, item="2")
    cuts = [Cut("question,answer", "filler")]
    alone: list[torch.Tensor] = []
    rows = [[*PROMPT.token_ids, *ANSWER], [*other.token_ids, *ANSWER]]
    for prompt, row in zip((PROMPT, other), rows, strict=True):
        with cut_attached(model, cuts, [prompt]):
            alone.append(logits(model, torch.tensor([row]))[0])
    longest = max(map(len, rows))
    for left in (False, True):
        padded, mask = torch.zeros(2, longest, dtype=torch.long), torch.zeros(2, longest, dtype=torch.long)
        places = [slice(longest - len(row), None) if left else slice(0, len(row)) for row in rows]
        for at, (place, row) in enumerate(zip(places, rows, strict=True)):
            padded[at, place], mask[at, place] = torch.tensor(row), 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with cut_attached(model, cuts, [PROMPT, other]):
            found = logits(model, padded, attention_mask=mask, position_ids=positions)
        for at, place in enumerate(places):
            close(found[at, place], alone[at])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(family: str) -> None:
    model = tiny(family, head=True)
    cuts = [Cut("question,answer", "filler")]
    other = prompt_of(*((span.name, len(span)) for span in PROMPT.spans), seed=4, item="2")
    both = torch.tensor([[*PROMPT.token_ids, *ANSWER], [*other.token_ids, *ANSWER]])
    calls: dict[str, list[torch.Tensor]] = {}

    def read(key: str, ids: torch.Tensor, prompts: Sequence[Prompt]) -> None:
        with cut_attached(model, cuts, prompts), capturing(model.model, layers=[1, 2, 3]) as recorder:
            recorder.on_call = lambda call, out: calls.setdefault(key, []).append(out[-1:].clone())
            with torch.inference_mode():
                model.model(input_ids=ids, use_cache=False)

    read("alone", both[1:], [other])
    read("beside", both, [PROMPT, other])
    # Matrix products of other sizes may have other bits; the first layer's attention has the same input.
    assert torch.equal(calls["alone"][0], calls["beside"][0])


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gpt_oss"])
def test_generate_sees_the_cut_in_every_step(family: str) -> None:
    model = tiny(family, head=True)
    cuts = [Cut("answer", "filler,question", layers="2-")]
    ids = torch.tensor([PROMPT.token_ids])
    with cut_attached(model, cuts, [PROMPT]):
        with torch.inference_mode():
            made = model.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        step = ids
        for _ in range(made.shape[1] - ids.shape[1]):
            step = torch.cat([step, logits(model, step)[:, -1:].argmax(-1)], dim=1)
    assert made.tolist() == step.tolist()
    with cut_attached(model, cuts, [PROMPT]), torch.inference_mode():
        several = model.model.generate(
            ids, max_new_tokens=8, do_sample=False, num_beams=2, num_return_sequences=2, pad_token_id=0
        )
    assert several.shape[0] == 2


def test_what_tokens_receive_is_read_from_the_cut_attention() -> None:
    model = tiny("llama")
    prompt = prompt_of(("start", 2), ("system", 4), ("filler", 5), ("question", 6))
    with cut_attached(model, [Cut("question", "filler", layers=2)], [prompt], answer=False):
        (found,) = received(model, [prompt])
    filler = prompt.positions("filler")
    (plain,) = received(model, [prompt])
    assert np.array_equal(found.received[:, 0], plain.received[:, 0], equal_nan=True)
    assert found.mass[1, :, 2].max() < plain.mass[1, :, 2].min() + 1
    # Of the filler only filler tokens are left as queries, and they are not original ones.
    assert found.n[1, 1][filler].tolist() == [0] * 5
    assert found.n[0, 1][filler].tolist() == [4, 3, 2, 1, 0]
    assert float(found.mass[1, :, 2].max()) == 0.0
    assert np.allclose(found.mass.sum(-1), 1, atol=1e-6)


def test_cuts_that_leave_no_single_softmax_cannot_be_captured() -> None:
    model = tiny("llama")
    for cut in (Cut("question", "filler", heads=1), Cut("question", "filler", to="sink")):
        with (
            cut_attached(model, [cut], [PROMPT]),
            pytest.raises(BadStudy, match="a cut by head, or one that sends weight to the sink"),
        ):
            list(received(model, [PROMPT]))


def test_the_model_is_as_before_even_on_error() -> None:
    model = tiny("llama", head=True)
    ids = torch.tensor([PROMPT.token_ids])
    before, implementation = logits(model, ids), model.model.config._attn_implementation
    with (
        pytest.raises(BadPrompt, match="row 1 of the forward does not hold the tokens of item '1'"),
        cut_attached(model, [Cut("question", "filler")], [PROMPT]),
    ):
        logits(model, ids + 1)
    assert torch.equal(logits(model, ids), before)
    assert model.model.config._attn_implementation == implementation
    assert not model.model.get_decoder()._forward_pre_hooks


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        (
            lambda: Cut("questions", "filler"),
            r"no span 'questions' \(did you mean 'question'\?\); there are: start, system",
        ),
        (lambda: Cut("question", []), "a cut's keys name no span"),
        (lambda: Cut("question", 3), r"names of spans, as 'question,end'; got 3"),
        (lambda: Cut("question", "filler", layers=[]), "a cut's layers: none is named"),
        (lambda: Cut("question", "filler", layers=[1.5]), r"whole numbers from 1, or a text .* got 1\.5"),
        (lambda: Cut("question", "filler", to="bin"), "a cut's weight goes to one of rest, sink; got 'bin'"),
        (lambda: Cut("question", "filler", layers="4"), r"no layer 4: this model's layers are 1 to 3"),
        (lambda: Cut("question", "filler", heads="5"), r"no head 5: this model's heads are 1 to 4"),
        (
            lambda: Cut("question", "system"),
            "item '1', condition 'mless': the cut names keys = 'system', but the prompt has no such span",
        ),
        (
            lambda: Cut("question", "start,filler"),
            "the cut leaves token 4, the first of 'question', nothing to see but itself",
        ),
        (lambda: Cut("question", "start", to="sink"), "sends the weight of 'start' to the sink, but the first token"),
    ],
)
def test_bad_cuts_are_refused_before_anything_runs(cut: Callable[[], Cut], why: str) -> None:
    prompt = prompt_of(("start", 1), ("filler", 3), ("question", 4))
    with pytest.raises((BadStudy, BadPrompt), match=why), cut_attached(tiny("llama"), [cut()], [prompt]):
        pass


def test_what_a_token_sees_is_counted_by_layer_and_head() -> None:
    """Two cuts leave a token nothing only where one head of one layer has both; where the weight goes does not matter."""
    prompt = prompt_of(("start", 2), ("filler", 3), ("question", 4))
    both = {"queries": "question", "keys": "start"}, {"queries": "question", "keys": "filler"}
    for first, second in (({"layers": "1"}, {"layers": "2-"}), ({"heads": "1-2"}, {"heads": "3"})):
        check_cuts([Cut(**both[0], **first), Cut(**both[1], **second)], prompt)
    overlapping = (
        ({}, {}),
        ({"layers": "1-2"}, {"layers": "2-"}),
        ({"heads": "1-2"}, {"heads": "2", "layers": "7"}),
        ({"layers": "3"}, {"to": "sink"}),
    )
    for first, second in overlapping:
        with pytest.raises(BadPrompt, match="token 5, the first of 'question', nothing to see but itself"):
            check_cuts([Cut(**both[0], **first), Cut(**both[1], **second)], prompt)
    with pytest.raises(BadPrompt, match="token 1, of 'start', nothing to see but itself"):
        check_cuts([Cut("start", "start")], prompt)
    check_cuts([Cut("start", "start")], prompt_of(("start", 1), ("question", 4)))


def test_a_cpu_kernel_that_sdpa_would_not_choose_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.7's does not know heads that share keys, and reads beyond them."""
    model, ids = tiny("llama", head=True), torch.tensor([[*PROMPT.token_ids, *ANSWER]])
    with cut_attached(model, CUTS["answer-filler"], [PROMPT]):
        wanted = logits(model, ids)
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.MATH.value)
        monkeypatch.setattr(cutting, "_by_parts", None)
        close(logits(model, ids), wanted)


def test_prompts_that_do_not_fit_the_rows() -> None:
    model = tiny("llama", head=True)
    cuts = [Cut("question", "filler")]
    ids = torch.tensor([PROMPT.token_ids] * 3)
    with cut_attached(model, cuts, [PROMPT, PROMPT]), pytest.raises(BadPrompt, match="has 3 rows, but 2 prompts"):
        logits(model, ids)
    with pytest.raises(BadPrompt, match="no prompt is given"), cut_attached(model, cuts, []):
        pass
    with cut_attached(model, cuts, [PROMPT]), pytest.raises(UnsupportedArchitecture, match="ready-made mask"):
        logits(model, ids[:1], attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool).tril())


def test_runs_hold_just_the_edges_that_are_left() -> None:
    """Random rows and tables: what runs say, edge by edge."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        labels = np.sort(rng.integers(0, len(NAMED_SPANS), rng.integers(1, 20))).astype(np.int8)
        table = np.zeros((len(NAMED_SPANS) + 1,) * 2, bool)
        table[:-1, :-1] = rng.random((len(NAMED_SPANS),) * 2) < 0.3
        runs = runs_of(labels[None], table)
        lonely = any(table[one, one] and (labels == one).sum() > 1 for one in set(labels.tolist()))
        assert (runs is None) == lonely
        if runs is None:
            continue
        seen = np.zeros((len(labels),) * 2, bool)
        for run in runs[0]:
            seen[run.first : run.last, run.kept] = True
            for at in range(run.first, run.last):
                seen[at, run.first : at + 1] = True
        wanted = np.tril(~table[labels][:, labels]) | np.eye(len(labels), dtype=bool)
        assert np.array_equal(seen, wanted)


def test_the_first_token_that_loses_an_edge() -> None:
    """Random cuts of prompts whose spans come in any order, edge by edge."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        order = rng.permutation(NAMED_SPANS[:-1])[: rng.integers(1, 6)]
        prompt = prompt_of(*((str(name), int(rng.integers(1, 4))) for name in order))
        labels = labels_of(prompt, len(prompt))
        cuts = [Cut(*rng.choice(NAMED_SPANS, 2).tolist()) for _ in range(rng.integers(1, 4))]
        lost = [
            query
            for query in range(len(prompt))
            for key in range(query)
            for cut in cuts
            if labels[query] in cut.queries and labels[key] in cut.keys
        ]
        assert first_cut(cuts, prompt) == min([*lost, len(prompt) - 1])


def by_sequences(q: Any, k: Any, v: Any, plan: Any, scale: float) -> torch.Tensor:
    """What torch's flash attention does on a GPU: each sequence by itself, its queries the last of its keys."""
    out = torch.empty_like(q)
    keys, values = k[plan.keys], v[plan.keys]
    ends = list(zip(plan.to_queries.tolist(), plan.to_keys.tolist(), strict=True))
    for (a, c), (b, d) in pairwise(ends):
        each = q.shape[1] // k.shape[1]
        one, two, three = (
            q[a:b].transpose(0, 1),
            *(x[c:d].transpose(0, 1).repeat_interleave(each, 0) for x in (keys, values)),
        )
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
        weights = (one @ two.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
        out[a:b] = (weights @ three).transpose(0, 1)
    return out


def test_one_call_for_all_runs_as_a_gpu_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences that a GPU is given hold just the edges that are left, in every row of a batch."""
    model = tiny("qwen2", head=True)
    other = prompt_of(("start", 1), ("filler", 3), ("question", 4), seed=2, item="2")
    rows = [[*PROMPT.token_ids, *ANSWER], [*other.token_ids, *ANSWER, *[0] * 12]]
    ids = torch.tensor(rows)
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    cuts = [Cut("question,answer", "filler"), Cut("answer", "question", layers="2")]

    def by_flash(call: Any, runs: Any) -> torch.Tensor:
        return cutting._by_flash(call, cutting._gathered(runs, call.query.shape[2], call.query.device))

    with cut_attached(model, cuts, [PROMPT, other]):
        wanted = logits(model, ids, attention_mask=mask)
        monkeypatch.setattr(cutting, "_flash", by_sequences)
        monkeypatch.setattr(cutting, "_by_parts", by_flash)
        found = logits(model, ids, attention_mask=mask)
    close(found[mask.bool()], wanted[mask.bool()])
