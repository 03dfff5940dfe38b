"""Chat templates from outside: they end, or are refused in words, and honest ones come out as transformers renders them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mless import limits, templates
from mless.errors import BadPrompt
from mless.prompting import build_prompts
from mless.values import Condition, Item
from spelling import CHATML, byte_level, with_a_prefix

TALK = [{"role": "system", "content": "Be brief. \ud800"}, {"role": "user", "content": "Why?\n\x00é"}]
FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def hasty() -> Iterator[None]:
    """A second is enough for what must not end; the limit in use is longer."""
    templates._ASKED.end()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(templates, "TEMPLATE_SECONDS", replace(limits.TEMPLATE_SECONDS, value=1))
        yield
    templates._ASKED.end()


@pytest.mark.parametrize("make", [byte_level, with_a_prefix])
@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
        "{{ messages | tojson }}{% if add_generation_prompt %}>{% endif %}",
        "{%- set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
        "{{ strftime_now('%Y %Z') }}",
    ],
)
def test_honest_templates_are_rendered_as_transformers_does(make: Any, template: str) -> None:
    tokenizer = make(template)
    expected = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert templates.render(tokenizer, TALK) == expected


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (FOR_EVER, "does not end; expected at most 1 seconds .limit template-seconds"),
        pytest.param("{{ 9 ** (9 ** 9) }}", "does not end", marks=pytest.mark.slow),
        ("{% if 'MARK' not in messages[-1].content %}" + FOR_EVER + "{% endif %}" + CHATML, "does not end"),
        # One comparison, which nothing inside a Python process can interrupt.
        ("{% set x = range(99999) | list %}{% set y = range(99999) | list %}{{ [x] * 99999 == [y] * 99999 }}", "does not end"),
        ("{{ 'a' * 10 ** 11 }}", "asks for too much memory; expected at most 2,147,483,648 bytes"),
        pytest.param("{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}", "asks for too much memory", marks=pytest.mark.slow),
        pytest.param("{{ '%999999999999d' % 1 }}", "asks for too much memory|cannot be used", marks=pytest.mark.slow),
        ("{% set n = 10 ** 8 %}{{ 'a' * n }}", "makes too long a text; expected at most 16,000,000 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot be used .maximum recursion depth"),
        ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "cannot be used|crashes"),
        ("{{ ''.__class__.__mro__ }}", "cannot be used .access to attribute '__class__'"),
        ("{% include '/etc/passwd' %}", "cannot be used .no loader"),
        ("{{", "cannot be used"),
    ],
)  # fmt: skip
def test_hostile_templates(hasty: None, template: str, why: str) -> None:
    condition = Condition("none", "none")
    with pytest.raises(BadPrompt, match=rf"the chat template .*({why}).*; use --prompt raw"):
        list(build_prompts(byte_level(template), [Item("q", "Why?")], condition, kind="chat"))
    # The next one is not harmed.
    assert templates.render(byte_level("{{ messages[0].content }}!"), [{"role": "user", "content": "x"}]) == "x!"


def test_a_template_that_refuses_one_item_is_named_with_it() -> None:
    template = "{% if 'MARK' not in messages[-1].content %}{{ raise_exception('not\\nthis') }}{% endif %}" + CHATML
    with pytest.raises(BadPrompt, match=r"item 'q': the chat template refuses it \(not\); use --prompt raw"):
        list(build_prompts(byte_level(template), [Item("q", "Why?")], Condition("none", "none"), kind="chat"))


def test_a_process_that_died_is_started_again() -> None:
    tokenizer, talk = byte_level("{{ messages[0].content }}"), [{"role": "user", "content": "x"}]
    assert templates.render(tokenizer, talk) == "x"
    process = templates._ASKED._asked.process
    assert process is not None
    process._process.kill()
    process._process.wait()
    assert templates.render(tokenizer, talk) == "x"


def test_a_process_that_was_begun_early_is_the_one_that_is_asked() -> None:
    templates._ASKED.end()
    templates.begin(byte_level(None))
    assert templates._ASKED._asked.process is None  # without a template there is nothing to start
    tokenizer = byte_level("{{ messages[0].content }}")
    templates.begin(tokenizer)
    begun = templates._ASKED._asked.process
    assert begun is not None
    assert templates.render(tokenizer, [{"role": "user", "content": "x"}]) == "x"
    assert templates._ASKED._asked.process is begun


def test_a_forked_process_has_one_of_its_own(tmp_path: Path) -> None:
    tokenizer = byte_level("{{ messages[0].content }}")

    def asked(*texts: str) -> str:
        return " ".join(templates.render(tokenizer, [{"role": "user", "content": text}]) for text in texts)

    assert asked("a") == "a"
    (tmp_path / "said").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is what is tried here
        child = os.fork()
    if child == 0:
        try:
            (tmp_path / "said").write_text(asked("b", "c"))
            templates._ASKED.end()
        finally:
            os._exit(0)
    here = asked("d", "e")
    os.waitpid(child, 0)
    assert ((tmp_path / "said").read_text(), here) == ("b c", "d e")
    assert asked("f") == "f"
