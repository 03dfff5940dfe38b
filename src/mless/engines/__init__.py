"""Text generation: transformers in this process, vLLM, any OpenAI-compatible server, and a scripted fake."""

from mless.engines.base import Decoding, Engine, Finish, Reply, Request

__all__ = ["Decoding", "Engine", "Finish", "Reply", "Request"]
