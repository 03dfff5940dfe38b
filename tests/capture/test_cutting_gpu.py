"""Cuts on a GPU: the same as on a CPU, and a row the same alone and in a batch."""

from __future__ import annotations

import pytest
import torch

from mless.capture.cutting import cut_attached, serves
from mless.capture.seam import Change, changing
from mless.changes import Cut
from mless.intervening import prove_cuts
from tiny import prompt_of, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPT = prompt_of(("start", 2), ("system", 40), ("filler", 55), ("question", 60), ("end", 3))
CUTS = [Cut("question,answer", "filler"), Cut("answer", "question", layers=2)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "mistral", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proofs_hold(family: str, dtype: torch.dtype) -> None:
    prove_cuts(tiny(family, head=True, dtype=dtype).model.cuda(), CUTS, PROMPT)


def test_runs_are_one_call_of_flash_attention_and_equal_a_mask_for_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen2", head=True, dtype=torch.bfloat16, hidden_size=256).model.cuda()
    ids = torch.tensor([[*PROMPT.token_ids, *range(10, 20)]] * 3, device="cuda")
    served: list[bool] = []

    class Watch(Change):
        def before(self, call):
            served.append(serves(call, call.mask.base))
            return call

    with cut_attached(model, CUTS, [PROMPT] * 3) as handle, changing(model, Watch()), torch.inference_mode():
        found = model(input_ids=ids, use_cache=False).logits
        handle.rows([PROMPT])
        alone = model(input_ids=ids[:1], use_cache=False).logits
        handle.rows([PROMPT] * 3)
        monkeypatch.setattr("mless.capture.cutting.serves", lambda *_: False)
        wanted = model(input_ids=ids, use_cache=False).logits
    assert all(served)
    assert served
    assert torch.equal(found[0], found[2])
    assert float((found - wanted).float().norm() / wanted.float().norm()) < 2e-2
    assert float((found[:1] - alone).float().norm() / alone.float().norm()) < 2e-2
