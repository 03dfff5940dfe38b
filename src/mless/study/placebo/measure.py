"""`mless run placebo`: is a filler special, or would any edit of that length at that place do the same?

The named fillers and the edits are the conditions of one likelihood study and, if asked, of one accuracy study. Each lies in an inner folder,
so resuming, workers and row-stability work as in every study.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mless import tasks
from mless.engines import ENGINES
from mless.errors import BadStudy
from mless.prompting import with_filler_ids
from mless.study.bench import Composed, Job, Measurement, Outcome, Run
from mless.study.composing import Composition, Readout, inner_spec, named_fillers, opened, run_composed
from mless.study.grids import check_distinct, placebo_conditions
from mless.study.placebo.tables import placebo_tables
from mless.study.placebo.words import placebo_lines
from mless.study.spec import AccuracyTable, LikelihoodTable, PlaceboTable, StudySpec
from mless.values import Condition

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.results.folder import ResultFolder


class PlaceboMeasurement(Composed):
    """Places the study's fillers among ``[placebo]``'s edits."""

    tables = ("placebo", "edits")
    needs = ("likelihood", "accuracy")
    figures = ("placebo",)
    summed_up = ("placebo",)

    def compose(self, job: Job, run: Run, readouts: Mapping[str, type[Measurement]]) -> Outcome:
        spec = job.spec
        settings = spec.placebo or PlaceboTable()
        named = named_fillers(spec, spec.conditions, "placebos")
        check_alike(spec, named)
        edits = placebo_conditions(settings.edits, spec.length, spec.placement, spec.seed, settings.kinds)
        if taken := {one.name for one in named} & {one.name for one in edits}:
            raise BadStudy(f"placebos: an edit is called {min(taken)!r} too; give your condition another name")
        by = cast("list[Readout]", settings.by)
        engine = (spec.accuracy or AccuracyTable()).engine
        subject = opened(job, weights="likelihood" in by or ENGINES.get(engine).needs_weights)
        if subject.tokenizer is not None:
            edits = with_filler_ids(subject.tokenizer, edits, tasks.filler_sentences())
            check_distinct(edits)
        conditions = [*named, *edits]
        studies = {name: inner_spec(spec, name, f"Fillers and arbitrary edits by {name}", conditions) for name in by}

        def tables(inner: Mapping[str, ResultFolder]) -> Mapping[str, pa.Table]:
            names = {one.name for one in edits}
            return placebo_tables(inner, names, _margins(spec), subject.tokenizer, seed=spec.seed)

        own = {"placebo": settings.measured()}
        listed = [Condition("none", "none"), *conditions]
        return run_composed(self, job, run, subject, Composition(studies, listed, tables, own, by))

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return placebo_lines(path)


def check_alike(spec: StudySpec, named: Sequence[Condition]) -> None:
    """Edits are compared with fillers of their own length at their own place."""
    for one in named:
        for what, own, wanted in (("length", one.length, spec.length), ("placement", one.placement, spec.placement)):
            if own != wanted:
                raise BadStudy(
                    f"placebos: condition {one.name!r} has the {what} {own}, and the edits have {wanted}; edits are compared with fillers of the same "
                    f"length at the same place: leave {what} out of [condition.{one.name}], or run a study of its own"
                )


def _margins(spec: StudySpec) -> Any:
    likelihood, accuracy = spec.likelihood or LikelihoodTable(), spec.accuracy or AccuracyTable()
    return lambda metric: accuracy.margin if metric == "pass@1" else likelihood.margin_of(metric)
