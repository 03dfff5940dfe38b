"""Placebo edits: exactly so many tokens, the same for all items, different from each other, whatever the tokenizer. And doses of a filler."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mless import limits
from mless.conditions import CONDITION_KINDS, EDITS, Kind
from mless.errors import BadPrompt, BadStudy
from mless.models import LoadedModel
from mless.prompting import build_messages, build_prompts, shared_beginning, with_filler_ids
from mless.results import wording
from mless.study import load_study, run_study
from mless.study.conditions import conditions_of
from mless.study.grids import check_distinct, dose_conditions, dose_lengths, placebo_conditions
from mless.study.identity import digest
from mless.study.spec import ConditionTable
from mless.tasks import filler_sentences
from mless.values import PLACEMENTS, Condition, Item, Placement, condition_of, condition_words
from spelling import CHATML, NO_SYSTEM, TRIMS, byte_level, model_folder, with_a_prefix

SENTENCES = filler_sentences()
ITEMS = [Item("a", "How much is 1 + 1?"), Item("b", "Find the sum of two and three."), Item("c", "👩🏽‍🚀 /?\n")]
MADE: dict[str, Callable[[], Any]] = {
    "raw": byte_level,
    "raw-bos": lambda: byte_level(bos=True),
    "trimmed-offsets": lambda: byte_level(CHATML, bos=True, trim_offsets=True),
    "chatml": lambda: byte_level(CHATML),
    "template-trims": lambda: byte_level(TRIMS, bos=True),
    "template-without-system": lambda: byte_level(NO_SYSTEM, bos=True),
    "blank-before-every-text": lambda: with_a_prefix(CHATML),
}
PUBLISHED = Path(os.environ["MLESS_TOKENIZERS"]) if os.environ.get("MLESS_TOKENIZERS") else None


def words_only() -> Any:
    """A vocabulary of a few words, with neither bytes nor blanks."""
    vocabulary = {"<unk>": 0, "a": 1, "the": 2, ".": 3, ",": 4}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def fillers(tokenizer: Any, condition: Condition, seed: int = 0) -> list[tuple[int, ...]]:
    kind: Any = "chat" if tokenizer.chat_template else "raw"
    made = build_prompts(tokenizer, ITEMS, condition, kind=kind, seed=seed, sentences=SENTENCES)
    return [tuple(prompt.token_ids[at] for at in prompt.positions("filler")) for prompt in made]


def check(tokenizer: Any, conditions: list[Condition]) -> None:
    """Exactly `length` tokens, none of them special, the same for every item and study seed, listed, and all different."""
    known = with_filler_ids(tokenizer, conditions, SENTENCES)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for one, listed in zip(conditions, known, strict=True):
        ids = listed.filler_ids
        assert ids is not None
        assert len(ids) == one.length
        assert not set(ids) & {*special, *tokenizer.all_special_ids}
        assert all(0 <= token < len(tokenizer) for token in ids)
        assert fillers(tokenizer, one) == fillers(tokenizer, one, seed=7) == [ids] * len(ITEMS)
        shown = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if one.kind in ("edit-newlines", "edit-spaces"):
            assert not shown.strip()
        if one.kind == "edit-one-token":
            assert len(set(ids)) == 1
    assert len({one.filler_ids for one in known}) == len(known)
    check_distinct(known)
    assert with_filler_ids(tokenizer, conditions, SENTENCES) == known


@pytest.mark.parametrize("name", MADE)
def test_edits_in_seven_kinds_of_tokenizers(name: str) -> None:
    # The last one's vocabulary has so few plain tokens that seed 0 draws one of them for two edits.
    check(MADE[name](), placebo_conditions(seed=int(name == "blank-before-every-text")))


def test_edits_of_the_embedded_model(embedded: LoadedModel) -> None:
    conditions = placebo_conditions(k=16, length=20, placement="end", seed=3)
    check(embedded.tokenizer, conditions)
    by_kind = {one.kind: embedded.tokenizer.decode(fillers(embedded.tokenizer, one)[0]) for one in conditions}
    assert not any(sign.isalnum() or sign == "/" for sign in by_kind["edit-punctuation"])
    assert set(by_kind["edit-newlines"]) <= set("\n\r\t ")
    assert "\n" in by_kind["edit-newlines"]
    assert not any(sign.isascii() and sign.isprintable() for sign in by_kind["edit-emoji"])
    words = {word.strip(".,;:!?'\"").lower() for sentence in SENTENCES for word in sentence.split()}
    assert set(by_kind["edit-shuffled-words"].split()[:-1]) <= words
    assert any(by_kind["edit-sentences"].strip()[:30] in sentence for sentence in SENTENCES)


@pytest.mark.skipif(PUBLISHED is None, reason="MLESS_TOKENIZERS names no folder of published tokenizers")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gemma3", "mistral_nemo", "deepseek_v3", "gpt2"])
def test_edits_in_published_tokenizers(name: str) -> None:
    from transformers import AutoTokenizer

    assert PUBLISHED is not None
    check(AutoTokenizer.from_pretrained(PUBLISHED / name), placebo_conditions())


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**63 - 1), st.sampled_from(list(EDITS)))
def test_a_longer_edit_begins_with_the_shorter(short: int, long: int, seed: int, kind: str) -> None:
    short, long = sorted((short, long))
    one, other = (Condition("x", kind, None, length, seed=seed) for length in (short, long))
    tokenizer = byte_level()
    ids, longer = (
        kind_of.ids(tokenizer, c, item="", seed=0, sentences=SENTENCES)
        for c in (one, other)
        for kind_of in [EDITS[kind]]
    )
    assert longer[:short] == ids
    assert len(longer) == long


def test_placebos_are_spread_over_the_kinds_and_seeded() -> None:
    made = placebo_conditions()
    assert [one.name for one in made[:9]] == [
        "edit-01-random-tokens", "edit-02-one-token", "edit-03-punctuation", "edit-04-newlines", "edit-05-spaces", "edit-06-emoji",
        "edit-07-sentences", "edit-08-shuffled-words", "edit-09-random-tokens",
    ]  # fmt: skip
    assert len({one.name for one in made}) == 40
    kinds = [one.kind for one in made]
    assert {kind: kinds.count(kind) for kind in EDITS} == dict.fromkeys(EDITS, 5)
    assert {(one.length, one.placement) for one in made} == {(55, "before-question")}
    assert placebo_conditions() == made
    assert placebo_conditions(k=80)[:40] == made
    drawn = {(one.kind, one.seed) for one in made}
    assert not drawn & {(one.kind, one.seed) for one in placebo_conditions(seed=1)}
    assert all(0 <= (one.seed or 0) <= limits.SEED.value for one in placebo_conditions(seed=limits.SEED.value))
    only = placebo_conditions(k=3, kinds=["edit-emoji", "edit-spaces"])
    assert [one.kind for one in only] == ["edit-emoji", "edit-spaces", "edit-emoji"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": 0}, "placebos: edits: expected at least 1, got 0"),
        ({"k": 1001}, r"placebos: edits: .*at most 1,000 conditions"),
        ({"length": 0}, "placebos: length: expected at least 1, got 0"),
        ({"length": 10**7}, r"placebos: length: .*at most 1,000,000 tokens"),
        ({"placement": "in-front"}, "placebos: no placement 'in-front'; there are: before-system"),
        ({"placement": "before-answr"}, r"no placement 'before-answr' \(did you mean 'before-answer'\?\)"),
        ({"kinds": ["edit-emojis"]}, r"no kind of edit 'edit-emojis' \(did you mean 'edit-emoji'\?\); there are: edit-random-tokens"),
        ({"kinds": []}, "at least one; got none"),
        ({"kinds": ["edit-emoji", "edit-emoji"]}, "name each kind of edit once"),
    ],
)  # fmt: skip
def test_bad_placebos_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadStudy, match=message):
        placebo_conditions(**given)


def test_edits_that_are_the_same_tokens_are_refused() -> None:
    conditions = placebo_conditions(k=40, length=1, kinds=["edit-newlines"])
    with pytest.raises(
        BadStudy, match=r"conditions 'edit-\d\d-newlines' and 'edit-\d\d-newlines' are the same 1 tokens"
    ):
        check_distinct(with_filler_ids(byte_level(), conditions, SENTENCES))
    check_distinct(with_filler_ids(byte_level(), conditions[:1], SENTENCES))
    # Repeated fillers may be alike: a study may compare one in two ways.
    check_distinct(
        with_filler_ids(byte_level(), [Condition("x", "repeat", " /", 3), Condition("y", "repeat", " /", 3)])
    )


def test_a_tokenizer_without_the_signs_refuses_the_kind_by_name() -> None:
    tokenizer = words_only()
    with pytest.raises(
        BadPrompt, match="has no tokens for emoji, which edits of kind edit-emoji are made of; leave that kind out"
    ):
        fillers(tokenizer, Condition("x", "edit-emoji", None, 5))
    with pytest.raises(BadPrompt, match="has no tokens for line breaks"):
        fillers(tokenizer, Condition("x", "edit-newlines", None, 5))
    (ids, *_) = fillers(tokenizer, Condition("x", "edit-punctuation", None, 50))
    assert set(ids) == {3, 4}  # the full stop and the comma, and never <unk>


def test_edits_say_what_they_are(embedded: LoadedModel) -> None:
    (one,) = with_filler_ids(embedded.tokenizer, [Condition("x", "edit-one-token", None, 4, seed=9)])
    assert condition_words(one) == "4 tokens, one random token repeated, drawn with seed 9, before-question"
    stored = {
        **{name: getattr(one, name) for name in one.__dataclass_fields__},
        "filler_ids": list(one.filler_ids or ()),
    }
    assert condition_of("x", json.loads(json.dumps(stored))) == one
    assert wording.filler_shown(stored) == "one random token repeated"
    # Its tokens are the same for all items, so they belong to the prompts' shared beginning.
    (prompt, *_) = build_prompts(embedded.tokenizer, ITEMS, one, kind="chat", sentences=SENTENCES)
    assert shared_beginning(prompt, one) == prompt.positions("question")[0]


def test_edits_as_text() -> None:
    for kind, edit in EDITS.items():
        condition = Condition("x", kind, None, 12, seed=2)
        if kind in ("edit-random-tokens", "edit-one-token", "edit-newlines", "edit-spaces"):
            with pytest.raises(BadPrompt, match=r"condition 'x'.*(server's is not known|trim blanks)"):
                list(build_messages(ITEMS, condition, sentences=SENTENCES))
            continue
        first, second, _ = build_messages(ITEMS, condition, sentences=SENTENCES)
        added = [turn[1][1].removesuffix(item.question) for turn, item in zip((first, second), ITEMS, strict=False)]
        assert added[0] == added[1]
        assert added[0].strip()
        assert edit.text(condition, item="", seed=0, sentences=SENTENCES).strip() == added[0].strip()


def test_only_edits_take_a_seed() -> None:
    with pytest.raises(BadStudy, match="condition 'x': kind 'repeat' takes no seed of its own; leave seed out"):
        Condition("x", "repeat", " /", 3, seed=1)
    with pytest.raises(BadStudy, match="condition 'x': its seed must be 0 or more, got -1"):
        Condition("x", "edit-emoji", None, 3, seed=-1)
    with pytest.raises(BadStudy, match="condition 'x' draws its filler, so it takes no filler; got ' /'"):
        Condition("x", "edit-emoji", " /", 3)
    assert [name for name in CONDITION_KINDS.names() if CONDITION_KINDS.get(name).takes_seed] == list(EDITS)
    assert not Kind.takes_seed


def test_a_study_declares_an_edit_and_lists_its_ids(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (tmp_path / "own.toml").write_text(
        'conditions = ["none", "faces"]\nlayers = "1"\nlimit = 2\n[condition.faces]\nkind = "edit-emoji"\nlength = 5\nseed = 3\n'
    )
    spec = load_study(str(tmp_path / "own.toml"), {"model": str(folder)})
    assert conditions_of(spec)[1] == Condition("faces", "edit-emoji", None, 5, seed=3)
    run_study(spec, tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "study.json").read_text())["conditions"]["faces"]
    (known,) = with_filler_ids(byte_level(), [Condition("faces", "edit-emoji", None, 5, seed=3)], SENTENCES)
    assert (stored["seed"], tuple(stored["filler_ids"])) == (3, known.filler_ids)


def test_a_condition_without_a_seed_is_stored_as_before() -> None:
    """The digest of a study's own conditions, as folders had it before conditions had seeds."""
    before = {
        "kind": None, "filler": " .", "length": 40, "placement": None, "hidden": False, "system": None, "question": None, "samples": None,
        "temperature": None, "again": False, "arm": None,
    }  # fmt: skip
    assert digest(ConditionTable(filler=" .", length=40).model_dump()) == digest(before)


# ---- doses -----------------------------------------------------------------------------------------------------------------

MLESS = Condition("mless", "repeat", " /", 55)
RANDOM = Condition("random", "text", None, 55)


def test_a_dose_grid() -> None:
    made = dose_conditions([0, 16, 4], [MLESS, RANDOM], ["before-question", "before-answer"])
    assert [one.name for one in made] == [
        "none", "mless-4-before-question", "mless-16-before-question", "mless-4-before-answer", "mless-16-before-answer",
        "random-4-before-question", "random-16-before-question", "random-4-before-answer", "random-16-before-answer",
    ]  # fmt: skip
    assert made[0] == Condition("none", "none")
    assert made[4] == Condition("mless-16-before-answer", "repeat", " /", 16, "before-answer")
    assert [one.name for one in dose_conditions([3], [MLESS])] == ["mless-3-before-question"]
    emoji = Condition("faces", "edit-emoji", None, 55, hidden=True, seed=4)
    assert dose_conditions([3], [emoji])[0] == Condition(
        "faces-3-before-question", "edit-emoji", None, 3, hidden=True, seed=4
    )


def test_doses_of_one_item_are_nested() -> None:
    for filler in (MLESS, RANDOM, Condition("tokens", "tokens", None, 55), Condition("faces", "edit-emoji", None, 55)):
        drawn = [fillers(byte_level(), one) for one in dose_conditions([4, 16, 64], [filler])]
        for shorter, longer in pairwise(drawn):
            assert [ids[: len(short)] for ids, short in zip(longer, shorter, strict=True)] == shorter


def test_dose_lengths_are_log_spaced() -> None:
    assert dose_lengths() == (0, 1, 2, 4, 8, 16, 32, 63, 126, 251, 501, 1000)
    assert dose_lengths(8, 4) == (0, 1, 2, 4, 8)
    assert dose_lengths(3, 9) == (0, 1, 2, 3)


@given(st.integers(1, limits.FILLER.value), st.integers(2, 50))
def test_properties_of_dose_lengths(most: int, points: int) -> None:
    found = dose_lengths(most, points)
    assert found[:2] == (0, 1)
    assert found[-1] == most
    assert list(found) == sorted(set(found))
    assert len(found) <= points + 1


@pytest.mark.parametrize(
    ("lengths", "given", "placements", "message"),
    [
        ([], [MLESS], ["end"], "at least one length, one filler and one placement"),
        ([1], [], ["end"], "at least one length"),
        ([1], [MLESS], [], "at least one length"),
        ([-1], [MLESS], ["end"], "dose: length: expected at least 0, got -1"),
        ([10**7], [MLESS], ["end"], "dose: length: .*at most 1,000,000 tokens"),
        ([1, 1], [MLESS], ["end"], "dose: length 1 is named twice"),
        ([1], [MLESS, MLESS], ["end"], "dose: filler mless is named twice"),
        ([1], [MLESS], ["end", "end"], "dose: placement end is named twice"),
        ([1], [MLESS], ["ending"], r"dose: no placement 'ending' \(did you mean 'end'\?\); there are: before-system, before-question, end"),
        ([1], [Condition("none", "none")], ["end"], "condition 'none' inserts nothing, so it has no length; name a filler, as mless"),
        (range(1, 600), [MLESS, RANDOM], ["end"], r"599 lengths × 2 fillers × 1 placements are 1,198 conditions besides none; expected at most 1,000"),
        ([1], [Condition("shift", "shift", None, 3)], ["before-answer"], "shifts what comes after the prompt's end"),
        ([1], [Condition("x" * 199, "repeat", " /", 3)], ["end"], "condition name .*at most 200 characters"),
    ],
)  # fmt: skip
def test_bad_grids_are_refused(lengths: Any, given: list[Condition], placements: Any, message: str) -> None:
    with pytest.raises(BadStudy, match=message):
        dose_conditions(lengths, given, placements)


def test_every_placement_has_a_dose() -> None:
    assert get_args(Placement) == PLACEMENTS
    made = dose_conditions([2], [MLESS], PLACEMENTS)
    assert [one.placement for one in made] == list(PLACEMENTS)
