"""How shares of an effect are said."""

from __future__ import annotations

import pytest

from mless.results.cause_rows import CauseLink
from mless.results.caused import share_words


@pytest.mark.parametrize(
    ("share", "lo", "hi", "words"),
    [
        (0.24, 0.12, 0.38, "24 % [12, 38]"),
        (-0.03, -0.171, 0.0, "−3 % [−17, 0]"),
        (9.99, 5.0, 14.0, "999 % [500, 1400]"),
        (122.1, 92.4, 171.0, "122.1 × [92.4, 171.0]"),
        (-12.0, -14.0, -10.0, "−12.0 × [−14.0, −10.0]"),
        (10.4, -0.4, 31.0, "10.4 × [−0.4, 31.0]"),
        (0.5, None, None, "50 %"),
        (None, None, None, "no share"),
    ],
)
def test_a_share_is_said_in_per_cent_and_a_large_one_as_a_multiple(
    share: float | None, lo: float | None, hi: float | None, words: str
) -> None:
    row = CauseLink(
        *("m", "t", "mless", "solution", "arm", "in", 24, 0.1, 0.05, 0.15, 0.001), share, lo, hi, None, None
    )  # fmt: skip
    assert share_words(row) == words
