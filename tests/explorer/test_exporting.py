"""The explorer as one file: nothing from elsewhere, nothing that ends a script early, its size said and bounded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from mless.errors import BadStudy
from mless.explorer import exporting
from mless.explorer.folders import Folders
from mless.explorer.server import page_files
from mless.explorer.views import answer
from stored_attention import write_attention

EVIL = "</script><script>alert(1)</script><!--"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_attention(
        tmp_path_factory.mktemp("exported") / "quick", items=5, layers=2, heads=3, label=EVIL, token=EVIL
    )


def answers_in(page: bytes) -> dict[str, object]:
    found = re.search(rb'<script id="answers" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_it_holds_the_servers_own_answers(stored: Path) -> None:
    made = exporting.compose([stored], items="2,4", heads=1)
    held = answers_in(made.text)
    assert len(held) == made.answers
    folders = Folders([stored], patient=True)
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
