"""Text generation by vLLM, in this process: the fast path for big models. What it promises of row-stability: docs/engines.md."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from mless.engines.base import Decoding, Reply, Request, Scored, ScoreRequest, by_arm, check_scoring
from mless.engines.opening import Opening
from mless.errors import EngineFault, first_line
from mless.models.loading import whole_folder
from mless.models.locating import Say, silent
from mless.models.tokenizers import locate_tokenizer
from mless.values import ArmSettings

_INVARIANT = "VLLM_BATCH_INVARIANT"
#: Below this, vLLM silently uses this temperature instead.
_LOWEST_TEMPERATURE = 0.01
#: vLLM keeps whole blocks of a prefix only. Its CPU default of 128 tokens is longer than many prompts, so nothing would be kept; 32 is the
#: smallest size at which its CPU kernels are fast. On GPUs vLLM's default (mostly 16) is used.
_CPU_BLOCK = 32
#: By default vLLM's cache would take nine tenths of the memory, which on a CPU other programs need too.
_CPU_CACHE_BYTES = 4 << 30

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Task(Generic[T]):
    """A request as vLLM gets it, and what its output is read as."""

    request: Request
    token_ids: tuple[int, ...]
    sampling: Any
    read: Callable[[Any], T]


class VllmEngine:
    """vLLM with the model in `folder` (config, safetensors, and tokenizer unless `tokenizer` names another folder).

    `dtype` and `max_model_len` are vLLM's own settings ("auto": as in the config). `gpu_memory_utilization` is the share of the device's
    memory it takes; where it is None, vLLM's default on a GPU, and 4 GiB for the cache on a CPU. `seed` is the engine's; every answer is
    drawn with its request's. `batch_invariant`, or VLLM_BATCH_INVARIANT=1 in the environment, asks for vLLM's batch-invariant kernels and
    does without its prefix cache, as `prefix_caching=False` does. `arm` prepares it for requests with ARM: no prefix cache, and no compiled
    graphs, which would run the model without ARM. `tensor_parallel` is the number of GPUs (on a CPU: processes) that each layer is divided
    among.
    """

    # Over 60 lines: vLLM's settings stand in one place, each with its reason.
    def __init__(
        self,
        folder: Path | str,
        *,
        tokenizer: Path | str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        batch_invariant: bool = False,
        arm: bool = False,
        prefix_caching: bool = True,
        tensor_parallel: int = 1,
        gpu_memory_utilization: float | None = None,
        say: Say = silent,
    ) -> None:
        self._core: Any = None
        self._busy = False
        self._arm = arm
        #: Prompt tokens that came out of the prefix cache rather than being computed, by condition.
        self.cached_tokens: Counter[str] = Counter()
        folder = Path(folder)
        if not (folder / "config.json").exists() or not any(folder.glob("*.safetensors")):
            raise EngineFault(
                f"vllm reads a folder with config.json and *.safetensors, and {str(folder)!r} lacks one of them; "
                "of a hub model fetch the weights first: hf download"
            )
        if arm and tensor_parallel > 1:
            from mless.engines import vllm_arm

            raise vllm_arm.divided(tensor_parallel, 1)
        given = os.environ.get(_INVARIANT)
        self._invariant = batch_invariant or given == "1"
        try:
            vllm, platform = _import_vllm(self._invariant)
            if self._invariant:
                _require_invariance(platform)
        except EngineFault:
            if given != "1":
                os.environ.pop(_INVARIANT, None)
            raise
        say(f"vLLM {vllm.__version__} loads the model on {platform.device_type}, which takes a while")
        arguments: dict[str, Any] = {
            "model": str(folder),
            "tokenizer": str(tokenizer or folder),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            # A cache hit leaves fewer rows to compute, and vLLM does not yet promise the same bits for them: vllm#40896.
            # And cached keys from one ARM setting would be used for another.
            "enable_prefix_caching": prefix_caching and not (self._invariant or arm),
            # Pickles are never read, here as elsewhere.
            "load_format": "safetensors",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if tensor_parallel > 1:
            # Processes of vLLM's own; the engine's core, which keeps the order of requests, stays in this one.
            arguments |= {"tensor_parallel_size": tensor_parallel, "distributed_executor_backend": "mp"}
            if platform.is_cpu():
                # By itself vLLM wants a NUMA node for each process.
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _shared_out(tensor_parallel))
        if arm or platform.is_cpu():
            # Compiling takes longer than a short study. On a GPU graphs give most of the speed, but they cannot change with ARM.
            arguments["enforce_eager"] = True
        if platform.is_cpu():
            arguments["block_size"] = _CPU_BLOCK
        if gpu_memory_utilization is not None:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        elif platform.is_cpu():
            arguments["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
        try:
            with warnings.catch_warnings(action="ignore"):  # its packages warn about each other
                self._core = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        except Exception as fault:
            raise EngineFault(
                f"vLLM {vllm.__version__} could not load {str(folder)!r} ({first_line(fault)}); try another --dtype, free memory "
                "(on a CPU VLLM_CPU_KVCACHE_SPACE says how many GiB its cache takes), or --engine hf"
            ) from fault
        self._vllm = vllm
        self._config: Any = self._core.vllm_config
        self._context = int(self._config.model_config.max_model_len)
        self._rows = int(self._config.scheduler_config.max_num_seqs)
        self._vocabulary = int(self._config.model_config.get_vocab_size())
        self._device = "cpu" if platform.is_cpu() else str(platform.get_device_name())

    def generate(self, requests: Sequence[Request], decoding: Decoding, *, live: int | None = None) -> Iterator[Reply]:
        """Answer every request; what cannot be done is refused here, before anything is computed."""
        rows = self._rows_at_once(live)
        if 0 < decoding.temperature < _LOWEST_TEMPERATURE:
            raise EngineFault(
                f"vLLM draws no cooler than temperature {_LOWEST_TEMPERATURE}, got {decoding.temperature}; use 0 (greedy) or --engine hf"
            )
        tasks: list[_Task[Reply]] = []
        for request in requests:
            self._refuse(request, request.token_ids, decoding.max_new_tokens)
            read = partial(self._reply, request)
            tasks.append(_Task(request, request.token_ids, self._sampling(request, decoding), read))
        self._refuse_arms(requests)
        return self._outputs(tasks, rows)

    def score(self, requests: Sequence[ScoreRequest], *, live: int | None = None) -> Iterator[Scored]:
        """log p of every given text, as prompt log-probabilities. The one token that vLLM draws after it is thrown away."""
        rows = self._rows_at_once(live)
        check_scoring(requests)
        sampling = self._scoring()
        tasks: list[_Task[Scored]] = []
        for request in requests:
            self._refuse(request.prompt, request.whole, 1)
            tasks.append(_Task(request.prompt, request.whole, sampling, partial(_scored, request)))
        self._refuse_arms([request.prompt for request in requests])
        return self._outputs(tasks, rows)

    def about(self) -> dict[str, Any]:
        """What is recorded of the engine; `promise` says which results have the same bits."""
        model, cache = self._config.model_config, self._config.cache_config
        dtype = str(model.dtype).removeprefix("torch.")
        # Added only with ARM, so that older studies without ARM still match.
        arm = {"arm_seed": "settings"} if self._arm else {}
        return {
            "engine": "vllm",
            "vllm": self._vllm.__version__,
            "device": self._device,
            "dtype": dtype,
            "context": self._context,
            "max_num_seqs": self._rows,
            "tensor_parallel": int(self._config.parallel_config.tensor_parallel_size),
            "eager": bool(model.enforce_eager),
            "prefix_caching": "by condition" if cache.enable_prefix_caching else "off",
            "block_size": int(cache.block_size),
            _INVARIANT: os.environ.get(_INVARIANT),
            "row_stable": False,
            "promise": _promise(self._device, dtype, self._invariant),
            **arm,
        }

    def close(self) -> None:
        """Shut vLLM down and give its memory back. A second call does nothing."""
        core, self._core = self._core, None
        if core is None:
            return
        core.engine_core.shutdown()
        # A process can have only one vLLM process group; a second engine needs it gone.
        from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

        cleanup_dist_env_and_memory()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rows_at_once(self, live: int | None) -> int:
        if self._core is None:
            raise EngineFault("this vllm engine is closed; make another one")
        if live is not None and live < 1:
            raise EngineFault(f"live must be at least 1 row, got {live}")
        return min(live or self._rows, self._rows)

    def _refuse(self, request: Request, token_ids: Sequence[int], max_new_tokens: int) -> None:
        what = f"condition {request.condition!r}, item {request.item!r}"
        if request.position_ids is not None or request.hidden is not None:
            asked = "position ids of its own" if request.position_ids is not None else "filler hidden from attention"
            raise EngineFault(
                f"{what} asks for {asked}, which vLLM cannot do; leave this condition out, or use --engine hf"
            )
        if request.changes is not None:
            raise EngineFault(
                f"{what} has cuts or patches, which vLLM cannot do; leave this condition out, or use --engine hf"
            )
        if not token_ids:
            raise EngineFault(
                f"{what}: vllm takes prompts as token ids, and this one has none; messages are for --engine openai"
            )
        if len(token_ids) + max_new_tokens > self._context:
            raise EngineFault(
                f"{what}: {len(token_ids)} prompt tokens and {max_new_tokens} new ones do not fit the context of "
                f"{self._context}; lower max_new_tokens to {max(self._context - len(token_ids), 0)} or shorten the prompt"
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocabulary:
            raise EngineFault(
                f"{what}: token ids must lie in 0…{self._vocabulary - 1}, got {min(token_ids)}…{max(token_ids)}; "
                "the tokenizer is not this model's"
            )

    def _refuse_arms(self, requests: Sequence[Request]) -> None:
        for settings in by_arm(requests):
            if settings is not None:
                self._refuse_arm(settings)

    def _refuse_arm(self, settings: ArmSettings) -> None:
        from mless.engines import vllm_arm

        if not self._arm:
            raise EngineFault(
                "ARM was asked of a vllm engine made without it, whose compiled graphs and prefix cache would not know of it; make "
                "VllmEngine(…, arm=True)"
            )
        vllm_arm.refuse(settings, self._config.parallel_config)
        vllm_arm.fused_points(self._model(), settings.layers)

    def _model(self) -> Any:
        (model,) = self._core.apply_model(_itself)
        return model

    def _outputs(self, tasks: Sequence[_Task[T]], live: int) -> Generator[T]:
        """What is read of each task's output, as it finishes: those without ARM first, then one ARM setting after another."""
        if self._busy:
            raise EngineFault("this vllm engine is answering other requests; take all of their replies first")
        self._busy = True
        try:
            for settings in by_arm([task.request for task in tasks]):
                yield from self._answered([task for task in tasks if task.request.arm == settings], live, settings)
        finally:
            self._busy = False

    def _answered(self, tasks: Sequence[_Task[T]], live: int, settings: ArmSettings | None) -> Generator[T]:
        """The same for tasks with one ARM setting; all running rows share the activations."""
        core = self._core
        if core is None:
            raise EngineFault("this vllm engine was closed while it answered; the answers so far are kept, run again")
        waiting = deque(enumerate(tasks))
        running: dict[str, _Task[T]] = {}
        if settings is None:
            with_arm = nullcontext()
        else:
            from mless.engines import vllm_arm

            with_arm = vllm_arm.placed(self._model(), settings)
        try:
            with with_arm as arm:
                while waiting or running:
                    # max_num_seqs stays what it was when the engine started, so the number of live rows is limited here.
                    while waiting and len(running) < live:
                        number, task = waiting.popleft()
                        running[str(number)] = task
                        core.add_request(str(number), self._prompt(task), task.sampling)
                    for output in self._step(core):
                        if arm is not None:
                            arm.require_run()
                        if output.finished:
                            yield running.pop(output.request_id).read(output)
                    if running and not core.has_unfinished_requests():
                        lost = next(iter(running.values())).request
                        raise EngineFault(
                            f"vLLM is done but gave no answer to {len(running)} requests, the first of them condition {lost.condition!r}, "
                            f"item {lost.item!r}; the answers so far are kept, run again"
                        )
        finally:
            # After an error, or when the caller stops early, unfinished requests must not run on into the next call.
            if running and self._core is not None:
                core.abort_request(list(running))

    def _step(self, core: Any) -> list[Any]:
        if self._core is None:
            raise EngineFault("this vllm engine was closed while it answered; the answers so far are kept, run again")
        try:
            return core.step()
        except Exception as fault:
            raise EngineFault(
                f"vLLM failed while generating ({first_line(fault)}); the answers so far are kept: run again, with less memory in use"
            ) from fault

    def _prompt(self, task: _Task[Any]) -> Any:
        # vLLM finds cached prefixes by their tokens. The salt is part of every block's hash, so a prefix is computed once per condition and
        # never shared between conditions. Conditions may patch activations, so equal tokens may have different keys. And the A/A control
        # must be computed, not read from none's cache.
        return self._vllm.TokensPrompt(
            prompt_token_ids=list(task.token_ids), cache_salt=f"condition {task.request.condition}"
        )

    def _sampling(self, request: Request, decoding: Decoding) -> Any:
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        # vLLM adds the end tokens of generation config and tokenizer. With sampling parameters given, it takes nothing else from the
        # generation config (no repetition penalty).
        return self._vllm.SamplingParams(
            # Seeds have 63 bits here, because vLLM reads -1 as "no seed".
            seed=request.seed & (2**63 - 1),
            max_tokens=decoding.max_new_tokens,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            stop=list(decoding.stop),
            detokenize=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _scoring(self) -> Any:
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        # 0: the prompt's own tokens, and no others beside them.
        return self._vllm.SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )

    def _reply(self, request: Request, output: Any) -> Reply:
        answer = output.outputs[0]
        if answer.finish_reason not in ("stop", "length"):
            raise EngineFault(
                f"condition {request.condition!r}, item {request.item!r}: vLLM ended with {answer.finish_reason!r} instead of an "
                "answer; run again"
            )
        self.cached_tokens[request.condition] += output.num_cached_tokens or 0
        return Reply(
            condition=request.condition,
            item=request.item,
            sample=request.sample,
            text=answer.text,
            n_tokens=len(answer.token_ids),
            finish="length" if answer.finish_reason == "length" else "stop",
            token_ids=tuple(answer.token_ids),
        )


def _scored(request: ScoreRequest, output: Any) -> Scored:
    """log p of the text's tokens from vLLM's, which has an entry for each token of prompt and text."""
    prompt, whole = request.prompt, request.whole
    found: list[Any] = list(output.prompt_logprobs or ())
    first = len(prompt.token_ids)
    known = [one.get(token) if one else None for one, token in zip(found[first:], whole[first:], strict=False)]
    logp = tuple(float(one.logprob) for one in known if one is not None)
    if len(found) != len(whole) or len(logp) != len(request.token_ids) or not all(map(isfinite, logp)):
        raise EngineFault(
            f"condition {prompt.condition!r}, item {prompt.item!r}: vLLM gave {len(logp)} log-probabilities for {len(request.token_ids)} tokens, or one that "
            "is not finite; try --dtype float32, or --engine hf"
        )
    return Scored(*request.key, logp)


def _shared_out(processes: int) -> str:
    """This process's cores among so many processes, as vLLM writes it: "0,1|2,3"."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // processes)
    parts = [cores[at * each : (at + 1) * each] or cores[-1:] for at in range(processes)]
    return "|".join(",".join(map(str, part)) for part in parts)


def opened(given: Opening) -> VllmEngine:
    """The engine for a study; the whole model is fetched where it is not here yet."""
    assert given.described is not None
    return VllmEngine(
        whole_folder(given.described.source),
        tokenizer=locate_tokenizer(given.tokenizer_name) if given.tokenizer_name else None,
        dtype=given.dtype,
        max_model_len=given.length,
        seed=given.seed,
        batch_invariant=given.settings.mode == "batch-invariant",
        arm=given.with_arm,
        prefix_caching=not given.scoring,
        tensor_parallel=given.settings.tensor_parallel or 1,
        say=given.say,
    )


def _itself(model: Any) -> Any:
    return model


def _import_vllm(batch_invariant: bool) -> tuple[Any, Any]:
    """vLLM and the platform it runs on."""
    if batch_invariant and os.environ.get(_INVARIANT) != "1":
        if "vllm" in sys.modules:
            raise EngineFault(
                f"vllm is already imported, too late for batch-invariant kernels; start with {_INVARIANT}=1"
            )
        # Some of vLLM's modules read it while they are imported.
        os.environ[_INVARIANT] = "1"
    # In this process: conditions can patch the model, and requests keep their order (across processes a bf16 run does not repeat).
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # by default it sends usage reports
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    except ImportError as fault:
        raise EngineFault(
            f"the engine vllm is not installed ({first_line(fault)}); run: pip install 'mless[vllm]' (it needs a GPU; "
            "for a CPU see docs/engines.md), or use --engine hf"
        ) from fault
    return vllm, current_platform


def _require_invariance(platform: Any) -> None:
    """vLLM accepts the setting on any device, but on a CPU it fails at the first step. Its documentation lists the devices."""
    if platform.is_cuda() and not platform.has_device_capability(80):
        lacking = (
            f"{platform.get_device_name()} has compute capability {platform.get_device_capability().as_version_str()}"
        )
    elif not (platform.is_cuda() or platform.is_rocm() or platform.is_xpu()):
        lacking = f"this is a {platform.device_type}"
    else:
        return
    raise EngineFault(
        f"vLLM's batch-invariant kernels need an NVIDIA GPU of compute capability 8.0 or more (or an AMD Instinct, or an Intel GPU), "
        f"and {lacking}; unset {_INVARIANT}, or use --engine hf, which is row-stable anywhere"
    )


def _promise(device: str, dtype: str, invariant: bool) -> str:
    if invariant:
        return "vLLM's batch-invariant mode (beta): the same tokens whatever the rows beside them, by vLLM's word; not measured here"
    if device == "cpu" and dtype == "float32":
        return (
            "row-stable is not promised: sums are rounded differently with other rows alongside. Measured with SmolLM2-135M in fp32 "
            "on a CPU, 64 of 64 answers had the same tokens at 1, 8 and 64 rows (docs/engines.md)"
        )
    return "row-stable is not promised: an answer may change with the rows beside it; look at none-again before believing an effect"
