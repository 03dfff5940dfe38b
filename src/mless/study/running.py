"""Run a study, from its spec to its tables. What is stored is never computed again."""

from __future__ import annotations

from pathlib import Path

from mless.errors import BadStudy
from mless.study import measuring
from mless.study.bench import Composed, Job, Measurement, Outcome, Progress, Silent, Workers
from mless.study.cluster import RayWorkers
from mless.study.kinds import measurement_of, readouts_of
from mless.study.shared import shared_out
from mless.study.showing import check_figure
from mless.study.spec import StudySpec


def run_study(
    spec: StudySpec,
    out: Path | None = None,
    progress: Progress | None = None,
    *,
    for_figure: bool = False,
    trust_remote_code: bool = False,
    run_code: bool = False,
    workers: Workers | None = None,
) -> Outcome:
    """Run what is missing of `spec` into `out` (a folder of its own under ``results/`` by default).

    `for_figure` fails before the run where the model cannot show the study's figure. `trust_remote_code` is no study field: a file from
    someone else must not be able to set it. Nor is `run_code`, which allows to run the code that a model writes, in a sandbox. With
    `workers` other processes measure, here or on a cluster.
    """
    return run_job(Job(spec, out, progress or Silent(), for_figure, trust_remote_code, run_code, workers))


def run_tuning(
    spec: StudySpec,
    out: Path | None = None,
    progress: Progress | None = None,
    *,
    trust_remote_code: bool = False,
    workers: Workers | None = None,
) -> Outcome:
    """Run a study that chooses ARM's settings; one that does not is refused."""
    if spec.tune is None or spec.accuracy is None:
        raise BadStudy(
            f"study {spec.name!r} has no {'[tune]' if spec.tune is None else '[accuracy]'}, so there is nothing to choose among; use the study tune, or one "
            "that has [tune] and [accuracy]"
        )
    return run_study(spec, out, progress, trust_remote_code=trust_remote_code, workers=workers)


def run_job(job: Job) -> Outcome:
    measurement = measurement_of(job.spec)
    if isinstance(measurement, Composed):
        return measurement.compose(job, run_job, readouts_of(measurement))
    if job.for_figure and not measurement.needs_weights():
        check_figure(job.spec)
    if job.workers is None:
        return measuring.run(measurement, job)
    if not measurement.needs_weights():
        raise BadStudy(
            "--workers shares out what a model computes, but this study's answers come from a server or a script; leave --workers out"
        )
    return _shared(measurement, job, job.workers)


def _shared(measurement: Measurement, job: Job, asked: Workers) -> Outcome:
    """The same by workers. They are started only where something has to be measured."""
    workers = RayWorkers(job, asked)
    try:
        return measuring.run(shared_out(measurement, workers, asked), job)
    finally:
        workers.close()
