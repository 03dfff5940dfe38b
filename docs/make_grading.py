"""Run the public grading suites through mless's extraction and grading, and write docs/grading.md's tables.

python docs/make_grading.py           write them
python docs/make_grading.py --check   write nothing; exit code 1 if the page is out of date

The cases are in tests/tasks/grading_suites.jsonl. A side that `texts` names is a whole text, from which the answer is extracted first, as from
a model's reply. Where a case is judged otherwise than by its suite, `right` and `because` say who is right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mless.tasks import Grade, Grader, Rule, extract

HERE = Path(__file__).resolve().parent
CASES = HERE.parent / "tests" / "tasks" / "grading_suites.jsonl"
PAGE = HERE / "grading.md"
BEGIN, END = "<!-- Made by docs/make_grading.py: begin -->", "<!-- Made by docs/make_grading.py: end -->"
#: How a whole text is read.
RULES: tuple[Rule, ...] = ("boxed", "hashes", "formula", "number")

#: Name in the cases → what it is, where it is from, its licence.
SUITES = {
    "math-verify": ("math-verify's own tests", "math-verify 0.9.0, `tests/`", "MIT"),
    "hendrycks": ("MATH's `is_equiv`", "hendrycks/math at 5f3bf91, `modeling/math_equivalence_test.py`", "MIT"),
    "qwen": (
        "Qwen2.5-Math's grader",
        "QwenLM/Qwen2.5-Math at 29a82a8, `evaluation/grader.py`",
        "no licence file found",
    ),
    "minerva-maxtext": (
        "Minerva's normalisation, as MaxText tests it",
        "AI-Hypercomputer/maxtext at 14591bf, `tests/post_training/unit/rl_utils_test.py`",
        "Apache 2.0",
    ),
    "nemo-skills": (
        "NeMo-Skills' `math_equal`",
        "NVIDIA/NeMo-Skills at 583b90a, `tests/test_math_equal.py`",
        "Apache 2.0",
    ),
    "prm800k-tinker": (
        "PRM800K's grader, as tinker-cookbook tests it",
        "thinking-machines-lab/tinker-cookbook at 73cf698, `recipes/math_rl/math_env_test.py`",
        "no licence file found",
    ),
}
_RIGHT = {"ours": "ours", "suite": "the suite", "open": "a matter of convention"}


@dataclass(frozen=True)
class Case:
    """One case of a suite; `equal` is what the suite says."""

    suite: str
    place: str
    answer: str
    reference: str
    equal: bool
    texts: Sequence[Literal["answer", "reference"]] = ()
    right: Literal["ours", "suite", "open"] | None = None
    because: str = ""


def cases() -> list[Case]:
    return [Case(**json.loads(line)) for line in CASES.read_text(encoding="utf-8").splitlines()]


def grades(of: Sequence[Case]) -> list[Grade]:
    """Each case's grade, by one grader."""
    with Grader(limit=60) as grader:
        return grader.grade_many([_sides(case) for case in of])


def _sides(case: Case) -> tuple[str | None, str]:
    answer = extract(case.answer, RULES).text if "answer" in case.texts else case.answer
    reference = extract(case.reference, RULES).text if "reference" in case.texts else case.reference
    if reference is None:
        raise ValueError(f"no answer found in the reference of {case}")
    return answer, reference


def block(of: Sequence[Case], judged: Sequence[Grade]) -> str:
    """The part of the page between its two marks."""
    differ = [(case, grade) for case, grade in zip(of, judged, strict=True) if case.equal != grade.correct]
    rows = [
        (
            name,
            source,
            licence,
            sum(case.suite == key for case in of),
            sum(case.suite == key for case in of) - sum(case.suite == key for case, _ in differ),
            sum(case.suite == key for case, _ in differ),
        )
        for key, (name, source, licence) in SUITES.items()
    ]
    total = (
        f"| **all** | | | {len(of)} | {len(of) - len(differ)} | {len(differ)} ({100 * len(differ) / len(of):.1f} %) |"
    )
    lines = [BEGIN, "", "| suite | source | licence | cases | agree | differ |", "|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows] + [total, ""]
    lines += [
        "| suite: test | answer | reference | suite | ours | right is | because |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, grade in differ:
        who = _RIGHT[case.right] if case.right else "?"
        said = ["equal" if verdict else "different" for verdict in (case.equal, grade.correct)]
        lines.append(
            f"| {case.suite}: {case.place.removeprefix('all: ')} | {_code(case.answer)} | {_code(case.reference)} | {said[0]} | "
            f"{said[1]} ({grade.why}) | {who} | {case.because} |"
        )
    return "\n".join([*lines, "", END])


def _code(text: str) -> str:
    shown = text.replace("\n", "↵").strip()
    shown = shown if len(shown) <= 90 else f"…{shown[-89:]}"
    return f"`{shown}`".replace("|", r"\|")


def page_with(new: str) -> str:
    """The page with this block in place of its own."""
    page = PAGE.read_text(encoding="utf-8")
    return page[: page.index(BEGIN)] + new + page[page.index(END) + len(END) :]


def main() -> int:
    of = cases()
    page = page_with(block(of, grades(of)))
    if "--check" in sys.argv[1:]:
        return int(page != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
