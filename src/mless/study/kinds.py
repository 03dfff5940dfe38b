"""The one table of measurements: name → class. Pages and their figures are in `mless.report.kinds`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mless.registry import Registry
from mless.results.folder import ResultFolder
from mless.results.manifest import measured_in
from mless.study.bench import Measurement

if TYPE_CHECKING:
    from mless.study.spec import StudySpec

#: Name → class, loaded when it is asked for.
MEASUREMENTS: Registry[type[Measurement]] = Registry(
    "measurements",
    "measurement",
    {
        "attention": "mless.study.attention.measure:AttentionMeasurement",
        "activations": "mless.study.activations.measure:ActivationMeasurement",
        "affine": "mless.study.affine.measure:AffineMeasurement",
        "likelihood": "mless.study.likelihood.measure:LikelihoodMeasurement",
        "accuracy": "mless.study.accuracy.measure:AccuracyMeasurement",
        "placebo": "mless.study.placebo.measure:PlaceboMeasurement",
        "dose": "mless.study.dose.measure:DoseMeasurement",
        "multiverse": "mless.study.multiverse.measure:MultiverseMeasurement",
        "cause": "mless.study.cause.measure:CauseMeasurement",
        "tune": "mless.study.tuning.measure:TuningMeasurement",
    },
    wants="a class of mless.study.bench.Measurement",
    fits=lambda one: isinstance(one, type) and issubclass(one, Measurement),
)


def measurement_of(spec: StudySpec) -> Measurement:
    return MEASUREMENTS.get(spec.measured)(spec)


def readouts_of(measurement: Measurement | type[Measurement]) -> Mapping[str, type[Measurement]]:
    """The measurements that this one needs."""
    return {name: MEASUREMENTS.get(name) for name in measurement.needs}


def verdict_lines(path: Path) -> list[str]:
    """A finished study in words: an opening line, one per condition, the published claim, and the limits."""
    kind = MEASUREMENTS.get(measured_in(ResultFolder(path).about() or {}))
    return kind.lines(path, readouts_of(kind))
