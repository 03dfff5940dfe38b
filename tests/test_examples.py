"""The examples run as they stand, and say what the README says they say."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(script, capsys):
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_slurm_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "examples" / "cluster.slurm")], check=True)


def test_the_readmes_python_is_the_first_example(capsys):
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    exec(compile(block[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 10  # the layer, then its nine heads
    assert printed[0].startswith("layer 1 drops: ε 0.")
