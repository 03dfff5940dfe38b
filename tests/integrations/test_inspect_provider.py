"""The model provider `mless` inside Inspect. Needs Inspect, in an environment of its own: make test-inspect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import mless
from mless.engines.base import Decoding, Request
from mless.engines.hf import HfEngine
from mless.errors import BadPrompt, BadStudy
from mless.prompting import build_prompts
from mless.results.folder import ResultFolder
from mless.study.importing import import_results
from mless.tasks import arithmetic
from mless.values import Condition, Item

# Inspect and what it brings warn of one another, differently with each version; warnings of mless stay errors.
pytestmark = [pytest.mark.inspect, pytest.mark.filterwarnings("ignore", "error:::mless.*")]

SYSTEM = "You are a calculator. Reply with just the result."
SLOTS, CONTEXT, NEW_TOKENS = 4, 192, 8


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return arithmetic(6)


@pytest.fixture(scope="module")
def provider() -> Iterator[Callable[..., Any]]:
    """Makes providers by Inspect's own door; each asks for the model once, and gives it back in the end."""
    from inspect_ai.model import get_model

    made: dict[str, Any] = {}

    def make(**arguments: Any) -> Any:
        key = json.dumps(arguments, sort_keys=True)
        if key not in made:
            given = {"slots": SLOTS, "context": CONTEXT, "device": "cpu", "dtype": "float32"} | arguments
            made[key] = get_model("mless/smollm2", memoize=False, **given)
        return made[key]

    yield make
    for model in made.values():
        model.api.close()


def evaluated(model: Any, items: Sequence[Item], folder: Path, **options: Any) -> Any:
    from inspect_ai import Task
    from inspect_ai import eval as inspect_eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, system_message

    task = Task(
        dataset=[Sample(id=item.id, input=item.question, target=item.answer or "") for item in items],
        solver=[system_message(SYSTEM), generate()],
        scorer=includes(),
        name="sums",
    )
    asked = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "log_format": "json"} | options
    (log,) = inspect_eval(task, model=model, log_dir=str(folder), display="none", **asked)
    assert log.status == "success", log.error
    return log


def said(log: Any) -> dict[str, str]:
    return {str(sample.id): sample.output.completion for sample in log.samples}


def asked(model: Any, messages: Sequence[Any], tools: Sequence[Any] = (), **config: Any) -> Any:
    import anyio
    from inspect_ai.model import GenerateConfig

    return anyio.run(lambda: model.api.generate(list(messages), list(tools), "auto", GenerateConfig(**config)))


def conversation(question: str, system: str | None = SYSTEM) -> list[Any]:
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser

    return [*([ChatMessageSystem(content=system)] if system else []), ChatMessageUser(content=question)]


# ---- the same answers as a study's -------------------------------------------------------------------------------------


def test_answers_are_those_of_the_engine_whatever_company_they_come_in(
    provider: Callable[..., Any], items: Sequence[Item], tmp_path: Path
):
    model = provider(condition="mless", length=9)
    log = evaluated(model, items, tmp_path)
    loaded = model.api._worker.model
    condition = Condition("mless", "repeat", " /", 9)
    prompts = {p.item: p for p in build_prompts(loaded.tokenizer, items, condition, kind="chat", system=SYSTEM)}
    requests = [Request("mless", item, token_ids=prompt.token_ids) for item, prompt in prompts.items()]
    with HfEngine(loaded, length=CONTEXT, slots=SLOTS) as engine:
        expected = {reply.item: reply for reply in engine.generate(requests, Decoding(NEW_TOKENS))}
    assert said(log) == {item: reply.text for item, reply in expected.items()}
    assert len(set(said(log).values())) > 2, "answers that are all alike would agree whatever was asked"
    for sample in log.samples:
        reply = expected[str(sample.id)]
        assert sample.output.stop_reason == ("stop" if reply.finish == "stop" else "max_tokens")
        assert sample.output.usage.output_tokens == reply.n_tokens
        assert sample.output.usage.input_tokens == len(prompts[str(sample.id)])
    assert {sample.output.stop_reason for sample in log.samples} >= {"stop"}
    assert said(evaluated(model, items, tmp_path, max_connections=1, max_samples=1)) == said(log)


def test_requests_that_come_together_are_answered_together(
    provider: Callable[..., Any], items: Sequence[Item], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = provider(condition="none")
    sizes: list[int] = []
    engine = model.api._worker._engine
    generate = engine.generate

    def counted(requests: Sequence[Request], decoding: Decoding) -> Any:
        sizes.append(len(requests))
        return generate(requests, decoding)

    monkeypatch.setattr(engine, "generate", counted)
    evaluated(model, items, tmp_path)
    assert sum(sizes) == len(items)
    assert max(sizes) > 1


@pytest.mark.parametrize("placement", ["before-system", "before-question", "end", "before-answer"])
@pytest.mark.parametrize("kind", ["chat", "raw"])
def test_tokens_are_those_of_a_study(provider: Callable[..., Any], items: Sequence[Item], kind: str, placement: str):
    api = provider(condition="mless", length=9, prompt=kind).api
    object.__setattr__(api, "condition", Condition("mless", "repeat", " /", 7, placement))  # pyright: ignore[reportArgumentType]
    prompts = build_prompts(api._worker.tokenizer, items, api.condition, kind=kind, system=SYSTEM)  # pyright: ignore[reportArgumentType]
    try:
        for item, prompt in zip(items, prompts, strict=True):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item.question}]
            assert api._request(messages, "q", 0).token_ids == prompt.token_ids
    finally:
        api.condition = Condition("mless", "repeat", " /", 9)


def test_without_a_system_message_the_template_is_left_to_itself(provider: Callable[..., Any]):
    api = provider(condition="mless", length=9).api
    tokenizer = api._worker.tokenizer
    messages = [{"role": "user", "content": "2 + 2?"}]
    plain = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    request = api._request(messages, "q", 0)
    (slash,) = tokenizer(" /", add_special_tokens=False).input_ids
    assert [token for token in request.token_ids if token != slash] == plain
    at = request.token_ids.index(slash)
    assert tokenizer.decode(request.token_ids[:at]).endswith("user\n")


def test_shifted_positions_and_hidden_filler_reach_the_engine(provider: Callable[..., Any]):
    api = provider(condition="mless", length=9).api
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "2 + 2?"}]
    try:
        api.condition = Condition("position-only", "shift", length=5)
        shifted = api._request(messages, "q", 0)
        steps = [b - a for a, b in zip(shifted.position_ids, shifted.position_ids[1:], strict=False)]
        assert sorted(set(steps)) == [1, 6]
        api.condition = Condition("masked-filler", "repeat", " /", 5, hidden=True)
        hidden = api._request(messages, "q", 0)
        first, last = hidden.hidden
        assert api._worker.tokenizer.decode(hidden.token_ids[first:last]) == " /" * 5
        api.condition = Condition("question-twice", "none", question="{question}\n\n{question}")
        assert api._worded(messages)[1]["content"] == "2 + 2?\n\n2 + 2?"
    finally:
        api.condition = Condition("mless", "repeat", " /", 9)


# ---- what is asked for is honoured, or refused -------------------------------------------------------------------------


def test_length_stops_seeds_and_temperature_are_honoured(provider: Callable[..., Any]):
    model = provider(condition="none")
    messages = conversation("Name five animals that live in the sea.", None)
    short = asked(model, messages, max_tokens=5)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 5)
    whole = asked(model, messages, max_tokens=24).completion
    assert whole.startswith(short.completion)
    word = whole.split()[2]
    stopped = asked(model, messages, max_tokens=24, stop_seqs=[word])
    assert stopped.completion == whole[: whole.index(word)]
    assert stopped.stop_reason == "stop"
    assert asked(model, messages, max_tokens=24).completion == whole
    warm = {"max_tokens": 12, "temperature": 1.5}
    draws = [asked(model, messages, seed=3, **warm).completion for _ in range(3)]
    assert len(set(draws)) == 3, "the second epoch must not repeat the first"
    fresh = provider(condition="none", condition_seed=0)
    assert [asked(fresh, messages, seed=3, **warm).completion for _ in range(3)] == draws
    assert asked(provider(condition="none", condition_seed=1), messages, seed=4, **warm).completion != draws[0]
    narrow = asked(fresh, messages, seed=9, max_tokens=12, temperature=1.5, top_p=1e-6).completion
    assert whole.startswith(narrow)


def test_a_fault_of_any_kind_reaches_all_who_wait_and_the_next_is_answered(
    provider: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    import anyio
    from inspect_ai.model import GenerateConfig

    model = provider(condition="none")
    told: list[str] = []

    async def ask(question: str) -> None:
        try:
            await model.api.generate(conversation(question), [], "auto", GenerateConfig(max_tokens=4))
        except ValueError as fault:
            told.append(str(fault))

    async def together() -> None:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for question in ("2 + 2?", "3 + 3?", "4 + 4?"):
                    group.start_soon(ask, question)

    def broken(requests: Sequence[Request], decoding: Decoding) -> Any:
        raise ValueError("injected")
        yield  # a generator, as the engine's is

    with monkeypatch.context() as patched:
        patched.setattr(model.api._worker._engine, "generate", broken)
        anyio.run(together)
    assert told == ["injected"] * 3
    assert asked(model, conversation("2 + 2?"), max_tokens=4).completion


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"num_choices": 2}, "num_choices"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"reasoning_effort": "low", "best_of": 3}, "best_of, reasoning_effort"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(
    provider: Callable[..., Any], config: dict[str, Any], named: str
):
    with pytest.raises(BadStudy, match=f"cannot honour {named}"):
        asked(provider(condition="none"), conversation("2 + 2?"), **config)


def test_tools_images_and_long_prompts_are_refused_by_name(provider: Callable[..., Any]):
    from inspect_ai.model import ChatMessageUser, ContentImage
    from inspect_ai.tool import ToolInfo

    model = provider(condition="none")
    with pytest.raises(BadStudy, match="calls no tools, got calculator"):
        asked(model, conversation("2 + 2?"), [ToolInfo(name="calculator", description="adds")])
    with pytest.raises(BadPrompt, match="reads text only, got 'image'"):
        asked(model, [ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AA==")])])
    with pytest.raises(BadPrompt, match=r"give -M context=\d+, or a smaller --max-tokens"):
        asked(model, conversation("2 + 2?"), max_tokens=CONTEXT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"condition": "mles"}, "no condition 'mles'"),
        ({"conditions": "mless"}, "no argument 'conditions'; there are: condition"),
        ({"arm_x": 1}, "no argument 'arm_x'"),
        ({"condition": "self-consistency"}, "asking several times"),
    ],
)
def test_bad_arguments_are_told_before_the_model_is_loaded(arguments: dict[str, Any], message: str):
    from inspect_ai.model import get_model

    with pytest.raises(BadStudy, match=message):
        get_model("mless/no-such-model", memoize=False, **arguments)


# ---- the command, and the way back -------------------------------------------------------------------------------------

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message


@task
def sums():
    rows = {rows}
    samples = [Sample(id=name, input=question, target=answer) for name, question, answer in rows]
    return Task(dataset=samples, solver=[system_message({system!r}), generate()], scorer=includes())
"""


def test_from_their_command_to_our_statistics(items: Sequence[Item], tmp_path: Path):
    rows = [(item.id, item.question, item.answer) for item in items]
    (tmp_path / "sums.py").write_text(TASK.format(rows=rows, system=SYSTEM))
    logs: dict[str, Path] = {}
    for name, kind, more in (
        ("none", "json", ()),
        ("both", "eval", ("-M", "condition=mless", "-M", "length=9", "-M", "arm_c=0.13")),
    ):
        done = subprocess.run(
            [str(Path(sys.executable).with_name("inspect")), "eval", "sums.py", "--model", "mless/smollm2", "-M", f"slots={SLOTS}", "-M",
             f"context={CONTEXT}", *more, "--max-tokens", str(NEW_TOKENS), "--temperature", "0", "--log-format", kind, "--log-dir", name,
             "--display", "none"],
            cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        (logs[name],) = (tmp_path / name).glob(f"*.{kind}")
    folder = tmp_path / "folder"
    outcome = import_results([f"{name}={file}" for name, file in logs.items()], folder)
    about = ResultFolder(folder).manifest()
    assert about is not None
    assert (about["task"], about["model"]["label"], about["engine"]["engine"]) == ("sums", "smollm2", "inspect")
    both = about["conditions"]["both"]
    assert (both["kind"], both["length"], both["arm"]["c"]) == ("repeat", 9, 0.13)
    assert about["study"]["accuracy"]["max_new_tokens"] == NEW_TOKENS
    table = {row["condition"]: row for row in ResultFolder(folder).read_table("accuracy").to_pylist()}
    header = json.loads(logs["none"].read_text())["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    assert table["none"]["value"] == pytest.approx(header)
    assert outcome.units == 2 * len(items)
    assert mless.verdict_lines(folder)[0].startswith(f"smollm2, {len(items)} items of sums, engine inspect")


RETRIED = """
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, solver


@solver
def stumble():
    async def solve(state, generate):
        if state.epoch == 2 and Path({flag!r}).exists():
            raise RuntimeError("injected")
        return state

    return solve


@task
def animals():
    questions = [Sample(id=name, input="Name an animal that lives in the sea.") for name in ("a", "b")]
    return Task(dataset=questions, solver=[stumble(), generate()], epochs=2)
"""


def test_a_retry_draws_for_a_missing_epoch_what_the_whole_run_would_have_drawn(
    provider: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from inspect_ai import eval as inspect_eval
    from inspect_ai import eval_retry

    monkeypatch.chdir(tmp_path)
    flag = tmp_path / "stumble"
    (tmp_path / "animals.py").write_text(RETRIED.format(flag=str(flag)))
    # Two objects, as the first one has been asked already.
    whole, halved = provider(condition="none"), provider(condition="none", condition_seed=2)

    def run(model: Any, **options: Any) -> Any:
        (log,) = inspect_eval(
            "animals.py", model=model, log_dir="logs", display="none", max_tokens=12, temperature=1.5, **options
        )
        return log

    def by_epoch(log: Any) -> dict[tuple[str, int], str]:
        return {(str(one.id), one.epoch): one.output.completion for one in log.samples if one.error is None}

    undisturbed = run(whole, max_samples=1)
    assert undisturbed.status == "success", undisturbed.error
    drawn = by_epoch(undisturbed)
    assert len(drawn) == len(set(drawn.values())) == 4, "epochs, and items that ask the same, must differ"
    flag.touch()
    stopped = run(halved, continue_on_fail=True)
    assert stopped.status == "error"
    assert by_epoch(stopped) == {key: text for key, text in drawn.items() if key[1] == 1}
    flag.unlink()
    (retried,) = eval_retry(stopped, log_dir="logs", display="none")
    assert retried.status == "success", retried.error
    assert by_epoch(retried) == drawn
