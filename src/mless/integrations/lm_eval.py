"""The model `mless` of lm-evaluation-harness: its own Hugging Face backend, with a condition's filler in the prompt and ARM in the model.

    python -m mless.integrations.lm_eval --model mless --model_args pretrained=…,condition=mless,length=55,arm_c=0.13 --tasks …

is lm-eval's own command with this model registered; importing this module registers it for `simple_evaluate(model="mless", …)`. With
condition none and no ARM the backend is unchanged, so its numbers are those of `hf`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from mless.errors import BadPrompt, BadStudy, EngineFault, MlessError
from mless.integrations.filling import Places, fill, filler_ids, find_places, key_of, needed, recorded, take_condition
from mless.results.escaping import visible
from mless.values import Condition


def _of_lm_eval(module: str) -> Any:
    """Typed loosely: lint must pass where lm-eval is not installed."""
    try:
        return needed(f"lm_eval.{module}", "lm-eval", "lm-evaluation-harness")
    except EngineFault as fault:
        if __name__ != "__main__":
            raise
        _fail(fault)


def _fail(fault: MlessError) -> NoReturn:
    print(f"mless: {visible(' '.join(str(fault).splitlines()), keep='')}", file=sys.stderr)
    sys.exit(2)


_Backend: Any = _of_lm_eval("models.huggingface").HFLM
_register: Any = _of_lm_eval("api.registry").register_model
WHO = "the lm-eval model 'mless'"


@_register("mless")
class MlessLM(_Backend):
    """`HFLM` under a condition. Its own arguments are `condition`, `filler`, `length`, `placement`, `condition_seed` and ARM's, as arm_c.

    Every other argument is the backend's. Without a chat template the whole context is the question; with one it is the last user message.
    """

    def __init__(self, pretrained: Any, *, condition_seed: int = 0, **options: Any) -> None:
        self.condition: Condition = take_condition(options, WHO)
        _refuse(self.condition)
        self._seed = condition_seed
        self._inserts = self.condition.inserts
        self._places: dict[str, Places] = {}
        self._inputs: set[tuple[int, ...]] = set()
        self._arm: Any = None
        super().__init__(pretrained=_located(pretrained), **options)
        if self.backend != "causal":
            raise BadStudy(f"{WHO} takes decoders only, got the backend {self.backend!r}; use lm-eval's own model hf")
        if self._inserts:
            filler_ids(
                self.tokenizer, self.condition, 0, ""
            )  # a filler that this tokenizer splits is refused before any item is asked
        if self.condition.arm is not None:
            from mless.redistribution import ArmHandle

            self._arm = ArmHandle(self.model, self.condition.arm)
            # A model passed in outlives this object and must not keep ARM. At the interpreter's end it is no longer used.
            weakref.finalize(self, self._arm.detach).atexit = False

    def detach_arm(self) -> None:
        """Take ARM out of the model now. For a model that was passed in this also happens when this object is deleted."""
        if self._arm is not None:
            self._arm.detach()
            self._arm = None

    def get_model_info(self) -> dict[str, Any]:
        """With the condition as it was resolved: `mless import` reads it from lm-eval's results."""
        return {**super().get_model_info(), "mless_condition": recorded(self.condition)}

    # ---- prompts -----------------------------------------------------------------------------------------------------------

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """As the backend renders it; where the question stands in it is remembered."""

        def render(messages: list[dict[str, Any]]) -> str:
            return super(MlessLM, self).apply_chat_template(messages, add_generation_prompt)

        rendered = render(chat_history)
        if self._inserts and rendered not in self._places:
            self._places[rendered] = find_places(render, chat_history, rendered)
        return rendered

    def _filled(self, context: str, ids: Sequence[int], shown: str | None = None) -> tuple[int, ...]:
        """The ids of a context with the filler among them; `shown` is the context before blanks were taken from its end."""
        places = self._places.get(context if shown is None else shown)
        if places is None and self.condition.placement != "before-answer":
            bare = context.removeprefix(self.tokenizer.bos_token or "")
            if special := next((one for one in self.tokenizer.all_special_tokens if one in bare), None):
                raise BadPrompt(
                    f"{WHO}: a prompt holds {special!r}, so a chat template made it, but not in this run: where its question begins is not known; "
                    "run without --cache_requests, or use placement=before-answer"
                )
        return fill(
            self.tokenizer, context, ids, places, self.condition, seed=self._seed, key=key_of(context)
        ).token_ids

    # ---- generate_until ----------------------------------------------------------------------------------------------------

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The backend's ids of each context with filler among them, padded; the mask says what is padding, and positions follow from it."""
        if not self._inserts:
            return super().tok_batch_encode(list(strings), padding_side, left_truncate_len, truncation)
        rows: list[tuple[int, ...]] = []
        for text in strings:
            ids, _ = super().tok_batch_encode([text], padding_side, None, truncation)
            rows.append(self._filled(text, ids[0].tolist()))
            if left_truncate_len and len(rows[-1]) > left_truncate_len:
                raise BadPrompt(
                    f"{WHO}: a prompt is {len(rows[-1])} tokens with its filler, but only {left_truncate_len} leave room for the answer; "
                    "use a shorter filler, or a smaller max_gen_toks"
                )
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for n, row in enumerate(rows):
            where = slice(width - len(row), width) if padding_side == "left" else slice(0, len(row))
            ids[n, where] = torch.tensor(row)
            mask[n, where] = 1
        return ids, mask

    # ---- loglikelihood -----------------------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """A text's own likelihood has no question to put filler before, so with filler it is refused."""
        if self._inserts:
            raise BadStudy(
                f"{WHO}: loglikelihood_rolling (perplexity of a whole text) has no question, so condition {self.condition.name!r} has no place for its "
                "filler; use condition none, or ARM alone"
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **options: Any) -> list[tuple[float, bool]]:
        if self._inserts:
            requests = [self._with_filler(*request) for request in requests]
        if self._arm is not None:
            window = self.max_length + 1
            self._inputs = {tuple((context + scored)[-window:][:-1]) for _, context, scored in requests}
        return super()._loglikelihood_tokens(requests, **options)

    def _with_filler(
        self, pair: tuple[str, str], context: list[int], scored: list[int]
    ) -> tuple[Any, list[int], list[int]]:
        # As the backend has it: blanks at a context's end are scored with what follows, and no context is the model's first token.
        text = pair[0].rstrip()
        if text:
            filled = list(self._filled(text, context, pair[0]))
        else:
            (start,) = context
            filled = [
                start,
                *fill(self.tokenizer, "", (), None, self.condition, seed=self._seed, key=key_of("")).token_ids,
            ]
        if len(filled) + len(scored) > self.max_length + 1:
            raise BadPrompt(
                f"{WHO}: a prompt and its continuation are {len(filled) + len(scored)} tokens with filler, but the model takes {self.max_length}, and "
                "cutting them would cut the filler; use a shorter filler"
            )
        return pair, filled, scored

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """The backend gives no mask, as padding on the right changes no earlier token. ARM's wider scopes count tokens, so they get one."""
        arm = self.condition.arm
        if self._arm is None or arm is None or arm.scope == "token" or attn_mask is not None or len(inps) == 1:
            return super()._model_call(inps, attn_mask, labels)
        mask = torch.zeros_like(inps)
        for n, row in enumerate(inps.tolist()):
            mask[n, : self._length_of(row)] = 1
        precision = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=precision, enabled=precision is not None):
            return self.model(input_ids=inps, attention_mask=mask).logits

    def _length_of(self, row: list[int]) -> int:
        """How many of a row's tokens are real. The backend pads with zeros and does not say; the request does."""
        bare = len(row)
        while bare and row[bare - 1] == 0:
            bare -= 1
        return next((n for n in range(bare, len(row) + 1) if tuple(row[:n]) in self._inputs), len(row))


def _refuse(condition: Condition) -> None:
    if condition.of_kind.moves or condition.hidden:
        raise BadStudy(
            f"{WHO}: condition {condition.name!r} changes positions or attention, which lm-eval's backend cannot do; use mless run accuracy, or "
            "the Inspect provider mless"
        )
    if condition.system is not None or condition.question is not None:
        raise BadStudy(
            f"{WHO}: condition {condition.name!r} is another wording, which is up to lm-eval: use --system_instruction, or another task"
        )


def _located(pretrained: Any) -> Any:
    """The embedded model by its name here; everything else as the backend takes it."""
    if not isinstance(pretrained, str):
        return pretrained
    from mless.models.locating import EMBEDDED, locate

    return str(locate(pretrained).folder) if pretrained in EMBEDDED else pretrained


def main() -> None:
    """lm-eval's own command, which now knows the model `mless`; a fault of the user's is one line and exit code 2."""
    try:
        _of_lm_eval("__main__").cli_evaluate()
    except MlessError as fault:
        _fail(fault)


if __name__ == "__main__":
    main()
