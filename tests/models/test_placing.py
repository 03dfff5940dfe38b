"""Layers over several places. Without a GPU these are CPU memory and disk, by the same hooks that serve a GPU and CPU memory."""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate import cpu_offload
from torch import nn

import mless
from mless.capture.branching import branches
from mless.capture.scoring import Scorer
from mless.errors import BadCluster, BadFolder, BadStudy, UnsupportedArchitecture
from mless.models import load, loading
from mless.models.placing import Place, is_spread
from mless.models.seams import check_heads
from mless.proofs import prove, prove_outputs, prove_reading
from mless.results.folder import ResultFolder
from mless.study import load_study, run_study
from mless.study.bench import Silent, Workers
from mless.values import parse_memory
from models import walking
from models.spreading import EVERY, answers, assert_same, everything, in_half, save_deep, weights_elsewhere
from models.tiny_models import save_model, save_tokenizer
from tiny import prompt_of, tiny

PROMPT = prompt_of(("system", 7), ("filler", 4), ("question", 12), seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deep(tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="module")
def spread(folder: Path) -> mless.LoadedModel:
    return in_half(folder, "cpu", "disk")


# ---- the same numbers ------------------------------------------------------------------------------------------------


def test_every_instrument_and_arm_give_the_same_sums(folder: Path, spread: mless.LoadedModel) -> None:
    assert spread.placed == {"cpu": "layers 1–3, embed_tokens", "disk": "layers 4–6, norm"}
    assert spread.kind == "cpu, spread"
    there = weights_elsewhere(spread)
    assert there > 0
    assert_same(everything(load(str(folder))), everything(spread))
    assert weights_elsewhere(spread) == there  # brought in for a forward only


def test_a_mask_stays_lazy_on_its_way_through_the_hooks(spread: mless.LoadedModel) -> None:
    """accelerate sends all that has `.to`; a mask made a tensor would be T × T, and other kernels would serve."""
    (one,) = mless.received(spread, [PROMPT])
    assert set(one.computed_by.values()) == {"joint"}


def test_proofs_hold(spread: mless.LoadedModel) -> None:
    assert prove(spread, PROMPT, EVERY)["received"] < 1e-5
    assert prove_outputs(spread, PROMPT, EVERY)["captured"] < 1e-5
    assert prove_reading(spread, PROMPT, EVERY)["output unchanged"]


@pytest.mark.parametrize("tied", [False, True])
def test_answers_are_the_same(tmp_path: Path, tied: bool) -> None:
    folder = save_deep(tmp_path / "answering", tie_word_embeddings=tied)
    spread = in_half(folder, "cpu", "disk", head=True)
    assert answers(spread) == answers(load(str(folder), head=True))


def test_texts_are_scored_by_a_head_that_lies_on_disk(tmp_path: Path) -> None:
    folder = save_deep(tmp_path / "scoring", tie_word_embeddings=False)
    spread = in_half(folder, "cpu", "disk", head=True)
    assert spread.model.get_output_embeddings().weight.is_meta
    rows = [branches(PROMPT, [[5, 6, 7], [8]])]
    (here,), (there,) = (Scorer(model)(rows) for model in (load(str(folder), head=True), spread))
    for one, other in zip(here.texts, there.texts, strict=True):
        assert other == pytest.approx(one, abs=1e-5)


def test_weights_in_cpu_memory_that_hooks_bring_in(folder: Path) -> None:
    """What a GPU computes with, as far as it can be had without one: every weight is elsewhere, held in CPU memory."""
    model = load(str(folder), head=True)
    expected, replies = everything(load(str(folder))), answers(model)
    cpu_offload(model.model, execution_device=torch.device("cpu"))
    decoder = load(str(folder))
    cpu_offload(decoder.model, execution_device=torch.device("cpu"))
    assert is_spread(decoder.model)
    assert weights_elsewhere(decoder) == len(list(decoder.model.parameters()))
    assert_same(expected, everything(decoder))
    assert answers(model) == replies


@pytest.mark.parametrize("family", ["falcon", "gpt_oss", "mpt", "qwen3_moe"])
def test_families_with_ways_of_their_own(tmp_path: Path, family: str) -> None:
    """Attention outside the registry, sinks and windows, experts that transformers converts when it loads them."""
    walking.save(family, tmp_path)
    save_tokenizer(tmp_path, bos=True)
    whole = load(str(tmp_path))
    size = sum(weight.nbytes for weight in whole.model.parameters())
    spread = load(str(tmp_path), device_map="auto", device_memory=f"cpu={size * 2 // 3}B,disk")
    assert {"cpu", "disk"} == set(spread.placed or {})
    (one,), (other,) = mless.received(whole, [PROMPT]), mless.received(spread, [PROMPT])
    np.testing.assert_allclose(other.received, one.received, atol=1e-5)
    prove(spread, PROMPT, one.layers)


def test_a_part_of_the_layers_is_placed_too(folder: Path) -> None:
    whole = load(str(folder), layers="1-5")
    size = sum(weight.nbytes for weight in whole.model.parameters())
    spread = load(str(folder), layers="1-5", device_map="auto", device_memory=f"cpu={size * 2 // 3}B,disk")
    assert weights_elsewhere(spread) > 0
    (one,), (other,) = mless.received(whole, [PROMPT]), mless.received(spread, [PROMPT])
    np.testing.assert_allclose(other.received, one.received, atol=1e-5)


def test_what_lies_on_disk_is_reached_as_long_as_the_model_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests make such folders too.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def views() -> set[Path]:
        return set(tmp_path.glob("mless-*"))

    before = views()
    model = in_half(folder, "cpu", "disk")
    gc.collect()
    (view,) = [one for one in views() - before if any(one.glob("*.safetensors"))]
    list(mless.received(model, [PROMPT]))
    del model
    gc.collect()
    assert not view.exists()


# ---- whole studies ---------------------------------------------------------------------------------------------------

STUDIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "quick": ({"conditions": "none,mless,arm"}, ("attention", "retained")),
    "activations": ({}, ("activations",)),
    "affine": ({"conditions": "none,mless"}, ("affine",)),
    "accuracy": (
        {"conditions": "none,mless,arm", "data": "arithmetic", "accuracy.max_new_tokens": 6, "accuracy.slots": 8},
        ("answers",),
    ),
}


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_has_the_same_tables_and_records_where_layers_are(folder: Path, tmp_path: Path, study: str) -> None:
    changes, tables = STUDIES[study]
    changes = {
        "model": str(folder),
        "limit": 3,
        "length": 5,
        "prompt": "raw",
        "system": "a",
        "arm.layers": [2, 5],
        **changes,
    }
    size = sum(weight.nbytes for weight in load(str(folder)).model.parameters())
    there = {"device_map": "auto", "device_memory": f"cpu={size * 3 // 5}B,disk"}
    whole = run_study(load_study(study, changes), tmp_path / "whole").folder
    spread = run_study(load_study(study, changes | there), tmp_path / "spread").folder
    for table in tables:
        _same_tables(ResultFolder(whole).read_table(table), ResultFolder(spread).read_table(table))
    about = ResultFolder(spread).about() or {}
    assert set(about["device"]["placed"]) == {"cpu", "disk"}
    assert about["study"]["device_map"] == "auto"
    assert "placed" not in (ResultFolder(whole).about() or {})["device"]


def _same_tables(one: pa.Table, other: pa.Table) -> None:
    assert one.column_names == other.column_names
    for name in one.column_names:
        a, b = one.column(name).to_pylist(), other.column(name).to_pylist()
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert x == pytest.approx(y, abs=1e-5, nan_ok=True) if _numbers(x) else x == y, name


def _numbers(value: Any) -> bool:
    rest = value if isinstance(value, list) else [value]
    return all(isinstance(one, float | int) for one in rest)


class Stopped(Exception):
    pass


class StopsAfterTwo(Silent):
    """Ends a run of six units after the second."""

    def step(self, what: str, done: int, total: int, workers: str = "") -> None:
        if (done, total) == (2, 6):
            raise Stopped


def test_other_bounds_go_on_and_a_model_on_one_device_does_not(folder: Path, tmp_path: Path) -> None:
    """Numbers do not depend on where layers lie, but a spread model does without fused steps."""
    size = sum(weight.nbytes for weight in load(str(folder)).model.parameters())
    common = {"model": str(folder), "limit": 3, "length": 5, "prompt": "raw", "system": "a", "batch_size": 1}

    def run(progress: Silent, **there: Any) -> mless.Outcome:
        spec = load_study("quick", common | {"conditions": "none,mless"} | there)
        return run_study(spec, tmp_path / "r", progress)

    with pytest.raises(Stopped):
        run(StopsAfterTwo(), device_map="auto", device_memory=f"cpu={size * 3 // 5}B,disk")
    with pytest.raises(BadFolder, match="it differs in kind of device"):
        run(Silent())
    ended = run(Silent(), device_map="auto", device_memory=f"cpu={size * 4 // 5}B,disk")
    assert (0 < ended.computed < 6, ended.units) == (True, 6)


# ---- refusals --------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "with --device cpu": ({"device_map": "auto", "device": "cpu"}, "--device cpu names one"),
    "with --device cuda:1": ({"device_map": "auto", "device": "cuda:1"}, "--device cuda:1 names one"),
    "bounds alone": ({"device_memory": "cpu=1GiB"}, "add --device-map auto"),
    "no size": ({"device_map": "auto", "device_memory": "cpu"}, "a size by device, as cuda:0=20GiB"),
    "no unit": ({"device_map": "auto", "device_memory": "cpu=20"}, "got 'cpu=20'"),
    "no device": ({"device_map": "auto", "device_memory": "gpu=20GiB"}, "got 'gpu=20GiB'"),
    "a disk with a size": ({"device_map": "auto", "device_memory": "disk=1GiB"}, "disk alone to allow it"),
    "twice": ({"device_map": "auto", "device_memory": "cpu=1GiB,cpu=2GiB"}, "names 'cpu' twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_contradicts_itself_is_refused(folder: Path, case: str) -> None:
    given, said = BAD[case]
    with pytest.raises(BadStudy, match=said):
        load(str(folder), **given)
    with pytest.raises(BadStudy, match=said):
        load_study("quick", given)


def test_sizes_are_read() -> None:
    assert parse_memory(" cuda:0=1.5GiB, cpu = 60GB ,disk") == {"cuda:0": 3 << 29, "cpu": 60 * 10**9, "disk": None}


def test_another_map_is_refused(folder: Path) -> None:
    with pytest.raises(BadStudy, match="no device map 'balanced'; there is: auto"):
        load(str(folder), device_map="balanced")
    with pytest.raises(BadStudy, match="field 'device_map'"):
        load_study("quick", {"device_map": "balanced"})


def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(BadStudy, match="names 'cuda:99', but this machine has"):
        load(str(folder), device_map="auto", device_memory="cuda:99=1GiB")


@pytest.mark.parametrize(
    ("engine", "said"), [("vllm", r"accuracy\.tensor_parallel=N"), ("openai", "is given no weights")]
)
def test_engines_that_load_by_themselves_refuse_it(engine: str, said: str) -> None:
    given = {"device_map": "auto", "accuracy.engine": engine, "accuracy.base_url": "http://127.0.0.1:9/v1"}
    with pytest.raises(BadStudy, match=said):
        load_study("accuracy", given)


def test_workers_with_several_gpus_need_a_model_that_is_spread(folder: Path, tmp_path: Path) -> None:
    spec = load_study("quick", {"model": str(folder)})
    with pytest.raises(BadCluster, match=r"--worker-gpus 2, but a model lies on one GPU .*; add --device-map auto"):
        run_study(spec, tmp_path / "r", workers=Workers("2", gpus=2))


def test_workers_have_as_many_gpus_as_vllm_divides_layers_among(tmp_path: Path) -> None:
    spec = load_study("accuracy", {"accuracy.engine": "vllm", "accuracy.tensor_parallel": 2})
    with pytest.raises(BadCluster, match=r"tensor_parallel = 2 divides each layer among 2; leave --worker-gpus out"):
        run_study(spec, tmp_path / "r", workers=Workers("2", gpus=4))


def test_a_missing_accelerate_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(BadStudy, match="pip install accelerate"):
        load(str(folder), device_map="auto")


@pytest.mark.parametrize("share", [0.5, 1.0], ids=["by half", "by its buffers"])
def test_a_model_that_does_not_fit_is_refused(folder: Path, share: float) -> None:
    """Weights that fit to the byte do not: a model has more than weights, and layers are not divided."""
    size = sum(weight.nbytes for weight in load(str(folder)).model.parameters())
    with pytest.raises(BadStudy, match=r"does not fit even so: its weights take .* add disk to --device-memory"):
        load(str(folder), device_map="auto", device_memory=f"cpu={int(size * share)}B")


def test_a_gpu_that_holds_nothing_is_refused(folder: Path) -> None:
    model = load(str(folder))
    with pytest.raises(BadStudy, match=r"nothing of tiny fits into the GPU memory .* or use --device cpu"):
        Place(torch.device("cuda"), {}).taken(model.model, 1, "tiny")


@pytest.mark.parametrize("family", ["dbrx", "longcat_flash"])
def test_a_family_that_passes_its_hooks_by_is_refused(tmp_path: Path, family: str) -> None:
    """The second would run without an error, with other experts than it chose."""
    walking.save(family, tmp_path)
    save_tokenizer(tmp_path, bos=True)
    size = sum(weight.nbytes for weight in load(str(tmp_path)).model.parameters())
    with pytest.raises(UnsupportedArchitecture, match="uses weights past the hooks"):
        load(str(tmp_path), device_map="auto", device_memory=f"cpu={size * 2 // 3}B,disk")


@pytest.mark.parametrize(
    "names", ["memory.max memory.current", "memory/memory.limit_in_bytes memory/memory.usage_in_bytes"]
)
def test_the_memory_of_a_batch_job_bounds_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """A container or a batch job may take less than its machine has."""
    (tmp_path / "memory").mkdir()
    for name, size in zip(names.split(), (5_000_000, 4_990_000), strict=True):
        (tmp_path / name).write_text(f"{size}\n")
    monkeypatch.setattr("mless.models.placing._CGROUP", tmp_path)
    with pytest.raises(BadStudy, match="does not fit even so"):
        load(str(folder), device_map="auto")


def test_without_a_gpu_a_model_that_fits_is_on_the_cpu(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = load(str(folder), device_map="auto")
    assert (model.kind, list(model.placed or {})) == ("cpu", ["cpu"])
    assert not is_spread(model.model)


# ---- heads -----------------------------------------------------------------------------------------------------------


def shard(model: nn.Module, layer: int) -> None:
    """Leave half of a layer's heads, as one of two processes of a tensor-parallel model has it."""
    attention: Any = model.layers[layer - 1].self_attn  # pyright: ignore[reportIndexIssue]
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(attention, name)
            linear.weight = nn.Parameter(linear.weight[: linear.weight.shape[0] // 2].clone())
            if linear.bias is not None:
                linear.bias = nn.Parameter(linear.bias[: linear.bias.shape[0] // 2].clone())
        whole = attention.o_proj.weight
        attention.o_proj.weight = nn.Parameter(whole[:, : whole.shape[1] // 2].clone())


def test_a_layer_with_fewer_heads_than_the_config_is_refused_when_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "m", "qwen2")
    own = loading._build  # pyright: ignore[reportPrivateUsage]

    def sharded(*given: Any) -> Any:
        model, info = own(*given)
        shard(model, 3)
        return model, info

    monkeypatch.setattr(loading, "_build", sharded)
    with pytest.raises(UnsupportedArchitecture, match=r"layers\.2\.self_attn shows 2 heads, and the config says 4"):
        load(str(folder))


def test_a_count_of_fewer_heads_is_refused() -> None:
    model = tiny("gpt2").model
    model.h[1].attn.num_heads = 2
    with pytest.raises(UnsupportedArchitecture, match=r"h\.1\.attn shows 2 heads"):
        check_heads(model, 4, "tiny")


def test_a_layer_that_runs_with_fewer_heads_is_refused() -> None:
    """A model that someone else has divided, given to an instrument as it is."""
    model = tiny("qwen2")
    shard(model.model, 2)
    with pytest.raises(UnsupportedArchitecture, match="layer 2 of Qwen2Model shows 2 heads, and the config says 4"):
        list(mless.received(model, [PROMPT]))
