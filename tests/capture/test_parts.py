"""Long prompts run part by part with a cache, and give what they give whole."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModel

from mless.capture import received
from mless.errors import BadStudy, UnsupportedArchitecture
from mless.values import Prompt
from tiny import FAMILIES, prompt_of, tiny, wrapped

LONG = prompt_of(("system", 12), ("filler", 30), ("question", 48))
SHORT = prompt_of(("system", 5), ("question", 9), item="2", condition="none")


#: A third of them, every family and every part among them.
SPLIT = [
    pytest.param(family, part, LONG, marks=[] if (n + m) % 3 == 0 else pytest.mark.slow)
    for (n, family), (m, part) in itertools.product(enumerate(FAMILIES), enumerate((7, 32, 89)))
]


@pytest.mark.parametrize(("family", "part", "prompt"), [("llama", 1, SHORT), *SPLIT])
def test_parts_add_up_to_the_whole(family: str, part: int, prompt: Prompt) -> None:
    model = tiny(family)
    whole, joined = next(received(model, [prompt])), next(received(model, [prompt], part=part))
    assert np.array_equal(joined.n, whole.n)
    for name in ("received", "uniform", "mass"):
        np.testing.assert_allclose(getattr(joined, name), getattr(whole, name), rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [[1], [2]])
def test_only_some_layers_and_heads(family: str, layers: list[int]) -> None:
    """Later layers do not run, so their cache stays empty in every part."""
    model = tiny(family)
    chosen: dict[str, Any] = {"layers": layers, "heads": [1, 3]}
    whole, joined = next(received(model, [LONG], **chosen)), next(received(model, [LONG], part=20, **chosen))
    np.testing.assert_allclose(joined.received, whole.received, rtol=0, atol=2e-6)


def test_a_long_prompt_among_short_ones_runs_alone_and_in_its_place() -> None:
    model = tiny("qwen2")
    prompts = [SHORT, LONG, SHORT, SHORT]
    apart = [next(received(model, [prompt])) for prompt in prompts]
    together = list(received(model, prompts, batch_size=4, part=40))
    assert [one.prompt for one in together] == prompts
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one.received, other.received, rtol=0, atol=2e-6)


def test_a_part_of_nothing_is_refused() -> None:
    with pytest.raises(BadStudy, match="a part has at least 1 token, got 0; leave part out"):
        next(received(tiny("llama"), [LONG], part=0))


def test_a_model_that_keeps_nothing_between_parts_is_refused() -> None:
    config = AutoConfig.for_model("openai-gpt", vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    model = wrapped(AutoModel.from_config(config).eval(), "openai-gpt")
    with pytest.raises(
        UnsupportedArchitecture, match=r"has 40 keys after 80 tokens.*give part=… at least the prompt's length"
    ):
        next(received(model, [LONG], part=40))


def test_a_model_that_keeps_more_than_keys_is_refused() -> None:
    config = AutoConfig.for_model(
        "lfm2", vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, layer_types=["conv", "full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = wrapped(AutoModel.from_config(config).eval(), "lfm2")
    assert next(received(model, [LONG])).layers == [2]
    with pytest.raises(
        UnsupportedArchitecture, match=r"keeps more than keys and values between the parts.*part=90 or more"
    ):
        next(received(model, [LONG], part=40))


@pytest.mark.parametrize(
    ("said", "refused"),
    [("The size of tensor a (0) must match the size of tensor b (11)", True), ("CUDA out of memory", False)],
)
def test_only_what_a_missing_state_looks_like_is_taken_for_it(
    said: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RecurrentGemma fails as the first does: its state is no cache."""
    model = tiny("llama")

    forward, ran = model.model.layers[1].mlp.forward, []

    def broken(x: Any) -> Any:
        ran.append(x.shape[1])
        if len(ran) > 1 or not refused:
            raise RuntimeError(said)
        return forward(x)

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", broken)
    with pytest.raises(
        UnsupportedArchitecture if refused else RuntimeError,
        match=r"keeps more than keys and values.*part=90 or more" if refused else "^CUDA out of memory$",
    ):
        next(received(model, [LONG], part=40))


@pytest.mark.parametrize(
    ("kind", "more", "part"),
    [
        ("dynamic", {"factor": 2.0}, 60),
        ("longrope", {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "factor": 4.0}, 20),
    ],
)
def test_keys_that_a_long_prompt_turns_otherwise_are_refused(kind: str, more: dict[str, Any], part: int) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 50} | more
    model = tiny("llama", rope_parameters=rope)
    with pytest.raises(BadStudy, match=rf"in prompts of more than 50 tokens \({kind}\).*give part=90 or more"):
        next(received(model, [LONG], part=part))
