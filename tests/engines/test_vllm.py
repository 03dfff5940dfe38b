"""vLLM as an engine. All but the first tests need a real vLLM: make test-vllm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mless.engines.base import Decoding, Reply, Request
from mless.engines.vllm import VllmEngine
from mless.errors import EngineFault
from mless.models import locate
from mless.prompting import build_prompts
from mless.tasks import arithmetic
from mless.values import Condition


def needs_vllm(test: Callable[..., None]) -> Callable[..., None]:
    # vLLM and the hundred packages it brings warn of one another, differently with each version; warnings of mless stay errors.
    return pytest.mark.vllm(pytest.mark.filterwarnings("ignore", "error:::mless.*")(test))


@pytest.fixture
def empty_model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_without_vllm_the_fault_names_the_cure(monkeypatch: pytest.MonkeyPatch, empty_model: Path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineFault, match=r"not installed.*pip install 'mless\[vllm\]'.*--engine hf"):
        VllmEngine(empty_model)


def test_a_folder_without_weights_is_refused_before_vllm_is_looked_for(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineFault, match=r"config.json and \*.safetensors.*hf download"):
        VllmEngine(tmp_path)


def test_batch_invariance_cannot_be_asked_for_once_vllm_is_imported(monkeypatch: pytest.MonkeyPatch, empty_model: Path):
    monkeypatch.setitem(sys.modules, "vllm", sys)  # any module will do
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with pytest.raises(EngineFault, match=r"too late.*start with VLLM_BATCH_INVARIANT=1"):
        VllmEngine(empty_model, batch_invariant=True)


# ---- with a real vLLM ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    return locate("smollm2").folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    with VllmEngine(folder, dtype="float32", max_model_len=512) as made:
        yield made


@pytest.fixture(scope="module")
def requests(tokenizer: Any) -> list[Request]:
    return asked(tokenizer, "none", 12)


def asked(tokenizer: Any, condition: str, count: int) -> list[Request]:
    prompts = build_prompts(tokenizer, arithmetic(count), Condition(condition, "none"), kind="chat")
    return [Request(condition, prompt.item, token_ids=prompt.token_ids, seed=7 + i) for i, prompt in enumerate(prompts)]


def yes(tokenizer: Any) -> tuple[int, ...]:
    """A prompt that the model answers in a few tokens."""
    messages = [{"role": "user", "content": "Say just: yes"}]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def by_key(replies: Iterator[Reply]) -> dict[tuple[str, str, int], Reply]:
    found = list(replies)
    assert len({reply.key for reply in found}) == len(found), "a request was answered twice"
    return {reply.key: reply for reply in found}


@needs_vllm
def test_greedy_tokens_are_those_of_transformers(
    engine: VllmEngine, requests: list[Request], folder: Path, tokenizer: Any
):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request in requests[:4]:
        (reply,) = engine.generate([request], Decoding(max_new_tokens=24))
        ids = torch.tensor([request.token_ids])
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected = own[0, ids.shape[1] :].tolist()
        assert list(reply.token_ids) == expected
        assert reply.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert reply.n_tokens == len(expected)


@needs_vllm
@pytest.mark.parametrize("live", [None, 1, 5])
def test_every_request_is_answered_once(engine: VllmEngine, requests: list[Request], live: int | None):
    replies = by_key(engine.generate(requests, Decoding(max_new_tokens=8), live=live))
    assert set(replies) == {request.key for request in requests}


@needs_vllm
def test_no_more_than_live_rows_are_in_flight_and_replies_come_as_they_finish(
    engine: VllmEngine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
):
    core: Any = engine._core
    seen: list[int] = []
    step = core.step

    def counted() -> Any:
        seen.append(core.get_num_unfinished_requests())
        return step()

    monkeypatch.setattr(core, "step", counted)
    replies = engine.generate(requests, Decoding(max_new_tokens=8), live=3)
    next(replies)
    assert len(seen) < len(requests) / 3 * 8, "the first reply came only at the end"
    list(replies)
    assert max(seen) == 3


@needs_vllm
def test_a_finished_row_makes_room_for_the_next(
    engine: VllmEngine, requests: list[Request], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []
    add = engine._core.add_request

    def noted(number: str, *others: Any) -> Any:
        events.append(f"in {number}")
        return add(number, *others)

    monkeypatch.setattr(engine._core, "add_request", noted)
    short = Request("none", "short", token_ids=yes(tokenizer))
    for reply in engine.generate([requests[0], short, requests[1]], Decoding(max_new_tokens=40), live=2):
        events.append(f"out {reply.item}")
    assert events.index("in 2") < events.index(f"out {requests[0].item}"), "the third row waited for the whole batch"


@needs_vllm
def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(engine: VllmEngine, requests: list[Request]):
    (whole,) = engine.generate(requests[:1], Decoding(max_new_tokens=24))
    stop = whole.text[8:11]
    (cut,) = engine.generate(requests[:1], Decoding(max_new_tokens=24, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish == "stop"
    assert cut.n_tokens == len(cut.token_ids) < 24


@needs_vllm
def test_finish_says_whether_an_answer_was_cut_off(engine: VllmEngine, tokenizer: Any):
    request = Request("none", "1", token_ids=yes(tokenizer))
    (cut,) = engine.generate([request], Decoding(max_new_tokens=1))
    assert (cut.finish, cut.n_tokens) == ("length", 1)
    (whole,) = engine.generate([request], Decoding(max_new_tokens=200))
    assert whole.finish == "stop"
    assert whole.token_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token not in whole.text


@needs_vllm
def test_the_same_seed_draws_the_same_sample_whatever_is_beside_it(engine: VllmEngine, requests: list[Request]):
    decoding = Decoding(max_new_tokens=16, temperature=1.0, top_p=0.9, top_k=50)
    together = by_key(engine.generate(requests, decoding))
    alone = by_key(engine.generate(requests[:4], decoding, live=1))
    assert {key: together[key].token_ids for key in alone} == {key: reply.token_ids for key, reply in alone.items()}
    other = by_key(engine.generate([replace(request, seed=request.seed + 100) for request in requests], decoding))
    assert sum(other[key].token_ids != reply.token_ids for key, reply in together.items()) > len(requests) / 2


@needs_vllm
@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1])
def test_any_seed_is_a_seed(engine: VllmEngine, requests: list[Request], seed: int):
    decoding = Decoding(max_new_tokens=16, temperature=1.5)
    first, second = (next(engine.generate([replace(requests[0], seed=seed)], decoding)) for _ in range(2))
    assert first == second


@needs_vllm
def test_a_condition_reuses_its_own_prefix_and_no_other_conditions(engine: VllmEngine, tokenizer: Any):
    first, again = asked(tokenizer, "one", 1), asked(tokenizer, "another", 1)
    assert first[0].token_ids == again[0].token_ids
    assert len(first[0].token_ids) > 32, "shorter than a block: nothing could be cached"
    decoding = Decoding(max_new_tokens=2)
    list(engine.generate(first, decoding))
    assert engine.cached_tokens["one"] == 0
    list(engine.generate(again, decoding))
    assert engine.cached_tokens["another"] == 0
    list(engine.generate(first, decoding))
    assert engine.cached_tokens["one"] >= 32


@needs_vllm
def test_leaving_early_leaves_nothing_behind(engine: VllmEngine, requests: list[Request]):
    expected = by_key(engine.generate(requests, Decoding(max_new_tokens=8)))
    begun = engine.generate(requests, Decoding(max_new_tokens=64))
    replies = engine.generate(requests, Decoding(max_new_tokens=8), live=4)
    next(replies)
    with pytest.raises(EngineFault, match="answering other requests"):
        next(begun)
    replies.close()
    assert by_key(engine.generate(requests, Decoding(max_new_tokens=8))) == expected


@needs_vllm
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"position_ids": (0, 5)}, "position ids of its own.*--engine hf", id="position_ids"),
        pytest.param({"hidden": (0, 1)}, "filler hidden from attention.*--engine hf", id="hidden"),
        pytest.param({"token_ids": (), "messages": (("user", "1+1"),)}, "token ids.*--engine openai", id="messages"),
        pytest.param(
            {"token_ids": (1,) * 500}, "500 prompt tokens and 16 new ones do not fit.*512.* to 12", id="context"
        ),
        pytest.param({"token_ids": (1, 10**6)}, "not this model's", id="vocabulary"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_computed(
    engine: VllmEngine, requests: list[Request], change: dict[str, Any], message: str
):
    bad = replace(Request("none", "bad", token_ids=(1, 2)), **change)
    with pytest.raises(EngineFault, match=message):
        engine.generate([*requests, bad], Decoding(max_new_tokens=16))
    assert not engine._core.has_unfinished_requests()


@needs_vllm
def test_a_temperature_that_vllm_would_change_is_refused(engine: VllmEngine, requests: list[Request]):
    with pytest.raises(EngineFault, match=r"no cooler than temperature 0.01, got 0.001"):
        engine.generate(requests, Decoding(temperature=0.001))
    with pytest.raises(EngineFault, match="live must be at least 1"):
        engine.generate(requests, Decoding(), live=0)


@needs_vllm
def test_a_failing_step_is_an_engine_fault(
    engine: VllmEngine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
):
    def fails() -> Any:
        raise RuntimeError("out of memory\nand a long trace")

    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "step", fails)
        with pytest.raises(EngineFault, match=r"failed while generating \(out of memory\)"):
            list(engine.generate(requests, Decoding(max_new_tokens=4)))
    assert len(list(engine.generate(requests, Decoding(max_new_tokens=4)))) == len(requests)


@needs_vllm
def test_a_lost_answer_is_an_engine_fault_and_no_endless_wait(
    engine: VllmEngine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
):
    step = engine._core.step
    monkeypatch.setattr(engine._core, "step", lambda: [output for output in step() if output.request_id != "2"])
    with pytest.raises(EngineFault, match=f"no answer to 1 requests.*item '{requests[2].item}'"):
        list(engine.generate(requests, Decoding(max_new_tokens=4)))


@needs_vllm
def test_about_says_what_ran_and_what_is_not_promised(engine: VllmEngine):
    import vllm

    about = engine.about()
    assert about["engine"] == "vllm"
    assert about["vllm"] == vllm.__version__
    assert about["dtype"] == "float32"
    assert about["context"] == 512
    assert about["prefix_caching"] == "by condition"
    assert about["VLLM_BATCH_INVARIANT"] is None
    assert about["promise"].startswith("row-stable is not promised")


@needs_vllm
@pytest.mark.parametrize("asked_for", [True, False], ids=["argument", "environment"])
def test_batch_invariance_is_refused_where_the_hardware_lacks_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked_for: bool
):
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this machine may have it")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(EngineFault, match=r"compute capability 8.0.*this is a cpu.*--engine hf"):
        VllmEngine(folder, batch_invariant=asked_for)


@needs_vllm
def test_a_model_vllm_cannot_load_is_an_engine_fault(empty_model: Path):
    with pytest.raises(EngineFault, match=r"could not load .*--engine hf"):
        VllmEngine(empty_model)


@needs_vllm
def test_a_closed_engine_says_so_and_another_can_be_made(folder: Path, requests: list[Request], engine: VllmEngine):
    # Last in the file: it closes the engine the others use, as two at once would share one process group.
    expected = [reply.token_ids for reply in engine.generate(requests[:1], Decoding(max_new_tokens=4))]
    engine.close()
    engine.close()
    with pytest.raises(EngineFault, match="closed"):
        engine.generate(requests, Decoding())
    with VllmEngine(folder, dtype="float32", max_model_len=512) as another:
        assert [reply.token_ids for reply in another.generate(requests[:1], Decoding(max_new_tokens=4))] == expected


@needs_vllm
def test_a_whole_study(tmp_path: Path):
    # A process of its own: there is one vLLM to a process, and it has been used above.
    words = [
        "run",
        "accuracy",
        "--engine",
        "vllm",
        "--dtype",
        "float32",
        "--data",
        "arithmetic:1:4",
        "--max-new-tokens",
        "6",
    ]
    command = [sys.executable, "-m", "mless.cli", *words, "--out", str(tmp_path / "r"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads(ended.stdout.strip().splitlines()[-1])
    assert told["units_computed"] == 20
    assert {row["condition"] for row in told["accuracy"]} == {"none", "none-again", "mless", "mful", "random"}
