"""What can go wrong, by name. Every message says what was expected, what was found, and the way out."""

from __future__ import annotations

import re


class MlessError(Exception):
    """A fault the user can fix. The command prints its message on one line and exits with code 2."""


class UnknownModel(MlessError):
    """No model by that name, hub id, folder or GGUF file."""


class UnsupportedArchitecture(MlessError):
    """The model computes attention in a way this tool cannot measure correctly."""


class TokenizerFault(MlessError):
    """The tokenizer would feed the model something it was not trained on."""


class BadData(MlessError):
    """A data file that is empty, broken or lacks a field."""


class BadPrompt(MlessError):
    """A prompt that cannot be built as asked."""


class BadStudy(MlessError):
    """An unknown study, an unknown field, or a value out of its range."""


class BadAttention(MlessError):
    """Attention that is not finite: the model's numbers broke, so no statistic of them is given."""


class BadFolder(MlessError):
    """A result folder that belongs to another study, a newer version, or a run still under way."""


class ProofFailed(MlessError):
    """A self-check at load time failed; measuring would silently give wrong numbers."""


class EngineFault(MlessError):
    """Text generation that cannot be done as asked: an engine not installed, a server that fails or answers something else."""


class BadCluster(MlessError):
    """Workers that are not there, keep dying, or do not fit together."""


class BadPlugin(MlessError):
    """A thing from outside the package that cannot be used: its module fails, its name is taken, or it is something else."""


class NoMemory(MlessError):
    """Memory that was asked for was refused."""


_REFUSED = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|bad_alloc|launch worker thread|can't start new thread|"
    r"failed to map segment from shared object$",
    re.IGNORECASE,
)


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether memory was refused. torch on a CPU and Parquet's reader say so in words only."""
    by_type = isinstance(fault, MemoryError) or type(fault).__name__ == "OutOfMemoryError"  # torch is not imported here
    return by_type or _REFUSED.search(str(fault)) is not None


def first_line(fault: BaseException) -> str:
    """What an error of another library says, on one short line; its kind where it says nothing."""
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:200]
