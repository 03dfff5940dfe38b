"""A likelihood study run for real: its numbers against a plain loop, the control, resuming, what it lacks, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import mless
from heard import Heard
from interrupted import take_apart
from mless.errors import BadAttention, BadStudy
from mless.models import LoadedModel
from mless.results.folder import ResultFolder
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.likelihood.rows import padded
from spelling import byte_level, model_folder

CONDITIONS = ["none", "mless", "random", "question-twice", "position-only", "masked-filler", "arm"]
TABLES = ("prompts", "scores", "tokens", "candidates", "likelihood", "effects")
ITEMS = 8


def write_task(path: Path, items: int = ITEMS, **more: Any) -> Path:
    rows = [
        {"question": f"What is {n} + {n + 10}?", "answer": str(2 * n + 10), "solution": f"Add {n}: it is \\boxed{{{2 * n + 10}}}.", **more}
        for n in range(items)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", context=1024)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "sums.jsonl")


def run_tiny(
    model: Path, data: Path, out: Path, progress: Heard | None = None, sets: Sequence[str] = (), **changes: Any
) -> Outcome:
    chosen = {"model": str(model), "data": str(data), "length": 7, "system": "Answer in \\boxed{}.", **changes}
    return run_study(load_study("likelihood", chosen, ["likelihood.others=4", *sets]), out, progress or Heard())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Path, task: Path) -> Path:
    path = tmp_path_factory.mktemp("likelihood") / "results"
    units = ITEMS * (len(CONDITIONS) + 1)
    assert run_tiny(tiny, task, path, conditions=CONDITIONS) == Outcome(path, units, units)
    return path


@pytest.fixture(scope="module")
def tables(folder: Path) -> dict[str, pl.DataFrame]:
    return {name: pl.DataFrame(ResultFolder(folder).read_table(name)) for name in TABLES}


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> LoadedModel:
    return mless.load(str(tiny), head=True)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.parquet").read_bytes() for name in TABLES}


def plain(model: LoadedModel, prompt: Sequence[int], text: str) -> np.ndarray:
    """One row at a time, softmax in fp32."""
    ids = model.tokenizer(text, add_special_tokens=False).input_ids
    with torch.inference_mode():
        logits = model.model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].double().numpy()


# ---- numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", ["none", "mless", "random", "question-twice"])
def test_numbers_are_those_of_a_plain_loop(
    tables: dict[str, pl.DataFrame], loaded: LoadedModel, task: Path, condition: str
) -> None:
    items = [json.loads(line) for line in task.read_text().splitlines()]
    for number, item in enumerate(items):
        here = (pl.col("condition") == condition) & (pl.col("item") == str(number + 1))
        prompt = tables["prompts"].filter(here)["token_ids"][0].to_list()
        found = dict(tables["scores"].filter(here).select("metric", "value").iter_rows())
        candidates = tables["candidates"].filter(here)
        solution = plain(loaded, prompt, item["solution"])
        answer = plain(loaded, prompt, f"\\boxed{{{item['answer']}}}").sum()
        others = [plain(loaded, prompt, text).sum() for text in candidates.filter(pl.col("role") == "other")["text"]]
        assert len(others) == 4
        before = loaded.tokenizer(item["solution"].partition("\\boxed")[0], add_special_tokens=False).input_ids
        after = plain(loaded, [*prompt, *before], f"\\boxed{{{item['answer']}}}").sum()
        assert found["solution"] == pytest.approx(solution.mean(), abs=1e-5)
        assert found["answer"] == pytest.approx(answer, abs=1e-5 * abs(answer))
        assert found["contrast"] == pytest.approx(answer - np.mean(others), abs=1e-5 * abs(answer))
        assert found["answer-after-solution"] == pytest.approx(after, abs=1e-5 * abs(after))
        assert tables["tokens"].filter(here)["logp"].to_numpy() == pytest.approx(solution, abs=1e-5)


def test_deltas_are_against_none(tables: dict[str, pl.DataFrame]) -> None:
    values = tables["likelihood"]
    none = values.filter(condition="none").select("item", "metric", pl.col("value").alias("none"))
    both = values.join(none, on=["item", "metric"])
    assert both.height == values.height
    assert (both["delta"] - (both["value"] - both["none"])).abs().max() == 0
    effects = tables["effects"]
    mean = values.group_by("condition", "metric").agg(pl.col("delta").mean().alias("mean"))
    joined = effects.join(mean, on=["condition", "metric"])
    assert joined.height == effects.height == (len(CONDITIONS)) * 7
    assert (joined["delta"] - joined["mean"]).abs().max() < 1e-12


def test_the_control_differs_in_no_bit(tables: dict[str, pl.DataFrame], folder: Path) -> None:
    again = tables["likelihood"].filter(condition="none-again")
    assert again["delta"].unique().to_list() == [0.0]
    assert again.height == ITEMS * 7
    kl = tables["tokens"].filter(condition="none-again")
    assert kl["kl"].unique().to_list() == [0.0]
    assert kl["agree"].unique().to_list() == [1.0]
    assert any("A/A control" in line and "no number differs" in line for line in verdict_lines(folder))


def test_hidden_filler_does_what_positions_do(tables: dict[str, pl.DataFrame]) -> None:
    hidden, moved = (
        tables["scores"].filter(condition=name)["value"].to_numpy() for name in ("masked-filler", "position-only")
    )
    assert hidden == pytest.approx(moved, abs=1e-4)


def test_arm_changes_the_numbers_and_is_taken_off(tables: dict[str, pl.DataFrame]) -> None:
    assert tables["likelihood"].filter(condition="arm", metric="solution")["delta"].abs().min() > 0


def test_arm_draws_alike_for_all_texts_in_one_row(tiny: Path, task: Path, tmp_path: Path) -> None:
    """With a pool of more than a token texts run in rows of their own; a token's own draw must not depend on that."""
    run_tiny(tiny, task, tmp_path / "r", conditions="none,arm", limit=2)
    from mless.redistribution import attached
    from mless.values import ArmSettings, arm_seed

    model = mless.load(str(tiny), head=True)
    rows = pl.DataFrame(ResultFolder(tmp_path / "r").read_table("prompts")).filter(condition="arm")
    scores = pl.DataFrame(ResultFolder(tmp_path / "r").read_table("candidates")).filter(
        condition="arm", item="1", role="other"
    )
    with attached(model.model, ArmSettings(c=0.13)) as handle:
        handle.rows(seeds=torch.tensor([arm_seed("1", 0)]))
        for text, logp in scores.select("text", "logp").iter_rows():
            assert plain(model, rows["token_ids"][0].to_list(), text).sum() == pytest.approx(logp, abs=1e-4)


# ---- running -------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_same_bytes(tiny: Path, task: Path, folder: Path, tmp_path: Path) -> None:
    import shutil

    again = shutil.copytree(folder, tmp_path / "again")
    take_apart(again)
    for unit in ("mless-00002", "none-00001", "arm-00003"):
        for file in (again / "units").rglob(f"{unit}*"):
            file.unlink()
    found = run_tiny(tiny, task, again, conditions=CONDITIONS)
    assert 0 < found.computed < found.units
    assert bytes_of(again) == bytes_of(folder)


def test_other_margins_are_judged_without_the_model(tiny: Path, task: Path, tmp_path: Path) -> None:
    run_tiny(tiny, task, tmp_path, conditions="none,mless")
    before = pl.DataFrame(ResultFolder(tmp_path).read_table("effects"))
    found = run_tiny(tiny, task, tmp_path, sets=["likelihood.answer_margin=1000"], conditions="none,mless")
    assert found.computed == 0
    after = pl.DataFrame(ResultFolder(tmp_path).read_table("effects"))
    assert after.filter(condition="mless", metric="contrast")["verdict"].to_list() == ["equivalent"]
    assert after["delta"].to_list() == before["delta"].to_list()


def test_rows_that_run_together_have_the_same_numbers(
    tiny: Path,
    task: Path,
    folder: Path,
    tables: dict[str, pl.DataFrame],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: padded, filled up, in groups of all conditions."""
    from mless.study.likelihood import measure

    monkeypatch.setattr(measure, "ALONE", frozenset[str]())
    run_tiny(tiny, task, tmp_path / "r", conditions=CONDITIONS)
    there = pl.DataFrame(ResultFolder(tmp_path / "r").read_table("scores"))
    both = there.join(tables["scores"], on=["condition", "item", "metric"])
    assert both.height == there.height == tables["scores"].height
    # ARM chooses by rank, so the last bits of its input matter.
    plain = both.filter(pl.col("condition") != "arm")
    assert (plain["value"] - plain["value_right"]).abs().max() < 1e-4
    again = pl.DataFrame(ResultFolder(tmp_path / "r").read_table("likelihood")).filter(condition="none-again")
    assert again["delta"].abs().max() < 1e-4
    about = json.loads((tmp_path / "r" / "study.json").read_text())
    assert about["proofs"]["neighbours"] == "same bits"


def test_states_that_are_forgotten_are_computed_again(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ARM's groups come last, when the states of `none` that they are compared with are gone but for a few."""
    from mless.study.likelihood import measure, scoring

    monkeypatch.setattr(measure, "ALONE", frozenset[str]())
    chosen = {"conditions": ["none", "mless", "arm"], "group_tokens": 384}
    run_tiny(tiny, task, tmp_path / "kept", **chosen)
    monkeypatch.setattr(scoring, "_KEPT", 9000)
    run_tiny(tiny, task, tmp_path / "forgotten", **chosen)
    kept, forgotten = (
        pl.DataFrame(ResultFolder(tmp_path / name).read_table("tokens")) for name in ("kept", "forgotten")
    )
    assert kept.equals(forgotten)


def test_a_number_that_is_not_finite_is_refused_with_its_own_item(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU numbers are read while the next group runs; the item that is named is the one whose numbers they are."""
    from mless.capture import scoring
    from mless.study.likelihood import measure

    monkeypatch.setattr(measure, "ALONE", frozenset[str]())
    own = scoring.Scorer._read

    def read(self: Any, rows: Any, states: Any, *more: Any) -> Any:
        for at, row in enumerate(rows):
            if (row.prompt.item, row.prompt.condition) == ("3", "mless"):
                states[at] = float("nan")
        return own(self, rows, states, *more)

    monkeypatch.setattr(scoring.Scorer, "_read", read)
    with pytest.raises(BadAttention, match=r"^item '3', condition 'mless': (?!item)") as found:
        run_tiny(tiny, task, tmp_path / "r", conditions=["none", "mless"])
    assert "a log-probability is not finite" in str(found.value)


# ---- what is lacking -----------------------------------------------------------------------------------------------------


def test_a_task_without_solutions_has_its_answers_scored(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "plain.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(6)))
    run_tiny(tiny, data, tmp_path / "r", conditions="none,mless")
    effects = pl.DataFrame(ResultFolder(tmp_path / "r").read_table("effects"))
    assert set(effects["metric"]) == {"answer", "contrast"}
    assert any("no reference solutions" in line for line in verdict_lines(tmp_path / "r"))


def test_a_task_with_neither_is_refused(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "bare.jsonl"
    data.write_text('{"question": "Why?"}\n{"question": "How?"}\n')
    with pytest.raises(BadStudy, match="likelihood needs items with an answer or a reference solution"):
        run_tiny(tiny, data, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_conditions_that_draw_answers_are_refused_by_name(tiny: Path, task: Path, tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match="condition 'self-consistency' draws answers"):
        run_tiny(tiny, task, tmp_path / "r", conditions="none,self-consistency")


def test_a_solution_longer_than_the_context_is_left_out_everywhere_and_counted(tiny: Path, tmp_path: Path) -> None:
    data = write_task(tmp_path / "long.jsonl", 4)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[1]["solution"] = "so 12.5 " * 2000 + rows[1]["solution"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    heard = Heard()
    run_tiny(tiny, data, tmp_path / "r", heard, conditions="none,mless")
    said = "1 item of 4: the reference solution does not fit into the context, so it is left out under every condition"
    assert said in heard.lines
    assert said in verdict_lines(tmp_path / "r")
    values = pl.DataFrame(ResultFolder(tmp_path / "r").read_table("scores"))
    assert set(values.filter(item="2")["metric"]) == {"answer", "contrast"}
    assert "solution" in set(values.filter(item="1")["metric"])


def test_an_answer_longer_than_the_context_is_left_out_everywhere_and_counted(tiny: Path, tmp_path: Path) -> None:
    data = write_task(tmp_path / "long.jsonl", 4)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[1]["answer"] = "12.5 + x " * 500
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    heard = Heard()
    run_tiny(tiny, data, tmp_path / "r", heard, conditions="none,mless")
    assert (
        "1 item of 4: the answer does not fit into the context, so it is left out under every condition" in heard.lines
    )
    values = pl.DataFrame(ResultFolder(tmp_path / "r").read_table("scores"))
    assert "answer" not in set(values.filter(item="2")["metric"])
    assert {"solution", "answer", "contrast"} <= set(values.filter(item="1")["metric"])


def test_fewer_other_answers_than_asked_for_are_said(tiny: Path, tmp_path: Path) -> None:
    heard = Heard()
    run_tiny(tiny, write_task(tmp_path / "few.jsonl", 3), tmp_path / "r", heard, conditions="none,mless")
    assert "3 items of 3: 2 other answers of its kind to compare with; 4 were asked for" in heard.lines


def test_others_do_not_depend_on_how_many_items_are_scored(
    tiny: Path, task: Path, folder: Path, tmp_path: Path
) -> None:
    run_tiny(tiny, task, tmp_path / "r", conditions="none,mless", limit=2)
    few, all_of_them = (pl.DataFrame(ResultFolder(one).read_table("candidates")) for one in (tmp_path / "r", folder))
    assert (
        few.filter(condition="none", item="2")["text"].to_list()
        == all_of_them.filter(condition="none", item="2")["text"].to_list()
    )


def test_an_item_without_an_answer_has_its_solution_scored(tiny: Path, tmp_path: Path) -> None:
    data = write_task(tmp_path / "t.jsonl", 4)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[2]["answer"] = ""
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    heard = Heard()
    run_tiny(tiny, data, tmp_path / "r", heard, conditions="none,mless")
    assert "1 item of 4: no answer, so only its solution is scored" in heard.lines
    values = pl.DataFrame(ResultFolder(tmp_path / "r").read_table("scores"))
    assert "answer" not in set(values.filter(item="3")["metric"])


def test_choices(tiny: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    data = tmp_path / "choices.jsonl"
    options = ["red", "green", "light blue"]
    rows = [{"question": f"Which colour is number {n}?", "choices": options, "answer": "ABC"[n % 3]} for n in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_tiny(tiny, data, tmp_path / "r", conditions="none,mless")
    found = {name: pl.DataFrame(ResultFolder(tmp_path / "r").read_table(name)) for name in TABLES}
    for number in range(5):
        here = (pl.col("condition") == "mless") & (pl.col("item") == str(number + 1))
        prompt = found["prompts"].filter(here)["token_ids"][0].to_list()
        sums = [plain(loaded, prompt, text).sum() for text in options]
        each = [one / len(text) for one, text in zip(sums, options, strict=True)]
        values = dict(found["scores"].filter(here).select("metric", "value").iter_rows())
        right = number % 3
        assert values["choice"] == float(np.argmax(sums) == right)
        assert values["choice-normalised"] == float(np.argmax(each) == right)
        assert values["margin"] == pytest.approx(
            sums[right] - max(one for n, one in enumerate(sums) if n != right), abs=1e-4
        )


# ---- form ----------------------------------------------------------------------------------------------------------------


def form_only(path: Path) -> Path:
    """A model in which a slash anywhere before makes the first sign of a box likelier, and nothing else."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level(None)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    (slash,), (box,) = (tokenizer(sign, add_special_tokens=False).input_ids[-1:] for sign in ("/", "\\"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        layer = model.model.layers[0]
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(1.0)
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[slash, 1] = 1.0
        # Queries are zero, so attention is even: the mean of the values says how many slashes came before.
        layer.self_attn.v_proj.weight[2, 1] = 1.0
        layer.self_attn.o_proj.weight[2, 2] = 8.0
        model.lm_head.weight[box, 2] = 1.0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_contrast_is_zero_where_only_the_form_changes_and_the_answer_alone_is_not(tmp_path: Path) -> None:
    data = write_task(tmp_path / "sums.jsonl", 20)  # all answers have two digits
    run_tiny(form_only(tmp_path / "model"), data, tmp_path / "r", conditions="none,mless", filler="/")
    effects = pl.DataFrame(ResultFolder(tmp_path / "r").read_table("effects")).filter(condition="mless")
    answer, contrast = (effects.filter(metric=name).row(0, named=True) for name in ("answer", "contrast"))
    assert answer["verdict"] == "rises"
    assert answer["delta"] > 0.3
    assert abs(contrast["delta"]) < 1e-5
    assert contrast["verdict"] == "equivalent"
    assert any("most of the answer's" in line and "is form" in line for line in verdict_lines(tmp_path / "r"))


def test_tokens_of_texts_are_counted_as_they_lie_in_one_row() -> None:
    from mless.capture.branching import branches
    from mless.study.likelihood.texts import tokens_after
    from tiny import prompt_of

    texts = [(1, 2, 3), (1, 2), (), (1, 4), (2, 2)]
    assert tokens_after(texts) == 3
    assert len(branches(prompt_of(("question", 5)), texts)) == 5 + 3


def test_padded_lengths_depend_on_nothing_else_and_waste_little() -> None:
    for length in range(1, 9000):
        found = padded(length)
        assert length <= found <= max(length + 31, length * 1.13)
        assert padded(found) == found
