"""A chat template is code that comes with the model. Templates are rendered in a guarded process, within limits on time, memory and size."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mless.errors import BadPrompt, MlessError, first_line
from mless.guarded import Guarded, Replaced
from mless.limits import TEMPLATE_MEMORY, TEMPLATE_SECONDS, TEMPLATE_TEXT

_WAY_OUT = "use --prompt raw, or --tokenizer DIR with another template"


class TemplateRefuses(MlessError):
    """The template itself raised an error, as some do for a role that they do not know."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """The conversation as the tokenizer's template writes it, up to where the assistant's answer begins."""
    given = [dict(message) for message in messages]
    try:
        if _has_its_own_way(tokenizer):
            return tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        template = tokenizer.get_chat_template()
    except Exception as fault:  # of several templates none may be the default one
        raise TemplateRefuses(first_line(fault)) from fault
    reply = _ASKED.ask(template, given, _special_tokens(tokenizer))
    if "text" in reply:
        return reply["text"]
    if "refuses" in reply:
        raise TemplateRefuses(reply["refuses"])
    found = {
        "time": f"does not end; expected {TEMPLATE_SECONDS}",
        "memory": f"asks for too much memory; expected {TEMPLATE_MEMORY}",
        "size": f"makes too long a text; expected {TEMPLATE_TEXT}",
        "crash": "crashes the process that renders it",
    }
    raise BadPrompt(f"the chat template {found[reply['fault']]}; {_WAY_OUT}")


def begin(tokenizer: Any) -> None:
    """Starts the process that renders the tokenizer's template, if it has one, while other things are done."""
    if getattr(tokenizer, "chat_template", None) is not None and not _has_its_own_way(tokenizer):
        _ASKED.begin()


def _has_its_own_way(tokenizer: Any) -> bool:
    """A class that renders by its own code. It is no template, but code: transformers' own, or code that the user trusts."""
    from transformers import PreTrainedTokenizerBase

    return getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    """The tokens that templates use by name, such as bos_token."""
    given: dict[str, Any] = tokenizer.special_tokens_map
    return {name: list(map(str, one)) if isinstance(one, list | tuple) else str(one) for name, one in given.items()}


def _started() -> Guarded:
    return Guarded(__name__, float(TEMPLATE_SECONDS.value), TEMPLATE_MEMORY.value, _failed)


class _Asked:
    """The guarded process, for every thread, and another one after a fork: a forked process has pipes that are another's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = Replaced(_started)
        self._owner = os.getpid()

    def ask(self, *question: object) -> dict[str, Any]:
        with self._lock:
            return self._own().ask(*question)

    def begin(self) -> None:
        with self._lock:
            self._own().begin()

    def end(self) -> None:
        with self._lock:
            if self._owner == os.getpid():
                self._asked.end()

    def _own(self) -> Replaced:
        if self._owner != os.getpid():
            self._asked, self._owner = Replaced(_started), os.getpid()
        return self._asked


_ASKED = _Asked()
atexit.register(_ASKED.end)


def _failed(cause: str) -> MlessError:
    return MlessError(f"the process that renders chat templates did not start ({cause}); use --prompt raw")


# ---- the process's end -----------------------------------------------------------------------------------------------


def prepare() -> Callable[..., dict[str, Any]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def answer(template: str, messages: list[dict[str, Any]], special: dict[str, Any]) -> dict[str, Any]:
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages], chat_template=template, add_generation_prompt=True, **special
            )
        except MemoryError:
            raise
        except Exception as fault:  # noqa: BLE001  a template may raise anything
            return {"refuses": first_line(fault)}
        text = rendered[0][0]
        return {"text": text} if len(text) <= TEMPLATE_TEXT.value else {"fault": "size"}

    return answer
