"""`mless show` and `mless export` as they are typed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from command_line import Command, refused

from stored_attention import write_attention


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_attention(tmp_path_factory.mktemp("shown") / "quick", items=4, layers=2, heads=2)


def test_show_prints_an_address_serves_it_and_ends_with_ctrl_c(shown: Path) -> None:
    command = [sys.executable, "-m", "mless", "show", str(shown), "--no-browser"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
        # Tests that run in the background of a shell have Ctrl-C switched off, and hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", process.stdout.readline())
        assert address
        with urllib.request.urlopen(address[0] + "api/start") as reply:
            assert b"SmolLM2-135M-Instruct" in reply.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert out == "ended\n"


def test_show_refuses_what_is_no_result_folder(command: Command, tmp_path: Path) -> None:
    refused(command("show", tmp_path, "--no-browser"), "holds no study.json")
    refused(command("show", tmp_path / "a", tmp_path / "b", "--no-browser"), "b holds no study.json")


def test_show_of_the_folder_above_names_the_result_folders_in_it(command: Command, shown: Path) -> None:
    refused(command("show", shown.parent, "--no-browser"), f"give one or more of them: {shown}")


def test_show_of_tables_without_their_study_says_what_is_missing(command: Command, shown: Path, tmp_path: Path) -> None:
    lost = shutil.copytree(shown, tmp_path / "lost")
    (lost / "study.json").unlink()
    refused(
        command("show", lost, "--no-browser"),
        "attention.parquet is there without the study.json it belongs to: copy that too, or run the study again",
    )


def test_export_says_the_size_before_it_writes(command: Command, shown: Path, tmp_path: Path) -> None:
    found = command("export", shown, "-o", tmp_path / "page.html", "--items", "1")
    assert found.code == 0
    size = (tmp_path / "page.html").stat().st_size
    first, last = found.out.splitlines()
    assert re.search(rf"page\.html: {size / 1e6:.1f} MB, \d+ views", first)
    assert last.startswith("page: ")


def test_export_writes_nothing_that_is_too_large(command: Command, shown: Path, tmp_path: Path) -> None:
    found = command("export", shown, "-o", tmp_path / "page.html", "--items", "all", "--max-mb", "0.1")
    refused(found, "allow more with --max-mb")
    assert re.search(r"it holds \d+ views so far", found.err)
    assert not (tmp_path / "page.html").exists()


def test_export_names_what_is_damaged_and_writes_the_rest(command: Command, shown: Path, tmp_path: Path) -> None:
    spoiled = write_attention(tmp_path / "spoiled", items=4, layers=1, heads=2)
    (spoiled / "attention.parquet").write_bytes(b"no table")
    found = command("export", shown, spoiled, "-o", tmp_path / "page.html", "--items", "1")
    assert found.code == 0
    assert "left out, damaged: spoiled: spoiled/attention.parquet" in found.out
    assert (tmp_path / "page.html").exists()
