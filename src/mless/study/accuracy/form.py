"""What is said of the form of answers: stated or guessed results, and a Δ taken apart by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def form_words(row: Mapping[str, Any]) -> str:
    """What of a Δ is form, behind its verdict; nothing where all answers state a result, or where it is not known."""
    if row.get("delta_form") is None or not (
        row["delta_form"] or row["stated_delta"] or row["delta_both"] != row["delta"]
    ):
        return ""
    several = row["samples"] > 1
    what = "pairs of answers" if several else "items"
    form = f"{points(row['delta_form'])} points{interval(row['delta_form_lo'], row['delta_form_hi'], signed=True)}"
    both = f"{points(row['delta_both'])}{interval(row['delta_both_lo'], row['delta_both_hi'], signed=True)}"
    right = f"{row['both_before']:,} → {row['both_after']:,} right"
    if not mostly_form(row):
        rest = f"; where both state a result ({row['both_n']:,} {what}) it is {both}: {right}" if row["both_n"] else ""
        return f". Form gives {form}{rest}"
    text = (
        f". Most of this Δ is form: {form} come from {what} where a result is not stated under both (stated in {share(row['stated'])} of the "
        f"answers, {points(row['stated_delta'])} points{interval(row['stated_delta_lo'], row['stated_delta_hi'], signed=True)}); "
    )
    if not row["both_n"]:
        return text + f"there are no {what} where both state one"
    among = f"{points(row['both_delta'])} points{interval(row['both_delta_lo'], row['both_delta_hi'], signed=True)}"
    return text + f"{both} from the {row['both_n']:,} {what} where both state one: {right}, {among} among these"


def mostly_form(row: Mapping[str, Any]) -> bool:
    """Whether a Δ is called mostly form: form is its larger part, and the Δ, or the part that is form, is more than chance."""
    lo, hi = row.get("delta_form_lo"), row.get("delta_form_hi")
    clear = row["verdict"] in ("rises", "drops") or (lo is not None and hi is not None and (lo > 0 or hi < 0))
    return bool(row.get("mostly_form")) and clear


def guessed_lines(heads: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How many answers state no result, said as soon as one condition has more than 5 % of them."""
    shares = {name: row.get("guessed") for name, row in heads.items()}
    if not any(one is not None and one > 0.05 for one in shares.values()):
        return []
    shown = ", ".join(f"{name} {share(one)}" for name, one in shares.items())
    return [f"Answers that state no result, where the last number, letter or formula was taken as a guess: {shown}"]


def points(part: float) -> str:
    """``+3.3``, in points."""
    shown = f"{100 * part:+.1f}"
    return "0.0" if shown in ("+0.0", "-0.0") else shown.replace("-", "−")


def interval(lo: float | None, hi: float | None, *, signed: bool = False) -> str:
    """`` [−1.0, +7.6]``; nothing where there is none."""
    if lo is None or hi is None:
        return ""
    return f" [{points(lo)}, {points(hi)}]" if signed else f" [{100 * lo:.1f}, {100 * hi:.1f}]"


def share(value: float | None) -> str:
    """``12.3 %``."""
    return "–" if value is None else f"{100 * value:.1f} %"
