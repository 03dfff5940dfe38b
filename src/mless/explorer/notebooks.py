"""How results, prompts and attention look in a notebook: a page in a sandboxed frame of fixed height, without any widget machinery.

A frame has its page inside (`srcdoc`) and an origin of its own, so nothing in a result folder can reach the notebook.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mless.capture import Attention
from mless.errors import MlessError
from mless.explorer import exporting
from mless.explorer.asking import request_text
from mless.explorer.server import page_files
from mless.results.comparing import Comparison
from mless.results.escaping import visible
from mless.study import Outcome
from mless.values import MASS_NAMES, SPAN_NAMES, Prompt

#: Pixels of a frame with a page, and of one that only shows a value.
HEIGHT, LOW = 640, 320
#: A larger page would make the notebook's file unwieldy: each run of a cell stores it.
MOST_MB = 4.0
#: Tokens of a prompt that are drawn, and characters of its text that are shown.
MOST_TOKENS, MOST_TEXT = 4000, 6000


def html_of(value: object) -> str:
    """What a notebook shows of a value. A fault becomes a sentence: a display must not raise."""
    try:
        match value:
            case Outcome():
                return framed([value.folder])
            case Comparison():
                folders = list(dict.fromkeys(row.folder for block in value.blocks for row in block.rows))
                return framed(folders, request_text("forest", folder=1, readout=value.readout))
            case Prompt():
                return _frame(_small(_prompt(value)), LOW, f"Prompt of item {value.item}")
            case Attention():
                return _frame(_small(_attention(value)), HEIGHT, f"Attention in item {value.prompt.item}")
            case _:
                return f"<pre>{_text(repr(value))}</pre>"
    except MlessError as fault:
        return f"<pre>{_text(str(fault))}</pre>"
    except Exception as fault:  # noqa: BLE001 - a notebook would show a traceback in place of the value
        words = f"{type(fault).__name__}: {fault}"
        return f"<pre>{_text(f'this cannot be shown here ({words}); print(…) or mless.show(…) may; please report it')}</pre>"


def framed(results: Sequence[str | os.PathLike[str]], first: str = "start", *, height: int = HEIGHT) -> str:
    """Result folders as a page in a frame, open at the view `first`. Of large folders it holds a part, and says how to see the rest."""
    made = exporting.compose([Path(one) for one in results], items="1-2", heads=1, max_mb=MOST_MB, part=True)
    page = made.text.decode()
    # Inside a frame a link to "#map" is resolved against the notebook's address, unless the page names its own.
    for old, new in (
        (" base-uri 'none';", ""),
        ('<meta charset="utf-8">', '<meta charset="utf-8">\n<base href="about:srcdoc">'),
        ('<script id="answers"', f'<script id="answers" data-open="{html.escape(first)}"'),
    ):
        before, found, after = page.partition(old)
        assert found, old
        page = before + new + after
    return _frame(page, height, "mless explorer", "allow-scripts")


def _frame(page: str, height: int, title: str, may: str = "") -> str:
    # A notebook's page may be read in any encoding, so only ASCII stands in it.
    inside = html.escape(page).encode("ascii", "xmlcharrefreplace").decode()
    return (
        f'<iframe title="{_text(title)}" sandbox="{may}" referrerpolicy="no-referrer" loading="lazy" '
        f'style="width: 100%; height: {height}px; border: 1px solid #8886; border-radius: 6px" srcdoc="{inside}"></iframe>'
    )


def _text(text: str, most: int = 2000) -> str:
    return html.escape(visible(text if len(text) <= most else text[: most - 1] + "…"))


# ---- one prompt, one capture -----------------------------------------------------------------------------------------------


def _small(body: str) -> str:
    """A page without any script."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>{page_files()['frame.css'].decode()}</style></head><body>{body}</body></html>"
    )


def _spans(prompt: Prompt) -> list[str]:
    """The span of each token."""
    return [span.name for span in prompt.spans for _ in range(span.start, span.stop)]


def _legend(prompt: Prompt) -> str:
    counts = {name: _spans(prompt).count(name) for name in SPAN_NAMES}
    shown = [f'<li><i class="{name}"></i>{name} {n:,}</li>' for name, n in counts.items() if n]
    return f"<ul>{''.join(shown)}</ul>"


def _head(prompt: Prompt) -> str:
    return (
        f'<h1>Item {_text(prompt.item, 80)}, condition {_text(prompt.condition, 80)} <span class="soft">· {len(prompt):,} tokens</span></h1>'
        f"{_legend(prompt)}"
    )


def _prompt(prompt: Prompt) -> str:
    total = max(1, len(prompt))
    parts = "".join(
        f'<rect class="{span.name}" x="{1000 * span.start / total:.2f}" y="0" width="{1000 * (span.stop - span.start) / total:.2f}" height="18">'
        f"<title>{span.name}: tokens {span.start} to {span.stop - 1}</title></rect>"
        for span in prompt.spans
    )
    strip = f'<svg viewBox="0 0 1000 18" width="1000" height="18" preserveAspectRatio="none" role="img" aria-label="Spans of the prompt">{parts}</svg>'
    return f"{_head(prompt)}{strip}<pre>{_text(prompt.text, MOST_TEXT)}</pre>"


def _attention(found: Attention) -> str:
    """The mass that each head puts on the question, and what tokens receive in the head with the most of it."""
    on = MASS_NAMES.index("question")
    mass = np.asarray(found.mass)[..., on]
    top = float(np.nanmax(mass)) if mass.size and np.isfinite(mass).any() else 1.0
    rows = "".join(
        f"<tr><th>L{layer}</th>"
        + "".join(_cell(float(mass[at, n]), top, f"L{layer}H{head}") for n, head in enumerate(found.heads))
        + "</tr>"
        for at, layer in enumerate(found.layers)
    )
    heads = "".join(f"<th>{head}</th>" for head in found.heads)
    layer, head = np.unravel_index(int(np.nanargmax(mass)) if np.isfinite(mass).any() else 0, mass.shape)
    return (
        f"{_head(found.prompt)}<p>Mass of original queries on the question, by layer and head (from 1); the darkest is {top:.2f}.</p>"
        f'<div class="wide"><table><tr><th></th>{heads}</tr>{rows}</table></div>'
        f"<p>What each token receives from later original tokens in L{found.layers[layer]}H{found.heads[head]}, coloured by span "
        '<span class="soft">(the first token left out)</span>:</p>'
        f"{_bars(found, int(layer), int(head))}"
    )


def _cell(value: float, top: float, name: str) -> str:
    share = value / top if top > 0 and math.isfinite(value) else 0.0
    said = f"{name}: {value:.3f}" if math.isfinite(value) else f"{name}: none"
    return f'<td class="c" style="background: rgba(var(--amount), {share:.3f})" title="{said}"></td>'


def _bars(found: Attention, layer: int, head: int) -> str:
    values = np.asarray(found.received)[1, layer, head, :MOST_TOKENS].astype(np.float64)
    names = _spans(found.prompt)[:MOST_TOKENS]
    # The first token is a sink in most models, and beside it nothing else could be seen.
    known: Any = values[1:][np.isfinite(values[1:])]
    top = float(known.max()) if known.size and known.max() > 0 else 1.0
    wide = 1000 / max(1, len(values))
    bars = "".join(
        f'<rect class="{name}" x="{at * wide:.2f}" y="{120 - 120 * min(1.0, value / top):.1f}" width="{max(0.6, wide * 0.9):.2f}" '
        f'height="{120 * min(1.0, value / top):.1f}"><title>token {at}, {name}: {value:.4f}</title></rect>'
        for at, (value, name) in enumerate(zip(values.tolist(), names, strict=True))
        if at and math.isfinite(value)
    )
    more = (
        f" {len(found.prompt) - MOST_TOKENS:,} further tokens are left out." if len(found.prompt) > MOST_TOKENS else ""
    )
    return (
        f'<svg viewBox="0 0 1000 122" width="1000" height="122" preserveAspectRatio="none" role="img" aria-label="Received attention by token">{bars}</svg>'
        f'<p class="soft">The highest is {top:.4f}.{more}</p>'
    )
