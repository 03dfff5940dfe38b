"""The one table of engines: what each needs and can do, and where the function that opens it is."""

from __future__ import annotations

from mless.engines.opening import EngineKind
from mless.registry import Registry

#: Every engine by the name that studies use.
ENGINES: Registry[EngineKind] = Registry(
    "engines",
    "engine",
    {
        "hf": EngineKind(
            "mless.engines.hf:opened",
            needs_weights=True,
            needs_loaded=True,
            takes_arm=True,
            arm_scopes=("token",),
            takes_positions=True,
            takes_changes=True,
            scores=True,  # not through `score`: mless reads the model that it has loaded
        ),
        "vllm": EngineKind(
            "mless.engines.vllm:opened",
            needs_weights=True,
            takes_arm=True,
            takes_tensor_parallel=True,
            arm_scopes=("token",),
            scores=True,
        ),
        "openai": EngineKind(
            "mless.engines.openai:opened",
            takes_text=True,
            scores=True,
            requires={"base_url": "the openai engine needs a server: --base-url http://HOST:PORT/v1"},
        ),
        "scripted": EngineKind(
            "mless.engines.scripted:opened",
            takes_arm=True,  # its answers are given, whatever the condition
            takes_text=True,
            reads_prompts=False,
            takes_positions=True,
            requires={"script": "the scripted engine needs its answers: --set accuracy.script=FILE.json"},
        ),
    },
    wants="an mless.engines.EngineKind",
    fits=lambda one: isinstance(one, EngineKind),
)
