"""A change in accuracy taken apart: it adds up, its intervals cover, and it says form where only the form changed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mless import stats
from mless.errors import BadData
from mless.stats import form


def tables(seed: int, items: int, samples: int, chances: tuple[float, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.random((items, samples)) < chance for chance in chances]


@given(
    seed=st.integers(0, 10_000),
    items=st.integers(1, 40),
    samples=st.integers(1, 5),
    chances=st.tuples(*[st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])] * 4),
    clustered=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_the_parts_add_up(seed: int, items: int, samples: int, chances: tuple[float, ...], clustered: bool) -> None:
    was, is_now, was_stated, is_stated = tables(seed, items, samples, chances)
    clusters = [f"c{n // 3}" for n in range(items)] if clustered else None
    found = stats.decompose(was, is_now, was_stated, is_stated, np.random.default_rng(0), clusters)
    delta = float(is_now.mean() - was.mean())
    assert math.isclose(found.both.value + found.form.value, delta, abs_tol=1e-11)
    # in whole answers nothing is lost to rounding
    both = was_stated & is_stated
    rest = int((is_now & ~both).sum()) - int((was & ~both).sum())
    assert found.after - found.before + rest == int(is_now.sum()) - int(was.sum())
    assert found.n_both == both.sum()
    assert math.isclose(found.stated.value, float(is_stated.mean() - was_stated.mean()), abs_tol=1e-11)
    if found.n_both:
        assert math.isclose(found.given_both.value, (found.after - found.before) / found.n_both, abs_tol=1e-11)
    else:
        assert math.isnan(found.given_both.value)
    if found.mostly_form:
        assert delta * found.form.value > 0
        assert abs(found.form.value) > abs(found.both.value)


def test_with_one_answer_it_is_the_paired_difference_of_the_part() -> None:
    was, is_now, was_stated, is_stated = tables(1, 200, 1, (0.3, 0.6, 0.7, 0.9))
    found = stats.decompose(was, is_now, was_stated, is_stated, np.random.default_rng(0))
    both = was_stated & is_stated
    expected = stats.paired_difference((was & both)[:, 0], (is_now & both)[:, 0])
    assert (found.both.value, found.both.lo, found.both.hi) == (expected.value, expected.lo, expected.hi)
    given_both = stats.paired_difference(was[both], is_now[both])
    assert (found.given_both.value, found.given_both.lo) == (given_both.value, given_both.lo)


@pytest.mark.parametrize(
    ("changes", "mostly"),
    [
        # (right before, right after, stated before, stated after) for ten items each
        ([(0, 1, 0, 1)], True),  # only the form changed
        ([(0, 1, 1, 1)], False),  # both stated: better answers
        ([(0, 1, 0, 1), (0, 1, 1, 1)], False),  # as much of one as of the other
        ([(0, 1, 0, 1), (0, 1, 0, 1), (0, 1, 1, 1)], True),
        ([(1, 0, 1, 0), (1, 0, 1, 0), (0, 1, 1, 1)], True),  # a drop, by form
        ([(0, 1, 0, 1), (1, 0, 1, 1), (1, 0, 1, 1)], False),  # a drop, though form rises
        ([(1, 1, 0, 1)], False),  # nothing changed
    ],
)
def test_mostly_form_has_the_sign_of_the_change_and_is_larger(changes: list[tuple[int, ...]], mostly: bool) -> None:
    rows = [np.repeat(np.array(column, dtype=bool), 10)[:, None] for column in zip(*changes, strict=True)]
    assert stats.decompose(*rows, np.random.default_rng(0)).mostly_form is mostly


@pytest.mark.parametrize("samples", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_intervals_cover(samples: int) -> None:
    rng = np.random.default_rng(5)
    reps, items = 150, 80
    truth: dict[str, float] = {"both": 0.6 * 0.9 * 0.2, "form": (1 - 0.6 * 0.9) * 0.2, "stated": 0.3, "given_both": 0.2}
    inside = dict.fromkeys(truth, 0)
    for _ in range(reps):
        # an item is easy or hard, which its samples share
        ease = rng.uniform(-0.3, 0.3, (items, 1))
        was = rng.random((items, samples)) < 0.4 + ease
        is_now = rng.random((items, samples)) < 0.6 + ease
        was_stated, is_stated = rng.random((items, samples)) < 0.6, rng.random((items, samples)) < 0.9
        found = stats.decompose(was, is_now, was_stated, is_stated, rng)
        for name, value in truth.items():
            part = getattr(found, name)
            inside[name] += part.lo <= value <= part.hi
    # 95 % of 150 has a standard error of 1.8 points
    assert all(0.90 <= count / reps <= 0.99 for count in inside.values()), inside


def test_tables_of_other_shapes_cannot_be_paired() -> None:
    one, two = np.ones((3, 1), dtype=bool), np.ones((3, 2), dtype=bool)
    with pytest.raises(Exception, match=r"one shape; got \(3, 1\), \(3, 2\)|decompose") as fault:
        form.decompose(one, two, one, one, np.random.default_rng(0))
    # under the tests' type checks the wrong shape does not even get in
    assert isinstance(fault.value, BadData) or "decompose" in str(fault.value)


def test_no_items_and_one_item_have_no_interval() -> None:
    for items, stated in itertools.product((0, 1), (True, False)):
        table: Any = np.full((items, 1), stated)
        found = stats.decompose(table, table, table, table, np.random.default_rng(0))
        assert math.isnan(found.both.lo)
        assert math.isnan(found.form.hi)
        assert found.mostly_form is False
