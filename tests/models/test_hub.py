"""From the hub only what is needed is fetched. A process of its own does it: huggingface_hub reads its settings at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standin_hub import StandInHub
from tiny_models import save_model, weight_map

from mless.models.loading import describe, fingerprint

_WORKER = """
import json, sys, warnings
import mless
from huggingface_hub import constants
warnings.simplefilter("error")
for line in sys.stdin:
    asked = json.loads(line)
    constants.HF_HUB_OFFLINE = asked.pop("offline", constants.HF_HUB_OFFLINE)
    try:
        model = mless.load(asked.pop("name"), **asked)
        answer = {"label": model.label, "loaded": model.loaded_layers, "fingerprint": model.fingerprint}
    except mless.MlessError as fault:
        answer = {"fault": type(fault).__name__, "message": str(fault)}
    print(json.dumps(answer), flush=True)
"""


class Worker:
    """A process that loads models by name and says how it went."""

    def __init__(self, url: str, home: Path, **changes: str) -> None:
        # An inherited token or cache folder would take part otherwise.
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        settings = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        self.errors = (home / f"stderr-{time.monotonic_ns()}").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=clean | settings | {"NO_PROXY": "127.0.0.1"} | changes,
            text=True,
        )

    def load(self, name: str, **options: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, **options}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, Path(self.errors.name).read_text()
        return json.loads(answer)

    def stop(self) -> None:
        self._process.communicate()
        self.errors.close()


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("repos")
    tiny = save_model(root / "tiny", "llama", shard="20KB")
    single = save_model(root / "single", "qwen2")
    for name in ("pytorch_model.bin", "consolidated.pth", "modeling_own.py", "picture.png", "model.onnx"):
        (tiny / name).write_bytes(b"never to be fetched")
    pickled = save_model(root / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    bare = root / "bare"
    bare.mkdir()
    (bare / "weights.gguf").write_bytes(b"GGUF")
    return {"a/tiny": tiny, "a/single": single, "a/gated": single, "a/pickled": pickled, "a/bare": bare}


@pytest.fixture(scope="module")
def hub(repos: dict[str, Path]) -> Iterator[StandInHub]:
    served = StandInHub(repos, gated=frozenset({"a/gated"}))
    yield served
    served.stop()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def worker(hub: StandInHub, home: Path) -> Iterator[Worker]:
    process = Worker(hub.url, home)
    yield process
    process.stop()


def _message(answer: dict[str, Any]) -> str:
    assert answer.get("fault") == "UnknownModel", answer
    assert "\n" not in answer["message"]
    return answer["message"]


def test_layer_1_fetches_its_shards_and_small_text_only(
    worker: Worker, hub: StandInHub, repos: dict[str, Path]
) -> None:
    answer = worker.load("a/tiny", layers=1)
    folder = describe(str(repos["a/tiny"])).source
    assert answer == {"label": "tiny", "loaded": 1, "fingerprint": fingerprint(folder, 1)}
    fetched = hub.fetched("a/tiny")
    shards = weight_map(repos["a/tiny"])
    needed = {file for key, file in shards.items() if "embed_tokens" in key or "layers.0." in key}
    assert {file for file in fetched if file.endswith(".safetensors")} == needed
    assert len(needed) < len(set(shards.values())) / 2
    assert {Path(file).suffix for file in fetched} == {".json", ".safetensors"}


def test_more_layers_fetch_the_rest(worker: Worker, hub: StandInHub, repos: dict[str, Path]) -> None:
    worker.load("a/tiny", layers=1)
    before = len(hub.requests)
    answer = worker.load("a/tiny", layers=3)
    folder = describe(str(repos["a/tiny"])).source
    assert answer == {"label": "tiny", "loaded": 3, "fingerprint": fingerprint(folder, 3)}
    again = [path for method, path in hub.requests[before:] if method == "GET" and "resolve" in path]
    assert again
    assert all(path.endswith(".safetensors") for path in again)


def test_a_single_file_repository_loads(worker: Worker) -> None:
    assert worker.load("a/single", layers=2)["loaded"] == 2


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/nothing", ["'a/nothing'", "on the hub", "HF_TOKEN"]),
        ("a/gated", ["'a/gated' is gated", "accept its terms", "HF_TOKEN"]),
        ("a/pickled", ["'a/pickled'", "no safetensors", "never read"]),
        ("a/bare", ["'a/bare'", "no config.json"]),
        ("a/b--c", ["no model 'a/b--c'"]),
    ],
)
def test_what_the_hub_cannot_give_is_named(worker: Worker, hub: StandInHub, name: str, parts: list[str]) -> None:
    message = _message(worker.load(name, layers=1))
    assert all(part in message for part in parts), message
    assert not {file for file in hub.fetched(name) if not file.endswith(".json")}


def test_code_is_fetched_only_where_it_is_trusted(worker: Worker, hub: StandInHub) -> None:
    worker.load("a/tiny", layers=1)
    assert "modeling_own.py" not in hub.fetched("a/tiny")
    worker.load("a/tiny", layers=1, trust_remote_code=True)
    assert "modeling_own.py" in hub.fetched("a/tiny")


def test_without_a_network_the_cache_serves_what_it_has(worker: Worker, hub: StandInHub) -> None:
    online = worker.load("a/tiny", layers=1)
    with hub.away():
        before = len(hub.requests)
        assert worker.load("a/tiny", layers=1) == online
        message = _message(worker.load("a/other", layers=1))
        assert "'a/other' is not on this machine" in message
        assert "hf download a/other" in message
        assert len(hub.requests) == before


def test_a_shard_that_is_not_in_the_cache_is_named_offline(worker: Worker, hub: StandInHub) -> None:
    online, before = worker.load("a/tiny", layers=1), len(hub.requests)
    assert worker.load("a/tiny", layers=1, offline=True) == online
    assert "hf download a/tiny" in _message(worker.load("a/tiny", layers=6, offline=True))
    assert len(hub.requests) == before
    assert worker.load("a/tiny", layers=1, offline=False) == online


@pytest.mark.slow
def test_a_process_that_begins_offline(worker: Worker, hub: StandInHub, home: Path) -> None:
    online = worker.load("a/tiny", layers=1)
    process = Worker(hub.url, home, HF_HUB_OFFLINE="1")
    try:
        assert process.load("a/tiny", layers=1) == online
        message = _message(process.load("a/tiny", layers=6))
        assert "hf download a/tiny" in message
    finally:
        process.stop()
