"""`mless verify` on good, damaged, unfinished, older and imported folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mless
from growing_tables import grow
from interrupted import about_changed, not_finished, units_kept
from mless.engines import vllm
from mless.engines.base import OutOfMemory
from mless.errors import BadFolder, BadStudy
from mless.results.folder import SEALED, ResultFolder
from mless.results.sealing import encode
from mless.study import load_study, run_study, verifying
from mless.study.bench import StartAgain
from mless.study.identity import unit_name
from mless.study.measuring import Again
from mless.study.verifying import Verification, compare, verification_lines, verify, way_out
from spelling import model_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished folder that still has its units."""
    out = tmp_path_factory.mktemp("whole") / "r"
    with units_kept():
        run_tiny(tiny, out)
    return out


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "units")
    return tmp_path / "r"


def run_tiny(model: Path, out: Path, study: str = "quick", **changes: Any) -> None:
    chosen = {"model": str(model), "limit": 3, "length": 5, "conditions": "none,mless", "prompt": "raw", **changes}
    run_study(load_study(study, chosen), out)


def test_a_good_folder(folder: Path, tiny: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = verify(folder, sample=4)
    assert (found.state, found.good, found.tables, found.units, list(found.damaged)) == ("whole", True, 5, 0, [])
    assert found.recomputed is not None
    assert (found.recomputed.units, found.recomputed.differing, found.recomputed.same_circumstances) == (4, 0, True)
    assert found.recomputed.numbers > 1000
    assert found.made["model"] == str(tiny)
    assert len(found.made["fingerprint"]) == 64
    head, *rest = verification_lines(found)
    assert head == f"{folder}: whole: study.json and 5 tables are as they were written"
    assert any(line.startswith("made from: study quick, model ") and "(3 items)" in line for line in rest)
    assert any(
        line.startswith(f"made by: mless {mless.__version__} (format 4), python ") and "torch" in line for line in rest
    )
    assert any("all equal to the last bit" in line for line in rest)
    assert rest[-1].startswith("Checksums find damage, not forgery")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert mless.verify(folder, sample=0).not_recomputed == "no sample was asked for"


@pytest.mark.parametrize("study", ["activations", "affine"])
def test_other_measurements(tiny: Path, tmp_path: Path, study: str) -> None:
    with units_kept():
        run_tiny(tiny, tmp_path / "r", study)
    found = verify(tmp_path / "r", sample=2)
    assert found.state == "whole"
    assert found.left_over == ["units/: the tables hold them; the same command removes them"]
    assert found.recomputed is not None
    assert (found.recomputed.units, found.recomputed.differing) == (2, 0)
    shutil.rmtree(tmp_path / "r" / "units")
    found = verify(tmp_path / "r", sample=2)
    assert (found.recomputed is None) is (study == "affine")
    assert study != "affine" or "these are removed when a study ends" in found.not_recomputed


def test_a_damaged_folder(folder: Path) -> None:
    content = bytearray((folder / "retained.parquet").read_bytes())
    content[len(content) // 2] ^= 4
    (folder / "retained.parquet").write_bytes(content)
    (folder / "shares.parquet").unlink()
    (folder / "notes.txt").write_text("mine")
    found = verify(folder)
    assert (found.state, found.good) == ("damaged", False)
    assert len(found.damaged) == 2
    lines = verification_lines(found)
    assert "damaged: 2 faults in" in lines[0]
    assert any("retained.parquet is damaged" in line for line in lines)
    assert any("shares.parquet is missing; restore it" in line for line in lines)
    assert "also there: notes.txt: not listed in study.json" in lines
    assert "not computed again: the folder is damaged" in lines
    (folder / "study.json").write_text((folder / "study.json").read_text().replace('"seed": 0', '"seed": 1'))
    found = verify(folder)
    assert (found.state, len(found.damaged)) == ("damaged", 1)


def test_an_unfinished_folder(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    shutil.copytree(finished, out)
    not_finished(out)
    ResultFolder(out).unit_path("attention", "mless-00003").unlink()
    found = verify(out)
    assert (found.state, found.good, found.units, found.units_needed) == ("unfinished", False, 11, 6)
    assert found.recomputed is not None
    assert found.recomputed.differing == 0
    assert ": go on with: mless run quick " in way_out(found)
    assert f" --out {out} " in way_out(found), "the folder was copied"
    shutil.copyfile(
        ResultFolder(out).unit_path("attention", "none-00001"), ResultFolder(out).unit_path("attention", "mless-00001")
    )
    found = verify(out)
    assert found.state == "damaged"
    assert "it holds another unit: unit 'none-00001' instead of 'mless-00001'" in found.damaged[0]


def test_forged_numbers_are_found_by_computing_them_again(folder: Path) -> None:
    """With new checksums, which whoever writes them can make."""
    about = ResultFolder(folder).manifest() or {}
    keys = [unit_name(condition, number) for condition in about["conditions"] for number in range(3)]
    units = {key: ResultFolder(folder).read_part("attention", key, keys) for key in keys}
    forged, column = units[keys[2]], units[keys[2]].schema.get_field_index("received")
    rows = [[None if v is None else v * 1.5 for v in row] for row in forged["received"].to_pylist()]
    kind = forged.schema.field(column)
    units[keys[2]] = forged.set_column(column, kind, pa.array(rows, kind.type))
    other = ResultFolder(folder.parent / "forged")
    other.write_manifest({})
    grow(other, "attention", units)
    other.write_manifest({})
    shutil.copyfile(other.path / "attention.parquet", folder / "attention.parquet")
    written = other.manifest() or {}
    with about_changed(folder) as about:
        for listed in ("tables", "footers"):
            about[listed]["attention"] = written[listed]["attention"]
    found = verify(folder, sample=6)
    assert (found.state, found.good, found.damaged) == ("differs", False, [])
    assert found.recomputed is not None
    assert found.recomputed.largest > 0.1
    assert "not reproduced" in verification_lines(found)[0]
    assert json.loads(json.dumps(found.content()))["good"] is False


def test_what_cannot_be_computed_again_is_said(folder: Path, tiny: Path, tmp_path: Path) -> None:
    with about_changed(folder) as about:
        about["study"]["model"] = str(tmp_path / "nowhere")
    found = verify(folder)
    assert (found.state, found.recomputed) == ("whole", None)
    assert "no model" in found.not_recomputed
    other = tmp_path / "tiny"
    shutil.copytree(tiny, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    with about_changed(folder) as about:
        about["study"]["model"] = str(other)
    assert "it differs in model's weights" in verify(folder).not_recomputed
    with about_changed(folder) as about:
        about["imported"] = {"none": {"file": "x", "sha256": "0"}}
    assert "imported from another program" in verify(folder).not_recomputed


def test_an_older_folder_can_only_be_read(folder: Path) -> None:
    with about_changed(folder, number=2):
        pass
    found = verify(folder, sample=0)
    assert (found.state, found.good, found.tables) == ("unsealed", True, 5)
    assert "made before there were checksums" in verification_lines(found)[0]
    (folder / "shares.parquet").write_bytes(b"PAR1")
    assert verify(folder, sample=0).state == "damaged"


def test_units_of_an_older_folder_have_no_checksum(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    shutil.copytree(finished, out)
    for file in (out / "units").rglob("*.parquet"):
        file.write_bytes(encode(pq.read_table(file)))
    with about_changed(out, number=2):
        pass
    found = verify(out)
    assert (found.state, found.damaged) == ("unsealed", [])
    assert "made before weights were fully hashed" in found.not_recomputed
    with about_changed(out, number=2) as about:
        about["complete"] = False
    found = verify(out)
    assert (found.state, found.damaged) == ("unfinished", [])
    assert "is not continued" in way_out(found)
    ResultFolder(out).unit_path("attention", "none-00001").write_bytes(b"PAR1")
    (fault,) = verify(out).damaged
    assert "cannot be read" in fault
    assert "run the same command" not in fault


def test_a_folder_that_a_running_study_writes(folder: Path) -> None:
    ResultFolder(folder).unit_path("attention", "none-00001").parent.mkdir(parents=True)
    ResultFolder(folder).unit_path("attention", "none-00001").write_bytes(b"half")
    with ResultFolder(folder).writing():
        found = verify(folder)
    assert (found.state, found.good, found.busy, found.damaged) == ("unfinished", False, True, [])
    assert "being written by a running study" in verification_lines(found)[0]
    assert way_out(found) == f"{folder}: verify it again when the running study has ended"
    assert verify(folder).state == "damaged"


def test_memory_that_is_refused_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Again:
        raise StartAgain from OutOfMemory("8 rows do not fit; use fewer", 8)

    monkeypatch.setattr(verifying, "compute_again", refused)
    found = verify(folder)
    assert (found.state, found.recomputed) == ("whole", None)
    assert found.not_recomputed.startswith("memory was refused (8 rows do not fit)")


def test_texts_of_an_engine_that_promises_none_may_differ() -> None:
    unit: Any = None
    now, kept = ({"replies": pa.table({"text": ["a", last]})} for last in "bc")
    again = Again([(unit, now, kept)], True, "float32")
    about = [{"engine": {"promise": vllm._promise("cuda", "bfloat16", one)}} for one in (True, False)]
    assert [compare(again, promised=verifying._promises_texts(one)).agrees for one in about] == [False, True]
    found = Verification(Path("r"), "whole", 3, 0, None, [], [], {}, compare(again, promised=False))
    assert "1 of the texts are equal, and its engine does not promise" in "".join(verification_lines(found))
    assert verifying._promises_texts({"engine": {"promise": "same tokens for any number of live rows"}})
    assert verifying._promises_texts({})


def test_what_is_no_folder_or_no_sample(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadFolder, match="no result folder"):
        verify(tmp_path / "nothing")
    with pytest.raises(BadStudy, match="0 or more, got -1"):
        verify(folder, sample=-1)


@pytest.mark.parametrize(
    ("same", "changes", "agrees"),
    [
        (True, {}, True),
        (True, {"x": [1.0, 1.0000001]}, True),
        (False, {"x": [1.0, 1.0009]}, True),
        (False, {"x": [1.0, 1.1]}, False),
        (False, {"x": [1.0, None]}, False),
        (False, {"x": [1.0]}, False),
        (True, {"text": ["a", "c"]}, False),
        (False, {"text": ["a", "c"]}, True),
    ],
)
def test_numbers_within_tolerance_and_texts(same: bool, changes: dict[str, Any], agrees: bool) -> None:
    stored = {"x": [1.0, 1.0], "text": ["a", "b"]}
    now = {key: pa.array(value) for key, value in (stored | changes).items()}
    tables = {name: pa.table({name: now[name]}) for name in now}
    kept = {name: pa.table({name: pa.array(value)}) for name, value in stored.items()}
    unit: Any = None
    found = compare(Again([(unit, tables, kept)], same, "float32"))
    assert found.agrees is agrees
    assert (found.differing + found.texts_differing > 0) is bool(changes)


def test_a_folder_whose_inner_folder_is_damaged_does_not_begin_with_whole() -> None:
    def found(name: str, state: str, *inner: Verification) -> Verification:
        return Verification(Path(name), state, 2, 0, None, [], [], {}, inner=inner)

    outer = found("tuned", "whole", found("tuned/dev-1", "whole"), found("tuned/test", "damaged"))
    assert not outer.good
    assert verification_lines(outer)[0].startswith("tuned: not whole: ")
    assert verification_lines(outer)[0].endswith("see test")
    assert way_out(outer).startswith("tuned/test: do not use its numbers"), "it says what to do, not the state again"
    assert verification_lines(found("tuned", "whole", found("tuned/test", "whole")))[0].startswith("tuned: whole: ")


def test_an_unfinished_inner_folder_goes_on_with_the_study_around_it() -> None:
    """Its own command holds all its conditions, and is not what the user gave."""

    def found(name: str, command: str, *inner: Verification) -> Verification:
        made = {"format": SEALED, "command": [*command.split(), "--out", name]}
        return Verification(Path(name), "unfinished", 2, 0, None, [], [], made, inner=inner)

    said = way_out(found("why", "mless run cause", found("why/likelihood", "mless run likelihood --set a=b")))
    assert said == (
        "why: go on with: mless run cause --out why; why/likelihood: goes on when the study that it lies in does"
    )
