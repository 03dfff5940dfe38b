"""The tables of an attention study do not depend on how many rows are made at once."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mless.study import load_study, run_study
from mless.study.attention import tables
from spelling import model_folder


def test_shares_made_in_pieces_are_those_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_folder(tmp_path / "tiny")
    spec = load_study(
        "quick", {"model": str(model), "limit": 5, "length": 3, "conditions": "none,mless", "prompt": "raw"}
    )
    run_study(spec, tmp_path / "whole")
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 25)  # two items of 2 layers with 4 heads and their mean
    run_study(spec, tmp_path / "pieces")
    whole, pieces = (pq.read_table(tmp_path / name / "shares.parquet") for name in ("whole", "pieces"))
    assert len(whole) == 2 * 5 * 2 * 5
    assert pieces.equals(whole)
