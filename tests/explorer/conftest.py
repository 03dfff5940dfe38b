"""A real Chromium, and an explorer for it to open."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import mless
from stored_attention import write_attention

# Spoiled folders are those of the tests beside these.
sys.path.append(str(Path(__file__).parents[1] / "hostile"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by playwright."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        pytest.fail("no chromium was found on this machine; install one: apt install chromium")
    with sync_playwright() as driver:
        # Chromium's own sandbox does not start as root, which containers often are.
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_attention(tmp_path_factory.mktemp("browsed") / "quick", items=12, layers=4, heads=6)


@pytest.fixture(scope="session")
def address(attention: Path) -> Iterator[str]:
    """An explorer over one folder."""
    running = mless.show(attention, browser=False)
    yield running.address
    running.stop()


class Opened:
    """A page, every address it asked for, and every error it met."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda one: self.requests.append(one.url))
        page.on("pageerror", lambda fault: self.errors.append(str(fault)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)

    def go(self, address: str) -> Any:
        self.page.goto(address)
        self.ready()
        return self.page

    def ready(self) -> None:
        self.page.wait_for_selector("main[aria-busy='false']")


@pytest.fixture
def served() -> Iterator[Callable[..., str]]:
    """Starts explorers and gives their addresses. They end after the pages, which may still ask for something when a test ends."""
    with ExitStack() as stack:

        def start(*folders: Any) -> str:
            running = mless.show(*folders, browser=False)
            stack.callback(running.stop)
            return running.address

        yield start


@pytest.fixture
def opened(browser: Any, served: Callable[..., str]) -> Iterator[Callable[..., Opened]]:
    """Opens pages as a person with these settings would; each must end without an error."""
    contexts: list[tuple[Any, Opened]] = []

    def make(**settings: Any) -> Opened:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 860}} | settings))
        context.set_default_timeout(60_000)
        made = Opened(context.new_page())
        contexts.append((context, made))
        return made

    yield make
    for context, made in contexts:
        context.close()
        assert made.errors == []
