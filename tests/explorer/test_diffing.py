"""A word diff gives both texts back, and stays small work for long texts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mless.explorer import diffing
from mless.explorer.diffing import word_diff


def both(diff: Sequence[tuple[str, str]]) -> tuple[str, str]:
    return (
        "".join(text for kind, text in diff if kind != "new"),
        "".join(text for kind, text in diff if kind != "gone"),
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("a b c", "a b c", id="same"),
        pytest.param("", "new words", id="only-second"),
        pytest.param("3 + 4 = 7", "3 + 4 = 8", id="one-word"),
        pytest.param("a\n\n  b\tc", "a b c", id="white-space"),
        pytest.param("x " * 50 + "y", "x " * 49 + "y", id="repeated"),
        pytest.param("naïve 𝒙 = ½ 中文\x00", "naïve 𝒚 = ⅓ 中\x00", id="signs"),
    ],
)
def test_pieces_make_up_both_texts(before: str, after: str) -> None:
    assert both(word_diff(before, after)) == (before, after)


def test_what_is_shared_is_found() -> None:
    diff = word_diff("the sum of 3 and 4 is 7 .", "so the sum of 3 and 4 must be 7 .")
    assert [text for kind, text in diff if kind == "gone"] == ["is"]
    assert [text for kind, text in diff if kind == "new"] == ["so ", "must be"]


def test_random_edits_are_given_back() -> None:
    rng = random.Random(1)
    words = [f"w{rng.randrange(40)}" for _ in range(300)]
    for _ in range(30):
        other = [word for word in words if rng.random() > 0.1]
        other.insert(rng.randrange(len(other)), "put-in")
        before, after = " ".join(words), " ".join(other)
        diff = word_diff(before, after)
        assert both(diff) == (before, after)
        assert sum(len(text) for kind, text in diff if kind == "same") > 0.5 * len(before)


def test_long_texts_are_not_compared_word_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """difflib is quadratic: it never sees more than a gap between two anchors."""
    seen: list[int] = []
    real = diffing.difflib.SequenceMatcher

    def watched(junk: None, first: list[str], second: list[str], **more: bool) -> object:
        seen.append(max(len(first), len(second)))
        return real(junk, first, second, **more)

    monkeypatch.setattr(diffing.difflib, "SequenceMatcher", watched)
    rng = random.Random(2)
    words = [f"w{rng.randrange(20_000)}" for _ in range(10_000)]
    other = [word if rng.random() > 0.05 else "changed" for word in words]
    assert both(word_diff(" ".join(words), " ".join(other))) == (" ".join(words), " ".join(other))
    same = "yes " * 10_000
    assert both(word_diff(f"a {same}b", f"c {same}d")) == (f"a {same}b", f"c {same}d")
    few = ["yes", "no"]
    chaos = [" ".join(rng.choice(few) for _ in range(10_000)) for _ in range(2)]
    assert both(word_diff(*chaos)) == tuple(chaos)
    assert seen
    assert max(seen) <= 600


def test_the_end_of_huge_texts_counts_as_replaced() -> None:
    before, after = "a " * 25_000 + "end", "a " * 25_000 + "end"
    diff = word_diff(before, after)
    assert both(diff) == (before, after)
    assert diff[0] == ("same", "a " * (diffing.MOST_WORDS // 2))
