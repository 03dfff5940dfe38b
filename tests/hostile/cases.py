"""The hostile cases as data: what is spoiled, how, how often, and which command then gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import spoiling
from ground import STUDIES, WITH_UNITS

Spoil = Callable[[Path, Random], None]
FIGURES = {
    "quick": ("retained", "map", "mass", "fig2"),
    "activations": ("fig4", "fig7"),
    "affine": ("fig3",),
    "likelihood": ("effects", "along"),
    "placebo": ("placebo",),
    "dose": ("dose",),
    "multiverse": ("multiverse",),
    "cause": ("cause",),
    "accuracy": ("table2", "fig6"),
    "tuned": ("table9", "fig12"),
}


@dataclass(frozen=True)
class Row:
    """Cases that differ by their seed. `{x}` is the spoiled copy, `{g}` the valid things, `{o}` a place for results."""

    name: str
    source: str
    files: tuple[str, ...]
    spoil: Spoil
    times: int
    commands: tuple[tuple[str, ...], ...]
    #: Give the folder checksums that fit, so that what reads it has to notice.
    reseal: bool = False
    #: The folder whose tables a run that ends well must give bit by bit, whatever was spoiled.
    same_as: str = ""
    #: A server answers with the spoiled copy; its address is `{u}`.
    served: bool = False
    #: A refusal may come after a part of the work, which stays in the folder for the next run.
    keeps: bool = False


@dataclass(frozen=True)
class Case:
    row: Row
    seed: int

    @property
    def name(self) -> str:
        return f"{self.row.name}-{self.seed}"

    @property
    def rng(self) -> Random:
        return Random(self.name)

    @property
    def command(self) -> tuple[str, ...]:
        return self.row.commands[self.seed % len(self.row.commands)]

    @property
    def file(self) -> str:
        return self.row.files[self.seed // len(self.row.commands) % len(self.row.files)]


def _readers(kind: str) -> tuple[tuple[str, ...], ...]:
    """Every command that reads a result folder of this kind: draw, compare, run again (and draw its page again), plan."""
    again = (*STUDIES[kind], "--out", "{x}")
    found = [("figure", name, "{x}") for name in FIGURES[kind]]
    found += [("compare", "{x}", "--condition", "all", "--by", "activation")]
    if kind == "accuracy":
        found += [("plan", "--items", "100", "--pilot", "{x}")]
    return (*found, ("verify", "{x}", "--sample", "0"), again, again)


TABLES = {
    "quick": ("retained", "attention", "prompts", "dilution", "shares"),
    "activations": ("activations", "activation_items", "activation_histograms", "prompts"),
    "affine": ("affine", "affine_items", "affine_points", "prompts"),
    "likelihood": ("effects", "likelihood", "tokens", "candidates", "scores", "prompts"),
    "placebo": ("placebo", "edits"),
    "dose": ("dose", "dose_tests"),
    "multiverse": ("specifications", "specification_tests", "specification_settings"),
    "cause": ("ladder", "cause", "chain"),
    "accuracy": ("accuracy", "answers"),
    "tuned": ("tuning", "tuned"),
}  # fmt: skip


def _folders() -> list[Row]:
    rows: list[Row] = []
    for kind, tables in TABLES.items():
        files = tuple(f"{name}.parquet" for name in tables)
        readers = _readers(kind)
        rows += [
            Row(f"{kind}-study", kind, ("study.json",), spoiling.spoil_json, 70, readers, reseal=True),
            Row(f"{kind}-study-text", kind, ("study.json",), spoiling.spoil_text, 12, readers),
            Row(f"{kind}-table", kind, files, spoiling.spoil_table, 60, readers, reseal=True),
            Row(f"{kind}-table-bytes", kind, files, spoiling.spoil_bytes, 20, readers),
            Row(f"{kind}-table-sealed-bytes", kind, files, spoiling.spoil_bytes, 16, readers, reseal=True),
            Row(f"{kind}-entry", kind, ("study.json", *files, "report.html"), spoiling.spoil_entry, 24, readers),
        ]
    return rows


def _unfinished() -> list[Row]:
    """Units are damaged between a kill and the run that goes on."""
    rows: list[Row] = []
    for kind in WITH_UNITS:
        again, look = (*STUDIES[kind], "--out", "{x}"), ("verify", "{x}", "--sample", "0")
        draw, source = ("figure", FIGURES[kind][0], "{x}"), f"{kind}-unfinished"
        commands = (again, again, look, draw, again, ("verify", "{x}", "--sample", "1"))
        rows += [
            Row(f"{kind}-units", source, ("units",), spoiling.spoil_units, 30, commands, same_as=kind),
            Row(f"{kind}-sealed-units", source, ("units",), spoiling.spoil_sealed_units, 24, commands, keeps=True),
        ]
    return rows


_RUN = ("run", "quick", "--model", "{x}", "--limit", "1", "--length", "3", "--prompt", "raw", "--conditions", "none,mless", "--out", "{o}")  # fmt: skip
_ON_DATA = (*_RUN[:2], "--model", "{g}/model", "--data", "{x}", "--limit", "2", *_RUN[6:])
_STUDY = ("run", "{x}", "--model", "{g}/model", "--out", "{o}")


_CHAT = tuple("chat" if word == "raw" else word for word in _RUN)
_ANSWERS = (
    "run", "accuracy", "--model", "{x}", "--data", "{g}/items.jsonl", "--limit", "1", "--prompt", "raw", "--length", "3", "--conditions",
    "none,mless", "--max-new-tokens", "2", "--out", "{o}",
)  # fmt: skip


def _imports(name: str, end: str) -> tuple[tuple[str, ...], ...]:
    return (
        ("import", f"none={{g}}/{name}-none.{end}", "mless={x}", "--out", "{o}"),
        ("import", "none={x}", f"mless={{g}}/{name}-mless.{end}", "--out", "{o}"),
        ("import", "none={x}", "mless={x}", "--out", "{o}"),
    )


_SERVED = (
    "run", "accuracy", "--engine", "openai", "--base-url", "{u}", "--model", "served", "--data", "{g}/items.jsonl", "--limit", "3", "--length", "3",
    "--conditions", "none,mless", "--set", "accuracy.retries=1", "--set", "accuracy.timeout=1", "--out", "{o}",
)  # fmt: skip
_SERVED_IDS = (*_SERVED, "--tokenizer", "{g}/model", "--prompt", "raw")

ROWS: tuple[Row, ...] = (
    *_folders(),
    *_unfinished(),
    Row("reply", "reply.json", ("",), spoiling.spoil_reply, 200, (_SERVED, _SERVED_IDS), served=True, keeps=True),
    Row("config", "model", ("config.json",), spoiling.spoil_json, 90, (("models", "{x}"), _RUN)),
    Row("tokenizer", "model", ("tokenizer.json", "tokenizer_config.json"), spoiling.spoil_json, 60, (_RUN,)),
    Row("tokenizer-parts", "model", ("tokenizer.json",), spoiling.spoil_tokenizer, 30, (_RUN,)),
    Row("model-text", "model", ("config.json", "tokenizer.json"), spoiling.spoil_text, 24, (("models", "{x}"), _RUN)),
    Row("generation", "model", ("generation_config.json",), spoiling.spoil_json, 16, (_ANSWERS,)),
    Row("generation-entry", "model", ("generation_config.json",), spoiling.spoil_entry, 8, (_ANSWERS,)),
    Row("template", "model", ("chat_template.jinja",), spoiling.spoil_template, 40, (_CHAT,)),
    Row("weights", "model", ("model.safetensors",), spoiling.spoil_header, 50, (_RUN,)),
    Row("weights-bytes", "model", ("model.safetensors",), spoiling.spoil_bytes, 24, (_RUN,)),
    Row(
        "model-entry", "model", ("config.json", "tokenizer.json", "model.safetensors"), spoiling.spoil_entry, 24, (("models", "{x}"), _RUN)
    ),
    Row("gguf", "tiny.gguf", ("",), spoiling.spoil_bytes, 60, (("models", "{x}"), _RUN)),
    Row("toml", "study.toml", ("",), spoiling.spoil_toml, 80, (_STUDY,)),
    Row("toml-text", "study.toml", ("",), spoiling.spoil_text, 12, (_STUDY,)),
    Row("toml-entry", "study.toml", ("",), spoiling.spoil_entry, 8, (_STUDY,)),
    Row("data-lines", "items.jsonl", ("",), spoiling.spoil_lines, 50, (_ON_DATA,)),
    Row("data-json", "items.json", ("",), spoiling.spoil_json, 30, (_ON_DATA,)),
    Row("data-csv", "items.csv", ("",), spoiling.spoil_csv, 20, (_ON_DATA,)),
    Row("data-entry", "items.jsonl", ("",), spoiling.spoil_entry, 8, (_ON_DATA,)),
    Row("script", "script.json", ("",), spoiling.spoil_json, 24, ((*STUDIES["accuracy"][:-1], "accuracy.script={x}", "--out", "{o}"),)),
    Row("lm-eval", "samples-mless.jsonl", ("",), spoiling.spoil_lines, 120, _imports("samples", "jsonl")),
    Row("lm-eval-choices", "choices-mless.jsonl", ("",), spoiling.spoil_lines, 80, _imports("choices", "jsonl")),
    Row("inspect", "inspect-mless.json", ("",), spoiling.spoil_json, 120, _imports("inspect", "json")),
    Row("inspect-archive", "inspect-mless.eval", ("",), spoiling.spoil_archive, 60, _imports("inspect", "eval")),
    Row("archive-bytes", "inspect-mless.eval", ("",), spoiling.spoil_bytes, 40, _imports("inspect", "eval")),
    Row("log-text", "inspect-mless.json", ("",), spoiling.spoil_text, 20, _imports("inspect", "json")),
    Row("log-entry", "samples-mless.jsonl", ("",), spoiling.spoil_entry, 16, _imports("samples", "jsonl")),
)  # fmt: skip


def all_cases() -> list[Case]:
    return [Case(row, seed) for row in ROWS for seed in range(row.times)]


def a_sample(count: int) -> list[Case]:
    """A case of each of so many rows, by seed; a commit changes them only where it changes the table."""
    rng = Random("sample")
    return [Case(row, rng.randrange(row.times)) for row in rng.sample(ROWS, count)]
