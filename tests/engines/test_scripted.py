"""The shipped fake: what it answers, how it cuts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mless.engines.base import Decoding, Reply, Request
from mless.engines.scripted import ScriptedEngine
from mless.errors import BadData, EngineFault

GREEDY = Decoding()


def ask(engine: ScriptedEngine, *requests: Request, decoding: Decoding = GREEDY) -> list[Reply]:
    return list(engine.generate(requests, decoding))


def text_of(engine: ScriptedEngine, condition: str, item: str) -> str:
    return ask(engine, Request(condition, item))[0].text


class Letters:
    """A tokenizer with a token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([0] if add_special_tokens else []) + [ord(char) for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_each_request_is_answered_once_and_remembered():
    requests = [Request("none", "1"), Request("mless", "1", sample=2), Request("none", "2")]
    with ScriptedEngine({"1": "four", "2": "five of them"}) as engine:
        replies = ask(engine, *requests)
    assert [(reply.key, reply.text, reply.n_tokens, reply.finish) for reply in replies] == [
        (("none", "1", 0), "four", 1, "stop"),
        (("mless", "1", 2), "four", 1, "stop"),
        (("none", "2", 0), "five of them", 3, "stop"),
    ]
    assert engine.seen == requests


def test_the_best_fitting_line_counts():
    engine = ScriptedEngine(
        {"1": "any condition", "*": "any at all", "mless": {"1": "both", "*": "mless, any"}, "mful": {"2": "mful 2"}}
    )
    assert text_of(engine, "mless", "1") == "both"
    assert text_of(engine, "mless", "2") == "mless, any"
    assert text_of(engine, "mful", "1") == "any condition"
    assert text_of(engine, "mful", "2") == "mful 2"
    assert text_of(engine, "mful", "3") == "any at all"


def test_wildcard_condition_is_the_same_as_no_condition():
    engine = ScriptedEngine({"*": {"1": "one", "*": "rest"}})
    assert [text_of(engine, "none", item) for item in "12"] == ["one", "rest"]


def test_a_function_may_answer():
    engine = ScriptedEngine(lambda request: f"{request.condition} {request.item}")
    assert text_of(engine, "none", "7") == "none 7"


def test_item_without_answer_is_named():
    with pytest.raises(EngineFault, match=r"no scripted answer for item '9' of condition 'mful'.*'\*'"):
        ask(ScriptedEngine({"1": "x", "none": {"9": "y"}}), Request("mful", "9"))


@pytest.mark.parametrize("value", [3, None, [], ["a", 4], {"1": {"2": "too deep"}}])
def test_values_that_are_no_texts_are_refused(value: object):
    with pytest.raises(EngineFault, match="scripted answer of item"):
        ScriptedEngine({"1": value})


def test_function_that_gives_no_text_is_refused():
    with pytest.raises(EngineFault, match=r"must give a text for item '1' of 'none', got None"):
        ask(ScriptedEngine({"1": None}.get), Request("none", "1"))  # type: ignore[arg-type]


def test_line_given_twice_is_refused():
    with pytest.raises(EngineFault, match=r"'1' is scripted both by itself and under condition"):
        ScriptedEngine({"1": "a", "*": {"1": "b"}})


def test_long_answers_are_cut_at_words():
    engine = ScriptedEngine({"*": "one  two\nthree four"})
    cut = ask(engine, Request("none", "1"), decoding=Decoding(max_new_tokens=3))[0]
    assert (cut.text, cut.n_tokens, cut.finish) == ("one  two\nthree", 3, "length")
    whole = ask(engine, Request("none", "1"), decoding=Decoding(max_new_tokens=4))[0]
    assert (whole.text, whole.n_tokens, whole.finish) == ("one  two\nthree four", 4, "stop")


def test_long_answers_are_cut_at_the_tokenizer_s_tokens():
    engine = ScriptedEngine({"*": "abcdef"}, tokenizer=Letters())
    cut = ask(engine, Request("none", "1"), decoding=Decoding(max_new_tokens=4))[0]
    assert (cut.text, cut.n_tokens, cut.finish, cut.token_ids) == ("abcd", 4, "length", (97, 98, 99, 100))


def test_stop_texts_end_an_answer_and_are_no_part_of_it():
    engine = ScriptedEngine({"*": "The answer is 4. Question: and 5?"})
    reply = ask(engine, Request("none", "1"), decoding=Decoding(stop=("?", " Question:")))[0]
    assert (reply.text, reply.n_tokens, reply.finish) == ("The answer is 4.", 4, "stop")


def test_stop_text_beyond_the_cut_is_never_reached():
    engine = ScriptedEngine({"*": "a b c STOP d"})
    reply = ask(engine, Request("none", "1"), decoding=Decoding(max_new_tokens=2, stop=("STOP",)))[0]
    assert (reply.text, reply.finish) == ("a b", "length")


def test_empty_text_is_an_answer():
    reply = ask(ScriptedEngine({"*": ""}), Request("none", "1"))[0]
    assert (reply.text, reply.n_tokens, reply.finish) == ("", 0, "stop")


def test_greedy_takes_the_first_text_and_sampling_draws_by_seed():
    engine = ScriptedEngine({"*": ["a", "b", "c"]})
    requests = [
        Request(condition, "1", sample, seed=100 + sample) for condition in ("none", "mless") for sample in range(60)
    ]
    assert {reply.text for reply in ask(engine, *requests)} == {"a"}
    drawn = [reply.text for reply in ask(engine, *requests, decoding=Decoding(temperature=1.0))]
    assert set(drawn) == {"a", "b", "c"}
    assert drawn[:60] == drawn[60:], "conditions share their luck"
    backwards = ask(engine, *reversed(requests), decoding=Decoding(temperature=0.5))
    assert [reply.text for reply in backwards][::-1] == drawn


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_from_file(tmp_path: Path, suffix: str):
    path = tmp_path / f"answers{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps({"1": "é", "mless": {"*": ["a", "b"]}}))
    else:
        path.write_text('1 = "é"\n[mless]\n"*" = ["a", "b"]\n', encoding="utf-8")
    engine = ScriptedEngine.from_file(path)
    assert [text_of(engine, "none", "1"), text_of(engine, "mless", "5")] == ["é", "a"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"1": "a"', "broken JSON"),
        (b'["a"]', "should hold an object, not a list; expected"),
        (b'{"1": "a", "1": "b"}', "'1' stands twice"),
        (b'{"1": "\xff"}', "is not UTF-8"),
        (b"[" * 100_000, "broken JSON"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path: Path, content: bytes, says: str):
    path = tmp_path / "answers.json"
    path.write_bytes(content)
    with pytest.raises(BadData, match=says):
        ScriptedEngine.from_file(path)


def test_missing_file_and_broken_toml_are_told(tmp_path: Path):
    with pytest.raises(BadData, match=r"nothing\.json': is not there; expected"):
        ScriptedEngine.from_file(tmp_path / "nothing.json")
    (tmp_path / "answers.toml").write_text("1 = ")
    with pytest.raises(BadData, match="no valid TOML"):
        ScriptedEngine.from_file(tmp_path / "answers.toml")


def test_about_says_that_no_model_was_asked():
    about = ScriptedEngine({"*": "x"}).about()
    assert about["engine"] == "scripted"
    assert "no model" in about["promise"]
    assert json.loads(json.dumps(about)) == about


def test_the_control_says_what_none_says_unless_it_is_scripted_itself() -> None:
    def said(answers: dict[str, Any]) -> str:
        engine = ScriptedEngine(answers)
        return next(engine.generate([Request("none-again", "q")], Decoding())).text

    assert said({"none": {"q": "a"}, "*": {"q": "b"}}) == "a"
    assert said({"none": {"q": "a"}, "none-again": {"q": "c"}}) == "c"
    assert said({"*": {"q": "b"}}) == "b"
