"""The same pieces for a script or a notebook: items, prompts, shares, whole studies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mless import stats, tasks
from mless.errors import BadFolder, BadPrompt, BadStudy
from mless.prompting import align, build_prompts, resolve_kind
from mless.results.folder import ResultFolder
from mless.study.attention import tables
from mless.study.bench import Outcome, Progress
from mless.study.conditions import conditions_of
from mless.study.kinds import MEASUREMENTS
from mless.study.loading import load_study, validated
from mless.study.running import run_study
from mless.study.spec import AccuracyTable, TuneTable
from mless.study.tuning.choosing import Noise, Readout, on_noise, with_control
from mless.values import QUERY_SETS, Condition, Item, Prompt, QuerySet, format_numbers, head_name

if TYPE_CHECKING:
    from mless.capture import Attention
    from mless.models import LoadedModel


def items(source: str = "bundled", *, limit: int | None = None, seed: int = 0) -> list[Item]:
    """The items of a data set: a file, a name in $MLESS_DATA, ``bundled`` or ``arithmetic``."""
    return tasks.load_items(source, limit=limit, seed=seed)[1]


def prompts(
    model: LoadedModel,
    questions: Sequence[Item] | Sequence[str],
    condition: str | Condition = "none",
    *,
    prompt: str = "auto",
    **changes: Any,
) -> list[Prompt]:
    """Token ids with spans for each question under one condition.

    `condition` is ``none``, ``mless``, ``mful``, ``random``, ``random-tokens``, ``position-only`` or a `Condition` of your own; `changes`
    are study fields such as ``filler``, ``length``, ``placement``, ``seed``.
    """
    name = condition if isinstance(condition, str) else "none"
    spec = validated({"name": "direct", "conditions": [name], **changes}, "direct")
    chosen = next(c for c in conditions_of(spec) if c.name == name) if isinstance(condition, str) else condition
    rows = [q if isinstance(q, Item) else Item(str(n), q) for n, q in enumerate(questions, start=1)]
    kind = resolve_kind(prompt, model.tokenizer, model.label)
    sentences = tasks.filler_sentences()
    return list(
        build_prompts(model.tokenizer, rows, chosen, kind=kind, system=spec.system, seed=spec.seed, sentences=sentences)
    )


@dataclass(frozen=True, slots=True)
class Share:
    """A retained share with its interval, dilution exponent, test, yardstick and verdict.

    Head 0 is the layer: the mean of its captured heads.

    `epsilon` is log λ / log λ_uniform, the mean over items: 0 nothing lost, 1 as a head that spreads evenly. It hardly depends on prompt
    length, so use it to compare models; NaN where nothing dilutes. `skewed`: a few items decide the row.
    """

    layer: int
    head: int
    retained: float
    lo: float
    hi: float
    epsilon: float
    epsilon_lo: float
    epsilon_hi: float
    epsilon_items: int
    p: float
    p_adjusted: float
    n_items: int
    uniform: float
    skewed: bool
    verdict: str

    def __str__(self) -> str:
        where = f"layer {self.layer}" if self.head == 0 else head_name(self.layer, self.head)
        exponent = (
            "" if math.isnan(self.epsilon) else f"ε {self.epsilon:.2f} [{self.epsilon_lo:.2f}, {self.epsilon_hi:.2f}], "
        )
        share = f"retained share {self.retained:.2f} [{self.lo:.2f}, {self.hi:.2f}]"
        return f"{where} {self.verdict}: {exponent}{share} (uniform dilution {self.uniform:.2f})"


def retained(
    without: Iterable[Attention],
    with_filler: Iterable[Attention],
    *,
    queries: QuerySet = "original",
    seed: int = 0,
    margins: stats.Margins | None = None,
) -> list[Share]:
    """Retained shares of every layer and head captured, from the same items without and with filler, in the same order.

    A layer's is the mean of its heads' that were captured.
    """
    without, with_filler = list(without), list(with_filler)
    if [a.prompt.item for a in without] != [b.prompt.item for b in with_filler] or not without:
        raise BadPrompt("retained shares need the same items, in the same order, without and with filler")
    for a, b in zip(without, with_filler, strict=True):
        align(a.prompt, b.prompt)
    captured = {(tuple(one.layers), tuple(one.heads)) for one in (*without, *with_filler)}
    if len(captured) > 1:
        raise BadStudy(
            "retained shares need the same layers and heads of every prompt, without and with filler; got "
            + " and ".join(sorted(f"layers {format_numbers(a)} with heads {format_numbers(b)}" for a, b in captured))
            + ": give received() the same layers= and heads="
        )
    s = QUERY_SETS.index(queries)

    def sums(rows: Sequence[Attention]) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.stack([tables.question_sums(row.received[s], row.prompt) for row in rows]),
            np.stack([tables.question_sums(row.uniform[s], row.prompt) for row in rows]),
        )

    (base, base_even), (now, now_even) = sums(without), sums(with_filler)
    rows = tables.share_rows(
        tables.log_shares(now, base),
        tables.log_shares(now_even, base_even),
        without[0].layers,
        without[0].heads,
        np.random.default_rng([seed, s]),
        margins=margins or stats.Margins(),
    )
    return [Share(**row) for row in rows]


def run(
    study: str,
    out: Path | str | None = None,
    progress: Progress | None = None,
    *,
    run_code: bool = False,
    **changes: Any,
) -> Outcome:
    """A whole study by name, or the part of it that is not stored yet: ``mless.run("quick", limit=8)``.

    `run_code` allows to run the code that a model writes, in a sandbox, for tasks that are judged so (humaneval).
    """
    return run_study(load_study(study, changes), Path(out) if out is not None else None, progress, run_code=run_code)


def tune_on_noise(path: Path | str, *, seeds: Sequence[int] = range(100)) -> Noise:
    """How often choosing among a folder's settings would claim an effect if there were none: `on_noise` on its dev answers."""
    folder = ResultFolder(Path(path))
    about = folder.about()
    if about is None or about.get("measures") != "tune":
        raise BadFolder(f"{path} holds no tuning of ARM's parameters; mless tune --method grid --out DIR makes one")
    if not about.get("complete"):
        raise BadFolder(f"{path}: its tuning is not finished; run the same command again to complete it")
    rungs: list[int] = about["tuning"]["rungs"]
    if len(rungs) > 1:
        raise BadFolder(
            f"{path} was tuned by halving (rungs of {', '.join(map(str, rungs))}), so only the settings kept have answers to all dev items, "
            f"and noise needs those of every setting; tune with --method grid"
        )
    answers = with_control(ResultFolder(folder.path / "dev-1").read_table("answers"))
    tune = TuneTable.model_validate(about["study"]["tune"]).model_copy(update={"method": "grid"})
    accuracy = AccuracyTable.model_validate(about["study"]["accuracy"])
    names = [name for name in about["conditions"] if name != "none"]
    # With the study's own seed all of these are dev items.
    return on_noise(
        answers,
        names,
        tune,
        accuracy,
        cast("Readout", MEASUREMENTS.get("accuracy")),
        seeds=seeds,
        seed=about["study"]["seed"] + 1,
    )
