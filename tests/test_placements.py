"""The table of placements in docs/method.md: made by a script that checks every prompt it shows."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mless.models import LoadedModel
from mless.values import PLACEMENTS
from spelling import CHATML, NO_SYSTEM, TRIMS, byte_level, with_a_prefix

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "make_placements.py"
TOKENIZERS = os.environ.get("MLESS_TOKENIZERS")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("make_placements", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = {
    "bytes": lambda: byte_level(CHATML),
    "bytes, trimmed offsets": lambda: byte_level(CHATML, bos=True, trim_offsets=True),
    "a template that trims": lambda: byte_level(TRIMS),
    "a template without a system role": lambda: byte_level(NO_SYSTEM),
    "a blank before every text": lambda: with_a_prefix(CHATML),
    "no template": byte_level,
}


@pytest.mark.parametrize("name", SMALL)
def test_every_placement_is_as_documented_for_small_tokenizers(script: Any, name: str) -> None:
    tokenizer = SMALL[name]()
    kinds = ["raw", "chat"] if tokenizer.chat_template else ["raw"]
    made = list(script.rows(tokenizer))  # it raises where one is not
    assert [(row.kind, row.placement) for row in made] == [(kind, place) for kind in kinds for place in PLACEMENTS]


def test_every_placement_is_as_documented_for_the_embedded_model(script: Any, embedded: LoadedModel) -> None:
    page = SCRIPT.with_name("method.md").read_text(encoding="utf-8")
    for row in script.rows(embedded.tokenizer):
        assert f"| {row.kind} | `{row.placement}` | {script._code(row.shown)} |" in page.partition("**SmolLM2**")[2]


@pytest.mark.parametrize(
    ("kind", "placement", "before", "after"),
    [
        ("raw", "before-question", "Reason step by step.\n", "What is 1 + 1?"),
        ("chat", "end", "What is 1 + 1?<e><a>", ""),
        ("chat", "before-answer", "What is 1 + 1?", "<e><a>"),
        ("raw", "anywhere", "Reason step by step.", "\nWhat is 1 + 1?"),
        ("raw", "before-system", "Reason", " step by step.\nWhat is 1 + 1?"),
    ],
)
def test_a_prompt_that_is_not_as_documented_is_found_out(
    script: Any, kind: str, placement: str, before: str, after: str
) -> None:
    with pytest.raises(SystemExit, match=f"{kind}, {placement}: not as documented"):
        script._check_place(kind, placement, before, after)


@pytest.mark.slow
@pytest.mark.skipif(
    not TOKENIZERS, reason="MLESS_TOKENIZERS names no folder of tokenizers; docs/make_placements.py says what it holds"
)
@pytest.mark.filterwarnings("ignore")
def test_the_page_has_what_the_published_tokenizers_give(script: Any) -> None:
    assert script.page(Path(TOKENIZERS or "")) == script.PAGE.read_text(encoding="utf-8")
