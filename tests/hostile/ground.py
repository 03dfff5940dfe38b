"""Valid things to be spoiled: a model, a GGUF, data, a study file, logs of other programs, and a result folder of every kind.

They are made once, by a process of its own: what is forked afterwards must not have computed anything.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

#: Words that make a small study of the tiny model, by the folder that it makes.
SMALL = ("--limit", "3", "--prompt", "raw", "--length", "5")
STUDIES: dict[str, tuple[str, ...]] = {
    "quick": ("run", "quick", "--model", "{g}/model", *SMALL, "--conditions", "none,mless,mful,random"),
    "activations": ("run", "activations", "--model", "{g}/model", *SMALL, "--conditions", "none,mless,arm", "--layers", "1"),
    "affine": ("run", "affine", "--model", "{g}/model", *SMALL, "--conditions", "none,mless", "--layers", "1"),
    "likelihood": (
        "run", "likelihood", "--model", "{g}/model", "--data", "{g}/worked.jsonl", *SMALL, "--conditions", "none,mless", "--set", "likelihood.others=3",
    ),
    "placebo": (
        "run", "placebo", "--model", "{g}/model", "--data", "{g}/worked.jsonl", *SMALL, "--conditions", "none,mless", "--set", "likelihood.others=3",
        "--set", "placebo.edits=3",
    ),
    "dose": (
        "run", "dose", "--model", "{g}/model", "--data", "{g}/worked.jsonl", "--limit", "6", "--prompt", "raw", "--conditions", "none,mless", "--set",
        "likelihood.others=3", "--set", "dose.most=8", "--set", "dose.points=2", "--set", "dose.placements=before-question",
    ),
    "multiverse": (
        "run", "multiverse", "--model", "{g}/model", "--data", "{g}/worked.jsonl", "--limit", "3", "--length", "5", "--conditions", "none,mless", "--set",
        "likelihood.others=3", "--set", "multiverse.template=raw", "--set", "multiverse.system=study,none",
    ),
    "cause": (
        "run", "cause", "--model", "{g}/model", "--data", "{g}/worked.jsonl", *SMALL, "--conditions", "none,mless", "--set", "likelihood.others=3",
        "--set", "cause.every=2",
    ),
    "accuracy": (
        "run", "accuracy", "--model", "{g}/model", "--data", "{g}/items.jsonl", "--prompt", "raw", "--length", "5", "--conditions", "none,mless",
        "--set", "accuracy.engine=scripted", "--set", "accuracy.script={g}/script.json",
    ),
    "tuned": (
        "tune", "--model", "{g}/model", "--data", "{g}/items.jsonl", "--prompt", "raw", "--set", "tune.c=[0.05,0.13]", "--set", "tune.p1=[95]",
        "--set", "tune.p_min=[]", "--set", "tune.p_max=[]", "--set", "accuracy.engine=scripted", "--set", "accuracy.script={g}/script.json",
    ),
}  # fmt: skip


def words(given: tuple[str, ...], **places: Path | str) -> list[str]:
    return [word.format(**{name: str(place) for name, place in places.items()}) for word in given]


def study(name: str, ground: Path, out: Path) -> list[str]:
    """The command that makes a folder."""
    return [*words(STUDIES[name], g=ground), "--out", str(out)]


def samples(seed: int) -> list[dict[str, Any]]:
    """lm-eval's samples, as --log_samples writes them."""
    return [
        {
            "doc_id": n,
            "doc": {"question": f"q{n}"},
            "target": "42",
            "arguments": {"gen_args_0": {"arg_0": f"Question {n}?", "arg_1": {"until": [], "do_sample": False, "max_gen_toks": 32}}},
            "resps": [["it is 42" if (n * 7 + seed) % 3 else "it is 7"]],
            "filtered_resps": ["42" if (n * 7 + seed) % 3 else "7"],
            "filter": "last-number",
            "metrics": ["exact_match"],
            "doc_hash": f"hash of {n}",
            "exact_match": float((n * 7 + seed) % 3 > 0),
        }
        for n in range(12)
    ]  # fmt: skip


def choices(seed: int) -> list[dict[str, Any]]:
    """Those of a multiple-choice task."""
    return [
        {
            "doc_id": n,
            "doc": {"question": f"q{n}"},
            "target": "1",
            "arguments": {f"gen_args_{k}": {"arg_0": f"Question {n}?", "arg_1": f" choice {k}"} for k in range(2)},
            "resps": [[["-1.5", "False"]], [["-1.0" if (n + seed) % 2 else "-2.0", "False"]]],
            "filtered_resps": [["-1.5", "False"], ["-1.0", "False"]],
            "filter": "none",
            "metrics": ["acc"],
            "doc_hash": f"hash of {n}",
            "acc": float((n + seed) % 2),
        }
        for n in range(12)
    ]


def inspect_log(seed: int) -> dict[str, Any]:
    one = {
        "target": "42",
        "attachments": {"long": "Question 0?"},
        "output": {
            "choices": [{"message": {"role": "assistant", "content": "it is 42"}, "stop_reason": "stop"}],
            "completion": "it is 42",
            "usage": {"output_tokens": 5},
            "metadata": {"mless_condition": None},
        },
    }
    about = {
        "task": "pkg/sums",
        "model": "mless/smollm2",
        "model_generate_config": {"max_tokens": 8, "temperature": 0.7},
    }
    return {
        "status": "success",
        "eval": about,
        "plan": {"config": {"max_tokens": 8, "temperature": 0.7}},
        "samples": [
            one
            | {
                "id": f"q{n}",
                "epoch": 1,
                "input": f"Question {n}?" if n else "attachment://long",
                "scores": {"includes": {"value": "C" if (n + seed) % 3 else "I", "answer": "42"}},
            }
            for n in range(12)
        ],
    }  # fmt: skip


def write_archive(path: Path, log: dict[str, Any]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({key: value for key, value in log.items() if key != "samples"}))
        for one in log["samples"]:
            archive.writestr(f"samples/{one['id']}_epoch_{one['epoch']}.json", json.dumps(one))


def _write_inputs(ground: Path) -> None:
    from models.tiny_models import write_gguf
    from spelling import CHATML, model_folder

    model_folder(ground / "model")
    (ground / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 2], "do_sample": false}')
    (ground / "model" / "chat_template.jinja").write_text(CHATML)
    write_gguf(ground / "tiny.gguf")
    rows = [{"id": f"q{n}", "question": f"What is {n} + 0?", "answer": str(n)} for n in range(1, 25)]
    (ground / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (ground / "items.json").write_text(json.dumps(rows))
    worked = [row | {"solution": f"Adding 0 changes nothing: \\boxed{{{row['answer']}}}"} for row in rows]
    (ground / "worked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in worked))
    (ground / "items.csv").write_text("id,question,answer\n" + "".join(f"q{n},What is {n}?,{n}\n" for n in range(9)))
    (ground / "script.json").write_text(json.dumps({"*": {f"q{n}": rf"\boxed{{{n % 5}}}" for n in range(1, 25)}}))
    (ground / "study.toml").write_text(
        'title = "Ten slashes"\nprompt = "raw"\nconditions = ["none", "short"]\nlayers = "1"\nlimit = 2\n'
        'flips = 100000\nseed = 1\n\n[condition.short]\nfiller = " /"\nlength = 10\n\n[margins]\ndrop = 0.95\nrise = 1.05\n'
    )
    for name, make in (("samples", samples), ("choices", choices)):
        for condition, seed in (("none", 0), ("mless", 1)):
            lines = "".join(json.dumps(row) + "\n" for row in make(seed))
            (ground / f"{name}-{condition}.jsonl").write_text(lines)
    for condition, seed in (("none", 0), ("mless", 1)):
        (ground / f"inspect-{condition}.json").write_text(json.dumps(inspect_log(seed)))
        write_archive(ground / f"inspect-{condition}.eval", inspect_log(seed))


#: Kinds of study that keep units while they run. A tuning keeps its own in inner folders.
WITH_UNITS = ("quick", "activations", "affine", "likelihood", "accuracy")
#: What an OpenAI-compatible server sends: a head and a body, and how they are sent (see `serving`).
_REPLY = {
    "how": "whole",
    "head": ["HTTP/1.1 200 OK", "Content-Type: application/json"],
    "body": {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "served",
        "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0,
                "text": "so it is 4",
                "message": {"role": "assistant", "content": "so it is 4"},
                "finish_reason": "stop",
                "logprobs": {"content": [{"token": "so", "logprob": -0.5, "top_logprobs": []}]},
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13},
        "data": [{"id": "served"}],
        "version": "1.0",
    },
}  # fmt: skip


def _make(ground: Path) -> None:
    """Everything, in this process; without the pictures, which take longer than the rest."""
    import mless.report
    from interrupted import not_finished, units_kept
    from mless.cli import main

    def page(folder: Path, fresh: bool, say: Any) -> Path:
        (folder / "report.html").write_text("a page")
        return folder / "report.html"

    mless.report.publish = page
    _write_inputs(ground)
    (ground / "reply.json").write_text(json.dumps(_REPLY))
    with units_kept():
        for name in STUDIES:
            sys.argv = ["mless", *study(name, ground, ground / name)]
            try:
                main()
            except SystemExit as left:
                if left.code:
                    raise
    for name in WITH_UNITS:
        unfinished = ground / f"{name}-unfinished"
        shutil.copytree(ground / name, unfinished)
        not_finished(unfinished)
        (unfinished / "report.html").unlink()
        next(iter(sorted((unfinished / "units").glob("*/*.parquet")))).unlink()
    for units in [*ground.glob("*/units"), *ground.glob("*/*/units"), *ground.glob("*/*/*/units")]:
        if "unfinished" not in str(units):
            shutil.rmtree(units)


def make(ground: Path) -> Path:
    """Everything, by another process."""
    ground.mkdir(parents=True)
    done = subprocess.run([sys.executable, str(HERE / "ground.py"), str(ground)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ground


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "models")]
    _make(Path(sys.argv[1]))
