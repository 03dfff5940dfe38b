"""A cause that was planted is found, and nothing else; where none is, none is claimed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from cause_folders import FILLER
from mless.results.folder import ResultFolder
from mless.study import load_study, run_study
from mless.study.cause.cells import Runs, cells, ladder
from mless.study.cause.tables import tables_of_changes
from spelling import model_folder
from study.likelihood.test_likelihood_study import write_task

LAYER, HEAD = 2, 3
ITEMS = 12


def planted(path: Path) -> Path:
    """Three layers whose attention is even and whose parts add nothing, but for one head: it reads how much of what is seen is a slash, and that
    makes some tokens likelier.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    model_folder(path, context=512, num_hidden_layers=3, num_key_value_heads=4)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = LlamaForCausalLM.from_pretrained(path)
    (slash,) = tokenizer(" /", add_special_tokens=False).input_ids
    width = model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, :2] = 0.0
        embedding[slash, 0] = 30.0
        model.lm_head.weight[:, 1] = torch.linspace(-1, 1, len(embedding))
        for layer in model.model.layers:
            attention = layer.self_attn
            for one in (attention.q_proj, attention.k_proj, attention.o_proj, layer.mlp.down_proj):
                one.weight.zero_()
        attention = model.model.layers[LAYER - 1].self_attn
        place = (HEAD - 1) * width
        attention.v_proj.weight[place] = 0.0
        attention.v_proj.weight[place, 0] = 1.0
        attention.o_proj.weight[1, place] = 1.0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("planted")
    chosen = {
        "model": str(planted(root / "model")),
        "data": str(write_task(root / "sums.jsonl", ITEMS)),
        "length": 20,
        "system": "Answer in \\boxed{}.",
    }
    sets = ["likelihood.others=3", "cause.by_head=true", "cause.parts=attention-output,mlp-output"]
    return run_study(load_study("cause", chosen, sets), root / "out").folder


def rows(folder: Path, table: str) -> pl.DataFrame:
    return pl.DataFrame(ResultFolder(folder).read_table(table)).filter(metric="solution")


def test_the_map_names_the_head_and_nothing_else(folder: Path) -> None:
    cells = rows(folder, "cause")
    assert cells.height == 3 * (4 + 1) * 2
    shown = cells.filter(pl.col("p_adjusted") <= 0.05)
    assert shown.select("layer", "part", "head").unique().rows() == [(LAYER, "attention-output", HEAD)]
    assert sorted(shown["direction"]) == ["in", "out"]
    assert shown["share"].to_list() == pytest.approx([1.0, 1.0], abs=1e-3)
    assert (shown["share_lo"] > 0.9).all()
    others = cells.filter((pl.col("layer") != LAYER) | (pl.col("head") != HEAD) | pl.col("head").is_null())
    assert others["effect"].abs().max() == pytest.approx(0.0, abs=1e-6)


def test_the_ladder_says_who_reads_it(folder: Path) -> None:
    """The solution's own tokens look back at the slashes; of the question's only the last one predicts a token of it."""
    steps = {(row["step"], row["against"]): row for row in rows(folder, "ladder").iter_rows(named=True)}
    whole, answer = steps["all", "none"], steps["answer", "nobody"]
    assert abs(whole["delta"]) > 0.01
    assert answer["delta"] / whole["delta"] > 0.8
    assert steps["positions", "none"]["delta"] == pytest.approx(0.0, abs=1e-6)
    assert steps["nobody", "positions"]["delta"] == pytest.approx(0.0, abs=1e-6)


def test_of_the_published_chain_nothing_is_left(folder: Path) -> None:
    links = rows(folder, "chain")
    share = {(row["link"], row["direction"]): row["share"] for row in links.iter_rows(named=True)}
    for way in ("in", "out"):
        assert share["attention-output", way] == pytest.approx(0.0, abs=1e-3)
        assert share["mlp-activation", way] == pytest.approx(0.0, abs=1e-3)
        assert share["elsewhere", way] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("skewed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_where_nothing_is_planted_nothing_is_claimed(skewed: bool) -> None:
    """Simulated: of 80 studies without any cause one in twenty may name a cell. More than 9 come by chance once in a hundred times."""
    rng = np.random.default_rng(4)
    places = cells(FILLER, range(1, 9), ("attention-output", "mlp-output"), (), ("all",))
    runs = Runs(FILLER, {}, places, {})
    columns = {one.name: at for at, one in enumerate(runs.conditions())}
    claims = 0
    for _ in range(80):
        noise = rng.normal(0, 1, (24, len(columns)))
        noise = rng.exponential(1, noise.shape) - 1 if skewed else noise
        whole = rng.normal(0.5, 1, 24)
        noise[:, columns["mless"]] = whole
        for one in places:
            if one.direction == "out":
                noise[:, columns[one.condition.name]] += whole
        made = tables_of_changes({"solution": noise}, runs, {"model": "m", "task": "t"}, seed=0)
        claims += int((pl.DataFrame(made["cause"])["p_adjusted"] <= 0.05).any())
    assert claims <= 9


@pytest.mark.parametrize(("size", "claimed"), [(2e-6, False), (1e-2, True)])
def test_rounding_of_a_filler_that_nobody_sees_is_not_claimed(size: float, claimed: bool) -> None:
    """However often it has one sign. A change of a cell is tested whatever its size."""
    steps = ladder(FILLER)
    places = cells(FILLER, range(1, 3), ("attention-output",), (), ("all",))
    runs = Runs(FILLER, steps, places, {})
    columns = {one.name: at for at, one in enumerate(runs.conditions())}
    changes = np.zeros((24, len(columns)))
    sizes = size * np.random.default_rng(1).uniform(0.5, 1, 24)
    for one in (steps["nobody"], steps["question"], steps["answer"], FILLER, places[0].condition):
        changes[:, columns[one.name]] = sizes
    for one in places:
        if one.direction == "out":
            changes[:, columns[one.condition.name]] = sizes
    made = tables_of_changes({"solution": changes}, runs, {"model": "m", "task": "t"}, seed=0)
    unseen = pl.DataFrame(made["ladder"]).filter(step="nobody", against="positions")
    assert (unseen["p_adjusted"] <= 0.05).to_list() == [claimed]
    assert unseen["delta"][0] == pytest.approx(sizes.mean())
    found = pl.DataFrame(made["cause"])
    assert (found["p_adjusted"] <= 0.05).to_list() == [True] + [False] * (len(places) - 1)
