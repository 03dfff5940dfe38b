"""On a CUDA device: the kernel is the sorted path bit for bit, in captured graphs too, and the model is as before afterwards.

Needs torch, transformers, jaxtyping and pytest only, so that it also runs on a bare GPU machine (``--noconftest``).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mless
from engines.tiny_answerers import answering, ids_of
from kernels.test_redistributing import CHOICES, ROWS, given, values
from mless.kernels import redistributing
from mless.redistribution import arm, compile_redistribution, redistribute
from mless.values import arm_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def model_of(**changes: Any) -> Any:
    return answering("qwen2", dtype=torch.bfloat16, hidden_size=256, intermediate_size=1024, **changes).model.cuda()


IDS = torch.tensor([ids_of(9, 1), ids_of(9, 2)])


def test_the_benchmark_s_gate():
    gate = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "arm.py"))["gate"]
    gate(torch.device("cuda"))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind != "tiny"])
def test_the_kernel_is_the_sorted_path_bit_for_bit(kind, choice):
    for units in (258, 4864):
        a = values(units, kind)
        told = given(units, choice)
        assert redistributing.fits(a.cuda())
        ours = redistribute(a.cuda(), **CHOICES[choice], **{name: t.cuda() for name, t in told.items()})
        assert torch.equal(ours.cpu(), redistribute(a, **CHOICES[choice], **told))


@torch.inference_mode()
def test_one_kernel_does_what_the_hook_does():
    model, ids = model_of(), IDS.cuda()
    act = model.model.layers[0].mlp.act_fn
    plain = model(input_ids=ids).logits
    with arm(model, c=0.3):
        fused = model(input_ids=ids).logits
        hook = act.register_forward_hook(lambda module, args, output: None)
        by_hook = model(input_ids=ids).logits
        hook.remove()
    assert torch.equal(model(input_ids=ids).logits, plain)
    assert "forward" not in vars(model.model.layers[0].mlp)
    # The quick reciprocal may round an activation to its neighbour, seldom.
    torch.testing.assert_close(fused, by_hook, rtol=0.05, atol=0.1)
    assert (fused - plain).abs().mean() > 10 * (fused - by_hook).abs().mean()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@torch.inference_mode()
def test_no_host_sync_and_the_same_in_a_captured_graph():
    model, ids = model_of(), IDS.cuda()
    with arm(model, c=0.3) as handle:
        seeds = torch.tensor([1, 2], device="cuda")
        handle.rows(seeds=seeds)
        mlp, x = model.model.layers[0].mlp, torch.randn(2, 9, 256, device="cuda", dtype=torch.bfloat16)
        expected = mlp(x)
        logits = model(input_ids=ids).logits
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = mlp(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(again, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = mlp(x)
        for _ in range(3):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected)
        # Rows' seeds are read when a forward runs.
        seeds.copy_(torch.tensor([2, 1]))
        assert not torch.equal(model(input_ids=ids).logits, logits)


COMPILED = """
import torch
from mless.redistribution import arm
from test_redistribution_gpu import IDS, model_of

with torch.inference_mode():
    model, ids = model_of(num_hidden_layers=1), IDS.cuda()
    plain = model(input_ids=ids).logits
    with arm(model, c=0.3):
        expected = model(input_ids=ids).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids).logits, plain, rtol=0.02, atol=0.02)
    with arm(compiled, c=0.3):
        torch.testing.assert_close(compiled(input_ids=ids).logits, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(compiled(input_ids=ids).logits, plain, rtol=0.02, atol=0.02)
print("as it is")
"""


def test_a_compiled_model_takes_the_kernel_as_it_is():
    # In a process of its own: here mless is type-checked, and no compiler sees through the checks.
    here = Path(__file__).parent
    places = [str(here), str(Path(mless.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[0] == "as it is"


@pytest.mark.parametrize("attached", [True, False])
@torch.inference_mode()
def test_what_is_compiled_ahead_is_what_runs(attached):
    from mless.kernels.redistributing_triton import _kernel

    def compiled():
        return sum(len(caches[0]) for caches in _kernel.device_caches.values())

    loaded = answering("qwen2", dtype=torch.bfloat16, hidden_size=256, intermediate_size=1536)
    loaded.model.cuda()
    settings = arm_settings(fraction=0.3)
    before = compiled()
    compile_redistribution(loaded, settings, attached=attached)
    assert compiled() == before + 1
    seeds, positions = torch.tensor([3, 5]).cuda(), torch.arange(IDS.numel()).view_as(IDS).cuda()
    if attached:
        with arm(loaded, fraction=0.3) as handle:
            handle.rows(seeds=seeds, positions=positions)
            loaded.model(input_ids=IDS.cuda())
    else:
        redistribute(torch.randn(2, 7, 1536).bfloat16().cuda(), settings, seeds=seeds)
    assert compiled() == before + 1
