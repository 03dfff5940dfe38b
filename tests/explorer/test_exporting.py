"""The explorer as one file: nothing from elsewhere, nothing that ends a script early, its size said and bounded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mless.errors import BadFolder, BadStudy
from mless.explorer import exporting
from mless.explorer.folders import Folders
from mless.explorer.server import page_files
from mless.explorer.views import answer
from mless.results.folder import ResultFolder
from stored_attention import write_attention
from synthetic import write_answers

EVIL = "</script><script>alert(1)</script><!--"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_attention(
        tmp_path_factory.mktemp("exported") / "quick", items=5, layers=2, heads=3, label=EVIL, token=EVIL
    )


def answers_in(page: bytes) -> dict[str, Any]:
    found = re.search(rb'<script id="answers" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_it_holds_the_servers_own_answers(stored: Path) -> None:
    made = exporting.compose([stored], items="2,4", heads=1)
    held = answers_in(made.text)
    assert len(held) == made.views
    folders = Folders([stored], patient=True, elsewhere=True)
    assert all(one.pop("damaged") == [] for one in held["start"]["folders"])
    assert held["start"].pop("left_out") == 0
    for request in ("start", "map?folder=1&queries=original", "map/mass?folder=1", "proof?folder=1"):
        path, _, rest = request.partition("?")
        values = dict(pair.split("=") for pair in rest.split("&") if pair)
        assert held[request] == json.loads(json.dumps(answer(folders, path, values)))
    strips = [request for request in held if request.startswith("strip?")]
    assert {re.search(r"item=(\d+)", one)[1] for one in strips} == {"2", "4"}  # pyright: ignore[reportOptionalSubscript]
    # One head of each of two layers, under two conditions.
    assert len(strips) == 2 * 2 * 2


def test_nothing_in_it_comes_from_elsewhere_or_ends_a_script(stored: Path) -> None:
    text = exporting.compose([stored]).text.decode()
    assert EVIL not in text
    assert text.count("</script>") == 2
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in text
    assert not re.search(r'\b(src|href)="(?!data:)', text)


def test_its_policy_allows_its_own_script_and_style_only(stored: Path) -> None:
    text = exporting.compose([stored], items="none").text.decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy
    for tag, source in (("<script>", "script-src"), ("<style>", "style-src")):
        inner = text.split(tag)[1].split(tag.replace("<", "</"))[0]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{source} 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert "unsafe" not in policy[1]


def test_a_page_that_would_be_too_large_is_refused_with_the_way_out(stored: Path) -> None:
    with pytest.raises(BadStudy, match=r"larger than 0\.11 MB.*--items 1.*--heads 1.*--max-mb 0\.44"):
        exporting.compose([stored], items="all", max_mb=0.11)


def broken(path: Path, table: str) -> Path:
    """The folder with a table of which a byte was changed."""
    content = bytearray((path / f"{table}.parquet").read_bytes())
    content[60:1000] = bytes(940)
    (path / f"{table}.parquet").write_bytes(content)
    return path


def test_a_damaged_table_is_named_and_the_other_folders_are_exported(stored: Path, tmp_path: Path) -> None:
    first = broken(write_attention(tmp_path / "one", items=4, layers=2, heads=2), "attention")
    second = broken(write_answers(tmp_path / "two", items=12), "answers")
    third = broken(write_attention(tmp_path / "three", items=4, layers=1, heads=2), "retained")
    fourth = write_attention(tmp_path / "four", items=4, layers=1, heads=2)
    (fourth / "study.json").write_text("{")
    made = exporting.compose([first, second, stored, third, fourth], heads=1)
    held = answers_in(made.text)
    assert [one.partition(":")[0] for one in made.damaged] == ["one", "two", "three", "four"]
    assert "one/attention.parquet" in made.damaged[0]
    cards = held["start"]["folders"]
    assert [one["state"] for one in cards] == ["finished", "refused", "finished", "refused", "refused"]
    assert [bool(one["damaged"]) for one in cards] == [True, False, False, False, False]
    # The map of a folder whose attention is damaged is sound, and all of the sound folder is there.
    assert "conditions" in held["map?folder=1&queries=original"]
    assert "one/attention.parquet" in held["map/mass?folder=1"]["error"]
    alone = answers_in(exporting.compose([stored], heads=1).text)
    numbered = {one.replace("folder=1", "folder=3") for one in alone}
    assert numbered <= set(held)


def test_where_nothing_is_sound_the_export_is_refused_by_name(tmp_path: Path) -> None:
    path = broken(write_attention(tmp_path / "one", items=4, layers=1, heads=2), "retained")
    with pytest.raises(BadFolder, match=r"nothing can be exported: .*one/retained\.parquet is damaged"):
        exporting.compose([path])


def test_no_path_of_this_machine_is_in_it(tmp_path: Path) -> None:
    """Not of a folder with odd signs in its name, nor of one that is damaged, nor in the command that made it."""
    place = tmp_path / "só <home>\u202e"
    paths = [write_attention(place / name, items=4, layers=1, heads=2) for name in ("one", "two", "three")]
    broken(paths[1], "attention")
    broken(paths[2], "retained")
    folder = ResultFolder(paths[0])
    about = folder.about()
    assert about is not None
    secret = "/home/somebody/models"
    about |= {"command": ["mless", "run", "quick", f"--out={secret}/out", "--model", f"{secret}/tiny"]}
    about |= {"model": {**about["model"], "name": f"{secret}/tiny"}}
    with folder.writing():
        folder.write_manifest(about)
    made = exporting.compose(paths, heads=1)
    text = json.dumps([answers_in(made.text), made.damaged], ensure_ascii=False)
    assert "somebody" not in text
    assert str(tmp_path) not in text
    assert "<home>" not in text
    start = answers_in(made.text)["start"]["folders"][0]
    assert start["command"] == "mless run quick --out=out --model tiny"
    assert start["path"] == "one"
    assert answers_in(made.text)["proof?folder=1"]["verify"] == "mless verify one"


def test_items_that_are_not_there_are_refused(stored: Path) -> None:
    with pytest.raises(BadStudy, match="no item 6: the largest folder's items are 1 to 5"):
        exporting.compose([stored], items="6")
    with pytest.raises(BadStudy, match="cannot read"):
        exporting.compose([stored], items="first")


def test_modules_that_cannot_be_put_together_are_refused() -> None:
    files = {"main.js": 'import { a } from "./other.js";\na();\n', "other.js": "export function a() {}\n"}
    assert "const { a } = module_other;" in exporting.bundle(files)
    with pytest.raises(ValueError, match="not understood"):
        exporting.bundle(files | {"other.js": "export default 1;\n"})
    with pytest.raises(ValueError, match="in a circle"):
        exporting.bundle(files | {"other.js": 'import { b } from "./main.js";\nexport function a() {}\n'})


def test_every_module_is_in_it_once() -> None:
    files = {name: content.decode() for name, content in page_files().items()}
    script = exporting.bundle(files)
    for name in files:
        if name.endswith(".js"):
            assert script.count(f"const module_{name.removesuffix('.js')} = ") == 1, name
