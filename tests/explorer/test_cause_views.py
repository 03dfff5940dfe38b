"""The numbers behind ladder, map and chain are those of the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cause_folders import write_cause
from mless.errors import BadFolder, MlessError
from mless.explorer.asking import read_request
from mless.explorer.exporting import bundle, compose
from mless.explorer.folders import Folders
from mless.explorer.server import page_files
from mless.explorer.views import VIEWS, Chosen, answer, view, views_of
from mless.results.cause_rows import LINKS, STEPS
from mless.results.caused import StoredCause, shown_at
from synthetic import write_answers, write_likelihood

NAMES = ("ladder", "causes", "chain")


def test_ladder(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "cause", layers=2, metrics=("contrast", "pass@1"))
    folders = Folders([path])
    assert set(NAMES) <= set(views_of(folders[0]))
    found = answer(folders, "ladder", {})
    steps = StoredCause.open(path).steps()
    assert [(row["step"], row["against"], row["metric"], row["delta"]) for row in found["steps"]] == [
        (row.step, row.against, row.metric, row.delta) for row in steps
    ]
    assert [row["sure"] for row in found["steps"]] == [shown_at(row.p_adjusted) for row in steps]
    assert [step for step, _ in found["rungs"]] == list(STEPS[:-1])
    # Every change that adds up has a name.
    assert {step for step, _ in found["changes"]} == {row.step for row in steps if row.adds_up}
    assert {one["name"]: one["by"] for one in found["metrics"]} == {"contrast": 1.0, "pass@1": 100.0}


def test_causes(tmp_path: Path) -> None:
    path = write_cause(
        tmp_path / "cause", layers=3, heads=(4, 2), parts=("residual", "attention-output", "keys-values")
    )
    found = answer(Folders([path]), "causes", {})
    cells = StoredCause.open(path).cells()
    assert found["layers"] == [1, 2, 3]
    assert found["rows"] == [
        ["residual", None],
        ["attention-output", 2],
        ["attention-output", 4],
        ["keys-values", None],
    ]
    assert [(row["effect"], row["share"], row["base"]) for row in found["cells"]] == [
        (row.effect, row.share, row.base) for row in cells
    ]
    assert [row["sure"] for row in found["cells"]] == [shown_at(row.p_adjusted) for row in cells]
    assert {row["base"] for row in found["cells"]} == set(found["bases"])
    assert found["parts"]["keys-values"] == "keys and values"


def test_chain(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "cause", layers=1)
    found = answer(Folders([path]), "chain", {})
    links = StoredCause.open(path).links()
    assert [(row["link"], row["direction"], row["share"], row["note"]) for row in found["rows"]] == [
        (row.link, row.direction, row.share, row.note) for row in links
    ]
    assert [link for link, _ in found["links"]] == list(LINKS)
    assert [row["metric"] for row in found["wholes"]] == ["solution", "contrast"]
    less = answer(Folders([write_cause(tmp_path / "less", layers=1, activation=False)]), "chain", {})
    assert [link for link, _ in less["links"]] == ["attention-output", "elsewhere"]


def test_no_share_is_null_and_not_zero(tmp_path: Path) -> None:
    folders = Folders([write_cause(tmp_path / "cause", whole=0.0, layers=2)])
    assert {row["share"] for row in answer(folders, "causes", {})["cells"]} == {None}
    assert {row["share"] for row in answer(folders, "chain", {})["rows"]} == {None}


@pytest.mark.parametrize("name", NAMES)
def test_another_study_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folders = Folders([write_answers(tmp_path / "answers", items=5)])
    assert name not in views_of(folders[0])
    with pytest.raises(MlessError, match=r"no .*\.parquet"):
        answer(folders, name, {})


@pytest.mark.parametrize(("name", "table"), [("ladder", "ladder"), ("causes", "cause"), ("chain", "chain")])
def test_a_damaged_table_is_refused_by_name(tmp_path: Path, name: str, table: str) -> None:
    path = write_cause(tmp_path / "cause", layers=1)
    (path / f"{table}.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(BadFolder, match=rf"{table}\.parquet"):
        answer(Folders([path]), name, {})


def test_exports_hold_the_three(tmp_path: Path) -> None:
    folders = Folders([write_answers(tmp_path / "answers", items=5), write_cause(tmp_path / "cause", layers=2)])
    asked = [one for name in NAMES for one in view(name).exported(folders, Chosen())]
    assert asked == ["ladder?folder=2", "causes?folder=2", "chain?folder=2"]
    for one in asked:
        json.dumps(answer(folders, *read_request(one)), allow_nan=False)
    page = compose([folder.path for folder in folders]).text.decode()
    for one in asked:
        assert f'"{one}":{{"title"' in page


def test_the_page_knows_every_view_of_the_table() -> None:
    """A name that stands in one table only would be a dead link in the menu."""
    files = {name: content.decode() for name, content in page_files().items()}
    found = re.search(r"export const VIEWS = \{ ([^}]*) \};", files["views.js"])
    assert found is not None
    assert set(VIEWS) - {"proof"} <= set(found[1].split(", "))
    assert "const module_cause =" in bundle(files)


def test_every_name_that_a_module_of_the_page_imports_is_there() -> None:
    """A browser loads nothing at all where one name is missing; an exported file would find it undefined."""
    files = {name: content.decode() for name, content in page_files().items() if name.endswith(".js")}
    given = {
        name: set(re.findall(r"^export (?:async )?(?:function\*?|class|const|let) (\w+)", text, re.MULTILINE))
        for name, text in files.items()
    }
    missing = [
        f"{name}: {one} of {source}"
        for name, text in files.items()
        for names, source in re.findall(r'^import \{ ([^}]+) \} from "\./(\w+\.js)";$', text, re.MULTILINE)
        for one in (part.split(" as ")[0] for part in names.split(", "))
        if one not in given[source]
    ]
    assert missing == []
    assert "go" in given["address.js"]


def test_the_card_says_what_the_inner_studys_control_differs_by_and_opens_nothing_elsewhere(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "cause", layers=2)
    write_likelihood(path / "likelihood")
    (card,) = answer(Folders([path]), "start", {})["folders"]
    assert card["control"].endswith("no number differs from none's. (of the inner study likelihood)")
    (path / "likelihood").rename(tmp_path / "elsewhere")
    (path / "likelihood").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (card,) = answer(Folders([path]), "start", {})["folders"]
    assert card["state"] == "finished"
    assert card["control"] is None
