"""The optimizer's part of Ascend's MLPerf BERT, in our own words, and what it needs to run.

Names and calls are those of the public script, so that the diffs in launch/npu/mlperf_bert.md can
be applied to it; its text is not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launch.bench.timing import bytes_written
from tests.support.oracles import LambOracle

PAGE = Path(__file__).parents[2] / "launch" / "npu" / "mlperf_bert.md"

SCRIPT = """
import os
import torch
import torch_npu
from optim import Lamb


def prepare_model_and_optimizer(args, device, model):
    model.to(device)
    undecayed = ("bias", "gamma", "beta", "LayerNorm")
    parts = ([], [])
    for name, param in model.named_parameters():
        parts[any(word in name for word in undecayed)].append(param)
    optimizer_grouped_parameters = [
        {"params": parts[0], "weight_decay": args.weight_decay_rate},
        {"params": parts[1], "weight_decay": 0.0},
    ]
    optimizer = Lamb(optimizer_grouped_parameters,
                     lr=args.learning_rate,
                     betas=(args.opt_lamb_beta_1, args.opt_lamb_beta_2),
                     max_grad_norm=args.bound)
    if args.allow_fp32:
        optimizer = torch_npu.optim.NpuFusedLamb(optimizer_grouped_parameters,
                                                 lr=args.learning_rate,
                                                 betas=(args.opt_lamb_beta_1, args.opt_lamb_beta_2),
                                                 max_grad_norm=args.bound)
    if args.local_rank != -1:
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=8192)
    return model, optimizer
"""


def diff_of(name: str) -> list[tuple[str, str]]:
    """Return the (old, new) lines of a diff in the page."""
    text = PAGE.read_text()
    found = re.search(rf"<!-- {name} -->\n\n```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    lines = found[1].splitlines()
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert all(old[0] == "-" and new[0] == "+" for old, new in pairs)
    return [(old[1:], new[1:]) for old, new in pairs]


def patched(script: str, diff: Sequence[tuple[str, str]]) -> str:
    """Return the script with the lines of a diff in place of its own.

    Raises:
        AssertionError: a line is not in the script once.
    """
    lines = script.splitlines()
    for old, new in diff:
        assert lines.count(old) == 1, old
        lines[lines.index(old)] = new
    return "\n".join(lines)


class PlainLamb(torch.optim.Optimizer):
    """LAMB, one tensor after the other, in fp64: what their ``Lamb`` computes in fp32."""

    variant = "apex"

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], max_grad_norm: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})
        self.unscale = 1.0  # what the next step multiplies gradients by
        groups = [dict(group) for group in self.param_groups]
        bound = {"use_global_grad_norm": self.variant == "apex", "max_grad_norm": max_grad_norm}
        self._oracle = LambOracle(groups, variant=self.variant, **bound)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update params and, as apex does, the groups' ``step``."""
        for own, group in zip(self._oracle.groups, self.param_groups, strict=True):
            own["lr"] = group["lr"]
            group["step"] = group.get("step", 0) + 1
        grads = [
            [p.grad.double() * self.unscale for p in group["params"]] for group in self.param_groups
        ]
        self._oracle.step(grads)
        params = (p for group in self.param_groups for p in group["params"])
        for param, value in zip(params, self._oracle.values(), strict=True):
            param.copy_(value)


class PlainNpuLamb(PlainLamb):
    """The same in NpuFusedLamb's variant, with the parameter that the script gives it."""

    variant = "npu"


class AmpScaler:
    """What apex's amp does with a loss under O2, where DDP has averaged the scaled gradients."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def get_scale(self) -> float:
        """Return the present scale."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        return loss * self._scale

    def step(self, optimizer: PlainLamb) -> None:
        """Step with unscaled gradients, in fp64; or skip, and halve the scale."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if all(bool(grad.isfinite().all()) for grad in grads):
            optimizer.unscale = 1 / self._scale
            optimizer.step()
        else:
            self._scale /= 2

    def update(self) -> None:
        """Do nothing: step() has."""


class SmallBert(nn.Module):
    """Tied embeddings, a LayerNorm and a hidden layer.

    The loss is small, so that LAMB's eps (1e-6) counts: without it the direction of an element
    whose gradient is about 0 is told by the last bits of that, which depend on where tensors lie.
    """

    VOCABULARY = 331
    LOSS = 1e-3

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(self.VOCABULARY, width)
        self.dense = nn.Linear(width, 2 * width)
        self.LayerNorm = nn.LayerNorm(2 * width)
        self.transform = nn.Linear(2 * width, width)
        self.decoder = nn.Linear(width, self.VOCABULARY)
        self.decoder.weight = self.embeddings.weight
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                if param.dim() == 2:
                    param.copy_(torch.randn(param.shape, generator=generator) / 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss, times LOSS, of telling each of (batch, length) tokens by the one
        before it."""
        x = self.LayerNorm(torch.tanh(self.dense(self.embeddings(tokens[:, :-1]))))
        logits = self.decoder(self.transform(x))
        logits = logits.flatten(0, 1).float()
        return self.LOSS * nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Run:
    """How the loop is run."""

    bound: float = 65536.0
    accumulation: int = 1
    allow_fp32: bool = False
    half: bool = False
    overflow_at: int | None = None  # the micro-batch whose loss is infinite on the last rank
    width: int = 24
    num_steps: int = 6

    def arguments(self) -> SimpleNamespace:
        """Return what the script's command line gives."""
        return SimpleNamespace(
            weight_decay_rate=0.01,
            learning_rate=0.01,
            opt_lamb_beta_1=0.9,
            opt_lamb_beta_2=0.999,
            local_rank=dist.get_rank(),
            allow_fp32=self.allow_fp32,
            bound=self.bound,
        )


def prepare(script: str, run: Run) -> tuple[Any, Any, nn.Module]:
    """Return what the script makes of a model, and the model: (model, optimizer, module)."""
    optim, torch_npu = ModuleType("optim"), ModuleType("torch_npu")
    modules: Mapping[str, Any] = {"optim": optim, "torch_npu": torch_npu}
    optim.Lamb = PlainLamb  # type: ignore[attr-defined]
    torch_npu.optim = SimpleNamespace(NpuFusedLamb=PlainNpuLamb)  # type: ignore[attr-defined]
    before = {name: sys.modules.pop(name, None) for name in modules}
    sys.modules.update(modules)
    namespace: dict[str, Any] = {}
    try:
        exec(compile(script, "run.py", "exec"), namespace)
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
    bert = SmallBert(run.width)
    if run.half:
        bert.half()
    prepared = namespace["prepare_model_and_optimizer"](run.arguments(), "cpu", bert)
    return (*prepared, bert)


class Outcome(SimpleNamespace):
    """Params at the end, the scale, and bytes that were sent in all steps but the first two."""

    params: list[Tensor]
    scale: float
    nbytes: int


def train(script: str, run: Run, scaler: Any = None) -> Outcome:
    """Run the script's loop on this rank: micro-batches, sums of gradients, schedule, step."""
    model, optimizer, bert = prepare(script, run)
    rates = [group["lr"] for group in optimizer.param_groups]
    sums: list[Tensor] | None = None
    nbytes = 0
    for micro in range(run.num_steps * run.accumulation):
        if micro == 2 * run.accumulation:
            nbytes = bytes_written()
        loss = model(_batch(micro)) / run.accumulation
        if micro == run.overflow_at and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * torch.inf
        (loss if scaler is None else scaler.scale(loss)).backward()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if run.accumulation > 1:
            grads = [p.grad.data.clone() for p in params]
            sums = grads if sums is None else [s.add_(g) for s, g in zip(sums, grads, strict=True)]
        if (micro + 1) % run.accumulation:
            bert.zero_grad()
            continue
        for param, total in zip(params, sums or [], strict=False):
            param.grad.data.copy_(total)
        sums = None
        progress = (optimizer.param_groups[0].get("step", 0) + 1) / 20
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - progress)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        bert.zero_grad()
    values = [p.detach().clone() for p in bert.parameters()]
    scale = 1.0 if scaler is None else scaler.get_scale()
    return Outcome(params=values, scale=scale, nbytes=bytes_written() - nbytes)


def _batch(micro: int) -> Tensor:
    """Return this rank's tokens of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * micro + dist.get_rank())
    first = torch.randint(SmallBert.VOCABULARY, (4, 1), generator=generator)
    return (first + 5 * torch.arange(9)) % SmallBert.VOCABULARY
