"""`mless verify`: is a result folder whole, who made it from what, and does a sample of it come out again?"""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from mless.engines.base import OutOfMemory
from mless.errors import BadStudy, MlessError, is_out_of_memory
from mless.gates import state_of
from mless.results.folder import SEALED, ResultFolder
from mless.results.inspecting import Findings, inspect_folder
from mless.results.reading import measured_in
from mless.study.bench import Composed, Job, Progress, Silent, StartAgain
from mless.study.kinds import measurement_of
from mless.study.loading import validated
from mless.study.measuring import Again, compute_again
from mless.values import counted as count_of

if TYPE_CHECKING:
    import pyarrow as pa

#: On another device or with other versions numbers may differ by this, as a share of the column's largest number in the unit.
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
#: How an engine's promise begins that draws the same text again, whatever is drawn beside it.
_SAME_TEXTS = ("same tokens", "exact", "vLLM's batch-invariant mode")
#: Inner folders of composed studies of which a sample is computed again: of a tuning the test items alone, of a multiverse (whose folders are
#: called likelihood-chat-…) the first by each readout.
_SAMPLED = ("test", "likelihood", "accuracy")
FORGERY = "Checksums find damage, not forgery: a person who changes numbers on purpose can write new checksums. Against that only computing again helps."


@dataclass(frozen=True)
class Recomputed:
    """Units computed again and compared with the stored ones."""

    units: int
    numbers: int
    #: Whether device and versions are those the folder was made with; equal bits are then expected.
    same_circumstances: bool
    differing: int
    #: The largest difference, as a share of the column's largest number in its unit, and what is allowed.
    largest: float
    tolerance: float
    #: Texts: answers, names, counts.
    texts_differing: int
    texts: int
    #: Whether the engine that drew them promises the same texts in another batch.
    texts_promised: bool = True

    @property
    def agrees(self) -> bool:
        """Texts drawn elsewhere, or in another batch without a promise, may differ: one last bit can choose another token."""
        demanded = self.same_circumstances and self.texts_promised
        return self.largest <= self.tolerance and not (self.texts_differing and demanded)


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    path: Path
    #: `whole`, `unfinished`, `damaged`, `differs` (what was computed again is not what is stored) or `unsealed` (made before checksums).
    state: str
    tables: int
    units: int
    units_needed: int | None
    damaged: Sequence[str]
    left_over: Sequence[str]
    made: Mapping[str, Any]
    recomputed: Recomputed | None = None
    #: Why nothing was computed again.
    not_recomputed: str = ""
    #: Whether a running study was writing the folder, so that its files were not looked at; it counts as `unfinished`.
    busy: bool = False
    inner: Sequence[Verification] = field(default=())

    @property
    def good(self) -> bool:
        return self.state in ("whole", "unsealed") and all(one.good for one in self.inner)

    def content(self) -> dict[str, Any]:
        """For other programs."""
        own = {key: value for key, value in asdict(self).items() if key not in ("path", "inner")}
        if self.recomputed is not None and not math.isfinite(self.recomputed.largest):
            own["recomputed"]["largest"] = None  # JSON has no infinity
        inner = [one.content() for one in self.inner]
        return {"folder": str(self.path), "good": self.good} | own | {"inner": inner, "note": FORGERY}


def verify(
    path: Path | str,
    *,
    sample: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Verification:
    """Check every file of a result folder, and compute `sample` of its units again where its model and data are at hand (0: none).

    The weights are hashed anew. On the same device with the same versions the numbers must be equal to the last bit, else within `TOLERANCES`.
    """
    if sample < 0:
        raise BadStudy(f"the sample is a number of units, 0 or more, got {sample}")
    path, progress = Path(path), progress or Silent()
    found = _inspected(path, progress)
    if found is None:
        return _busy(path)
    about = found.about or {}
    recomputed, why_not = None, "the folder is damaged"
    if not found.damaged:
        recomputed, why_not = _recompute(path, about, sample, Random(seed), progress, trust_remote_code)
    # The numbers of a composed study are in its inner folders.
    first = {one.name.partition("-")[0]: one for one in reversed(found.inner)}
    inner = [
        verify(
            one,
            sample=sample
            if first.get(one.name.partition("-")[0]) == one and one.name.partition("-")[0] in _SAMPLED
            else 0,
            seed=seed,
            progress=progress,
            trust_remote_code=trust_remote_code,
        )
        for one in found.inner
    ]
    return Verification(
        path=path,
        state=_state(found, recomputed),
        tables=found.tables,
        units=found.units,
        units_needed=about.get("units") if not found.complete else None,
        damaged=found.damaged,
        left_over=found.left_over,
        made=_made(path, about),
        recomputed=recomputed,
        not_recomputed=why_not,
        inner=inner,
    )


def _inspected(path: Path, progress: Progress) -> Findings | None:
    """What lies there; None where a running study writes the folder. Files read before and after a write do not agree, which is no damage."""
    folder = ResultFolder(path)
    while not folder.is_being_written():
        before = _stamp(path / "study.json")
        found = inspect_folder(path, progress.step)
        if not found.damaged or (_stamp(path / "study.json") == before and not folder.is_being_written()):
            return found
    return None


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        return state_of(file)
    except (OSError, ValueError):
        return ()


def _busy(path: Path) -> Verification:
    about = ResultFolder(path).manifest() or {}
    why_not = "a running study is writing the folder"
    return Verification(
        path, "unfinished", 0, 0, about.get("units"), [], [], _made(path, about), not_recomputed=why_not, busy=True
    )


def _state(found: Findings, recomputed: Recomputed | None) -> str:
    if found.damaged:
        return "damaged"
    if recomputed is not None and not recomputed.agrees:
        return "differs"
    if not found.complete:
        return "unfinished"
    return "whole" if found.sealed else "unsealed"


def _made(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Who made the folder from what, as study.json says it."""
    if not about:
        return {}
    model: Any = about.get("model") if isinstance(about.get("model"), dict) else {"name": about.get("model")}
    written = datetime.fromtimestamp((path / "study.json").stat().st_mtime, UTC)
    return {
        "mless": about.get("mless"),
        "format": about.get("format"),
        "measures": measured_in(about),
        "study": (about.get("study") or {}).get("name"),
        "model": model.get("name"),
        "fingerprint": model.get("fingerprint"),
        "revision": model.get("revision"),
        "data": (about.get("study") or {}).get("data"),
        "items": len(about.get("items") or ()),
        "conditions": list(about.get("conditions") or {}),
        "device": about.get("device"),
        "versions": about.get("versions"),
        "engine": (about.get("engine") or {}).get("engine"),
        "imported": about.get("imported"),
        "written": written.isoformat(timespec="seconds"),
        "command": about.get("command"),
    }


# ---- computing again -------------------------------------------------------------------------------------------------


def _recompute(
    path: Path, about: Mapping[str, Any], sample: int, rng: Random, progress: Progress, trust_remote_code: bool
) -> tuple[Recomputed | None, str]:
    """The comparison, or the reason why there is none."""
    if about.get("imported"):
        return None, "its answers were imported from another program, so there is nothing to compute again"
    if not sample:
        return None, "no sample was asked for"
    if about["format"] < SEALED:
        return None, "it was made before weights were fully hashed, so whether these are its weights is not known"
    try:
        spec = validated(about.get("study") or {}, str(path / "study.json"))
        measurement = measurement_of(spec)
        if isinstance(measurement, Composed):
            return None, "its numbers are those of its inner folders"
        if not measurement.needs_weights():
            return None, "its answers came from a server or a script, whose model is not at hand"
        with tempfile.TemporaryDirectory() as scratch:
            job = Job(spec, Path(scratch) / "none", progress, trust_remote_code=trust_remote_code, run_code=True)
            again = compute_again(measurement, job, ResultFolder(path), sample, rng)
    except (StartAgain, OutOfMemory) as fault:
        return None, _refused(fault.__cause__ if isinstance(fault, StartAgain) else fault)
    except MlessError as fault:
        return None, str(fault)
    except Exception as fault:
        if is_out_of_memory(fault):
            return None, _refused(fault)
        raise
    if not again.units:
        return None, "its tables hold only what was made of the units, and these are removed when a study ends"
    return compare(again, promised=_promises_texts(about)), ""


def _refused(fault: BaseException | None) -> str:
    cause = str(fault).partition("\n")[0].partition(";")[0]
    return f"memory was refused ({cause}), and with less at once other texts may come out; verify it where there is more memory"


def _promises_texts(about: Mapping[str, Any]) -> bool:
    """Whether the same texts must come out again. Where no engine drew them, texts are names and counts."""
    engine: Mapping[str, Any] = about.get("engine") or {}
    if not engine:
        return True
    # The version of vLLM is not among those of every study.
    same_vllm = "vllm" not in engine or engine["vllm"] == _installed("vllm")
    return same_vllm and str(engine.get("promise", "")).startswith(_SAME_TEXTS)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compare(again: Again, *, promised: bool = True) -> Recomputed:
    """Every number and text of the units computed again against the stored ones."""
    numbers = differing = texts = texts_differing = 0
    largest = 0.0
    for _, now, stored in again.units:
        for name, table in stored.items():
            for new, old in _columns(now[name], table):
                if isinstance(old, list):
                    scale = max(
                        (abs(value) for value in old if value is not None and math.isfinite(value)), default=0.0
                    )
                    numbers += len(old)
                    for a, b in zip(new, old, strict=True) if len(new) == len(old) else [(math.inf, 0.0)]:
                        if not _same(a, b):
                            differing += 1
                            largest = max(largest, _distance(a, b, scale))
                else:
                    texts += 1
                    texts_differing += new != old
    tolerance = TOLERANCES.get(again.dtype, max(TOLERANCES.values()))
    return Recomputed(
        len(again.units), numbers, again.same, differing, largest, tolerance, texts_differing, texts, promised
    )


def _columns(now: pa.Table, stored: pa.Table) -> Iterator[tuple[Any, Any]]:
    """Pairs of a column's numbers as lists, or of one text; a column that is missing, or of another length, is a text that differs."""
    for name in stored.column_names:
        new: list[Any] = now.column(name).to_pylist() if name in now.column_names else []
        old: list[Any] = stored.column(name).to_pylist()
        if _is_of_numbers(stored.schema.field(name).type):
            yield list(_numbers(new)), list(_numbers(old))
        elif len(new) != len(old):
            yield None, old and str(old[0])
        else:
            yield from ((str(a), str(b)) for a, b in zip(new, old, strict=True))


def _is_of_numbers(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_list(kind):
        return _is_of_numbers(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_of_numbers(kind.field(at).type) for at in range(kind.num_fields))
    return pa.types.is_floating(kind)


def _numbers(value: Any) -> Iterator[float | None]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _numbers(one)
    else:
        yield value


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def _distance(a: float | None, b: float | None, scale: float) -> float:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)) or not scale:
        return math.inf
    return abs(a - b) / scale


# ---- in words --------------------------------------------------------------------------------------------------------


def verification_lines(found: Verification) -> list[str]:
    """The verdict first, then what it rests on."""
    return [*_own_lines(found), *(line for one in found.inner for line in _own_lines(one)), FORGERY]


def way_out(found: Verification) -> str:
    """What to do about a folder that is not good; `verification_lines` says what is the matter with it."""
    bad = [one for one in (found, *found.inner) if one.state not in ("whole", "unsealed")]
    return "; ".join(f"{one.path}: {_way_out(one, inner=one is not found)}" for one in bad)


def _way_out(found: Verification, *, inner: bool) -> str:
    if found.state == "damaged":
        return "do not use its numbers until each of these faults is mended, or run its study into a new folder"
    if found.state == "differs":
        return "do not use its numbers unless they come out again on the machine that made them; verify it there, or run its study into a new folder"
    if found.busy:
        return "verify it again when the running study has ended"
    if found.made.get("format", SEALED) < SEALED:
        return "run its study into a new folder: this one is of an older mless, and is not continued"
    if inner:
        return "goes on when the study that it lies in does"
    command: Any = found.made.get("command")
    if not isinstance(command, list):
        return "the command that made it goes on"
    words = [str(word) for word in command]
    if "--out" in words[:-1]:  # the folder may have been moved or copied since
        words[words.index("--out") + 1] = str(found.path)
    return f"go on with: {shlex.join(words)}"


def _own_lines(found: Verification) -> list[str]:
    counted = f"{found.tables} tables" + (f", {found.units} units" if found.units else "")
    heads = {
        "whole": f"whole: study.json and {counted} are as they were written",
        "unsealed": f"readable: made before there were checksums, so only that study.json and {counted} can be read was checked",
        "unfinished": _unfinished(found),
        "damaged": f"damaged: {count_of(len(found.damaged), 'fault')} in study.json and {counted}",
        "differs": f"not reproduced: {counted} are as they were written, but other numbers come out here",
    }
    head = heads[found.state]
    if found.state in ("whole", "unsealed") and not found.good:
        names = ", ".join(one.path.name for one in found.inner if not one.good)
        head = f"not whole: its own {counted} are as they were written, but not all that lies in it is: see {names}"
    return [
        f"{found.path}: {head}",
        *found.damaged,
        *_left_over(found),
        *_made_lines(found.made),
        _again_line(found),
    ]


def _unfinished(found: Verification) -> str:
    if found.busy:
        return "unfinished, being written by a running study; its files were not looked at"
    # A tuning has no units of its own. Others may keep a unit in several files, one for each table.
    needed = "" if found.units_needed is None else f" (the study has {found.units_needed} units, of one file or more)"
    there = f"unfinished: {found.units} files of units are there{needed}"
    old = found.made.get("format", SEALED) < SEALED
    return f"{there}, and can be read" if old else f"{there}, each as it was written"


def _left_over(found: Verification) -> list[str]:
    return [f"also there: {'; '.join(found.left_over)}"] if found.left_over else []


def _made_lines(made: Mapping[str, Any]) -> list[str]:
    if not made:
        return []
    device: Any = made["device"]
    where = device.get("kind") if isinstance(device, dict) else device
    dtype = f" ({device['dtype']})" if isinstance(device, dict) and device.get("dtype") else ""
    versions: Mapping[str, str] = made["versions"] if isinstance(made["versions"], dict) else {}
    by = ", ".join(f"{name} {version}" for name, version in versions.items())
    known = f", weights {made['fingerprint']}" if made["fingerprint"] else ""
    return [
        f"made from: study {made['study']}, model {made['model']}{known}, data {made['data']} ({made['items']} items), conditions "
        f"{', '.join(made['conditions'])}",
        f"made by: mless {made['mless']} (format {made['format']}), {by or 'versions not stored'}, on {where or 'no device of this machine'}{dtype}; "
        f"its file study.json dates from {made['written']}",
    ]


def _again_line(found: Verification) -> str:
    again = found.recomputed
    if again is None:
        return f"not computed again: {found.not_recomputed}"
    what = f"computed again: {again.units} units, {again.numbers:,} numbers and {again.texts:,} texts"
    if not again.differing and not again.texts_differing:
        return f"{what}, all equal to the last bit"
    here = (
        "on the same device with the same versions"
        if again.same_circumstances
        else "on another device or with other versions"
    )
    said: list[str] = []
    if again.differing:
        said.append(
            f"{again.differing:,} numbers differ, by at most {again.largest:.1g} of their column's largest (allowed: {again.tolerance:g})"
        )
    if again.texts_differing and again.texts_promised:
        said.append(f"{again.texts_differing:,} texts differ")
    elif again.texts_differing:
        equal = again.texts - again.texts_differing
        said.append(f"{equal:,} of the texts are equal, and its engine does not promise that all are")
    return f"{what}, {here}: {', and '.join(said)}"
