"""The site of the docs: every page is in its navigation, it is built, links lead somewhere, nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = runpy.run_path(str(ROOT / "docs" / "make_site.py"))
PYTHON = os.environ.get("MLESS_SITE_PYTHON", str(ROOT / ".venv-site" / "bin" / "python"))


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [page for pages in SITE["NAV"].values() for page in pages]
    assert len(listed) == len(set(listed))
    there = {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")}
    assert {page for page in listed if page.startswith("docs/")} <= there <= set(listed)


def adapted(text: str, tmp_path: Path, source: str = "docs/usage.md") -> str:
    return SITE["adapted"](text, source, SITE["sources"](), tmp_path)


def test_links_out_of_docs_stay_in_the_site(tmp_path: Path) -> None:
    text = "[a](../README.md#read-on) [b](method.md) [c](../examples/cluster.slurm) [d](https://example.org/x.md) [e](#f) `[g](h.md)`"
    assert adapted(text, tmp_path) == (
        "[a](index.md#read-on) [b](method.md) [c](files/examples/cluster.slurm) [d](https://example.org/x.md) [e](#f) `[g](h.md)`\n"
    )
    assert (tmp_path / "files/examples/cluster.slurm").read_bytes() == (ROOT / "examples/cluster.slurm").read_bytes()
    assert adapted("![p](docs/pictures/map.png)", tmp_path, "README.md") == "![p](pictures/map.png)\n"


def test_a_link_named_by_its_file_has_the_pages_title(tmp_path: Path) -> None:
    text = "See [method.md](method.md#spans), [docs/arm.md](arm.md), [how](method.md) and `[arm.md](arm.md)`."
    assert adapted(text, tmp_path) == (
        "See [Method](method.md#spans), [ARM](arm.md), [how](method.md) and `[arm.md](arm.md)`.\n"
    )


@pytest.mark.parametrize("target", ["nowhere.md", "../tests/tiny.pyc", "../docs"])
def test_a_link_to_no_page_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"docs/usage\.md links to .*neither a page of the navigation nor another file"
    ):
        adapted(f"[x]({target})", tmp_path)


def test_lists_and_tables_get_their_blank_line_but_code_does_not(tmp_path: Path) -> None:
    text = "Words:\n* one\n  * two\n\n<!-- note -->\n| a | b |\n|---|---|\n\n```\nwords\n* as it is\n| x |\n```\n"
    assert adapted(text, tmp_path) == (
        "Words:\n\n* one\n    * two\n\n<!-- note -->\n\n| a | b |\n|---|---|\n\n```\nwords\n* as it is\n| x |\n```\n"
    )


def test_what_a_page_would_load_from_outside_is_found(tmp_path: Path) -> None:
    page = '<a href="https://example.org">fine</a><link rel=stylesheet href=//cdn.example/x.css><script src="https://cdn.example/x.js"></script>'
    (tmp_path / "index.html").write_text(f'{page}<img src="own.png">')
    (tmp_path / "x.css").write_text("@import 'https://fonts.example/y'; a { background: url(own.png) }")
    assert list(SITE["loads_from_outside"](tmp_path)) == [
        "index.html: //cdn.example/x.css",
        "index.html: https://cdn.example/x.js",
        "x.css: https://fonts.example/y",
    ]


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="here">x</h1><a href="#here"></a><a href="#gone"></a><a href="b.html#there"></a>'
    )
    (tmp_path / "b.html").write_text(
        '<h2 id="there">y</h2><a href="c.html"></a><a href="index.html#nor"></a><img src="d.png">'
    )
    assert list(SITE["broken_links"](tmp_path)) == [
        "b.html: c.html",
        "b.html: index.html#nor",
        "b.html: d.png",
        "index.html: #gone",
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    if not Path(PYTHON).exists():
        pytest.fail(f"{PYTHON} is not there; `make test-site` installs what the site needs")
    folder = tmp_path_factory.mktemp("site") / "built"
    done = subprocess.run(
        [PYTHON, str(ROOT / "docs" / "make_site.py"), str(folder)], capture_output=True, text=True, check=False
    )
    return folder / "html", done


@pytest.mark.site
def test_the_site_is_built_without_a_fault(built: tuple[Path, Any]) -> None:
    folder, done = built
    assert (done.returncode, done.stderr) == (0, "")
    assert {Path(name).stem for name in SITE["sources"]().values()} <= {path.stem for path in folder.glob("*.html")}
    assert not list(SITE["broken_links"](folder))
    assert not list(SITE["loads_from_outside"](folder))


@pytest.mark.site
def test_formulas_are_mathml_and_all_of_them(built: tuple[Path, Any]) -> None:
    folder, _ = built
    pages = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.html")}
    written = re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", (ROOT / "docs" / "method.md").read_text(), flags=re.DOTALL)
    assert pages["method"].count("<math ") == len(written) > 50
    for name, page in pages.items():
        assert page.count("<math ") == page.count('class="arithmatex"'), name
        assert 'arithmatex">\\' not in page, name


@pytest.mark.site
def test_tables_and_lists_came_out(built: tuple[Path, Any]) -> None:
    folder, _ = built
    for path in folder.glob("*.html"):
        page = path.read_text(encoding="utf-8")
        assert "<p>|" not in page, path.name
        # A tokenizer's <s> that got out of its code would strike out the rest of the page.
        assert not re.search(r"<(s|del|unused\d+|bos)>", page), path.name
