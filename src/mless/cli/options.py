"""Options that several commands take, each declared once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mless.cli.groups import StudyField
from mless.errors import BadStudy

if TYPE_CHECKING:
    from mless.study.bench import Workers


def _with_escapes(text: str) -> str:
    """A filler as it is typed: \\n, \\t and \\r stand for blanks, \\\\ for a backslash; any other backslash is itself."""
    return re.sub(r"\\([nrt\\])", lambda found: {"n": "\n", "r": "\r", "t": "\t"}.get(found[1], "\\"), text)


# ---- single options --------------------------------------------------------------------------------------------------

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Hub id, folder with safetensors, GGUF file (or a folder with one), or smollm2."
    ),
    StudyField(),
]
AnswerField = Annotated[str | None, typer.Option(help="Field that holds the answer (guessed otherwise)."), StudyField()]
SolutionField = Annotated[
    str | None, typer.Option(help="Field that holds the worked solution (guessed otherwise)."), StudyField()
]
Layers = Annotated[
    str | None,
    typer.Option(help="all, 1, or 1-3,7; only layers up to the last one are loaded and run."),
    StudyField(),
]
Primary = Annotated[
    str | None,
    typer.Option(
        help="Answers: the condition that is tested alone, the others by Holm among themselves; name it before the first answer."
    ),
    StudyField(),
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="key=value: any study field, as --set margins.drop=0.9.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model's repository brings.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]


# ---- groups ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """How a model is loaded."""

    tokenizer: Annotated[
        str | None,
        typer.Option(help="Tokenizer to use instead of the model's own: folder or hub id."),
        StudyField(),
    ] = None
    # No study field: a study file must not be able to allow it.
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Who measures. No study fields: the numbers do not depend on it, and a study file must not be able to reach other machines."""

    workers: Annotated[
        str | None,
        typer.Option(
            help="Let others measure: a number of processes (or GPUs) of this machine, auto, or HOST:PORT of a Ray cluster (mless[ray])."
        ),
    ] = None
    worker_threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each worker: by default the processors shared out, 4 on a cluster."),
    ] = None
    worker_gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs of each worker, 1 by default; more with --device-map auto, or as accuracy.tensor_parallel.",
        ),
    ] = None
    worker_limit: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds after which a worker that has not answered is given up: 3600 by default."),
    ] = None
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed",
            help="Take workers that differ in device, dtype or versions: last digits then depend on who measured.",
        ),
    ] = False

    def asked(self) -> Workers | None:
        from mless.study.bench import Workers

        if self.workers is None:
            if self.mixed or not (self.worker_threads is self.worker_gpus is self.worker_limit is None):
                raise BadStudy(
                    "--worker-threads, --worker-gpus, --worker-limit and --mixed say how workers run, and none are asked for; add --workers, or leave them out"
                )
            return None
        given = Workers(self.workers, self.worker_threads, self.mixed, gpus=self.worker_gpus)
        return given if self.worker_limit is None else replace(given, limit=self.worker_limit)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where the questions come from."""

    data: Annotated[
        str | None,
        typer.Option(
            help="JSONL, JSON, CSV or Parquet file; a name in $MLESS_DATA; bundled; or arithmetic[:DIFFICULTY[:COUNT]]. "
            "Distinct questions by difficulty: 200 in 1 (the default), 16,500 in 2, more in 3 and 4, 20,000 in 5, 4,000 in 6."
        ),
        StudyField(),
    ] = None
    question_field: Annotated[
        str | None, typer.Option(help="Field that holds the question (guessed otherwise)."), StudyField()
    ] = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How many prompts are made, and in what form."""

    limit: Annotated[int | None, typer.Option(help="Use only the first N items."), StudyField()] = None
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            help="chat (the model's template), user (the same, the system text in the user's turn), raw (as published), or auto.",
        ),
        StudyField(),
    ] = None


@dataclass(frozen=True, kw_only=True)
class FillerOptions:
    """What is inserted, and where."""

    filler: Annotated[
        str | None,
        typer.Option(
            parser=_with_escapes,
            metavar="TEXT",
            help="The mless filler, such as ' /': its tokens are repeated and cut to the length. \\n is a line break, \\t a tab, \\\\ a backslash.",
        ),
        StudyField(),
    ] = None
    length: Annotated[int | None, typer.Option(help="Filler length in tokens."), StudyField()] = None
    placement: Annotated[
        str | None,
        typer.Option(help="before-system, before-question, end (of the user's turn), before-answer, or anywhere."),
        StudyField(),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """With what precision, on which device and from which seed."""

    dtype: Annotated[
        str | None,
        typer.Option(help="auto (what the device computes quickly), float32, bfloat16 or float16."),
        StudyField(),
    ] = None
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …"), StudyField()] = None
    device_map: Annotated[
        str | None,
        typer.Option(help="auto: spread a model larger than one GPU over all GPUs and CPU memory (docs/usage.md)."),
        StudyField(),
    ] = None
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="The most that --device-map places on a device, as cuda:0=20GiB,cpu=60GiB; disk, without a size, allows layers to stay there.",
        ),
        StudyField(),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of everything random."), StudyField()] = None


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the result goes, and how it is printed."""

    out: Annotated[Path | None, typer.Option("--out", "-o", help="Result folder (under results/ otherwise).")] = None
    as_json: Json = False
