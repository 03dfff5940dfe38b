"""The command: parse, call, print. Exit codes: 0 done, 1 a defect of mless, 2 bad input, 130 interrupted."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mless import __version__
from mless.errors import BadFolder, BadStudy, MlessError

if TYPE_CHECKING:
    from mless.study import StudySpec
    from mless.study.running import Outcome

_EPILOG = (
    "Layers and heads are numbered from 1. Exit codes: 0 done; 1 a defect of mless (please report it); 2 bad input, with the way out in "
    "the message; 130 interrupted, the same command goes on where it stopped."
)
_INTERRUPTED = 130
app = typer.Typer(
    name="mless",
    help="Measure what inserted filler tokens do to a language model's attention and to its answers.",
    epilog=_EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _with_escapes(text: str) -> str:
    """A filler as it is typed: \\n, \\t and \\r stand for blanks, \\\\ for a backslash; any other backslash is itself."""
    return re.sub(r"\\([nrt\\])", lambda found: {"n": "\n", "r": "\r", "t": "\t"}.get(found[1], "\\"), text)


Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Hub id, folder with safetensors, GGUF file (or a folder with one), or smollm2."
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="As in run; may be given several times for figures that compare models."),
]
Tokenizer = Annotated[str | None, typer.Option(help="Tokenizer to use instead of the model's own: folder or hub id.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model's repository brings.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="JSONL, JSON, CSV or Parquet file; a name in $MLESS_DATA; bundled; or arithmetic[:DIFFICULTY[:COUNT]] "
        "(1, the default, has 200 distinct questions, 2 has 16,500, 3 and 4 more, 5 has 20,000, 6 has 4,000)."
    ),
]
QuestionField = Annotated[str | None, typer.Option(help="Field that holds the question (guessed otherwise).")]
AnswerField = Annotated[str | None, typer.Option(help="Field that holds the answer (guessed otherwise).")]
Limit = Annotated[int | None, typer.Option(help="Use only the first N items.")]
PromptKind = Annotated[
    str | None, typer.Option("--prompt", help="chat (the model's template), raw (as published), or auto.")
]
Conditions = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: none, mless, mful, random, random-tokens, position-only, arm, mless-arm, or a study's own; for answers also "
        "plan-and-solve, rephrased, question-twice, masked-filler, self-consistency."
    ),
]

Filler = Annotated[
    str | None,
    typer.Option(
        parser=_with_escapes,
        metavar="TEXT",
        help="The mless filler, such as ' /': its tokens are repeated and cut to the length. \\n is a line break, \\t a tab, \\\\ a backslash.",
    ),
]
Primary = Annotated[
    str | None,
    typer.Option(
        help="Answers: the condition that is tested alone, the others by Holm among themselves; name it before the first answer."
    ),
]
Length = Annotated[int | None, typer.Option(help="Filler length in tokens.")]
Placement = Annotated[
    str | None,
    typer.Option(help="before-system, before-question, end (of the user's turn), before-answer, or anywhere."),
]
Layers = Annotated[
    str | None, typer.Option(help="all, 1, or 1-3,7; only layers up to the last one are loaded and run.")
]
Dtype = Annotated[
    str | None, typer.Option(help="auto (what the device computes quickly), float32, bfloat16 or float16.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="key=value: any study field, as --set margins.drop=0.9.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Result folder (under results/ otherwise).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]


def _version(show: bool) -> bool:
    if show:
        typer.echo(f"mless {__version__}")
        raise typer.Exit
    return show


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def _changes(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


class _Bar:
    """Lines and a bar with ETA on standard error; the bar appears once something has taken a second.

    Where nobody watches (no terminal), lines wait until the run has passed its checks: what is wrong with the input is then the
    only line there is.
    """

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bar: Any = None
        self._task: Any = None
        self._began = time.monotonic()
        self._held: list[str] | None = None if self._console.is_terminal else []

    def say(self, line: str) -> None:
        if self._held is not None:
            self._held.append(line)
        else:
            self._console.print(_plain(line), markup=False, soft_wrap=not self._console.is_terminal)

    def checked(self) -> None:
        """Say what was held back, and hold back nothing more."""
        held, self._held = self._held or [], None
        for line in held:
            self.say(line)

    def step(self, what: str, done: int, total: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        if self._bar is None:
            if time.monotonic() - self._began < 1 or done == total:
                return
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Progress(
                *columns, TextColumn("ETA"), TimeRemainingColumn(), console=self._console, transient=True,
                disable=not self._console.is_terminal,  # a file or a log would only get its debris
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(what, total=total)
        self._bar.update(self._task, description=what, completed=done, total=total)
        if done == total:
            self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._began = time.monotonic()


@app.command(epilog=_EPILOG)
def run(
    study: Annotated[str, typer.Argument(help="A study's name (see: mless studies) or a TOML file.")] = "quick",
    model: Model = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Remote = False,
    data: Data = None,
    question_field: QuestionField = None,
    limit: Limit = None,
    prompt: PromptKind = None,
    conditions: Conditions = None,
    filler: Filler = None,
    length: Length = None,
    placement: Placement = None,
    layers: Layers = None,
    heads: Annotated[str | None, typer.Option(help="Heads to store: all, 1, or 1-3,7.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = None,
    system: Annotated[str | None, typer.Option(help="The system text, in place of the study's.")] = None,
    answer_field: AnswerField = None,
    engine: Annotated[str | None, typer.Option(help="Answers: hf, vllm, openai, or scripted.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Answers: the openai engine's server, as http://localhost:8000/v1.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Answers: where an answer is cut off.")] = None,
    samples: Annotated[int | None, typer.Option(help="Answers: how many are drawn per item.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Answers: 0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Answers: nucleus sampling.")] = None,
    k: Annotated[str | None, typer.Option("--k", help="Answers: pass@k and maj@k, as 1,4,8.")] = None,
    primary: Primary = None,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run a study, or what is missing of it, and print its verdict."""
    from mless.study import load_study, run_study

    changes = _changes(
        model=model, tokenizer=tokenizer, data=data, question_field=question_field, limit=limit, prompt=prompt, conditions=conditions,
        filler=filler, length=length, placement=placement, layers=layers, heads=heads, dtype=dtype, device=device, seed=seed,
    )  # fmt: skip
    answers = _changes(
        engine=engine, base_url=base_url, max_new_tokens=max_new_tokens, samples=samples, temperature=temperature, top_p=top_p, k=k,
    )  # fmt: skip
    changes |= {f"accuracy.{key}": value for key, value in answers.items()} | _changes(
        answer_field=answer_field, system=system, primary=primary
    )
    _carry_out(
        as_json,
        lambda bar: run_study(load_study(study, changes, sets or ()), out, bar, trust_remote_code=trust_remote_code),
    )


def _carry_out(as_json: bool, work: Callable[[_Bar], Outcome]) -> None:
    """Do what makes a folder, publish it, and say what it shows and where it lies."""
    from mless.figures.folder import holds_answers
    from mless.report import publish, summary

    bar = _Bar(as_json)
    try:
        outcome = work(bar)
    finally:
        bar.stop()
    bar.checked()
    page = publish(outcome.folder, fresh=outcome.fresh, say=bar.say)
    told = summary(outcome.folder)
    if as_json:
        typer.echo(json.dumps(told | {"units_computed": outcome.computed}, ensure_ascii=False))
        return
    _print_verdict(
        told["verdict"],
        "already stored" if not outcome.computed else f"{outcome.computed} of {outcome.units} units computed",
    )
    if holds_answers(outcome.folder):
        _print_accuracy(outcome.folder)
    typer.echo(f"\nreport: {_plain(str(page))}")


def _print_accuracy(folder: Path) -> None:
    """The table of an accuracy study: shares in per cent, differences in points."""
    from rich.console import Console
    from rich.table import Table

    from mless.study.accuracy import accuracy_rows
    from mless.study.form import mostly_form

    def number(value: float | None, form: str = ".1f", scale: float = 100.0) -> str:
        if value is None:
            return "–"
        return format(value * scale, form).replace("-", "−") if value else "0.0"

    def between(lo: float | None, hi: float | None, form: str = ".1f") -> str:
        return "" if lo is None else f" [{number(lo, form)}, {number(hi, form)}]"

    columns = (
        "condition",
        "n",
        "accuracy, %",
        "Δ, points",
        "A/A Δ",
        "p",
        "p (Holm)",
        "can show ±",
        "cut off, %",
        "no answer, %",
        "guessed, %",
        "of Δ form",
        "tokens",
        "verdict",
    )
    table = Table(*columns, box=None, pad_edge=False)
    for row in accuracy_rows(folder):
        metric = "" if row["metric"] == "pass@1" else f" ({row['metric']})"
        table.add_row(
            _plain(row["condition"]) + metric, str(row["n"]), number(row["value"]) + between(row["lo"], row["hi"]),
            number(row["delta"], "+.1f") + between(row["delta_lo"], row["delta_hi"], "+.1f"), number(row["aa_delta"], "+.1f"),
            number(row["p"], ".3g", 1), number(row["p_adjusted"], ".3g", 1), number(row["mde"]), number(row["truncated"]),
            number(row["no_answer"]), number(row.get("guessed")),
            number(row.get("delta_form"), "+.1f") + (", mostly" if mostly_form(row) else ""), number(row["tokens"], ".0f", 1), row["verdict"] or "",
        )  # fmt: skip
    # A table broken in the middle of its cells cannot be read: where there is no terminal it gets the width it needs.
    console = Console(highlight=False)
    if not console.is_terminal:
        wide = Console(highlight=False, width=1000)
        console = Console(highlight=False, width=max(console.width, wide.measure(table).maximum))
    console.print("")
    console.print(table)


@app.command(epilog=_EPILOG)
def figure(
    name: Annotated[
        str,
        typer.Argument(help="fig2 … fig4, fig6 … fig20, table1 … table9, map, retained or mass."),
    ],
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Result folders to draw from; without any, the study is run.")
    ] = None,
    model: Models = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Remote = False,
    data: Data = None,
    question_field: QuestionField = None,
    limit: Limit = None,
    prompt: PromptKind = None,
    filler: Filler = None,
    length: Length = None,
    placement: Placement = None,
    layers: Layers = None,
    heads: Annotated[str | None, typer.Option(help="Heads to show: a list, or most-shifted:3.")] = None,
    item: Annotated[
        str | None, typer.Option(help="One prompt instead of the mean: its number from 1, or its id.")
    ] = None,
    queries: Annotated[str, typer.Option(help="original (fair comparison) or later (as published).")] = "original",
    omit_first: Annotated[
        bool | None,
        typer.Option("--omit-first/--keep-first", help="Leave out the first token (default: for Llama and Gemma)."),
    ] = None,
    bars: Annotated[
        bool, typer.Option("--bars", help="fig10: draw the answers for its left half too (a whole accuracy study).")
    ] = False,
    formats: Annotated[
        str | None, typer.Option("--format", help="Comma-separated: png, svg, pdf; for tables md, csv, tex.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the pictures (figures/ in the first result folder otherwise)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a published figure, for the published models or for yours; runs what is not stored yet."""
    from mless.figures import check, default_formats, draw
    from mless.report import write_report
    from mless.study import load_study, verdict_lines

    changes = _changes(
        tokenizer=tokenizer, data=data, question_field=question_field, limit=limit, prompt=prompt, filler=filler, length=length,
        placement=placement, layers=layers, dtype=dtype, device=device, seed=seed,
    )  # fmt: skip
    changes |= {f"figure.{key}": value for key, value in (("heads", heads), ("layers", layers)) if value is not None}
    # Of a figure with two halves each half takes the settings that are its own.
    of_answers = [text for text in sets or () if text.startswith("accuracy.")] if bars else []
    spec = load_study(name, changes, [text for text in sets or () if text not in of_answers])
    shown = spec.figure_spec()
    left = _left_half(spec, changes, [*(sets or ())]) if bars else None
    options: dict[str, Any] = {
        "layer": spec.single_layer(), "heads": spec.figure.heads if spec.figure else None, "item": item, "queries": queries,
        "formats": _formats(formats) if formats is not None else default_formats(shown), "out": out,
    }  # fmt: skip
    check(shown, **options)
    bar = _Bar(as_json)
    used = list(folders or []) or _run_for_figure(spec, model, item, bar, trust_remote_code=trust_remote_code)
    if left is not None:
        used += _run_for_figure(left, model, item, bar, trust_remote_code=trust_remote_code)
    elif spec.figure is not None and spec.figure.bars and not folders:
        bar.say(
            f"{name}: the half made of attention; --bars draws the answers of its other half too, for which a model must answer them"
        )
    written = draw(shown, used, omit_first=omit_first, **options)
    bar.checked()
    lines = {str(folder): verdict_lines(folder) for folder in used}
    for folder in used if not folders else ():
        write_report(folder, verdict=lines[str(folder)])
    if as_json:
        typer.echo(
            json.dumps(
                {"figure": name, "files": [str(path) for path in written], "verdicts": lines}, ensure_ascii=False
            )
        )
        return
    for block in lines.values():
        _print_verdict(block)
    typer.echo("")
    for path in written:
        typer.echo(f"figure: {_plain(str(path))}")


def _formats(text: str) -> list[str]:
    return [kind.strip() for kind in text.split(",") if kind.strip()]


def _left_half(spec: StudySpec, changes: dict[str, Any], sets: list[str]) -> StudySpec:
    """The accuracy study that belongs to a figure with two halves."""
    from mless.study import load_study

    if spec.figure is None or spec.figure.bars is None:
        raise BadStudy(f"--bars is for figures with a half made of answers (fig10); {spec.name} has none")
    kept = {key: value for key, value in changes.items() if key != "layers" and not key.startswith("figure.")}
    return load_study(
        spec.figure.bars, kept, [text for text in sets if not text.startswith(("figure.", "layers", "heads"))]
    )


def _run_for_figure(
    spec: StudySpec, asked: list[str] | None, item: str | None, bar: _Bar, *, trust_remote_code: bool
) -> list[Path]:
    """The result folders of a figure's models; whatever can be found wrong with one is found before any is run."""
    from mless.models import describe
    from mless.study import run_study

    models = asked or spec.published_models() or [spec.model]
    specs = spec.for_models(models)
    try:
        if item is not None:
            spec.check_item(item)
        for one in specs if len(specs) > 1 and spec.accuracy is None else ():
            described = describe(one.model, trust_remote_code=trust_remote_code, say=bar.say)
            one.check_figure(described.layers, described.heads)
        return [run_study(one, None, bar, for_figure=True, trust_remote_code=trust_remote_code).folder for one in specs]
    except BadFolder as fault:
        raise BadFolder(
            f"{fault} (mless figure keeps its results under results/; remove that folder, or run the study with: mless run {spec.source} "
            f"--out DIR and then mless figure {spec.source} DIR)"
        ) from None
    except MlessError as fault:
        if asked or not spec.published_models():
            raise
        raise type(fault)(
            f"{spec.name} was published for {', '.join(models)}: {fault}; or draw it for a model you have: "
            f"mless figure {spec.source} --model smollm2{' --heads most-shifted:3' if spec.figure and spec.figure.panels else ''}"
        ) from None
    finally:
        bar.stop()


@app.command(epilog=_EPILOG)
def tune(
    study: Annotated[
        str, typer.Argument(help="A study with [accuracy]: its name (see: mless studies) or a TOML file.")
    ] = "tune",
    model: Model = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Remote = False,
    data: Data = None,
    question_field: QuestionField = None,
    answer_field: AnswerField = None,
    limit: Limit = None,
    prompt: PromptKind = None,
    c: Annotated[str | None, typer.Option("--c", help="Values of c to try, as 0.05,0.13.")] = None,
    fraction: Annotated[str | None, typer.Option(help="Fractions to try in c's place, as 0.1,0.25.")] = None,
    p1: Annotated[str | None, typer.Option("--p1", help="Percentiles to try with each of them, as 90,99.5.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to try, each alternative by itself: 1,2,1-3 are three, 1+5 is one.")
    ] = None,
    p_min: Annotated[str | None, typer.Option(help="Lower bounds of the share, tried at the study's c and p1.")] = None,
    p_max: Annotated[str | None, typer.Option(help="Upper bounds, tried with each lower one.")] = None,
    method: Annotated[
        str | None, typer.Option(help="halving (rungs of growing dev items) or grid (all settings on all dev items).")
    ] = None,
    dev_share: Annotated[float | None, typer.Option(help="Share of the items to choose on.")] = None,
    transfer: Annotated[
        list[str] | None, typer.Option(help="Other data to try the chosen setting on; may be given several times.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="hf, vllm, or scripted.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Where an answer is cut off.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = None,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Choose ARM's parameters on some items, and say on the others what the choice is worth."""
    from mless.study import load_study
    from mless.study.tuning import run_tuning

    changes = _changes(
        model=model, tokenizer=tokenizer, data=data, question_field=question_field, answer_field=answer_field, limit=limit, prompt=prompt,
        dtype=dtype, device=device, seed=seed,
    )  # fmt: skip
    grid = _changes(c=c, fraction=fraction, p1=p1, layers=layers, p_min=p_min, p_max=p_max)
    if grid:
        # Who names a grid wants that one: what the study would try besides is left out.
        grid = {key: [] for key in ("c", "fraction", "p1", "layers", "p_min", "p_max", "settings")} | grid
    tried = grid | _changes(method=method, dev_share=dev_share, transfer=transfer)
    changes |= {f"tune.{key}": value for key, value in tried.items()}
    changes |= {f"accuracy.{key}": v for key, v in _changes(engine=engine, max_new_tokens=max_new_tokens).items()}
    _carry_out(
        as_json,
        lambda bar: run_tuning(load_study(study, changes, sets or ()), out, bar, trust_remote_code=trust_remote_code),
    )


@app.command(epilog=_EPILOG)
def plan(
    items: Annotated[int | None, typer.Option(help="How many items the run would have.")] = None,
    data: Annotated[str | None, typer.Option(help="Count the items of this data set instead.")] = None,
    effect: Annotated[
        float | None, typer.Option(help="The effect to plan for, as a share: 0.02 is two points.")
    ] = None,
    changed: Annotated[
        float | None, typer.Option(help="Share of items whose judgement changes at all (0.1 is assumed otherwise).")
    ] = None,
    pilot: Annotated[Path | None, typer.Option(help="Take that share from this result folder.")] = None,
    power: Annotated[float, typer.Option(help="How often the effect is to be found.")] = 0.8,
    alpha: Annotated[float, typer.Option(help="Level of the test.")] = 0.05,
    conditions: Annotated[
        int | None,
        typer.Option(
            "--conditions",
            "--tests",
            help="How many conditions are compared with none; as in the study accuracy (3) otherwise.",
        ),
    ] = None,
    primary: Annotated[
        bool, typer.Option("--primary", help="Plan for a primary condition, which is tested alone.")
    ] = False,
    again: Annotated[
        float | None,
        typer.Option(
            help="Share of items that the same prompts asked again judge otherwise (A/A); the pilot's, or 0 as row-stable decoding has it."
        ),
    ] = None,
    margin: Annotated[
        float, typer.Option(help="A change smaller than this would not matter, as a share; at least 0.001.")
    ] = 0.02,
    as_json: Json = False,
) -> None:
    """Say before a run what effect so many items can show, how likely each verdict is, and how many items it takes."""
    from mless.study.planning import plan as planned
    from mless.study.planning import plan_lines

    if data is not None:
        if items is not None:
            raise BadStudy("--items and --data both say how many items there are; give one of them")
        from mless.tasks import load_items

        items = len(load_items(data)[1])
    found = planned(
        items, effect, changed, pilot, power, alpha, conditions, primary=primary, again=again, margin=margin
    )
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    for line in plan_lines(found):
        typer.echo(_plain(line))


@app.command("import", epilog=_EPILOG)
def import_(
    results: Annotated[
        list[str],
        typer.Argument(
            help="FILE or NAME=FILE, one per condition, none among them: lm-eval's samples_*.jsonl, or Inspect's .eval or .json logs."
        ),
    ],
    metric: Annotated[
        str | None, typer.Option(help="The score to compare, 0 or 1 for every item: exact_match, acc …")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Which task of a file with several; else what it is called.")] = None,
    model: Annotated[str | None, typer.Option(help="What the model is called, where the files do not say.")] = None,
    margin: Annotated[float, typer.Option(help="A change smaller than this would not matter, as a share.")] = 0.02,
    primary: Primary = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare per-item results of lm-evaluation-harness or Inspect by the same statistics, and print the verdict."""
    from mless.report import publish, summary
    from mless.study.imported import import_results

    outcome = import_results(
        results, out, metric=metric, task=task, model=model, margin=margin, primary=primary, seed=seed
    )
    page = publish(outcome.folder, fresh=True)
    told = summary(outcome.folder)
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    _print_verdict(told["verdict"], f"{outcome.units} answers imported")
    _print_accuracy(outcome.folder)
    typer.echo(f"\nreport: {_plain(str(page))}")


@app.command(epilog=_EPILOG)
def studies(as_json: Json = False) -> None:
    """List the studies that come with mless."""
    from rich.console import Console
    from rich.table import Table

    from mless.study import available_studies

    found = available_studies()
    if as_json:
        typer.echo(json.dumps({name: spec.model_dump() for name, spec in found.items()}, ensure_ascii=False))
        return
    table = Table("study", "what it shows", "published for", box=None, pad_edge=False)
    for name, spec in found.items():
        table.add_row(
            name, spec.title, ", ".join(published.rsplit("/", 1)[-1] for published in spec.published_models())
        )
    Console(highlight=False).print(table)


@app.command(epilog=_EPILOG)
def models(
    name: Annotated[
        str | None, typer.Argument(help="Describe this model: is it here, will it work, what is it like?")
    ] = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """List the models at hand, or describe one before running it."""
    from mless.models.listing import at_hand, profile

    bar = _Bar(as_json)
    bar.checked()  # there is no run to check, and converting a GGUF takes minutes
    try:
        content = (
            profile(name, tokenizer=tokenizer, trust_remote_code=trust_remote_code, say=bar.say, step=bar.step)
            if name
            else at_hand()
        )
    finally:
        bar.stop()
    if as_json:
        typer.echo(json.dumps(content, ensure_ascii=False))
        return
    width = max(map(len, content), default=0)
    for key, value in content.items():
        typer.echo(_plain(f"{key:<{width}}  {value}"))


def _print_verdict(lines: list[str], note: str = "") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    head, *rest = lines
    console.print("")
    # Broken to the terminal's width where there is one; in a pipe or a file a sentence stays on its line.
    for line in (f"{head}{f' ({note})' if note else ''}", *(f"• {line}" for line in rest)):
        console.print(_plain(line), markup=False, soft_wrap=not console.is_terminal)


def main() -> None:
    """Entry point: a fault of the user's is one line and exit code 2."""
    # OpenMP's threads spin while they wait, so on a machine with anything else to do a run takes four times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A precaution: a rerun is to end with the same bits, so MKL is not left to choose its threads and code paths anew.
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")
    os.environ.setdefault("MKL_CBWR", "AUTO")
    try:
        left_with = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except MlessError as fault:
        _fail(str(fault), 2)
    except (KeyboardInterrupt, typer.Abort):
        left_with = _INTERRUPTED
    except Exception as fault:
        if type(fault).__module__.startswith(("click", "typer")) and hasattr(fault, "format_message"):
            context = getattr(fault, "ctx", None)
            usage = f" (see: {context.command_path} --help)" if context is not None else ""
            _fail(f"{fault.format_message()}{usage}", 2)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        raise
    # typer makes an exit code of Ctrl-C and hands it back as the command's own result.
    if left_with == _INTERRUPTED:
        _fail("interrupted; what is stored stays, the same command goes on from there", _INTERRUPTED)
    sys.exit(left_with if isinstance(left_with, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"mless: {_plain(' '.join(message.splitlines()))}", file=sys.stderr)
    sys.exit(code)


def _plain(text: str) -> str:
    """One line whatever it holds: a control character in a file name must not move the cursor."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


if __name__ == "__main__":
    main()
