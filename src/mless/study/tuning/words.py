"""A tuning in words: how many settings were tried, the choice on dev, and what the test items and the other tasks say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mless.results.answers import ALPHA
from mless.results.folder import ResultFolder
from mless.results.wording import p_words, points
from mless.study.tuning.choosing import Readout
from mless.values import arm_of, arm_words, counted


def tuning_lines(path: Path, accuracy: Readout) -> list[str]:
    """How many settings were tried, the choice on dev, what the test items and the other tasks say of it, and how far settings matter."""
    folder = ResultFolder(path)
    rows: list[dict[str, Any]] = folder.read_table("tuning").to_pylist()
    about = folder.about() or {}
    choice: dict[str, Any] = about["tuning"]
    name, tried = choice["chosen"], choice["tried"]
    last = next(row for row in reversed(rows) if row["condition"] == name)
    sizes = ", ".join(str(row) for row in dict.fromkeys(row["n"] for row in rows))
    how = f"by successive halving ({sizes})" if len(choice["rungs"]) > 1 else "as a grid"
    lines = [
        f"{about['model']['label']}, {about['task']}: {counted(tried, 'setting')} of ARM tried {how} on {counted(len(choice['dev']), 'dev item')}; the "
        f"{len(choice['test']):,} test items were answered for the chosen one only"
    ]
    arm = arm_words(arm_of(about["conditions"][name]["arm"]))
    beats = "" if last["delta"] > 0 else "; no setting was better than none"
    lines.append(
        f"Chosen on dev: {name} ({arm}): {100 * last['value']:.1f} % against {100 * last['none']:.1f} %, {accuracy.change_words(last)}, after Holm over the "
        f"{tried} tried {p_words(last['p_adjusted'])}{beats}. It was chosen for this number, so the number is no result"
    )
    lines += [f"Test: {line}" for line in accuracy.lines(path / "test", {})[1:]]
    lines.append("Test: one setting was compared, so its p needs no correction for the settings tried on dev")
    for data, inner in choice["transfer"].items():
        said = [line for line in accuracy.lines(path / inner, {})[1:] if line.startswith((f"{name} (", "A/A"))]
        lines += [f"Transfer to {data}: {line}" for line in said]
    if len(choice["transfer"]) > 1:
        lines.append(_over_transfers(folder, name))
    lines.append(_sensitivity(rows, tried))
    return lines


def _over_transfers(folder: ResultFolder, name: str) -> str:
    rows = [
        row for row in folder.read_table("tuned").to_pylist() if row["split"] == "all" and row["metric"] == "pass@1"
    ]
    said = [f"{row['task']} {p_words(row['p_adjusted'])}, {row['verdict']}" for row in rows if row["condition"] == name]
    return f"Transfer, after Holm over the {len(said)} other tasks: {'; '.join(said)}"


def _sensitivity(rows: Sequence[Mapping[str, Any]], tried: int) -> str:
    """Over the rung that all settings were in."""
    first = [row for row in rows if row["rung"] == 1]
    low, high = (points(end(row["delta"] for row in first)) for end in (min, max))
    sure = [row["condition"] for row in first if row["p_adjusted"] is not None and row["p_adjusted"] <= ALPHA]
    found = (
        f"{', '.join(sure)} differ{'s' if len(sure) == 1 else ''} from none" if sure else "no setting differs from none"
    )
    return f"Sensitivity, {first[0]['n']} dev items, all {tried} settings: Δ from {low} to {high} points; after Holm {found}"
