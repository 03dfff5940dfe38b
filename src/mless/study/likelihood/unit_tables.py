"""What is stored of one item under one condition: its metrics, log p along its solution, and log p of each answer that is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mless.results.schemas import CANDIDATES, SCORES, SOLUTION_TOKENS, table_of_columns, table_of_rows
from mless.study.likelihood.texts import Texts, values_of

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.capture.scoring import Scores


def tables_of_texts(
    names: Mapping[str, Any],
    texts: Texts,
    token_texts: Mapping[int, str],
    scored: Sequence[np.ndarray] | None,
    first: Scores | None,
    *,
    plain: bool,
) -> dict[str, pa.Table]:
    """`scored` is log p by text, None where there are no texts; `first` has the distributions along the solution, where they are known. `plain`:
    the condition is the one that distributions are compared with.
    """
    logp, n = scored or [], len(texts.solution)
    along = _along(first, n, plain=plain)
    values = values_of(texts, logp, along) if scored else {}
    rows = [{**names, "metric": name, "value": value, "n_tokens": many} for name, (value, many) in values.items()]
    columns = {
        **names,
        "position": np.arange(n),
        "token": np.array(texts.solution, np.int64),
        "text": [token_texts[token] for token in texts.solution],
        "logp": logp[0] if scored else np.empty(0),
        **along,
    }
    after = len(logp) - len(list(texts.candidates()))
    candidates = [
        {**names, "number": at, "role": role, "text": text, "logp": float(one.sum()), "n_tokens": len(ids)}
        for at, ((role, text, ids), one) in enumerate(
            zip(texts.candidates(), logp[after:], strict=True) if scored else ()
        )
    ]
    return {
        "scores": table_of_rows(rows, SCORES),
        "tokens": table_of_columns(columns, SOLUTION_TOKENS, n),
        "candidates": table_of_rows(candidates, CANDIDATES),
    }


def _along(first: Scores | None, n: int, *, plain: bool) -> dict[str, np.ndarray]:
    """Entropy of each distribution along the solution, and how far it is from `none`'s; NaN where distributions are not known."""
    if first is None:
        return {name: np.full(n, np.nan) for name in ("entropy", "kl", "agree")}
    return {
        "entropy": first.entropy,
        "kl": np.zeros(n) if plain else first.kl,
        "agree": np.ones(n) if plain else first.agree,
    }


def expected_rows(texts: Texts, table: str) -> dict[str, Sequence[object]]:
    """What a table's columns have to hold of this item."""
    if table == "scores":
        return {"metric": texts.metrics}
    if table == "tokens":
        return {"position": range(len(texts.solution)), "token": texts.solution}
    candidates = list(texts.candidates())
    return {
        "number": range(len(candidates)),
        "role": [role for role, _, _ in candidates],
        "text": [text for _, text, _ in candidates],
    }
