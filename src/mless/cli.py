"""The command: parse, call, print. Exit codes: 0 done, 1 a defect of mless, 2 bad input, 130 interrupted."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mless import __version__
from mless.errors import BadFolder, MlessError

if TYPE_CHECKING:
    from mless.study import StudySpec

_EPILOG = (
    "Layers and heads are numbered from 1. Exit codes: 0 done; 1 a defect of mless (please report it); 2 bad input, with the way out in "
    "the message; 130 interrupted, the same command goes on where it stopped."
)
_INTERRUPTED = 130
app = typer.Typer(
    name="mless",
    help="Measure what inserted filler tokens do to a language model's attention.",
    epilog=_EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
        help="JSONL, JSON, CSV or Parquet file; a name in $MLESS_DATA; bundled; or arithmetic[:DIFFICULTY[:COUNT]]."
    ),
]
QuestionField = Annotated[str | None, typer.Option(help="Field that holds the question (guessed otherwise).")]
Limit = Annotated[int | None, typer.Option(help="Use only the first N items.")]
PromptKind = Annotated[
    str | None, typer.Option("--prompt", help="chat (the model's template), raw (as published), or auto.")
]
Conditions = Annotated[str | None, typer.Option(help="Comma-separated: none, mless, mful, random, or a study's own.")]
Filler = Annotated[str | None, typer.Option(help="The mless filler; one token when repeated, such as ' /'.")]
Length = Annotated[int | None, typer.Option(help="Filler length in tokens.")]
Placement = Annotated[str | None, typer.Option(help="before-system, before-question, end, or anywhere.")]
Layers = Annotated[
    str | None, typer.Option(help="all, 1, or 1-3,7; only layers up to the last one are loaded and run.")
]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
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
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run a study, or what is missing of it, and print its verdict."""
    from mless.report import publish, summary
    from mless.study import load_study, run_study

    changes = _changes(
        model=model, tokenizer=tokenizer, data=data, question_field=question_field, limit=limit, prompt=prompt, conditions=conditions,
        filler=filler, length=length, placement=placement, layers=layers, heads=heads, dtype=dtype, device=device, seed=seed,
    )  # fmt: skip
    bar = _Bar(as_json)
    try:
        outcome = run_study(load_study(study, changes, sets or ()), out, bar, trust_remote_code=trust_remote_code)
    finally:
        bar.stop()
    bar.checked()
    page = publish(outcome.folder, fresh=outcome.computed > 0, say=bar.say)
    told = summary(outcome.folder)
    if as_json:
        typer.echo(json.dumps(told | {"units_computed": outcome.computed}, ensure_ascii=False))
        return
    _print_verdict(
        told["verdict"],
        "already stored" if not outcome.computed else f"{outcome.computed} of {outcome.units} units computed",
    )
    typer.echo(f"\nreport: {_plain(str(page))}")


@app.command(epilog=_EPILOG)
def figure(
    name: Annotated[str, typer.Argument(help="fig2, fig9, fig10, fig11, fig13 … fig20, map, retained or mass.")],
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
    formats: Annotated[str, typer.Option("--format", help="Comma-separated: png, svg, pdf.")] = "png,svg",
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
    from mless.figures import check, draw
    from mless.report import write_report
    from mless.study import load_study, verdict_lines

    changes = _changes(
        tokenizer=tokenizer, data=data, question_field=question_field, limit=limit, prompt=prompt, filler=filler, length=length,
        placement=placement, layers=layers, dtype=dtype, device=device, seed=seed,
    )  # fmt: skip
    changes |= {f"figure.{key}": value for key, value in (("heads", heads), ("layers", layers)) if value is not None}
    spec = load_study(name, changes, sets or ())
    shown = spec.figure_spec()
    options: dict[str, Any] = {
        "layer": spec.single_layer(), "heads": spec.figure.heads if spec.figure else None, "item": item, "queries": queries,
        "formats": [kind.strip() for kind in formats.split(",") if kind.strip()], "out": out,
    }  # fmt: skip
    check(shown, **options)
    bar = _Bar(as_json)
    used = list(folders or []) or _run_for_figure(spec, model, item, bar, trust_remote_code=trust_remote_code)
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
        for one in specs if len(specs) > 1 else ():
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
            f"mless figure {spec.source} --model smollm2 --heads most-shifted:3"
        ) from None
    finally:
        bar.stop()


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
    content = (
        profile(name, tokenizer=tokenizer, trust_remote_code=trust_remote_code, say=bar.say) if name else at_hand()
    )
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
