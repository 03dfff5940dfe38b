"""Long prompts run part by part with a cache, and give what they give whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mless.capture import received
from mless.errors import BadStudy
from tiny import FAMILIES, prompt_of, tiny

LONG = prompt_of(("system", 12), ("filler", 30), ("question", 48))
SHORT = prompt_of(("system", 5), ("question", 9), item="2", condition="none")


@pytest.mark.parametrize(("family", "part"), [("llama", 1), *itertools.product(FAMILIES, (7, 32, 89))])
def test_parts_add_up_to_the_whole(family: str, part: int) -> None:
    model = tiny(family)
    whole, joined = next(received(model, [LONG])), next(received(model, [LONG], part=part))
    assert np.array_equal(joined.n, whole.n)
    for name in ("received", "uniform", "mass"):
        np.testing.assert_allclose(getattr(joined, name), getattr(whole, name), rtol=0, atol=2e-6, err_msg=name)


def test_only_some_layers_and_heads() -> None:
    model = tiny("llama")
    chosen = {"layers": [2], "heads": [1, 3]}
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
