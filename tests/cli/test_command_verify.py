"""`mless verify` as it is typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from command_line import Command, refused, small


def test_verify(command: Command, tiny: Path, stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(stored, out)
    good = command("verify", out, "--sample", "2")
    assert good.code == 0
    assert "whole: study.json and 5 tables are as they were written" in good.out
    assert "computed again: 2 units" in good.out
    assert "damage, not forgery" in good.out
    content = json.loads(command("verify", out, "--json", "--sample", "1").out)
    assert (content["good"], content["state"], content["recomputed"]["differing"]) == (True, "whole", 0)
    (out / "retained.parquet").write_bytes((out / "shares.parquet").read_bytes())
    bad = command("verify", out)
    assert bad.code == 2
    assert "retained.parquet is damaged" in bad.out
    assert bad.err.startswith(f"mless: {out}: do not use its numbers until "), "the way out, not once more the state"
    refused(
        command("run", "quick", *small(tiny), "--conditions", "none,mless,mful,random", "--out", out),
        "retained.parquet is damaged",
        "restore it from a copy",
    )
    refused(command("verify", tmp_path / "nowhere"), "no result folder")
    refused(command("verify", out, "--sample", "-1"), "0 or more")
