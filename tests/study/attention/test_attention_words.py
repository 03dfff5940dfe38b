"""The verdict in words says drops, rises, unchanged and undecided alike, and what limits it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mless.errors import BadFolder
from mless.results.folder import ResultFolder
from mless.study import verdict_lines

DROPS, RISES, SAME, WIDE = (0.73, 0.70, 0.76), (1.2, 1.1, 1.3), (1.0, 0.97, 1.03), (0.97, 0.8, 1.15)
VERDICT = {DROPS: "drops", RISES: "rises", SAME: "unchanged", WIDE: "undecided"}
Share = tuple[float, float, float]


def write(
    path: Path,
    shares: dict[str, dict[int, Share]],
    *,
    heads: int = 9,
    odd_heads: int = 1,
    n_items: int = 24,
    conditions: dict[str, Any] | None = None,
    epsilon: bool = True,
    depth: int | None = None,
) -> Path:
    """A folder whose layers have these shares; of the heads, `odd_heads` say something else than their layer.

    Without `epsilon` it is as mless wrote it before there was a dilution exponent; `depth` is the number of the model's layers.
    """
    rows: list[dict[str, Any]] = []
    for condition, layers in shares.items():
        for layer, share in layers.items():
            for head in range(heads + 1):
                mine = (SAME if share != SAME else WIDE) if 0 < head <= odd_heads else share
                value, lo, hi = mine
                even = math.log(0.62)
                exponents = {
                    "epsilon": math.log(value) / even, "epsilon_lo": math.log(hi) / even, "epsilon_hi": math.log(lo) / even,
                    "epsilon_items": n_items, "skewed": False,
                }  # fmt: skip
                for queries, shift in (("original", 0.0), ("later", -0.5)):
                    rows.append(
                        {
                            **(exponents if epsilon else {}),
                            "model": "m", "task": "t", "condition": condition, "layer": layer, "head": head, "queries": queries,
                            "retained": value + shift, "lo": lo + shift, "hi": hi + shift, "p": 0.001, "p_adjusted": 0.3 if lo <= 1 <= hi else 0.01,
                            "n_items": n_items, "uniform": 0.62, "verdict": VERDICT[mine],
                        }
                    )  # fmt: skip
    known: dict[str, Any] = {
        "none": {"kind": "none", "filler": None, "length": 0, "placement": "before-question"},
        "mless": {"kind": "repeat", "filler": " /", "length": 55, "placement": "before-question"},
        "random": {"kind": "text", "filler": None, "length": 55, "placement": "before-question"},
    } | (conditions or {})
    folder = ResultFolder(path)
    model = {"label": "m"} | ({} if depth is None else {"layers": depth})
    about = {
        "study": {"name": "own"},
        "model": model,
        "task": "t",
        "prompt": "raw",
        "items": [str(n) for n in range(n_items)],
    }
    folder.write_manifest(about | {"conditions": {name: known[name] for name in ("none", *shares)}})
    folder.write_table("retained", pa.Table.from_pylist(rows))
    return path


def test_the_whole_verdict(tmp_path: Path) -> None:
    layers = {1: DROPS} | dict.fromkeys(range(2, 31), SAME)
    random = {1: (0.81, 0.8, 0.82)} | dict.fromkeys(range(2, 31), SAME)
    VERDICT[random[1]] = "drops"
    lines = verdict_lines(write(tmp_path, {"mless": layers, "random": random}))
    assert lines == [
        "m, 24 items of t, raw prompts; retained share λ = attention the question's tokens receive with filler over without; "
        "ε, the mean over heads of log λ / log λ of an even spread: 0 nothing lost, 1 as a head that spreads evenly",
        "mless (55 × ' /', before-question): layer 1 drops, 8 of 9 heads: ε 0.66 [0.57, 0.75], retained share 0.73 [0.70, 0.76] "
        "(uniform dilution 0.62; random text 0.81, ε 0.44); layers 2–30 unchanged (λ 1.00, ε 0.00)",
        "random (55 tokens of natural text, before-question): layer 1 drops, 8 of 9 heads: ε 0.44 [0.42, 0.47], "
        "retained share 0.81 [0.80, 0.82] (uniform dilution 0.62); layers 2–30 unchanged (λ 1.00, ε 0.00)",
        "The published claim (layer 1 drops, later layers do not change) holds for this model: layer 1 drops, and 0 of 29 later "
        "layers change.",
    ]


@pytest.mark.parametrize(("by_exponent", "how"), [(True, "more"), (False, "as much")])
def test_natural_text_takes_more_only_by_both_measures(tmp_path: Path, by_exponent: bool, how: str) -> None:
    text = (0.6, 0.58, 0.62)
    VERDICT[text] = "drops"
    folder = ResultFolder(write(tmp_path, {"mless": {1: DROPS, 2: SAME}, "random": {1: text, 2: SAME}}))
    if not by_exponent:
        rows = [
            row | ({"epsilon_lo": 0.5} if row["condition"] == "random" else {})
            for row in folder.read_table("retained").to_pylist()
        ]
        folder.write_table("retained", pa.Table.from_pylist(rows))
    assert f"natural text of the same length takes {how} (λ 0.60, ε " in verdict_lines(tmp_path)[-1]


def test_a_folder_from_before_the_exponent_has_its_verdict(tmp_path: Path) -> None:
    lines = verdict_lines(write(tmp_path, {"mless": {1: DROPS, 2: SAME}, "random": {1: DROPS, 2: SAME}}, epsilon=False))
    assert lines[0].endswith("with filler over without")
    assert (
        "layer 1 drops, 8 of 9 heads: retained share 0.73 [0.70, 0.76] (uniform dilution 0.62; random text 0.73)"
        in lines[1]
    )
    assert "takes as much (λ 0.73)" in lines[3]
    assert not any("ε" in line for line in lines)


def test_a_condition_that_dilutes_nothing_has_no_exponent(tmp_path: Path) -> None:
    folder = ResultFolder(write(tmp_path, {"mless": {1: SAME}}))
    rows = [
        row | {"epsilon": None, "epsilon_lo": None, "epsilon_hi": None}
        for row in folder.read_table("retained").to_pylist()
    ]
    folder.write_table("retained", pa.Table.from_pylist(rows))
    assert not any("ε" in line for line in verdict_lines(tmp_path))


def test_a_row_that_few_items_decide_is_marked(tmp_path: Path) -> None:
    folder = ResultFolder(write(tmp_path, {"mless": {1: DROPS}}))
    rows = [row | {"skewed": row["head"] == 0} for row in folder.read_table("retained").to_pylist()]
    folder.write_table("retained", pa.Table.from_pylist(rows))
    assert "retained share 0.73 [0.70, 0.76] (skewed: a few items decide this interval)" in verdict_lines(tmp_path)[1]


@pytest.mark.parametrize(
    ("share", "words", "claim"),
    [
        (DROPS, "drops, 9 of 9 heads: ε 0.66 [0.57, 0.75], retained share 0.73 [0.70, 0.76]", "tested in its first half only, which holds"),
        (RISES, "rises, 9 of 9 heads: ε −0.38 [−0.55, −0.20], retained share 1.20 [1.10, 1.30]", "attention on the question rises"),
        (SAME, "unchanged, 9 of 9 heads: ε 0.00 [−0.06, 0.06], retained share 1.00 [0.97, 1.03]", "does not hold for this model: layer 1 keeps"),
        (WIDE, "undecided, 9 of 9 heads: ε 0.06 [−0.29, 0.47], retained share 0.97 [0.80, 1.15]", "is undecided for this model"),
    ],
    ids=["drops", "rises", "unchanged", "undecided"],
)  # fmt: skip
def test_every_verdict_can_be_said(tmp_path: Path, share: Share, words: str, claim: str) -> None:
    lines = verdict_lines(write(tmp_path, {"mless": {1: share}}, odd_heads=0))
    assert f"layer 1 {words} (uniform dilution 0.62)" in lines[1]
    assert claim in lines[2]
    assert len(lines) == 3


#: Layers of a model of 30, and what is to be said of the claim.
CLAIMS: dict[str, tuple[dict[int, Share], str]] = {
    "all at 0.70": (
        dict.fromkeys(range(1, 31), DROPS),
        "does not hold for this model: layer 1 drops, so its first half holds; its second does not, 29 of 29 later layers change: layers 2–30 drop",
    ),
    "layer 1 alone": (
        {1: DROPS} | dict.fromkeys(range(2, 31), SAME),
        "holds for this model: layer 1 drops, and 0 of 29 later layers change",
    ),
    "one of 29 more": (
        {1: DROPS, 2: DROPS} | dict.fromkeys(range(3, 31), SAME),
        "holds in part for this model: layer 1 drops, 1 of 29 later layers change: layer 2 drops",
    ),
    "two of 29, both ways": (
        {1: DROPS, 2: DROPS, 3: RISES} | dict.fromkeys(range(4, 31), SAME),
        "holds in part for this model: layer 1 drops, 2 of 29 later layers change: layer 2 drops and layer 3 rises",
    ),
    "three of 29": (
        {1: DROPS, 2: RISES, 3: RISES, 4: RISES} | dict.fromkeys(range(5, 31), SAME),
        "does not hold for this model: layer 1 drops, so its first half holds; its second does not, 3 of 29 later layers change: layers 2–4 rise",
    ),
    "some undecided": (
        {1: DROPS, 2: DROPS, 3: WIDE} | dict.fromkeys(range(4, 31), SAME),
        "holds in part for this model: layer 1 drops, 1 of 29 later layers change: layer 2 drops; undecided: layer 3",
    ),
    "undecided alone": (
        {1: DROPS, 3: WIDE} | dict.fromkeys([2, *range(4, 31)], SAME),
        "holds in part for this model: layer 1 drops, 0 of 29 later layers change for certain; undecided: layer 3",
    ),
    "too many undecided": (
        {1: DROPS, 2: DROPS} | dict.fromkeys(range(3, 6), WIDE) | dict.fromkeys(range(6, 31), SAME),
        "is undecided for this model: layer 1 drops, 1 of 29 later layers change: layer 2 drops, but too many are undecided to say; undecided: layers 3–5",
    ),
    "layer 1 unchanged, others not": (
        {1: SAME, 2: DROPS} | dict.fromkeys(range(3, 31), SAME),
        "does not hold for this model: layer 1 keeps its attention; 1 of 29 later layers change too: layer 2 drops",
    ),
    "layer 1 undecided": (
        {1: WIDE} | dict.fromkeys(range(2, 31), SAME),
        "is undecided for this model: layer 1's interval is too wide to say",
    ),
    "layer 1 undecided, all others drop": (
        {1: WIDE} | dict.fromkeys(range(2, 31), DROPS),
        "does not hold for this model: its second half does not, 29 of 29 later layers change: layers 2–30 drop; layer 1 is undecided",
    ),
    "a few later layers measured": (
        {1: DROPS, 2: SAME, 3: SAME},
        "holds for the layers measured: layer 1 drops, and 0 of 2 later layers measured (of 29) change",
    ),
    "one of a few later layers changes": (
        {1: DROPS, 2: DROPS, 3: SAME},
        "is open for this model: layer 1 drops, so its first half holds; of its second, "
        "1 of 2 later layers measured (of 29) change: layer 2 drops, and the others may not",
    ),
    "layer 1 undecided, one of a few later layers changes": (
        {1: WIDE, 2: DROPS, 3: SAME},
        "is undecided for this model: layer 1's interval is too wide to say",
    ),
    "of a few later layers more change than a tenth of all": (
        {1: DROPS, 2: DROPS, 3: DROPS, 4: RISES, 5: SAME},
        "does not hold for this model: layer 1 drops, so its first half holds; its second does not, "
        "3 of 4 later layers measured (of 29) change: layers 2–3 drop and layer 4 rises",
    ),
    "layer 1 measured": (
        {1: DROPS},
        "was tested in its first half only, which holds for this model: layer 1 drops. No later layer was measured",
    ),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_both_halves_of_the_claim(tmp_path: Path, case: str) -> None:
    layers, words = CLAIMS[case]
    lines = verdict_lines(write(tmp_path, {"mless": layers}, depth=30))
    assert lines[2] == f"The published claim (layer 1 drops, later layers do not change) {words}."


def test_later_layers_are_grouped_by_what_they_do(tmp_path: Path) -> None:
    rises, little, less = (1.4, 1.3, 1.5), (0.97, 0.96, 0.98), (1.02, 1.01, 1.03)
    VERDICT[rises] = "rises"
    VERDICT[little] = VERDICT[less] = "unchanged"
    layers = {1: SAME, 2: DROPS, 3: RISES, 4: rises, 5: little, 6: WIDE, 7: less, 8: SAME}
    lines = verdict_lines(write(tmp_path, {"mless": layers}))
    assert lines[1].endswith(
        "; layer 2 drops (λ 0.73, ε 0.66); layers 3–4 rise (λ 1.20 to 1.40, ε −0.70 to −0.38); "
        "layers 5, 7–8 unchanged (λ 0.97 to 1.02, ε −0.04 to 0.06; 2 of 3 surely differ from 1, but by less than 4 %); layer 6 undecided (λ 0.97, ε 0.06)"
    )


def test_heads_that_move_in_a_layer_that_does_not_are_counted(tmp_path: Path) -> None:
    folder = ResultFolder(write(tmp_path, {"mless": {1: DROPS, 2: SAME, 3: SAME}}))
    table = folder.read_table("retained").to_pylist()
    for row in table:
        if (row["layer"], row["head"]) == (3, 9):
            row["verdict"] = "rises"
    folder.write_table("retained", pa.Table.from_pylist(table))
    assert verdict_lines(tmp_path)[1].endswith(
        "; layers 2–3 unchanged (λ 1.00, ε 0.00; 1 of their 18 heads drop or rise by themselves)"
    )


def test_without_layer_one_the_claim_is_not_judged(tmp_path: Path) -> None:
    lines = verdict_lines(write(tmp_path, {"mless": {2: DROPS, 3: SAME}}))
    assert ": layer 2 drops, 8 of 9 heads" in lines[1]
    assert lines[2] == "The published claim is about layer 1, which was not measured."


def test_without_mless_there_is_no_claim_to_judge(tmp_path: Path) -> None:
    own = {"base": {"kind": "none", "filler": None, "length": 0, "placement": "before-question"}}
    lines = verdict_lines(write(tmp_path, {"random": {1: DROPS}, "base": {1: SAME}}, conditions=own))
    assert len(lines) == 3
    assert lines[2].startswith("base (nothing inserted): layer 1 unchanged, 8 of 9 heads")
    assert "random text" not in lines[2]  # natural text of another length is no yardstick


def test_the_claim_is_about_filler_before_the_question(tmp_path: Path) -> None:
    own = {"mless": {"kind": "repeat", "filler": " /", "length": 55, "placement": "end"}}
    lines = verdict_lines(write(tmp_path, {"mless": {1: SAME}}, conditions=own))
    assert lines[2] == "The published claim is about filler before the question; this one stands end."


def test_a_layer_of_which_only_some_heads_were_measured(tmp_path: Path) -> None:
    folder = ResultFolder(write(tmp_path, {"mless": {1: DROPS}}))
    about = dict(folder.manifest() or {})
    folder.write_manifest(about | {"heads": [3], "model": {"label": "m", "heads": 9}})
    assert "Only 1 of 9 heads were measured; what is said of a layer is said of these." in verdict_lines(tmp_path)


@pytest.mark.parametrize(
    ("n_items", "layers", "told"), [(4, 1, 9), (12, 1, None), (12, 100, 16), (9, 1, None), (8, 1, 9)]
)
def test_too_few_items_ever_to_reject(tmp_path: Path, n_items: int, layers: int, told: int | None) -> None:
    """Exact sign flips of n items cannot go below 2/2ⁿ; times 9 heads a layer that must stay under 0.05."""
    lines = verdict_lines(write(tmp_path, {"mless": dict.fromkeys(range(1, layers + 1), SAME)}, n_items=n_items))
    if told is None:
        assert 9 * layers * 2 / 2**n_items < 0.05
        assert not any("too few" in line for line in lines)
    else:
        assert 9 * layers * 2 / 2 ** (told - 1) >= 0.05 > 9 * layers * 2 / 2**told
        assert lines[-1] == (
            f"{n_items} items are too few for the sign-flip test ever to reject after Holm over {9 * layers} rows "
            f"(it takes {told}); the intervals stand, the p-values cannot."
        )


def test_a_folder_without_results_has_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"is no result folder \(it has no study\.json\)"):
        verdict_lines(tmp_path)
    ResultFolder(tmp_path).write_manifest({})
    with pytest.raises(BadFolder, match=r"study\.json: the field study is missing; the file was damaged or changed"):
        verdict_lines(tmp_path)
    write(tmp_path, {"mless": {1: DROPS}})
    (tmp_path / "retained.parquet").unlink()
    with pytest.raises(BadFolder, match="its run did not finish; run the same command again"):
        verdict_lines(tmp_path)
