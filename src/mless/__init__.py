"""mless measures what inserted filler tokens do inside a decoder language model and to its answers.

Everything public is named in `__all__`; heavy libraries load when a name is first used, so `import mless` is quick.
"""

from __future__ import annotations

import sys

# `python -m mless` puts the working directory first on the path. A json.py that lies there must not run.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == "mless":
    sys.path[:] = sys.path[0 if sys.flags.safe_path else 1 :]

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from mless.capture import Attention, capturing, received
    from mless.capture.patching import RecordedRun
    from mless.changes import Cut, Patch
    from mless.engines import Decoding, Reply, Request
    from mless.engines.hf import HfEngine
    from mless.errors import MlessError
    from mless.explorer import show
    from mless.figures import draw
    from mless.intervening import cut, patch, recording
    from mless.models import LoadedModel, load
    from mless.prompting import align
    from mless.redistribution import ArmHandle, arm, attach_arm, redistribute
    from mless.registry import register
    from mless.results.comparing import Comparison, compare
    from mless.study import Outcome, StudySpec, load_study, verdict_lines
    from mless.study.direct import Share, items, prompts, retained, run
    from mless.study.verifying import Verification, verify
    from mless.values import ArmSettings, Condition, FigureSpec, Item, Panel, Prompt, Span

_MODULE_OF = {
    "ArmHandle": "mless.redistribution",
    "ArmSettings": "mless.values",
    "Attention": "mless.capture",
    "Comparison": "mless.results.comparing",
    "Condition": "mless.values",
    "Cut": "mless.changes",
    "Decoding": "mless.engines",
    "FigureSpec": "mless.values",
    "HfEngine": "mless.engines.hf",
    "Item": "mless.values",
    "LoadedModel": "mless.models",
    "MlessError": "mless.errors",
    "Outcome": "mless.study",
    "Panel": "mless.values",
    "Patch": "mless.changes",
    "Prompt": "mless.values",
    "Reply": "mless.engines",
    "Request": "mless.engines",
    "RecordedRun": "mless.capture.patching",
    "Share": "mless.study.direct",
    "Span": "mless.values",
    "StudySpec": "mless.study",
    "Verification": "mless.study.verifying",
    "align": "mless.prompting",
    "arm": "mless.redistribution",
    "attach_arm": "mless.redistribution",
    "capturing": "mless.capture",
    "compare": "mless.results.comparing",
    "cut": "mless.intervening",
    "draw": "mless.figures",
    "items": "mless.study.direct",
    "load": "mless.models",
    "load_study": "mless.study",
    "patch": "mless.intervening",
    "prompts": "mless.study.direct",
    "received": "mless.capture",
    "recording": "mless.intervening",
    "redistribute": "mless.redistribution",
    "register": "mless.registry",
    "retained": "mless.study.direct",
    "run": "mless.study.direct",
    "show": "mless.explorer",
    "verdict_lines": "mless.study",
    "verify": "mless.study.verifying",
}

__all__ = [
    "ArmHandle",
    "ArmSettings",
    "Attention",
    "Comparison",
    "Condition",
    "Cut",
    "Decoding",
    "FigureSpec",
    "HfEngine",
    "Item",
    "LoadedModel",
    "MlessError",
    "Outcome",
    "Panel",
    "Patch",
    "Prompt",
    "RecordedRun",
    "Reply",
    "Request",
    "Share",
    "Span",
    "StudySpec",
    "Verification",
    "align",
    "arm",
    "attach_arm",
    "capturing",
    "compare",
    "cut",
    "draw",
    "items",
    "load",
    "load_study",
    "patch",
    "prompts",
    "received",
    "recording",
    "redistribute",
    "register",
    "retained",
    "run",
    "show",
    "verdict_lines",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'mless' has no attribute {name!r}; it has: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
