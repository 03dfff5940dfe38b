"""A measurement of one's own: how long the residual stream's vectors are, layer by layer, with each condition and without.

MLESS_PLUGINS=residual_norms PYTHONPATH=examples/norms mless run examples/norms/norms.toml
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

import mless
from mless.figures import style
from mless.models.activations import decoder_of
from mless.results.figure_kinds import Drawing, FigureKind
from mless.results.folder import ResultFolder
from mless.results.schemas import schema, table_of_rows
from mless.results.wording import p_words
from mless.stats.activations import paired_change
from mless.study.bench import Bench, Group, Measurement, Unit
from mless.values import format_numbers

#: A row per item and layer: the mean length of the vectors behind that layer, over the original tokens.
ITEMS = schema("item", "layer", "norm")
#: A row per condition and layer, against none: the ratio of lengths with its interval and test.
NORMS = schema("layer", "norm", "none", "ratio", "lo", "hi", "p", "p_adjusted", "n_items", "verdict")


class NormMeasurement(Measurement):
    doing = "norms"
    unit_tables = ("norm_items",)
    merged = unit_tables
    tables = ("prompts", "norm_items", "norms")
    sources = ("prompts", "norm_items")
    figures = ("norms",)
    summed_up = ("norms",)

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Mapping[str, pa.Table]]]:
        for unit in group.units:
            assert unit.prompt is not None
            ids = torch.tensor([unit.prompt.token_ids], device=bench.model.device)
            names = {**bench.names, "condition": unit.condition.name, "item": unit.prompt.item}
            rows = []
            for layer, behind in _run(bench, ids).items():
                length = behind[0, unit.prompt.original].float().norm(dim=-1).mean()
                rows.append({**names, "layer": layer, "norm": float(length)})
            yield unit, {"norm_items": table_of_rows(rows, ITEMS)}

    def finish(self, bench: Bench) -> None:
        stored = bench.folder.read_table("norm_items").column("norm").to_numpy()
        norms = stored.reshape(len(bench.conditions), len(bench.items), len(bench.layers))
        rows = []
        for condition, values in zip(bench.conditions[1:], norms[1:], strict=True):
            rng = np.random.default_rng(bench.spec.seed)
            found = paired_change(values, norms[0], rng, scale="log ratio", margins=bench.spec.margins_of())
            for at, layer in enumerate(bench.layers):
                ratio, lo, hi = (float(np.exp(end[at])) for end in (found.difference, found.lo, found.hi))
                row = {**bench.names, "condition": condition.name, "layer": layer, "norm": float(found.value[at])}
                row |= {"none": float(found.none[at]), "ratio": ratio, "lo": lo, "hi": hi, "p": float(found.p[at])}
                row |= {"p_adjusted": float(found.p_adjusted[at]), "n_items": int(found.n[at])}
                rows.append(row | {"verdict": found.verdict[at]})
        bench.folder.write_table("norms", table_of_rows(rows, NORMS))

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        folder = ResultFolder(path)
        about, rows = folder.manifest() or {}, folder.read_table("norms").to_pylist()
        said = [f"{about['model']['label']}, {len(about['items'])} items: length of the residual stream's vectors"]
        for condition in dict.fromkeys(row["condition"] for row in rows):
            own = [row for row in rows if row["condition"] == condition]
            first = own[0]
            line = f"{condition}: layer {first['layer']} × {first['ratio']:.3f}"
            if first["lo"] is not None:
                line += f" [{first['lo']:.3f}, {first['hi']:.3f}], {p_words(first['p_adjusted'])}"
            for verdict in ("drops", "rises"):
                if moved := [row["layer"] for row in own if row["verdict"] == verdict]:
                    line += f"; {verdict} in layer{'s' if len(moved) > 1 else ''} {format_numbers(moved)}"
            said.append(line)
        return said


def _run(bench: Bench, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """What leaves each measured layer. By hooks, because transformers norms the last of its hidden states."""
    found: dict[int, torch.Tensor] = {}
    _, layers = decoder_of(bench.model.model)
    hooks = []
    for number in bench.layers:

        def keep(_module: object, _given: object, out: object, number: int = number) -> None:
            found[number] = out[0] if isinstance(out, tuple) else out

        hooks.append(layers[number - 1].register_forward_hook(keep))
    try:
        with torch.inference_mode():
            bench.model.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def draw_norms(given: Drawing) -> style.Picture:
    """The ratio of lengths by layer, a line per condition with its 95 % interval."""
    figure = style.new_figure(style.PAGE_WIDTH, 2.6)
    axes = figure.subplots()
    for path in given.paths:
        rows = ResultFolder(path).read_table("norms").to_pylist()
        for condition in dict.fromkeys(row["condition"] for row in rows):
            own = [row for row in rows if row["condition"] == condition]
            layers = [row["layer"] for row in own]
            colour = style.colour(condition, given.spec.conditions)
            axes.plot(layers, [row["ratio"] for row in own], color=colour, label=style.short(condition))
            bounds = [[row[end] if row[end] is not None else np.nan for row in own] for end in ("lo", "hi")]
            axes.fill_between(layers, *bounds, color=colour, alpha=0.2, linewidth=0)
    axes.axhline(1, color="0.5", linewidth=0.6)
    axes.set(xlabel="Layer", ylabel="Length with / without")
    axes.legend()
    return style.Picture(figure, "Length of the residual stream by layer", "Bands: 95 % intervals over items.")


mless.register("measurements", "norms", NormMeasurement)
mless.register("figures", "norms", FigureKind(draw_norms))
