"""What a notebook shows: frames that cannot reach it, with everything escaped; and the example notebook runs as it stands."""

from __future__ import annotations

import ast
import html
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mless
from dose_folders import write_dose
from mless.capture import Attention
from mless.explorer import exporting, notebooks
from mless.study import Outcome
from mless.values import MASS_NAMES, Prompt, Span
from several_models import answered
from stored_attention import write_attention
from synthetic import write_answers

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_look.ipynb"
HOSTILE = '</iframe><script>alert("1")</script>\u202e" onload="alert(2)'


def shown(value: Any) -> str:
    found = value._repr_html_()
    assert isinstance(found, str)
    return found


def inside(frame: str) -> str:
    """The page in a frame. There is one frame and nothing else."""
    match = re.fullmatch(
        r'<iframe title="[^"<]*" sandbox="(?:allow-scripts)?" [^<>]*srcdoc="([^"<>]*)"></iframe>', frame
    )
    assert match, frame[:300]
    return html.unescape(match[1])


def prompt(item: str = "1", text: str = "What is 1 + 2?") -> Prompt:
    spans = (
        Span("start", 0, 1),
        Span("system", 1, 3),
        Span("filler", 3, 8),
        Span("question", 8, 12),
        Span("end", 12, 13),
    )
    return Prompt(item, "mless", tuple(range(13)), spans, text)


def attention(received: float = 0.1) -> Attention:
    size = (2, 2, 3, 13)
    mass = np.full((2, 3, len(MASS_NAMES)), 1 / len(MASS_NAMES), np.float32)
    mass[1, 2, MASS_NAMES.index("question")] = 0.6
    values = np.full(size, received, np.float32)
    values[..., -1] = np.nan
    count = np.zeros((2, 2, 13), np.int64)
    return Attention(
        prompt(), [1, 2], [1, 2, 3], values, count, values[:, :, 0], mass, {1: "reference", 2: "reference"}
    )


def test_a_result_is_its_page_in_a_frame(tmp_path: Path) -> None:
    frame = shown(Outcome(write_dose(tmp_path / "dose", points=3, items=12), 0, 1))
    page = inside(frame)
    assert 'sandbox="allow-scripts"' in frame
    assert "height: 640px" in frame
    assert frame.isascii()
    assert '<base href="about:srcdoc">' in page
    assert 'data-open="start"' in page
    assert '"dose?folder=1":' in page
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)


def test_a_comparison_opens_at_its_forest(tmp_path: Path) -> None:
    paths = [answered(tmp_path, name, number) for number, name in enumerate(("A", "B"))]
    page = inside(shown(mless.compare(paths)))
    assert 'data-open="forest?folder=1&amp;readout=accuracy"' in page
    assert '"forest?folder=1\\u0026readout=accuracy":' in page


def test_a_prompt_and_a_capture_need_no_script() -> None:
    for value in (prompt(), attention()):
        frame = shown(value)
        page = inside(frame)
        assert 'sandbox=""' in frame
        assert "<script" not in page
        assert "Item 1, condition mless" in page
        assert "filler 5" in page
    page = inside(shown(attention()))
    assert "in L2H3" in page
    assert page.count('class="c"') == 6
    assert page.count("<rect") == 11, "neither the first token nor one that nobody sees has a bar"


def test_a_capture_without_numbers_is_shown() -> None:
    value = attention(received=float("nan"))
    value.mass[:] = np.nan
    assert page_of(value).count("<rect") == 0


def page_of(value: Any) -> str:
    return inside(shown(value))


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    for frame in (
        shown(prompt(item=HOSTILE, text=HOSTILE)),
        shown(Outcome(write_answers(tmp_path / "folder", items=4, text=HOSTILE, label=HOSTILE), 0, 1)),
    ):
        page = inside(frame)
        assert 'alert("1")</script>' not in page
        assert '" onload="' not in re.sub(r"(?s)<script.*?</script>", "", page)
        assert "\u202e" not in frame


def test_a_long_prompt_is_cut() -> None:
    long = Prompt("1", "none", tuple(range(9)), (Span("question", 0, 9),), "word " * 100_000)
    assert len(shown(long)) < 40_000


def test_what_cannot_be_shown_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A display must not raise: a folder that is gone, and one that is too large for a frame."""
    assert "holds no study.json" in shown(Outcome(tmp_path / HOSTILE.replace("/", ""), 0, 0))
    assert "<script" not in shown(Outcome(tmp_path / "<script>", 0, 0))
    monkeypatch.setattr(exporting, "_page", lambda parts: 1 // 0)
    said = shown(Outcome(write_answers(tmp_path / "folder", items=4), 0, 1))
    assert "this cannot be shown here (ZeroDivisionError" in said


def test_a_large_folder_is_shown_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_attention(tmp_path / "folder", items=4, layers=2, heads=2)
    outcome = Outcome(folder, 0, 1)
    whole = inside(shown(outcome))
    assert '"left_out":0' in whole
    assert '"head/curve?' in whole
    # A table of attention that is too large to be read as a whole: its curves and mass are not there, and the rest is.
    monkeypatch.setattr(exporting, "_LONG_BYTES", 1000)
    page = inside(shown(outcome))
    assert "head/curve?" not in page
    assert "map/mass?" not in page
    assert '"strip?' in page
    assert re.search(r'"left_out":[1-9]', page)
    # A page that would be too large.
    monkeypatch.setattr(notebooks, "MOST_MB", len(exporting._page({})) / 1e6 + 0.02)
    small = shown(outcome)
    assert len(inside(small)) < len(page)
    assert '"verdict":' in inside(small)


# ---- the example ---------------------------------------------------------------------------------------------------------


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_the_example_holds_no_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_the_example_runs_and_what_it_shows_are_frames(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells one after the other, as a notebook runs them: the value of a last expression is shown."""
    names: dict[str, Any] = {}
    frames: list[str] = []
    for number, text in enumerate(cells()):
        tree = ast.parse(text)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
            frames += [shown(value)] if hasattr(value, "_repr_html_") else []
    assert [len(inside(frame)) > 1000 for frame in frames] == [True] * 4
    assert "layer 1" in capsys.readouterr().out


@pytest.mark.notebook
@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None, reason="no nbclient; `make test-notebook` installs it"
)
def test_the_example_runs_in_a_real_kernel() -> None:
    nbclient: Any = importlib.import_module("nbclient")
    nbformat: Any = importlib.import_module("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    pages = [out["data"]["text/html"] for cell in notebook.cells for out in cell.get("outputs", ()) if "text/html" in out.get("data", {})]  # fmt: skip
    assert len(pages) == 4
    for page in pages:
        inside("".join(page))
