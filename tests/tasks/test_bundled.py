"""The questions and sentences that come with the package."""

from __future__ import annotations

import re

from mless.tasks import filler_sentences, load_items


def test_bundled_items() -> None:
    name, items = load_items("bundled")
    assert name == "bundled"
    assert [item.id for item in items] == [f"bundled-{n:02d}" for n in range(1, 25)]
    assert len({item.question for item in items}) == 24
    for item in items:
        assert item.question.endswith("?"), item
        # Words, as the tokenizer is heavy: 45 to 70 of them made 61 to 87 SmolLM2 tokens when these were written.
        assert 45 <= len(item.question.split()) <= 70, item
        assert item.answer is not None
        assert re.fullmatch(r"\d+|\d+/\d+|[A-Z][a-z]+", item.answer), item


def test_the_first_bundled_items() -> None:
    assert load_items("bundled", limit=5) == ("bundled", load_items("bundled")[1][:5])


def test_sentences_are_plain_prose_without_numbers_or_questions() -> None:
    sentences = filler_sentences()
    assert len(sentences) == len(set(sentences)) >= 60
    number = re.compile(r"\d|\b(one|two|three|four|five|six|seven|eight|nine|ten|hundred|half|first|second)\b", re.I)
    for sentence in sentences:
        assert re.fullmatch(r"[A-Z][A-Za-z ,]+\.", sentence), sentence
        assert 10 <= len(sentence.split()) <= 25, sentence
        assert not number.search(sentence), sentence
