"""A unit exists whole or not at all; a folder has one writer, one study, and a format."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from growing_tables import grow
from mless.errors import BadFolder
from mless.results.folder import FORMAT, ResultFolder, write_atomically


def table(*numbers: int) -> pa.Table:
    texts = pa.array([f"row {n}" for n in numbers], pa.string())
    return pa.table({"n": pa.array(numbers, pa.int32()), "text": texts})


@pytest.fixture
def folder(tmp_path: Path) -> ResultFolder:
    return ResultFolder(tmp_path / "results")


@contextmanager
def child(code: str, *arguments: object) -> Generator[subprocess.Popen[str]]:
    """Another process that runs `code`; killed and reaped whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# ---- units ---------------------------------------------------------------------------------------------------------------


def test_units_there_and_back(folder: ResultFolder) -> None:
    folder.write_unit({"a": table(1), "b": table(2, 3)}, "key")
    assert folder.read_unit("b", "key").equals(table(2, 3))
    assert folder.has_unit(("a", "b"), "key")
    folder.unit_path("a", "key").unlink()
    assert not folder.has_unit(("a", "b"), "key")


_WRITER = """
import sys
from pathlib import Path
import pyarrow as pa
from mless.results.folder import ResultFolder
folder = ResultFolder(Path(sys.argv[1]))
with folder.writing():
    folder.sweep()
    for n in range(100_000):
        rows = pa.table({"n": pa.array([n] * 5000), "noise": pa.array([(n * k) % 9973 for k in range(5000)])})
        folder.write_unit({"first": rows, "second": rows}, f"{n % 40:05d}")
        if n == 0:
            print("writing", flush=True)  # a slow disk may take longer than any sleep to get here
"""


def test_a_killed_writer_leaves_only_whole_units(folder: ResultFolder) -> None:
    rng = random.Random(0)
    seen = 0
    for _ in range(4):
        with child(_WRITER, folder.path) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            time.sleep(rng.uniform(0.0, 0.4))
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        for path in (folder.path / "units").rglob("*.parquet"):
            found = folder.read_unit(path.parent.name, path.stem)
            assert found.num_rows == 5000
            assert found["n"].to_pylist() == [found["n"][0].as_py()] * 5000
            seen += 1
    assert seen > 0
    (folder.path / "units" / "first" / ".00001.parquet.x.partial").write_bytes(b"half")
    with folder.writing():
        folder.sweep()
    assert not [path for path in folder.path.rglob("*") if "partial" in path.name]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()  # a folder of that name cannot be replaced by a file
    with pytest.raises(BadFolder, match=r"cannot write .*target: .*; fix that and run the same command again"):
        write_atomically(tmp_path / "target", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_results_are_as_readable_as_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    folder = ResultFolder(tmp_path / "r")
    grow(folder, "t", {"k": table(1)})
    assert (folder.path / "t.parquet").stat().st_mode & 0o777 == 0o666 & ~before


def test_writing_never_touches_the_mask_of_the_process(folder: ResultFolder) -> None:
    """To ask for it is to change it for all threads, and what another one makes meanwhile gets the wrong permissions."""
    called: set[str] = set()

    def note(frame: object, event: str, what: object) -> None:
        if event == "c_call":
            called.add(getattr(what, "__name__", ""))

    sys.setprofile(note)
    try:
        write_atomically(folder.path / "a", b"x")
        grow(folder, "t", {"k": table(1)})
        folder.write_manifest({})
    finally:
        sys.setprofile(None)
    assert {"replace", "fsync"} <= called
    assert "umask" not in called


def test_a_corrupted_unit_is_named(folder: ResultFolder) -> None:
    folder.write_unit({"t": table(1)}, "good")
    folder.write_unit({"t": table(2)}, "bad")
    path = folder.unit_path("t", "bad")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        BadFolder, match=r"unit .*bad\.parquet is refused: .*; run the same command again, and it is measured"
    ):
        folder.read_unit("t", "bad")
    assert folder.read_unit("t", "good") == table(1)


# ---- provenance ----------------------------------------------------------------------------------------------------------


def test_a_manifest_there_and_back(folder: ResultFolder) -> None:
    assert folder.manifest() is None
    folder.write_manifest({"study": {"name": "ünï"}})
    assert folder.manifest() == {"format": FORMAT, "study": {"name": "ünï"}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not readable JSON: .*; the folder is damaged: remove it, or choose another --out"),
        ("", "not readable JSON"),
        ("[]", "was not written by mless; choose another --out"),
        ('{"format": "1"}', "was not written by mless"),
        ("{}", "was not written by mless"),
        (
            json.dumps({"format": FORMAT + 1, "mless": "9.9"}),
            rf"newer mless \(9\.9, format {FORMAT + 1}\); this one reads format {FORMAT}: upgrade mless, or choose another --out",
        ),
    ],
)
def test_manifests_that_are_refused(folder: ResultFolder, content: str, why: str) -> None:
    folder.path.mkdir()
    (folder.path / "study.json").write_text(content)
    with pytest.raises(BadFolder, match=why):
        folder.manifest()
    with pytest.raises(BadFolder, match=why):
        folder.require("retained")


@pytest.mark.parametrize(
    ("number", "prompt", "shown"),
    [
        (1, {"prompt": "chat"}, "before-answer"),
        (1, {}, "before-answer"),  # results of another program, which were ids too
        (1, {"prompt": "raw"}, "end"),
        (1, {"prompt": "text"}, "end"),
        (2, {"prompt": "chat"}, "end"),
    ],
)
def test_what_was_the_end_of_a_chat_prompt_is_before_the_answer_now(
    folder: ResultFolder, number: int, prompt: dict[str, str], shown: str
) -> None:
    def content(end: str, *words: str) -> dict[str, Any]:
        placed = {"a": end, "b": "before-question"}
        conditions = {name: {"kind": "text", "length": 5, "placement": where} for name, where in placed.items()}
        conditions["none"] = {"kind": "none"}
        study = {"placement": end, "condition": {"a": {"placement": end}, "b": {"placement": None}}, "name": "end"}
        return {"format": number, **prompt, "conditions": conditions, "study": study, "command": ["mless", *words]}

    sets = ("placement={}", 'condition.a.placement="{}"', "filler=end", "placement=endless")
    folder.path.mkdir()
    written = content("end", *(word.format("end") for word in sets))
    (folder.path / "study.json").write_text(json.dumps(written))
    assert folder.manifest() == content(shown, *(word.format(shown) for word in sets))


def test_a_manifest_in_latin_1_is_no_crash(folder: ResultFolder) -> None:
    folder.path.mkdir()
    (folder.path / "study.json").write_bytes(b'{"format": 1, "x": "\xe9"}')
    with pytest.raises(BadFolder, match="not readable JSON"):
        folder.manifest()


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadFolder, match="is a file, not a result folder; choose another --out"):
        ResultFolder(tmp_path / "file").manifest()
    with (
        pytest.raises(BadFolder, match=r"cannot write .*: .*choose another --out"),
        ResultFolder(tmp_path / "file").writing(),
    ):
        pytest.fail("a file was locked as a folder")


def test_tables_that_are_not_there(folder: ResultFolder) -> None:
    with pytest.raises(BadFolder, match=r"no result folder .it has no study\.json.; make one with: mless run STUDY"):
        folder.require("retained")
    folder.write_manifest({})
    with pytest.raises(
        BadFolder, match=r"has no retained\.parquet: its run did not finish; run the same command again"
    ):
        folder.require("retained")
    folder.write_table("own", table(1))
    assert folder.require("own") == folder.path / "own.parquet"


def test_what_a_run_killed_at_its_start_leaves_is_not_foreign(folder: ResultFolder) -> None:
    folder.check_free()
    with folder.writing():
        (folder.path / ".study.json.abc.partial").write_text("{")
    folder.check_free()
    (folder.path / "thesis.tex").write_text("mine")
    with pytest.raises(BadFolder, match=r"is not empty and holds no study\.json; choose another --out"):
        folder.check_free()


def test_a_table_that_was_replaced_is_opened_anew(folder: ResultFolder) -> None:
    folder.write_manifest({})
    for value in (1, 2):
        grow(folder, "own", {key: table(value) for key in ("a", "b")})
        folder.write_manifest(folder.manifest() or {})
        assert folder.read_part("own", "b", ["a", "b"]) == table(value)


def test_discarding_takes_only_what_a_run_wrote(folder: ResultFolder) -> None:
    with folder.writing():
        folder.write_manifest({})
        grow(folder, "t", {"k": table(1)})
        folder.write_unit({"t": table(1)}, "k")
        folder.discard()
    assert not folder.path.exists()
    folder.path.mkdir()
    (folder.path / "note.txt").write_text("mine")
    with folder.writing():
        folder.write_manifest({})
        folder.discard()
    assert [entry.name for entry in folder.path.iterdir()] == ["note.txt"]


# ---- one writer ----------------------------------------------------------------------------------------------------------

_HOLDER = """
import sys, time
from pathlib import Path
from mless.results.folder import ResultFolder
with ResultFolder(Path(sys.argv[1])).writing():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_told_and_the_hold_ends_with_the_first(folder: ResultFolder) -> None:
    with child(_HOLDER, folder.path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(BadFolder, match=r"another mless is writing .*; wait for it to end, or choose another --out"),
            folder.writing(),
        ):
            pytest.fail("two writers at once")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with folder.writing():
        folder.write_manifest({})
    assert folder.manifest() is not None


def test_the_hold_ends_on_an_exception(folder: ResultFolder) -> None:
    with pytest.raises(ZeroDivisionError), folder.writing():
        1 / 0  # noqa: B018
    with folder.writing():
        pass


def test_a_place_that_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the working directory's name is no UTF-8."""
    place = tmp_path / os.fsdecode(b"here\xff")
    place.mkdir()
    monkeypatch.chdir(place)
    with pytest.raises(BadFolder, match=r"here\\udcff/r' holds bytes that are no UTF-8 text.*choose another --out"):
        ResultFolder(Path("r")).writing().__enter__()
    assert list(place.iterdir()) == []


def test_a_seed_of_64_bits_is_read_again_and_one_of_more_is_never_written(folder: ResultFolder) -> None:
    folder.write_manifest({"seeds": {"study": 2**63 - 1}})
    assert (folder.manifest() or {})["seeds"] == {"study": 2**63 - 1}
    with pytest.raises(BadFolder, match=r"seeds\.study: expected less than or equal to"):
        folder.write_manifest({"seeds": {"study": 2**63}})
    assert (folder.manifest() or {})["seeds"] == {"study": 2**63 - 1}


@pytest.mark.parametrize("what", ["pipe", "folder", "endless"])
def test_a_unit_that_is_no_file_is_refused_unread(folder: ResultFolder, what: str) -> None:
    folder.write_manifest({})
    folder.write_unit({"own": table(1)}, "a")
    path = folder.unit_path("own", "a")
    path.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "endless": lambda at: os.symlink("/dev/zero", at)}[what](path)
    with pytest.raises(
        BadFolder, match=r"is refused: is a (pipe|folder|device), not a file; run the same command again"
    ):
        folder.read_unit("own", "a")
    assert "not a file; set aside as" in folder.refuse_damaged(["own"], "a")[0]
    assert not os.path.lexists(path)


@pytest.mark.parametrize(
    "inside", ["units", "units/own", "set-aside", "set-aside/units", "set-aside/units/own", ".lock"]
)
def test_nothing_is_written_through_a_link(folder: ResultFolder, tmp_path: Path, inside: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder.path / inside).parent.mkdir(parents=True, exist_ok=True)
    (folder.path / inside).symlink_to(elsewhere)
    way_out = "remove the link" if inside == ".lock" else "move what it points to to this place"
    with pytest.raises(BadFolder, match=f"is a symbolic link.*; {way_out}, or choose another --out"), folder.writing():
        folder.write_unit({"own": table(1)}, "a")
    assert not list(elsewhere.iterdir())
