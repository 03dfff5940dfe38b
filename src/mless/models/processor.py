"""What a CPU computes in: decided here alone, from the processor's flags and oneDNN's limit, never from a timing.

A dtype that a processor has no units for is emulated, which takes up to some hundred times as long. Such weights stay as they are in memory
and are widened to float32 as they are used (`mless.models.widening`).
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Width = Literal["float32", "bfloat16", "float16"]

#: Up to so many loaded parameters (4 GB) a CPU computes and stores in float32. A fixed count, not the machine's memory, so that a resumed
#: study gets the same dtype everywhere.
FP32_PARAMETERS = 1_000_000_000

#: oneDNN's names for a limit (ONEDNN_MAX_CPU_ISA, any case) below which it uses no bfloat16, float16 or matrix (AMX) units. Any other limit
#: removes none of them.
_NO_BF16 = frozenset("sse41 avx avx2 avx2_vnni avx2_vnni_2 avx512_core avx512_core_vnni".split())
_NO_FP16 = _NO_BF16 | {"avx512_core_bf16"}
_NO_AMX = _NO_FP16 | {"avx512_core_fp16", "avx10_1_512"}
#: Linux's names for units that multiply in a dtype, and for matrix units, best first.
_BF16_X86, _FP16_X86 = ("amx_bf16", "avx512_bf16"), ("avx512_fp16",)
_AMX = ("amx_bf16", "amx_fp16", "amx_tile", "amx_int8")
_BF16_ARM = ("bf16",)


@dataclass(frozen=True)
class Processor:
    """The units of a processor: for each dtype the feature that multiplies in it, None where it would be emulated."""

    machine: str
    bfloat16: str | None
    float16: str | None
    #: The limit on oneDNN that the environment sets, as it is written there.
    limit: str | None = None

    @property
    def matrix_units(self) -> bool:
        """Whether it multiplies whole tiles of bfloat16 (AMX): only there is it much faster than float32."""
        return self.bfloat16 == "amx_bf16"

    def computes(self, dtype: str) -> bool:
        """Whether it has units for this dtype."""
        return dtype == "float32" or getattr(self, dtype, None) is not None

    def why(self, dtype: str) -> str:
        """The units for a dtype in words, or why there are none."""
        short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
        if (units := getattr(self, dtype)) is not None:
            return f"{short} units: {units}"
        limited = f" below ONEDNN_MAX_CPU_ISA={self.limit}" if self.limit else ""
        return f"no {short} units on this processor ({self.machine}){limited}"

    def about(self) -> dict[str, Any]:
        """For study.json."""
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """What a model computes in, what its weights are kept in, and why."""

    compute: Width
    stored: Width
    why: str

    @property
    def widened(self) -> bool:
        return self.stored != self.compute


def units_of(features: str, machine: str, environ: Mapping[str, str], *, onednn: bool = True) -> Processor:
    """What can be said from a processor's features, as /proc/cpuinfo lists them, and the environment.

    Without oneDNN (`onednn` False) torch multiplies 16-bit numbers one by one, whatever the processor could do.
    """
    known = set(features.lower().split())
    # oneDNN looks for its own name first, then for its old one; an empty value is none.
    limit = environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or None
    capped = (limit or "").strip().lower()
    if not onednn:
        return Processor(machine, None, None, limit)
    if machine.lower() in ("aarch64", "arm64"):
        # torch's fp16 products on ARM are not quick in every shape, so they count as none.
        return Processor(machine, next((one for one in _BF16_ARM if one in known), None), None, None)

    def first(names: tuple[str, ...], below: frozenset[str]) -> str | None:
        return next(
            (name for name in names if name in known and capped not in (_NO_AMX if name in _AMX else below)), None
        )

    return Processor(machine, first(_BF16_X86, _NO_BF16), first(_FP16_X86, _NO_FP16), limit)


def features_in(cpuinfo: str) -> str:
    """The features of the first core in the text of /proc/cpuinfo: `flags` on x86, `Features` on ARM."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return value.strip()
    return ""


def features_of_mac(sysctl: str) -> str:
    """The features in what `sysctl hw.optional` prints, by Linux's names."""
    return "bf16" if any(line.replace(" ", "") == "hw.optional.arm.FEAT_BF16:1" for line in sysctl.splitlines()) else ""


@functools.cache
def here() -> Processor:
    """This machine's processor. oneDNN reads its limit once too, so it is asked for once a process."""
    import torch

    onednn = torch.backends.mkldnn.is_available()
    return units_of(_features(), platform.machine() or "unknown", os.environ, onednn=onednn)


def _features() -> str:
    try:
        return features_in(Path("/proc/cpuinfo").read_text())
    except OSError:
        pass
    if sys.platform == "darwin":
        try:
            sysctl = subprocess.run(["sysctl", "hw.optional"], capture_output=True, text=True, timeout=10, check=False)
            return features_of_mac(sysctl.stdout)
        except (OSError, subprocess.SubprocessError):
            return ""
    import torch

    # Elsewhere torch's own look at the processor; it does not know of oneDNN's limit.
    asked = {"amx_bf16": "_is_amx_tile_supported", "avx512_bf16": "_is_avx512_bf16_supported"}
    return " ".join(name for name, call in asked.items() if getattr(torch.cpu, call, lambda: False)())


def choose(asked: str, stored: str, parameters: int, processor: Processor | None = None) -> Choice:
    """What a CPU computes in, for a checkpoint in `stored` of which so many parameters are loaded.

    A dtype that was asked for is taken as asked, even where it is emulated (`warning` says so). `auto` is float32 for small models. A large
    one computes in its own dtype where there are units for it, else in float32 from its stored weights.
    """
    processor = processor or here()
    if asked != "auto":
        return as_it_is(asked, "asked for")
    count = f"{parameters / 1e9:.2f} billion parameters loaded"
    if parameters <= FP32_PARAMETERS or stored == "float32":
        return Choice("float32", "float32", count)
    own = _width(stored)
    if processor.computes(own):
        return Choice(own, own, f"{count}, {processor.why(own)}")
    return Choice("float32", own, f"{count}, {processor.why(own)}")


def as_it_is(dtype: str, why: str) -> Choice:
    """Weights and products both in `dtype`."""
    return Choice(_width(dtype), _width(dtype), why)


def for_answers(processor: Processor | None = None) -> str:
    """The dtype of a model that answers on a CPU, where none was asked for: bfloat16 where whole tiles of it are multiplied, else auto."""
    return "bfloat16" if (processor or here()).matrix_units else "auto"


def warning(dtype: str, processor: Processor | None = None) -> str | None:
    """A warning for a dtype that this processor emulates; None where it has units for it."""
    processor = processor or here()
    if processor.computes(dtype):
        return None
    return f"WARNING: {dtype} is emulated here ({processor.why(dtype)}): products may take 6 to 230 times as long as in float32"


def _width(name: str) -> Width:
    assert name in ("float32", "bfloat16", "float16"), name
    return name
