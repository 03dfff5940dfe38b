"""Stored numbers are the computed ones: flipped bits, swapped units, changed weights and colliding names are found."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from heard import Heard
from interrupted import not_finished, units_kept
from mless.errors import BadFolder
from mless.models import hashing
from mless.results.folder import ResultFolder
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.identity import unit_name
from models.tiny_models import write_gguf
from spelling import model_folder

TABLES = ("prompts", "attention", "dilution", "retained", "shares")
LENGTHS: dict[str, Any] = {
    "conditions": ["none", "dots", "dots.", "Dots"],
    "condition": {
        "dots": {"filler": " .", "length": 3},
        "dots.": {"filler": " .", "length": 6},
        "Dots": {"filler": " .", "length": 9},
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


def run_tiny(model: Path, out: Path, heard: Heard | None = None, **changes: Any) -> Outcome:
    chosen = {"model": str(model), "limit": 3, "length": 5, "conditions": "none,mless", "prompt": "raw", **changes}
    return run_study(load_study("quick", chosen), out, heard)


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished folder that still has its units."""
    out = tmp_path_factory.mktemp("whole") / "r"
    with units_kept():
        run_tiny(tiny, out)
    return out


@pytest.fixture
def unfinished(finished: Path, tmp_path: Path) -> Path:
    """The same as a run leaves it that is killed after its last unit."""
    shutil.copytree(finished, tmp_path / "r")
    not_finished(tmp_path / "r")
    return tmp_path / "r"


def tables_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.parquet").read_bytes() for name in TABLES}


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


# ---- flipped bits --------------------------------------------------------------------------------------------------------


def everything_read(folder: ResultFolder) -> Iterator[pa.Table]:
    for table in TABLES:
        yield folder.read_table(table)


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_flipped_bits_change_no_number(finished: Path, tmp_path: Path, count: int) -> None:
    """One bit at a time, over units, tables and study.json: what is read is refused, or it is what was stored."""
    rng = random.Random(count)
    out = tmp_path / "r"
    shutil.copytree(finished, out)
    stored = list(everything_read(ResultFolder(out)))
    files = sorted(path for path in out.rglob("*") if path.suffix in (".parquet", ".json"))
    assert len(files) == 6 + 12
    refused = 0
    for _ in range(count):
        path = rng.choice(files)
        before = path.read_bytes()
        flip(path, rng)
        try:
            if "units" in path.parts:
                ResultFolder(out).read_unit(path.parent.name, path.stem)
            else:
                assert all(map(pa.Table.equals, everything_read(ResultFolder(out)), stored))
        except BadFolder:
            refused += 1
        path.write_bytes(before)
    assert refused > 0.9 * count  # the others are spaces of study.json
    assert all(map(pa.Table.equals, everything_read(ResultFolder(out)), stored))


def test_damaged_units_are_set_aside_and_measured_anew(tiny: Path, finished: Path, unfinished: Path) -> None:
    rng = random.Random(0)
    folder, heard = ResultFolder(unfinished), Heard()
    flip(folder.unit_path("attention", "mless-00002"), rng)
    folder.unit_path("dilution", "none-00001").write_bytes(b"garbage")
    damaged = folder.unit_path("attention", "mless-00002").read_bytes()
    assert run_tiny(tiny, unfinished, heard).folder == unfinished
    assert tables_of(unfinished) == tables_of(finished)
    said = "unit units/attention/mless-00002.parquet is refused: it is damaged: its checksum does not match its content; set aside as "
    assert f"{said}set-aside/units/attention/mless-00002.parquet, and measured anew" in heard.lines
    assert (unfinished / "set-aside" / "units" / "attention" / "mless-00002.parquet").read_bytes() == damaged


@pytest.mark.parametrize("stranger", ["condition", "item", "table", "study"])
def test_a_copied_unit_is_refused(tiny: Path, finished: Path, unfinished: Path, tmp_path: Path, stranger: str) -> None:
    folder, heard = ResultFolder(unfinished), Heard()
    place = folder.unit_path("attention", "mless-00002")
    if stranger == "study":
        with units_kept():
            run_tiny(tiny, tmp_path / "other", seed=1, conditions="none,mless")
        source = ResultFolder(tmp_path / "other").unit_path("attention", "mless-00002")
    else:
        table = "dilution" if stranger == "table" else "attention"
        source = folder.unit_path(
            table, {"condition": "none-00002", "item": "mless-00001"}.get(stranger, "mless-00002")
        )
    shutil.copyfile(source, place)
    run_tiny(tiny, unfinished, heard)
    assert any("attention/mless-00002.parquet is refused: it holds another unit: " in line for line in heard.lines)
    assert tables_of(unfinished) == tables_of(finished)


@pytest.mark.parametrize(
    ("how", "table"),
    [
        *(("no rows", table) for table in TABLES),
        *(
            pytest.param(how, table, marks=[] if table in ("attention", "retained") else [pytest.mark.slow])
            for how in ("garbage", "another's")
            for table in TABLES
        ),
    ],
)
def test_a_table_that_is_not_the_stored_one_is_not_already_stored(
    tiny: Path, finished: Path, tmp_path: Path, table: str, how: str
) -> None:
    out = tmp_path / "r"
    shutil.copytree(finished, out)
    file = out / f"{table}.parquet"
    if how == "no rows":
        pq.write_table(pq.read_table(file).slice(0, 0), file)
    elif how == "garbage":
        file.write_bytes(b"PAR1garbagePAR1")
    else:
        shutil.copyfile(out / f"{'shares' if table != 'shares' else 'retained'}.parquet", file)
    why = rf"{table}\.parquet is damaged, or not the table that was stored: .*; restore it from a copy, or remove it and run"
    with pytest.raises(BadFolder, match=why):
        run_tiny(tiny, out)
    if table == "retained":
        with pytest.raises(BadFolder, match=why):
            verdict_lines(out)
    file.unlink()  # the way out
    run_tiny(tiny, out)
    assert tables_of(out) == tables_of(finished)


def test_a_study_json_edited_by_hand_is_refused(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    shutil.copytree(finished, out)
    text = (out / "study.json").read_text()
    (out / "study.json").write_text(text.replace('"length": 5', '"length": 6'))
    with pytest.raises(BadFolder, match=r"study\.json is damaged, or was changed by hand: .*restore it from a copy"):
        verdict_lines(out)


# ---- changed weights -----------------------------------------------------------------------------------------------------


def test_changed_weights_are_another_study(tiny: Path, finished: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "tiny", tmp_path / "r"
    shutil.copytree(tiny, model)
    shutil.copytree(finished, out)
    assert run_tiny(model, out).computed == 0
    file = model / "model.safetensors"
    weights, stat = load_file(file), file.stat()
    key = next(key for key in weights if "layers.0." in key and "up_proj" in key)
    weights[key][: len(weights[key]) // 2] *= 5
    save_file(weights, file, metadata={"format": "pt"})
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(BadFolder, match=r"holds another study .*: it differs in model's weights; choose another --out"):
        run_tiny(model, out)
    not_finished(out)
    with pytest.raises(BadFolder, match="it differs in model's weights"):
        run_tiny(model, out)


def test_a_gguf_of_the_same_size_and_time_is_another_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hashing, "_SETTLED_NS", -(10**9))  # remember a file that was written just now too
    file, out = write_gguf(tmp_path / "x" / "tiny.gguf"), tmp_path / "r"
    run_tiny(file, out)
    assert run_tiny(file, out).computed == 0
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-40_000, os.SEEK_END)
        bytes_there = opened.read(4)
        opened.seek(-40_000, os.SEEK_END)
        opened.write(bytes((bytes_there[0] ^ 1, *bytes_there[1:])))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    with pytest.raises(BadFolder, match=r"it differs in .*model's weights"):
        run_tiny(file, out)


# ---- names that could collide --------------------------------------------------------------------------------------------


def test_conditions_with_similar_names_have_their_own_units(tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "r", **LENGTHS)
    prompts = pq.read_table(tmp_path / "r" / "prompts.parquet").to_pylist()
    attention = pq.read_table(tmp_path / "r" / "attention.parquet").to_pylist()
    lengths = {(row["condition"], row["item"]): len(row["token_ids"]) for row in prompts}
    assert len({lengths[condition, prompts[0]["item"]] for condition in LENGTHS["conditions"]}) == 4
    assert all(len(row["received"]) == lengths[row["condition"], row["item"]] for row in attention)


def test_names_of_units_never_collide() -> None:
    names = [
        "dots",
        "dots.",
        "x",
        "x-",
        "X",
        "x.",
        "-x",
        "a b",
        "a-b",
        "a/b",
        "ü",
        "unnamed",
        "~",
        "x" * 300,
        "x" * 301,
        ".",
    ]
    made = [unit_name(name, number).lower() for name in names for number in (0, 1, 99_999)]
    assert len(set(made)) == len(made)
    assert max(map(len, made)) < 100
    assert not any(set(name) & set('/\\:*?"<>|') for name in made)
    assert unit_name("mless", 1) == "mless-00002"


# ---- a folder that goes away ---------------------------------------------------------------------------------------------


class Removing(Heard):
    """Removes the folder once so many units are stored."""

    def __init__(self, out: Path, what: str) -> None:
        super().__init__()
        self._out, self._what = out, what

    def step(self, what: str, done: int, total: int, workers: str = "") -> None:
        if what.startswith("attention") and done == 4 and self._out.exists():
            if self._what == "folder":
                shutil.rmtree(self._out)
            elif self._what == "folder, made again":
                shutil.rmtree(self._out)
                self._out.mkdir()
            else:
                shutil.rmtree(self._out / "units", ignore_errors=True)  # it may not have been made yet
                os.unlink(self._out / "study.json")


@pytest.mark.parametrize("what", ["folder, made again", "content", pytest.param("folder", marks=pytest.mark.slow)])
def test_a_folder_removed_while_its_study_runs_can_be_made_again(
    tiny: Path, finished: Path, tmp_path: Path, what: str
) -> None:
    out = tmp_path / "r"
    with pytest.raises(BadFolder, match=r"was removed or replaced while its study ran.*run the same command again"):
        run_tiny(tiny, out, Removing(out, what), batch_size=1)
    assert what == "content" or not out.exists() or not any(out.iterdir())
    assert run_tiny(tiny, out, batch_size=1).computed == 6
    assert pq.read_table(out / "retained.parquet").num_rows == pq.read_table(finished / "retained.parquet").num_rows


def test_units_without_a_study_json_are_set_aside(tiny: Path, finished: Path, unfinished: Path) -> None:
    (unfinished / "study.json").unlink()
    heard = Heard()
    assert run_tiny(tiny, unfinished, heard).computed == 6
    assert any("holds units, but no study.json: they are set aside as set-aside/units" in line for line in heard.lines)
    assert len(list((unfinished / "set-aside").rglob("*.parquet"))) == 12
    assert tables_of(unfinished) == tables_of(finished)


def test_a_lock_that_is_a_link_is_not_followed(tiny: Path, tmp_path: Path) -> None:
    out, target = tmp_path / "r", tmp_path / "target"
    out.mkdir()
    (out / ".lock").symlink_to(target)
    with pytest.raises(BadFolder, match=r"\.lock is a symbolic link.*remove the link"):
        run_tiny(tiny, out)
    assert not target.exists()
