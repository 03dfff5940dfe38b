"""A tokenizer that would feed its model what it was not trained on is found out and named, with the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_models import save_model, save_tokenizer, write_gguf

import mless
from mless.errors import TokenizerFault
from mless.models import locate
from mless.models.tokenizers import open_tokenizer


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "gemma", "gemma3_text", bos=False)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_missing_bos_is_named_with_its_cause_and_the_fix(gemma: Path) -> None:
    with pytest.raises(TokenizerFault) as caught:
        mless.load(str(gemma), layers=1)
    message = str(caught.value)
    assert "adds no BOS token (id 0)" in message
    assert "Gemma 3 models were trained with one" in message
    assert "--tokenizer DIR" in message
    assert "\n" not in message


@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_tokenizer_that_adds_it_is_the_fix(gemma: Path, tmp_path: Path, given: str) -> None:
    better = save_tokenizer(tmp_path / "better", bos=True)
    model = mless.load(str(gemma), layers=1, tokenizer=str(better if given == "folder" else better / "tokenizer.json"))
    assert model.tokenizer("a").input_ids[0] == 0
    worse = save_tokenizer(tmp_path / "worse", bos=False)
    with pytest.raises(TokenizerFault, match="adds no BOS"):
        mless.load(str(gemma), layers=1, tokenizer=str(worse))


def test_a_gemma_that_adds_its_bos_is_fine(tmp_path: Path) -> None:
    model = mless.load(str(save_model(tmp_path / "gemma", "gemma3_text", bos=True)), layers=1)
    assert model.omit_first
    assert model.bos == 0  # what its prompts must begin with, whatever a chat template renders


def test_a_llama_or_qwen_without_bos_is_fine(tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        model = mless.load(str(save_model(tmp_path / family, family, bos=False)), layers=1)
        assert model.tokenizer("a").input_ids[0] != 0
        assert model.bos is None


def test_a_loss_measured_without_bos_speaks_for_any_family(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "x" / "tiny.gguf")
    notes_file = locate(str(file)).folder / "mless.json"
    notes = json.loads(notes_file.read_text())
    assert notes["bos"].keys() == {"id", "loss_with", "loss_without"}
    notes_file.write_text(json.dumps(notes | {"bos": {"id": 0, "loss_with": 3.0, "loss_without": 4.4}}))
    assert mless.load(str(file), layers=1).loaded_layers == 1
    notes_file.write_text(json.dumps(notes | {"bos": {"id": 0, "loss_with": 3.0, "loss_without": 7.1}}))
    with pytest.raises(TokenizerFault, match=r"its loss on plain text is 7\.1 without one and 3\.0 with it"):
        mless.load(str(file), layers=1)
    with pytest.raises(TokenizerFault, match="its loss on plain text"):  # the converted folder remembers
        mless.load(str(notes_file.parent), layers=1)
    better = save_tokenizer(tmp_path / "better", bos=True, size=300)
    assert mless.load(str(file), layers=1, tokenizer=str(better)).tokenizer("a").input_ids[0] == 0


def test_what_the_gguf_says_of_its_bos_counts(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "x" / "tiny.gguf", add_bos=True)
    save_tokenizer(file.parent, bos=False, size=300)
    with pytest.raises(TokenizerFault, match="the GGUF says add_bos_token"):
        mless.load(str(file))
    assert mless.load(str(file), tokenizer=str(save_tokenizer(tmp_path / "better", bos=True, size=300))).bos == 0


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path, gemma: Path) -> None:
    folder = save_model(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(TokenizerFault, match=r"bare' has no tokenizer.json; .*--tokenizer DIR"):
        mless.load(str(folder), layers=1)
    assert mless.load(str(folder), layers=1, tokenizer=str(gemma)).loaded_layers == 1


@pytest.mark.parametrize("content", ["{", "{}", '{"version": "1.0", "added_tokens": [], "model": {"type": "Own"}}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    folder = save_model(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerFault, match=r"no tokenizer could be read from .*--tokenizer"):
        mless.load(str(folder), layers=1)


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    from transformers import CTRLTokenizer

    folder = save_model(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "a</w>": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    slow = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    slow.save_pretrained(folder)
    for given in (None, slow):
        with pytest.raises(TokenizerFault, match=r"slow tokenizer.*tokenizer.json: --tokenizer DIR"):
            mless.load(str(folder), layers=1, tokenizer=given)


def test_a_tokenizer_is_given_by_name_by_path_or_loaded(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    own = mless.load(str(folder), layers=1).tokenizer
    for given in (str(folder), folder, own):
        assert mless.load(str(folder), layers=1, tokenizer=given).tokenizer("a b").input_ids == own("a b").input_ids
    with pytest.raises(TokenizerFault, match="a name, a folder or a tokenizer of transformers expected, got int"):
        mless.load(str(folder), layers=1, tokenizer=7)
    other = save_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(
        TokenizerFault, match=r"the tokenizer that was given has \d+ tokens, but the model .* knows 300"
    ):
        mless.load(str(other), layers=1, tokenizer=own)


def test_another_models_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", vocab_size=300)
    with pytest.raises(
        TokenizerFault, match=r"has \d+ tokens, but the model .* knows 300: it belongs to another model"
    ):
        mless.load(str(folder), layers=1)


def test_tokenizers_and_templates_have_fingerprints(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    plain = mless.load(str(folder), layers=1)
    assert not plain.tokenizer.chat_template
    copied = shutil.copytree(folder, tmp_path / "copied")
    assert mless.load(str(copied), layers=1).tokenizer_fingerprint == plain.tokenizer_fingerprint
    save_tokenizer(folder, bos=True, template="{{ messages[0]['content'] }}")
    chatting = mless.load(str(folder), layers=1)
    assert chatting.tokenizer.chat_template
    assert chatting.tokenizer_fingerprint != plain.tokenizer_fingerprint


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            {"normalizer": {"type": "Prepend", "prepend": "z" * 1_000_000}},
            r"its normalizer holds 1,000,000 characters; expected at most",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "gone", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {},
                }
            },
            "no entry found for key",
        ),
    ],
    ids=["endless-prefix", "panic"],
)
def test_a_tokenizer_that_hangs_or_panics_is_refused(tmp_path: Path, part: dict[str, object], says: str) -> None:
    folder = save_tokenizer(tmp_path / "odd", bos=True)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | part))
    with pytest.raises(TokenizerFault, match=rf"no tokenizer could be read from .*{says}.*give one with --tokenizer"):
        open_tokenizer(str(folder))
