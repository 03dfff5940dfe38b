"""Text generation: transformers in this process, vLLM, any OpenAI-compatible server, and a scripted fake."""

from mless.engines.base import Changes, Decoding, Engine, Finish, Reply, Request, Scored, ScoreRequest, ScoringEngine
from mless.engines.kinds import ENGINES
from mless.engines.opening import EngineKind, EngineSettings, Opening

__all__ = [
    "ENGINES",
    "Changes",
    "Decoding",
    "Engine",
    "EngineKind",
    "EngineSettings",
    "Finish",
    "Opening",
    "Reply",
    "Request",
    "ScoreRequest",
    "Scored",
    "ScoringEngine",
]
