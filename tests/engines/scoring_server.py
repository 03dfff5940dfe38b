"""A server on the loopback that gives log-probabilities of given text, computed by a real model, as vLLM's server writes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch

from engines.faulty_proxy import Answer, Asked

#: Changes the fields of an answer: how a server goes wrong.
Spoil = Callable[[dict[str, Any]], None]


def log_probabilities(model: Any, ids: list[int]) -> list[float]:
    """log p of every token but the first, one row, softmax in fp32."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def echoing(model: Any, tokenizer: Any = None, spoil: Spoil | None = None) -> Callable[[Asked], Answer]:
    """Answers of ``/completions`` with ``echo`` and ``logprobs``. Texts of tokens are given where there is a tokenizer."""
    lock = threading.Lock()

    def answer(asked: Asked) -> Answer:
        if asked.method == "GET":
            return Answer(body=json.dumps({"data": [{"id": "tiny"}]}).encode())
        if asked.path != "/v1/completions":
            return Answer(404, b'{"error": {"message": "Not Found"}}')
        body = asked.json
        assert (body["echo"], body["logprobs"], body["temperature"]) == (True, 1, 1.0)
        ids = body["prompt"]
        with lock:
            known = log_probabilities(model, ids)
            texts = None if tokenizer is None else [tokenizer.decode([one]) for one in (*ids, ids[-1])]
        drawn = [-0.5] * body["max_tokens"]
        fields = {"token_logprobs": [None, *known, *drawn], "tokens": texts}
        choice = {"index": 0, "text": "", "logprobs": fields, "finish_reason": "length"}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(drawn)}
        whole = {"choices": [choice], "usage": usage, "system_fingerprint": "fp-7"}
        if spoil is not None:
            spoil(whole)
        return Answer(body=json.dumps(whole).encode())

    return answer


def _logprobs(whole: dict[str, Any]) -> dict[str, Any]:
    return whole["choices"][0]["logprobs"]


def ignore_echo(whole: dict[str, Any]) -> None:
    """As llama.cpp's server does: log-probabilities of what it drew, as a chat has them."""
    whole["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": -0.5}]}


def give_no_logprobs(whole: dict[str, Any]) -> None:
    whole["choices"][0]["logprobs"] = None


def make_other_tokens(whole: dict[str, Any]) -> None:
    """Two more tokens than were sent."""
    fields, usage = _logprobs(whole), whole["usage"]
    fields["token_logprobs"] = [None, -1.0, *fields["token_logprobs"][1:], -1.0]
    fields["tokens"], usage["prompt_tokens"] = None, usage["prompt_tokens"] + 2


def add_a_bos(whole: dict[str, Any]) -> None:
    """As many log-probabilities as for the tokens that were sent and one drawn, but one of them is that of a BOS token."""
    fields, usage = _logprobs(whole), whole["usage"]
    fields["token_logprobs"] = [None, -1.0, *fields["token_logprobs"][1:-1]]
    fields["tokens"], usage["prompt_tokens"] = None, usage["prompt_tokens"] + 1


def give_nulls(whole: dict[str, Any]) -> None:
    fields = _logprobs(whole)
    fields["token_logprobs"] = [None] * (len(fields["token_logprobs"]) - 1) + [-0.5]


def give_zero_probability(whole: dict[str, Any]) -> None:
    _logprobs(whole)["token_logprobs"][-2] = -9999.0
