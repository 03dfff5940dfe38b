"""Make the pictures of docs/explorer.md anew: screenshots of the explorer in Chromium, into docs/pictures.

python docs/make_explorer_pictures.py RESULT     (`make pictures` does it for the embedded model's quick study)
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import mless

PICTURES = Path(__file__).parent / "pictures"
HEAD = "folder=1&condition=mless&layer=1&head=7"
#: Name of the picture → what the address says, and the height of what is shown.
VIEWS = {"explorer-map": ("#map?" + HEAD, 640), "explorer-strip": ("#strip?" + HEAD + "&item=1&token=80", 720)}


def main(result: str) -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("no chromium was found; install one: apt install chromium")
    running = mless.show(result, browser=False)
    try:
        with sync_playwright() as driver:
            # Chromium's own sandbox does not start as root, which containers often are.
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
            for name, (view, height) in VIEWS.items():
                page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme="light")
                page.goto(running.address + view)
                page.wait_for_selector("main[aria-busy='false'] canvas, main[aria-busy='false'] .strip")
                page.screenshot(path=PICTURES / f"{name}.png")
                print(f"picture: {PICTURES / name}.png")
    finally:
        running.stop()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
