"""How a CPU multiplies matrices of fp32 numbers that came from a bf16 model: by its units for bf16, where it has them (AMX).

Products of two bf16 numbers are exact in fp32, in which they are added up, so scores lose nothing and take a half to a fifth of the time.
torch has no product of bf16 tensors on a CPU whose sums stay fp32; it has a switch by which a product of fp32 tensors rounds what it
multiplies to bf16, which changes no number that is one already. The switch is the whole process's. Computations of this package that must
not be rounded wait while it is on; products of fp32 tensors that other threads compute meanwhile are rounded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@functools.cache
def short_serve() -> bool:
    """Whether this processor multiplies bf16 numbers several times as quickly, and this torch can be told to."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return bool(amx()) and hasattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision")


_turn = threading.Condition()
_users = 0
_short = False
_before = ""


@contextmanager
def products(*, short: bool) -> Generator[None]:
    """Inside, products of fp32 tensors on a CPU are those of bf16 numbers, or with `short` off are not; whoever wants the other waits."""
    global _users, _short, _before
    with _turn:
        _turn.wait_for(lambda: not _users or _short == short)
        if not _users and short:
            how: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
            _before, how.fp32_precision = how.fp32_precision, "bf16"
        _users, _short = _users + 1, short
    try:
        yield
    finally:
        with _turn:
            _users -= 1
            if not _users:
                if short:
                    torch.backends.mkldnn.matmul.fp32_precision = _before  # pyright: ignore[reportAttributeAccessIssue]
                _turn.notify_all()
