"""How many values each variant of ARM changes in layer 1 of the embedded model, and how far the choices agree.

python benchmarks/arm_variants.py
"""

from __future__ import annotations

import torch

import mless
from mless.models.activations import activation_points


def main() -> None:
    model = mless.load("smollm2", layers=1)
    prompts = mless.prompts(model, mless.items("bundled"), "none", prompt="raw")
    point = activation_points(model.model, [1])[0]
    counts = {"row-stable": 0, "released": 0, "both": 0, "all": 0}
    for prompt in prompts:
        kept: list[torch.Tensor] = []
        hook = point.act.register_forward_hook(lambda _module, _given, output, kept=kept: kept.append(output.detach()))
        with torch.no_grad():
            model.model(input_ids=torch.tensor([prompt.token_ids]))
        hook.remove()
        values = kept[0].reshape(1, -1, kept[0].shape[-1]).float()
        chosen = {name: mless.redistribute(values, variant=name) != values for name in ("row-stable", "released")}
        counts["all"] += values.numel()
        counts["both"] += int((chosen["row-stable"] & chosen["released"]).sum())
        for name, some in chosen.items():
            counts[name] += int(some.sum())
    for name in ("row-stable", "released"):
        print(f"{name}: {100 * counts[name] / counts['all']:.1f} % of values changed")
    either = counts["row-stable"] + counts["released"] - counts["both"]
    of_released, of_either = (100 * counts["both"] / whole for whole in (counts["released"], either))
    print(f"changed by both: {of_released:.0f} % of what released changes, {of_either:.0f} % of what either does")


if __name__ == "__main__":
    main()
