"""Models compared from their folders: every readout against the statistics, real folders, and all that does not fit."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from mless import stats
from mless.errors import BadData, BadFolder, BadStudy
from mless.results.comparing import compare
from mless.results.readouts import READOUTS, readouts_of
from mless.stats.intervals import mean_intervals
from mless.study.spec import AccuracyTable
from several_models import FAMILIES, answered, likelihoods, measured
from synthetic import write_folder, write_tuning


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return measured(tmp_path_factory.mktemp("attention"), "quick")


@pytest.fixture(scope="module")
def activations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return measured(tmp_path_factory.mktemp("activations"), "activations", ("llama", "gpt2"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("answers")
    return [answered(root, f"model-{n}", n) for n in range(4)]


def rows_of(path: Path, table: str, **wanted: Any) -> list[dict[str, Any]]:
    found = pq.read_table(path / f"{table}.parquet").to_pylist()
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


# ---- attention -------------------------------------------------------------------------------------------------------


def test_a_layer_is_as_in_the_table(attention: dict[str, Path]):
    """λ and ε of a layer, read from the items, are the row of head 0."""
    for layer in (1, 3):
        lambdas = compare(list(attention.values()), readout="lambda", layer=layer)
        epsilons = compare(list(attention.values()), layer=layer)
        for path, one, two in zip(attention.values(), lambdas.blocks[0].rows, epsilons.blocks[0].rows, strict=True):
            [row] = rows_of(path, "retained", condition="mless", layer=layer, head=0, queries="original")
            assert np.exp([one.reading.value, one.reading.lo, one.reading.hi]) == pytest.approx(
                [row["retained"], row["lo"], row["hi"]]
            )
            assert [two.reading.value, two.reading.lo, two.reading.hi] == pytest.approx(
                [row["epsilon"], row["epsilon_lo"], row["epsilon_hi"]]
            )
            assert one.reading.n == two.reading.n == row["n_items"] == 5


def test_a_whole_model_is_the_mean_over_its_layers(attention: dict[str, Path]):
    path = attention["qwen2"]
    heads = [row["retained"] for row in rows_of(path, "retained", condition="mful", queries="original") if row["head"]]
    found = compare([path], readout="lambda", conditions=["mful"])
    assert math.exp(found.blocks[0].rows[0].reading.value) == pytest.approx(np.mean(heads))
    items: dict[str, list[float]] = {}
    for row in rows_of(path, "shares", condition="mful", queries="original", head=0):
        items.setdefault(row["item"], []).append(row["epsilon"])
    plain = mean_intervals(np.array([np.mean(values) for values in items.values()])[:, None])
    reading = compare([path], conditions=["mful"]).blocks[0].rows[0].reading
    assert [reading.value, reading.lo, reading.hi] == pytest.approx([plain.mean[0], plain.lo[0], plain.hi[0]])


def test_models_are_put_together_by_the_statistics(attention: dict[str, Path]):
    found = compare(list(attention.values()), by=["activation", "size", "family"])
    assert (found.readout, found.metric, found.models, found.items) == ("epsilon", "epsilon", 4, 5)
    [block] = found.blocks
    assert block.condition == "mless"
    effects = np.array([row.reading.value for row in block.rows])
    errors = np.array([row.reading.error for row in block.rows])
    plain = stats.random_effects(effects, errors)
    assert [block.pooled.mean, block.pooled.lo, block.pooled.hi, block.pooled.tau2] == [
        plain.mean,
        plain.lo,
        plain.hi,
        plain.tau2,
    ]
    assert [row.weight for row in block.rows] == plain.weights.tolist()
    assert [row.label for row in block.rows] == [f"tiny-{family}" for family in FAMILIES]
    # what the folder says of its model
    kinds = [row.moderators["activation"] for row in block.rows]
    assert kinds == ["SiLU", "SiLU", "GELU", "GELU"]
    # as text: NaN is not NaN
    assert repr(block.by["activation"]) == repr(stats.by_kind(effects, errors, kinds))
    assert [row.moderators["family"] for row in block.rows] == list(FAMILIES)
    sizes = [json.loads((path / "study.json").read_text())["model"]["parameters"] for path in attention.values()]
    assert repr(block.by["size"]) == repr(stats.by_number(effects, errors, np.log10(np.array(sizes, float))))
    assert [row.moderators["size"] for row in block.rows] == [f"{size / 1000:.3g}K" for size in sizes]
    assert math.isnan(block.by["family"].p)


def test_every_condition_or_the_one_asked_for(attention: dict[str, Path]):
    paths = list(attention.values())
    assert [block.condition for block in compare(paths, conditions=["all"]).blocks] == ["mless", "mful"]
    assert [block.condition for block in compare(paths, conditions=["mful", "mful"]).blocks] == ["mful"]
    with pytest.raises(BadStudy, match="--condition none: every condition is compared with none"):
        compare(paths, conditions=["none"])
    with pytest.raises(BadFolder, match=r"no condition 'mles' in this folder; it holds none, mless, mful"):
        compare(paths, conditions=["mles"])


def test_layers_that_are_not_there(attention: dict[str, Path]):
    with pytest.raises(
        BadStudy,
        match=r"holds no layer 99 of tiny-llama: it holds 1–6 \(numbered from 1\); choose another with --layer",
    ):
        compare(list(attention.values()), layer=99)


# ---- activations, answers, likelihood --------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["near_zero", "l2"])
def test_activations_of_a_layer_are_as_in_the_table(activations: dict[str, Path], metric: str):
    found = compare(list(activations.values()), metric=metric, layer=2, conditions=["mful"])
    for path, row in zip(activations.values(), found.blocks[0].rows, strict=True):
        [stored] = rows_of(path, "activations", condition="mful", layer=2, tokens="all", metric=metric)
        assert row.reading.value == pytest.approx(stored["difference"])
        assert row.reading.n == stored["n_items"]
    assert found.scale.ratio == (metric == "l2")
    whole = compare(list(activations.values()), metric=metric, conditions=["mful"])
    for path, row in zip(activations.values(), whole.blocks[0].rows, strict=True):
        stored = rows_of(path, "activations", condition="mful", tokens="all", metric=metric)
        assert row.reading.value == pytest.approx(np.mean([one["difference"] for one in stored]))
    assert compare(list(activations.values())).metric == "near_zero"


def test_answers(answers: list[Path]):
    found = compare(answers, conditions=["mful"], by=["activation", "size"])
    assert (found.readout, found.metric, found.scale.unit, found.task) == (
        "accuracy",
        "pass@1",
        "points",
        "arithmetic-1",
    )
    for path, row in zip(answers, found.blocks[0].rows, strict=True):
        [stored] = rows_of(path, "accuracy", condition="mful", split="all", metric="pass@1")
        assert [row.reading.value, row.reading.lo, row.reading.hi] == [
            stored["delta"],
            stored["delta_lo"],
            stored["delta_hi"],
        ]
        assert row.reading.error == pytest.approx((stored["delta_hi"] - stored["delta_lo"]) / (2 * 1.959964), rel=1e-6)
    # the control is no condition to compare
    assert [block.condition for block in compare(answers, conditions=["all"]).blocks] == ["mless", "mful", "random"]
    with pytest.raises(BadStudy, match="--layer: accuracy has no layers"):
        compare(answers, layer=1)
    with pytest.raises(
        BadStudy,
        match=r"no metric 'pass@4' \(did you mean 'pass@1'\?\) of accuracy for condition 'mless'; it has pass@1",
    ):
        compare(answers, metric="pass@4")


def test_the_primary_condition_is_the_usual_one(tmp_path: Path):
    study = {
        "name": "accuracy",
        "accuracy": AccuracyTable(max_new_tokens=96).model_dump(),
        "primary": "mful",
        "seed": 0,
    }
    paths = [answered(tmp_path, f"m{n}", n, items=30, about={"study": study}) for n in range(2)]
    assert compare(paths).blocks[0].condition == "mful"


def test_likelihoods(tmp_path: Path):
    def folder(n: int, *metrics: str) -> Path:
        rows = [
            {
                "condition": "mless",
                "metric": m,
                "n": 40,
                "delta": 0.01 * n,
                "lo": 0.01 * n - 0.02,
                "hi": 0.01 * n + 0.02,
            }
            for m in metrics
        ]
        return likelihoods(tmp_path / f"r{n}-{'-'.join(metrics)}", rows, label=f"m{n}")

    both = compare([folder(11, "solution", "contrast"), folder(12, "solution", "contrast")])
    assert both.metric == "contrast"  # tokens of a solution are others in each model
    found = compare([folder(1, "answer", "solution"), folder(2, "answer", "solution")])
    assert (found.readout, found.metric, found.scale.unit) == ("likelihood", "solution", "nats a token")
    reading = found.blocks[0].rows[1].reading
    assert [reading.value, reading.lo, reading.hi, reading.n] == pytest.approx([0.02, 0.0, 0.04, 40], abs=1e-12)
    assert reading.error == pytest.approx(0.02 / 2.0226909200367604)  # t(0.975, 39)
    # a metric that all have
    assert compare([folder(3, "contrast", "kl"), folder(4, "kl", "contrast")]).metric == "contrast"
    with pytest.raises(BadFolder, match="the folders have no metric of likelihood in common"):
        compare([folder(5, "kl"), folder(6, "entropy")])
    assert compare([folder(7, "margin-normalised")]).scale.unit == "nats a character"
    assert (compare([folder(8, "choice")]).scale.unit, compare([folder(9, "choice")]).scale.factor) == ("points", 100)
    with pytest.raises(BadFolder, match="has 'warmth' in 'metric'; expected one of solution"):
        compare([folder(10, "warmth")])


def test_likelihoods_of_real_studies(tmp_path: Path):
    """What is compared has the numbers that the studies themselves say."""
    folders = measured(tmp_path, "likelihood", ("llama", "gpt2"), data="arithmetic:2:6", limit=6)
    found = compare(list(folders.values()), conditions=["mless", "mful"])
    assert found.metric == "contrast"
    for block in found.blocks:
        for row, path in zip(block.rows, folders.values(), strict=True):
            told = next(
                one
                for one in pq.read_table(path / "effects.parquet").to_pylist()
                if (one["condition"], one["metric"]) == (block.condition, found.metric)
            )
            reading = row.reading
            assert [reading.value, reading.lo, reading.hi, reading.n] == [told[k] for k in ("delta", "lo", "hi", "n")]


def test_a_readout_is_one_row(tmp_path: Path, answers: list[Path], monkeypatch: pytest.MonkeyPatch):
    import mless
    from mless.results.readouts import Reading, Readout, Scale

    def read(folder: Any, condition: str, metric: str, layer: int | None) -> Reading:
        return Reading(0.5, 0.1, 0.3, 0.7, 9)

    row = Readout("accuracy", read, lambda folder, condition: ["mine"], lambda metric: Scale("my number"))
    # What registers something is named there, so that other processes find it too.
    monkeypatch.setenv("MLESS_PLUGINS", os.environ.get("MLESS_PLUGINS", ""))
    mless.register("readouts", "mine", row)
    try:
        assert readouts_of("accuracy") == ["accuracy", "mine"]
        assert compare(answers, readout="mine").blocks[0].pooled.mean == pytest.approx(0.5)
    finally:
        READOUTS.remove("mine")


# ---- properties of models --------------------------------------------------------------------------------------------


def test_properties_from_a_file(answers: list[Path], tmp_path: Path):
    file = tmp_path / "models.csv"
    file.write_text(
        "model,activation,size,release,note\nmodel-0,gelu_new,135M,2024,a\norg/model-1,silu,1.5B,2025,b\nMODEL-2,relu2,7B,2025,a\nmodel-3,glu,7e10,2026,b\n"
    )
    [block] = compare(answers, by=["activation", "size", "release", "note"], models=file).blocks
    assert [row.moderators["activation"] for row in block.rows] == ["GELU", "SiLU", "ReLU²", "glu"]
    assert [row.moderators["size"] for row in block.rows] == ["135M", "1.5B", "7B", "70B"]
    effects, errors = (np.array([getattr(row.reading, name) for row in block.rows]) for name in ("value", "error"))
    assert block.by["size"].slope == pytest.approx(
        stats.by_number(effects, errors, np.log10([135e6, 1.5e9, 7e9, 7e10])).slope
    )
    assert block.by["release"] == stats.by_number(effects, errors, np.array([2024.0, 2025.0, 2025.0, 2026.0]))
    assert [one.name for one in block.by["note"].groups] == ["a", "b"]
    # what the file does not have comes from the folder
    assert [row.moderators["family"] for row in compare(answers, by=["family"], models=file).blocks[0].rows] == [
        "llama",
        "gpt2",
    ] * 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("name,size\nmodel-0,7B\n", "has no column `model`, only name, size"),
        ("", "has no column `model`, only nothing"),
        ("model,size\nmodel-0,7B\n", "has no row for the model 'model-1'"),
        ("model,size\nmodel-0,7B\nmodel-0,8B\n", "has the model 'model-0' twice"),
        ("model,size\nmodel-0\n", "has 1 cells in line 2 and 2 columns"),
        ("model,size,size\nmodel-0,1,2\n", "has a column twice"),
        ('model,size\n"model-0,7B\n', "cannot be read"),
        ("model,size\nmodel-0, \nmodel-1,7B\nmodel-2,7B\nmodel-3,7B\n", "'model-0' has no value in the column 'size'"),
        (
            "model,size\nmodel-0,big\nmodel-1,7B\nmodel-2,7B\nmodel-3,7B\n",
            "size of model-0: a number of parameters, as 7B or 135M",
        ),
    ],
)
def test_a_file_of_properties_that_does_not_serve(answers: list[Path], tmp_path: Path, text: str, match: str):
    file = tmp_path / "models.csv"
    file.write_text(text)
    with pytest.raises(BadData, match=match):
        compare(answers, by=["size"], models=file)
    with pytest.raises(BadData, match=r"is not there; expected a CSV file with a column `model`"):
        compare(answers, by=["size"], models=tmp_path / "none.csv")


def test_a_folder_that_does_not_say_a_property(answers: list[Path], tmp_path: Path):
    older = answered(
        tmp_path, "older", 9, about={"model": {"name": "older", "label": "older", "fingerprint": "o", "layers": 12}}
    )
    with pytest.raises(
        BadStudy,
        match=r"does not say the activation of older; give it in a file: --models models.csv, with the columns model and activation",
    ):
        compare([*answers, older], by=["activation"])
    with pytest.raises(BadStudy, match=r"does not say the layer of model-0 \(did you mean 'layers'\?\)"):
        compare(answers, by=["layer"])
    assert not math.isnan(compare([*answers, older], by=["layers"]).blocks[0].by["layers"].slope)


# ---- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"task": "gsm8k"}, r"they differ in task \('arithmetic-1' and 'gsm8k'\)"),
        ({"prompt": "chat"}, r"kind of prompt \('raw' and 'chat'\)"),
        ({"seeds": {"study": 7}}, r"seed \('0' and '7'\)"),
        ({"identity": {"data": "a"}, "units": 1}, "questions or answers of items with the same ids"),
        ({"identity": {"solutions": "a"}, "units": 1}, "reference solutions or options of items with the same ids"),
    ],
)
def test_folders_that_asked_something_else(answers: list[Path], tmp_path: Path, change: dict[str, Any], match: str):
    other = answered(tmp_path, "other", 8, about=change)
    with pytest.raises(
        BadFolder,
        match=f"answers-8 does not fit .*answers-0: .*{match}.*compare folders of one study, run for each model",
    ):
        compare([*answers, other])


def test_other_items(answers: list[Path], tmp_path: Path):
    other = answered(tmp_path, "other", 8, items=59)
    with pytest.raises(BadFolder, match=r"they differ in items \(60 and 59\)"):
        compare([*answers, other])
    # the checksum of their questions is another one too, but no item with the same id has another question
    summed = answered(tmp_path, "summed", 9, items=59, about={"identity": {"data": "a"}, "units": 1})
    with pytest.raises(BadFolder, match=r"they differ in items \(60 and 59\)\. Their"):
        compare([*answers, summed])
    about = json.loads((answers[0] / "study.json").read_text())
    shutil.copytree(answers[1], tmp_path / "swapped")
    items = [about["items"][1], about["items"][0], *about["items"][2:]]
    stored = json.loads((tmp_path / "swapped/study.json").read_text()) | {"items": items}
    (tmp_path / "swapped/study.json").write_text(json.dumps(stored))
    with pytest.raises(BadFolder, match=r"items \(60 and 60; number 1 is 'sum-001' and 'sum-002'\)"):
        compare([answers[0], tmp_path / "swapped"])


def test_arbitrary_edits_with_other_seeds_are_other_edits(tmp_path: Path):
    row = {"condition": "edit", "metric": "contrast", "n": 40, "delta": 0.1, "lo": 0.0, "hi": 0.2}
    folders = [
        likelihoods(
            tmp_path / str(seed),
            [row],
            label=f"m{seed}",
            about={
                "conditions": {
                    "none": {"kind": "none"},
                    "edit": {"kind": "edit-random-tokens", "length": 9, "seed": seed},
                }
            },
        )
        for seed in (1, 2)
    ]
    with pytest.raises(BadFolder, match="they differ in seed of condition edit"):
        compare(folders)


def test_several_answers_an_item_have_intervals_by_students_t(tmp_path: Path):
    drawn = AccuracyTable(samples=4, temperature=0.5, top_p=0.95, k=[1])
    paths = [answered(tmp_path, f"m{n}", n, items=12, settings=drawn) for n in range(2)]
    reading = compare(paths).blocks[0].rows[0].reading
    assert reading.error == pytest.approx((reading.hi - reading.lo) / 2 / 2.200985160082949)  # t(0.975, 11)


def test_other_conditions_and_settings(attention: dict[str, Path], answers: list[Path], tmp_path: Path):
    longer = measured(tmp_path, "quick", ("gemma3_text",), length=6, placement="end", filler=" .")["gemma3_text"]
    with pytest.raises(
        BadFolder,
        match=r"filler of condition mless \(' /' and ' \.'\); length of condition mless \('5' and '6'\); placement of condition mless",
    ):
        compare([*attention.values(), longer])
    # of another condition it is no matter: but its length is another one too
    with pytest.raises(BadFolder, match="length of condition mful"):
        compare([*attention.values(), longer], conditions=["mful"])
    one_layer = measured(tmp_path / "one", "quick", ("gemma3_text",), layers="1")["gemma3_text"]
    with pytest.raises(BadFolder, match=r"layers \('all' and '1'\)"):
        compare([*attention.values(), one_layer])
    assert compare([*attention.values(), one_layer], readout="lambda", layer=1).models == 5
    other = answered(tmp_path, "other", 8, settings=AccuracyTable(max_new_tokens=32, slots=2, margin=0.1))
    with pytest.raises(
        BadFolder,
        match=r"they differ in accuracy.max_new_tokens \('96' and '32'\)\. Their effects would not be of one thing",
    ):
        compare([*answers, other])


def test_the_same_model_counts_once(attention: dict[str, Path], answers: list[Path]):
    with pytest.raises(
        BadFolder,
        match=r"hold the same model \(tiny-gpt2\) with the same settings; it counts once, so leave one of them out",
    ):
        compare([*attention.values(), attention["gpt2"]])
    with pytest.raises(BadFolder, match="hold the same model"):
        compare([answers[0], answers[0]])


def test_models_of_one_name_are_told_apart_by_their_folders(tmp_path: Path):
    paths = [answered(tmp_path, "same", n, items=30) for n in range(2)]
    assert [row.label for row in compare(paths).blocks[0].rows] == ["same (answers-0)", "same (answers-1)"]


def test_folders_that_hold_something_else(attention: dict[str, Path], answers: list[Path], tmp_path: Path):
    llama = attention["llama"]
    with pytest.raises(
        BadFolder,
        match=r"answers-0 holds no epsilon: its study measured accuracy, of which there is accuracy; choose it with --readout",
    ):
        compare([llama, answers[0]])
    with pytest.raises(
        BadFolder, match="holds no accuracy: its study measured attention, of which there is epsilon, lambda"
    ):
        compare([llama], readout="accuracy")
    with pytest.raises(
        BadStudy,
        match=r"no readout 'lamda' \(did you mean 'lambda'\?\); there are: epsilon, lambda, activations, accuracy, likelihood",
    ):
        compare([llama], readout="lamda")
    with pytest.raises(BadFolder, match=r"holds no study\.json, so it is no result folder"):
        compare([tmp_path])
    with pytest.raises(BadStudy, match="no result folder given"):
        compare([])
    from mless.values import ArmSettings

    tuning = write_tuning(tmp_path / "tuned", [(ArmSettings(layers=(1,), c=1.0), 0.1, 0.5)])
    with pytest.raises(BadFolder, match=r"holds a tuning, whose answers lie in folders of their own; give .*test"):
        compare([tuning])
    norms = likelihoods(
        tmp_path / "norms",
        [{"condition": "mless", "metric": "x", "n": 2, "delta": 0.0, "lo": 0.0, "hi": 0.0}],
        about={"measures": "norms"},
    )
    with pytest.raises(
        BadFolder, match="measured norms, of which nothing can be compared; there are the readouts epsilon"
    ):
        compare([norms])


def test_damaged_and_unfinished_folders(attention: dict[str, Path], answers: list[Path], tmp_path: Path):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(attention["llama"], spoilt)
    table = spoilt / "shares.parquet"
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    with pytest.raises(BadFolder, match=r"shares\.parquet is damaged"):
        compare([spoilt, attention["qwen2"]])
    unfinished = answered(tmp_path, "unfinished", 5, about={"complete": False})
    with pytest.raises(BadFolder, match="its study is not finished; run the same command again to complete it"):
        compare([*answers, unfinished])
    older = write_folder(tmp_path / "older", about={"complete": True})  # before there were items' shares
    with pytest.raises(BadFolder, match=r"no shares\.parquet"):
        compare([older])


def test_no_condition_in_common(answers: list[Path], tmp_path: Path):
    alone = answered(tmp_path, "alone", 6, conditions=("none", "none-again"))
    with pytest.raises(BadFolder, match="no condition in common that could be compared with none"):
        compare([*answers, alone])


def test_a_model_that_cannot_be_weighed(tmp_path: Path):
    def folder(n: int, lo: float | None, hi: float | None, items: int = 40) -> Path:
        return likelihoods(
            tmp_path / f"r{n}",
            [{"condition": "mless", "metric": "solution", "n": items, "delta": 0.0, "lo": lo, "hi": hi}],
            label=f"m{n}",
        )

    good, still = folder(1, -0.1, 0.1), folder(2, 0.0, 0.0)
    with pytest.raises(
        BadData,
        match=r"m2, condition 'mless': the effect is 0 with a standard error of 0 over 40 items, which cannot be weighed",
    ):
        compare([good, still])
    assert compare([still]).blocks[0].rows[0].reading.value == 0  # alone it is only shown
    with pytest.raises(BadData, match=r"m3, .* standard error of nan over 1 items"):
        compare([good, folder(3, None, None, 1)])
