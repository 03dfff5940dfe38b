"""`mless run cause` for real: its tables against the inner study, resuming, words, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from heard import Heard
from mless.errors import BadFolder, BadStudy
from mless.report import publish
from mless.results.folder import ResultFolder
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.likelihood import measure
from mless.study.verifying import verify
from models.tiny_models import save_tokenizer
from models.walking import save
from spelling import model_folder
from study.likelihood.test_likelihood_study import write_task

ITEMS, LAYERS = 5, 2
#: none and its control, four steps and the filler, layers × 3 parts × 2, and of the chain: activation and both, each way, and ARM.
RUNS = 2 + 5 + LAYERS * 3 * 2 + 4 + 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", context=1024)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "sums.jsonl", ITEMS)


def run_tiny(
    model: Path, data: Path, out: Path, sets: Sequence[str] = (), progress: Heard | None = None, **changes: Any
) -> Outcome:
    chosen = {"model": str(model), "data": str(data), "length": 7, "system": "Answer in \\boxed{}.", "dtype": "float32"}
    chosen |= changes
    return run_study(load_study("cause", chosen, ["likelihood.others=3", *sets]), out, progress or Heard())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Path, task: Path) -> Path:
    path = tmp_path_factory.mktemp("cause") / "results"
    units = ITEMS * RUNS
    assert run_tiny(tiny, task, path) == Outcome(path, units, units)
    return path


def table(folder: Path, name: str) -> pl.DataFrame:
    return pl.DataFrame(ResultFolder(folder).read_table(name))


def changes(folder: Path, condition: str, metric: str = "solution") -> np.ndarray:
    rows = table(folder / "likelihood", "likelihood").filter(condition=condition, metric=metric).sort("item")
    return rows["delta"].to_numpy()


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_the_five_changes_of_the_ladder_add_up_to_the_whole(folder: Path) -> None:
    rows = table(folder, "ladder").filter(metric="solution")
    whole = rows.filter(step="all", against="none")["delta"].item()
    assert rows.filter(pl.col("adds_up"))["delta"].sum() == pytest.approx(whole, abs=1e-12)
    assert whole == pytest.approx(changes(folder, "mless").mean(), abs=1e-12)
    question = changes(folder, "seen-by-question") - changes(folder, "seen-by-nobody")
    assert rows.filter(step="question", against="nobody")["delta"].item() == pytest.approx(question.mean(), abs=1e-12)
    assert rows.filter(pl.col("adds_up"))["p_adjusted"].null_count() == 0
    assert rows.filter(~pl.col("adds_up"))["p_adjusted"].null_count() == 4


def test_the_last_residual_stream_is_the_whole_effect_both_ways(folder: Path) -> None:
    cells = table(folder, "cause").filter(part="residual", layer=LAYERS)
    assert cells.height > 0
    assert (cells["effect"] - cells["whole"]).abs().max() == 0  # to the bit: the patched run is the other one
    shares = cells["share"].drop_nulls()
    assert shares.to_list() == pytest.approx([1.0] * len(shares), abs=1e-12)


def test_effects_and_shares_are_those_of_the_inner_study(folder: Path) -> None:
    cells = table(folder, "cause").filter(metric="solution", part="attention-output", layer=1)
    whole = changes(folder, "mless")
    put_in = changes(folder, "in-attention-output-1")
    taken_out = whole - changes(folder, "out-attention-output-1")
    for direction, effect in (("in", put_in), ("out", taken_out)):
        row = cells.filter(direction=direction).row(0, named=True)
        assert row["effect"] == pytest.approx(effect.mean(), abs=1e-12)
        assert row["whole"] == pytest.approx(whole.mean(), abs=1e-12)
        assert row["base"] == "none"
        if row["share"] is not None:
            assert row["share"] == pytest.approx(effect.mean() / whole.mean())
            assert row["share_lo"] <= row["share"] <= row["share_hi"]
        else:
            assert row["whole_lo"] <= 0 <= row["whole_hi"]


def test_of_the_chain_elsewhere_is_what_both_leave(folder: Path) -> None:
    links = table(folder, "chain").filter(metric="solution")
    assert links.select("link", "direction").height == 9
    whole = changes(folder, "mless").mean()
    for way in ("in", "out"):
        by = {row["link"]: row for row in links.filter(direction=way).iter_rows(named=True)}
        assert by["both"]["effect"] + by["elsewhere"]["effect"] == pytest.approx(whole, abs=1e-12)
    arm, activation = (links.filter(link=name).row(0, named=True) for name in ("arm", "mlp-activation"))
    assert arm["moved"] == pytest.approx(activation["moved"], rel=0.03) or arm["note"]


@pytest.mark.parametrize("skips", [True, False])
def test_a_run_that_starts_late_has_the_numbers_of_one_that_starts_at_the_first_layer(
    skips: bool, folder: Path, tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits where it has all tokens. From a later token on products have other shapes, which some processors round otherwise."""
    started, few = folder, {}
    if not skips:
        few = {"limit": 2}
        monkeypatch.setattr("mless.capture.pairing.first_patched", lambda *_: 0)
        monkeypatch.setattr("mless.capture.cutting.first_cut", lambda *_: 0)
        started = run_tiny(tiny, task, tmp_path / "started", **few).folder
    said = json.loads((started / "likelihood" / "study.json").read_text())["proofs"]["patched runs"]
    assert said == f"start at the first layer{' and token' if skips else ''} that is changed"
    monkeypatch.setattr("mless.intervening.starts_anywhere", lambda *_: "not asked")
    run_tiny(tiny, task, tmp_path / "whole", **few)
    for name in ("ladder", "cause", "chain"):
        one, other = table(tmp_path / "whole", name), table(started, name)
        if skips and "effect" in one.columns:
            assert one["effect"].to_numpy() == pytest.approx(other["effect"].to_numpy(), abs=1e-5)
        else:
            assert one.equals(other)


def test_rows_that_run_together_have_the_same_numbers_every_time(
    folder: Path, tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; there padding is a part of a row's shape, so numbers are near and not the same."""
    monkeypatch.setattr(measure, "ALONE", frozenset())
    together, again = (
        run_tiny(tiny, task, tmp_path / name, [f"group_tokens={tokens}"]).folder
        for name, tokens in (("together", 2048), ("again", 2048))
    )
    for name in ("ladder", "cause", "chain"):
        one, other = table(together, name), table(again, name)
        assert one.equals(other)
    near = table(folder, "cause").join(
        table(together, "cause"), on=["metric", "layer", "part", "direction"], suffix="_together"
    )
    assert (near["effect"] - near["effect_together"]).abs().max() < 1e-4  # pyright: ignore[reportOperatorIssue]


def test_it_is_run_once_and_goes_on_with_the_arm_it_chose(folder: Path, tiny: Path, task: Path) -> None:
    heard = Heard()
    assert run_tiny(tiny, task, folder, progress=heard) == Outcome(folder, 0, ITEMS * RUNS, fresh=False)
    assert not any("layer 1's activations" in line for line in heard.lines)


def test_heads_keys_and_every_second_layer(tiny: Path, task: Path, tmp_path: Path) -> None:
    sets = ["cause.parts=attention-output,keys-values", "cause.by_head=true", "cause.of=map", "cause.every=2"]
    run_tiny(tiny, task, tmp_path / "out", sets, limit=2)
    cells = table(tmp_path / "out", "cause").filter(metric="solution")
    assert cells["layer"].unique().to_list() == [1]
    assert sorted(cells.filter(part="attention-output", direction="in")["head"]) == [1, 2, 3, 4]
    keys = cells.filter(part="keys-values")
    assert keys["base"].to_list() == ["positions", "positions"]
    moved = (changes(tmp_path / "out", "mless") - changes(tmp_path / "out", "positions")).mean()
    assert keys["whole"].to_list() == pytest.approx([moved, moved], abs=1e-12)
    assert table(tmp_path / "out", "ladder").height == 0
    assert table(tmp_path / "out", "chain").height == 0
    publish(tmp_path / "out", fresh=True)
    assert {one.stem for one in (tmp_path / "out" / "figures").glob("*.svg")} == {"cause"}


# ---- words -----------------------------------------------------------------------------------------------------------


def test_words_and_page(folder: Path) -> None:
    lines = verdict_lines(folder)
    assert lines[0] == (
        f"tiny, {ITEMS} items of sums: what the effect of mless (7 × ' /', before-question) is made of, by likelihood"
    )
    said = "\n".join(lines)
    for part in (
        "solution, the ladder: in all",
        "the map, put in:",
        "the map, taken out:",
        "the published chain, put in:",
    ):
        assert part in said
    assert f"with {ITEMS} items no cell of so many can be shown to matter, whatever they do (it takes 9)" in said
    publish(folder, fresh=True)
    assert "taken out" in (folder / "report.html").read_text()
    found = verify(folder, sample=2)
    assert found.state == "whole"


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "changed", "said"),
    [
        (
            [],
            {"conditions": ["none", "mless", "mful"]},
            "takes one filler's effect apart, and the study has mless, mful",
        ),
        ([], {"conditions": ["none"]}, "no filler is named"),
        ([], {"conditions": ["none", "position-only"]}, "inserts nothing"),
        ([], {"placement": "anywhere"}, "stands anywhere in the prompt"),
        ([], {"placement": "before-answer"}, "ends the prompt"),
        ([], {"placement": "end", "prompt": "raw"}, "ends the prompt"),
        (
            [],
            {"conditions": ["none", "positions"], "condition": {"positions": {"filler": " /"}}},
            "is called 'positions' too",
        ),
        (["likelihood.engine=vllm"], {}, "use likelihood.engine=hf"),
        (["cause.parts=keys-values", "cause.at=question"], {}, "put in and taken out whole"),
        (["cause.parts=keys-values", "cause.by=likelihood,accuracy"], {}, "leave accuracy out of by"),
        ([], {"layers": "1-3"}, "no layer 3"),
        (["cause.by_head=true"], {"heads": "9"}, "no head 9"),
        (["cause.parts=attention"], {}, "there are: residual, attention-output"),
        (["cause.parts="], {}, "name at least one"),
        (["cause.of=ladder,ladder"], {}, "each once"),
        (["cause.at=answr"], {}, "no span 'answr'"),
        (["cause.by=guess"], {}, "one or both of likelihood, accuracy"),
        (["cause.parts=residual", "cause.by_head=true"], {}, "only attention-output is apart by head"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_before_anything_runs(
    sets: list[str], changed: dict[str, Any], said: str, tiny: Path, task: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadStudy, match=said):
        run_tiny(tiny, task, tmp_path / "out", sets, **changed)
    assert not (tmp_path / "out").exists()


def test_more_runs_than_a_study_may_have_are_refused(tmp_path: Path, task: Path) -> None:
    deep = model_folder(tmp_path / "deep", num_hidden_layers=70)
    parts = "attention-output,mlp-output,residual,mlp-activation,keys-values"
    with pytest.raises(BadStudy, match=r"cause: 70 layers × 8 parts and heads × 2.*at most 1,000 conditions"):
        run_tiny(deep, task, tmp_path / "out", ["cause.by_head=true", f"cause.parts={parts}"])
    assert not (tmp_path / "out").exists()


def test_another_arm_is_not_passed_over(folder: Path, tiny: Path, task: Path) -> None:
    with pytest.raises(BadFolder, match=r"it differs in (arm|cause)"):
        run_tiny(tiny, task, folder, ["arm.p1=90"])


def test_another_map_in_the_same_folder_is_refused(folder: Path, tiny: Path, task: Path) -> None:
    with pytest.raises(BadFolder, match="it differs in cause"):
        run_tiny(tiny, task, folder, ["cause.every=2"])


# ---- a model that attends in some of its layers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which the second and the fourth attend."""
    folder = tmp_path_factory.mktemp("models") / "hybrid"
    folder.mkdir()
    save("lfm2", folder)
    return save_tokenizer(folder, bos=True)


def test_the_chain_is_refused_where_layer_1_has_no_attention(hybrid: Path, task: Path, tmp_path: Path) -> None:
    says = "layer 1 of hybrid is no softmax attention, so the published chain does not begin there; leave it out: --set cause.of=ladder,map"
    with pytest.raises(BadStudy, match=says):
        run_tiny(hybrid, task, tmp_path / "out", limit=2)
    with pytest.raises(BadStudy, match="layer 1 of hybrid is no softmax attention"):
        run_tiny(hybrid, task, tmp_path / "out", ["cause.of=map"], limit=2, layers="1-2")
    assert not (tmp_path / "out").exists()


def test_a_hybrids_map_has_attention_where_there_is_some(
    hybrid: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run_tiny(hybrid, task, out, ["cause.of=ladder,map"], limit=2)
    # Its convolutions look at earlier tokens, so no run may begin at a later one.
    proofs = json.loads((out / "likelihood" / "study.json").read_text())["proofs"]
    assert proofs["patched runs"].startswith(
        "start at the first layer that is changed, with all tokens: without earlier ones"
    )
    monkeypatch.setattr("mless.capture.pairing.first_patched", lambda *_: 0)
    run_tiny(hybrid, task, tmp_path / "whole", ["cause.of=map"], limit=2)
    assert table(tmp_path / "whole", "cause").equals(table(out, "cause"))
    cells = table(out, "cause")
    assert cells.filter(part="attention-output")["layer"].unique().sort().to_list() == [2, 4]
    assert cells.filter(part="residual")["layer"].unique().sort().to_list() == [1, 2, 3, 4]
    assert verdict_lines(out)[-1].startswith("layers 1, 3 without softmax attention: nothing can be cut there")
    publish(out, fresh=True)
