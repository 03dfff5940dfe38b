"""How wide a text is, before it is drawn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mless.figures import style


@pytest.mark.parametrize("text", ["m" * 250, "Qwen2.5-0.5B-Instruct/" * 12, "il .," * 40, "ü日" * 60])
def test_a_long_text_is_measured_by_its_signs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outline of 250 signs takes seconds; the sum of their widths is nearly the same."""
    whole = style.text_width(style.shown(text)[:80], style.SMALL)
    assert sum(map(style._advance, style.shown(text)[:80])) * style.SMALL == pytest.approx(whole, rel=0.03)
    longest = 0

    def outline(at: Any, drawn: str, **more: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(drawn))
        return drawn_by(at, drawn, **more)

    drawn_by = style.TextPath
    monkeypatch.setattr(style, "TextPath", outline)
    titles = style.fit_titles([(f"{text}, measured", "Layer 1")], 2.5)
    ((title, _),) = titles.values()
    assert longest <= 80
    assert title.endswith("…\nLayer 1")
    assert style.text_width(title.partition("\n")[0], style.SMALL) <= 2.5


@pytest.mark.parametrize(
    ("file", "environment", "cause"),
    [
        (b"figure.dpi: \xff\xfe\n", {}, "codec can't decode"),
        (b"", {"MPLBACKEND": "nothing"}, "'nothing' is not a valid value"),
    ],
)
def test_broken_settings_of_matplotlib_are_named(
    tmp_path: Path, file: bytes, environment: dict[str, str], cause: str
) -> None:
    (tmp_path / "matplotlibrc").write_bytes(file)
    code = "from mless.errors import BadStudy\ntry:\n    import mless.figures.style\nexcept BadStudy as fault:\n    print(fault)\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert "matplotlib cannot read its settings (" in done.stdout, done.stderr
    assert cause in done.stdout
    assert "mend or remove them: $MPLBACKEND, or a matplotlibrc" in done.stdout
