"""`mless studies`: the list, for people and as JSON."""

from __future__ import annotations

import json

from command_line import Command


def test_studies(command: Command) -> None:
    result = command("studies")
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines() if line.startswith(("quick", "fig"))][:2] == [
        "quick",
        "fig2",
    ]
    content = json.loads(command("studies", "--json").out)
    assert content["fig15"]["figure"]["panels"][0]["head"] == 17
    assert content["quick"]["length"] == 55
