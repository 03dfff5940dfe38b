"""Spoiled folders of every kind (tests/hostile) in the explorer: answered or refused, nothing executed, nothing from elsewhere, nothing outside served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cases import TABLES, Case, _folders
from ground import make
from running import reseal
from spoiling import copy_of

import mless
from mless.errors import BadFolder, MlessError
from mless.explorer.asking import read_request
from mless.explorer.folders import Folders
from mless.explorer.views import VIEWS, Chosen, answer, view
from stored_attention import EVIL

SECRET = "the-secret-beside-the-folders"
#: Names of the page's views that show a folder, and what each asks for beside it.
PLACES = {
    "map": "", "head": "condition=mless&layer=1&head=1", "strip": "condition=mless&layer=1&head=1&item=1", "answers": "", "answer": "item=1",
    "likelihood": "", "tokens": "item=1", "dose": "", "placebo": "", "multiverse": "", "ladder": "", "causes": "", "chain": "",
    "forest": "", "between": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("hostile") / "ground")


def spoiled(case: Case, ground: Path, place: Path) -> Path:
    path = copy_of(ground / case.row.source, place)
    case.row.spoil(path / case.file, case.rng)
    if case.row.reseal:
        reseal(path)
    return path


def asked_of(path: Path) -> list[str]:
    """What the page asks for of a sound folder of this kind."""
    folders = Folders([path], patient=True)
    found = [one for name in VIEWS for one in view(name).exported(folders, Chosen({1: (1,)}, 1))]
    return list(dict.fromkeys(["start", "proof?folder=1", *found]))[:60]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TABLES)
def test_a_spoiled_folder_is_answered_or_refused(kind: str, ground: Path, tmp_path: Path) -> None:
    """Never a traceback: what cannot be read is one of mless's own refusals."""
    requests = asked_of(ground / kind)
    refused = 0
    for row in (one for one in _folders() if one.source == kind):
        for seed in range(0, row.times, 3):
            path = spoiled(Case(row, seed), ground, tmp_path / f"{row.name}-{seed}")
            try:
                folders = Folders([path], patient=True)
                for request in requests:
                    try:
                        json.dumps(answer(folders, *read_request(request)), allow_nan=False)
                    except MlessError:
                        refused += 1
            except BadFolder:  # no study.json
                refused += 1
            shutil.rmtree(path)
    assert refused > 20


@pytest.fixture(scope="module")
def served(ground: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, int]]:
    """An explorer over spoiled folders of every kind, over folders full of markup, and over some whose files lead out of them."""
    place = tmp_path_factory.mktemp("spoiled")
    (place / "secret.txt").write_text(SECRET)
    paths: list[Path] = []
    for row in _folders():
        for seed in (1, 8):
            path = spoiled(Case(row, seed), ground, place / f"{row.name}-{seed}")
            paths += [path] if (path / "study.json").is_file() else []
    for kind in TABLES:
        path = copy_of(ground / kind, place / f"{kind}-markup")
        about = json.loads((path / "study.json").read_text())
        about |= {"command": EVIL, "study": about["study"] | {"title": EVIL}, "device": {EVIL: EVIL}, "versions": EVIL}
        about["model"] |= {"label": EVIL, "name": EVIL}
        (path / "study.json").write_text(json.dumps(about))
        reseal(path)
        paths.append(path)
        path = copy_of(ground / kind, place / f"{kind}-outside")
        for table in TABLES[kind]:
            (path / f"{table}.parquet").unlink()
            (path / f"{table}.parquet").symlink_to(place / "secret.txt")
        paths.append(path)
    path = copy_of(ground / "quick", place / "study-outside")
    (path / "study.json").unlink()
    (path / "study.json").symlink_to(place / "secret.txt")
    paths.append(path)
    running = mless.show(paths, browser=False)
    yield running, len(paths)
    running.stop()


@pytest.mark.browser
def test_hostile_folders_in_a_browser(opened: Any, served: tuple[Any, int]) -> None:
    running, count = served
    made = opened()
    page, said = made.page, []
    page.on("dialog", lambda box: (said.append(box.message), box.dismiss()))
    page.on("popup", lambda other: said.append(other.url))
    page.on("download", lambda one: said.append(one.url))
    faults: list[str] = []
    page.on("response", lambda reply: faults.append(reply.url) if reply.status >= 500 else None)
    made.go(running.address)
    cards = page.locator("article.card")
    assert cards.count() == count > 100
    assert page.locator(".state.refused").count() > 10
    assert page.locator(".state.finished").count() > 10
    shown = page.evaluate("fetch('api/start').then((reply) => reply.json())")["folders"]
    tried = 0
    for folder in shown:
        kinds = [name for name in folder.get("views", []) if name in PLACES] or ["map"]
        kinds += [
            inner
            for inner, outer in (("head", "map"), ("strip", "map"), ("answer", "answers"), ("tokens", "likelihood"))
            if outer in kinds
        ]
        for name in kinds:
            where = f"{name}?folder={folder['number']}&{PLACES[name]}"
            page.evaluate("(where) => { location.hash = where; }", where)
            page.wait_for_selector(f".view.{name}")
            made.ready()
            tried += 1
            assert "owned" not in page.title(), where
            assert SECRET not in page.inner_text("body"), where
            assert page.locator("img, main script, iframe, object, embed, main style").count() == 0, where
    assert tried > 150
    assert said == []
    assert faults == []
    own = urlsplit(running.address)
    for address in made.requests:
        parts = urlsplit(address)
        assert parts.scheme in ("data", "blob") or parts[:2] == own[:2], address
    # Refusals are said by the browser's console too.
    made.errors[:] = sorted({one for one in made.errors if "Failed to load resource" not in one})
