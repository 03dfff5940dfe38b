"""How every picture looks, and how it becomes bytes that do not change from run to run."""

from __future__ import annotations

import io
import math
import re
import textwrap
import unicodedata
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from mless.errors import BadStudy, first_line

try:
    import matplotlib as mpl
except ValueError as fault:  # bytes that are no text among them
    raise BadStudy(
        f"matplotlib cannot read its settings ({first_line(fault)}); mend or remove them: $MPLBACKEND, or a matplotlibrc in the working directory, in "
        "$MATPLOTLIBRC or in ~/.config/matplotlib"
    ) from None
from matplotlib import font_manager, ft2font
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator

#: Full width of a page's text, inches: fonts are given at the size they are printed.
PAGE_WIDTH = 7.2
DPI = 200
SMALL, NORMAL, TITLE = 7.0, 7.5, 8.0
#: Inches that a token's text needs on an axis, or it would touch its neighbour; and how many there is room for on a landscape page.
LABEL_PITCH = 0.118
MOST_LABELS = 80

# Okabe and Ito's palette: told apart by every kind of colour vision, and in grey by lightness.
BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#F0E442", "#000000"

COLOURS = {"none": BLUE, "mless": VERMILLION, "mful": GREEN, "random": ORANGE}
OTHERS = (PURPLE, SKY, BLACK, "#7A5C00", "#8C8C8C")

SPAN_COLOURS = {
    "start": "#8C8C8C",
    "system": SKY,
    "filler": VERMILLION,
    "question": BLUE,
    "end": YELLOW,
    "sink": "#3D3D3D",
}

SHORT = {"none": "None", "mless": "Mless", "mful": "Mful", "random": "Random sentence"}
LONG = {"mless": "Meaningless tokens", "mful": "Meaningful tokens", "random": "Random sentence"}


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure, and in words what it shows."""

    figure: Figure
    title: str
    description: str


@contextmanager
def applied() -> Generator[None]:
    """Our settings on top of matplotlib's defaults, whatever the user's matplotlibrc says; restored on exit."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "font.family": ["DejaVu Sans"],
                "font.size": NORMAL,
                "text.parse_math": False,  # a token may be a dollar sign
                "axes.titlesize": TITLE,
                "axes.labelsize": NORMAL,
                "axes.linewidth": 0.6,
                "axes.edgecolor": "0.25",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "axes.axisbelow": True,
                "grid.color": "0.9",
                "grid.linewidth": 0.5,
                "xtick.labelsize": SMALL,
                "ytick.labelsize": SMALL,
                "xtick.major.width": 0.6,
                "ytick.major.width": 0.6,
                "xtick.major.size": 2.5,
                "ytick.major.size": 2.5,
                "legend.fontsize": NORMAL,
                "legend.frameon": False,
                "lines.linewidth": 0.9,
                "svg.fonttype": "none",
                "svg.hashsalt": "mless",
                "pdf.fonttype": 42,
            }
        )
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure outside pyplot's global state."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05))
    FigureCanvasAgg(figure)
    return figure


def settle(picture: Picture) -> None:
    """Lay out once, with one backend's text sizes, so that a format looks the same whichever others are written beside it.

    The layout solver does not repeat the last bits of a position, and an SVG's ids are hashes of positions. So positions are rounded, to
    a millionth of the figure.
    """
    figure = picture.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:  # those of subfigures too
        for which in ("original", "active"):
            left, bottom, width, height = axes.get_position(original=which == "original").bounds
            axes.set_position((_rounded(left), _rounded(bottom), _rounded(width), _rounded(height)), which=which)
    _round_parts(figure)


def _round_parts(figure: FigureBase) -> None:
    for text in figure.texts:
        x, y = text.get_position()
        text.set_position((_rounded(x), _rounded(y)))
    for part in figure.subfigs:
        box: Any = part.bbox_relative
        box.p0, box.p1 = tuple(map(_rounded, box.p0)), tuple(map(_rounded, box.p1))
        _round_parts(part)


def _rounded(share: float) -> float:
    return round(float(share), 6)


def render(picture: Picture, kind: str) -> bytes:
    """PNG, SVG or PDF; nothing in it depends on the day, the machine or matplotlib's version number."""
    silent: dict[str, dict[str, Any]] = {
        "png": {"Software": None, "Title": picture.title, "Description": picture.description},
        "svg": {"Date": None, "Creator": None, "Title": picture.title, "Description": picture.description},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None, "Title": picture.title},
    }
    stream, figure = io.BytesIO(), picture.figure
    # The canvas itself, and not savefig, which draws a figure that was laid out once more before it draws it.
    try:
        if kind == "png":
            FigureCanvasAgg(figure).print_png(stream, metadata=silent[kind])
        elif kind == "svg":
            FigureCanvasSVG(figure).print_svg(stream, metadata=silent[kind])
        else:
            FigureCanvasPdf(figure).print_pdf(stream, metadata=silent[kind])
    finally:
        FigureCanvasAgg(figure)
    return stream.getvalue()


def colour(condition: str, among: tuple[str, ...] = ()) -> str:
    """A condition keeps its colour in every picture."""
    if condition in COLOURS:
        return COLOURS[condition]
    unnamed = [name for name in among if name not in COLOURS]
    return OTHERS[(unnamed.index(condition) if condition in unnamed else 0) % len(OTHERS)]


def short(condition: str) -> str:
    """``mless`` → ``Mless``, as the published legends write it."""
    return SHORT.get(condition, shown(condition))


def long(condition: str) -> str:
    """``mless`` → ``Meaningless tokens``."""
    return LONG.get(condition, shown(condition))


def shown(text: str) -> str:
    """Text that can be drawn: control characters and signs the font lacks are escaped, never dropped."""
    return "".join(sign if _drawable(sign) else _escaped(sign) for sign in text)


def shown_token(text: str, width: int = 12) -> str:
    """A token as an axis label: spaces at its edges dropped unless they are all of it, long ones shortened."""
    label = shown(text.strip(" ")) or "␣" * min(len(text), 3)
    return label if len(label) <= width else label[: width - 1] + "…"


@cache
def _glyphs() -> frozenset[int]:
    font = ft2font.FT2Font(font_manager.findfont("DejaVu Sans"))
    return frozenset(int(code) for code in font.get_charmap())


def _drawable(sign: str) -> bool:
    return sign == " " or (unicodedata.category(sign)[0] not in "CZ" and ord(sign) in _glyphs())


def _escaped(sign: str) -> str:
    return sign.encode("unicode_escape", "backslashreplace").decode("ascii") if not sign.isascii() else repr(sign)[1:-1]


@cache
def text_width(text: str, size: float) -> float:
    """Width in inches."""
    if not text.strip():
        return 0.0
    if len(text) > _MEASURED_WHOLE:
        return sum(map(_advance, text)) * size
    return float(TextPath((0, 0), text, size=size, usetex=False).get_extents().width) / 72


#: The outline of a longer text takes seconds to measure; it is taken for the sum of its signs, which leaves out kerning.
_MEASURED_WHOLE = 80


@cache
def _advance(sign: str) -> float:
    """How far one sign moves the next, in inches at size 1."""
    return (text_width(f"|{sign}|", 100.0) - text_width("||", 100.0)) / 100


Title = tuple[str, float]


def fit_titles(parts: Sequence[tuple[str, str]], width: float) -> dict[tuple[str, str], Title]:
    """(model, rest) → its title's text and size: alike for all, on one line where all fit into `width` inches, else on two."""
    ones = {part: " ".join(filter(None, (shown(part[0]), part[1]))) for part in parts}
    for size in (TITLE, NORMAL, SMALL):
        if all(text_width(one, size) <= width for one in ones.values()):
            return {part: (one, size) for part, one in ones.items()}
    return {part: ("\n".join(filter(None, (cut(shown(part[0]), width), part[1]))), SMALL) for part in parts}


def cut(text: str, width: float) -> str:
    """Shortened until it fits into `width` inches at the small size."""
    if text_width(text, SMALL) <= width or len(text) <= 8:
        return text
    # Halving, because measuring a long text is slow.
    kept, too_many = 7, len(text)
    while too_many - kept > 1:
        middle = (kept + too_many) // 2
        kept, too_many = (middle, too_many) if text_width(text[:middle] + "…", SMALL) <= width else (kept, middle)
    return text[:kept] + "…"


def wrapped(text: str, width: float) -> str:
    """Broken into lines of `width` inches at the small size, after spaces, dashes and slashes; a longer part is cut."""
    lines: list[str] = [""]
    for part in re.findall(r"[^ \-/]*[ \-/]|[^ \-/]+", text):
        if lines[-1] and text_width((lines[-1] + part).rstrip(), SMALL) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(cut(line.rstrip(), width) for line in lines)


def set_title(axes: Axes, title: Title, *, pad: float = 5.0) -> None:
    """Put a fitted title above its axes."""
    axes.set_title(title[0], fontsize=title[1], pad=pad)


def add_caption(figure: Figure, text: str) -> None:
    """Small lines under the picture, wrapped to its width."""
    columns = max(30, int(figure.get_figwidth() * 72 / (SMALL * 0.54)))
    lines = len(textwrap.wrap(text, columns))
    even = min(columns, len(text) // max(lines, 1) + 8)  # lines of about one length, no single word left over
    wrapped = textwrap.wrap(text, even)
    figure.supxlabel(
        "\n".join(wrapped if len(wrapped) == lines else textwrap.wrap(text, columns)), fontsize=SMALL, color="0.35"
    )


def nice_ticks(axes: Axes, *, x: int = 6, y: int = 5) -> None:
    """Few, round ticks."""
    axes.xaxis.set_major_locator(MaxNLocator(x, steps=[1, 2, 5, 10], integer=True, min_n_ticks=2))
    axes.yaxis.set_major_locator(MaxNLocator(y, steps=[1, 2, 5, 10], min_n_ticks=3))


def labelled_width(tokens: int) -> float:
    """Inches of a picture with so many tokens' texts side by side, at most a landscape page."""
    return min(max(PAGE_WIDTH, tokens * LABEL_PITCH + 0.7), MOST_LABELS * LABEL_PITCH + 0.7)


def label_places(heights: Mapping[int, float], tokens: int, room: float) -> list[int]:
    """Positions whose token is written out, of `tokens` in `room` inches: the highest first, each far enough from those already chosen."""
    gap = max(1, math.ceil(LABEL_PITCH * 0.93 * tokens / room))
    chosen: list[int] = []
    for position in sorted(heights, key=lambda place: (-heights[place], place)):
        if len(chosen) < MOST_LABELS and all(abs(position - other) >= gap for other in chosen):
            chosen.append(position)
    return sorted(chosen)


def numbers_to_label(numbers: list[int], room: int) -> list[int]:
    """Indices of the numbers worth a tick label, at most about `room`: all, or the first and then every 5th, 10th … number."""
    if len(numbers) <= room:
        return list(range(len(numbers)))
    step = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if len(numbers) / step <= room)
    kept = [i for i, number in enumerate(numbers) if number % step == 0]
    return [0, *[i for i in kept if i >= math.ceil(step / 2)]]
