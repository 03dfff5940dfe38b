"""Build the site of the pages in docs/: plain HTML in build/site/html, with nothing loaded from elsewhere.

python docs/make_site.py            in an environment with requirements-site.txt (`make site`)
python docs/make_site.py FOLDER     build there instead

The pages stay as they are on a forge. A copy of them is adapted to what Zensical reads (links out of docs/, blank lines, indents), built, and
its formulas are made MathML, which browsers draw without a script.
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"

# Part → its pages, as they lie in the repository. Every page of docs/ is in here once; a test holds it to that.
NAV: dict[str, tuple[str, ...]] = {
    "Start": ("README.md", "docs/tutorial.md", "docs/glossary.md", "docs/gallery.md", "docs/explorer.md"),
    "How to": (
        "docs/howto-model.md",
        "docs/howto-data.md",
        "docs/howto-filler.md",
        "docs/howto-cluster.md",
        "docs/howto-polars.md",
        "docs/install.md",
    ),
    "Use": (
        "docs/usage.md",
        "docs/results.md",
        "docs/compare.md",
        "docs/engines.md",
        "docs/integrations.md",
        "docs/cluster.md",
        "docs/scale.md",
        "docs/tuning.md",
    ),
    "Findings": ("docs/findings.md",),
    "Method": (
        "docs/method.md",
        "docs/statistics.md",
        "docs/accuracy-statistics.md",
        "docs/likelihood.md",
        "docs/placebo.md",
        "docs/dose.md",
        "docs/multiverse.md",
        "docs/cause.md",
        "docs/activations.md",
        "docs/affine.md",
        "docs/arm.md",
        "docs/extraction.md",
        "docs/grading.md",
        "docs/kernels.md",
    ),
    "Reference": (
        "docs/cli.md",
        "docs/api.md",
        "docs/models.md",
        "docs/adding-a-model.md",
        "docs/limits.md",
        "docs/support.md",
        "benchmarks/README.md",
        "benchmarks/tried.md",
    ),
    "Project": ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
}

_NAMES = {"README.md": "index.md", "benchmarks/README.md": "speed.md"}
_LINK = re.compile(r"(\]\(\s*<?)([^)\s>]+)")
#: A link whose words are a file's name.
_NAMED = re.compile(r"\[[\w./-]+\.md(\]\(\s*<?([^)\s>#]+))")
_FENCE = re.compile(r"^ *(```|~~~)")
_ITEM = re.compile(r"( *)([*-]|\d+\.) ")


def sources() -> dict[str, str]:
    """Path in the repository → name of the page in the site."""
    listed = [page for pages in NAV.values() for page in pages]
    missing = [page for page in listed if not (ROOT / page).exists()]
    if missing:
        raise SystemExit(f"docs/make_site.py lists pages that are not there: {', '.join(missing)}")
    return {page: _NAMES.get(page, Path(page).name.lower()) for page in listed}


def stage(folder: Path) -> None:
    """Write everything that Zensical needs into `folder`."""
    pages = folder / "pages"
    pages.mkdir(parents=True)
    names = sources()
    for source, name in names.items():
        (pages / name).write_text(adapted((ROOT / source).read_text(encoding="utf-8"), source, names, pages))
    shutil.copyfile(SITE / "site.css", pages / "site.css")
    parts = ", ".join(
        f"{{ {json.dumps(part)} = {json.dumps([names[page] for page in listed if page in names])} }}"
        for part, listed in NAV.items()
    )
    settings = (SITE / "zensical.toml").read_text(encoding="utf-8")
    (folder / "zensical.toml").write_text(settings.replace("nav = []", f"nav = [{parts}]"), encoding="utf-8")


def adapted(text: str, source: str, names: dict[str, str], pages: Path) -> str:
    """The page as Python-Markdown reads it.

    Links stay within the site, a list or table has a blank line before it, nested lists are indented by four, and what is folded
    (`<details>`) is Markdown too.
    """
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            line = _linked(line, source, names, pages).replace("<details>", '<details markdown="1">')
            before = lines[-1] if lines else ""
            item = _ITEM.match(line)
            if before.strip() and (_opens_table(line, before) or (item and _is_prose(before))):
                lines.append("")
            if item and 0 < len(item[1]) < 4:
                line = f"    {line.lstrip()}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _opens_table(line: str, before: str) -> bool:
    return line.startswith("|") and not before.startswith("|")


def _is_prose(line: str) -> bool:
    return not line.startswith((" ", "|", "#")) and not _ITEM.match(line)


def _linked(line: str, source: str, names: dict[str, str], pages: Path) -> str:
    """Links as they are in the site, with a page's title for a file's name; a file that is no page is copied there."""

    def titled(found: re.Match[str]) -> str:
        there = Path(os.path.normpath(Path(source).parent / found[2])).as_posix()
        return f"[{_title(there)}{found[1]}" if there in names else found[0]

    def target(found: re.Match[str]) -> str:
        if re.match(r"[a-z][a-z0-9+.-]*:|//|#", found[2]):
            return found[0]
        path, mark, anchor = found[2].partition("#")
        there = Path(os.path.normpath(Path(source).parent / path)).as_posix()
        if there in names:
            return f"{found[1]}{names[there]}{mark}{anchor}"
        if not (ROOT / there).is_file() or there.endswith(".md"):
            raise SystemExit(
                f"{source} links to {found[2]}, which is neither a page of the navigation nor another file"
            )
        name = there.removeprefix("docs/") if there.startswith("docs/pictures/") else f"files/{there}"
        copy = pages / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / there, copy)
        return f"{found[1]}{name}"

    return "".join(
        part if part.startswith("`") else _LINK.sub(target, _NAMED.sub(titled, part))
        for part in re.split(r"(`[^`]*`)", line)
        if part
    )


@functools.cache
def _title(page: str) -> str:
    """A page's heading, up to a colon."""
    return (ROOT / page).read_text(encoding="utf-8").partition("# ")[2].splitlines()[0].partition(":")[0]


# ---- formulas --------------------------------------------------------------------------------------------------------

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def with_mathml(page: str) -> str:
    """`page` with MathML in place of every formula in TeX."""
    from latex2mathml.converter import convert

    def drawn(found: re.Match[str]) -> str:
        tag, opening, tex = found.groups()
        tex = html.unescape(tex)
        made = convert(tex, display="block" if opening == "[" else "inline")
        unread = re.search(r"<m[io]>(\\[A-Za-z]+)</m[io]>", made)
        if unread:
            raise SystemExit(f"formula {tex!r}: latex2mathml does not know {unread[1]}")
        # A prime is a small sign already; as an exponent it would be a speck.
        made = made.replace("<mi>&#x02032;</mi>", '<mo class="prime">&#x02032;</mo>')
        return f'<{tag} class="arithmatex" title="{html.escape(tex)}">{made}</{tag}>'

    return _FORMULA.sub(drawn, page)


# ---- what the site loads and where it leads --------------------------------------------------------------------------

# What a browser fetches by itself when it opens the page; a link that a reader may click is not meant.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed|object|link|use)\b[^>]*?\b(?:src|href|data|srcset)=[\"']?([^\"'\s>]+)"
)
_OUTSIDE = re.compile(r"https?:|//")


def loads_from_outside(folder: Path) -> Iterator[str]:
    """Every address outside the site that one of its pages or style sheets would fetch."""
    for path in sorted(folder.rglob("*.html")):
        for target in _FETCHED.findall(path.read_text(encoding="utf-8")):
            if _OUTSIDE.match(html.unescape(target)):
                yield f"{path.relative_to(folder)}: {target}"
    for path in sorted(folder.rglob("*.css")):
        for target in re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", path.read_text(encoding="utf-8")):
            if _OUTSIDE.match(target):
                yield f"{path.relative_to(folder)}: {target}"


def broken_links(folder: Path) -> Iterator[str]:
    """Every link of a page to a file or an anchor that the site does not have."""
    anchors: dict[Path, set[str]] = {}
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.html"))}
    for path, text in pages.items():
        anchors[path] = {html.unescape(one) for one in re.findall(r"\sid=[\"']?([^\"'\s>]+)", text)}
    for path, text in pages.items():
        if path.name == "404.html":  # its links are absolute
            continue
        for target in re.findall(r"<(?:a|link|script|img)\b[^>]*?\b(?:href|src)=[\"']?([^\"'\s>]+)", text):
            target = html.unescape(target)
            if re.match(r"[a-z][a-z0-9+.-]*:|//", target):
                continue
            name, _, anchor = target.partition("#")
            there = Path(os.path.normpath(path.parent / name.partition("?")[0])) if name else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists() or (anchor and there in anchors and anchor not in anchors[there]):
                yield f"{path.relative_to(folder)}: {target}"


def build(folder: Path) -> Path:
    """Build the site in `folder` and return where its pages are."""
    if folder.exists():
        shutil.rmtree(folder)
    stage(folder)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        # Zensical colours every letter by itself.
        raise SystemExit(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr) + "the site could not be built")
    made = folder / "html"
    for page in sorted(made.rglob("*.html")):
        page.write_text(with_mathml(page.read_text(encoding="utf-8")), encoding="utf-8")
    return made


def main(arguments: Sequence[str]) -> int:
    made = build(Path(arguments[0]).resolve() if arguments else ROOT / "build" / "site")
    faults: Iterable[str] = [
        *(f"loads from outside: {one}" for one in loads_from_outside(made)),
        *(f"leads nowhere: {one}" for one in broken_links(made)),
    ]
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"site: {made / 'index.html'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
