"""Patches, against hooks written by hand; and the other run where everything is taken from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from mless.capture import received
from mless.capture.cutting import cut_attached
from mless.capture.patching import RecordedRun, patch_attached, places_of, recorded
from mless.changes import PARTS, Cut, Patch
from mless.errors import BadPrompt, BadStudy, UnsupportedArchitecture
from mless.models import LoadedModel
from mless.values import Prompt
from tiny import FAMILIES, prompt_of, tiny

WITH = prompt_of(("start", 2), ("system", 4), ("filler", 5), ("question", 6), ("end", 3))
_IDS = [WITH.token_ids[at] for at in WITH.original]
WITHOUT = replace(
    prompt_of(("start", 2), ("system", 4), ("question", 6), ("end", 3), condition="none"), token_ids=tuple(_IDS)
)
#: Without the filler, at the positions the tokens have with it.
MOVED = replace(WITHOUT, condition="position-only", position_ids=tuple(WITH.original))
ANSWER = (5, 6, 7, 8, 9)
#: Where a family keeps its layers, and what it calls their parts.
LAYERS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}
OUTPUT = {"gpt2": "attn.c_proj", "gpt_neox": "attention.dense"}
ACT = {"gpt2": "mlp.act", "gpt_neox": "mlp.act"}


def ids_of(prompt: Prompt, answer: Sequence[int] = ANSWER) -> torch.Tensor:
    return torch.tensor([[*prompt.token_ids, *answer]])


def forward(model: LoadedModel, prompt: Prompt, answer: Sequence[int] = ANSWER) -> torch.Tensor:
    """The last hidden states and logits of a row, joined."""
    ids, more = ids_of(prompt, answer), {}
    if prompt.position_ids is not None:
        last = prompt.position_ids[-1]
        more = {"position_ids": torch.tensor([[*prompt.position_ids, *range(last + 1, last + 1 + len(answer))]])}
        more["attention_mask"] = torch.ones_like(ids)
    with torch.inference_mode():
        found = model.model(input_ids=ids, use_cache=False, output_hidden_states=True, **more)
    return torch.cat([found.hidden_states[-1], found.logits], dim=-1)


def run_of(model: LoadedModel, prompt: Prompt, *patches: Patch) -> tuple[RecordedRun, torch.Tensor]:
    with recorded(model, places_of(model.model, patches), [prompt]) as recorder:
        found = forward(model, prompt)
    (run,) = recorder.runs()
    return run, found


@contextmanager
def by_hand(model: LoadedModel, family: str, part: str, layer: int, act: Any) -> Iterator[None]:
    """Calls ``act(values)`` on the part of one layer, written for each family; what it returns is used."""
    block = model.model.get_submodule(LAYERS.get(family, "model.layers"))[layer - 1]

    def after(_: Any, __: Any, out: Any) -> Any:
        several = isinstance(out, tuple)
        new = act(out[0] if several else out)
        return (new, *out[1:]) if several else new

    def entering(_: Any, given: Any) -> Any:
        return (act(given[0]), *given[1:])

    where = {"residual": "", "mlp-output": "mlp", "mlp-activation": ACT.get(family, "mlp.act_fn")}
    with ExitStack() as stack:
        if part == "attention-output":
            projection = block.get_submodule(OUTPUT.get(family, "self_attn.o_proj"))
            stack.callback(projection.register_forward_pre_hook(entering).remove)
        elif part == "keys-values":
            stack.enter_context(_with_keys(model, layer, act))
        else:
            stack.callback(block.get_submodule(where[part]).register_forward_hook(after).remove)
        yield


@contextmanager
def _with_keys(model: LoadedModel, layer: int, act: Any) -> Iterator[None]:
    module: Any = sys.modules[type(model.model).__module__]
    own, before = module.eager_attention_forward, model.model.config._attn_implementation

    def attend(of: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        if of.layer_idx + 1 == layer:
            key, value = (act(one.transpose(1, 2)).transpose(1, 2) for one in (key, value))
        return own(of, query, key, value, mask, **more)

    model.model.set_attn_implementation("eager")
    module.eager_attention_forward = attend
    try:
        yield
    finally:
        module.eager_attention_forward = own
        model.model.set_attn_implementation(before)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_patches_equal_hooks_written_by_hand(family: str, part: str) -> None:
    model = tiny(family, head=True)
    patch = Patch(part, layers=2, at="question,answer")
    if family == "gpt_oss" and part == "mlp-activation":
        with pytest.raises(UnsupportedArchitecture, match="layer 2 is a mixture of experts"):
            places_of(model.model, [patch]) and run_of(model, WITH, patch)
        return
    target = MOVED if part == "keys-values" else WITHOUT
    held: list[torch.Tensor] = []

    def keep(values: torch.Tensor) -> torch.Tensor:
        held.append(values.clone())
        return values

    with by_hand(model, family, part, 2, keep):
        forward(model, WITH)
    theirs = [at for at in range(len(WITH) + len(ANSWER)) if at >= len(WITH) or at in WITH.positions("question")]
    ours = [at for at in range(len(target) + len(ANSWER)) if at >= len(target) or at in target.positions("question")]
    taken = iter(held)

    def put(values: torch.Tensor) -> torch.Tensor:
        values, source = values.clone(), next(taken)
        values[:, ours] = source[:, theirs]
        return values

    with by_hand(model, family, part, 2, put):
        wanted = forward(model, target)
    run, _ = run_of(model, WITH, patch)
    base = forward(model, target)
    with patch_attached(model, [patch], [target], [run]):
        found = forward(model, target)
    close(found, wanted)
    assert float((base - wanted).abs().max()) > 1e-4
    assert torch.equal(forward(model, target), base)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_oss"])
def test_a_patch_of_everything_is_the_other_run_and_one_of_nothing_the_base(family: str) -> None:
    model = tiny(family, head=True)
    everything = Patch("residual")
    run, other = run_of(model, WITH, everything)
    with patch_attached(model, [everything], [WITHOUT], [run]):
        found = forward(model, WITHOUT)
    kept = [*WITH.original, *range(len(WITH), len(WITH) + len(ANSWER))]
    width = model.model.config.hidden_size
    assert torch.equal(found[0, :, :width], other[0, kept, :width])
    close(found[0], other[0, kept])
    base = forward(model, WITHOUT)
    with patch_attached(model, [], [WITHOUT], [run]):
        assert torch.equal(forward(model, WITHOUT), base)
    # Its own values change nothing, to the bit: recorded and put in where attention is computed alike.
    own = [Patch(part) for part in PARTS if (family, part) != ("gpt_oss", "mlp-activation")]
    mine, inside = run_of(model, WITHOUT, *own)
    with patch_attached(model, own, [WITHOUT], [mine]):
        assert torch.equal(forward(model, WITHOUT), inside)


def test_a_head_is_patched_alone() -> None:
    model = tiny("llama", head=True)
    width = model.model.config.hidden_size // 4
    patch = Patch("attention-output", layers="1", at="question", heads="2,4")
    run, _ = run_of(model, WITH, patch)
    inputs: dict[str, torch.Tensor] = {}
    projection = model.model.model.layers[0].self_attn.o_proj
    for name, prompt in (("base", WITHOUT), ("other", WITH)):
        with hooked(projection, lambda _, given, name=name: inputs.update({name: given[0].clone()})):
            forward(model, prompt)
    with (
        patch_attached(model, [patch], [WITHOUT], [run]),
        hooked(projection, lambda _, given: inputs.update(found=given[0].clone())),
    ):
        forward(model, WITHOUT)
    for head in range(4):
        at = slice(head * width, (head + 1) * width)
        ours, theirs = WITHOUT.positions("question"), WITH.positions("question")
        wanted = inputs["base"][0, :, at].clone()
        if head in (1, 3):
            wanted[ours] = inputs["other"][0, theirs, at]
        close(inputs["found"][0, :, at], wanted)


@contextmanager
def hooked(module: Any, hook: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_a_fillers_keys_put_into_a_prompt_without_it_are_the_filler(family: str) -> None:
    """With the keys and values of all layers, original tokens compute what they compute beside the filler itself."""
    model = tiny(family, head=True, **({} if family == "llama" else {"sliding_window": 64}))
    patch = Patch("keys-values", at="filler")
    run, other = run_of(model, WITH, patch)
    with patch_attached(model, [patch], [MOVED], [run]):
        found = forward(model, MOVED)
    kept = [*WITH.original, *range(len(WITH), len(WITH) + len(ANSWER))]
    close(found[0], other[0, kept])
    assert float((forward(model, MOVED)[0] - other[0, kept]).abs().max()) > 1e-3


def test_a_window_hides_keys_that_are_put_in() -> None:
    """Tokens further from the filler than the window do not see it."""
    model = tiny("mistral", head=True, sliding_window=4, num_hidden_layers=1)
    patch = Patch("keys-values", at="filler")
    run, _ = run_of(model, WITH, patch)
    with patch_attached(model, [patch], [MOVED], [run]):
        found = forward(model, MOVED)
    change = (found - forward(model, MOVED)).abs().amax(-1)[0]
    # The question begins right after the filler: its first three tokens are less than 4 places from it.
    first = WITHOUT.positions("question")[0]
    assert (change[first : first + 3] > 1e-4).all()
    assert float(change[:first].max()) == 0.0
    assert float(change[first + 3 :].max()) < 1e-6


def test_rows_of_a_batch_take_their_own_patches_and_runs() -> None:
    model = tiny("qwen2", head=True)
    patches = [Patch("mlp-output", layers=1, at="question"), Patch("attention-output", layers="2-", at="end,answer")]
    run, _ = run_of(model, WITH, *patches)
    base = forward(model, WITHOUT)
    alone: list[torch.Tensor] = []
    for patch in patches:
        with patch_attached(model, [patch], [WITHOUT], [run]):
            alone.append(forward(model, WITHOUT))
    ids = ids_of(WITHOUT).expand(3, -1)
    padded = torch.cat([ids, torch.zeros(3, 4, dtype=torch.long)], dim=1)
    mask = (torch.arange(padded.shape[1]) < ids.shape[1]).long().expand(3, -1)
    with patch_attached(model, patches, [WITHOUT] * 3, [run] * 3) as handle, torch.inference_mode():
        handle.rows([WITHOUT] * 3, [run] * 3, [[patches[0]], [], [patches[1]]])
        found = model.model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, : ids.shape[1]]
    for row, wanted in zip(found, (alone[0], base, alone[1]), strict=True):
        close(row, wanted[0, :, -found.shape[-1] :])
    # Several rows, left padding: one prompt a row.
    with patch_attached(model, patches[:1], [WITHOUT] * 2, [run] * 2), torch.inference_mode():
        left = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids[:2]], dim=1)
        real = (torch.arange(left.shape[1]) >= 4).long().expand(2, -1)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        found = model.model(input_ids=left, attention_mask=real, position_ids=positions, use_cache=False).logits
    close(found[1, 4:], alone[0][0, :, -found.shape[-1] :])


def test_generation_goes_on_from_a_patched_prompt() -> None:
    model = tiny("llama", head=True)
    patch = Patch("residual", layers=2, at="question,end")
    with recorded(model, places_of(model.model, [patch]), [WITH]) as recorder:
        forward(model, WITH, ())
    (run,) = recorder.runs()
    ids = ids_of(WITHOUT, ())
    with patch_attached(model, [patch], [WITHOUT], [run]), torch.inference_mode():
        made = model.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        step = ids
        for _ in range(6):
            logits = model.model(input_ids=step, use_cache=False).logits
            step = torch.cat([step, logits[:, -1:].argmax(-1)], dim=1)
    assert made.tolist() == step.tolist()
    with recorded(model, [("residual", 2)], [WITHOUT]) as recorder, torch.inference_mode():
        made = model.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    (run,) = recorder.runs()
    assert run.ids == tuple(made[0, :-1].tolist())
    assert run.of("residual", 2)[0].shape == (len(run.ids), model.model.config.hidden_size)


def test_an_answer_that_goes_another_way_takes_no_values() -> None:
    """With a cache too, where a forward holds one token: another token has no value in the other run."""
    model = tiny("llama", head=True)
    patch = Patch("residual", layers=2)
    run, _ = run_of(model, WITH, patch)
    ids = ids_of(WITHOUT, ())
    with patch_attached(model, [patch], [WITHOUT], [run]), torch.inference_mode():
        cache = model.model(input_ids=ids, use_cache=True).past_key_values
        model.model(input_ids=torch.tensor([ANSWER[:2]]), past_key_values=cache, use_cache=True)
        with pytest.raises(BadPrompt, match="the tokens after the prompt are not those of the other run"):
            model.model(input_ids=torch.tensor([[ANSWER[2] + 1]]), past_key_values=cache, use_cache=True)


def test_a_run_with_keys_put_in_is_recorded_without_them() -> None:
    model = tiny("llama", head=True)
    keys, every = Patch("keys-values", at="filler"), [("keys-values", layer) for layer in (1, 2, 3)]
    run, _ = run_of(model, WITH, keys)
    with patch_attached(model, [keys], [MOVED], [run]), recorded(model, every, [MOVED]) as recorder:
        forward(model, MOVED)
    (found,) = recorder.runs()
    kept = [*WITH.original, *range(len(WITH), len(WITH) + len(ANSWER))]
    for layer in (1, 2, 3):
        for ours, theirs in zip(found.of("keys-values", layer), run.of("keys-values", layer), strict=True):
            close(ours, theirs[kept])


def test_a_cut_and_a_patch_together() -> None:
    """The values of a cut run, put into the uncut one, are those of the cut run."""
    model = tiny("llama", head=True)
    everything = [Patch("attention-output"), Patch("mlp-output")]
    with cut_attached(model, [Cut("question,answer", "filler")], [WITH]):
        run, cut = run_of(model, WITH, *everything)
    with patch_attached(model, everything, [WITH], [run]):
        close(forward(model, WITH), cut)
    keys = Patch("keys-values", at="filler")
    run, _ = run_of(model, WITH, keys)
    with (
        cut_attached(model, [Cut("question", "system", heads=1)], [MOVED]),
        patch_attached(model, [keys], [MOVED], [run]),
        pytest.raises(BadStudy, match="cannot be joined with a cut by head"),
    ):
        forward(model, MOVED)
    with cut_attached(model, [Cut("question", "system")], [MOVED]), patch_attached(model, [keys], [MOVED], [run]):
        found = forward(model, MOVED)
    with cut_attached(model, [Cut("question", "system")], [WITH]):
        run, other = run_of(model, WITH, keys)
    kept = [*WITH.original, *range(len(WITH), len(WITH) + len(ANSWER))]
    close(found[0], other[0, kept])


OTHER = prompt_of(("start", 2), ("question", 6), seed=7)


@pytest.mark.parametrize(
    ("patch", "target", "why"),
    [
        (lambda: Patch("mlp"), WITHOUT, r"no part 'mlp' to patch"),
        (lambda: Patch("residual", heads=1), WITHOUT, "a patch of residual has no heads"),
        (lambda: Patch("residual", layers=4), WITHOUT, "no layer 4"),
        (lambda: Patch("attention-output", layers=4), WITHOUT, "no layer 4"),
        (lambda: Patch("attention-output", heads=5), WITHOUT, "no head 5"),
        (lambda: Patch("residual", at="filler"), WITHOUT, "'filler', which is not in both prompts"),
        (lambda: Patch("residual", at="system"), OTHER, "do not hold the same original tokens"),
        (
            lambda: Patch("keys-values", at="question"),
            WITHOUT,
            "is at position 6 here and at 11 under 'mless'; patch keys-values into",
        ),
        (lambda: Patch("residual", at="nowhere"), WITHOUT, "a patch's at: no span 'nowhere'"),
    ],
)
def test_bad_patches_are_refused_before_anything_runs(patch: Any, target: Prompt, why: str) -> None:
    model = tiny("llama", head=True)
    run = RecordedRun(WITH, None, len(WITH), {})
    with pytest.raises((BadStudy, BadPrompt), match=why), patch_attached(model, [patch()], [target], [run]):
        pass


def test_a_span_the_prompt_lacks_and_runs_that_do_not_fit() -> None:
    model = tiny("llama", head=True)
    patch = Patch("residual", layers=1, at="question")
    bare = replace(prompt_of(("start", 2), ("end", 3), condition="none"))
    run, _ = run_of(model, bare, patch)
    lacks = "names at = 'question', but the prompt has no such span; it has: start, end"
    with pytest.raises(BadPrompt, match=lacks), patch_attached(model, [patch], [bare], [run]):
        pass
    run, _ = run_of(model, WITH, patch)
    with (
        pytest.raises(BadPrompt, match="2 prompts are to take values from 1 runs"),
        patch_attached(model, [patch], [WITHOUT] * 2, [run]),
    ):
        pass
    with (
        pytest.raises(BadStudy, match="recorded without residual of layer 2"),
        patch_attached(model, [Patch("residual", layers="1-2")], [WITHOUT], [run]),
    ):
        pass
    with (
        pytest.raises(BadPrompt, match="the tokens after the prompt are not those of the other run"),
        patch_attached(model, [Patch("residual", layers=1)], [WITHOUT], [run]),
    ):
        forward(model, WITHOUT, (1, 2, 3))
    with recorded(model, [("residual", 1)], [WITH]) as recorder, pytest.raises(BadStudy, match="nothing was recorded"):
        recorder.runs()


def test_families_without_the_part_are_refused_by_name() -> None:
    from models import walking

    opt = walking.build("opt")
    with (
        pytest.raises(UnsupportedArchitecture, match="layer 1 has no MLP as a part of its own"),
        recorded(opt, [("mlp-output", 1)], [WITH]),
    ):
        pass


def test_keys_that_are_put_in_are_no_tokens_to_receive() -> None:
    model = tiny("llama")
    run, _ = run_of(tiny("llama", head=True), WITH, patch := Patch("keys-values", at="filler"))
    with (
        patch_attached(model, [patch], [MOVED], [run]),
        pytest.raises(UnsupportedArchitecture, match="attends from 15 queries to 20 keys"),
    ):
        list(received(model, [MOVED]))
