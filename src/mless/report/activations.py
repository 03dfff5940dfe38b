"""What the page of an activation study says: changes by layer and by token class, and the pictures that show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mless.figures import draw
from mless.report.kinds import Page
from mless.results.folder import ResultFolder
from mless.results.reading import StoredActivations
from mless.values import FigureSpec

#: The metrics in the order the page has them, as it calls them.
METRICS = {
    "near_zero": "near-zero share, %",
    "near_zero_half": "at τ/2, %",
    "near_zero_double": "at 2τ, %",
    "l1": "L1",
    "l2": "L2",
    "gini": "Gini",
    "variance": "variance",
    "kurtosis": "kurtosis",
}


def summary(folder: Path) -> dict[str, Any]:
    """For other programs: every metric of all original tokens, by condition and layer."""
    rows = ResultFolder(folder).read_table("activations", filters=[("tokens", "==", "all")]).to_pylist()
    return {"activations": rows}


def draw_standard(folder: Path, formats: Sequence[str]) -> list[Path]:
    """The first layer's histogram and changes with those of all layers, and its near-zero shares by token class."""
    opened = StoredActivations.open(folder)
    shown = tuple(opened.conditions)
    if len(shown) < 2:
        return []
    first = min(opened.layers)
    written = draw(FigureSpec("activations", "activations", (), shown), [folder], layer=first, formats=formats)
    return written + draw(FigureSpec("classes", "classes", (), shown), [folder], layer=first, formats=formats)


def page(folder: Path) -> tuple[StoredActivations, str, dict[str, Any]]:
    """The opened folder, its template, and what that needs beyond what every page has."""
    opened = StoredActivations.open(folder)
    rows = opened.changes()
    order = {name: place for place, name in enumerate(METRICS)}
    found: list[dict[str, Any]] = []
    for condition in opened.conditions:
        own = sorted(
            (_formatted(row) for row in rows if row["condition"] == condition),
            key=lambda row: (row["layer"], order.get(row["metric"], len(order))),
        )
        if own:
            found.append(
                {
                    "condition": condition,
                    "claim": [
                        row for row in own if row["tokens"] == "all" and row["metric"] in ("near_zero", "variance")
                    ],
                    "all": [row for row in own if row["tokens"] == "all"],
                    "others": [row for row in own if row["tokens"] != "all" and row["metric"] == "near_zero"],
                }
            )
    return opened, "activations.html", {"changes": found}


def _formatted(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its numbers as the page writes them: shares in per cent, sizes by their ratio."""
    share = str(row["metric"]).startswith("near_zero")
    numbers = [row["value"], row["none"], row["difference"], row["lo"], row["hi"]]
    if share:
        value, none, change, lo, hi = (100 * number for number in numbers)
        texts = [f"{value:.2f}", f"{none:.2f}", f"{change:+.2f}", f"[{lo:+.2f}, {hi:+.2f}]"]
    elif row["scale"] == "log ratio":
        change, lo, hi = (math.exp(number) for number in numbers[2:])
        texts = [f"{numbers[0]:.4g}", f"{numbers[1]:.4g}", f"× {change:.3f}", f"[{lo:.3f}, {hi:.3f}]"]
    else:
        texts = [
            f"{numbers[0]:.4f}",
            f"{numbers[1]:.4f}",
            f"{numbers[2]:+.4f}",
            f"[{numbers[3]:+.4f}, {numbers[4]:+.4f}]",
        ]
    names = ("value_text", "none_text", "change_text", "interval_text")
    shown = [("–" if "nan" in text else text).replace("-", "−") for text in texts]
    return {**row, "called": METRICS.get(row["metric"], row["metric"]), **dict(zip(names, shown, strict=True))}


PAGE = Page(summary, draw_standard, page)
