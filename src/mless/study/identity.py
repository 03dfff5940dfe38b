"""A study's identity: what must agree for stored units to be used, and the folder's name and command."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless import __version__
from mless.errors import BadFolder
from mless.results.folder import GROUPED, SEALED, ResultFolder
from mless.results.manifest import measured_in
from mless.study.composed_tables import MULTIVERSE_SETTINGS
from mless.study.conditions import conditions_of
from mless.study.loading import write_sets
from mless.study.spec import LikelihoodTable, StudySpec
from mless.values import Item

if TYPE_CHECKING:
    from mless.models.loading import Description


#: In study.json of a folder that was judged again: the format of the mless that measured its units.
UNITS_FORMAT = "units_format"

#: Settings of [accuracy] that say how answers are judged or fetched, and do not change them; [likelihood] has the latter too.
ANALYSIS = ("k", "rules", "grader", "margin", "dev_share", "cluster_field")
FETCHING = ("concurrency", "timeout", "retries")
#: Fields of a table that do not change what is measured.
_JUDGING = {
    "accuracy": (*ANALYSIS, *FETCHING),
    "likelihood": (*LikelihoodTable().judged(), *FETCHING),
    "placebo": ("by",),
    "dose": ("dev_share",),
    "multiverse": (*MULTIVERSE_SETTINGS, "by"),  # another grid adds inner folders and leaves the others as they are
    "cause": ("by",),
}
#: Fields that answers do not depend on.
OF_ATTENTION = ("layers", "heads", "batch_size", "group_tokens", "margins", "flips")
#: What leads to the items; the items themselves are compared.
_SELECTING = ("data", "question_field", "answer_field", "solution_field", "limit", "only")

#: What leads to where the layers lie; whether they are spread is compared once the model is loaded (`LoadedModel.kind`).
_PLACING = ("device_map", "device_memory")


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "unnamed"


def unit_name(condition: str, number: int) -> str:
    """The file name of an item's unit. Two conditions never share one, not even where a file system takes `A` for `a`.

    A plain name stands for itself. Any other gets a digest behind a sign that plain names do not have.
    """
    plain = slug(condition).lower()[:60]
    if plain != condition:
        plain = f"{plain}~{hashlib.sha256(condition.encode(errors='surrogatepass')).hexdigest()[:16]}"
    return f"{plain}-{number + 1:05d}"


def default_folder(spec: StudySpec, label: str, judged_by: Sequence[str] = ()) -> Path:
    """``results/quick-SmolLM2-135M-Instruct``; fields changed from the study's own file add a short digest.

    Analysis-only fields (`judged_by`) do not change the name, nor how much memory a device gives. So a run with another margin or primary
    condition finds its stored numbers.
    """
    left_out = ("model", "figure", "title", "primary", "device_memory", *judged_by)
    changed = {key: value for key, value in spec.changed().items() if key not in left_out}
    for table, judging in _JUDGING.items():
        if (own := changed.pop(table, None)) is not None:
            written: dict[str, Any] = spec._as_written[table] or {}  # pyright: ignore[reportPrivateUsage]
            drawn = {key: value for key, value in own.items() if key not in judging and value != written.get(key)}
            changed |= {table: drawn} if drawn or not written else {}
    mark = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:6] if changed else ""
    return Path("results") / "-".join(filter(None, [slug(spec.name), slug(label), mark]))


def identity_of(spec: StudySpec, described: Description | None, model: str, items: Sequence[Item]) -> dict[str, str]:
    """What must agree for stored units to belong to this study; by name, so that an error can name the difference.

    `described` is None where the model is a server's, which is known by its name alone.
    """
    from mless.models.gate import check_tokenizer_files
    from mless.models.tokenizers import locate_tokenizer

    fields = {
        key: digest(value)
        for key, value in spec.model_dump().items()
        if key
        not in ("title", "model", "tokenizer", *_SELECTING, *_PLACING, "figure", "accuracy", "likelihood", "primary")
    }
    if spec.group_tokens is None:
        del fields["group_tokens"]  # what is then used is known once the model is loaded
    unused = ["arm"] if not any(condition.arm for condition in conditions_of(spec)) else []
    unused += [
        key
        for key in ("activations", "affine", "tune", "placebo", "dose", "multiverse", "cause", "measures", "options")
        if not getattr(spec, key)
    ]
    fields = {key: value for key, value in fields.items() if key not in unused}
    own = described.source.tokenizer if described is not None else None
    tokens = locate_tokenizer(spec.tokenizer) if spec.tokenizer else own
    if tokens is not None:
        check_tokenizer_files(tokens, spec.tokenizer or spec.model)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    files = [tokens / name for name in names] if tokens is not None else []
    tokenizer = digest([hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "" for file in files])
    # Solutions and choices are no part of it, so that folders from before there were any go on; who measures them adds them.
    rows = digest([[item.id, item.question, item.answer] for item in items])
    return fields | {"model's weights": model, "tokenizer files": tokenizer, "data": rows}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def check_age(folder: ResultFolder, stored: dict[str, Any]) -> None:
    """Refuse to go on with an older folder: its units have no checksums, and its weights are known by a sample only."""
    if stored["format"] < SEALED:
        raise BadFolder(
            f"{folder.path} was made by an older mless (format {stored['format']}), which stored no checksums and knew the weights by a sample of "
            "them. Its tables and figures still open, but it is not continued or judged again; choose another --out, or remove the folder"
        )


def differing(stored: Mapping[str, Any], identity: Mapping[str, str]) -> list[str]:
    """The names of what is not as in the stored study."""
    old = stored.get("identity", {})
    return sorted(key for key in identity if old.get(key) != identity[key])


#: As many differences are named.
_NAMED = 8


def check_same(
    folder: ResultFolder,
    stored: dict[str, Any],
    identity: dict[str, str],
    name: str,
    measures: str,
    *,
    measured: bool = False,
) -> None:
    """Compare the part of the identity that is known before a model is loaded, of the study `name` that measures `measures`.

    `measured` says that no prompt runs any more.
    """
    different = differing(stored, identity)
    units_format: int = stored.get(UNITS_FORMAT) or stored["format"]
    older = units_format < GROUPED and stored.get("study", {}).get("batch_size") == 1
    if older and "batch_size" in different and identity["batch_size"] == digest(None):
        different.remove("batch_size")  # it was 1 unless given
        if not measured:
            raise BadFolder(
                f"{folder.path} was begun by an older mless, which ran each prompt alone; add --set batch_size=1 to go on with it, or choose "
                "another --out"
            )
    if "layers" in different and "model's weights" in different:
        different.remove("model's weights")  # a checkpoint is known by the layers that are read of it
    if not different:
        return
    study, holds = stored.get("study", {}).get("name", "unknown"), measured_in(stored)
    if study != name:  # nearly every field differs then, and says no more
        says = f"holds the study {study!r}, and you ask for {name!r}"
    elif holds != measures:
        says = f"holds a study {study!r} of {holds}, and yours is of {measures}"
    else:
        more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
        says = f"holds another study ({study!r}): it differs in {', '.join(different[:_NAMED])}{more}"
    raise BadFolder(f"{folder.path} {says}; choose another --out, or remove the folder")


def rerun_command(spec: StudySpec, out: Path, trust_remote_code: bool = False) -> list[str]:
    """What to type to get this folder again."""
    changed = {key: value for key, value in spec.changed().items() if key not in ("figure", "title")}
    sets = [word for text in write_sets(changed) for word in ("--set", text)]
    trust = ["--trust-remote-code"] if trust_remote_code else []
    code = ["--run-code"] if spec.accuracy is not None and spec.accuracy.runs_code else []
    return ["mless", "run", spec.source, "--out", str(out), *sets, *trust, *code]


def recorded(measures: str, study: Mapping[str, Any], task: str, items: Sequence[str]) -> dict[str, Any]:
    """What every study.json says, of a study that was run or of results that were imported."""
    return {
        "mless": __version__,
        "measures": measures,
        "study": dict(study),
        "task": task,
        "items": list(items),
        "seeds": {"study": study["seed"]},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in ("torch", "transformers", "numpy", "scipy", "pyarrow", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def is_circumstance(name: str) -> bool:
    """Whether a part of an identity is about what the model was computed with, and not about what was measured."""
    return name.endswith(" in use") or name == "kind of device"
