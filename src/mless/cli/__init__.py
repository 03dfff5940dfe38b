"""The command: parse, call, print. Exit codes: 0 done, 1 a defect of mless, 2 bad input, 130 interrupted,
141 the reader of a pipe has gone (`| head`), which is what a shell reports for other tools.

One file a command. Libraries that are slow to import are imported inside functions, so `mless --help` is quick.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer

from mless import __version__
from mless.cli.command_compare import compare
from mless.cli.command_doctor import doctor
from mless.cli.command_export import export
from mless.cli.command_figure import figure
from mless.cli.command_import import import_
from mless.cli.command_models import models
from mless.cli.command_plan import plan
from mless.cli.command_run import run
from mless.cli.command_show import show
from mless.cli.command_studies import studies
from mless.cli.command_tune import tune
from mless.cli.command_verify import verify
from mless.cli.groups import spread
from mless.cli.printing import plain
from mless.cli.streams import CLOSED_PIPE, OutputClosed, guarded
from mless.errors import BadStudy, MlessError, is_out_of_memory
from mless.gates import not_text, shown
from mless.limits import THREADS

_EPILOG = (
    "Layers and heads are numbered from 1. Exit codes: 0 done; 1 a defect of mless (please report it); 2 bad input (the message says "
    "the way out); 130 interrupted (the same command goes on)."
)
_INTERRUPTED = 130
_LESS = (
    "what is stored stays; measure fewer prompts at once (--set batch_size=1), fewer layers (--layers 1) or shorter prompts (--length), "
    "or run where there is more memory"
)
# In the order of the help.
_COMMANDS = {
    "run": run,
    "show": show,
    "export": export,
    "figure": figure,
    "compare": compare,
    "tune": tune,
    "plan": plan,
    "import": import_,
    "verify": verify,
    "studies": studies,
    "models": models,
    "doctor": doctor,
}

app = typer.Typer(
    name="mless",
    help="Measure what inserted filler tokens do to a language model's attention and to its answers.",
    epilog=_EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in _COMMANDS.items():
    app.command(_name, epilog=_EPILOG)(spread(_command))


def _version(show: bool) -> bool:
    if show:
        print(f"mless {__version__}")
        raise typer.Exit
    return show


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def main() -> None:
    """Entry point. Bad input is one line on standard error and exit code 2."""
    # OpenMP's threads spin while they wait, which makes a run four times as long on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A rerun must end with the same bits, so MKL may not choose other threads or code paths.
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")
    os.environ.setdefault("MKL_CBWR", "AUTO")
    with guarded():
        sys.exit(_exit_code())


def _exit_code() -> int:
    """Run the command; what it wrote has been written when this ends."""
    try:
        _check_words(sys.argv[1:])
        _check_threads()
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        # typer catches Ctrl-C itself and returns its exit code as the command's result.
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except OutputClosed:
        return CLOSED_PIPE
    except MlessError as fault:
        return _failed(str(fault), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted; what is stored stays, the same command goes on from there", _INTERRUPTED)
    except Exception as fault:  # noqa: BLE001 - a defect: it is shown, behind the gate
        if type(fault).__module__.startswith(("click", "typer")) and hasattr(fault, "format_message"):
            context = getattr(fault, "ctx", None)
            usage = f" (see: {context.command_path} --help)" if context is not None else ""
            message = _no_number(fault) or fault.format_message()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
            return _failed(f"{message}{usage}", 2)
        if isinstance(fault, ImportError) and sys.argv[1:2] == ["doctor"]:
            return _doctor_alone()
        if is_out_of_memory(fault):
            cause = (str(fault).splitlines() or [type(fault).__name__])[0]
            return _failed(f"memory was refused ({cause}); {_LESS}", 2)
        return _failed(
            "this is a defect of mless; please report it with what is printed above and with what `mless doctor` prints",
            1,
            fault,
        )


_NUMBERS = {"int": "a whole number", "float": "a number"}


def _no_number(fault: Any) -> str | None:
    """In plain words that an option takes a number; None where the fault is another. Newer typers pass on pydantic's own words."""
    if not hasattr(fault.__cause__, "errors") or not getattr(fault, "param", None):
        return None
    first = fault.__cause__.errors()[0]
    wanted = _NUMBERS.get(first["type"].partition("_")[0])
    return f"{fault.param.opts[0]} takes {wanted}, got {shown(first['input'])}" if wanted else None


def _doctor_alone() -> int:
    """The doctor without typer, which cannot read words where a package of its own is broken."""
    try:
        doctor(self_test="--no-self-test" not in sys.argv, as_json="--json" in sys.argv)
    except typer.Exit as left:
        return left.exit_code
    return 0


def _check_words(words: list[str]) -> None:
    """Names go into study.json and tables, which hold text: bytes that are none, as in a file's name, are refused."""
    for word in words:
        if not_text(word):
            raise BadStudy(
                f"{shown(word)} holds bytes that are no UTF-8 text; rename the file or folder, or mend the word"
            )


def _check_threads() -> None:
    """Refuse a number of threads at which OpenMP ends the process without a word. What is no number it ignores by itself."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        asked = os.environ.get(name, "")
        for number in asked.split(","):
            digits = number.strip().lstrip("0")
            if digits.isdecimal() and (len(digits) > 9 or int(digits) > THREADS.value):
                raise BadStudy(
                    f"{name} is {shown(asked)}; expected {THREADS}: set it to the number of cores, or unset it"
                )


def _failed(message: str, code: int, fault: Exception | None = None) -> int:
    # Where standard error cannot be written either, the exit code has to say it alone.
    with contextlib.suppress(OutputClosed, MlessError):
        if fault is not None:
            traceback.print_exception(fault)
        print(f"mless: {plain(' '.join(message.splitlines()))}", file=sys.stderr, flush=True)
    return code
