"""Distance to lm-evaluation-harness: its own log-likelihoods of the texts that a likelihood study scores. Needs lm-eval: make test-lm-eval."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from heard import Heard
from mless.models import locate
from mless.models.tokenizers import open_tokenizer
from mless.results.folder import ResultFolder
from mless.study import load_study, run_study

# lm-eval and what it brings warn of one another, differently with each version; warnings of mless stay errors.
pytestmark = [pytest.mark.lmeval, pytest.mark.filterwarnings("ignore", "error:::mless.*")]

#: fp32 sums in another order.
RELATIVE = 1e-5
TEXTS, OPTIONS = "mless_texts", "mless_options"
CONDITIONS = ("none", "mless")
#: Texts that have the same tokens by themselves as behind the prompt: each begins where the tokenizer splits anyway.
SUMS = [
    {
        "question": f"What is {n} + {n + 10}?",
        "answer": str(2 * n + 10),
        "solution": f"Add {n} and {n + 10}, digit by digit.\nThat makes\n\\boxed{{{2 * n + 10}}}",
    }
    for n in (3, 18, 240)
]
#: The embedded model takes some of the right ones.
RIGHT_OR_WRONG: list[dict[str, Any]] = [
    {"question": "Which of these is red?", "choices": ["a leaf", "a ripe tomato", "the sky"], "answer": "B"},
    {"question": "What do bees make?", "choices": ["honey", "silk", "wool", "milk"], "answer": "A"},
    {"question": "Which of these is largest?", "choices": ["an ant", "a mouse", "an elephant"], "answer": "C"},
    {"question": "What is frozen water called?", "choices": ["steam", "ice", "a puddle"], "answer": "B"},
]

#: Condition, item, and what of it: a candidate's number, or a metric's name.
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Scored:
    """A text behind its context, and the sum of its tokens' log-probabilities as mless has it."""

    key: Key
    context: str
    text: str
    context_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logp: float

    @property
    def moved(self) -> str:
        """Blanks at the context's end. lm-eval counts them as part of what it scores."""
        return self.context[len(self.context.rstrip()) :]


@dataclass(frozen=True)
class Theirs:
    """What lm-eval found: the log-likelihood of each pair of texts, the tokens it took them for, and its samples of each task."""

    logp: Mapping[tuple[str, str], float]
    tokens: Mapping[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]

    def of(self, one: Scored) -> float:
        """The text alone: without the blanks before it, which it was asked for by themselves."""
        return self.logp[one.context, one.text] - (self.logp[one.context, ""] if one.moved else 0.0)


@pytest.fixture(scope="module", params=["chat", "raw"])
def tables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    """A likelihood study of the embedded model in fp32."""
    folder = tmp_path_factory.mktemp("likelihood")
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in SUMS + RIGHT_OR_WRONG))
    chosen = {"model": "smollm2", "dtype": "float32", "device": "cpu", "prompt": request.param, "length": 9}
    spec = load_study(
        "likelihood",
        {**chosen, "data": str(data), "conditions": list(CONDITIONS)},
        ["likelihood.others=2", "likelihood.again=false"],
    )
    run_study(spec, folder / "r", Heard())
    names = ("prompts", "scores", "tokens", "candidates")
    return {name: pl.DataFrame(ResultFolder(folder / "r").read_table(name)) for name in names}


@pytest.fixture(scope="module")
def ours(tables: dict[str, pl.DataFrame]) -> list[Scored]:
    return list(scored(tables))


@pytest.fixture(scope="module")
def theirs(ours: Sequence[Scored], tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    return by_lm_eval(ours, tmp_path_factory.mktemp("tasks"))


def scored(tables: Mapping[str, pl.DataFrame]) -> Iterator[Scored]:
    """Every text that the study scored, with the tokens it was scored as."""
    tokenizer = open_tokenizer("smollm2")

    def encoded(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)

    for prompt in tables["prompts"].iter_rows(named=True):
        condition, item, context = prompt["condition"], prompt["item"], prompt["text"]
        before = tuple(prompt["token_ids"])
        own = {name: table.filter(condition=condition, item=item) for name, table in tables.items()}
        for row in own["candidates"].iter_rows(named=True):
            name = f"{row['role']} {row['number']}"
            yield Scored((condition, item, name), context, row["text"], before, encoded(row["text"]), row["logp"])
        values = dict(own["scores"].select("metric", "value").iter_rows())
        if "solution" in values:
            given = SUMS[int(item) - 1]
            ids = tuple(own["tokens"]["token"])
            total = float(own["tokens"]["logp"].sum())
            solution = Scored((condition, item, "solution"), context, given["solution"], before, ids, total)
            assert values["solution"] == pytest.approx(solution.logp / len(ids), rel=1e-12)
            yield solution
            # lm-eval is given the reasoning as part of the context.
            answer = f"\\boxed{{{given['answer']}}}"
            reasoning = given["solution"].removesuffix(answer)
            yield Scored(
                (condition, item, "answer-after-solution"),
                context + reasoning,
                answer,
                before + encoded(reasoning),
                encoded(answer),
                values["answer-after-solution"],
            )


def by_lm_eval(ours: Sequence[Scored], folder: Path) -> Theirs:
    """All texts one by one, and the options as a multiple choice, by two tasks that are written into `folder`."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokens: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    class Overheard(HFLM):
        """lm-eval keeps texts only; the tokens that it makes of them are noted on the way."""

        def _loglikelihood_tokens(self, requests: Any, **others: Any) -> Any:
            tokens.update({pair: (tuple(before), tuple(after)) for pair, before, after in requests})
            return super()._loglikelihood_tokens(requests, **others)

    texts = [{"context": one.context, "text": one.text} for one in ours]
    texts += [{"context": context, "text": ""} for context in sorted({one.context for one in ours if one.moved})]
    options: dict[tuple[str, str], dict[str, Any]] = {}
    for one in ours:
        if one.key[2].startswith("option"):
            row = {"condition": one.key[0], "item": one.key[1], "context": one.context, "choices": []}
            options.setdefault(one.key[:2], row)["choices"].append(one.text)
    for (_, item), row in options.items():
        row["right"] = "ABCD".index(RIGHT_OR_WRONG[int(item) - 1 - len(SUMS)]["answer"])
    write_task(folder, TEXTS, texts, output_type="loglikelihood", doc_to_target="{{text}}", metrics=["acc"])
    write_task(
        folder,
        OPTIONS,
        list(options.values()),
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        doc_to_target="{{right}}",
        metrics=["acc", "acc_norm"],
    )
    backend = Overheard(
        pretrained=str(locate("smollm2").folder),
        dtype="float32",
        device="cpu",
        batch_size=4,
        add_bos_token=False,  # the prompts are rendered already, special tokens and all
        # lm-eval 0.4.13 runs two pairs that are one text split in two places once, and then reads the shorter continuation where the longer one
        # begins. A solution and the answer that ends it are such pairs.
        logits_cache=False,
    )
    results = simple_evaluate(
        model=backend,
        tasks=[TEXTS, OPTIONS],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert results is not None
    samples = results["samples"]
    logp = {
        (sample["doc"]["context"], sample["doc"]["text"]): float(sample["resps"][0][0][0]) for sample in samples[TEXTS]
    }
    return Theirs(logp, tokens, samples)


def write_task(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], metrics: Sequence[str], **how: str) -> None:
    """A local task over its own file; JSON is YAML."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "target_delimiter": "",
        "metric_list": [{"metric": one, "aggregation": "mean", "higher_is_better": True} for one in metrics],
        **how,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))


def distance(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def test_both_score_the_same_tokens(ours: Sequence[Scored], theirs: Theirs) -> None:
    for one in ours:
        before, after = theirs.tokens[one.context, one.text]
        assert before + after == one.context_ids + one.ids, one.key
        blanks = theirs.tokens[one.context, ""][1] if one.moved else ()
        assert after == blanks + one.ids, one.key


def test_log_probabilities_are_those_of_lm_eval(
    ours: Sequence[Scored], theirs: Theirs, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {one.key[2].split()[0] for one in ours}
    assert kinds == {"answer", "other", "option", "solution", "answer-after-solution"}
    assert {one.key[0] for one in ours} == set(CONDITIONS)
    apart = {one.key: distance(one.logp, theirs.of(one)) for one in ours}
    most = max(apart, key=lambda key: apart[key])
    nats = max(abs(one.logp - theirs.of(one)) for one in ours)
    with capsys.disabled():
        print(f"\n{len(apart)} texts, largest relative difference {apart[most]:.1e} ({most}), in nats {nats:.1e}")
    assert apart[most] < RELATIVE
    assert len({round(one.logp, 3) for one in ours}) > len(ours) / 2, "texts all alike would agree whatever was scored"


def test_right_options_are_chosen_alike(
    ours: Sequence[Scored], theirs: Theirs, tables: dict[str, pl.DataFrame]
) -> None:
    by_text = {(*one.key[:2], one.text): one for one in ours if one.key[2].startswith("option")}
    scores = tables["scores"]
    samples = theirs.samples[OPTIONS]
    assert len(samples) == len(RIGHT_OR_WRONG) * len(CONDITIONS)
    chosen: list[float] = []
    for sample in samples:
        doc = sample["doc"]
        for text, ((logp, _),) in zip(doc["choices"], sample["resps"], strict=True):
            one = by_text[doc["condition"], doc["item"], text]
            blanks = theirs.logp[one.context, ""] if one.moved else 0.0
            assert distance(one.logp, logp - blanks) < RELATIVE
        here = scores.filter(condition=doc["condition"], item=doc["item"])
        values = dict(here.select("metric", "value").iter_rows())
        assert (values["choice"], values["choice-normalised"]) == (sample["acc"], sample["acc_norm"])
        chosen.append(sample["acc"])
    assert 0 < sum(chosen) < len(chosen), "all right or all wrong: that would agree whatever was chosen"


def test_another_token_is_farther_away(ours: Sequence[Scored], theirs: Theirs) -> None:
    """The bound tells one answer from the next: no two candidates of an item are as near as that."""
    first = [one for one in ours if one.key[:2] == ours[0].key[:2] and one.context == ours[0].context]
    apart = [distance(one.logp, theirs.of(other)) for one in first for other in first if one is not other]
    assert min(apart) > 100 * RELATIVE
