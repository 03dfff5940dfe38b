"""Hostile model folders: refused in words, before anything is built, by the gate alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import mless
from mless.errors import MlessError, TokenizerFault, UnknownModel
from mless.models import describe
from mless.models.gate import check_generation_config, read_config, read_header, read_index, read_notes
from mless.models.loading import fingerprint
from spelling import model_folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("gate") / "good")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "m"))


def changed(folder: Path, file: str, **fields: Any) -> None:
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(content | fields))


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("num_hidden_layers", 10**5, "at most 1,000 layers (limit layers"),
        ("num_hidden_layers", 2**31, "at most 1,000 layers"),
        ("num_hidden_layers", 0, "a whole number of at least 1, not 0"),
        ("num_hidden_layers", "2", "should be a whole number, not '2'"),
        ("num_attention_heads", 0, "at least 1"),
        ("num_attention_heads", True, "should be a whole number, not true or false"),
        ("num_key_value_heads", 0, "at least 1"),
        ("head_dim", 0, "at least 1"),
        ("vocab_size", 10**12, "limit config-width"),
        ("vocab_size", 10**30, "limit config-width"),
        ("num_labels", 10**9, "limit config-count"),
        ("num_experts", 10**9, "limit config-count"),
        ("model_type", [], "model_type should be a short name, not a list"),
        ("model_type", "x" * 1000, "model_type should be a short name"),
        ("auto_map", 5, "auto_map should name code files"),
        ("auto_map", {"AutoConfig": 5}, "auto_map should name code files"),
        ("text_config", 5, "text_config should be an object, not 5"),
        ("text_config", {"num_hidden_layers": 10**6}, "text_config.num_hidden_layers"),
        ("dtype", [], "dtype should be a dtype such as bfloat16"),
        ("dtype", "os.system", "dtype should be a dtype"),
        ("architectures", [5], "architectures should be a list of names"),
        ("save_pretrained", 5, "'save_pretrained' is a method"),
    ],
)
def test_configs(folder: Path, field: str, value: Any, why: str) -> None:
    changed(folder, "config.json", **{field: value})
    with pytest.raises(UnknownModel) as refused:
        read_config(folder, "m")
    assert why in str(refused.value)
    assert str(refused.value).startswith("'m': its config.json is broken: ")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"text_config": {}}, "has no text_config"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8, but there are 4 heads"),
        ({"pad_token_id": 10**9}, "pad_token_id is 1000000000; expected"),
        ({"num_kv_shared_layers": "x"}, "num_kv_shared_layers should count some of the 2 layers"),
    ],
)
def test_configs_as_transformers_reads_them(folder: Path, fields: dict[str, Any], why: str) -> None:
    changed(folder, "config.json", **fields)
    with pytest.raises(UnknownModel, match=why):
        describe(str(folder))


def test_a_config_wider_than_its_weights_asks_for_no_memory(folder: Path) -> None:
    changed(folder, "config.json", vocab_size=90_000_000)
    with pytest.raises(UnknownModel, match=r"vocab_size is 90,000,000, but no tensor is longer than"):
        mless.load(str(folder))


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def refused_header(folder: Path, header: Any, data: bytes) -> str:
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(written).to_bytes(8, "little") + written + data)
    with pytest.raises(UnknownModel) as refused:
        read_header(path, path.name, "m")
    assert str(refused.value).isprintable()
    return str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("dtype", "EVIL", "has no known dtype"),
        ("dtype", 5, "has no known dtype"),
        ("dtype", "F64", "but its shape and dtype say otherwise"),
        ("shape", None, "has no shape"),
        ("shape", [-1, 5], "has no shape"),
        ("shape", [10**18, 10**18], "say otherwise"),
        ("shape", [True], "has no shape"),
        ("data_offsets", "x", "has no place in the file"),
        ("data_offsets", [0], "has no place in the file"),
        ("data_offsets", [-5, 10], "has no place in the file"),
    ],
)
def test_headers(folder: Path, field: str, value: Any, why: str) -> None:
    header, data = header_of(folder)
    header["lm_head.weight"][field] = value
    assert why in refused_header(folder, header, data)


def test_whole_headers(folder: Path) -> None:
    header, data = header_of(folder)
    assert "holds no tensors" in refused_header(folder, {}, b"")
    assert "should hold an object" in refused_header(folder, [], data)
    assert "nested too deeply" in refused_header(folder, b"[" * 90_000, data)
    assert "not UTF-8" in refused_header(folder, b"\xff\xfe", data)
    assert "by an object" in refused_header(folder, header | {"lm_head.weight": 5}, data)
    assert "metadata" in refused_header(folder, header | {"__metadata__": 5}, data)
    assert "is no name of a tensor" in refused_header(
        folder, {f"layers.{'9' * 5000}.x": header["lm_head.weight"]}, data
    )
    one, other = [key for key in header if key.endswith("norm.weight")][:2]
    overlapping = header | {one: header[other]}
    assert "but the one before it ends at" in refused_header(folder, overlapping, data)
    (folder / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(UnknownModel, match="do not hold the header"):
        read_header(folder / "model.safetensors", "model.safetensors", "m")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"weight_map": {}}, "found nothing"),
        ({}, "found null"),
        ({"weight_map": []}, "found a list"),
        ({"weight_map": {"a": 5}}, "should lie in a file, found 5"),
        ({"weight_map": {"a": "x" * 5000}}, "should lie in a file"),
        ([], "should hold an object"),
    ],
)
def test_indexes(tmp_path: Path, content: Any, why: str) -> None:
    (tmp_path / "index.json").write_text(json.dumps(content))
    with pytest.raises(UnknownModel, match=why):
        read_index(tmp_path / "index.json", "m")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file(folder: Path, file: str, kind: str) -> None:
    (folder / file).unlink()
    if kind == "folder":
        (folder / file).mkdir()
    elif kind == "pipe":
        os.mkfifo(folder / file)
    else:
        (folder / file).symlink_to("/dev/zero")
    with pytest.raises(MlessError, match=f"is a {kind}, not a file"):
        mless.load(str(folder))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model_max_length": "x"}, "model_max_length that is no number"),
        ({"model_input_names": 5}, "no list of names"),
    ],
)
def test_tokenizer_settings(folder: Path, fields: dict[str, Any], why: str) -> None:
    changed(folder, "tokenizer_config.json", **fields)
    with pytest.raises(TokenizerFault, match=why):
        mless.load(str(folder))


def test_token_ids_beyond_the_embedding(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    model = mless.load(str(folder))
    with pytest.raises(TokenizerFault, match=r"holds token 5000 .* knows"):
        list(mless.received(model, mless.prompts(model, ["a"], prompt="raw")))


@pytest.mark.parametrize("value", [{}, "x", [10**12], -5, [True]])
def test_tokens_that_end_an_answer(folder: Path, value: Any) -> None:
    changed(folder, "generation_config.json", eos_token_id=value)
    with pytest.raises(UnknownModel, match="as eos_token_id, which is no token id"):
        check_generation_config(folder, "m")


@pytest.mark.parametrize(
    "content",
    [
        "[" * 90_000,
        "[]",
        '{"gguf": 5}',
        '{"gguf": {}, "bos": 5}',
        '{"gguf": {}, "bos": {"id": 1}}',
        '{"gguf": {}, "bos": {"id": 1, "loss_with": "x", "loss_without": 2}}',
        '{"gguf": {"name": "\\ud800"}}',
        '{"gguf": {"name": ["x"]}}',
    ],
)
def test_notes_that_mless_did_not_write(tmp_path: Path, content: str) -> None:
    (tmp_path / "mless.json").write_text(content)
    assert read_notes(tmp_path) is None


@pytest.mark.parametrize("what", ["folder", "deep"])
def test_a_generation_config_that_cannot_be_read_is_named(folder: Path, what: str) -> None:
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if what == "folder":
        path.mkdir()
    else:
        path.write_text("[" * 100_000)
    with pytest.raises(UnknownModel, match=r"generation_config\.json: (is a folder, not a file|line 1: broken JSON)"):
        fingerprint(describe(str(folder)).source, 1, head=True)
