"""A small model whose layers lie on two devices, and all that is measured of it: to be held against the same model on one device."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mless
from mless.capture.activations import Rows, read_activations
from mless.capture.affine import displacement
from mless.engines.base import Decoding, Request
from mless.engines.hf import HfEngine
from mless.errors import BadStudy
from mless.models import LoadedModel
from mless.values import arm_settings
from models.tiny_models import save_model

LAYERS = 6
EVERY = list(range(1, LAYERS + 1))
ARM: dict[str, Any] = {"c": 0.5, "layers": [2, 5]}
_QUESTIONS = ["What is 2 plus 3?", "A farmer has 12 apples and 3 pears.", "How many boats are in the harbour?"]
_SIZES = {
    "num_hidden_layers": LAYERS,
    "layer_types": ["full_attention"] * LAYERS,
    "hidden_size": 128,
    "intermediate_size": 192,
}


def save_deep(folder: Path, family: str = "qwen2", **changes: Any) -> Path:
    """Heads of 32 numbers, which a GPU's kernels take."""
    return save_model(folder, family, **_SIZES | changes)


def in_half(folder: Path, device: str, rest: str, **how: Any) -> LoadedModel:
    """The model with the first half of its layers on `device` and the others on `rest`, by a bound on the memory of `device`."""
    layer = sum(
        weight.nbytes for weight in mless.load(str(folder), layers=1, dtype="float32").model.layers.parameters()
    )
    most = f",{rest}" if rest == "disk" else ""
    for quarters in range(2 * LAYERS, 8 * LAYERS):
        how |= {"device_map": "auto", "device_memory": f"{device}={quarters * layer // 4}B{most}", "dtype": "float32"}
        try:
            model = mless.load(str(folder), **how)
        except BadStudy:
            continue  # nothing fits there yet
        placed = model.placed or {}
        if (
            f"layers 1–{LAYERS // 2}," in f"{placed.get(device)},"
            and f"layers {LAYERS // 2 + 1}–{LAYERS}" in placed.get(rest, "")
        ):
            return model
    raise AssertionError("no bound divides the layers in half")


def everything(model: LoadedModel) -> dict[str, np.ndarray]:
    """Received attention, activations and displacements of a few prompts, without ARM and with it."""
    prompts = {
        name: mless.prompts(model, _QUESTIONS, name, prompt="raw", length=9, system="a", seed=3)
        for name in ("none", "mless")
    }
    found: dict[str, np.ndarray] = {}

    def kept(name: str, *values: Any) -> None:
        found[name] = np.concatenate([np.asarray(one, dtype=np.float64).ravel() for one in values])

    for name in ("plain", "arm"):
        with mless.arm(model, **ARM) if name == "arm" else nullcontext():
            # Padded rows, and rows alone.
            for size in (1, 3):
                rows = list(mless.received(model, prompts["mless"], batch_size=size))
                kept(f"{name}, received by {size}", *(row.received for row in rows))
                kept(f"{name}, mass by {size}", *(row.mass for row in rows))
                kept(f"{name}, n by {size}", *(row.n for row in rows))
            values: dict[tuple[int, int], np.ndarray] = {}

            def take(row: int, of: Rows, values: dict[tuple[int, int], np.ndarray] = values) -> None:
                values[row, of.layer] = np.concatenate(list(of.blocks()))

            read_activations(model, prompts["mless"], layers=EVERY, take=take)
            kept(f"{name}, activations", *(values[key] for key in sorted(values)))
            moved = displacement(model, prompts["none"][0], prompts["mless"][0], layers=EVERY)
            kept(f"{name}, displacements", *moved.sums.values(), moved.output, moved.displacement)
    return found


def answers(model: LoadedModel, **decoding: Any) -> dict[tuple[str, str], tuple[int, ...]]:
    """Tokens of some answers, without ARM and with it; rows are checked to be independent of their neighbours first."""
    prompts = mless.prompts(model, _QUESTIONS, "mless", prompt="raw", length=9, system="a", seed=3)
    requests = [
        Request(condition, str(n), 0, n, prompt.token_ids, shared=0 if arm else 4, arm=arm)
        for condition, arm in (("none", None), ("arm", arm_settings(**ARM)))
        for n, prompt in enumerate(prompts)
    ]
    with HfEngine(model, length=128, slots=8) as engine:
        engine.self_check(requests)
        replies = engine.generate(requests, Decoding(**{"max_new_tokens": 8} | decoding))
        return {(reply.condition, reply.item): reply.token_ids for reply in replies}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert np.isfinite(values).any(), name
        size = np.nanmax(np.abs(values))
        np.testing.assert_allclose(other[name], values, rtol=0, atol=tolerance * max(1.0, size), err_msg=name)


def weights_elsewhere(model: LoadedModel) -> int:
    """How many weights have no numbers outside of a forward."""
    return sum(weight.device == torch.device("meta") for weight in model.model.parameters())
