"""On a CUDA device: a model with half of its layers in CPU memory gives the numbers and answers of the model on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mless
from mless.errors import BadStudy
from mless.proofs import prove, prove_outputs, prove_reading
from mless.results.folder import ResultFolder
from models.spreading import EVERY, answers, assert_same, everything, in_half, save_deep, weights_elsewhere

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SAMPLED = {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deep(tmp_path_factory.mktemp("deep"))


def test_every_instrument_and_arm_give_the_same_sums(folder: Path) -> None:
    spread = in_half(folder, "cuda:0", "cpu")
    assert (spread.device, spread.kind) == (torch.device("cuda", 0), "cuda, spread")
    assert weights_elsewhere(spread) > 0
    assert_same(everything(mless.load(str(folder), device="cuda", dtype="float32")), everything(spread))
    assert weights_elsewhere(spread) > 0  # none stays on the GPU


def test_the_same_kernels_compute(folder: Path) -> None:
    """A mask that a hook had made a tensor of would go another way."""
    models = mless.load(str(folder), device="cuda", dtype="float32"), in_half(folder, "cuda:0", "cpu")
    by: list[dict[int, str]] = []
    for model in models:
        prompts = mless.prompts(model, ["How many boats?"], "mless", prompt="raw", length=9, system="a")
        by.append(next(iter(mless.received(model, prompts))).computed_by)
    assert by[0] == by[1]


def test_proofs_hold(folder: Path) -> None:
    spread = in_half(folder, "cuda:0", "cpu")
    (prompt,) = mless.prompts(spread, ["How many boats?"], "mless", prompt="raw", length=9, system="a")
    assert prove(spread, prompt, EVERY)["received"] < 1e-4
    assert prove_outputs(spread, prompt, EVERY)["captured"] < 1e-4
    assert prove_reading(spread, prompt, EVERY)["output unchanged"]


@pytest.mark.parametrize("decoding", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_the_same(folder: Path, decoding: dict[str, float]) -> None:
    whole = mless.load(str(folder), device="cuda", dtype="float32", head=True)
    spread = in_half(folder, "cuda:0", "cpu", head=True)
    assert answers(spread, **decoding) == answers(whole, **decoding)


def test_a_tied_head_works(tmp_path: Path) -> None:
    folder = save_deep(tmp_path / "tied", tie_word_embeddings=True)
    whole = mless.load(str(folder), device="cuda", dtype="float32", head=True)
    assert answers(in_half(folder, "cuda:0", "cpu", head=True)) == answers(whole)


def test_layers_may_stay_on_disk_beside_a_gpu(folder: Path) -> None:
    size = sum(weight.nbytes for weight in mless.load(str(folder), dtype="float32", device="cpu").model.parameters())
    spread = mless.load(
        str(folder), device_map="auto", device_memory=f"cuda:0={size * 2 // 3}B,cpu=1KB,disk", dtype="float32"
    )
    assert "disk" in (spread.placed or {})
    assert_same(everything(mless.load(str(folder), device="cuda", dtype="float32")), everything(spread))


def test_a_model_that_fits_is_on_one_gpu(folder: Path) -> None:
    model = mless.load(str(folder), device_map="auto", dtype="float32")
    assert list(model.placed or {}) == ["cuda:0"]
    assert model.kind == "cuda"


def test_a_gpu_without_room_is_refused(folder: Path) -> None:
    with pytest.raises(BadStudy, match=r"nothing of .* fits into the GPU memory"):
        mless.load(str(folder), device_map="auto", device_memory="cuda:0=1KB", dtype="float32")


def test_a_study_records_where_layers_are(folder: Path, tmp_path: Path) -> None:
    spread = in_half(folder, "cuda:0", "cpu")
    size = sum(weight.nbytes for weight in spread.model.parameters())
    outcome = mless.run(
        "quick", tmp_path / "out", model=str(folder), limit=4, system="a", length=9, prompt="raw", dtype="float32", device_map="auto",
        device_memory=f"cuda:0={size * 2 // 3}B",
    )  # fmt: skip
    device = (ResultFolder(outcome.folder).about() or {})["device"]
    assert device["kind"] == "cuda:0"
    assert set(device["placed"]) == {"cuda:0", "cpu"}
