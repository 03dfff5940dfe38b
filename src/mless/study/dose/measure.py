"""`mless run dose`: how much of a filler, and where? Lengths × fillers × placements, by likelihood.

All cells are conditions of one likelihood study in the inner folder `likelihood`, so resuming, workers and row-stability work as in every study.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mless import stats
from mless.errors import BadStudy
from mless.study.bench import Composed, Job, Measurement, Outcome, Run
from mless.study.composing import Composition, inner_spec, named_fillers, opened, run_composed
from mless.study.dose.tables import dose_tables
from mless.study.dose.words import dose_lines
from mless.study.grids import dose_conditions, dose_lengths
from mless.study.spec import DoseTable, StudySpec

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.results.folder import ResultFolder


class DoseMeasurement(Composed):
    """Tries the study's fillers in ``[dose]``'s lengths and placements."""

    tables = ("dose", "dose_tests")
    needs = ("likelihood",)
    figures = ("dose",)
    summed_up = ("dose", "dose_tests")

    def compose(self, job: Job, run: Run, readouts: Mapping[str, type[Measurement]]) -> Outcome:
        spec = job.spec
        settings = spec.dose or DoseTable()
        _check_unused(spec)
        fillers = named_fillers(spec, spec.conditions, "dose")
        cells = dose_conditions(dose_lengths(settings.most, settings.points), fillers, settings.placements)
        _, items = job.items or spec.load_items()
        # Before anything runs: with few items all may fall on one side.
        stats.split_items([item.id for item in items], settings.dev_share, spec.seed)
        subject = opened(job, weights=True)
        if subject.context is not None and settings.most >= subject.context:
            raise BadStudy(
                f"dose: a filler of {settings.most:,} tokens does not fit into this model's context of {subject.context:,} with a prompt around it; "
                f"choose shorter ones, as --set dose.most={subject.context // 4}"
            )
        inner = inner_spec(spec, "likelihood", "Fillers by length and placement", cells[1:])

        def tables(done: Mapping[str, ResultFolder]) -> Mapping[str, pa.Table]:
            named = {one.name: one for one in cells[1:]}
            return dose_tables(done, named, dev_share=settings.dev_share, seed=spec.seed, flips=spec.flips)

        own = {"dose": settings.measured()}
        composition = Composition({"likelihood": inner}, cells, tables, own, settings.dev_share)
        return run_composed(self, job, run, subject, composition)

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return dose_lines(path)


def _check_unused(spec: StudySpec) -> None:
    """Lengths and places are those of [dose]; one given otherwise would do nothing."""
    for name, instead in (("length", "dose.most and dose.points"), ("placement", "dose.placements")):
        own = [one for one in spec.conditions if getattr(spec.condition.get(one), name, None) is not None]
        if name in spec.changed() or own:
            where = f"[condition.{own[0]}]" if own else "the study"
            raise BadStudy(
                f"dose: {where} gives a {name}, but fillers are tried in those of [dose]; leave it out, and set {instead}"
            )
