"""The values of the page's template, and the one place where they become safe text."""

from __future__ import annotations

import base64
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jinja2
import pyarrow.compute as pc
from markupsafe import Markup
from PIL import Image

from mless.report.facts import words_of
from mless.results import wording
from mless.results.answers import StoredAnswers
from mless.results.reading import StoredResults, StoredStudy
from mless.results.wording import decoding_of, p_value
from mless.results.wording import visible as shown
from mless.values import SPAN_NAMES

#: Of a longer example prompt the middle is left out.
TOKENS_SHOWN = (600, 200)

#: The pictures that answer the question come first; the others follow by name.
FIRST_PICTURES = ("retained", "map", "mass", "effects")

KINDS = {"png": "image/png", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Picture:
    """One image of the page, with what it shows in words."""

    name: str
    source: str
    title: str
    caption: str


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the example prompt; `breaks` where a line ends after it."""

    position: int
    text: str
    span: str
    breaks: bool


def render(folder: StoredStudy, verdict: Sequence[str], template: str, parts: dict[str, Any]) -> str:
    """The page as text, by a template and what it needs beyond what every page has."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters.update({"share": _share, "p": _p, **wording_filters()})
    return environment.get_template(template).render(
        title=folder.study.get("title") or folder.study.get("name") or "mless study",
        model=folder.label,
        mless=folder.about.get("mless", "unknown"),
        verdict=list(verdict),
        facts=_facts(folder),
        conditions=_conditions(folder),
        pictures=_pictures(folder.path / "figures"),
        example=_example(folder),
        command=_command(folder),
        everything=json.dumps(folder.about, indent=2, ensure_ascii=False, default=str),
        **parts,
    )


# ---- safe text -------------------------------------------------------------------------------------------------------


def _finalize(value: object) -> object:
    """Every value the template prints passes here, and through autoescape after it."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else shown(value)


def _share(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}".replace("-", "−")


def _p(value: float | None) -> str:
    return p_value(None if value is None or math.isnan(value) else value)


# ---- the parts -------------------------------------------------------------------------------------------------------


def _engine(about: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Which engine computed, and what it promises; nothing where mless itself did."""
    known: Mapping[str, Any] = about.get("engine") or {}
    engine = {key: value for key, value in known.items() if key not in ("promise", "computing")}
    return [("Engine", engine), ("What it promises", known.get("promise"))]


def _facts(folder: StoredStudy) -> list[tuple[str, str]]:
    """What was run, in the order a reader asks for it. What the folder does not say is left out."""
    about, model, study = folder.about, folder.model, folder.study
    size = f"{model['layers']} layers × {model['heads']} heads" if "layers" in model and "heads" in model else None
    own: list[tuple[str, object]]
    if isinstance(folder, StoredAnswers):
        own = [("Answers", decoding_of(folder)), *_engine(about)]
    elif isinstance(folder, StoredResults):
        own = [("First token", "left out of the curves (attention sink)" if folder.omit_first else "shown")]
    else:
        own = _engine(about)
    known: list[tuple[str, object]] = [
        ("Model", folder.label if model.get("name") in (None, folder.label) else f"{folder.label} ({model['name']})"),
        ("Architecture", ", ".join(filter(None, (str(model.get("family") or ""), size)))),
        ("Fingerprint", model.get("fingerprint")),
        ("Data", study.get("data") or about.get("task")),
        ("Items", len(folder.items)),
        ("Prompt", None if study.get("multiverse") else study.get("prompt")),  # a multiverse has several
        *own,
        ("Seeds", about.get("seeds", study.get("seed"))),
        ("Device", about.get("device")),
        ("Implementations", about.get("implementations")),
        ("Proofs", about.get("proofs")),
        ("Versions", about.get("versions")),
    ]
    return [(name, words_of(value)) for name, value in known if value not in (None, "", [], {})]


def _conditions(folder: StoredStudy) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for name, about in folder.conditions.items():
        rest = {
            key: value for key, value in about.items() if key not in ("name", "kind", "filler", "length", "placement")
        }
        filler = about.get("filler")
        found.append(
            {
                "name": name,
                "kind": str(about.get("kind", "–")),
                "filler": "–" if filler is None else json.dumps(_shortened(str(filler)), ensure_ascii=False),
                "length": str(about.get("length") or "–"),
                "placement": str(about.get("placement") or "–") if about.get("kind") != "none" else "–",
                "rest": words_of(
                    {key: value for key, value in rest.items() if value is not None and value is not False}
                ),
            }
        )
    return found


def _shortened(text: str, width: int = 80) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _pictures(folder: Path) -> list[Picture]:
    """Each figure once, as PNG where there is one; its caption is the one it was drawn with."""
    files: dict[str, Path] = {}
    for kind in KINDS:
        for file in sorted(folder.glob(f"*.{kind}")):
            if file.is_file() and not file.name.startswith("."):
                files.setdefault(file.stem, file)
    found: list[Picture] = []
    for name in sorted(files, key=_picture_order):
        file = files[name]
        kind = file.suffix[1:]
        about = _png_texts(file) if kind == "png" else {}
        data = base64.b64encode(file.read_bytes()).decode("ascii")
        title = about.get("Title") or f"Figure {name}"
        caption = about.get("Description") or "A picture of this folder's tables."
        found.append(Picture(name, f"data:{KINDS[kind]};base64,{data}", title, caption))
    return found


def _picture_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    first = FIRST_PICTURES.index(name) if name in FIRST_PICTURES else len(FIRST_PICTURES)
    return first, [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _png_texts(file: Path) -> dict[str, str]:
    try:
        with Image.open(file, formats=["PNG"]) as image:
            return {str(key): str(value) for key, value in image.info.items() if isinstance(value, str)}
    except (OSError, SyntaxError, ValueError):
        return {}


def _example(folder: StoredStudy) -> dict[str, Any] | None:
    """The first item's prompt with the first filler."""
    if not folder.has_tokens() or not folder.items:
        return None
    filled = [name for name, about in folder.conditions.items() if about.get("kind") != "none"]
    for condition in [*filled, *folder.conditions]:
        where = (pc.field("condition") == condition) & (pc.field("item") == folder.items[0])
        rows = folder.table("prompts", ["spans", "tokens"], where).to_pylist()
        if rows:
            break
    else:
        return None
    spans = {i: span["name"] for span in rows[0]["spans"] for i in range(span["start"], span["stop"])}
    tokens = [_token(i, text, spans.get(i, "")) for i, text in enumerate(rows[0]["tokens"])]
    head, tail = TOKENS_SHOWN
    left_out = max(0, len(tokens) - head - tail)
    return {
        "item": folder.items[0],
        "condition": condition,
        "count": len(tokens),
        "spans": [name for name in SPAN_NAMES if name in spans.values()],
        "before": tokens[:head] if left_out else tokens,
        "left_out": left_out,
        "after": tokens[-tail:] if left_out else [],
    }


def _token(position: int, text: str, span: str) -> Token:
    visible = shown(text, keep="")
    if not visible.strip(" "):
        visible = "␣" * len(visible) or "∅"
    return Token(position, visible, span if span in SPAN_NAMES else "other", "\n" in text)


def _command(folder: StoredStudy) -> str:
    """The command the folder was made with, where it is stored; else one that makes such a folder."""
    command = folder.about.get("command")
    if isinstance(command, str) and command:
        return command
    if isinstance(command, list) and command:
        return shlex.join(str(part) for part in cast("list[object]", command))
    return shlex.join(
        ["mless", "run", str(folder.study.get("name") or "quick"), "--model", str(folder.model.get("name") or "…")]
    )


def wording_filters() -> dict[str, Any]:
    """How the template writes numbers."""
    return {
        "percent": wording.percent,
        "points": wording.points,
        "interval": wording.percent_interval,
        "change": wording.points_interval,
        "alone": wording.p_of,
        "form": wording.form_part,
    }
