"""How quickly the explorer answers over a large folder, through HTTP.

    python benchmarks/explorer.py                      500 items × 28 layers × 28 heads × 4 conditions, 1.7 GB; some minutes
    python benchmarks/explorer.py --items 50           a smaller one

A folder is written by script, as mless stores one (tests/stored_attention.py). `mless show` serves it in a process of its own. Timed are the
first page with all that it asks for, and clicks as a person makes them: map → head (items and the curve) → strip, in other layers and heads each
time. The most memory of the server is read from the system. The gate: a strip's numbers are those of the table.

A curve over all items is added up while it is read: `curve_s` is how long the first one takes until it is complete.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import pyarrow.compute as pc
import pyarrow.parquet as pq

from stored_attention import write_attention

CONDITIONS = ("none", "mless", "mful", "random")
#: The slowest clicks, which are printed.
SHOWN = 15


def get(address: str) -> tuple[float, bytes]:
    begin = time.perf_counter()
    with urllib.request.urlopen(address) as reply:
        content = reply.read()
    return time.perf_counter() - begin, content


def most_memory(process: int) -> int:
    """The most memory the server has had, in bytes; Linux only."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not say how much memory a process has had")


def check(address: str, folder: Path) -> None:
    """Refuse to time anything unless a strip's numbers are those of the table."""
    _, content = get(f"{address}api/strip?condition=mless&folder=1&head=3&item=7&layer=5&queries=original")
    values = json.loads(content)["values"]["with"]
    where = (
        (pc.field("condition") == "mless") & (pc.field("item") == "item-007") & (pc.field("layer") == 5) & (pc.field("head") == 3)
    )  # fmt: skip
    table = pq.read_table(
        folder / "attention.parquet", columns=["received"], filters=where & (pc.field("queries") == "original")
    )
    for got, wanted in zip(values, table["received"][0].as_py(), strict=True):
        if (got is None) != (wanted is None) or (got is not None and abs(got - wanted) > 1e-3 * abs(wanted)):
            raise SystemExit(f"the strip says {got} where the table has {wanted}")


def measure(address: str, layers: int, heads: int, items: int, clicks: int) -> dict[str, Any]:
    begin = time.perf_counter()
    for name in ("", "page/main.js", "page/style.css", "page/start.js", "page/map.js", "api/start"):
        get(address + name)
    found: dict[str, Any] = {"first_page_s": time.perf_counter() - begin}
    rng = random.Random(0)
    times: dict[str, list[tuple[float, str]]] = {"map": [], "head": [], "curve": [], "strip": []}

    def click(name: str, request: str) -> bytes:
        took, content = get(f"{address}api/{request}")
        times[name].append((took, request))
        return content

    click("map", "map?folder=1&queries=original")
    begin, complete = time.perf_counter(), None
    for _ in range(clicks):
        layer, head, item = rng.randint(1, layers), rng.randint(1, heads), rng.randint(1, items)
        condition = rng.choice(CONDITIONS[1:3])
        where = f"condition={condition}&folder=1&head={head}"
        click("head", f"head?{where}&layer={layer}&queries=original")
        content = click("curve", f"head/curve?{where}&layer={layer}&queries=original")
        if complete is None and json.loads(content)["complete"]:
            complete = time.perf_counter() - begin
        click("strip", f"strip?{where}&item={item}&layer={layer}&queries=original")
        click("map", "map?folder=1&queries=original")
    slowest = sorted((one for group in times.values() for one in group), reverse=True)
    for took, request in slowest[:SHOWN]:
        print(f"{1000 * took:6.0f} ms  {request}", file=sys.stderr)
    every = [took for took, _ in reversed(slowest)]
    found |= {
        "clicks": len(every),
        "median_ms": 1000 * statistics.median(every),
        "p95_ms": 1000 * every[int(0.95 * len(every))],
        "worst_ms": 1000 * every[-1],
        "curve_s": complete,
    }
    for name, group in times.items():
        found[f"{name}_median_ms"] = 1000 * statistics.median(took for took, _ in group)
    return found


def main() -> None:
    given = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given.add_argument("--items", type=int, default=500)
    given.add_argument("--layers", type=int, default=28)
    given.add_argument("--heads", type=int, default=28)
    given.add_argument("--clicks", type=int, default=60)
    given.add_argument("--folder", type=Path, help="where the folder is, or is written and kept")
    asked = given.parse_args()
    place = asked.folder or Path(tempfile.mkdtemp()) / "large"
    begin = time.perf_counter()
    if not (place / "study.json").exists():
        write_attention(
            place, items=asked.items, layers=asked.layers, heads=asked.heads, conditions=CONDITIONS, length=55, question=(72, 142)
        )  # fmt: skip
    size = sum(file.stat().st_size for file in place.glob("*.parquet"))
    print(f"folder: {size / 1e9:.2f} GB, {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    command = [sys.executable, "-m", "mless", "show", str(place), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        found = measure(address, asked.layers, asked.heads, asked.items, asked.clicks)
        check(address, place)
        found |= {"server_mb": most_memory(server.pid) / 1e6, "folder_gb": size / 1e9, "machine": platform.machine()}
        print(json.dumps(found))
    finally:
        server.terminate()
        server.wait()
        if asked.folder is None:
            shutil.rmtree(place.parent)


if __name__ == "__main__":
    main()
