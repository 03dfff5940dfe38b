"""Effects and their course along the solution: which marks, which bins, the same bytes each time, and errors that name the way out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from PIL import Image

from interrupted import table_replaced
from mless.errors import BadFolder, BadStudy
from mless.figures import check, draw, style
from mless.figures.likelihood import along_of, effects_of
from mless.results.along import FEWEST, bins_of
from mless.results.figure_kinds import Drawing
from mless.results.reading import StoredLikelihood
from mless.study import load_study, run_study
from mless.study.showing import check_figure, figure_spec, single_layer
from mless.values import ArmSettings, Condition, FigureSpec
from spelling import model_folder
from synthetic import write_answers, write_likelihood

EFFECTS = FigureSpec("effects", "effects", (), ())
ALONG = FigureSpec("along", "along", (), ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_likelihood(tmp_path_factory.mktemp("likelihood") / "r")


def panels(paths: Sequence[Path], conditions: tuple[str, ...] = ()) -> dict[str, Axes]:
    """The panels of `effects` by their metric."""
    with style.applied():
        picture = effects_of(Drawing(FigureSpec("effects", "effects", (), conditions), list(paths)))
    return {axes.get_title(): axes for axes in picture.figure.get_axes()}


def along(paths: Sequence[Path], item: str | None = None, conditions: tuple[str, ...] = ()) -> style.Picture:
    with style.applied():
        return along_of(Drawing(FigureSpec("along", "along", (), conditions), list(paths), item=item))


def texts(path: Path) -> str:
    return re.sub(r"<[^>]*>", " ", path.read_text(encoding="utf-8"))


def rows_of(folder: Path, **where: object) -> list[dict[str, object]]:
    rows = pq.read_table(folder / "effects.parquet").to_pylist()
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


# ---- effects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [EFFECTS, ALONG], ids=["effects", "along"])
def test_the_same_bytes_each_time_and_a_caption_of_its_own(spec: FigureSpec, folder: Path, tmp_path: Path) -> None:
    first = draw(spec, [folder], formats=("png", "svg"), out=tmp_path / "a")
    (alone,) = draw(spec, [folder], formats=("svg",), out=tmp_path / "b")
    assert alone.read_bytes() == (tmp_path / "a" / alone.name).read_bytes()
    with Image.open(first[0]) as image:
        assert "SmolLM2-135M-Instruct" in image.info["Title"]
        assert "29 items" in image.info["Description"]  # the last item has nothing that is scored


def test_a_panel_a_metric_and_a_row_a_condition(folder: Path) -> None:
    found = panels([folder])
    assert list(found) == ["solution", "contrast", "answer"]
    assert [label.get_text() for label in found["solution"].get_yticklabels()] == [
        "w/o again", "w/ Mless", "w/ Mful", "w/ random text",
    ]  # fmt: skip
    assert not any(label.get_text() for label in found["answer"].get_yticklabels())
    assert [axes.get_xlabel() for axes in found.values()] == ["Δ nats a token", "Δ nats", "Δ nats"]


def marks(axes: Axes) -> dict[float, tuple[str, bool, str, float]]:
    """Row → its mark, whether it is filled, its colour, and where it stands."""
    found: dict[float, tuple[str, bool, str, float]] = {}
    for line in axes.get_lines():
        if line.get_marker() not in ("None", ""):
            filled = to_hex(line.get_markerfacecolor()) != "#ffffff"
            found[float(line.get_ydata()[0])] = (
                str(line.get_marker()), filled, to_hex(line.get_color()), float(line.get_xdata()[0]),
            )  # fmt: skip
    return found


def test_marks_say_the_verdict_and_stand_at_the_change(folder: Path) -> None:
    for metric, axes in panels([folder]).items():
        shown = marks(axes)
        for place, row in enumerate(rows_of(folder, metric=metric)):
            marker, filled, colour, at = shown[float(place)]
            assert at == pytest.approx(row["delta"])
            if row["condition"] == "none-again":
                assert (marker, colour) == ("D", to_hex("0.45"))
                continue
            assert colour == to_hex(style.COLOURS[str(row["condition"])])
            expected = {
                "equivalent": ("s", False),
                "undecided": ("o", False),
                "rises": ("o", True),
                "drops": ("o", True),
            }
            assert (marker, filled) == expected[str(row["verdict"])]
    verdicts = {row["verdict"] for row in rows_of(folder)}
    assert {"rises", "drops", "equivalent"} <= verdicts  # or the test above shows little


def test_intervals_bands_and_adjusted_p(folder: Path, tmp_path: Path) -> None:
    axes = panels([folder])["contrast"]
    (mful,) = rows_of(folder, metric="contrast", condition="mful")
    lines = [one for collection in axes.collections for one in collection.get_paths() if len(one.vertices) == 2]
    ends = [tuple(np.asarray(line.vertices)[:, 0].tolist()) for line in lines]
    assert any(one == pytest.approx((mful["lo"], mful["hi"])) for one in ends)
    reach = [
        np.asarray(one.get_paths()[0].vertices)[:, 0]
        for one in axes.collections
        if len(one.get_paths()[0].vertices) > 4
    ]
    assert {(float(found.min()), float(found.max())) for found in reach} == {(-0.1, 0.1)}  # ± margin
    (file,) = draw(EFFECTS, [folder], formats=["svg"], out=tmp_path)
    drawn = texts(file)
    assert "no number differs" in drawn
    assert "± margin: would not matter" in drawn
    assert "undecided" not in drawn  # nothing is, so the mark is not explained


def test_options_have_panels_below_and_points_for_shares(tmp_path: Path) -> None:
    found = panels([write_likelihood(tmp_path / "r", items=12, choices=True)])
    assert list(found) == ["solution", "contrast", "answer", "choice", "margin"]
    assert found["choice"].get_xlabel() == "Δ points"
    (mless,) = rows_of(tmp_path / "r", metric="choice", condition="mless")
    assert marks(found["choice"])[1.0][3] == pytest.approx(100 * float(str(mless["delta"])))


def test_what_was_not_measured_has_no_panel(tmp_path: Path) -> None:
    assert list(panels([write_likelihood(tmp_path / "a", items=8, solutions=False)])) == ["contrast", "answer"]
    assert list(panels([write_likelihood(tmp_path / "b", items=8, answers=False)])) == ["solution"]


def test_folders_are_groups_named_by_what_differs(folder: Path, tmp_path: Path) -> None:
    other = write_likelihood(tmp_path / "other", label="Qwen", items=12, conditions=("none", "none-again", "mless"))
    axes = panels([folder, other])["solution"]
    assert {"SmolLM2-135M-Instruct", "Qwen"} <= {text.get_text() for text in axes.texts}
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["w/o again", "w/ Mless", "w/ Mful", "w/ random text", "w/o again", "w/ Mless"]
    same = write_likelihood(tmp_path / "same", task="math500", items=12)
    named = {text.get_text() for text in panels([folder, same])["solution"].texts}
    assert {"SmolLM2-135M-Instruct, gsm8k_test", "SmolLM2-135M-Instruct, math500"} <= named


def test_an_a_a_control_that_differs_is_told(tmp_path: Path) -> None:
    noisy = write_likelihood(tmp_path / "r", items=12, noise=0.2)
    (file,) = draw(EFFECTS, [noisy], formats=["svg"], out=tmp_path)
    assert re.search(r"A/A \(w/o again\): up to [+−]\d", texts(file))
    alone = write_likelihood(tmp_path / "alone", items=12, conditions=("none", "mless"))
    (file,) = draw(EFFECTS, [alone], formats=["svg"], out=tmp_path)
    assert "No A/A control was run" in texts(file)


def test_two_items_have_no_interval_to_draw(tmp_path: Path) -> None:
    few = write_likelihood(tmp_path / "r", items=2)  # one of them with scores
    (file,) = draw(EFFECTS, [few], formats=["svg"], out=tmp_path)
    assert "n = 1 items" in texts(file)


def test_hostile_names_are_drawn_as_text(tmp_path: Path) -> None:
    evil = Condition("<script>$x\x07", "repeat", " /", 5)
    odd = write_likelihood(
        tmp_path / "r", items=6, label="<b>\x1b$", task="\u202e", text="\x07", conditions=("none", "none-again", evil)
    )
    for spec, item in ((EFFECTS, None), (ALONG, None), (ALONG, "1")):
        (file,) = draw(spec, [odd], item=item, formats=["svg"], out=tmp_path / str(item))
        text = file.read_text(encoding="utf-8")
        assert "<script" not in text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)
        assert "&lt;script&gt;$x\\x07" in text


# ---- along the solution ----------------------------------------------------------------------------------------------


def test_bins_double() -> None:
    assert bins_of(1) == [(1, 1)]
    assert bins_of(4) == [(1, 1), (2, 2), (3, 4)]
    assert bins_of(5) == [(1, 1), (2, 2), (3, 4), (5, 8)]


def test_the_mean_of_items_in_each_bin_by_hand(folder: Path) -> None:
    rows = pq.read_table(folder / "tokens.parquet").to_pylist()
    logp: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        logp.setdefault((row["condition"], row["item"]), []).append(row["logp"])
    items = {item for _, item in logp}
    wanted: list[float] = []
    for first, last in bins_of(max(map(len, logp.values()))):
        each = [
            np.mean(np.subtract(logp["mful", item], logp["none", item])[first - 1 : last])
            for item in items
            if len(logp["none", item]) >= first
        ]
        if len(each) >= FEWEST:
            wanted.append(float(np.mean(each)))
    picture = along([folder])
    left, right = picture.figure.get_axes()
    lines = [one for axes in (left, right) for one in axes.get_lines() if one.get_color() == style.GREEN]
    assert np.concatenate([line.get_ydata() for line in lines]) == pytest.approx(wanted)
    ticks = [label.get_text() for axes in (left, right) for label in axes.get_xticklabels()]
    assert ticks[:4] == ["1\nn = 29", "2\n29", "3–4\n29", "5–8\n29"]
    assert len(ticks) == len(wanted)
    assert min(int(tick.split("\n")[1].removeprefix("n = ")) for tick in ticks) >= FEWEST


def test_few_items_are_cut_at_half_of_them_and_short_solutions_have_one_panel(tmp_path: Path) -> None:
    few = write_likelihood(tmp_path / "few", items=5)
    assert "fewer than 2 (half of them)" in along([few]).description
    rows = pq.read_table(few / "tokens.parquet")
    short = rows.take([n for n, row in enumerate(rows.to_pylist()) if row["position"] < 6])
    table_replaced(few, "tokens", short)
    (axes,) = along([few]).figure.get_axes()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1\nn = 4", "2\n4", "3–4\n4", "5–8\n4"]


def test_a_control_that_changes_nothing_has_no_line(folder: Path, tmp_path: Path) -> None:
    picture = along([folder])
    assert "no token differs" in picture.description
    colours = {to_hex(line.get_color()) for line in picture.figure.get_axes()[0].get_lines()}
    assert to_hex("0.45") not in colours
    noisy = along([write_likelihood(tmp_path / "r", items=12, noise=0.2)])
    assert "no token differs" not in noisy.description
    assert to_hex("0.45") in {to_hex(line.get_color()) for line in noisy.figure.get_axes()[0].get_lines()}


def test_lines_differ_once_colours_repeat(tmp_path: Path) -> None:
    many = [Condition(f"own-{n}", "none", arm=ArmSettings(c=0.1)) for n in range(7)]
    picture = along([write_likelihood(tmp_path / "r", items=12, conditions=("none", *many))])
    looks = {(line.get_color(), str(line.get_linestyle())) for line in picture.figure.get_axes()[0].get_lines()[1:]}
    assert len(looks) == 7


def test_folders_below_each_other_share_their_scale(folder: Path, tmp_path: Path) -> None:
    other = write_likelihood(tmp_path / "other", label="Qwen", changes={"mless": (0.5, 0.0, 0.0)})
    axes = along([folder, other]).figure.get_axes()
    assert [one.get_title(loc="left") for one in axes] == ["SmolLM2-135M-Instruct", "Qwen", "", ""]
    assert axes[0].get_ylim() == axes[1].get_ylim()
    assert axes[2].get_ylim() == axes[3].get_ylim()


def test_one_item_token_by_token(folder: Path) -> None:
    rows = [row for row in pq.read_table(folder / "tokens.parquet").to_pylist() if row["item"] == "sum-003"]
    own = {name: [row["logp"] for row in rows if row["condition"] == name] for name in ("none", "mful")}
    for item in ("3", "sum-003"):
        picture = along([folder], item)
        parts = picture.figure.get_axes()
        drawn = [line.get_ydata() for axes in parts for line in axes.get_lines() if line.get_color() == style.GREEN]
        assert np.concatenate(drawn) == pytest.approx(np.subtract(own["mful"], own["none"]))
        labels = [label.get_text() for axes in parts for label in axes.get_xticklabels()]
        assert labels == [style.shown_token(row["text"]) for row in rows if row["condition"] == "none"]
        total = f"{sum(own['mful']) - sum(own['none']):+.3f}".replace("-", "−")
        assert f"w/ Mful {total}" in picture.description


def test_a_long_solution_goes_on_in_further_rows(tmp_path: Path) -> None:
    one = write_likelihood(tmp_path / "r", items=2)
    rows = [row for row in pq.read_table(one / "tokens.parquet").to_pylist() if row["position"] == 0]
    long = [row | {"position": n, "logp": -0.001 * (n % 40)} for row in rows for n in range(1000)]
    table = pq.read_table(one / "tokens.parquet")
    table_replaced(one, "tokens", table.from_pylist(long, table.schema))
    parts = along([one], "1").figure.get_axes()
    assert len(parts) == 6
    assert all(
        0 < len(axes.get_xticks()) <= style.MOST_LABELS for axes in parts
    )  # the others have no room for their text


def test_a_study_stores_what_the_pictures_need(tmp_path: Path) -> None:
    solution = "Two and two are four,\nso \\boxed{4}"
    rows = [
        {"id": f"q{n}", "question": f"What is {n} + 2?", "answer": str(n + 2), "solution": solution} for n in range(3)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "model": str(model_folder(tmp_path / "tiny")),
        "data": str(tmp_path / "data.jsonl"),
        "length": 5,
        "conditions": "none,mless",
    }
    made = run_study(load_study("along", changes), tmp_path / "results").folder
    assert "".join(StoredLikelihood.open(made).solution_tokens("q1")) == solution
    for spec, item in ((EFFECTS, None), (ALONG, None), (ALONG, "2")):
        assert draw(spec, [made], item=item, formats=["svg"], out=tmp_path / str(item))
    assert "One item: q1." in along([made], "2").description


# ---- what is refused ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_drawn_is_told(folder: Path, tmp_path: Path) -> None:
    plain = write_likelihood(tmp_path / "plain", items=6, solutions=False)
    for item in (None, "1"):
        with pytest.raises(BadFolder, match=r"have no reference solutions.*--solution-field.*mless figure effects"):
            draw(ALONG, [plain], item=item, out=tmp_path)
    with pytest.raises(BadFolder, match="item 'sum-030' has no reference solution; choose another with --item"):
        draw(ALONG, [folder], item="30", out=tmp_path)
    with pytest.raises(BadStudy, match="99"):
        draw(ALONG, [folder], item="99", out=tmp_path)
    with pytest.raises(
        BadFolder, match=r"holds no log-probabilities: its study measured accuracy.*mless run likelihood"
    ):
        draw(EFFECTS, [write_answers(tmp_path / "answers", items=12)], out=tmp_path)
    with pytest.raises(BadFolder, match="no condition 'evil'"):
        draw(FigureSpec("effects", "effects", (), ("evil",)), [folder], out=tmp_path)
    with pytest.raises(BadFolder, match="nothing to compare with none among none"):
        draw(FigureSpec("effects", "effects", (), ("none",)), [folder], out=tmp_path)
    with pytest.raises(BadStudy, match="takes no --item"):
        check(EFFECTS, item="1")
    with pytest.raises(BadStudy, match="takes no --heads"):
        check(ALONG, heads="1")


@pytest.mark.parametrize("name", ["effects", "along"])
def test_the_studies_of_that_name_show_all_their_conditions(name: str) -> None:
    spec = load_study(name)
    assert figure_spec(spec).conditions == ()
    assert single_layer(spec) is None
    check_figure(spec, 30, 9)
    with pytest.raises(BadStudy, match="takes no --layers"):
        single_layer(load_study(name, {"figure.layers": "1"}))
