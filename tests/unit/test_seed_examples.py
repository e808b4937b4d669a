"""The official examples of torch_npu's fused optimizers run, one import line changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.harness import run_threads
from tests.support.oracles import AdamOracle, BertAdamOracle, LambOracle, Oracle, SGDOracle
from tests.support.placing import on_device

# The example of the four pages; they differ in the class and its options only.
EXAMPLE = """\
import torch
from torch_npu.npu.amp import GradScaler, autocast
from torch_npu.optim import {name}

def _create_simple_params_and_grads():
    params = [
        torch.arange(6).reshape(2, 3).float().npu(),
        torch.arange(12).reshape(4, 3).float().npu(),
        torch.arange(6).reshape(2, 3).half().npu(),
        torch.arange(12).reshape(4, 3).half().npu(),
        torch.arange(15).reshape(5, 3).float().npu(),
        torch.arange(18).reshape(6, 3).half().npu(),
        torch.arange(6).reshape(2, 3).float().npu()
    ]

    for i, p in enumerate(params):
        if i < len(params) - 1:
            p.requires_grad = True
            p.grad = p.clone().detach() / 100.

    return params

opt_kwargs = {options}
params = _create_simple_params_and_grads()
fused_opt = {name}(params, **opt_kwargs)
with torch.no_grad():
    fused_opt.step()
"""

# name: (options as written, reference).
PAGES: dict[str, tuple[str, type[Oracle]]] = {
    "NpuFusedLamb": ("dict(lr=0.01, eps=1e-5)", LambOracle),
    "NpuFusedAdam": (
        "dict(eps=1e-8, betas=(0.9, 0.999), lr=2e-3, weight_decay=0.05)",
        AdamOracle,
    ),
    "NpuFusedSGD": ("dict(lr=0.01, momentum=0.9, weight_decay=0.001)", SGDOracle),
    "NpuFusedBertAdam": ("dict(lr=0.01, warmup=0.1, t_total=20, max_grad_norm=-1)", BertAdamOracle),
}

# fp32 parameters: rounding of the update. fp16 ones are the fp32 master rounded once: half an ulp.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2.0**-11}


def port(name: str) -> str:
    """Return the example with our import, and the unused one dropped; on the CPU no `.npu()`."""
    code = EXAMPLE.format(name=name, options=PAGES[name][0])
    code = code if on_device() else code.replace(".npu()", "")
    code = code.replace("from torch_npu.npu.amp import GradScaler, autocast\n", "")
    old = f"from torch_npu.optim import {name}"
    assert old in code
    return code.replace(old, f"from shardfuse.optim.npu import {name}")


def run_example(name: str, num_steps: int) -> None:
    """Run the example, and its step again until there were `num_steps`; look at what it left."""
    code = port(name)
    assert "torch_npu" not in code
    namespace: dict[str, Any] = {}
    exec(compile(code, name, "exec"), namespace)
    for _ in range(num_steps - 1):
        namespace["fused_opt"].step()
    check_example(name, num_steps, namespace)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("name", PAGES)
def test_example(name: str, num_steps: int, num_ranks: int) -> None:
    """The example runs, and after it and three more steps the parameters are the reference's.

    Ranks all make the same gradients, whose mean is what each has.
    """
    if num_ranks == 1:
        run_example(name, num_steps)
    else:
        run_threads(num_ranks, run_example, name, num_steps)


def check_example(name: str, num_steps: int, namespace: dict[str, Any]) -> None:
    params: list[torch.Tensor] = namespace["params"]
    start: list[torch.Tensor] = namespace["_create_simple_params_and_grads"]()
    oracle = PAGES[name][1]([{"params": start}], **namespace["opt_kwargs"])
    for _ in range(num_steps):
        oracle.step([[p.grad for p in start]])
    for param, first, value in zip(params, start, oracle.values(), strict=True):
        assert torch.isfinite(param).all()
        error = (param.detach().double() - value).abs().max()
        assert error <= TOLERANCES[param.dtype] * value.abs().max()
        assert torch.equal(param.grad, first.grad) if first.requires_grad else param.grad is None
    moved = [not torch.equal(p.detach(), q.detach()) for p, q in zip(params, start, strict=True)]
    # With a warm-up BertAdam's first step has learning rate 0; SGD's is below an fp16 ulp here.
    warm = num_steps > 1 or name != "NpuFusedBertAdam"
    assert [moved[index] for index in (0, 1, 4)] == [warm] * 3
    assert not moved[6]
