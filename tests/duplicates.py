"""Part of `make lint`: no two places in `src` of more than ten lines say the same. pylint's search, without its slow parts."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from pylint.checkers.symilar import Symilar

#: Functions that take the place of each other share one signature, so signatures do not count.
SIGNATURE = re.compile(r"^def \w+\(\n.*?^\) -> [^\n]*:\n", re.MULTILINE | re.DOTALL)


def without_signatures(text: str) -> str:
    """The same with blank lines in their place, so that line numbers stay."""
    return SIGNATURE.sub(lambda found: "\n" * found[0].count("\n"), text)


def main() -> int:
    search = Symilar(min_lines=11, ignore_comments=True, ignore_docstrings=True)
    for file in sorted(Path("src").rglob("*.py")):
        search.append_stream(str(file), io.StringIO(without_signatures(file.read_text("utf-8"))))
    report = io.StringIO()
    with redirect_stdout(report):
        search.run()
    if "duplicates=0 " in report.getvalue():
        return 0
    print(report.getvalue(), "lines that stand twice: let one place say it", sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
