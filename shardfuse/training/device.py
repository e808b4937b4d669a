"""The device that a rank computes on."""

from __future__ import annotations

import os

import torch


def set_device(local_rank: int | None = None) -> torch.device:
    """Make this rank's accelerator the current device and return it, or the CPU without one.

    Call it before init_process_group(), and move the model to the returned device.

    Args:
        local_rank: index of the device on this host. None: LOCAL_RANK, which torchrun sets, or 0.
            Pass 0 if each rank sees only its own device (ASCEND_RT_VISIBLE_DEVICES,
            CUDA_VISIBLE_DEVICES).

    Raises:
        ValueError: this host has no device of that index.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
    count = torch.accelerator.device_count()
    if not 0 <= index < count:
        raise ValueError(
            f"local rank {index} has no device of its own: this process sees {count} of type "
            f"{accelerator.type}. Start as many ranks as devices (--nproc-per-node), or make more "
            "devices visible; if each rank sees only its own device, pass local_rank=0."
        )
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)
