"""Folders of attention studies as mless stores them today: tables of units, checksums, aligned prompts. No model is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from growing_tables import parts_of, put_ready
from mless.results.folder import ResultFolder
from mless.results.schemas import RETAINED, SHARES, lists, table_of_columns, table_of_rows
from mless.results.storing import Store
from mless.study.identity import unit_name
from mless.values import MASS_NAMES, Condition

WORDS = [" the", " sum", " of", " three", " numbers", " is", " 12", ",", " and", " what", " follows", "\n"]
FACTOR = {"mless": 0.8, "mful": 0.75, "random": 0.7}
QUERIES = ("later", "original")

#: What a page of a hostile folder would do if any of its texts became markup.
EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"


def write_attention(
    path: Path,
    *,
    items: int = 12,
    layers: int = 3,
    heads: int = 4,
    conditions: Sequence[str] = ("none", "mless", "random"),
    length: int = 20,
    question: tuple[int, int] = (30, 50),
    label: str = "SmolLM2-135M-Instruct",
    name: str = "smollm2",
    token: str | None = None,
    item: str = "item-{:03d}",
    in_part: int = 8,
    complete: bool = True,
    seed: int = 0,
) -> Path:
    """Write a folder. Layer 1 loses attention under filler, the others hardly; head 2 loses most, item 5 more than others.

    `token` is put into every question. Unless `complete`, only the units of the first condition are there, as while a study runs.
    """
    rng = np.random.default_rng(seed)
    kinds = {"none": Condition("none", "none"), "random": Condition("random", "text", None, length)}
    known = {one: kinds.get(one) or Condition(one, "repeat", " /", length) for one in conditions}
    ids = [item.format(n + 1) for n in range(items)]
    made = _Folder(rng, layers, heads, length, question, token, {"model": label, "task": "bundled"}, ids)
    folder = ResultFolder(path)
    about: dict[str, Any] = {
        "measures": "attention", "mless": "0.1.0",
        "study": {"name": "quick", "title": "Where does attention go?", "data": "bundled", "prompt": "raw", "seed": 0},
        "task": "bundled", "prompt": "raw", "items": ids, "conditions": {one: asdict(about) for one, about in known.items()},
        "model": {"name": name, "label": label, "family": "llama", "layers": layers, "heads": heads, "fingerprint": "9f" * 16},
        "layers": list(range(1, layers + 1)), "heads": list(range(1, heads + 1)), "seeds": {"study": 0}, "omit_first": True,
        "implementations": {"forward": ["sdpa"], "received": ["streaming"]}, "versions": {"torch": "2.13.0"}, "device": {"kind": "cpu"},
        "identity": {"name": "x"}, "units": items * len(known), "command": ["mless", "run", "quick", "--out", "results/quick"],
    }  # fmt: skip
    with folder.writing():
        folder.write_manifest({**about, "complete": False})
        prompts = [row for condition in conditions for row in made.prompts(condition)]
        stored = list(known) if complete else list(known)[:1]
        units = [unit_name(one, n) for one in stored for n in range(items)]
        store = Store(folder, ["attention", "dilution"], parts_of(units, in_part))
        for condition in stored:
            for n in range(items):
                store.add(unit_name(condition, n), made.unit(condition, n))
                put_ready(store)
        if not complete:
            store.close()
            return path
        store.finish()
        folder.write_table("prompts", _prompts_table(prompts))
        shares = [made.shares(condition) for condition in conditions if condition != "none"]
        folder.write_table("shares", pa.concat_tables(shares))
        rows = [row for condition in conditions if condition != "none" for row in made.retained(condition)]
        folder.write_table("retained", table_of_rows(rows, RETAINED))
        folder.write_manifest({**about, "complete": True})
        folder.drop_units()
    return path


class _Folder:
    """The numbers of a folder, unit by unit, so that a large one needs little memory."""

    def __init__(
        self,
        rng: np.random.Generator,
        layers: int,
        heads: int,
        length: int,
        question: tuple[int, int],
        token: str | None,
        names: dict[str, str],
        ids: list[str],
    ) -> None:
        self.layers, self.heads, self.length, self.names, self.ids = layers, heads, length, names, ids
        self.system = 10
        self.asked = rng.integers(*question, len(ids)).tolist()
        self.token = token
        self.seed = int(rng.integers(1 << 30))
        # λ by layer and head: the first layer loses, head 2 most.
        self.change = np.ones((layers, heads))
        self.change[0] = np.linspace(0.9, 1.0, heads)
        self.change[0, min(1, heads - 1)] = 0.7

    def _words(self, condition: str, n: int) -> tuple[list[str], list[str]]:
        rng = np.random.default_rng((self.seed, n))
        words = [WORDS[at] for at in rng.integers(0, len(WORDS), self.asked[n])]
        if self.token is not None:
            words[3] = self.token
        before = ["<s>", *(f" sys{at}" for at in range(self.system))]
        filler = (
            []
            if condition == "none"
            else [f" word{at}" if condition == "random" else " /" for at in range(self.length)]
        )
        names = ["start", *["system"] * self.system, *["filler"] * len(filler), *["question"] * len(words)]
        return [*before, *filler, *words], names

    def prompts(self, condition: str) -> Iterator[dict[str, Any]]:
        for n, item in enumerate(self.ids):
            tokens, names = self._words(condition, n)
            spans: list[dict[str, Any]] = []
            for at, span in enumerate(names):
                if spans and spans[-1]["name"] == span:
                    spans[-1]["stop"] = at + 1
                else:
                    spans.append({"name": span, "start": at, "stop": at + 1})
            yield {
                **self.names, "condition": condition, "item": item, "token_ids": [sum(map(ord, token)) for token in tokens], "spans": spans,
                "text": "".join(tokens), "tokens": tokens,
            }  # fmt: skip

    def factor(self, condition: str, n: int) -> np.ndarray:
        """λ of one item by layer and head; item 5 loses twice as much as the others in every head of layer 1."""
        rng = np.random.default_rng((self.seed, n, sum(map(ord, condition))))
        strength = {"mless": 1.0, "mful": 1.2, "random": 1.5}.get(condition, 1.0)
        logs = np.log(self.change) * strength + rng.normal(0, 0.02, self.change.shape)
        return np.exp(logs * (2 if n == 4 else 1))

    def unit(self, condition: str, n: int) -> dict[str, pa.Table]:
        tokens, names = self._words(condition, n)
        rng = np.random.default_rng((self.seed, n, 7))
        original = np.array([span != "filler" for span in names])
        rows = self.layers * self.heads * len(QUERIES)
        shape = (self.layers, self.heads, len(QUERIES), int(original.sum()))
        base = np.exp(rng.standard_normal(shape, np.float32) - 4)
        if condition != "none":
            base = base * self.factor(condition, n)[:, :, None, None].astype(np.float32)
        values = 0.01 * rng.random((*shape[:3], len(tokens)), np.float32)
        values[..., original] = base
        values[..., -1] = np.nan
        values = values.reshape(rows, len(tokens))
        layer = np.repeat(np.arange(1, self.layers + 1), self.heads * len(QUERIES))
        head = np.tile(np.repeat(np.arange(1, self.heads + 1), len(QUERIES)), self.layers)
        n_queries = np.broadcast_to(len(tokens) - 1 - np.arange(len(tokens)), values.shape).astype(np.int32)
        share = np.array([names.count(one) for one in MASS_NAMES], np.float32) / len(names)
        mass = pa.StructArray.from_arrays([pa.array(np.full(rows, one, np.float32)) for one in share], list(MASS_NAMES))
        said = {**self.names, "condition": condition, "item": self.ids[n]}
        first = pa.array(np.zeros(rows, np.int32))
        common = {key: pa.array([value]).take(first) for key, value in said.items()}
        queries = pa.array(list(QUERIES)).take(pa.array(np.tile([0, 1], self.layers * self.heads)))
        attention = pa.table(
            common
            | {"layer": pa.array(layer, pa.int32()), "head": pa.array(head, pa.int32()), "queries": queries}
            | {"received": lists(values, pa.float32()), "n": lists(n_queries, pa.int32()), "mass": mass}
        )
        few = self.layers * len(QUERIES)
        even = np.where(np.arange(len(tokens)) < len(tokens) - 1, 1 / len(tokens), np.nan).astype(np.float32)
        dilution = pa.table(
            {key: column.slice(0, few) for key, column in common.items()}
            | {"layer": pa.array(np.repeat(np.arange(1, self.layers + 1), 2), pa.int32()), "queries": pa.array(list(QUERIES) * self.layers)}
            | {"received": lists(np.broadcast_to(even, (few, len(tokens))), pa.float32())}
        )  # fmt: skip
        return {"attention": attention, "dilution": dilution}

    def _even(self, n: int) -> float:
        total = 1 + self.system + self.asked[n]
        return total / (total + self.length)

    def shares(self, condition: str) -> pa.Table:
        count, width = len(self.ids), self.heads + 1
        every = np.stack([self.factor(condition, n) for n in range(count)])
        with_layer = np.concatenate([every.mean(axis=2, keepdims=True), every], axis=2)
        retained = np.repeat(with_layer.reshape(count, -1), len(QUERIES), axis=1).reshape(-1)
        even = np.repeat([self._even(n) for n in range(count)], self.layers * width * len(QUERIES))
        rows = len(retained)
        each = self.layers * width * len(QUERIES)
        columns = {
            **self.names, "condition": condition, "item": pa.array(self.ids).take(pa.array(np.repeat(np.arange(count), each))),
            "layer": np.tile(np.repeat(np.arange(1, self.layers + 1), width * len(QUERIES)), count),
            "head": np.tile(np.repeat(np.arange(width), len(QUERIES)), self.layers * count),
            "queries": pa.array(list(QUERIES)).take(pa.array(np.tile([0, 1], rows // 2))),
            "retained": retained, "uniform": even, "epsilon": np.log(retained) / np.log(even),
        }  # fmt: skip
        return table_of_columns(columns, SHARES, rows)

    def retained(self, condition: str) -> Iterator[dict[str, Any]]:
        every = np.stack([self.factor(condition, n) for n in range(len(self.ids))])
        even = float(np.exp(np.mean([np.log(self._even(n)) for n in range(len(self.ids))])))
        for layer in range(self.layers):
            for head in range(self.heads + 1):
                logs = np.log(every[:, layer].mean(axis=1) if head == 0 else every[:, layer, head - 1])
                mean, half = logs.mean(), 2.2 * logs.std(ddof=1) / np.sqrt(len(logs))
                lo, hi = float(np.exp(mean - half)), float(np.exp(mean + half))
                verdict = (
                    "drops"
                    if hi < 0.95
                    else "rises"
                    if lo > 1.05
                    else "unchanged"
                    if lo > 0.9 and hi < 1.1
                    else "undecided"
                )
                for queries in QUERIES:
                    yield {
                        **self.names, "condition": condition, "layer": layer + 1, "head": head, "queries": queries, "retained": float(np.exp(mean)),
                        "lo": lo, "hi": hi, "epsilon": mean / np.log(even), "epsilon_lo": np.log(hi) / np.log(even), "epsilon_hi": np.log(lo) / np.log(even),
                        "epsilon_items": len(logs), "p": 0.001, "p_adjusted": 0.02, "n_items": len(logs), "uniform": even, "skewed": False, "verdict": verdict,
                    }  # fmt: skip


def _prompts_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    table = pa.Table.from_pylist(list(rows))
    at = table.column_names.index("token_ids")
    return table.set_column(at, "token_ids", table["token_ids"].cast(pa.list_(pa.int32())))
