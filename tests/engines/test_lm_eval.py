"""Distance to lm-evaluation-harness: the same model and prompts through its HF backend. Needs lm-eval: make test-lm-eval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mless.engines.base import Decoding, Request
from mless.engines.hf import HfEngine
from mless.models import LoadedModel, load, locate
from mless.prompting import build_prompts, shared_beginning
from mless.tasks import TASK_RULES, Grader, arithmetic, extract
from mless.values import Condition, Item, Prompt

# lm-eval and what it brings warn of one another, differently with each version; warnings of mless stay errors.
pytestmark = [pytest.mark.lmeval, pytest.mark.filterwarnings("ignore", "error:::mless.*")]

NEW_TOKENS = 32
TASK = "mless_arithmetic"
#: So asked, the embedded model ends most answers by itself, and some are right and some are wrong.
NONE = Condition("none", "none", system="You are a calculator. Reply with just the result.")
#: Two tokens whose logits are nearer than this may change places when sums are added up in another order.
TIE = 1e-3
#: The last number, as lm-eval's own tasks find it: a pattern, all matches, the last of them.
LAST_NUMBER = r"(-?\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Answer:
    """What either side made of an item."""

    token_ids: tuple[int, ...]
    text: str
    extracted: str | None
    correct: bool


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return arithmetic(32)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("smollm2", dtype="float32", device="cpu", head=True)


@pytest.fixture(scope="module")
def prompts(model: LoadedModel, items: Sequence[Item]) -> list[Prompt]:
    return list(build_prompts(model.tokenizer, items, NONE, kind="chat"))


@pytest.fixture(scope="module")
def ours(model: LoadedModel, items: Sequence[Item], prompts: Sequence[Prompt]) -> dict[str, Answer]:
    return by_mless(model, items, prompts)


@pytest.fixture(scope="module")
def theirs(
    items: Sequence[Item], prompts: Sequence[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answer]:
    return by_lm_eval(items, prompts, tmp_path_factory.mktemp("task"))


def by_mless(model: LoadedModel, items: Sequence[Item], prompts: Sequence[Prompt]) -> dict[str, Answer]:
    """The answers of the hf engine, found and graded as in a study."""
    requests = [
        Request("none", prompt.item, token_ids=prompt.token_ids, shared=shared_beginning(prompt, NONE))
        for prompt in prompts
    ]
    length = max(len(prompt) for prompt in prompts) + NEW_TOKENS
    with HfEngine(model, length=length, slots=8) as engine:
        replies = {reply.item: reply for reply in engine.generate(requests, Decoding(max_new_tokens=NEW_TOKENS))}
    found = {item: extract(reply.text, TASK_RULES["arithmetic"]) for item, reply in replies.items()}
    with Grader() as grader:
        grades = {item.id: grader.grade(found[item.id], item.answer or "") for item in items}
    return {
        item: Answer(reply.token_ids, reply.text, found[item].text, grades[item].correct)
        for item, reply in replies.items()
    }


def by_lm_eval(items: Sequence[Item], prompts: Sequence[Prompt], folder: Path) -> dict[str, Answer]:
    """The answers of lm-eval's HF backend on a task of its own, written into `folder`; the tokens it saw must be ours."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    seen: dict[tuple[int, ...], tuple[int, ...]] = {}

    class Overheard(HFLM):
        """lm-eval keeps texts only; what goes into the model and comes out of it is noted on the way."""

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **others: Any) -> Any:
            made = super()._model_generate(context, max_length, stop, **others)
            (row,), (whole,) = context.tolist(), made.tolist()
            seen[tuple(row)] = tuple(whole[len(row) :])
            return made

    write_task(items, prompts, folder)
    backend = Overheard(
        pretrained=str(locate("smollm2").folder),
        dtype="float32",
        device="cpu",
        batch_size=1,
        add_bos_token=False,  # the prompts are rendered already, special tokens and all
    )
    results = simple_evaluate(
        model=backend,
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert results is not None
    samples = {sample["doc"]["item"]: sample for sample in results["samples"][TASK]}
    assert {prompt.token_ids for prompt in prompts} == set(seen), "lm-eval gave the model other tokens than mless does"
    answers: dict[str, Answer] = {}
    for prompt in prompts:
        sample = samples[prompt.item]
        text, extracted = sample["resps"][0][0], sample["filtered_resps"][0]
        answers[prompt.item] = Answer(seen[prompt.token_ids], text, extracted, bool(sample["exact_match"] == 1))
    assert results["results"][TASK]["exact_match,last-number"] == pytest.approx(
        sum(answer.correct for answer in answers.values()) / len(answers)
    )
    return answers


def write_task(items: Sequence[Item], prompts: Sequence[Prompt], folder: Path) -> None:
    """A generate_until task: JSON is YAML."""
    data = folder / "items.jsonl"
    rows = [
        {"item": item.id, "prompt": prompt.text, "answer": item.answer}
        for item, prompt in zip(items, prompts, strict=True)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": NEW_TOKENS},
        "filter_list": [
            {
                "name": "last-number",
                "filter": [
                    {"function": "regex", "regex_pattern": LAST_NUMBER, "group_select": -1},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task))


def gap(model: LoadedModel, prompt: Prompt, one: Sequence[int], other: Sequence[int]) -> float:
    """How far apart the logits of the two tokens are where two answers to a prompt part."""
    same = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    ids = torch.tensor([[*prompt.token_ids, *one[:same]]])
    with torch.inference_mode():
        logits = model.model(ids).logits[0, -1]
    return abs(float(logits[one[same]] - logits[other[same]]))


def test_tokens_and_texts_are_those_of_lm_eval_but_for_ties(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    ours: dict[str, Answer],
    theirs: dict[str, Answer],
    capsys: pytest.CaptureFixture[str],
):
    parted = {
        prompt.item: gap(model, prompt, ours[prompt.item].token_ids, theirs[prompt.item].token_ids)
        for prompt in prompts
        if ours[prompt.item].token_ids != theirs[prompt.item].token_ids
    }
    with capsys.disabled():
        print(
            f"\n{len(prompts) - len(parted)} of {len(prompts)} answers have lm-eval's tokens; gaps of others: {parted}"
        )
    assert all(tie < TIE for tie in parted.values()), parted
    assert len(parted) <= len(prompts) // 8, "so many ties are none"
    same = [item for item in ours if item not in parted]
    assert {item: ours[item].text for item in same} == {item: theirs[item].text for item in same}


def test_where_decoding_is_identical_every_item_has_the_same_result(ours: dict[str, Answer], theirs: dict[str, Answer]):
    same = [item for item in ours if ours[item].token_ids == theirs[item].token_ids]
    assert {item: ours[item].correct for item in same} == {item: theirs[item].correct for item in same}
    assert any(len(ours[item].token_ids) < NEW_TOKENS for item in same), "no answer ended by itself"
    right = sum(ours[item].correct for item in same)
    assert 0 < right < len(same), "all right or all wrong: that would agree whatever the grading did"


def test_another_token_is_no_tie(model: LoadedModel, prompts: Sequence[Prompt], theirs: dict[str, Answer]):
    made = theirs[prompts[0].item].token_ids
    assert gap(model, prompts[0], made, (*made[:1], made[1] + 1, *made[2:])) > 1000 * TIE
