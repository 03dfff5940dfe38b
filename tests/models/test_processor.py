"""What a CPU computes in follows from its flags and from oneDNN's limit alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mless.models import processor
from mless.models.processor import Processor, choose, features_in, features_of_mac, for_answers, units_of, warning

#: Flags of real processors, shortened to what could matter.
SKYLAKE = "fpu sse4_1 avx f16c avx2 fma avx512f avx512dq avx512bw avx512vl"
HASWELL = "fpu sse4_1 avx f16c avx2 fma"
COOPER_LAKE = f"{SKYLAKE} avx512_vnni avx512_bf16"
SAPPHIRE_RAPIDS = f"{COOPER_LAKE} avx_vnni amx_bf16 avx512_fp16 amx_tile amx_int8"
NEOVERSE_N1 = "fp asimd evtstrm aes fphp asimdhp asimddp"
NEOVERSE_V1 = f"{NEOVERSE_N1} i8mm bf16"


@pytest.mark.parametrize(
    ("features", "machine", "environ", "bf16", "fp16"),
    [
        pytest.param(HASWELL, "x86_64", {}, None, None, id="avx2"),
        # oneDNN calls bf16 "supported" here, and emulates it.
        pytest.param(SKYLAKE, "x86_64", {}, None, None, id="avx512-without-bf16"),
        pytest.param(COOPER_LAKE, "x86_64", {}, "avx512_bf16", None, id="avx512_bf16"),
        pytest.param(SAPPHIRE_RAPIDS, "AMD64", {}, "amx_bf16", "avx512_fp16", id="amx"),
        pytest.param(SAPPHIRE_RAPIDS, "x86_64", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, None, None, id="amx-as-avx2"),
        pytest.param(SAPPHIRE_RAPIDS, "x86_64", {"DNNL_MAX_CPU_ISA": "avx512_core"}, None, None, id="old-name"),
        pytest.param(
            SAPPHIRE_RAPIDS,
            "x86_64",
            {"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"},
            "amx_bf16",
            "avx512_fp16",
            id="new-name-first",
        ),
        pytest.param(
            SAPPHIRE_RAPIDS, "x86_64", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "avx512_bf16", None, id="no-amx"
        ),
        pytest.param(
            SAPPHIRE_RAPIDS,
            "x86_64",
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"},
            "avx512_bf16",
            "avx512_fp16",
            id="no-amx-fp16",
        ),
        pytest.param(
            SAPPHIRE_RAPIDS,
            "x86_64",
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"},
            "amx_bf16",
            "avx512_fp16",
            id="amx-cap",
        ),
        # oneDNN takes a name that it does not know, and an empty one, for no limit.
        pytest.param(COOPER_LAKE, "x86_64", {"ONEDNN_MAX_CPU_ISA": "8086"}, "avx512_bf16", None, id="unknown-limit"),
        pytest.param(COOPER_LAKE, "x86_64", {"ONEDNN_MAX_CPU_ISA": ""}, "avx512_bf16", None, id="empty-limit"),
        pytest.param(NEOVERSE_N1, "aarch64", {}, None, None, id="neoverse-n1"),
        pytest.param(NEOVERSE_V1, "aarch64", {}, "bf16", None, id="neoverse-v1"),
        pytest.param(NEOVERSE_V1, "aarch64", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "bf16", None, id="no-x86-limits-on-arm"),
        pytest.param("", "x86_64", {}, None, None, id="nothing-known"),
    ],
)
def test_units_by_flags_and_limit(
    features: str, machine: str, environ: dict[str, str], bf16: str | None, fp16: str | None
) -> None:
    found = units_of(features, machine, environ)
    assert (found.bfloat16, found.float16) == (bf16, fp16)
    assert found.computes("float32")
    assert found.computes("bfloat16") == (bf16 is not None)
    assert found.matrix_units == (bf16 == "amx_bf16")
    # Without oneDNN torch has no 16-bit products worth the name, whatever the processor has.
    assert units_of(features, machine, environ, onednn=False).bfloat16 is None


@given(st.sampled_from([SKYLAKE, COOPER_LAKE, SAPPHIRE_RAPIDS, ""]), st.text(max_size=20))
def test_a_limit_never_adds_units(features: str, limit: str) -> None:
    free, limited = units_of(features, "x86_64", {}), units_of(features, "x86_64", {"ONEDNN_MAX_CPU_ISA": limit})
    for dtype in ("bfloat16", "float16"):
        assert free.computes(dtype) or not limited.computes(dtype)


def test_features_are_those_of_the_first_core() -> None:
    x86 = "processor\t: 0\nflags\t\t: fpu avx2\nbugs\t\t: spectre\n\nprocessor\t: 1\nflags\t\t: other\n"
    assert features_in(x86) == "fpu avx2"
    assert features_in("processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd40\n") == "fp asimd bf16"
    assert features_in("processor : 0\nuarch : sifive\n") == ""
    assert features_of_mac("hw.optional.floatingpoint: 1\nhw.optional.arm.FEAT_BF16: 1\n") == "bf16"
    assert features_of_mac("hw.optional.arm.FEAT_BF16: 0\n") == ""


PLAIN, MATRIX = units_of(SKYLAKE, "x86_64", {}), units_of(SAPPHIRE_RAPIDS, "x86_64", {})


def test_what_a_model_computes_in() -> None:
    small, large = processor.FP32_PARAMETERS, processor.FP32_PARAMETERS + 1
    for one in (PLAIN, MATRIX):
        assert (choose("auto", "bfloat16", small, one).compute, choose("auto", "bfloat16", small, one).widened) == (
            "float32",
            False,
        )
        assert choose("auto", "float32", large, one).compute == "float32"
    kept = choose("auto", "bfloat16", large, MATRIX)
    assert (kept.compute, kept.stored) == ("bfloat16", "bfloat16")
    assert "bf16 units: amx_bf16" in kept.why
    kept = choose("auto", "bfloat16", large, PLAIN)
    assert (kept.compute, kept.stored, kept.widened) == ("float32", "bfloat16", True)
    assert kept.why == "1.00 billion parameters loaded, no bf16 units on this processor (x86_64)"
    assert choose("auto", "float16", large, PLAIN).stored == "float16"
    limited = units_of(SAPPHIRE_RAPIDS, "x86_64", {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert choose("auto", "bfloat16", large, limited).why.endswith("(x86_64) below ONEDNN_MAX_CPU_ISA=AVX2")
    # What was asked for is done as asked.
    for asked in ("float32", "bfloat16", "float16"):
        assert (choose(asked, "bfloat16", 1, PLAIN).compute, choose(asked, "bfloat16", 1, PLAIN).widened) == (
            asked,
            False,
        )


def test_answers_are_in_bf16_only_where_tiles_of_it_are_multiplied() -> None:
    assert for_answers(MATRIX) == "bfloat16"
    assert for_answers(PLAIN) == for_answers(units_of(COOPER_LAKE, "x86_64", {})) == "auto"
    assert for_answers(units_of(SAPPHIRE_RAPIDS, "x86_64", {"ONEDNN_MAX_CPU_ISA": "AVX2"})) == "auto"


def test_a_slow_dtype_is_never_silent() -> None:
    told = warning("bfloat16", PLAIN)
    assert told is not None
    assert told.startswith("WARNING: bfloat16 is emulated here (no bf16 units on this processor (x86_64))")
    assert told.endswith("products may take 6 to 230 times as long as in float32")
    assert "\n" not in told
    assert warning("float32", PLAIN) is None
    assert warning("bfloat16", MATRIX) is None


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="flags are read from /proc/cpuinfo")
def test_this_machine_is_asked_once_and_heeds_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor.here() is processor.here()
    flags = features_in(Path("/proc/cpuinfo").read_text()).split()
    if not {"amx_bf16", "avx512_bf16", "bf16"} & set(flags):
        assert processor.here().bfloat16 is None
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    told = processor.here.__wrapped__()  # as a process asks that was started so
    assert (told.bfloat16, told.limit) == ((None, "AVX2") if "avx" in flags else (processor.here().bfloat16, None))


def test_what_is_known_of_a_processor_can_be_written_down() -> None:
    assert Processor("x86_64", None, None, "AVX2").about() == {
        "machine": "x86_64",
        "bfloat16": None,
        "float16": None,
        "limit": "AVX2",
    }
