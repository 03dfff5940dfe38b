"""What `mless models` says, of all models at hand and of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_model, save_tokenizer, write_gguf

from mless import cli
from mless.errors import UnknownModel
from mless.models import FAMILIES, locate
from mless.models.listing import available_models, profile


def quiet(line: str) -> None: ...


def described(name: object, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer": None, "trust_remote_code": False, "say": quiet}
    return profile(str(name), **(settings | options))


def test_models_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "cache"))
    assert available_models()["smollm2"] == "SmolLM2-135M-Instruct, embedded"
    source = locate(str(write_gguf(tmp_path / "x" / "tiny.gguf")))
    assert available_models()[str(source.folder)] == "Tiny Llama, converted from GGUF"
    assert described(source.folder)["layers"] == 2  # what is listed can be given as it stands
    (source.folder / "mless.json").write_text("{")
    assert str(source.folder) not in available_models()


def test_models_in_the_hubs_cache_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--a--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    save_model(snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    assert available_models()["a/tiny"].startswith("in the hub's cache, ")


def test_what_is_listed_is_models_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert list(available_models()) == ["smollm2"]
    assert all(family.label for family in FAMILIES.values())


def test_the_command_says_that_it_converts_a_gguf_before_it_describes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "x" / "tiny.gguf")
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["mless", "models", str(file)])
    for converts in (True, False):  # once
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
        told = capsys.readouterr()
        assert ("converting tiny.gguf to safetensors, once" in told.err) == converts
        assert "layers" in told.out


def test_a_profile_says_what_a_model_is_like(tmp_path: Path) -> None:
    content = described(save_model(tmp_path / "tiny", "gemma3_text", shard="1KB"))
    assert content["model"] == "tiny"
    assert content["from"] == "folder"
    assert content["family"] == "Gemma 3"
    assert (content["layers"], content["heads"], content["key/value heads"], content["context"]) == (6, 4, 2, 256)
    assert content["sliding window"] == 16
    assert content["tokenizer"].endswith("tokens, BOS added")
    assert content["chat template"] == "no (prompt auto = raw)"


def test_a_profile_reads_no_weights(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", shard="1KB")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert described(folder)["layers"] == 6


def test_a_profile_names_what_stands_in_the_way(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "gemma", "gemma3_text", bos=False)
    assert "FAULT: the tokenizer of" in described(folder)["tokenizer"]
    better = save_tokenizer(tmp_path / "better", bos=True, template="{{ messages }}")
    content = described(folder, tokenizer=str(better))
    assert content["tokenizer"].endswith("BOS added")
    assert content["chat template"] == "yes (prompt auto = chat)"
    with pytest.raises(UnknownModel, match="did you mean"):
        described("smollm")


def test_the_embedded_models_profile(embedded: Any) -> None:
    content = described("smollm2")
    assert (content["model"], content["from"], content["family"]) == ("SmolLM2-135M-Instruct", "gguf", "Llama")
    assert content["tokenizer"] == "49152 tokens, BOS not added"
