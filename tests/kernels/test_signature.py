"""Masks as intervals, against the same mask looked at key by key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mless.kernels import Intervals, intervals, reference, signature


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, int, Tensor]:
    """Starts that never fall and never pass their query, how many keys there are, and two query sets."""
    batch, queries, before = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(0, 6))
    keys = queries + before
    rows = st.lists(st.integers(0, keys - 1), min_size=queries, max_size=queries).map(sorted)
    wanted = torch.tensor([draw(rows) for _ in range(batch)], dtype=torch.int32)
    starts = torch.minimum(wanted, torch.arange(before, keys, dtype=torch.int32))
    flags = st.lists(st.booleans(), min_size=queries, max_size=queries)
    first, second = (torch.tensor([draw(flags) for _ in range(batch)]) for _ in range(2))
    return starts, keys, torch.stack([first, first & second], dim=1)


def square(starts: Tensor, keys: int) -> Tensor:
    """The mask, pair by pair."""
    batch, queries = starts.shape
    seen = torch.zeros(batch, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for i in range(queries):
            seen[b, i, int(starts[b, i]) : i + keys - queries + 1] = True
    return seen


def asked(seen: Tensor) -> Callable[[int, int], Tensor]:
    """A mask as models have it: it answers for a block of rows."""

    def visible(first: int, last: int, /) -> Tensor:
        return seen[:, None, first:last]

    return visible


@given(cases())
@settings(max_examples=60, deadline=None)
def test_rows_and_ends_are_the_mask(case):
    starts, keys, _ = case
    ours, seen = Intervals(starts, keys), square(starts, keys)
    queries = starts.shape[1]
    assert torch.equal(ours(0, queries)[:, 0], seen)
    middle = queries // 2
    assert torch.equal(ours(middle, queries)[:, 0], seen[:, middle:])
    for b in range(len(starts)):
        for j in range(keys):
            who = seen[b, :, j].nonzero()
            assert int(ours.ends[b, j]) == (int(who.max()) + 1 if len(who) else 0)


@given(cases(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_few_queries_see_what_lies_near_them(case, aligned):
    starts, keys, _ = case
    seen, queries = square(starts, keys), starts.shape[1]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signature, "_ALIGNED", aligned)
        ours = Intervals(starts, keys)
        for first in range(queries):
            for last in range(first + 1, queries + 1):
                which, mask = ours.near(first, last)
                rows = seen[:, first:last]
                assert torch.equal(mask[:, 0], rows[:, :, which])
                assert int(mask.sum()) == int(rows.sum())  # nothing that is seen lies elsewhere
                assert which.start % aligned == 0
    first_key = seen.int().argmax(-1).amin(0)
    assert ours.widest == int((torch.arange(queries) + keys - queries + 1 - first_key).max())


@given(cases())
@settings(max_examples=60, deadline=None)
def test_an_even_head_is_the_reference_s_with_all_scores_zero(case):
    starts, keys, sets = case
    batch, queries = starts.shape
    found = Intervals(starts, keys).asked(sets)
    truth = reference.received(
        torch.zeros(batch, 1, queries, 1), torch.zeros(batch, 1, keys, 1), scale=1.0, visible=asked(square(starts, keys)), sets=sets,
        spans=torch.zeros(batch, keys, dtype=torch.long), n_spans=1,
    )  # fmt: skip
    torch.testing.assert_close(found.even, truth.received[:, :, 0], rtol=0, atol=1e-12)
    assert torch.equal(found.counts, truth.counts)
    assert torch.equal(found.size, sets[:, -1].sum(-1))
    assert found.end.tolist() == [int(row.nonzero().max()) + 1 if row.any() else 0 for row in sets[:, 0]]


def test_a_mask_that_hides_nothing_may_say_so():
    sets = torch.rand(2, 2, 7, generator=torch.Generator().manual_seed(0)) > 0.3
    starts = torch.zeros(2, 7, dtype=torch.int32)
    told, untold = Intervals(starts, 11, whole=True), Intervals(starts, 11)
    assert torch.equal(told.ends, untold.ends)
    for name in ("even", "counts", "end", "size"):
        assert torch.equal(getattr(told.asked(sets), name), getattr(untold.asked(sets), name))


def test_other_sets_get_their_own_yardstick():
    mask = Intervals(torch.zeros(1, 5, dtype=torch.int32), 5, whole=True)
    every, some = torch.ones(1, 1, 5, dtype=torch.bool), torch.tensor([[[True, False, True, False, True]]])
    assert mask.asked(every).counts.tolist() == [[[4, 3, 2, 1, 0]]]
    assert mask.asked(some).counts.tolist() == [[[2, 2, 1, 1, 0]]]
    assert mask.asked(every).counts.tolist() == [[[4, 3, 2, 1, 0]]]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_what_is_made_of_intervals_is_found(case):
    starts, keys, sets = case
    seen, members = square(starts, keys), sets[:, 0]
    # What padding sees is nobody's business: nothing, everything, or holes.
    junk = torch.rand(seen.shape, generator=torch.Generator().manual_seed(keys)) > 0.5
    found = intervals(asked(torch.where(members[..., None], seen, junk)), members, keys)
    assert found is not None
    assert torch.equal(found(0, starts.shape[1])[:, 0][members], seen[members])
    assert found.whole == (not bool(starts[members].any()))
    # Nobody has to look back for what stands before a row's first member or behind its last.
    for row, who in enumerate(members):
        end = int(who.nonzero().max()) + 1 if who.any() else 0
        if not found.whole:
            assert found.starts[row, end:].tolist() == list(range(keys - starts.shape[1] + end, keys))
            begin = int(who.nonzero().min()) if who.any() else 0
            own = torch.arange(begin) + keys - starts.shape[1]
            assert found.starts[row, :begin].tolist() == own.clamp(max=int(starts[row, begin])).tolist()
    # Kernels walk to the last query that sees a key: it must not come before a member's.
    assert bool((found.starts.diff(dim=-1) >= 0).all())


@given(st.integers(1, 2), st.integers(1, 4), st.integers(0, 2), st.data())
@settings(max_examples=150, deadline=None)
def test_it_is_found_exactly_where_it_is_one(batch, queries, before, data):
    """Any mask at all: accepted where every row is one run that ends at its own key and starts never fall, refused elsewhere."""
    keys = queries + before
    flags = st.lists(st.booleans(), min_size=batch * queries * keys, max_size=batch * queries * keys)
    seen = torch.tensor(data.draw(flags)).reshape(batch, queries, keys)
    fits = True
    for b in range(batch):
        begins = []
        for i in range(queries):
            places = seen[b, i].nonzero().flatten().tolist()
            fits &= bool(places) and places == list(range(places[0], i + before + 1))
            begins += places[:1]
        fits &= begins == sorted(begins)
    assert (intervals(asked(seen), torch.ones(batch, queries, dtype=torch.bool), keys) is not None) == fits


def hole(seen: Tensor) -> None:
    seen[0, 9, 4] = False


def ahead(seen: Tensor) -> None:
    seen[0, 9, 10] = True


def hole_and_ahead(seen: Tensor) -> None:
    hole(seen)
    ahead(seen)  # as many as an interval would have


def prefix(seen: Tensor) -> None:
    seen[0, :6, :6] = True


def falling(seen: Tensor) -> None:
    seen[0, 8, :3] = False


def blind(seen: Tensor) -> None:
    seen[0, 9] = False


def not_itself(seen: Tensor) -> None:
    seen[0, 9, 9] = False


@pytest.mark.parametrize("spoil", [hole, ahead, hole_and_ahead, prefix, falling, blind, not_itself])
@pytest.mark.parametrize("elements", [1, 1 << 26], ids=["in-blocks", "whole"])
def test_what_is_not_made_of_intervals_is_not_taken_for_it(spoil, elements, monkeypatch):
    monkeypatch.setattr(signature, "_ELEMENTS", elements)
    seen = torch.ones(2, 40, 40, dtype=torch.bool).tril()
    everybody = torch.ones(2, 40, dtype=torch.bool)
    assert intervals(asked(seen), everybody, 40) is not None
    spoil(seen)
    assert intervals(asked(seen), everybody, 40) is None
    # As padding the same rows are welcome.
    others = everybody.clone()
    others[0, :10] = False
    assert intervals(asked(seen), others, 40) is not None


def test_heads_that_see_differently_are_no_intervals():
    seen = torch.ones(1, 3, 6, 6, dtype=torch.bool).tril()
    assert intervals(lambda first, last, /: seen[:, :, first:last], torch.ones(1, 6, dtype=torch.bool), 6) is None


def test_one_mask_for_all_rows_is_enough():
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    found = intervals(lambda first, last, /: seen[:, :, first:last], torch.ones(3, 6, dtype=torch.bool), 6)
    assert found is not None
    assert found.starts.shape == (3, 6)
    assert found.whole


def test_intervals_stay_what_they_are():
    mask = Intervals(torch.zeros(1, 4, dtype=torch.int32), 4, whole=True)
    assert intervals(mask, torch.ones(1, 4, dtype=torch.bool), 4) is mask
