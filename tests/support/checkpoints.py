"""A model with one of every kind of parameter, trained alike at every number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedGradScaler
from tests.support.placing import device_type
from tests.support.runs import assert_bitwise

SHARDING = {"kernel": "eager", "bucket_cap_mb": 0.005, "consolidate_every": 0}


class Everything(nn.Module):
    """Cut over ranks and buckets, tied, strided, empty, frozen, in two dtypes; and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 40))
        self.tied = nn.Linear(40, 50, bias=False)
        self.tied.weight = self.body[0].weight
        self.conv = nn.Parameter(torch.zeros(7, 3, 5, 5).to(memory_format=torch.channels_last))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.ones(0, 3))
        self.halved = nn.Parameter(torch.zeros(1100, dtype=torch.bfloat16))
        self.late = nn.Parameter(torch.zeros(700))
        self.frozen = nn.Parameter(torch.ones(30), requires_grad=False)
        self.outside = nn.Parameter(torch.ones(5), requires_grad=False)  # in no optimizer
        self.register_buffer("counter", torch.zeros(3, dtype=torch.int64))
        generator = torch.Generator().manual_seed(seed)  # ranks that are threads share the default
        with torch.no_grad():
            for value in [*self.parameters(), *self.buffers()]:
                value.copy_(torch.randint(-8, 9, value.shape, generator=generator))

    def set_extra_state(self, state: Any) -> None:
        """Keep something that is no tensor."""
        self.noted = state

    def get_extra_state(self) -> Any:
        """Return it."""
        return getattr(self, "noted", {"seen": 0})


class Job:
    """What a training loop has.

    Args:
        build: an optimizer of (groups, sharding=...).
        sharding: more of its configuration.
        seed: of the first values, which a checkpoint replaces.
        num_micro: how often backward() is called for a step, all but the last time in no_sync();
            0: gradients are set by hand.
        dtype: of all parameters; None: most are fp32, one is bf16.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        sharding: dict[str, Any] | None = None,
        seed: int = 0,
        num_micro: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model = Everything(seed).to(dtype)
        named = {n: p for n, p in self.model.named_parameters() if n != "outside"}
        late = [(name, named.pop(name)) for name in ("late", "frozen")]
        groups = [
            {"params": list(named.items())},
            {"params": late, "lr": 0.25, "weight_decay": 0.5},
        ]
        self.optimizer = build(groups, lr=0.125, sharding={**SHARDING, **(sharding or {})})
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = ShardedGradScaler(device_type(), init_scale=4.0, growth_interval=2)
        self.step = 0
        self._num_micro = num_micro

    @property
    def objects(self) -> dict[str, Any]:
        """What is saved and loaded; of values, a copy."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "step": self.step,
            "list": [1, {"a": torch.tensor([self.step])}],
        }

    def train(self, num_steps: int) -> None:
        """Take steps by integer-valued gradients, of which the mean is the same at every world."""
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(self.step)
            if self._num_micro:
                self._accumulate(generator)
            else:
                self.scaler.scale(torch.ones(()))  # as a loss would be
                for param, grad in self._grads(generator):
                    param.grad = (grad * self.scaler.get_scale()).to(param.dtype)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            self.model.counter += 1
            self.model.noted = {"seen": self.step}

    def _grads(self, generator: torch.Generator) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters and their gradients, which the first rank has for all."""
        scale = float(dist.get_world_size()) if dist.get_rank() == 0 else 0.0
        for name, param in self.model.named_parameters():
            if param.requires_grad and not (name == "late" and self.step < 2):
                yield param, torch.randint(-4, 5, param.shape, generator=generator) * scale

    def _accumulate(self, generator: torch.Generator) -> None:
        """Make gradients by backward(), each time others."""
        for micro in range(self._num_micro):
            is_last = micro == self._num_micro - 1
            with nullcontext() if is_last else self.optimizer.no_sync():
                grads = self._grads(generator)
                loss = sum((param * grad.to(param.dtype)).sum().float() for param, grad in grads)
                self.scaler.scale(loss).backward()

    def values(self) -> dict[str, Any]:
        """Return copies of everything, by key, whole."""
        self.optimizer.consolidate_state_dict(to=None)
        optimizer = self.optimizer.state_dict()
        found: dict[str, Any] = {"step": self.step, "groups": optimizer["param_groups"]}
        found["scheduler"], found["scaler"] = self.scheduler.state_dict(), self.scaler.state_dict()
        for param, states in optimizer["state"].items():
            found |= {f"state.{param}.{key}": value for key, value in states.items()}
        for key, value in self.model.state_dict().items():
            found[f"model.{key}"] = value.clone() if isinstance(value, Tensor) else dict(value)
        return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare key by key, tensors bit by bit."""
    assert found.keys() == expected.keys()
    for key in found:
        if isinstance(found[key], Tensor):
            assert_bitwise([found[key]], [expected[key]])
        else:
            assert found[key] == expected[key], key
