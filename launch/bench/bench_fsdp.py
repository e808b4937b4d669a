"""A step over parameters that FSDP2 has sharded, against torch's AdamW and Muon, a LAMB by tensors.

Every rank has the local shards of DTensors and of their gradients; nothing else runs. All
optimizers step in turn in the same processes. A LAMB by tensors makes a collective for each norm.
Muon is also measured on whole tensors: torch's on each rank, and ours at stage 1.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from launch.bench.launches import LaunchError, run_ranks
from launch.bench.options import Options, Row
from launch.bench.timing import median
from shardfuse import ShardedAdamW, ShardedLamb, ShardedMuon

WORLD_SIZE = 2
ROUNDS = 3
REPEATS = 10
WIDTH = 256
NUM_TENSORS = (48, 300)
MUON_REPEATS = 2
MUON_WIDTH = 192
MUON_TENSORS = (48,)
_WARM_UP = 2
_LR = 1e-3


class TensorLamb(torch.optim.Optimizer):
    """LAMB as in timm and apex, tensor by tensor; over DTensors each norm is a collective."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": _LR, "betas": (0.9, 0.999), "decay": 0.01})
        self._step = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every tensor by the ratio of its norms."""
        self._step += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["m"], state["v"]
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (v / (1 - beta2**self._step)).sqrt() + 1e-6
                u = m / (1 - beta1**self._step) / root + group["decay"] * p
                ratio = p.norm().full_tensor() / u.norm().full_tensor()
                p.add_(u, alpha=-group["lr"] * float(ratio))


class TorchMuon:
    """torch.optim.Muon for matrices, the only tensors that it takes, and AdamW for the rest."""

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        matrices = [pair for pair in params if pair[1].dim() == 2]
        others = [pair for pair in params if pair[1].dim() != 2]
        self._parts = torch.optim.Muon(matrices, lr=_LR), torch.optim.AdamW(others, lr=_LR)

    def step(self) -> None:
        """Update all tensors."""
        for part in self._parts:
            part.step()


Methods = Mapping[str, Callable[[list[tuple[str, nn.Parameter]]], Any]]

METHODS: Methods = {
    "ShardedAdamW": functools.partial(ShardedAdamW, lr=_LR),
    "ShardedLamb": functools.partial(ShardedLamb, lr=_LR, variant="nvlamb"),
    "torch AdamW, foreach": functools.partial(torch.optim.AdamW, lr=_LR, foreach=True),
    "torch AdamW, fused": functools.partial(torch.optim.AdamW, lr=_LR, fused=True),
    "LAMB by tensors": TensorLamb,
}

MUONS: Methods = {
    "ShardedMuon": functools.partial(ShardedMuon, lr=_LR),
    "torch Muon": TorchMuon,
    "ShardedMuon, stage 1": functools.partial(ShardedMuon, lr=_LR),
    "torch Muon, replicated": TorchMuon,
}
"""Newton-Schulz iterations take most of their time, so they are launched apart from the others."""

WHOLE = ("ShardedMuon, stage 1", "torch Muon, replicated")
"""Those over whole tensors. At stage 1 a step has its reduce-scatter and all-gather, too."""


def shapes(num_tensors: int, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of blocks of a transformer, twelve tensors each."""
    vectors = [(width,)] * 6
    matrices = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    return [*matrices, *vectors] * (num_tensors // 12)


def measure(names: Sequence[str], num_tensors: int, width: int, repeats: int) -> dict[str, Any]:
    """Return for each method the times of steps and of this thread in them, in ms."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def put(value: Tensor) -> Any:
        return distribute_tensor(value, mesh, [Shard(0)])

    optimizers = {}
    for name in names:
        torch.manual_seed(0)
        place = (lambda value: value) if name in WHOLE else put
        params = [nn.Parameter(place(torch.randn(s))) for s in shapes(num_tensors, width)]
        grads = [place(torch.randn(param.shape)) for param in params]
        optimizers[name] = {**METHODS, **MUONS}[name]([(str(i), p) for i, p in enumerate(params)])
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index in range(_WARM_UP + repeats):
        for name, optimizer in optimizers.items():
            dist.barrier()
            start, thread = time.perf_counter(), time.thread_time()
            optimizer.step()
            own = (time.perf_counter() - start) * 1e3, (time.thread_time() - thread) * 1e3
            if index >= _WARM_UP:
                times[name].append(own)
    return {"times": times}


def run(options: Options) -> Iterator[Row]:
    """Yield a row per method, number of tensors and launch."""
    parts = (
        (METHODS, NUM_TENSORS, WIDTH, REPEATS),
        (MUONS, MUON_TENSORS, MUON_WIDTH, MUON_REPEATS),
    )
    for index in range(options.num_rounds(ROUNDS)):
        for methods, sizes, width, repeats in parts:
            names = [name for name in methods if options.wants(name)]
            if not names:
                continue
            for num_tensors in (12,) if options.quick else sizes:
                arguments = {
                    "names": names,
                    "num_tensors": num_tensors,
                    "width": 16 if options.quick else width,
                    "repeats": 2 if options.quick else repeats,
                }
                yield from _launch(index, arguments)


def _launch(index: int, arguments: dict[str, Any]) -> Iterator[Row]:
    names, num_tensors = arguments["names"], arguments["num_tensors"]
    try:
        ranks = run_ranks("launch.bench.bench_fsdp:measure", arguments, world_size=WORLD_SIZE)
    except LaunchError as error:
        print(error, flush=True)
        yield from ({"method": name, "round": index, "note": "failed"} for name in names)
        return
    for name in names:
        wall, thread = zip(*ranks[0]["times"][name], strict=True)
        yield {
            "method": name,
            "tensors": num_tensors,
            "width": arguments["width"],
            "round": index,
            "step_ms": round(median(wall), 3),
            "thread_ms": round(median(thread), 3),
            "thread_us_per_tensor": round(median(thread) / num_tensors * 1e3, 2),
            "note": "",
        }
