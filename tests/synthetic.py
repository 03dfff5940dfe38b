"""Result folders that look like real ones: spiky attention with a layer-1 drop under filler; answers and log-probabilities that filler changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mless.results.folder import ResultFolder
from mless.results.nats import LIKELIHOOD_METRICS
from mless.results.schemas import (
    ACCURACY,
    ANSWERS,
    CANDIDATES,
    EFFECTS,
    LIKELIHOOD,
    SCORES,
    SOLUTION_TOKENS,
    TUNING,
    table_of_rows,
)
from mless.stats.effects import paired_effects
from mless.study.accuracy.tables import accuracy_table
from mless.study.likelihood.tables import DESCRIBED
from mless.study.spec import AccuracyTable, LikelihoodTable
from mless.values import ArmSettings, Condition

WORDS = " Find the sum of all $ positive integers n such that \\frac{n +1 }{ 2} is prime , and greater than 3 . What \n".split(
    " "
)
FILLERS = {"mless": " /", "mful": "he", "random": None}
SPANS = pa.list_(pa.struct([("name", pa.string()), ("start", pa.int32()), ("stop", pa.int32())]))
MASS = pa.struct([(name, pa.float32()) for name in ("start", "system", "filler", "question", "end", "sink")])


def write_folder(
    path: Path,
    *,
    name: str = "smollm2",
    label: str = "SmolLM2-135M-Instruct",
    layers: int = 3,
    heads: int = 9,
    captured: Sequence[int] | None = None,
    items: Sequence[str] | int = 12,
    conditions: Sequence[str] = ("none", "mless", "mful", "random"),
    placement: str = "before-question",
    omit_first: bool = False,
    length: int = 55,
    token: str | None = None,
    about: Mapping[str, Any] | None = None,
    attention: bool = True,
    exponents: bool = True,
    seed: int = 0,
) -> Path:
    """Write a folder as design.md §4 has it; `captured` layers of the model's `layers`, `token` put into every question.

    Without `exponents` it is as mless wrote it before there was a dilution exponent.
    """
    rng = np.random.default_rng(seed)
    ids = [f"math-{i}" for i in range(items)] if isinstance(items, int) else list(items)
    kept = list(captured or range(1, layers + 1))
    path.mkdir(parents=True, exist_ok=True)
    prompts: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    logs: dict[tuple[str, int, int], list[float]] = {}
    lam = {
        layer: np.exp(rng.normal(-0.32 if layer == 1 else 0.0, 0.25 if layer == 1 else 0.03, heads)) for layer in kept
    }
    system = 16
    shared = {(layer, head): rng.lognormal(0, 1.1, system) for layer in kept for head in range(1, heads + 1)}
    for item in ids:
        asked = int(rng.integers(34, 56))
        words = [f" {w}" if w != "\n" else w for w in rng.choice(WORDS, asked)]
        if token is not None:
            words[3] = token
        tokens = ["<s>", *[f" sys{i}" for i in range(system)], *words, "</q>", "\n"]
        total = len(tokens)
        base = {key: np.concatenate([[40.0], shared[key], rng.lognormal(0, 1.1, asked + 2)]) * 0.008 for key in shared}
        for condition in conditions:
            inserted = 0 if condition == "none" else length
            at = {"before-system": 1, "before-question": 1 + system, "end": total}.get(placement)
            at = int(rng.integers(2, total - 3)) if at is None else at
            filler = [FILLERS[condition] or f" rnd{i}" for i in range(inserted)] if inserted else []
            named = ["start", *["system"] * system, *["question"] * asked, "end", "end"]
            named = named[:at] + ["filler"] * inserted + named[at:]
            spans: list[dict[str, Any]] = []
            for i, span in enumerate(named):
                if spans and spans[-1]["name"] == span:
                    spans[-1]["stop"] = i + 1
                else:
                    spans.append({"name": span, "start": i, "stop": i + 1})
            full = tokens[:at] + filler + tokens[at:]
            common = {"model": name, "task": "bundled", "condition": condition, "item": item}
            prompts.append(
                {**common, "token_ids": list(range(len(full))), "spans": spans, "text": "".join(full), "tokens": full}
            )
            for layer in kept if attention else ():
                for head in range(1, heads + 1):
                    curve = base[layer, head]
                    factor = 1.0
                    if inserted:
                        strength = {"mless": 1.0, "mful": 0.8, "random": 0.6}[condition]
                        factor = float(lam[layer][head - 1] ** strength * np.exp(rng.normal(0, 0.04)))
                        taken = 0.008 * rng.lognormal(0, 1.0 if condition == "random" else 0.2, inserted) * 0.5
                        curve = np.concatenate([curve[:at] * factor, taken, curve[at:] * factor])
                        logs.setdefault((condition, layer, head), []).append(np.log(factor))
                    n = len(full) - 1 - np.arange(len(full))
                    share = np.array([0.3, 0.25 * factor, 0.3 * (1 - factor) if inserted else 0, 0.3 * factor, 0.05, 0])
                    mass = dict(zip([f.name for f in MASS], (share / share.sum()).tolist(), strict=True))
                    for queries in ("later", "original"):
                        received = [float(v) if k else None for v, k in zip(curve, n, strict=True)]
                        rows.append(
                            {
                                **common,
                                "layer": layer,
                                "head": head,
                                "queries": queries,
                                "received": received,
                                "n": n,
                                "mass": mass,
                            }
                        )
    fields = [("model", pa.string()), ("task", pa.string()), ("condition", pa.string())]
    lists = [
        ("token_ids", pa.list_(pa.int32())),
        ("spans", SPANS),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.string())),
    ]
    pq.write_table(
        pa.Table.from_pylist(prompts, pa.schema([*fields, ("item", pa.string()), *lists])), path / "prompts.parquet"
    )
    if attention:
        measured = [("received", pa.list_(pa.float32())), ("n", pa.list_(pa.int32())), ("mass", MASS)]
        keys = [("item", pa.string()), ("layer", pa.int32()), ("head", pa.int32()), ("queries", pa.string())]
        pq.write_table(pa.Table.from_pylist(rows, pa.schema([*fields, *keys, *measured])), path / "attention.parquet")
    else:
        for condition in conditions[1:]:
            for layer in kept:
                for head in range(1, heads + 1):
                    logs[condition, layer, head] = list(np.log(lam[layer][head - 1]) + rng.normal(0, 0.08, 12))
    _write_retained(path, name, logs, heads, exponents)
    known: dict[str, Any] = {"none": {"kind": "none"}}
    for condition in conditions:
        if condition != "none":
            kind = "text" if condition == "random" else "repeat"
            known[condition] = {"kind": kind, "filler": FILLERS[condition], "length": length, "placement": placement}
    known = {condition: known[condition] for condition in conditions}
    study = {
        "name": "quick",
        "title": "Quick look",
        "data": "bundled",
        "prompt": "chat",
        "length": length,
        "placement": placement,
        "seed": 0,
    }
    told = {
        "format": 2, "mless": "0.1.0", "study": study, "task": "bundled", "prompt": "chat", "conditions": known, "omit_first": omit_first, "items": ids,
        "model": {"name": name, "label": label, "family": "llama", "layers": layers, "heads": heads, "fingerprint": "9f" * 16},
        "versions": {"torch": "2.13.0", "transformers": "5.22.2"}, "device": "cpu", "proofs": {"received sums": "ok (3e-7)", "causality": "ok"},
        **(about or {}),
    }  # fmt: skip
    (path / "study.json").write_text(json.dumps(told), encoding="utf-8")
    return path


def _write_retained(
    path: Path, name: str, logs: Mapping[tuple[str, int, int], Sequence[float]], heads: int, exponents: bool
) -> None:
    rows: list[dict[str, Any]] = []

    def add(condition: str, layer: int, head: int, values: np.ndarray) -> None:
        spread = 2.2 * values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
        lo, hi = np.exp(values.mean() - spread), np.exp(values.mean() + spread)
        verdict = (
            "drops" if hi < 0.95 else "rises" if lo > 1.05 else "unchanged" if lo > 0.9 and hi < 1.1 else "undecided"
        )
        uniform = 0.62 + 0.01 * min(layer, 9)
        even = np.log(uniform)
        newer = {
            "epsilon": values.mean() / even, "epsilon_lo": np.log(hi) / even, "epsilon_hi": np.log(lo) / even,
            "epsilon_items": len(values), "skewed": head == 2,
        }  # fmt: skip
        for queries in ("later", "original"):
            rows.append(
                {
                    **(newer if exponents else {}),
                    "model": name, "task": "bundled", "condition": condition, "layer": layer, "head": head, "queries": queries,
                    "retained": float(np.exp(values.mean())), "lo": float(lo), "hi": float(hi), "p": 0.001, "p_adjusted": 0.02,
                    "n_items": len(values), "uniform": uniform, "verdict": verdict,
                }
            )  # fmt: skip

    for condition, layer in dict.fromkeys(key[:2] for key in logs):
        each = [np.array(logs[condition, layer, head]) for head in range(1, heads + 1)]
        add(condition, layer, 0, np.mean(each, axis=0))
        for head, values in enumerate(each, 1):
            add(condition, layer, head, values)
    pq.write_table(pa.Table.from_pylist(rows), path / "retained.parquet")


# ---- answers -----------------------------------------------------------------------------------------------------------------

CONDITIONS = {
    one.name: one
    for one in (
        Condition("none", "none"),
        Condition("none-again", "none", again=True),
        Condition("mless", "repeat", " /", 55),
        Condition("mful", "repeat", " he", 55),
        Condition("random", "text", None, 55),
        Condition("self-consistency", "none", samples=5, temperature=0.7),
    )
}


def write_answers(
    path: Path,
    *,
    name: str = "smollm2",
    label: str = "SmolLM2-135M-Instruct",
    task: str = "arithmetic-1",
    items: int = 60,
    conditions: Sequence[str | Condition] = ("none", "none-again", "mless", "mful", "random"),
    accuracy: float = 0.6,
    effects: Mapping[str, float] | None = None,
    noise: int = 0,
    settings: AccuracyTable | None = None,
    text: str | None = None,
    tokens: bool = True,
    about: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a folder of an accuracy study. `effects` moves the conditions' accuracy, `noise` items change in the A/A control, `text` is
    put into every answer, without `tokens` nobody knows how many tokens an answer had."""
    rng = np.random.default_rng(seed)
    settings = settings or AccuracyTable(max_new_tokens=96)
    known = {one.name: one for one in (CONDITIONS[c] if isinstance(c, str) else c for c in conditions)}
    ids = [f"sum-{i + 1:03d}" for i in range(items)]
    chance = rng.beta(2 * accuracy, 2 * (1 - accuracy), items)[:, None]
    luck = rng.random((items, 16))
    sums = rng.integers(2, 60, (items, 2)).tolist()
    answers: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []
    for condition in known.values():
        drawn = luck[:, : condition.samples or settings.samples]
        if condition.kind != "none" or condition.samples:  # every fifth item or so is answered anew
            drawn = np.where(rng.random((items, 1)) < 0.8, drawn, rng.random(drawn.shape))
        right = drawn < np.clip(chance + (effects or {}).get(condition.name, 0.0), 0, 1)
        if condition.again:
            changed = rng.permutation(items)[:noise]
            right[changed] = ~right[changed]
        for place, (item, (a, b)) in enumerate(zip(ids, sums, strict=True)):
            common = {"model": label, "task": task, "condition": condition.name, "item": item}
            prompts.append(common | _asked(condition, a, b))
            for sample, good in enumerate(right[place].tolist()):
                cut = not good and place % 7 == 0
                said = None if cut else str(a + b if good else a + b + 1 + place % 3)
                words = f"{text or ''}{a} plus {b}{' and so' * (sample + place % 4)}"
                answers.append(
                    {
                        **common, "sample": sample, "seed": 1000 + 16 * place + sample, "extracted": said, "correct": good,
                        "text": words if cut else f"{words} is \\boxed{{{said}}}.", "why": "no answer" if cut else "equal" if good else "differ",
                        "n_tokens": None if not tokens else 96 if cut else 12 + place % 30, "finish": "length" if cut else "stop", "reference": str(a + b),
                        "how": "none" if cut else "boxed", "disagree": False, "cluster": None,
                    }
                )  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    judged = pa.Table.from_pylist(answers, ANSWERS)
    pq.write_table(judged, path / "answers.parquet")
    pq.write_table(pa.Table.from_pylist(prompts), path / "prompts.parquet")
    pq.write_table(accuracy_table(judged, known, settings, seed=0), path / "accuracy.parquet")
    study = {
        "name": "accuracy",
        "title": "Accuracy with filler",
        "data": task,
        "prompt": "raw",
        "seed": 0,
        "accuracy": settings.model_dump(),
    }
    told = {
        "format": 2, "mless": "0.1.0", "complete": True, "study": study, "task": task, "prompt": "raw", "items": ids, "seeds": {"study": 0},
        "conditions": {condition: asdict(one) for condition, one in known.items()},
        "model": {"name": name, "label": label, "family": "llama", "layers": 30, "heads": 9, "fingerprint": "9f" * 16},
        "engine": {"engine": "hf", "mode": "row-stable", "slots": 16, "promise": "the same bits for any number of live rows"},
        "versions": {"torch": "2.13.0", "transformers": "5.22.2"}, "device": {"kind": "cpu", "dtype": "bfloat16"}, **(about or {}),
    }  # fmt: skip
    (path / "study.json").write_text(json.dumps(told), encoding="utf-8")
    return path


def _asked(condition: Condition, a: int, b: int) -> dict[str, Any]:
    filler = [condition.filler or " word"] * (condition.length if condition.kind in ("repeat", "text") else 0)
    parts = {
        "start": ["<s>"],
        "system": [" Reason", " step", " by", " step", "."],
        "filler": filler,
        "question": [" What", " is", f" {a}", " +", f" {b}", "?"],
    }
    tokens: list[str] = []
    spans: list[dict[str, Any]] = []
    for name, words in parts.items():
        if words:
            spans.append({"name": name, "start": len(tokens), "stop": len(tokens) + len(words)})
        tokens += words
    return {"token_ids": list(range(len(tokens))), "spans": spans, "text": "".join(tokens), "tokens": tokens}


# ---- tuning -----------------------------------------------------------------------------------------------------------------


def write_tuning(
    path: Path,
    tried: Sequence[tuple[ArmSettings, float, float]],
    *,
    label: str = "SmolLM2-135M-Instruct",
    task: str = "arithmetic-1",
    complete: bool = True,
    rungs: int = 1,
) -> Path:
    """A tuning folder of (settings, Δ, p after Holm); with several rungs the second half drops out after the first."""
    names = [f"s{n}" for n in range(1, len(tried) + 1)]
    rows: list[dict[str, Any]] = []
    for rung in range(1, rungs + 1):
        here = list(zip(names, tried, strict=True))
        for name, (arm, delta, p) in here if rung == 1 else here[: len(here) // 2]:
            rows.append(
                {
                    "model": label, "task": task, "condition": name, "rung": rung, "n": 40 * rung, "none": 0.55, "value": 0.55 + delta,
                    "lo": 0.4, "hi": 0.7, "delta": delta, "delta_lo": delta - 0.1, "delta_hi": delta + 0.1, "p": p / 2, "p_adjusted": p,
                    "kept": name == "s1", **{key: getattr(arm, key) for key in ("c", "fraction", "p_min", "p_max", "p1", "layers")},
                }
            )  # fmt: skip
    base: dict[str, Any] = dict.fromkeys(ACCURACY.names) | {"model": label, "task": task, "metric": "pass@1", "n": 60}
    level = {"value": 0.5, "lo": 0.4, "hi": 0.6}
    mine = {"condition": "s1", "delta": 0.05, "delta_lo": -0.04, "delta_hi": 0.14, "p": 0.31, "p_adjusted": 0.31}
    tuned = [
        base | level | {"condition": "none", "split": "test"},
        base | level | mine | {"split": "test", "verdict": "undecided", "aa_delta": 0.0},
    ]
    folder = ResultFolder(path)
    conditions = {
        name: asdict(Condition(name, "none", arm=arm)) for name, (arm, _, _) in zip(names, tried, strict=True)
    }
    about = {"chosen": "s1", "tried": len(tried), "rungs": [40] * rungs, "dev": ["a"], "test": ["b"], "transfer": {}}
    folder.write_table("tuning", pa.Table.from_pylist(rows, schema=TUNING))
    folder.write_table("tuned", pa.Table.from_pylist(tuned, schema=ACCURACY))
    folder.write_manifest(
        {
            "measures": "tune", "complete": complete, "study": {"name": "tune", "accuracy": {}}, "task": task, "model": {"label": label},
            "conditions": conditions, "items": ["a", "b"], "tuning": about,
        }
    )  # fmt: skip
    return path


# ---- likelihood -----------------------------------------------------------------------------------------------------------------

#: What a condition does: nats a token of the solution, nats of this answer against others, nats that all answers share.
Change = tuple[float, float, float]
CHANGES: dict[str, Change] = {"mless": (0.004, 0.02, 1.0), "mful": (-0.03, -0.3, 0.5), "random": (0.0, 0.0, 0.0)}


def write_likelihood(
    path: Path,
    *,
    name: str = "smollm2",
    label: str = "SmolLM2-135M-Instruct",
    task: str = "gsm8k_test",
    items: int = 30,
    conditions: Sequence[str | Condition] = ("none", "none-again", "mless", "mful", "random"),
    changes: Mapping[str, Change] | None = None,
    solutions: bool = True,
    answers: bool = True,
    choices: bool = False,
    noise: float = 0.0,
    text: str = "",
    about: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a folder of a likelihood study. `changes` move the conditions' numbers, `noise` the A/A control's; `text` is in every text.

    Every solution has another length; the last item has neither solution nor answer where there are two items or more.
    """
    rng = np.random.default_rng(seed)
    known = {one.name: one for one in (CONDITIONS[c] if isinstance(c, str) else c for c in conditions)}
    moved = CHANGES if changes is None else changes
    ids = [f"sum-{i + 1:03d}" for i in range(items)]
    settings = LikelihoodTable()
    lengths = rng.permutation(np.linspace(8, 90, items).astype(int)).tolist()
    base = [-rng.exponential(1.5, n) for n in lengths]
    first = rng.normal(-14, 2, (items, 9))
    tables: dict[str, list[dict[str, Any]]] = {"scores": [], "tokens": [], "candidates": [], "likelihood": []}
    values: dict[str, dict[str, np.ndarray]] = {}
    prompts: list[dict[str, Any]] = []
    for condition in known.values():
        solution, own, form = moved.get(condition.name, (0.0, 0.0, 0.0))
        quiet = condition.name == "none" or (condition.again and not noise)
        spread = 0.0 if quiet else noise if condition.again else 0.01
        for place, item in enumerate(ids):
            common = {"model": label, "task": task, "condition": condition.name, "item": item}
            prompts.append(common | _asked(condition, place, 2))
            found: dict[str, tuple[float, int]] = {}
            if place and place == items - 1:
                continue
            if solutions:
                n = lengths[place]
                shift = np.where(np.arange(n) < 4, solution * 3, solution) + rng.normal(0, spread, n) / np.sqrt(n)
                logp = np.minimum(base[place] + shift, 0.0)
                kl = 0.0 if quiet else 0.05
                for at, one in enumerate(logp.tolist()):
                    tables["tokens"].append(
                        {
                            **common, "position": at, "token": at, "text": f"{text}{WORDS[at % len(WORDS)]} ", "logp": one, "entropy": 1.0,
                            "kl": kl, "agree": 1.0,
                        }
                    )  # fmt: skip
                found["solution"] = float(logp.mean()), n
                found |= {"kl": (kl, n), "entropy": (1.0, n), "top-1 agreement": (1.0, n)}
            roles = ["answer"] * answers + ["other"] * 4 * answers + ["option"] * 4 * choices
            scored = first[place, : len(roles)] + rng.normal(0, spread * 5, len(roles)) + form
            if answers:
                scored[0] += own
                found["answer"] = float(scored[0]), 4
                found["contrast"] = float(scored[0] - scored[1:5].mean()), 4
            if choices:
                right, *wrong = scored[-4:].tolist()
                found |= {"choice": (float(right > max(wrong)), 4), "margin": (right - max(wrong), 4)}
            for at, (role, one) in enumerate(zip(roles, scored.tolist(), strict=True)):
                tables["candidates"].append(
                    {
                        **common,
                        "number": at,
                        "role": role,
                        "text": f"{text}#### {place + at}",
                        "logp": one,
                        "n_tokens": 4,
                    }
                )
            for metric in [one for one in LIKELIHOOD_METRICS if one in found]:
                value, n = found[metric]
                mine = values.setdefault(metric, {}).setdefault(condition.name, np.full(items, np.nan))
                mine[place] = value
                row = {**common, "metric": metric, "value": value, "n_tokens": n}
                tables["scores"].append(row)
                tables["likelihood"].append({**row, "delta": value - values[metric]["none"][place]})
    effects = [
        {"model": label, "task": task, "condition": one, "metric": metric, "margin": settings.margin_of(metric), **asdict(effect)}
        for metric, found in values.items()
        for one, effect in paired_effects(
            found["none"], {one: mine for one, mine in found.items() if one != "none"}, rng, margin=settings.margin_of(metric),
            again="none-again" if "none-again" in found else None, flips=2000,
        ).items()
    ]  # fmt: skip
    for row in effects:
        if row["metric"] in DESCRIBED:
            row |= dict.fromkeys(("p", "p_again", "p_adjusted", "alpha", "equivalent_p", "mde", "margin", "verdict"))
    folder = ResultFolder(path)
    wanted = {"scores": SCORES, "tokens": SOLUTION_TOKENS, "candidates": CANDIDATES, "likelihood": LIKELIHOOD}
    for table, columns in wanted.items():
        folder.write_table(table, table_of_rows(tables[table], columns))
    folder.write_table("effects", table_of_rows(effects, EFFECTS))
    folder.write_table("prompts", pa.Table.from_pylist(prompts))
    study = {
        "name": "likelihood", "title": "Does filler make the right answer likelier?", "data": task, "prompt": "raw", "seed": 0,
        "likelihood": settings.model_dump(),
    }  # fmt: skip
    told = {
        "measures": "likelihood", "complete": True, "study": study, "task": task, "prompt": "raw", "items": ids, "seeds": {"study": 0},
        "conditions": {condition: asdict(one) for condition, one in known.items()}, "lacking": {},
        "model": {"name": name, "label": label, "family": "llama", "layers": 30, "heads": 9, "fingerprint": "9f" * 16},
        "versions": {"torch": "2.13.0", "transformers": "5.22.2"}, "device": {"kind": "cpu", "dtype": "float32"}, **(about or {}),
    }  # fmt: skip
    folder.write_manifest(told)
    return path
