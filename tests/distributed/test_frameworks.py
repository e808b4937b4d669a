"""Lightning's and Accelerate's own loops, with their clipping, on two ranks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardfuse import ShardedAdamW
from tests.support.harness import run_procs

pytestmark = pytest.mark.timeout(240)

needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)

NUM_STEPS = 6
# Where the gradients are averaged, and who clips.
SHARDING: dict[str, dict[str, Any]] = {
    "reduced": {"grads_are_reduced": True},
    "option": {"grads_are_reduced": True, "clip_grad_norm": 0.5},
    "alone": {"clip_grad_norm": 0.5},
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def optimizer_over(model: nn.Module, mode: str) -> Any:
    """Return torch's AdamW, or ours."""
    if mode == "torch":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return ShardedAdamW(model.parameters(), lr=1e-2, sharding=SHARDING[mode])


def data() -> TensorDataset:
    inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, 5 * inputs.sum(1, keepdim=True))


def be_launched() -> None:
    """Look like a rank that torchrun has started; the process group is there already."""
    os.environ.update(
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID="test",
        ACCELERATE_USE_CPU="true",
    )


def lightning_job(mode: str, precision: str, folder: str) -> tuple[list[Tensor], float]:
    """Fit by lightning.Trainer under DDP, as lightning_ddp.py does; return values and the rate."""
    be_launched()
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_over(self, mode)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    module = Net()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=NUM_STEPS,
        precision=precision,  # type: ignore[arg-type]
        gradient_clip_val=None if mode == "option" else 0.5,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(), batch_size=8))
    assert trainer.global_step == NUM_STEPS
    values = [param.detach().clone() for param in module.parameters()]
    return values, trainer.optimizers[0].param_groups[0]["lr"]


def lightning_refusal() -> str:
    """Have Lightning clip gradients that nothing has averaged."""
    be_launched()
    from lightning.pytorch.plugins.precision import MixedPrecision

    model = net()
    optimizer = ShardedAdamW(model.parameters(), lr=1e-2)
    try:
        MixedPrecision("bf16-mixed", "cpu").clip_gradients(optimizer, 0.5)
    except RuntimeError as error:
        return str(error)
    return ""


LIGHTNING = [
    (mode, precision)
    for precision in ("bf16-mixed", "16-mixed", "32-true")
    for mode in ("torch", "reduced", "option")
    # A plain scaler unscales p.grad for Lightning's clip alone.
    if (mode, precision) != ("option", "16-mixed")
]


def lightning_jobs(folder: str) -> tuple[list[Any], str]:
    """Run all in one pair of processes: importing Lightning takes longer than they do."""
    return [lightning_job(*job, folder) for job in LIGHTNING], lightning_refusal()


@needs_lightning
@pytest.mark.cpu_only("it is told to take the CPU")
def test_lightning(tmp_path: Path) -> None:
    """gradient_clip_val works in all precisions, and so does the option in its place.

    Without grads_are_reduced p.grad is this rank's own, and Lightning refuses to clip that.
    """
    ranks = run_procs(2, lightning_jobs, str(tmp_path), timeout=220)
    expected = dict(zip(LIGHTNING, ranks[0][0], strict=True))
    for results, refusal in ranks:
        for (mode, precision), (values, lr) in zip(LIGHTNING, results, strict=True):
            reference, its_lr = expected["torch", precision]
            assert lr == pytest.approx(its_lr)
            for a, b in zip(values, reference, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=f"{mode} {precision}")
        assert "does not allow for gradient clipping" in refusal


def accelerate_job(mode: str) -> list[Tensor]:
    """Train as Accelerate's examples do, two micro-batches a step; return the values."""
    be_launched()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = net()
    optimizer = optimizer_over(model, mode)
    loader: Any = DataLoader(data(), batch_size=4)
    if mode == "alone":
        optimizer, loader = accelerator.prepare(optimizer, loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward((model(batch[0]) - batch[1]).square().mean())
            if accelerator.sync_gradients and "clip_grad_norm" not in SHARDING.get(mode, {}):
                assert accelerator.clip_grad_norm_(model.parameters(), 0.5) > 0.5
            optimizer.step()
            optimizer.zero_grad()
        if index == 2 * NUM_STEPS - 1:
            break
    return [param.detach().clone() for param in model.parameters()]


ACCELERATE = ["torch", "reduced", "option", "alone"]


def accelerate_jobs() -> list[list[Tensor]]:
    return [accelerate_job(mode) for mode in ACCELERATE]


@needs_accelerate
@pytest.mark.cpu_only("it is told to take the CPU")
def test_accelerate() -> None:
    """accelerator.clip_grad_norm_ under DDP; the option, also for a model that is not wrapped."""
    ranks = run_procs(2, accelerate_jobs, timeout=220)
    for results in ranks:
        for mode, values in zip(ACCELERATE, results, strict=True):
            for a, b in zip(values, ranks[0][0], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=mode)
