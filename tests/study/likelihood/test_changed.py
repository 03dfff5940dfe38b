"""Conditions with cuts and patches, by likelihood: rungs that must equal each other, and what is refused."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from heard import Heard
from interrupted import take_apart
from mless.capture import patching
from mless.capture.scoring import Scorer
from mless.errors import BadAttention, BadPrompt, BadStudy, UnsupportedArchitecture
from mless.kernels.threads import has_own_thread_count
from mless.results.folder import ResultFolder
from mless.study import load_study, run_study, verdict_lines
from mless.study.likelihood import measure, rows
from mless.study.verifying import verify
from models.tiny_models import save_tokenizer
from models.walking import save
from spelling import byte_level, model_folder
from study.likelihood.test_likelihood_study import write_task

FILLER = {"filler": " /", "length": 7}
ALL_BUT_FILLER = "original,answer"
DECLARED: dict[str, dict[str, Any]] = {
    "nobody": FILLER | {"cut": [{"queries": ALL_BUT_FILLER, "keys": "filler"}]},
    "question-only": FILLER | {"cut": [{"queries": "answer", "keys": "filler"}]},
    "late-head": FILLER
    | {"cut": [{"queries": "answer", "keys": ["filler"], "layers": "2-", "heads": "1", "to": "sink"}]},
    "put-in": {"patch": [{"from": "mless", "part": "residual"}]},
    "taken-out": FILLER | {"patch": [{"from": "none", "part": "residual"}]},
    "mlp": {"patch": [{"from": "mless", "part": "mlp-output", "layers": 1, "at": "question,answer"}]},
    "keys": {"kind": "shift", "length": 7, "patch": [{"from": "mless", "part": "keys-values", "at": "filler"}]},
    "of-cut": FILLER | {"patch": [{"from": "nobody", "part": "residual"}]},
}
CONDITIONS = ["none", "mless", "masked-filler", *DECLARED]
TABLES = ("prompts", "scores", "tokens", "candidates", "likelihood", "effects")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", context=1024)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "sums.jsonl", 3)


def run(tiny: Path, task: Path, out: Path, heard: Heard | None = None, **changes: Any) -> Heard:
    chosen = {
        "model": str(tiny),
        "data": str(task),
        "length": 7,
        "system": "Answer in \\boxed{}.",
        "condition": DECLARED,
        "dtype": "float32",
    }
    heard = heard or Heard()
    run_study(load_study("likelihood", chosen | changes, ["likelihood.others=4", "likelihood.again=false"]), out, heard)
    return heard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Path, task: Path) -> Path:
    out = tmp_path_factory.mktemp("changed") / "results"
    run(tiny, task, out, conditions=CONDITIONS)
    return out


def values(folder: Path, condition: str) -> np.ndarray:
    table = pl.DataFrame(ResultFolder(folder).read_table("scores")).filter(condition=condition)
    found = table.filter(~pl.col("metric").is_in(["kl", "agree"])).sort("item", "metric")["value"].to_numpy()
    assert np.isfinite(found).all()
    return found


def test_filler_that_is_cut_from_everything_is_hidden_filler(folder: Path) -> None:
    assert values(folder, "nobody") == pytest.approx(values(folder, "masked-filler"), abs=1e-5)
    assert np.abs(values(folder, "nobody") - values(folder, "mless")).max() > 1e-3


def test_every_rung_is_another_run(folder: Path) -> None:
    for one in ("none", "mless", "nobody"):
        for other in ("question-only", "late-head", "mlp"):
            assert np.abs(values(folder, one) - values(folder, other)).max() > 1e-5, (one, other)


def test_everything_put_in_is_the_other_condition_and_everything_taken_out_the_first(folder: Path) -> None:
    """To the bit: the same states go through the head in the same shape."""
    assert (values(folder, "put-in") == values(folder, "mless")).all()
    assert (values(folder, "taken-out") == values(folder, "none")).all()
    assert (values(folder, "of-cut") == values(folder, "nobody")).all()


def test_a_fillers_keys_at_its_positions_are_the_filler(folder: Path) -> None:
    assert values(folder, "keys") == pytest.approx(values(folder, "mless"), abs=1e-5)


def test_words_and_stored_conditions_say_what_was_changed(folder: Path) -> None:
    about = json.loads((folder / "study.json").read_text())
    assert about["conditions"]["question-only"]["cut"] == [
        {"queries": ["answer"], "keys": ["filler"], "layers": "all", "heads": None, "to": "rest"}
    ]
    assert about["conditions"]["mlp"]["patch"][0]["source"] == "mless"
    assert "cut" not in about["conditions"]["mless"]
    assert about["proofs"]["cuts of nobody"]["output"] < 1e-5
    said = "\n".join(verdict_lines(folder))
    assert "answer → filler cut in all layers" in said
    assert "residual of none put in in all layers everywhere" not in said
    assert "residual of none in all layers everywhere" in said


def test_a_resumed_run_and_rows_that_run_together_have_the_same_numbers(
    tiny: Path, task: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = shutil.copytree(folder, tmp_path / "again")
    take_apart(again)
    for unit in ("mlp-00002", "late-head-00001", "of-cut-00003", "none-00003"):
        for file in (again / "units").rglob(f"{unit}*"):
            file.unlink()
    run(tiny, task, again, conditions=CONDITIONS)
    for name in TABLES:
        assert (again / f"{name}.parquet").read_bytes() == (folder / f"{name}.parquet").read_bytes(), name
    monkeypatch.setattr(measure, "ALONE", frozenset())
    together = tmp_path / "together"
    run(tiny, task, together, conditions=CONDITIONS, group_tokens=600)
    for condition in CONDITIONS:
        assert values(together, condition) == pytest.approx(values(folder, condition), abs=1e-4), condition


def test_a_patched_row_has_the_same_bits_whichever_others_are_missing(tiny: Path, task: Path, tmp_path: Path) -> None:
    """Where a row begins, by layer and by token, follows from its own item and condition."""
    some = [f"{part}-{layer}" for part in ("attention-output", "mlp-output") for layer in (1, 2)]
    declared = {f"in-{one}": {"patch": [{"from": "mless", "part": one[:-2], "layers": one[-1]}]} for one in some}
    whole = tmp_path / "whole"
    run(tiny, task, whole, conditions=["none", "mless", *declared], condition=declared)
    said = json.loads((whole / "study.json").read_text())["proofs"]["patched runs"]
    assert said == "start at the first layer and token that is changed"
    for missing in ([0], [1, 2], [0, 1, 3]):
        again = shutil.copytree(whole, tmp_path / f"again{len(missing)}")
        take_apart(again)
        for number in missing:
            for file in (again / "units").rglob(f"in-{some[number]}-*"):
                file.unlink()
        run(tiny, task, again, conditions=["none", "mless", *declared], condition=declared)
        for name in TABLES:
            assert (again / f"{name}.parquet").read_bytes() == (whole / f"{name}.parquet").read_bytes(), (missing, name)


@pytest.mark.slow
def test_a_resumed_run_of_a_real_model_has_the_same_bits(task: Path, tmp_path: Path) -> None:
    """Wide enough that products of another shape are rounded otherwise."""
    declared = {
        f"in-{layer}": {"patch": [{"from": "mless", "part": "attention-output", "layers": layer}]}
        for layer in (3, 12, 28)
    }
    asked: dict[str, Any] = {"conditions": ["none", "mless", *declared], "condition": declared, "limit": 1}
    asked |= {"model": "smollm2", "dtype": "float32"}
    whole = tmp_path / "whole"
    run(Path(), task, whole, **asked)
    again = shutil.copytree(whole, tmp_path / "again")
    take_apart(again)
    for missing in (12, 28):
        for file in (again / "units").rglob(f"in-{missing}-*"):
            file.unlink()
    run(Path(), task, again, **asked)
    for name in TABLES:
        assert (again / f"{name}.parquet").read_bytes() == (whole / f"{name}.parquet").read_bytes(), name
    found = verify(whole, sample=5)
    assert found.recomputed is not None
    assert found.recomputed.differing == 0


def test_patched_rows_are_those_of_whole_runs_whatever_runs_beside_them(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of the same length with another base, and with another filler."""
    put: dict[str, Any] = {"patch": [{"from": "mless", "part": "mlp-output", "layers": 1}]}
    out: dict[str, Any] = {"patch": [{"from": "none", "part": "mlp-output", "layers": 1}]}
    declared: dict[str, dict[str, Any]] = {
        "moved": {"kind": "shift", "length": 7},
        "other": {"filler": " a", "length": 7},
        "in-none": put,
        "in-moved": {"kind": "shift", "length": 7} | put,
        "out-mless": FILLER | out,
        "out-other": {"filler": " a", "length": 7} | out,
    }
    asked: dict[str, Any] = {"conditions": ["none", "mless", *declared], "condition": declared}
    run(tiny, task, tmp_path / "skips", **asked)
    monkeypatch.setattr("mless.capture.pairing.first_patched", lambda *_: 0)
    run(tiny, task, tmp_path / "whole", **asked)
    for condition in declared:
        assert values(tmp_path / "skips", condition) == pytest.approx(values(tmp_path / "whole", condition), abs=1e-5)


def test_cut_rows_are_those_of_whole_runs(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a study patches too, so that what is before the first cut edge is there."""
    cuts = {name: one for name, one in DECLARED.items() if "cut" in one}
    assert len(cuts) == 3
    # Of one head in a later layer, for some of the prompt's tokens.
    cuts["late"] = FILLER | {"cut": [{"queries": "question", "keys": "filler", "layers": "2", "heads": "2"}]}
    asked: dict[str, Any] = {"conditions": ["none", "mless", *cuts, "mlp"], "condition": DECLARED | cuts}
    own, skipped = Scorer.__call__, dict[str, int]()

    def call(self: Any, rows: Any, *more: Any, **named: Any) -> Any:
        skipped[rows[0].prompt.condition] = named.get("skipped", 0)
        return own(self, rows, *more, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Scorer, "__call__", call)
        run(tiny, task, tmp_path / "skips", **asked)
    assert skipped["none"] == skipped["mless"] == 0
    assert 0 < skipped["nobody"] <= skipped["late"] < skipped["question-only"] == skipped["late-head"]
    monkeypatch.setattr("mless.capture.cutting.first_cut", lambda *_: 0)
    run(tiny, task, tmp_path / "whole", **asked)
    for condition in cuts:
        found = values(tmp_path / "skips", condition)
        assert found == pytest.approx(values(tmp_path / "whole", condition), abs=1e-5)
        assert np.abs(found - values(tmp_path / "skips", "mless")).max() > 1e-5


def test_a_model_that_looks_back_by_other_means_than_attention_is_run_with_all_tokens(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the row from whose patch most layers are computed, not of the first or the last one."""
    hybrid = tmp_path / "hybrid"
    hybrid.mkdir()
    save("lfm2", hybrid)
    save_tokenizer(hybrid, bos=True)
    declared: dict[str, dict[str, Any]] = {
        "keys": {
            "kind": "shift",
            "length": 7,
            "patch": [{"from": "mless", "part": "keys-values", "at": "filler", "layers": 2}],
        },
        "mlp": {"patch": [{"from": "mless", "part": "mlp-output", "layers": 2}]},
        "last": {"patch": [{"from": "mless", "part": "residual", "layers": 4}]},
    }
    asked: dict[str, Any] = {"conditions": ["none", "mless", *declared], "condition": declared, "limit": 2}
    run(hybrid, task, tmp_path / "out", **asked)
    said = json.loads((tmp_path / "out" / "study.json").read_text())["proofs"]["patched runs"]
    assert said.startswith("start at the first layer that is changed, with all tokens: without earlier ones")
    monkeypatch.setattr("mless.capture.pairing.first_patched", lambda *_: 0)
    run(hybrid, task, tmp_path / "whole", **asked)
    for condition in declared:
        assert (values(tmp_path / "out", condition) == values(tmp_path / "whole", condition)).all()


def test_a_model_whose_keys_cannot_be_kept_is_run_with_all_tokens(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patch does not ask for them, and only rows that begin later would."""

    def refuse(call: Any) -> None:
        raise UnsupportedArchitecture("it attends twice with the same keys")

    asked: dict[str, Any] = {"conditions": ["none", "mless", "put-in", "nobody"]}
    run(tiny, task, tmp_path / "out", **asked)
    monkeypatch.setattr(patching, "_refuse_second", refuse)
    run(tiny, task, tmp_path / "twice", **asked)
    said = json.loads((tmp_path / "twice" / "study.json").read_text())["proofs"]["patched runs"]
    assert said.endswith("with all tokens: without earlier ones a layer fails (it attends twice with the same keys)")
    for condition in asked["conditions"]:
        assert values(tmp_path / "twice", condition) == pytest.approx(values(tmp_path / "out", condition), abs=1e-5)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.skipif(not has_own_thread_count(), reason="this build of torch has one number for all threads")
def test_rows_side_by_side_have_the_bits_of_rows_one_by_one(tiny: Path, task: Path, tmp_path: Path) -> None:
    """Three at a time, in a thread each; the same after an interrupt; and one by one in a process with one thread."""
    asked: dict[str, Any] = {"conditions": [*CONDITIONS, "arm"]}
    run(tiny, task, tmp_path / "three", **asked)
    assert json.loads((tmp_path / "three" / "study.json").read_text())["proofs"]["rows side by side"] == 3

    class Interrupting(Heard):
        def step(self, what: str, done: int, total: int, workers: str = "") -> None:
            if done == 10 and what.startswith("likelihood"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny, task, tmp_path / "resumed", Interrupting(), **asked)
    run(tiny, task, tmp_path / "resumed", **asked)
    again = json.loads((tmp_path / "resumed" / "study.json").read_text())["timings"]["units_computed"]
    assert 0 < again <= 3 * len(asked["conditions"]) - 10
    torch.set_num_threads(1)
    run(tiny, task, tmp_path / "one", **asked)
    assert json.loads((tmp_path / "one" / "study.json").read_text())["proofs"]["rows side by side"] == 1
    for name in TABLES:
        three = (tmp_path / "three" / f"{name}.parquet").read_bytes()
        assert (tmp_path / "one" / f"{name}.parquet").read_bytes() == three, name
        assert (tmp_path / "resumed" / f"{name}.parquet").read_bytes() == three, name


@pytest.mark.usefixtures("three_threads")
def test_what_changed_rows_take_is_recorded_while_it_is_scored(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward of its own costs as much as two rows. Only the proofs have some, for one item."""
    own, items = rows.recorded_rows, list[str]()

    def recorded(lane: Any, places: Any, some: Any, *more: Any) -> Any:
        items.extend(row.prompt.item for row in some)
        return own(lane, places, some, *more)

    monkeypatch.setattr(rows, "recorded_rows", recorded)
    chosen = ["none", "mless", "nobody", "question-only", "put-in", "taken-out", "mlp"]
    run(tiny, task, tmp_path / "out", conditions=chosen)
    assert len(set(items)) == 1
    assert len(items) == 2


@pytest.mark.usefixtures("three_threads")
def test_a_row_that_is_of_no_use_is_named_beside_others(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Scorer._read

    def read(self: Any, rows: Any, states: Any, *more: Any) -> Any:
        if (rows[0].prompt.item, rows[0].prompt.condition) == ("2", "nobody"):
            states = states * float("nan")
        return own(self, rows, states, *more)

    monkeypatch.setattr(Scorer, "_read", read)
    with pytest.raises(BadAttention, match=r"^item '2', condition 'nobody': (?!item)"):
        run(tiny, task, tmp_path / "out", conditions=CONDITIONS)


@pytest.mark.usefixtures("three_threads")
def test_a_fault_in_a_lane_ends_the_study_and_what_was_measured_stays(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, done = Scorer.__call__, list[int]()

    def call(self: Any, rows: Any, *more: Any, **named: Any) -> Any:
        done.append(1)
        if rows[0].prompt.item == "2" and rows[0].prompt.condition == "of-cut":
            raise RuntimeError("a lane fails")
        return own(self, rows, *more, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Scorer, "__call__", call)
        with pytest.raises(RuntimeError, match="a lane fails"):
            run(tiny, task, tmp_path / "out", conditions=CONDITIONS)
    begun = len(done)
    run(tiny, task, tmp_path / "out", conditions=CONDITIONS)
    run(tiny, task, tmp_path / "whole", conditions=CONDITIONS)
    assert begun > 10
    assert not [one for one in threading.enumerate() if one.name.startswith("mless-lane")]
    for name in TABLES:
        assert (tmp_path / "out" / f"{name}.parquet").read_bytes() == (
            tmp_path / "whole" / f"{name}.parquet"
        ).read_bytes(), name


@pytest.mark.usefixtures("three_threads")
def test_memory_that_is_short_once_changes_no_bit(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that run alone have the same bits in halves of their group, and after them."""
    own, refused, skipped = Scorer.__call__, [1], dict[Any, int]()

    def call(self: Any, rows: Any, *more: Any, **named: Any) -> Any:
        skipped[rows[0].prompt.item, rows[0].prompt.condition] = named.get("skipped", 0)
        if not refused and (rows[0].prompt.item, rows[0].prompt.condition) == ("1", "late-head") and more[0] != [None]:
            refused.append(1)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return own(self, rows, *more, **named)

    monkeypatch.setattr(Scorer, "__call__", call)
    run(tiny, task, tmp_path / "whole", conditions=CONDITIONS)
    known = skipped.copy()
    assert any(known.values())
    refused.clear()
    skipped.clear()
    said = run(tiny, task, tmp_path / "short", conditions=CONDITIONS)
    assert refused
    # A tiny model's bits may be the same in other shapes.
    assert skipped == known
    assert any(line.startswith("out of memory") for line in said.lines)
    for name in TABLES:
        assert (tmp_path / "short" / f"{name}.parquet").read_bytes() == (
            tmp_path / "whole" / f"{name}.parquet"
        ).read_bytes(), name


def test_a_runs_own_values_put_in_change_no_bit(tiny: Path, task: Path, tmp_path: Path) -> None:
    declared = {"own": {"patch": [{"from": "none", "part": "mlp-output"}]}}
    run(tiny, task, tmp_path / "out", conditions=["none", "mless", *declared], condition=declared)
    assert (values(tmp_path / "out", "own") == values(tmp_path / "out", "none")).all()


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ({"cut": [{"queries": "questions", "keys": "filler"}]}, "no span 'questions'"),
        ({"cut": [{"queries": "question"}]}, "keys"),
        ({"cut": [{"queries": "question", "keys": "system", "layer": 1}]}, "layer"),
        (
            {"cut": [{"queries": "question", "keys": "system", "layers": "9"}]},
            r"condition 'mine', cut: no layer 9: this model's",
        ),
        ({"cut": [{"queries": "question", "keys": "system", "heads": "99"}]}, r"condition 'mine', cut: no head 99"),
        (
            {"cut": [{"queries": "answer", "keys": "filler"}]},
            "the cut names keys = 'filler', but the prompt has no such span",
        ),
        ({"cut": [{"queries": "question", "keys": "all"}]}, "nothing to see but itself"),
        ({"patch": [{"from": "mless", "part": "attention"}]}, "no part 'attention' to patch"),
        ({"patch": [{"part": "residual"}]}, "from"),
        (
            {"patch": [{"from": "mlless", "part": "residual"}]},
            r"takes values from 'mlless', which is no condition of this study \(did you mean 'mless'",
        ),
        ({"patch": [{"from": "put-in", "part": "residual"}]}, "takes values from 'put-in', which is patched itself"),
        ({"patch": [{"from": "mine", "part": "residual"}]}, "takes values from itself"),
        (
            {"patch": [{"from": "mless", "part": "residual"}, {"from": "none", "part": "mlp-output"}]},
            "from one other condition",
        ),
        ({"patch": [{"from": "question-twice", "part": "residual"}]}, "do not hold the same original tokens"),
        ({"patch": [{"from": "mless", "part": "keys-values", "at": "question"}]}, "keys hold positions"),
        ({"patch": [{"from": "mless", "part": "residual", "at": "filler"}]}, "'filler', which is not in both prompts"),
        ({"patch": [{"from": "mless", "part": "mlp-output", "heads": 1}]}, "a patch of mlp-output has no heads"),
        ({"again": True, "cut": [{"queries": "question", "keys": "system"}]}, "takes no cut and no patch"),
    ],
)
def test_bad_input_is_refused_by_name(
    tiny: Path, task: Path, tmp_path: Path, condition: dict[str, Any], why: str
) -> None:
    with pytest.raises((BadStudy, BadPrompt), match=why):
        run(
            tiny,
            task,
            tmp_path / "out",
            conditions=["none", "mless", "put-in", "question-twice", "mine"],
            condition=DECLARED | {"mine": condition},
        )
    assert not (tmp_path / "out" / "units").exists()


@pytest.mark.parametrize("measures", ["likelihood", "accuracy"])
def test_a_family_without_the_part_is_refused_by_name_before_anything_runs(
    task: Path, tmp_path: Path, measures: str
) -> None:
    tokenizer = byte_level()
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=len(tokenizer), **shape, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    declared = {"mine": {"patch": [{"from": "mless", "part": "mlp-activation", "layers": "1"}]}}
    chosen = {"model": str(tmp_path / "moe"), "data": str(task), "length": 3, "prompt": "raw", "condition": declared}
    with pytest.raises(UnsupportedArchitecture, match="layer 1 is a mixture of experts"):
        run_study(load_study(measures, chosen | {"conditions": ["none", "mless", "mine"]}), tmp_path / "out", Heard())
    assert not (tmp_path / "out" / "units").exists()


def test_other_engines_and_measurements_refuse_by_name(tiny: Path, task: Path, tmp_path: Path) -> None:
    chosen = {"model": str(tiny), "data": str(task), "condition": DECLARED, "conditions": ["none", "nobody"]}
    with pytest.raises(BadStudy, match="condition 'nobody' has a cut, so it is more than a filler"):
        run_study(load_study("placebo", chosen | {"conditions": ["nobody"]}), tmp_path / "placebo", Heard())
    scripted = ["likelihood.engine=vllm"]
    with pytest.raises(BadStudy, match="'nobody' cuts attention or takes values from another run, which engine 'vllm'"):
        run_study(load_study("likelihood", chosen, scripted), tmp_path / "vllm", Heard())
