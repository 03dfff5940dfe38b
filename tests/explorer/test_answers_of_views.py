"""What requests are answered: the numbers of the tables, sliced and aligned."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from mless.errors import BadFolder, BadPrompt
from mless.explorer.asking import NotThere, read_request, request_text
from mless.explorer.folders import Folders, Kept
from mless.explorer.server import prepare
from mless.explorer.slices import sums
from mless.explorer.views import VIEWS, Chosen, answer, view
from mless.figures.curves import measure
from mless.results.folder import ResultFolder
from mless.results.reading import StoredResults
from stored_attention import write_attention
from synthetic import write_answers, write_folder, write_likelihood

HEAD = {"folder": "1", "condition": "mless", "layer": "1", "head": "2"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_attention(tmp_path_factory.mktemp("stored") / "quick")


@pytest.fixture
def folders(stored: Path) -> Folders:
    return Folders([stored], patient=True)


def test_the_start_has_the_verdict_and_where_it_came_from(folders: Folders) -> None:
    one = answer(folders, "start", {})["folders"][0]
    assert one["state"] == "finished"
    assert one["verdict"][0].startswith("SmolLM2-135M-Instruct, 12 items of bundled")
    assert [row["name"] for row in one["conditions"]] == ["none", "mless", "random"]
    assert ["implementations", "forward: sdpa; received: streaming"] in one["facts"]
    assert one["command"] == "mless run quick --out results/quick"
    assert one["views"][:2] == ["start", "map"]


def test_the_map_has_every_cell_of_the_table(folders: Folders, stored: Path) -> None:
    found = answer(folders, "map", {"queries": "original"})
    rows = pq.read_table(stored / "retained.parquet").filter(pc.field("queries") == "original").to_pylist()
    assert (found["layers"], found["columns"]) == ([1, 2, 3], [1, 2, 3, 4])
    for row in rows:
        one = next(part for part in found["conditions"] if part["name"] == row["condition"])
        part, at = (
            (one["layers"], row["layer"] - 1)
            if row["head"] == 0
            else (one["heads"], (row["layer"] - 1) * 4 + row["head"] - 1)
        )
        for name in ("retained", "lo", "hi", "p_adjusted", "epsilon"):
            assert part[name][at] == pytest.approx(row[name], rel=1e-4)
        assert part["verdict"][at] == row["verdict"]


def test_mass_is_the_mean_over_items_of_the_stored_mass(folders: Folders, stored: Path) -> None:
    found = answer(folders, "map/mass", {})
    assert found["complete"]
    mean = StoredResults.open(stored).mass(["none", "mless"], 2)
    for name in ("none", "mless"):
        one = next(part for part in found["conditions"] if part["name"] == name)
        assert (one["read"], one["complete"]) == (12, True)
        for span, value in mean[name].items():
            assert np.mean(one["mass"][span][4:8]) == pytest.approx(value, rel=1e-3, abs=1e-9)


def test_items_of_a_head_are_ranked_by_shift(folders: Folders, stored: Path) -> None:
    found = answer(folders, "head", HEAD)["shifts"]
    where = (
        (pc.field("condition") == "mless")
        & (pc.field("layer") == 1)
        & (pc.field("head") == 2)
        & (pc.field("queries") == "original")
    )
    rows = {row["item"]: row for row in pq.read_table(stored / "shares.parquet").filter(where).to_pylist()}
    assert found["item"][0] == "item-005"
    assert found["number"][0] == 5
    far = [abs(np.log(value)) for value in found["retained"]]
    assert far == sorted(far, reverse=True)
    for item, value in zip(found["item"], found["epsilon"], strict=True):
        assert value == pytest.approx(rows[item]["epsilon"], rel=1e-4)


def test_a_curve_is_the_figures_curve(folders: Folders, stored: Path) -> None:
    found = answer(folders, "head/curve", HEAD)
    drawn = measure(StoredResults.open(stored), ["none", "mless"], [(1, 2)], "original", item=None, omit_first=None)
    assert found["complete"]
    assert set(found["curves"]) == {"without", "with", "text"}
    for role, condition in (("without", "none"), ("with", "mless")):
        wanted = drawn.curve(condition, 1, 2, aligned=True)
        got = found["curves"][role]
        assert found["first"] == wanted.at[0]
        assert len(got["mean"]) == len(wanted.mean)
        for name in ("mean", "lo", "hi"):
            assert [np.nan if one is None else one for one in got[name]] == pytest.approx(
                getattr(wanted, name).tolist(), rel=1e-3, nan_ok=True
            )
        assert got["n"] == wanted.n.tolist()


def test_a_curve_comes_in_parts_and_ends_complete(stored: Path) -> None:
    folders = Folders([stored])
    for _ in range(400):
        found = answer(folders, "head/curve", HEAD)
        assert 0 <= found["read"] <= 12
        if found["complete"]:
            break
        time.sleep(0.01)
    assert found["complete"]
    assert found == answer(Folders([stored], patient=True), "head/curve", HEAD)


def test_the_curves_of_a_head_are_added_up_side_by_side(tmp_path: Path) -> None:
    """So that the page can say "10 of 40 items" of all of them soon, and not of the last one only when the others are complete."""
    folders = Folders([write_attention(tmp_path / "quick", items=40, in_part=4)])
    seen: set[tuple[int, ...]] = set()
    for _ in range(2000):
        added = sums(folders[0], ["none", "mless", "random"], 1)
        assert added is not None
        seen.add(tuple(one.steps for one in added))
        if all(one.complete for one in added):
            break
    assert all(one.complete for one in added)
    assert all(max(steps) - min(steps) <= 1 for steps in seen)


def test_a_strip_is_aligned_token_by_token(folders: Folders, stored: Path) -> None:
    found = answer(folders, "strip", HEAD | {"item": "5"})
    one = (pc.field("item") == "item-005") & (pc.field("layer") == 1) & (pc.field("head") == 2)
    rows = pq.read_table(stored / "attention.parquet").filter(one & (pc.field("queries") == "original")).to_pylist()
    by_name = {row["condition"]: row["received"] for row in rows}
    filler = found["span_names"].index("filler")
    original = [at for at, span in enumerate(found["spans"]) if span != filler]
    assert len(found["spans"]) - len(original) == 20
    values = found["values"]
    assert known([values["without"][at] for at in original]) == pytest.approx(known(by_name["none"]), rel=1e-3)
    assert known(values["with"]) == pytest.approx(known(by_name["mless"]), rel=1e-3)
    natural = known([by_name["random"][at] for at in original])
    assert known([values["text"][at] for at in original]) == pytest.approx(natural, rel=1e-3)
    assert all(values["without"][at] is None for at in range(len(found["spans"])) if at not in original)
    even = values["even_with"][0] / values["even_without"][0]
    assert even == pytest.approx(len(original) / len(found["spans"]), rel=1e-2)
    assert found["tokens"][0] == "<s>"
    assert "\\n" in found["tokens"]  # what cannot be seen is written


def known(values: list[float | None]) -> list[float]:
    """The last token has no later one, so nothing is known of it."""
    assert values[-1] is None
    return [value for value in values[:-1] if value is not None]


def test_prompts_that_do_not_hold_the_same_tokens_are_not_aligned(tmp_path: Path) -> None:
    # This maker numbers the tokens of each prompt anew, so their ids differ.
    folders = Folders([write_folder(tmp_path / "old")], patient=True)
    with pytest.raises(BadPrompt, match="do not hold the same original tokens"):
        answer(folders, "strip", HEAD | {"item": "1"})


def test_a_folder_of_before_has_map_and_curves_too(tmp_path: Path) -> None:
    folders = Folders([write_folder(tmp_path / "old")], patient=True)
    assert answer(folders, "map", {})["columns"] == list(range(1, 10))
    assert answer(folders, "head", HEAD)["shifts"] is None
    assert answer(folders, "head/curve", HEAD)["complete"]


def test_a_proof_names_table_kernel_and_commands(folders: Folders, stored: Path) -> None:
    found = answer(folders, "proof", {"folder": "1"})
    about = json.loads((stored / "study.json").read_text())
    assert found["tables"]["retained"] == about["tables"]["retained"]
    assert found["implementations"] == "forward: sdpa; received: streaming"
    assert found["verify"] == f"mless verify {stored}"


def test_a_running_study_says_how_far_it_is_and_goes_on(tmp_path: Path) -> None:
    path = write_attention(tmp_path / "running", complete=False)
    folders = Folders([path])
    one = answer(folders, "start", {})["folders"][0]
    assert (one["state"], one["stored"], one["units"]) == ("interrupted", 12, 36)
    with ResultFolder(path).writing():
        assert answer(folders, "start", {})["folders"][0]["state"] == "running"


def test_units_in_files_of_their_own_count_too(tmp_path: Path) -> None:
    path = write_attention(tmp_path / "running", complete=False)
    (path / "units" / "attention").mkdir()
    (path / "units" / "attention" / "mless-00001.parquet").write_bytes(b"")
    assert answer(Folders([path]), "start", {})["folders"][0]["stored"] == 13


def test_a_damaged_folder_is_refused_beside_the_others(stored: Path, tmp_path: Path) -> None:
    broken = write_attention(tmp_path / "broken", items=4)
    content = bytearray((broken / "retained.parquet").read_bytes())
    content[200] ^= 1
    (broken / "retained.parquet").write_bytes(content)
    first, second = answer(Folders([broken, stored]), "start", {})["folders"]
    assert first["state"] == "refused"
    assert "checksum" in first["why"]
    assert second["state"] == "finished"


@pytest.mark.parametrize("table", ["shares", "attention"])
def test_a_damaged_slice_is_refused(table: str, tmp_path: Path) -> None:
    broken = write_attention(tmp_path / "broken", items=4)
    content = bytearray((broken / f"{table}.parquet").read_bytes())
    content[60:4000] = bytes(3940)
    (broken / f"{table}.parquet").write_bytes(content)
    folders = Folders([broken], patient=True)
    with pytest.raises(BadFolder, match=rf"{table}\.parquet"):
        answer(folders, "head" if table == "shares" else "head/curve", HEAD)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda table: pa.concat_tables([table, table.slice(3, 1)]), "has a row twice"),
        (lambda table: with_first(table, "item", "item-999"), "has a name that study.json does not list"),
        (lambda table: with_first(table, "head", 99), "has a layer or head that was not captured"),
        (lambda table: with_first(table, "layer", 0), "has a layer or head that was not captured"),
    ],
    ids=["twice", "item", "head", "layer"],
)
def test_shares_that_do_not_fit_the_study_are_refused(
    change: Callable[[pa.Table], pa.Table], match: str, tmp_path: Path
) -> None:
    path = write_attention(tmp_path / "quick", items=4)
    folder = ResultFolder(path)
    about = folder.about()
    assert about is not None
    with folder.writing():
        folder.write_table("shares", change(pq.read_table(path / "shares.parquet")))
        folder.write_manifest(about)
    with pytest.raises(BadFolder, match=match):
        answer(Folders([path]), "head", HEAD)


def with_first(table: pa.Table, column: str, value: object) -> pa.Table:
    """The table with another value in the first row."""
    values = table[column].to_pylist()
    values[0] = value
    return table.set_column(table.column_names.index(column), column, pa.array(values, table.schema.field(column).type))


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("nothing", {}),
        ("start/more", {}),
        ("map", {"folder": "2"}),
        ("map", {"folder": "0"}),
        ("map", {"folder": "-1"}),
        ("map", {"folder": "1e3"}),
        ("map", {"folder": "../../etc"}),
        ("map", {"queries": "all"}),
        ("head", {}),
        ("head", HEAD | {"condition": "none"}),
        ("head", HEAD | {"condition": "../x"}),
        ("head", HEAD | {"layer": "9"}),
        ("head", HEAD | {"head": "99"}),
        ("strip", HEAD),
        ("strip", HEAD | {"item": "13"}),
        ("strip", HEAD | {"item": "item-001"}),
        ("strip", HEAD | {"item": "1" * 5000}),
    ],
)
def test_what_is_not_there_is_said(folders: Folders, path: str, values: dict[str, str]) -> None:
    with pytest.raises(NotThere):
        answer(folders, path, values)


def test_no_folder_and_no_result_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match="no result folder was given"):
        Folders([])
    with pytest.raises(BadFolder, match=r"holds no study\.json"):
        Folders([tmp_path])


def test_folders_of_other_studies_have_a_start(tmp_path: Path) -> None:
    made = [
        write_answers(tmp_path / "answers", conditions=("none", "none-again", "mless")),
        write_likelihood(tmp_path / "nats"),
    ]
    found = answer(Folders(made), "start", {})["folders"]
    assert [one["state"] for one in found] == ["finished", "finished"]
    assert all("A/A control none-again" in one["control"] for one in found)
    assert "pass@1" in found[0]["control"]
    assert "no number differs" in found[1]["control"]
    with pytest.raises(NotThere, match="holds no map"):
        answer(Folders(made), "map", {})


def test_a_request_has_one_spelling() -> None:
    given = {"condition": "a b/ü&=?#+'()*!~", "folder": 1}
    text = request_text("head", **given)
    assert text == "head?condition=a%20b%2F%C3%BC%26%3D%3F%23%2B'()*!~&folder=1"
    assert read_request(text) == ("head", {"condition": given["condition"], "folder": "1"})


def test_every_view_answers_what_it_exports(folders: Folders) -> None:
    for name in VIEWS:
        for request in view(name).exported(folders, Chosen({1: (1, 2)}, 1)):
            assert answer(folders, *read_request(request))


def test_the_cache_is_bounded_and_drops_the_oldest() -> None:
    kept = Kept(100)
    made: list[int] = []

    def make(n: int) -> int:
        made.append(n)
        return n

    for n in (1, 2, 1, 3, 1, 2):
        assert kept.get(n, lambda n=n: make(n), lambda value: 45) == n
    assert made == [1, 2, 3, 2]
    assert kept.get(9, lambda: make(9), lambda value: 1000) == 9
    assert kept.get(9, lambda: make(9), lambda value: 1000) == 9
    assert made[-2:] == [9, 9]  # too large to keep


def test_what_two_threads_want_is_made_once() -> None:
    kept, made, begun = Kept(), [], threading.Event()

    def make() -> int:
        made.append(1)
        begun.wait(10)
        return 7

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(kept.get, "one", make) for _ in range(2)]
        begun.set()
        assert [one.result(20) for one in found] == [7, 7]
    assert len(made) == 1


def test_a_value_that_cannot_be_made_is_tried_again() -> None:
    kept = Kept(100)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            kept.get("one", lambda: 1 // 0)
    assert kept.get("one", lambda: 5) == 5


def test_the_first_page_waits_for_no_large_library(stored: Path) -> None:
    """Each of these takes a second or more to import."""
    script = (
        "import sys; from pathlib import Path; from mless.explorer.folders import Folders; from mless.explorer.views import answer; "
        f"answer(Folders([Path({str(stored)!r})]), 'start', {{}}); print([name for name in ('torch', 'scipy.stats', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_first_page_and_the_shares_are_there_before_they_are_asked_for(stored: Path) -> None:
    folders = Folders([stored])
    prepare(folders)
    made: list[str] = []
    folders[0].kept("shares", lambda: made.append("shares"))
    folders[0].kept("start", lambda: made.append("start"))
    assert made == []
