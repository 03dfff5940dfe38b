"""vLLM as an engine. All but the first tests need a real vLLM: make test-vllm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mless.engines import vllm_arm
from mless.engines.base import Changes, Decoding, Reply, Request, ScoreRequest
from mless.engines.vllm import VllmEngine
from mless.errors import BadStudy, EngineFault, MlessError
from mless.models import locate
from mless.prompting import build_prompts
from mless.results.folder import ResultFolder
from mless.tasks import arithmetic
from mless.values import ArmSettings, Condition
from models.tiny_models import save_model
from tiny import prompt_of


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


@pytest.mark.parametrize(
    ("parallel", "scope", "message"),
    [
        pytest.param((2, 1), "token", "tensor parallel 2 × pipeline parallel 1.*one device.*--engine hf", id="tensor"),
        pytest.param((1, 4), "token", "tensor parallel 1 × pipeline parallel 4.*--engine hf", id="pipeline"),
        pytest.param((1, 1), "sequence", "scope 'sequence'.*use scope 'token'", id="sequence"),
        pytest.param((1, 1), "tensor", "scope 'tensor'.*use scope 'token'", id="all"),
    ],
)
def test_arm_over_several_processes_or_tokens_is_refused_by_name(parallel: tuple[int, int], scope: Any, message: str):
    tensor, pipeline = parallel
    config = SimpleNamespace(world_size=tensor * pipeline, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    with pytest.raises(EngineFault, match=message):
        vllm_arm.refuse(ArmSettings(c=0.13, scope=scope), config)


def test_arm_with_tensor_parallel_is_refused_before_anything_is_loaded(empty_model: Path):
    with pytest.raises(EngineFault, match=r"tensor parallel 2 × pipeline parallel 1.*one device.*--engine hf"):
        VllmEngine(empty_model, arm=True, tensor_parallel=2)


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
def test_log_probabilities_of_given_text_are_those_of_transformers(
    engine: VllmEngine, requests: list[Request], folder: Path, tokenizer: Any
):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [tuple(tokenizer(text).input_ids) for text in ("\\boxed{18}", "The sum is 7, as 3 + 4 = 7.")]
    wanted = [
        ScoreRequest(replace(request, sample=number), text)
        for request in requests[:4]
        for number, text in enumerate(texts)
    ]
    together = {one.key: one.logp for one in engine.score(wanted)}
    assert together.keys() == {one.key for one in wanted}
    for one in wanted:
        first = len(one.prompt.token_ids)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([one.whole]), use_cache=False).logits[0, first - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0].tolist()
        assert together[one.key] == pytest.approx(own, abs=1e-4)
    # Prompts that are in the prefix cache by now have all of their log-probabilities too.
    apart = {one.key: one.logp for one in engine.score(wanted, live=1)}
    assert all(apart[key] == pytest.approx(together[key], abs=1e-4) for key in together)


@needs_vllm
def test_texts_that_vllm_cannot_score_are_refused_before_anything_is_computed(
    engine: VllmEngine, requests: list[Request]
):
    with pytest.raises(EngineFault, match="the text has no token ids"):
        engine.score([ScoreRequest(requests[0], ())])
    with pytest.raises(EngineFault, match=r"filler hidden from attention.*--engine hf"):
        engine.score([ScoreRequest(replace(requests[0], hidden=(1, 3)), (5,))])
    with pytest.raises(EngineFault, match="do not fit the context of 512"):
        engine.score([ScoreRequest(requests[0], (5,) * 512)])


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
        pytest.param(
            {"changes": Changes(prompt_of(("question", 2)))}, "has cuts or patches.*--engine hf", id="changes"
        ),
        pytest.param({"token_ids": (), "messages": (("user", "1+1"),)}, "token ids.*--engine openai", id="messages"),
        pytest.param(
            {"token_ids": (1,) * 500}, "500 prompt tokens and 16 new ones do not fit.*512.* to 12", id="context"
        ),
        pytest.param({"token_ids": (1, 10**6)}, "not this model's", id="vocabulary"),
        pytest.param({"arm": ArmSettings(c=0.13)}, r"compiled graphs and prefix cache.*arm=True", id="redistribution"),
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
    assert "arm_seed" not in about
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


def told(folder: Path, *words: str) -> dict[str, Any]:
    """What a small study said, run in a process of its own: there is one vLLM to a process, and it has been used above."""
    command = [sys.executable, "-m", "mless.cli", "run", "accuracy", "--engine", "vllm", "--dtype", "float32"]
    command += ["--data", "arithmetic:1:4", "--max-new-tokens", "6", "--out", str(folder), "--json", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])


@needs_vllm
def test_a_whole_study(tmp_path: Path):
    said = told(tmp_path / "r")
    assert said["units_computed"] == 20
    assert {row["condition"] for row in said["accuracy"]} == {"none", "none-again", "mless", "mful", "random"}


@needs_vllm
def test_a_whole_study_with_arm(tmp_path: Path):
    said = told(tmp_path / "r", "--conditions", "none,arm", "--set", "arm.fraction=0.25")
    assert said["units_computed"] == 12
    changed = {row["condition"]: row["changed_text"] for row in said["accuracy"]}
    assert changed["none-again"] == 0
    assert changed["arm"] > 0
    engine = json.loads((tmp_path / "r/study.json").read_text())["engine"]
    assert (engine["arm_seed"], engine["prefix_caching"]) == ("settings", "off")


@needs_vllm
def test_a_model_divided_among_two_processes_answers_as_a_whole_one(tmp_path: Path):
    """Of a tiny model with four heads; the embedded one's nine cannot be halved."""
    model = save_model(
        tmp_path / "m", "llama", hidden_size=256, head_dim=64, intermediate_size=384, num_hidden_layers=2
    )
    small = ("--model", str(model), "--prompt", "raw", "--conditions", "none,mless", "--length", "5")
    told(tmp_path / "whole", *small)
    told(tmp_path / "divided", *small, "--set", "accuracy.tensor_parallel=2")
    whole, divided = (ResultFolder(tmp_path / name) for name in ("whole", "divided"))
    engines = [(folder.about() or {})["engine"]["tensor_parallel"] for folder in (whole, divided)]
    assert engines == [1, 2]
    columns = ["condition", "item", "text"]
    assert divided.read_table("answers", columns=columns).equals(whole.read_table("answers", columns=columns))


@needs_vllm
def test_an_engine_is_a_setting_of_the_multiverse(tmp_path: Path):
    data = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "solution": f"{n} twice is \\boxed{{{2 * n}}}."} for n in range(3)]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ("engine=hf,vllm", "template=raw", "system=none")
    command = [sys.executable, "-m", "mless", "run", "multiverse", "--data", str(data), "--out", str(tmp_path / "r")]
    command += ["--set", "likelihood.others=2", *(word for one in sets for word in ("--set", f"multiverse.{one}"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = ResultFolder(tmp_path / "r").read_table("specifications").to_pylist()
    assert {row["reason"] for row in found} == {None}
    deltas = {row["engine"]: row["delta"] for row in found if row["metric"] == "solution"}
    assert deltas["vllm"] == pytest.approx(deltas["hf"], abs=1e-3)


@needs_vllm
def test_a_likelihood_study_has_the_numbers_of_hf(tmp_path: Path):
    data = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "solution": f"{n} twice is \\boxed{{{2 * n}}}."} for n in range(3)]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = (
        "--data",
        str(data),
        "--conditions",
        "none,mless,arm",
        "--dtype",
        "float32",
        "--set",
        "likelihood.others=2",
    )
    own = [sys.executable, "-m", "mless", "run", "likelihood", *small]
    for engine in ("vllm", "hf"):
        command = [*own, "--engine", engine, "--out", str(tmp_path / engine)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {
        engine: {
            (row["condition"], row["item"], row["metric"]): row["value"]
            for row in ResultFolder(tmp_path / engine).read_table("scores").to_pylist()
        }
        for engine in ("vllm", "hf")
    }
    same = {key: value for key, value in found["vllm"].items() if key[0] != "arm"}
    assert {metric for _, _, metric in same} == {"solution", "answer", "answer-after-solution", "contrast"}
    # hf draws ARM's magnitudes by item, vLLM by the setting alone.
    assert all(found["hf"][key] == pytest.approx(value, abs=1e-3) for key, value in same.items())
    assert any(found["vllm"]["arm", *key[1:]] != value for key, value in same.items() if key[0] == "none")
    engine = (ResultFolder(tmp_path / "vllm").about() or {})["engine"]
    assert (engine["engine"], engine["prefix_caching"], engine["row_stable"]) == ("vllm", "off", False)


# ---- ARM, with a real vLLM: behind the test that closes the other engine ---------------------------------------------

STRONG = ArmSettings(fraction=0.25, p1=99.5, seed=3)


@pytest.fixture(scope="module")
def arm_engine(folder: Path) -> Iterator[VllmEngine]:
    with VllmEngine(folder, dtype="float32", max_model_len=512, arm=True) as made:
        yield made


def act_fn(engine: VllmEngine, layer: int = 1) -> Any:
    return engine._model().model.layers[layer - 1].mlp.act_fn


@needs_vllm
def test_arm_changes_answers_and_leaves_the_baseline_as_it_was(arm_engine: VllmEngine, tokenizer: Any):
    decoding = Decoding(max_new_tokens=16)
    plain = asked(tokenizer, "none", 20)
    before, own = by_key(arm_engine.generate(plain, decoding)), act_fn(arm_engine)
    weak = replace(STRONG, fraction=0.02)
    # One condition under two settings, and the baseline between them.
    mixed = [
        wanted
        for request in plain
        for wanted in (
            replace(request, condition="arm", arm=STRONG),
            request,
            replace(request, condition="arm", sample=1, arm=weak),
        )
    ]
    during = by_key(arm_engine.generate(mixed, decoding))
    after = by_key(arm_engine.generate(plain, decoding))
    assert set(during) == {request.key for request in mixed}
    assert after == before
    assert {key: during[key] for key in before} == before
    assert act_fn(arm_engine) is own

    def changed(one: tuple[str, int], other: tuple[str, int]) -> int:
        return sum(
            during[one[0], item, one[1]].token_ids != during[other[0], item, other[1]].token_ids
            for _, item, _ in before
        )

    assert changed(("arm", 0), ("none", 0)) >= 5
    assert changed(("arm", 0), ("arm", 1)) >= 5


@needs_vllm
@pytest.mark.parametrize("layers", [(1,), (1, 3)])
def test_arm_gives_the_tokens_of_transformers_with_arm(
    arm_engine: VllmEngine, tokenizer: Any, folder: Path, layers: tuple[int, ...]
):
    import torch
    from transformers import AutoModelForCausalLM

    from mless.redistribution import attached

    settings = replace(STRONG, layers=layers)
    plain = asked(tokenizer, "arm", 4)
    replies = by_key(
        arm_engine.generate([replace(request, arm=settings) for request in plain], Decoding(max_new_tokens=16))
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with attached(model, settings):
        for request in plain:
            ids = torch.tensor([request.token_ids])
            own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
            assert list(replies[request.key].token_ids) == own[0, ids.shape[1] :].tolist()


@needs_vllm
def test_arm_leaves_a_row_alone_with_its_positions_and_seed(arm_engine: VllmEngine, tokenizer: Any):
    decoding = Decoding(max_new_tokens=12)
    wanted = [replace(request, arm=STRONG) for request in asked(tokenizer, "arm", 8)]
    together = by_key(arm_engine.generate(wanted, decoding))
    assert by_key(arm_engine.generate(wanted[::-1], decoding, live=3)) == together
    other = replace(STRONG, seed=4)
    drawn = by_key(arm_engine.generate([replace(request, arm=other) for request in wanted], decoding))
    assert sum(drawn[key].token_ids != reply.token_ids for key, reply in together.items()) >= 2


@needs_vllm
@pytest.mark.parametrize("road", ["closed", "fault"])
def test_arm_left_early_leaves_the_model_as_it_was(
    arm_engine: VllmEngine, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, road: str
):
    decoding = Decoding(max_new_tokens=8)
    plain = asked(tokenizer, "none", 4)
    before, own = by_key(arm_engine.generate(plain, decoding)), act_fn(arm_engine)
    replies = arm_engine.generate([replace(request, arm=STRONG) for request in plain], decoding, live=2)
    next(replies)
    assert act_fn(arm_engine) is not own
    if road == "closed":
        replies.close()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(arm_engine._core, "step", lambda: 1 / 0)
            with pytest.raises(EngineFault, match="failed while generating"):
                list(replies)
    assert act_fn(arm_engine) is own
    assert by_key(arm_engine.generate(plain, decoding)) == before


@needs_vllm
def test_arm_that_never_ran_is_a_fault_and_no_answer(
    arm_engine: VllmEngine, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    mlp = arm_engine._model().model.layers[0].mlp
    own = mlp.act_fn
    # As a compiled graph does: it keeps what it was made of.
    monkeypatch.setattr(mlp, "forward", lambda x: mlp.down_proj(own(mlp.gate_up_proj(x)[0]))[0])
    (request,) = asked(tokenizer, "arm", 1)
    with pytest.raises(EngineFault, match=r"layer 1 and vLLM answered without running it: compiled graphs"):
        list(arm_engine.generate([replace(request, arm=STRONG)], Decoding(max_new_tokens=4)))
    assert mlp.act_fn is own


@needs_vllm
def test_arm_without_positions_is_a_fault(arm_engine: VllmEngine, tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_arm.PlacedArm, "_begin", lambda *_: None)
    (request,) = asked(tokenizer, "arm", 1)
    with pytest.raises(
        EngineFault, match=r"layer 1's MLP was given tokens of shape \(\d+,\) in a forward with no positions"
    ):
        list(arm_engine.generate([replace(request, arm=STRONG)], Decoding(max_new_tokens=4)))


@needs_vllm
def test_arm_is_refused_where_it_cannot_be_placed(
    arm_engine: VllmEngine, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    from torch import nn

    (request,) = asked(tokenizer, "arm", 1)
    layers = arm_engine._model().model.layers

    def refused(settings: ArmSettings, kind: type[MlessError], message: str) -> None:
        with pytest.raises(kind, match=message):
            arm_engine.generate([request, replace(request, arm=settings)], Decoding())
        assert not arm_engine._core.has_unfinished_requests()

    refused(replace(STRONG, scope="sequence"), EngineFault, "scope 'sequence'")
    refused(replace(STRONG, layers=(1, 99)), BadStudy, "no layer 99")
    for layer, name, module, message in (
        (2, "act_fn", nn.SiLU(), r"LlamaForCausalLM: layer 2 has SiLU for its activation \(mlp.act_fn\).*--engine hf"),
        (3, "experts", nn.ModuleList([nn.Identity()]), r"layer 3 is a mixture of experts \(mlp.experts\)"),
        (4, "gate_up_proj", None, "layer 4 has an MLP of down_proj, act_fn"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(layers[layer - 1].mlp._modules, name, module)
            refused(replace(STRONG, layers=(layer,)), EngineFault, message)


@needs_vllm
def test_arm_is_told_in_about(arm_engine: VllmEngine):
    about = arm_engine.about()
    assert (about["eager"], about["prefix_caching"], about["arm_seed"]) == (True, "off", "settings")


@needs_vllm
def test_arm_in_a_layer_with_gelu_gives_the_tokens_of_transformers_with_arm(
    arm_engine: VllmEngine, folder: Path, tokenizer: Any, tmp_path: Path
):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mless.redistribution import attached

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma2", vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, attn_logit_softcapping=None, final_logit_softcapping=None,
        eos_token_id=0, pad_token_id=0, bos_token_id=1, sliding_window=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(6.0)
    model.save_pretrained(tmp_path)
    plain = asked(tokenizer, "arm", 4)
    arm_engine.close()  # one vLLM to a process
    with VllmEngine(tmp_path, tokenizer=folder, dtype="float32", max_model_len=256, arm=True) as small:
        assert type(act_fn(small)).__name__ == "GeluAndMul"
        decoding = Decoding(max_new_tokens=8)
        base = by_key(small.generate(plain, decoding))
        replies = by_key(small.generate([replace(request, arm=STRONG) for request in plain], decoding))
    assert base != replies
    with attached(model, STRONG):
        for request in plain:
            ids = torch.tensor([request.token_ids])
            own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            assert list(replies[request.key].token_ids) == own[0, ids.shape[1] :].tolist()
