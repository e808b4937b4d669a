"""Whole scripts of users, moved from DistributedDataParallel by the edits that README gives.

Each has the shape of a public project: nanoGPT, minGPT with DDP, timm, NVIDIA's BERT, a fine-tuning
with LoRA, and Fabric's own trainer. It runs as it was, and moved in each way that it allows:

    handed over   the DDP line is dropped, and the model is passed in place of its parameters
    grouped       the DDP line is dropped, parameters are passed in groups, and broadcast_buffers()
                  gets the model
    kept          the DDP line stays, and only the name of the optimizer's class changes

Losses, norms, the model, its average and torch's checkpoint are those of the script as it was.
The first rank alone saves, and each version continues from the other's file.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardfuse
from tests.support.harness import run_procs

pytestmark = pytest.mark.timeout(240)

NUM_STEPS, SAVED_AT = 6, 3

Result = dict[str, Tensor]


class Edits:
    """The lines of a script that are not the same in all versions."""

    def __init__(self, way: str, **sharding: Any) -> None:
        self.way = way
        self.sharding = {"bucket_cap_mb": 0.002, "kernel": "eager", **sharding}
        self.is_wrapped = way in ("original", "kept")

    def wrap(self, model: nn.Module, **options: Any) -> Any:
        return DistributedDataParallel(model, **options) if self.is_wrapped else model

    def optimizer(self, name: str, model: nn.Module, groups: Any = None, **options: Any) -> Any:
        """Build the optimizer of these groups, or of all parameters, frozen ones too."""
        params = groups or list(model.parameters())
        if self.way == "original":
            return (OwnLamb if name == "Lamb" else getattr(torch.optim, name))(params, **options)
        if self.way == "handed over":
            assert groups is None
            params = model
        optimizer = getattr(shardfuse, f"Sharded{name}")(params, **options, sharding=self.sharding)
        if self.way == "grouped":
            optimizer.broadcast_buffers(model)
        return optimizer

    def lamb(self) -> dict[str, Any]:
        return (
            {}
            if self.way == "original"
            else {"variant": "apex", "use_global_grad_norm": True, "max_grad_norm": 1.0}
        )

    def clip(self, optimizer: Any, params: Iterable[Tensor], max_norm: float) -> Tensor:
        norm: Tensor = (nn.utils if self.is_wrapped else optimizer).clip_grad_norm_(
            params, max_norm
        )
        return norm.detach()

    def no_sync(self, wrapped: Any, optimizer: Any) -> Any:
        return (wrapped if self.is_wrapped else optimizer).no_sync()

    def save(self, file: Path, optimizer: Any, **values: Any) -> None:
        """Save on the first rank alone. Before it stands the only line that is new."""
        if self.way != "original":
            optimizer.consolidate_state_dict()
        if dist.get_rank() == 0:
            torch.save({**values, "optimizer": optimizer.state_dict()}, file)
        dist.barrier()  # so that the test may read the file


class OwnLamb(torch.optim.Optimizer):
    """LAMB as NVIDIA's BERT has it in CUDA, with its clip; groups have the step."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(param))
                grad = param.grad / norm.clamp(min=1.0)
                mean = state["exp_avg"].lerp_(grad, 0.1)
                square = state["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
                update = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-6)
                update += group["weight_decay"] * param
                adapts = group["weight_decay"] != 0
                ratio = param.norm() / update.norm() if adapts else 1.0
                param.sub_(group["lr"] * ratio * update)


def draw(step: int, micro: int, *shape: int) -> Tensor:
    """Return this rank's data of a step, the same in a run that continues."""
    seed = 1000 * step + 10 * micro + dist.get_rank()
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(step: int, micro: int, *shape: int) -> Tensor:
    return draw(step, micro, *shape).mul(100).long().remainder(16)


def next_token_loss(logits: Tensor, text: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def only_on_first_rank(evaluate: Callable[[], Tensor]) -> Tensor:
    """Evaluate on the first rank alone, as nanoGPT does, and return the result on every rank."""
    found = evaluate().float() if dist.get_rank() == 0 else torch.zeros(())
    dist.broadcast(found, 0)
    return found


# The scripts: each is called with the step that it continues from, 0 or SAVED_AT, and the file.
# Until it has built all, each rank draws other numbers, as scripts that seed by rank do.

Script = Callable[[Edits, int, Path, Path], Result]


class Block(nn.Module):
    """Attention by two linear layers, as nanoGPT has it, whose LayerNorms have no bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size, bias=False)
        self.attention = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.attention(self.norm(x)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + self.out(mixed)


class NanoGPT(nn.Module):
    """Has an embedding that is tied to the head, and no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 24)
        self.blocks = nn.Sequential(Block(24), Block(24))
        self.head = nn.Linear(24, 16, bias=False)
        self.embedding.weight = self.head.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(text)))


def nano_gpt(edits: Edits, start: int, loaded: Path, saved: Path) -> Result:
    """Groups by dimension, a rate set by hand, three micro-batches, an evaluation on one rank."""
    model = NanoGPT()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if start:
        checkpoint = torch.load(loaded)
        model.load_state_dict(checkpoint["model"])
    optimizer = edits.optimizer("AdamW", model, groups, lr=0.01, betas=(0.9, 0.95))
    if start:
        optimizer.load_state_dict(checkpoint["optimizer"])
    wrapped = edits.wrap(model)
    result: Result = {}
    for step in range(start, NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (step + 1) / 3)
        if step == SAVED_AT:

            def evaluate() -> Tensor:
                model.eval()
                with torch.no_grad():
                    loss = next_token_loss(wrapped(tokens(99, 0, 3, 10)), tokens(99, 0, 3, 10))
                model.train()
                return loss

            result["evaluated"] = only_on_first_rank(evaluate)
            edits.save(saved, optimizer, model=model.state_dict())
        for micro in range(3):
            if edits.is_wrapped:
                wrapped.require_backward_grad_sync = micro == 2
            text = tokens(step, micro, 3, 10)
            paused = not edits.is_wrapped and micro < 2
            with optimizer.no_sync() if paused else nullcontext():
                loss = next_token_loss(wrapped(text), text) / 3
                loss.backward()
            result[f"loss {step}, {micro}"] = loss.detach()
        result[f"norm {step}"] = edits.clip(optimizer, wrapped.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return result | model.state_dict()


class MinGPT(nn.Module):
    """Has torch's own attention, which reads several parameters at once, and its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 24)
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 2, bias=False, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, 16, bias=False)
        self.register_buffer("mask", torch.ones(10, 10).triu(1).bool())

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return self.head(x + self.mlp(x))


def min_gpt(edits: Edits, start: int, loaded: Path, saved: Path) -> Result:
    """The optimizer is older than the wrapper and than the snapshot, which all ranks load."""
    model = MinGPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = edits.optimizer("AdamW", model, groups, lr=0.01, eps=1e-6)
    if start:
        snapshot = torch.load(loaded, map_location="cpu")
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
    wrapped = edits.wrap(model)
    result: Result = {}
    for step in range(start, NUM_STEPS):
        if step == SAVED_AT:
            edits.save(saved, optimizer, model=model.state_dict())
            with torch.no_grad():
                text = tokens(99, 0, 3, 10)
                result["evaluated"] = next_token_loss(wrapped(text), text)
        text = tokens(step, 0, 3, 10)
        loss = next_token_loss(wrapped(text), text)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        result[f"loss {step}"] = loss.detach()
        result[f"norm {step}"] = edits.clip(optimizer, wrapped.parameters(), 0.3)
        optimizer.step()
    return result | model.state_dict()


class Images(nn.Module):
    """Has BatchNorms, and a mean of its inputs, with which the next forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.randn(3, 1, 1))
        self.convs = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 12, 3, bias=False),
            nn.BatchNorm2d(12),
            nn.SiLU(),
        )
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        inputs = x * (1 + self.center)  # a BatchNorm would undo a sum
        if self.training:
            self.center.lerp_(x.mean(dim=(0, 2, 3))[:, None, None], 0.3)
        return self.head(self.convs(inputs).mean(dim=(2, 3)))


def timm(edits: Edits, start: int, loaded: Path, saved: Path) -> Result:
    """BatchNorms, an average of the weights, a scheduler, statistics sent at an epoch's end."""
    model = Images()
    norms = [p for p in model.parameters() if p.dim() < 2]
    rest = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": rest}]
    optimizer = edits.optimizer("AdamW", model, groups, lr=0.01, weight_decay=0.05, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    if start:
        checkpoint = torch.load(loaded)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    wrapped = edits.wrap(model)  # timm itself makes the average before, of other weights per rank
    average = copy.deepcopy(model)
    if start:
        average.load_state_dict(checkpoint["average"])
    result: Result = {}
    for step in range(start, NUM_STEPS):
        if step == SAVED_AT and not start:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
            model.eval()
            with torch.inference_mode():
                result["evaluated"] = model(draw(99, 0, 4, 3, 8, 8)).sum()
                result["average evaluated"] = average.eval()(draw(99, 0, 4, 3, 8, 8)).sum()
            model.train()
            kept = {"average": average.state_dict(), "scheduler": scheduler.state_dict()}
            edits.save(saved, optimizer, model=model.state_dict(), **kept)
        for micro in range(2):
            x = draw(step, micro, 4, 3, 8, 8)
            with edits.no_sync(wrapped, optimizer) if micro < 1 else nullcontext():
                loss = F.cross_entropy(wrapped(x), x[:, 0, 0, :4].argmax(1)) / 2
                loss.backward()
            result[f"loss {step}, {micro}"] = loss.detach()
        result[f"norm {step}"] = edits.clip(optimizer, model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                mine = average.state_dict()[name]
                mine.lerp_(value, 0.3) if mine.is_floating_point() else mine.copy_(value)
    averages = {f"average {name}": value for name, value in average.state_dict().items()}
    return result | model.state_dict() | averages


class Poly(torch.optim.lr_scheduler.LRScheduler):
    """NVIDIA's schedule, which asks the optimizer's group for the step."""

    def step(self, epoch: int | None = None) -> None:
        done = (int(self.optimizer.param_groups[0].get("step", 0)) + 1) / (NUM_STEPS + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02 * (done / 0.3 if done < 0.3 else (1 - done) ** 0.5)


def bert(edits: Edits, start: int, loaded: Path, saved: Path) -> Result:
    """LAMB with a schedule that reads the group's step; DDP's gradients are views of its bucket."""
    layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(16, 24), layer, nn.Linear(24, 16))
    named = list(model.named_parameters())
    rest = [p for n, p in named if "bias" in n or "norm" in n]
    decay = [p for n, p in named if not ("bias" in n or "norm" in n)]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    if start:
        checkpoint = torch.load(loaded)
        model.load_state_dict(checkpoint["model"])
    optimizer = edits.optimizer("Lamb", model, groups, lr=0.02, **edits.lamb())
    scheduler = Poly(optimizer)
    if start:
        optimizer.load_state_dict(checkpoint["optimizer"])
    wrapped = edits.wrap(model, gradient_as_bucket_view=True)
    result: Result = {}
    for step in range(start, NUM_STEPS):
        if step == SAVED_AT:
            edits.save(saved, optimizer, model=model.state_dict())
        for micro in range(2):
            text = tokens(step, micro, 3, 10)
            with edits.no_sync(wrapped, optimizer) if micro < 1 else nullcontext():
                loss = F.cross_entropy(wrapped(text).flatten(0, 1), text.flatten()) / 2
                loss.backward()
            result[f"loss {step}, {micro}"] = loss.detach()
        scheduler.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    # Keys have no use for their bias: its gradient is rounding alone.
    return result | {n: v for n, v in model.state_dict().items() if "in_proj_bias" not in n}


class Adapted(nn.Module):
    """A frozen layer with a low-rank part that is trained."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, size) / size)
        self.up = nn.Parameter(torch.zeros(size, 2))
        self.register_buffer("scale", torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.base(x) * self.scale + x @ self.down.t() @ self.up.t()
        merged = self.base.weight * self.scale[:, None] + self.up @ self.down
        return F.linear(x, merged, self.base.bias * self.scale)


def lora(edits: Edits, start: int, loaded: Path, saved: Path) -> Result:
    """A frozen model with adapters and buffers; half of it is averaged by hand as it trains."""
    model = nn.Sequential(Adapted(12), nn.BatchNorm1d(12), nn.Tanh(), Adapted(12), nn.Linear(12, 1))
    if start:
        checkpoint = torch.load(loaded)
        model.load_state_dict(checkpoint["model"])
    optimizer = edits.optimizer("Adam", model, lr=0.01, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if start:
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    wrapped = edits.wrap(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    average = {name: param.detach().clone() for name, param in trained.items()}
    if start:
        average = checkpoint["average"]
    result: Result = {}
    for step in range(start, NUM_STEPS):
        if step == SAVED_AT:

            def evaluate() -> Tensor:
                model.eval()
                found = model(torch.ones(2, 12)).detach().sum()
                model.train()
                return found

            result["evaluated"] = only_on_first_rank(evaluate)
            kept = {"average": average, "scheduler": scheduler.state_dict()}
            edits.save(saved, optimizer, model=model.state_dict(), **kept)
        x = draw(step, 0, 6, 12)
        loss = (wrapped(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        result[f"loss {step}"] = loss.detach()
        result[f"norm {step}"] = edits.clip(optimizer, trained.values(), 2.0)
        optimizer.step()
        scheduler.step()
        for name, param in trained.items():
            average[name] = 0.7 * average[name] + 0.3 * param.detach()
    return result | model.state_dict() | {f"average {n}": v for n, v in average.items()}


def fabric(edits: Edits, start: int, loaded: Path, saved: Path) -> Result:
    """step() gets a closure that runs forward and backward; the rate follows a metric."""
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Dropout(0.2), nn.Linear(20, 1))
    optimizer = edits.optimizer("SGD", model, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    wrapped = edits.wrap(model)
    if start:
        state = torch.load(loaded)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    result: Result = {}
    for step in range(start, NUM_STEPS):
        if step == SAVED_AT:
            kept = {"model": model.state_dict(), "scheduler": scheduler.state_dict()}
            edits.save(saved, optimizer, **kept)

        def closure(step: int = step) -> Tensor:
            torch.manual_seed(100 * step + dist.get_rank())
            x = draw(step, 0, 6, 12)
            loss: Tensor = (wrapped(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        result[f"loss {step}"] = optimizer.step(closure).detach()
        optimizer.zero_grad()
        scheduler.step(float(step % 3))
    return result | model.state_dict()


SCRIPTS: dict[str, tuple[Script, tuple[str, str]]] = {
    "nanoGPT": (nano_gpt, ("grouped", "kept")),
    "minGPT": (min_gpt, ("grouped", "kept")),
    "timm": (timm, ("grouped", "kept")),
    "BERT": (bert, ("grouped", "kept")),
    "LoRA": (lora, ("handed over", "kept")),
    "Fabric": (fabric, ("handed over", "kept")),
}


def differences(name: str, way: str, sharding: dict[str, Any]) -> list[str]:
    """Run a script as it was, and moved; return what differs on this rank by more than rounding.

    Of the first rank's results and others' losses, norms and parameters: DistributedDataParallel
    leaves other ranks' buffers as their last forward has made them.
    """
    script, _ = SCRIPTS[name]
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, 0)
    folder = Path(folders[0])
    expected: Result = {}
    different = []
    # version, whose file it continues from
    runs = (("original", ""), (way, ""), (way, "original"), ("original", way), (way, way))
    for version, loaded in runs:
        torch.manual_seed(1337 + len(loaded) + dist.get_rank())  # a continued run begins otherwise
        start, saved = (SAVED_AT, folder / "again") if loaded else (0, folder / version)
        found = script(Edits(version, **sharding), start, folder / (loaded or "none"), saved)
        found = {key: value.detach().clone() for key, value in found.items()}
        expected = expected or found
        assert loaded or found.keys() == expected.keys()
        for key in found.keys() & expected.keys():
            is_buffer = "running" in key or "tracked" in key or key == "center"
            if dist.get_rank() > 0 and (is_buffer or key.startswith("average")):
                continue
            if not torch.allclose(found[key], expected[key], rtol=2e-5, atol=2e-6):
                by = (found[key] - expected[key]).abs().max()
                different.append(f"{version} from {loaded or 'scratch'}: {key} by {by:.2g}")
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return different


def moved(names: list[str], ways: tuple[int, ...], sharding: dict[str, Any]) -> list[str]:
    """Return what differs in which script and way; 1 is that in which the wrapper is kept."""
    texts = []
    for name in names:
        for way in ways:
            found = differences(name, SCRIPTS[name][1][way], sharding)
            texts += [f"{name}: {text}" for text in found]
    return texts


def test_moved_scripts_train_as_before() -> None:
    """Each in each way, on one host: the same losses, tensors and checkpoints."""
    assert run_procs(2, moved, list(SCRIPTS), (0, 1), {}, timeout=230) == [[], []]


@pytest.mark.parametrize("collectives", ["pairwise", "native"])
def test_over_other_transports(collectives: str) -> None:
    """Over sockets, params are in flight as forward, clip, average, evaluation and save begin."""
    found = run_procs(2, moved, list(SCRIPTS), (0, 1), {"collectives": collectives}, timeout=230)
    assert found == [[], []]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("collectives", ["auto", "pairwise"])
def test_with_sharded_gradients(collectives: str, num_ranks: int) -> None:
    """Stage 2, for which the wrapper is dropped."""
    sharding = {"stage": 2, "collectives": collectives}
    assert not any(run_procs(num_ranks, moved, list(SCRIPTS), (0,), sharding, timeout=230))
