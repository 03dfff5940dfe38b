"""A study run for real: its tables, held against numbers computed anew here, and what a second run does."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from scipy import stats as scipy_stats
from scipy.optimize import brentq

import mless
from interrupted import about_changed, as_of_format_3, format_3, put_units_back, take_apart
from mless.errors import BadAttention, BadFolder, BadPrompt, BadStudy, UnsupportedArchitecture
from mless.figures import draw
from mless.models import LoadedModel
from mless.results.folder import ResultFolder
from mless.results.storing import Store
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.identity import digest
from mless.values import FigureSpec, Panel
from spelling import CHATML, model_folder

TABLES = ("prompts", "attention", "dilution", "retained", "shares")
SMALL = {"layers": "1-2", "limit": 4, "conditions": "none,mless,random"}
ITEMS, HEADS, LAYERS, CONDITIONS = 4, 9, 2, ["none", "mless", "random"]


class Heard:
    """Notes what a run tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[tuple[int, int]] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def step(self, what: str, done: int, total: int, workers: str = "") -> None:
        if what.startswith("attention"):
            self.steps.append((done, total))

    def checked(self) -> None:
        self.lines.append("checked")


@pytest.fixture(scope="module")
def heard() -> Heard:
    return Heard()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, heard: Heard) -> Path:
    path = tmp_path_factory.mktemp("real") / "results"
    outcome = run_study(load_study("quick", SMALL), path, heard)
    assert outcome == Outcome(path, ITEMS * len(CONDITIONS), ITEMS * len(CONDITIONS))
    return path


@pytest.fixture(scope="module")
def tables(folder: Path) -> dict[str, pl.DataFrame]:
    return {name: pl.read_parquet(folder / f"{name}.parquet") for name in TABLES}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


def run_tiny(model: Path, out: Path, heard: Heard | None = None, **changes: Any) -> Outcome:
    chosen = {"model": str(model), "limit": 3, "length": 5, "conditions": "none,mless", "prompt": "raw", **changes}
    return run_study(load_study("quick", chosen), out, heard)


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny model, to be read or copied."""
    folder = tmp_path_factory.mktemp("plain") / "r"
    run_tiny(tiny, folder)
    return folder


@pytest.fixture(scope="module")
def narrow(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with narrow margins."""
    folder = tmp_path_factory.mktemp("narrow") / "r"
    run_tiny(tiny, folder, **NARROW)
    return folder


def tables_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.parquet").read_bytes() for name in TABLES}


# ---- the file contract ---------------------------------------------------------------------------------------------------

COMMON = {"model": pl.String, "task": pl.String, "condition": pl.String}
MASS = pl.Struct(dict.fromkeys(("start", "system", "filler", "question", "end", "sink"), pl.Float32))
CONTRACT: dict[str, dict[str, Any]] = {
    "prompts": {
        "item": pl.String,
        "token_ids": pl.List(pl.Int32),
        "spans": pl.List(pl.Struct({"name": pl.String, "start": pl.Int32, "stop": pl.Int32})),
        "text": pl.String,
        "tokens": pl.List(pl.String),  # beyond the contract: each token's text, for figures that name tokens
    },
    "attention": {
        "item": pl.String, "layer": pl.Int32, "head": pl.Int32, "queries": pl.String, "received": pl.List(pl.Float32),
        "n": pl.List(pl.Int32), "mass": MASS,
    },
    "retained": {
        "layer": pl.Int32, "head": pl.Int32, "queries": pl.String, "retained": pl.Float64, "lo": pl.Float64, "hi": pl.Float64,
        "epsilon": pl.Float64, "epsilon_lo": pl.Float64, "epsilon_hi": pl.Float64, "epsilon_items": pl.Int32,
        "p": pl.Float64, "p_adjusted": pl.Float64, "n_items": pl.Int32, "uniform": pl.Float64, "skewed": pl.Boolean, "verdict": pl.String,
    },
    "shares": {
        "item": pl.String, "layer": pl.Int32, "head": pl.Int32, "queries": pl.String, "retained": pl.Float64,
        "uniform": pl.Float64, "epsilon": pl.Float64,
    },
    "dilution": {"item": pl.String, "layer": pl.Int32, "queries": pl.String, "received": pl.List(pl.Float32)},
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_the_contracts_columns(tables: dict[str, pl.DataFrame], name: str) -> None:
    assert dict(tables[name].schema) == COMMON | CONTRACT[name]
    assert tables[name]["model"].unique().to_list() == ["SmolLM2-135M-Instruct"]
    assert tables[name]["task"].unique().to_list() == ["bundled"]


def test_every_row_is_there_once(tables: dict[str, pl.DataFrame]) -> None:
    assert tables["prompts"].select("condition", "item").rows() == [
        (condition, f"bundled-{n:02d}") for condition in CONDITIONS for n in range(1, ITEMS + 1)
    ]
    keys = ["condition", "item", "layer", "head", "queries"]
    attention = tables["attention"]
    assert attention.select(keys).n_unique() == attention.height == len(CONDITIONS) * ITEMS * LAYERS * HEADS * 2
    retained = tables["retained"]
    assert retained.select("condition", "layer", "head", "queries").n_unique() == retained.height
    assert retained.height == 2 * LAYERS * (HEADS + 1) * 2
    assert sorted(retained["head"].unique()) == list(range(HEADS + 1))
    shares = tables["shares"]
    assert shares.select(keys).n_unique() == shares.height == retained.height * ITEMS
    assert shares.drop("retained", "uniform", "epsilon").null_count().sum_horizontal()[0] == 0


def test_every_items_shares_give_the_table_of_all(tables: dict[str, pl.DataFrame]) -> None:
    key = ["condition", "layer", "head", "queries"]
    every = (
        tables["shares"]
        .group_by(key)
        .agg(pl.col("epsilon").mean().alias("mean"), pl.col("retained").log().mean().exp())
    )
    together = tables["retained"].join(every, on=key, suffix="_items")
    assert together.height == tables["retained"].height
    assert together["epsilon"].null_count() == 0
    np.testing.assert_allclose(together["epsilon"], together["mean"], rtol=1e-9)
    heads = together.filter(pl.col("head") > 0)
    np.testing.assert_allclose(heads["retained"], heads["retained_items"], rtol=1e-9)
    assert (together["epsilon_lo"] <= together["epsilon"]).all()
    assert (together["epsilon"] <= together["epsilon_hi"]).all()
    one = tables["shares"].filter(pl.col("head") > 0)
    np.testing.assert_allclose(one["epsilon"], np.log(one["retained"]) / np.log(one["uniform"]), rtol=1e-9)


def test_prompts_are_what_their_spans_and_text_say(tables: dict[str, pl.DataFrame], embedded: LoadedModel) -> None:
    original: dict[str, list[int]] = {}
    for row in tables["prompts"].iter_rows(named=True):
        names = names_of(row)
        assert len(names) == len(row["token_ids"]) == len(row["tokens"])
        assert row["text"] == embedded.tokenizer.decode(row["token_ids"])
        assert names.count("filler") == (0 if row["condition"] == "none" else 55)
        kept = [token for token, name in zip(row["token_ids"], names, strict=True) if name != "filler"]
        assert original.setdefault(row["item"], kept) == kept


def names_of(prompt: dict[str, Any]) -> list[str]:
    return [span["name"] for span in prompt["spans"] for _ in range(span["start"], span["stop"])]


def test_attention_is_counted_and_sums_as_defined(tables: dict[str, pl.DataFrame]) -> None:
    names = {(p["condition"], p["item"]): names_of(p) for p in tables["prompts"].iter_rows(named=True)}
    for row in tables["attention"].iter_rows(named=True):
        spans = names[row["condition"], row["item"]]
        queries = [row["queries"] == "later" or name != "filler" for name in spans]
        assert row["n"] == [sum(queries[j + 1 :]) for j in range(len(spans))]
        assert [value is None for value in row["received"]] == [n == 0 for n in row["n"]]
        assert sum(row["mass"].values()) == pytest.approx(1, abs=1e-5)
        assert (row["mass"]["filler"] == 0) == (row["condition"] == "none")
        assert row["mass"]["sink"] == 0
    # every later query gives all of its attention to itself and earlier tokens: less than one each
    later = tables["attention"].filter(pl.col("queries") == "later")
    totals = [np.nansum(np.array(r, float) * n) / (len(n) - 1) for r, n in later.select("received", "n").rows()]
    assert 0 < min(totals) <= max(totals) <= 1


# ---- retained shares, computed anew --------------------------------------------------------------------------------------


def question_sums(tables: dict[str, pl.DataFrame], queries: str) -> dict[tuple[str, str], np.ndarray]:
    """(condition, item) → Σ received over the question's tokens with n > 0, by layer and head."""
    sums: dict[tuple[str, str], np.ndarray] = {}
    names = {(p["condition"], p["item"]): names_of(p) for p in tables["prompts"].iter_rows(named=True)}
    for row in tables["attention"].filter(pl.col("queries") == queries).iter_rows(named=True):
        key = row["condition"], row["item"]
        values = [
            v for v, n, name in zip(row["received"], row["n"], names[key], strict=True) if name == "question" and n
        ]
        sums.setdefault(key, np.zeros((LAYERS, HEADS)))[row["layer"] - 1, row["head"] - 1] = sum(values)
    return sums


def sign_flip(logs: np.ndarray) -> float:
    """Every pattern of signs, one by one."""
    sums = [
        abs(sum(s * x for s, x in zip(signs, logs, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(logs))
    ]
    return float(np.mean([total >= abs(logs.sum()) - 1e-12 for total in sums]))


def holm(p: list[float]) -> list[float]:
    order = np.argsort(p, kind="stable")
    adjusted, running = np.empty(len(p)), 0.0
    for rank, at in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[at]))
        adjusted[at] = running
    return adjusted.tolist()


def interval(center: float, scores: np.ndarray) -> tuple[float, float]:
    """Student's limits, or Hall's where they lie further out: the t for which his g(t) is Student's, found by bisection."""
    n = len(scores)
    t, error = float(scipy_stats.t.ppf(0.975, n - 1)), scores.std(ddof=1) / np.sqrt(n)
    a = float(scipy_stats.skew(scores, bias=False)) * (1 + 5 / n) / np.sqrt(n)

    def solved(target: float) -> float:
        return brentq(lambda x: x + a * x**2 / 3 + a**2 * x**3 / 27 + a / 6 - target, -1e6, 1e6, xtol=1e-12)

    lo, hi = center - max(t, solved(t)) * error, center - min(-t, solved(-t)) * error
    return float(np.exp(lo)), float(np.exp(hi))


@pytest.mark.parametrize("queries", ["original", "later"])
@pytest.mark.parametrize("condition", ["mless", "random"])
def test_retained_rows_equal_an_independent_computation(
    tables: dict[str, pl.DataFrame], condition: str, queries: str
) -> None:
    sums = question_sums(tables, queries)
    items = sorted({item for _, item in sums})
    logs = np.log(np.stack([sums[condition, item] / sums["none", item] for item in items]))
    rows = {
        (row["layer"], row["head"]): row
        for row in tables["retained"]
        .filter((pl.col("condition") == condition) & (pl.col("queries") == queries))
        .iter_rows(named=True)
    }
    p: list[float] = []
    for layer in range(LAYERS):
        shares = np.exp(logs[:, layer].mean(axis=0))
        for head in range(HEADS):
            row = rows[layer + 1, head + 1]
            mine = logs[:, layer, head]
            assert row["retained"] == pytest.approx(shares[head], rel=1e-6)
            assert (row["lo"], row["hi"]) == pytest.approx(interval(mine.mean(), mine), rel=1e-5)
            assert row["p"] == sign_flip(mine)
            assert row["n_items"] == ITEMS
            p.append(row["p"])
        row = rows[layer + 1, 0]
        scores = (logs[:, layer] * (shares / shares.sum())).sum(axis=1)
        assert row["retained"] == pytest.approx(shares.mean(), rel=1e-6)
        assert (row["lo"], row["hi"]) == pytest.approx(interval(np.log(shares.mean()), scores), rel=1e-5)
    adjusted = [rows[layer, head]["p_adjusted"] for layer in (1, 2) for head in range(1, HEADS + 1)]
    assert adjusted == pytest.approx(holm(p))
    for row in rows.values():
        lo, hi = row["lo"], row["hi"]
        expected = (
            "drops" if hi < 0.95 else "rises" if lo > 1.05 else "unchanged" if lo >= 0.9 and hi <= 1.1 else "undecided"
        )
        assert row["verdict"] == expected


@pytest.mark.parametrize("queries", ["original", "later"])
def test_uniform_dilution_is_the_closed_form(tables: dict[str, pl.DataFrame], queries: str) -> None:
    """A query at i of a full-causal model that spreads evenly gives 1/(i + 1) to each key."""

    def even(prompt: dict[str, Any]) -> float:
        names = names_of(prompt)
        asks = np.array([queries == "later" or name != "filler" for name in names])
        gives = asks / np.arange(1, len(names) + 1)
        received = [
            gives[j + 1 :].sum() / asks[j + 1 :].sum()
            for j, name in enumerate(names)
            if name == "question" and asks[j + 1 :].any()
        ]
        return float(np.sum(received))

    sums = {(p["condition"], p["item"]): even(p) for p in tables["prompts"].iter_rows(named=True)}
    for condition in ("mless", "random"):
        logs = [np.log(sums[condition, item] / sums["none", item]) for kind, item in sums if kind == "none"]
        found = tables["retained"].filter((pl.col("condition") == condition) & (pl.col("queries") == queries))[
            "uniform"
        ]
        assert found.to_numpy() == pytest.approx(np.exp(np.mean(logs)), rel=1e-5)


def test_layer_one_drops_as_known_for_this_model(tables: dict[str, pl.DataFrame]) -> None:
    layers = tables["retained"].filter((pl.col("head") == 0) & (pl.col("queries") == "original"))
    share = layers.filter((pl.col("condition") == "mless") & (pl.col("layer") == 1)).row(0, named=True)
    assert 0.65 < share["retained"] < 0.85
    assert share["verdict"] == "drops"
    assert share["retained"] > share["uniform"] + 0.1


# ---- study.json and what is told -----------------------------------------------------------------------------------------


def test_the_manifest_says_what_was_run(folder: Path) -> None:
    about = json.loads((folder / "study.json").read_text())
    assert about["complete"] is True
    assert about["study"]["margins"] == {"drop": 0.95, "rise": 1.05, "same": [0.9, 1.1]}  # every default is spelled out
    mless = about["conditions"]["mless"]
    assert {
        "name": "mless", "kind": "repeat", "filler": " /", "length": 55, "placement": "before-question", "arm": None,
    }.items() <= mless.items()  # fmt: skip
    assert {mless[key] for key in ("system", "question", "samples", "temperature")} == {None}  # those are for answers
    assert about["model"]["label"] == "SmolLM2-135M-Instruct"
    assert {"fingerprint", "layers", "heads"} <= about["model"].keys()
    assert about["tokenizer"]["fingerprint"]
    assert {"torch", "transformers", "numpy"} <= about["versions"].keys()
    assert {"seeds", "device", "implementations", "timings"} <= about.keys()
    assert about["command"][:3] == ["mless", "run", "quick"]


def test_the_manifest_says_which_kernel_computed(
    folder: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels(path: Path) -> list[str]:
        return json.loads((path / "study.json").read_text())["implementations"]["received"]

    assert kernels(folder) == ["joint"]
    assert json.loads((folder / "study.json").read_text())["implementations"]["forward"] == ["joint"]
    # Stopped half-way it is on record already, and a run that goes on with another kernel adds that one.
    half, put, stored = tmp_path / "half", Store.put, []

    def once(self: Store, *args: Any) -> None:
        if stored:
            raise KeyboardInterrupt
        stored.append(put(self, *args))

    monkeypatch.setattr(Store, "put", once)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tiny, half)
    assert kernels(half) == ["joint"]
    monkeypatch.setattr(Store, "put", put)
    monkeypatch.setattr("mless.kernels.attended", lambda *args, **named: None)
    monkeypatch.setattr("mless.kernels.implementation", lambda *args, **named: "another")
    run_tiny(tiny, half)
    assert kernels(half) == ["another", "joint"]
    # Made anew from stored tables or from stored units, nothing is computed and nothing forgotten.
    (half / "retained.parquet").unlink()
    assert run_tiny(tiny, half).computed == 0
    assert kernels(half) == ["another", "joint"]
    take_apart(half)
    assert run_tiny(tiny, half).computed == 0
    assert kernels(half) == ["another", "joint"]


def test_progress_is_told(folder: Path, heard: Heard) -> None:
    assert folder.exists()
    assert any(line.startswith("prompts: raw; system text: '") for line in heard.lines)
    assert "loading SmolLM2-135M-Instruct, layers 1–2 of 30" in heard.lines
    assert heard.steps == [(n, 12) for n in range(1, 13)]


def test_the_verdict_of_a_real_run(folder: Path) -> None:
    lines = verdict_lines(folder)
    assert lines[0].startswith("SmolLM2-135M-Instruct, 4 items of bundled, raw prompts; retained share λ = ")
    assert lines[1].startswith("mless (55 × ' /', before-question): layer 1 drops, ")
    assert lines[2].startswith("random (55 tokens of natural text, before-question): layer 1 drops, ")
    assert lines[3].startswith("The published claim (layer 1 drops, later layers do not change) ")
    assert lines[4].startswith(
        "4 items are too few for the sign-flip test ever to reject after Holm over 18 rows (it takes 10)"
    )


# ---- running it again ----------------------------------------------------------------------------------------------------


def test_a_second_run_computes_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert run_study(load_study("quick", SMALL), folder) == Outcome(folder, 0, 12, fresh=False)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_only_groups_with_missing_units_are_computed_again(tiny: Path, plain: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(plain, copy)
    store = take_apart(copy)
    store.unit_path("attention", "none-00003").unlink()
    store.unit_path("dilution", "mless-00002").unlink()
    heard = Heard()
    # All prompts of a condition are one group here, and a group runs as it did the first time.
    assert run_tiny(tiny, copy, heard).computed == 6
    assert heard.steps[-1] == (6, 6)
    assert {done for done, _ in heard.steps} == {4, 5, 6}
    assert tables_of(copy) == tables_of(plain)


def test_units_are_removed_once_the_tables_hold_them(folder: Path, tmp_path: Path) -> None:
    assert not (folder / "units").exists()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    put_units_back(copy)  # as a run leaves them that is killed after its last word
    assert run_study(load_study("quick", SMALL), copy) == Outcome(copy, 0, 12, fresh=False)
    assert not (copy / "units").exists()
    assert tables_of(copy) == tables_of(folder)


def test_a_missing_table_is_made_again(
    tiny: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the tables that it follows from, without a model, or from the prompts; one that holds what was measured is measured again."""
    shutil.copytree(plain, tmp_path / "r")
    before = tables_of(tmp_path / "r")
    for name in TABLES:
        (tmp_path / "r" / f"{name}.parquet").unlink()
        with monkeypatch.context() as scope:
            if name in ("retained", "shares"):
                scope.setattr("mless.models.load", unwanted)
            outcome = run_tiny(tiny, tmp_path / "r")
        assert outcome == Outcome(tmp_path / "r", 6 if name in ("attention", "dilution") else 0, 6)
        assert tables_of(tmp_path / "r") == before


def unwanted(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("nothing was to be loaded here")


# ---- judged anew ---------------------------------------------------------------------------------------------------------

#: Margins that no interval of the tiny model fits as it fits the usual ones.
NARROW: dict[str, Any] = {"margins.drop": 0.9999, "margins.rise": 1.0001, "margins.same": [0.99999, 1.00001]}


@pytest.mark.parametrize(
    "changes", [NARROW, {"flips": 200_000}, pytest.param(NARROW | {"flips": 200_000}, marks=pytest.mark.slow)]
)
def test_other_margins_and_flips_need_no_model(
    tiny: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    shutil.copytree(plain, tmp_path / "r")
    old = tables_of(tmp_path / "r")
    run_tiny(tiny, tmp_path / "fresh", **changes)
    monkeypatch.setattr("mless.models.load", unwanted)
    assert run_tiny(tiny, tmp_path / "r", **changes) == Outcome(tmp_path / "r", 0, 6)
    assert tables_of(tmp_path / "r") == tables_of(tmp_path / "fresh")
    assert (tables_of(tmp_path / "r") != old) is ("margins.drop" in changes)  # few items are tested exactly
    assert about_of(tmp_path / "r") == about_of(tmp_path / "fresh")
    assert run_tiny(tiny, tmp_path / "r", **changes) == Outcome(tmp_path / "r", 0, 6, fresh=False)
    assert run_tiny(tiny, tmp_path / "r").fresh  # and back
    assert tables_of(tmp_path / "r") == old


def about_of(folder: Path) -> dict[str, Any]:
    """What study.json says, but for what differs between any two runs."""
    about = json.loads((folder / "study.json").read_text())
    del about["timings"], about["sha256"]
    about["command"].remove(str(folder))
    return about


def test_an_interrupted_run_ends_by_the_margins_it_goes_on_with(
    tiny: Path, plain: Path, narrow: Path, tmp_path: Path
) -> None:
    shutil.copytree(plain, tmp_path / "r")
    take_apart(tmp_path / "r").unit_path("attention", "mless-00002").unlink()
    assert run_tiny(tiny, tmp_path / "r", **NARROW).computed == 3
    assert tables_of(tmp_path / "r") == tables_of(narrow)
    assert about_of(tmp_path / "r") == about_of(narrow)


@contextmanager
def killed_before(moment: str, last: Callable[[dict[str, Any]], bool]) -> Generator[None]:
    """The run in here ends before it writes that table, or its last word in study.json."""
    write_table, write_manifest = ResultFolder.write_table, ResultFolder.write_manifest

    def table(self: ResultFolder, name: str, content: Any) -> None:
        if name == moment:
            raise KeyboardInterrupt
        write_table(self, name, content)

    def manifest(self: ResultFolder, content: Any) -> None:
        if moment == "study.json" and last(content):
            raise KeyboardInterrupt
        write_manifest(self, content)

    with pytest.MonkeyPatch.context() as scope:
        scope.setattr(ResultFolder, "write_table", table)
        scope.setattr(ResultFolder, "write_manifest", manifest)
        with pytest.raises(KeyboardInterrupt):
            yield


def is_narrow(about: dict[str, Any]) -> bool:
    return about["study"]["margins"]["drop"] == NARROW["margins.drop"]


@pytest.mark.parametrize("moment", ["retained", "shares", "study.json"])
def test_a_run_killed_after_its_tables_got_their_places_measures_nothing_again(
    tiny: Path, plain: Path, tmp_path: Path, moment: str
) -> None:
    out = tmp_path / "r"
    with killed_before(moment, lambda about: about["complete"]):
        run_tiny(tiny, out)
    assert (out / "attention.parquet").exists()
    assert run_tiny(tiny, out) == Outcome(out, 0, 6)
    assert tables_of(out) == tables_of(plain)
    assert not (out / "units").exists()


@pytest.mark.parametrize("moment", ["retained", "shares", "study.json"])
@pytest.mark.parametrize("asked", [{}, NARROW], ids=["as before", "as asked"])
def test_a_run_killed_while_it_judges_again_loses_nothing(
    tiny: Path,
    plain: Path,
    narrow: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    asked: dict[str, Any],
) -> None:
    """Killed before it writes one of the two tables or its last word; the next run wants the old margins, or the new ones."""
    out = tmp_path / "r"
    shutil.copytree(plain, out)
    fresh = narrow if asked else plain
    monkeypatch.setattr("mless.models.load", unwanted)
    with killed_before(moment, is_narrow):
        run_tiny(tiny, out, **NARROW)
    assert json.loads((out / "study.json").read_text())["complete"] is True
    assert run_tiny(tiny, out, **asked) == Outcome(out, 0, 6)
    assert tables_of(out) == tables_of(fresh)
    assert about_of(out) == about_of(fresh)


def test_a_folder_of_before_is_judged_anew_too(
    tiny: Path, plain: Path, narrow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its study.json has margins among what must agree, and no digest of how it was judged."""
    out = tmp_path / "r"
    shutil.copytree(plain, out)
    with about_changed(out) as about:
        del about["analysis"]
        about["identity"] |= {name: digest(about["study"][name]) for name in ("margins", "flips")}
    monkeypatch.setattr("mless.models.load", unwanted)
    assert run_tiny(tiny, out) == Outcome(out, 0, 6, fresh=False)
    assert run_tiny(tiny, out, **NARROW) == Outcome(out, 0, 6)
    assert tables_of(out) == tables_of(narrow)


def test_judged_anew_a_folder_keeps_the_size_of_its_groups(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives other margins need not say it again. Whoever computes some of it anew needs it."""
    out = tmp_path / "r"
    run_tiny(tiny, out, group_tokens=60)
    monkeypatch.setattr("mless.models.load", unwanted)
    assert run_tiny(tiny, out, **NARROW) == Outcome(out, 0, 6)
    about = about_of(out)
    assert about["study"]["group_tokens"] == about["group_tokens"] == 60
    assert "group_tokens=60" in about["command"]


# ---- folders of format 3 ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with each prompt alone, as prompts ran before format 4."""
    folder = tmp_path_factory.mktemp("alone") / "r"
    run_tiny(tiny, folder, batch_size=1)
    return folder


@pytest.fixture
def of_format_3(alone: Path, tmp_path: Path) -> Path:
    """That folder as it was stored then."""
    shutil.copytree(alone, tmp_path / "old")
    as_of_format_3(tmp_path / "old")
    return tmp_path / "old"


def drawn(folder: Path, out: Path) -> list[bytes]:
    """Pictures of one item's attention and of all shares."""
    one = FigureSpec("one", "heads", (Panel(ResultFolder(folder).manifest()["model"]["label"], 1, 1),))  # pyright: ignore[reportOptionalSubscript]
    every = FigureSpec("all", "retained", (), ("none", "mless"))
    return [path.read_bytes() for spec in (one, every) for path in draw(spec, [folder], formats=["svg"], out=out)]


def test_a_folder_of_format_3_is_judged_anew_more_than_once(
    tiny: Path, alone: Path, of_format_3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts ran one by one, which nobody had to ask for then. It gives the tables and pictures that one of today gives."""
    old, new = of_format_3, tmp_path / "new"
    shutil.copytree(alone, new)
    measured = {name: rows for name, rows in tables_of(old).items() if name not in ("retained", "shares")}
    assert not {*measured.values()} & {*tables_of(new).values()}
    monkeypatch.setattr("mless.models.load", unwanted)
    assert verdict_lines(old) == verdict_lines(new)
    assert run_tiny(tiny, old) == Outcome(old, 0, 6, fresh=False)
    for asked in (NARROW, {}):
        assert run_tiny(tiny, old, **asked) == Outcome(old, 0, 6)
        assert run_tiny(tiny, new, batch_size=1, **asked) == Outcome(new, 0, 6)
        assert tables_of(old) == tables_of(new) | measured
        assert verdict_lines(old) == verdict_lines(new)
    assert drawn(old, tmp_path / "a") == drawn(new, tmp_path / "b")
    about = ResultFolder(old).manifest() or {}
    assert (about["study"]["batch_size"], about["units_format"]) == (1, 3)
    with pytest.raises(BadFolder, match=r"holds another study.*batch_size"):
        run_tiny(tiny, old, batch_size=2)


def test_units_of_a_folder_of_format_3_are_those_of_today(alone: Path, of_format_3: Path) -> None:
    keys = [f"{condition}-{number:05d}" for condition in ("none", "mless") for number in (1, 2, 3)]
    old, new = ResultFolder(of_format_3), ResultFolder(alone)
    for name in ("attention", "dilution"):
        assert [old.read_part(name, key, keys) for key in keys] == [new.read_part(name, key, keys) for key in keys]
        assert old.read_table(name) == new.read_table(name)


@pytest.mark.parametrize("moment", ["retained", "shares", "study.json"])
def test_a_folder_of_format_3_is_still_known_after_a_kill(
    tiny: Path, alone: Path, of_format_3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """study.json gets today's format before the tables are judged, and the way its prompts ran must not be forgotten then."""
    shutil.copytree(alone, tmp_path / "new")
    monkeypatch.setattr("mless.models.load", unwanted)
    run_tiny(tiny, tmp_path / "new", batch_size=1, **NARROW)
    with killed_before(moment, is_narrow):
        run_tiny(tiny, of_format_3, **NARROW)
    assert run_tiny(tiny, of_format_3, **NARROW) == Outcome(of_format_3, 0, 6)
    assert verdict_lines(of_format_3) == verdict_lines(tmp_path / "new")
    for name in ("retained", "shares"):
        assert tables_of(of_format_3)[name] == tables_of(tmp_path / "new")[name]


@pytest.mark.parametrize("lacks", ["a unit", "a table"])
def test_an_unfinished_folder_of_format_3_goes_on_once_its_prompts_run_alone(
    tiny: Path, alone: Path, of_format_3: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    if lacks == "a unit":
        with format_3():
            take_apart(of_format_3).unit_path("attention", "mless-00002").unlink()
    else:
        (of_format_3 / "dilution.parquet").unlink()
    before = {path: path.read_bytes() for path in of_format_3.rglob("*") if path.is_file()}
    with monkeypatch.context() as scope:
        scope.setattr("mless.models.load", unwanted)
        with pytest.raises(
            BadFolder, match=r"begun by an older mless, .*; add --set batch_size=1 to go on with it, or"
        ):
            run_tiny(tiny, of_format_3)
    assert {path: path.read_bytes() for path in of_format_3.rglob("*") if path.is_file()} == before
    assert run_tiny(tiny, of_format_3, batch_size=1).computed == (1 if lacks == "a unit" else 6)
    assert tables_of(of_format_3) == tables_of(alone)


def test_a_table_of_format_3_outlives_a_run_that_is_killed(tiny: Path, alone: Path, of_format_3: Path) -> None:
    """Another table is gone, so all is measured again; until that is done, the one that is left stays."""
    (of_format_3 / "dilution.parquet").unlink()
    left = (of_format_3 / "attention.parquet").read_bytes()
    with killed_before("prompts", bool):
        run_tiny(tiny, of_format_3, batch_size=1)
    assert (of_format_3 / "attention.parquet").read_bytes() == left
    assert run_tiny(tiny, of_format_3, batch_size=1) == Outcome(of_format_3, 0, 6)
    assert tables_of(of_format_3) == tables_of(alone)


def test_a_format_of_units_that_is_null_is_as_if_left_out(tiny: Path, plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "r")
    with about_changed(tmp_path / "r") as about:
        about["units_format"] = None
    assert run_tiny(tiny, tmp_path / "r") == Outcome(tmp_path / "r", 0, 6, fresh=False)


# ---- other studies in the same folder ----------------------------------------------------------------------------------------


def test_without_out_a_run_finds_the_numbers_it_can_judge_anew(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = {"model": str(tiny), "limit": 1, "length": 5, "conditions": "none,mless", "prompt": "raw"}
    first = run_study(load_study("quick", chosen))
    assert run_study(load_study("quick", chosen | NARROW)) == Outcome(first.folder, 0, 2)
    # The sign-flip test of an affine study is made of its units, so there another number of flips is another study.
    first = run_study(load_study("affine", chosen))
    assert run_study(load_study("affine", chosen | NARROW)) == Outcome(first.folder, 0, 2)
    assert run_study(load_study("affine", chosen | {"flips": 200_000})).folder != first.folder


def test_margins_that_make_no_sense_are_refused_before_anything_is_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mless.models.load", unwanted)
    with pytest.raises(BadStudy, match="margin drop must lie above 0 and not above 1"):
        run_tiny(tiny, tmp_path / "r", **{"margins.drop": 1.5})
    assert not (tmp_path / "r").exists()


def test_what_a_run_killed_at_its_start_leaves_is_taken_over(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    out.mkdir()
    (out / ".lock").touch()
    (out / ".study.json.x.partial").write_text("{")
    assert run_tiny(tiny, out).computed == 6
    assert not list(out.glob(".*.partial"))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"length": 6}, "length"),
        ({"seed": 1}, "seed"),
        ({"limit": 2}, "data"),
        ({"layers": "1", "heads": "2"}, "heads, layers"),
    ],
)
def test_another_study_in_the_same_folder_is_refused(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], difference: str
) -> None:
    out = tmp_path_factory.getbasetemp() / "taken"
    run_tiny(tiny, out)
    before = tables_of(out)
    why = f"holds another study \\('quick'\\): it differs in {difference}; choose another --out, or remove the folder"
    with pytest.raises(BadFolder, match=why):
        run_tiny(tiny, out, **changes)
    assert tables_of(out) == before


def test_another_model_or_tokenizer_under_the_same_name_is_refused(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    shutil.copytree(tiny, model)
    run_tiny(model, tmp_path / "r")
    shutil.rmtree(model)
    model_folder(model, template=CHATML)  # the same weights, another tokenizer
    with pytest.raises(BadFolder, match="it differs in tokenizer files; choose"):
        run_tiny(model, tmp_path / "r")
    shutil.rmtree(model)
    model_folder(model, seed=1)
    with pytest.raises(BadFolder, match="it differs in model's weights; choose"):
        run_tiny(model, tmp_path / "r")


def test_the_given_tokenizers_content_counts_and_not_its_path(tiny: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in tiny.glob("tokenizer*"):
            shutil.copy(file, tmp_path / name)
    assert run_tiny(tiny, tmp_path / "r", tokenizer=str(tmp_path / "one")).computed == 6
    assert run_tiny(tiny, tmp_path / "r", tokenizer=str(tmp_path / "two")).computed == 0
    settings = tmp_path / "two" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 7}))
    with pytest.raises(BadFolder, match="it differs in tokenizer files"):
        run_tiny(tiny, tmp_path / "r", tokenizer=str(tmp_path / "two"))


def test_a_foreign_folder_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(BadFolder, match=r"is not empty and holds no study\.json; choose another --out"):
        run_tiny(tiny, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_somebody_writes_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    out = ResultFolder(tmp_path / "r")
    with out.writing(), pytest.raises(BadFolder, match="another mless is writing"):
        run_tiny(tiny, out.path)
    assert run_tiny(tiny, out.path).computed == 6


# ---- the same numbers by other roads -------------------------------------------------------------------------------------


def test_batches_give_the_same_numbers(tiny: Path, plain: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "r", batch_size=3)
    for name in ("attention", "dilution", "retained"):
        # Read by mless, which puts rows in the order of the items: they lie in the order in which they ran.
        tables = (ResultFolder(path).read_table(name) for path in (tmp_path / "r", plain))
        batched, alone = map(pl.DataFrame, tables)
        assert_frame_equal(batched, alone, abs_tol=1e-5, rel_tol=1e-5)


def test_a_group_that_does_not_fit_into_memory_runs_in_halves(
    tiny: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from mless import capture

    run, tried = capture.received_later, []

    def little_memory(model: Any, prompts: Any, **named: Any) -> Any:
        tried.append(len(prompts))
        if len(prompts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return run(model, prompts, **named)

    monkeypatch.setattr(capture, "received_later", little_memory)
    heard = Heard()
    run_tiny(tiny, tmp_path / "r", heard)
    assert tried == [3, 1, 2, 1, 1] * 2
    assert (
        sum(line.startswith("out of memory with 3 prompts at once: this group runs in halves.") for line in heard.lines)
        == 2
    )
    assert json.loads((tmp_path / "r" / "study.json").read_text())["groups_halved"] == 4
    for name in ("attention", "dilution", "retained"):
        halved, whole = (pl.read_parquet(path / f"{name}.parquet") for path in (tmp_path / "r", plain))
        assert_frame_equal(halved, whole, abs_tol=1e-5, rel_tol=1e-5)


def test_chosen_heads_and_layers_are_the_whole_runs_rows(tiny: Path, plain: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "some", layers="2", heads="1,4")
    keys = (pl.col("layer") == 2) & pl.col("head").is_in([1, 4])
    whole = pl.read_parquet(plain / "attention.parquet").filter(keys)
    assert_frame_equal(pl.read_parquet(tmp_path / "some" / "attention.parquet"), whole, abs_tol=1e-6)


def test_a_run_from_a_script_is_the_same(tiny: Path, plain: Path, tmp_path: Path) -> None:
    outcome = mless.run(
        "quick", tmp_path / "b", model=str(tiny), limit=3, length=5, conditions=["none", "mless"], prompt="raw"
    )
    assert tables_of(outcome.folder) == tables_of(plain)


# ---- edges ---------------------------------------------------------------------------------------------------------------


def data(path: Path, *questions: str) -> str:
    path.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions), encoding="utf-8")
    return str(path)


def test_positions_alone_are_a_condition(tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "out", conditions="none,mless,position-only,random-tokens")
    prompts = pl.read_parquet(tmp_path / "out" / "prompts.parquet")
    ids = {
        name: prompts.filter(pl.col("condition") == name)["token_ids"].to_list() for name in ("none", "position-only")
    }
    assert ids["position-only"] == ids["none"]
    retained = pl.read_parquet(tmp_path / "out" / "retained.parquet").filter(pl.col("condition") == "position-only")
    assert retained["uniform"].to_list() == pytest.approx([1.0] * len(retained))  # no key was added
    assert retained["retained"].is_finite().all()
    assert (retained["retained"] - 1).abs().max() > 1e-6  # but distances changed, if little in a random model
    lines = verdict_lines(tmp_path / "out")
    assert any(line.startswith("position-only (positions moved on by 5, before-question, no token") for line in lines)
    assert any(line.startswith("random-tokens (5 random tokens, before-question)") for line in lines)


def as_of_format_1(folder: Path, placement: str | None = None) -> None:
    """A finished folder as an older mless has left it."""
    with about_changed(folder, number=1) as about:
        del about["analysis"]  # which studies of attention did not have
        if placement is not None:
            about["study"]["placement"] = placement
            about["conditions"]["mless"]["placement"] = placement
            about["identity"]["placement"] = digest(placement)


OLDER = r"made by an older mless \(format 1\), which stored no checksums .* still open, but it is not continued .*another --out"


@pytest.mark.parametrize("finished", [True, False])
def test_an_older_folder_opens_but_is_not_continued(tiny: Path, plain: Path, tmp_path: Path, finished: bool) -> None:
    shutil.copytree(plain, tmp_path / "out")
    lines = verdict_lines(tmp_path / "out")
    as_of_format_1(tmp_path / "out")
    assert verdict_lines(tmp_path / "out") == lines
    if not finished:
        (tmp_path / "out" / "attention.parquet").unlink()
    before = tables_of(tmp_path / "out") if finished else None
    with pytest.raises(BadFolder, match=OLDER):
        run_tiny(tiny, tmp_path / "out")
    assert before is None or tables_of(tmp_path / "out") == before


def test_an_older_folder_whose_end_was_before_the_answer_is_not_mixed_in(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", template=CHATML)
    out = tmp_path / "out"
    run_tiny(model, out, prompt="chat", placement="before-answer")
    as_of_format_1(out, "end")
    assert (ResultFolder(out).manifest() or {})["conditions"]["mless"]["placement"] == "before-answer"
    assert any(line.startswith("mless (5 × ' /', before-answer)") for line in verdict_lines(out))
    with pytest.raises(BadFolder, match=OLDER):
        run_tiny(model, out, prompt="chat", placement="end")


def test_a_question_nobody_later_sees_is_undecided(tiny: Path, tmp_path: Path) -> None:
    """In a raw prompt a question of one token is the last token."""
    source = data(tmp_path / "d.jsonl", "7", "8", "9")
    run_tiny(tiny, tmp_path / "r", data=source)
    rows = pl.read_parquet(tmp_path / "r" / "retained.parquet")
    assert rows["retained"].null_count() == rows.height
    assert rows["verdict"].unique().to_list() == ["undecided"]
    assert rows["n_items"].unique().to_list() == [0]
    lines = verdict_lines(tmp_path / "r")
    assert "layer 1 undecided: the share is undefined (no later token sees the question); layer 2 undecided" in lines[1]


def test_one_item_gives_shares_without_intervals(tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "r", limit=1)
    rows = pl.read_parquet(tmp_path / "r" / "retained.parquet")
    assert rows["retained"].null_count() == 0
    assert rows["lo"].null_count() == rows["p"].null_count() == rows.height
    lines = verdict_lines(tmp_path / "r")
    assert lines[0].startswith("tiny, 1 item of bundled")
    assert "layer 1 undecided" in lines[1]
    assert lines[-1].startswith("An interval and a test take at least 2 items whose share is defined")


def test_only_none_is_a_study_too(tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "r", conditions="none")
    empty = pl.read_parquet(tmp_path / "r" / "retained.parquet")
    assert empty.is_empty()
    assert dict(empty.schema) == COMMON | CONTRACT["retained"]
    assert len(verdict_lines(tmp_path / "r")) == 1


def test_nan_in_one_item_names_it_and_leaves_nothing(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m", broken="~")
    source = data(tmp_path / "d.jsonl", "fine and well", "a ~ b c")
    with pytest.raises(
        BadAttention, match=r"item '2', condition 'none': attention is not finite .* L1H1; .*--dtype float32"
    ):
        run_tiny(model, tmp_path / "r", data=source)
    assert not (tmp_path / "r").exists()


def test_moved_positions_are_refused_before_anything_is_written_where_a_model_takes_none(tmp_path: Path) -> None:
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    model = model_folder(tmp_path / "m")
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=vocabulary, hidden_size=32, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(model)
    run_tiny(model, tmp_path / "fine", layers="1")
    with pytest.raises(
        UnsupportedArchitecture,
        match=r"m \(bloom\) takes no position ids, so `position-only` cannot be run on it; leave it out of --conditions",
    ):
        run_tiny(model, tmp_path / "r", layers="1", conditions="none,mless,position-only")
    assert not (tmp_path / "r").exists()


def test_a_prompt_longer_than_the_context_is_named_before_anything_is_written(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m", context=64)
    source = data(tmp_path / "d.jsonl", "short", "a long one " * 20)
    with pytest.raises(BadPrompt, match=r"item '2' is \d+ tokens under condition 'none', but m takes 64; leave it out"):
        run_tiny(model, tmp_path / "r", data=source)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("what", ["prompts as rendered", "dtype in use", "kind of device", "unit format"])
def test_units_made_under_other_circumstances_are_not_mixed_in(
    tiny: Path, plain: Path, tmp_path: Path, what: str
) -> None:
    """A template may write today's date, and `auto` is another dtype on another machine: same study by name, other numbers."""
    copy = tmp_path / "interrupted"
    shutil.copytree(plain, copy)
    take_apart(copy)
    with about_changed(copy) as about:
        about["identity"][what] = "something else"
    before = sorted(path.name for path in copy.rglob("*"))
    with pytest.raises(BadFolder, match=rf"it differs in {what}; choose another --out"):
        run_tiny(tiny, copy)
    assert sorted(path.name for path in copy.rglob("*")) == before


def test_remote_code_is_no_field_of_a_study() -> None:
    from mless.errors import BadStudy

    with pytest.raises(BadStudy, match="trust_remote_code"):
        load_study("quick", {}, ["trust_remote_code=true"])


@pytest.mark.parametrize(
    "changes",
    [{"limit": 3, "conditions": "none,mless"}, pytest.param({}, marks=pytest.mark.slow)],
    ids=["some", "whole"],
)
def test_the_quick_study_finds_what_was_published(tmp_path: Path, changes: dict[str, Any]) -> None:
    """SmolLM2, every layer and head: layer 1 drops to between 0.65 and 0.85, and from layer 5 on nothing moves far."""
    outcome = run_study(load_study("quick", changes), tmp_path / "quick")
    shares = pl.read_parquet(outcome.folder / "retained.parquet").filter(
        pl.col("condition") == "mless", pl.col("queries") == "original", pl.col("head") == 0
    )
    by_layer = dict(shares.select("layer", "retained").iter_rows())
    assert sorted(by_layer) == list(range(1, 31))
    assert 0.65 < by_layer[1] < 0.85
    assert all(0.88 < by_layer[layer] < 1.12 for layer in range(5, 31))
    lines = verdict_lines(outcome.folder)
    assert re.match(r"mless \(55 × ' /', before-question\): layer 1 drops, [78] of 9 heads: ε 0\.\d", lines[1])


def test_a_template_that_leaves_the_bos_out_is_found_out(embedded: LoadedModel, tmp_path: Path) -> None:
    import dataclasses

    from mless.errors import TokenizerFault
    from mless.study.subject import check_prompt

    rows = mless.prompts(embedded, ["How much is two and two?"], "none", prompt="raw")
    check_prompt(embedded, rows[0])
    needy = dataclasses.replace(embedded, bos=rows[0].token_ids[0] + 1)
    with pytest.raises(TokenizerFault, match=r"does not begin with the BOS token.*--prompt raw"):
        check_prompt(needy, rows[0])


def test_attention_under_arm_is_a_condition_too(tiny: Path, tmp_path: Path) -> None:
    """ARM in layer 1's MLP leaves layer 1's attention alone and reaches layer 2's."""
    out = run_tiny(tiny, tmp_path / "r", conditions="none,arm", layers="1-2", **{"arm.fraction": 0.4}).folder
    rows = pl.read_parquet(out / "attention.parquet").sort("item", "layer", "head", "queries")
    for layer, same in ((1, True), (2, False)):
        without, with_arm = (
            rows.filter((pl.col("layer") == layer) & (pl.col("condition") == name))["received"].to_list()
            for name in ("none", "arm")
        )
        assert (without == with_arm) is same


def test_arm_behind_the_last_measured_layer_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match=r"ARM in layer 2 cannot change layers up to 1.*--layers 1-2"):
        run_tiny(tiny, tmp_path / "r", conditions="none,arm", layers="1", **{"arm.layers": [2]})


def test_parameters_of_arm_that_nobody_uses_are_said(tiny: Path, tmp_path: Path) -> None:
    told = Heard()
    chosen = {"model": str(tiny), "limit": 1, "length": 5, "conditions": "none,mless", "prompt": "raw", "arm.c": 0.3}
    run_study(load_study("quick", chosen), tmp_path / "r", told)
    assert any("no condition runs with ARM" in line for line in told.lines)


def test_a_question_far_too_long_is_refused_before_it_is_split(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"id": "a", "question": "q " * 1_000_000}))
    with pytest.raises(BadPrompt, match=r"item 'a' has 2,000,000 characters, but .* takes 512 tokens; leave it out"):
        run_study(load_study("quick", {"model": str(tiny), "data": str(data), "prompt": "raw"}), tmp_path / "r")
    assert not (tmp_path / "r" / "study.json").exists()
