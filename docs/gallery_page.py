"""docs/gallery.md from the table of figure kinds; docs/make_pages.py writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mless.results.figure_kinds import FIGURES, FigureKind

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class _Shown:
    """A kind of figure on the page. `command` made the picture; `sees` says what is on it, and `page` where to read on."""

    title: str
    sees: str
    command: str
    picture: str | None
    page: str


_SMOL = "SmolLM2-135M-Instruct"
_CAUSE = "mless run cause --data gsm8k --limit 100 --dtype float32"
# One row a kind: `page` fails where the table of kinds has one that is not here, or a picture is missing.
SHOWN: dict[str, _Shown] = {
    "heads": _Shown(
        "Heads",
        "What each token receives without and with filler: the mean over items with its 95 % band, three heads of layer 1. "
        "`fig2` and `fig13` to `fig20` are of this kind.",
        "mless figure fig15 --model smollm2 --heads most-shifted:3",
        "fig15.png",
        "method.md",
    ),
    "layers": _Shown(
        "Layers",
        "One head in layers 1, 2 and 3.",
        "mless figure fig9 --model smollm2 --heads most-shifted:1",
        "fig9.png",
        "method.md",
    ),
    "conditions": _Shown(
        "Conditions",
        "One head under three conditions, aligned and over the full sequence.",
        "mless figure fig10 --model smollm2 --heads most-shifted:1",
        "fig10.png",
        "method.md",
    ),
    "versus": _Shown(
        "Filler against natural text",
        "Slashes against sentences of the same length, over the full sequence.",
        "mless figure fig11 --model smollm2 --heads most-shifted:1",
        "fig11.png",
        "method.md",
    ),
    "map": _Shown(
        "Map",
        "The retained share of every head of every layer, a panel a condition.",
        f"mless run quick\nmless figure map results/quick-{_SMOL}",
        "map.png",
        "method.md",
    ),
    "retained": _Shown(
        "Retained share by layer",
        "λ of every layer with its interval, beside uniform dilution.",
        f"mless figure retained results/quick-{_SMOL}",
        "retained.png",
        "method.md",
    ),
    "mass": _Shown(
        "Mass",
        "Where the attention of original tokens goes, by span.",
        f"mless figure mass results/quick-{_SMOL}",
        "mass.png",
        "method.md",
    ),
    "bars": _Shown(
        "Accuracy",
        "Accuracy with intervals, the paired difference to `none`, and how many answers were cut off. MATH-500, one H200.",
        "mless run accuracy --model MODEL --data math500 --max-new-tokens 1024",
        "math500.png",
        "accuracy-statistics.md",
    ),
    "table": _Shown(
        "Tables",
        "Accuracies of models by tasks, as Markdown, CSV and LaTeX: the published `table1` to `table9`. No picture; "
        "[the README](../README.md#do-the-answers-get-better) shows one.",
        "mless figure table1 --model MODEL --data math500",
        None,
        "accuracy-statistics.md",
    ),
    "effects": _Shown(
        "Effects on log-probabilities",
        "What each condition does to the log-probability of solutions and answers. GSM8K, 500 items.",
        "mless run likelihood --data gsm8k --limit 500 --out results/likelihood\nmless figure effects results/likelihood",
        "likelihood-effects.png",
        "likelihood.md",
    ),
    "along": _Shown(
        "Along the solution",
        "Where along the reference solution the change is.",
        "mless figure along results/likelihood",
        "likelihood-along.png",
        "likelihood.md",
    ),
    "dose": _Shown(
        "Dose",
        "The effect by number of slashes and by place, with a band for all lengths at once. Qwen2.5-Coder-0.5B, MATH-500.",
        "mless run dose --model MODEL --data math500 --limit 100",
        "dose.png",
        "dose.md",
    ),
    "placebo": _Shown(
        "Placebo",
        "Named fillers among forty arbitrary edits of the same length. GSM8K.",
        "mless run placebo --data gsm8k --limit 200",
        "placebo.png",
        "placebo.md",
    ),
    "specification": _Shown(
        "Specification curve",
        "One comparison in every combination of settings that nobody states. GSM8K, 24 items.",
        "mless run multiverse --data gsm8k --limit 24",
        "multiverse.png",
        "multiverse.md",
    ),
    "ladder": _Shown(
        "Ladder",
        "Who has to see the filler: the change at each rung, and the five changes that add up to it.",
        _CAUSE,
        "ladder.png",
        "cause.md",
    ),
    "cause": _Shown(
        "Map of causes",
        "Layer × part: the share of the filler's effect that comes when its value is put in, and that goes when it is taken out.",
        _CAUSE,
        "cause.png",
        "cause.md",
    ),
    "chain": _Shown(
        "Chain",
        "How much of the effect passes through layer 1's attention output, the first MLP's activation, and elsewhere.",
        _CAUSE,
        "chain.png",
        "cause.md",
    ),
    "forest": _Shown(
        "Forest",
        "One effect in three models, with their mean and where a further model may lie.",
        "mless compare results/gemma results/qwen results/smollm2 --readout likelihood --metric contrast --out results/compared",
        "forest.png",
        "compare.md",
    ),
    "displacement": _Shown(
        "Displacement of outputs",
        "How filler moves a head's outputs, and how much of it one λ and one σ explain.",
        "mless figure fig3 --model smollm2",
        "fig3.png",
        "affine.md",
    ),
    "activations": _Shown(
        "Activations",
        "Histogram, near-zero share, norms and Gini of layer 1's activations, without filler, with it, and with ARM.",
        "mless figure fig4 --model smollm2",
        "fig4.png",
        "activations.md",
    ),
    "classes": _Shown(
        "Token classes",
        "Near-zero share by class of token: digits, operators, conjunctions, other.",
        "mless figure fig7 --model smollm2",
        "fig7.png",
        "activations.md",
    ),
    "sweep": _Shown(
        "Sweep of lengths",
        "Accuracy by filler length. The best length is chosen on half of the items and judged on the other half. 24 items, "
        "to show the picture.",
        "mless figure fig8 --model smollm2 --data arithmetic:1:24 --prompt chat --set accuracy.max_new_tokens=24 --set accuracy.slots=24",
        "fig8.png",
        "accuracy-statistics.md",
    ),
    "diversity": _Shown(
        "pass@k and diversity",
        "Is an item solved in one of k tries, and how different are the answers? No picture here yet.",
        "mless figure fig6 --model MODEL --data math500",
        None,
        "accuracy-statistics.md",
    ),
    "sensitivity": _Shown(
        "Sensitivity to ARM's parameters",
        "Accuracy over c and p1 (and, in `fig12`, over the bounds of the share); one setting is then tried on untouched items. No "
        "picture here yet.",
        "mless figure tune --model smollm2",
        None,
        "tuning.md",
    ),
}


def page(note: str) -> str:
    """The whole page, with `note` under its title."""
    unshown = sorted(set(FIGURES.names()) - set(SHOWN))
    if unshown:
        raise SystemExit(f"docs/gallery_page.py shows no figure of the kinds: {', '.join(unshown)}")
    blocks = [
        "# Gallery",
        note,
        f"The {len(SHOWN)} kinds of figure, each with the command that made the picture. They are drawn from stored results alone: "
        "`mless figure NAME FOLDER` draws from a folder, and `mless figure NAME --model MODEL` runs what is not stored yet. `--format` "
        f"chooses PNG, SVG or PDF. The pictures are of {_SMOL} unless a line says otherwise; for `MODEL` put in your own.",
        *(block for kind, shown in SHOWN.items() for block in _entry(kind, FIGURES.get(kind), shown)),
        "A kind of your own is one function: [CONTRIBUTING.md](../CONTRIBUTING.md#adding-to-a-table).",
    ]
    return "\n\n".join(blocks) + "\n"


def _entry(name: str, kind: FigureKind, shown: _Shown) -> list[str]:
    takes = f" Takes {', '.join(f'`{option}`' for option in kind.takes)}." if kind.takes else ""
    blocks = [
        f"## {shown.title}",
        f"{shown.sees} Kind `{name}`.{takes} See [{shown.page}]({shown.page}).",
        f"```bash\n{shown.command}\n```",
    ]
    if shown.picture is not None:
        if not (HERE / "pictures" / shown.picture).exists():
            raise SystemExit(f"docs/gallery_page.py shows docs/pictures/{shown.picture}, which is not there")
        blocks.append(f"![{shown.title}](pictures/{shown.picture})")
    return blocks
