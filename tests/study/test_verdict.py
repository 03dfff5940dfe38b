"""The verdict in words says drops, rises, unchanged and undecided alike, and what limits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mless.errors import BadFolder
from mless.store import ResultFolder
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
) -> Path:
    """A folder whose layers have these shares; of the heads, `odd_heads` say something else than their layer."""
    rows: list[dict[str, Any]] = []
    for condition, layers in shares.items():
        for layer, share in layers.items():
            for head in range(heads + 1):
                mine = (SAME if share != SAME else WIDE) if 0 < head <= odd_heads else share
                value, lo, hi = mine
                for queries, shift in (("original", 0.0), ("later", -0.5)):
                    rows.append(
                        {
                            "model": "m", "task": "t", "condition": condition, "layer": layer, "head": head, "queries": queries,
                            "retained": value + shift, "lo": lo + shift, "hi": hi + shift, "p": 0.001, "p_adjusted": 0.01,
                            "n_items": n_items, "uniform": 0.62, "verdict": VERDICT[mine],
                        }
                    )  # fmt: skip
    known: dict[str, Any] = {
        "none": {"kind": "none", "filler": None, "length": 0, "placement": "before-question"},
        "mless": {"kind": "repeat", "filler": " /", "length": 55, "placement": "before-question"},
        "random": {"kind": "text", "filler": None, "length": 55, "placement": "before-question"},
    } | (conditions or {})
    folder = ResultFolder(path)
    about = {"model": {"label": "m"}, "task": "t", "prompt": "raw", "items": [str(n) for n in range(n_items)]}
    folder.write_manifest(about | {"conditions": {name: known[name] for name in ("none", *shares)}})
    folder.write_table("retained", pa.Table.from_pylist(rows))
    return path


def test_the_sentence_of_the_issue(tmp_path: Path) -> None:
    layers = {1: DROPS} | dict.fromkeys(range(2, 31), SAME)
    random = {1: (0.81, 0.8, 0.82)} | dict.fromkeys(range(2, 31), SAME)
    VERDICT[random[1]] = "drops"
    lines = verdict_lines(write(tmp_path, {"mless": layers, "random": random}))
    assert lines == [
        "m, 24 items of t, raw prompts; retained share = attention the question's tokens receive with filler over without",
        "mless (55 × ' /', before-question): layer 1 drops: 8 of 9 heads, retained share 0.73 [0.70, 0.76] "
        "(uniform dilution 0.62, random text 0.81); layers 2–30 unchanged",
        "random (55 tokens of natural text, before-question): layer 1 drops: 8 of 9 heads, retained share 0.81 [0.80, 0.82] "
        "(uniform dilution 0.62); layers 2–30 unchanged",
        "The published claim (layer 1 drops) holds here: layer 1 loses attention to the filler.",
    ]


@pytest.mark.parametrize(
    ("share", "words", "claim"),
    [
        (DROPS, "layer 1 drops: 9 of 9 heads, retained share 0.73 [0.70, 0.76]", "holds here: layer 1 loses attention"),
        (RISES, "layer 1 rises: 9 of 9 heads, retained share 1.20 [1.10, 1.30]", "attention on the question rises"),
        (
            SAME,
            "layer 1 unchanged: 9 of 9 heads, retained share 1.00 [0.97, 1.03]",
            "does not hold here: layer 1 keeps",
        ),
        (WIDE, "layer 1 undecided: 9 of 9 heads, retained share 0.97 [0.80, 1.15]", "is undecided here"),
    ],
)
def test_every_verdict_can_be_said(tmp_path: Path, share: Share, words: str, claim: str) -> None:
    lines = verdict_lines(write(tmp_path, {"mless": {1: share}}, odd_heads=0))
    assert f"{words} (uniform dilution 0.62)" in lines[1]
    assert claim in lines[2]
    assert len(lines) == 3


def test_later_layers_are_grouped_by_what_they_do(tmp_path: Path) -> None:
    rises = (1.4, 1.3, 1.5)
    VERDICT[rises] = "rises"
    layers = {1: SAME, 2: DROPS, 3: RISES, 4: rises, 5: SAME, 6: WIDE, 7: SAME}
    lines = verdict_lines(write(tmp_path, {"mless": layers}))
    assert lines[1].endswith(
        "; layer 2 drops (0.73); layers 3–4 rise (1.20–1.40); layers 5, 7 unchanged; layer 6 undecided (0.97)"
    )
    assert lines[2].endswith("layer 1 keeps its attention; later layers that change too: 2–4.")


def test_heads_that_move_in_a_layer_that_does_not_are_counted(tmp_path: Path) -> None:
    folder = ResultFolder(write(tmp_path, {"mless": {1: DROPS, 2: SAME, 3: SAME}}))
    table = folder.read_table("retained").to_pylist()
    for row in table:
        if (row["layer"], row["head"]) == (3, 9):
            row["verdict"] = "rises"
    folder.write_table("retained", pa.Table.from_pylist(table))
    assert verdict_lines(tmp_path)[1].endswith("; layers 2–3 unchanged (1 of 18 heads are not)")


def test_without_layer_one_the_claim_is_not_judged(tmp_path: Path) -> None:
    lines = verdict_lines(write(tmp_path, {"mless": {2: DROPS, 3: SAME}}))
    assert ": layer 2 drops: 8 of 9 heads" in lines[1]
    assert lines[2] == "The published claim is about layer 1, which was not measured."


def test_without_mless_there_is_no_claim_to_judge(tmp_path: Path) -> None:
    own = {"base": {"kind": "none", "filler": None, "length": 0, "placement": "before-question"}}
    lines = verdict_lines(write(tmp_path, {"random": {1: DROPS}, "base": {1: SAME}}, conditions=own))
    assert len(lines) == 3
    assert lines[2].startswith("base (nothing inserted): layer 1 unchanged: 8 of 9 heads")
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
    with pytest.raises(BadFolder, match="its run did not finish; run the same command again"):
        verdict_lines(tmp_path)
