"""Keep recorded runs, and make the tables of benchmarks/README.md from them.

    python benchmarks/tables.py                                     write the tables
    python benchmarks/tables.py --check                             write nothing; exit code 1 if one is out of date
    python benchmarks/tables.py --record FILE --as h200-received    keep what a benchmark wrote to FILE as the next run, and write the tables

A run is kept in results/DATE-MACHINE-BENCHMARK.jsonl, one JSON line per row, its number among the runs of that machine and benchmark under
`run`. In the README a table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
Row = dict[str, Any]
OTHERS = {"llama-3.1-8b": "Llama-3.1-8B", "gemma3-4b": "Gemma3-4B"}
BENCHMARKS = (
    "received",
    "received-other-shapes",
    "long-prompts",
    "generation",
    "arm",
    "study",
    "likelihood",
    "cause",
    "cutting",
    "groups",
    "driver",
    "workers",
    "judging",
)
#: A cause study that compiled ARM's kernels; the others were compiled before its clock began.
_ONLY_ARM = "ARM's"
PEERS = ("HF eager", "TransformerLens", "nnterp")
TIMED = ("plain", "plain again", "ours", "layer 1", *PEERS)


# ---- the recorded rows -----------------------------------------------------------------------------------------------


def rows_of(name: str, what: str, **wanted: Any) -> list[Row]:
    """Rows of that benchmark, in the order of their runs. A run with a letter is one between two others, and is told of in the text."""
    found = [row for row in _kept(name) if isinstance(row["run"], int) and row["what"] == what]
    found = [row for row in found if all(row.get(field) == value for field, value in wanted.items())]
    return sorted(found, key=lambda row: row["run"])


def record(file: Path, name: str) -> None:
    """Keep a run and make the tables anew; one that no tables can be made of leaves everything as it was."""
    rows = _lines(file)
    if not rows:
        sys.exit(f"{file} holds no rows: give what a benchmark wrote with --json")
    if lost := next((row for row in rows if not isinstance(row, dict) or not {"what", "torch"} <= row.keys()), None):
        sys.exit(f"{file} was not written by a benchmark's --json: a row has no `what` or no `torch`: {lost}")
    if not re.fullmatch(rf"[a-z0-9]+-({'|'.join(BENCHMARKS)})", name):
        sys.exit(
            f"no name for a run: {name!r}; it is MACHINE-BENCHMARK, where BENCHMARK is one of {', '.join(BENCHMARKS)}"
        )
    runs = [row["run"] for row in _kept(name) if isinstance(row["run"], int)]
    run, date = max(runs, default=0) + 1, rows[0].get("date", time.strftime("%Y-%m-%d"))
    kept = HERE / "results" / f"{date}-{name}.jsonl"
    before = kept.read_text(encoding="utf-8") if kept.exists() else ""
    kept.write_text(before + "".join(json.dumps({**row, "run": run}) + "\n" for row in rows), encoding="utf-8")
    try:
        made = page(PAGE.read_text(encoding="utf-8"))
    except BaseException as fault:
        kept.write_text(before, encoding="utf-8") if before else kept.unlink()
        if isinstance(fault, (KeyError, IndexError, TypeError, ValueError)):
            why = f"{type(fault).__name__}: {fault}"
            sys.exit(f"not kept: no tables can be made with these rows ({why}); give a whole run of one benchmark")
        raise
    PAGE.write_text(made, encoding="utf-8")
    print(f"kept in {kept}")


def _kept(name: str) -> list[Row]:
    files = sorted((HERE / "results").glob("*.jsonl"))
    return [row for file in files if re.sub(r"^\d{4}-\d\d-\d\d-", "", file.stem) == name for row in _lines(file)]


def _lines(file: Path) -> list[Row]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeError, json.JSONDecodeError) as error:
        sys.exit(f"{file} cannot be read as one JSON object per line: {error}")


# ---- what was sought -------------------------------------------------------------------------------------------------


def aims() -> str:
    """Every number that was sought, and what each run had."""
    lines: list[tuple[str, str, Sequence[float], Callable[[float], bool], str]] = []

    def at_most(what: str, most: float, found: Sequence[float], form: str = ".3f") -> None:
        lines.append((what, f"≤ {most:g}", found, lambda value: value <= most, form))

    def at_least(what: str, least: float, found: Sequence[float], form: str = ".2f") -> None:
        lines.append((what, f"≥ {least:,g}", found, lambda value: value >= least, form))

    for tokens, most in ((512, 1.05), (8192, 1.07), (32768, 1.15), (131072, 1.35)):
        name = f"{tokens:,} tokens" + (" × 8 rows" if tokens == 512 else "")
        forwards = [row for row in _forwards(tokens) if "whole_ratio" in row]
        at_most(f"H200, ours over plain, {name}", most, [row["ratio"] for row in forwards])
        at_most("the same, captured whole", most, [_whole(row) for row in _forwards(tokens)])
    memory = _by_run(rows_of("h200-received", "forward"), "memory_ratio", max)
    at_most("H200, peak memory over plain, the worst of all lengths", 1.02, memory)
    alone = [row for row in rows_of("h200-received", "kernel") if row["tokens"] >= 8192]
    at_most("H200, kernel over SDPA's flash, the worst from 8,192 up", 0.55, _by_run(alone, "one_over_flash", max))
    at_most("the same, two query sets", 0.55, _by_run(alone, "two_over_flash", max))
    at_most("H200, one captured layer of 28, 8,192 tokens", 1.01, [row["one_layer_ratio"] for row in _forwards(8192)])
    first = rows_of("h200-received", "the first layer alone, captured")
    at_most("H200, layer 1 alone over a whole forward", 0.05, [row["of_a_whole_forward"] for row in first])
    errors = [row["worst_relative_error"] for row in rows_of("h200-received", "gate")]
    at_most("H200, error against fp64", 1e-6, errors, ".1e")
    at_most("CPU, ours over plain, 2,048 tokens", 1.1, [run["ours"]["over_plain"] for run in _cpu_runs(2048)], ".2f")
    at_least(
        "CPU, fastest peer over ours, 2,048 tokens", 3, [_peers_over(run, "ours") for run in _beside_peers(2048)], ".3f"
    )
    layer = [_peers_over(run, "layer 1", "s") for run in _beside_peers(2048)]
    at_least("CPU, fastest peer over ours, layer 1 only", 80, layer, ".0f")
    for rows, least in ((128, 8000), (1, 200)):
        speeds = [row["tokens_per_s"] for row in rows_of("h200-generation", "ours, row-stable", rows=rows)]
        at_least(f"H200, tokens a second, {rows} row{'s' if rows > 1 else ''}", least, speeds, ",.0f")
    at_least("CPU, tokens over the best `generate`'s, bf16", 1.8, _over_generate("bfloat16"))
    at_least("CPU, tokens over the best `generate`'s, fp32", 3, _over_generate("float32"))
    studies = [row for row in _kept("h200-study") if row["run"] != 1]  # run 1 compiles its kernels
    at_most("H200, whole study over its plain forwards", 3, [row["ratio"] for row in studies], ".2f")
    at_most("the same, folder over its floats", 1.1, [row["folder_over_floats"] for row in studies], ".2f")
    at_most("the same, memory over the model's, GB", 4, [row["memory_gb"] for row in studies], ".1f")
    at_most("the same, one item with all heads, ms", 60, [row["one_item_ms"] for row in studies], ".0f")
    at_most("the same, one head over 500 items, ms", 500, [row["one_head_ms"] for row in studies], ".0f")
    here = [row["ratio"] for row in _kept("aarch64-study")]
    at_most("CPU (2 cores, aarch64), whole study over its plain forwards", 1.3, here, ".2f")
    at_most(
        "H200, likelihood study over its plain forwards", 1.5, [row["ratio"] for row in _kept("h200-likelihood")], ".2f"
    )
    here = [row["ratio"] for row in _kept("aarch64-likelihood")]
    at_most("CPU (2 cores, aarch64), likelihood study over its plain forwards", 1.5, here, ".2f")
    eight = [row["ratio"] for row in _kept("h200host-likelihood")]
    at_most("CPU (8 cores, x86), the same with 100 items", 1.5, eight, ".2f")
    causes = {
        when: [row["ratio"] for row in _kept("h200-cause") if row.get("compiles") == when]
        for when in (False, True, _ONLY_ARM)
    }
    sought = "H200, cause study over layers × 3 × 2 + 2 plain forwards an item"
    at_most(f"{sought}, kernels compiled before", 1.5, causes[False], ".2f")
    at_most("the same, ARM's kernels compiled while prompts are rendered", 1.5, causes[_ONLY_ARM], ".2f")
    at_most("the same in versions that waited for kernels, some of them compiled anew", 1.5, causes[True], ".2f")
    older = [row["ratio"] for row in _kept("h200-cause") if "compiles" not in row]
    at_most("the same in older versions, where it was not noted", 1.5, older, ".2f")
    here = _kept("x86-cause")
    threads = " · ".join(re.findall(r"[0-9]+", " ".join(row["device"] for row in here)))
    at_most(
        f"CPU (x86, {threads} threads), the same with the embedded model", 1.5, [row["ratio"] for row in here], ".2f"
    )
    for rows, tokens in ((8, 512), (1, 8192)):
        cut = [row["ratio"] for row in _kept("h200-cutting") if (row["rows"], row["tokens"]) == (rows, tokens)]
        at_most(f"H200, forward with a cut over one without, {rows} × {tokens:,} tokens, three cuts", 1.1, cut, ".2f")
    here = [row["ratio"] for row in _kept("x86-cutting")]
    at_most("CPU (2 cores, x86), the same, 1 × 2,048 tokens, three cuts", 1.1, here, ".2f")
    four = [row["over_first"] for row in rows_of("h200host-workers", "quick by workers", workers=4)]
    at_least("16 cores, 4 workers over one, 4 threads each", 3, four)
    judged = [row["ratio"] for row in rows_of("h200host-judging", "judged", workers=16)]
    at_least("16 cores, 20,000 answers judged by 16 workers over one", 10, judged)
    made = []
    for what, sought, found, held, form in lines:
        hit = sum(map(held, found))
        reached = f"in {hit} of {len(found)} run{'s' * (len(found) > 1)}" if found else "not measured"
        made.append((what, sought, " · ".join(format(value, form) for value in found), reached))
    return _table(("what", "sought", "measured, run by run", "reached"), made)


def _newest(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def _by_run(rows: Iterable[Row], field: str, worst: Callable[[list[float]], float]) -> list[float]:
    runs: dict[int, list[float]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row[field])
    return [worst(found) for found in runs.values()]


# ---- received attention, on a GPU ------------------------------------------------------------------------------------


def _forwards(tokens: int, shapes: str = "qwen2.5-7b", name: str = "h200-received") -> list[Row]:
    return rows_of(name, "forward", tokens=tokens, shapes=shapes)


def _whole(row: Row) -> float:
    """Of a captured forward that goes on to its end: in the first runs there was no other."""
    return row.get("whole_ratio", row["ratio"])


def received() -> str:
    made = []
    for tokens in (512, 8192, 32768, 131072):
        found = _forwards(tokens)
        row = found[-1]
        made.append(
            (
                _length(row),
                _ms(row["plain_ms"]),
                _ms(row["ours_ms"]),
                f"**{_dots(each['ratio'] for each in found if 'whole_ratio' in each)}**",
                _dots(map(_whole, found)),
                f"{row['memory_ratio'] - 1:+.1%}",
                f"{row['one_layer_ratio']:.3f}" if "one_layer_ratio" in row else "",
                f"{row['noise']:.3f}" if "noise" in row else "",
            )
        )
    head = ("tokens", "plain, ms", "ours, ms", "**ours / plain**", "captured whole / plain", "peak memory")
    return _table((*head, "one layer of 28", "plain again"), made)


def eager() -> str:
    made = []
    for shapes, name in (("qwen2.5-7b", "h200-received"), *((other, "h200-received-other-shapes") for other in OTHERS)):
        newest: dict[tuple[int, int], Row] = {}
        for row in rows_of(name, "eager", shapes=shapes):
            newest[row["tokens"], row["batch"]] = row
        for row in sorted(newest.values(), key=lambda row: row["tokens"] * row["batch"]):
            failed = row["ms"] is None
            same = {field: row[field] for field in ("tokens", "batch", "shapes", "run")}
            plain = rows_of(name, "forward", **same)
            over = f"{row['ms'] / plain[0]['plain_ms']:.1f}" if plain and not failed else ""
            label = {"qwen2.5-7b": "Qwen2.5-7B", **OTHERS}[shapes]
            made.append(
                (label, _length(row), row["gib"] if failed else _ms(row["ms"]), over, "" if failed else row["gib"])
            )
    return _table(("shapes", "tokens", "ms", "over plain", "peak, GiB"), made)


def other_shapes() -> str:
    made = []
    for shapes, label in OTHERS.items():
        for tokens in (512, 8192, 32768, 131072):
            found = _forwards(tokens, shapes, "h200-received-other-shapes")
            row = found[-1]
            ours = _dots(each["ratio"] for each in found if "whole_ratio" in each)
            memory = f"{row['memory_ratio'] - 1:+.1%}"
            made.append((label, _length(row), _ms(row["plain_ms"]), ours, _dots(map(_whole, found)), memory))
    return _table(("shapes", "tokens", "plain, ms", "ours / plain", "captured whole / plain", "peak memory"), made)


def kernel() -> str:
    """The newest run's kernel alone, beside SDPA and beside the two ceilings measured in the same run."""
    rows = _newest(rows_of("h200-received", "kernel", shapes="qwen2.5-7b"))
    ceiling = rows_of("h200-received", "ceilings", run=rows[-1]["run"])[0]
    heads, kv_heads, size = 28, 4, 128
    made = []
    for row in rows:
        # Queries and keys of two bytes, a log-sum-exp and a received number of four: what has to be moved at the least.
        moved = row["tokens"] * (2 * size * (heads + kv_heads) + 4 * 2 * heads)
        bandwidth = moved / (row["one_set_ms"] * 1e-3) / (ceiling["copy_tb_s"] * 1e12)
        made.append(
            (
                f"{row['tokens']:,}",
                f"{row['flash_ms']:.2f}",
                f"{row['cudnn_ms']:.2f}",
                f"{row['one_set_ms']:.2f} · {row['two_sets_ms']:.2f}",
                f"{row['one_over_flash']:.2f} · {row['two_over_flash']:.2f}",
                f"{row['one_over_cudnn']:.2f} · {row['two_sets_ms'] / row['cudnn_ms']:.2f}",
                row["tflops"],
                f"{row['tflops'] / ceiling['matmul_tflops']:.0%} of {ceiling['matmul_tflops']}",
                f"{bandwidth:.1%} of {ceiling['copy_tb_s']} TB/s",
            )
        )
    head = ("tokens", "flash, ms", "cuDNN, ms", "ours, one set · two, ms", "over flash", "over cuDNN", "TFLOP/s")
    return _table((*head, "of a product's rate", "of a copy's rate"), made)


def scaling() -> str:
    groups: dict[str, list[Row]] = {}
    for row in _newest(rows_of("h200-received", "scaling")):
        groups.setdefault(row["in"], []).append(row)
    units = {"tokens": "tokens²", "heads": "heads", "rows": "rows", "captured layers": "layers"}
    names = {"rows": "rows of 8,192 tokens", "captured layers": "captured layers, time over plain"}
    made = []
    for name, rows in groups.items():
        rows = [row for row in rows if row["per_unit"] is not None]
        sizes, ms = (" · ".join(form(row) for row in rows) for form in (lambda row: f"{row['size']:,}", _scaling_ms))
        unit = " · ".join(f"{row['per_unit']:.3g}" for row in rows)
        made.append((names.get(name, name), sizes, ms, f"{units[name]}: {unit}"))
    return _table(("what grows", "sizes", "ms", "time over what the mathematics says"), made)


def _scaling_ms(row: Row) -> str:
    return f"{row['ms']:.2f}" if row["ms"] < 10 else f"{row['ms']:.1f}"


# ---- received attention, on a CPU ------------------------------------------------------------------------------------


def _cpu_runs(tokens: int) -> list[dict[str, Row]]:
    """For each run that had prompts of that length, what was timed → its row."""
    runs: dict[int, dict[str, Row]] = {}
    for what in TIMED:
        for row in rows_of("cpu-received", what, tokens=tokens):
            runs.setdefault(row["run"], {})[what] = row
    return [runs[run] for run in sorted(runs)]


def _beside_peers(tokens: int) -> list[dict[str, Row]]:
    return [run for run in _cpu_runs(tokens) if all(peer in run for peer in PEERS)]


def _peers_over(run: dict[str, Row], ours: str, by: str = "over_plain") -> float:
    return min(run[peer][by] for peer in PEERS) / run[ours][by]


def received_cpu() -> str:
    made = []
    for tokens in (128, 512, 2048, 4096):
        runs = _cpu_runs(tokens)
        for what in TIMED:
            found = [run[what] for run in runs if what in run]
            made.append(
                (
                    f"{tokens:,}",
                    what,
                    " · ".join(str(row["run"]) for row in found),
                    _dots((row["s"] for row in found), ".2f"),
                    _dots((row["over_plain"] for row in found), ".2f"),
                    _dots((row["least_over_least"] for row in found), ".2f"),
                    found[-1].get("peak_gb", ""),
                )
            )
    return _table(("tokens", "", "runs", "s", "over plain", "least over least", "peak, GB"), made)


def sought_cpu() -> str:
    runs = _beside_peers(2048)
    lines = {
        "ours over plain": [f"{run['ours']['over_plain']:.3f}" for run in runs],
        "plain again over plain": [f"{run['plain again']['over_plain']:.3f}" for run in runs],
        "ours over plain again, medians of seconds": [
            f"{run['ours']['s'] / run['plain again']['s']:.3f}" for run in runs
        ],
        "the fastest of ours over the fastest plain": [f"{run['ours']['least_over_least']:.3f}" for run in runs],
        "fastest peer over ours, both over plain": [f"{_peers_over(run, 'ours'):.3f}" for run in runs],
        "fastest peer over ours, medians of seconds": [f"{_peers_over(run, 'ours', 's'):.3f}" for run in runs],
        "fastest peer over layer 1 only, medians of seconds": [
            f"{_peers_over(run, 'layer 1', 's'):.0f}" for run in runs
        ],
        "rounds of ours, of a peer": [f"{run['ours']['rounds']}, {run[PEERS[0]]['rounds']}" for run in runs],
    }
    made = [(what, *found) for what, found in lines.items()]
    return _table(("2,048 tokens", *(f"run {run['ours']['run']}" for run in runs)), made)


# ---- generation, ARM -------------------------------------------------------------------------------------------------


def generation() -> str:
    made = []
    for rows in (128, 1):
        ours = rows_of("h200-generation", "ours, row-stable", rows=rows)
        theirs = rows_of("h200-generation", "transformers generate (64 new tokens)", rows=rows)
        sampled = rows_of("h200-generation", "ours, row-stable, sampled (top-k 50, top-p 0.95)", rows=rows)
        speeds = [_dots((row["tokens_per_s"] for row in found), ",.0f") for found in (ours, sampled, theirs)]
        runs = " · ".join(str(row["run"]) for row in sampled)
        made.append((rows, speeds[0], f"{speeds[1]} (runs {runs})", speeds[2]))
    head = ("rows", "ours, greedy, tokens/s", "ours, sampled", "transformers' generate, dynamic cache, greedy")
    return _table(head, made)


def _cpu_speeds(dtype: str) -> list[tuple[Row, list[Row]]]:
    """For each run, ours and what transformers made in batches of different sizes."""
    theirs = rows_of("cpu-generation", f"transformers generate, {dtype}")
    ours = rows_of("cpu-generation", f"ours, row-stable, {dtype}")
    return [(row, [each for each in theirs if each["run"] == row["run"]]) for row in ours]


def _over_generate(dtype: str) -> list[float]:
    """Ours in bf16 over the best batch size of transformers in that dtype."""
    ours = {row["run"]: row["tokens_per_s"] for row, _ in _cpu_speeds("bfloat16")}
    return [
        ours[row["run"]] / max(each["tokens_per_s"] for each in theirs) for row, theirs in _cpu_speeds(dtype) if theirs
    ]


def generation_cpu() -> str:
    made = []
    for dtype in ("bfloat16", "float32"):
        ratios = iter(_over_generate(dtype))
        for row, theirs in _cpu_speeds(dtype):
            made.append((row["run"], f"ours, {dtype}", row["rows"], f"{row['tokens_per_s']:.0f}", ""))
            if theirs:
                sizes, speeds = _dots((each["rows"] for each in theirs), "d"), [each["tokens_per_s"] for each in theirs]
                over = f"{next(ratios):.2f} × the best"
                made.append((row["run"], f"transformers' generate, {dtype}", sizes, _dots(speeds, ".0f"), over))
    return _table(("run", "", "rows", "tokens/s", "ours in bf16 is"), made)


def arm() -> str:
    made = []
    for row in _newest(_kept("h200-arm")):
        times = (f"{row['plain_ms']:.4f}", f"{row['arm_ms']:.4f}", f"{row['ratio']:.3f}", f"{row['noise']:.3f}")
        made.append((row["what"].replace("1 row(s)", "1 row").replace("row(s)", "rows"), *times))
    return _table(("", "plain, ms", "with ARM, ms", "ratio", "plain again"), made)


# ---- words -----------------------------------------------------------------------------------------------------------


def likelihood() -> str:
    """Every recorded run, on each machine."""
    names = ("machine", "run", "items", "rows", "plain forwards, s", "measuring", "finishing", "drawing")
    made = []
    for machine in ("h200", "aarch64", "h200host"):
        for row in sorted(_kept(f"{machine}-likelihood"), key=lambda row: row["run"]):
            plain = min(seconds for name, seconds in row.items() if re.fullmatch(r"plain_\d+_s", name))
            rows = f"{int(re.findall(r'[0-9]+', row['what'])[0]):,}"
            timed = (row[name] for name in ("measure_s", "finish_s", "drawing_s", "after_loading_s", "ratio"))
            made.append((machine, row["run"], row["items"], rows, plain, *timed, row["memory_gb"]))
    return _table((*names, "**after loading**", "**over plain**", "memory, GB"), made)


def cause() -> str:
    """Every recorded run, on each machine."""
    names = (
        "machine",
        "run",
        "items",
        "plain forward, ms",
        "forwards",
        "measuring",
        "finishing",
        "**after loading**",
        "**ratio**",
        "compiles",
    )
    made = []
    for machine in ("h200", "x86"):
        for row in sorted(_kept(f"{machine}-cause"), key=lambda row: row["run"]):
            plain = min(ms for name, ms in row.items() if re.fullmatch(r"plain_\d+_ms", name))
            items = int(re.findall(r"[0-9]+", row["what"])[0])
            timed = (row[name] for name in ("measure_s", "finish_s", "after_loading_s", "ratio"))
            compiles = {True: "its kernels", False: "–", _ONLY_ARM: _ONLY_ARM}.get(row.get("compiles"), "not noted")
            made.append((machine, row["run"], items, plain, f"{row['forwards']:,}", *timed, compiles))
    return _table(names, made)


def cutting() -> str:
    fields = ("cut", "rows", "tokens", "plain_ms", "ratio", "worst")
    rows = (
        [machine, *(row[name] for name in fields)]
        for machine in ("h200", "x86")
        for row in _newest(_kept(f"{machine}-cutting"))
    )
    return _table(("machine", "cut", "rows", "tokens", "plain, ms", "**over plain**, median", "the worst of 9"), rows)


def study() -> str:
    """Every recorded run: what is measured changes from run to run, and a process's first study pays for its kernels."""
    head = ["run", "plain forwards, s", "measuring", "finishing", "drawing", "**after loading**", "**over plain**"]
    head += ["folder / floats", "memory, GB", "one item, ms", "one head, ms"]
    kept = sorted(_kept("h200-study"), key=lambda row: row["run"])
    fields = ("plain_16_s", "measure_s", "finish_s", "drawing_s", "after_loading_s", "ratio")
    more = ("folder_over_floats", "memory_gb", "one_item_ms", "one_head_ms")
    return _table(head, ([row["run"], *(f"{row[name]:.4g}" for name in (*fields, *more))] for row in kept))


def workers() -> str:
    head = ["run", "workers", "threads each", "prompts a second", "over one", "whole command, s"]
    kept = sorted(_kept("h200host-workers"), key=lambda row: (row["run"], row["workers"]))
    fields = ("run", "workers", "threads", "rate", "over_first", "whole_s")
    return _table(head, ([row[name] for name in fields] for row in kept))


def groups() -> str:
    kept = _kept("h200-groups")
    return _table(
        ["run", "against", "largest difference", "root mean square"],
        ([row["run"], row["what"], f"{row['most']:.1e}", f"{row['rms']:.1e}"] for row in kept),
    )


def driver() -> str:
    head = ["what", "layers × heads", "workers", "units", "MB", "units a second", "**MB a second**", "memory, MB"]
    rows = [row for row in _newest(_kept("aarch64-driver")) if row["what"] != "sharing"]
    made = (
        [
            row["what"],
            f"{row['layers']} × {row['heads']}",
            f"{row['workers']:,}",
            row["units"],
            f"{row['floats_mb']:.0f}",
            f"{row['units_per_s']:.1f}",
            f"**{row['mb_per_s']:.0f}**",
            f"{row['memory_mb']:,}",
        ]
        for row in rows
    )
    return _table(head, made)


def sharing() -> str:
    rows = _newest(rows_of("aarch64-driver", "sharing"))
    return _table(
        ["workers", "groups", "groups a second"],
        ([f"{row[name]:,}" for name in ("workers", "tasks", "tasks_per_s")] for row in rows),
    )


def _dots(values: Iterable[float], form: str = ".3f") -> str:
    return " · ".join(format(value, form) for value in values)


def _length(row: Row) -> str:
    return f"{row['tokens']:,}" + (f" × {row['batch']} rows" if row["batch"] > 1 else "")


def _ms(value: float) -> str:
    return f"{value:,.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "aims": aims,
    "received": received,
    "eager": eager,
    "other shapes": other_shapes,
    "kernel": kernel,
    "scaling": scaling,
    "received on a CPU": received_cpu,
    "2,048 tokens on a CPU": sought_cpu,
    "generation": generation,
    "generation on a CPU": generation_cpu,
    "ARM": arm,
    "study": study,
    "likelihood": likelihood,
    "cause": cause,
    "cuts": cutting,
    "workers": workers,
    "groups": groups,
    "driver": driver,
    "sharing": sharing,
}


def page(text: str) -> str:
    """The page with every table as the recorded rows have it."""
    placed = re.findall(r"<!-- table (.+?) -->", text)
    if sorted(placed) != sorted(TABLES):
        sys.exit(
            f"{PAGE.name} should hold each of these tables once: {', '.join(TABLES)}; it holds {', '.join(placed)}"
        )

    def filled(found: re.Match[str]) -> str:
        return f"<!-- table {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    made, n = re.subn(r"<!-- table (.+?) -->\n.*?<!-- end -->", filled, text, flags=re.DOTALL)
    if n != len(TABLES):
        sys.exit(f"{PAGE.name}: a table has no <!-- end --> after it")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is out of date")
    parser.add_argument("--record", type=Path, metavar="FILE", help="what a benchmark wrote with --json")
    parser.add_argument("--as", dest="name", metavar="NAME", help="MACHINE-BENCHMARK, e.g. h200-received")
    asked = parser.parse_args()
    if bool(asked.record) != bool(asked.name):
        parser.error("--record FILE and --as NAME go together")
    if asked.record and asked.check:
        parser.error("--check writes nothing, and --record keeps a run: give one of them")
    if asked.record:
        return record(asked.record, asked.name)
    text = PAGE.read_text(encoding="utf-8")
    made = page(text)
    if asked.check and made != text:
        sys.exit(f"{PAGE.name} is out of date: run python benchmarks/tables.py")
    if not asked.check:
        PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
