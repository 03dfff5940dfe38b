"""accuracy.parquet: each number against the statistic it is said to be, verdicts under a true null, and the words."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from judged_answers import WITHOUT_ANSWERS, answers_of, asked_for, of, pair, row_of, rows_of, table_of, write_folder
from mless import stats
from mless.errors import BadData, BadFolder, BadStudy
from mless.results.answers import accuracy_rows, best_on_dev
from mless.results.folder import ResultFolder
from mless.results.schemas import ACCURACY, ANSWERS
from mless.study.accuracy import comparing
from mless.study.accuracy.tables import accuracy_table
from mless.study.accuracy.words import accuracy_lines, form_words, population_lines
from mless.study.spec import AccuracyTable


def drawn(rng: np.random.Generator, items: int, samples: int, shift: float = 0.0) -> np.ndarray:
    """Samples that resemble each other within an item."""
    return rng.random((items, samples)) < np.clip(rng.beta(1, 1, items) + shift, 0, 1)[:, None]


# ---- one answer per item ---------------------------------------------------------------------------------------------


def test_one_answer_per_item_is_wilson_tango_and_mcnemar():
    before, after = pair(gained=20, lost=5, n=120)
    table = table_of({"none": before, "mless": after}, margin=0.05)
    assert table.schema == ACCURACY
    none, mless = row_of(table, "none"), row_of(table, "mless")
    level = stats.accuracy_interval(after)
    assert (mless["value"], mless["lo"], mless["hi"], mless["n"]) == (level.value, level.lo, level.hi, 120)
    change = stats.paired_difference(before, after)
    assert (mless["delta"], mless["delta_lo"], mless["delta_hi"]) == (change.value, change.lo, change.hi)
    assert (mless["gained"], mless["lost"]) == (20, 5)
    assert mless["p"] == mless["p_adjusted"] == stats.mcnemar_exact(before, after)
    assert mless["mde"] == stats.smallest_detectable_effect(120, 25 / 120)
    assert mless["equivalence_p"] == stats.equivalence(before, after, 0.05).p
    assert mless["verdict"] == "rises"
    assert [none[name] for name in ("delta", "p", "p_adjusted", "mde", "verdict", "changed_text", "sd")] == [None] * 7
    assert mless["aa_delta"] is None
    assert mless["p_again"] is None


def test_the_verdicts():
    before, up = pair(gained=20, lost=5, n=400)
    same = before.copy()
    table = table_of({"none": before, "mless": up, "mful": same}, margin=0.02)
    assert row_of(table, "mless")["verdict"] == "rises"
    assert row_of(table, "mful")["verdict"] == "equivalent"
    assert row_of(table_of({"none": up, "mless": before}), "mless")["verdict"] == "drops"
    few, other = pair(gained=6, lost=5, n=60)
    assert row_of(table_of({"none": few, "mless": other}), "mless")["verdict"] == "undecided"


def test_what_stands_beside_an_accuracy():
    before, after = pair(gained=3, lost=1, n=10)
    rows = rows_of("none", before) + rows_of("mless", after)
    rows[10] |= {"finish": "length", "extracted": None, "correct": False, "n_tokens": 110, "text": ""}
    row = row_of(
        accuracy_table(pa.Table.from_pylist(rows, schema=ANSWERS), of("none", "mless"), AccuracyTable(), seed=0),
        "mless",
    )
    assert (row["truncated"], row["no_answer"], row["tokens"], row["samples"]) == (0.1, 0.1, 20.0, 1)
    assert row["changed_text"] == 0.4
    assert (row["gained"], row["lost"]) == (2, 1)


def test_where_nothing_changed_there_is_no_smallest_effect():
    before, _ = pair(gained=0, lost=0, n=300)
    row = row_of(table_of({"none": before, "mless": before}), "mless")
    assert (row["p"], row["delta"], row["mde"], row["changed_text"]) == (1.0, 0.0, None, 0.0)
    several = np.stack([before] * 3, axis=1)
    row = row_of(table_of({"none": several, "mless": several}), "mless")
    assert (row["p"], row["delta"], row["mde"], row["verdict"]) == (1.0, 0.0, None, "equivalent")


def test_one_item_gives_values_and_nothing_else():
    one = np.array([True])
    row = row_of(table_of({"none": one, "none-again": one, "mless": ~one}), "mless")
    assert (row["value"], row["delta"], row["verdict"]) == (0.0, -1.0, "undecided")
    assert [row[name] for name in ("lo", "hi", "p", "p_again", "p_adjusted", "mde", "equivalence_p")] == [None] * 7


# ---- the A/A control and the family ----------------------------------------------------------------------------------


def test_an_effect_needs_rejection_against_both_runs_of_none():
    n = 200
    rng = np.random.default_rng(3)
    none = rng.random(n) < 0.5
    after, again = none.copy(), none.copy()
    after[np.flatnonzero(~none)[:20]] = True  # 20 gained against none
    again[np.flatnonzero(~none)[:17]] = True  # … of which 17 came by themselves
    table = table_of({"none": none, "none-again": again, "mless": after})
    row, control = row_of(table, "mless"), row_of(table, "none-again")
    assert row["p"] == stats.mcnemar_exact(none, after) < 0.001
    assert row["p_again"] == row["p_adjusted"] == stats.mcnemar_exact(again, after) > 0.05
    assert row["verdict"] == "undecided"
    assert row["aa_delta"] == control["delta"] == control["aa_delta"] == row_of(table, "none")["aa_delta"] == 17 / n
    assert (control["gained"], control["lost"], control["p"]) == (17, 0, stats.mcnemar_exact(none, again))
    assert [control[name] for name in ("p_again", "p_adjusted", "mde", "equivalence_p", "verdict")] == [None] * 5


def test_a_change_no_larger_than_the_control_is_no_finding_whatever_its_p():
    n = 200
    none, after = pair(gained=20, lost=0, n=n)
    again = none.copy()
    again[np.flatnonzero(none)[:20]] = False  # the same prompts fell by as much
    row = row_of(table_of({"none": none, "none-again": again, "mless": after}), "mless")
    assert row["p_adjusted"] < 0.001
    assert (row["delta"], row["aa_delta"], row["verdict"]) == (0.1, -0.1, "undecided")


def test_the_control_is_no_member_of_the_family():
    none, after = pair(gained=14, lost=3, n=100)
    judged = {"none": none, "none-again": none, "mless": after, "mful": none, "random": none}
    p = stats.mcnemar_exact(none, after)
    row = row_of(table_of(judged), "mless")
    assert row["p"] == row["p_again"] == p  # where A/A is zero the rule costs nothing
    assert row["p_adjusted"] == pytest.approx(3 * p)
    judged.pop("none-again")
    assert row_of(table_of(judged), "mless")["p_adjusted"] == pytest.approx(3 * p)


def test_sampled_p_are_equal_where_the_control_repeats_none():
    rng = np.random.default_rng(0)
    none, after = drawn(rng, 60, 4), drawn(rng, 60, 4, 0.2)
    row = row_of(table_of({"none": none, "none-again": none, "mless": after}), "mless")
    assert row["p"] == row["p_again"]


NULLS = pytest.mark.parametrize("noisy", [False, True], ids=["A/A zero", "A/A not zero"])


def null_runs(rng: np.random.Generator, sets: int, n: int, noisy: bool) -> list[np.ndarray]:
    """none, none-again and four conditions that do nothing: [sets, items] each, an item being as hard under all."""
    hard = rng.beta(1, 1, (sets, n))
    runs = [rng.random((sets, n)) < hard for _ in range(6)]
    return runs if noisy else [runs[0], runs[0], *runs[2:]]


def claimed_by_hand(runs: list[np.ndarray]) -> np.ndarray:
    """Which sets claim an effect by McNemar against both runs of none, and Holm: its first step is Bonferroni's."""
    both = [
        np.maximum(*(stats.paired.mcnemar_p((~base & one).sum(1), (base & ~one).sum(1), "exact") for base in runs[:2]))
        for one in runs[2:]
    ]
    return np.min(both, axis=0) * len(both) <= 0.05


@NULLS
def test_under_a_true_null_few_runs_claim_an_effect(noisy: bool):
    sets = 20_000
    share = float(claimed_by_hand(null_runs(np.random.default_rng(11), sets, 100, noisy)).mean())
    print(f"true null, 4 conditions, 100 items, A/A {'not ' if noisy else ''}zero: {share:.2%} of runs claim an effect")
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / sets)


@NULLS
def test_the_table_claims_what_the_rule_by_hand_does(noisy: bool):
    runs = null_runs(np.random.default_rng(11), 400, 100, noisy)
    by_hand = claimed_by_hand(runs)
    # some that claim, and some that do not
    chosen = [*np.flatnonzero(by_hand)[:4], *np.flatnonzero(~by_hand)[:4]]
    names = ("none", "none-again", "mless", "mful", "random", "other")
    for at in chosen:
        rows = table_of({name: run[at] for name, run in zip(names, runs, strict=True)}).to_pylist()
        found = [row for row in rows if row["verdict"] in ("rises", "drops")]
        # the further rule, that a change exceed the control's, only ever takes claims away
        larger = any((row["p_adjusted"] or 1) <= 0.05 and abs(row["delta"]) > abs(row["aa_delta"]) for row in rows)
        assert bool(found) == larger
        assert by_hand[at] == any((row["p_adjusted"] or 1) <= 0.05 for row in rows)


# ---- several samples per item ----------------------------------------------------------------------------------------


def test_several_samples_are_bootstrap_sign_flip_and_seeds():
    rng = np.random.default_rng(1)
    none, after = drawn(rng, 20, 6), drawn(rng, 20, 6, 0.25)
    table = table_of({"none": none, "mless": after}, k=[1, 3], margin=0.1)
    row = row_of(table, "mless")
    seeds = stats.over_seeds(after)
    assert (row["value"], row["sd"], row["samples"]) == (pytest.approx(seeds.mean), seeds.sd, 6)
    direct = stats.cluster_difference(none, after, np.random.default_rng(5))
    assert row["delta"] == pytest.approx(direct.value)
    assert row["p"] == pytest.approx(direct.p)  # 20 items: both tests are exact
    assert (row["delta_lo"], row["delta_hi"]) == (
        pytest.approx(direct.lo, abs=0.01),
        pytest.approx(direct.hi, abs=0.01),
    )
    assert row["mde"] == pytest.approx(stats.smallest_detectable_mean(20, direct.sd) + 1 / 6 / 20)  # and what ties cost
    assert row["equivalence_p"] == stats.cluster_equivalence(none, after, 0.1).p
    moved = after.mean(axis=1) - none.mean(axis=1)
    assert (row["gained"], row["lost"]) == ((moved > 1e-9).sum(), (moved < -1e-9).sum())


def test_pass_at_k_votes_and_diversity_have_their_rows():
    rng = np.random.default_rng(2)
    none, after = drawn(rng, 25, 6), drawn(rng, 25, 6, 0.2)
    table = table_of({"none": none, "mless": after}, k=[1, 3, 6, 3])
    metrics = [row["metric"] for row in table.to_pylist() if row["condition"] == "mless"]
    assert metrics == ["pass@1", "pass@3", "pass@6", "maj@3", "maj@6", "diversity"]
    third = row_of(table, "mless", "pass@3")
    by_item = [stats.pass_at_k_by_item(one, 3)[:, None] for one in (none, after)]
    assert third["value"] == pytest.approx(by_item[1].mean())
    assert third["p"] == pytest.approx(stats.cluster_difference(*by_item, np.random.default_rng(0)).p)
    assert third["sd"] is None
    # wrong answers differ from sample to sample, so one right answer that is repeated wins
    votes = [
        stats.majority_at_k([["42" if x else str(n) for n, x in enumerate(row)] for row in one], one, 3)
        for one in (none, after)
    ]
    maj = row_of(table, "mless", "maj@3")
    assert (maj["value"], maj["sd"]) == (pytest.approx(votes[1].mean), pytest.approx(votes[1].sd))
    assert maj["p"] == pytest.approx(
        stats.cluster_difference(votes[0].right, votes[1].right, np.random.default_rng(0)).p
    )
    whole = row_of(table, "mless", "maj@6")  # one vote per item: right or wrong
    assert whole["sd"] is None
    assert (whole["lo"], whole["hi"]) == (lambda e: (e.lo, e.hi))(
        stats.accuracy_interval(stats.majority_at_k([["42" if x else str(n) for n, x in enumerate(r)] for r in after], after, 6).right[:, 0])
    )  # fmt: skip


def test_diversity_is_the_mean_over_items_that_have_two_words():
    none = np.zeros((12, 2), bool)
    rows = rows_of("none", none) + rows_of("mless", none)
    for row in rows:
        number = int(row["item"][1:])
        if row["condition"] == "mless":
            row["text"] = "a b c" if row["sample"] == 0 or number % 2 else "d e f"
        else:
            row["text"] = "a b c" if number else "short"
    table = accuracy_table(pa.Table.from_pylist(rows, schema=ANSWERS), of("none", "mless"), AccuracyTable(), seed=0)
    none_row, row = row_of(table, "none", "diversity"), row_of(table, "mless", "diversity")
    assert (none_row["n"], none_row["value"]) == (11, 0.5)
    assert (row["n"], row["value"]) == (12, 0.75)
    assert 0 <= row["lo"] < 0.75 < row["hi"] <= 1
    assert row["delta"] == pytest.approx(5 * 0.5 / 11)  # the items that have one under both conditions
    assert row["p"] == pytest.approx(2 / 2**5)  # of them five changed, all one way
    assert (row["equivalence_p"], row["gained"], row["verdict"]) == (None, None, "undecided")


def test_answers_of_one_word_have_no_diversity():
    none = np.ones((5, 2), bool)
    rows = [row | {"text": "42"} for row in rows_of("none", none) + rows_of("mless", none)]
    table = accuracy_table(pa.Table.from_pylist(rows, schema=ANSWERS), of("none", "mless"), AccuracyTable(), seed=0)
    row = row_of(table, "mless", "diversity")
    assert (row["n"], row["value"], row["delta"], row["p"], row["verdict"]) == (0, None, None, None, "undecided")


def test_a_vote_is_one_row_against_greedy_none():
    rng = np.random.default_rng(4)
    none, samples = drawn(rng, 80, 1)[:, 0], drawn(rng, 80, 8, 0.3)
    filler = none.copy()
    filler[np.flatnonzero(~none)[:9]] = True
    judged = {"none": none, "none-again": none, "mless": filler, "vote": samples}
    table = table_of(judged)
    assert [r["metric"] for r in table.to_pylist() if r["condition"] == "vote"] == ["maj@8", "diversity"]
    row = row_of(table, "vote", "maj@8")
    votes = [["42" if x else str(n) for n, x in enumerate(one)] for one in samples]
    right = stats.majority_at_k(votes, samples, 8).right[:, 0]
    assert (row["value"], row["samples"], row["aa_delta"]) == (right.mean(), 8, 0.0)
    assert row["delta"] == stats.paired_difference(none, right).value
    assert row["p"] == row["p_again"] == stats.mcnemar_exact(none, right)
    assert row["changed_text"] is None  # 8 answers have no partner among 1
    family = stats.holm(np.array([row_of(table, "mless")["p"], row["p"]]))
    assert (row_of(table, "mless")["p_adjusted"], row["p_adjusted"]) == tuple(family)
    assert row_of(table, "vote", "diversity")["delta"] is None


def test_a_vote_over_as_many_samples_as_none_has_is_against_its_pass_at_1_too():
    rng = np.random.default_rng(5)
    none, voted = drawn(rng, 30, 8), drawn(rng, 30, 8)
    table = table_of({"none": none, "vote": voted}, k=[8])
    row = row_of(table, "vote", "maj@8")
    assert row["delta"] == pytest.approx(row["value"] - row_of(table, "none", "pass@1")["value"])


# ---- clusters --------------------------------------------------------------------------------------------------------


def test_clusters_are_the_unit_even_with_one_answer():
    rng = np.random.default_rng(6)
    keys = [f"c{n // 5}" for n in range(100)]
    moved = np.repeat(rng.random(20) < 0.4, 5)
    none = rng.random(100) < 0.5
    after = np.where(moved, True, none)
    row = row_of(table_of({"none": none, "mless": after}, keys), "mless")
    direct = stats.cluster_difference(none[:, None], after[:, None], np.random.default_rng(0), keys)
    assert row["p"] == pytest.approx(direct.p)  # 20 clusters: exact
    assert row["p"] > stats.mcnemar_exact(none, after)
    ties = 1 / 100  # the clusters' sums are whole numbers
    assert row["mde"] == pytest.approx(stats.smallest_detectable_mean(20, direct.sd * math.sqrt(20 / 100)) + ties)
    assert row["equivalence_p"] == stats.cluster_equivalence(none[:, None], after[:, None], 0.02, keys).p
    assert (row["gained"], row["lost"]) == ((after & ~none).sum(), 0)
    wilson = stats.accuracy_interval(after)
    assert row["hi"] - row["lo"] > 1.2 * (wilson.hi - wilson.lo)


def test_items_without_a_key_are_clusters_of_their_own():
    none, after = pair(gained=9, lost=2, n=24)
    keys: list[Any] = [None] * 24
    keys[0] = "q0003"  # is called as an item is, and yet that item is not in it
    row = row_of(table_of({"none": none, "mless": after}, keys), "mless")
    assert row["p"] == pytest.approx(stats.mcnemar_exact(none, after))


def test_single_items_as_clusters_give_the_interval_of_pass_at_1():
    rng = np.random.default_rng(7)
    after = drawn(rng, 200, 1)
    keys = [str(n) for n in range(200)]
    row = row_of(table_of({"none": after, "mless": after}, keys), "mless")
    direct = stats.pass_at_k(after, 1, np.random.default_rng(0))
    assert (row["lo"], row["hi"]) == (pytest.approx(direct.lo, abs=0.004), pytest.approx(direct.hi, abs=0.004))
    wrong = np.zeros((30, 1), bool)
    row = row_of(table_of({"none": wrong, "mless": ~wrong}, [str(n) for n in range(30)]), "mless")
    assert (row["hi"], row_of(table_of({"none": wrong}, keys[:30]), "none")["lo"]) == (1.0, 0.0)
    assert row["lo"] == pytest.approx(1 - 0.086, abs=0.01)


@pytest.mark.parametrize("share", [0.95, pytest.param(0.3, marks=pytest.mark.slow)])
def test_the_interval_of_an_accuracy_covers_when_items_come_in_clusters(share: float):
    sets, groups, size = 400, 40, 5
    rng = np.random.default_rng(8)
    keys = [f"c{n // size}" for n in range(groups * size)]
    hits = wilson_hits = 0
    for seed in range(sets):
        of_group = rng.beta(share, 1 - share, groups)  # correlation 0.5 within a cluster
        right = (rng.random((groups, size)) < of_group[:, None]).reshape(-1)
        block = comparing._Block("all", np.arange(len(right)), keys, 0.02, seed)
        found, wilson = comparing._mean_of_shares(right.astype(float), block, "none"), stats.accuracy_interval(right)
        hits += found.lo <= share <= found.hi
        wilson_hits += wilson.lo <= share <= wilson.hi
    print(f"40 clusters of 5, accuracy {share}: covers {hits / sets:.1%}, Wilson's {wilson_hits / sets:.1%}")
    assert hits / sets >= 0.93 - 3 * math.sqrt(0.05 * 0.95 / sets)
    assert wilson_hits / sets < 0.85


# ---- nothing but the answers decides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "samples", "clustered"),
    [
        (1, 1, False), (2, 3, True),
        *(pytest.param(seed, seed % 2 * 2 + 1, seed % 4 > 1, marks=pytest.mark.slow) for seed in range(3, 11)),
    ],
)  # fmt: skip
def test_the_order_of_the_rows_does_not_matter(seed: int, samples: int, clustered: bool):
    rng = np.random.default_rng(9)
    judged = {
        name: drawn(rng, 40, samples, shift) for name, shift in (("none", 0.0), ("none-again", 0.0), ("mless", 0.1))
    }
    clusters = [f"c{n // 2}" for n in range(40)] if clustered else None
    answers = answers_of(judged, clusters)
    order = list(range(answers.num_rows))
    random.Random(seed).shuffle(order)
    asked = asked_for(answers, k=[1, samples], dev_share=0.5)
    tables = [accuracy_table(one, of(*judged), asked, seed=1) for one in (answers, answers.take(order))]
    assert tables[0].equals(tables[1])


@pytest.mark.parametrize("samples", [1, 4])
def test_another_condition_moves_only_what_depends_on_their_number(samples: int):
    rng = np.random.default_rng(10)
    judged = {name: drawn(rng, 60, samples) for name in ("none", "none-again", "mless")}
    more = {"none": judged["none"], "mful": drawn(rng, 60, samples), **judged}
    few, many = (table_of(one, dev_share=0.4).to_pylist() for one in (judged, more))
    left = [row for row in many if row["condition"] != "mful"]
    for one, other in zip(few, left, strict=True):
        for row in (one, other):
            for name in ("p_adjusted", "verdict", "alpha", "mde", "delta_lo_all", "delta_hi_all"):
                del row[name]
    assert few == left


def test_the_seed_matters_where_numbers_are_drawn_and_only_there():
    rng = np.random.default_rng(12)
    several = {"none": drawn(rng, 40, 3), "mless": drawn(rng, 40, 3)}
    assert not table_of(several, seed=0).equals(table_of(several, seed=1))
    single = {"none": several["none"][:, 0], "mless": several["mless"][:, 0]}
    assert table_of(single, seed=0).equals(table_of(single, seed=1))


# ---- dev and test ----------------------------------------------------------------------------------------------------


def test_dev_and_test_are_told_apart_by_item():
    rng = np.random.default_rng(14)
    judged = {"none": drawn(rng, 200, 1), "mless": drawn(rng, 200, 1)}
    table = table_of(judged, dev_share=0.3, seed=7)
    dev = stats.split_items([f"q{n:04d}" for n in range(200)], 0.3, 7)
    for split, chosen in (("all", np.ones(200, bool)), ("dev", dev), ("test", ~dev)):
        row = row_of(table, "mless", split=split)
        before, after = judged["none"][chosen, 0], judged["mless"][chosen, 0]
        assert (row["n"], row["value"], row["p"]) == (
            chosen.sum(),
            pytest.approx(after.mean()),
            stats.mcnemar_exact(before, after),
        )


def test_related_items_are_on_one_side():
    rng = np.random.default_rng(15)
    keys = [f"c{n // 10}" for n in range(100)]
    table = table_of({"none": drawn(rng, 100, 1)}, keys, dev_share=0.5)
    dev = stats.split_items(keys, 0.5, 0)
    assert row_of(table, "none", split="dev")["n"] == dev.sum() == round(dev.sum(), -1)


def sweep(n: int = 200, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    none = rng.random(n) < 0.5
    long = none | (rng.random(n) < 0.2)
    return {"none": none, "none-again": none, "short": none.copy(), "long": long}


def test_the_best_on_dev_and_what_it_does_on_test():
    table = table_of(sweep(), dev_share=0.5)
    best = best_on_dev(table, of("none", "none-again", "short", "long"))
    assert (best.condition, best.among, best.verdict) == ("long", 2, "rises")
    assert best.dev == row_of(table, "long", split="dev")
    assert best.test == row_of(table, "long", split="test")
    assert best.p == best.test["p"] < best.test["p_adjusted"]  # one condition is tested there


def test_of_equals_the_smaller_p_then_the_first():
    none = np.arange(400) % 2 == 0
    a, b = none.copy(), none.copy()
    a[np.flatnonzero(~none)[:40]] = True  # 40 gained
    b[np.flatnonzero(~none)[:60]] = True  # 60 gained …
    b[np.flatnonzero(none)[:20]] = False  # … and 20 lost
    table = table_of({"none": none, "long": b, "short": a}, dev_share=0.5)
    rows = table.to_pylist()
    value = row_of(table, "short", split="dev")["value"]
    for row in rows:
        if row["condition"] == "long" and row["split"] == "dev":
            row["value"] = value
    tied = pa.Table.from_pylist(rows, schema=ACCURACY)
    assert best_on_dev(tied, of("none", "long", "short")).condition == "short"
    same = table_of({"none": none, "long": a, "short": a}, dev_share=0.5)
    assert best_on_dev(same, of("none", "long", "short")).condition == "long"


def test_nothing_to_choose_from():
    none = np.arange(40) % 2 == 0
    with pytest.raises(BadStudy, match=r"no items were set apart.*accuracy\.dev_share=0\.5"):
        best_on_dev(table_of({"none": none, "mless": none}), of("none", "mless"))
    with pytest.raises(BadStudy, match="nothing to choose from"):
        best_on_dev(table_of({"none": none, "none-again": none}, dev_share=0.5), of("none", "none-again"))


# ---- what is refused -------------------------------------------------------------------------------------------------


def made(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=ANSWERS)


NONE, MLESS = rows_of("none", np.ones(4, bool)), rows_of("mless", np.ones(4, bool))
TWICE = rows_of("mless", np.ones((4, 2), bool))


@pytest.mark.parametrize(
    ("rows", "names", "fault", "message"),
    [
        (MLESS, ["none", "mless"], BadStudy, r"compared with condition 'none', which was not run \(there are: mless\)"),
        ([], ["none"], BadStudy, "there are: no answers"),
        ([*NONE, *MLESS], ["none"], BadData, "condition 'mless', which the study does not have; it has: none"),
        (NONE, ["none", "mless"], BadData, "condition 'mless' has no answers; run the study again"),
        ([*NONE, *MLESS[:-1]], ["none", "mless"], BadData, r"differ in their items: 'q0003': 'mless' lacks it .*\(1 such\)"),
        ([*NONE[:-2], *MLESS], ["none", "mless"], BadData, r"'q0002': 'mless' has it and 'none' has not \(2 such\)"),
        ([*NONE, *MLESS, MLESS[1]], ["none", "mless"], BadData, "'mless', item 'q0001', sample 0: answered twice"),
        ([*NONE, *TWICE], ["none", "mless"], BadData, "'mless' has 2 samples per item, but 'none' has 1"),
        ([*NONE, *TWICE[:-1]], ["none", "mless"], BadData, "'mless', item 'q0003': sample 1 is missing"),
        ([*NONE, MLESS[0] | {"correct": None}], ["none", "mless"], BadData, "'mless', item 'q0000', sample 0: not judged"),
        ([*NONE, *(r | {"model": "n"} for r in MLESS)], ["none", "mless"], BadData, "answers of one model expected; got m, n"),
        ([*NONE, *(r | {"cluster": "c"} for r in MLESS)], ["none", "mless"], BadData, "item 'q0000': its cluster is 'c', but None"),
        ([*NONE, *rows_of("vote", np.ones((4, 3), bool))], ["none", "vote"], BadData, "'vote' has 3 samples per item, but it votes over 8"),
    ],
)  # fmt: skip
def test_refused(rows: list[dict[str, Any]], names: list[str], fault: type[Exception], message: str):
    with pytest.raises(fault, match=message):
        accuracy_table(made(*rows), of(*names), AccuracyTable(), seed=0)


def test_k_beyond_the_samples_and_out_of_range():
    several = {"none": np.ones((4, 2), bool)}
    # four were asked for, but the answers hold two
    message = r"pass@4 and maj@4 need at least 4 samples .* there are 2; draw more with --samples 4 .* k ≤ 2"
    with pytest.raises(BadStudy, match=message):
        table_of(several, samples=4, k=[1, 4])
    with pytest.raises(BadStudy, match="from 1 on, expected; got 0"):
        accuracy_table(answers_of(several), of("none"), AccuracyTable.model_construct(k=[0]), seed=0)


def test_one_control_that_does_not_vote():
    known = of("none", "none-again")
    rows = [*NONE, *rows_of("none-again", np.ones(4, bool)), *rows_of("twice", np.ones(4, bool))]
    with pytest.raises(BadStudy, match=r"one A/A control .* got none-again, twice"):
        accuracy_table(
            made(*rows), known | {"twice": replace(known["none-again"], name="twice")}, AccuracyTable(), seed=0
        )
    with pytest.raises(BadStudy, match="cannot vote"):
        accuracy_table(
            made(*rows[:8]), known | {"none-again": replace(known["none-again"], samples=2)}, AccuracyTable(), seed=0
        )


# ---- in words --------------------------------------------------------------------------------------------------------


def lines_of(
    path: Path, judged: dict[str, np.ndarray], about: dict[str, Any] | None = None, **settings: Any
) -> list[str]:
    return accuracy_lines(write_folder(path, answers_of(judged), about, **settings))


def test_a_joint_bound_is_said_where_nothing_changed(tmp_path: Path):
    none, _ = pair(gained=20, lost=5, n=200)
    unclear = none.copy()
    unclear[:4] = ~unclear[:4]
    lines = lines_of(tmp_path, {"none": none, "mless": unclear, "random": none})
    (together,) = [line for line in lines if line.startswith("Read together")]
    assert re.search(
        r"random \[−2\.\d, \+2\.\d\]; beyond ±\d\.\d points a change is excluded for every one of them$", together
    )


def test_a_screen_that_says_all_verdicts_alike(tmp_path: Path):
    none, rises = pair(gained=20, lost=5, n=200)
    unclear = none.copy()
    unclear[:4] = ~unclear[:4]
    unclear[100:104] = ~unclear[100:104]
    judged = {"none": none, "none-again": none, "mless": rises, "mful": unclear, "random": none}
    lines = lines_of(tmp_path, judged)
    assert lines[0] == (
        "m, 200 items of t, engine hf (row-stable, S = 16), greedy, 1 answer per item; accuracy = share judged right, with 95 % interval"
    )
    assert lines[1] == "none (nothing inserted): 46.5 % [39.7, 53.4]"
    assert lines[2].startswith(
        "mless (55 × ' /', before-question): 54.0 % [47.1, 60.8]; Δ +7.5 points [+2.8, +12.8] (A/A 0.0), p = 0.004, "
    )
    assert lines[2].endswith(", after Holm p = 0.012: accuracy rises")
    assert lines[3].endswith(": undecided: neither a change is shown, nor that it stays within ±2 points")
    assert "random (55 tokens of natural text, before-question)" in lines[4]
    assert ": no effect: a change of more than ±2 points is excluded (equivalence test, p = 0.0" in lines[4]
    assert lines[5].startswith(
        "Read together, the Δ of all 3 conditions lie in (95 % for all at once, Bonferroni): mless [+1.7, +14.2], mful ["
    )
    assert lines[5].endswith("random [−2.8, +2.8]")  # one of them rises, so nothing is excluded for all
    assert lines[6] == "A/A: none-again differs on 0 of 200 items, Δ 0.0: row-stable decoding repeats itself"
    assert lines[7].startswith(
        "Smallest effect that so many items could have shown (80 % power, by the test that was used: p ≤ 0.0167 (Holm over 3)): mless ±"
    )
    assert lines[7].endswith("random: too few items changed for any")
    assert lines[8] == "The string and the symbolic rule judged 0 of 1,000 answers differently."
    assert lines[9].startswith("Items that changed: random 0; fewer than 6 can never reject")
    assert len(lines) == 10


def test_no_effect_is_said_only_when_equivalent(tmp_path: Path):
    none, after = pair(gained=8, lost=8, n=100)
    text = "\n".join(lines_of(tmp_path, {"none": none, "mless": after}))
    assert "no effect:" not in text
    assert "undecided" in text
    assert "No A/A control (none-again) was run" in text


def test_a_control_that_does_not_repeat(tmp_path: Path):
    none, again = pair(gained=7, lost=4, n=200)
    judged = {"none": none, "none-again": again, "mless": again}
    vllm = lines_of(tmp_path / "a", judged, {"engine": "vllm"})
    line = next(one for one in vllm if one.startswith("A/A"))
    assert line.startswith("A/A: none-again differs on 11 of 200 items, Δ +1.5 [−")
    assert line.endswith(
        "5.5 % of the answers read otherwise: an effect needs rejection against both none and none-again, and a Δ no larger than this is none"
    )
    assert "engine vllm, greedy" in vllm[0]
    assert "and against none-again p = 1.00" in vllm[2]
    broken = lines_of(tmp_path / "b", judged)
    assert any("row-stable decoding should have repeated itself and did not" in one for one in broken)
    sampled = lines_of(tmp_path / "c", judged, temperature=0.7)
    assert "temperature 0.7" in sampled[0]
    assert any("needs rejection against both" in one for one in sampled)


def test_texts_that_differ_are_told_even_where_no_grade_does(tmp_path: Path):
    none = np.arange(20) % 2 == 0
    rows = rows_of("none", none) + rows_of("none-again", none)
    rows[-1]["text"] = "well, it is 42"
    line = next(x for x in accuracy_lines(write_folder(tmp_path, made(*rows))) if x.startswith("A/A"))
    assert "differs on 0 of 20 items" in line
    assert "5.0 % of the answers read otherwise" in line


def test_a_significant_change_as_large_as_the_controls(tmp_path: Path):
    none, after = pair(gained=20, lost=0, n=200)
    again = none.copy()
    again[np.flatnonzero(none)[:20]] = False
    lines = lines_of(tmp_path, {"none": none, "none-again": again, "mless": after}, {"engine": "vllm"})
    assert lines[2].endswith("undecided: the same prompts differ by as much among themselves (A/A)")


def test_answers_of_another_form_are_pointed_out(tmp_path: Path) -> None:
    none, after = pair(gained=8, lost=3, n=50)
    rows = rows_of("none", none) + rows_of("mless", after)
    for row in rows:
        row |= {
            "n_tokens": 40 if row["condition"] == "none" else 9,
            "text": "so" if row["condition"] == "none" else " ",
        }
    lines = accuracy_lines(write_folder(tmp_path, made(*rows)))
    assert any(line.startswith("The answers differ in form: none 40, mless 9 tokens on average.") for line in lines)
    assert any(
        line.startswith("Empty answers: none 0.0 %, mless 100.0 %.") and "--prompt chat" in line for line in lines
    )


def test_a_generated_task_asked_whole_is_no_sample():
    assert population_lines("arithmetic-1", 199) == population_lines("math500", 500) == []
    assert population_lines("arithmetic-99", 200) == []  # of a newer version
    [line] = population_lines("arithmetic-1", 200)
    assert line.startswith(
        "These 200 items are all that arithmetic-1 has, so intervals and p do not speak of a larger set"
    )
    assert "--data arithmetic:5:COUNT (20,000 questions)" in line


def stated_rows() -> list[dict[str, Any]]:
    """40 items: 10 gained where both state a result, 20 gained where only the second does, 10 right and stated under both."""
    none = rows_of("none", np.repeat([False, False, True], [10, 20, 10]))
    after = rows_of("mless", np.ones(40, dtype=bool))
    for n, row in enumerate(none):
        row["stated"] = not 10 <= n < 30
    for row in after:
        row["stated"] = True
    return none + after


def test_a_change_is_taken_apart_by_form(tmp_path: Path):
    row = row_of(accuracy_table(made(*stated_rows()), of("none", "mless"), AccuracyTable(), seed=0), "mless")
    assert (row["delta"], row["delta_both"], row["delta_form"]) == (0.75, 0.25, 0.5)
    assert (row["both_n"], row["both_before"], row["both_after"], row["both_delta"]) == (20, 10, 20, 0.5)
    assert (row["stated"], row["guessed"], row["no_answer"], row["stated_delta"]) == (1, 0, 0, 0.5)
    assert row["mostly_form"] is True
    assert row["delta_form_lo"] < 0.5 < row["delta_form_hi"]
    text = "\n".join(accuracy_lines(write_folder(tmp_path, made(*stated_rows()))))
    assert "accuracy rises. Most of this Δ is form: +50.0 points [" in text
    assert "(stated in 100.0 % of the answers, +50.0 points [" in text
    assert "from the 20 items where both state one: 10 → 20 right, +50.0 points [" in text


def test_form_is_called_most_of_a_change_only_where_there_is_one():
    row: dict[str, Any] = {
        "samples": 1, "delta": 0.05, "verdict": "undecided", "mostly_form": True, "delta_form": 0.04, "delta_form_lo": -0.01, "delta_form_hi": 0.09,
        "delta_both": 0.01, "delta_both_lo": -0.04, "delta_both_hi": 0.06, "both_n": 30, "both_before": 10, "both_after": 11, "both_delta": 1 / 30,
        "both_delta_lo": -0.1, "both_delta_hi": 0.2, "stated": 0.9, "stated_delta": 0.1, "stated_delta_lo": 0.0, "stated_delta_hi": 0.2,
    }  # fmt: skip
    assert form_words(row) == (
        ". Form gives +4.0 points [−1.0, +9.0]; where both state a result (30 items) it is +1.0 [−4.0, +6.0]: 10 → 11 right"
    )
    for clear in ({"delta_form_lo": 0.001}, {"verdict": "rises"}, {"verdict": "drops"}):
        assert form_words(row | clear).startswith(". Most of this Δ is form: +4.0 points")
    # nothing changed in all, and the two parts cancel
    even = row | {"delta": 0.0, "delta_both": -0.04, "mostly_form": False, "verdict": "equivalent"}
    assert "of it" not in form_words(even)
    assert form_words(even | {"both_n": 0}) == ". Form gives +4.0 points [−1.0, +9.0]"


def test_no_answer_is_not_stated_and_samples_pair_with_samples():
    none, after = np.zeros((6, 3), dtype=bool), np.ones((6, 3), dtype=bool)
    rows = rows_of("none", none) + rows_of("mless", after)
    for row in rows:
        # under none sample 0 is stated, sample 1 guessed, sample 2 has no answer
        row["stated"] = True if row["condition"] == "mless" else (True, False, None)[row["sample"]]
        if row["stated"] is None:
            row["extracted"] = None
    answers = made(*rows)
    table = accuracy_table(answers, of("none", "mless"), asked_for(answers), seed=0)
    row = row_of(table, "mless")
    assert (row["both_n"], row["both_before"], row["both_after"]) == (6, 0, 6)
    assert row["delta_both"] == pytest.approx(1 / 3)
    assert row["delta_form"] == pytest.approx(2 / 3)
    base = row_of(table, "none")
    assert (base["stated"], base["guessed"], base["no_answer"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert base["delta_form"] is None


def test_answers_without_stated_have_no_parts_and_the_same_verdict(tmp_path: Path):
    rows = stated_rows()
    older = made(*rows).drop_columns("stated")
    table = accuracy_table(older, of("none", "mless"), AccuracyTable(), seed=0)
    row = row_of(table, "mless")
    assert (row["delta"], row["verdict"]) == (0.75, "rises")
    assert all(row[name] is None for name in ACCURACY.names[ACCURACY.names.index("stated") :])
    folder = write_folder(tmp_path, older)
    # as an older version left it: the columns are not there at all
    kept = ACCURACY.names[: ACCURACY.names.index("stated")]
    ResultFolder(folder).write_table("accuracy", ResultFolder(folder).read_table("accuracy").select(kept))
    text = "\n".join(accuracy_lines(folder))
    assert "accuracy rises" in text
    assert "form" not in text
    # an answer of which it is not known spoils the whole: a part of the items is no decomposition
    rows[0]["stated"] = None
    assert (
        row_of(accuracy_table(made(*rows), of("none", "mless"), AccuracyTable(), seed=0), "mless")["delta_form"] is None
    )


def test_truncation_missing_answers_and_rules_that_disagree(tmp_path: Path):
    none, after = pair(gained=8, lost=3, n=50)
    rows = rows_of("none", none) + rows_of("mless", after)
    for row in rows[50:54]:
        row |= {"finish": "length", "extracted": None, "correct": False}
    rows[0]["disagree"] = True
    lines = accuracy_lines(write_folder(tmp_path, made(*rows), max_new_tokens=64))
    assert "Cut off at 64 tokens: none 0.0 %, mless 8.0 %; --max-new-tokens gives more room" in lines
    assert "No answer found, which counts as wrong: none 0.0 %, mless 8.0 %" in lines
    assert any(
        line.startswith("The string and the symbolic rule judged 1 of 100 answers differently; ") for line in lines
    )


@pytest.mark.parametrize(("value", "words"), [(False, "at the floor no drop"), (True, "at the ceiling no rise")])
def test_floor_and_ceiling(tmp_path: Path, value: bool, words: str):
    none = np.full(60, value)
    text = "\n".join(lines_of(tmp_path, {"none": none, "none-again": none, "mless": none}))
    assert words in text
    assert "mless 0; fewer than 6 can never reject" in text


def test_a_single_item(tmp_path: Path):
    one = np.array([True])
    lines = lines_of(tmp_path, {"none": one, "mless": ~one})
    assert lines[0].startswith("m, 1 item of t")
    assert lines[-1] == "An interval and a test take at least 2 items; here nothing can be decided."


def test_sampled_votes_and_further_metrics(tmp_path: Path):
    rng = np.random.default_rng(16)
    judged = {
        "none": drawn(rng, 60, 4),
        "none-again": drawn(rng, 60, 4),
        "mless": drawn(rng, 60, 4),
        "vote": drawn(rng, 60, 8, 0.3),
    }
    lines = lines_of(tmp_path, judged, temperature=0.6, samples=4, k=[1, 2])
    assert "temperature 0.6, 4 samples per item" in lines[0]
    assert "sd over 4 seeds" in lines[1]
    vote = next(line for line in lines if line.startswith("vote"))
    assert vote.startswith("vote (the vote of 8 samples at temperature 0.7): maj@8 ")
    assert "points [" in vote
    assert "against none's pass@1" in vote
    for metric in ("pass@2 (A/A ", "maj@2 (A/A ", "2-gram diversity (A/A "):
        assert any(line.startswith(metric) and "): none " in line and "mless" in line for line in lines)


def test_the_choice_of_a_sweep_is_told_with_its_test_items(tmp_path: Path):
    lines = lines_of(tmp_path, sweep(), dev_share=0.5)
    chosen = next(line for line in lines if line.startswith("Chosen"))
    assert chosen.startswith("Chosen on ")
    assert " dev items, out of 2: long (100 × ' /', before-question); on the " in chosen
    assert " test items Δ = +" in chosen
    assert chosen.endswith("accuracy rises")


def test_rows_for_the_screen(tmp_path: Path):
    rng = np.random.default_rng(17)
    judged = {"none": drawn(rng, 30, 1), "mless": drawn(rng, 30, 1), "vote": drawn(rng, 30, 8)}
    rows = accuracy_rows(write_folder(tmp_path, answers_of(judged), dev_share=0.5))
    assert [(row["condition"], row["metric"], row["split"]) for row in rows] == [
        ("none", "pass@1", "all"),
        ("mless", "pass@1", "all"),
        ("vote", "maj@8", "all"),
    ]
    assert rows[1]["accuracy"] == pytest.approx(judged["mless"].mean())


def test_a_folder_without_answers(tmp_path: Path):
    with pytest.raises(BadFolder, match="no result folder"):
        accuracy_lines(tmp_path)
    ResultFolder(tmp_path).write_manifest(WITHOUT_ANSWERS)
    with pytest.raises(BadFolder, match="holds no answers: its study measured attention"):
        accuracy_lines(tmp_path)
    answers = {"study": {"accuracy": AccuracyTable().model_dump()}}
    ResultFolder(tmp_path / "b").write_manifest(WITHOUT_ANSWERS | answers)
    with pytest.raises(BadFolder, match=r"has no accuracy\.parquet: its run did not finish"):
        accuracy_rows(tmp_path / "b")
