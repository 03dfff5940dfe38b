"""What an attention study costs in time, disk and memory, calculated; and how far the same formulas are off for runs that were measured.

    python benchmarks/cost.py            the tables of docs/scale.md, and the check
    python benchmarks/cost.py --check    the check alone

Nothing is run. Every constant is a measurement that its comment names. No model above 8B was ever run with mless: what is said of 70B and 405B is
calculated from 7B's.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tables import rows_of

SETS = 2  # query sets: later, original
GIB = 1 << 30


@dataclass(frozen=True)
class Model:
    label: str
    #: All weights, and those that every token is multiplied with (without embeddings and head), in billions.
    billions: float
    multiplied: float
    layers: int
    heads: int

    @property
    def weights(self) -> float:
        """Bytes in bf16."""
        return 2e9 * self.billions


MODELS = (
    Model("7B (Qwen2.5)", 7.62, 6.53, 28, 28),
    Model("70B (Llama 3)", 70.6, 68.5, 80, 64),
    Model("405B (Llama 3.1)", 405.9, 401.6, 126, 128),
)

#: Operations a second of plain forwards: 2 × 6.53e9 weights × 256,380 tokens in 7.19 s (h200-study, run 2).
RATE = 2 * 6.53e9 * 256_380 / 7.19
#: Seconds a group and layer that the thread that starts kernels takes on top: (15.4 − 13.0 s) for 33 groups more of 28 layers (tried.md).
LAUNCH = 2.4 / 33 / 28
#: Seconds a byte of received attention, for what is copied from the GPU and made into tables beside the forwards (the rest of those 13.0 s).
COPY = (13.0 - 7.19 - 36 * 28 * LAUNCH) / 1.608e9
#: Bytes of the folder over bytes of received attention (h200-study, both runs).
FOLDER = 0.61
#: Bytes a second of received attention that one core of the driver takes (driver.py, `writing`, 28 × 28, half of what two cores take).
ENCODED = 30e6
#: Bytes a second at which weights are read: 15.2 GB in 2.75 s (h200-study, run 2; from a file that had just been written).
READ = 15.2e9 / 2.75
#: Seconds to test and bytes of a row of `shares` in memory and on the disk (docs/scale.md).
SHARE_S, SHARE_MEMORY, SHARE_DISK = 0.6e-6, 92.25, 14.6
#: Seconds to test a head of 500 items (what is left of h200-study's 1.87 s), and bytes of the process beside what is counted (of its 1.84 GB).
TEST_S, BASE = 0.41 / 784 / 500, 1.0e9
#: The driver's own limits (mless.results.storing, mless.study.writing, mless.study.sharing).
PART_TOKENS, WAITING, ANSWERS = 4096, GIB, 2


@dataclass(frozen=True)
class Study:
    model: Model
    items: int
    gpus: int = 1
    conditions: int = 4
    tokens: float = 128.2  # a prompt, in the mean: MATH-500 in `quick`
    group: int = 8192
    cores: int = 16
    #: GPUs that hold one copy of the model.
    gpus_a_worker: int = 1
    shared: bool = True

    @property
    def units(self) -> int:
        return self.items * self.conditions

    @property
    def floats(self) -> float:
        """Bytes of received attention: a float32 a token, layer, head and query set."""
        return 4.0 * SETS * self.units * self.tokens * self.model.layers * self.model.heads

    @property
    def workers(self) -> int:
        return max(1, self.gpus // self.gpus_a_worker)

    @property
    def forwards_s(self) -> float:
        """By one worker. Attention itself is under 2 % of it at these lengths, and inside the measured rate."""
        return 2e9 * self.model.multiplied * self.units * self.tokens / RATE

    @property
    def measuring_s(self) -> float:
        """By one worker."""
        groups = self.units * self.tokens / self.group * 1.13  # padding: 290,137 tokens for 256,380
        return self.forwards_s + LAUNCH * self.model.layers * groups + COPY * self.floats

    @property
    def writing_s(self) -> float:
        return self.floats / (ENCODED * self.cores)

    @property
    def load_s(self) -> float:
        return self.model.weights / READ

    @property
    def share_rows(self) -> int:
        return (self.conditions - 1) * SETS * self.items * self.model.layers * (self.model.heads + 1)

    @property
    def finish_s(self) -> float:
        return TEST_S * self.items * self.model.layers * self.model.heads + SHARE_S * self.share_rows

    @property
    def whole_s(self) -> float:
        return (
            self.load_s + max(self.measuring_s / self.workers, self.writing_s if self.shared else 0.0) + self.finish_s
        )

    @property
    def disk(self) -> float:
        return FOLDER * self.floats + SHARE_DISK * self.share_rows

    @property
    def memory(self) -> float:
        """Of the driver: parts that are encoded with what they become, answers, what waits, sums, and `shares` at the end."""
        a_token = 2 * 4 * SETS * self.model.layers * self.model.heads  # received and n
        threads = self.cores if self.shared else min(4, self.cores // 2)
        parts = min(3 * threads, threads + 8) * PART_TOKENS * a_token * 1.3
        answers = ANSWERS * self.group * a_token if self.shared else 0
        sums = 8 * SETS * self.units * self.model.layers * self.model.heads
        waiting = min(WAITING, 2 * self.floats) if self.shared else 0
        return BASE + sums + max(min(parts, 2.6 * self.floats) + answers + waiting, SHARE_MEMORY * self.share_rows)

    @property
    def limited_by(self) -> str:
        return "writer" if self.shared and self.writing_s > self.measuring_s / self.workers else "GPUs"


def check() -> list[str]:
    """Calculated beside measured. What a constant was taken from checks nothing, and is marked as *fitted*."""
    lines = ["| run | what | measured | calculated | off by |", "|---|---|---|---|---|"]

    def beside(run: str, what: str, measured: float, calculated: float, *, fitted: bool = False) -> None:
        off = "fitted" if fitted else f"{calculated / measured - 1:+.0%}"
        lines.append(f"| {run} | {what} | {measured:.2f} | {calculated:.2f} | {off} |")

    for row in rows_of("h200-study", "quick, 2000 prompts"):
        group = row.get("group_tokens", 4096)
        made = Study(MODELS[0], row["units"] // 4, tokens=row["tokens"] / row["units"], group=group, shared=False)
        name = f"H200, run {row['run']}{', compiles its kernels' if row['run'] == 1 else ''}"
        second = row["run"] == 2
        beside(name, "plain forwards, s", row["plain_16_s"], made.forwards_s, fitted=second)
        beside(name, "measuring, s", row["measure_s"], made.measuring_s)
        beside(name, "finishing, s", row["finish_s"], made.finish_s, fitted=second)
        beside(name, "folder, GB", row["folder_over_floats"] * made.floats / 1e9, made.disk / 1e9, fitted=second)
        beside(name, "memory, GB", row["memory_gb"], made.memory / 1e9, fitted=second)
    for group, measured in ((8192, 11.4), (16384, 13.2)):
        made = Study(MODELS[0], 500, group=group, shared=False)
        beside(f"H200, groups of {group:,} (tried.md)", "measuring, s", measured, made.measuring_s)
    return lines


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count < 1e12 else f"{count / 1e12:.1f} TB"


def tables() -> list[str]:
    lines = ["| model | items | GPUs | GPUs a worker | time | of it writing | limited by | disk | driver's memory |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for model, needs in zip(MODELS, (1, 2, 8), strict=True):
        for items in (500, 10_000):
            for gpus in (1, 8, 64):
                if gpus < needs:
                    continue
                made = Study(model, items, gpus, gpus_a_worker=needs)
                lines.append(
                    f"| {model.label} | {items:,} | {gpus} | {needs} | {_time(made.whole_s)} | {_time(made.writing_s)} | {made.limited_by} | "
                    f"{_bytes(made.disk)} | {_bytes(made.memory)} |"
                )
    return lines


def forty() -> str:
    """40 models of 7B, one study after the other on 64 GPUs, or 8 at a time with a driver each."""
    one, eighth = Study(MODELS[0], 500, 64), Study(MODELS[0], 500, 8)
    return (
        f"40 models of 7B, 500 items, 64 GPUs: {_time(40 * one.whole_s)} one after the other, {_time(5 * eighth.whole_s)} as 8 studies at a time on 8 GPUs "
        f"and 16 cores each; {_bytes(40 * one.disk)}"
    )


def limits() -> list[str]:
    lines = [
        "| model | one worker makes, MB/s | one core encodes | workers that 16 cores keep up with |",
        "|---|---|---|---|",
    ]
    for model in MODELS:
        made = Study(model, 500)
        rate = made.floats / made.measuring_s
        lines.append(f"| {model.label} | {rate / 1e6:.0f} | {ENCODED / 1e6:.0f} | {16 * ENCODED / rate:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    print(*check(), sep="\n")
    if not asked.check:
        print("", *tables(), "", forty(), "", *limits(), sep="\n")


if __name__ == "__main__":
    main()
