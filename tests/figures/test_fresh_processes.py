"""Every kind of picture has the same bytes in every process, with any number of threads and any order of hashes.

Run as a program with a folder of results, a folder to write to, formats and names, this file draws those pictures and prints a digest of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cause_folders import write_cause
from dose_folders import write_dose
from mless.figures import draw, style
from mless.results.figure_kinds import FIGURES
from mless.study import load_study, run_study
from mless.study.spec import AccuracyTable
from mless.values import ArmSettings, Condition, FigureSpec, Panel
from placed_folders import write_placebo
from specified_folders import write_multiverse
from spelling import model_folder
from synthetic import write_answers, write_folder, write_likelihood, write_tuning

FOUR = ("none", "mless", "mful", "random")
LENGTHS = ("mless-10", "mless-40", "mless-70")
QWEN, LLAMA = "Qwen2.5-Math-7B", "Llama-3.1-8B-Instruct"


def panels(*heads: int) -> tuple[Panel, ...]:
    return tuple(Panel(QWEN, 1, head) for head in heads)


#: Each picture with the folders it is drawn from.
PICTURES: dict[str, tuple[FigureSpec, tuple[str, ...]]] = {
    "heads": (FigureSpec("heads", "heads", panels(2, 5, 9)), ("attention",)),
    "layers": (FigureSpec("layers", "layers", tuple(Panel(QWEN, n, 4) for n in (1, 2, 3))), ("attention",)),
    "conditions": (FigureSpec("conditions", "conditions", panels(4), ("none", "mless", "mful")), ("attention",)),
    "versus": (
        FigureSpec("versus", "versus", (Panel(QWEN, 1, 1), Panel(LLAMA, 1, 3)), ("mless", "random")),
        ("attention",),
    ),
    "map": (FigureSpec("map", "map", (), FOUR), ("attention",)),
    "retained": (FigureSpec("retained", "retained", (), FOUR), ("attention",)),
    "mass": (FigureSpec("mass", "mass", (), FOUR), ("attention",)),
    "bars": (FigureSpec("bars", "bars", (), (FOUR[0], "none-again", *FOUR[1:])), ("answers",)),
    "two-models": (FigureSpec("two-models", "bars", (), FOUR), ("answers", "sampled")),
    "fig10": (FigureSpec("fig10", "conditions", panels(3), ("none", "mless", "mful")), ("answers", "attention")),
    "sweep": (FigureSpec("sweep", "sweep", (), ("none", "none-again", *LENGTHS)), ("swept",)),
    "diversity": (FigureSpec("diversity", "diversity", (), ("none", "mless")), ("sampled",)),
    "activations": (FigureSpec("activations", "activations", (), ("none", "mless", "random", "arm")), ("activations",)),
    "classes": (FigureSpec("classes", "classes", (), ("none", "mless", "random", "arm")), ("activations",)),
    "dose": (FigureSpec("dose", "dose"), ("dose",)),
    "placebo": (FigureSpec("placebo", "placebo"), ("placebo",)),
    "specification": (FigureSpec("specification", "specification"), ("multiverse",)),
    "ladder": (FigureSpec("ladder", "ladder"), ("cause", "no-effect")),
    "cause": (FigureSpec("cause", "cause"), ("cause", "no-effect")),
    "chain": (FigureSpec("chain", "chain"), ("cause", "no-effect")),
    "displacement": (
        FigureSpec("displacement", "displacement", (), ("none", "mless", "random", "position-only")),
        ("affine",),
    ),
    "sensitivity": (FigureSpec("sensitivity", "sensitivity"), ("tuned",)),
    "effects": (FigureSpec("effects", "effects", (), ()), ("likelihood",)),
    "along": (FigureSpec("along", "along", (), ()), ("likelihood",)),
    "forest": (FigureSpec("forest", "forest", (), FOUR), ("answers", "other-answers")),
}


def test_every_kind_of_picture_is_here() -> None:
    kinds = {name for name in FIGURES if not FIGURES.get(name).table}
    assert {spec.kind for spec, _ in PICTURES.values()} == kinds


@pytest.mark.parametrize("name", ["map", "fig10"])
def test_last_bits_of_a_layout_do_not_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some processors the layout solver does not repeat them. fig10 has parts of its own (subfigures)."""
    write_folder(tmp_path / "attention", label=QWEN, layers=2, heads=4, items=4)
    write_answers(tmp_path / "answers", items=12)
    spec, folders = PICTURES[name]
    execute = style.ConstrainedLayoutEngine.execute
    found: set[bytes] = set()
    for shift in (0.0, 3e-14, -2e-14):

        def shaken(self: Any, figure: Any, shift: float = shift) -> Any:
            done = execute(self, figure)
            for axes in figure.axes:
                left, bottom, width, height = axes.get_position(original=True).bounds
                axes._set_position((left + shift, bottom - shift, width + shift, height))
            for part in figure.subfigs:
                part.bbox_relative.p1 = part.bbox_relative.p1 + shift
            for text in figure.texts:
                text.set_y(text.get_position()[1] + shift)
            return done

        monkeypatch.setattr(style.ConstrainedLayoutEngine, "execute", shaken)
        [path] = draw(spec, [tmp_path / folder for folder in folders], formats=["svg"], out=tmp_path / f"{shift}")
        found.add(path.read_bytes())
    assert len(found) == 1


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result folder of every kind."""
    root = tmp_path_factory.mktemp("stored")
    write_folder(root / "attention", label=QWEN)
    write_answers(root / "answers", items=60, effects={"mful": -0.4}, noise=3)
    write_placebo(root / "placebo")
    write_dose(root / "dose")
    write_cause(root / "cause", heads=(1, 2), layers=5)
    write_cause(root / "no-effect", whole=0.0, layers=3)
    other = {"model": {"name": "llama", "label": LLAMA, "family": "llama", "fingerprint": "8e" * 16}}
    write_answers(root / "other-answers", label=LLAMA, items=60, seed=1, about=other)
    write_multiverse(root / "multiverse")
    drawn = AccuracyTable(samples=4, temperature=0.5, top_p=0.95, k=[1, 3])
    write_answers(root / "sampled", name="llama", label=LLAMA, items=30, settings=drawn)
    lengths = [Condition(name, "repeat", " /", int(name[6:])) for name in LENGTHS]
    halves = AccuracyTable(dev_share=0.5)
    write_answers(root / "swept", items=80, conditions=("none", "none-again", *lengths), settings=halves)
    cells = [(ArmSettings(c=c, p1=p1), c / 10, 0.5) for c in (0.05, 0.13) for p1 in (90.0, 99.5)]
    write_tuning(root / "tuned", cells)
    write_likelihood(root / "likelihood")
    model = str(model_folder(root / "tiny"))
    for name, study, limit in (("activations", "fig4", 5), ("affine", "fig3", 5)):
        made = run_study(load_study(study, {"model": model, "limit": limit, "length": 7}), root / "made").folder
        made.rename(root / name)
    return root


def drawn_in_fresh_processes(stored: Path, times: int, formats: str, *names: str) -> list[dict[str, str]]:
    """The digests of the named pictures, from `times` processes with one thread and as many with two."""
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]

    def drawn(threads: str, run: int) -> dict[str, str]:
        environment = os.environ | {
            "OMP_NUM_THREADS": threads, "ARROW_DEFAULT_NUM_THREADS": threads, "PYTHONHASHSEED": str(run), "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        command = [sys.executable, __file__, str(stored), str(stored / f"drawn-{threads}-{run}"), formats, *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    asked = [(threads, run) for threads in ("1", "2") for run in range(times)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda one: drawn(*one), asked))


def differing(runs: list[dict[str, str]]) -> list[str]:
    return [name for name in runs[0] if len({run[name] for run in runs}) > 1]


@pytest.mark.slow
def test_forty_processes_draw_the_same_bytes(stored: Path) -> None:
    runs = drawn_in_fresh_processes(stored, 20, "png,svg,pdf", *PICTURES)
    assert len(runs[0]) == 3 * len(PICTURES)
    assert differing(runs) == []


def main(stored: Path, out: Path, formats: str, *names: str) -> None:
    digests: dict[str, str] = {}
    for name in names:
        spec, folders = PICTURES[name]
        written = draw(spec, [stored / folder for folder in folders], formats=formats.split(","), out=out / name)
        digests |= {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in written}
    print(json.dumps(digests))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
