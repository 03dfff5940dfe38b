"""Per-item results of other programs: lm-evaluation-harness's samples and Inspect's logs. Neither has to be installed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mless import gates
from mless.errors import BadData
from mless.study.identity import digest
from mless.study.logs import (
    an_object,
    check_drawing,
    check_log,
    check_sample,
    check_stored_condition,
    first,
    read_log,
    unzipped,
)

#: What lm-eval's regex filter says where it found nothing.
_NOTHING_FOUND = "[invalid]"
_SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d:.\-]+)")


@dataclass(frozen=True, slots=True)
class Scored:
    """One answer as a program left it. `mark` is a digest of the item's content: the same id with another one is another item."""

    item: str
    sample: int
    mark: str
    question: str
    reference: str
    text: str
    extracted: str | None
    how: str
    #: By metric; with the filter's name behind a comma where lm-eval applied several.
    scores: dict[str, Any]
    n_tokens: int | None = None
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """One file, or one result in memory."""

    source: str
    program: str
    rows: list[Scored]
    task: str | None
    model: str | None = None
    condition: dict[str, Any] | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    drawn: str = ""
    digest: str = ""

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.scores))


def read_results(where: Any, source: str, task: str | None) -> Results:
    """Read a file (lm-eval's samples_*.jsonl, Inspect's .eval or .json) or what `simple_evaluate` returned; `source` names it."""
    if isinstance(where, Mapping):
        found = _from_json(cast("Mapping[str, Any]", where), source, task)
        return replace(found, digest=digest([[row.item, row.sample, row.text, str(row.scores)] for row in found.rows]))
    path = Path(where)
    raw = read_log(path)
    if path.suffix == ".eval" or raw[:4] == b"PK\x03\x04":
        found = _inspect(unzipped(path), str(path))
    elif path.suffix == ".jsonl":
        found = _lm_eval_file(
            path, [an_object(line, path, n) for n, line in enumerate(raw.splitlines(), 1) if line.strip()]
        )
    else:
        found = _from_json(an_object(raw, path), str(path), task)
    return replace(found, digest=hashlib.sha256(raw).hexdigest())


def _from_json(content: Mapping[str, Any], source: str, task: str | None) -> Results:
    if "eval" in content:
        return _inspect(content, source)
    samples: Any = content.get("samples")
    if not isinstance(samples, dict):
        raise BadData(
            f"{source} holds no samples (it has: {', '.join(list(content)[:8]) or 'nothing'}); lm-eval writes them with --log_samples, as samples_*.jsonl"
        )
    by_task = cast("dict[str, list[dict[str, Any]]]", samples)
    if task is None and len(by_task) != 1:
        raise BadData(f"{source} holds several tasks: {', '.join(by_task)}; choose one with --task")
    name = task if task is not None else next(iter(by_task))
    if name not in by_task:
        raise BadData(f"{source} has no task {name!r}; it has: {', '.join(by_task)}")
    rows: Any = by_task[name]
    if not isinstance(rows, list):
        raise BadData(
            f"{source}: the samples of task {gates.shown(name, 60)} are {gates.kind_of(rows)}; expected a list of them"
        )
    return _lm_eval(cast("list[dict[str, Any]]", rows), source, name, content)


# ---- lm-evaluation-harness ---------------------------------------------------------------------------------------------


def _lm_eval_file(path: Path, samples: list[dict[str, Any]]) -> Results:
    """With what lm-eval wrote beside it: which model, which arguments."""
    match = _SAMPLES.fullmatch(path.stem)
    beside: dict[str, Any] = {}
    if match is not None:
        whole = path.with_name(f"results_{match['date']}.json")
        if whole.is_file():
            beside = an_object(read_log(whole), whole)
    return _lm_eval(samples, str(path), match["task"] if match else None, beside)


def _lm_eval(samples: Sequence[Mapping[str, Any]], source: str, task: str | None, beside: Mapping[str, Any]) -> Results:
    if not samples:
        raise BadData(f"{source} holds no samples; was the run finished, with --log_samples?")
    for number, sample in enumerate(samples, 1):
        check_sample(sample, source, number)
    filters = list(dict.fromkeys(str(sample.get("filter", "none")) for sample in samples))
    rows: dict[str, Scored] = {}
    for sample in samples:
        chosen = str(sample.get("filter", "none"))
        item = str(sample["doc_id"])
        scores = {f"{name},{chosen}" if len(filters) > 1 else name: sample.get(name) for name in sample["metrics"]}
        if item not in rows:
            rows[item] = _lm_eval_row(item, sample, scores)
        elif twice := sorted(rows[item].scores.keys() & scores.keys()):
            raise BadData(
                f"{source}: item {item!r} is there twice (score {twice[0]!r}); was the file appended to by a second run?"
            )
        else:
            rows[item].scores.update(scores)
    config: Any = beside.get("config")
    settings: dict[str, Any] = cast("dict[str, Any]", config) if isinstance(config, dict) else {}
    asked = _arguments(samples[0])[0]
    drawing: dict[str, Any] = asked[1] if len(asked) > 1 and isinstance(asked[1], dict) else {}
    check_drawing(drawing, source)
    warm = drawing.get("temperature") if drawing.get("do_sample", True) else 0.0
    condition = settings.get("mless_condition")
    if condition is not None:
        check_stored_condition(condition, source)
    return Results(
        source,
        "lm-eval",
        list(rows.values()),
        task,
        _lm_eval_model(beside, settings),
        condition,
        float(warm or 0.0),
        drawing.get("max_gen_toks"),
        "" if drawing else "log-likelihoods of the given choices",
    )


def _lm_eval_model(beside: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    arguments: Any = settings.get("model_args")
    if isinstance(arguments, str):
        arguments = dict(part.split("=", 1) for part in arguments.split(",") if "=" in part)
    given = cast("dict[str, Any]", arguments).get("pretrained") if isinstance(arguments, dict) else None
    name = given or beside.get("model_name")
    return str(name).rstrip("/").rsplit("/", 1)[-1] if isinstance(name, str) and name else None


def _arguments(sample: Mapping[str, Any]) -> list[list[Any]]:
    """Each request's arguments: tuples in memory, named in a file."""
    given: Any = sample["arguments"]
    if isinstance(given, dict):
        requests = cast("dict[str, dict[str, Any]]", given)
        return [list(one.values()) for one in requests.values()]
    return [list(one) for one in given]


def _lm_eval_row(item: str, sample: Mapping[str, Any], scores: dict[str, Any]) -> Scored:
    requests = _arguments(sample)
    mark = str(sample.get("doc_hash") or digest(str(sample.get("doc"))))
    question = str(requests[0][0])
    target = str(sample.get("target", ""))
    if len(requests[0]) > 1 and isinstance(requests[0][1], str):
        choices = [str(request[1]) for request in requests]
        found = [float(first(response)) for response in sample["resps"]]
        by_length = any(name.startswith("acc_norm") for name in scores)
        likelihoods = "; ".join(f"{choice.strip()}: {value:.2f}" for choice, value in zip(choices, found, strict=True))
        best = max(range(len(choices)), key=lambda n: found[n])
        right = choices[int(target)].strip() if target.isdecimal() and int(target) < len(choices) else target
        how = "likeliest" + (" (acc; acc_norm divides by length)" if by_length else "")
        return Scored(item, 0, mark, question, right, likelihoods, choices[best].strip(), how, scores)
    filtered = first(sample.get("filtered_resps"))
    extracted = None if filtered is None or filtered == _NOTHING_FOUND else str(filtered)
    text = str(first(sample["resps"]))
    return Scored(item, 0, mark, question, target, text, extracted, str(sample.get("filter", "")), scores)


# ---- Inspect -----------------------------------------------------------------------------------------------------------


def _inspect(content: Mapping[str, Any], source: str) -> Results:
    check_log(content, source)
    about: dict[str, Any] = content["eval"]
    if content.get("status") != "success":
        fault: dict[str, Any] = content.get("error") or {}
        why = f": {str(fault['message']).splitlines()[0]}" if fault.get("message") else ""
        raise BadData(
            f"{source}: the eval did not succeed (status {content.get('status')!r}{why}); finish it with: inspect eval-retry {source}"
        )
    samples: list[dict[str, Any]] = content.get("samples") or []
    if not samples:
        raise BadData(f"{source} holds no samples; was it written with --no-log-samples?")
    rows = [_inspect_row(_with_attachments(sample), source) for sample in samples]
    config: dict[str, Any] = {
        **(about.get("model_generate_config") or {}),
        **((content.get("plan") or {}).get("config") or {}),
    }
    condition = next((one for sample in samples if (one := _inspect_condition(sample))), None)
    if condition is not None:
        check_stored_condition(condition, source)
    return Results(
        source,
        "inspect",
        rows,
        str(about["task"]).rsplit("/", 1)[-1] if about.get("task") else None,
        str(about["model"]).rsplit("/", 1)[-1] if about.get("model") else None,
        condition,
        config.get("temperature"),
        config.get("max_tokens"),
        "" if config.get("temperature") is not None else "drawn at the provider's own temperature",
    )


def _inspect_condition(sample: Mapping[str, Any]) -> Any:
    """What a sample says of its condition; it is checked before it is used."""
    output: dict[str, Any] = sample.get("output") or {}
    return (output.get("metadata") or {}).get("mless_condition")


def _with_attachments(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Long texts are stored once in a list, and referenced elsewhere."""
    named: dict[str, str] = sample.get("attachments") or {}

    def resolved(value: Any) -> Any:
        if isinstance(value, str):
            return named.get(value.removeprefix("attachment://"), value) if value.startswith("attachment://") else value
        if isinstance(value, list):
            return [resolved(one) for one in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {key: resolved(one) for key, one in cast("dict[str, Any]", value).items()}
        return value

    return {
        key: resolved(value) if key in ("input", "target", "output", "scores") else value
        for key, value in sample.items()
    }


def _inspect_row(sample: Mapping[str, Any], source: str) -> Scored:
    item = str(sample["id"])
    given: dict[str, dict[str, Any]] = sample.get("scores") or {}
    if not given:
        fault: dict[str, Any] = sample.get("error") or {}
        why = f" ({fault['message']})" if fault.get("message") else ""
        raise BadData(
            f"{source}: sample {item!r}, epoch {sample.get('epoch', 1)} has no score{why}; finish it with: inspect eval-retry {source}"
        )
    scores: dict[str, Any] = {}
    for name, score in given.items():
        value: Any = score.get("value")
        if isinstance(value, dict):
            scores |= {f"{name}.{key}": one for key, one in cast("dict[str, Any]", value).items()}
        else:
            scores[name] = value
    said = [str(score["answer"]) for score in given.values() if score.get("answer") is not None]
    output: dict[str, Any] = sample.get("output") or {}
    choices: list[dict[str, Any]] = output.get("choices") or []
    reason = choices[0].get("stop_reason") if choices else None
    usage: dict[str, Any] = output.get("usage") or {}
    target: Any = sample.get("target", "")
    return Scored(
        item,
        int(sample.get("epoch", 1)) - 1,
        digest([sample.get("input") if isinstance(sample.get("input"), str) else _said(sample.get("input")), target]),
        _said(sample.get("input")),
        ", ".join(map(str, cast("list[Any]", target))) if isinstance(target, list) else str(target),
        str(output.get("completion") or (_said([choices[0]["message"]]) if choices else "")),
        said[0] if said else None,
        ", ".join(given),
        scores,
        usage.get("output_tokens"),
        {"stop": "stop", "max_tokens": "length", "model_length": "length"}.get(str(reason)),
    )


def _said(messages: Any) -> str:
    """The text of an input: itself, or that of its messages."""
    if not isinstance(messages, list):
        return str(messages or "")
    texts: list[str] = []
    for message in cast("list[dict[str, Any]]", messages):
        content: Any = message.get("content")
        parts = cast("list[dict[str, Any]]", content) if isinstance(content, list) else [{"text": content}]
        texts += [str(part.get("text") or "") for part in parts]
    return "\n".join(texts)
