"""Digests of weights, so that a change of any of them is noticed, without reading them all at every start.

A digest is kept together with what the file system says of the file: device, inode, size, time of writing (mtime) and time of change (ctime).
Size and mtime are not enough: `cp -p`, `rsync -t` and `touch -d` give another file the same ones. But whatever writes or replaces a file sets
its ctime or its inode, and no program can set ctime back. A write within the same tick of the clock could share it, so a file is remembered
only once it is some seconds old. Bits that rot on the disk leave no such trace: `mless verify` therefore hashes anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from mless import gates

#: The part of a file that is hashed at once, as (start, stop); named, so that its digest can be remembered.
Parts = Mapping[str, tuple[int, int]]
#: Called with a number of bytes, and whether they were hashed just now or were remembered.
Reach = Callable[[int, bool], None]
_WHOLE = "whole file"
_AT_ONCE = 1 << 22
#: File systems keep times to 2 s at worst.
_SETTLED_NS = 4 * 10**9


def hash_file(path: Path, memory: Path, reach: Reach, *, anew: bool = False) -> str:
    """The SHA-256 of a file."""
    return hash_parts(path, {_WHOLE: (0, path.stat().st_size)}, memory, reach, anew=anew)[_WHOLE]


def hash_parts(path: Path, parts: Parts, memory: Path, reach: Reach, *, anew: bool = False) -> dict[str, str]:
    """The SHA-256 of each part of a file. Those in `memory` are not read again, unless `anew`."""
    state = list(gates.state_of(path))
    record = memory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    known = {} if anew else _remembered(record, state)
    # A name alone could be of another header's tensor; the place belongs to it.
    keys = {name: f"{name} {start} {stop}" for name, (start, stop) in parts.items()}
    missing = [name for name, key in keys.items() if key not in known]
    reach(sum(stop - start for name, (start, stop) in parts.items() if keys[name] in known), False)
    if len(missing) == 1:
        known[keys[missing[0]]] = _hash(path, *parts[missing[0]], reach)
    else:
        # hashlib lets other threads run while it works, so every core hashes. Progress is reported by this thread alone.
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for name, found in zip(missing, pool.map(lambda name: _hash(path, *parts[name]), missing), strict=True):
                known[keys[name]] = found
                reach(parts[name][1] - parts[name][0], True)
    # ctime is the time of creation on Windows, and says nothing of a change there.
    if missing and os.name != "nt" and list(gates.state_of(path)) == state and time.time_ns() - state[-1] > _SETTLED_NS:
        _remember(record, state, known)
    return {name: known[key] for name, key in keys.items()}


def _hash(path: Path, start: int, stop: int, reach: Reach | None = None) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (part := file.read(min(_AT_ONCE, stop - start))):
            total.update(part)
            start += len(part)
            if reach is not None:
                reach(len(part), True)
    return total.hexdigest()


def _remembered(record: Path, state: list[int]) -> dict[str, str]:
    try:
        content: Any = json.loads(record.read_text(encoding="utf-8"))
        if content["state"] == state:
            return {str(key): str(value) for key, value in cast("dict[str, str]", content["sha256"]).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # what cannot be read is hashed again
    return {}


def _remember(record: Path, state: list[int], digests: Mapping[str, str]) -> None:
    """Keep the digests. A cache that cannot be written costs time, and nothing else."""
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False, encoding="utf-8") as file:
            json.dump({"state": state, "sha256": dict(digests)}, file)
        Path(file.name).replace(record)
    except OSError:
        return
