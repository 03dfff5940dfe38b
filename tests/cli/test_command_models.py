"""`mless models`: what is at hand, and one model in detail."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Command, refused


def test_models(command: Command, tiny: Path) -> None:
    assert "smollm2" in command("models").out
    assert json.loads(command("models", "--json").out)["smollm2"] == "SmolLM2-135M-Instruct, embedded"
    content = json.loads(command("models", tiny, "--json").out)
    assert (content["model"], content["layers"], content["heads"], content["context"]) == ("tiny", 2, 4, 512)
    assert "no (prompt auto = raw)" in command("models", tiny).out
    refused(command("models", "nothing"), "no model 'nothing'")
