"""The model `mless` inside lm-evaluation-harness: its baseline is `hf`, item by item. Needs lm-eval: make test-lm-eval."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import mless
from mless.errors import BadPrompt, BadStudy
from mless.integrations.filling import take_condition
from mless.models import load
from mless.prompting import build_prompts
from mless.results.folder import ResultFolder
from mless.study.importing import import_results
from mless.tasks import arithmetic, filler_sentences
from mless.values import Condition, Item

# lm-eval and what it brings warn of one another, differently with each version; warnings of mless stay errors.
pytestmark = [pytest.mark.lmeval, pytest.mark.filterwarnings("ignore", "error:::mless.*")]

SYSTEM = "You are a calculator. Reply with just the result."
COUNT = 8
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load("smollm2", dtype="float32", device="cpu", head=True)


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return arithmetic(COUNT)


@pytest.fixture(scope="module")
def tasks_folder(items: Sequence[Item], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks over one local file, a generation and a choice of four; JSON is YAML."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "items.jsonl"
    rows = [
        {
            "question": item.question,
            "answer": item.answer,
            # The right one, in another place each time, among near misses.
            "choices": sorted(
                (str(int(item.answer or 0) + step) for step in (0, 1, 3, 10)), key=lambda c: (int(c) * 7 + n) % 11
            ),
        }
        for n, item in enumerate(items)
    ]
    for row in rows:
        row["gold"] = row["choices"].index(row["answer"])
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
    }
    generation = common | {
        "task": "sums_said",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["###"], "do_sample": False, "max_gen_toks": NEW_TOKENS},
        "filter_list": [
            {
                "name": "last-number",
                "filter": [
                    {"function": "regex", "regex_pattern": r"(-?\d+)", "group_select": -1},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    choice = common | {
        "task": "sums_chosen",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }
    for task in (generation, choice):
        (folder / f"{task['task']}.yaml").write_text(json.dumps(task))
    return folder


@pytest.fixture
def lm(loaded: Any) -> Iterator[Any]:
    """Makes models around the one that is loaded; ARM is taken out of it afterwards."""
    from mless.integrations.lm_eval import MlessLM

    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(MlessLM(loaded.model, tokenizer=loaded.tokenizer, **{"batch_size": 4, "device": "cpu"} | options))
        return made[-1]

    yield make
    for one in made:
        one.detach_arm()


def evaluated(model: Any, folder: Path, **options: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model=model,
        tasks=["sums_said", "sums_chosen"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **({"apply_chat_template": True, "system_instruction": SYSTEM} | options),
    )
    assert found is not None
    return found


def likelihoods(model: Any, pairs: Sequence[tuple[str, str]]) -> list[float]:
    from lm_eval.api.instance import Instance

    asked = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    return [found for found, _ in model.loglikelihood(asked, disable_tqdm=True)]


def pairs_of(items: Sequence[Item]) -> list[tuple[str, str]]:
    return [(item.question + "\nAnswer:", f" {n}") for item in items for n in (7, 1234)]


# ---- the baseline ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "raw"])
def test_without_filler_and_arm_every_item_is_that_of_hf(loaded: Any, lm: Any, tasks_folder: Path, chat: bool):
    from lm_eval.models.huggingface import HFLM

    asked = {"apply_chat_template": chat, "system_instruction": SYSTEM if chat else None}
    theirs = evaluated(
        HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=4, device="cpu"), tasks_folder, **asked
    )
    ours = evaluated(lm(condition="none"), tasks_folder, **asked)
    for task in ("sums_said", "sums_chosen"):
        assert len(ours["samples"][task]) == COUNT
        for own, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert own == other  # responses, likelihoods to the last bit, metrics, arguments and hashes
        assert ours["results"][task] == theirs["results"][task]
    said = [sample["resps"][0][0] for sample in ours["samples"]["sums_said"]]
    assert len(set(said)) > 2, "answers that are all alike would agree whatever was asked"
    assert ours["config"]["mless_condition"]["kind"] == "none"


# ---- the filler --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["before-system", "before-question", "end", "before-answer"])
@pytest.mark.parametrize("name", ["mless", "mful"])
def test_tokens_are_those_of_a_study(loaded: Any, lm: Any, items: Sequence[Item], name: str, placement: str):
    model = lm(condition=name, length=7, placement=placement)
    condition = Condition(name, "repeat", {"mless": " /", "mful": " he"}[name], 7, placement)  # pyright: ignore[reportArgumentType]
    expected = build_prompts(loaded.tokenizer, items, condition, kind="chat", system=SYSTEM)
    for item, prompt in zip(items, expected, strict=True):
        text = model.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item.question}]
        )
        ids, mask = model.tok_batch_encode([text])
        assert tuple(ids[0].tolist()) == prompt.token_ids
        assert mask.all()


def test_natural_text_and_any_place_keep_the_original_tokens(lm: Any, items: Sequence[Item]):
    plain = lm(condition="none")
    for options in ({"condition": "random"}, {"condition": "mless", "placement": "anywhere"}):
        model = lm(length=9, **options)
        places = set()
        for item in items:
            whole = model.tok_batch_encode([item.question])[0][0].tolist()
            bare = plain.tok_batch_encode([item.question])[0][0].tolist()
            assert len(whole) == len(bare) + 9
            at = next(n for n in range(len(bare) + 1) if whole[:n] + whole[n + 9 :] == bare)
            places.add(at)
            assert model.tok_batch_encode([item.question])[0][0].tolist() == whole, (
                "it must not change from call to call"
            )
        assert len(places) > 1 or options == {"condition": "random"}
    assert (
        lm(condition="random", length=9).tok_batch_encode([items[0].question])[0].tolist()
        != lm(condition="random", length=9, condition_seed=1).tok_batch_encode([items[0].question])[0].tolist()
    )
    assert filler_sentences()


def test_a_batch_is_padded_on_the_left_and_masked(lm: Any):
    model = lm(condition="mless", length=5)
    ids, mask = model.tok_batch_encode(["short", "a much longer question than the other one"])
    assert mask.sum(1).tolist() == [6, ids.shape[1]]
    assert mask[0].tolist() == sorted(mask[0].tolist())
    slash = model.tokenizer(" /", add_special_tokens=False).input_ids[0]
    assert (ids == slash).sum(1).tolist() == [5, 5]


def test_likelihoods_with_filler_are_those_of_the_ids_by_hand_and_of_any_batch(
    loaded: Any, lm: Any, items: Sequence[Item]
):
    pairs = pairs_of(items)
    together, alone = (
        likelihoods(lm(condition="mless", length=11), pairs),
        likelihoods(lm(condition="mless", length=11, batch_size=1), pairs),
    )
    slash = loaded.tokenizer(" /", add_special_tokens=False).input_ids
    for (context, scored), one, other in zip(pairs, together, alone, strict=True):
        whole: list[int] = loaded.tokenizer(context + scored, add_special_tokens=False).input_ids
        count = len(whole) - len(loaded.tokenizer(context, add_special_tokens=False).input_ids)
        ids = torch.tensor([[*slash * 11, *whole]])
        with torch.inference_mode():
            logs = loaded.model(ids).logits[0].log_softmax(-1)
        by_hand = sum(float(logs[n - 1, ids[0, n]]) for n in range(ids.shape[1] - count, ids.shape[1]))
        assert one == pytest.approx(by_hand, abs=1e-3)
        assert one == pytest.approx(other, abs=1e-3)
    assert together != pytest.approx(likelihoods(lm(condition="none"), pairs), abs=1e-2), "the filler changed nothing"


def test_answers_with_filler_do_not_depend_on_the_batch(lm: Any, tasks_folder: Path):
    said = [
        [
            sample["resps"]
            for sample in evaluated(lm(condition="mless", batch_size=size), tasks_folder)["samples"]["sums_said"]
        ]
        for size in (1, 5)
    ]
    assert said[0] == said[1]


# ---- ARM ---------------------------------------------------------------------------------------------------------------


def test_with_arm_it_is_hf_inside_mless_arm_and_afterwards_the_model_is_as_before(
    loaded: Any, lm: Any, items: Sequence[Item]
):
    from lm_eval.models.huggingface import HFLM

    from mless.redistribution import arm

    pairs = pairs_of(items)
    plain = HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=4, device="cpu")
    before = likelihoods(plain, pairs)
    model = lm(arm_c=0.13, arm_p1=99.5)
    assert (model.condition.name, model.condition.arm.c) == ("arm", 0.13)
    ours = likelihoods(model, pairs)
    model.detach_arm()
    with arm(loaded.model, c=0.13, p1=99.5):
        assert likelihoods(plain, pairs) == ours
    assert ours != before
    assert likelihoods(plain, pairs) == before


def test_a_model_that_was_handed_in_is_the_original_once_the_evaluation_is_over(loaded: Any, tasks_folder: Path):
    import mless.integrations.lm_eval

    ids = torch.tensor([loaded.tokenizer("What is 17 + 25?").input_ids])

    def forward() -> torch.Tensor:
        with torch.inference_mode():
            return loaded.model(ids).logits

    before = forward()
    arguments = {"pretrained": loaded.model, "tokenizer": loaded.tokenizer, "arm_c": 0.13, "arm_layers": "1+3"}
    lm = mless.integrations.lm_eval.MlessLM(**arguments, device="cpu")
    assert lm.condition.arm is not None
    assert lm.condition.arm.layers == (1, 3)
    assert not torch.equal(forward(), before), "ARM is not in the model, so nothing could be left of it"
    del lm
    gc.collect()
    assert torch.equal(forward(), before)
    found = evaluated("mless", tasks_folder, model_args=arguments, batch_size=4, device="cpu", limit=2)
    assert found["config"]["mless_condition"]["arm"]["c"] == 0.13
    gc.collect()
    assert torch.equal(forward(), before)


@pytest.mark.parametrize(
    ("text", "layers"), [("2", (2,)), ("1-3", (1, 2, 3)), ("1+5", (1, 5)), ("1-2+5", (1, 2, 5)), ("1,5", (1, 5))]
)
def test_layers_can_be_written_where_a_comma_would_end_the_argument(text: str, layers: tuple[int, ...]):
    condition = take_condition({"arm_layers": text}, "this test")
    assert condition.arm is not None
    assert condition.arm.layers == layers


@pytest.mark.parametrize("scope", ["token", "sequence"])
def test_padding_does_not_enter_arm(lm: Any, items: Sequence[Item], scope: str):
    pairs = [pair for n, pair in enumerate(pairs_of(items)) if n % 3 == 0] + [("Tea?", " yes please, and with milk")]
    model = lm(condition="mless", arm_fraction=0.25, arm_scope=scope, batch_size=4)
    together = likelihoods(model, pairs)
    model.detach_arm()
    alone = likelihoods(lm(condition="mless", arm_fraction=0.25, arm_scope=scope, batch_size=1), pairs)
    assert together == pytest.approx(alone, abs=2e-3)


# ---- the command, and the way back -------------------------------------------------------------------------------------


def test_from_their_command_to_our_statistics(loaded: Any, lm: Any, tasks_folder: Path, tmp_path: Path):
    asked = "pretrained=smollm2,dtype=float32,condition=mless,length=9,arm_c=0.13"
    done = subprocess.run(
        [sys.executable, "-m", "mless.integrations.lm_eval", "run", "--model", "mless", "--model_args", asked, "--tasks", "sums_said,sums_chosen",
         "--include_path", str(tasks_folder), "--device", "cpu", "--batch_size", "4", "--limit", "6", "--log_samples", "--output_path", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("samples_sums_chosen_*.jsonl")
    none = evaluated(lm(condition="none"), tasks_folder, limit=6, apply_chat_template=False, system_instruction=None)
    folder = tmp_path / "folder"
    import_results({"none": none, "both": file}, folder, metric="acc_norm", task="sums_chosen", model="smollm2")
    about = ResultFolder(folder).manifest()
    assert about is not None
    both = about["conditions"]["both"]
    assert (both["kind"], both["length"], both["arm"]["c"]) == ("repeat", 9, 0.13)
    assert about["imported"]["both"]["file"] == str(file)
    rows = {row["condition"]: row for row in ResultFolder(folder).read_table("accuracy").to_pylist()}
    assert rows["none"]["value"] == pytest.approx(none["results"]["sums_chosen"]["acc_norm,none"])
    written = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    assert rows["both"]["value"] == pytest.approx(written["results"]["sums_chosen"]["acc_norm,none"])
    assert any(line.startswith("both") for line in mless.verdict_lines(folder))


def test_their_command_by_itself_does_not_know_the_model(tasks_folder: Path):
    """Should this fail, lm-eval finds models without an import by now, and docs/integrations.md can name the shorter command."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", "mless", "--model_args", "pretrained=smollm2", "--tasks", "sums_said",
         "--include_path", str(tasks_folder), "--device", "cpu", "--limit", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "'mless', but no model for this name found" in done.stderr.splitlines()[-1], done.stderr


def test_a_bad_argument_is_one_line_of_their_command(monkeypatch: pytest.MonkeyPatch, tasks_folder: Path, capsys: Any):
    from mless.integrations.lm_eval import main

    asked = ["--model", "mless", "--model_args", "pretrained=smollm2,condition=mles", "--tasks", "sums_said"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", *asked, "--include_path", str(tasks_folder), "--device", "cpu"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("mless: no condition 'mles' (did you mean 'mless'?)")


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"condition": "position-only"}, "changes positions or attention"),
        ({"condition": "masked-filler"}, "changes positions or attention"),
        ({"condition": "plan-and-solve"}, "another wording"),
        ({"condition": "self-consistency"}, "asking several times"),
        ({"condition": "none-again"}, "asking several times"),
        ({"condition": "mless", "length": 0}, "length"),
        ({"condition": "mless", "placement": "middle"}, "placement"),
        ({"arm_d": 1}, "no argument 'arm_d'; those of ARM are: arm_preset, arm_variant, arm_c"),
        ({"arm_c": -1}, "c must be 0 or more"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(lm: Any, options: dict[str, Any], message: str):
    with pytest.raises(BadStudy, match=message):
        lm(**options)


def test_a_filler_of_several_tokens_is_repeated_and_cut(lm: Any):
    model = lm(condition="mless", filler=" quizzaciously", length=7)
    parts = model.tokenizer(" quizzaciously", add_special_tokens=False).input_ids
    assert len(parts) > 1
    ids = model.tok_batch_encode(["2 + 2?"])[0][0].tolist()
    assert ids[:7] == (parts * 7)[:7]


def test_rolling_likelihood_takes_arm_but_no_filler(lm: Any):
    from lm_eval.api.instance import Instance

    asked = [Instance("loglikelihood_rolling", {}, ("Once upon a time there was a lighthouse.",), 0)]
    plain = lm(condition="none").loglikelihood_rolling(asked, disable_tqdm=True)
    with pytest.raises(BadStudy, match=r"loglikelihood_rolling .* has no question"):
        lm(condition="mless").loglikelihood_rolling(asked, disable_tqdm=True)
    assert lm(arm_c=0.3).loglikelihood_rolling(asked, disable_tqdm=True) != plain


def test_a_prompt_that_does_not_fit_with_its_filler_is_refused(lm: Any):
    model = lm(condition="mless", length=20, max_length=30)
    with pytest.raises(BadPrompt, match="leave room for the answer; use a shorter filler"):
        model.tok_batch_encode(["one two three four"], left_truncate_len=22)
    with pytest.raises(BadPrompt, match="cutting them would cut the filler"):
        likelihoods(model, [("one two three four five six seven eight nine ten", " eleven twelve")])


def test_a_prompt_rendered_in_an_earlier_run_is_refused(lm: Any):
    text = lm(condition="none").apply_chat_template([{"role": "user", "content": "2 + 2?"}])
    model = lm(condition="mless")
    with pytest.raises(BadPrompt, match="run without --cache_requests"):
        model.tok_batch_encode([text])
    model.apply_chat_template([{"role": "user", "content": "2 + 2?"}])
    assert model.tok_batch_encode([text])[0].shape[0] == 1
