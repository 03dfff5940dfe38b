"""Numbers in words, the same in texts, tables and pictures."""

from __future__ import annotations

import pytest

from mless.results.wording import p_value, p_words


@pytest.mark.parametrize(
    ("p", "value", "words"),
    [
        (0.0, "< 0.001", "p < 0.001"),
        (0.00099, "< 0.001", "p < 0.001"),
        (0.001, "0.001", "p = 0.001"),
        (0.0124, "0.012", "p = 0.012"),
        (0.1, "0.10", "p = 0.10"),
        (0.344, "0.34", "p = 0.34"),
        (1.0, "1.00", "p = 1.00"),
        (None, "–", "p unknown"),
    ],
)
def test_p_has_three_decimals_below_a_tenth_and_two_above(p: float | None, value: str, words: str) -> None:
    assert (p_value(p), p_words(p)) == (value, words)
