"""What received attention costs on a CPU, against a plain forward and against what people use instead; SmolLM2, fp32, every head.

    python benchmarks/received_cpu.py --peer-python .venv-peers/bin/python [--tokens 128,512,2048,4096] [--json FILE]

Correctness comes first: ours against fp64, the peers' column sums against ours. Then one JSON line per row, and a table. Every row is a
process of its own, so that its peak memory is its own; they take turns forward by forward, so that a ratio is of one moment, and the plain
forward runs again at the end of each turn as the control. The peers (requirements-peers.txt) run under `--peer-python`; each sums a layer's
matrix as soon as it has it, which needs less memory than keeping them all. TransformerLens and nnterp also compute the language-model head.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OURS = ("plain", "ours", "layer 1")
PEERS = ("HF eager", "TransformerLens", "nnterp")
GATE_TOKENS = 300

Sums = Tensor  # layers × heads × keys: the column sums of what later queries send
Forward = Callable[[Tensor], Sums | None]


def token_ids(tokens: int) -> Tensor:
    return torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def columns(p: Tensor) -> Tensor:
    """Of one layer's matrices, batch × heads × queries × keys."""
    return torch.tril(p, -1).sum(-2)[0]


# ---- what is timed: each runs in a process of its own ----------------------------------------------------------------


def plain(folder: Path) -> Forward:
    import mless

    model = mless.load("smollm2").model
    return lambda ids: model(input_ids=ids, use_cache=False) and None


def ours(folder: Path, layers: int | None = None) -> Forward:
    import mless
    from mless.capture import capturing

    loaded = mless.load("smollm2", layers=layers)
    captured = range(1, loaded.loaded_layers + 1)

    def forward(ids: Tensor) -> Sums:
        with capturing(loaded.model, layers=captured) as recorder:
            recorder.run(input_ids=ids, use_cache=False)
        return torch.stack([recorder.sums[layer].received[0, 0] for layer in captured])

    return forward


def hf_eager(folder: Path) -> Forward:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    found: list[Tensor] = []
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda module, given, output: found.append(columns(output[1])))

    def forward(ids: Tensor) -> Sums:
        found.clear()
        model(input_ids=ids, use_cache=False)
        return torch.stack(found)

    return forward


def transformer_lens(folder: Path) -> Forward:
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32)
    names = [name for name in model.hook_dict if name.endswith("attn.hook_pattern")]

    def forward(ids: Tensor) -> Sums:
        found: dict[str, Tensor] = {}

        def note(p: Tensor, hook: Any) -> None:
            found[hook.name] = columns(p)

        model.run_with_hooks(ids, fwd_hooks=[(name, note) for name in names], return_type=None)
        return torch.stack([found[name] for name in names])

    return forward


def nnterp(folder: Path) -> Forward:
    from nnterp import StandardizedTransformer

    model = StandardizedTransformer(str(folder), enable_attention_probs=True, dtype=torch.float32, device_map="cpu")
    layers = model.num_layers

    def forward(ids: Tensor) -> Sums:
        with model.trace(ids):
            found = torch.stack([columns(model.attention_probabilities[layer]) for layer in range(layers)]).save()
        return found

    return forward


MADE: dict[str, Callable[[Path], Forward]] = {
    "plain": plain,
    "ours": ours,
    "layer 1": lambda folder: ours(folder, layers=1),
    "HF eager": hf_eager,
    "TransformerLens": transformer_lens,
    "nnterp": nnterp,
}


def peak_gb() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's peak is handed on from the process that started this one
        found = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(found.split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def serve(name: str, folder: Path, tokens: int, answers: Any) -> None:
    """One forward for each line asked for; its seconds and this process's peak memory so far."""
    torch.set_grad_enabled(False)
    forward = MADE[name](folder)
    ids = token_ids(tokens)
    forward(ids[:, :64])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        sums = forward(ids)
        took = time.perf_counter() - begin
        if path := line.strip():
            torch.save(sums, path)
        print(json.dumps({"s": took, "peak_gb": peak_gb()}), file=answers, flush=True)


class Worker:
    def __init__(self, name: str, python: str, folder: Path, tokens: int) -> None:
        self.command = [
            python,
            str(Path(__file__).resolve()),
            "--serve",
            name,
            "--folder",
            str(folder),
            "--tokens",
            str(tokens),
        ]
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self.name, self.seconds, self.peak = name, list[float](), 0.0
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | offline
        )  # fmt: skip
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with {self.process.wait()}; run it by hand: {' '.join(self.command)}")
        return line

    def run(self, save: Path | None = None) -> float:
        assert self.process.stdin is not None
        print(save or "", file=self.process.stdin, flush=True)
        answer = json.loads(self._line())
        self.seconds.append(answer["s"])
        self.peak = answer["peak_gb"]
        return answer["s"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- the gate --------------------------------------------------------------------------------------------------------


def save_for_peers(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    import mless

    loaded = mless.load("smollm2")
    whole = LlamaForCausalLM(loaded.model.config)
    whole.model = loaded.model
    whole.tie_weights()
    whole.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def error_of_ours(tokens: int) -> float:
    """The worst layer's, against fp64 from the same queries and keys."""
    import mless
    from mless import kernels
    from mless.capture import capturing
    from mless.kernels import reference

    model = mless.load("smollm2").model
    layers = range(1, model.config.num_hidden_layers + 1)
    seen: dict[int, tuple[Tensor, Tensor, float]] = {}

    def watch(call: Any, out: Tensor) -> None:
        seen[call.layer] = call.query, call.key, call.score["scale"]

    with torch.inference_mode(), capturing(model, layers=layers) as recorder:
        recorder.on_call = watch
        model(input_ids=token_ids(tokens), use_cache=False)
    if set(recorder.computed_by.values()) != {"joint"}:
        sys.exit(f"this is to be a benchmark of `joint`, but {set(recorder.computed_by.values())} computed")
    real = torch.ones(1, tokens, dtype=torch.bool)
    visible = kernels.Intervals(torch.zeros(1, tokens, dtype=torch.int32), tokens, whole=True)
    asked = {"visible": visible, "sets": real[:, None], "spans": torch.zeros(1, tokens, dtype=torch.long), "n_spans": 1}
    errors: list[float] = []
    for layer, (q, k, scale) in seen.items():
        truth = reference.received(q, k, scale=scale, **asked).received
        found = recorder.sums[layer].received[:, :1].double()
        errors.append(float((found - truth).norm() / truth.norm()))
    return max(errors)


def gate(folder: Path, pythons: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"what": "gate", "tokens": GATE_TOKENS, "ours against fp64": error_of_ours(GATE_TOKENS)}
    saved: dict[str, Tensor] = {}
    for name in pythons:
        if name == "plain":
            continue
        worker = Worker(name, pythons[name], folder, GATE_TOKENS)
        worker.run(folder / "sums.pt")
        worker.close()
        saved[name] = torch.load(folder / "sums.pt")
    for name, sums in saved.items():
        expected = saved["ours"][: len(sums)]
        found[f"{name} against ours"] = float((sums - expected).norm() / expected.norm())
    del found["ours against ours"]
    wrong = {name: error for name, error in found.items() if " against " in name and not error <= 1e-5}
    if wrong:
        sys.exit(f"no speed on wrong sums: {wrong}")
    return found


# ---- times -----------------------------------------------------------------------------------------------------------


def rows_of(tokens: int, folder: Path, pythons: dict[str, str], rounds: int, peer_rounds: int) -> list[dict[str, Any]]:
    workers = {name: Worker(name, python, folder, tokens) for name, python in pythons.items()}
    again: list[float] = []
    try:
        for name, worker in workers.items():
            if name in OURS or peer_rounds > 1:
                worker.run()
                worker.seconds.clear()
        for at in range(rounds):
            for name, worker in workers.items():
                if name in OURS or at < peer_rounds:
                    worker.run()
            again.append(workers["plain"].run())
            workers["plain"].seconds.pop()
    finally:
        for worker in workers.values():
            worker.close()
    base = workers["plain"].seconds
    rows: list[dict[str, Any]] = []
    for name, worker in workers.items():
        rows.append(_row(name, tokens, worker.seconds, base) | {"peak_gb": round(worker.peak, 2)})
    rows.insert(1, _row("plain again", tokens, again, base))
    return rows


def _row(name: str, tokens: int, seconds: list[float], base: list[float]) -> dict[str, Any]:
    return {
        "what": name,
        "tokens": tokens,
        "s": round(statistics.median(seconds), 4),
        "least_s": round(min(seconds), 4),
        "over_plain": round(statistics.median(a / b for a, b in zip(seconds, base, strict=False)), 3),
        "least_over_least": round(min(seconds) / min(base), 3),
        "rounds": len(seconds),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| tokens | | s | over plain | least over least | peak, GB |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row["what"] != "gate":
            cells = [
                f"{row['tokens']:,}",
                row["what"],
                f"{row['s']:.3f}",
                row["over_plain"],
                row["least_over_least"],
                row.get("peak_gb", ""),
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def versions(python: str) -> dict[str, str]:
    asked = "import importlib.metadata as m; print({p: m.version(p) for p in ('torch','transformers','transformer-lens','nnterp','nnsight')})"
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    return json.loads(found.stdout.replace("'", '"'))


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="128,512,2048,4096")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument(
        "--peer-python",
        help="of the environment made from requirements-peers.txt; without it no peer but HF eager runs",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=MADE, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        answers, sys.stdout = sys.stdout, sys.stderr  # a peer's own words must not be taken for an answer
        serve(asked.serve, asked.folder, int(asked.tokens), answers)
        return
    pythons: dict[str, str] = dict.fromkeys((*OURS, "HF eager"), sys.executable)
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    about["waiting"] = os.environ.get("OMP_WAIT_POLICY", "as OpenMP has it")
    if asked.peer_python:
        pythons |= dict.fromkeys(PEERS[1:], asked.peer_python)
        about["peers"] = versions(asked.peer_python)
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row | about | {"load": round(os.getloadavg()[0], 1)})
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if asked.json:
            asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_for_peers(folder)
        tell(gate(folder, pythons))
        for tokens in map(int, asked.tokens.split(",")):
            # A peer takes minutes for a long prompt, and its ratio is far from 1.
            some = (max(2, asked.rounds // 2), 1) if tokens > 2048 else (asked.rounds, asked.peer_rounds)
            for row in rows_of(tokens, folder, pythons, *some):
                tell(row)
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
