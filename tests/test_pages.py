"""The pages: the generated ones are up to date, links lead somewhere, commands can be read, quoted messages are still the code's own."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from mless.cli import app
from mless.study import load_study

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
]


def _text_outside_code(page: Path) -> str:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def _anchors(page: Path) -> set[str]:
    """The anchors GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_generated_pages_are_up_to_date():
    # In a process of its own: here annotations are checked while tests run, and look otherwise.
    made = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_pages.py"), "--check"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    text = _text_outside_code(page)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for target in targets:
        if re.match(r"[a-z][a-z0-9+.-]*:|//", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}, which does not exist"
        assert found.is_relative_to(ROOT), f"{page.name} links to {target}, outside the repository"
        if anchor and found.suffix == ".md":
            assert anchor in _anchors(found), f"{page.name} links to {target}, but {found.name} has no such heading"


def test_the_readme_can_be_read_in_three_minutes() -> None:
    # Further pages are for whatever does not fit.
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


def _commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks that call mless."""
    blocks = re.findall(
        r"^```(?:bash|console)\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("mless ")]


WITH_COMMANDS = [page for page in PAGES if _commands(page)]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_on_the_pages_can_be_read(page: Path) -> None:
    root: Any = typer.main.get_command(app)
    for line in _commands(page):
        words = shlex.split(line, comments=True)[1:]
        if "…" in line or "|" in words or words[0].startswith("--"):
            continue  # shortened, or an option of mless itself
        assert words[0] in root.commands, line
        try:
            given = root.commands[words[0]].make_context(words[0], words[1:]).params
        except Exception as fault:  # noqa: BLE001 - whatever typer says, with the line it is about
            pytest.fail(f"{page.name}: {line}: {fault}")
        study = given.get("study") or given.get("name")
        if words[0] in ("run", "figure") and not study.endswith(".toml"):
            load_study(study)


def test_the_tutorial_and_the_how_to_pages_have_commands() -> None:
    named = {page.stem for page in WITH_COMMANDS}
    assert {"tutorial", "gallery", "howto-model", "howto-data", "howto-filler", "howto-cluster", "install"} <= named


def _messages_of_the_code() -> list[str]:
    """Every text in the package, with … where a value is put in."""
    found: list[str] = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_quoted_in_adding_a_model_are_the_codes_own():
    page = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(quoted) >= 15
    messages = _messages_of_the_code()
    for quote in quoted:
        assert any(quote in message for message in messages), f"no message of mless reads: {quote}"
