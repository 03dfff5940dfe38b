"""Memory that was refused, in the words of those who ask for it."""

from __future__ import annotations

import pytest

from mless.errors import is_out_of_memory


@pytest.mark.parametrize(
    ("fault", "refused"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        # Parquet's reader where there is no room for another thread's stack: the table is good.
        (OSError("Unknown error: Failed to launch worker thread: Resource temporarily unavailable"), True),
        (RuntimeError("can't start new thread"), True),
        # A library that found no room to be loaded; on a disk that forbids it the message goes on.
        (ImportError("ft2font.so: failed to map segment from shared object"), True),
        (ImportError("ft2font.so: failed to map segment from shared object: Operation not permitted"), False),
        (OSError("Couldn't deserialize thrift: invalid TType"), False),
    ],
)
def test_memory_that_was_refused_is_told_from_damage(fault: Exception, refused: bool) -> None:
    assert is_out_of_memory(fault) is refused
